"""When a checkpoint is due: pure decisions on numbers that somebody else has measured.

A policy is anything with `is_due(progress)`. It is asked at each `need_checkpoint()`, on every rank; if any rank finds
that it is due, all save. The costs in `Progress` are the largest of all ranks, the same on each.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, final, runtime_checkable

from evergrad.errors import UsageError


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
