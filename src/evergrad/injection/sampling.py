"""How many faults, and where: the amount, and the two ways to sample."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from evergrad.errors import UsageError
from evergrad.injection.draws import Draws
from evergrad.injection.population import Population
from evergrad.records import Json
from evergrad.wording import checked_choice

Integers = npt.NDArray[np.int64]
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
class Sites:
    """Where faults begin: the tensor of each, as its number in the population, and the place in it.

    By element, ascending and all different; by tensor, grouped by tensor, in the order drawn.
    """

    attempts: int
    tensors: Integers
    places: Integers

    def __len__(self) -> int:
        return len(self.tensors)


def sample(population: Population, amount: Amount, sampling: Sampling, draws: Draws) -> Sites:
    """Draw the sites of all faults that come about."""
    sizes = population.sizes
    total = int(sizes.sum())
    alone = amount.count is None and amount.fraction is None and amount.rate is None
    checked_sampling(sampling)
    if alone and sampling == "element":
        assert amount.probability is not None
        _check_memory(total * amount.probability)
        return split(sizes, total, draws.hits(total, amount.probability))
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
        return split(sizes, attempts, chosen)
    tensors = draws.below(len(sizes), attempts) if attempts else np.empty(0, np.int64)
    places = draws.below(sizes[tensors]) if attempts else tensors
    if amount.probability is not None:
        happens = draws.chance(amount.probability, attempts)
        tensors, places = tensors[happens], places[happens]
    order = np.argsort(tensors, kind="stable")
    return Sites(attempts, tensors[order], places[order])


def checked_sampling(sampling: object) -> None:
    """`UsageError` for a way to sample that there is not."""
    checked_choice("sampling", sampling, ("element", "tensor"))


def split(sizes: Integers, attempts: int, chosen: Integers) -> Sites:
    """From numbers counted through all tensors to tensors and places in them."""
    ends = np.cumsum(sizes)
    tensors = np.searchsorted(ends, chosen, side="right")
    return Sites(attempts, tensors, chosen - (ends - sizes)[tensors])


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
