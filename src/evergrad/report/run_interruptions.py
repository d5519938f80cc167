"""What ended a generation before the job ended: who was lost, who saw it, what was decided, when a step was applied.

A generation is left by a plan for the next one, or by the end of the job. Deaths, reports and plans are matched by
the generation that they name and by process numbers, not by their order: a death may be noted after the plan that
it led to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from evergrad.report.run_course import Course, Planned
from evergrad.report.run_injections import Injections
from evergrad.report.run_moments import Moment, text, whole
from evergrad.report.run_story import Interruption, Loss

_VERDICTS = ("restart", "redo", "repair", "retry", "proceed")  # by how much is done again
_UNFINISHED = ("failed", "fatal", "too-few")


def interruptions(course: Course) -> tuple[Interruption, ...]:
    """In the order of generations."""
    return tuple(_interruptions(course))


@dataclass(frozen=True, slots=True)
class _End:
    """How a generation ended: who died, who said that it was broken, and the plan for the next one."""

    plan: Planned
    after: Planned | None
    deaths: dict[int, Moment]
    broken: Sequence[Moment]


def _interruptions(course: Course) -> Iterator[Interruption]:
    injections = Injections(course)
    for generation in sorted(course.plans):
        end = _end(course, generation)
        if end is not None:
            yield _interruption(course, end, injections)


def _end(course: Course, generation: int) -> _End | None:
    """None if it is there no more than to the end of the job, or not at all."""
    plan, after = course.plans.get(generation), course.plans.get(generation + 1)
    if plan is None:
        return None
    deaths = {
        uid: moment
        for moment in course.by_generation["death", generation]
        if (uid := whole(moment.fields, "uid")) is not None and plan.rank_of(uid) is not None
    }
    broken = course.by_generation["broken", generation]
    # Where all leave together the last generation ends without a plan, too, and nothing has failed.
    if after is None and not deaths and not (broken and _is_unfinished(course)):
        return None
    return _End(plan, after, deaths, broken)


def _interruption(course: Course, end: _End, injections: Injections) -> Interruption:
    plan, after, deaths = end.plan, end.after, end.deaths
    generation = plan.generation
    gone = after.dead if after is not None else tuple(deaths)
    until_s = after.at_s if after is not None else float("inf")
    reports = course.by_generation["report", generation]
    seen = _first(reports, list(deaths.values()), end.broken)
    if seen is not None and seen.at_s > until_s and not course.is_spread:
        seen = None  # noted after the plan that it led to: who knew first is not on record
    seen_s = seen.at_s if seen is not None else None
    lost = tuple(_loss(course, uid, end, injections, seen_s) for uid in gone)
    failed_s = min((loss.failed_s for loss in lost if loss.failed_s is not None), default=None)
    if failed_s is not None and seen_s is not None and failed_s > seen_s and not course.is_spread:
        failed_s = None  # of another rank, that was lost before, nobody noted the moment
    left = after.left if after is not None else ()
    joined = after.joiners if after is not None else ()
    back = _returns(course, plan.at_s, until_s)
    is_planned = after is not None and not gone and not back and bool(left or joined)
    going_on = course.by_generation["going on", generation + 1]
    arrived = course.by_generation["joined", generation + 1]
    steps = [step for moment in reports if (step := whole(moment.fields, "step")) is not None]
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
        seen_by=_seer(course, seen, generation),
        decided_s=after.at_s if after is not None else None,
        joined_s=arrived[-1].at_s if arrived else None,
        going_on_s=going_on[0].at_s if going_on else None,
        strategy=after.strategy if after is not None else plan.strategy,
        verdict=verdict,
        ranks_before=len(plan.members),
        ranks=len(after.members) if after is not None else None,
        steps_redone=_redone(course, verdict, step, after, next_s),
        bytes_handed=_handed(course, until_s, next_s),
        exact=after.exact if after is not None else True,
        overtaken=not going_on and _end(course, generation + 1) is not None,
    )


def _loss(course: Course, uid: int, end: _End, injections: Injections, seen_s: float | None) -> Loss:
    rank, death = end.plan.rank_of(uid), end.deaths.get(uid)
    how = text(death.fields, "how") if death is not None else ""
    if death is not None and "stack" not in death.fields:
        how = f"died ({how})" if how else "died"
    cause = injections.cause(uid, end.plan.generation, death.at_s if death is not None else None, seen_s)
    failed_s, act = (cause.at_s, cause.act) if cause is not None else (None, "")
    return Loss(uid, f"process {uid}" if rank is None else f"rank {rank}", how or "was lost", failed_s, act)


def _returns(course: Course, since_s: float, until_s: float) -> str:
    """Why all go back to a version, if a guard has asked for it in this generation."""
    asked = course.between("goes back", since_s, until_s)
    return f"the guard found {text(asked[0].fields, 'why') or 'ranks that differ'}" if asked else ""


def _what(
    course: Course,
    lost: Sequence[Loss],
    left: Sequence[int],
    joined: Sequence[int],
    back: str,
    broken: Sequence[Moment],
) -> str:
    told = [f"{loss.who} {loss.how}" for loss in lost]
    told += [f"{course.label(uid)} left" for uid in left]
    told += [back] if back else []
    if not told and joined:
        told = [f"{course.label(uid)} joined" for uid in joined]
    if not told:
        reason = next((text(moment.fields, "reason") for moment in broken), "")
        told = [reason or "the generation broke, and nobody was lost"]
    return ", ".join(told)


def _seer(course: Course, seen: Moment | None, generation: int) -> str:
    if seen is None:
        return ""
    return "the launcher" if seen.uid is None else course.rank_in(seen.uid, generation)


def _redone(course: Course, verdict: str, step: int | None, after: Planned | None, end_s: float) -> int | None:
    """How many steps were begun or applied and done again; None if that is not on record."""
    if after is None:
        return None
    if not after.is_restart:
        return 1 if verdict == "redo" else 0
    back = [
        whole(moment.fields, "step") or 0 for moment in course.by_event["restored"] if after.at_s <= moment.at_s < end_s
    ]
    return max(0, step - back[0]) if back and step is not None else None


def _handed(course: Course, since_s: float, until_s: float) -> int:
    return sum(_or(whole(each.fields, "bytes"), 0) for each in course.between("handed over", since_s, until_s))


def _is_unfinished(course: Course) -> bool:
    return any(course.by_event[event] for event in _UNFINISHED) or not course.by_event["end"]


def _first(*groups: Sequence[Moment]) -> Moment | None:
    return min((group[0] for group in groups if group), key=lambda moment: moment.at_s, default=None)


def _or(value: int | None, other: int) -> int:
    return other if value is None else value
