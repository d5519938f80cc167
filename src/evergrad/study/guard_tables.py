"""The table of a study that lets guards watch: how often each speaks up, how soon, how often for nothing, at what cost.

Trainings that differ in nothing but their seed are one row. Without a fault a training is one run, however often it is
repeated; so false alarms are counted over the different runs without a fault that the study has (`corrupt = 0`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, quantiles

from evergrad.study.rendering import Entry, Quantity, Table
from evergrad.study.results import Cell, Results
from evergrad.study.statistics import wilson
from evergrad.study.table_notes import facts_under, varying_axes
from evergrad.study.trials import Observation
from evergrad.study.watching.contract import GUARD_EVERY, GUARDS

_AIM = ("fault", "flips", "where", "layer", "corrupt", "target", "step")
"""Axes that say something of the fault; the others say which training it is."""

_MEANINGS = {
    "guard": "norm, range and replicas are parts of Evergrad's own; non-finite asks torch.isfinite of loss and "
    "gradients in every step; checkpoint range compares the largest number of each tensor with what it was when the "
    "checkpoint was saved, once, at the load. Range and replicas look "
    f"every {GUARD_EVERY} steps. All watch the same trainings, and none acts",
    "trainings": "those with a fault that were watched to their end",
    "RWC seen %": "trainings whose final metric is not the golden run's, or that met N-EV: the part in which the guard "
    "spoke up after the fault. An alarm before it is a false one, and hides a later one",
    "RWC": "how many those are",
    "N-EV seen %": "the same of trainings that met a NaN, an infinity or an extreme value",
    "N-EV": "how many those are",
    "all seen %": "the same of all trainings with a fault, whether it did harm or not",
    "latency": "steps from the fault to the alarm, where there was one: 1 is in the first step with the fault, 0 "
    "before it; the median, and in brackets the quartiles",
    "false %": "runs without a fault in which the guard spoke up; runs with the same result count once",
    "false": "how many of how many runs, and their steps",
    "cost %": "seconds that the guard takes, of the seconds of a step, spread over all steps; the median of trainings, "
    "as rank 0 measured them while all guards watched",
}


def guard_table(results: Results) -> Table:
    """A row for each guard in each cell with a fault."""
    rows: dict[tuple[Entry, ...], list[Cell]] = {}
    faulty = [cell for cell in results.cells if cell.axes.get("corrupt") != 0]
    places = [name for name in varying_axes(results) if name != "seed" and _tells(name, faulty, results)]
    for cell in faulty:
        rows.setdefault(tuple(cell.axes.get(name) for name in places), []).append(cell)
    clean = [cell for cell in results.cells if cell.axes.get("corrupt") == 0]
    headers = tuple(_MEANINGS)
    lines: list[tuple[Entry, ...]] = []
    for place, cells in rows.items():
        quiet = [one for cell in clean if _is_same_training(cell, cells[0]) for one in cell.seen if one.alarms]
        seen = [(cell, one) for cell in cells for one in cell.seen if one.alarms]
        for guard in GUARDS:
            if any(guard in one.alarms for _, one in seen):
                lines.append((*place, *_row(guard, seen, quiet, results)))
    level = f"{100 * results.confidence:g} %, each for its row alone"
    notes = [*(f"{header}: {meaning}." for header, meaning in _MEANINGS.items()), f"Intervals: Wilson; {level}."]
    title = results.title or results.study
    return Table(title, (*places, *headers), tuple(lines), (*notes, *facts_under(results)), groups=len(places))


def _row(
    guard: str, seen: Sequence[tuple[Cell, Observation]], quiet: Sequence[Observation], results: Results
) -> tuple[Entry, ...]:
    delays = [(cell, one, _delay(cell, one, guard)) for cell, one in seen]
    met = [delay for _, one, delay in delays if _is_nev(one)]
    changed = [delay for cell, one, delay in delays if _is_nev(one) or one.metrics[-1:] != (cell.golden,)]
    everything = [delay for _, _, delay in delays]
    runs = {one.digest or f"{number}": one for number, one in enumerate(quiet)}
    false = sum(one.alarms.get(guard) is not None for one in runs.values())
    steps = sum(one.steps for one in runs.values())
    return (
        guard,
        len(seen),
        _rate(_heard(changed), len(changed), results),
        len(changed),
        _rate(_heard(met), len(met), results),
        len(met),
        _rate(_heard(everything), len(everything), results),
        _middle([delay for delay in everything if delay is not None]),
        _rate(false, len(runs), results),
        f"{false} of {len(runs)} ({steps:,} steps)" if runs else None,
        _cost(guard, [one.costs for _, one in seen]),
    )


def _tells(name: str, faulty: Sequence[Cell], results: Results) -> bool:
    """Whether rows differ in it once those without a fault are left out."""
    return name != "corrupt" or len({cell.axes.get(name) for cell in faulty}) > 1


def _is_same_training(cell: Cell, other: Cell) -> bool:
    names = {*cell.axes, *other.axes} - {*_AIM, "seed"}
    return all(cell.axes.get(name) == other.axes.get(name) for name in names)


def _delay(cell: Cell, seen: Observation, guard: str) -> int | None:
    """Steps from the fault to the alarm; None if it did not speak up, or spoke up before."""
    step, alarm = int(cell.axes.get("step", 0)), seen.alarms.get(guard)
    # Before step s (from 0) there were s steps: what speaks up after the s-th did so before the fault.
    return None if alarm is None or (alarm <= step and step > 0) else alarm - step


def _is_nev(seen: Observation) -> bool:
    return seen.nonfinite_at is not None or seen.extreme_at is not None


def _heard(delays: Sequence[int | None]) -> int:
    return sum(delay is not None for delay in delays)


def _rate(count: int, whole: int, results: Results) -> Quantity | None:
    if not whole:
        return None
    low, high = wilson(count, whole, results.confidence)
    return Quantity(100 * count / whole, 1, 100 * low, 100 * high)


def _middle(delays: Sequence[int]) -> Quantity | None:
    if not delays:
        return None
    if len(delays) == 1:
        return Quantity(float(delays[0]), 1)
    low, middle, high = quantiles(delays, n=4, method="inclusive")
    return Quantity(middle, 1, low, high)


def _cost(guard: str, costs: Sequence[Mapping[str, tuple[float, ...]]]) -> Quantity | None:
    parts = [100 * one[f"guard {guard}"][0] / one["step"][0] for one in costs if "step" in one and one["step"][0] > 0]
    return Quantity(median(parts), 2) if parts else None
