"""A study's tables as tables of a page, with published figures beside our own."""

from __future__ import annotations

from collections.abc import Sequence

from evergrad.report.blocks import Block, Cell, Column, DataTable, Mark, Prose
from evergrad.report.markup import literal
from evergrad.report.published import Published
from evergrad.study import results as found
from evergrad.study.columns import MEANINGS, PUBLISHED
from evergrad.study.plan import Plan
from evergrad.study.rendering import Entry, Quantity, Table
from evergrad.study.results import Results
from evergrad.study.table_notes import varying_axes
from evergrad.study.tables import published_table

_VERDICTS: dict[str, Mark] = {"not told apart": "muted", "no trend told": "muted"}


def data_table(table: Table, caption: str = "") -> DataTable:
    """A table of a study, to be sorted; what its columns mean comes from its own notes."""
    helps = _meanings(table)
    columns = [
        Column(header, "number" if numeric else "text", helps.get(header, ""))
        for header, numeric in zip(table.headers, table.numeric, strict=True)
    ]
    return DataTable(columns, [[_cell(entry) for entry in row] for row in table.rows], caption or literal(table.title))


def lead_measure(results: Results, plan: Plan, published: Published | None) -> str:
    """What a study is first of all about: as published, or mismatches where nothing is trained, or N-EV."""
    if published is not None and published.measure:
        return published.measure
    is_inference = all(getattr(cell.training, "epochs", None) == 0 for cell in plan.cells)
    return "mismatch" if is_inference and any(cell.mismatches for cell in results.cells) else "nev"


def measures_shown(lead: str) -> list[str]:
    """What is shown in the published shape, the most important first."""
    return list(dict.fromkeys([lead, "nev", "rwc"]))


def published_blocks(results: Results, measure: str, published: Published | None) -> list[Block]:
    """The study's table in the published shape, and what was published beside each column, if it is of this measure."""
    header = PUBLISHED[measure][0]
    table = published_table(results, measure)
    ours = data_table(table, f"{header}: ours, with intervals of {100 * results.confidence:g} %.")
    if published is None or published.measure != measure:
        return [ours]
    beside = _beside(results, published, table, ours)
    if beside is None:
        return [ours]
    series = " / ".join(published.series) if len(published.series) > 1 else ""
    told = (
        f"In italics, as published by {literal(published.source)}: {published.what}{f', {series}' if series else ''}. "
    )
    return [beside, Prose(f"{told}They are there to compare shape and order; models, data and scale are not the same.")]


def _beside(results: Results, published: Published, table: Table, ours: DataTable) -> DataTable | None:
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
            columns.append(Column(f"{column.title}, published" if across else "published"))
            places.append(-1)
    rows = []
    for entries, row in zip(table.rows, ours.rows, strict=True):
        line = figures.get(tuple(map(str, entries[: len(stubs)])), {})
        made: list[Cell] = []
        top = ""
        for place in places:
            if place < 0:
                text = line.get(top, "")
                made.append(Cell(text, _first_number(text), "published"))
            else:
                top = ours.columns[place].title if across else ""
                made.append(row[place])
        rows.append(made)
    return DataTable(columns, rows, ours.caption)


def _top(cell: found.Cell, across: str) -> str:
    place = cell.axes.get(across) if across else ""
    return "none" if place is None else str(place)


def _cell(entry: Entry) -> Cell:
    if entry is None:
        return Cell("–", None, "muted")
    if isinstance(entry, Quantity):
        return Cell(str(entry), entry.value)
    if isinstance(entry, str):
        return Cell(entry, entry, _VERDICTS.get(entry, ""))
    return Cell(str(entry) if isinstance(entry, int) else f"{entry:g}", float(entry))


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
