"""Figures of rates: how they go along the study's axis, with intervals; and as a map of layers, roles and targets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from evergrad.report.blocks import Block, Figure, Prose
from evergrad.report.markup import literal
from evergrad.report.palette import PALETTE, series_colour
from evergrad.report.published import Published
from evergrad.study.columns import PUBLISHED
from evergrad.study.rendering import Quantity
from evergrad.study.results import Cell, Results
from evergrad.study.table_notes import varying_axes

_MOST = 4
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "pentagon")
_PLACES = ("layer", "where", "target")
_STRIPPED = ("bitflip:bits=", "bitmask:mask=", "role:")


def rate_blocks(results: Results, measure: str, published: Published | None) -> list[Block]:
    """A line a column of the published table, along its rows; a figure for each place on the other axes."""
    down, across = _axes(results)
    if not down:
        return []
    header = PUBLISHED[measure][0]
    groups = groups_of(results, (down, across))
    blocks: list[Block] = []
    for name, cells in groups[:_MOST]:
        figure = Figure(
            f"{results.study} {measure} {name}".strip(),
            [*_ours(cells, results, measure, down, across), *_published(cells, published, measure, down, across)],
            {
                "xaxis": _place_axis(down, _places(cells, down)),
                "yaxis": {"title": {"text": header}, "rangemode": "tozero", **_percent_range(header)},
            },
            f"**{header}** by {down}{f', {literal(name)}' if name else ''}. Bars are {_intervals(results)}.",
            height=400 if len(groups) == 1 else 340,
            half=len(groups) > 1,
        )
        if any(trace["y"] for trace in figure.traces):
            blocks.append(figure)
    return blocks + _left_out(len(groups))


def heat_blocks(results: Results, measure: str) -> list[Block]:
    """A map where layers, roles or targets vary beside another axis."""
    varying = varying_axes(results)
    aimed = next((name for name in _PLACES if name in varying), "")
    other = next((name for name in varying if name not in (aimed, "seed")), "")
    if not aimed or not other:
        return []
    header, entry = PUBLISHED[measure]
    groups = groups_of(results, (aimed, other))
    blocks: list[Block] = []
    for name, cells in groups[:_MOST]:
        x, y = _places(cells, other), _places(cells, aimed)
        found = {(str(cell.axes.get(aimed)), str(cell.axes.get(other))): entry(cell, results) for cell in cells}
        z = [[_value(found.get((row, column))) for column in x] for row in y]
        text = [[_or_dash(found.get((row, column))) for column in x] for row in y]
        if not any(value is not None for row in z for value in row):
            continue
        trace: dict[str, Any] = {
            "type": "heatmap", "x": short_places(x), "y": short_places(y), "z": z, "text": text,
            "texttemplate": "%{text}", "colorscale": "Cividis", "xgap": 2, "ygap": 2,
            "colorbar": {"title": {"text": header}, "thickness": 12},
        }  # fmt: skip
        trace["hovertemplate"] = f"{aimed} %{{y}}, {other} %{{x}}<br>{header}: %{{text}}<extra></extra>"
        if "%" in header:
            trace |= {"zmin": 0, "zmax": 100}
        layout = {
            "xaxis": {"title": {"text": other}, "type": "category", "showgrid": False},
            "yaxis": {"title": {"text": aimed}, "type": "category", "autorange": "reversed", "showgrid": False},
        }
        caption = f"**{header}** by {aimed} and {other}{f', {literal(name)}' if name else ''}, with intervals."
        height = min(640, 150 + 52 * len(y))
        blocks.append(Figure(f"{results.study} map {name}".strip(), [trace], layout, caption, height))
    return blocks + _left_out(len(groups))


def groups_of(results: Results, used: Iterable[str]) -> list[tuple[str, list[Cell]]]:
    """The cells by their places on the axes that a figure does not use, in words."""
    names = [name for name in varying_axes(results) if name not in used]
    groups: dict[str, list[Cell]] = {}
    for cell in results.cells:
        groups.setdefault(", ".join(f"{name} {cell.axes.get(name)}" for name in names), []).append(cell)
    return list(groups.items())


def short_places(places: Sequence[str]) -> list[str]:
    """Without what all of them begin with, if that is a fault's or a role's own word.

    >>> short_places(["bitflip:bits=1", "bitflip:bits=sign"]), short_places(["role:model"]), short_places(["a1", "a2"])
    (['1', 'sign'], ['model'], ['a1', 'a2'])
    """
    cut = next((prefix for prefix in _STRIPPED if all(place.startswith(prefix) for place in places)), "")
    return [place.removeprefix(cut) for place in places]


def _axes(results: Results) -> tuple[str, str]:
    """The axis along the figure, and the one that lines differ in; empty where there is none."""
    varying = [name for name in varying_axes(results) if name != "seed"]
    down = results.rows if results.rows in varying else next((one for one in varying if one != results.columns), "")
    across = results.columns if results.columns in varying and results.columns != down else ""
    if not down:
        down, across = across, ""
    return down, across


def _ours(cells: Sequence[Cell], results: Results, measure: str, down: str, across: str) -> list[dict[str, Any]]:
    entry = PUBLISHED[measure][1]
    places = _places(cells, down)
    tops = _places(cells, across) if across else [""]
    traces = []
    for index, (top, name) in enumerate(zip(tops, short_places(tops), strict=True)):
        line = [cell for cell in cells if not across or str(cell.axes.get(across)) == top]
        found = [(cell, quantity) for cell in line if (quantity := entry(cell, results)) is not None]
        traces.append(
            {
                "type": "scatter", "mode": "lines+markers", "name": name or "ours",
                "x": [places.index(str(cell.axes.get(down))) + _aside(index, tops) for cell, _ in found],
                "y": [quantity.value for _, quantity in found],
                "error_y": _errors([quantity for _, quantity in found]),
                "text": [
                    f"{down} {cell.axes.get(down)}: {quantity}<br>{cell.known:,} trainings" for cell, quantity in found
                ],
                "hovertemplate": "%{text}",
                "line": {"color": series_colour(index), "width": 2},
                "marker": {"size": 9, "symbol": _SYMBOLS[index % len(_SYMBOLS)]},
                "showlegend": True,
            }
        )  # fmt: skip
    return traces


def _published(
    cells: Sequence[Cell], published: Published | None, measure: str, down: str, across: str
) -> list[dict[str, Any]]:
    """Open marks, one trace a series; only where the unit is that of ours."""
    if published is None or published.measure != measure or not published.is_percent:
        return []
    places, tops = _places(cells, down), _places(cells, across) if across else [""]
    traces = []
    for index, series in enumerate(published.series):
        found = [
            (cell, values[index])
            for cell in cells
            if (values := published.at(cell.axes)) is not None and _is_number(values[index])
        ]
        if found:
            of = [f"{cell.axes.get(across)}, {series}" if across else series for cell, _ in found]
            traces.append(
                {
                    "type": "scatter", "mode": "markers",
                    "name": "published" if series == "published" else f"published, {series}",
                    "x": [
                        places.index(str(cell.axes.get(down)))
                        + _aside(tops.index(str(cell.axes.get(across, ""))), tops)
                        for cell, _ in found
                    ],
                    "y": [float(value) for _, value in found],
                    "text": [f"published, {one}: {value} %" for one, (_, value) in zip(of, found, strict=True)],
                    "hovertemplate": "%{text}<extra></extra>",
                    "marker": {
                        "size": 9, "color": PALETTE["published"],
                        "symbol": f"{('x-thin', 'cross-thin', 'asterisk')[index % 3]}-open", "line": {"width": 1.5},
                    },
                }
            )  # fmt: skip
    return traces


def _intervals(results: Results) -> str:
    return f"intervals of {100 * results.confidence:g} %"


def _aside(index: int, tops: Sequence[str]) -> float:
    """How far a line's points stand beside their place, so that intervals do not cover each other."""
    return (index - (len(tops) - 1) / 2) * min(0.12, 0.6 / len(tops))


def _errors(quantities: Sequence[Quantity]) -> dict[str, Any]:
    highs = [0.0 if one.high is None else one.high - one.value for one in quantities]
    lows = [0.0 if one.low is None else one.value - one.low for one in quantities]
    return {"type": "data", "symmetric": False, "array": highs, "arrayminus": lows, "thickness": 1.2, "width": 4}


def _place_axis(down: str, places: Sequence[str]) -> dict[str, Any]:
    """Places at equal distances, whatever they are."""
    ticks = {"tickvals": list(range(len(places))), "ticktext": short_places(places)}
    return {"title": {"text": down}, **ticks, "range": [-0.5, len(places) - 0.5], "zeroline": False, "showgrid": False}


def _percent_range(header: str) -> dict[str, Any]:
    return {"range": [-3, 103]} if "%" in header and "mismatch" not in header else {}


def _places(cells: Sequence[Cell], axis: str) -> list[str]:
    return list(dict.fromkeys(str(cell.axes.get(axis)) for cell in cells))


def _value(quantity: Quantity | None) -> float | None:
    return None if quantity is None else quantity.value


def _or_dash(quantity: Quantity | None) -> str:
    return "–" if quantity is None else str(quantity)


def _left_out(count: int) -> list[Block]:
    more = f"{_MOST} of {count} groups are drawn; the table has all."
    return [Prose(more)] if count > _MOST else []


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()
