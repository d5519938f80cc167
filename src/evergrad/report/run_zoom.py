"""Pictures of failures, each from its moment to the next applied step, in milliseconds."""

from __future__ import annotations

from typing import Any

from evergrad.report.blocks import Figure
from evergrad.report.markup import literal
from evergrad.report.palette import PALETTE
from evergrad.report.run_figures import LONGEST, bars, cut, harmless, rows_of
from evergrad.report.run_story import Interruption, Process, RunStory, Span
from evergrad.report.run_words import duration

MOST = 6
"""So many failures are drawn one by one."""
PHASES = {
    "unseen": ("not seen yet", PALETTE["bad"], ""),
    "agreeing": ("seen, until the plan", PALETTE["warn"], "/"),
    "recovering": ("plan, until the next step", PALETTE["recovering"], "x"),
}
_ROWS = 14
_COMPARED = 40


def zoom_figure(story: RunStory, each: Interruption, number: int) -> Figure | None:
    """The processes around one failure, and above them its phases."""
    begin_s = each.begin_s
    last_s = each.going_on_s if each.going_on_s is not None else each.decided_s
    if begin_s is None or last_s is None or last_s <= begin_s or each.clocks_disagree:
        return None
    margin_s = 0.12 * (last_s - begin_s)
    left_s, right_s = begin_s - margin_s, last_s + 2 * margin_s
    lost = {loss.uid for loss in each.lost}
    around = [process for process in story.processes if process.uid in lost or _is_there(process, left_s, right_s)]
    shown = rows_of(around, _ROWS)
    within = {process.uid: _within(process.spans, left_s, right_s) for process in shown}
    traces: list[dict[str, Any]] = bars(shown, within, begin_s, 1e-3)
    traces.insert(0, {"type": "bar", "orientation": "h", "y": ["<b>phases</b>"], "x": [0], "showlegend": False,
                      "hoverinfo": "skip"})  # fmt: skip
    for phase in each.phases:
        name, colour, pattern = PHASES[phase.name]
        share, told = phase.seconds / (last_s - begin_s), duration(phase.seconds)
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": ["<b>phases</b>"],
                "base": [round((phase.begin_s - begin_s) * 1e3, 3)],
                "x": [round(phase.seconds * 1e3, 3)],
                "text": [f"{name}: {told}" if share > 0.4 else told if share > 0.1 else ""],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "insidetextfont": {"color": "#ffffff"},
                "textangle": 0,
                "hovertext": [f"<b>{name}</b>: {told}"],
                "hoverinfo": "text",
                "showlegend": False,
                "marker": {
                    "color": colour,
                    "pattern": {"shape": pattern, "size": 6, "solidity": 0.12, "fillmode": "overlay"},
                },
            }
        )
    moments = [("plan", each.decided_s), ("joined", each.joined_s), ("next step", each.going_on_s)]
    known = [(name, at_s) for name, at_s in moments if at_s is not None and at_s <= right_s]
    lines = [
        {"type": "line", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "x0": (at_s - begin_s) * 1e3,
         "x1": (at_s - begin_s) * 1e3, "line": {"width": 1, "dash": "dot", "color": PALETTE["muted"]}}
        for at_s in (begin_s, *(at_s for _, at_s in known))
    ]  # fmt: skip
    since = "the failure" if each.failed_s is not None else "it was seen; when it failed is not on record"
    marks = ", ".join(f"{name} at {duration(at_s - begin_s)}" for name, at_s in known)
    caption = (
        f"**Failure {number}**: {literal(each.what)}. {marks[:1].upper()}{marks[1:]}{'.' if marks else ''}".rstrip()
    )
    if len(shown) < len(around):
        caption += f" {len(shown)} of {len(around):,} processes are drawn."
    layout = {
        "barmode": "overlay",
        "bargap": 0.25,
        "xaxis": {
            "title": {"text": harmless(f"milliseconds since {since}")},
            "range": [-margin_s * 1e3, (right_s - begin_s) * 1e3],
        },
        "yaxis": {"autorange": "reversed", "type": "category", "automargin": True, "fixedrange": True},
        "shapes": lines,
    }
    return Figure(f"failure-{number}", traces, layout, caption, 140 + 26 * (len(shown) + 1))


def compared_figure(story: RunStory) -> Figure | None:
    """The phases of several failures, one above the other."""
    known = [
        (number, each) for number, each in enumerate(story.failures, 1) if each.phases and not each.clocks_disagree
    ]
    if len(known) < 2:
        return None
    shown = sorted(known, key=lambda pair: -(pair[1].seconds or 0.0))[:_COMPARED]
    shown.sort(key=lambda pair: pair[0])
    names = {number: harmless(cut(f"{number}: {each.what}")) for number, each in shown}
    traces = []
    for key, (name, colour, pattern) in PHASES.items():
        rows = [
            (names[number], harmless(f"{number}: {each.what[:LONGEST]}"), phase)
            for number, each in shown
            for phase in each.phases
            if phase.name == key
        ]
        if rows:
            traces.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": name,
                    "y": [row for row, _, _ in rows],
                    "x": [round(phase.seconds * 1e3, 3) for _, _, phase in rows],
                    "hovertext": [f"<b>{row}</b><br>{name}: {duration(phase.seconds)}" for _, row, phase in rows],
                    "hoverinfo": "text",
                    "marker": {
                        "color": colour,
                        "pattern": {"shape": pattern, "size": 6, "solidity": 0.12, "fillmode": "overlay"},
                    },
                }
            )
    caption = "From each failure, or from when it was seen, to the next applied step."
    if any(each.clocks_disagree for each in story.failures):
        caption += " Without those on which clocks disagree."
    if len(shown) < len(known):
        caption += f" The {len(shown)} longest of {len(known):,}."
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "milliseconds"}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "type": "category", "automargin": True,
                  "categoryarray": list(names.values()), "categoryorder": "array"},
    }  # fmt: skip
    return Figure("failures", traces, layout, caption, 130 + 26 * len(shown))


def _is_there(process: Process, left_s: float, right_s: float) -> bool:
    """Whether it does something then; those that failed earlier do nothing."""
    return any(span.begin_s < right_s and span.end_s > left_s and span.state != "gone" for span in process.spans)


def _within(spans: list[Span], left_s: float, right_s: float) -> list[Span]:
    return [
        Span(span.state, max(span.begin_s, left_s), min(span.end_s, right_s), span.what)
        for span in spans
        if span.begin_s < right_s and span.end_s > left_s
    ]
