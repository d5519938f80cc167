"""Random draws that are the same on every platform and with every version of NumPy.

The bit generator is PCG64 as NumPy seeds it, whose stream NumPy promises never to change. NumPy's distributions
carry no such promise, so none is used: every draw is derived here from the raw 64-bit outputs, in the order in
which they come, by integer arithmetic and by additions, products and quotients of doubles, which IEEE 754 fixes
to the last bit. (Logarithms of the C library differ between platforms: `_ln` is ours.)

A draw below n is the output modulo n; outputs in the last, incomplete stretch of n below 2**64 are skipped.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

GENERATOR = "PCG64, raw 64-bit outputs modulo n with rejection"

Integers = npt.NDArray[np.int64]

_BATCH = 1 << 16
_SERIES = 24  # terms of the logarithm: |s| ≤ 1/3, so that 3**-49 is left out
_LN2 = 0.6931471805599453


class Draws:
    """A stream of draws from one seed.

    >>> Draws(7).below(10, 5)
    array([3, 5, 6, 4, 1])
    """

    def __init__(self, seed: int) -> None:
        self._source = np.random.PCG64(seed)
        self.taken = 0
        """How many outputs of the generator were used."""

    def raw(self, count: int) -> npt.NDArray[np.uint64]:
        """The next outputs of the generator."""
        self.taken += count
        return np.asarray(self._source.random_raw(count), np.uint64)

    def below(self, bound: int | Integers, count: int | None = None) -> Integers:
        """Integers from 0 up to a bound, all alike; one bound for all, or one each."""
        bounds = np.atleast_1d(np.asarray(bound, np.uint64))
        drawn = self.raw(len(bounds) if count is None else count)
        # Where the last whole stretch of n ends, modulo 2**64: 0 if n divides 2**64, and nothing is skipped.
        last = np.zeros_like(bounds) - (np.zeros_like(bounds) - bounds) % bounds
        skipped = np.flatnonzero((drawn >= last) & (last != 0))
        while len(skipped):
            drawn[skipped] = self.raw(len(skipped))
            ends = last if len(last) == 1 else last[skipped]
            skipped = skipped[drawn[skipped] >= ends]
        return (drawn % bounds).astype(np.int64)

    def chance(self, probability: float, count: int) -> npt.NDArray[np.bool_]:
        """For each of `count`, whether something of this probability happens; to 2**-64."""
        if probability >= 1:
            return np.ones(count, bool)
        return self.raw(count) < np.uint64(int(probability * 2.0**64))

    def subset(self, population: int, count: int) -> Integers:
        """`count` different integers below `population`, ascending; every such set is equally likely."""
        if 2 * count > population:  # name those that stay out
            keep = np.ones(population, bool)
            keep[self.subset(population, population - count)] = False
            return np.flatnonzero(keep)
        found = _distinct(np.sort(self.below(population, count))) if count else np.empty(0, np.int64)
        while len(found) < count:
            more = self.below(population, count - len(found))
            found = _distinct(np.sort(np.concatenate([found, np.sort(more)]), kind="stable"))
        return found

    def others(self, population: int, taken: Integers, count: int) -> Integers:
        """`count` different integers below `population` that are not in the ascending `taken`, in no order."""
        if 2 * len(taken) > population:
            free = np.ones(population, bool)
            free[taken] = False
            places = np.flatnonzero(free)
            return places[self.subset(len(places), count)]
        chosen: dict[int, None] = {}
        while len(chosen) < count:
            drawn = self.below(population, count - len(chosen))
            place = np.minimum(np.searchsorted(taken, drawn), max(len(taken) - 1, 0))
            free = drawn[taken[place] != drawn] if len(taken) else drawn
            chosen.update(dict.fromkeys(free.tolist()))
        return np.array(list(chosen), np.int64)

    def poisson(self, expected: float) -> int:
        """How many of something that happens `expected` times on average; costs as much as it counts."""
        count, spent, batch = 0, 0.0, int(min(_BATCH, 16 + 2 * expected))
        while True:
            # Times between arrivals, each −ln u, until more time has gone by than there was.
            waits = np.cumsum(np.concatenate([[spent], -_ln(self._unit(batch))]))[1:]
            inside = int(np.searchsorted(waits, expected, side="right"))
            count += inside
            if inside < len(waits):
                return count
            spent = float(waits[-1])

    def hits(self, population: int, probability: float) -> Integers:
        """Which of a population are hit when each is with this probability, ascending; costs what the hits cost."""
        if probability >= 1:
            return np.arange(population)
        if probability <= 0:
            return np.empty(0, np.int64)
        if probability < 0.5:  # ln(1 − p), also where 1 − p is 1 to a double
            rate = float(_ln_ratio(np.array([-probability / (2 - probability)]))[0])
        else:
            rate = float(_ln(np.array([1 - probability]))[0])
        if rate == 0:  # too small for a double
            return np.empty(0, np.int64)
        pieces: list[Integers] = []
        place = -1
        while place < population:
            batch = int(min(_BATCH, 16 + 2 * population * probability))
            gaps = np.minimum(_ln(self._unit(batch)) / rate, float(population)).astype(np.int64) + 1
            places = place + np.cumsum(gaps)
            pieces.append(places[places < population])
            place = int(places[-1])
        return np.concatenate(pieces)

    def _unit(self, count: int) -> npt.NDArray[np.float64]:
        """Doubles from 2**-53 to 1, all alike."""
        return ((self.raw(count) >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * 2.0**-53


def _distinct(ascending: Integers) -> Integers:
    return ascending[np.diff(ascending, prepend=-1) > 0]


def _ln(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The natural logarithm, by operations that are the same everywhere."""
    mantissa, exponent = np.frexp(values)
    low = mantissa < math.sqrt(0.5)
    mantissa = np.where(low, 2 * mantissa, mantissa)
    exponent = exponent - low
    return _ln_ratio((mantissa - 1) / (mantissa + 1)) + exponent * _LN2


def _ln_ratio(s: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """ln((1 + s) / (1 − s)) for small s."""
    square, total = s * s, np.zeros_like(s)
    for term in range(_SERIES, -1, -1):
        total = total * square + 1.0 / (2 * term + 1)
    return 2 * s * total
