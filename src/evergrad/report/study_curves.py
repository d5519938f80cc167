"""How trainings go on after the fault: metric, loss and distance from the golden run, a sample of trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from evergrad.report.blocks import Block, Figure, Prose
from evergrad.report.markup import literal
from evergrad.report.palette import PALETTE, series_colour
from evergrad.report.study_data import StudyData, TrialData
from evergrad.report.study_rates import short_places
from evergrad.study.results import Cell
from evergrad.study.table_notes import varying_axes
from evergrad.study.trials import Observation, Series
from evergrad.training.settings import Direction

_MOST_PANELS = 4
_MOST_POINTS = 400  # final metrics of a cell that are drawn one by one

Points = tuple[list[float], list[float]]


def curve_blocks(data: StudyData) -> list[Block]:
    """Metric by epoch, loss and distance by step: a figure each for every place on the axis that goes across."""
    panels = _panels(data)
    blocks: list[Block] = []
    for kind, title, x_title, points, log in _KINDS:
        for name, lines in panels[:_MOST_PANELS]:
            traces = _traces(lines, points)
            if not any(trace.get("meta") == "faulty" for trace in traces):
                continue
            axis, beyond = _log_axis(kind, lines) if log else ({}, "")
            layout = {
                "xaxis": {"title": {"text": x_title}, **({"dtick": 1} if x_title == "epoch" and _few(traces) else {})},
                "yaxis": {"title": {"text": title}, **axis},
            }
            where = f", {literal(name)}" if name else ""
            if kind == "metric":
                where += _lower(lines)
            caption = f"{title[0].upper()}{title[1:]} by {x_title}{where}{_CAPTIONS[kind]}{beyond}."
            label = f"{data.results.study} {kind} {name}".strip()
            blocks.append(Figure(label, traces, layout, caption, 320, half=True))
    if blocks:
        drawn = len(data.courses)
        sampled = (
            f"{drawn:,} of {data.done:,} trainings are drawn, evenly over the cells. " if drawn < data.done else ""
        )
        blocks.insert(0, Prose(f"{sampled}A line that ends with × met a NaN or an infinity there."))
    if len(panels) > _MOST_PANELS:
        blocks.append(Prose(f"{_MOST_PANELS} of {len(panels)} groups are drawn; the table has all."))
    return blocks


def final_blocks(data: StudyData) -> list[Block]:
    """The final metric of every training that finished finite, cell by cell, against the golden run's."""
    blocks: list[Block] = []
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
        where = (f", {literal(name)}" if name else "") + _lower(lines)
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
        panels.setdefault(name, []).append((label, cell, data.drawn(tally)))
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


def _traces(
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


_KINDS: tuple[tuple[str, str, str, Callable[[Observation], Points], bool], ...] = (
    ("metric", "metric", "epoch", _metric_points, False),
    ("loss", "loss", "step", _loss_points, True),
    ("distance", "distance from the golden run", "step", _distance_points, True),
)

_CAPTIONS = {
    "metric": "; epoch 0 is the restart, before any step",
    "loss": " after the restart",
    "distance": ": the Euclidean distance of the weights from the golden run's after the same step",
}
