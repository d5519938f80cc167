"""Which cells differ: tests between neighbours along an axis, and of a trend, corrected for how many there are.

Between two cells it is Fisher's exact test, two-sided: right at any count, and rates of 0 and 1 are common here. Where
trainings are few it errs towards "not told apart". A difference comes with Newcombe's interval, which is for that pair
alone; the verdict is by the p-value that Holm corrects over everything tested in one call, so that a table of cells
without any difference has none marked, with the stated confidence. Benjamini and Hochberg's, which bounds the share of
wrong ones among those marked, stands beside it.

A study that stops when it knows enough chose its size by what it saw: its p-values are a guide, not a promise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

from evergrad.errors import UsageError
from evergrad.study.results import Cell, Results
from evergrad.study.statistics import checked_confidence, checked_counts, checked_part, scipy_part, wilson
from evergrad.study.trials import Axes, Outcome
from evergrad.wording import checked_choice, did_you_mean, short_repr

AxisValue: TypeAlias = "str | int | float"

MEASURES = ("nev", "rwc")
DIFFERS = "differs"
NOT_TOLD_APART = "not told apart"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellComparison:
    """Two cells that are neighbours on one axis and the same on all others."""

    measure: str
    """`nev` or `rwc`."""
    axis: str
    first: AxisValue
    second: AxisValue
    others: Axes
    """Where both are on the other axes."""
    first_counts: tuple[int, int]
    """How many of how many known trainings."""
    second_counts: tuple[int, int]
    interval: tuple[float, float]
    """Of the difference, of this pair alone."""
    p: float
    p_holm: float = 1.0
    p_bh: float = 1.0
    verdict: str = NOT_TOLD_APART

    @property
    def rates(self) -> tuple[float, float]:
        """Of the first and of the second."""
        return self.first_counts[0] / self.first_counts[1], self.second_counts[0] / self.second_counts[1]

    @property
    def difference(self) -> float:
        """The second's rate less the first's."""
        return self.rates[1] - self.rates[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """Whether a rate rises or falls along an axis, all other axes equal."""

    measure: str
    axis: str
    places: tuple[AxisValue, ...]
    others: Axes
    counts: tuple[tuple[int, int], ...]
    z: float
    """Above 0: it rises."""
    p: float
    p_holm: float = 1.0
    verdict: str = "no trend told"

    @property
    def never_falls(self) -> bool:
        """Whether every rate seen is at least its neighbour's before."""
        rates = [k / n for k, n in self.counts]
        return all(before <= after for before, after in pairwise(rates))


def compare_cells(
    results: Results,
    *,
    axis: str | None = None,
    measures: Sequence[str] = MEASURES,
    confidence: float | None = None,
) -> tuple[CellComparison, ...]:
    """Every pair of neighbours along one axis, or along all that vary, in the plan's order.

    Cells of which nothing is known yet are passed over. The correction is over all that is returned.
    """
    level = checked_confidence(results.confidence if confidence is None else confidence)
    found: list[CellComparison] = []
    for name in results.axes if axis is None else (_checked_axis(results, axis),):
        for others, cells in _lines(results, name):
            for measure in measures:
                for one, other in pairwise(cells):
                    before, after = count_measure(one, measure), count_measure(other, measure)
                    found.append(
                        CellComparison(
                            measure=measure,
                            axis=name,
                            first=one.axes[name],
                            second=other.axes[name],
                            others=others,
                            first_counts=before,
                            second_counts=after,
                            interval=newcombe(before, after, level),
                            p=fisher(before, after),
                        )
                    )
    ps = [one.p for one in found]
    return tuple(
        replace(one, p_holm=by_holm, p_bh=by_bh, verdict=DIFFERS if by_holm <= 1 - level else NOT_TOLD_APART)
        for one, by_holm, by_bh in zip(found, holm(ps), benjamini_hochberg(ps), strict=True)
    )


def trend(results: Results, axis: str, *, measure: str = "nev", confidence: float | None = None) -> tuple[Trend, ...]:
    """The trend along an axis, for each combination of the others, corrected over them.

    Numbers go from the lowest to the highest, other places in the plan's order. They count as equally far apart: for
    1, 10, 100 flips that is the logarithm.
    """
    level = checked_confidence(results.confidence if confidence is None else confidence)
    found: list[Trend] = []
    for others, line in _lines(results, _checked_axis(results, axis)):
        if len(line) < 2:
            continue
        cells = sort_by_axis(line, axis)
        counts = tuple(count_measure(cell, measure) for cell in cells)
        places = tuple(cell.axes[axis] for cell in cells)
        z, p = cochran_armitage(counts)
        found.append(Trend(measure=measure, axis=axis, places=places, others=others, counts=counts, z=z, p=p))
    corrected = zip(found, holm([one.p for one in found]), strict=True)
    return tuple(
        replace(one, p_holm=p, verdict=("rises" if one.z > 0 else "falls") if p <= 1 - level else one.verdict)
        for one, p in corrected
    )


def sort_by_axis(cells: Sequence[Cell], axis: str) -> list[Cell]:
    """Cells by their places on an axis of numbers, the lowest first; in the order given if it is of anything else."""
    places = [cell.axes.get(axis) for cell in cells]
    numbers = [place for place in places if isinstance(place, int | float)]
    if len(numbers) < len(places):
        return list(cells)
    return [cell for _, cell in sorted(zip(numbers, cells, strict=True), key=lambda pair: pair[0])]


def count_measure(cell: Cell, measure: str) -> tuple[int, int]:
    """How many of a cell's known trainings show it: a NaN, infinity or extreme value (`nev`), or any change (`rwc`)."""
    checked_choice("measure", measure, MEASURES)
    return (cell.counts[Outcome.NEV] if measure == "nev" else cell.changed_result), cell.known


def fisher(first: tuple[int, int], second: tuple[int, int]) -> float:
    """The two-sided p-value of Fisher's exact test that two rates, each k of n, are one.

    >>> round(fisher((8, 10), (1, 6)), 6)
    0.034965
    """
    (k1, n1), (k2, n2) = checked_counts(*first), checked_counts(*second)
    return min(1.0, float(scipy_part("stats").fisher_exact([[k1, n1 - k1], [k2, n2 - k2]])[1]))


def newcombe(first: tuple[int, int], second: tuple[int, int], confidence: float = 0.95) -> tuple[float, float]:
    """Newcombe's hybrid score interval of the second rate less the first, each k of n: both Wilson intervals combined.

    >>> [round(bound, 4) for bound in newcombe((48, 80), (56, 70))]
    [0.0524, 0.3339]
    """
    if 0 in (first[1], second[1]):
        return -1.0, 1.0
    (low1, high1), (low2, high2) = wilson(*first, confidence), wilson(*second, confidence)
    rate1, rate2 = first[0] / first[1], second[0] / second[1]
    down, up = math.hypot(rate2 - low2, high1 - rate1), math.hypot(high2 - rate2, rate1 - low1)
    return max(-1.0, rate2 - rate1 - down), min(1.0, rate2 - rate1 + up)


def cochran_armitage(counts: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """z and two-sided p of a linear trend in rates, each k of n, at equal distances.

    >>> z, p = cochran_armitage([(83, 86), (90, 93), (129, 136), (70, 82)])  # lung cancer and smoking, Fleiss 1981
    >>> round(z * z, 4), round(p, 6)
    (8.2249, 0.004132)
    """
    pairs = [checked_counts(k, n) for k, n in counts]
    hits, total = sum(k for k, _ in pairs), sum(n for _, n in pairs)
    if not 0 < hits < total:
        return 0.0, 1.0
    rate = hits / total
    slope = math.fsum(place * (k - n * rate) for place, (k, n) in enumerate(pairs))
    first, second = (sum(place**power * n for place, (_, n) in enumerate(pairs)) for power in (1, 2))
    variance = rate * (1 - rate) * (second - first * first / total)
    if variance <= 0:  # all trainings at one place
        return 0.0, 1.0
    z = slope / math.sqrt(variance)
    return z, float(scipy_part("special").erfc(abs(z) / math.sqrt(2)))


def holm(ps: Sequence[float]) -> list[float]:
    """p-values corrected so that the chance of even one wrong rejection stays below the level: Holm's step-down.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03, 0.005])]
    [0.03, 0.06, 0.06, 0.02]
    """
    corrected, highest = [0.0] * len(ps), 0.0
    for rank, place in enumerate(sorted(range(len(ps)), key=lambda place: _checked_p(ps[place]))):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[place]))
        corrected[place] = highest
    return corrected


def benjamini_hochberg(ps: Sequence[float]) -> list[float]:
    """p-values corrected so that of all rejections the share of wrong ones is expected below the level.

    >>> [round(p, 3) for p in benjamini_hochberg([0.01, 0.04, 0.03, 0.005])]
    [0.02, 0.04, 0.04, 0.02]
    """
    if not ps:
        return []
    checked = [_checked_p(p) for p in ps]
    return [float(p) for p in scipy_part("stats").false_discovery_control(checked, method="bh")]


def _lines(results: Results, axis: str) -> Iterator[tuple[Axes, list[Cell]]]:
    """The cells that differ on this axis alone, in the plan's order; those with nothing known are left out."""
    lines: dict[frozenset[tuple[str, AxisValue]], list[Cell]] = {}
    for cell in results.cells:
        if axis in cell.axes and cell.known:
            lines.setdefault(frozenset(_others(cell, axis).items()), []).append(cell)
    for cells in lines.values():
        yield _others(cells[0], axis), cells


def _others(cell: Cell, axis: str) -> dict[str, AxisValue]:
    return {name: place for name, place in cell.axes.items() if name != axis}


def _checked_axis(results: Results, axis: str) -> str:
    known = list(dict.fromkeys(name for cell in results.cells for name in cell.axes))
    if axis not in known:
        names = ", ".join(known) or "none"
        raise UsageError(
            f"axis: expected one of the study's, {names}, found {short_repr(axis)}.{did_you_mean(axis, known)}"
        )
    return axis


def _checked_p(p: float) -> float:
    return p if p in (0, 1) else checked_part("p", p)
