"""Folders of torch.distributed.checkpoint: logical tensors over all their files, altered where they lie."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import evergrad as eg
from evergrad.dtypes import DType
from evergrad.errors import DamagedFile, FileAccessError, FormatError, LimitExceeded, UnsupportedContent
from evergrad.formats.byte_source import DataFile
from evergrad.formats.region import Region
from evergrad.formats.tiled import TensorBox, TiledTensor
from evergrad.records import Check, TensorInfo
from evergrad.testing import FormatContract, raw_bytes
from folder_fuzz import FUZZ
from refusals import refusal_of_file

DATA = Path(__file__).parent.parent / "data"
# torch's own: it looks for a process group, and for a device.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning:torch")


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, whole, as DCP itself reads it."""
    read = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {name: what for name, what in read.items() if isinstance(what, TensorStorageMetadata)}
    state = {name: torch.empty(what.size, dtype=what.properties.dtype) for name, what in tensors.items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


class TestDcp(FormatContract):
    """Written by this process."""

    format = "dcp"

    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        torch.manual_seed(0)
        state = {
            "model": {"fc.weight": torch.randn(40, 5), "bn.running_mean": torch.randn(5, dtype=torch.bfloat16)},
            "optim": {"state": {0: {"exp_avg": torch.randn(8, 3).T, "step": torch.tensor(3.0)}}},
            "complex": torch.randn(3, 3, dtype=torch.complex64),
            "empty": torch.zeros(0, 4),
            "note": "text",
        }
        dcp.save(state, checkpoint_id=(path := folder / "step-1"), no_dist=True)
        return path, self.load(path)

    def load(self, path: Path) -> Mapping[str, torch.Tensor]:
        return loaded(path)


class TestShardedDcp(TestDcp):
    """Written by four processes: DTensors by rows, columns and in a grid."""

    def make(self, folder: Path) -> tuple[Path, Mapping[str, torch.Tensor]]:
        shutil.copytree(DATA / "dcp_sharded", path := folder / "step-1")
        return path, self.load(path)


@pytest.mark.parametrize("name", ["dcp", "dcp_sharded"])
def test_every_tensor_is_as_dcp_itself_read_it(name: str, data: Path) -> None:
    expected = json.loads((data / f"{name}.expected.json").read_text())
    with eg.open_checkpoint(data / name) as ck:
        assert sorted(ck.tensors) == sorted(row["name"] for row in expected)
        for row in expected:
            info = ck.tensors[row["name"]]
            assert [list(info.shape), info.dtype.value] == [row["shape"], row["dtype"]], row["name"]
            assert hashlib.sha256(raw_bytes(ck.read(row["name"]))).hexdigest() == row["sha256"], row["name"]


def test_names_are_those_of_the_metadata_and_objects_are_left_alone(data: Path) -> None:
    with eg.open_checkpoint(data / "dcp") as ck:
        assert "model.fc.weight" in ck.tensors
        assert ck.others == dict.fromkeys(["list.1.step", "note"], "an object saved by torch.save")
    with eg.open_checkpoint(data / "dcp" / ".metadata") as ck:
        assert ck.path == data / "dcp"


def test_every_single_element_is_found_in_its_part(tmp_path: Path) -> None:
    shutil.copytree(DATA / "dcp_sharded", folder := tmp_path / "s")
    before = loaded(folder)
    with eg.open_checkpoint(folder) as ck:
        for name, info in ck.tensors.items():
            everyone = np.random.default_rng(1).permutation(info.numel)
            patterns = (everyone % 2 + 1).astype(info.dtype.bits)
            old = ck.xor(name, everyone, patterns)
            np.testing.assert_array_equal(old, bits(before[name], info)[everyone])
    after = loaded(folder)
    for name, info in ck.tensors.items():
        changed = bits(before[name], info) ^ bits(after[name], info)
        np.testing.assert_array_equal(changed, np.arange(info.numel) % 2 + 1, name)


def bits(tensor: torch.Tensor, info: TensorInfo) -> np.ndarray:
    return np.frombuffer(raw_bytes(tensor), info.dtype.bits)


def test_every_range_of_elements_is_the_same_part_of_the_whole(data: Path) -> None:
    with eg.open_checkpoint(data / "dcp_sharded") as ck:
        for name in ("rows", "columns", "middle", "grid", "uneven"):
            whole = ck.read_bits(name)
            for start in range(len(whole)):
                for stop in range(start, len(whole) + 1):
                    np.testing.assert_array_equal(ck.read_bits(name, start, stop), whole[start:stop])


def test_long_and_short_runs_are_read_alike(tmp_path: Path) -> None:
    values = np.arange(20 * 9000, dtype=np.uint32).reshape(20, 9000)
    boxes = [TensorBox((r, c), (10, w)) for r in (0, 10) for c, w in ((0, 4000), (4000, 4900), (8900, 100))]
    pieces = [values[r : r + h, c : c + w].copy() for (r, c), (h, w) in boxes]
    (path := tmp_path / "raw").write_bytes(b"".join(piece.tobytes() for piece in pieces))
    starts = np.cumsum([0, *(piece.nbytes for piece in pieces)])
    file = DataFile(path)
    uint32 = DType.UINT32
    tensor = TiledTensor("x", (20, 9000), uint32, boxes, lambda n: Region(file, int(starts[n]), boxes[n].sizes, uint32))
    for start, stop in [(0, 180_000), (5, 179_999), (3999, 4001), (8950, 9050), (100_000, 100_001), (95_000, 125_000)]:
        np.testing.assert_array_equal(tensor.read(start, stop), values.reshape(-1)[start:stop])
    file.close()


def test_the_checksum_of_every_part_stays_valid(tmp_path: Path) -> None:
    shutil.copytree(DATA / "dcp_sharded", folder := tmp_path / "s")
    with eg.open_checkpoint(folder) as ck:
        for name, info in ck.tensors.items():
            ck.xor(name, range(info.numel), np.full(info.numel, 3, info.dtype.bits))
    places = dcp.FileSystemReader(folder).read_metadata().storage_data
    for place in places.values():
        raw = (folder / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
        assert zipfile.ZipFile(io.BytesIO(raw)).testzip() is None
    with eg.open_checkpoint(folder) as ck:
        assert {ck.checksum(name) for name in ck.tensors} == {Check.OK}
        assert set(ck.container_checks().values()) == {Check.OK}
        assert len(ck.container_checks()) == 4


def test_damage_is_found(tmp_path: Path) -> None:
    shutil.copytree(DATA / "dcp_sharded", folder := tmp_path / "s")
    places = dcp.FileSystemReader(folder).read_metadata().storage_data
    place = next(place for index, place in places.items() if index.fqn == "columns" and index.index == 2)
    file = folder / place.relative_path
    raw = bytearray(file.read_bytes())
    with zipfile.ZipFile(io.BytesIO(raw[place.offset : place.offset + place.length])) as archive:
        record = next(info for info in archive.infolist() if info.filename.endswith("data/0"))
    raw[raw.index(b"FB", place.offset + record.header_offset) + 64] ^= 1
    file.write_bytes(raw)
    with eg.open_checkpoint(folder) as ck:
        assert ck.checksum("columns") is Check.FAILED
        assert ck.checksum("rows") is Check.OK


def write(folder: Path, metadata: object, files: Mapping[str, bytes] | None = None) -> Path:
    folder.mkdir()
    (folder / ".metadata").write_bytes(metadata if isinstance(metadata, bytes) else pickle.dumps(metadata))
    for name, raw in (files or {"__0_0.distcp": bytes(64)}).items():
        (folder / name).write_bytes(raw)
    return folder


def saved(value: object, **options: Any) -> bytes:
    torch.save(value, buffer := io.BytesIO(), **options)
    return buffer.getvalue()


PART = saved(torch.arange(6.0).reshape(2, 3))


def metadata(
    *,
    size: tuple[int, ...] = (2, 3),
    chunks: list[tuple[tuple[int, ...], tuple[int, ...]]] | None = None,
    file: object = "__0_0.distcp",
    offset: int = 0,
    length: int = len(PART),
    dtype: object = torch.float32,
    transforms: list[str] | None = None,
) -> Metadata:
    chunks = [((0, 0), (2, 3))] if chunks is None else chunks
    parts = [ChunkStorageMetadata(o, n) for o, n in chunks]
    places = {
        MetadataIndex("w", o): _StorageInfo(file, offset + number * length, length, transforms)
        for number, (o, _) in enumerate(chunks)
    }
    tensor = TensorStorageMetadata(TensorProperties(dtype=dtype), size, parts)
    return Metadata({"w": tensor, "note": BytesStorageMetadata()}, storage_data=places)


@pytest.mark.parametrize("protocol", range(6))
def test_the_hand_made_metadata_is_valid_in_every_protocol(protocol: int, tmp_path: Path) -> None:
    raw = pickle.dumps(metadata(), protocol)
    with eg.open_checkpoint(write(tmp_path / "s", raw, {"__0_0.distcp": PART})) as ck:
        assert ck.read("w").tolist() == [[0, 1, 2], [3, 4, 5]]


def test_parts_in_the_old_torch_format_are_served(tmp_path: Path) -> None:
    old = saved(torch.arange(6.0).reshape(2, 3), _use_new_zipfile_serialization=False)
    padded = b"x" * 13 + old
    folder = write(tmp_path / "s", metadata(offset=13, length=len(old)), {"__0_0.distcp": padded})
    with eg.open_checkpoint(folder) as ck:
        ck.xor("w", [5], [1 << 31])
        assert ck.checksum("w") is Check.UNKNOWN
    with eg.open_checkpoint(folder) as ck:
        assert ck.read("w").tolist() == [[0, 1, 2], [3, 4, -5]]


def test_a_part_stored_through_a_transform_is_listed_and_left_alone(tmp_path: Path) -> None:
    with eg.open_checkpoint(write(tmp_path / "s", metadata(transforms=["zstd"]), {"__0_0.distcp": PART})) as ck:
        assert not ck.tensors
        assert ck.others["w"] == "a tensor stored through zstd"


@pytest.mark.parametrize(
    ("changes", "kind", "word"),
    [
        ({"file": "../outside.distcp"}, DamagedFile, "outside its folder"),
        ({"file": "/etc/passwd"}, DamagedFile, "outside its folder"),
        ({"file": "x\0y"}, DamagedFile, "outside its folder"),
        ({"file": 3}, DamagedFile, "without file"),
        ({"file": "__9_0.distcp"}, FileAccessError, "not there"),
        ({"offset": 100}, DamagedFile, "beyond the end"),
        ({"offset": -1}, DamagedFile, "without file"),
        ({"length": 10**18}, DamagedFile, "beyond the end"),
        ({"length": 100}, DamagedFile, "zip"),
        ({"length": 0}, UnsupportedContent, "no torch file"),
        ({"size": (2, 4)}, DamagedFile, "parts of 6 elements in a tensor of 8"),
        ({"size": (2**61, 2**61)}, DamagedFile, "impossible"),
        ({"size": (0, 2**61, 2**61), "chunks": []}, DamagedFile, "impossible"),
        ({"size": (-2, -3)}, DamagedFile, "impossible"),
        ({"size": (2**63, 3)}, DamagedFile, "impossible"),
        ({"size": (1,) * 65}, DamagedFile, "of 65 axes (expected at most 64)"),
        ({"size": (6,), "chunks": [((0,), (6,))]}, DamagedFile, "is another"),
        ({"dtype": torch.float64}, DamagedFile, "is another"),
        ({"chunks": []}, DamagedFile, "parts of 0 elements"),
        ({"chunks": [((0,), (6,))]}, DamagedFile, "dimensions"),
        ({"chunks": [((0, 1), (2, 3))]}, DamagedFile, "a part at (0, 1)"),
        ({"size": (4, 3), "chunks": [((0, 0), (2, 3)), ((1, 0), (2, 3))], "length": 0}, DamagedFile, "overlap"),
        ({"size": (4, 3), "chunks": [((0, 0), (2, 3)), ((2, 0), (2, 3))]}, DamagedFile, "beyond the end"),
        (
            {"size": (2**40, 8), "chunks": [((0, 0), (2**40, 4)), ((0, 4), (2**40, 4))], "length": 9},
            LimitExceeded,
            "absurd",
        ),
        ({"size": (1024, 4096), "chunks": [((0, 0), (1024, 4096))]}, DamagedFile, "is another"),
    ],
    ids=str,
)
def test_bad_metadata_is_refused_in_one_line(
    changes: dict[str, Any], kind: type[FormatError], word: str, tmp_path: Path
) -> None:
    (line,) = refusal_of_file(write(tmp_path / "s", metadata(**changes), {"__0_0.distcp": PART}), kind)
    assert word in line


def test_two_tensors_in_the_same_bytes_are_refused(tmp_path: Path) -> None:
    whole = metadata()
    whole.state_dict_metadata["v"] = whole.state_dict_metadata["w"]
    whole.storage_data[MetadataIndex("v", (0, 0))] = _StorageInfo("__0_0.distcp", 8, 100)
    (line,) = refusal_of_file(write(tmp_path / "s", whole, {"__0_0.distcp": PART}), DamagedFile)
    assert "two parts overlap" in line


def test_a_shared_list_of_parts_is_no_bomb(tmp_path: Path) -> None:
    chunks = [ChunkStorageMetadata((0,), (0,))] * 20_000
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.float32), (0,), chunks)
    bomb = Metadata({f"t{i}": tensor for i in range(20_000)}, storage_data={})
    (line,) = refusal_of_file(write(tmp_path / "s", bomb), DamagedFile)
    assert "more parts than" in line


class Runs:
    """Unpickling this creates a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_a_hostile_pickle_is_read_and_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "it-ran"
    evil = metadata()
    evil.planner_data = Runs(mark)
    with eg.open_checkpoint(write(tmp_path / "s", evil, {"__0_0.distcp": PART})) as ck:
        assert ck.read("w").numel() == 6
    (line,) = refusal_of_file(write(tmp_path / "t", pickle.dumps(Runs(mark))), DamagedFile)
    assert "no Metadata" in line
    (line,) = refusal_of_file(write(tmp_path / "u", pickle.dumps({"a": 1})), DamagedFile)
    assert "no Metadata" in line
    (line,) = refusal_of_file(write(tmp_path / "v", b"not a pickle"), DamagedFile)
    assert "damaged" in line
    assert not mark.exists()


def test_a_deflated_part_is_refused_and_the_file_stays_as_it_is(tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(PART)) as old, zipfile.ZipFile(buffer := io.BytesIO(), "w", 8) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    raw = buffer.getvalue()
    folder = write(tmp_path / "s", metadata(length=len(raw)), {"__0_0.distcp": raw})
    with eg.open_checkpoint(folder) as ck, pytest.raises(UnsupportedContent, match="compressed"):
        ck.xor("w", [0], [1])
    assert (folder / "__0_0.distcp").read_bytes() == raw


def test_folders_saved_without_collectives_are_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "s", metadata(), {"__0_0.distcp": PART})
    (folder / ".metadata").rename(folder / "__0.metadata")
    (line,) = refusal_of_file(folder, UnsupportedContent)
    assert "without collectives" in line


def test_parts_that_cannot_all_be_altered_are_none_of_them_altered(tmp_path: Path) -> None:
    shutil.copytree(DATA / "dcp_sharded", folder := tmp_path / "s")
    before = loaded(folder)["rows"]
    with eg.open_checkpoint(folder) as ck:
        ck.read("rows")
        last = folder / "__3_0.distcp"
        raw = last.read_bytes()
        last.unlink()
        last.write_bytes(raw)  # another file now: what is open is no longer what is there
        with pytest.raises(FileAccessError, match="replaced"):
            ck.xor("rows", range(math.prod(before.shape)), np.ones(before.numel(), np.uint32))
    assert torch.equal(loaded(folder)["rows"], before)


@pytest.mark.parametrize("source", ["dcp", "dcp_sharded"])
def test_mutated_folders_give_only_our_errors(source: str, tmp_path: Path, limited: Callable[..., str]) -> None:
    said = limited(FUZZ, DATA / source, tmp_path, 150, 20261, memory=3 << 29, seconds=100)
    assert 0 < int(said) < 150
