"""TensorFlow checkpoints: read without TensorFlow, altered so that TensorFlow's own checksums hold."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import evergrad as eg
from evergrad.errors import DamagedFile, FileAccessError, FormatError, LimitExceeded, UnsupportedContent
from evergrad.formats import crc, tensorflow
from evergrad.formats.tensorflow import slice_key
from evergrad.records import Check, Role
from evergrad.testing import FormatContract, raw_bytes
from folder_fuzz import FUZZ
from refusals import refusal_of_file

DATA = Path(__file__).parent.parent / "data"


class TestTensorFlow(FormatContract):
    """A Keras model with its optimizer, written by TensorFlow 2.21."""

    format = "tensorflow"
    source = "tf_ckpt"

    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        shutil.copytree(DATA / self.source, path := folder / "ckpt")
        with eg.open_checkpoint(path) as ck:
            return path, {name: ck.read(name) for name in ck.tensors}


class TestTensorFlowOfEveryType(TestTensorFlow):
    """Every element type, four data files, and a tensor in slices."""

    source = "tf_types"


@pytest.mark.parametrize(("source", "texts"), [("tf_types", "text"), ("tf_ckpt", "_CHECKPOINTABLE_OBJECT_GRAPH")])
def test_every_tensor_is_as_tensorflow_itself_read_it(source: str, texts: str, data: Path) -> None:
    expected = json.loads((data / f"{source}.expected.json").read_text())
    with eg.open_checkpoint(data / source) as ck:
        assert sorted(ck.tensors) == sorted(row["name"] for row in expected)
        for row in expected:
            info = ck.tensors[row["name"]]
            assert [list(info.shape), info.dtype.value] == [row["shape"], row["dtype"]], row["name"]
            assert hashlib.sha256(raw_bytes(ck.read(row["name"]))).hexdigest() == row["sha256"], row["name"]
        assert ck.others == {texts: "a tensor of strings"}


def test_names_are_the_stored_keys_and_roles_go_by_them(data: Path) -> None:
    with eg.open_checkpoint(data / "tf_ckpt") as ck:
        assert ck.others == {"_CHECKPOINTABLE_OBJECT_GRAPH": "a tensor of strings"}
        kernel = ck.tensors["optimizer/_trainable_variables/4/.ATTRIBUTES/VARIABLE_VALUE"]
        assert (kernel.shape, kernel.dtype) == ((144, 5), "float32")
        assert kernel.role is Role.MODEL, "the optimizer only refers to it"
        moment = ck.tensors["optimizer/_variables/10/.ATTRIBUTES/VARIABLE_VALUE"]
        assert moment.role is Role.OPTIMIZER
        mean = ck.tensors["model/_functional/_operations/2/moving_mean/.ATTRIBUTES/VARIABLE_VALUE"]
        assert mean.role is Role.BUFFER


@pytest.mark.parametrize("asked", ["ckpt", "ckpt.index", "."])
def test_it_opens_by_prefix_index_and_folder(asked: str, data: Path) -> None:
    with eg.open_checkpoint(data / "tf_ckpt" / asked) as ck:
        assert ck.format == "tensorflow"
        assert ck.path == data / "tf_ckpt" / "ckpt.index"


def test_what_is_no_prefix_is_still_no_such_file(data: Path) -> None:
    with pytest.raises(FileAccessError, match="no such file or folder"):
        eg.open_checkpoint(data / "tf_ckpt" / "ckp")
    with pytest.raises(FileAccessError, match="no such file or folder"):
        eg.open_checkpoint(data / "tf_ckpt" / "nothing" / "here")


def two_in_a_folder(folder: Path) -> Path:
    """Two checkpoints of the same data in one folder, as a training run leaves them."""
    for step in (1, 2):
        for file in (DATA / "tf_ckpt").iterdir():
            shutil.copy(file, folder / file.name.replace("ckpt", f"ckpt-{step}"))
    return folder


@pytest.mark.parametrize("named", ["ckpt-2", "/where/it/was/saved/ckpt-2", r"ckpt\0552"])
def test_a_folder_opens_the_checkpoint_that_it_calls_the_latest(named: str, tmp_path: Path) -> None:
    two_in_a_folder(tmp_path)
    (tmp_path / "checkpoint").write_text(
        f'model_checkpoint_path: "{named}"\n' + "".join(f'all_model_checkpoint_paths: "ckpt-{n}"\n' for n in (1, 2))
    )
    with eg.open_checkpoint(tmp_path) as ck:
        assert ck.path.name == "ckpt-2.index"


def test_a_folder_of_several_says_which_there_are(tmp_path: Path) -> None:
    two_in_a_folder(tmp_path)
    with pytest.raises(UnsupportedContent, match=r"several checkpoints: 'ckpt-1\.index', 'ckpt-2\.index'"):
        eg.open_checkpoint(tmp_path)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "../elsewhere/ckpt-3"\n')
    with pytest.raises(FileAccessError, match="not in the folder"):
        eg.open_checkpoint(tmp_path)


def test_the_checksums_of_tensor_and_index_follow_a_change(tmp_path: Path) -> None:
    shutil.copytree(DATA / "tf_types", tmp_path / "m")
    with eg.open_checkpoint(tmp_path / "m") as ck:
        for name, info in ck.tensors.items():
            if info.numel:
                shape = (2, 2) if info.dtype.parts == 2 else 2
                ck.xor(name, [0, info.numel - 1], np.ones(shape, info.dtype.bits))
    with eg.open_checkpoint(tmp_path / "m") as ck:
        checks = {name: ck.checksum(name) for name, info in ck.tensors.items() if info.numel}
        assert set(checks.values()) == {Check.OK}
        assert set(ck.container_checks().values()) == {Check.OK}


def test_damage_is_found_and_a_change_does_not_hide_it(tmp_path: Path) -> None:
    shutil.copytree(DATA / "tf_types", tmp_path / "m")
    with eg.open_checkpoint(tmp_path / "m") as ck:
        sliced, whole = ck.read("sliced"), ck.read("types/int32")
    assert sliced.tolist() == torch.arange(40.0).reshape(8, 5).tolist()
    file = tmp_path / "m" / "model.data-00003-of-00004"
    raw = bytearray(file.read_bytes())
    raw[100] ^= 1
    file.write_bytes(raw)
    index = tmp_path / "m" / "model.index"
    entries = bytearray(index.read_bytes())
    entries[entries.index(b"scalar") + 5] ^= 1
    index.write_bytes(entries)
    for _ in range(2):
        with eg.open_checkpoint(tmp_path / "m") as ck:
            assert ck.checksum("sliced") is Check.FAILED
            assert ck.checksum("types/int32") is Check.OK
            assert ck.container_checks()["model.index block 0"] is Check.FAILED
            ck.xor("sliced", [25, 3], [1, 1])
            ck.xor("types/int32", [3], [8])
    with eg.open_checkpoint(tmp_path / "m") as ck:
        assert torch.equal(ck.read("types/int32"), whole)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 9, 4095, (1 << 19) + 7, 3 << 19])
def test_the_crc_without_a_library_is_castagnolis(length: int) -> None:
    data = np.random.default_rng(length).integers(0, 256, length, np.uint8)
    slow = 0xFFFFFFFF
    for byte in data[:6000].tolist():
        slow ^= byte
        for _ in range(8):
            slow = slow >> 1 ^ (0x82F63B78 if slow & 1 else 0)
    assert crc.fold(data[:6000]) == slow ^ 0xFFFFFFFF
    whole = crc.fold(data)
    assert whole == crc.fold(data[length // 3 :], crc.fold(data[: length // 3]))
    assert crc.unmasked(crc.masked(whole)) == whole
    assert crc.fold(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283


def test_an_installed_crc32c_is_used_if_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def right(data: bytes, value: int = 0) -> int:
        return crc.fold(np.frombuffer(data, np.uint8), value)

    for package in (right, lambda data, value=0: 7):
        monkeypatch.setitem(sys.modules, "crc32c", SimpleNamespace(crc32c=package))
        crc._library.cache_clear()
        assert (crc._library() is package) == (package is right)
        assert crc.crc32c(b"123456789") == 0xE3069283
    crc._library.cache_clear()


@pytest.mark.parametrize(
    ("extent", "code"),
    [(63, "bf"), (64, "c040"), (8191, "dfff"), (8192, "e02000"), (2**40, "fd0000000000"), (-64, "40"), (-65, "3fbf")],
)
def test_slices_are_found_under_their_ordered_code(extent: int, code: str) -> None:
    assert slice_key(b"a\0\xff", [(extent, -1)]).hex() == "00" + "6100ffff00" + "0001" + "0101" + code + "7f"


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def block(entries: list[tuple[bytes, bytes]], kind: int = 0) -> bytes:
    body = b"".join(b"\0" + varint(len(key)) + varint(len(value)) + key + value for key, value in entries)
    body += struct.pack("<2L", 0, 1) + bytes([kind])
    return body + struct.pack("<L", crc.masked(crc.crc32c(body)))


def table(entries: list[tuple[bytes, bytes]], kind: int = 0) -> bytes:
    """A table of one block, by hand."""
    data = block(entries, kind)
    meta = block([])
    index = block([(b"\xff", b"\0" + varint(len(data) - 5))])
    footer = varint(len(data)) + varint(len(meta) - 5) + varint(len(data) + len(meta)) + varint(len(index) - 5)
    return data + meta + index + footer.ljust(40, b"\0") + tensorflow.MAGIC


def entry(dtype: int = 1, shape: tuple[int, ...] = (2,), shard: int = 0, offset: int = 0, size: int = 8) -> bytes:
    dims = b"".join(b"\x12" + varint(len(d) + 1) + b"\x08" + d for d in (varint(n & 2**64 - 1) for n in shape))
    places = b"".join(bytes([tag]) + varint(value) for tag, value in ((0x18, shard), (0x20, offset), (0x28, size)))
    return b"\x08" + varint(dtype) + b"\x12" + varint(len(dims)) + dims + places


HEADER = (b"", b"\x08\x01\x1a\x02\x08\x01")


def written(folder: Path, index: bytes) -> Path:
    (folder / "m.data-00000-of-00001").write_bytes(bytes(16))
    (folder / "m.index").write_bytes(index)
    return folder / "m"


def test_the_hand_made_table_is_a_valid_one(tmp_path: Path) -> None:
    with eg.open_checkpoint(written(tmp_path, table([HEADER, (b"a", entry())]))) as ck:
        assert ck.read("a").tolist() == [0, 0]
        assert set(ck.container_checks().values()) == {Check.OK}


def test_big_endian_data_is_read_and_altered(tmp_path: Path) -> None:
    path = written(tmp_path, table([(b"", b"\x08\x01\x10\x01"), (b"a", entry())]))
    (tmp_path / "m.data-00000-of-00001").write_bytes(struct.pack(">2f", 1, 2))
    with eg.open_checkpoint(path) as ck:
        assert ck.read("a").tolist() == [1, 2]
        ck.xor("a", [1], [1 << 31])
        assert ck.checksum("a") is Check.UNKNOWN
    assert (tmp_path / "m.data-00000-of-00001").read_bytes() == struct.pack(">2f", 1, -2)


@pytest.mark.parametrize(
    ("index", "kind", "word"),
    [
        (table([HEADER, (b"a", entry(offset=12))]), DamagedFile, "beyond the end"),
        (table([HEADER, (b"a", entry(offset=2**63))]), DamagedFile, "impossible place"),
        (table([HEADER, (b"a", entry(shard=1))]), DamagedFile, "data file 1 of 1"),
        (table([HEADER, (b"a", entry(shape=(3,)))]), DamagedFile, "wrong length"),
        (table([HEADER, (b"a", entry(shape=(-1,)))]), DamagedFile, "impossible shape"),
        (table([HEADER, (b"a", entry(shape=(2**61, 2**61)))]), DamagedFile, "impossible shape"),
        (table([HEADER, (b"a", entry(shape=(0, 2**61, 2**61), size=0))]), DamagedFile, "impossible shape"),
        (table([HEADER, (b"a", entry(shape=(2**31, 2**29)))]), DamagedFile, "wrong length"),
        (table([HEADER, (b"a", entry(shape=(1,) * 65))]), DamagedFile, "of 65 axes (expected at most 64)"),
        (table([HEADER, (b"a", entry()), (b"b", entry(offset=4))]), DamagedFile, "overlap"),
        (table([HEADER, (b"a", entry()), (b"a", entry())]), DamagedFile, "twice"),
        (table([HEADER, (b"a", entry() + b"\x3a\x04\x0a\x02\x10\x02")]), DamagedFile, "slice is missing"),
        (table([HEADER, (b"a", b"\x08" + b"\xff" * 12)]), DamagedFile, "does not end"),
        (table([HEADER, (b"a", b"\x12\xff\xff\xff\x7f")]), DamagedFile, "bytes in a message"),
        (table([HEADER, (b"a", b"\x0f")]), DamagedFile, "unknown kind"),
        (table([(b"a", entry())]), DamagedFile, "no header"),
        (table([]), DamagedFile, "no header"),
        (table([(b"", b"\x08\xff\xff\xff\xff\x07"), (b"a", entry())]), DamagedFile, "data files"),
        (table([(b"", b"\x08\x02"), (b"a", entry())]), FileAccessError, "not there"),
        (table([HEADER], kind=1), UnsupportedContent, "snappy"),
        (table([HEADER, (b"k" * 20_000, entry())]), DamagedFile, "a key of 20000 bytes"),
        (bytes(40) + tensorflow.MAGIC, DamagedFile, "outside"),
        (b"\xff" * 40 + tensorflow.MAGIC, DamagedFile, "does not end"),
    ],
)
def test_a_bad_index_is_refused_in_one_line(index: bytes, kind: type[FormatError], word: str, tmp_path: Path) -> None:
    (line,) = refusal_of_file(written(tmp_path, index), kind)
    assert word in line


def test_keys_that_grow_out_of_nothing_are_refused(tmp_path: Path) -> None:
    long = b"k" * 16_000
    body = b"\0" + varint(len(long)) + b"\0" + long + (varint(16_000) + b"\0\0") * 200_000
    data = body + struct.pack("<2L", 0, 1) + bytes(5)
    index = block([(b"\xff", b"\0" + varint(len(data) - 5))])
    footer = varint(0) + varint(len(data) - 5) + varint(len(data)) + varint(len(index) - 5)
    (line,) = refusal_of_file(
        written(tmp_path, data + index + footer.ljust(40, b"\0") + tensorflow.MAGIC), LimitExceeded
    )
    assert "keys of more" in line


def test_missing_and_foreign_files_are_told(tmp_path: Path) -> None:
    shutil.copytree(DATA / "tf_types", tmp_path / "m")
    (tmp_path / "m" / "model.data-00002-of-00004").unlink()
    (line,) = refusal_of_file(tmp_path / "m", FileAccessError)
    assert "model.data-00002-of-00004" in line
    assert "not there" in line
    index = (tmp_path / "m" / "model.index").rename(tmp_path / "m" / "renamed.xyz")
    (line,) = refusal_of_file(index, FileAccessError)
    assert "name does not tell" in line


@pytest.mark.parametrize("source", ["tf_ckpt", "tf_types"])
def test_mutated_folders_give_only_our_errors(source: str, tmp_path: Path, limited: Callable[..., str]) -> None:
    said = limited(FUZZ, DATA / source, tmp_path, 150, 20261, memory=3 << 29, seconds=100)
    assert 0 < int(said) < 150
