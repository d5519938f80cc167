"""What changes in the bytes of one file, as blocks of 64 bytes: images before and after, their digests, writing them.

Only the blocks that are touched are read, so that it all costs what the faults cost. A few more, spread evenly over
the file, are taken in to witness that it is still the same file: all of them where the file is small.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from evergrad.errors import FileAccessError
from evergrad.formats.region import file_errors
from evergrad.formats.rehearsal import Changes

__all__ = ["BLOCK", "Patch", "sha256"]

BLOCK = 64
WITNESSES = 64
WHOLE_BYTES = 1 << 22
"""A file of up to this size is digested whole."""

Integers = npt.NDArray[np.int64]
Octets = npt.NDArray[np.uint8]

_READ_BYTES = 1 << 22
_SHORT_RUNS = 4096
"""Up to so many blocks are written one by one; more through a map."""


@dataclass(slots=True)
class Patch:
    """The blocks of a file that changes touch, and their bytes."""

    path: Path
    size: int
    blocks: Integers
    images: Octets
    """One row a block, as it is in the file; the last block of the file is filled up with zeros."""
    touched: npt.NDArray[np.bool_]

    @classmethod
    def read(cls, path: Path, changes: Changes) -> Patch:
        """Read the blocks that these changes touch, and the witnesses."""
        with file_errors(path), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            touched = _touched(changes)
            blocks = np.union1d(touched, _witnesses(size)) if len(touched) else _witnesses(size)
            images = np.zeros((len(blocks), BLOCK), np.uint8)
            if size:
                with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as view:
                    data = np.frombuffer(view, np.uint8)
                    whole = size // BLOCK
                    inside = blocks < whole
                    images[inside] = data[: whole * BLOCK].reshape(-1, BLOCK)[blocks[inside]]
                    if not inside.all():
                        images[-1, : size - whole * BLOCK] = data[whole * BLOCK :]
                    del data
        return cls(path, size, blocks, images, np.isin(blocks, touched, assume_unique=True))

    def digest(self) -> str:
        """Over the blocks' numbers and bytes, and the file's size."""
        found = hashlib.blake2b(digest_size=16)
        found.update(f"{self.size} {BLOCK}".encode())
        found.update(self.blocks.astype("<i8").tobytes())
        found.update(self.images.data)
        return found.hexdigest()

    def rows(self, addresses: Integers, size: int) -> Octets:
        """The bytes from each address on."""
        return self.images.reshape(-1)[self._cells(addresses, size)]

    def bytes_at(self, offset: int, length: int) -> bytes:
        """A few bytes as they are by now."""
        return self.rows(np.array([offset]), length).tobytes()

    def put_rows(self, addresses: Integers, rows: Octets) -> None:
        """Put a row of bytes at each address; nothing is written yet."""
        self.images.reshape(-1)[self._cells(addresses, rows.shape[1])] = rows

    def put(self, offset: int, data: bytes) -> None:
        """Put a few bytes; nothing is written yet."""
        self.put_rows(np.array([offset]), np.frombuffer(data, np.uint8)[None, :])

    def write(self) -> None:
        """Write the touched blocks into the file, and make them durable."""
        with file_errors(self.path, "cannot be altered"):
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                now = os.fstat(fd)
                if now.st_size != self.size:
                    raise FileAccessError(self.path, f"has {now.st_size:,} bytes (expected {self.size:,}): it changed")
                blocks, images = self.blocks[self.touched], self.images[self.touched]
                sparse = now.st_blocks * 512 < now.st_size  # a map's page in a hole has no place on a full disk
                if len(blocks) <= _SHORT_RUNS or sparse:
                    for block, image in zip(blocks.tolist(), images, strict=True):
                        start = block * BLOCK
                        os.pwrite(fd, image[: self.size - start].data, start)
                else:
                    _write_mapped(fd, self.size, blocks, images)
                os.fsync(fd)
            finally:
                os.close(fd)

    def _cells(self, addresses: Integers, size: int) -> Integers:
        """Where in the images these bytes are."""
        where, inner = np.divmod(addresses, BLOCK)
        if size == 1 or int(inner.max(initial=0)) + size <= BLOCK:
            first: Integers = np.searchsorted(self.blocks, where) * BLOCK + inner
            return first[:, None] + np.arange(size)
        every = addresses[:, None] + np.arange(size)
        return np.searchsorted(self.blocks, every // BLOCK) * BLOCK + every % BLOCK


def sha256(path: Path, patch: Patch | None = None) -> str:
    """The digest of a whole file, as `sha256sum` has it; with a patch, as it will be once that is written."""
    found = hashlib.sha256()
    with file_errors(path), path.open("rb") as file:
        start = 0
        while piece := file.read(_READ_BYTES):
            if patch is not None:
                first, last = np.searchsorted(patch.blocks, [start // BLOCK, -(-(start + len(piece)) // BLOCK)])
                data = np.frombuffer(bytearray(piece + bytes(-len(piece) % BLOCK)), np.uint8).reshape(-1, BLOCK)
                data[patch.blocks[first:last] - start // BLOCK] = patch.images[first:last]
                found.update(data.reshape(-1)[: len(piece)].data)
            else:
                found.update(piece)
            start += len(piece)
    return found.hexdigest()


def _write_mapped(fd: int, size: int, blocks: Integers, images: Octets) -> None:
    with mmap.mmap(fd, size) as view:
        data = np.frombuffer(view, np.uint8)
        whole = size // BLOCK
        inside = blocks < whole
        data[: whole * BLOCK].reshape(-1, BLOCK)[blocks[inside]] = images[inside]
        if not inside.all():
            data[whole * BLOCK :] = images[-1, : size - whole * BLOCK]
        del data


def _touched(changes: Changes) -> Integers:
    pieces = []
    for addresses, rows in changes.rows:
        first, last = addresses // BLOCK, (addresses + (rows.shape[1] - 1)) // BLOCK
        pieces.append(first)
        if np.any(first != last):  # an element across the border of two blocks
            pieces.append(last)
    for offset, data in changes.puts.items():
        pieces.append(np.arange(offset // BLOCK, (offset + len(data) - 1) // BLOCK + 1))
    found = np.sort(np.concatenate(pieces)) if pieces else np.empty(0, np.int64)
    return found[np.diff(found, prepend=-1) > 0]


def _witnesses(size: int) -> Integers:
    """All blocks of a small file; of a large one the first, the last, and some between."""
    count = -(-size // BLOCK)
    if size <= WHOLE_BYTES:
        return np.arange(count)
    return np.arange(WITNESSES, dtype=np.int64) * (count - 1) // (WITNESSES - 1)
