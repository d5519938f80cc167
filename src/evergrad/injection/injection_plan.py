"""What is going to happen to which numbers: sites and a fault become columns of old and new bits.

Nothing is written here. Faults that hit the same number follow each other: the later one meets what the earlier one
left. What is drawn again, because it would leave NaN or an infinity, is first the bits and then, if a site leaves
no choice, the site.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from evergrad.dtypes import DType
from evergrad.errors import UsageError
from evergrad.formats import Checkpoint
from evergrad.formats.bitcast import finite, values
from evergrad.formats.checkpoint import Bits
from evergrad.injection.faults import Fault, field_of, width
from evergrad.injection.rng import Draws, Integers
from evergrad.injection.sampling import FaultSites, Population, Sampling, locate_sites
from evergrad.records import Json, TensorInfo

# What was done to one tensor, in columns; and to one number, in a person's words.


@dataclass(frozen=True, slots=True)
class Hit:
    """One fault in one number.

    >>> print(Hit("fc.weight", DType.FLOAT32, (4, 3), 7, 1 << 30, 0x3CAE7D56, 0x7CAE7D56))
    fc.weight[2,1] bit 1 (exponent msb): 0.0213 → 7.248e+36
    """

    tensor: str
    dtype: DType
    shape: tuple[int, ...]
    number: int
    """Its index in C order; in complex tensors parts are counted, the real one of each element first."""
    aim: int
    """The bits that were aimed at."""
    old: int
    new: int

    @property
    def index(self) -> int:
        """Which element, in C order."""
        return self.number // self.dtype.parts

    @property
    def position(self) -> tuple[int, ...]:
        """Which element, along each axis."""
        return tuple(int(n) for n in np.unravel_index(self.index, self.shape))

    @property
    def part(self) -> str:
        """`real` or `imag` of a complex element; nothing otherwise."""
        return ("real", "imag")[self.number % 2] if self.dtype.parts == 2 else ""

    @property
    def bits(self) -> tuple[int, ...]:
        """The bits that were aimed at, by number: 0 is the sign."""
        total = width(self.dtype)
        return tuple(bit for bit in range(total) if self.aim >> (total - 1 - bit) & 1)

    @property
    def changed(self) -> bool:
        """Whether a bit is another than before."""
        return self.old != self.new

    @property
    def old_value(self) -> float | int:
        """The number before."""
        return _value(self.old, self.dtype)

    @property
    def new_value(self) -> float | int:
        """The number after."""
        return _value(self.new, self.dtype)

    @property
    def where(self) -> str:
        """The number's address: `fc.weight[2,1]`."""
        place = f"[{','.join(str(n) for n in self.position)}]" if self.shape else ""
        return f"{self.tensor}{place}{f'.{self.part}' if self.part else ''}"

    def __str__(self) -> str:
        bits = self.bits
        if len(bits) == width(self.dtype):
            what = "all bits"
        elif len(bits) == 1:
            what = f"bit {bits[0]} ({field_of(bits[0], self.dtype)})"
        elif bits == tuple(range(bits[0], bits[-1] + 1)):
            what = f"bits {bits[0]}–{bits[-1]}"
        else:
            what = f"bits {', '.join(str(bit) for bit in bits)}"
        before, after = (f"{value:.4g}" if self.dtype.is_float else str(value) for value in self._values)
        if before == after and self.changed:
            before, after = (repr(value) for value in self._values)
        return f"{self.where} {what}: {before} → {after}" + ("" if self.changed else " (unchanged)")

    @property
    def _values(self) -> tuple[float | int, float | int]:
        return self.old_value, self.new_value

    def to_json(self) -> dict[str, Json]:
        """The address, and the bits by number and as hexadecimal patterns."""
        digits = width(self.dtype) // 4
        return {
            "tensor": self.tensor,
            "index": self.index,
            "position": list(self.position),
            **({"part": self.part} if self.part else {}),
            "bits": list(self.bits),
            "old": f"{self.old:0{digits}x}",
            "new": f"{self.new:0{digits}x}",
            "old_value": _plain(self.old_value),
            "new_value": _plain(self.new_value),
        }


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """What was done to one tensor: numbers, the bits aimed at, old and new bits, in the order of the faults."""

    tensor: str
    dtype: DType
    shape: tuple[int, ...]
    numbers: npt.NDArray[np.int64]
    aim: Bits
    old: Bits
    new: Bits

    def __len__(self) -> int:
        return len(self.numbers)

    def hits(self) -> Iterator[Hit]:
        """One by one."""
        rows = zip(self.numbers.tolist(), self.aim.tolist(), self.old.tolist(), self.new.tolist(), strict=True)
        for number, aim, old, new in rows:
            yield Hit(self.tensor, self.dtype, self.shape, number, aim, old, new)

    def net_changes(self) -> Column:
        """Each number once: with its bits before the first fault and after the last."""
        if len(self.numbers) < 2 or bool(np.all(np.diff(self.numbers) > 0)):
            return self
        order = np.argsort(self.numbers, kind="stable")
        ordered = self.numbers[order]
        first = np.flatnonzero(np.diff(ordered, prepend=-1))
        last = np.append(first[1:], len(ordered)) - 1
        aim = np.bitwise_or.reduceat(self.aim[order], first)
        old, new = self.old[order[first]], self.new[order[last]]
        return Column(self.tensor, self.dtype, self.shape, ordered[first], aim, old, new)

    def elements(self, patterns: Bits) -> tuple[npt.NDArray[np.int64], Bits]:
        """Patterns of distinct numbers as `Checkpoint.xor` takes them: of elements, complex ones as rows of two."""
        parts = self.dtype.parts
        if parts == 1:
            return self.numbers, patterns
        elements, rows = np.unique(self.numbers // parts, return_inverse=True)
        whole = np.zeros((len(elements), parts), self.dtype.bits)
        whole[rows, self.numbers % parts] = patterns
        return elements, whole


def _plain(value: float | int) -> Json:
    return value if math.isfinite(value) else str(value)  # JSON has neither NaN nor infinities


def _value(bits: int, dtype: DType) -> float | int:
    found: float | int = values(np.array([bits], dtype.bits), dtype)[0].item()
    return found


_BIT_ROUNDS = 64
_SITE_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class InjectionPlan:
    """The columns of every tensor that is hit, and what they come to."""

    columns: list[Column]
    injected: int
    changed: int
    nonfinite: int


@dataclass(slots=True)
class _Batch:
    """The faults on tensors of one type: a row each, `elements` numbers a row."""

    dtype: DType
    tensors: Integers
    places: Integers
    aim: Bits
    keys: npt.NDArray[np.int64]  # numbers, counted through all tensors of the population
    old: Bits
    new: Bits
    tried: Integers  # places that leave no choice, counted through all tensors


def plan_injection(
    ck: Checkpoint,
    population: Population,
    sites: FaultSites,
    fault: Fault,
    draws: Draws,
    *,
    sampling: Sampling = "element",
    allow_nonfinite: bool = True,
) -> InjectionPlan:
    """Draw the bits, read what is there, and say what becomes of it."""
    maker = _Planner(ck, population, fault, draws, sampling, allow_nonfinite)
    types = np.array([list(DType).index(info.dtype) for info in population.tensors], np.int64)
    kinds = types[sites.tensors]
    batches = [maker.plan_dtype(list(DType)[kind], sites, kinds == kind) for kind in _in_order(kinds)]
    columns = [column for batch in batches for column in maker.columns(batch)]
    place = {info.name: number for number, info in enumerate(population.tensors)}
    columns.sort(key=lambda column: place[column.tensor])
    changed = sum(int((batch.old != batch.new).any(axis=1).sum()) for batch in batches)
    nonfinite = sum(int((~_finite(batch.new.reshape(-1), batch.dtype)).sum()) for batch in batches)
    return InjectionPlan(columns, len(sites), changed, nonfinite)


class _Planner:
    """One injection's plan in the making."""

    def __init__(
        self,
        ck: Checkpoint,
        population: Population,
        fault: Fault,
        draws: Draws,
        sampling: Sampling,
        allow_nonfinite: bool,
    ) -> None:
        self.ck, self.population, self.fault, self.draws = ck, population, fault, draws
        self.sampling, self.allow_nonfinite = sampling, allow_nonfinite
        self.run = np.arange(fault.elements) * fault.stride
        self.sizes = population.sizes
        self.firsts = np.cumsum(self.sizes) - self.sizes
        numbers = np.array([info.numel * info.dtype.parts for info in population.tensors], np.int64)
        self.bases = np.cumsum(numbers) - numbers

    def plan_dtype(self, dtype: DType, sites: FaultSites, mine: npt.NDArray[np.bool_]) -> _Batch:
        """The faults on tensors of one type, with what they meet and what they leave."""
        count = int(mine.sum())
        aim = self._draw(dtype, count)
        none: Bits = np.empty((0, 0), dtype.bits)
        keys = np.empty((0, 0), np.int64)
        batch = _Batch(dtype, sites.tensors[mine], sites.places[mine], aim, keys, none, none, np.empty(0, np.int64))
        for _ in range(_SITE_ROUNDS):
            stuck = self._apply_all(batch)
            if not len(stuck):
                return batch
            where = self._name(batch, int(stuck[0]))
            self._move(batch, stuck)
        raise UsageError(
            f"{self.ck.path}: of {count:,} faults {len(stuck):,} found no place in {_SITE_ROUNDS} where the bits that "
            f"are allowed leave a finite value (the last: {where}). Allow non-finite values, or choose other bits."
        )

    def _apply_all(self, batch: _Batch) -> Integers:
        """Let every fault happen; returns the rows that leave no finite value, whatever bits are drawn."""
        batch.keys = np.empty((len(batch.tensors), len(self.run)), np.int64)
        batch.old = np.empty(batch.keys.shape, batch.dtype.bits)
        for tensor, rows in _groups(batch.tensors):
            numbers = self.population.numbers(tensor, batch.places[rows])[:, None] + self.run
            batch.keys[rows] = numbers + self.bases[tensor]
            info = self.population.tensors[tensor]
            batch.old[rows] = read_numbers(self.ck, info, numbers.reshape(-1)).reshape(numbers.shape)
        batch.new = np.empty_like(batch.old)
        if self.sampling == "element" and len(self.run) == 1:  # no number comes twice
            return self._apply(batch, np.arange(len(batch.tensors)))
        unique, cells = np.unique(batch.keys, return_inverse=True)
        cells = cells.reshape(batch.keys.shape)
        present_bits = np.empty(len(unique), batch.dtype.bits)
        present_bits[cells] = batch.old
        stuck = []
        for step in conflict_free_batches(cells, len(unique)):
            batch.old[step] = present_bits[cells[step]]
            stuck.append(self._apply(batch, step))
            present_bits[cells[step]] = batch.new[step]
        return np.concatenate(stuck) if stuck else np.empty(0, np.int64)

    def _apply(self, batch: _Batch, rows: Integers) -> Integers:
        """Alter these rows; with `allow_nonfinite=False` draw bits again where that is not finite."""
        batch.new[rows] = self._alter(batch, rows)
        if self.allow_nonfinite:
            return rows[:0]
        bad = rows[~_finite(batch.new[rows].reshape(-1), batch.dtype).reshape(len(rows), -1).all(axis=1)]
        for _ in range(_BIT_ROUNDS):
            if not len(bad):
                break
            before = self.draws.taken
            batch.aim[bad] = self._draw(batch.dtype, len(bad))
            if self.draws.taken == before:
                break  # nothing was left to chance: there is no other choice
            batch.new[bad] = self._alter(batch, bad)
            bad = bad[~_finite(batch.new[bad].reshape(-1), batch.dtype).reshape(len(bad), -1).all(axis=1)]
        return bad

    def _alter(self, batch: _Batch, rows: Integers) -> Bits:
        old = batch.old[rows]
        aims = np.repeat(batch.aim[rows], old.shape[1])
        new = self.fault.alter(old.reshape(-1), aims, batch.dtype)
        return self._checked("alter", new, batch.dtype, len(aims)).reshape(old.shape)

    def _draw(self, dtype: DType, count: int) -> Bits:
        """What is aimed at; a copy, which may be altered."""
        return self._checked("draw", self.fault.draw(dtype, count, self.draws), dtype, count).copy()

    def _checked(self, what: str, bits: object, dtype: DType, count: int) -> Bits:
        """What a fault gave: a user's own may give anything, and the log has to hold it."""
        found = np.asarray(bits)
        if found.shape != (count,) or found.dtype != dtype.bits:
            raise UsageError(
                f"{type(self.fault).__name__}.{what} gave {found.dtype} of shape {found.shape} "
                f"(expected {dtype.bits} of shape {(count,)})"
            )
        return found

    def _move(self, batch: _Batch, stuck: Integers) -> None:
        """Give other places, in tensors of the same type, to faults that cannot stay where they are."""
        alike = np.array([info.dtype is batch.dtype for info in self.population.tensors])
        sizes = np.where(alike, self.sizes, 0)
        firsts = np.cumsum(sizes) - sizes
        batch.tried = np.union1d(batch.tried, firsts[batch.tensors[stuck]] + batch.places[stuck])
        total = int(sizes.sum())
        if self.sampling == "element":
            taken = np.union1d(batch.tried, firsts[batch.tensors] + batch.places)
            if len(taken) + len(stuck) > total:
                where = self._name(batch, int(stuck[0]))
                raise UsageError(
                    f"{self.ck.path}: no place is left where the bits that are allowed leave a finite value "
                    f"(the last tried: {where}). Allow non-finite values, or choose other bits."
                )
            moved = locate_sites(sizes, 0, self.draws.others(total, taken, len(stuck)))
            batch.tensors[stuck], batch.places[stuck] = moved.tensors, moved.places
        else:
            among = np.flatnonzero(alike)
            batch.tensors[stuck] = among[self.draws.below(len(among), len(stuck))]
            batch.places[stuck] = self.draws.below(self.sizes[batch.tensors[stuck]])
        batch.aim[stuck] = self._draw(batch.dtype, len(stuck))
        by_place = (batch.places, batch.tensors) if self.sampling == "element" else (batch.tensors,)
        order = np.lexsort(by_place)
        batch.tensors, batch.places, batch.aim = batch.tensors[order], batch.places[order], batch.aim[order]

    def columns(self, batch: _Batch) -> list[Column]:
        """What happens to each tensor, in the order in which it happens."""
        found = []
        for tensor, rows in _groups(batch.tensors):
            info = self.population.tensors[tensor]
            index = (batch.keys[rows] - self.bases[tensor]).reshape(-1)
            aim = np.repeat(batch.aim[rows], len(self.run))
            old, new = batch.old[rows].reshape(-1), batch.new[rows].reshape(-1)
            found.append(Column(info.name, info.dtype, info.shape, index, aim, old, new))
        return found

    def _name(self, batch: _Batch, row: int) -> str:
        tensor = int(batch.tensors[row])
        number = self.population.numbers(tensor, batch.places[row : row + 1])
        info = self.population.tensors[tensor]
        value = values(read_numbers(self.ck, info, number), info.dtype)[0]
        return f"{info.name}, element {int(number[0]) // info.dtype.parts} = {value:.6g}"


def read_numbers(ck: Checkpoint, info: TensorInfo, numbers: Integers) -> Bits:
    """The bits of single numbers: of elements, or of parts of complex elements."""
    parts = info.dtype.parts
    if parts == 1:
        return ck.bits_at(info.name, numbers)
    return ck.bits_at(info.name, numbers // parts)[np.arange(len(numbers)), numbers % parts]


def conflict_free_batches(cells: Integers, count: int) -> list[Integers]:
    """Rows in an order in which those that share a cell follow each other, gathered into as few steps as possible."""
    uses = np.bincount(cells.reshape(-1), minlength=count)
    crowded = np.flatnonzero((uses[cells] > 1).any(axis=1))
    last: dict[int, int] = {}
    level = np.zeros(len(cells), np.int64)
    for row, mine in zip(crowded.tolist(), cells[crowded].tolist(), strict=True):
        step = max(last.get(cell, -1) for cell in mine) + 1
        level[row] = step
        last.update(dict.fromkeys(mine, step))
    order = np.argsort(level, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(level[order])) + 1)


def _groups(tensors: Integers) -> list[tuple[int, slice]]:
    """Runs of rows on the same tensor."""
    cuts = [0, *(np.flatnonzero(np.diff(tensors)) + 1).tolist(), len(tensors)]
    return [(int(tensors[a]), slice(a, b)) for a, b in pairwise(cuts) if a < b]


def _in_order(kinds: Integers) -> list[int]:
    unique, first = np.unique(kinds, return_index=True)
    return [int(kind) for kind in unique[np.argsort(first)]]


def _finite(bits: Bits, dtype: DType) -> npt.NDArray[np.bool_]:
    return finite(values(bits, dtype))
