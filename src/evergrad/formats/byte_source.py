"""Files as bytes at offsets: read exactly, altered in place, closed whatever happens.

`ByteSource` is what a tensor may lie in: a file, a part of one (`FileSlice` in `dcp.py`), a member of an archive.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from evergrad import _files
from evergrad._files import file_errors, open_regular
from evergrad.errors import DamagedFile, FileAccessError

# What an alteration would do to the bytes of files, found out without doing it.
#
# Within `record_dry_run()`, `Checkpoint.xor` changes nothing: every byte that it would change, tensors' and
# checksums', is
# noted. Whoever rehearsed can so write down what is going to happen, durably, before it happens.
#
# What has no place of its own in a file (compressed members, filtered HDF5 chunks) cannot be rehearsed:
# `NeedsRewrite` says so, and such a file has to be altered in a copy.


class NeedsRewrite(Exception):
    """What was to be altered has no place of its own in the file. Never leaves this package and `injection`."""


@dataclass(slots=True)
class FileEdits:
    """What would happen to one file."""

    xors: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]] = field(default_factory=list)
    """Elements: their addresses, and for each a row of bytes to XOR from there on."""
    writes: dict[int, bytes] = field(default_factory=dict)
    """Checksums that follow: offset → what would stand there."""


@dataclass(slots=True)
class DryRun:
    """What would happen to each file, in the order in which they were touched."""

    files: dict[Path, FileEdits] = field(default_factory=dict)
    stale: bool = False
    """Whether checksums are going to be left as they are: what only a checksum ties together then has a place."""

    def edits_of(self, path: Path) -> FileEdits:
        """The changes of one file."""
        return self.files.setdefault(path, FileEdits())


_CURRENT: ContextVar[DryRun | None] = ContextVar("evergrad-rehearsal", default=None)


@contextmanager
def record_dry_run(*, stale: bool = False) -> Iterator[DryRun]:
    """Checkpoints that are opened and altered in this block are not altered: what would happen is noted."""
    noted = DryRun(stale=stale)
    token = _CURRENT.set(noted)
    try:
        yield noted
    finally:
        _CURRENT.reset(token)


def current_dry_run() -> DryRun | None:
    """The rehearsal that is under way, if one is."""
    return _CURRENT.get()


Held = TypeVar("Held", bound="Closeable")


class ByteSource(Protocol):
    """Something with bytes at offsets: a file, or a decompressed member of one."""

    path: Path
    size: int
    in_place: bool
    """Whether these are bytes of a file at their own place, so that altering them can be rehearsed."""

    def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes, or `DamagedFile`."""

    def read_into(self, offset: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Fill the buffer from here on, or raise `DamagedFile`."""

    def view(self) -> npt.NDArray[np.uint8]:
        """All bytes, to look at; nothing is read before it is touched."""

    def read_current(self, offset: int, length: int) -> bytes:
        """A few bytes as they are, or, in a rehearsal, as they would be by now."""

    def xor(self, addresses: npt.NDArray[np.int64], rows: npt.NDArray[np.uint8], word: int) -> npt.NDArray[np.uint8]:
        """XOR a row of bytes onto each address and return what was there; durable after `close`.

        Rows consist of words of `word` bytes. An address may come twice: every row counts.
        """

    def put(self, offset: int, data: bytes) -> None:
        """Replace a few bytes; durable after `close`."""

    def check_writable(self) -> None:
        """Raise what altering would raise."""

    def close(self) -> None:
        """Make changes durable and let go; twice is fine."""


class DataFile:
    """One open file: exact reads, and a map for altering it in place. Not thread-safe."""

    in_place = True

    def __init__(self, path: Path) -> None:
        self.path = path
        with file_errors(path):
            self._fd = open_regular(path)
            self.size = os.fstat(self._fd).st_size
        self._closed = False
        self._view: npt.NDArray[np.uint8] | None = None
        self._writable: npt.NDArray[np.uint8] | None = None
        self._private: npt.NDArray[np.uint8] | None = None

    def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes, or `DamagedFile`."""
        if offset < 0 or length < 0 or offset + length > self.size:
            self._short(offset, length)
        buffer = np.empty(length, np.uint8)
        self.read_into(offset, buffer)
        return buffer.tobytes()

    def read_into(self, offset: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Fill the buffer from here on, or raise `DamagedFile`."""
        self._open()
        target = buffer.data
        while target:
            with file_errors(self.path):
                count = os.preadv(self._fd, [target], offset)
            if count == 0:
                self._short(offset, len(target))
            target, offset = target[count:], offset + count

    def view(self) -> npt.NDArray[np.uint8]:
        """All bytes, to look at, through a map."""
        if self._writable is not None:
            return self._writable
        if self._view is None:
            self._view = self._map(self._fd, mmap.ACCESS_READ)
        return self._view

    def private(self) -> npt.NDArray[np.uint8]:
        """All bytes through a map whose changes never reach the file; usable for as long as someone holds it."""
        if self._private is None:
            self._private = self._map(self._fd, mmap.ACCESS_COPY)
        return self._private

    def writable(self) -> npt.NDArray[np.uint8]:
        """All bytes, to alter, through a map; opened for writing only now."""
        if self._writable is None:
            self._open()
            with file_errors(self.path, "cannot be altered"):
                fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    if not os.path.samestat(os.fstat(fd), os.fstat(self._fd)):
                        raise FileAccessError(self.path, "was replaced since it was opened", hint="Open it again.")
                    self._writable = self._map(fd, mmap.ACCESS_WRITE)
                finally:
                    os.close(fd)
        return self._writable

    def read_current(self, offset: int, length: int) -> bytes:
        """A few bytes as they are, or, in a rehearsal, as they would be by now."""
        noted = current_dry_run()
        pending = noted.edits_of(self.path).writes.get(offset) if noted is not None else None
        return pending if pending is not None else self.read(offset, length)

    def xor(self, addresses: npt.NDArray[np.int64], rows: npt.NDArray[np.uint8], word: int) -> npt.NDArray[np.uint8]:
        """XOR a row of bytes onto each address and return what was there."""
        noted = current_dry_run()
        if noted is None:
            return xor_rows(self.writable(), addresses, rows, word)
        noted.edits_of(self.path).xors.append((addresses, rows))
        return gather(self.view(), addresses, rows.shape[1], word)

    def put(self, offset: int, data: bytes) -> None:
        """Replace a few bytes."""
        noted = current_dry_run()
        if noted is None:
            self.writable()[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        else:
            noted.edits_of(self.path).writes[offset] = data

    def check_writable(self) -> None:
        """Raise what altering would raise."""
        if current_dry_run() is None:
            self.writable()

    def replaced(self) -> bool:
        """Whether the path leads to another file by now."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except OSError:
            return True

    def close(self) -> None:
        """Make changes durable and let go; twice is fine."""
        if self._closed:
            return
        self._closed = True
        changed, self._writable, self._view, self._private = self._writable is not None, None, None, None
        try:
            if changed:
                with file_errors(self.path, "changes could not be made durable"):
                    _files.fsync(self._fd)
        finally:
            os.close(self._fd)

    def _map(self, fd: int, access: int) -> npt.NDArray[np.uint8]:
        self._open()
        # A map beyond the end of a file that shrank would end the process with SIGBUS.
        if os.fstat(fd).st_size < self.size:
            self._short(0, self.size)
        if self.size == 0:
            return np.empty(0, np.uint8)
        with file_errors(self.path, "cannot be mapped"):
            return np.frombuffer(mmap.mmap(fd, self.size, access=access), np.uint8)

    def _open(self) -> None:
        if self._closed:
            raise FileAccessError(self.path, "is closed")

    def _short(self, offset: int, length: int) -> None:
        found = max(0, min(self.size, os.fstat(self._fd).st_size) - offset)
        raise DamagedFile(self.path, f"truncated at byte {offset}", expected=f"{length} bytes", found=found)


class Closeable(Protocol):
    """Whatever has to be let go of in the end."""

    def close(self) -> None:
        """Make changes durable and let go; twice is fine."""


def close_all(holders: Iterable[Closeable]) -> None:
    """Close every one, and only then raise the first error."""
    first: Exception | None = None
    for holder in holders:
        try:
            holder.close()
        except Exception as error:
            first = first or error
    if first is not None:
        raise first


@contextmanager
def closed_on_error(holder: Held) -> Iterator[Held]:
    """Hand over something open: whoever gets it will close it, unless an error comes before that."""
    try:
        yield holder
    except BaseException:
        holder.close()
        raise


def indexed_file_size(index: Path, path: Path) -> int:
    """The size of a file that an index names, or a word on its absence."""
    if not path.is_file():
        hint = "Is the download complete?"
        raise FileAccessError(index, f"names file {path.name!r}, which is not there", hint=hint)
    with file_errors(path):
        return path.stat().st_size


def gather(
    source: npt.NDArray[np.uint8], addresses: npt.NDArray[np.int64], size: int, word: int
) -> npt.NDArray[np.uint8]:
    """The `size` bytes from each address on, one row each."""
    words, cells = _cells(source, addresses, size, word)
    return np.ascontiguousarray(words[cells]).view(np.uint8).reshape(-1, size)


def xor_rows(
    target: npt.NDArray[np.uint8], addresses: npt.NDArray[np.int64], rows: npt.NDArray[np.uint8], word: int
) -> npt.NDArray[np.uint8]:
    """XOR a row of bytes onto each address, every row even where an address comes twice; what was there before."""
    words, cells = _cells(target, addresses, rows.shape[1], word)
    old = words[cells]
    deltas = np.ascontiguousarray(rows).view(words.dtype)
    if _distinct(addresses):
        words[cells] = old ^ deltas
    else:
        np.bitwise_xor.at(words, cells, deltas)
    return np.ascontiguousarray(old).view(np.uint8).reshape(-1, rows.shape[1])


def _cells(
    source: npt.NDArray[np.uint8], addresses: npt.NDArray[np.int64], size: int, word: int
) -> tuple[npt.NDArray[np.unsignedinteger], npt.NDArray[np.int64]]:
    """The bytes as words, and the words of each address: single bytes where not all are aligned."""
    if word > 1 and np.any(addresses & (word - 1)):
        word = 1
    words = source[: len(source) // word * word].view(f"u{word}")
    return words, addresses[:, None] // word + np.arange(size // word)


def _distinct(addresses: npt.NDArray[np.int64]) -> bool:
    steps = np.diff(addresses)
    if np.all(steps > 0):
        return True
    return bool(np.all(np.diff(np.sort(addresses)) > 0))
