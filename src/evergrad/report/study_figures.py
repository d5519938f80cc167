"""Figures of rates: how they go along the study's axis, with intervals; and as a map of layers, roles and targets."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from evergrad.dtypes import DType, ElementLayout
from evergrad.report.html import escape_markup
from evergrad.report.page_model import PALETTE, Figure, Prose, ReportBlock, series_colour
from evergrad.report.study_data import PublishedFigures, StudyData, TrialData
from evergrad.study.plan import CellPlan
from evergrad.study.probe_tables import probe_table
from evergrad.study.results import Cell, Results
from evergrad.study.table_formats import Quantity, Table, TableEntry, varying_axes
from evergrad.study.tables import PUBLISHED
from evergrad.study.trials import Observation, Series
from evergrad.training.settings import Direction

_MOST_RATES = 4
_SYMBOLS_RATES = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "pentagon")
_PLACES = ("layer", "where", "target")
_STRIPPED = ("bitflip:bits=", "bitmask:mask=", "role:")


def rate_blocks(results: Results, measure: str, published: PublishedFigures | None) -> list[ReportBlock]:
    """A line a column of the published table, along its rows; a figure for each place on the other axes."""
    down, across = _axes(results)
    if not down:
        return []
    header = PUBLISHED[measure][0]
    groups = groups_of(results, (down, across))
    blocks: list[ReportBlock] = []
    for name, cells in groups[:_MOST_RATES]:
        figure = Figure(
            f"{results.study} {measure} {name}".strip(),
            [*_ours(cells, results, measure, down, across), *_published(cells, published, measure, down, across)],
            {
                "xaxis": _place_axis(down, _places(cells, down)),
                "yaxis": {"title": {"text": header}, "rangemode": "tozero", **_percent_range(header)},
            },
            f"**{header}** by {down}{f', {escape_markup(name)}' if name else ''}. Bars are {_intervals(results)}.",
            height=400 if len(groups) == 1 else 340,
            half=len(groups) > 1,
        )
        if any(trace["y"] for trace in figure.traces):
            blocks.append(figure)
    return blocks + _left_out(len(groups))


def heat_blocks(results: Results, measure: str) -> list[ReportBlock]:
    """A map where layers, roles or targets vary beside another axis."""
    varying = varying_axes(results)
    aimed = next((name for name in _PLACES if name in varying), "")
    other = next((name for name in varying if name not in (aimed, "seed")), "")
    if not aimed or not other:
        return []
    header, entry = PUBLISHED[measure]
    groups = groups_of(results, (aimed, other))
    blocks: list[ReportBlock] = []
    for name, cells in groups[:_MOST_RATES]:
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
        caption = f"**{header}** by {aimed} and {other}{f', {escape_markup(name)}' if name else ''}, with intervals."
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
                "error_y": _errors_rates([quantity for _, quantity in found]),
                "text": [
                    f"{down} {cell.axes.get(down)}: {quantity}<br>{cell.known:,} trainings" for cell, quantity in found
                ],
                "hovertemplate": "%{text}",
                "line": {"color": series_colour(index), "width": 2},
                "marker": {"size": 9, "symbol": _SYMBOLS_RATES[index % len(_SYMBOLS_RATES)]},
                "showlegend": True,
            }
        )  # fmt: skip
    return traces


def _published(
    cells: Sequence[Cell], published: PublishedFigures | None, measure: str, down: str, across: str
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


def _errors_rates(quantities: Sequence[Quantity]) -> dict[str, Any]:
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


def _left_out(count: int) -> list[ReportBlock]:
    more = f"{_MOST_RATES} of {count} groups are drawn; the table has all."
    return [Prose(more)] if count > _MOST_RATES else []


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


# The picture of a number's bits: sign, exponent and mantissa from left to right, and what a flip of each one does.

_MOST_BITS = 6
_BITS = re.compile(r"\bbits=(\d+(?:-\d+)?|sign|exponent-msb|exponent|mantissa)(?:,|$)")


def bit_blocks(data: StudyData, measure: str) -> list[ReportBlock]:
    """A figure for each place on the other axes, of a study whose faults are of one bit or a few, by their position."""
    results = data.results
    plans = {id(cell): tally.plan for cell, tally in data.cells()}
    header, entry = PUBLISHED[measure]
    blocks: list[ReportBlock] = []
    groups = groups_of(results, ("fault",))
    for name, cells in groups[:_MOST_BITS]:
        layout = _layout(plans[id(cells[0])])
        if layout is None:
            continue
        found = [
            (span, quantity, cell.known)
            for cell in cells
            if (span := bits_of(plans[id(cell)].fault, layout)) is not None
            and (quantity := entry(cell, results)) is not None
        ]
        if len({span for span, _, _ in found}) > 1:
            caption = (
                f"**{header}** by the bit that flips{f', {escape_markup(name)}' if name else ''}; bit 0 is the sign. "
                f"Bars are intervals of {100 * results.confidence:g} %; a position without a mark was not tried."
            )
            traces = _traces_bits(found, layout, header)
            blocks.append(Figure(f"{results.study} bits {name}".strip(), traces, _frame(layout, header), caption, 400))
    return blocks


def bits_of(fault: str, layout: ElementLayout) -> tuple[int, int] | None:
    """The first and the last bit that a fault may flip, from the sign on; None if it may be any, or it flips none.

    >>> [bits_of(f"bitflip:bits={bits}", DType("float32").layout) for bits in ("sign", "exponent", "9-12")]
    [(0, 0), (1, 8), (9, 12)]
    """
    if not fault.startswith("bitflip") or (told := _BITS.search(fault)) is None:
        return None
    exponent = layout.exponent_bits
    named = {
        "sign": (0, 0),
        "exponent-msb": (1, 1),
        "exponent": (1, exponent),
        "mantissa": (exponent + 1, exponent + layout.mantissa_bits),
    }
    if told[1] in named:
        return named[told[1]]
    first, _, last = told[1].partition("-")
    span = int(first), int(last or first)
    return span if span[0] <= span[1] <= exponent + layout.mantissa_bits else None


def _layout(cell: CellPlan) -> ElementLayout | None:
    """Of the numbers that are hit; None if a program of the user's own holds them."""
    dtype = DType.named(getattr(cell.training, "precision", ""))
    return dtype.layout if dtype is not None and dtype.layout.exponent_bits else None


def _traces_bits(
    found: Sequence[tuple[tuple[int, int], Quantity, int]], layout: ElementLayout, header: str
) -> list[dict[str, Any]]:
    traces: list[dict[str, Any]] = []
    for field in ("sign", "exponent", "mantissa"):
        mine = [one for one in found if _field(one[0][0], layout) == field]
        traces.append(
            {
                "type": "bar", "name": field, "marker": {"color": PALETTE[field]},
                "x": [(first + last) / 2 for (first, last), _, _ in mine],
                "width": [last - first + 0.8 for (first, last), _, _ in mine],
                "y": [quantity.value for _, quantity, _ in mine],
                "error_y": {
                    "type": "data", "symmetric": False, "thickness": 1.4, "width": 4, "color": PALETTE["muted"],
                    "array": [(one.high if one.high is not None else one.value) - one.value for _, one, _ in mine],
                    "arrayminus": [one.value - (one.low if one.low is not None else one.value) for _, one, _ in mine],
                },
                "text": [
                    f"{_position(span)} ({field})<br>{header}: {one}<br>{known:,} trainings"
                    for span, one, known in mine
                ],
                "textposition": "none", "hovertemplate": "%{text}<extra></extra>", "showlegend": True,
            }
        )  # fmt: skip
    # A dot on the line where a rate is nought, which as a bar would look like one that was not tried.
    zero = [span for span, quantity, _ in found if quantity.value == 0]
    traces.append(
        {
            "type": "scatter", "mode": "markers", "showlegend": False, "hoverinfo": "skip",
            "x": [(first + last) / 2 for first, last in zero], "y": [0] * len(zero),
            "marker": {"size": 7, "color": [PALETTE[_field(first, layout)] for first, _ in zero]},
        }
    )  # fmt: skip
    return traces


def _frame(layout: ElementLayout, header: str) -> dict[str, Any]:
    """The axes, and below them the strip of fields."""
    exponent, whole = layout.exponent_bits, 1 + layout.exponent_bits + layout.mantissa_bits
    fields = (("sign", 0, 0), ("exponent", 1, exponent), ("mantissa", exponent + 1, whole - 1))
    shapes = [
        {
            "type": "rect", "xref": "x", "yref": "paper", "x0": first - 0.5, "x1": last + 0.5, "y0": -0.06, "y1": -0.01,
            "fillcolor": PALETTE[name], "line": {"width": 0}, "layer": "above",
        }
        for name, first, last in fields
    ]  # fmt: skip
    shown = [0, 1, *range(4, whole, 4)] if whole <= 32 else [0, 1, *range(8, whole, 8)]
    return {
        "barmode": "overlay",
        "shapes": shapes,
        "margin": {"b": 70},
        "xaxis": {
            "title": {"text": f"bit, of {whole}: 1 sign, {exponent} exponent, {layout.mantissa_bits} mantissa"},
            "range": [-0.7, whole - 0.3],
            "tickvals": shown,
            "ticks": "outside",
            "ticklen": 20,
            "tickcolor": "rgba(0,0,0,0)",
            "showgrid": False,
            "zeroline": False,
        },
        "yaxis": {"title": {"text": header}, "range": [0, 104] if "%" in header else None},
    }


def _field(bit: int, layout: ElementLayout) -> str:
    return "sign" if bit == 0 else "exponent" if bit <= layout.exponent_bits else "mantissa"


def _position(span: tuple[int, int]) -> str:
    first, last = span
    return f"bit {first}" if first == last else f"bits {first} to {last}"


# How trainings go on after the fault: metric, loss and distance from the golden run, a sample of trials.

_MOST_PANELS = 4
_MOST_POINTS = 400  # final metrics of a cell that are drawn one by one

Points = tuple[list[float], list[float]]


def curve_blocks(data: StudyData) -> list[ReportBlock]:
    """Metric by epoch, loss and distance by step: a figure each for every place on the axis that goes across."""
    panels = _panels(data)
    blocks: list[ReportBlock] = []
    for kind, title, x_title, points, log in _KINDS_CURVES:
        for name, lines in panels[:_MOST_PANELS]:
            traces = _traces_curves(lines, points)
            if not any(trace.get("meta") == "faulty" for trace in traces):
                continue
            axis, beyond = _log_axis(kind, lines) if log else ({}, "")
            layout = {
                "xaxis": {"title": {"text": x_title}, **({"dtick": 1} if x_title == "epoch" and _few(traces) else {})},
                "yaxis": {"title": {"text": title}, **axis},
            }
            where = f", {escape_markup(name)}" if name else ""
            if kind == "metric":
                where += _lower(lines)
            caption = f"{title[0].upper()}{title[1:]} by {x_title}{where}{_CAPTIONS[kind]}{beyond}."
            label = f"{data.results.study} {kind} {name}".strip()
            blocks.append(Figure(label, traces, layout, caption, 320, half=True))
    if blocks:
        drawn = len(data.observations)
        sampled = (
            f"{drawn:,} of {data.done:,} trainings are drawn, evenly over the cells. " if drawn < data.done else ""
        )
        blocks.insert(0, Prose(f"{sampled}A line that ends with × met a NaN or an infinity there."))
    if len(panels) > _MOST_PANELS:
        blocks.append(Prose(f"{_MOST_PANELS} of {len(panels)} groups are drawn; the table has all."))
    return blocks


def final_blocks(data: StudyData) -> list[ReportBlock]:
    """The final metric of every training that finished finite, cell by cell, against the golden run's."""
    blocks: list[ReportBlock] = []
    panels = _panels(data)
    for name, lines in panels[:_MOST_PANELS]:
        cells = [(label, cell) for label, cell, _ in lines if cell.finals]
        if not cells or not any(math.isfinite(cell.golden) for _, cell in cells):
            continue
        traces: list[dict[str, Any]] = []
        names = [label.removeprefix(f"{_down(data)} ") for label, _ in cells]
        for index, (name_of, cell) in enumerate(zip(names, (cell for _, cell in cells), strict=True)):
            finals = cell.finals[:: max(1, math.ceil(len(cell.finals) / _MOST_POINTS))]
            traces.append(
                {
                    "type": "box", "name": name_of, "y": list(finals), "boxpoints": "all", "jitter": 0.5, "pointpos": 0,
                    "marker": {"size": 4, "color": series_colour(index), "opacity": 0.6}, "line": {"width": 1},
                    "fillcolor": "rgba(128,128,128,0.15)", "showlegend": False, "hoveron": "points",
                }
            )  # fmt: skip
        goldens = {cell.golden for _, cell in cells}
        traces.append(
            {
                "type": "scatter", "mode": "lines" if len(goldens) == 1 else "markers", "name": "golden run",
                "x": names, "y": [cell.golden for _, cell in cells],
                "line": {"color": PALETTE["golden"], "dash": "dash", "width": 2},
                "marker": {"symbol": "line-ew-open", "size": 22, "color": PALETTE["golden"], "line": {"width": 3}},
            }
        )  # fmt: skip
        where = (f", {escape_markup(name)}" if name else "") + _lower(lines)
        caption = f"Final metric{where}: trainings that finished finite, and the golden run."
        layout = {
            "yaxis": {"title": {"text": "final metric"}},
            "xaxis": {"title": {"text": _down(data)}, "type": "category"},
        }
        blocks.append(Figure(f"{data.results.study} final {name}".strip(), traces, layout, caption, 320, half=True))
    return blocks


def _lower(lines: Sequence[tuple[str, Cell, list[TrialData]]]) -> str:
    """Return the remark that lower is better; empty for other metrics, as readers expect those."""
    return ", lower is better" if any(cell.direction is Direction.LOWER for _, cell, _ in lines) else ""


def _panels(data: StudyData) -> list[tuple[str, list[tuple[str, Cell, list[TrialData]]]]]:
    """The cells by all their places but that on the axis that goes down, whose places are the lines of a panel."""
    down = _down(data)
    others = [name for name in varying_axes(data.results) if name not in (down, "seed")]
    panels: dict[str, list[tuple[str, Cell, list[TrialData]]]] = {}
    places = list(dict.fromkeys(str(cell.axes.get(down, "")) for cell in data.results.cells))
    short = dict(zip(places, short_places(places), strict=True))
    for cell, tally in data.cells():
        name = ", ".join(f"{other} {cell.axes.get(other)}" for other in others)
        label = f"{down} {short[str(cell.axes.get(down, ''))]}" if down else "with a fault"
        panels.setdefault(name, []).append((label, cell, data.plotted_trials(tally)))
    return list(panels.items())


def _log_axis(kind: str, lines: Sequence[tuple[str, Cell, list[TrialData]]]) -> tuple[dict[str, Any], str]:
    """Powers of ten, up to what can be told apart: some values reach 1e38. And what a caption says of those beyond."""
    axis: dict[str, Any] = {"type": "log", "exponentformat": "power"}
    trials = [one for _, _, trials in lines for one in trials]
    if kind == "loss":
        golden = [loss for _, _, trials in lines for one in trials[:1] for loss in one.golden.observation.losses.values]
        seen = [*golden, *(loss for one in trials for loss in one.seen.losses.values)]
        most = 100 * max(_positive(golden), default=math.inf)
    else:
        seen = [distance for one in trials for distance in one.seen.distances.values]
        most = _most_distance(trials)
    shown = [value for value in _positive(seen) if value <= most]
    if not shown or most == math.inf:
        return axis, ""
    low, high = math.log10(min(shown)), math.log10(max(shown))
    framed = {**axis, "range": [low - 0.05 * (high - low) - 0.02, high + 0.05 * (high - low) + 0.02]}
    if kind == "loss":
        return framed, "; losses beyond 100 times the golden run's are outside of the frame"
    if len(shown) == len(_positive(seen)):
        return axis, ""
    return framed, f"; those beyond {most:.0e}, far above most, are outside of the frame"


def _most_distance(trials: Sequence[TrialData]) -> float:
    """As far as most trainings get that stay finite, and a million times as far: by quartiles, in powers of ten.

    Harmless flips and others lie many powers of ten apart, and all of them are to be seen; 1e30 is not.
    """
    finite = [one for one in trials if one.seen.nonfinite_at is None] or trials
    tops = [max(known) for one in finite if (known := _positive(one.seen.distances.values))]
    logs = sorted(math.log10(top) for top in tops)
    if not logs:
        return math.inf
    low, high = logs[len(logs) // 4], logs[3 * (len(logs) - 1) // 4]
    exponent = high + max(6.0, 3 * (high - low))
    return 10.0**exponent if exponent < 300 else math.inf


def _positive(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value) and value > 0]


def _down(data: StudyData) -> str:
    varying = [name for name in varying_axes(data.results) if name != "seed"]
    return data.results.rows if data.results.rows in varying else next(iter(varying), "")


def _traces_curves(
    lines: Sequence[tuple[str, Cell, list[TrialData]]], points: Callable[[Observation], Points]
) -> list[dict[str, Any]]:
    traces: list[dict[str, Any]] = []
    for index, (label, _, trials) in enumerate(lines):
        shown = False
        for one in trials:
            x, y = points(one.seen)
            if not _is_drawable(y):
                continue
            colour = series_colour(index)
            traces.append(
                {
                    "type": "scatter", "mode": "lines+markers" if len(x) < 3 else "lines", "name": label,
                    "meta": "faulty", "legendgroup": label, "showlegend": not shown, "x": x, "y": y, "opacity": 0.55,
                    "line": {"color": colour, "width": 1}, "marker": {"size": 4},
                    "hovertemplate": f"{label}, trial {one.trial.id}: {one.outcome.value}<br>"
                    "%{x}: %{y:.4g}<extra></extra>",
                }
            )  # fmt: skip
            if one.seen.nonfinite_at is not None:
                last = max(place for place, value in enumerate(y) if math.isfinite(value))
                end = {"x": [x[last]], "y": [y[last]], "mode": "markers", "showlegend": False, "hoverinfo": "skip"}
                marker = {"symbol": "x", "size": 6, "color": colour}
                traces.append({"type": "scatter", "legendgroup": label, "meta": "end", **end, "marker": marker})
            shown = True
    golden = {one.golden.key: one.golden for _, _, trials in lines for one in trials}
    for first, run in enumerate(golden.values()):
        x, y = points(run.observation)
        if _is_drawable(y) and any(y):
            traces.append(
                {
                    "type": "scatter", "mode": "lines", "name": "golden run", "legendgroup": "golden", "x": x, "y": y,
                    "line": {"color": PALETTE["golden"], "width": 3, "dash": "dash"}, "showlegend": first == 0,
                    "hovertemplate": "golden run<br>%{x}: %{y:.4g}<extra></extra>",
                }
            )  # fmt: skip
    return traces


def _metric_points(seen: Observation) -> Points:
    return [float(epoch) for epoch in range(len(seen.metrics))], list(seen.metrics)


def _loss_points(seen: Observation) -> Points:
    return _series(seen.losses, 1)


def _distance_points(seen: Observation) -> Points:
    x, y = _series(seen.distances, 1)
    return x, [value if value > 0 else float("nan") for value in y]  # nought has no place on such a scale


def _series(series: Series, first: int) -> Points:
    return [float(first + place * series.every) for place in range(len(series.values))], list(series.values)


def _is_drawable(y: Iterable[float]) -> bool:
    return any(math.isfinite(value) for value in y)


def _few(traces: Sequence[dict[str, Any]]) -> bool:
    return all(len(trace["x"]) < 12 for trace in traces)


_KINDS_CURVES: tuple[tuple[str, str, str, Callable[[Observation], Points], bool], ...] = (
    ("metric", "metric", "epoch", _metric_points, False),
    ("loss", "loss", "step", _loss_points, True),
    ("distance", "distance from the golden run", "step", _distance_points, True),
)

_CAPTIONS = {
    "metric": "; epoch 0 is the restart, before any step",
    "loss": " after the restart",
    "distance": ": the Euclidean distance of the weights from the golden run's after the same step",
}


# Figures of studies that watch more than outcomes: what saving costs, how far a fault spreads, what guards see.

_MOST_WATCHED = 6
_COSTS = ("blocked ms", "overhead %", "restart ms", "restore ms", "first save ms")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_SYMBOLS_WATCHED = ("circle", "square", "diamond", "triangle-up", "cross")

Row = tuple[TableEntry, ...]


def probe_figures(results: Results, kind: str) -> list[ReportBlock]:
    """The figures that go with the table of that kind, one of `WATCHED`."""
    table = probe_table(results, kind)
    return list(_KINDS_WATCHED[kind](results, table))


def _costs(results: Results, table: Table) -> list[ReportBlock]:
    """Bars side by side for each strategy, along the number of ranks; a figure for each model and cost."""
    names = [name for name in varying_axes(results) if name in table.headers]
    down = results.rows if results.rows in names else next((one for one in names if one != results.columns), "")
    across = results.columns if results.columns in names and results.columns != down else ""
    groups = [name for name in names if name not in (down, across)]
    blocks: list[ReportBlock] = []
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
                caption = (
                    f"**{header}**{f', {escape_markup(group)}' if group else ''}: medians; the thin lines are {spread}."
                )
                layout = {
                    "barmode": "group",
                    "xaxis": {"title": {"text": down}, "type": "category"},
                    "yaxis": {"title": {"text": header}, "rangemode": "tozero"},
                }
                label = f"{results.study} {header} {group}".strip()
                blocks.append(Figure(label, traces, layout, caption, 320, half=True))
    return blocks[: 2 * _MOST_WATCHED]


def _spread(results: Results, table: Table) -> list[ReportBlock]:
    """The parts that differ over steps: of elements, layers, ranks; a line a cell."""
    places = [name for name in varying_axes(results) if name in table.headers]
    blocks: list[ReportBlock] = []
    for header in ("elements %", "layers %", "ranks %"):
        traces: list[dict[str, Any]] = []
        for index, (cell, rows) in enumerate(_split(table, places, table.rows)):
            found = [(row, value) for row in rows if isinstance(value := _at(table, row, header), Quantity)]
            traces.append(
                {
                    "type": "scatter", "mode": "lines+markers", "name": cell or "all", "legendgroup": cell,
                    "x": [_at(table, row, "steps") for row, _ in found], "y": [value.value for _, value in found],
                    "error_y": _errors_watched([value for _, value in found]),
                    "text": [str(value) for _, value in found],
                    "hovertemplate": f"{cell}<br>after %{{x}} steps: %{{text}} %<extra></extra>",
                    "line": {"color": series_colour(index), "dash": _DASHES[index % len(_DASHES)]},
                    "marker": {"size": 7, "symbol": _SYMBOLS_WATCHED[index % len(_SYMBOLS_WATCHED)]},
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


def _guards(results: Results, table: Table) -> list[ReportBlock]:
    """How much of what changed the result each guard saw: a bar a guard, grouped by cell."""
    places = [name for name in varying_axes(results) if name in table.headers]
    blocks: list[ReportBlock] = []
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

_KINDS_WATCHED: dict[str, Callable[[Results, Table], list[ReportBlock]]] = {
    "costs": _costs,
    "spread": _spread,
    "guards": _guards,
}


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


def _at(table: Table, row: Row, header: str) -> TableEntry:
    return row[table.headers.index(header)]


def _errors_watched(quantities: Sequence[Quantity]) -> dict[str, Any]:
    highs = [0.0 if one.high is None else one.high - one.value for one in quantities]
    lows = [0.0 if one.low is None else one.value - one.low for one in quantities]
    return {"type": "data", "symmetric": False, "array": highs, "arrayminus": lows, "thickness": 1.2, "width": 4}


def _bar_errors(quantities: Sequence[Quantity]) -> dict[str, Any]:
    """Those of bars have no line to take their colour from, and plotly's own is lost on a dark page."""
    return {**_errors_watched(quantities), "color": PALETTE["muted"]}
