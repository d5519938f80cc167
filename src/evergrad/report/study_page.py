"""The report of a study: its question, the answer in words, then every table and figure that the answer rests on."""

from __future__ import annotations

import heapq
import shlex
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from evergrad.report.html import escape_markup, write_page
from evergrad.report.page_model import (
    Commands,
    DataTable,
    Facts,
    Mark,
    Prose,
    ReportBlock,
    ReportPage,
    Section,
    TableCell,
    TableColumn,
)
from evergrad.report.study_data import (
    PublishedFigures,
    StudyData,
    TrialData,
    cell_label,
    cell_phrase,
    published_for,
    study_data,
)
from evergrad.report.study_figures import (
    bit_blocks,
    curve_blocks,
    final_blocks,
    heat_blocks,
    probe_figures,
    rate_blocks,
)
from evergrad.study import results as found
from evergrad.study.comparisons import DIFFERS, CellComparison, Trend, compare_cells, sort_by_axis, trend
from evergrad.study.plan import Plan
from evergrad.study.probe_tables import probe_kinds, probe_table
from evergrad.study.results import Cell as results_Cell
from evergrad.study.results import Results
from evergrad.study.table_formats import Quantity, Table, TableEntry, varying_axes
from evergrad.study.tables import MEANINGS, PUBLISHED, comparisons_table, published_table, summary_table, trends_table
from evergrad.study.trials import Outcome
from evergrad.training.settings import Direction

# A study's tables as tables of a page, with published figures beside our own.

_VERDICTS: dict[str, Mark] = {"not told apart": "muted", "no trend told": "muted"}


def data_table(table: Table, caption: str = "") -> DataTable:
    """A table of a study, to be sorted; what its columns mean comes from its own notes."""
    helps = _meanings(table)
    columns = [
        TableColumn(header, "number" if numeric else "text", helps.get(header, ""))
        for header, numeric in zip(table.headers, table.numeric, strict=True)
    ]
    return DataTable(
        columns, [[_cell(entry) for entry in row] for row in table.rows], caption or escape_markup(table.title)
    )


def lead_measure(results: Results, plan: Plan, published: PublishedFigures | None) -> str:
    """What a study is first of all about: as published, or mismatches where nothing is trained, or N-EV."""
    if published is not None and published.measure:
        return published.measure
    is_inference = all(getattr(cell.training, "epochs", None) == 0 for cell in plan.cells)
    return "mismatch" if is_inference and any(cell.mismatches for cell in results.cells) else "nev"


def measures_shown(lead: str) -> list[str]:
    """What is shown in the published shape, the most important first."""
    return list(dict.fromkeys([lead, "nev", "rwc"]))


def published_blocks(results: Results, measure: str, published: PublishedFigures | None) -> list[ReportBlock]:
    """The study's table in the published shape, and what was published beside each column, if it is of this measure."""
    header = PUBLISHED[measure][0]
    table = published_table(results, measure)
    ours = data_table(table, f"{header}: ours, with intervals of {100 * results.confidence:g} %.")
    if published is None or published.measure != measure:
        return [ours]
    beside = _with_published_columns(results, published, table, ours)
    if beside is None:
        return [ours]
    series = " / ".join(published.series) if len(published.series) > 1 else ""
    of = f", {series}" if series else ""
    told = f"In italics, as published by {escape_markup(published.source)}: {published.what}{of}. "
    return [beside, Prose(f"{told}They are there to compare shape and order; models, data and scale are not the same.")]


def _with_published_columns(
    results: Results, published: PublishedFigures, table: Table, ours: DataTable
) -> DataTable | None:
    """Our table with a published column after each of ours that has any published figure."""
    names = [name for name in varying_axes(results) if name != results.columns]
    across = results.columns if any(results.columns in cell.axes for cell in results.cells) else ""
    down = results.rows
    stubs = [*(name for name in names if name != down), *([down] if down in names else [])]
    figures: dict[tuple[str, ...], dict[str, str]] = {}
    for cell in results.cells:
        line = figures.setdefault(tuple(str(cell.axes.get(name)) for name in stubs), {})
        line[_top(cell, across)] = published.in_words(cell.axes)
    if not any(text for line in figures.values() for text in line.values()):
        return None
    columns, places = list(ours.columns[: len(stubs)]), list(range(len(stubs)))
    for place, column in enumerate(ours.columns[len(stubs) :], len(stubs)):
        columns.append(column)
        places.append(place)
        top = column.title if across else ""
        if any(line.get(top) for line in figures.values()):
            columns.append(TableColumn(f"{column.title}, published" if across else "published"))
            places.append(-1)
    rows = []
    for entries, row in zip(table.rows, ours.rows, strict=True):
        line = figures.get(tuple(map(str, entries[: len(stubs)])), {})
        made: list[TableCell] = []
        top = ""
        for place in places:
            if place < 0:
                text = line.get(top, "")
                made.append(TableCell(text, _first_number(text), "published"))
            else:
                top = ours.columns[place].title if across else ""
                made.append(row[place])
        rows.append(made)
    return DataTable(columns, rows, ours.caption)


def _top(cell: found.Cell, across: str) -> str:
    place = cell.axes.get(across) if across else ""
    return "none" if place is None else str(place)


def _cell(entry: TableEntry) -> TableCell:
    if entry is None:
        return TableCell("–", None, "muted")
    if isinstance(entry, Quantity):
        return TableCell(str(entry), entry.value)
    if isinstance(entry, str):
        return TableCell(entry, entry, _VERDICTS.get(entry, ""))
    return TableCell(str(entry) if isinstance(entry, int) else f"{entry:g}", float(entry))


def _meanings(table: Table) -> dict[str, str]:
    """From notes such as `RWC: result with change.`"""
    told = dict(MEANINGS)
    for note in table.notes:
        name, colon, text = note.partition(": ")
        if colon and name in table.headers:
            told[name] = text.removesuffix(".")
    return {name: text for name, text in told.items() if name in table.headers}


def _first_number(text: str) -> float | None:
    numbers: Sequence[str] = text.split(" / ")
    try:
        return float(numbers[0])
    except ValueError:
        return None


# The worst trials of a study: a NaN after the fewest flips, or the worst final metric; with replays.

_EACH = 5


def worst_trials(data: StudyData) -> list[TrialData]:
    """N-EV first, the fewest flips and the earliest first; then the worst final metrics; a few of each."""
    nev = heapq.nsmallest(_EACH, (one for one in data.trials() if one.outcome is Outcome.NEV), key=_nev_key)
    lost = [one for one in data.trials() if one.outcome in (Outcome.FAILED, Outcome.DEGRADED, Outcome.CHANGED)]
    lost = [one for one in lost if one.outcome is Outcome.FAILED or (one.metric_drop or 0) > 0]
    return [*nev, *heapq.nsmallest(_EACH, lost, key=_drop_key)]


def worst_blocks(data: StudyData) -> list[ReportBlock]:
    """The table of them, and the commands that run each again."""
    found = worst_trials(data)
    if not found:
        return []
    columns = [
        TableColumn("trial"),
        TableColumn("cell"),
        TableColumn("outcome", help="nev: a NaN, an infinity or an extreme value was seen"),
        TableColumn(
            "first seen", "number", "after which step a NaN, an infinity or an extreme value; 0: at the restart"
        ),
        TableColumn("in"),
        TableColumn("at restart", "number", "the metric before the first step"),
        TableColumn("final", "number", "the last metric on record"),
        TableColumn("worse by", "number", "how much worse than the golden run's final metric this one is"),
    ]  # fmt: skip
    # Programs of users' own have no replay of bits, but the same command runs them again.
    lines = [(f"{one.outcome.value}: {cell_label(one.trial.axes)}", replay_line(data.folder, one)) for one in found]
    told = (
        f"Up to {_EACH} with N-EV, those with the fewest flips first, and up to {_EACH} whose "
        "final metric is worse than the golden run's by most."
    )
    return [Prose(told), DataTable(columns, [_row(one) for one in found]), Commands(lines)]


def replay_line(folder: Path, one: TrialData) -> str:
    """The command that runs a trial again."""
    return f"evergrad study replay {shlex.quote(str(folder))} {one.trial.id}"


def _row(one: TrialData) -> list[TableCell]:
    at = [step for step in (one.seen.nonfinite_at, one.seen.extreme_at) if step is not None]
    first = min(at, default=None)
    where = (one.seen.nonfinite_in if first == one.seen.nonfinite_at else one.seen.extreme_in) if at else ""
    metrics = one.seen.metrics
    finished = bool(metrics) and (len(metrics) > 1 or one.seen.steps == 0)
    return [
        TableCell(one.trial.id),
        TableCell(cell_label(one.trial.axes)),
        TableCell(one.outcome.value),
        TableCell("–", None, "muted") if first is None else TableCell(str(first), first),
        TableCell(where or "–", where or None),
        _number(metrics[0] if metrics else None),
        _number(metrics[-1] if finished else None),
        _number(one.metric_drop if finished else None),
    ]


def _number(value: float | None) -> TableCell:
    return TableCell("–", None, "muted") if value is None else TableCell(f"{value:.4f}", value)


def _nev_key(one: TrialData) -> tuple[int, int, str]:
    at = [step for step in (one.seen.nonfinite_at, one.seen.extreme_at) if step is not None]
    return one.trial.flips, min(at, default=0), one.trial.id


def _drop_key(one: TrialData) -> tuple[float, str]:
    return -(one.metric_drop if one.metric_drop is not None else float("inf")), one.trial.id


# The answer of a study in words: nothing but what its tables and tests say, and first what is missing.

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


def study_answer(data: StudyData, lead: str) -> list[str]:
    """Paragraphs, the most important first; an incomplete study says so before anything else."""
    results = data.results
    kinds = probe_kinds(results)
    told = completeness(data)
    if not any(cell.known for cell in results.cells):
        return told or ["No training of this study has a known outcome yet: there is no answer."]
    for kind in kinds:
        told += _WATCHED[kind](probe_table(results, kind), results)
    if set(kinds) & {"costs", "guards"}:  # their cells differ in what no rate of outcomes is asked about
        return [*told, _totals(results)]
    told += _along(results, lead)
    told.append(_totals(results))
    told += _trends(results, lead)
    told += _comparisons_answer(results)
    return told + [f"Left out: {escape_markup(note)}." for note in results.notes if note.endswith(_OTHERS)]


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
        told.append(f"**To be known**: {escape_markup('; '.join(others[:2]))}{more}.")
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
    lines: dict[str, list[tuple[results_Cell, Quantity]]] = {}
    quantities = {id(cell): quantity for cell, quantity in found}
    for cell in sort_by_axis([cell for cell, _ in found], down):
        lines.setdefault(_others(cell, results, down), []).append((cell, quantities[id(cell)]))
    for place, line in list(lines.items())[:_MOST]:
        (first, low), (last, high) = line[0], line[-1]
        where = f"For {place}, " if place else ""
        ends = f"{_with_unit(low, unit)} at {cell_phrase({down: first.axes[down]})}"
        if len(line) > 1:
            ends += f" and {_with_unit(high, unit)} at {cell_phrase({down: last.axes[down]})}"
        sentences.append(f"{where}**{label}** was {ends}.")
    more = f" The table has {len(lines) - _MOST} more." if len(lines) > _MOST else ""
    return [" ".join(sentences) + more + _how(results, label)]


def _extremes(results: Results, found: Sequence[tuple[results_Cell, Quantity]], label: str, unit: str) -> str:
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
        f"Along {escape_markup(down)}: {'; '.join(parts)} (Cochran and Armitage's test, "
        f"Holm's correction).{_early(results)}"
    ]


def _comparisons_answer(results: Results) -> list[str]:
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


def _pair(one: CellComparison, results: Results) -> str:
    label = {"nev": "N-EV", "rwc": "RWC"}[one.measure]
    before, after = (f"{100 * rate:.1f}" for rate in one.rates)
    place = _place(one, results)
    ends = f"{cell_phrase({one.axis: one.first})} to {cell_phrase({one.axis: one.second})}"
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
        told.append(f"{cell_phrase({name: str(row[name]) for name in axes})}: {numbers}")  # fmt: skip
    if not told:
        return []
    return [f"{'; '.join(told)}. Medians; in brackets the quartiles, of the overhead an interval of the median."]


def _spread(table: Table, results: Results) -> list[str]:
    """The last row of each cell."""
    axes = [name for name in varying_axes(results) if name in table.headers]
    rows = [dict(zip(table.headers, row, strict=True)) for row in table.rows]
    last = {tuple(str(row[name]) for name in axes): row for row in rows}
    told = [
        f"{cell_phrase(dict(zip(axes, place, strict=True))) or 'in all'}: {_short(row['elements %'])} % of elements, "
        f"{_short(row['layers %'])} % of layers, {_short(row['ranks %'])} % of ranks after {row['steps']} steps"
        for place, row in list(last.items())[:6]
    ]
    more = f" The table has {len(last) - 6} more." if len(last) > 6 else ""
    return (
        [f"What differs from the fault-free run: {'; '.join(told)}.{more} Means; the table has intervals."]
        if told
        else []
    )


def _short(entry: TableEntry) -> str:
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


def _others(cell: results_Cell, results: Results, down: str) -> str:
    return cell_phrase({name: cell.axes[name] for name in varying_axes(results) if name != down and name in cell.axes})


def _place(found: CellComparison | Trend, results: Results) -> str:
    varying = varying_axes(results)
    return cell_phrase({name: place for name, place in found.others.items() if name in varying})


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


REPORT = "report.html"

_WATCHED_TITLES = {"costs": "What it costs", "spread": "How far faults spread", "guards": "What guards see"}


def write_study_report(folder: Path, out: Path | None = None) -> Path:
    """Write the report of the study in a folder, to DIR/report.html if not told otherwise; returns the file."""
    return write_page(study_page(folder), out or folder / REPORT)


def study_page(folder: Path) -> ReportPage:
    """The page; a study with no finished trial has one that says so."""
    data = study_data(folder)
    results = data.results
    published = published_for(results)
    lead = lead_measure(results, data.plan, published)
    known = any(cell.known for cell in results.cells)
    sections = [*_results_sections(data, lead, published)] if known else []
    sections.append(Section("Settings, versions, machine", _facts(data), "settings"))
    sections.append(Section("How to cite, and how to go on", _citing(data), "cite"))
    return ReportPage(
        title=data.plan.title or data.plan.study,
        kind=f"study report · {data.plan.study}{f' at scale {results.scale}' if results.scale else ''}",
        question=data.plan.question,
        answer=study_answer(data, lead),
        sections=[section for section in sections if section.blocks],
        made=f"Evergrad {_version()}, {time.strftime('%Y-%m-%d %H:%M %Z')}",
    )


def _results_sections(data: StudyData, lead: str, published: PublishedFigures | None) -> list[Section]:
    results = data.results
    kinds = probe_kinds(results)
    sections = [
        Section(title, [*probe_figures(results, kind), data_table(probe_table(results, kind))], kind)
        for kind, title in _WATCHED_TITLES.items()
        if kind in kinds
    ]
    if "costs" in kinds:  # trainings without a fault: outcomes and their rates say nothing
        return sections
    if "guards" in kinds:
        return [*sections, *_course_sections(data, lead)]
    bits = bit_blocks(data, lead)
    sections.append(Section("Sensitivity by bit", bits, "bits"))
    main: list[ReportBlock] = [] if bits else rate_blocks(results, lead, published)
    for measure in measures_shown(lead):
        main += published_blocks(results, measure, published)
    sections.append(Section("The study's table", main, "table"))
    sections.append(Section("Sensitivity by place", heat_blocks(results, lead), "places"))
    if published is not None and published.table is not None:
        told = Prose(
            f"As published by {escape_markup(published.source)}; models, data and scale are not those of this study."
        )
        sections.append(Section("As published", [told, published.table], "published", folded=True))
    return [*sections, *_course_sections(data, lead)]


def _course_sections(data: StudyData, lead: str) -> list[Section]:
    """What every study of faults has: all its numbers, and its trainings."""
    results = data.results
    return [
        Section("All columns", [data_table(summary_table(results))], "columns"),
        Section("Which cells differ", _comparisons(results, lead), "comparisons", folded=True),
        Section("How trainings went on", [*final_blocks(data), *curve_blocks(data)], "curves"),
        Section("The worst trials", worst_blocks(data), "worst"),
    ]


def _comparisons(results: Results, lead: str) -> list[ReportBlock]:
    blocks: list[ReportBlock] = []
    found = compare_cells(results)
    if found:
        table = comparisons_table(results, found)
        blocks += [Prose("\n\n".join(table.notes[:2])), data_table(table)]
    measure = lead if lead in ("nev", "rwc") else "nev"
    if results.rows in varying_axes(results):
        trends = trends_table(results, results.rows, measure)
        if trends.rows:
            blocks += [Prose(trends.notes[0]), data_table(trends)]
    return blocks


def _facts(data: StudyData) -> list[ReportBlock]:
    facts = [(name, value) for name, value in data.results.facts.items() if value]
    return [Facts([*facts, *(("note", note) for note in data.results.notes[:20])])]


def _citing(data: StudyData) -> list[ReportBlock]:
    folder = shlex.quote(str(data.folder))
    told = f"Evergrad {_version()}, study {data.plan.study}, seed {data.plan.seed}"
    pairs = [("tool", told + (f", commit {data.results.facts['commit']}" if "commit" in data.results.facts else ""))]
    if data.plan.source:
        pairs.insert(0, ("after", data.plan.source))
    if data.plan.differs:
        pairs.insert(1, ("what differs", data.plan.differs))
    lines = [
        ("Every table as CSV, Markdown and LaTeX, and every trial", f"evergrad study export {folder}"),
        ("This page again, after more trainings", f"evergrad study report {folder}"),
    ]
    return [Facts(pairs), Commands(lines)]


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("evergrad")
    except PackageNotFoundError:
        return ""
