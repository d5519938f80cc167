"""From the events of a timeline to the story of a run: a pure function, linear in the events.

Fields of events are whatever a file says: one that is missing or of another type is as if it were not on record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from evergrad.records import Json
from evergrad.report.run_course import Course
from evergrad.report.run_interruptions import interruptions
from evergrad.report.run_moments import Moment, text, whole
from evergrad.report.run_noticed import notice
from evergrad.report.run_states import spans
from evergrad.report.run_story import Generation, Interruption, RunStory
from evergrad.timeline import Event

_OUTCOMES = ("finished", "failed", "fatal", "too-few", "left")
_TELLS_STEPS = ("report", "going on", "epoch", "checked", "restored", *_OUTCOMES)


def analyse(events: Iterable[Event], notes: Sequence[str] = ()) -> RunStory:
    """What happened in a run. `events` come in any order; there is at least one."""
    listed = list(events)
    begin = next((event for event in listed if event.event == "begin"), None)
    settings = _settings(begin)
    is_spread = settings.get("is_spread") is True
    moments = _ordered(listed, begin, is_spread)
    course = Course(moments, is_spread)
    found = interruptions(course)
    last_s = max(moment.at_s for moment in moments)
    end = next((moment for moment in reversed(moments) if moment.event == "end" and moment.who == "launcher"), None)
    seconds = end.at_s if end is not None else last_s
    generations = _generations(course, found, seconds)
    processes = [course.processes[uid] for uid in sorted(course.processes)]
    spans(course, found, seconds)
    progress = _progress(moments)
    planned = generations[0].members if generations else ()
    spares = sum(process.label.startswith("spare") for process in processes)
    return RunStory(
        command=text(begin.fields, "command") if begin is not None else "",
        outcome=text(end.fields, "outcome") if end is not None else "",
        message=text(end.fields, "message") if end is not None else "",
        seconds=max(seconds, 0.0),
        num_ranks=whole(settings, "num_ranks") or len(planned),
        num_spares=_or(whole(settings, "num_spares"), spares),
        steps=_steps(end, progress),
        processes=tuple(processes),
        generations=generations,
        interruptions=found,
        noticed=tuple(notice(course)),
        progress=progress,
        samples_lost=_samples_lost(moments),
        inexact=_inexact(course, found),
        unverified=text(end.fields, "unverified") if end is not None else "",
        is_told_exact=end is not None and end.fields.get("exact") is True,
        is_spread=is_spread,
        settings=settings,
        num_events=len(listed),
        notes=tuple(notes),
    )


def _settings(begin: Event | None) -> dict[str, Json]:
    found = begin.fields.get("settings") if begin is not None else None
    return found if isinstance(found, dict) else {}


def _ordered(events: Sequence[Event], begin: Event | None, is_spread: bool) -> list[Moment]:
    """By the clock that all share: on one machine the monotonic one, across machines there is only the wall clock."""
    first = begin or events[0]
    zero_s = first.time if is_spread else first.mono
    moments = [Moment((event.time if is_spread else event.mono) - zero_s, event) for event in events]
    return sorted(moments, key=lambda moment: moment.at_s)


def _generations(course: Course, found: Sequence[Interruption], end_s: float) -> tuple[Generation, ...]:
    ends = {each.generation: each for each in found}
    made = []
    for plan in course.plans.values():
        ended = ends.get(plan.generation)
        before = ends.get(plan.generation - 1)
        end = end_s if ended is None else next((at for at in (ended.seen_s, ended.decided_s) if at is not None), end_s)
        made.append(
            Generation(
                plan.generation,
                plan.at_s,
                max(end, plan.at_s),
                tuple(course.label(uid) for uid in plan.members),
                tuple(course.label(uid) for uid in plan.joiners),
                0 if plan.generation == 0 else before.step if before is not None else None,
            )
        )
    return tuple(made)


def _progress(moments: Sequence[Moment]) -> tuple[tuple[float, int], ...]:
    """Of several ranks that say the same only the first; a restart may lead back."""
    found: list[tuple[float, int]] = []
    is_told = False  # that the job stood still there
    for moment in moments:
        step = whole(moment.fields, "step") if moment.event in _TELLS_STEPS else None
        if moment.event == "plan" and whole(moment.fields, "generation") == 0:
            step = 0
        if step is None or step < 0:
            continue
        last = found[-1][1] if found else -1
        is_report = moment.event == "report"
        # Ranks report one after the other: who is a step behind does not take the job back, a restored version does.
        if step > last or (is_report and not is_told) or (moment.event == "restored" and step < last):
            found.append((moment.at_s, step if moment.event == "restored" else max(step, last)))
            is_told = is_report
    return tuple(found)


def _steps(end: Moment | None, progress: Sequence[tuple[float, int]]) -> int | None:
    told = whole(end.fields, "steps") if end is not None else None
    seen = max((step for _, step in progress), default=None)
    return seen if told is None else max(told, seen or 0)


def _samples_lost(moments: Sequence[Moment]) -> int:
    """By the last books of each epoch: after a restart an epoch may be told twice."""
    last: dict[int, int] = defaultdict(int)
    for moment in moments:
        if moment.event == "epoch":
            epoch, lost = whole(moment.fields, "epoch"), whole(moment.fields, "lost")
            if epoch is not None and lost is not None:
                last[epoch] = max(0, lost)
    return sum(last.values())


def _inexact(course: Course, found: Sequence[Interruption]) -> str:
    """The first reason on record: what a joiner did not get, or a plan that says so."""
    told = next((text(moment.fields, "reason") for moment in course.moments if moment.event == "inexact"), "")
    planned = next((each for each in found if not each.exact), None)
    if told or planned is None:
        return told
    ranks = f"{planned.ranks} rank{'' if planned.ranks == 1 else 's'}"
    return f"generation {planned.generation + 1} went on with {ranks}, by {planned.strategy or 'its plan'}"


def _or(value: int | None, other: int) -> int:
    return other if value is None else value
