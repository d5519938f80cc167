"""Checkpoints of frameworks that are not installed here are read all the same, tensor for tensor."""

from __future__ import annotations

import hashlib
import json
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import evergrad as eg
from evergrad.errors import DamagedFile, UnsupportedContent
from evergrad.records import Check, Role
from evergrad.testing import raw_bytes
from unprivileged import Unprivileged

FILES = {
    "lightning": "lightning.ckpt",
    "cuda": "cuda.pt",
    "trainer": "trainer/checkpoint-4",
    "sharded": "sharded",
    "user_class": "user_class.pt",
    "whole_module": "whole_module.pt",
    "numpy_state": "numpy_state.pt",
}


@pytest.mark.parametrize("name", FILES)
def test_every_tensor_is_as_the_framework_itself_read_it(name: str, data: Path) -> None:
    expected = json.loads((data / f"{name}.expected.json").read_text())
    with eg.open_checkpoint(data / FILES[name]) as ck:
        assert sorted(ck.tensors) == sorted(row["name"] for row in expected)
        for row in expected:
            info = ck.tensors[row["name"]]
            assert [list(info.shape), info.dtype.value] == [row["shape"], row["dtype"]], row["name"]
            assert hashlib.sha256(raw_bytes(ck.read(row["name"]))).hexdigest() == row["sha256"], row["name"]


def test_a_lightning_checkpoint_is_read_where_lightning_is_not_installed(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("lightning", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, package, None)  # importing it fails, even where it is installed
    with zipfile.ZipFile(data / "lightning.ckpt") as archive:
        pickle = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        assert b"lightning.fabric" in archive.read(pickle), "the file does mention Lightning's classes"
    with eg.open_checkpoint(data / "lightning.ckpt") as ck:
        assert ck.tensors["state_dict/net.0.weight"].role is Role.MODEL
        assert ck.tensors["state_dict/net.1.running_mean"].role is Role.BUFFER
        assert ck.tensors["optimizer_states/0/state/0/exp_avg"].role is Role.OPTIMIZER
        assert "lightning.fabric.utilities.data.AttributeDict" in ck.others.values()


def test_classes_of_unknown_packages_are_named_and_not_imported(data: Path) -> None:
    before = set(sys.modules)
    with eg.open_checkpoint(data / "user_class.pt") as ck:
        assert ck.others["config"] == "acme_training.config.Config"
        assert ck.read("config/class_weights").dim() == 1
        with pytest.raises(UnsupportedContent, match=r"config is acme_training\.config\.Config"):
            ck.state()
    assert not [name for name in set(sys.modules) - before if name.startswith("acme")]


def test_numpy_values_inside_a_torch_file_come_back(data: Path) -> None:
    with eg.open_checkpoint(data / "numpy_state.pt") as ck:
        state = ck.state()
    theirs = torch.load(data / "numpy_state.pt", weights_only=False)
    arrays = [key for key, value in theirs["arrays"].items() if isinstance(value, np.ndarray)]
    assert arrays
    for key in arrays:
        assert state["arrays"][key].dtype == theirs["arrays"][key].dtype
        np.testing.assert_array_equal(state["arrays"][key], theirs["arrays"][key])
    for key, value in theirs["scalars"].items():
        assert type(state["scalars"][key]) is type(value)
        assert state["scalars"][key] == value
    np.random.RandomState().set_state(state["numpy_rng"])
    assert state["python_rng"] == theirs["python_rng"]


def test_the_checksum_that_torch_never_checks_stays_valid(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(1000.0), "b": torch.arange(7, dtype=torch.int8)}, path := tmp_path / "a.pt")
    with eg.open_checkpoint(path) as ck:
        ck.xor("a", [0, 999, 500, 500], [1 << 31, 1, 7, 8])
        ck.xor("b", [6], [0x80])
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    # The copies in front of and behind the data too: rebuild the archive from them alone.
    raw = bytearray(path.read_bytes())
    for info in zipfile.ZipFile(path).infolist():
        descriptor = raw.find(b"PK\x07\x08", info.header_offset)
        assert int.from_bytes(raw[descriptor + 4 : descriptor + 8], "little") == info.CRC


def test_a_file_written_without_checksums_keeps_none(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(10.0)}, path := tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    with eg.open_checkpoint(path) as ck:
        ck.xor("a", [1], [1])
    assert {info.CRC for info in zipfile.ZipFile(path).infolist()} == {0}
    assert torch.load(path)["a"][1] != 1


def test_tied_tensors_say_what_they_share_and_change_together(tmp_path: Path) -> None:
    weight = torch.zeros(4, 4)
    torch.save({"in": weight, "out": weight, "half": weight[:2], "other": torch.zeros(2)}, path := tmp_path / "a.pt")
    with eg.open_checkpoint(path) as ck:
        assert set(ck.tensors["in"].shares) == {"out", "half"}
        assert ck.tensors["other"].shares == ()
        ck.xor("out", [15], [0x3F800000])
        assert ck.read("in")[3, 3] == 1
        assert ck.read("half").sum() == 0
        state = ck.state()
    assert state["in"].data_ptr() == state["out"].data_ptr() == state["half"].data_ptr()


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "stored.npz", "deflated.npz"])
def test_a_read_only_file_can_be_read_and_is_not_altered(name: str, unprivileged: Unprivileged) -> None:
    path = unprivileged.folder / name
    if path.suffix == ".npz":
        (np.savez_compressed if "deflated" in name else np.savez)(path, a=np.zeros(3, np.float32))
    else:
        torch.save({"a": torch.zeros(3)}, unprivileged.folder / "a.pt")
        if path.suffix != ".pt":
            eg.convert(unprivileged.folder / "a.pt", path)
    path.chmod(0o444)
    before = path.read_bytes()
    with unprivileged, eg.open_checkpoint(path) as ck:
        assert ck.read("a").sum() == 0
        with pytest.raises(eg.EvergradError, match="cannot be altered: permission denied"):
            ck.xor("a", [0], [1])
    assert path.read_bytes() == before


def test_an_expanded_tensor_is_altered_wherever_its_bytes_show(tmp_path: Path) -> None:
    torch.save({"wide": torch.tensor([1.0]).expand(3, 4)}, path := tmp_path / "a.pt")
    with eg.open_checkpoint(path) as ck:
        assert ck.tensors["wide"].nbytes == 48
        assert ck.xor("wide", [5, 7], [1 << 31, 0]).tolist() == [0x3F800000, 0x3F800000]
        assert ck.read("wide").tolist() == [[-1.0] * 4] * 3
        assert ck.state()["wide"].stride() == (0, 0)


def test_a_replaced_file_is_not_altered_by_mistake(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(3)}, path := tmp_path / "a.pt")
    torch.save({"b": torch.zeros(3)}, other := tmp_path / "b.pt")
    with eg.open_checkpoint(path) as ck:
        other.replace(path)
        with pytest.raises(eg.EvergradError, match="was replaced"):
            ck.xor("a", [0], [1])


def test_big_endian_torch_files_are_read(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(6.0)}, little := tmp_path / "little.pt")
    with zipfile.ZipFile(little) as old, zipfile.ZipFile(tmp_path / "big.pt", "w") as new:
        for name in old.namelist():
            swapped = {"byteorder": b"big", "0": np.arange(6, dtype=">f4").tobytes()}
            new.writestr(name, swapped.get(name.rsplit("/", 1)[-1], old.read(name)))
    with eg.open_checkpoint(tmp_path / "big.pt") as ck:
        assert ck.read("a").tolist() == [0, 1, 2, 3, 4, 5]
        assert ck.xor("a", [1], [0x80000000]).tolist() == [0x3F800000]
        assert ck.read("a")[1] == -1
    with zipfile.ZipFile(tmp_path / "big.pt") as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("kind", ["a.pt", "stored.npz", "deflated.npz"])
def test_one_bit_that_rotted_at_rest_fails_the_checksum(kind: str, tmp_path: Path) -> None:
    path = tmp_path / kind
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    if kind == "a.pt":
        torch.save({"x": torch.from_numpy(values), "y": torch.ones(3)}, path)
    else:
        (np.savez_compressed if kind == "deflated.npz" else np.savez)(path, x=values, y=np.ones(3))
    with eg.open_checkpoint(path) as ck:
        assert {ck.checksum(name) for name in ck.tensors} == {Check.OK}
        assert set(ck.container_checks().values()) <= {Check.OK}
        ck.xor("x", [7], [1 << 20])
        if kind != "deflated.npz":
            assert ck.checksum("x") is Check.OK, "an alteration of ours keeps it valid"
    raw = bytearray(path.read_bytes())
    at = raw.index(values[500:502].tobytes()) if kind != "deflated.npz" else raw.index(b"x.npy") + 1500
    raw[at] ^= 1
    path.write_bytes(raw)
    with eg.open_checkpoint(path) as ck:
        try:
            assert ck.checksum("x") is Check.FAILED
        except DamagedFile as error:
            assert "does not decompress" in str(error)
        assert ck.checksum("y") is Check.OK


def test_where_there_is_no_checksum_nothing_is_claimed(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(10.0)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    eg.convert(tmp_path / "a.pt", tmp_path / "a.safetensors")
    for path in (tmp_path / "a.pt", tmp_path / "a.safetensors"):
        with eg.open_checkpoint(path) as ck:
            assert ck.checksum("a") is Check.UNKNOWN


def test_two_who_alter_the_same_file_keep_its_checksum_valid(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(10.0)}, path := tmp_path / "a.pt")
    with eg.open_checkpoint(path) as one, eg.open_checkpoint(path) as two:
        one.xor("a", [1], [1])
        two.xor("a", [2], [1])
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_a_compressed_archive_that_was_replaced_is_not_overwritten(tmp_path: Path) -> None:
    np.savez_compressed(path := tmp_path / "a.npz", x=np.zeros(4, np.float32))
    np.savez_compressed(tmp_path / "b.npz", x=np.full(9, 7.0))
    ck = eg.open_checkpoint(path)
    ck.xor("x", [0], [1])
    (tmp_path / "b.npz").replace(path)
    with pytest.raises(eg.EvergradError, match="was replaced"):
        ck.close()
    assert np.load(path)["x"].tolist() == [7.0] * 9


def test_a_module_that_refers_back_to_itself_is_listed(tmp_path: Path) -> None:
    module = types.ModuleType("acme_cycle")
    node = type("Node", (), {"__module__": "acme_cycle"})
    module.Node = node
    sys.modules["acme_cycle"] = module
    try:
        parent, child = node(), node()
        parent.child, child.parent, child.weight = child, parent, torch.ones(2)
        torch.save({"net": parent}, path := tmp_path / "a.pt")
    finally:
        del sys.modules["acme_cycle"]
    with eg.open_checkpoint(path) as ck:
        assert list(ck.tensors) == ["net/child/weight"]
