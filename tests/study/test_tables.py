"""Tables: their shape, what they say, and that no name in them is obeyed by what reads it."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re

import pytest
from rich.console import Console

from evergrad.errors import UsageError
from evergrad.study.results import Cell, Results
from evergrad.study.statistics import wilson
from evergrad.study.table_formats import FORMS, Quantity, Table, format_table
from evergrad.study.tables import comparisons_table, published_table, results_to_json, summary_table, trends_table
from evergrad.study.trials import Outcome

HOSTILE = "=cmd|' /C calc'!A0 \x1b[2J\n\\input{x} $&#%_^~{}<> --a \u202eb `c` \"d\" [red]"


def _cell(nev: int, *, n: int = 40, unknown: int = 0, finals: tuple[float, ...] = (), **more: object) -> Cell:
    axes = {name: more.pop(name) for name in ("model", "where", "flips", "data") if name in more}
    counts = dict.fromkeys(Outcome, 0)
    counts |= {Outcome.NEV: nev, Outcome.CHANGED: 1, Outcome.IDENTICAL: n - nev - 1, Outcome.UNKNOWN: unknown}
    return Cell(
        axes=axes,  # type: ignore[arg-type]
        due=n + unknown,
        counts=counts,
        golden=0.95,
        golden_start=0.9,
        finals=finals,
        interval=wilson(nev, n),
        **more,  # type: ignore[arg-type]
    )


def _results(*cells: Cell, axes: tuple[str, ...] = ("model", "flips"), **more: object) -> Results:
    due = sum(cell.due for cell in cells)
    named = {"study": "bitflip-nev", "title": "Flips", "source": "A paper", "scale": "tiny", "trials": due} | more
    return Results(cells=cells, axes=axes, **named)  # type: ignore[arg-type]


GRID = _results(
    *(
        _cell(nev, model=model, flips=flips, data="digits", finals=(0.94, 0.95, 0.96), starts=(0.9, float("nan")))
        for model in ("alexnet", "vgg16")
        for flips, nev in ((1, 0), (10, 6), (100, 20))
    ),
    facts={"seed": "7", "margin": "0.02"},
    notes=("One line of the journal is damaged.",),
)


def _column(table: Table, header: str) -> list[object]:
    return [row[table.headers.index(header)] for row in table.rows]


def test_a_summary_has_a_row_for_each_cell_and_columns_with_content() -> None:
    table = summary_table(GRID)
    counted = ("trainings", "N-EV", "NaN", "TF", "AccR", "changed", "identical", "N-EV %", "RWC", "RWC %")
    assert table.headers == ("model", "flips", *counted, "AvgI-Acc", "ACC", "STD", "CV %", "ΔACC")
    assert len(table.rows) == 6
    assert str(_column(table, "N-EV %")[1]) == "15.0 [7.1, 29.1]"
    assert _column(table, "RWC")[1] == 7
    assert [str(_column(table, header)[0]) for header in ("AvgI-Acc", "ACC", "STD", "CV %")] == [
        "0.9000",
        "0.9500",
        "0.0100",
        "1.05",
    ]
    change = _column(table, "ΔACC")[0]
    assert isinstance(change, Quantity)
    assert change.low is not None
    assert change.low < 0 < change.high


def test_unknown_missing_and_mismatches_are_shown_only_where_there_are_any() -> None:
    cells = (_cell(1, model="a", flips=1, unknown=3, mismatches=(0.0, 0.5)), _cell(0, model="b", flips=1))
    late = dataclasses.replace(cells[1], due=90)
    table = summary_table(_results(cells[0], late))
    assert _column(table, "unknown") == [3, 0]
    assert _column(table, "due") == [43, 90]
    assert str(_column(table, "mismatch %")[0]).startswith("25.00 [")
    assert _column(table, "mismatch %")[1] is None
    assert not {"ACC", "STD", "AvgI-Acc"} & set(table.headers)
    # The lost ones are in no rate: 1 of 40, not of 43.
    assert _column(table, "N-EV %")[0].value == 2.5  # type: ignore[attr-defined]


def test_a_cell_without_trainings_has_no_rate() -> None:
    empty = Cell(axes={"model": "a", "flips": 1}, due=9, counts=dict.fromkeys(Outcome, 0), golden=0.5, golden_start=0.5)
    table = summary_table(_results(empty))
    assert (_column(table, "N-EV %"), _column(table, "RWC %")) == ([None], [None])
    assert "–" in format_table(table, "markdown")
    assert format_table(summary_table(_results()), "csv")


def test_notes_define_the_columns_and_say_where_the_numbers_are_from() -> None:
    for table in (summary_table(GRID), published_table(GRID)):
        notes = "\n".join(table.notes)
        for said in (
            "N-EV: a NaN",
            "Wilson; 95 %",
            "240 of 240 trainings",
            "In every cell: data digits",
            "seed: 7",
            "margin: 0.02",
            "damaged",
        ):
            assert said in notes
    anytime = dataclasses.replace(GRID, interval="anytime", confidence=0.99)
    assert "valid at every look" in "\n".join(summary_table(anytime).notes)
    assert "99 %" in "\n".join(summary_table(anytime).notes)
    assert "a guide, not a promise" in "\n".join(comparisons_table(anytime).notes)
    assert "a guide, not a promise" not in "\n".join(comparisons_table(GRID).notes)


def test_the_published_shape_has_rows_down_and_columns_across() -> None:
    table = published_table(GRID)
    assert table.headers == ("flips", "alexnet", "vgg16")
    assert [row[0] for row in table.rows] == [1, 10, 100]
    assert str(table.rows[1][2]) == "15.0 [7.1, 29.1]"
    assert str(published_table(GRID, "final").rows[0][1]) == "0.9500"
    turned = published_table(dataclasses.replace(GRID, rows="model", columns="flips"))
    assert turned.headers == ("model", "1", "10", "100")
    with pytest.raises(UsageError, match="measure: expected nev, rwc"):
        published_table(GRID, "nevv")


def test_further_axes_become_groups_of_rows_and_holes_stay_empty() -> None:
    cells = [
        _cell(flips // 10, model=model, where=where, flips=flips)
        for model in ("a", "b")
        for flips in (1, 10)
        for where in ("model", "optimizer")
        if (model, where, flips) != ("b", "optimizer", 10)
    ]
    table = published_table(_results(*cells, axes=("model", "flips", "where")))
    assert table.headers == ("where", "flips", "a", "b")
    assert [row[:2] for row in table.rows] == [("model", 1), ("model", 10), ("optimizer", 1), ("optimizer", 10)]
    assert table.rows[3][3] is None
    assert [table.ends_group(place) for place in range(4)] == [False, True, False, False]
    assert format_table(table, "latex").count(r"\midrule") == 2


def test_without_the_published_axes_the_table_takes_what_there_is() -> None:
    lone = published_table(_results(_cell(1, where="model"), _cell(2, where="optimizer"), axes=("where",)))
    assert lone.headers == ("where", "N-EV %")
    assert [row[0] for row in lone.rows] == ["model", "optimizer"]
    assert published_table(_results(_cell(1), axes=())).headers == ("N-EV %",)
    partly = published_table(_results(_cell(1, model="a", flips=1), _cell(2, flips=1), axes=("model",)))
    assert partly.headers == ("flips", "a", "none")
    assert None not in partly.rows[0]


def test_comparisons_and_trends_are_tables_too() -> None:
    table = comparisons_table(GRID)
    row = next(row for row in table.rows if row[:5] == ("N-EV", "flips", 10, 100, "model vgg16"))
    assert str(row[7]) == "35.0 [14.6, 51.8]"
    assert row[-1] in ("differs", "not told apart")
    assert len(table.rows) == 2 * (4 + 3)
    rising = trends_table(GRID, "flips")
    assert [row[1] for row in rising.rows] == ["0.0 15.0 50.0"] * 2
    assert [row[-1] for row in rising.rows] == ["rises"] * 2


def test_the_json_has_the_promised_keys_and_is_json() -> None:
    told = results_to_json(GRID)
    assert list(told)[:3] == ["study", "trials", "cells"]
    again = json.loads(json.dumps(told, allow_nan=False))
    assert again == told
    first = again["cells"][1]
    promised = ("axes", "trainings", "identical", "changed", "degraded", "nev", "failed", "unknown", "nev_interval")
    assert tuple(first)[:9] == promised
    assert first["axes"] == {"model": "alexnet", "flips": 10, "data": "digits"}
    assert (first["trainings"], first["identical"], first["changed"], first["nev"]) == (40, 33, 1, 6)
    assert first["nev_interval"] == list(wilson(6, 40))
    assert first["start"] == 0.9
    lost = dataclasses.replace(GRID.cells[0], golden=float("nan"), finals=())
    json.dumps(results_to_json(_results(lost)), allow_nan=False)


def _hostile() -> Table:
    rows = ((HOSTILE, 1, Quantity(-1.5, 1, -2.0, 1.0)), ("[0, 1] *", 2, None), ("-3+1", -3, Quantity(2.0)))
    return Table(HOSTILE, (HOSTILE, "@n", "rate"), rows, (HOSTILE, "a,=1+1;@b"))


def test_a_terminal_gets_no_escapes_and_no_markup() -> None:
    out = io.StringIO()
    Console(file=out, width=300, force_terminal=True, color_system=None).print(_hostile())
    assert "\x1b" not in re.sub(r"\x1b\[\d*m", "", out.getvalue())
    assert "\u202e" not in out.getvalue()
    assert r"\x1b[2J\n" in out.getvalue()
    assert "[red]" in out.getvalue()


def test_a_spreadsheet_gets_no_formulas_and_a_reader_gets_numbers() -> None:
    text = format_table(_hostile(), "csv")
    rows = [row for row in csv.reader(io.StringIO(text)) if not row[0].startswith("#")]
    assert rows[0][1:] == ["'@n", "rate", "rate low", "rate high"]
    assert [row[1:] for row in rows[1:]] == [["1", "-1.5", "-2", "1"], ["2", "", "", ""], ["-3", "2", "", ""]]
    assert rows[3][0] == "'-3+1"
    for row in csv.reader(io.StringIO(text)):
        for cell in row:
            number = re.fullmatch(r"-?[\d.e+-]+", cell)
            assert number or not cell.strip().startswith(("=", "+", "-", "@")), cell
    assert "# a,'=1+1;'@b\n" in text
    assert "\x1b" not in text


def test_markdown_keeps_its_columns_whatever_the_names() -> None:
    lines = format_table(_hostile(), "markdown").splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 5
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {4}
    assert not re.search(r"(?<!\\)[<>`*_]", table[2])
    assert "| -3 | 2.0 |" in table[4]


def test_latex_has_every_special_escaped_and_all_ends_paired() -> None:
    text = format_table(_hostile(), "latex")
    assert text.isprintable() or set(text) - {"\n"} == {char for char in text if char.isprintable()}
    for name in ("table", "tabular", "minipage"):
        assert text.count(rf"\begin{{{name}}}") == text.count(rf"\end{{{name}}}") == 1
    assert r"\toprule" in text
    assert re.search(r"\\label\{tab:[a-z0-9-]+\}", text)
    body = text.split(r"\midrule")[1].split(r"\bottomrule")[0]
    bare = re.sub(r"\\(text[a-z]+\{\}|[\\{}$&#%_])|\$-\$|\{''\}|\{\}", "", body)
    # What is left is plain but for the two separators of each of three rows.
    assert sorted(re.findall(r"[\\{}$&#%_^~<>|\"`']", bare)) == ["&"] * 6
    assert "--a" not in body
    for line in body.strip().splitlines():
        assert line.startswith("{}")
        assert line.endswith(r"\\")
    assert "[$-$2.0, 1.0]" in body


def test_an_unknown_form_names_the_known() -> None:
    assert tuple(FORMS) == ("csv", "latex", "markdown")
    with pytest.raises(UsageError, match="format: expected csv, latex or markdown, found 'html'"):
        format_table(_hostile(), "html")


def test_small_numbers_do_not_pass_for_none() -> None:
    assert [str(Quantity(p, 4)) for p in (0.0, 1e-9, 0.00007, 1.0)] == ["0.0000", "<0.0001", "0.0001", "1.0000"]
    assert str(Quantity(-0.01, 1, -0.04, 0.0)) == "0.0 [0.0, 0.0]"
