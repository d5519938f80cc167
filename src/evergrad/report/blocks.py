"""What a page is made of, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
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
class Column:
    """A column of a table; `help` says what it means, below the table."""

    title: str
    kind: Literal["text", "number"] = "text"
    help: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """A text without markup, and what it is sorted by: None sorts last, either way. Without a key, by the text."""

    text: str
    sort: float | str | None = ""
    mark: Mark = ""


@dataclass(frozen=True, slots=True)
class DataTable:
    """A table that a reader can sort; every row has a cell for each column."""

    columns: list[Column]
    rows: list[list[Cell]]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Commands:
    """Commands to copy, each with what it does, without markup."""

    lines: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values, without markup: settings, versions, the machine."""

    pairs: list[tuple[str, str]]


Block = Prose | Figure | DataTable | Commands | Facts


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page with a title; folded ones are opened by a click, and by printing."""

    title: str
    blocks: list[Block]
    anchor: str = ""
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Page:
    """A report: the question, its answer in words, then what the answer rests on."""

    title: str
    kind: str  # "study report", "timeline": shown above the title
    question: str
    answer: list[str]  # paragraphs, with the markup of `Prose`; the first is the one to remember
    sections: list[Section] = field(default_factory=list)
    made: str = ""  # by what, when
