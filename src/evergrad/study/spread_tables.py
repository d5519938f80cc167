"""The table of a study that watches how far a fault spreads: a row for each cell and number of steps."""

from __future__ import annotations

from collections.abc import Sequence

from evergrad.study.rendering import Entry, Quantity, Table
from evergrad.study.results import Cell, Results
from evergrad.study.statistics import mean, paired_interval
from evergrad.study.table_notes import facts_under, varying_axes

AFTER = (0, 1, 2, 3, 5, 10)
"""The numbers of steps that are shown, beside the last."""

_PARTS = {"elements": 4, "layers": 1, "ranks": 1}
"""Digits of each: one element of many ranks is a small part."""

_MEANINGS = {
    "steps": "since the restart; 0: the fault is there, and no step has been taken. The last row of a cell is "
    "after the last step that was compared",
    "trainings": "those that came so far: who was given up has no later steps, and one that crashed is left out",
    "elements %": "of all parameters of all ranks, those that differ in any bit from the fault-free run's after as "
    "many steps",
    "layers %": "of the modules that have parameters of their own, those in which an element differs on any rank",
    "ranks %": "of the ranks, those in which an element differs",
}


def spread_table(results: Results) -> Table:
    """How far faults have come after so many steps: means over the trainings of a cell, with intervals."""
    places = varying_axes(results)
    rows: list[tuple[Entry, ...]] = []
    for cell in results.cells:
        for after in _shown(cell):
            seen = _seen(cell, after)
            parts = (_part([one[name] for one in seen], results, digits) for name, digits in _PARTS.items())
            rows.append((*(cell.axes.get(name) for name in places), after, len(seen), *parts))
    headers = ("steps", "trainings", *(f"{name} %" for name in _PARTS))
    level = f"{100 * results.confidence:g} %, each for its row alone"
    notes = [f"{header}: {_MEANINGS[header]}." for header in headers]
    notes.append(f"Means over trainings, with intervals by bootstrap where they differ; {level}.")
    title = f"{results.title or results.study}: parts that differ from the fault-free run"
    return Table(title, (*places, *headers), tuple(rows), (*notes, *facts_under(results)), groups=len(places))


def _shown(cell: Cell) -> list[int]:
    """Of `AFTER` what any training of the cell has, and the last of all."""
    there = {int(step) for one in cell.seen if one.spread for step in one.spread["after"].values}
    return sorted(there.intersection((*AFTER, max(there)))) if there else []


def _seen(cell: Cell, after: int) -> list[dict[str, float]]:
    """The parts after that many steps, of each training that has them."""
    found = []
    for one in cell.seen:
        steps = one.spread["after"].values if one.spread else ()
        if after in steps:
            at = steps.index(after)
            found.append({name: one.spread[name].values[at] for name in _PARTS})
    return found


def _part(values: Sequence[float], results: Results, digits: int) -> Quantity | None:
    percent = [100 * value for value in values]
    middle = mean(percent)
    if middle is None:
        return None
    # Of numbers that are all the same there is nothing to draw again, and no interval to tell.
    low, high = paired_interval(percent, results.confidence) if len(set(percent)) > 1 else (None, None)
    return Quantity(middle, digits, low, high)
