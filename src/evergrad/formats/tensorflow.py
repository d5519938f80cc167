"""TensorFlow's V2 checkpoints: `ckpt.index` says where in `ckpt.data-NNNNN-of-MMMMM` each tensor's bytes are."""

from __future__ import annotations

import codecs
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from evergrad._files import file_errors, open_file
from evergrad.dtypes import DType
from evergrad.errors import DamagedFile, FileAccessError, LimitExceeded, UnsupportedContent
from evergrad.formats.byte_source import DataFile, close_all, indexed_file_size
from evergrad.formats.checkpoint import Checkpoint, Format, OtherTensor, Probe, digest, read_blocks
from evergrad.formats.crc import CRC32C, crc32c, masked, unmasked
from evergrad.formats.region import Region
from evergrad.formats.tiled import TensorBox, TiledCheckpoint, TiledTensor, check_tiling
from evergrad.records import MAX_AXES, Check, Role, TensorInfo
from evergrad.state import role_of

# LevelDB's sorted tables, as TensorFlow keeps the index of a checkpoint: where each value lies, under which checksum.
#
# A table is a row of blocks, each followed by its kind (one byte) and a masked CRC-32C over both. Keys in a block
# share prefixes with the key before. The last block is an index of the others, and the footer of 48 bytes says where
# it is.

MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
FOOTER_BYTES = 48
MAX_TABLE_BYTES = 1 << 28  # about three million tensors
MAX_KEY_BYTES = 1 << 14
_TRAILER = 5
_COMPRESSIONS = {1: "snappy", 2: "zstd"}


@dataclass(frozen=True, slots=True)
class SSTableBlock:
    """A block's place in the file, without its trailer."""

    start: int
    size: int


@dataclass(frozen=True, slots=True)
class SSTableEntry:
    """A key, its value, and where the value lies in the file."""

    key: bytes
    value: bytes
    start: int
    block: SSTableBlock


class SSTable:
    """An open table: all of its entries, and a way to alter a value so that the block's checksum follows."""

    def __init__(self, path: Path) -> None:
        self.file = DataFile(path)
        try:
            if self.file.size > MAX_TABLE_BYTES:
                expected = f"at most {MAX_TABLE_BYTES} bytes"
                raise LimitExceeded(path, "index", expected=expected, found=self.file.size)
            data = self.file.read(0, self.file.size)
            self.blocks, self.entries = _read(path, data)
        except BaseException:
            self.file.close()
            raise

    def alter(self, block: SSTableBlock, start: int, value: bytes) -> None:
        """Put bytes into a block; a checksum that did not hold before will not hold after."""
        before = np.frombuffer(self.file.read_current(start, len(value)), np.uint8)
        delta = np.frombuffer(value, np.uint8) ^ before
        self.file.put(start, value)
        place = block.start + block.size + 1
        stored = int.from_bytes(self.file.read_current(place, 4), "little")
        change = CRC32C.change(np.array([start - block.start], np.int64), delta[None, :], block.size + 1)
        self.file.put(place, struct.pack("<L", masked(unmasked(stored) ^ change)))

    def check(self, block: SSTableBlock) -> Check:
        """Whether the block has the checksum that stands behind it."""
        data = self.file.read(block.start, block.size + _TRAILER)
        return Check.of(crc32c(data[:-4]) == unmasked(int.from_bytes(data[-4:], "little")))


def varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """The number at a position, and the position behind it; ValueError if it does not end."""
    value = shift = 0
    while position < end and shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, position
        shift += 7
    raise ValueError(f"a number at byte {position} that does not end")


def protobuf_fields(data: bytes) -> Iterator[tuple[int, int | bytes, int]]:
    """The fields of a protocol buffer: number, value, and where the value begins; ValueError if it is none."""
    position, end = 0, len(data)
    while position < end:
        tag, position = varint(data, position, end)
        kind, start = tag & 7, position
        if kind == 0:
            number, position = varint(data, position, end)
            yield tag >> 3, number, start
            continue
        if kind == 2:
            length, start = varint(data, position, end)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of unknown kind {kind}")
        position = start + length
        if position > end:
            raise ValueError(f"a field of {length} bytes in a message of {end}")
        piece = data[start:position]
        yield tag >> 3, piece if kind == 2 else int.from_bytes(piece, "little"), start


def _read(path: Path, data: bytes) -> tuple[list[SSTableBlock], list[SSTableEntry]]:
    if len(data) < FOOTER_BYTES or not data.endswith(MAGIC):
        found = data[-8:].hex() or "an empty file"
        raise DamagedFile(path, "no table footer at the end", expected=MAGIC.hex(), found=found)
    try:
        footer = len(data) - FOOTER_BYTES
        meta, position = _handle(path, data, footer, len(data))
        index, _ = _handle(path, data, position, len(data))
        blocks = [_handle(path, entry.value, 0, len(entry.value), len(data))[0] for entry in _block(path, data, index)]
        # A block that is named again and again would be read again and again.
        if sum(block.size for block in blocks) > len(data):
            raise DamagedFile(path, "index blocks overlap")
        entries: list[SSTableEntry] = []
        key_bytes = 0
        for block in blocks:
            for entry in _block(path, data, block):
                key_bytes += len(entry.key)
                if key_bytes > 64 * len(data) + (1 << 20):
                    raise LimitExceeded(path, f"keys of more than {key_bytes} bytes in an index of {len(data)}")
                entries.append(entry)
    except (ValueError, struct.error) as error:
        raise DamagedFile(path, f"index is damaged: {error}") from None
    return [*blocks, meta, index], entries


def _handle(path: Path, data: bytes, position: int, end: int, size: int | None = None) -> tuple[SSTableBlock, int]:
    """The place of a block, which lies before the footer."""
    start, position = varint(data, position, end)
    length, position = varint(data, position, end)
    limit = (len(data) if size is None else size) - FOOTER_BYTES
    if start + length + _TRAILER > limit:
        expected = f"an end before {limit}"
        raise DamagedFile(path, "an index block lies outside", expected=expected, found=start + length + _TRAILER)
    return SSTableBlock(start, length), position


def _block(path: Path, data: bytes, block: SSTableBlock) -> Iterator[SSTableEntry]:
    """The entries of a block; its restart points only serve searching."""
    kind = data[block.start + block.size]
    if kind:
        how = _COMPRESSIONS.get(kind, f"method {kind}")
        raise UnsupportedContent(path, f"index is compressed ({how})", hint="Save it again with a current TensorFlow.")
    if block.size < 4:
        raise ValueError(f"a block of {block.size} bytes at {block.start}")
    end = block.start + block.size
    restarts = int.from_bytes(data[end - 4 : end], "little")
    end -= 4 * (restarts + 1)
    if end < block.start:
        raise ValueError(f"{restarts} restart points in a block of {block.size} bytes at {block.start}")
    position, key = block.start, b""
    while position < end:
        shared, position = varint(data, position, end)
        own, position = varint(data, position, end)
        length, position = varint(data, position, end)
        if shared > len(key) or position + own + length > end:
            raise ValueError(f"an entry at byte {position} that runs beyond its block")
        if shared + own > MAX_KEY_BYTES:
            raise ValueError(f"a key of {shared + own} bytes at byte {position}")
        key = key[:shared] + data[position : position + own]
        start = position + own
        position = start + length
        yield SSTableEntry(key, data[start:position], start, block)


# What the entries in the index of a TensorFlow checkpoint say: protocol buffers, and the keys of slices.

MAX_SHARDS = 1 << 17
_ESCAPES = {0x00: b"\0\xff", 0xFF: b"\xff\0"}

Extents = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class BundleEntry:
    """A tensor, or a slice of one, as its entry in the index describes it."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    crc: int | None  # where in the index its checksum is
    block: SSTableBlock
    slices: tuple[Extents, ...]


def read_header(index: Path, entries: list[SSTableEntry]) -> tuple[int, bool]:
    """How many data files there are, and whether their numbers are big-endian."""
    if not entries or entries[0].key != b"":
        raise DamagedFile(index, "is a table, but no TensorFlow checkpoint: it has no header")
    shards, endianness = 0, 0
    try:
        for number, value, _ in protobuf_fields(entries[0].value):
            if isinstance(value, int):
                shards = value if number == 1 else shards
                endianness = value if number == 2 else endianness
    except ValueError as error:
        raise DamagedFile(index, f"header is damaged: {error}") from None
    if not 0 < shards <= MAX_SHARDS or endianness > 1:
        raise DamagedFile(index, f"header tells {shards} data files and byte order {endianness}")
    return shards, endianness == 1


def read_entry(index: Path, entry: SSTableEntry) -> BundleEntry:
    """What an entry says (a `BundleEntryProto`)."""
    numbers = {1: 0, 3: 0, 4: 0, 5: 0}
    shape: tuple[int, ...] = ()
    crc: int | None = None
    slices: list[bytes] = []
    try:
        for number, value, start in protobuf_fields(entry.value):
            if number == 6:
                crc = entry.start + start
            elif number == 2 and isinstance(value, bytes):
                shape = _shape(value)
            elif number == 7 and isinstance(value, bytes):
                slices.append(value)
            elif number in numbers and isinstance(value, int):
                numbers[number] = value
        extents = tuple(_extents(value, len(shape)) for value in slices)
    except ValueError as error:
        raise DamagedFile(index, f"the entry of {entry.key[:80]!r} is damaged: {error}") from None
    if max(numbers.values()) >= 1 << 62:
        raise DamagedFile(index, f"the entry of {entry.key[:80]!r} has an impossible place: {list(numbers.values())}")
    return BundleEntry(numbers[1], shape, numbers[3], numbers[4], numbers[5], crc, entry.block, extents)


def _shape(data: bytes) -> tuple[int, ...]:
    lengths = []
    for number, value, _ in protobuf_fields(data):
        if number == 3 and value:
            raise ValueError("a tensor of unknown rank")
        if number == 2 and isinstance(value, bytes):
            lengths.append(sum(n for what, n, _ in protobuf_fields(value) if what == 1 and isinstance(n, int)))
    # torch cannot make more, even if one of the lengths is 0.
    if len(lengths) > MAX_AXES:
        raise ValueError(f"a tensor of {len(lengths)} axes (expected at most {MAX_AXES})")
    if math.prod(max(length, 1) for length in lengths) >= 1 << 62:
        raise ValueError("an impossible shape")
    return tuple(lengths)


def _extents(data: bytes, rank: int) -> Extents:
    """A slice (a `TensorSliceProto`): where it begins, and its length or -1, in each dimension."""
    raw = [value for number, value, _ in protobuf_fields(data) if number == 1 and isinstance(value, bytes)]
    if len(raw) != rank:
        raise ValueError(f"a slice of {len(raw)} dimensions in a tensor of {rank}")
    found = [
        {number: value for number, value, _ in protobuf_fields(extent) if isinstance(value, int)} for extent in raw
    ]
    return tuple((each.get(1, 0), each.get(2, -1)) for each in found)


def box_of(extents: Extents, shape: tuple[int, ...]) -> TensorBox:
    """The part of a tensor of this shape that a slice is."""
    sizes = tuple(whole if size == -1 else size for (_, size), whole in zip(extents, shape, strict=True))
    return TensorBox(tuple(offset for offset, _ in extents), sizes)


def slice_key(name: bytes, extents: Sequence[tuple[int, int]]) -> bytes:
    """The key under which a slice is stored, by where it begins and how long it is in each dimension; -1 is all of it.

    >>> slice_key(b"w", [(4, 4), (0, -1)]).hex()
    '0077000101028484807f'
    """
    key = [_unsigned(0), _text(name), _unsigned(len(extents))]
    key += [_signed(offset) + _signed(size) for offset, size in extents]
    return b"".join(key)


def _text(value: bytes) -> bytes:
    return b"".join(_ESCAPES.get(byte) or bytes([byte]) for byte in value) + b"\0\1"


def _unsigned(value: int) -> bytes:
    raw = value.to_bytes((value.bit_length() + 7) // 8, "big")
    return bytes([len(raw)]) + raw


def _signed(value: int) -> bytes:
    """The sign, how many bytes follow, and the number, in bits that sort as the numbers do."""
    if -64 <= value < 64:
        return bytes([(value & 0xFF) ^ 0x80])
    length = 1
    while not -(1 << (7 * length - 1)) <= value < 1 << (7 * length - 1):
        length += 1
    # As many leading ones as there are bytes; they flip the sign bits, of which there are always enough.
    head = ((1 << length) - 1) << (7 * length)
    return ((value & (1 << 8 * length) - 1) ^ head).to_bytes(length, "big")


def strings_checksum(data: bytes, count: int) -> int | None:
    """The CRC-32C that TensorFlow takes of a tensor of strings; None if the bytes are no such tensor.

    The bytes are the lengths as varints, a masked checksum over the lengths, and the texts. Checksums are taken over
    lengths of 4 bytes each (8 from 2**32 on) and not over the varints.
    """
    if count > len(data):
        return None
    position, lengths = 0, bytearray()
    total = 0
    for _ in range(count):
        length = shift = 0
        while True:
            if position >= len(data) or shift > 63:
                return None
            byte = data[position]
            position += 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        total += length
        lengths += length.to_bytes(4 if length < 1 << 32 else 8, "little") if length < 1 << 64 else b""
    crc = crc32c(np.frombuffer(bytes(lengths), np.uint8), 0)
    noted, texts = data[position : position + 4], data[position + 4 :]
    if noted != masked(crc).to_bytes(4, "little") or len(texts) != total:
        return None
    return crc32c(np.frombuffer(noted + texts, np.uint8), crc)


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
    table = SSTable(index)
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
    table: SSTable
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


class _EntryChecksum:
    """A tensor's checksum, in its entry of the index."""

    def __init__(self, table: SSTable, file: DataFile, stored: BundleEntry) -> None:
        self._table, self._file, self._stored = table, file, stored

    def update(self, addresses: npt.NDArray[np.int64], deltas: npt.NDArray[np.uint8]) -> None:
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


def _open(index: Path, table: SSTable) -> Checkpoint:
    shards, big_endian = read_header(index, table.entries)
    stored: dict[bytes, BundleEntry] = {}
    for entry in table.entries[1:]:
        if entry.key in stored:
            raise DamagedFile(index, f"names {entry.key[:80]!r} twice")
        stored[entry.key] = read_entry(index, entry)
    files = _Files(index.name.removesuffix(INDEX), shards, table)
    _check_places(index, files, stored.items())
    tensors, others, boxes = _sort(index, stored)

    def locate(name: str) -> TiledTensor:
        info, parts = tensors[name], boxes[name]

        def find(number: int) -> Region:
            box, entry = parts[number]
            file = files.data(entry.shard)
            seal = _EntryChecksum(table, file, entry) if entry.crc is not None else None
            return Region(file, entry.offset, box.sizes, info.dtype, None, big_endian, seal)

        return TiledTensor(name, info.shape, info.dtype, [box for box, _ in parts], find)

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
            return Check.of(_EntryChecksum(table, file, entry).holds())
        crc = unmasked(int.from_bytes(table.file.read(entry.crc, 4), "little"))
        return Check.of(strings_checksum(file.read(entry.offset, entry.size), math.prod(entry.shape)) == crc)

    return TiledCheckpoint(
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
    index: Path, stored: Mapping[bytes, BundleEntry]
) -> tuple[dict[str, TensorInfo], dict[str, str], dict[str, list[tuple[TensorBox, BundleEntry]]]]:
    """The tensors, everything else, and the parts of each tensor."""
    tensors: dict[str, TensorInfo] = {}
    others: dict[str, str] = {}
    boxes: dict[str, list[tuple[TensorBox, BundleEntry]]] = {}
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
        parts = [(TensorBox((0,) * len(entry.shape), entry.shape), entry)]
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


def _slices(
    index: Path, name: str, entry: BundleEntry, found: Sequence[BundleEntry | None]
) -> list[tuple[TensorBox, BundleEntry]]:
    """The slices of a tensor that hold something, each with its place in the whole."""
    boxes = [box_of(extents, entry.shape) for extents in entry.slices]
    parts = [
        (box, part) for box, part in zip(boxes, found, strict=True) if part is not None and part.shape == box.sizes
    ]
    if len(parts) < len(boxes):
        raise DamagedFile(index, f"{name}: a slice is missing, or has another shape")
    try:
        return [parts[number] for number in check_tiling(entry.shape, boxes)]
    except ValueError as error:
        raise DamagedFile(index, f"{name}: {error}") from None


def _role(name: str, dtype: DType, rank: int) -> Role:
    """By the name as its owner knows it: TensorFlow saves attributes of objects, each once, by the first way to it."""
    if "/.OPTIMIZER_SLOT/" in name:
        return Role.OPTIMIZER
    if _TRAINED.match(name):
        return Role.MODEL
    return role_of(name.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE"), is_float=dtype.is_float, rank=rank)


def _check_places(index: Path, files: _Files, entries: Iterable[tuple[bytes, BundleEntry]]) -> None:
    """Every tensor lies in its file, and no two in the same bytes."""
    sizes: dict[int, int] = {}
    places: list[tuple[int, int, int]] = []
    for key, entry in entries:
        if entry.slices:
            continue
        if entry.shard >= files.count:
            raise DamagedFile(index, f"{key[:80]!r} lies in data file {entry.shard} of {files.count}")
        if entry.shard not in sizes:
            sizes[entry.shard] = indexed_file_size(index, files.path(entry.shard))
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
