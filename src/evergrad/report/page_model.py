"""What a page is made of, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Mark = Literal["", "published", "good", "bad", "muted"]


@dataclass(frozen=True, slots=True)
class Prose:
    """Paragraphs by blank lines; `code` and **bold** are known. Names in it go through `markup.literal`."""

    text: str


@dataclass(frozen=True, slots=True)
class Figure:
    """A plotly figure as plain JSON data.

    Colours of text, grid and background follow the page's theme and need not be given. In texts of a figure
    `<br>`, `<b>`, `<i>`, `<sub>`, `<sup>` and `<extra>` are obeyed, other markup is shown.
    """

    name: str  # unique on its page; also the name of the image that can be saved
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    caption: str = ""
    height: int = 380
    half: bool = False  # stands beside the next one that is half, where the page is wide


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing that is SVG already, without scripts and links, and with every text in it escaped."""

    name: str
    svg: str
    caption: str = ""


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a table; `help` says what it means, below the table."""

    title: str
    kind: Literal["text", "number"] = "text"
    help: str = ""


@dataclass(frozen=True, slots=True)
class TableCell:
    """A text without markup, and what it is sorted by: None sorts last, either way. Without a key, by the text."""

    text: str
    sort: float | str | None = ""
    mark: Mark = ""


@dataclass(frozen=True, slots=True)
class DataTable:
    """A table that a reader can sort; every row has a cell for each column."""

    columns: list[TableColumn]
    rows: list[list[TableCell]]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Commands:
    """Commands to copy, each with what it does, without markup."""

    lines: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values, without markup: settings, versions, the machine."""

    pairs: list[tuple[str, str]]


ReportBlock = Prose | Figure | Picture | DataTable | Commands | Facts


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page with a title; folded ones are opened by a click, and by printing."""

    title: str
    blocks: list[ReportBlock]
    anchor: str = ""
    folded: bool = False


@dataclass(frozen=True, slots=True)
class ReportPage:
    """A report: the question, its answer in words, then what the answer rests on."""

    title: str
    kind: str  # "study report", "timeline": shown above the title
    question: str
    answer: list[str]  # paragraphs, with the markup of `Prose`; the first is the one to remember
    sections: list[Section] = field(default_factory=list)
    made: str = ""  # by what, when


# The colours of reports: told apart by the colour-blind, and visible on light and on dark pages.
#
# They are Okabe and Ito's, with those that are too pale for white darkened: each has a contrast of at least 3 to both
# backgrounds. A colour is never all that tells two things apart: lines differ in dash, bars in place.

_BLUE, _VERMILION, _GREEN = "#2b7fb8", "#d55e00", "#009e73"
_ORANGE, _PURPLE, _GREY = "#c78500", "#c2689b", "#808890"

PALETTE: Mapping[str, str] = MappingProxyType(
    {
        # studies
        "golden": _ORANGE,
        "faulty": _BLUE,
        "published": _PURPLE,
        "sign": _VERMILION,
        "exponent": _BLUE,
        "mantissa": _GREEN,
        # verdicts
        "ok": _GREEN,
        "bad": _VERMILION,
        "warn": _ORANGE,
        "muted": _GREY,
        # what a rank is doing
        "starting": _ORANGE,
        "training": _GREEN,
        "waiting": _PURPLE,
        "recovering": _PURPLE,
        "dead": _VERMILION,
        "spare": _GREY,
    }
)

# Ranks, models, tiers: whatever comes in a row.
SERIES: tuple[str, ...] = (_BLUE, _VERMILION, _GREEN, _PURPLE, _ORANGE, "#5b7fd6", "#8a7a3b", _GREY)


def series_colour(index: int) -> str:
    """The colour of a rank, or of anything else that is counted; they repeat after eight.

    >>> series_colour(0) == series_colour(8)
    True
    """
    return SERIES[index % len(SERIES)]
