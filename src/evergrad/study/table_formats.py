"""What a table is, and how it is written: for a terminal, as CSV, Markdown or LaTeX.

Titles, names and notes may be a user's. Each form has characters that it obeys, so every text is spelt out for the form
it goes to: terminals get no escapes, spreadsheets no formulas, Markdown and LaTeX no markup.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from evergrad.study.results import Results
from evergrad.wording import checked_choice

if TYPE_CHECKING:
    import rich.table


_MISSING = "–"

_FORMULA = ("=", "+", "-", "@")
_MARKDOWN = re.compile(r"[\\`*_<>\[\]|~#&$]")
_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    "'": r"\textquotesingle{}",
    '"': "{''}",  # some languages make it an accent
    "\0": "{}",  # between two hyphens, which would become a dash
    # What our own texts hold beyond ASCII; pdflatex does not know all of it.
    "–": "--",
    "−": "$-$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "²": r"\textsuperscript{2}",
    "Δ": r"$\Delta$",
    "α": r"$\alpha$",
    "→": r"$\rightarrow$",
    "…": r"\dots{}",
}


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with the digits it is shown to, and its interval if it has one.

    >>> print(Quantity(12.4, 1, 9.12, 16.7), Quantity(0.00001, 4), Quantity(0.5, 4))
    12.4 [9.1, 16.7] <0.0001 0.5000
    """

    value: float
    digits: int = 1
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            least = 10.0**-self.digits
            return f"<{least:.{self.digits}f}" if 0 < self.value < least / 2 else self._shown(self.value)
        return f"{self._shown(self.value)} [{self._shown(self.low)}, {self._shown(self.high)}]"

    def _shown(self, number: float) -> str:
        return f"{round(number, self.digits) + 0.0:.{self.digits}f}"  # without a minus before zero


TableEntry: TypeAlias = "str | int | float | Quantity | None"


@dataclass(frozen=True, slots=True)
class Table:
    """Headers and rows, as numbers where they are numbers; no form is decided yet. Texts become one printable line."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[TableEntry, ...], ...]
    notes: tuple[str, ...] = ()
    """What stands under it."""
    groups: int = 0
    """How many columns, from the left, name a group of rows."""

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.headers) for row in self.rows)
        object.__setattr__(self, "title", _printable(self.title))
        object.__setattr__(self, "headers", tuple(map(_printable, self.headers)))
        object.__setattr__(self, "notes", tuple(map(_printable, self.notes)))
        rows = tuple(tuple(_printable(one) if isinstance(one, str) else one for one in row) for row in self.rows)
        object.__setattr__(self, "rows", rows)

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Which columns hold numbers alone."""
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(self.headers)
        return tuple(not any(isinstance(one, str) for one in column) for column in columns)

    def __rich__(self) -> rich.table.Table:
        """As rich prints it."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        drawn = RichTable(
            title=Text(self.title) if self.title else None,
            caption=Text("\n".join(self.notes)) if self.notes else None,
            title_justify="left",
            caption_justify="left",
            box=box.SIMPLE_HEAD,
        )
        for header, numeric in zip(self.headers, self.numeric, strict=True):
            drawn.add_column(Text(header), justify="right" if numeric else "left")
        for place, row in enumerate(self.rows):
            drawn.add_row(*(Text(_shown(one)) for one in row), end_section=self.ends_group(place))
        return drawn

    def ends_group(self, place: int) -> bool:
        """Whether another group begins after this row."""
        after = self.rows[place + 1] if place + 1 < len(self.rows) else None
        return after is not None and self.rows[place][: self.groups] != after[: self.groups]


def format_table(table: Table, form: str) -> str:
    """The table as text in one of `FORMS`; for a terminal, rich prints the table itself."""
    return FORMS[checked_choice("format", form, tuple(FORMS))](table)


def _csv(table: Table) -> str:
    """Numbers in full, an interval in columns of its own; notes as lines that begin with #, for readers to skip."""
    columns = list(zip(*table.rows, strict=True)) if table.rows else [()] * len(table.headers)
    wide = [any(isinstance(one, Quantity) and one.low is not None for one in column) for column in columns]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    headers: list[str] = []
    for header, has_interval in zip(table.headers, wide, strict=True):
        headers += [header, f"{header} low", f"{header} high"] if has_interval else [header]
    writer.writerow([escape_formula(header) for header in headers])
    for row in table.rows:
        cells: list[str] = []
        for one, has_interval in zip(row, wide, strict=True):
            if isinstance(one, Quantity):
                numbers = (one.value, one.low, one.high) if has_interval else (one.value,)
                cells += ["" if number is None else f"{number:.10g}" for number in numbers]
            else:
                cells += [escape_formula(one) if isinstance(one, str) else "" if one is None else str(one)]
                cells += ["", ""] * has_interval
        writer.writerow(cells)
    for note in (table.title, *table.notes):
        # A spreadsheet takes the line apart at separators, and would obey a formula after one.
        plain = re.sub(r"([,;|]\s*)(?=[=+\-@])", r"\1'", note.replace('"', "'"))
        out.write(f"# {plain}\n")
    return out.getvalue()


def _markdown(table: Table) -> str:
    """A table of GitHub's kind; notes as a list."""
    lines = [f"**{_unmarked(table.title)}**", ""] if table.title else []
    lines.append(_piped([_unmarked(header) for header in table.headers]))
    lines.append(_piped(["---:" if numeric else "---" for numeric in table.numeric]))
    lines += [_piped([_unmarked(one) if isinstance(one, str) else _shown(one) for one in row]) for row in table.rows]
    if table.notes:
        lines += ["", *(f"- {_unmarked(note)}" for note in table.notes)]
    return "\n".join(lines) + "\n"


def _latex(table: Table) -> str:
    """A float with caption and label, for a document with `booktabs`; notes in small print below."""
    label = re.sub(r"[^a-z0-9]+", "-", table.title.lower()).strip("-") or "table"
    lines = [r"\begin{table}", r"\centering", rf"\caption{{{_escaped(table.title)}}}", rf"\label{{tab:{label}}}"]
    lines.append(rf"\begin{{tabular}}{{{''.join('r' if numeric else 'l' for numeric in table.numeric)}}}")
    lines += [r"\toprule", _ended([_escaped(header) for header in table.headers]), r"\midrule"]
    for place, row in enumerate(table.rows):
        shown = (one if isinstance(one, str) else _shown(one).replace("-", "−") for one in row)
        lines.append(_ended([_escaped(one) for one in shown]))
        if table.ends_group(place):
            lines.append(r"\midrule")
    lines += [r"\bottomrule", r"\end{tabular}"]
    if table.notes:
        lines += [r"\par\medskip", r"\begin{minipage}{\linewidth}\footnotesize\raggedright"]
        lines += [rf"{_escaped(note)}\par" for note in table.notes]
        lines.append(r"\end{minipage}")
    return "\n".join([*lines, r"\end{table}"]) + "\n"


FORMS: dict[str, Callable[[Table], str]] = {"csv": _csv, "latex": _latex, "markdown": _markdown}


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _shown(entry: TableEntry) -> str:
    if entry is None:
        return _MISSING
    return f"{entry:.6g}" if isinstance(entry, float) else str(entry)


def escape_formula(text: str) -> str:
    """A text that no spreadsheet takes for a formula."""
    return f"'{text}" if text.lstrip().startswith(_FORMULA) or text.startswith(("\t", "\r")) else text


def _unmarked(text: str) -> str:
    return _MARKDOWN.sub(r"\\\g<0>", text)


def _piped(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(char, char) for char in re.sub("-(?=-)", "-\0", text))


def _ended(cells: list[str]) -> str:
    # The braces keep a [ or * that begins the next row from being read as a wish of this row's end.
    return rf"{{}}{' & '.join(cells)} \\"


# What every table of a study shows beside its own columns: the axes that tell cells apart, and the facts under it.


def varying_axes(results: Results) -> list[str]:
    """The axes that a table must show: without them two cells might look the same."""
    names = dict.fromkeys([*results.axes, *(name for cell in results.cells for name in cell.axes)])
    return [name for name in names if name in results.axes or len({cell.axes.get(name) for cell in results.cells}) > 1]


def notes_under(results: Results) -> tuple[str, ...]:
    """How many trainings there are, what all cells share, and everything that the numbers depend on."""
    done = sum(cell.trainings for cell in results.cells)
    notes = [f"{done:,} of {results.trials:,} trainings."]
    varying = varying_axes(results)
    same = results.cells[0].axes if results.cells else {}
    fixed = ", ".join(f"{name} {place}" for name, place in same.items() if name not in varying)
    notes += [f"In every cell: {fixed}."] if fixed else []
    return (*notes, *(f"{name}: {value}" for name, value in results.facts.items()), *results.notes)
