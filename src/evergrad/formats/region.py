"""Where a tensor's bytes are, and the only code that reads and alters them.

A format's work is to find, for each tensor, a `Region`: a place in a `Bytes`, with strides and byte order.
Reading and XOR then are the same for every format. A region may carry a `Seal`, a checksum of the container
that has to follow every change.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from evergrad.dtypes import DType
from evergrad.errors import DamagedFile, FileAccessError, LimitExceeded
from evergrad.formats.rehearsal import NeedsRewrite, rehearsing
from evergrad.state.sharing import byte_extent, contiguous_strides, is_contiguous

__all__ = [
    "Bytes",
    "Closes",
    "DataFile",
    "Region",
    "Seal",
    "closed_on_error",
    "file_errors",
    "gather",
    "named_size",
    "xor_rows",
]

Held = TypeVar("Held", bound="Closes")

_GATHER = 1 << 18  # elements of a strided tensor gathered at a time


class Bytes(Protocol):
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

    def now(self, offset: int, length: int) -> bytes:
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


class Seal(Protocol):
    """A container's checksum over some of its bytes."""

    def follow(self, addresses: npt.NDArray[np.int64], deltas: npt.NDArray[np.uint8]) -> None:
        """`deltas[i]` has been XORed onto the bytes from `addresses[i]` on: put the checksum right."""

    def holds(self) -> bool:
        """Whether the bytes still have this checksum; reads all of them."""


class DataFile:
    """One open file: exact reads, and a map for altering it in place. Not thread-safe."""

    in_place = True

    def __init__(self, path: Path) -> None:
        self.path = path
        with file_errors(path):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.size = os.fstat(self._fd).st_size
        self._closed = False
        self._view: npt.NDArray[np.uint8] | None = None
        self._writable: npt.NDArray[np.uint8] | None = None

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

    def now(self, offset: int, length: int) -> bytes:
        """A few bytes as they are, or, in a rehearsal, as they would be by now."""
        noted = rehearsing()
        pending = noted.of(self.path).puts.get(offset) if noted is not None else None
        return pending if pending is not None else self.read(offset, length)

    def xor(self, addresses: npt.NDArray[np.int64], rows: npt.NDArray[np.uint8], word: int) -> npt.NDArray[np.uint8]:
        """XOR a row of bytes onto each address and return what was there."""
        noted = rehearsing()
        if noted is None:
            return xor_rows(self.writable(), addresses, rows, word)
        noted.of(self.path).rows.append((addresses, rows))
        return gather(self.view(), addresses, rows.shape[1], word)

    def put(self, offset: int, data: bytes) -> None:
        """Replace a few bytes."""
        noted = rehearsing()
        if noted is None:
            self.writable()[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        else:
            noted.of(self.path).puts[offset] = data

    def check_writable(self) -> None:
        """Raise what altering would raise."""
        if rehearsing() is None:
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
        changed, self._writable, self._view = self._writable is not None, None, None
        try:
            if changed:
                with file_errors(self.path, "changes could not be made durable"):
                    os.fsync(self._fd)
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


@dataclass(frozen=True, slots=True)
class Region:
    """A tensor's place: `offset` bytes into `source`, strides in elements (None: contiguous)."""

    source: Bytes
    offset: int
    shape: tuple[int, ...]
    dtype: DType
    stride: tuple[int, ...] | None = None
    big_endian: bool = False
    seal: Seal | None = None

    def check(self, name: str) -> None:
        """Raise `DamagedFile` or `LimitExceeded` unless the tensor lies within its source."""
        path, stride = self.source.path, self._stride
        if len(stride) != len(self.shape) or any(n < 0 for n in (*self.shape, *stride, self.offset)):
            raise DamagedFile(path, f"{name}: impossible shape {self.shape}, strides {stride}, offset {self.offset}")
        end = self.offset + byte_extent(self.shape, stride, self.dtype.itemsize)
        if end > self.source.size:
            found = f"{self.source.size}"
            raise DamagedFile(path, f"{name}: lies beyond the end", expected=f"at least {end} bytes", found=found)
        # Expanded tensors are larger than their bytes; a few bytes must not claim a petabyte.
        if self.nbytes > max(64 * self.source.size, 1 << 28):
            raise LimitExceeded(path, f"{name}: absurd shape {self.shape} over {self.source.size} bytes")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, also of those that share memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether the elements follow each other in C order."""
        return self.stride is None or is_contiguous(self.shape, self.stride)

    @property
    def extent(self) -> tuple[int, int]:
        """First byte, and the byte after the last."""
        return self.offset, self.offset + byte_extent(self.shape, self._stride, self.dtype.itemsize)

    def read(self, start: int, stop: int) -> npt.NDArray[np.unsignedinteger]:
        """The bits of the elements from `start` to `stop` in C order; complex ones as rows of two."""
        dtype = self.dtype
        if self.contiguous:
            raw = np.empty((stop - start) * dtype.itemsize, np.uint8)
            self.source.read_into(self.offset + start * dtype.itemsize, raw)
        else:
            raw = np.empty((stop - start, dtype.itemsize), np.uint8)
            view = self.source.view()
            lanes = np.arange(dtype.itemsize)
            for first in range(start, stop, _GATHER):
                last = min(first + _GATHER, stop)
                addresses = self.addresses(np.arange(first, last))
                raw[first - start : last - start] = view[addresses[:, None] + lanes]
        bits = raw.reshape(-1).view(dtype.bits)
        if self.big_endian:
            bits.byteswap(inplace=True)
        return bits if dtype.parts == 1 else bits.reshape(-1, dtype.parts)

    def xor(
        self, indices: npt.NDArray[np.int64], patterns: npt.NDArray[np.unsignedinteger]
    ) -> npt.NDArray[np.unsignedinteger]:
        """XOR patterns onto elements in place and return their old bits; costs what the indices cost."""
        if not self.source.in_place and rehearsing() is not None:
            raise NeedsRewrite
        size, part = self.dtype.itemsize, self.dtype.layout.part_bytes
        rows = np.ascontiguousarray(patterns, self._stored_bits).view(np.uint8).reshape(-1, size)
        addresses = self.addresses(indices)
        old = self.source.xor(addresses, rows, part)
        if self.seal is not None:
            self.seal.follow(addresses, rows)
        return self._bits(old)

    def at(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.unsignedinteger]:
        """The bits of single elements."""
        size, part = self.dtype.itemsize, self.dtype.layout.part_bytes
        return self._bits(gather(self.source.view(), self.addresses(indices), size, part))

    def addresses(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Byte offsets in the source of elements given by their index in C order."""
        if self.contiguous:
            return self.offset + indices * self.dtype.itemsize
        out = np.full(len(indices), 0, np.int64)
        for size, step in zip(reversed(self.shape), reversed(self._stride), strict=True):
            indices, place = np.divmod(indices, size)
            out += place * step
        return self.offset + out * self.dtype.itemsize

    def _bits(self, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.unsignedinteger]:
        bits: npt.NDArray[np.unsignedinteger] = rows.view(self._stored_bits).astype(self.dtype.bits)
        return bits.reshape(-1) if self.dtype.parts == 1 else bits

    @property
    def _stride(self) -> Sequence[int]:
        return contiguous_strides(self.shape) if self.stride is None else self.stride

    @property
    def _stored_bits(self) -> np.dtype[np.unsignedinteger]:
        return self.dtype.bits.newbyteorder(">" if self.big_endian else "<")


class Closes(Protocol):
    """Whatever has to be let go of in the end."""

    def close(self) -> None:
        """Make changes durable and let go; twice is fine."""


def named_size(index: Path, path: Path) -> int:
    """The size of a file that an index names, or a word on its absence."""
    if not path.is_file():
        hint = "Is the download complete?"
        raise FileAccessError(index, f"names file {path.name!r}, which is not there", hint=hint)
    with file_errors(path):
        return path.stat().st_size


@contextmanager
def closed_on_error(holder: Held) -> Iterator[Held]:
    """Hand over something open: whoever gets it will close it, unless an error comes before that."""
    try:
        yield holder
    except BaseException:
        holder.close()
        raise


@contextmanager
def file_errors(path: Path, what: str = "cannot be read") -> Iterator[None]:
    """Turn what the file system refuses into one clear line."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise FileAccessError(path, f"{what}: {reason}") from error


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
