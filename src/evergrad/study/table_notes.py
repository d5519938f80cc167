"""What every table of a study shows beside its own columns: the axes that tell cells apart, and the facts under it."""

from __future__ import annotations

from evergrad.study.results import Results


def varying_axes(results: Results) -> list[str]:
    """The axes that a table must show: without them two cells might look the same."""
    names = dict.fromkeys([*results.axes, *(name for cell in results.cells for name in cell.axes)])
    return [name for name in names if name in results.axes or len({cell.axes.get(name) for cell in results.cells}) > 1]


def facts_under(results: Results) -> tuple[str, ...]:
    """How many trainings there are, what all cells share, and everything that the numbers depend on."""
    done = sum(cell.trainings for cell in results.cells)
    notes = [f"{done:,} of {results.trials:,} trainings."]
    varying = varying_axes(results)
    same = results.cells[0].axes if results.cells else {}
    fixed = ", ".join(f"{name} {place}" for name, place in same.items() if name not in varying)
    notes += [f"In every cell: {fixed}."] if fixed else []
    return (*notes, *(f"{name}: {value}" for name, value in results.facts.items()), *results.notes)
