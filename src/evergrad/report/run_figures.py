"""Pictures of a whole run: what each process did when, and how many steps were applied by when.

A long run stays small: where states change faster than can be seen one of them is drawn for all, lines are thinned,
and the captions say so.
"""

from __future__ import annotations

import html
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from evergrad.report.html import escape_markup
from evergrad.report.page_model import PALETTE, Figure
from evergrad.report.run_model import Interruption, ProcessHistory, ProcessState, RunAnalysis, Span
from evergrad.wording import count_of

# A run in words: only what its timeline says.

CLOCKS_DISAGREE = "clocks disagree"
"""What stands where a length of time would be less than nothing."""

_TOLD = 4  # failures that the answer tells one by one
_BAD_ENDS = ("failed", "fatal", "too-few")
_VERDICTS = {
    "redo": "did the mini-batch again",
    "repair": "reduced what was missing of its gradients without the lost rank",
    "retry": "went on at the next step",
    "restart": "went back to a checkpoint",
    "proceed": "went on",
}


def duration(seconds: float | None) -> str:
    """A length of time in a person's units.

    >>> duration(0.0031), duration(0.0972), duration(1.5), duration(75.2), duration(7300), duration(None)
    ('3.1 ms', '97 ms', '1.50 s', '75.2 s', '2 h 2 min', '?')
    """
    if seconds is None:
        return "?"
    if seconds < 0.9995:
        return f"{seconds * 1000:.1f} ms" if seconds < 0.00995 else f"{seconds * 1000:.0f} ms"
    if seconds < 600:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def summary(story: RunAnalysis) -> str:
    """One line: who, how much, how it ended, and what failures took."""
    who = count_of(story.num_ranks, "rank")
    if story.num_spares:
        who += f" and {count_of(story.num_spares, 'spare')}"
    steps = count_of(story.steps, "step") if story.steps is not None else "no step on record"
    return f"{who}, {steps} in {duration(story.seconds)}: {story.outcome or 'no end on record'}; {_failures(story)}"


def run_answer(story: RunAnalysis) -> list[str]:
    """Paragraphs for the head of the page, the one to remember first."""
    told = [f"**{escape_markup(_capital(summary(story)))}.**", *map(escape_markup, story.notes)]
    if story.outcome not in ("", "finished") and story.message:
        told.append(f"It ended because of this: {escape_markup(story.message.rstrip('.'))}.")
    told += [_failure(story, each) for each in story.failures[:_TOLD]]
    more = len(story.failures) - _TOLD
    if more > 0:
        told.append(f"{count_of(more, 'more failure')}: see the table below.")
    return [*told, *_planned(story), *_result(story)]


def caveats(story: RunAnalysis) -> list[str]:
    """What a reader has to know of how far durations can be trusted."""
    if not story.is_multinode:
        return []
    told = "Several machines: durations are differences of their wall clocks, which may not agree."
    wrong = sum(each.clocks_disagree for each in story.failures)
    if wrong:
        what = f"of {count_of(wrong, 'failure')} a moment lies before what led to it, and such times are left out"
        told = f"{told.rstrip('.')}: {what}."
    return [told]


def interruption_text(each: Interruption) -> str:
    """From the failure to the next step, in words: what is not on record is left out."""
    told = []
    by = f" by {each.seen_by}" if each.seen_by else ""
    phases = {phase.name: duration(phase.seconds) for phase in each.phases}
    if "unseen" in phases:
        told.append(f"seen{by} after {phases['unseen']}")
    elif each.failed_s is not None and each.seen_s is not None:
        told.append(f"seen{by}, by a clock that disagrees with that of the failure")
    elif each.seen_s is not None:
        told.append(f"seen first{by} (when it failed is not on record)")
    if "agreeing" in phases:
        told.append(f"the next plan {phases['agreeing']} later")
    if "recovering" in phases:
        told.append(f"the next step applied after another {phases['recovering']}")
    if each.seconds is not None and len(phases) > 1:
        told.append(f"{duration(each.seconds)} in all")
    if each.overtaken:
        told.append("the next generation broke, too, before a step was applied")
    return ", ".join(told)


def verdict_text(each: Interruption) -> str:
    """What became of it, short: for a table."""
    if each.ranks is None:
        return "no plan"
    if each.overtaken:
        return "overtaken"
    told = [each.verdict or "plan", *each.joined[:2]]
    if len(each.joined) > 2:
        told.append(f"{len(each.joined) - 2} more")
    if each.ranks != each.ranks_before:
        told.append(count_of(each.ranks, "rank"))
    return ", ".join(told)


def _failures(story: RunAnalysis) -> str:
    lost = sum(len(each.lost) for each in story.failures)
    nobody = "no rank was lost" if story.outcome in _BAD_ENDS and not lost else ""
    if not story.failures:
        return nobody or "no failure"
    chains = _chains(story)
    count, more = len(chains), len(story.failures) - len(chains)
    told = count_of(count, "failure")
    if more:
        told += f" and {more:,} more before {'it was' if count == 1 else 'those were'} over,"
    if lost and lost != count:
        told += f" that took {count_of(lost, 'rank')}"
    told = told.rstrip(",") + (f" ({nobody})" if nobody else "")
    known = [seconds for seconds in map(_seconds, chains) if seconds is not None]
    if not known:
        return told
    in_all = f"{duration(sum(known))} to the next step" if count == 1 else f"{duration(sum(known))} to the next steps"
    return f"{told}, {in_all}" + (f" ({len(known)} of {count} known)" if len(known) < count else "")


def _chains(story: RunAnalysis) -> list[list[Interruption]]:
    """Failures, each with those that came before it was over: the job stood still once."""
    chains: list[list[Interruption]] = []
    for each in story.interruptions:
        last = chains[-1][-1] if chains else None
        if last is not None and last.overtaken and last.generation + 1 == each.generation:
            chains[-1].append(each)
        elif each.kind == "failure":
            chains.append([each])
    return chains


def _seconds(chain: Sequence[Interruption]) -> float | None:
    """From the first failure to the next applied step."""
    begin_s, end_s = chain[0].begin_s, chain[-1].going_on_s
    if begin_s is None or end_s is None or any(each.clocks_disagree for each in chain) or end_s < begin_s:
        return None
    return end_s - begin_s


def _failure(story: RunAnalysis, each: Interruption) -> str:
    after = "" if each.step is None else f"after step {each.step:,} "
    on_purpose = sorted({loss.injected for loss in each.lost if loss.injected})
    why = f" (on purpose: {', '.join(on_purpose)})" if on_purpose else ""
    course = interruption_text(each)
    told = f"{escape_markup(_capital(f'{after}{each.what}{why}'))}{': ' + escape_markup(course) if course else ''}."
    if each.ranks is None:
        return f"{told} {'There was no further generation.' if story.outcome else 'No further plan is on record.'}"
    if each.overtaken:  # what was planned did not come about
        return told
    joined = f", {escape_markup(_and(each.joined))} joined" if each.joined else ""
    told += f" Those left {_VERDICTS.get(each.verdict, 'went on')}{joined}: on with {count_of(each.ranks, 'rank')}."
    if each.steps_redone is not None and each.steps_redone > 1:
        told += f" {count_of(each.steps_redone, 'step')} had to be done again."
    return told


def _planned(story: RunAnalysis) -> Iterator[str]:
    planned = [each for each in story.interruptions if each.kind == "planned"]
    if planned:
        shown = "; ".join(each.what for each in planned[:3]) + ("; …" if len(planned) > 3 else "")
        yield f"{count_of(len(planned), 'planned change')} of who trains: {escape_markup(shown)}."


def _result(story: RunAnalysis) -> Iterator[str]:
    bad = sum(each.mark == "bad" for each in story.anomalies)
    healed = sum(each.what.endswith("; healed") for each in story.anomalies)
    if healed:
        yield f"A guard found ranks whose state differed, and healed {count_of(healed, 'tensor')}."
    if story.inexact:
        yield f"Not as without failures: {escape_markup(story.inexact.rstrip('.'))}."
    elif story.failures and story.exact:
        yield "The run went on as it would have without failures, to the last bit; all ranks were compared at its end."
    elif story.failures and story.unverified and story.outcome == "finished":
        yield f"Not verified to be as without failures: {story.unverified.rstrip('.')}."
    if story.samples_lost:
        yield f"{count_of(story.samples_lost, 'sample')} went with a lost rank and into no step."
    if bad:
        yield f"{count_of(bad, 'other thing')} to look at, under “What else was noticed”."
    yield from caveats(story)


def _and(names: Sequence[str]) -> str:
    if len(names) > 4:
        return f"{', '.join(names[:3])} and {len(names) - 3} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


LONGEST = 200
"""Characters of a name where it stands in full: where the pointer is."""

STATES: dict[ProcessState, tuple[str, str, str]] = {
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


def processes_figure(story: RunAnalysis) -> Figure | None:
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


def steps_figure(story: RunAnalysis) -> Figure | None:
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


def rows_of(processes: Sequence[ProcessHistory], limit: int) -> list[ProcessHistory]:
    """Those that are drawn, in the order of their numbers: who failed or joined comes before the others."""
    if len(processes) <= limit:
        return list(processes)

    def interest(process: ProcessHistory) -> tuple[bool, bool, int]:
        states = {span.state for span in process.spans}
        is_joiner = process.label.startswith("spare") and bool(process.ranks)
        return "gone" not in states, not is_joiner, process.uid

    return sorted(sorted(processes, key=interest)[:limit], key=lambda process: process.uid)


def bars(
    shown: Sequence[ProcessHistory], spans: dict[int, list[Span]], zero_s: float, unit_s: float
) -> list[dict[str, Any]]:
    """A trace for each state: bars from `zero_s` on, in units of so many seconds."""
    names = _names(shown)
    traces = []
    for state, (name, colour, pattern) in STATES.items():
        rows = [(process, span) for process in shown for span in spans[process.uid] if span.state == state]
        if not rows:
            continue
        hover = [
            f"<b>{escape_figure_text(process.name[:LONGEST])}</b>: {name}, {duration(span.end_s - span.begin_s)}"
            f"<br>{escape_figure_text(span.what)}"
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


def escape_figure_text(text: str) -> str:
    """A text for a figure that stays a text."""
    return html.escape(text, quote=False)


def shorten(name: str, end: str = "") -> str:
    """A name that leaves room for what it stands beside; the `end` stays.

    >>> shorten("rank 2"), shorten("gpu-17.rack-3.example.org", " → rank 2")
    ('rank 2', 'gpu-17.…ple.org → rank 2')
    """
    room = max(8, _LABEL - len(end))
    if len(name) > room:
        name = f"{name[: room // 2]}…{name[-((room - 1) // 2) :]}"
    return name + end[-_LABEL:]


def _names(shown: Sequence[ProcessHistory]) -> dict[int, str]:
    """What each row is called; labels come from a file, and two may be alike, at least when they are cut."""
    taken: dict[str, int] = {}
    for process in shown:
        end = process.name.removeprefix(process.label)
        name = plain = escape_figure_text(shorten(process.label, end))
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
    owed: dict[ProcessState, float] = defaultdict(float)
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


def _merged(short: Sequence[Span], owed: dict[ProcessState, float]) -> Span:
    """All of them as one; what each state is owed is kept up."""
    if len(short) == 1:
        return short[0]
    for span in short:
        owed[span.state] += span.end_s - span.begin_s
    state = max((span.state for span in short), key=lambda state: owed[state])
    owed[state] -= short[-1].end_s - short[0].begin_s
    return Span(state, short[0].begin_s, short[-1].end_s, "mostly")


def _marks(story: RunAnalysis, shown: Sequence[ProcessHistory]) -> list[dict[str, Any]]:
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
                f"<b>{escape_figure_text(loss.who)} {escape_figure_text(loss.how)}</b><br>after step {each.step}, "
                f"{count_of(len(each.lost), 'rank')} lost"
                for each, loss, _ in failed
            ],
            "hoverinfo": "text",
            "marker": {"symbol": "x", "size": 11, "color": PALETTE["dead"], "line": {"width": 1, "color": "#ffffff"}},
        }
    ]


# Pictures of failures, each from its moment to the next applied step, in milliseconds.

MOST = 6
"""So many failures are drawn one by one."""
PHASES = {
    "unseen": ("not seen yet", PALETTE["bad"], ""),
    "agreeing": ("seen, until the plan", PALETTE["warn"], "/"),
    "recovering": ("plan, until the next step", PALETTE["recovering"], "x"),
}
_ROWS_ZOOM = 14
_COMPARED = 40


def zoom_figure(story: RunAnalysis, each: Interruption, number: int) -> Figure | None:
    """The processes around one failure, and above them its phases."""
    begin_s = each.begin_s
    last_s = each.going_on_s if each.going_on_s is not None else each.decided_s
    if begin_s is None or last_s is None or last_s <= begin_s or each.clocks_disagree:
        return None
    margin_s = 0.12 * (last_s - begin_s)
    left_s, right_s = begin_s - margin_s, last_s + 2 * margin_s
    lost = {loss.uid for loss in each.lost}
    around = [process for process in story.processes if process.uid in lost or _is_there(process, left_s, right_s)]
    shown = rows_of(around, _ROWS_ZOOM)
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
    noted = f"{marks[:1].upper()}{marks[1:]}." if marks else ""
    caption = f"**Failure {number}**: {escape_markup(each.what)}. {noted}".rstrip()
    if len(shown) < len(around):
        caption += f" {len(shown)} of {len(around):,} processes are drawn."
    layout = {
        "barmode": "overlay",
        "bargap": 0.25,
        "xaxis": {
            "title": {"text": escape_figure_text(f"milliseconds since {since}")},
            "range": [-margin_s * 1e3, (right_s - begin_s) * 1e3],
        },
        "yaxis": {"autorange": "reversed", "type": "category", "automargin": True, "fixedrange": True},
        "shapes": lines,
    }
    return Figure(f"failure-{number}", traces, layout, caption, 140 + 26 * (len(shown) + 1))


def compared_figure(story: RunAnalysis) -> Figure | None:
    """The phases of several failures, one above the other."""
    known = [
        (number, each) for number, each in enumerate(story.failures, 1) if each.phases and not each.clocks_disagree
    ]
    if len(known) < 2:
        return None
    shown = sorted(known, key=lambda pair: -(pair[1].seconds or 0.0))[:_COMPARED]
    shown.sort(key=lambda pair: pair[0])
    names = {number: escape_figure_text(shorten(f"{number}: {each.what}")) for number, each in shown}
    traces = []
    for key, (name, colour, pattern) in PHASES.items():
        rows = [
            (names[number], escape_figure_text(f"{number}: {each.what[:LONGEST]}"), phase)
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


def _is_there(process: ProcessHistory, left_s: float, right_s: float) -> bool:
    """Whether it does something then; those that failed earlier do nothing."""
    return any(span.begin_s < right_s and span.end_s > left_s and span.state != "gone" for span in process.spans)


def _within(spans: list[Span], left_s: float, right_s: float) -> list[Span]:
    return [
        Span(span.state, max(span.begin_s, left_s), min(span.end_s, right_s), span.what)
        for span in spans
        if span.begin_s < right_s and span.end_s > left_s
    ]
