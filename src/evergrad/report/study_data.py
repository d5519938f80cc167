"""What a study's report is made from: its results, its trials in brief, and a few of them step by step.

A journal may hold a hundred thousand trials. Their outcomes fit into memory, their courses do not: of these a sample is
read, chosen by nothing but the order of repetitions.
"""

from __future__ import annotations

import importlib.resources
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from evergrad.report.html import escape_markup
from evergrad.report.page_model import DataTable, TableColumn
from evergrad.report.page_model import TableCell as blocks_Cell
from evergrad.study.folder import StudyFolder, read_journal
from evergrad.study.golden import GoldenRun
from evergrad.study.plan import Plan
from evergrad.study.results import Cell, CellProgress, Results, StudyProgress, results_from, study_progress
from evergrad.study.trials import Axes, Observation, Outcome, Trial
from evergrad.training.settings import Direction

MOST_CURVES = 240
"""Trials of the whole study that are drawn step by step; every cell has its share."""

_FEWEST_CURVES = 2


@dataclass(frozen=True, slots=True)
class TrialData:
    """One trial and its verdict."""

    trial: Trial
    seen: Observation
    outcome: Outcome
    golden: GoldenRun
    direction: Direction = Direction.HIGHER
    """The direction of the metric."""

    @property
    def metric_drop(self) -> float | None:
        """By how much the final metric is worse than the golden run's; None without one, or if it is not a number."""
        if not self.seen.metrics or not self.golden.observation.metrics:
            return None
        drop = self.direction.sign * (self.golden.observation.metrics[-1] - self.seen.metrics[-1])
        return drop if math.isfinite(drop) else None


@dataclass(frozen=True, slots=True)
class StudyData:
    """A study as it lies in its folder."""

    folder: Path
    plan: Plan
    results: Results
    progress: StudyProgress
    observations: Mapping[str, Observation]
    """By trial: those that were read step by step."""

    def cells(self) -> Iterator[tuple[Cell, CellProgress]]:
        """Cells with what they were counted from."""
        return zip(self.results.cells, self.progress.cells, strict=True)

    def trials(self) -> Iterator[TrialData]:
        """Every trial that counts, in brief."""
        for cell in self.progress.cells:
            yield from _trials(cell)

    def plotted_trials(self, cell: CellProgress) -> list[TrialData]:
        """The trials of a cell that were read step by step."""
        return [
            replace(one, seen=self.observations[one.trial.id])
            for one in _trials(cell)
            if one.trial.id in self.observations
        ]

    @property
    def done(self) -> int:
        """Trainings with a verdict."""
        return sum(cell.trainings for cell in self.results.cells)


def study_data(folder: Path) -> StudyData:
    """Read the study in a folder."""
    tally, kept = study_progress(folder)
    results = results_from(tally, kept)
    share = max(_FEWEST_CURVES, MOST_CURVES // max(1, len(tally.cells)))
    wanted: set[str] = set()
    for cell in tally.cells:
        numbers = cell.counted()
        for place in _spread(len(numbers), share):
            if len(wanted) < 2 * MOST_CURVES:
                wanted.add(cell.entries[numbers[place]].trial.id)
    courses = read_journal(StudyFolder(folder).journal, only=wanted).entries if wanted else {}
    return StudyData(folder, tally.plan, results, tally, {name: one.observation for name, one in courses.items()})


def cell_label(axes: Axes) -> str:
    """A cell in words.

    >>> cell_label({"model": "alexnet", "flips": 10, "where": "role:model"})
    'model alexnet, flips 10, where role:model'
    """
    return ", ".join(f"{name} {place}" for name, place in axes.items())


def cell_phrase(axes: Axes) -> str:
    """The same as one would say it, as part of prose.

    >>> cell_phrase({"model": "alexnet", "flips": 1, "where": "role:model", "layer": "first"})
    'alexnet, 1 flip, in the model, layer first'
    """
    return ", ".join(escape_markup(_words(name, str(place))) for name, place in axes.items())


def _words(name: str, place: str) -> str:
    if name == "model":
        return place
    if name in ("flips", "ranks"):
        return f"{place} {name.removesuffix('s') if place == '1' else name}"
    if name == "where" and place.startswith("role:") and place.removeprefix("role:").isidentifier():
        return f"in the {place.removeprefix('role:')}"
    return f"{name} {place}"


def _trials(cell: CellProgress) -> Iterator[TrialData]:
    if cell.golden is None:
        return
    for number in cell.counted():
        entry = cell.entries[number]
        yield TrialData(entry.trial, entry.observation, cell.outcomes[number], cell.golden, cell.direction)


def _spread(count: int, wanted: int) -> list[int]:
    """So many places of a list, evenly; all if there are no more.

    >>> _spread(10, 3), _spread(2, 5)
    ([0, 3, 6], [0, 1])
    """
    return list(range(count)) if count <= wanted else [place * count // wanted for place in range(wanted)]


# Figures as they were published: for the studies of the gallery that ask the same question, beside our own.
#
# They are read from `published.toml` and only ever shown as published. A study of the same name with another source
# has none.


@dataclass(frozen=True, slots=True)
class PublishedFigures:
    """What one publication says of a study's cells."""

    source: str
    measure: str
    """As `evergrad.study.tables.PUBLISHED` names it; empty if no figure is of a single cell."""
    what: str
    """The figures' unit and number of trainings."""
    series: tuple[str, ...]
    """What the numbers of a cell are of: frameworks, mechanisms."""
    cells: tuple[tuple[Mapping[str, str | int], tuple[str, ...]], ...]
    table: DataTable | None
    """What fits no cell of ours, as it was printed."""

    @property
    def is_percent(self) -> bool:
        """Whether the figures have the unit of ours, and may share an axis with them."""
        return "%" in self.what

    def at(self, axes: Mapping[str, Any]) -> tuple[str, ...] | None:
        """The figures of a cell with these axes, as printed; None if there are none."""
        for wanted, values in self.cells:
            if all(fnmatchcase(str(axes.get(name)), str(place)) for name, place in wanted.items()):
                return values
        return None

    def in_words(self, axes: Mapping[str, Any]) -> str:
        """The same, in one text."""
        return " / ".join(self.at(axes) or ())


def published_for(results: Results) -> PublishedFigures | None:
    """The published figures of this study, if it is one that has some."""
    found = _all().get(results.study)
    return found if found is not None and found.source == results.source else None


@cache
def _all() -> dict[str, PublishedFigures]:
    text = (importlib.resources.files("evergrad.report") / "published.toml").read_text(encoding="utf-8")
    return {name: _published(told) for name, told in tomllib.loads(text).items()}


def _published(told: Mapping[str, Any]) -> PublishedFigures:
    cells = tuple((one["axes"], tuple(one["values"])) for one in told.get("cells", ()))
    table = told.get("table")
    return PublishedFigures(
        source=told["source"],
        measure=told.get("measure", ""),
        what=told.get("what", ""),
        series=tuple(told.get("series", ())),
        cells=cells,
        table=None if table is None else _table(table["caption"], table["columns"], table["rows"]),
    )


def _table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> DataTable:
    columns_of = list(zip(*rows, strict=True))
    numeric = [all(_number(text) is not None or text in ("", "–") for text in column) for column in columns_of]
    return DataTable(
        [
            TableColumn(title, "number" if is_number else "text")
            for title, is_number in zip(columns, numeric, strict=True)
        ],
        [
            [
                blocks_Cell(text, _number(text) if is_number else text, "published")
                for text, is_number in zip(row, numeric, strict=True)
            ]
            for row in rows
        ],
        caption,
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
