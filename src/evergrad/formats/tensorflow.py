"""TensorFlow's V2 checkpoints: `ckpt.index` says where in `ckpt.data-NNNNN-of-MMMMM` each tensor's bytes are."""

from __future__ import annotations

import codecs
import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from evergrad.dtypes import DType
from evergrad.errors import DamagedFile, FileAccessError, UnsupportedContent
from evergrad.formats.castagnoli import crc32c, masked, unmasked
from evergrad.formats.contract import Checkpoint, Format, OtherTensor, Probe, digest, read_blocks
from evergrad.formats.crc import CRC32C
from evergrad.formats.data_file import DataFile, close_all, file_errors, named_size, open_file
from evergrad.formats.pieces import Box, Pieces, PiecewiseCheckpoint, fill
from evergrad.formats.region import Region
from evergrad.formats.sstable import MAGIC, Table
from evergrad.formats.tensorflow_index import Stored, box_of, read_entry, read_header, slice_key, strings_checksum
from evergrad.records import Check, Role, TensorInfo
from evergrad.state import role_of

INDEX = ".index"
_GRAPHS = ("saved_model.pb", "saved_model.pbtxt")
_DATA = re.compile(r"(.+)\.data-\d{5}-of-\d{5}")
_BLOCK = 1 << 22
# Keras optimizers hold the model's parameters, and come before the model in the alphabet of ways to them.
_TRAINED = re.compile(r"([^/]+/)*optimizer/_trainable_variables/\d+/")
_LATEST = re.compile(rb'^\s*model_checkpoint_path:\s*"((?:[^"\\\n]|\\.)*)"', re.MULTILINE)

_DTYPES = {
    1: DType.FLOAT32, 2: DType.FLOAT64, 3: DType.INT32, 4: DType.UINT8, 5: DType.INT16, 6: DType.INT8,
    8: DType.COMPLEX64, 9: DType.INT64, 10: DType.BOOL, 14: DType.BFLOAT16, 17: DType.UINT16, 18: DType.COMPLEX128,
    19: DType.FLOAT16, 22: DType.UINT32, 23: DType.UINT64, 24: DType.FLOAT8_E5M2, 25: DType.FLOAT8_E4M3FN,
    26: DType.FLOAT8_E4M3FNUZ, 28: DType.FLOAT8_E5M2FNUZ,
}  # fmt: skip
_STRINGS = 7
_OTHERS = {
    _STRINGS: "strings", 11: "qint8", 12: "quint8", 13: "qint32", 15: "qint16", 16: "quint16", 20: "a resource",
    21: "a variant", 27: "float8_e4m3b11fnuz", 29: "int4", 30: "uint4", 31: "int2", 32: "uint2",
}  # fmt: skip


class TensorFlow(Format):
    """Files of `tf.train.Checkpoint` and `Model.save_weights`; opened by prefix, index file or folder.

    The folder of a SavedModel is opened as the checkpoint of its variables; its graph is left alone.
    """

    name = "tensorflow"

    def recognises(self, probe: Probe) -> bool:
        """A table's magic number at the end of a file, or a folder with an index and its data."""
        if not probe.is_folder:
            return _is_table(probe.path)
        if probe.names & set(_GRAPHS):
            return True
        stems = {name.removesuffix(INDEX) for name in probe.names if name.endswith(INDEX)}
        if "checkpoint" in probe.names and stems:
            return True
        return any((match := _DATA.fullmatch(name)) and match[1] in stems for name in probe.names)

    def open(self, path: Path) -> Checkpoint:
        """Read the index, and the size of every data file that it names."""
        if path.is_dir() and (graph := next((name for name in _GRAPHS if (path / name).is_file()), None)):
            return _open_saved_model(path, graph)
        index = _index_in(path) if path.is_dir() else path
        if index.suffix != INDEX:
            hint = "Give it back the name under which TensorFlow wrote it."
            raise FileAccessError(index, "is an index whose name does not tell its data files", hint=hint)
        return _open_index(index)


def _open_index(index: Path) -> Checkpoint:
    table = Table(index)
    try:
        return _open(index, table)
    except BaseException:
        table.file.close()
        raise


def _open_saved_model(folder: Path, graph: str) -> Checkpoint:
    """The variables of a SavedModel."""
    index = folder / "variables" / f"variables{INDEX}"
    if not index.is_file():
        hint = "Is the download complete? A model without variables holds no tensors here."
        raise FileAccessError(folder, f"is a SavedModel without variables/{index.name}", hint=hint)
    checkpoint = _open_index(index)
    with file_errors(folder):
        beside = sorted(child.name for child in folder.iterdir() if child.name not in (graph, "variables"))
    checkpoint.unkept = {graph: "the graph of a SavedModel", **dict.fromkeys(beside, "a part of a SavedModel")}
    return checkpoint


def index_of_prefix(path: Path) -> Path | None:
    """The index of the checkpoint that TensorFlow calls by this path, if there is one."""
    index = path.with_name(path.name + INDEX) if path.name else path
    return index if index.is_file() and _is_table(index) else None


@dataclass(slots=True)
class _Files:
    """The index and the data files, opened when first needed; durable and closed together."""

    prefix: str
    count: int
    table: Table
    opened: dict[int, DataFile] = field(default_factory=dict)
    closed: bool = False

    def path(self, shard: int) -> Path:
        return self.table.file.path.with_name(f"{self.prefix}.data-{shard:05d}-of-{self.count:05d}")

    def data(self, shard: int) -> DataFile:
        if self.closed:
            raise FileAccessError(self.path(shard), "is closed")
        if shard not in self.opened:
            self.opened[shard] = DataFile(self.path(shard))
        return self.opened[shard]

    def close(self) -> None:
        """Data first: what the index says of it is durable last."""
        self.closed = True
        close_all([*self.opened.values(), self.table.file])


class _EntrySeal:
    """A tensor's checksum, in its entry of the index."""

    def __init__(self, table: Table, file: DataFile, stored: Stored) -> None:
        self._table, self._file, self._stored = table, file, stored

    def follow(self, addresses: npt.NDArray[np.int64], deltas: npt.NDArray[np.uint8]) -> None:
        """Put the entry right, and the checksum of its block."""
        stored, place = self._stored, self._stored.crc
        assert place is not None
        change = CRC32C.change(addresses - stored.offset, deltas, stored.size)
        self._table.alter(stored.block, place, struct.pack("<L", masked(self._now(place) ^ change)))

    def holds(self) -> bool:
        """Whether the bytes have the checksum that the index says."""
        stored, crc = self._stored, 0
        assert stored.crc is not None
        for start in range(0, stored.size, _BLOCK):
            piece = np.empty(min(_BLOCK, stored.size - start), np.uint8)
            self._file.read_into(stored.offset + start, piece)
            crc = crc32c(piece, crc)
        return crc == self._now(stored.crc)

    def _now(self, place: int) -> int:
        return unmasked(int.from_bytes(self._table.file.read(place, 4), "little"))


def _open(index: Path, table: Table) -> Checkpoint:
    shards, big_endian = read_header(index, table.entries)
    stored: dict[bytes, Stored] = {}
    for entry in table.entries[1:]:
        if entry.key in stored:
            raise DamagedFile(index, f"names {entry.key[:80]!r} twice")
        stored[entry.key] = read_entry(index, entry)
    files = _Files(index.name.removesuffix(INDEX), shards, table)
    _check_places(index, files, stored.items())
    tensors, others, boxes = _sort(index, stored)

    def locate(name: str) -> Pieces:
        info, parts = tensors[name], boxes[name]

        def find(number: int) -> Region:
            box, entry = parts[number]
            file = files.data(entry.shard)
            seal = _EntrySeal(table, file, entry) if entry.crc is not None else None
            return Region(file, entry.offset, box.sizes, info.dtype, None, big_endian, seal)

        return Pieces(name, info.shape, info.dtype, [box for box, _ in parts], find)

    def check_container() -> Mapping[str, Check]:
        return {f"{index.name} block {number}": table.check(block) for number, block in enumerate(table.blocks)}

    def fingerprint(name: str) -> str | None:
        entry = stored.get(name.encode("utf-8"))
        if entry is None or entry.slices:
            return None
        return digest((entry.dtype, entry.shape), read_blocks(files.data(entry.shard), entry.offset, entry.size))

    def check_other(name: str) -> Check:
        entry = stored.get(name.encode("utf-8"))
        if entry is None or entry.slices or entry.crc is None:
            return Check.UNKNOWN
        file = files.data(entry.shard)
        if entry.dtype != _STRINGS:
            return Check.of(_EntrySeal(table, file, entry).holds())
        crc = unmasked(int.from_bytes(table.file.read(entry.crc, 4), "little"))
        return Check.of(strings_checksum(file.read(entry.offset, entry.size), math.prod(entry.shape)) == crc)

    return PiecewiseCheckpoint(
        TensorFlow.name,
        index,
        tensors,
        locate,
        files,
        others=others,
        check_container=check_container,
        fingerprint=fingerprint,
        check_other=check_other,
        beside=[files.path(shard) for shard in sorted({entry.shard for entry in stored.values() if not entry.slices})],
    )


def _sort(
    index: Path, stored: Mapping[bytes, Stored]
) -> tuple[dict[str, TensorInfo], dict[str, str], dict[str, list[tuple[Box, Stored]]]]:
    """The tensors, everything else, and the parts of each tensor."""
    tensors: dict[str, TensorInfo] = {}
    others: dict[str, str] = {}
    boxes: dict[str, list[tuple[Box, Stored]]] = {}
    used: set[bytes] = set()
    for key, entry in stored.items():
        if key.startswith(b"\0"):
            continue  # a slice: listed with the tensor it is of
        name = key.decode("utf-8", "backslashreplace")
        if name in tensors or name in others:  # one of them is not text
            raise DamagedFile(index, f"names {name[:80]!r} twice")
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            what = f"a tensor of {_OTHERS.get(entry.dtype, f'unknown type {entry.dtype}')}"
            others[name] = what if entry.dtype == _STRINGS else OtherTensor(what)
            continue
        parts = [(Box((0,) * len(entry.shape), entry.shape), entry)]
        if entry.slices:
            keys = [slice_key(key, extents) for extents in entry.slices]
            parts = _slices(index, name, entry, [stored.get(key) for key in keys])
            used.update(keys)
        for box, part in parts:
            if part.size != math.prod(box.sizes) * dtype.itemsize or part.dtype != entry.dtype:
                expected = f"{math.prod(box.sizes) * dtype.itemsize} bytes of {dtype}"
                raise DamagedFile(index, f"{name}: wrong length", expected=expected, found=part.size)
        role = _role(name, dtype, len(entry.shape))
        tensors[name] = TensorInfo(name, entry.shape, dtype, role, math.prod(entry.shape) * dtype.itemsize)
        boxes[name] = parts
    for key in stored.keys() - used:
        if key.startswith(b"\0"):
            others[key.decode("utf-8", "backslashreplace")] = "a slice of no tensor"
    return tensors, others, boxes


def _slices(index: Path, name: str, entry: Stored, found: Sequence[Stored | None]) -> list[tuple[Box, Stored]]:
    """The slices of a tensor that hold something, each with its place in the whole."""
    boxes = [box_of(extents, entry.shape) for extents in entry.slices]
    parts = [
        (box, part) for box, part in zip(boxes, found, strict=True) if part is not None and part.shape == box.sizes
    ]
    if len(parts) < len(boxes):
        raise DamagedFile(index, f"{name}: a slice is missing, or has another shape")
    try:
        return [parts[number] for number in fill(entry.shape, boxes)]
    except ValueError as error:
        raise DamagedFile(index, f"{name}: {error}") from None


def _role(name: str, dtype: DType, rank: int) -> Role:
    """By the name as its owner knows it: TensorFlow saves attributes of objects, each once, by the first way to it."""
    if "/.OPTIMIZER_SLOT/" in name:
        return Role.OPTIMIZER
    if _TRAINED.match(name):
        return Role.MODEL
    return role_of(name.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE"), is_float=dtype.is_float, rank=rank)


def _check_places(index: Path, files: _Files, entries: Iterable[tuple[bytes, Stored]]) -> None:
    """Every tensor lies in its file, and no two in the same bytes."""
    sizes: dict[int, int] = {}
    places: list[tuple[int, int, int]] = []
    for key, entry in entries:
        if entry.slices:
            continue
        if entry.shard >= files.count:
            raise DamagedFile(index, f"{key[:80]!r} lies in data file {entry.shard} of {files.count}")
        if entry.shard not in sizes:
            sizes[entry.shard] = named_size(index, files.path(entry.shard))
        if entry.offset + entry.size > sizes[entry.shard]:
            expected = f"at least {entry.offset + entry.size} bytes"
            what = f"{key[:80]!r} lies beyond the end of its data file"
            raise DamagedFile(index, what, expected=expected, found=sizes[entry.shard])
        if entry.size:
            places.append((entry.shard, entry.offset, entry.offset + entry.size))
    places.sort()
    for before, after in pairwise(places):
        if before[0] == after[0] and after[1] < before[2]:
            raise DamagedFile(index, f"two tensors overlap at byte {after[1]} of data file {after[0]}")


def _index_in(folder: Path) -> Path:
    """The index that the folder's `checkpoint` file names, or the only one."""
    latest = folder / "checkpoint"
    with file_errors(folder):
        found = sorted(child for child in folder.iterdir() if child.name.endswith(INDEX) and child.is_file())
        text = b""
        if latest.is_file():
            with open_file(latest) as file:
                text = file.read(1 << 16)
    if match := _LATEST.search(text):
        named = codecs.escape_decode(match[1])[0].decode("utf-8", "replace")
        # The path was written where the checkpoint was saved; only its last part still tells something.
        index = folder / (named.rsplit("/", 1)[-1] + INDEX)
        if index not in found:
            raise FileAccessError(latest, f"names {named!r}, which is not in the folder")
        return index
    if len(found) == 1:
        return found[0]
    names = ", ".join(repr(child.name) for child in found[:4])
    raise UnsupportedContent(folder, f"holds several checkpoints: {names}", hint="Open one of them.")


def _is_table(path: Path) -> bool:
    with file_errors(path), open_file(path) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - len(MAGIC)))
        return file.read() == MAGIC
