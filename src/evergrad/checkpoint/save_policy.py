"""When a checkpoint is due: pure decisions on numbers that somebody else has measured.

A policy is anything with `is_due(progress)`. It is asked at each `need_checkpoint()`, on every rank; if any rank finds
that it is due, all save. The costs in `Progress` are the largest of all ranks, the same on each.
"""

from __future__ import annotations

import logging
import math
import operator
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar, Protocol, final, runtime_checkable

from evergrad.checkpoint.pending import Pending
from evergrad.checkpoint.preemption import AsyncVote, SignalNotice, SignalWatch, Votes, checked_signals
from evergrad.checkpoint.ranks import Ranks
from evergrad.errors import CheckpointError, UsageError
from evergrad.wording import signal_name


@dataclass(frozen=True, slots=True)
class Progress:
    """What has happened since the last save, and what saves cost."""

    steps: int
    """Calls of `need_checkpoint` since the last save, this one included."""
    seconds: float
    """Since the last save returned; before any, since the first call."""
    cost_s: float | None = None
    """How long a save holds up the training: the median of the last few; None before the first."""
    durable_s: float | None = None
    """From a save until it is durable: the median of the last few; None if none was yet."""
    is_first: bool = False
    """Whether nothing was saved so far."""


@runtime_checkable
class Policy(Protocol):
    """Decides when to save. Yours may be any object with this method; it should depend on nothing but `progress`."""

    def is_due(self, progress: Progress) -> bool:
        """Whether to save now."""
        ...


@final
@dataclass(frozen=True, slots=True)
class EverySteps:
    """A save at every n-th call.

    >>> EverySteps(100).is_due(Progress(steps=100, seconds=3.0))
    True
    """

    n: int
    by_steps_alone: ClassVar[bool] = True
    """All ranks count alike: they need not ask each other."""

    def __post_init__(self) -> None:
        try:
            fits = not isinstance(self.n, bool) and operator.index(self.n) >= 1
        except TypeError:
            fits = False
        if not fits:
            raise UsageError(f"EverySteps: expected a whole number of steps, 1 or more, found {self.n!r}")

    def is_due(self, progress: Progress) -> bool:
        """Whether so many steps were made."""
        return progress.steps >= self.n

    def interval_s(self, progress: Progress) -> float | None:
        """What that is in seconds, at the pace since the last save."""
        return self.n * progress.seconds / progress.steps if progress.steps else None


@final
@dataclass(frozen=True, slots=True)
class EverySeconds:
    """A save whenever so much time has passed on any rank."""

    seconds: float

    def __post_init__(self) -> None:
        _check_positive("EverySeconds", "a number of seconds", self.seconds)

    def is_due(self, progress: Progress) -> bool:
        """Whether the time is over."""
        return progress.seconds >= self.seconds

    def interval_s(self, progress: Progress) -> float | None:
        """The time itself."""
        return self.seconds


@final
@dataclass(frozen=True, slots=True)
class MaxOverhead:
    """As often as saves hold up the training by no more than this part of its time.

    The first call is due, so that the cost gets known.

    >>> MaxOverhead(0.02).interval_s(Progress(steps=1, seconds=1.0, cost_s=0.5))
    25.0
    """

    fraction: float

    def __post_init__(self) -> None:
        _check_positive("MaxOverhead", "a part of the training time, such as 0.02", self.fraction)
        if self.fraction > 1:
            raise UsageError(f"MaxOverhead: expected a part of the training time, at most 1, found {self.fraction!r}")

    def is_due(self, progress: Progress) -> bool:
        """Whether the cost of a save is that part of the time since the last one, or less."""
        return _is_over(self.interval_s(progress), progress)

    def interval_s(self, progress: Progress) -> float | None:
        """The shortest time between saves that keeps to it; None before a cost is known."""
        return None if progress.cost_s is None else progress.cost_s / self.fraction


@final
@dataclass(frozen=True, slots=True)
class YoungDaly:
    """The interval that loses the least time to failures, given the mean time between those of the whole job.

    Daly's formula, with the measured cost of a save; but never more often than saves become durable, since one that
    is not protects nothing. The first call is due, so that the cost gets known.

    >>> round(YoungDaly(mtbf_s=3.1 * 3600).interval_s(Progress(steps=1, seconds=1.0, cost_s=60.0)))
    1118
    """

    mtbf_s: float

    def __post_init__(self) -> None:
        _check_positive("YoungDaly", "the mean seconds between failures of the job, mtbf_s", self.mtbf_s)

    def is_due(self, progress: Progress) -> bool:
        """Whether the interval is over."""
        return _is_over(self.interval_s(progress), progress)

    def interval_s(self, progress: Progress) -> float | None:
        """Training time between two saves; None before a cost is known."""
        if progress.cost_s is None:
            return None
        return max(daly_interval_s(progress.cost_s, self.mtbf_s), progress.durable_s or 0.0)


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Daly's higher-order optimum of the training time between two saves."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def checked_policies(given: Policy | int | Sequence[Policy | int] | None) -> tuple[Policy, ...]:
    """The policies that `Checkpointer(policy=…)` means: an int is EverySteps, and of several the first that is due."""
    several: list[object] = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    found: list[Policy] = []
    for one in several:
        if isinstance(one, int):
            found.append(EverySteps(one))
        elif isinstance(one, Policy) and not isinstance(one, type) and callable(one.is_due):
            found.append(one)
        else:
            raise UsageError(
                f"policy: expected a number of steps, eg.EverySteps(100), eg.EverySeconds(600), "
                f"eg.MaxOverhead(0.02), eg.YoungDaly(mtbf_s=…), or anything with is_due(progress), found {one!r}"
            )
    return tuple(found)


def _is_over(interval_s: float | None, progress: Progress) -> bool:
    return interval_s is None or progress.seconds >= interval_s


def _check_positive(name: str, what: str, value: object) -> None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    if not fits:
        raise UsageError(f"{name}: expected {what}, more than 0, found {value!r}")


# When a job saves and when it leaves: what `need_checkpoint`, `should_exit` and `save` know of each other.
#
# Every rank makes the same calls in the same order, and whatever decides an answer is the same on all of them: counts
# of calls and saves, and what a round of votes has brought. A clock and a signal are one rank's own; they only ever
# become votes. A save makes the votes of a round that was begun before it void, so nothing is saved twice.
#
# A `should_exit` right after a `need_checkpoint` begins no round and waits for none: it would wait for the network.
# It goes by what that call has heard.

_log = logging.getLogger(__name__)
_REMEMBERED = 5
_IN_FLIGHT = 4
_NEED, _EXIT = 0, 1


@dataclass(slots=True)
class _GroupCounters:
    """What has happened since the process group was made; a rank that has just joined begins with the same."""

    ranks: Ranks
    since_s: float
    calls: int = 0
    steps: int = 0
    saves: int = 0
    is_fresh: bool = False
    """Whether the last call was `need_checkpoint`."""
    is_first: bool = True
    asked: bool = False
    """Whether `need_checkpoint` was ever called."""
    said_after: int = 0
    """How many saves there had been when the round under way was begun."""
    due: bool = False
    is_current: bool = False
    """Whether the costs below include the last save."""
    cost_s: float = -1.0
    durable_s: float = -1.0
    told: SignalNotice | None = None
    """The signal that all ranks know of, and when this one learnt of it."""
    overdue: bool = False
    saved_since: bool = False
    last: Pending | None = None
    last_tiers: tuple[str, ...] = ()


class SavePolicyRuntime:
    """The answers of one checkpointer."""

    def __init__(
        self,
        policy: Policy | int | Sequence[Policy | int] | None = None,
        *,
        preempt_signals: Sequence[str | int] = ("SIGTERM", "SIGUSR2"),
        exit_code: int = 75,
        grace_s: float = 25.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        policies = checked_policies(policy)
        self._by_steps = [one for one in policies if getattr(one, "by_steps_alone", False)]
        self._by_vote = [one for one in policies if not getattr(one, "by_steps_alone", False)]
        self._signals = checked_signals(preempt_signals)
        self._code, self._grace_s, self._clock = _checked_code(exit_code), _checked_grace(grace_s), clock
        self._watch = SignalWatch(self._signals, clock)
        weakref.finalize(self, self._watch.uninstall)  # the handlers know the watch alone, and go with whoever reads it
        self._costs: deque[float] = deque(maxlen=_REMEMBERED)
        self._durables: deque[float] = deque(maxlen=_REMEMBERED)
        self._failed_cost: float | None = None
        self._in_flight: deque[tuple[Pending, float]] = deque(maxlen=_IN_FLIGHT)
        self._begun_s: float | None = None
        """When a save began that has not returned."""
        self._since_s: float | None = None
        self._agreed: tuple[float, float] | None = (-1.0, -1.0)
        """For `is_due`: when the last save was, and what saves cost on the slowest rank; None since the last save."""
        self._is_first = True
        self._complaints: list[str] = []
        self._leaving = False
        self._course: _GroupCounters | None = None
        self._agreement: AsyncVote | None = None

    @property
    def has_policy(self) -> bool:
        """True if there is a policy to ask."""
        return bool(self._by_steps or self._by_vote)

    def is_due(self, steps: int, agree: Callable[[list[float]], list[float]], *, votes: bool = True) -> bool:
        """Decide to save now, in a job that counts steps, watches signals and agrees with other ranks by itself.

        `steps` is how many there were since the last save. `agree` gives the largest of what the ranks say, number by
        number. A rank without a vote has just joined: it knows neither when the last save was nor what saves cost.
        """
        self._note_failure()
        self._note_durable()
        now = self._clock()
        self._since_s = now if self._since_s is None else self._since_s
        cost_s, durable_s = (None if value < 0 else value for value in self._agreed or (-1.0, -1.0))
        progress = Progress(steps, now - self._since_s, cost_s, durable_s, self._is_first)
        # As by votes: until all ranks know what the last save has cost, only steps are judged.
        asked = [*self._by_steps, *(self._by_vote if self._agreed is not None else ())] if votes else []
        due = any(policy.is_due(progress) for policy in asked)
        is_due, *costs = agree([float(due), *self._my_costs()])
        self._agreed = costs[0], costs[1]
        return is_due > 0

    @property
    def exit_code(self) -> int:
        """0 until `should_exit` has said so; then what tells the scheduler to run the job again."""
        return self._code if self._leaving else 0

    @property
    def preempted(self) -> bool:
        """Whether all ranks know that the job has to leave: what is saved from then on goes to every tier."""
        return self._course is not None and self._course.told is not None

    def need_checkpoint(self) -> bool:
        """Whether to save now: the policy says so, or the job has to leave. The same on all ranks."""
        course = self._enter()
        if self._leaving:
            return False
        course.asked, course.steps, course.is_fresh = True, course.steps + 1, True
        self._receive_votes(course)
        by_steps = any(policy.is_due(self._progress(course)) for policy in self._by_steps)
        answer = not course.saved_since if course.told is not None else by_steps or course.due
        # What nobody acts on is asked again: this call's votes count unless there is a save.
        course.due = False
        self._send_votes(course, _NEED)
        return answer

    def should_exit(self) -> bool:
        """Whether to leave now. After a signal this waits for the last save, as long as there is time."""
        course = self._enter()
        if self._leaving:
            return True
        takes_part = not course.is_fresh or course.ranks.world_size == 1
        course.is_fresh = False
        if takes_part:
            self._receive_votes(course)
        if course.told is not None and (course.saved_since or course.overdue or not course.asked):
            self._leaving = True  # from here on no rank begins a round
            self._await_last_save(course, course.told)
            return True
        if takes_part:
            self._send_votes(course, _EXIT)
        return False

    def begin_save(self) -> None:
        """All ranks save now, whatever becomes of it on each."""
        self._note_failure()
        self._begun_s = self._since_s = self._clock()
        self._agreed, self._is_first = None, False
        course = self._course
        if course is None:
            return
        ranks = Ranks.now()
        if ranks != course.ranks:
            course = self._start_afresh(ranks)
        course.saves, course.steps, course.due, course.is_current = course.saves + 1, 0, False, False
        course.since_s, course.is_first = self._begun_s, False
        course.saved_since, course.last, course.last_tiers = course.told is not None, None, ()

    def saved(self, pending: Pending | None = None, tiers: Sequence[str] = ()) -> None:
        """The save has returned, and goes on to these tiers."""
        assert self._begun_s is not None, "begin_save comes first"
        now = self._clock()
        self._costs.append(now - self._begun_s)
        self._since_s = now
        if pending is not None:
            self._in_flight.append((pending, self._begun_s))
        self._begun_s = None
        if self._course is not None:
            self._course.since_s, self._course.last, self._course.last_tiers = now, pending, tuple(tiers)

    def complaints(self) -> list[str]:
        """What a person should know, since this was last asked."""
        said, self._complaints = self._complaints, []
        return said

    def close(self) -> None:
        """Put signal handlers back and let go of the other ranks. Twice is fine."""
        self._watch.uninstall()
        self._in_flight.clear()
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None

    def _enter(self) -> _GroupCounters:
        """What every call begins with."""
        self._watch.install()
        ranks, course = Ranks.now(), self._course
        if course is None or ranks != course.ranks:
            course = self._start_afresh(ranks)
        course.calls += 1
        if self._agreement is None and ranks.world_size > 1 and (self._by_vote or self._signals) and not self._leaving:
            self._agreement = AsyncVote(ranks)
        self._note_failure()
        self._note_durable()
        return course

    def _start_afresh(self, ranks: Ranks) -> _GroupCounters:
        """Count from zero in a new process group. What saves cost is remembered, and compared again."""
        if self._agreement is not None:
            self._agreement.abandon()
            self._agreement = None
        self._course = _GroupCounters(ranks, self._clock())
        return self._course

    def _receive_votes(self, course: _GroupCounters) -> None:
        """Take what all ranks have said in the round before; alone, what this one says now."""
        if course.ranks.world_size == 1:
            course.cost_s, course.durable_s = self._my_costs()
            course.is_current, course.said_after = True, course.saves
            heard: Votes | None = self._votes(course, _NEED)
        else:
            heard = self._agreement.finish_round() if self._agreement is not None else None
        if heard is None:
            return
        if course.said_after == course.saves:
            course.due = course.due or heard.due > 0
            course.is_current = True
        course.cost_s, course.durable_s, course.overdue = heard.cost_s, heard.durable_s, heard.overdue > 0
        if heard.signal > 0 and course.told is None:
            number = int(heard.signal)
            course.told = self._watch.first or SignalNotice(number, self._clock())
            _log.warning("rank %d: %s: the job saves once more, then leaves", course.ranks.rank, signal_name(number))

    def _send_votes(self, course: _GroupCounters, call: int) -> None:
        if self._agreement is not None:
            course.said_after = course.saves
            self._agreement.start_round(self._votes(course, call))

    def _votes(self, course: _GroupCounters, call: int) -> Votes:
        # Until all ranks know what the last save has cost, none of them can judge when the next is due.
        due = course.is_current and any(policy.is_due(self._progress(course)) for policy in self._by_vote)
        first = self._watch.first
        told = course.told or first
        over = told is not None and self._clock() - told.time_s >= self._grace_s
        place = (course.saves << 32) + 2 * course.calls + call  # a float holds whole numbers of 53 bits
        return Votes(due, first.number if first else 0, over, *self._my_costs(), place)

    def _progress(self, course: _GroupCounters) -> Progress:
        cost_s, durable_s = (None if value < 0 else value for value in (course.cost_s, course.durable_s))
        return Progress(course.steps, self._clock() - course.since_s, cost_s, durable_s, course.is_first)

    def _my_costs(self) -> tuple[float, float]:
        cost_s = median(self._costs) if self._costs else self._failed_cost
        return -1.0 if cost_s is None else cost_s, median(self._durables) if self._durables else -1.0

    def _note_durable(self) -> None:
        """Return how long each save took that has become durable since the last call."""
        while self._in_flight and self._in_flight[0][0].done():
            pending, begun_s = self._in_flight.popleft()
            if pending.exception(timeout=0) is None:
                self._durables.append(self._clock() - begun_s)

    def _note_failure(self) -> None:
        """Of a save that never returned, the time counts as its cost while nothing better is known."""
        if self._begun_s is not None:
            self._failed_cost, self._begun_s = self._clock() - self._begun_s, None

    def _await_last_save(self, course: _GroupCounters, told: SignalNotice) -> None:
        """Wait for the last save, as long as there is time, and note what did not become of it."""
        if not course.asked:
            return
        name, last = signal_name(told.number), course.last
        if last is None:
            reason = "the one that was due failed" if course.saved_since else "need_checkpoint() was not heeded"
            self._complaints.append(f"leaving after {name} without a save: {reason}")
            return
        last.captured()
        missing = []
        for tier in course.last_tiers:
            left = max(0.0, told.time_s + self._grace_s - self._clock())
            try:
                last.wait(tier, timeout=left)
            except TimeoutError:
                missing.append(f"{last.version} is not in tier {tier} {self._grace_s:g} s after the signal")
            except CheckpointError as error:
                missing.append(str(error))
        if missing:
            self._complaints.append(f"leaving after {name}: {'; '.join(missing)}")


def _checked_code(exit_code: int) -> int:
    if isinstance(exit_code, bool) or not isinstance(exit_code, int) or not 0 <= exit_code <= 255:
        raise UsageError(f"exit_code: expected a whole number from 0 to 255, found {exit_code!r}")
    return exit_code


def _checked_grace(grace_s: float) -> float:
    fits = isinstance(grace_s, int | float) and not isinstance(grace_s, bool)
    if not (fits and math.isfinite(grace_s) and grace_s >= 0):
        raise UsageError(f"grace_s: expected a number of seconds, 0 or more, found {grace_s!r}")
    return float(grace_s)
