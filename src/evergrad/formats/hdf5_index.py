"""The chunk index of a data set, checked before the library follows it.

Checksums of filters cover what is in a chunk, and not where it lies. The index of old-style files (a version 1
B-tree, what h5py writes unless told otherwise) has no checksum, and the library believes it: a wrong entry gives other
data, or ends the process. It is read here from the bytes, and each number is held against the file's size. The other
kinds of index have checksums of their own, which the library checks; their chunks are taken from the library.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from evergrad.errors import DamagedFile
from evergrad.formats.hdf5_file import Hdf5File
from evergrad.formats.hdf5_listing import Entry

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
    file: Hdf5File, name: str, entry: Entry, chunk: tuple[int, ...], filters: list[int], data: Any
) -> ChunkIndex:
    """Return the chunks of a data set, or raise `DamagedFile` where one of them cannot be as the index says."""
    return _Check(file, name, entry, chunk, filters).run(data)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """The entries of an index: corner (in elements), place, stored size and filter mask of each chunk."""

    corners: npt.NDArray[np.uint64]
    starts: npt.NDArray[np.uint64]
    sizes: npt.NDArray[np.uint64]
    masks: npt.NDArray[np.uint64]


class _Check:
    def __init__(self, file: Hdf5File, name: str, entry: Entry, chunk: tuple[int, ...], filters: list[int]) -> None:
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
