"""Figures of studies that watch more than outcomes: what saving costs, how far a fault spreads, what guards see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from evergrad.report.blocks import Block, Figure
from evergrad.report.markup import literal
from evergrad.report.palette import PALETTE, series_colour
from evergrad.report.study_rates import short_places
from evergrad.study.rendering import Entry, Quantity, Table
from evergrad.study.results import Results
from evergrad.study.table_notes import varying_axes
from evergrad.study.watched_tables import watched_table

_MOST = 6
_COSTS = ("blocked ms", "overhead %", "restart ms", "restore ms", "first save ms")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross")

Row = tuple[Entry, ...]


def watched_figures(results: Results, kind: str) -> list[Block]:
    """The figures that go with the table of that kind, one of `WATCHED`."""
    table = watched_table(results, kind)
    return list(_KINDS[kind](results, table))


def _costs(results: Results, table: Table) -> list[Block]:
    """Bars side by side for each strategy, along the number of ranks; a figure for each model and cost."""
    names = [name for name in varying_axes(results) if name in table.headers]
    down = results.rows if results.rows in names else next((one for one in names if one != results.columns), "")
    across = results.columns if results.columns in names and results.columns != down else ""
    groups = [name for name in names if name not in (down, across)]
    blocks: list[Block] = []
    for header in [cost for cost in _COSTS if cost in table.headers][:3]:
        for group, rows in _split(table, groups, table.rows):
            traces = []
            for index, (top, mine) in enumerate(_split(table, [across] if across else [], rows)):
                found = [(row, value) for row in mine if isinstance(value := _at(table, row, header), Quantity)]
                traces.append(
                    {
                        "type": "bar", "name": str(_at(table, mine[0], across)) if across else header,
                        "x": [str(_at(table, row, down)) if down else header for row, _ in found],
                        "y": [value.value for _, value in found], "error_y": _bar_errors([value for _, value in found]),
                        "text": [str(value) for _, value in found], "textposition": "none",
                        "hovertemplate": f"{top or header}, {down} %{{x}}<br>{header} %{{text}}<extra></extra>",
                        "marker": {"color": series_colour(index)}, "showlegend": bool(across),
                    }
                )  # fmt: skip
            if any(trace["y"] for trace in traces):
                spread = "the interval of the median" if header == "overhead %" else "quartiles"
                caption = f"**{header}**{f', {literal(group)}' if group else ''}: medians; the thin lines are {spread}."
                layout = {
                    "barmode": "group",
                    "xaxis": {"title": {"text": down}, "type": "category"},
                    "yaxis": {"title": {"text": header}, "rangemode": "tozero"},
                }
                label = f"{results.study} {header} {group}".strip()
                blocks.append(Figure(label, traces, layout, caption, 320, half=True))
    return blocks[: 2 * _MOST]


def _spread(results: Results, table: Table) -> list[Block]:
    """The parts that differ over steps: of elements, layers, ranks; a line a cell."""
    places = [name for name in varying_axes(results) if name in table.headers]
    blocks: list[Block] = []
    for header in ("elements %", "layers %", "ranks %"):
        traces: list[dict[str, Any]] = []
        for index, (cell, rows) in enumerate(_split(table, places, table.rows)):
            found = [(row, value) for row in rows if isinstance(value := _at(table, row, header), Quantity)]
            traces.append(
                {
                    "type": "scatter", "mode": "lines+markers", "name": cell or "all", "legendgroup": cell,
                    "x": [_at(table, row, "steps") for row, _ in found], "y": [value.value for _, value in found],
                    "error_y": _errors([value for _, value in found]), "text": [str(value) for _, value in found],
                    "hovertemplate": f"{cell}<br>after %{{x}} steps: %{{text}} %<extra></extra>",
                    "line": {"color": series_colour(index), "dash": _DASHES[index % len(_DASHES)]},
                    "marker": {"size": 7, "symbol": _SYMBOLS[index % len(_SYMBOLS)]},
                }
            )  # fmt: skip
        if any(trace["y"] for trace in traces):
            what = header.removesuffix(" %")
            caption = (
                f"Part of all **{what}** that differ from the fault-free run: means over trainings, with intervals."
            )
            layout = {
                "xaxis": {"title": {"text": "steps since the restart"}},
                "yaxis": {"title": {"text": header}, "rangemode": "tozero"},
            }
            blocks.append(Figure(f"{results.study} {what}", traces, layout, caption, 400))
    return blocks


def _guards(results: Results, table: Table) -> list[Block]:
    """How much of what changed the result each guard saw: a bar a guard, grouped by cell."""
    places = [name for name in varying_axes(results) if name in table.headers]
    blocks: list[Block] = []
    for header in ("RWC seen %", "N-EV seen %", "false %"):
        traces = []
        for index, (cell, rows) in enumerate(_split(table, places, table.rows)):
            found = [(row, value) for row in rows if isinstance(value := _at(table, row, header), Quantity)]
            traces.append(
                {
                    "type": "bar", "name": cell or "all", "x": [str(_at(table, row, "guard")) for row, _ in found],
                    "y": [value.value for _, value in found], "error_y": _bar_errors([value for _, value in found]),
                    "text": [str(value) for _, value in found], "textposition": "none",
                    "hovertemplate": f"%{{x}}, {cell}<br>{header} %{{text}}<extra></extra>",
                    "marker": {"color": series_colour(index)}, "showlegend": bool(cell),
                }
            )  # fmt: skip
        if any(trace["y"] for trace in traces):
            layout = {
                "barmode": "group",
                "xaxis": {"type": "category"},
                "yaxis": {"title": {"text": header}, "range": [0, 104]},
            }
            caption = f"**{header}**: {_GUARD_WORDS[header]}, with intervals of {100 * results.confidence:g} %."
            blocks.append(Figure(f"{results.study} {header}", traces, layout, caption, 360))
    return blocks


_GUARD_WORDS = {
    "RWC seen %": "of the trainings whose result changed, those in which the guard spoke up after the fault",
    "N-EV seen %": "of the trainings that met a NaN, an infinity or an extreme value, those in which it spoke up",
    "false %": "of the runs without a fault, those in which it spoke up all the same",
}

_KINDS: dict[str, Callable[[Results, Table], list[Block]]] = {"costs": _costs, "spread": _spread, "guards": _guards}


def _split(table: Table, names: Sequence[str], rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Rows by their places on these axes, in words."""
    groups: dict[str, list[Row]] = {}
    shortened = {name: _short(table, name, rows) for name in names}
    for row in rows:
        words = (f"{name} {shortened[name][str(_at(table, row, name))]}" for name in names)
        groups.setdefault(", ".join(words), []).append(row)
    return list(groups.items())


def _short(table: Table, name: str, rows: Sequence[Row]) -> dict[str, str]:
    places = list(dict.fromkeys(str(_at(table, row, name)) for row in rows))
    return dict(zip(places, short_places(places), strict=True))


def _at(table: Table, row: Row, header: str) -> Entry:
    return row[table.headers.index(header)]


def _errors(quantities: Sequence[Quantity]) -> dict[str, Any]:
    highs = [0.0 if one.high is None else one.high - one.value for one in quantities]
    lows = [0.0 if one.low is None else one.value - one.low for one in quantities]
    return {"type": "data", "symmetric": False, "array": highs, "arrayminus": lows, "thickness": 1.2, "width": 4}


def _bar_errors(quantities: Sequence[Quantity]) -> dict[str, Any]:
    """Those of bars have no line to take their colour from, and plotly's own is lost on a dark page."""
    return {**_errors(quantities), "color": PALETTE["muted"]}
