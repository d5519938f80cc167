"""From the events of a timeline to the story of a run: a pure function, linear in the events.

Fields of events are whatever a file says: one that is missing or of another type is as if it were not on record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from evergrad.records import Json
from evergrad.report.run_model import (
    Anomaly,
    EventIndex,
    Generation,
    GenerationPlan,
    Interruption,
    LostProcess,
    ProcessHistory,
    ProcessState,
    RunAnalysis,
    Shade,
    Span,
    TimedEvent,
    float_field,
    int_field,
    int_list_field,
    text_field,
)
from evergrad.timeline import Event

# What was done to processes on purpose, and which of it is why one was lost.

_ACTS = {"kill_injected": "kill", "stop_injected": "stop", "network_cut_injected": "cut"}  # being slow is no end


@dataclass(frozen=True, slots=True)
class FailureAction:
    """One act on one process."""

    at_s: float
    act: str
    """`kill`, `stop`, `cut`."""
    over_s: float = float("inf")
    """When the process was as before: a stop had passed, a network was healed."""


class FailureActions:
    """All of a run; each explains one loss at most."""

    def __init__(self, course: EventIndex) -> None:
        self._index = course
        self._unassigned: dict[int, list[FailureAction]] = defaultdict(list)
        healed: dict[int, list[float]] = defaultdict(list)
        for moment in course.by_event["network_restored"]:
            for uid in _uids(moment):
                healed[uid].append(moment.at_s)
        for event, act in _ACTS.items():
            for moment in course.by_event[event]:
                for uid in _uids(moment):
                    over_s = self._over_s(moment, act, uid, healed[uid])
                    self._unassigned[uid].append(FailureAction(moment.at_s, act, over_s))
        for found in self._unassigned.values():
            found.sort(key=lambda each: each.at_s)

    def cause(self, uid: int, generation: int, died_s: float | None, seen_s: float | None) -> FailureAction | None:
        """Why this generation lost a process: the last act on it before that was seen, unless it was over by then.

        It may have been done before the generation's plan, while the one before it was being left.
        """
        plans = self._index.plans
        plan, before, after = (plans.get(each) for each in (generation, generation - 1, generation + 1))
        assert plan is not None
        since_s = before.at_s if before is not None else plan.at_s
        if self._index.first_by("recovered", generation, uid) is not None:
            since_s = plan.at_s  # it has outlived what was done to it before
        decided_s = after.at_s if after is not None else float("inf")
        died_s = decided_s if died_s is None else min(died_s, decided_s)
        seen_s = died_s if seen_s is None else min(seen_s, died_s)
        # The generation may have been broken by another rank before. Only across machines is a death before its cause.
        for until_s in (seen_s, died_s, float("inf")) if self._index.is_multinode else (seen_s, died_s):
            for each in reversed(self._unassigned[uid]):
                if since_s <= each.at_s <= until_s and each.over_s > seen_s:
                    self._unassigned[uid].remove(each)
                    return each
        return None

    def _over_s(self, moment: TimedEvent, act: str, uid: int, healed: list[float]) -> float:
        for_s = float_field(moment.fields, "for_s")
        if act == "cut":
            return next((at_s for at_s in healed if at_s > moment.at_s), float("inf"))
        if act == "stop" and for_s is not None and self._is_woken(moment.uid, uid):
            return moment.at_s + for_s
        return float("inf")

    def _is_woken(self, by: int | None, uid: int) -> bool:
        """A stopped process is woken by its own machine alone."""
        doer, done_to = (self._index.processes.get(-1 if each is None else each) for each in (by, uid))
        return not self._index.is_multinode or (doer is not None and done_to is not None and doer.node == done_to.node)


def _uids(moment: TimedEvent) -> tuple[int, ...]:
    return int_list_field(moment.fields, "uids") or (() if moment.uid is None else (moment.uid,))


# What each process was doing when: spans of one state, from its start to its end.


def assign_spans(course: EventIndex, found: Sequence[Interruption], end_s: float) -> None:
    """Give every process its spans."""
    for process in course.processes.values():
        begin = process.started_s if process.started_s is not None else 0.0
        first: ProcessState = "spare" if process.label.startswith("spare") else "starting"
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
                again_s = _first_step_after(course, uid, generation, before)
                if again_s is not None:
                    began_s = plan.at_s if uid in joiners else _reported(course, uid, generation - 1, plan)
                    _add(process, "recovering", began_s, again_s, f"becomes {what}")
                    trains_s = again_s
            _add(process, "training", trains_s, None, what)
        if ended is not None:
            _end_generation(course, plan, ended, end_s)
    for process in course.processes.values():
        _clip_spans(process, end_s)


def _end_generation(course: EventIndex, plan: GenerationPlan, ended: Interruption, end_s: float) -> None:
    """Whoever was lost is gone from the moment that it failed; whoever reported waits for the plan from then on."""
    lost = {loss.uid: loss for loss in ended.lost}
    for uid in plan.members:
        process = course.processes[uid]
        if uid in lost:
            at_s = next((at for at in (lost[uid].failed_s, ended.seen_s, process.exited_s) if at is not None), end_s)
            _add(process, "gone", at_s, end_s, lost[uid].how)
        elif (reported := course.first_by("report", plan.generation, uid)) is not None:
            _add(process, "recovering", reported.at_s, ended.decided_s or end_s, "has reported, waits for the plan")


def _first_step_after(course: EventIndex, uid: int, generation: int, before: Interruption) -> float | None:
    """When this rank had applied a step again; else when the first one had, who does not note its own."""
    own = course.first_by("recovered", generation, uid)
    return own.at_s if own is not None else before.going_on_s


def _reported(course: EventIndex, uid: int, generation: int, plan: GenerationPlan) -> float:
    reported = course.first_by("report", generation, uid)
    return reported.at_s if reported is not None else plan.at_s


def _add(process: ProcessHistory, state: ProcessState, begin_s: float, end_s: float | None, what: str) -> None:
    """A state begins and ends what was before it; None: until the next one."""
    end = float("inf") if end_s is None else end_s
    while process.spans and process.spans[-1].begin_s >= begin_s and len(process.spans) > 1:
        process.spans.pop()
    if process.spans and process.spans[-1].end_s > begin_s:
        last = process.spans[-1]
        process.spans[-1] = Span(last.state, last.begin_s, max(last.begin_s, begin_s), last.what)
    process.spans.append(Span(state, begin_s, max(begin_s, end), what))


def _clip_spans(process: ProcessHistory, end_s: float) -> None:
    """Nothing lasts longer than its process, but for being gone, which lasts to the end."""
    until_s = process.exited_s if process.exited_s is not None else end_s
    settled = []
    for span in process.spans:
        last_s = end_s if span.state == "gone" else min(span.end_s, until_s)
        if last_s > span.begin_s:
            settled.append(Span(span.state, span.begin_s, min(span.end_s, last_s), span.what))
    process.spans[:] = settled


# What ended a generation before the job ended: who was lost, who saw it, what was decided, when a step was applied.
#
# A generation is left by a plan for the next one, or by the end of the job. Deaths, reports and plans are matched by
# the generation that they name and by process numbers, not by their order: a death may be noted after the plan that
# it led to.

_VERDICTS = ("restart", "redo", "repair", "retry", "proceed")  # by how much is done again
_UNFINISHED = ("job_failed", "job_fatal", "job_too_few")


def interruptions(course: EventIndex) -> tuple[Interruption, ...]:
    """In the order of generations."""
    return tuple(_interruptions(course))


@dataclass(frozen=True, slots=True)
class _End:
    """How a generation ended: who died, who said that it was broken, and the plan for the next one."""

    plan: GenerationPlan
    after: GenerationPlan | None
    deaths: dict[int, TimedEvent]
    broken: Sequence[TimedEvent]


def _interruptions(course: EventIndex) -> Iterator[Interruption]:
    injections = FailureActions(course)
    for generation in sorted(course.plans):
        end = _end(course, generation)
        if end is not None:
            yield _interruption(course, end, injections)


def _end(course: EventIndex, generation: int) -> _End | None:
    """None if it is there no more than to the end of the job, or not at all."""
    plan, after = course.plans.get(generation), course.plans.get(generation + 1)
    if plan is None:
        return None
    deaths = {
        uid: moment
        for moment in course.by_generation["process_lost", generation]
        if (uid := int_field(moment.fields, "uid")) is not None and plan.rank_of(uid) is not None
    }
    broken = course.by_generation["generation_broken", generation]
    # Where all leave together the last generation ends without a plan, too, and nothing has failed.
    if after is None and not deaths and not (broken and _is_unfinished(course)):
        return None
    return _End(plan, after, deaths, broken)


def _interruption(course: EventIndex, end: _End, injections: FailureActions) -> Interruption:
    plan, after, deaths = end.plan, end.after, end.deaths
    generation = plan.generation
    gone = after.dead if after is not None else tuple(deaths)
    until_s = after.at_s if after is not None else float("inf")
    reports = course.by_generation["report", generation]
    seen = _first(reports, list(deaths.values()), end.broken)
    if seen is not None and seen.at_s > until_s and not course.is_multinode:
        seen = None  # noted after the plan that it led to: who knew first is not on record
    seen_s = seen.at_s if seen is not None else None
    lost = tuple(_loss(course, uid, end, injections, seen_s) for uid in gone)
    failed_s = min((loss.failed_s for loss in lost if loss.failed_s is not None), default=None)
    if failed_s is not None and seen_s is not None and failed_s > seen_s and not course.is_multinode:
        failed_s = None  # of another rank, that was lost before, nobody noted the moment
    left = after.left if after is not None else ()
    joined = after.joiners if after is not None else ()
    back = _returns(course, plan.at_s, until_s)
    is_planned = after is not None and not gone and not back and bool(left or joined)
    going_on = course.by_generation["recovered", generation + 1]
    arrived = course.by_generation["rank_joined", generation + 1]
    steps = [step for moment in reports if (step := int_field(moment.fields, "step")) is not None]
    step = max(steps, default=None)
    verdict = next((each for each in _VERDICTS if after is not None and each in after.verdicts), "")
    next_s = course.plans[generation + 2].at_s if generation + 2 in course.plans else float("inf")
    return Interruption(
        generation=generation,
        kind="planned" if is_planned else "failure",
        what=_what(course, lost, left, joined, back, end.broken),
        lost=lost,
        left=tuple(course.rank_in(uid, generation) for uid in left),
        joined=tuple(course.label(uid) for uid in joined),
        step=step,
        failed_s=failed_s,
        seen_s=seen_s,
        seen_by=_detected_by(course, seen, generation),
        decided_s=after.at_s if after is not None else None,
        joined_s=arrived[-1].at_s if arrived else None,
        going_on_s=going_on[0].at_s if going_on else None,
        strategy=after.strategy if after is not None else plan.strategy,
        verdict=verdict,
        ranks_before=len(plan.members),
        ranks=len(after.members) if after is not None else None,
        steps_redone=_redone(course, verdict, step, after, next_s),
        bytes_handed=_bytes_sent(course, until_s, next_s),
        exact=after.exact if after is not None else True,
        overtaken=not going_on and _end(course, generation + 1) is not None,
    )


def _loss(course: EventIndex, uid: int, end: _End, injections: FailureActions, seen_s: float | None) -> LostProcess:
    rank, death = end.plan.rank_of(uid), end.deaths.get(uid)
    how = text_field(death.fields, "how") if death is not None else ""
    if death is not None and "stack" not in death.fields:
        how = f"died ({how})" if how else "died"
    cause = injections.cause(uid, end.plan.generation, death.at_s if death is not None else None, seen_s)
    failed_s, act = (cause.at_s, cause.act) if cause is not None else (None, "")
    return LostProcess(uid, f"process {uid}" if rank is None else f"rank {rank}", how or "was lost", failed_s, act)


def _returns(course: EventIndex, since_s: float, until_s: float) -> str:
    """Why all go back to a version, if a guard has asked for it in this generation."""
    asked = course.between("rollback_to_version", since_s, until_s)
    return f"the guard found {text_field(asked[0].fields, 'reason') or 'ranks that differ'}" if asked else ""


def _what(
    course: EventIndex,
    lost: Sequence[LostProcess],
    left: Sequence[int],
    joined: Sequence[int],
    back: str,
    broken: Sequence[TimedEvent],
) -> str:
    told = [f"{loss.who} {loss.how}" for loss in lost]
    told += [f"{course.label(uid)} left" for uid in left]
    told += [back] if back else []
    if not told and joined:
        told = [f"{course.label(uid)} joined" for uid in joined]
    if not told:
        reason = next((text_field(moment.fields, "reason") for moment in broken), "")
        told = [reason or "the generation broke, and nobody was lost"]
    return ", ".join(told)


def _detected_by(course: EventIndex, seen: TimedEvent | None, generation: int) -> str:
    if seen is None:
        return ""
    return "the launcher" if seen.uid is None else course.rank_in(seen.uid, generation)


def _redone(
    course: EventIndex, verdict: str, step: int | None, after: GenerationPlan | None, end_s: float
) -> int | None:
    """How many steps were begun or applied and done again; None if that is not on record."""
    if after is None:
        return None
    if not after.is_restart:
        return 1 if verdict == "redo" else 0
    back = [
        int_field(moment.fields, "step") or 0
        for moment in course.by_event["restored"]
        if after.at_s <= moment.at_s < end_s
    ]
    return max(0, step - back[0]) if back and step is not None else None


def _bytes_sent(course: EventIndex, since_s: float, until_s: float) -> int:
    return sum(
        _or_interruptions(int_field(each.fields, "bytes"), 0) for each in course.between("state_sent", since_s, until_s)
    )


def _is_unfinished(course: EventIndex) -> bool:
    return any(course.by_event[event] for event in _UNFINISHED) or not course.by_event["launcher_ended"]


def _first(*groups: Sequence[TimedEvent]) -> TimedEvent | None:
    return min((group[0] for group in groups if group), key=lambda moment: moment.at_s, default=None)


def _or_interruptions(value: int | None, other: int) -> int:
    return other if value is None else value


# What a timeline tells besides interruptions: soft errors, late ranks, saves that were left out, lost spares.


def find_anomalies(course: EventIndex) -> Iterator[Anomaly]:
    """In the order of time; what several ranks say alike only once."""
    said: set[tuple[str, str]] = set()
    for moment in course.events:
        found = _anomaly_of(course, moment)
        if found is None:
            continue
        what, mark = found
        key = moment.event, what
        if moment.event in ("step_suspicious", "rollback_to_version", "save_skipped", "process_restarted", "restored"):
            if key in said:
                continue
            said.add(key)
        who = "launcher" if moment.uid is None else course.label(moment.uid)
        yield Anomaly(moment.at_s, who, what, mark)


def _anomaly_of(course: EventIndex, moment: TimedEvent) -> tuple[str, Shade] | None:
    fields = moment.fields
    match moment.event:
        case "bit_flip_injected":
            before, after = fields.get("before"), fields.get("after")
            return f"a bit of {_place(moment)} was flipped on purpose: {_value(before)} → {_value(after)}", ""
        case "corruption_found":
            healed = fields.get("healed") is True
            told = f"{text_field(fields, 'path')} on rank {int_field(fields, 'rank')}: {text_field(fields, 'what')}"
            return f"{told}; {'healed' if healed else 'not healed'}", "good" if healed else "bad"
        case "ranks_differ":
            joined = text_field(fields, "joined")
            return f"ranks differ{f' after {joined} joined' if joined else ''}: {text_field(fields, 'reason')}", "bad"
        case "unverified":
            return f"nobody can tell whether the run is exact: {text_field(fields, 'reason')}", ""
        case "step_suspicious":
            step = int_field(fields, "step")
            return f"step {'?' if step is None else step + 1} was suspicious: {text_field(fields, 'reason')}", ""
        case "rollback_to_version":
            return f"all go back to {text_field(fields, 'version')}: {text_field(fields, 'reason')}", "bad"
        case "restored":
            step = int_field(fields, "step")
            return ("no checkpoint to restore" if step is None else f"restored step {step}"), ""
        case "slowdown_injected":
            by, for_s = float_field(fields, "by"), float_field(fields, "for_s")
            lasting = f" for {for_s:g} s" if for_s is not None else ""
            return f"rank {int_field(fields, 'rank')} was made {by or 0:g} times as slow{lasting}", ""
        case "network_restored":
            return f"rank {int_field(fields, 'rank')} has its network again", "good"
        case "straggler" | "rank_late" | "reports_late":
            return _late(course, moment), ""
        case "deadlock":
            return f"every rank waits for another one: {text_field(fields, 'reason')}", "bad"
        case "save_skipped":
            return f"step {int_field(fields, 'step')} was not saved: {text_field(fields, 'reason')}", "bad"
        case "process_restarted":
            return f"starts its script anew: {text_field(fields, 'reason')}", ""
        case "process_stuck":
            return f"gave itself up: {text_field(fields, 'reason')}", "bad"
        case "guard_unavailable":
            return f"no guard: {text_field(fields, 'reason')}", ""
        case "node_left":
            return f"node {text_field(fields, 'node')} is gone: {text_field(fields, 'reason') or 'it has left'}", "bad"
        case "signal_received":
            return f"the launcher was sent {text_field(fields, 'signal')}", ""
        case "process_lost" if int_field(fields, "rank") is None:
            uid = int_field(fields, "uid")
            return (
                f"{course.label(-1 if uid is None else uid)} died ({text_field(fields, 'how')}) without a rank",
                "bad",
            )
        case "spare_ended":
            uid = int_field(fields, "uid")
            return f"{course.label(-1 if uid is None else uid)} ended its script without a rank", "bad"
        case "cannot_grow":
            return text_field(fields, "reason"), ""
        case _:
            return None


def _late(course: EventIndex, moment: TimedEvent) -> str:
    if "uids" in moment.fields:
        uids = moment.fields["uids"]
        who = ", ".join(course.label(uid) for uid in uids if isinstance(uid, int)) if isinstance(uids, list) else "?"
        return f"{who}: no report {float_field(moment.fields, 'waited_s') or 0:g} s after the generation broke"
    return f"rank {int_field(moment.fields, 'rank')} {text_field(moment.fields, 'reason')}"


def _place(moment: TimedEvent) -> str:
    path, rank = text_field(moment.fields, "path"), int_field(moment.fields, "rank")
    return f"{path}[{int_field(moment.fields, 'index')}] on rank {rank}"


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_OUTCOMES = ("job_finished", "job_failed", "job_fatal", "job_too_few", "job_left")
_TELLS_STEPS = ("report", "recovered", "epoch", "guard_check", "restored", *_OUTCOMES)


def analyse(events: Iterable[Event], notes: Sequence[str] = ()) -> RunAnalysis:
    """What happened in a run. `events` come in any order; there is at least one."""
    listed = list(events)
    begin = next((event for event in listed if event.event == "launcher_started"), None)
    settings = _settings(begin)
    is_spread = settings.get("is_spread") is True
    moments = _ordered(listed, begin, is_spread)
    course = EventIndex(moments, is_spread)
    found = interruptions(course)
    last_s = max(moment.at_s for moment in moments)
    end = next(
        (moment for moment in reversed(moments) if moment.event == "launcher_ended" and moment.who == "launcher"), None
    )
    seconds = end.at_s if end is not None else last_s
    generations = _generations(course, found, seconds)
    processes = [course.processes[uid] for uid in sorted(course.processes)]
    assign_spans(course, found, seconds)
    progress = _progress(moments)
    planned = generations[0].members if generations else ()
    spares = sum(process.label.startswith("spare") for process in processes)
    return RunAnalysis(
        command=text_field(begin.fields, "command") if begin is not None else "",
        outcome=text_field(end.fields, "outcome") if end is not None else "",
        message=text_field(end.fields, "message") if end is not None else "",
        seconds=max(seconds, 0.0),
        num_ranks=int_field(settings, "num_ranks") or len(planned),
        num_spares=_or_analysis(int_field(settings, "num_spares"), spares),
        steps=_steps(end, progress),
        processes=tuple(processes),
        generations=generations,
        interruptions=found,
        anomalies=tuple(find_anomalies(course)),
        progress=progress,
        samples_lost=_samples_lost(moments),
        inexact=_inexact(course, found),
        unverified=text_field(end.fields, "unverified") if end is not None else "",
        is_recorded_exact=end is not None and end.fields.get("exact") is True,
        is_multinode=is_spread,
        settings=settings,
        num_events=len(listed),
        notes=tuple(notes),
    )


def _settings(begin: Event | None) -> dict[str, Json]:
    found = begin.fields.get("settings") if begin is not None else None
    return found if isinstance(found, dict) else {}


def _ordered(events: Sequence[Event], begin: Event | None, is_spread: bool) -> list[TimedEvent]:
    """By the clock that all share: on one machine the monotonic one, across machines there is only the wall clock."""
    first = begin or events[0]
    zero_s = first.time if is_spread else first.monotonic
    moments = [TimedEvent((event.time if is_spread else event.monotonic) - zero_s, event) for event in events]
    return sorted(moments, key=lambda moment: moment.at_s)


def _generations(course: EventIndex, found: Sequence[Interruption], end_s: float) -> tuple[Generation, ...]:
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


def _progress(moments: Sequence[TimedEvent]) -> tuple[tuple[float, int], ...]:
    """Of several ranks that say the same only the first; a restart may lead back."""
    found: list[tuple[float, int]] = []
    is_told = False  # that the job stood still there
    for moment in moments:
        step = int_field(moment.fields, "step") if moment.event in _TELLS_STEPS else None
        if moment.event == "plan" and int_field(moment.fields, "generation") == 0:
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


def _steps(end: TimedEvent | None, progress: Sequence[tuple[float, int]]) -> int | None:
    told = int_field(end.fields, "steps") if end is not None else None
    seen = max((step for _, step in progress), default=None)
    return seen if told is None else max(told, seen or 0)


def _samples_lost(moments: Sequence[TimedEvent]) -> int:
    """By the last books of each epoch: after a restart an epoch may be told twice."""
    last: dict[int, int] = defaultdict(int)
    for moment in moments:
        if moment.event == "epoch":
            epoch, lost = int_field(moment.fields, "epoch"), int_field(moment.fields, "lost")
            if epoch is not None and lost is not None:
                last[epoch] = max(0, lost)
    return sum(last.values())


def _inexact(course: EventIndex, found: Sequence[Interruption]) -> str:
    """The first reason on record: what a joiner did not get, or a plan that says so."""
    told = next((text_field(moment.fields, "reason") for moment in course.events if moment.event == "inexact"), "")
    planned = next((each for each in found if not each.exact), None)
    if told or planned is None:
        return told
    ranks = f"{planned.ranks} rank{'' if planned.ranks == 1 else 's'}"
    return f"generation {planned.generation + 1} went on with {ranks}, by {planned.strategy or 'its plan'}"


def _or_analysis(value: int | None, other: int) -> int:
    return other if value is None else value
