"""Tensors that lie in several places: boxes of a grid, each a `Region` of its own, as sharded checkpoints have them."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from evergrad.dtypes import DType
from evergrad.errors import DamagedFile
from evergrad.formats.byte_source import Closeable
from evergrad.formats.checkpoint import Bits, Checkpoint
from evergrad.formats.region import Region, check_stored_checksum
from evergrad.records import Check, TensorInfo
from evergrad.state import Skeleton
from evergrad.state.sharing import contiguous_strides

_BATCH = 1 << 18  # elements scattered at a time
_SHORT = 1 << 12  # runs of fewer elements are scattered together, longer ones copied one by one


class TensorBox(NamedTuple):
    """A part of a tensor: where it begins in each dimension, and how far it goes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def check_tiling(shape: tuple[int, ...], boxes: Sequence[TensorBox]) -> list[int]:
    """The numbers of the boxes that hold something, each once; ValueError unless their sizes add up to the shape.

    Cheap: that they neither overlap nor leave holes is found out when the tensor is first used.
    """
    if math.prod(max(n, 1) for n in shape) >= 1 << 62:
        raise ValueError(f"an impossible shape {shape}")  # torch cannot make it, even if it is empty
    kept: dict[tuple[int, ...], int] = {}
    for number, (offsets, sizes) in enumerate(boxes):
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise ValueError(f"a part of {len(sizes)} dimensions in a tensor of {len(shape)}")
        if any(o < 0 or n < 0 or o + n > whole for o, n, whole in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"a part at {offsets} of size {sizes} in a tensor of shape {shape}")
        # Ranks that hold nothing, and copies that several ranks hold.
        if 0 not in sizes and boxes[kept.setdefault(offsets, number)].sizes != sizes:
            raise ValueError(f"two parts at {offsets}")
    covered = sum(math.prod(boxes[number].sizes) for number in kept.values())
    if covered != math.prod(shape):
        raise ValueError(f"parts of {covered} elements in a tensor of {math.prod(shape)}")
    return list(kept.values())


class TiledTensor:
    """One tensor in boxes; `find` gives the region of a box when it is first needed."""

    def __init__(
        self, name: str, shape: tuple[int, ...], dtype: DType, boxes: Sequence[TensorBox], find: Callable[[int], Region]
    ) -> None:
        self.shape, self.dtype, self.boxes = shape, dtype, boxes
        self._name, self._find = name, find
        self._stride = contiguous_strides(shape)
        whole = len(boxes) == 1
        self._cuts = [] if whole else _cuts(shape, boxes)
        self._grid = np.zeros((), np.int32) if whole else _grid(boxes, self._cuts)

    def region(self, number: int) -> Region:
        """The place of a box, checked."""
        region = self._find(number)
        region.check(self._name)
        return region

    def read(self, start: int, stop: int) -> Bits:
        """The bits of the elements from `start` to `stop` in C order."""
        if len(self.boxes) == 1:
            return self.region(0).read(start, stop)
        parts = () if self.dtype.parts == 1 else (self.dtype.parts,)
        out: Bits = np.empty((stop - start, *parts), self.dtype.bits)
        first, last = self._reach
        for number in np.flatnonzero((first < stop) & (last >= start)).tolist():
            self._read_box(number, start, stop, out)
        return out

    def xor(self, indices: npt.NDArray[np.int64], patterns: Bits) -> Bits:
        """XOR patterns onto elements in place and return their old bits; costs what the indices cost."""
        if len(self.boxes) == 1:
            return self.region(0).xor(indices, patterns)
        which, local = self._place(indices)
        order = np.argsort(which, kind="stable")
        touched, starts = np.unique(which[order], return_index=True)
        regions = [self.region(number) for number in touched.tolist()]
        for region in regions:
            region.source.check_writable()  # all of them can be altered, or none is
        old = np.empty_like(patterns)
        for region, mine in zip(regions, np.split(order, starts[1:]), strict=True):
            old[mine] = region.xor(local[mine], patterns[mine])
        return old

    def at(self, indices: npt.NDArray[np.int64]) -> Bits:
        """The bits of single elements."""
        if len(self.boxes) == 1:
            return self.region(0).at(indices)
        which, local = self._place(indices)
        parts = () if self.dtype.parts == 1 else (self.dtype.parts,)
        out: Bits = np.empty((len(indices), *parts), self.dtype.bits)
        for number in np.unique(which).tolist():
            mine = which == number
            out[mine] = self.region(number).at(local[mine])
        return out

    def checksum(self) -> Check:
        """Whether the checksums over every box hold; `unknown` if one has none, and none fails."""
        found = Check.OK
        for number in range(len(self.boxes)):
            check = check_stored_checksum(self.region(number).stored_checksum)
            if check is Check.FAILED:
                return check
            found = check if check is Check.UNKNOWN else found
        return found

    def _place(self, indices: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """In which box each element lies, and its index there."""
        rest = indices
        coordinates: list[npt.NDArray[np.int64]] = []
        for length in reversed(self.shape):
            rest, here = np.divmod(rest, length)
            coordinates.insert(0, here)
        cell = tuple(np.searchsorted(cut, coordinates[axis], "right") - 1 for axis, cut in self._cuts)
        which = self._grid[cell].astype(np.int64)
        local = np.zeros(len(indices), np.int64)
        for axis, here in enumerate(coordinates):
            local = local * self._corners[1][which, axis] + here - self._corners[0][which, axis]
        return which, local

    @cached_property
    def _corners(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        offsets = np.array([box.offsets for box in self.boxes], np.int64)
        return offsets, np.array([box.sizes for box in self.boxes], np.int64)

    @cached_property
    def _reach(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The first and the last element of each box, in the C order of the tensor."""
        offsets, sizes = self._corners
        stride = np.array(self._stride, np.int64)
        return offsets @ stride, (offsets + sizes - 1) @ stride

    def _read_box(self, number: int, start: int, stop: int, out: Bits) -> None:
        """Copy what a box has of a range: runs of elements that follow each other here and there."""
        offsets, sizes = self.boxes[number]
        axis = max((i for i, n in enumerate(self.shape) if sizes[i] != n), default=0)
        length, count = math.prod(sizes[axis:]), math.prod(sizes[:axis])
        base = sum(o * s for o, s in zip(offsets, self._stride, strict=True))

        def begin(run: int) -> int:
            place = base
            for size, step in zip(reversed(sizes[:axis]), reversed(self._stride[:axis]), strict=True):
                run, here = divmod(run, size)
                place += here * step
            return place

        low = bisect_right(range(count), start - length, key=begin)
        high = bisect_left(range(count), stop, key=begin)
        region = self.region(number)
        if length >= _SHORT:
            for run in range(low, high):
                place = begin(run)
                a, b = max(start, place), min(stop, place + length)
                out[a - start : b - start] = region.read(run * length + a - place, run * length + b - place)
            return
        for run in range(low, high, _BATCH // length):
            end = min(run + _BATCH // length, high)
            rest, begins = np.arange(run, end), np.full(end - run, base - start)
            for size, step in zip(reversed(sizes[:axis]), reversed(self._stride[:axis]), strict=True):
                rest, here = np.divmod(rest, size)
                begins += here * step
            places = (begins[:, None] + np.arange(length)).reshape(-1)
            piece = region.read(run * length, end * length)
            if places[0] < 0 or places[-1] >= len(out):  # the first and the last run may stick out
                inside = (places >= 0) & (places < len(out))
                places, piece = places[inside], piece[inside]
            out[places] = piece


class TiledCheckpoint(Checkpoint):
    """A checkpoint given by where the boxes of its tensors are; `locate` finds them when first needed."""

    supports_dry_run = True

    def __init__(
        self,
        format: str,
        path: Path,
        tensors: Mapping[str, TensorInfo],
        locate: Callable[[str], TiledTensor],
        holder: Closeable,
        *,
        others: Mapping[str, str],
        check_container: Callable[[], Mapping[str, Check]],
        fingerprint: Callable[[str], str | None] = lambda name: None,
        check_other: Callable[[str], Check] = lambda name: Check.UNKNOWN,
        beside: Sequence[Path] = (),
    ) -> None:
        self.format = format
        self.path = path
        self.tensors = tensors
        self.others = others
        self.metadata = {}
        self.skeleton = Skeleton.of_names(tensors)
        self._locate, self._holder, self._check_container = locate, holder, check_container
        self._fingerprint, self._check_other = fingerprint, check_other
        self._beside = beside
        self._last: tuple[str, TiledTensor] | None = None

    def _read_bits(self, name: str, start: int, stop: int) -> Bits:
        if start == stop:
            dtype = self.tensors[name].dtype
            return np.empty((0,) if dtype.parts == 1 else (0, dtype.parts), dtype.bits)
        return self._pieces(name).read(start, stop)

    def _bits_at(self, name: str, indices: npt.NDArray[np.int64]) -> Bits:
        return self._pieces(name).at(indices)

    def _xor_bits(self, name: str, indices: npt.NDArray[np.int64], patterns: Bits) -> Bits:
        return self._pieces(name).xor(indices, patterns)

    def files(self) -> list[Path]:
        """The index or folder, and the files beside it that hold the data."""
        return [self.path, *self._beside]

    def checksum(self, name: str) -> Check:
        """Whether the checksums over all parts of this tensor hold; an empty tensor has none."""
        return self._pieces(name).checksum() if self._info(name).numel else Check.UNKNOWN

    def fingerprint(self, name: str) -> str | None:
        """A digest of something in `others`, where the format can find its bytes."""
        return self._fingerprint(name) if name in self.others else None

    def check_other(self, name: str) -> Check:
        """Check the checksum of something in `others`, where the format has one."""
        return self._check_other(name) if name in self.others else Check.UNKNOWN

    def container_checks(self) -> Mapping[str, Check]:
        """Checksums over everything that is no tensor, as the format found them."""
        return self._check_container()

    def close(self) -> None:
        """Make changes durable and let go of the files; twice is fine."""
        self._last = None
        self._holder.close()

    def _pieces(self, name: str) -> TiledTensor:
        if self._last is None or self._last[0] != name:
            try:
                self._last = name, self._locate(name)
            except ValueError as error:
                raise DamagedFile(self.path, f"{name}: {error}") from None
        return self._last[1]


def _cuts(shape: tuple[int, ...], boxes: Sequence[TensorBox]) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """Where the boxes end in each dimension that is cut at all."""
    cuts = []
    for axis, length in enumerate(shape):
        edges = {0, length}
        for offsets, sizes in boxes:
            edges |= {offsets[axis], offsets[axis] + sizes[axis]}
        if len(edges) > 2:
            cuts.append((axis, np.array(sorted(edges), np.int64)))
    return cuts


def _grid(boxes: Sequence[TensorBox], cuts: Sequence[tuple[int, npt.NDArray[np.int64]]]) -> npt.NDArray[np.int32]:
    """Which box each cell between the cuts belongs to; ValueError where it is none, or two."""
    cells = [len(edges) - 1 for _, edges in cuts]
    if math.prod(cells) > 64 * len(boxes) + 4096:
        raise ValueError(f"{len(boxes)} parts that form no grid")
    grid = np.full(cells, -1, np.int32)
    for number, box in enumerate(boxes):
        corner = tuple(
            slice(*np.searchsorted(edges, [box.offsets[axis], box.offsets[axis] + box.sizes[axis]]).tolist())
            for axis, edges in cuts
        )
        if (grid[corner] != -1).any():
            raise ValueError("parts that overlap")
        grid[corner] = number
    if (grid == -1).any():
        raise ValueError("parts that leave a hole")
    return grid
