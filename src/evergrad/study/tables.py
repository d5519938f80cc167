"""The tables of a study: a row a cell, the published shape, which cells differ; and the same as JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from evergrad._files import replacing
from evergrad.errors import FileAccessError, reason
from evergrad.records import Json
from evergrad.study.comparisons import CellComparison, Trend, compare_cells, count_measure, trend
from evergrad.study.folder import StudyFolder
from evergrad.study.probe_tables import (
    PROBE_TABLE_KINDS,
    main_probe_kind,
    probe_kinds,
    probe_table,
    probe_tables_to_json,
)
from evergrad.study.results import Cell, Results, results_of, study_progress
from evergrad.study.statistics import (
    coefficient_of_variation,
    mean,
    paired_interval,
    proportion_interval,
    standard_deviation,
)
from evergrad.study.table_formats import (
    Quantity,
    Table,
    TableEntry,
    escape_formula,
    format_table,
    notes_under,
    varying_axes,
)
from evergrad.study.trials import Outcome
from evergrad.training.settings import Direction
from evergrad.wording import checked_choice

# The columns of a study's tables: what each says of a cell, and what its name means.

ColumnFunction: TypeAlias = "Callable[[Cell, Results], Quantity | None]"

COUNTED = {
    "N-EV": Outcome.NEV,
    "TF": Outcome.FAILED,
    "AccR": Outcome.DEGRADED,
    "changed": Outcome.CHANGED,
    "identical": Outcome.IDENTICAL,
    "unknown": Outcome.UNKNOWN,
}

MEANINGS = {
    "trainings": "with a verdict; rates are over those whose outcome is known",
    "due": "trainings that the plan asks for",
    "N-EV": "a NaN, an infinity or an extreme value was seen in state, loss or outputs",
    "NaN": "of N-EV, those in which a NaN or an infinity was seen; the others have extreme values alone",
    "TF": "stayed finite and crashed, never finished, or ended at chance level",
    "AccR": "finished, with a metric worse than the golden run's by more than the margin",
    "changed": "finished with another result than the golden run, and none of the outcomes before this one",
    "identical": "finished with the golden run's result",
    "unknown": "the worker was lost; in no rate",
    "RWC": "result with change, every known outcome but identical",
    "mismatch %": "test samples of which the restored model says something else than the golden one, mean of trainings",
    "AvgI-Acc": "mean metric at the first evaluation after the restart, where it is finite",
    "ACC": "mean final metric of trainings that finish finite",
    "STD": "standard deviation of the final metric, by n - 1",
    "CV %": "STD in % of ACC",
    "ΔACC": "mean of final metric less the golden run's, with an interval by bootstrap",
}


def nev_rate(cell: Cell, results: Results) -> Quantity | None:
    """The rate of N-EV in %, with the cell's own interval."""
    return _rate(cell, cell.counts[Outcome.NEV], cell.interval)


def rwc_rate(cell: Cell, results: Results) -> Quantity | None:
    """The rate of results with change in %."""
    return _counted_rate(cell, cell.changed_result, results)


def _failed(cell: Cell, results: Results) -> Quantity | None:
    return _counted_rate(cell, cell.counts[Outcome.FAILED], results)


def _degraded(cell: Cell, results: Results) -> Quantity | None:
    return _counted_rate(cell, cell.counts[Outcome.DEGRADED], results)


def _counted_rate(cell: Cell, count: int, results: Results) -> Quantity | None:
    return _rate(cell, count, proportion_interval(count, cell.known, results.confidence, results.interval))


def _rate(cell: Cell, count: int, interval: tuple[float, float]) -> Quantity | None:
    return Quantity(100 * count / cell.known, 1, 100 * interval[0], 100 * interval[1]) if cell.known else None


def _mismatch(cell: Cell, results: Results) -> Quantity | None:
    return _with_interval([100 * part for part in cell.mismatches], results, 2)


def start(cell: Cell, results: Results) -> Quantity | None:
    """The mean metric at the restart."""
    return _quantity(mean([number for number in cell.starts if math.isfinite(number)]))


def _accuracy(cell: Cell, results: Results) -> Quantity | None:
    return _quantity(mean(cell.finals))


def _spread(cell: Cell, results: Results) -> Quantity | None:
    return _quantity(standard_deviation(cell.finals))


def _variation(cell: Cell, results: Results) -> Quantity | None:
    part = coefficient_of_variation(cell.finals)
    return None if part is None else Quantity(100 * part, 2)


def change(cell: Cell, results: Results) -> Quantity | None:
    """The mean of what the fault did to the final metric, against the golden run."""
    if not math.isfinite(cell.golden):
        return None
    return _with_interval([final - cell.golden for final in cell.finals], results, 4)


def _with_interval(values: Sequence[float], results: Results, digits: int) -> Quantity | None:
    middle = mean(values)
    if middle is None:
        return None
    low, high = paired_interval(values, results.confidence) if len(values) > 1 else (None, None)
    return Quantity(middle, digits, low, high)


def _quantity(value: float | None) -> Quantity | None:
    return None if value is None else Quantity(value, 4)


# Shown where any cell has a value: inference has mismatches, and a command may measure nothing.
ACCURACIES: dict[str, ColumnFunction] = {
    "mismatch %": _mismatch,
    "AvgI-Acc": start,
    "ACC": _accuracy,
    "STD": _spread,
    "CV %": _variation,
    "ΔACC": change,
}

# What can be shown in the published shape, by the name to ask for it.
PUBLISHED: dict[str, tuple[str, ColumnFunction]] = {
    "nev": ("N-EV %", nev_rate),
    "rwc": ("RWC %", rwc_rate),
    "failed": ("TF %", _failed),
    "degraded": ("AccR %", _degraded),
    "mismatch": ("mismatch %", _mismatch),
    "start": ("AvgI-Acc", start),
    "final": ("ACC", _accuracy),
    "change": ("ΔACC", change),
}


_METHODS = {
    "wilson": "Wilson",
    "clopper-pearson": "Clopper and Pearson, exact",
    "anytime": "valid at every look, by a beta-binomial mixture, since the study may stop when it knows enough",
}


TABLES = ("summary", "paper", "comparisons", "trends", *PROBE_TABLE_KINDS)


def study_table(results: Results, layout: str | None = None, *, default: str = "summary") -> Table:
    """The table of that layout, one of `TABLES`. Without one, the first of costs, spread and guards that the study asks
    for; for a study of outcomes, `default`."""
    layout = checked_choice("layout", layout or main_probe_kind(results) or default, TABLES)
    if layout in PROBE_TABLE_KINDS:
        return probe_table(results, layout)
    if layout == "paper":
        return published_table(results)
    if layout == "comparisons":
        return comparisons_table(results)
    return trends_table(results, results.rows) if layout == "trends" else summary_table(results)


def summary_table(results: Results) -> Table:
    """One row a cell: its axes, how its trainings ended, rates with intervals, and accuracy where there is any."""
    cells = results.cells
    places = varying_axes(results)
    columns: dict[str, list[TableEntry]] = {"trainings": [cell.trainings for cell in cells]}
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
        found: list[TableEntry] = [entry(cell, results) for cell in cells]
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
    lines: dict[tuple[TableEntry, ...], dict[TableEntry, TableEntry]] = {}
    for cell in results.cells:
        line = lines.setdefault(tuple(cell.axes.get(name) for name in stubs), {})
        line[cell.axes.get(across) if across else header] = entry(cell, results)
    # Cells of a group may lie apart in the plan, where another axis is the outer one.
    order = {key: place for place, key in enumerate(dict.fromkeys(stub[: len(groups)] for stub in lines))}
    rows = sorted(lines.items(), key=lambda item: order[item[0][: len(groups)]])
    asked: list[TableEntry] = list(tops) or [header]
    return Table(
        f"{results.title or results.study}: {header}",
        (*stubs, *("none" if top is None else str(top) for top in asked)),
        tuple((*stub, *(line.get(top) for top in asked)) for stub, line in rows),
        _notes(results, [header.removesuffix(" %"), header]),
        groups=len(groups),
    )


def comparisons_table(results: Results, comparisons: Sequence[CellComparison] | None = None) -> Table:
    """Neighbouring cells tested against each other; all that can be, if none are given."""
    found = compare_cells(results) if comparisons is None else comparisons
    rows: list[tuple[TableEntry, ...]] = []
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
        (*notes, *notes_under(results)),
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
    return Table(title, headers, rows, (*notes, *notes_under(results)))


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
        **probe_tables_to_json(results),
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
    told["rwc_interval"] = [*proportion_interval(*count_measure(cell, "rwc"), results.confidence, results.interval)]
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


def _where(found: CellComparison | Trend, results: Results) -> str:
    varying = varying_axes(results)
    return ", ".join(f"{name} {place}" for name, place in found.others.items() if name in varying)


def _notes(results: Results, columns: Sequence[str]) -> tuple[str, ...]:
    """What stands under a table with these columns."""
    meanings = [f"{column}: {MEANINGS[column]}{_sign(results, column)}." for column in columns if column in MEANINGS]
    level = f"{_percent(results.confidence)}, each for its cell alone"
    return (*meanings, f"Intervals of rates: {_METHODS[results.interval]}; {level}.", *notes_under(results))


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


# A study as files: tables in every form, the trials one by one, the results, the plan.

_ENDINGS = {"csv": "csv", "markdown": "md", "latex": "tex"}
_COLUMNS = (
    "trial", "repetition", "seed", "fault", "flips", "where", "layer", "outcome", "end", "reason", "steps",
    "metric_at_restart", "final_metric", "nonfinite_at", "nonfinite_in", "extreme_at", "extreme_in", "mismatches",
    "injected", "changed", "final_distance", "seconds",
)  # fmt: skip


def export_study(folder: Path, to: Path) -> list[Path]:
    """Write everything to a folder; returns the files. Files of an earlier export are replaced, each at once."""
    results = results_of(folder)
    try:
        to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileAccessError(to, f"cannot be made: {reason(error)}") from error
    texts: dict[str, str] = {}
    made = {"summary": summary_table(results), "published": published_table(results)}
    made["comparisons"] = comparisons_table(results)
    for kind in probe_kinds(results):
        made[kind] = probe_table(results, kind)
    for name, table in made.items():
        texts |= {f"{name}.{ending}": format_table(table, form) for form, ending in _ENDINGS.items()}
    texts["results.json"] = json.dumps(results_to_json(results), indent=1, allow_nan=False) + "\n"
    texts["trials.csv"] = _trials(folder)
    texts["plan.toml"] = StudyFolder(folder).plan().text
    files = []
    for name, text in texts.items():
        with replacing(to / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
        files.append(to / name)
    return files


def _trials(folder: Path) -> str:
    """One row a trial, with its axes first."""
    progress, _ = study_progress(folder, brief=False)
    text = io.StringIO()
    axes = [name for name in progress.plan.axes if name not in _COLUMNS]
    out = csv.writer(text, lineterminator="\n")
    out.writerow([*axes, *_COLUMNS])
    for cell in progress.cells:
        for number in cell.counted():
            trial, seen = cell.entries[number].trial, cell.entries[number].observation
            row = (
                trial.id, number, trial.seed, trial.fault, trial.flips, trial.where, trial.layer,
                cell.outcomes[number].value, seen.end.value, seen.reason, seen.steps,
                seen.metrics[0] if seen.metrics else "", seen.metrics[-1] if seen.metrics else "",
                _or_empty(seen.nonfinite_at), seen.nonfinite_in, _or_empty(seen.extreme_at), seen.extreme_in,
                _or_empty(seen.mismatches), seen.injected, seen.changed,
                seen.distances.values[-1] if seen.distances.values else "", f"{seen.seconds:.4f}",
            )  # fmt: skip
            out.writerow([*(_plain(trial.axes.get(name, "")) for name in axes), *map(_plain, row)])
    return text.getvalue()


def _or_empty(value: int | None) -> int | str:
    return "" if value is None else value


def _plain(value: object) -> object:
    return escape_formula(value) if isinstance(value, str) else value
