"""safetensors files are accepted and refused as the library does, and what it would refuse is not called sound."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

import evergrad as eg
from evergrad.errors import DamagedFile
from evergrad.records import Check

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def _entry(begin: int, end: int, *shape: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}


def _write(path: Path, header: object, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def _library_opens(path: Path) -> bool:
    try:
        with safe_open(path, framework="pt"):
            return True
    except SafetensorError:
        return False


def test_a_file_that_mlx_saved_is_read_compared_altered_and_converted(data: Path, tmp_path: Path) -> None:
    theirs = load_file(data / "mlx.safetensors")
    with eg.open_checkpoint(data / "mlx.safetensors") as ck:
        assert {name: (info.shape, info.dtype.value) for name, info in ck.tensors.items()} == {
            "weight": ((2, 3), "float32"),
            "bias": ((2,), "bfloat16"),
        }
        assert ck.metadata == {}
        assert all(torch.equal(ck.read(name), theirs[name]) for name in theirs)
    eg.convert(data / "mlx.safetensors", tmp_path / "mlx.pt")
    assert eg.compare(data / "mlx.safetensors", tmp_path / "mlx.pt").equal
    eg.inject(data / "mlx.safetensors", eg.BitFlip(), count=1, seed=1, out=tmp_path / "bad.safetensors")
    assert len(eg.compare(data / "mlx.safetensors", tmp_path / "bad.safetensors").different) == 1
    assert _library_opens(tmp_path / "bad.safetensors")


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}, None], ids=str)
def test_metadata_may_be_a_table_of_strings_or_null(metadata: object, tmp_path: Path) -> None:
    path = _write(tmp_path / "a.safetensors", {"__metadata__": metadata, "a": ENTRY}, bytes(8))
    assert _library_opens(path)
    with eg.open_checkpoint(path) as ck:
        assert list(ck.tensors) == ["a"]


@pytest.mark.parametrize("metadata", [[], "text", 1, {"key": 1}, {"key": None}], ids=str)
def test_other_metadata_is_refused_as_the_library_refuses_it(metadata: object, tmp_path: Path) -> None:
    path = _write(tmp_path / "a.safetensors", {"__metadata__": metadata, "a": ENTRY}, bytes(8))
    assert not _library_opens(path)
    with pytest.raises(DamagedFile, match="__metadata__ is not a table of strings"):
        eg.open_checkpoint(path)


def test_a_header_with_nan_is_no_json_for_the_library_and_for_us(tmp_path: Path) -> None:
    header = json.dumps({"a": {**ENTRY, "scale": float("nan")}}).encode()
    path = _write(tmp_path / "a.safetensors", header, bytes(8))
    assert not _library_opens(path)
    with pytest.raises(DamagedFile, match="header is not JSON"):
        eg.open_checkpoint(path)


@pytest.mark.parametrize(
    ("header", "size", "told"),
    [
        ({"a": ENTRY}, 9, "1 byte after the last tensor"),
        ({"a": _entry(4, 12, 2)}, 12, "4 bytes before 'a'"),
        ({"a": ENTRY, "b": _entry(12, 20, 2)}, 20, "4 bytes before 'b'"),
        ({"a": ENTRY, "b": _entry(4, 4, 0, 3)}, 8, "'b' begins within 'a'"),
    ],
)
def test_a_layout_that_the_library_refuses_can_be_read_and_fails_verification(
    header: dict[str, Any], size: int, told: str, tmp_path: Path
) -> None:
    path = _write(tmp_path / "a.safetensors", header, bytes(size))
    assert not _library_opens(path)
    with eg.open_checkpoint(path) as ck:
        assert ck.read("a").tolist() == [0, 0]
    report = eg.verify(path)
    assert report.verdict is Check.FAILED
    assert [part for part in report.container if told in part]


def test_a_layout_that_the_library_accepts_is_unknown_for_lack_of_a_checksum(tmp_path: Path) -> None:
    header = {"b": _entry(8, 16, 2), "none": _entry(8, 8, 0), "a": ENTRY}
    path = _write(tmp_path / "a.safetensors", header, bytes(16))
    assert _library_opens(path)
    assert eg.verify(path).verdict is Check.UNKNOWN
    assert not eg.verify(path).container
