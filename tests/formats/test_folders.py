"""What lies in a folder beside the weights: models of other formats are named, and nothing is dropped unasked."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import evergrad as eg
from evergrad.errors import ConversionLoss
from evergrad.records import Check
from programs import run_python

ORDINARY = ("config.json", "tokenizer.json", "README.md", ".gitattributes", "merges.txt", "modeling_x.py", "LICENSE")


def weights(folder: Path, *, sharded: bool = False) -> Path:
    folder.mkdir()
    if sharded:
        save_file({"w": torch.ones(3)}, folder / "1.safetensors")
        index = {"weight_map": {"w": "1.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        torch.save({"w": torch.ones(3), "lr": 0.1}, folder / "a.pt")
    return folder


@pytest.mark.parametrize("sharded", [False, True])
def test_files_beside_the_weights_are_refused_by_name_and_nothing_else_is_said_of_them(
    sharded: bool, tmp_path: Path
) -> None:
    folder = weights(tmp_path / "a", sharded=sharded)
    for name in ORDINARY:
        (folder / name).write_text("{}")
    (folder / "onnx").mkdir()
    plain = weights(tmp_path / "plain", sharded=sharded)
    with eg.open_checkpoint(folder) as ck, eg.open_checkpoint(plain) as other:
        assert list(ck.tensors) == list(other.tensors) == ["w"]
        assert ck.format == other.format
        assert not ck.others
        assert ck.unkept == {**dict.fromkeys(ORDINARY, "a file without tensors"), "onnx": "a folder"}
        assert ck.state().keys() == other.state().keys()
    assert eg.verify(folder).verdict is (Check.UNKNOWN if sharded else Check.OK)
    assert run_python("-m", "evergrad", "verify", folder).returncode == 0
    assert eg.compare(folder, plain).equal
    with pytest.raises(ConversionLoss, match=r"README\.md \(a file without tensors\)") as caught:
        eg.convert(folder, tmp_path / "x.pt")
    assert {loss.partition(" ")[0] for loss in caught.value.losses} >= {*ORDINARY, "onnx"}
    done = run_python("-m", "evergrad", "convert", folder, tmp_path / "x.pt", "--dry-run")
    assert done.returncode == 1
    assert "would lose: config.json (a file without tensors)" in done.stdout
    done = run_python("-m", "evergrad", "convert", folder, tmp_path / "x.pt", "--tensors-only")
    assert done.returncode == 0
    assert "left out: config.json (a file without tensors)" in done.stdout
    assert eg.compare(eg.convert(plain, tmp_path / "y.pt"), plain).equal


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("more", [False, True])
def test_a_model_beside_the_weights_that_is_not_read_is_named_and_the_verdict_unknown(
    sharded: bool, more: bool, data: Path, tmp_path: Path
) -> None:
    a, again, b, without = (weights(tmp_path / name, sharded=sharded) for name in ("a", "again", "b", "without"))
    for folder in (a, again, b):
        shutil.copy(data / "unread" / "model.gguf", folder / "b.gguf")
    (b / "b.gguf").write_bytes((b / "b.gguf").read_bytes() + b"more")
    if more:
        for folder in (a, again, b, without):
            save_file({"v": torch.ones(2)}, folder / "z.safetensors")
    with eg.open_checkpoint(a) as ck:
        assert ck.others == {"b.gguf": "a GGUF model (llama.cpp)"}
        assert not ck.unkept
    assert eg.compare(a, again).equal, "by its bytes"
    assert eg.compare(a, b).values == ("b.gguf: a GGUF model (llama.cpp) / other bytes",)
    assert eg.compare(a, without).verdict == "unknown"
    assert eg.verify(a).unverified == {"b.gguf": "a GGUF model (llama.cpp)"}
    assert "left alone: b.gguf (a GGUF model (llama.cpp))" in run_python("-m", "evergrad", "inspect", a).stdout
    assert run_python("-m", "evergrad", "verify", a).returncode == 1
    for options in ({}, {"tensors_only": True}):
        with pytest.raises(ConversionLoss, match=r"b\.gguf \(a GGUF model"):
            eg.convert(a, tmp_path / "x.pt", **options)
    eg.convert(a, tmp_path / "x.pt", tensors_only=True, skip_unread=True)


def test_tensor_files_beside_an_index_are_listed_behind_their_names(tmp_path: Path) -> None:
    folder = weights(tmp_path / "a", sharded=True)
    torch.save({"x": torch.ones(2), "lr": 0.1}, folder / "extra.pt")
    (folder / "broken.bin").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with eg.open_checkpoint(folder) as ck:
        assert ck.format == "safetensors-sharded"
        assert set(ck.tensors) == {"w", "extra.pt/x"}
        assert ck.others == {"broken.bin": "a Git LFS pointer"}
        assert ck.read("extra.pt/x").tolist() == [1, 1]
    (folder / "broken.bin").unlink()
    with eg.open_checkpoint(folder) as ck:
        assert ck.state()["extra.pt"]["lr"] == 0.1
    one = eg.convert(folder, tmp_path / "one.pt")
    assert eg.compare(folder, one).equal
    with eg.open_checkpoint(folder / "model.safetensors.index.json") as ck:
        assert list(ck.tensors) == ["w"]
        assert not ck.unkept
    eg.inject(folder, eg.BitFlip(), where="extra.pt/x", count=1, seed=1, out=tmp_path / "bad")
    assert [tensor.name for tensor in eg.compare(folder, tmp_path / "bad").different] == ["extra.pt/x"]


def test_a_model_is_known_by_its_beginning_or_its_ending(data: Path, tmp_path: Path) -> None:
    folder = weights(tmp_path / "a")
    with h5py.File(folder / "tf_model.h5", "w") as file:
        file["w"] = np.ones(2)
    save_file({"v": torch.ones(2)}, folder / "weights-without-ending")
    torch.save({"v": torch.ones(2)}, folder / "checkpoint.pth.tar")
    shutil.copy(data / "unread" / "model.onnx", folder / "graph")
    (folder / "lost.onnx").write_bytes(b"")
    (folder / "gone.safetensors").symlink_to("nowhere")
    (folder / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>")
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(20))
    with eg.open_checkpoint(folder) as ck:
        assert ck.others == {
            "checkpoint.pth.tar": "a torch-zip file, which is not opened with its folder",
            "graph": "an ONNX model",
            "lost.onnx": "a file of no known format",
            "tf_model.h5": "an hdf5 file, which is not opened with its folder",
            "weights-without-ending": "a safetensors file, which is not opened with its folder",
        }
        assert ck.unkept == {
            **dict.fromkeys(("picture.png", "tokenizer.model"), "a file without tensors"),
            "gone.safetensors": "a link that leads to no file",
        }


def test_pipes_sockets_and_devices_beside_the_weights_are_never_opened(tmp_path: Path) -> None:
    folder = weights(tmp_path / "a")
    os.mkfifo(folder / "pipe.gguf")
    (folder / "device").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as unix:
        here = Path.cwd()
        os.chdir(folder)  # the path of a socket may not be long
        try:
            unix.bind("socket")
        finally:
            os.chdir(here)
        with eg.open_checkpoint(folder) as ck:
            assert not ck.others
            assert ck.unkept == dict.fromkeys(("device", "pipe.gguf", "socket"), "neither a file nor a folder")
