"""The events of a run, sorted into where they belong: by kind, by generation, by process; and its plans."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from evergrad.report.run_moments import Moment, numbers, text, whole
from evergrad.report.run_story import Process


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
    ranks: Mapping[int, int] = field(compare=False)
    """The rank of each process that has one."""

    def rank_of(self, uid: int) -> int | None:
        """The rank of a process; None if it has none."""
        return self.ranks.get(uid)


@dataclass(slots=True)
class Course:
    """The events of a run, sorted into where they belong."""

    moments: Sequence[Moment]
    is_spread: bool = False
    """Several machines, whose clocks may disagree."""
    plans: dict[int, Planned] = field(default_factory=dict)
    processes: dict[int, Process] = field(default_factory=dict)
    by_generation: dict[tuple[str, int], list[Moment]] = field(default_factory=lambda: defaultdict(list))
    """Those that name a generation: by event and generation."""
    by_event: dict[str, list[Moment]] = field(default_factory=lambda: defaultdict(list))
    _own: dict[tuple[str, int, int], Moment] = field(default_factory=dict)
    """The first that a process told of itself: by event, generation and process."""

    def __post_init__(self) -> None:
        for moment in self.moments:
            self.by_event[moment.event].append(moment)
            generation = whole(moment.fields, "generation")
            if generation is not None:
                self.by_generation[moment.event, generation].append(moment)
                if (uid := moment.uid) is not None:
                    self._own.setdefault((moment.event, generation, uid), moment)
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

    def own(self, event: str, generation: int, uid: int) -> Moment | None:
        """What a process told first of a generation, of one kind."""
        return self._own.get((event, generation, uid))

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


def _plan(moment: Moment) -> Planned | None:
    generation, verdicts = whole(moment.fields, "generation"), moment.fields.get("verdicts")
    if generation is None or generation < 0:
        return None
    members = numbers(moment.fields, "members")
    return Planned(
        moment.at_s,
        generation,
        members,
        numbers(moment.fields, "joiners"),
        numbers(moment.fields, "dead"),
        numbers(moment.fields, "left"),
        tuple(verdicts) if isinstance(verdicts, dict) else (),
        text(moment.fields, "strategy"),
        moment.fields.get("restart") is True,
        moment.fields.get("exact") is not False,
        {uid: rank for rank, uid in reversed(list(enumerate(members)))},  # named twice: the first counts
    )


def _or(value: int | None, other: int) -> int:
    return other if value is None else value
