"""The tables of a study: a row a cell, the published shape, which cells differ; and the same as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence

from evergrad.records import Json
from evergrad.study.columns import ACCURACIES, COUNTED, MEANINGS, PUBLISHED, change, nev_rate, rwc_rate, start
from evergrad.study.comparisons import Comparison, Trend, compare_cells, measured, trend
from evergrad.study.outcomes import Outcome
from evergrad.study.rendering import Entry, Quantity, Table
from evergrad.study.results import Cell, Results
from evergrad.study.statistics import mean, proportion_interval, standard_deviation
from evergrad.study.table_notes import facts_under, varying_axes
from evergrad.study.watched_tables import watched_to_json
from evergrad.training.settings import Direction
from evergrad.wording import checked_choice

_METHODS = {
    "wilson": "Wilson",
    "clopper-pearson": "Clopper and Pearson, exact",
    "anytime": "valid at every look, by a beta-binomial mixture, since the study may stop when it knows enough",
}


def summary_table(results: Results) -> Table:
    """One row a cell: its axes, how its trainings ended, rates with intervals, and accuracy where there is any."""
    cells = results.cells
    places = varying_axes(results)
    columns: dict[str, list[Entry]] = {"trainings": [cell.trainings for cell in cells]}
    if any(cell.trainings != cell.due for cell in cells):
        columns["due"] = [cell.due for cell in cells]
    for header, outcome in COUNTED.items():
        if outcome is not Outcome.UNKNOWN or any(cell.counts[outcome] for cell in cells):
            columns[header] = [cell.counts[outcome] for cell in cells]
        if outcome is Outcome.NEV:
            columns["NaN"] = [cell.nonfinite for cell in cells]
    columns["N-EV %"] = [nev_rate(cell, results) for cell in cells]
    columns["RWC"] = [cell.changed_result for cell in cells]
    columns["RWC %"] = [rwc_rate(cell, results) for cell in cells]
    for header, entry in ACCURACIES.items():
        found: list[Entry] = [entry(cell, results) for cell in cells]
        if any(one is not None for one in found):
            columns[header] = found
    return Table(
        results.title or results.study,
        (*places, *columns),
        tuple(
            (*(cell.axes.get(name) for name in places), *numbers)
            for cell, numbers in zip(cells, zip(*columns.values(), strict=True), strict=True)
        ),
        _notes(results, list(columns)),
    )


def published_table(results: Results, measure: str = "nev") -> Table:
    """One of `PUBLISHED` in the published shape: `rows` down, `columns` across, further axes as groups of rows."""
    checked_choice("measure", measure, tuple(PUBLISHED))
    header, entry = PUBLISHED[measure]
    names = _names(results)
    varying = varying_axes(results)
    across = results.columns if results.columns in names else ""
    down = results.rows if results.rows in names else next((name for name in varying if name != across), "")
    groups = [name for name in varying if name not in (down, across)]
    stubs = [*groups, down] if down else groups
    tops = list(dict.fromkeys(cell.axes.get(across) for cell in results.cells)) if across else []
    lines: dict[tuple[Entry, ...], dict[Entry, Entry]] = {}
    for cell in results.cells:
        line = lines.setdefault(tuple(cell.axes.get(name) for name in stubs), {})
        line[cell.axes.get(across) if across else header] = entry(cell, results)
    # Cells of a group may lie apart in the plan, where another axis is the outer one.
    order = {key: place for place, key in enumerate(dict.fromkeys(stub[: len(groups)] for stub in lines))}
    rows = sorted(lines.items(), key=lambda item: order[item[0][: len(groups)]])
    asked: list[Entry] = list(tops) or [header]
    return Table(
        f"{results.title or results.study}: {header}",
        (*stubs, *("none" if top is None else str(top) for top in asked)),
        tuple((*stub, *(line.get(top) for top in asked)) for stub, line in rows),
        _notes(results, [header.removesuffix(" %"), header]),
        groups=len(groups),
    )


def comparisons_table(results: Results, comparisons: Sequence[Comparison] | None = None) -> Table:
    """Neighbouring cells tested against each other; all that can be, if none are given."""
    found = compare_cells(results) if comparisons is None else comparisons
    rows: list[tuple[Entry, ...]] = []
    for one in found:
        before, after = (Quantity(100 * rate) for rate in one.rates)
        difference = Quantity(100 * one.difference, 1, 100 * one.interval[0], 100 * one.interval[1])
        where = _where(one, results)
        chances = (Quantity(p, 4) for p in (one.p, one.p_holm, one.p_bh))
        pair = (_LABELS[one.measure], one.axis, one.first, one.second)
        rows.append((*pair, where, before, after, difference, *chances, one.verdict))
    notes = [
        f"p: Fisher's exact test, two-sided; corrected over the {len(found)} of this table by Holm, which the verdict "
        f"goes by, and by Benjamini and Hochberg (BH).",
        f"difference: of the rates in %, with Newcombe's interval, {_percent(results.confidence)}, of that pair alone.",
        *_early(results),
    ]
    headers = ("measure", "axis", "from", "to", "at", "% from", "% to", "difference")
    return Table(
        f"{results.title or results.study}: which cells differ",
        (*headers, "p", "p Holm", "p BH", "verdict"),
        tuple(rows),
        (*notes, *facts_under(results)),
    )


def trends_table(results: Results, axis: str, measure: str = "nev", trends: Sequence[Trend] | None = None) -> Table:
    """Whether a rate rises along an axis."""
    found = trend(results, axis, measure=measure) if trends is None else trends
    rows = tuple(
        (
            _where(one, results),
            " ".join(f"{100 * k / n:.1f}" for k, n in one.counts),
            Quantity(one.z, 2),
            Quantity(one.p, 4),
            Quantity(one.p_holm, 4),
            "no" if one.never_falls else "yes",
            one.verdict,
        )
        for one in found
    )
    label = _LABELS[measure]
    notes = (
        f"p: Cochran and Armitage's test of a trend, two-sided, the places of {axis} at equal distances; corrected "
        f"over the {len(found)} of this table by Holm, which the verdict goes by.",
        "a fall: whether any rate seen is below the one before it.",
        *_early(results),
    )
    headers = ("at", f"{label} % along {axis}", "z", "p", "p Holm", "a fall", "verdict")
    title = f"{results.title or results.study}: {label} along {axis}"
    return Table(title, headers, rows, (*notes, *facts_under(results)))


def results_to_json(results: Results) -> dict[str, Json]:
    """The study's cells, and what else its tables say, as JSON; what has no value is null."""
    cells: list[Json] = [_cell_to_json(cell, results) for cell in results.cells]
    facts: dict[str, Json] = dict(results.facts)
    notes: list[Json] = [*results.notes]
    return {
        "study": results.study,
        "trials": results.trials,
        "cells": cells,
        "title": results.title,
        "source": results.source,
        "scale": results.scale,
        "varying": [*varying_axes(results)],
        "confidence": results.confidence,
        "interval": results.interval,
        "facts": facts,
        "notes": notes,
        **watched_to_json(results),
    }


def _cell_to_json(cell: Cell, results: Results) -> dict[str, Json]:
    first, changed = start(cell, results), change(cell, results)
    told: dict[str, Json] = {"axes": dict(cell.axes), "trainings": cell.trainings}
    for name in ("identical", "changed", "degraded", "nev", "failed", "unknown"):
        told[name] = cell.counts[Outcome(name)]
    told["nev_interval"] = [*cell.interval]
    told["nonfinite"] = cell.nonfinite
    told["due"] = cell.due
    told["rwc"] = cell.changed_result
    told["rwc_interval"] = [*proportion_interval(*measured(cell, "rwc"), results.confidence, results.interval)]
    told["direction"] = cell.direction.value
    told["golden"] = cell.golden if math.isfinite(cell.golden) else None
    told["golden_start"] = cell.golden_start if math.isfinite(cell.golden_start) else None
    told["start"] = None if first is None else first.value
    told["mismatch"] = mean(cell.mismatches)
    told["final"] = mean(cell.finals)
    told["final_std"] = standard_deviation(cell.finals)
    told["final_change"] = None if changed is None else changed.value
    told["final_change_interval"] = None if changed is None or changed.low is None else [changed.low, changed.high]
    told["places"] = cell.places
    return told


_LABELS = {"nev": "N-EV", "rwc": "RWC"}


def _names(results: Results) -> list[str]:
    """Of all axes, those that vary first."""
    return list(dict.fromkeys([*results.axes, *(name for cell in results.cells for name in cell.axes)]))


def _where(found: Comparison | Trend, results: Results) -> str:
    varying = varying_axes(results)
    return ", ".join(f"{name} {place}" for name, place in found.others.items() if name in varying)


def _notes(results: Results, columns: Sequence[str]) -> tuple[str, ...]:
    """What stands under a table with these columns."""
    meanings = [f"{column}: {MEANINGS[column]}{_sign(results, column)}." for column in columns if column in MEANINGS]
    level = f"{_percent(results.confidence)}, each for its cell alone"
    return (*meanings, f"Intervals of rates: {_METHODS[results.interval]}; {level}.", *facts_under(results))


def _sign(results: Results, column: str) -> str:
    """Return the meaning of a change's sign, if lower is better in any cell."""
    directions = {cell.direction for cell in results.cells}
    if column != "ΔACC" or Direction.LOWER not in directions:
        return ""
    return "; above 0 is worse" + ("" if len(directions) == 1 else " where lower is better")


def _early(results: Results) -> tuple[str, ...]:
    told = "The study may stop when it knows enough: then its p-values are a guide, not a promise."
    return (told,) if results.interval == "anytime" else ()


def _percent(part: float) -> str:
    return f"{100 * part:g} %"
