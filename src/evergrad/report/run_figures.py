"""Pictures of a whole run: what each process did when, and how many steps were applied by when.

A long run stays small: where states change faster than can be seen one of them is drawn for all, lines are thinned,
and the captions say so.
"""

from __future__ import annotations

import html
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from evergrad.report.blocks import Figure
from evergrad.report.palette import PALETTE
from evergrad.report.run_story import Process, RunStory, Span, State
from evergrad.report.run_words import duration
from evergrad.wording import counted

LONGEST = 200
"""Characters of a name where it stands in full: where the pointer is."""

STATES: dict[State, tuple[str, str, str]] = {
    "starting": ("starting", PALETTE["starting"], "/"),
    "spare": ("spare, waits", PALETTE["spare"], ""),
    "training": ("training", PALETTE["training"], ""),
    "recovering": ("recovering", PALETTE["recovering"], "x"),
    "gone": ("failed", PALETTE["dead"], "."),
}
"""How each state is called and drawn: a colour and a pattern, so that no colour alone tells it."""

_ROWS = 48
_SPANS = 1500  # of all processes together
_MARKS = 300
_POINTS = 1000
_BANDS = 200
_LABEL = 24  # characters beside a row: more would leave no room for bars on a telephone


def processes_figure(story: RunStory) -> Figure | None:
    """A row a process, coloured by what it did; failures are marked."""
    if not story.generations or not story.processes:
        return None
    shown = rows_of(story.processes, _ROWS)
    first_s = story.generations[0].begin_s
    # Importing takes long, and is the same for all: a short run would be nothing beside it.
    left_s = max(0.0, first_s - 0.25 * max(story.seconds - first_s, 1e-3))
    resolution_s = (story.seconds - left_s) / max(50.0, _SPANS / len(shown))
    thinned = {process.uid: _thinned(process.spans, resolution_s) for process in shown}
    traces = bars(shown, thinned, 0.0, 1.0)
    traces += _marks(story, shown)
    said = [f"What each process did. The first plan came {duration(first_s)} after the launcher had begun."]
    said.append("Who has a plan counts as training, also while it still imports or waits for another rank.")
    if len(shown) < len(story.processes):
        said.append(f"{len(shown)} of {len(story.processes):,} processes are drawn: those that failed or joined first.")
    if sum(map(len, thinned.values())) < sum(len(process.spans) for process in shown):
        said.append(
            f"Where states changed within {duration(resolution_s)}, the one that lasted longest is drawn; over the run "
            "each has about its share."
        )
    layout = {
        "barmode": "overlay",
        "bargap": 0.25,
        "xaxis": {"title": {"text": "seconds since the run began"}, "range": [left_s, story.seconds * 1.005]},
        "yaxis": {"autorange": "reversed", "type": "category", "automargin": True, "fixedrange": True},
    }
    return Figure("processes", traces, layout, " ".join(said), 130 + 26 * len(shown))


def steps_figure(story: RunStory) -> Figure | None:
    """Applied steps over time, with the time between a failure and the next step shaded."""
    if len(story.progress) < 2:
        return None
    # Nobody gets past a step without the gradients of all, so what survivors report they had when it failed.
    stopped = [(each.failed_s, each.step) for each in story.failures if each.failed_s is not None]
    points = sorted([*story.progress, *((at_s, step) for at_s, step in stopped if step is not None)])
    drawn = points[:: max(1, len(points) // _POINTS)]
    if drawn[-1] != points[-1]:
        drawn.append(points[-1])
    hover = [f"{step:,} steps after {duration(at_s)}" for at_s, step in drawn]
    line = {
        "type": "scatter",
        "mode": "lines+markers" if len(drawn) <= 200 else "lines",
        "x": [round(at_s, 4) for at_s, _ in drawn],
        "y": [step for _, step in drawn],
        "hovertext": hover,
        "hoverinfo": "text",
        "line": {"color": PALETTE["training"], "width": 1.5, "dash": "dot" if len(drawn) <= 200 else "solid"},
        "marker": {"size": 6},
        "name": "applied steps",
        "showlegend": False,
    }
    gaps = [each for each in story.failures if each.begin_s is not None and not each.clocks_disagree][:_BANDS]
    shapes = [
        {
            "type": "rect", "xref": "x", "yref": "paper", "y0": 0, "y1": 1,
            "line": {"width": 1.5, "color": PALETTE["bad"]},
            "x0": each.begin_s, "x1": each.going_on_s if each.going_on_s is not None else each.begin_s,
            "fillcolor": PALETTE["bad"], "opacity": 0.35, "layer": "below",
        }
        for each in gaps
    ]  # fmt: skip
    said = ["Applied steps, at the moments at which the timeline says how many: in between lines are straight."]
    if shapes:
        said.append("Shaded: from a failure to the next applied step.")
    if len(points) > len(story.progress):
        said.append("At a failure on purpose stand the steps that survivors reported, which may be one too many.")
    if len(drawn) < len(points):
        said.append(f"{len(drawn):,} of {len(points):,} moments are drawn.")
    layout = {
        "xaxis": {"title": {"text": "seconds since the run began"}},
        "yaxis": {"title": {"text": "steps"}, "rangemode": "tozero"},
        "shapes": shapes,
    }
    return Figure("steps", [line], layout, " ".join(said), 320)


def rows_of(processes: Sequence[Process], limit: int) -> list[Process]:
    """Those that are drawn, in the order of their numbers: who failed or joined comes before the others."""
    if len(processes) <= limit:
        return list(processes)

    def interest(process: Process) -> tuple[bool, bool, int]:
        states = {span.state for span in process.spans}
        is_joiner = process.label.startswith("spare") and bool(process.ranks)
        return "gone" not in states, not is_joiner, process.uid

    return sorted(sorted(processes, key=interest)[:limit], key=lambda process: process.uid)


def bars(shown: Sequence[Process], spans: dict[int, list[Span]], zero_s: float, unit_s: float) -> list[dict[str, Any]]:
    """A trace for each state: bars from `zero_s` on, in units of so many seconds."""
    names = _names(shown)
    traces = []
    for state, (name, colour, pattern) in STATES.items():
        rows = [(process, span) for process in shown for span in spans[process.uid] if span.state == state]
        if not rows:
            continue
        hover = [
            f"<b>{harmless(process.name[:LONGEST])}</b>: {name}, {duration(span.end_s - span.begin_s)}"
            f"<br>{harmless(span.what)}"
            for process, span in rows
        ]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": [names[process.uid] for process, _ in rows],
                "base": [round((span.begin_s - zero_s) / unit_s, 5) for _, span in rows],
                "x": [round((span.end_s - span.begin_s) / unit_s, 5) for _, span in rows],
                "hovertext": hover,
                "hoverinfo": "text",
                "marker": {
                    "color": colour,
                    "opacity": 0.55 if state in ("gone", "spare") else 0.9,
                    "line": {"width": 0},
                    "pattern": {"shape": pattern, "size": 6, "solidity": 0.2, "fillmode": "overlay"},
                },
            }
        )
    # A row that nothing is drawn in, and the order of rows: categories come in the order in which they are met.
    order = {"type": "bar", "orientation": "h", "y": list(names.values()), "x": [0] * len(names), "showlegend": False,
             "hoverinfo": "skip"}  # fmt: skip
    return [order, *traces]


def harmless(text: str) -> str:
    """A text for a figure that stays a text."""
    return html.escape(text, quote=False)


def cut(name: str, end: str = "") -> str:
    """A name that leaves room for what it stands beside; the `end` stays.

    >>> cut("rank 2"), cut("gpu-17.rack-3.example.org", " → rank 2")
    ('rank 2', 'gpu-17.…ple.org → rank 2')
    """
    room = max(8, _LABEL - len(end))
    if len(name) > room:
        name = f"{name[: room // 2]}…{name[-((room - 1) // 2) :]}"
    return name + end[-_LABEL:]


def _names(shown: Sequence[Process]) -> dict[int, str]:
    """What each row is called; labels come from a file, and two may be alike, at least when they are cut."""
    taken: dict[str, int] = {}
    for process in shown:
        end = process.name.removeprefix(process.label)
        name = plain = harmless(cut(process.label, end))
        more = itertools.count(2)
        while name in taken:
            name = f"{plain} ({process.uid})" if name == plain else f"{plain} ({process.uid}, {next(more)})"
        taken[name] = process.uid
    return {uid: name for name, uid in taken.items()}


def _thinned(spans: Sequence[Span], resolution_s: float) -> list[Span]:
    """Without those that are too short to be seen, where there are many.

    Several in a row become one, of the state that lasted longest; what the others lacked counts for them in the next
    such row, so that over a long run each state has about its share.
    """
    if len(spans) <= 12:
        return list(spans)
    kept: list[Span] = []
    short: list[Span] = []
    owed: dict[State, float] = defaultdict(float)
    for span in spans:
        is_short = span.end_s - span.begin_s < resolution_s
        is_apart = bool(short) and span.begin_s - short[-1].end_s >= resolution_s
        if short and (not is_short or is_apart or short[-1].end_s - short[0].begin_s >= resolution_s):
            _keep(kept, _merged(short, owed), resolution_s)
            short = []
        if is_short:
            short.append(span)
        else:
            _keep(kept, span, resolution_s)
    if short:
        _keep(kept, _merged(short, owed), resolution_s)
    return kept


def _keep(kept: list[Span], span: Span, resolution_s: float) -> None:
    """As a span of its own only if the last one is of another state, or lies apart."""
    if kept and kept[-1].state == span.state and span.begin_s - kept[-1].end_s < resolution_s:
        last = kept.pop()
        span = Span(last.state, last.begin_s, span.end_s, last.what if last.what == span.what else "mostly")
    kept.append(span)


def _merged(short: Sequence[Span], owed: dict[State, float]) -> Span:
    """All of them as one; what each state is owed is kept up."""
    if len(short) == 1:
        return short[0]
    for span in short:
        owed[span.state] += span.end_s - span.begin_s
    state = max((span.state for span in short), key=lambda state: owed[state])
    owed[state] -= short[-1].end_s - short[0].begin_s
    return Span(state, short[0].begin_s, short[-1].end_s, "mostly")


def _marks(story: RunStory, shown: Sequence[Process]) -> list[dict[str, Any]]:
    names = _names(shown)
    failed = [
        (each, loss, at_s)
        for each in story.failures
        for loss in each.lost
        if loss.uid in names and (at_s := loss.failed_s if loss.failed_s is not None else each.seen_s) is not None
    ][:_MARKS]
    if not failed:
        return []
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "failure",
            "x": [round(at_s, 5) for _, _, at_s in failed],
            "y": [names[loss.uid] for _, loss, _ in failed],
            "hovertext": [
                f"<b>{harmless(loss.who)} {harmless(loss.how)}</b><br>after step {each.step}, "
                f"{counted(len(each.lost), 'rank')} lost"
                for each, loss, _ in failed
            ],
            "hoverinfo": "text",
            "marker": {"symbol": "x", "size": 11, "color": PALETTE["dead"], "line": {"width": 1, "color": "#ffffff"}},
        }
    ]
