"""Where a tensor's bytes are, and the only code that reads and alters them.

A format's work is to find, for each tensor, a `Region`: a place in a `ByteSource`, with strides and byte order.
Reading and XOR then are the same for every format. A region may carry a `StoredChecksum`, a checksum of the container
that has to follow every change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from evergrad.dtypes import DType
from evergrad.errors import DamagedFile, LimitExceeded
from evergrad.formats.byte_source import ByteSource, DataFile, NeedsRewrite, current_dry_run, gather
from evergrad.records import Check
from evergrad.state.sharing import byte_extent, contiguous_strides, is_contiguous

_GATHER = 1 << 18  # elements of a strided tensor gathered at a time


class StoredChecksum(Protocol):
    """A container's checksum over some of its bytes."""

    def update(self, addresses: npt.NDArray[np.int64], deltas: npt.NDArray[np.uint8]) -> None:
        """`deltas[i]` has been XORed onto the bytes from `addresses[i]` on: put the checksum right."""

    def holds(self) -> bool:
        """Whether the bytes still have this checksum; reads all of them."""


def check_stored_checksum(seal: StoredChecksum | None) -> Check:
    """Whether a checksum holds; `unknown` where there is none."""
    return Check.UNKNOWN if seal is None else Check.of(seal.holds())


@dataclass(frozen=True, slots=True)
class Region:
    """A tensor's place: `offset` bytes into `source`, strides in elements (None: contiguous)."""

    source: ByteSource
    offset: int
    shape: tuple[int, ...]
    dtype: DType
    stride: tuple[int, ...] | None = None
    big_endian: bool = False
    stored_checksum: StoredChecksum | None = None

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
        if self.stride is None:
            return self.offset, self.offset + self.nbytes
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

    def pages(self) -> npt.NDArray[np.uint8] | None:
        """The bytes from the first element to the last in a private map of the file; None if they are no such thing."""
        start, stop = self.extent
        if not isinstance(self.source, DataFile) or self.big_endian or start % self.dtype.itemsize:
            return None
        return self.source.private()[start:stop]

    def xor(
        self, indices: npt.NDArray[np.int64], patterns: npt.NDArray[np.unsignedinteger]
    ) -> npt.NDArray[np.unsignedinteger]:
        """XOR patterns onto elements in place and return their old bits; costs what the indices cost."""
        if not self.source.in_place and current_dry_run() is not None:
            raise NeedsRewrite
        size, part = self.dtype.itemsize, self.dtype.layout.part_bytes
        rows = np.ascontiguousarray(patterns, self._stored_bits).view(np.uint8).reshape(-1, size)
        addresses = self.addresses(indices)
        old = self.source.xor(addresses, rows, part)
        if self.stored_checksum is not None:
            self.stored_checksum.update(addresses, rows)
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
