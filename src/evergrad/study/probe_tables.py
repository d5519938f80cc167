"""The table of a study that asks for more than outcomes: how far faults spread, what guards saw, what saving costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median, quantiles

from evergrad.errors import UsageError
from evergrad.records import Json
from evergrad.study.probe_base import GUARD_EVERY, GUARDS
from evergrad.study.results import Cell, Results
from evergrad.study.statistics import mean, paired_interval, wilson
from evergrad.study.table_formats import Quantity, Table, TableEntry, notes_under, varying_axes
from evergrad.study.trials import Observation, Outcome

PROBE_TABLE_KINDS = ("costs", "spread", "guards")


def main_probe_kind(results: Results) -> str:
    """Which of `PROBE_TABLE_KINDS` this study is first of all about; empty: outcomes are what it asks for."""
    return next(iter(probe_kinds(results)), "")


def probe_kinds(results: Results) -> list[str]:
    """Of `PROBE_TABLE_KINDS`, those that there is something to show of."""
    seen = [one for cell in results.cells for one in cell.seen]
    there = {
        "guards": any(one.alarms for one in seen),
        "spread": any(one.spread for one in seen),
        "costs": any(one.costs and not one.alarms for one in seen),  # what guards cost is in their own table
    }
    return [kind for kind, is_there in there.items() if is_there]


def probe_tables_to_json(results: Results) -> dict[str, Json]:
    """Every table of these, a mapping a row; a number with what stands in brackets behind it."""
    found: dict[str, Json] = {}
    for kind in probe_kinds(results):
        table = probe_table(results, kind)
        found[kind] = [dict(zip(table.headers, map(_plain, row), strict=True)) for row in table.rows]
    return found


def probe_table(results: Results, kind: str) -> Table:
    """The table of that kind; `UsageError` if the study has nothing to put into it."""
    found = probe_kinds(results)
    if kind not in found:
        told = f"it has {' and '.join(found)}" if found else "its trials were not asked for more than outcomes"
        raise UsageError(f"study {results.study}: no table of {kind}: {told}")
    if kind == "guards":
        return guard_table(results)
    if kind == "spread":
        return spread_table(results)

    return cost_table(results)


def _plain(entry: TableEntry) -> Json:
    if not isinstance(entry, Quantity):
        return entry
    return {"value": entry.value, "low": entry.low, "high": entry.high}


# The table of a study that watches how far a fault spreads: a row for each cell and number of steps.

AFTER = (0, 1, 2, 3, 5, 10)
"""The numbers of steps that are shown, beside the last."""

_PARTS = {"elements": 4, "layers": 1, "ranks": 1}
"""Digits of each: one element of many ranks is a small part."""

_MEANINGS_SPREAD_TABLES = {
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
    rows: list[tuple[TableEntry, ...]] = []
    for cell in results.cells:
        for after in _shown(cell):
            seen = _seen(cell, after)
            parts = (_part([one[name] for one in seen], results, digits) for name, digits in _PARTS.items())
            rows.append((*(cell.axes.get(name) for name in places), after, len(seen), *parts))
    headers = ("steps", "trainings", *(f"{name} %" for name in _PARTS))
    level = f"{100 * results.confidence:g} %, each for its row alone"
    notes = [f"{header}: {_MEANINGS_SPREAD_TABLES[header]}." for header in headers]
    notes.append(f"Means over trainings, with intervals by bootstrap where they differ; {level}.")
    title = f"{results.title or results.study}: parts that differ from the fault-free run"
    return Table(title, (*places, *headers), tuple(rows), (*notes, *notes_under(results)), groups=len(places))


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


# The table of a study that lets guards watch: how often each speaks up, how soon, how often for nothing, at what
# cost.
#
# Trainings that differ in nothing but their seed are one row. Without a fault a training is one run, however often it
# is repeated; so false alarms are counted over the different runs without a fault that the study has (`corrupt = 0`).

_AIM = ("fault", "flips", "where", "layer", "corrupt", "target", "step")
"""Axes that say something of the fault; the others say which training it is."""

_MEANINGS_GUARD_TABLES = {
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
    rows: dict[tuple[TableEntry, ...], list[Cell]] = {}
    faulty = [cell for cell in results.cells if cell.axes.get("corrupt") != 0]
    places = [name for name in varying_axes(results) if name != "seed" and _tells(name, faulty, results)]
    for cell in faulty:
        rows.setdefault(tuple(cell.axes.get(name) for name in places), []).append(cell)
    clean = [cell for cell in results.cells if cell.axes.get("corrupt") == 0]
    headers = tuple(_MEANINGS_GUARD_TABLES)
    lines: list[tuple[TableEntry, ...]] = []
    for place, cells in rows.items():
        quiet = [one for cell in clean if _is_same_training(cell, cells[0]) for one in cell.seen if one.alarms]
        seen = [(cell, one) for cell in cells for one in cell.seen if one.alarms]
        for guard in GUARDS:
            if any(guard in one.alarms for _, one in seen):
                lines.append((*place, *_row(guard, seen, quiet, results)))
    level = f"{100 * results.confidence:g} %, each for its row alone"
    notes = [
        *(f"{header}: {meaning}." for header, meaning in _MEANINGS_GUARD_TABLES.items()),
        f"Intervals: Wilson; {level}.",
    ]
    title = results.title or results.study
    return Table(title, (*places, *headers), tuple(lines), (*notes, *notes_under(results)), groups=len(places))


def _row(
    guard: str, seen: Sequence[tuple[Cell, Observation]], quiet: Sequence[Observation], results: Results
) -> tuple[TableEntry, ...]:
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


# The table of a study that measures what saving costs: a row a cell, medians with their spread.

_MEANINGS_COST_TABLES = {
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
    columns: dict[str, list[TableEntry]] = {
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


def _milliseconds(cost: str) -> Callable[[Cell, float], TableEntry]:
    return lambda cell, _: _quartiles([1000 * time for time in _times(cell, cost)], 1)


def _bare(cell: Cell, _: float) -> TableEntry:
    times = _times(cell, "without_s")
    return Quantity(median(times), 2) if times else None


def _overhead(cell: Cell, confidence: float) -> TableEntry:
    numbers = _overheads(cell)
    if not numbers:
        return None
    middle, low, high, _ = median_interval(numbers, confidence)
    return Quantity(middle, 1, low, high)


_ENTRIES: dict[str, Callable[[Cell, float], TableEntry]] = {
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
    notes = [f"{column}: {_MEANINGS_COST_TABLES[column]}." for column in columns if column in _MEANINGS_COST_TABLES]
    sure = [median_interval(found, results.confidence)[3] for cell in results.cells if (found := _overheads(cell))]
    if sure:
        few = "" if min(sure) >= results.confidence else f"; here, of so few, {100 * min(sure):.0f} %"
        asked = f"{100 * results.confidence:g} % sure{few}"
        notes.append(f"Interval of the overhead: of the median, between two of the trials' own numbers, {asked}.")
    if machine := results.facts.get("machine"):
        notes.append(f"Cores: {machine}; ranks are pinned to one each, in turn, and what saves beside them has all.")
    facts = {name: value for name, value in results.facts.items() if name not in _UNRELATED}
    return (*notes, *notes_under(replace(results, facts=facts)))
