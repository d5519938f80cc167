"""Where a data set's bytes are, and how they are read and altered.

Contiguous data and unfiltered chunks lie at known offsets and are altered there. Compact data and filtered
chunks (gzip, fletcher32, …) go through the library: only the chunks that are touched are read and written.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from evergrad.errors import DamagedFile, LimitExceeded
from evergrad.formats.contract import Bits
from evergrad.formats.hdf5_chunks import Box, ChunkedRegion, boxes, chunk_box
from evergrad.formats.hdf5_file import CHUNK_CACHE_BYTES, Hdf5File, hdf5_errors, library
from evergrad.formats.hdf5_index import DEFLATE, FLETCHER32, SUM_BYTES, ChunkIndex, check_index
from evergrad.formats.hdf5_listing import Entry
from evergrad.formats.region import Region, check_seal
from evergrad.formats.rehearsal import rehearsing
from evergrad.records import Check

_BLOCK_BYTES = 1 << 24
_TRUSTED_BYTES = 1 << 20  # a deflated chunk of this size takes a gigabyte at the very worst


class DataSet:
    """One data set of an open file."""

    def __init__(self, file: Hdf5File, name: str, entry: Entry) -> None:
        self._file, self._name, self._entry = file, name, entry
        self._h5 = library(file.path)
        nbytes = math.prod(entry.shape) * entry.dtype.itemsize
        if nbytes > file.limit:
            raise LimitExceeded(file.path, f"{name}: absurd shape {entry.shape} in a file of {file.size} bytes")
        self._layout, self._filters, self._chunk = self._creation()
        self._chunk_bytes = math.prod(self._chunk) * entry.dtype.itemsize if self._chunk else 0
        if self._chunk_bytes > file.limit or any(n < 1 for n in self._chunk):
            raise LimitExceeded(file.path, f"{name}: absurd chunks {self._chunk} in a file of {file.size} bytes")
        if self._filters.count(DEFLATE) > 1:
            raise LimitExceeded(file.path, f"{name}: compressed {self._filters.count(DEFLATE)} times over")
        self._region: Region | None = None
        self._index: ChunkIndex | None = None  # once it was checked
        self._unproved: dict[tuple[int, ...], int] | None = None  # large compressed chunks, and their sizes

    def read(self, start: int, stop: int) -> Bits:
        """The bits of a range of elements in C order, with little more than their own bytes in memory."""
        dtype = self._entry.dtype
        if start == stop:
            return np.empty((0,) if dtype.parts == 1 else (0, dtype.parts), dtype.bits)
        region = self._locate()
        if region is not None and not isinstance(region, ChunkedRegion):
            return region.read(start, stop)
        with self._errors():
            raw = np.empty((stop - start) * dtype.itemsize, np.uint8)
        done = 0
        for box in boxes(self._entry.shape, start, stop):
            length = math.prod(box[1]) * dtype.itemsize
            self._through("read", box, raw[done : done + length])
            done += length
        return self._native(raw)

    def xor(self, indices: npt.NDArray[np.int64], patterns: Bits) -> Bits:
        """XOR patterns onto elements, in place where they have one, and return their old bits."""
        region = self._locate()
        noted = rehearsing()
        if noted is not None and noted.stale and self._filters == [FLETCHER32]:
            summed = self._chunks(SUM_BYTES)
            region = None if summed.missing(indices) else summed
        if isinstance(region, ChunkedRegion):
            missing = region.missing(indices)
            if missing:
                self._write_out(self._chunk_box(number) for number in missing)
                region = self._locate()
        elif region is None and self._layout == self._h5.h5d.CONTIGUOUS:
            step = max(1, _BLOCK_BYTES // self._entry.dtype.itemsize)
            total = math.prod(self._entry.shape)
            ranges = [(first, min(first + step, total)) for first in range(0, total, step)]
            self._write_out(box for a, b in ranges for box in boxes(self._entry.shape, a, b))
            region = self._locate()
        return self._xor_through(indices, patterns) if region is None else region.xor(indices, patterns)

    def at(self, indices: npt.NDArray[np.int64]) -> Bits:
        """The bits of single elements; of filtered data, the chunks that hold them are read."""
        region = self._locate()
        if region is not None and not (isinstance(region, ChunkedRegion) and region.missing(indices)):
            return region.at(indices)
        dtype = self._entry.dtype
        out: Bits = np.empty((len(indices),) if dtype.parts == 1 else (len(indices), dtype.parts), dtype.bits)
        for members, box, local in self._touched(indices):
            out[members] = self._box(box)[local]
        return out

    def check(self) -> Check:
        """Whether every filter with a checksum (fletcher32, and gzip's Adler-32) agrees; reads everything.

        These cover what is in the chunks: the chunk index is checked first, and what it leaves open is `doubt`.
        """
        if not self._filters:
            return check_seal(self._file.seal())
        self._file.let_go()  # a chunk in the cache has been checked already
        try:
            claimed = self._file.claim(self._entry.address, self._checked_index().starts.tolist())
            if claimed is not None:
                return Check.FAILED
            step = max(1, _BLOCK_BYTES // self._entry.dtype.itemsize)
            total = math.prod(self._entry.shape)
            for start in range(0, total, step):
                self.read(start, min(start + step, total))
        except DamagedFile:
            return Check.FAILED
        if self.doubt():
            return check_seal(self._file.seal())
        return Check.OK if {FLETCHER32, DEFLATE} & set(self._filters) else Check.UNKNOWN

    def doubt(self) -> str:
        """Return what of this data set its filters' checksums, which hold, do not vouch for; empty if nothing."""
        if not {FLETCHER32, DEFLATE} & set(self._filters):
            return ""
        what = self._checked_index().doubt
        return f"{what}; the checksums cannot tell that this is as it was written" if what else ""

    def _checked_index(self) -> ChunkIndex:
        """Return the chunk index of filtered data, or refuse it: the library would follow it wherever it leads."""
        if self._index is None:
            with self._errors():
                data = self._open()
                self._index = check_index(self._file, self._name, self._entry, self._chunk, self._filters, data)
        return self._index

    def _creation(self) -> tuple[int, list[int], tuple[int, ...]]:
        """How the data set was created: layout, filters, chunk."""
        if self._entry.offset is not None:
            return self._h5.h5d.CONTIGUOUS, [], ()
        with self._errors():
            creation = self._file.dataset(self._entry.where).get_create_plist()
            layout = creation.get_layout()
            filters = [creation.get_filter(i)[0] for i in range(creation.get_nfilters())]
            chunk = tuple(int(n) for n in creation.get_chunk()) if layout == self._h5.h5d.CHUNKED else ()
        self._file.let_go()  # to be opened again with a cache of the right size
        return layout, filters, chunk

    def _locate(self) -> Region | None:
        """The place in the file; None where there is none, or none yet."""
        if self._region is not None and self._region.source is self._file.data:
            return self._region
        file, entry = self._file, self._entry
        self._region = None
        if self._layout == self._h5.h5d.CONTIGUOUS:
            offset = entry.offset
            if offset is None:  # it may have been given a place since
                with self._errors():
                    offset = self._open().get_offset()
            if offset is not None and 0 not in entry.shape:
                where = file.base + int(offset)
                self._region = Region(file.data, where, entry.shape, entry.dtype, None, entry.big_endian, file.seal())
                self._check_end(where + self._region.nbytes)
        elif self._layout == self._h5.h5d.CHUNKED and not self._filters and self._offsets_are_right():
            self._region = self._chunks()
        if self._region is not None and not isinstance(self._region, ChunkedRegion):
            self._region.check(self._name)
        return self._region

    def _offsets_are_right(self) -> bool:
        """Before HDF5 2 some versions forgot the user block when they gave a chunk's offset."""
        with self._errors():
            return not self._file.root.userblock_size or self._h5.h5.get_libversion() >= (2, 0, 0)

    def _chunks(self, sum_bytes: int = 0) -> ChunkedRegion:
        """The chunks that are in the file; with `sum_bytes` those behind which a checksum of that size stands."""
        file, entry = self._file, self._entry
        found: dict[int, int] = {}
        grid = [-(-size // step) for size, step in zip(entry.shape, self._chunk, strict=True)]

        def take(info: Any) -> None:
            number, within = 0, info.size == self._chunk_bytes + sum_bytes
            for count, step, first in zip(grid, self._chunk, info.chunk_offset, strict=True):
                number, within = number * count + int(first) // step, within and int(first) // step < count
            if within:
                found[number] = int(info.byte_offset)

        if self._filters:
            self._checked_index()
        with self._errors():
            self._open().chunk_iter(take)
        if found:
            self._check_end(file.base + max(found.values()) + self._chunk_bytes)
        numbers = np.array(sorted(found), np.int64)
        offsets = np.array([found[int(n)] for n in numbers], np.int64) + file.base
        part = entry.dtype.layout.part_bytes
        aligned = not len(offsets) or not np.any(offsets % part)
        return ChunkedRegion(
            file.data,
            0 if aligned else 1,
            entry.shape,
            entry.dtype,
            None,
            entry.big_endian,
            file.seal(),
            self._chunk,
            numbers,
            offsets,
        )

    def _check_end(self, end: int) -> None:
        if end > self._file.base + self._file.size or end < 0:
            expected, found = f"at least {end - self._file.base} bytes", self._file.size
            raise DamagedFile(self._file.path, f"{self._name}: lies beyond the end", expected=expected, found=found)

    def _write_out(self, unwritten: Iterator[Box]) -> None:
        """Give a place to what was never written, by writing what it reads as."""
        self._file.writable_root()
        for box in unwritten:
            raw = np.empty(math.prod(box[1]) * self._entry.dtype.itemsize, np.uint8)
            self._through("read", box, raw)
            self._through("write", box, raw)
        self._file.refresh()
        self._region = self._index = None

    def _xor_through(self, indices: npt.NDArray[np.int64], patterns: Bits) -> Bits:
        """Read, alter and write each touched chunk (or all of a compact data set) through the library."""
        self._file.writable_root()
        old = np.empty_like(patterns)
        for members, box, local in self._touched(indices):
            bits = self._box(box)
            old[members] = bits[local]
            np.bitwise_xor.at(bits, local, patterns[members])
            stored = bits.byteswap() if self._entry.big_endian else bits
            self._through("write", box, stored.reshape(-1).view(np.uint8))
        self._file.refresh()  # chunks may have moved to beyond the old end
        self._index = None
        return old

    def _touched(
        self, indices: npt.NDArray[np.int64]
    ) -> Iterator[tuple[npt.NDArray[np.int64], Box, npt.NDArray[np.int64]]]:
        """Chunk by chunk: which of the elements lie in it, its box, and their places there. All at once if compact."""
        shape = self._entry.shape
        if not self._chunk:
            yield np.arange(len(indices)), ((0,) * len(shape), shape), indices
            return
        whole = ChunkedRegion(self._file.data, 0, shape, self._entry.dtype, chunk=self._chunk)
        numbers, inner = whole.chunks_of(indices)
        order = np.argsort(numbers, kind="stable")
        for members in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
            box = self._chunk_box(int(numbers[members[0]]))
            # From the place in the whole chunk to that in the part of it that is within the data set.
            places = np.unravel_index(inner[members], self._chunk)
            yield members, box, np.ravel_multi_index(places, box[1])

    def _box(self, box: Box) -> Bits:
        raw = np.empty(math.prod(box[1]) * self._entry.dtype.itemsize, np.uint8)
        self._through("read", box, raw)
        return self._native(raw)

    def _chunk_box(self, number: int) -> Box:
        return chunk_box(self._entry.shape, self._chunk, number)

    def _through(self, verb: str, box: Box, raw: npt.NDArray[np.uint8]) -> None:
        """Read or write one box through the library, in the file's own type, so that nothing is converted."""
        if self._filters:
            self._checked_index()
        with self._errors():
            data = self._open()
            if verb == "read" and DEFLATE in self._filters:
                self._refuse_bombs(data, box)
            space = data.get_space()
            if box[0]:
                space.select_hyperslab(*box)
                memory = self._h5.h5s.create_simple(box[1])  # of the same shape: much faster than a flat one
            else:
                memory = self._h5.h5s.create(self._h5.h5s.SCALAR)
            (data.read if verb == "read" else data.write)(memory, space, raw, data.get_type())

    def _refuse_bombs(self, data: Any, box: Box) -> None:
        """Inflate large chunks once in small pieces: the library would take all the memory a chunk asks for."""
        if self._unproved is None:
            found: dict[tuple[int, ...], int] = {}

            def take(info: Any) -> None:
                if info.size > _TRUSTED_BYTES:
                    found[info.chunk_offset] = info.size

            data.chunk_iter(take)
            self._unproved = found
        for corner, size in list(self._unproved.items()):
            spans = zip(corner, self._chunk, *box, strict=True)
            if all(first < at + length and at < first + step for first, step, at, length in spans):
                self._check_inflation(data, corner, size)
                del self._unproved[corner]

    def _check_inflation(self, data: Any, corner: tuple[int, ...], size: int) -> None:
        order = [kind for kind in self._filters if kind != FLETCHER32]
        if size > self._file.size or order[-1] != DEFLATE:
            raise LimitExceeded(self._file.path, f"{self._name}: chunk at {corner} may inflate to any size")
        stream, total = zlib.decompressobj(), 0
        rest = data.read_direct_chunk(corner)[1]
        try:
            while rest and not stream.eof:
                total += len(stream.decompress(rest, 1 << 22))
                rest = stream.unconsumed_tail
                if total > self._chunk_bytes + 4:  # fletcher32 may have been applied before
                    expected = f"at most {self._chunk_bytes} bytes"
                    raise LimitExceeded(self._file.path, f"{self._name}: chunk at {corner} inflates", expected=expected)
        except zlib.error:
            pass  # damaged, or not compressed after all: the library tells

    def _open(self) -> Any:
        # Unfiltered chunks are not cached: they are altered behind the library's back.
        cache = max(CHUNK_CACHE_BYTES, self._chunk_bytes) if self._filters else 0
        return self._file.dataset(self._entry.where, cache_bytes=cache)

    def _native(self, raw: npt.NDArray[np.uint8]) -> Bits:
        bits = raw.view(self._entry.dtype.bits)
        if self._entry.big_endian:
            bits.byteswap(inplace=True)
        return bits if self._entry.dtype.parts == 1 else bits.reshape(-1, self._entry.dtype.parts)

    def _errors(self) -> Any:
        return hdf5_errors(self._file.path, self._name)
