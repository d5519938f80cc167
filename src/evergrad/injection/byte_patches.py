"""What changes in the bytes of one file, as blocks of 64 bytes: images before and after, their digests, writing them.

Only the blocks that are touched are read, so that it all costs what the faults cost. A few more, spread evenly over
the file, are taken in to witness that it is still the same file: all of them where the file is small.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from evergrad import _files
from evergrad._files import file_errors, open_file, replacing
from evergrad.errors import DamagedFile, FileAccessError
from evergrad.formats.byte_source import FileEdits
from evergrad.injection.log import FileChange, SavedBytes
from evergrad.injection.rng import Integers

BLOCK = 64
WITNESSES = 64
WHOLE_BYTES = 1 << 22
"""A file of up to this size is digested whole."""

Octets = npt.NDArray[np.uint8]

_READ_BYTES = 1 << 22
_FEW = 1024
_DENSE_BYTES = 1 << 16
"""Blocks that are closer than this on average are written through a map, others, and a few, one by one.

A map is faster for each block, but the kernel writes all of a large page of which a byte was changed through it.
"""


@dataclass(slots=True)
class Patch:
    """The blocks of a file that changes touch, and their bytes."""

    path: Path
    size: int
    blocks: Integers
    images: Octets
    """One row a block, as it is in the file; the last block of the file is filled up with zeros."""
    touched: npt.NDArray[np.bool_]
    whole: bool = False
    """Whether the file is replaced in one step, and not written into: someone may read it, or hold a link to it."""

    @classmethod
    def read(cls, path: Path, changes: FileEdits) -> Patch:
        """Read the blocks that these changes touch, and the witnesses."""
        with file_errors(path), open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            touched = _touched(changes)
            if len(touched) and not (int(touched[0]) >= 0 and int(touched[-1]) * BLOCK < size):
                raise DamagedFile(path, "ends before what is to be altered", found=f"{size} bytes")
            blocks = distinct(np.sort(np.concatenate([touched, _witnesses(size)])))
            images = np.zeros((len(blocks), BLOCK), np.uint8)
            if size:
                with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as view:
                    data = np.frombuffer(view, np.uint8)
                    inside = int(np.searchsorted(blocks, size // BLOCK))
                    _rows(data).take(blocks[:inside], out=_rows(images.reshape(-1))[:inside])
                    if inside < len(blocks):  # the last block of the file is a short one
                        images[-1, : size % BLOCK] = data[size // BLOCK * BLOCK :]
                    del data
        mine = np.zeros(len(blocks), bool)
        mine[np.searchsorted(blocks, touched)] = True
        return cls(path, size, blocks, images, mine)

    def digest(self) -> str:
        """Over the blocks' numbers and bytes, and the file's size."""
        found = hashlib.sha256()
        found.update(f"{self.size} {BLOCK}".encode())
        found.update(self.blocks.astype("<i8").tobytes())
        found.update(self.images.data)
        return found.hexdigest()

    def rows(self, addresses: Integers, size: int) -> Octets:
        """The bytes from each address on."""
        words, cells = self._cells(addresses, size)
        return np.ascontiguousarray(words[cells]).view(np.uint8).reshape(-1, size)

    def bytes_at(self, offset: int, length: int) -> bytes:
        """A few bytes as they are by now."""
        return self.rows(np.array([offset]), length).tobytes()

    def put_rows(self, addresses: Integers, rows: Octets) -> None:
        """Put a row of bytes at each address; nothing is written yet."""
        words, cells = self._cells(addresses, rows.shape[1])
        words[cells] = np.ascontiguousarray(rows).view(words.dtype)

    def put(self, offset: int, data: bytes) -> None:
        """Put a few bytes; nothing is written yet."""
        self.put_rows(np.array([offset]), np.frombuffer(data, np.uint8)[None, :])

    def write(self) -> None:
        """Write the touched blocks into the file, or a new file that takes its place; durably."""
        if self.whole:
            self._replace()
            return
        with file_errors(self.path, "cannot be altered"):
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                now = os.fstat(fd)
                if now.st_size != self.size:
                    raise FileAccessError(self.path, f"has {now.st_size:,} bytes (expected {self.size:,}): it changed")
                blocks, images = self.blocks[self.touched], self.images[self.touched]
                sparse = now.st_blocks * 512 < now.st_size  # a map's page in a hole has no place on a full disk
                if sparse or len(blocks) <= _FEW or len(blocks) * _DENSE_BYTES < self.size:
                    for block, image in zip(blocks.tolist(), images, strict=True):
                        _write_all(fd, image[: self.size - block * BLOCK].data, block * BLOCK)
                else:
                    _write_mapped(fd, self.size, blocks, images)
                _files.fsync(fd)
            finally:
                os.close(fd)

    def _replace(self) -> None:
        with replacing(self.path) as temporary, file_errors(self.path, "cannot be replaced"):
            data = bytearray(self.path.read_bytes())
            if len(data) != self.size:
                raise FileAccessError(self.path, f"has {len(data):,} bytes (expected {self.size:,}): it changed")
            for block, image in zip(self.blocks[self.touched].tolist(), self.images[self.touched], strict=True):
                data[block * BLOCK : (block + 1) * BLOCK] = image[: self.size - block * BLOCK].tobytes()
            temporary.write_bytes(data)

    def _cells(self, addresses: Integers, size: int) -> tuple[npt.NDArray[np.unsignedinteger], Integers]:
        """The images as words, and which of them these bytes are: whole elements where all are aligned."""
        flat = self.images.reshape(-1)
        if size in (1, 2, 4, 8) and not np.any(addresses & (size - 1)):
            where = np.searchsorted(self.blocks, addresses // BLOCK) * (BLOCK // size)
            return flat.view(f"u{size}"), (where + addresses % BLOCK // size)[:, None]
        every = addresses[:, None] + np.arange(size)
        return flat, np.searchsorted(self.blocks, every // BLOCK) * BLOCK + every % BLOCK


def sha256(path: Path, patch: Patch | None = None) -> str:
    """The digest of a whole file, as `sha256sum` has it; with a patch, as it will be once that is written."""
    found = hashlib.sha256()
    with file_errors(path), open_file(path) as file:
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


def distinct(ascending: Integers) -> Integers:
    """Each of the sorted numbers once."""
    return ascending[np.diff(ascending, prepend=-1) > 0]


def _rows(data: Octets) -> npt.NDArray[np.void]:
    """All whole blocks, each as one item: much faster to gather and to scatter than rows of bytes."""
    return data[: len(data) // BLOCK * BLOCK].view(f"V{BLOCK}")


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while count := os.pwrite(fd, data, offset):
        data, offset = data[count:], offset + count
        if not data:
            return
    raise OSError(errno.EIO, "nothing more was written")


def _write_mapped(fd: int, size: int, blocks: Integers, images: Octets) -> None:
    with mmap.mmap(fd, size) as view:
        data = np.frombuffer(view, np.uint8)
        inside = int(np.searchsorted(blocks, size // BLOCK))
        _rows(data)[blocks[:inside]] = _rows(images.reshape(-1))[:inside]
        if inside < len(blocks):
            data[size // BLOCK * BLOCK :] = images[-1, : size % BLOCK]
        del data


def _touched(changes: FileEdits) -> Integers:
    pieces = []
    for addresses, rows in changes.xors:
        first, last = addresses // BLOCK, (addresses + (rows.shape[1] - 1)) // BLOCK
        pieces.append(first)
        if np.any(first != last):  # an element across the border of two blocks
            pieces.append(last)
    for offset, data in changes.writes.items():
        pieces.append(np.arange(offset // BLOCK, (offset + len(data) - 1) // BLOCK + 1))
    return distinct(np.sort(np.concatenate(pieces))) if pieces else np.empty(0, np.int64)


def _witnesses(size: int) -> Integers:
    """All blocks of a small file; of a large one the first, the last, and some between."""
    count = -(-size // BLOCK)
    if size <= WHOLE_BYTES:
        return np.arange(count)
    return np.arange(WITNESSES, dtype=np.int64) * (count - 1) // (WITNESSES - 1)


# Files that had to be rewritten: which bytes were there before, and how to bring them back.

_BYTES = 1 << 22
_GAP = 256  # ranges that are closer than this are kept as one


def diff_rewritten_file(old: Path, new: Path, name: str) -> FileChange | None:
    """What became of a file: the bytes that changed, as they were; None if it is the same."""
    images: list[SavedBytes] = []
    before, after = hashlib.sha256(), hashlib.sha256()
    size = size_after = 0
    with file_errors(old), old.open("rb") as first, new.open("rb") as second:
        while True:
            a, b = first.read(_BYTES), second.read(_BYTES)
            before.update(a)
            after.update(b)
            if a:
                images += _differences(a, b, size)
            size, size_after = size + len(a), size_after + len(b)
            if not a and not b:
                break
    if not images and size == size_after:
        return None
    digests = before.hexdigest(), after.hexdigest()
    return FileChange(
        name=name,
        size=size,
        before=digests[0],
        after=digests[1],
        rewritten=True,
        size_after=size_after,
        images=tuple(images),
        full_before=digests[0],
        full_after=digests[1],
    )


def restore_bytes(path: Path, change: FileChange) -> None:
    """Bring the bytes of a copy back to what they were; `DamagedFile` if that does not give the old file."""
    with file_errors(path, "cannot be written"), path.open("r+b") as file:
        file.truncate(change.size)
        for image in change.images:
            file.seek(image.offset)
            file.write(image.old)
    found = sha256(path)
    if found != change.before:
        raise DamagedFile(path, "cannot be brought back", expected=change.before, found=found)


def _differences(a: bytes, b: bytes, offset: int) -> list[SavedBytes]:
    """The ranges of `a` that `b` has not, with small gaps closed."""
    common = min(len(a), len(b))
    here = np.frombuffer(a, np.uint8, common) != np.frombuffer(b, np.uint8, common)
    places = np.flatnonzero(here)
    if len(a) > common:
        places = np.append(places, np.arange(common, len(a)))
    if not len(places):
        return []
    cuts = np.flatnonzero(np.diff(places) > _GAP)
    starts = places[np.append(0, cuts + 1)]
    stops = places[np.append(cuts, len(places) - 1)] + 1
    return [SavedBytes(offset + int(s), a[int(s) : int(e)]) for s, e in zip(starts, stops, strict=True)]
