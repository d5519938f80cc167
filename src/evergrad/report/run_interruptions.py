"""What ended a generation before the job ended: who was lost, who saw it, what was decided, when a step was applied.

A generation is left by a plan for the next one, or by the end of the job. Deaths, reports and plans are matched by
the generation that they name and by process numbers, not by their order: a death may be noted after the plan that
it led to.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from evergrad.report.run_moments import Moment, numbers, text, whole
from evergrad.report.run_story import Interruption, Loss, Process

__all__ = ["Course", "Planned", "interruptions"]

_INJECTED = {"killing": "kill", "stopping": "stop", "cut": "cut"}
_VERDICTS = ("restart", "redo", "repair", "retry", "proceed")  # by how much is done again
_UNFINISHED = ("failed", "fatal", "too-few")


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan: one generation."""

    at_s: float
    generation: int
    members: tuple[int, ...]
    joiners: tuple[int, ...]
    dead: tuple[int, ...]
    left: tuple[int, ...]
    verdicts: tuple[str, ...]
    strategy: str
    is_restart: bool
    exact: bool

    def rank_of(self, uid: int) -> int | None:
        """The rank of a process; None if it has none."""
        return self.members.index(uid) if uid in self.members else None


@dataclass(slots=True)
class Course:
    """The events of a run, sorted into where they belong."""

    moments: Sequence[Moment]
    plans: dict[int, Planned] = field(default_factory=dict)
    processes: dict[int, Process] = field(default_factory=dict)
    by_generation: dict[tuple[str, int], list[Moment]] = field(default_factory=lambda: defaultdict(list))
    """Those that name a generation: by event and generation."""
    by_event: dict[str, list[Moment]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for moment in self.moments:
            self.by_event[moment.event].append(moment)
            generation = whole(moment.fields, "generation")
            if generation is not None:
                self.by_generation[moment.event, generation].append(moment)
        for moment in self.by_event["plan"]:
            plan = _plan(moment)
            if plan is not None and plan.generation not in self.plans:
                self.plans[plan.generation] = plan
        for moment in self.by_event["start"]:
            self._start(moment)
        for moment in self.by_event["exit"]:
            process = self.processes.get(_or(whole(moment.fields, "uid"), -1))
            if process is not None and process.exited_s is None:
                process.exited_s, process.code = moment.at_s, whole(moment.fields, "code")
        for plan in self.plans.values():
            for rank, uid in enumerate(plan.members):
                process = self.processes.setdefault(uid, Process(uid, f"process {uid}"))
                if rank not in process.ranks:
                    process.ranks.append(rank)

    def between(self, event: str, since_s: float, until_s: float) -> list[Moment]:
        """The events of one kind from a moment on, and before another one."""
        moments = self.by_event[event]
        first = bisect_left(moments, since_s, key=lambda moment: moment.at_s)
        return moments[first : bisect_left(moments, until_s, key=lambda moment: moment.at_s)]

    def label(self, uid: int) -> str:
        """What a process was started as."""
        process = self.processes.get(uid)
        return process.label if process is not None else f"process {uid}"

    def rank_in(self, uid: int, generation: int) -> str:
        """What a process was in a generation, in words."""
        plan = self.plans.get(generation)
        rank = plan.rank_of(uid) if plan is not None else None
        return self.label(uid) if rank is None else f"rank {rank}"

    def _start(self, moment: Moment) -> None:
        uid = whole(moment.fields, "uid")
        if uid is not None and uid not in self.processes:
            label, node = text(moment.fields, "label") or f"process {uid}", text(moment.fields, "node")
            self.processes[uid] = Process(uid, label, node, whole(moment.fields, "pid"), moment.at_s)


def interruptions(course: Course) -> tuple[Interruption, ...]:
    """In the order of generations."""
    return tuple(_interruptions(course))


def _interruptions(course: Course) -> Iterator[Interruption]:
    injected = _injected(course)
    for generation, plan in sorted(course.plans.items()):
        after = course.plans.get(generation + 1)
        deaths = {
            uid: moment
            for moment in course.by_generation["death", generation]
            if (uid := whole(moment.fields, "uid")) is not None and uid in plan.members
        }
        broken = course.by_generation["broken", generation]
        # Where all leave together the last generation ends without a plan, too, and nothing has failed.
        if after is None and not deaths and not (broken and _is_unfinished(course)):
            continue
        yield _interruption(course, plan, after, deaths, broken, injected)


def _interruption(
    course: Course,
    plan: Planned,
    after: Planned | None,
    deaths: dict[int, Moment],
    broken: Sequence[Moment],
    injected: dict[int, list[tuple[float, str]]],
) -> Interruption:
    generation = plan.generation
    gone = after.dead if after is not None else tuple(deaths)
    until_s = after.at_s if after is not None else float("inf")
    lost = tuple(_loss(uid, plan, deaths.get(uid), injected.get(uid, ()), until_s) for uid in gone)
    left = after.left if after is not None else ()
    joined = after.joiners if after is not None else ()
    reports = course.by_generation["report", generation]
    seen = _first(reports, list(deaths.values()), broken)
    failed = [loss.failed_s for loss in lost if loss.failed_s is not None]
    back = _returns(course, plan.at_s, until_s)
    is_planned = after is not None and not gone and not back and bool(left or joined)
    going_on = course.by_generation["going on", generation + 1]
    arrived = course.by_generation["joined", generation + 1]
    steps = [step for moment in reports if (step := whole(moment.fields, "step")) is not None]
    step = max(steps, default=None)
    verdict = next((each for each in _VERDICTS if after is not None and each in after.verdicts), "")
    end_s = course.plans[generation + 2].at_s if generation + 2 in course.plans else float("inf")
    return Interruption(
        generation=generation,
        kind="planned" if is_planned else "failure",
        what=_what(course, lost, left, joined, back, broken),
        lost=lost,
        left=tuple(course.rank_in(uid, generation) for uid in left),
        joined=tuple(course.label(uid) for uid in joined),
        step=step,
        failed_s=min(failed, default=None),
        seen_s=seen.at_s if seen is not None else None,
        seen_by=_seer(course, seen, generation),
        decided_s=after.at_s if after is not None else None,
        joined_s=arrived[-1].at_s if arrived else None,
        going_on_s=going_on[0].at_s if going_on else None,
        strategy=after.strategy if after is not None else plan.strategy,
        verdict=verdict,
        ranks_before=len(plan.members),
        ranks=len(after.members) if after is not None else None,
        steps_redone=_redone(course, verdict, step, after, end_s),
        bytes_handed=_handed(course, until_s, end_s),
        exact=after.exact if after is not None else True,
        overtaken=not going_on and generation + 2 in course.plans,
    )


def _loss(uid: int, plan: Planned, death: Moment | None, injected: Sequence[tuple[float, str]], until_s: float) -> Loss:
    who = f"rank {plan.rank_of(uid)}" if plan.rank_of(uid) is not None else f"process {uid}"
    how = text(death.fields, "how") if death is not None else ""
    if death is not None and "stack" not in death.fields:
        how = f"died ({how})" if how else "died"
    done = [each for each in injected if plan.at_s <= each[0] <= until_s]
    failed_s, act = done[0] if done else (None, "")
    return Loss(uid, who, how or "was lost", failed_s, act)


def _injected(course: Course) -> dict[int, list[tuple[float, str]]]:
    """What was done on purpose to each process, and when."""
    found: dict[int, list[tuple[float, str]]] = defaultdict(list)
    for event, act in _INJECTED.items():
        for moment in course.by_event[event]:
            uids = numbers(moment.fields, "uids") or ((moment.uid,) if moment.uid is not None else ())
            for uid in uids:
                found[uid].append((moment.at_s, act))
    return {uid: sorted(each) for uid, each in found.items()}


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


def _plan(moment: Moment) -> Planned | None:
    generation, verdicts = whole(moment.fields, "generation"), moment.fields.get("verdicts")
    if generation is None or generation < 0:
        return None
    return Planned(
        moment.at_s,
        generation,
        numbers(moment.fields, "members"),
        numbers(moment.fields, "joiners"),
        numbers(moment.fields, "dead"),
        numbers(moment.fields, "left"),
        tuple(verdicts) if isinstance(verdicts, dict) else (),
        text(moment.fields, "strategy"),
        moment.fields.get("restart") is True,
        moment.fields.get("exact") is not False,
    )


def _or(value: int | None, other: int) -> int:
    return other if value is None else value
