"""Elements of a data set, counted in C order: the chunk that holds each, and the boxes that make up a range."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evergrad.formats.region import Region

Box = tuple[tuple[int, ...], tuple[int, ...]]
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


def chunk_box(shape: Sequence[int], chunk: Sequence[int], number: int) -> Box:
    """The part of a chunk that is within the data set; chunks are numbered in C order."""
    first: list[int] = []
    for size, step in zip(reversed(shape), reversed(chunk), strict=True):
        number, place = divmod(number, -(-size // step))
        first.insert(0, place * step)
    sizes = zip(chunk, shape, first, strict=True)
    return tuple(first), tuple(min(step, size - start) for step, size, start in sizes)


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that make up a range of elements, in C order; at most two an axis and one."""
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        for corner, lengths in boxes(shape[1:], start - last * row, stop - last * row):
            yield (last, *corner), (1, *lengths)
        return
    if start < first * row:
        for corner, lengths in boxes(shape[1:], start - (first - 1) * row, row):
            yield (first - 1, *corner), (1, *lengths)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * row < stop:
        for corner, lengths in boxes(shape[1:], 0, stop - last * row):
            yield (last, *corner), (1, *lengths)
