"""Where a data set's bytes are, and how they are read and altered.

Contiguous data and unfiltered chunks lie at known offsets and are altered there. Compact data and filtered
chunks (gzip, fletcher32, …) go through the library: only the chunks that are touched are read and written.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from evergrad.errors import DamagedFile, LimitExceeded
from evergrad.formats.byte_source import current_dry_run
from evergrad.formats.checkpoint import Bits
from evergrad.formats.hdf5.file import CHUNK_CACHE_BYTES, DataSetEntry, Hdf5File, hdf5_errors, import_h5py
from evergrad.formats.region import Region, check_stored_checksum
from evergrad.records import Check

# Elements of a data set, counted in C order: the chunk that holds each, and the boxes that make up a range.

Hyperslab = tuple[tuple[int, ...], tuple[int, ...]]
"""First element and length along each axis."""


@dataclass(frozen=True, slots=True)
class ChunkedRegion(Region):
    """Unfiltered chunks, each at its own offset; `offset` only says whether all of them are aligned."""

    chunk: tuple[int, ...] = ()
    numbers: npt.NDArray[np.int64] | None = None  # of the chunks that are in the file, ascending
    offsets: npt.NDArray[np.int64] | None = None

    def chunks_of(self, indices: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """For each element, the number of its chunk and its index within the chunk."""
        number = np.zeros(len(indices), np.int64)
        inner = np.zeros(len(indices), np.int64)
        across = within = 1
        for size, step in zip(reversed(self.shape), reversed(self.chunk), strict=True):
            indices, place = np.divmod(indices, size)
            chunk, rest = np.divmod(place, step)
            number += chunk * across
            inner += rest * within
            across, within = across * -(-size // step), within * step
        return number, inner

    def missing(self, indices: npt.NDArray[np.int64]) -> list[int]:
        """The chunks of these elements that are not in the file yet."""
        assert self.numbers is not None
        wanted = np.unique(self.chunks_of(indices)[0])
        return [int(n) for n in wanted[~np.isin(wanted, self.numbers)]]

    def addresses(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Byte offsets in the source of elements given by their index in C order."""
        assert self.numbers is not None
        assert self.offsets is not None
        number, inner = self.chunks_of(indices)
        return self.offsets[np.searchsorted(self.numbers, number)] + inner * self.dtype.itemsize


def chunk_box(shape: Sequence[int], chunk: Sequence[int], number: int) -> Hyperslab:
    """The part of a chunk that is within the data set; chunks are numbered in C order."""
    first: list[int] = []
    for size, step in zip(reversed(shape), reversed(chunk), strict=True):
        number, place = divmod(number, -(-size // step))
        first.insert(0, place * step)
    sizes = zip(chunk, shape, first, strict=True)
    return tuple(first), tuple(min(step, size - start) for step, size, start in sizes)


def hyperslabs(shape: Sequence[int], start: int, stop: int) -> Iterator[Hyperslab]:
    """The boxes that make up a range of elements, in C order; at most two an axis and one."""
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        for corner, lengths in hyperslabs(shape[1:], start - last * row, stop - last * row):
            yield (last, *corner), (1, *lengths)
        return
    if start < first * row:
        for corner, lengths in hyperslabs(shape[1:], start - (first - 1) * row, row):
            yield (first - 1, *corner), (1, *lengths)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * row < stop:
        for corner, lengths in hyperslabs(shape[1:], 0, stop - last * row):
            yield (last, *corner), (1, *lengths)


# The chunk index of a data set, checked before the library follows it.
#
# Checksums of filters cover what is in a chunk, and not where it lies. The index of old-style files (a version 1
# B-tree, what h5py writes unless told otherwise) has no checksum, and the library believes it: a wrong entry gives
# other data, or ends the process. It is read here from the bytes, and each number is held against the file's size.
# The other kinds of index have checksums of their own, which the library checks; their chunks are taken from the
# library.

DEFLATE, SHUFFLE, FLETCHER32 = 1, 2, 3
SUM_BYTES = 4
_LAYOUT, _CONTINUATION = 0x08, 0x10
_MAX_BLOCKS = 65536
_MAX_LEVEL = 32
_UNFILTERED_EDGES = 1
_Scaled = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChunkIndex:
    """The chunks of a data set, all of them possible; `doubt` says what no checksum vouches for."""

    starts: npt.NDArray[np.uint64]
    stops: npt.NDArray[np.uint64]
    doubt: str


def check_index(
    file: Hdf5File, name: str, entry: DataSetEntry, chunk: tuple[int, ...], filters: list[int], data: Any
) -> ChunkIndex:
    """Return the chunks of a data set, or raise `DamagedFile` where one of them cannot be as the index says."""
    return _ChunkIndexCheck(file, name, entry, chunk, filters).run(data)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """The entries of an index: corner (in elements), place, stored size and filter mask of each chunk."""

    corners: npt.NDArray[np.uint64]
    starts: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.uint64]
    masks: npt.NDArray[np.uint64]


class _ChunkIndexCheck:
    def __init__(
        self, file: Hdf5File, name: str, entry: DataSetEntry, chunk: tuple[int, ...], filters: list[int]
    ) -> None:
        self._file, self._name, self._entry, self._filters = file, name, entry, filters
        self._chunk = chunk
        self._grid = tuple(-(-size // step) for size, step in zip(entry.shape, chunk, strict=True))
        self._chunk_bytes = math.prod(chunk) * entry.dtype.itemsize
        creation = file.root.id.get_create_plist()
        self._address_bytes, self._length_bytes = creation.get_sizes()
        self._user_block = int(creation.get_userblock())
        self._end = file.size - self._user_block
        self._nodes: set[int] = set()
        self._found: list[npt.NDArray[Any]] = []

    def run(self, data: Any) -> ChunkIndex:
        """Find the index, and check each of its chunks."""
        layout = self._layout()
        edges = False  # whether the chunks at the edge are stored as they are
        if layout is not None and layout[0] < 4:
            chunks = self._of_tree(int.from_bytes(self._address_in(layout), "little"))
            end = self._end
        else:
            edges = layout is not None and bool(layout[2] & _UNFILTERED_EDGES)
            chunks = self._of_library(data)
            end = self._file.size
        partial = np.zeros(len(chunks.starts), bool)
        if edges:
            sizes = np.array(self._entry.shape, np.uint64)
            partial = np.any(chunks.corners + np.array(self._chunk, np.uint64) > sizes, axis=1)
        self._check_corners(chunks)
        self._check_places(chunks, end)
        doubts = [self._check_masks(chunks, partial)]
        missing = math.prod(self._grid) - len(chunks.starts)
        if missing:
            doubts.append(f"{missing} of {math.prod(self._grid)} chunks are not in the file")
        if layout is None:
            doubts.append("the kind of its chunk index is not known")
        return ChunkIndex(chunks.starts, chunks.starts + chunks.sizes, "; ".join(filter(None, doubts)))

    # The object header, as far as the message that says where the index is

    def _layout(self) -> bytes | None:
        return next((body for kind, body in self._messages() if kind == _LAYOUT and len(body) > 2), None)

    def _address_in(self, layout: bytes) -> bytes:
        """Return the address of the index: behind version, class and rank, or in the first versions behind 8 bytes."""
        at = 3 if layout[0] == 3 else 8
        return layout[at : at + self._address_bytes]

    def _messages(self) -> Iterator[tuple[int, bytes]]:
        address = self._entry.address
        head = self._read(address, 16, "the header")
        new = head[:4] == b"OHDR"
        order = 2 if new and head[5] & 4 else 0
        if new:
            at = 6 + (16 if head[5] & 0x20 else 0) + (4 if head[5] & 0x10 else 0)
            width = 1 << (head[5] & 3)
            first = address + at + width
            length = int.from_bytes(self._read(address + at, width, "the header"), "little")
        else:
            first, length = address + 16, int.from_bytes(head[8:12], "little")
        blocks, taken = [(first, length)], 0
        while taken < len(blocks) and len(blocks) < _MAX_BLOCKS:
            block = self._read(*blocks[taken], "the header")
            taken, at = taken + 1, 0
            while at + (4 if new else 8) <= len(block):
                kind, size = struct.unpack_from("<BH" if new else "<HH", block, at)
                at += 4 + order if new else 8
                body = block[at : at + size]
                at += size
                yield kind, body
                if kind == _CONTINUATION and len(body) >= self._address_bytes + self._length_bytes:
                    place = int.from_bytes(body[: self._address_bytes], "little")
                    length = int.from_bytes(body[self._address_bytes :][: self._length_bytes], "little")
                    blocks.append((place + 4, length - 8) if new else (place, length))

    # The version 1 B-tree

    def _of_tree(self, root: int) -> _Chunks:
        rank = len(self._chunk)
        if root != (1 << 8 * self._address_bytes) - 1:  # else nothing was ever written
            self._node(root, None, (), None)
        none = np.empty(0, self._entry_type())
        found = np.concatenate(self._found) if self._found else none
        wide = {part: found[part].astype(np.uint64) for part in ("child", "size", "mask")}
        return _Chunks(found["at"].reshape(-1, rank + 1)[:, :rank], wide["child"], wide["size"], wide["mask"])

    def _entry_type(self) -> np.dtype[Any]:
        at = ("at", "<u8", (len(self._chunk) + 1,))
        return np.dtype([("size", "<u4"), ("mask", "<u4"), at, ("child", f"<u{self._address_bytes}")])

    def _node(self, address: int, level: int | None, least: _Scaled, bound: _Scaled | None) -> None:
        """Take the chunks of a node and of those below it: in order, not before `least`, and before `bound`."""
        what = f"the chunk index at byte {self._user_block + address}"
        head = self._read(address, 8 + 2 * self._address_bytes, what)
        count = int.from_bytes(head[6:8], "little")
        is_node = head[:5] == b"TREE\x01" and address not in self._nodes
        if not is_node or (head[5] > _MAX_LEVEL if level is None else head[5] != level or not count):
            below = "a node" if level is None else f"a node of level {level} with entries"
            found = "one that is in use already" if address in self._nodes else head[:8].hex(" ")
            self._refuse(what, f"{below} of a version 1 B-tree", found)
        self._nodes.add(address)
        kind = self._entry_type()
        key_bytes = kind.itemsize - self._address_bytes
        raw = self._read(address + len(head), count * kind.itemsize + key_bytes, what)
        entries = np.frombuffer(raw, kind, count)
        if not count:
            return
        last = self._scaled(np.frombuffer(raw, "<u8", len(self._chunk) + 1, len(raw) - key_bytes + 8))
        if not head[5]:
            self._leaf(what, entries, least, last if bound is None else min(bound, last))
            return
        keys = [*(self._scaled(at) for at in entries["at"]), last]
        for i, child in enumerate(entries["child"].tolist()):
            until = keys[i + 1] if bound is None else min(bound, keys[i + 1])
            self._node(child, head[5] - 1, max(least, keys[i]), until)

    def _leaf(self, what: str, entries: npt.NDArray[Any], least: _Scaled, bound: _Scaled) -> None:
        steps = np.array((*self._chunk, self._entry.dtype.itemsize), np.uint64)
        wrong = np.flatnonzero(np.any(entries["at"] % steps != 0, axis=1) | (entries["at"][:, -1] != 0))
        if len(wrong):
            *found, byte = entries["at"][wrong[0]].tolist()
            expected = f"chunks at multiples of {self._chunk}, byte 0"
            self._refuse(what, expected, f"one at {tuple(found)}, byte {byte}")
        scaled = [self._scaled(at) for at in (entries["at"][0], entries["at"][-1])]
        self._check_inside(entries["at"][:, :-1], what)
        # The library searches by halves: what is out of order, or not before the end, is never found.
        numbers = self._numbers(entries["at"][:, :-1])
        corners = entries["at"][:, :-1].tolist()
        for i in np.flatnonzero(numbers[1:] <= numbers[:-1])[:1]:
            self._refuse(
                what, "chunks in ascending order", f"one at {tuple(corners[i + 1])} behind {tuple(corners[i])}"
            )
        for i in ([0] if scaled[0] < least else []) + ([-1] if scaled[1] >= bound else []):
            self._refuse(what, "chunks within the bounds of their node", f"one at {tuple(corners[i])}")
        self._found.append(entries)

    def _scaled(self, at: npt.NDArray[np.uint64]) -> _Scaled:
        """Return a key as the library compares it: counted in chunks."""
        steps = (*self._chunk, self._entry.dtype.itemsize)
        return tuple(int(n) // step for n, step in zip(at.tolist(), steps, strict=True))

    # Every kind of index

    def _of_library(self, data: Any) -> _Chunks:
        found: list[tuple[int, ...]] = []

        def take(info: Any) -> None:
            found.append((*info.chunk_offset, info.byte_offset or 0, info.size, info.filter_mask))

        data.chunk_iter(take)
        rank = len(self._chunk)
        table = np.array(found, np.uint64).reshape(-1, rank + 3)
        return _Chunks(table[:, :rank], table[:, rank], table[:, rank + 1], table[:, rank + 2])

    def _check_corners(self, chunks: _Chunks) -> None:
        self._check_inside(chunks.corners, "the chunk index")
        numbers = np.sort(self._numbers(chunks.corners))
        twice = np.flatnonzero(numbers[1:] == numbers[:-1])
        if len(twice):
            number = tuple(int(n) for n in np.unravel_index(int(numbers[twice[0]]), self._grid))
            corner = tuple(n * step for n, step in zip(number, self._chunk, strict=True))
            self._refuse("the chunk index", "each chunk once", f"two at {corner}")

    def _check_inside(self, corners: npt.NDArray[np.uint64], what: str) -> None:
        outside = np.flatnonzero(np.any(corners >= np.array(self._entry.shape, np.uint64), axis=1))
        if len(outside):
            found = tuple(corners[outside[0]].tolist())
            self._refuse(what, f"chunks within {self._entry.shape}", f"one at {found}")

    def _numbers(self, corners: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Return the number of each chunk in C order."""
        numbers = np.zeros(len(corners), np.int64)
        for axis, (count, step) in enumerate(zip(self._grid, self._chunk, strict=True)):
            numbers = numbers * count + (corners[:, axis] // np.uint64(step)).astype(np.int64)
        return numbers

    def _check_places(self, chunks: _Chunks, end: int) -> None:
        limit = np.uint64(max(0, end))
        outside = (chunks.starts >= limit) | (chunks.sizes > limit - np.minimum(chunks.starts, limit))
        for i in np.flatnonzero(outside | (chunks.sizes == 0))[:1]:
            found = f"{chunks.sizes[i]} bytes at {chunks.starts[i]}"
            self._refuse(self._chunk_at(chunks, i), f"some bytes within {end}", found)
        order = np.argsort(chunks.starts)
        starts, stops = chunks.starts[order], (chunks.starts + chunks.sizes)[order]
        for i in np.flatnonzero(starts[1:] < stops[:-1])[:1]:
            found = f"it begins at {starts[i + 1]}, and the one at {tuple(chunks.corners[order[i]].tolist())} ends at"
            self._refuse(self._chunk_at(chunks, order[i + 1]), "bytes of its own", f"{found} {stops[i]}")

    def _check_masks(self, chunks: _Chunks, partial: npt.NDArray[np.bool_]) -> str:
        """Check the sizes that are known from the filters in use; return what the checksums do not vouch for."""
        used = np.uint64((1 << len(self._filters)) - 1)
        masks = chunks.masks & used
        doubted = int(np.count_nonzero(partial))
        for mask in np.unique(masks).tolist():
            applied = [kind for i, kind in enumerate(self._filters) if not mask >> i & 1]
            skipped = [kind for i, kind in enumerate(self._filters) if mask >> i & 1]
            those = (masks == np.uint64(mask)) & ~partial
            exact = set(applied) <= {SHUFFLE, FLETCHER32}
            if exact:
                size = self._chunk_bytes + SUM_BYTES * applied.count(FLETCHER32)
                for i in np.flatnonzero(those & (chunks.sizes != np.uint64(size)))[:1]:
                    without = f" (filter mask {mask:#x})" if mask else ""
                    found = f"{chunks.sizes[i]} bytes{without}"
                    self._refuse(self._chunk_at(chunks, i), f"{size} bytes", found)
            # A compressor that found nothing to gain is skipped, and the chunk has its full size. Any other is not.
            gained_nothing = exact and FLETCHER32 in applied and not {DEFLATE, SHUFFLE, FLETCHER32} & set(skipped)
            if skipped and not gained_nothing:
                doubted += int(np.count_nonzero(those))
        return f"{doubted} of {len(masks)} chunks skip a filter" if doubted else ""

    def _chunk_at(self, chunks: _Chunks, i: Any) -> str:
        return f"the chunk at {tuple(chunks.corners[i].tolist())}"

    def _read(self, address: int, length: int, what: str) -> bytes:
        if address < 0 or length < 0 or address + length > self._end:
            self._refuse(what, f"{length} bytes within {self._end}", f"them at {address}")
        return self._file.data.read(self._file.base + self._user_block + address, length)

    def _refuse(self, what: str, expected: str, found: str) -> NoReturn:
        raise DamagedFile(self._file.path, f"{self._name}: {what} is damaged", expected=expected, found=found)


_BLOCK_BYTES = 1 << 24
_TRUSTED_BYTES = 1 << 20  # a deflated chunk of this size takes a gigabyte at the very worst


class DataSet:
    """One data set of an open file."""

    def __init__(self, file: Hdf5File, name: str, entry: DataSetEntry) -> None:
        self._file, self._name, self._entry = file, name, entry
        self._h5 = import_h5py(file.path)
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
        for box in hyperslabs(self._entry.shape, start, stop):
            length = math.prod(box[1]) * dtype.itemsize
            self._through("read", box, raw[done : done + length])
            done += length
        return self._native(raw)

    def xor(self, indices: npt.NDArray[np.int64], patterns: Bits) -> Bits:
        """XOR patterns onto elements, in place where they have one, and return their old bits."""
        region = self._locate()
        noted = current_dry_run()
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
            self._write_out(box for a, b in ranges for box in hyperslabs(self._entry.shape, a, b))
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
            return check_stored_checksum(self._file.stored_checksum())
        self._file.release_dataset()  # a chunk in the cache has been checked already
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
            return check_stored_checksum(self._file.stored_checksum())
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
        self._file.release_dataset()  # to be opened again with a cache of the right size
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
                self._region = Region(
                    file.data, where, entry.shape, entry.dtype, None, entry.big_endian, file.stored_checksum()
                )
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
            file.stored_checksum(),
            self._chunk,
            numbers,
            offsets,
        )

    def _check_end(self, end: int) -> None:
        if end > self._file.base + self._file.size or end < 0:
            expected, found = f"at least {end - self._file.base} bytes", self._file.size
            raise DamagedFile(self._file.path, f"{self._name}: lies beyond the end", expected=expected, found=found)

    def _write_out(self, unwritten: Iterator[Hyperslab]) -> None:
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
    ) -> Iterator[tuple[npt.NDArray[np.int64], Hyperslab, npt.NDArray[np.int64]]]:
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

    def _box(self, box: Hyperslab) -> Bits:
        raw = np.empty(math.prod(box[1]) * self._entry.dtype.itemsize, np.uint8)
        self._through("read", box, raw)
        return self._native(raw)

    def _chunk_box(self, number: int) -> Hyperslab:
        return chunk_box(self._entry.shape, self._chunk, number)

    def _through(self, verb: str, box: Hyperslab, raw: npt.NDArray[np.uint8]) -> None:
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

    def _refuse_bombs(self, data: Any, box: Hyperslab) -> None:
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
