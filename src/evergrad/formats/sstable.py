"""LevelDB's sorted tables, as TensorFlow keeps the index of a checkpoint: where each value lies, under which checksum.

A table is a row of blocks, each followed by its kind (one byte) and a masked CRC-32C over both. Keys in a block share
prefixes with the key before. The last block is an index of the others, and the footer of 48 bytes says where it is.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evergrad.errors import DamagedFile, LimitExceeded, UnsupportedContent
from evergrad.formats.castagnoli import crc32c, masked, unmasked
from evergrad.formats.crc import CRC32C
from evergrad.formats.data_file import DataFile
from evergrad.records import Check

MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
FOOTER_BYTES = 48
MAX_TABLE_BYTES = 1 << 28  # about three million tensors
MAX_KEY_BYTES = 1 << 14
_TRAILER = 5
_COMPRESSIONS = {1: "snappy", 2: "zstd"}


@dataclass(frozen=True, slots=True)
class Block:
    """A block's place in the file, without its trailer."""

    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A key, its value, and where the value lies in the file."""

    key: bytes
    value: bytes
    start: int
    block: Block


class Table:
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

    def alter(self, block: Block, start: int, value: bytes) -> None:
        """Put bytes into a block; a checksum that did not hold before will not hold after."""
        before = np.frombuffer(self.file.now(start, len(value)), np.uint8)
        delta = np.frombuffer(value, np.uint8) ^ before
        self.file.put(start, value)
        place = block.start + block.size + 1
        stored = int.from_bytes(self.file.now(place, 4), "little")
        change = CRC32C.change(np.array([start - block.start], np.int64), delta[None, :], block.size + 1)
        self.file.put(place, struct.pack("<L", masked(unmasked(stored) ^ change)))

    def check(self, block: Block) -> Check:
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


def fields(data: bytes) -> Iterator[tuple[int, int | bytes, int]]:
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


def _read(path: Path, data: bytes) -> tuple[list[Block], list[Entry]]:
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
        entries: list[Entry] = []
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


def _handle(path: Path, data: bytes, position: int, end: int, size: int | None = None) -> tuple[Block, int]:
    """The place of a block, which lies before the footer."""
    start, position = varint(data, position, end)
    length, position = varint(data, position, end)
    limit = (len(data) if size is None else size) - FOOTER_BYTES
    if start + length + _TRAILER > limit:
        expected = f"an end before {limit}"
        raise DamagedFile(path, "an index block lies outside", expected=expected, found=start + length + _TRAILER)
    return Block(start, length), position


def _block(path: Path, data: bytes, block: Block) -> Iterator[Entry]:
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
        yield Entry(key, data[start:position], start, block)
