"""The answer of a study in words: nothing but what its tables and tests say, and first what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from evergrad.report.markup import literal
from evergrad.report.study_data import StudyData, place_words
from evergrad.study.columns import MEANINGS, PUBLISHED
from evergrad.study.comparisons import DIFFERS, Comparison, Trend, by_value, compare_cells, trend
from evergrad.study.outcomes import Outcome
from evergrad.study.rendering import Entry, Quantity, Table
from evergrad.study.results import Cell, Results
from evergrad.study.table_notes import varying_axes
from evergrad.study.watched_tables import watched_kinds, watched_table
from evergrad.training.settings import Direction

_MOST = 4
_COMPARED = "N-EV and RWC of neighbouring cells"
_TOTALS = {
    Outcome.NEV: "N-EV",
    Outcome.FAILED: "failed (TF)",
    Outcome.DEGRADED: "degraded (AccR)",
    Outcome.CHANGED: "changed",
    Outcome.IDENTICAL: "identical",
}
_OTHERS = "of this plan"
"""How the note ends that other trials are in the journal too, which is no reason to doubt those of the plan."""


def answer(data: StudyData, lead: str) -> list[str]:
    """Paragraphs, the most important first; an incomplete study says so before anything else."""
    results = data.results
    kinds = watched_kinds(results)
    told = completeness(data)
    if not any(cell.known for cell in results.cells):
        return told or ["No training of this study has a known outcome yet: there is no answer."]
    for kind in kinds:
        told += _WATCHED[kind](watched_table(results, kind), results)
    if set(kinds) & {"costs", "guards"}:  # their cells differ in what no rate of outcomes is asked about
        return [*told, _totals(results)]
    told += _along(results, lead)
    told.append(_totals(results))
    told += _trends(results, lead)
    told += _comparisons(results)
    return told + [f"Left out: {literal(note)}." for note in results.notes if note.endswith(_OTHERS)]


def completeness(data: StudyData) -> list[str]:
    """What is missing: trainings to come, lost ones, damaged lines."""
    results = data.results
    told = []
    open_cells = sum(cell.known < cell.due for cell in results.cells)
    if open_cells:
        known = sum(cell.known for cell in results.cells)
        told.append(
            f"**Not complete**: {known:,} of {results.trials:,} trainings have a known outcome, and {open_cells} of "
            f"{len(results.cells)} cells have trials to come. What follows is of those that there are."
        )
    others = [note for note in results.notes if not (note.startswith("not complete") or note.endswith(_OTHERS))]
    if others:
        more = f" … and {len(others) - 2} more notes" if len(others) > 2 else ""
        told.append(f"**To be known**: {literal('; '.join(others[:2]))}{more}.")
    lost = sum(cell.counts[Outcome.UNKNOWN] for cell in results.cells)
    if lost:
        told.append(f"Of {lost:,} trainings nothing is known: their workers were lost. They are in no rate.")
    return told


def _totals(results: Results) -> str:
    """Every outcome: the rate that is asked about may be nought because trainings met with something else."""
    counts = {outcome: sum(cell.counts[outcome] for cell in results.cells) for outcome in Outcome}
    known = sum(cell.known for cell in results.cells)
    parts = ", ".join(f"{counts[outcome]:,} {word}" for outcome, word in _TOTALS.items())
    told = f"Of {known:,} {'training' if known == 1 else 'trainings'} with a known outcome: {parts}."
    if any(cell.direction is Direction.LOWER for cell in results.cells):
        told += " Degraded is judged by a metric that is better lower."
    return told


def _along(results: Results, lead: str) -> list[str]:
    """Where the rate begins and where it ends along the study's axis, for each place on the others."""
    header, entry = PUBLISHED[lead]
    label = header.removesuffix(" %")
    unit = " %" if header.endswith("%") else ""
    found = [(cell, quantity) for cell in results.cells if (quantity := entry(cell, results)) is not None]
    if not found:
        return []
    down = results.rows if results.rows in varying_axes(results) else ""
    if not down or not all(isinstance(cell.axes.get(down), (int, float)) for cell, _ in found):
        return [_extremes(results, found, label, unit)]
    sentences = []
    lines: dict[str, list[tuple[Cell, Quantity]]] = {}
    quantities = {id(cell): quantity for cell, quantity in found}
    for cell in by_value([cell for cell, _ in found], down):
        lines.setdefault(_others(cell, results, down), []).append((cell, quantities[id(cell)]))
    for place, line in list(lines.items())[:_MOST]:
        (first, low), (last, high) = line[0], line[-1]
        where = f"For {place}, " if place else ""
        ends = f"{_with_unit(low, unit)} at {place_words({down: first.axes[down]})}"
        if len(line) > 1:
            ends += f" and {_with_unit(high, unit)} at {place_words({down: last.axes[down]})}"
        sentences.append(f"{where}**{label}** was {ends}.")
    more = f" The table has {len(lines) - _MOST} more." if len(lines) > _MOST else ""
    return [" ".join(sentences) + more + _how(results, label)]


def _extremes(results: Results, found: Sequence[tuple[Cell, Quantity]], label: str, unit: str) -> str:
    """The highest and the lowest cell; several where they are the same."""
    if len(found) == 1:
        return f"**{label}** was {_with_unit(found[0][1], unit)}.{_how(results, label)}"
    values = [quantity.value for _, quantity in found]
    parts = []
    for word, value in (("highest", max(values)), ("lowest", min(values))):
        same = [(cell, quantity) for cell, quantity in found if quantity.value == value]
        names = "; ".join(_others(cell, results, "") for cell, _ in same[:_MOST])
        more = f" and {len(same) - _MOST} more cells" if len(same) > _MOST else ""
        parts.append(f"{word}, {_with_unit(same[0][1], unit)}: {names}{more}")
    if min(values) == max(values):
        return (
            f"**{label}** was {_with_unit(found[0][1], unit)} in every one of {len(found)} cells.{_how(results, label)}"
        )
    return f"**{label}** was {parts[0]}. It was {parts[1]}.{_how(results, label)}"


def _trends(results: Results, lead: str) -> list[str]:
    measure = lead if lead in ("nev", "rwc") else ""
    down = results.rows
    if not measure or down not in varying_axes(results):
        return []
    numeric = all(isinstance(cell.axes.get(down), (int, float)) for cell in results.cells)
    found = [one for one in trend(results, down, measure=measure) if len(one.places) > 2] if numeric else []
    if not found:
        return []
    parts = []
    for verdict, same in groupby(sorted(found, key=lambda one: one.verdict), key=lambda one: one.verdict):
        ones = list(same)
        names = _listed([_place(one, results) or "all trainings" for one in ones])
        word = {"rises": "a rise is told", "falls": "a fall is told"}.get(verdict, "no trend is told")
        parts.append(f"{word} for {names}")
    return [
        f"Along {literal(down)}: {'; '.join(parts)} (Cochran and Armitage's test, Holm's correction).{_early(results)}"
    ]


def _comparisons(results: Results) -> list[str]:
    found = compare_cells(results)
    if not found:
        return []
    differ = [one for one in found if one.verdict == DIFFERS]
    if not differ:
        return [
            f"Of {len(found)} comparisons ({_COMPARED}) none is told apart after Holm's correction, which is not to "
            f"say that they are equal.{_early(results)}"
        ]
    # The largest differences first: a reader wants those.
    shown = sorted(differ, key=lambda one: -abs(one.difference))[:_MOST]
    names = "; ".join(_pair(one, results) for one in shown)
    more = f"; and {len(differ) - _MOST} more below" if len(differ) > _MOST else ""
    rest = len(found) - len(differ)
    left = f" The other {rest} are not told apart, which is not to say that they are equal." if rest else ""
    many = f"{len(differ)} of {len(found)} comparisons ({_COMPARED})"
    return [f"Told apart after Holm's correction, {many}: {names}{more}.{left}{_early(results)}"]


def _pair(one: Comparison, results: Results) -> str:
    label = {"nev": "N-EV", "rwc": "RWC"}[one.measure]
    before, after = (f"{100 * rate:.1f}" for rate in one.rates)
    place = _place(one, results)
    ends = f"{place_words({one.axis: one.first})} to {place_words({one.axis: one.second})}"
    return f"{label} {before} → {after} % from {ends}{f' ({place})' if place else ''}"


def _costs(table: Table, results: Results) -> list[str]:
    """What each strategy took at the end of the axis that goes down: the most ranks."""
    axes = [name for name in varying_axes(results) if name in table.headers]
    costs = [name for name in ("blocked ms", "overhead %", "restart ms", "restore ms") if name in table.headers]
    down = results.rows if results.rows in axes else ""
    rows = [dict(zip(table.headers, row, strict=True)) for row in table.rows]
    last = rows[-1].get(down) if down and rows else None
    told = []
    for row in [row for row in rows if not down or row.get(down) == last][: 2 * _MOST]:
        numbers = ", ".join(
            f"{cost.rpartition(' ')[0]} {row[cost]} {cost.rpartition(' ')[2]}"
            for cost in costs
            if row[cost] is not None
        )
        told.append(f"{place_words({name: str(row[name]) for name in axes})}: {numbers}")  # fmt: skip
    if not told:
        return []
    return [f"{'; '.join(told)}. Medians; in brackets the quartiles, of the overhead an interval of the median."]


def _spread(table: Table, results: Results) -> list[str]:
    """The last row of each cell."""
    axes = [name for name in varying_axes(results) if name in table.headers]
    rows = [dict(zip(table.headers, row, strict=True)) for row in table.rows]
    last = {tuple(str(row[name]) for name in axes): row for row in rows}
    told = [
        f"{place_words(dict(zip(axes, place, strict=True))) or 'in all'}: {_short(row['elements %'])} % of elements, "
        f"{_short(row['layers %'])} % of layers, {_short(row['ranks %'])} % of ranks after {row['steps']} steps"
        for place, row in list(last.items())[:6]
    ]
    more = f" The table has {len(last) - 6} more." if len(last) > 6 else ""
    return (
        [f"What differs from the fault-free run: {'; '.join(told)}.{more} Means; the table has intervals."]
        if told
        else []
    )


def _short(entry: Entry) -> str:
    """One digit, and no interval: the table has them."""
    return f"{entry.value:.1f}" if isinstance(entry, Quantity) else "–"


def _guards(table: Table, results: Results) -> list[str]:
    """What each guard saw of trainings whose result changed: the least and the most over the rows."""
    rows = [dict(zip(table.headers, row, strict=True)) for row in table.rows]
    told = []
    for guard in dict.fromkeys(str(row["guard"]) for row in rows):
        mine = [row for row in rows if row["guard"] == guard]
        seen = [row["RWC seen %"] for row in mine if isinstance(row["RWC seen %"], Quantity)]
        false = list(dict.fromkeys(str(row["false"]) for row in mine if row["false"]))
        if seen:
            low, high = (pick(seen, key=lambda one: one.value) for pick in (min, max))
            share = f"{low} %" if len(seen) == 1 or low.value == high.value else f"from {low} to {high} %"
            told.append(f"**{guard}** {share}{f', false alarms {_listed(false)}' if false else ''}")
    if not told:
        return []
    return [f"Of trainings whose result changed, guards spoke up in: {'; '.join(told)}. The table has each cell."]


_WATCHED = {"costs": _costs, "spread": _spread, "guards": _guards}


def _others(cell: Cell, results: Results, down: str) -> str:
    return place_words({name: cell.axes[name] for name in varying_axes(results) if name != down and name in cell.axes})


def _place(found: Comparison | Trend, results: Results) -> str:
    varying = varying_axes(results)
    return place_words({name: place for name, place in found.others.items() if name in varying})


def _with_unit(quantity: Quantity, unit: str) -> str:
    if not unit or quantity.low is None:
        return f"{quantity}{unit}"
    value, bracket, interval = str(quantity).partition(" [")
    return f"{value}{unit}{bracket}{interval}"


def _listed(names: Sequence[str]) -> str:
    shown = list(names[:_MOST])
    return "; ".join(shown) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")


def _how(results: Results, label: str) -> str:
    meaning = f" {label}: {MEANINGS[label]}." if label in MEANINGS else ""
    return f" In brackets, intervals of {100 * results.confidence:g} %.{meaning}"


def _early(results: Results) -> str:
    early = " The study may stop when it knows enough: its p-values are a guide, not a promise."
    return early if results.interval == "anytime" else ""
