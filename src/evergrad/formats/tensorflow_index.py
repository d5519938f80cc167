"""What the entries in the index of a TensorFlow checkpoint say: protocol buffers, and the keys of slices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evergrad.errors import DamagedFile
from evergrad.formats.castagnoli import crc32c, masked
from evergrad.formats.pieces import Box
from evergrad.formats.sstable import Block, Entry, fields
from evergrad.records import MAX_AXES

MAX_SHARDS = 1 << 17
_ESCAPES = {0x00: b"\0\xff", 0xFF: b"\xff\0"}

Extents = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor, or a slice of one, as its entry in the index describes it."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    crc: int | None  # where in the index its checksum is
    block: Block
    slices: tuple[Extents, ...]


def read_header(index: Path, entries: list[Entry]) -> tuple[int, bool]:
    """How many data files there are, and whether their numbers are big-endian."""
    if not entries or entries[0].key != b"":
        raise DamagedFile(index, "is a table, but no TensorFlow checkpoint: it has no header")
    shards, endianness = 0, 0
    try:
        for number, value, _ in fields(entries[0].value):
            if isinstance(value, int):
                shards = value if number == 1 else shards
                endianness = value if number == 2 else endianness
    except ValueError as error:
        raise DamagedFile(index, f"header is damaged: {error}") from None
    if not 0 < shards <= MAX_SHARDS or endianness > 1:
        raise DamagedFile(index, f"header tells {shards} data files and byte order {endianness}")
    return shards, endianness == 1


def read_entry(index: Path, entry: Entry) -> Stored:
    """What an entry says (a `BundleEntryProto`)."""
    numbers = {1: 0, 3: 0, 4: 0, 5: 0}
    shape: tuple[int, ...] = ()
    crc: int | None = None
    slices: list[bytes] = []
    try:
        for number, value, start in fields(entry.value):
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
    return Stored(numbers[1], shape, numbers[3], numbers[4], numbers[5], crc, entry.block, extents)


def _shape(data: bytes) -> tuple[int, ...]:
    lengths = []
    for number, value, _ in fields(data):
        if number == 3 and value:
            raise ValueError("a tensor of unknown rank")
        if number == 2 and isinstance(value, bytes):
            lengths.append(sum(n for what, n, _ in fields(value) if what == 1 and isinstance(n, int)))
    # torch cannot make more, even if one of the lengths is 0.
    if len(lengths) > MAX_AXES:
        raise ValueError(f"a tensor of {len(lengths)} axes (expected at most {MAX_AXES})")
    if math.prod(max(length, 1) for length in lengths) >= 1 << 62:
        raise ValueError("an impossible shape")
    return tuple(lengths)


def _extents(data: bytes, rank: int) -> Extents:
    """A slice (a `TensorSliceProto`): where it begins, and its length or -1, in each dimension."""
    raw = [value for number, value, _ in fields(data) if number == 1 and isinstance(value, bytes)]
    if len(raw) != rank:
        raise ValueError(f"a slice of {len(raw)} dimensions in a tensor of {rank}")
    found = [{number: value for number, value, _ in fields(extent) if isinstance(value, int)} for extent in raw]
    return tuple((each.get(1, 0), each.get(2, -1)) for each in found)


def box_of(extents: Extents, shape: tuple[int, ...]) -> Box:
    """The part of a tensor of this shape that a slice is."""
    sizes = tuple(whole if size == -1 else size for (_, size), whole in zip(extents, shape, strict=True))
    return Box(tuple(offset for offset, _ in extents), sizes)


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
