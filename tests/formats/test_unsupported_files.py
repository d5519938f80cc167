"""A SavedModel is opened by its folder; files of formats that are not read are named, with what to do instead."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import re
import shutil
import struct
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import evergrad as eg
from evergrad.errors import EvergradError, FileAccessError, UnknownFormat, UnsupportedContent
from evergrad.records import Check
from programs import run_python


def evergrad(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command line as a user meets it."""
    return run_python("-m", "evergrad", *arguments)


def test_a_saved_model_is_the_checkpoint_of_its_variables(data: Path, tmp_path: Path) -> None:
    folder = data / "saved_model"
    with eg.open_checkpoint(folder) as ck, eg.open_checkpoint(folder / "variables") as inner:
        assert ck.format == "tensorflow"
        assert dict(ck.tensors) == dict(inner.tensors)
        (weight,) = (name for name in ck.tensors if name.startswith("w/"))
        assert ck.read(weight).tolist() == [[0, 1, 2], [3, 4, 5]]
        assert ck.unkept["saved_model.pb"] == "the graph of a SavedModel"
    assert eg.verify(folder).verdict is Check.OK
    assert eg.compare(folder, folder / "variables").equal
    eg.convert(folder, tmp_path / "w.npz", tensors_only=True)
    np.testing.assert_array_equal(np.load(tmp_path / "w.npz")[weight], np.arange(6).reshape(2, 3))
    eg.inject(folder, eg.BitFlip(), where=weight, count=1, seed=1, out=tmp_path / "bad")
    assert (tmp_path / "bad" / "saved_model.pb").read_bytes() == (folder / "saved_model.pb").read_bytes()
    assert [tensor.name for tensor in eg.compare(folder, tmp_path / "bad").different] == [weight]
    assert eg.verify(tmp_path / "bad", where="b").verdict is Check.OK


def test_every_verb_takes_the_folder_of_a_saved_model(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(data / "saved_model", folder)
    assert "tensorflow: 2 tensors" in evergrad("inspect", folder).stdout
    assert json.loads(evergrad("inspect", folder, "--json").stdout)["format"] == "tensorflow"
    assert evergrad("verify", folder).returncode == 0
    assert evergrad("diff", folder, data / "saved_model").returncode == 0
    assert evergrad("convert", folder, tmp_path / "w.pt", "--tensors-only").returncode == 0
    done = evergrad("convert", folder, tmp_path / "v.pt")
    assert done.returncode == 2
    assert "saved_model.pb (the graph of a SavedModel)" in done.stderr
    assert evergrad("inject", folder, "--in-place", "--count", "1", "--seed", "1").returncode == 0
    assert evergrad("diff", folder, data / "saved_model").returncode == 1


def test_a_saved_model_without_variables_says_so(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "saved_model", tmp_path / "model", ignore=shutil.ignore_patterns("variables"))
    with pytest.raises(FileAccessError, match=r"is a SavedModel without variables/variables\.index"):
        eg.open_checkpoint(tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("model.onnx", "an ONNX model"),
        ("model.gguf", "a GGUF model (llama.cpp)"),
        ("model.tflite", "a TensorFlow Lite model"),
        ("model.msgpack", "a msgpack file, as Flax writes it"),
        ("model.joblib", "a joblib pickle"),
        ("model.mlmodel", "a Core ML model"),
    ],
)
def test_a_real_file_of_another_format_is_named_whatever_it_is_called(
    name: str, told: str, data: Path, tmp_path: Path
) -> None:
    shutil.copy(data / "unread" / name, path := tmp_path / "model.pt")
    with pytest.raises(UnknownFormat, match=re.escape(f"is {told}, which is not read. ")) as caught:
        eg.open_checkpoint(path)
    assert "no checkpoint recognised" not in str(caught.value)
    for verb in (
        ("inspect", path),
        ("verify", path),
        ("diff", path, path),
        ("inject", path, "--in-place", "--count", 1),
    ):
        done = evergrad(*verb)
        assert (done.returncode, done.stdout) == (2, "")
        assert told in done.stderr
        assert done.stderr.count("\n") == 1


def _tar(*names: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    return out.getvalue()


def _long_tar(format: int, time: float = 0) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as archive:
        member = tarfile.TarInfo(f"{'folder/' * 20}weights.bin" if not time else "weights.bin")
        member.mtime = time  # type: ignore[assignment]  # a fraction makes a PaxHeader
        archive.addfile(member, io.BytesIO())
    return out.getvalue()


LONG = "folder/" * 20 + "weights.bin"
PICKLED = pickle.dumps({"w": list(range(50))}, 4)


def _zip(*names: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in names:
            archive.writestr(name, b"content")
    return out.getvalue()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 438011\n"
CONTENT = {
    "a Git LFS pointer": LFS,
    "a git-annex pointer": b"/annex/objects/SHA256E-s438--4d7a.pt\n",
    "an HTML page": b"<!DOCTYPE html>\n<html><title>404 Not Found</title></html>",
    "an XML document": b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>',
    "a gzip file": gzip.compress(b"abc"),
    "an xz file": lzma.compress(b"abc"),
    "a bzip2 file": bz2.compress(b"abc"),
    "a Zstandard file": bytes.fromhex("28b52ffd04001900006162633ed8f3f5"),
    "an LZ4 file": bytes.fromhex("04224d186440a7000000000000000000"),
    "a 7z archive": bytes.fromhex("377abcaf271c0004000000000000000000"),
    "a GGML model": b"tjgg" + struct.pack("<8I", 1, 32000, 4096, 256, 32, 32, 128, 2),
    "a pickle": pickle.dumps({"w": [1.0]}, 4),
    "a tar archive with weights.bin": _tar("weights.bin", "config.json"),
    "a tar archive with weights.bin, which": _long_tar(tarfile.PAX_FORMAT, 1.5),
    f"a tar archive with {LONG}": _long_tar(tarfile.PAX_FORMAT),
    f"a tar archive with {LONG},": _long_tar(tarfile.GNU_FORMAT),
    "a tar archive, which": _tar("x" * 20)[:156] + b"x" + _tar("x" * 20)[157:512],
    "a zlib-compressed pickle, as joblib writes it": zlib.compress(PICKLED, 3),
    "a zlib-compressed pickle, as joblib": zlib.compress(PICKLED, 9),
    "a zlib-compressed pickle": zlib.compress(PICKLED, 1),
    "a gzip-compressed pickle, as joblib": gzip.compress(PICKLED),
    "a bzip2-compressed pickle, as joblib": bz2.compress(PICKLED),
    "an xz-compressed pickle, as joblib": lzma.compress(PICKLED),
    "an lzma-compressed pickle, as joblib": lzma.compress(PICKLED, lzma.FORMAT_ALONE),
    "zlib-compressed data": zlib.compress(b"no pickle at all"),
    "PyTorch's tar format of 2016": _tar("sys_info", "pickle", "tensors", "storages"),
    "a zip archive with policy.pth": _zip("data", "policy.pth", "version.txt"),
    "a zip archive": _zip("a.txt"),
    "a torch.export program": _zip("archive/archive_format", "archive/models/model.json"),
    "a Keras architecture": b'{"class_name": "Functional", "config": {"name": "m"}, "keras_version": "3.1"}',
    "a JSON file": b'{"error": "Repository not found"}',
    "a file of zeros": bytes(8192),
    "a Parquet file": b"PAR1" + bytes(40) + b"PAR1",
    "an SQLite database": b"SQLite format 3\0" + bytes(100),
    "an ELF program or library": b"\x7fELF\x02\x01\x01" + bytes(64),
    "a PDF document": b"%PDF-1.7\n",
    "a PNG image": b"\x89PNG\r\n\x1a\n" + bytes(32),
    "an MXNet parameter file": struct.pack("<QQ", 0x112, 0) + bytes(16),
}


@pytest.mark.parametrize("told", CONTENT)
def test_content_that_is_no_checkpoint_is_named(told: str, tmp_path: Path) -> None:
    (path := tmp_path / "model.pt").write_bytes(CONTENT[told])
    with pytest.raises(UnknownFormat) as caught:
        eg.open_checkpoint(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: is {told}")
    assert ", which is not read. " in message
    assert message.rstrip().endswith("."), "what to do instead is a sentence"


@pytest.mark.parametrize("packed", [zlib.compress, gzip.compress, bz2.compress, lzma.compress])
def test_a_compressed_joblib_file_says_how_to_go_on(packed: Callable[[bytes], bytes], tmp_path: Path) -> None:
    (path := tmp_path / "model.joblib").write_bytes(packed(PICKLED))
    with pytest.raises(UnknownFormat, match=r"Load it with joblib\.load where you trust it, and save its state uncomp"):
        eg.open_checkpoint(path)
    path.write_bytes(zlib.compress(b"no pickle at all"))
    with pytest.raises(UnknownFormat, match=r"If joblib wrote it: load it with joblib\.load"):
        eg.open_checkpoint(path)


@pytest.mark.parametrize("protocol", range(6))
def test_a_plain_pickle_is_named_and_not_run(protocol: int, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "ran",))

    (path := tmp_path / "model.pkl").write_bytes(pickle.dumps({"w": Evil()}, protocol))
    with pytest.raises(UnknownFormat, match=r"is a pickle, which is not read\. .*torch\.save"):
        eg.open_checkpoint(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_named(tmp_path: Path) -> None:
    module = torch.jit.trace(torch.nn.Linear(2, 1), torch.ones(1, 2))
    torch.jit.save(module, tmp_path / "script.pt")
    with pytest.raises(UnsupportedContent, match="is a TorchScript program"):
        eg.open_checkpoint(tmp_path / "script.pt")


def test_an_index_whose_shards_are_not_there_names_the_first(tmp_path: Path) -> None:
    index = {"metadata": {}, "weight_map": {"w": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        with pytest.raises(EvergradError, match=r"model-00001-of-00002\.safetensors.*not there"):
            eg.open_checkpoint(path)


def test_a_repository_that_was_cloned_without_lfs_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(LFS)
    with pytest.raises(UnknownFormat, match=r"pytorch_model\.bin: is a Git LFS pointer.*git lfs pull"):
        eg.open_checkpoint(tmp_path)
    torch.save({"w": torch.ones(2)}, tmp_path / "other.pt")
    with eg.open_checkpoint(tmp_path) as ck:
        assert ck.others == {"pytorch_model.bin": "a Git LFS pointer"}
        assert list(ck.tensors) == ["other.pt/w"]
    assert eg.compare(tmp_path, tmp_path).equal, "the same pointer"
    assert evergrad("verify", tmp_path).returncode == 1
    done = evergrad("convert", tmp_path, tmp_path / "out.npz", "--tensors-only")
    assert done.returncode == 2
    assert "pytorch_model.bin (a Git LFS pointer)" in done.stderr


def test_a_folder_without_a_checkpoint_names_what_it_holds(data: Path, tmp_path: Path) -> None:
    shutil.copy(data / "unread" / "model.gguf", tmp_path / "weights.gguf")
    with pytest.raises(UnknownFormat, match=r"weights\.gguf is a GGUF model \(llama\.cpp\), which is not read"):
        eg.open_checkpoint(tmp_path)
    package = tmp_path / "model.mlpackage"
    (package / "Data" / "com.apple.CoreML").mkdir(parents=True)
    (package / "Manifest.json").write_text("{}")
    with pytest.raises(UnknownFormat, match="is a Core ML package, which is not read"):
        eg.open_checkpoint(package)


def test_the_graph_of_a_saved_model_leads_to_its_folder(data: Path, tmp_path: Path) -> None:
    (bare := tmp_path / "saved_model.pb").write_bytes(b"\x08\x01")
    for path in (data / "saved_model" / "saved_model.pb", bare):
        with pytest.raises(UnknownFormat, match=r"is the graph of a SavedModel, .*\. Open the folder that holds it"):
            eg.open_checkpoint(path)


def test_bytes_without_any_signature_are_shown(tmp_path: Path) -> None:
    (path := tmp_path / "a.bin").write_bytes(bytes(range(1, 200)))
    with pytest.raises(UnknownFormat, match=r"no checkpoint recognised.*begins 01 02 03"):
        eg.open_checkpoint(path)
