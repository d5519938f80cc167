"""Figures as they were published: for the studies of the gallery that ask the same question, beside our own.

They are read from `published.toml` and only ever shown as published. A study of the same name with another source has
none.
"""

from __future__ import annotations

import importlib.resources
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from evergrad.report.blocks import Cell, Column, DataTable
from evergrad.study.results import Results


@dataclass(frozen=True, slots=True)
class Published:
    """What one publication says of a study's cells."""

    source: str
    measure: str
    """As `evergrad.study.columns.PUBLISHED` names it; empty if no figure is of a single cell."""
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


def published_for(results: Results) -> Published | None:
    """The published figures of this study, if it is one that has some."""
    found = _all().get(results.study)
    return found if found is not None and found.source == results.source else None


@cache
def _all() -> dict[str, Published]:
    text = (importlib.resources.files("evergrad.report") / "published.toml").read_text(encoding="utf-8")
    return {name: _published(told) for name, told in tomllib.loads(text).items()}


def _published(told: Mapping[str, Any]) -> Published:
    cells = tuple((one["axes"], tuple(one["values"])) for one in told.get("cells", ()))
    table = told.get("table")
    return Published(
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
        [Column(title, "number" if is_number else "text") for title, is_number in zip(columns, numeric, strict=True)],
        [
            [
                Cell(text, _number(text) if is_number else text, "published")
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
