"""What was done to processes on purpose, and which of it is why one was lost."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from evergrad.report.run_course import Course
from evergrad.report.run_moments import Moment, number, numbers

_ACTS = {"killing": "kill", "stopping": "stop", "cut": "cut"}  # being slow is no end


@dataclass(frozen=True, slots=True)
class Injection:
    """One act on one process."""

    at_s: float
    act: str
    """`kill`, `stop`, `cut`."""
    over_s: float = float("inf")
    """When the process was as before: a stop had passed, a network was healed."""


class Injections:
    """All of a run; each explains one loss at most."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._left: dict[int, list[Injection]] = defaultdict(list)
        healed: dict[int, list[float]] = defaultdict(list)
        for moment in course.by_event["healed"]:
            for uid in _uids(moment):
                healed[uid].append(moment.at_s)
        for event, act in _ACTS.items():
            for moment in course.by_event[event]:
                for uid in _uids(moment):
                    over_s = self._over_s(moment, act, uid, healed[uid])
                    self._left[uid].append(Injection(moment.at_s, act, over_s))
        for found in self._left.values():
            found.sort(key=lambda each: each.at_s)

    def cause(self, uid: int, generation: int, died_s: float | None, seen_s: float | None) -> Injection | None:
        """Why this generation lost a process: the last act on it before that was seen, unless it was over by then.

        It may have been done before the generation's plan, while the one before it was being left.
        """
        plans = self._course.plans
        plan, before, after = (plans.get(each) for each in (generation, generation - 1, generation + 1))
        assert plan is not None
        since_s = before.at_s if before is not None else plan.at_s
        if self._course.own("going on", generation, uid) is not None:
            since_s = plan.at_s  # it has outlived what was done to it before
        decided_s = after.at_s if after is not None else float("inf")
        died_s = decided_s if died_s is None else min(died_s, decided_s)
        seen_s = died_s if seen_s is None else min(seen_s, died_s)
        # The generation may have been broken by another rank before. Only across machines is a death before its cause.
        for until_s in (seen_s, died_s, float("inf")) if self._course.is_spread else (seen_s, died_s):
            for each in reversed(self._left[uid]):
                if since_s <= each.at_s <= until_s and each.over_s > seen_s:
                    self._left[uid].remove(each)
                    return each
        return None

    def _over_s(self, moment: Moment, act: str, uid: int, healed: list[float]) -> float:
        for_s = number(moment.fields, "for_s")
        if act == "cut":
            return next((at_s for at_s in healed if at_s > moment.at_s), float("inf"))
        if act == "stop" and for_s is not None and self._is_woken(moment.uid, uid):
            return moment.at_s + for_s
        return float("inf")

    def _is_woken(self, by: int | None, uid: int) -> bool:
        """A stopped process is woken by its own machine alone."""
        doer, done_to = (self._course.processes.get(-1 if each is None else each) for each in (by, uid))
        return not self._course.is_spread or (doer is not None and done_to is not None and doer.node == done_to.node)


def _uids(moment: Moment) -> tuple[int, ...]:
    return numbers(moment.fields, "uids") or (() if moment.uid is None else (moment.uid,))
