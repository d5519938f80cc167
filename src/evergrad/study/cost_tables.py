"""The table of a study that measures what saving costs: a row a cell, medians with their spread."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median, quantiles

from evergrad.study.outcomes import Outcome
from evergrad.study.rendering import Entry, Quantity, Table
from evergrad.study.results import Cell, Results
from evergrad.study.table_notes import facts_under, varying_axes

_MEANINGS = {
    "identical": "trainings that ended with every bit of the golden run's weights, and with its final metric",
    "blocked ms": "of one save, from its call to its return, on the rank where that took longest; median [quartiles] "
    "of all saves",
    "own ms": "the same, less the time in which that rank could have run and its core was at something else; waiting "
    "for another rank counts, even for one that waits for its core, so that it takes off more where ranks do not wait "
    "for each other",
    "bare s": "the steps of a trial without saves, median",
    "overhead %": "the time of a trial's steps with saves against the same steps without, from the same state, one "
    "right after the other",
    "drained ms": "from the end of those steps until all that was saved was durable; the steps' time is without it",
    "first save ms": "as blocked, of the save after an epoch: the first of its processes, which makes what later ones "
    "would find",
    "restore ms": "from a loaded model to its restored state on all ranks; median [quartiles] of all restarts",
    "restart ms": "from the kill of all ranks until all new ones could begin their first step; torch is loaded already",
}
_UNRELATED = ("N-EV", "given up", "degraded", "failed", "identical", "intervals")
"""Facts of studies of faults."""


def cost_table(results: Results) -> Table:
    """A row a cell: how often the result was the golden run's, and what saving or restarting took."""
    cells = results.cells
    varying = varying_axes(results)
    columns: dict[str, list[Entry]] = {
        "trainings": [cell.trainings for cell in cells],
        "identical": [cell.counts[Outcome.IDENTICAL] for cell in cells],
    }
    for header, entry in _ENTRIES.items():
        found = [entry(cell, results.confidence) for cell in cells]
        if any(one is not None for one in found):
            columns[header] = found
    return Table(
        results.title or results.study,
        (*varying, *columns),
        tuple(
            (*(cell.axes.get(name) for name in varying), *row)
            for cell, row in zip(cells, zip(*columns.values(), strict=True), strict=True)
        ),
        _notes(results, list(columns)),
        groups=max(0, len(varying) - 1),
    )


def median_interval(numbers: Sequence[float], confidence: float) -> tuple[float, float, float, float]:
    """The median, an interval for it, and how sure that is: the narrowest between two of the numbers, as many below as
    above, that is as sure as asked for; of few numbers the widest, which may be less.

    >>> median_interval([4, 1, 3, 2, 6, 5], 0.95)
    (3.5, 1, 6, 0.96875)
    """
    ordered = sorted(numbers)
    count = len(ordered)
    left = 0
    # That fewer than `left` of so many coin tosses show one side, or the other.
    while left + 1 < count - left - 1 and 1 - 2 * _tail(left + 1, count) >= confidence:
        left += 1
    return median(ordered), ordered[left], ordered[count - 1 - left], max(0.0, 1 - 2 * _tail(left, count))


def _tail(most: int, count: int) -> float:
    return float(sum(math.comb(count, hits) for hits in range(most + 1)) / 2**count)


def _quartiles(numbers: Sequence[float], digits: int) -> Quantity | None:
    if len(numbers) < 2:
        return Quantity(numbers[0], digits) if numbers else None
    low, middle, high = quantiles(numbers, n=4, method="inclusive")
    return Quantity(middle, digits, low, high)


def _milliseconds(cost: str) -> Callable[[Cell, float], Entry]:
    return lambda cell, _: _quartiles([1000 * time for time in _times(cell, cost)], 1)


def _bare(cell: Cell, _: float) -> Entry:
    times = _times(cell, "without_s")
    return Quantity(median(times), 2) if times else None


def _overhead(cell: Cell, confidence: float) -> Entry:
    numbers = _overheads(cell)
    if not numbers:
        return None
    middle, low, high, _ = median_interval(numbers, confidence)
    return Quantity(middle, 1, low, high)


_ENTRIES: dict[str, Callable[[Cell, float], Entry]] = {
    "blocked ms": _milliseconds("blocked_s"),
    "own ms": _milliseconds("own_s"),
    "bare s": _bare,
    "overhead %": _overhead,
    "drained ms": _milliseconds("drained_s"),
    "first save ms": _milliseconds("first_s"),
    "restore ms": _milliseconds("restore_s"),
    "restart ms": _milliseconds("restart_s"),
}


def _times(cell: Cell, cost: str) -> list[float]:
    """In seconds, of all trials one after the other."""
    return [time for one in cell.seen for time in one.costs.get(cost, ())]


def _overheads(cell: Cell) -> list[float]:
    """Of each trial, in %: its steps with saves against the same steps without."""
    pairs = ((one.costs.get("with_s"), one.costs.get("without_s")) for one in cell.seen)
    return [100 * (saved[0] / bare[0] - 1) for saved, bare in pairs if saved and bare]


def _notes(results: Results, columns: Sequence[str]) -> tuple[str, ...]:
    notes = [f"{column}: {_MEANINGS[column]}." for column in columns if column in _MEANINGS]
    sure = [median_interval(found, results.confidence)[3] for cell in results.cells if (found := _overheads(cell))]
    if sure:
        few = "" if min(sure) >= results.confidence else f"; here, of so few, {100 * min(sure):.0f} %"
        asked = f"{100 * results.confidence:g} % sure{few}"
        notes.append(f"Interval of the overhead: of the median, between two of the trials' own numbers, {asked}.")
    if machine := results.facts.get("machine"):
        notes.append(f"Cores: {machine}; ranks are pinned to one each, in turn, and what saves beside them has all.")
    facts = {name: value for name, value in results.facts.items() if name not in _UNRELATED}
    return (*notes, *facts_under(replace(results, facts=facts)))
