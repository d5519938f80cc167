"""What each process was doing when: spans of one state, from its start to its end."""

from __future__ import annotations

from collections.abc import Sequence

from evergrad.report.run_course import Course, Planned
from evergrad.report.run_story import Interruption, Process, Span, State


def spans(course: Course, found: Sequence[Interruption], end_s: float) -> None:
    """Give every process its spans."""
    for process in course.processes.values():
        begin = process.started_s if process.started_s is not None else 0.0
        first: State = "spare" if process.label.startswith("spare") else "starting"
        if process.label.startswith("spare"):
            _add(process, first, begin, None, "waits to be called")
        else:
            _add(process, first, begin, None, "imports, joins")
    ends = {each.generation: each for each in found}
    for generation, plan in sorted(course.plans.items()):
        before, ended = ends.get(generation - 1), ends.get(generation)
        joiners = set(plan.joiners)
        for rank, uid in enumerate(plan.members):
            process = course.processes[uid]
            what = f"rank {rank} of generation {generation}"
            # The first plan may be there before a process is: on another machine, or where imports take long.
            trains_s = max(plan.at_s, process.started_s or plan.at_s)
            if before is not None:
                again_s = _going_on(course, uid, generation, before)
                if again_s is not None:
                    began_s = plan.at_s if uid in joiners else _reported(course, uid, generation - 1, plan)
                    _add(process, "recovering", began_s, again_s, f"becomes {what}")
                    trains_s = again_s
            _add(process, "training", trains_s, None, what)
        if ended is not None:
            _end_generation(course, plan, ended, end_s)
    for process in course.processes.values():
        _settle(process, end_s)


def _end_generation(course: Course, plan: Planned, ended: Interruption, end_s: float) -> None:
    """Whoever was lost is gone from the moment that it failed; whoever reported waits for the plan from then on."""
    lost = {loss.uid: loss for loss in ended.lost}
    for uid in plan.members:
        process = course.processes[uid]
        if uid in lost:
            at_s = next((at for at in (lost[uid].failed_s, ended.seen_s, process.exited_s) if at is not None), end_s)
            _add(process, "gone", at_s, end_s, lost[uid].how)
        elif (reported := course.own("report", plan.generation, uid)) is not None:
            _add(process, "recovering", reported.at_s, ended.decided_s or end_s, "has reported, waits for the plan")


def _going_on(course: Course, uid: int, generation: int, before: Interruption) -> float | None:
    """When this rank had applied a step again; else when the first one had, who does not note its own."""
    own = course.own("going on", generation, uid)
    return own.at_s if own is not None else before.going_on_s


def _reported(course: Course, uid: int, generation: int, plan: Planned) -> float:
    reported = course.own("report", generation, uid)
    return reported.at_s if reported is not None else plan.at_s


def _add(process: Process, state: State, begin_s: float, end_s: float | None, what: str) -> None:
    """A state begins and ends what was before it; None: until the next one."""
    end = float("inf") if end_s is None else end_s
    while process.spans and process.spans[-1].begin_s >= begin_s and len(process.spans) > 1:
        process.spans.pop()
    if process.spans and process.spans[-1].end_s > begin_s:
        last = process.spans[-1]
        process.spans[-1] = Span(last.state, last.begin_s, max(last.begin_s, begin_s), last.what)
    process.spans.append(Span(state, begin_s, max(begin_s, end), what))


def _settle(process: Process, end_s: float) -> None:
    """Nothing lasts longer than its process, but for being gone, which lasts to the end."""
    until_s = process.exited_s if process.exited_s is not None else end_s
    settled = []
    for span in process.spans:
        last_s = end_s if span.state == "gone" else min(span.end_s, until_s)
        if last_s > span.begin_s:
            settled.append(Span(span.state, span.begin_s, min(span.end_s, last_s), span.what))
    process.spans[:] = settled
