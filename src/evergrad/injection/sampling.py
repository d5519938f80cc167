"""How many faults, and where: the amount, and the two ways to sample."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from evergrad.dtypes import DType
from evergrad.errors import UsageError
from evergrad.formats import Checkpoint
from evergrad.injection.faults import Fault, width
from evergrad.injection.rng import Draws, Integers
from evergrad.records import Json, TensorInfo
from evergrad.state import select
from evergrad.state.selection import Where
from evergrad.state.sharing import contiguous_strides
from evergrad.wording import checked_choice

# The numbers that a fault may hit: which tensors, without what does not fit, every byte once.
#
# A *number* is an element, or one part of a complex element; they are counted through all tensors of the selection,
# in file order. Tensors that lie in the same bytes (tied weights, views) are hit under one name only.

_PIECE = 1 << 18  # elements whose addresses are looked at together

Starts: TypeAlias = "Integers | int"


@dataclass(slots=True)
class Population:
    """The tensors that may be hit, and how many places a fault may begin at in each."""

    tensors: list[TensorInfo] = field(default_factory=list)
    starts: list[Starts] = field(default_factory=list)
    """For each tensor, the numbers at which a fault may begin: how many from 0 on, or which."""
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """Why tensors of the selection cannot be hit → their names."""

    @property
    def sizes(self) -> Integers:
        """Places in each tensor at which a fault may begin."""
        return np.array([n if isinstance(n, int) else len(n) for n in self.starts], np.int64)

    @property
    def bits(self) -> int:
        """Bits of all tensors that may be hit."""
        return sum(8 * info.nbytes for info in self.tensors)

    def numbers(self, tensor: int, places: Integers) -> Integers:
        """From places in a tensor to numbers in it."""
        starts = self.starts[tensor]
        return places if isinstance(starts, int) else starts[places]


def population(ck: Checkpoint, fault: Fault, where: Where, only: Iterable[DType] | None = None) -> Population:
    """What the fault may hit in this selection; `UsageError` if it fits nothing of it."""
    found = Population()
    chosen: list[TensorInfo] = []
    span = (fault.elements - 1) * fault.stride + 1
    allowed = None if only is None else frozenset(only)
    for name in select(ck.tensors, where):
        info = ck.tensors[name]
        reason = _misfit(info, fault, span, allowed)
        if reason:
            found.left_out.setdefault(reason, []).append(name)
        else:
            chosen.append(info)
    for info, starts in _each_byte_once(ck, chosen, span):
        if starts is None:
            found.left_out.setdefault("the same bytes under another name", []).append(info.name)
        else:
            found.tensors.append(info)
            found.starts.append(starts)
    if not found.tensors:
        reasons = "; ".join(f"{reason}: {_few(names)}" for reason, names in found.left_out.items())
        raise UsageError(
            f"{ck.path}: {type(fault).__name__} fits no tensor of the selection ({reasons or 'there are none'})"
        )
    return found


def _misfit(info: TensorInfo, fault: Fault, span: int, only: frozenset[DType] | None) -> str:
    if info.numel == 0:
        return "empty"
    if info.read_only:
        return f"{info.read_only}, which cannot be altered in place"
    if only is not None and info.dtype not in only:
        return f"{info.dtype} is not {' or '.join(sorted(only))}"
    if not fault.fits(info.dtype):
        bits = getattr(fault, "bits", None)
        if isinstance(bits, str) and not info.dtype.is_float:
            return f"{bits!r} means floats, not {info.dtype}"
        burst = getattr(fault, "burst", 1)
        if isinstance(bits, str) and burst > 1:
            return f"no burst of {burst} bits lies in the {bits} of {info.dtype}"
        return f"does not fit {info.dtype} ({width(info.dtype)} bits)"
    if info.numel * info.dtype.parts < span:
        return f"fewer than the {span} elements of one fault"
    return ""


def _each_byte_once(ck: Checkpoint, infos: list[TensorInfo], span: int) -> Iterator[tuple[TensorInfo, Starts | None]]:
    """Each tensor with the places that are its own: None if every byte is already another's."""
    chains: dict[int, list[TensorInfo]] = {}  # tensors whose bytes touch, by their common list of neighbours
    for info in infos:
        if info.place is not None:
            chains.setdefault(id(info.neighbours), []).append(info)
    settled: dict[str, Starts | None] = {}
    for members in chains.values():
        settled.update(_assign_shared_bytes(ck, members, span))
    for info in infos:
        if info.place is not None:
            yield info, settled[info.name]
        elif _may_repeat_itself(ck, info):
            yield info, next(iter(_byte_by_byte(ck, [info], span).values()))
        else:
            yield info, _room(info, span)


def _assign_shared_bytes(ck: Checkpoint, members: list[TensorInfo], span: int) -> dict[str, Starts | None]:
    """Of tensors that are the same or lie within each other, the largest has it all; anything else byte by byte."""
    members = sorted(members, key=lambda info: -info.nbytes)
    owners: list[tuple[int, int]] = []
    found: dict[str, Starts | None] = {}
    for info in members:
        assert info.place is not None
        start, stop = info.place.start, info.place.stop
        touching = [(a, b) for a, b in owners if a < stop and start < b]
        if any(a <= start and stop <= b for a, b in touching):
            found[info.name] = None
        elif touching or stop - start != info.nbytes or _may_repeat_itself(ck, info):
            return _byte_by_byte(ck, members, span)
        else:
            owners.append((start, stop))
            found[info.name] = _room(info, span)
    return found


def _byte_by_byte(ck: Checkpoint, members: list[TensorInfo], span: int) -> dict[str, Starts | None]:
    """Views that overlap in part, interleave or repeat themselves: every element whose bytes are still free.

    Piece by piece: an expanded tensor may have a million times the elements that its file has bytes.
    """
    low, high = 1 << 62, 0
    for info in members:
        for _, where in _addresses(ck, info):
            low, high = min(low, int(where.min())), max(high, int(where.max()))
    taken = np.zeros(high - low + 16, bool)
    found: dict[str, Starts | None] = {}
    for info in members:
        mine = [elements[_claimed(taken, where - low, info.dtype.itemsize)] for elements, where in _addresses(ck, info)]
        free = np.concatenate(mine)
        if len(free) == info.numel:
            found[info.name] = _room(info, span)
        elif span > 1 or not len(free):
            found[info.name] = None  # a run would leave what is its own
        else:
            parts = info.dtype.parts
            found[info.name] = (free[:, None] * parts + np.arange(parts)).reshape(-1)
    return found


def _claimed(taken: npt.NDArray[np.bool_], where: Integers, size: int) -> Integers:
    """The elements whose bytes are free, of those in the same bytes the first; their bytes are taken from then on."""
    rows = np.flatnonzero(~taken[where])
    rows = rows[np.sort(np.unique(where[rows], return_index=True)[1])]
    bytes_of = where[rows][:, None] + np.arange(size)
    free = ~taken[bytes_of].any(axis=1)
    taken[bytes_of[free]] = True
    claimed: Integers = rows[free]
    return claimed


def _addresses(ck: Checkpoint, info: TensorInfo) -> Iterator[tuple[Integers, Integers]]:
    """Pieces of a tensor: elements, and the byte at which each begins; in a row, if the format cannot tell.

    Along an axis that an expanded tensor repeats, the first element stands for all others in its bytes.
    """
    first = info.place.start if info.place is not None else 0
    strides = contiguous_strides(info.shape)
    axes = _unrepeated(ck, info, strides)
    if axes is not None:
        start = ck.addresses(info.name, 0, 1)
        assert start is not None
        lengths = [info.shape[axis] for axis in axes]
        for low in range(0, math.prod(lengths), _PIECE):
            rest = np.arange(low, min(low + _PIECE, math.prod(lengths)))
            elements, where = np.zeros_like(rest), np.full_like(rest, start[0])
            for axis in reversed(axes):
                rest, place = np.divmod(rest, info.shape[axis])
                elements += place * strides[axis]
                where += place * (ck.skeleton.sharing.views[info.name].stride[axis] * info.dtype.itemsize)
            yield elements, where
        return
    for low in range(0, info.numel, _PIECE):
        elements = np.arange(low, min(low + _PIECE, info.numel))
        found = ck.addresses(info.name, low, low + len(elements))
        yield elements, first + elements * info.dtype.itemsize if found is None else found


def _unrepeated(ck: Checkpoint, info: TensorInfo, strides: tuple[int, ...]) -> list[int] | None:
    """The axes along which an expanded tensor's bytes differ; None if it is no such tensor in this file."""
    view = ck.skeleton.sharing.views.get(info.name)
    if view is None or len(view.stride) != len(info.shape):
        return None
    axes = [axis for axis, length in enumerate(info.shape) if length > 1]
    if all(view.stride[axis] for axis in axes):
        return None
    # A safetensors file keeps the strides that the tensor had, and stores every element by itself.
    start = ck.addresses(info.name, 0, 1)
    for axis in axes:
        beside = ck.addresses(info.name, strides[axis], strides[axis] + 1)
        if start is None or beside is None or beside[0] != start[0] + view.stride[axis] * info.dtype.itemsize:
            return None
    return [axis for axis in axes if view.stride[axis]]


def _may_repeat_itself(ck: Checkpoint, info: TensorInfo) -> bool:
    """Whether elements of one tensor may lie in the same bytes, as in an expanded or unfolded one."""
    view = ck.skeleton.sharing.views.get(info.name)
    if view is None or len(view.stride) != len(info.shape):
        return False
    reach = 0  # how far the axes with smaller steps go
    for step, size in sorted((step, size) for size, step in zip(info.shape, view.stride, strict=True) if size > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def _room(info: TensorInfo, span: int) -> int:
    return info.numel * info.dtype.parts - span + 1


def _few(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")


Sampling: TypeAlias = Literal["element", "tensor"]

_MEGABIT = 1 << 20
_MAX_FAULTS = 200_000_000


@dataclass(frozen=True)
class Amount:
    """How many faults are attempted: one of count, fraction and rate; and with what probability an attempt succeeds.

    `rate` is in FIT (failures in 10⁹ hours) per Mbit (2²⁰ bits) over `hours`; the number of faults is then drawn from
    the Poisson distribution. `probability` alone attempts every number of the selection once.
    """

    count: int | None = None
    fraction: float | None = None
    rate: float | None = None
    hours: float = 1.0
    probability: float | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("count", "fraction", "rate") if getattr(self, name) is not None]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} are two ways to say how many: choose one")
        if not given and self.probability is None:
            raise UsageError("how many faults? Give count, fraction, rate or probability")
        if self.rate is None and self.hours != 1.0:
            raise UsageError("hours are hours at a rate: give rate too, or leave them out")
        if self.count is not None and (type(self.count) is not int or self.count < 0):
            raise UsageError(f"count {self.count!r:.60}: expected a whole number from 0 on")
        _check_share("fraction", self.fraction)
        _check_share("probability", self.probability)
        for name in ("rate", "hours"):
            value = getattr(self, name)
            sound = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
            if not sound and (value is not None or name == "hours"):
                raise UsageError(f"{name} {value!r:.60}: expected a number from 0 on")

    def to_json(self) -> dict[str, Json]:
        """What was given."""
        told: dict[str, Json] = {name: getattr(self, name) for name in ("count", "fraction", "rate", "probability")}
        told = {name: value for name, value in told.items() if value is not None}
        return {**told, "hours": self.hours} if self.rate is not None else told


@dataclass(frozen=True, slots=True)
class FaultSites:
    """Where faults begin: the tensor of each, as its number in the population, and the place in it.

    By element, ascending and all different; by tensor, grouped by tensor, in the order drawn.
    """

    attempts: int
    tensors: Integers
    places: Integers

    def __len__(self) -> int:
        return len(self.tensors)


def sample(population: Population, amount: Amount, sampling: Sampling, draws: Draws) -> FaultSites:
    """Draw the sites of all faults that come about."""
    sizes = population.sizes
    total = int(sizes.sum())
    alone = amount.count is None and amount.fraction is None and amount.rate is None
    checked_sampling(sampling)
    if alone and sampling == "element":
        assert amount.probability is not None
        _check_memory(total * amount.probability)
        return locate_sites(sizes, total, draws.hits(total, amount.probability))
    _check_memory(total if alone else 0)
    attempts = total if alone else _attempts(amount, population, total, draws)
    if sampling == "element":
        if attempts > total:
            raise UsageError(
                f"{attempts:,} faults in {total:,} elements: expected at most one each. "
                f"Choose fewer, select more tensors, or sample by tensor, which may hit one twice."
            )
        chosen = draws.subset(total, attempts)
        if amount.probability is not None:
            chosen = chosen[draws.chance(amount.probability, attempts)]
        return locate_sites(sizes, attempts, chosen)
    tensors = draws.below(len(sizes), attempts) if attempts else np.empty(0, np.int64)
    places = draws.below(sizes[tensors]) if attempts else tensors
    if amount.probability is not None:
        happens = draws.chance(amount.probability, attempts)
        tensors, places = tensors[happens], places[happens]
    order = np.argsort(tensors, kind="stable")
    return FaultSites(attempts, tensors[order], places[order])


def checked_sampling(sampling: object) -> None:
    """`UsageError` for a way to sample that there is not."""
    checked_choice("sampling", sampling, ("element", "tensor"))


def locate_sites(sizes: Integers, attempts: int, chosen: Integers) -> FaultSites:
    """From numbers counted through all tensors to tensors and places in them."""
    ends = np.cumsum(sizes)
    tensors = np.searchsorted(ends, chosen, side="right")
    return FaultSites(attempts, tensors, chosen - (ends - sizes)[tensors])


def _attempts(amount: Amount, population: Population, total: int, draws: Draws) -> int:
    if amount.count is not None:
        _check_memory(amount.count)
        return amount.count
    if amount.fraction is not None:
        found = round(amount.fraction * total)
        if found == 0 and amount.fraction > 0:
            raise UsageError(f"fraction {amount.fraction:g} of {total:,} elements is less than half a fault")
        _check_memory(found)
        return found
    assert amount.rate is not None
    expected = amount.rate * amount.hours * (population.bits / _MEGABIT) / 1e9
    _check_memory(expected)
    return draws.poisson(expected)


def _check_memory(faults: float) -> None:
    if faults > _MAX_FAULTS:
        raise UsageError(f"more than {_MAX_FAULTS:,} faults: expected at most so many in one injection")


def _check_share(name: str, value: float | None) -> None:
    if value is not None and not (isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1):
        raise UsageError(f"{name} {value!r}: expected a number from 0 to 1")
