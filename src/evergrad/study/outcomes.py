"""What a trial's observation means: one outcome, the first of a scale that applies; thresholds are stated."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import StrEnum

from evergrad.errors import UsageError
from evergrad.records import Json
from evergrad.study.trials import End, Observation
from evergrad.training.settings import Direction
from evergrad.wording import checked_choice, shown


class Outcome(StrEnum):
    """A trial's verdict against the golden run, the worst first."""

    NEV = "nev"
    """A NaN, an infinity or an extreme value was seen in state, loss or outputs."""
    FAILED = "failed"
    """It stayed finite and crashed, never finished, or ended at chance level."""
    DEGRADED = "degraded"
    """It finished, with a metric worse than the golden run's by more than the margin."""
    CHANGED = "changed"
    """It finished with another result, and none of the above applies."""
    IDENTICAL = "identical"
    """It finished with the golden run's result."""
    UNKNOWN = "unknown"
    """Its worker was lost for reasons of ours; it runs again."""


SCALE = tuple(Outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Where one outcome ends and the next begins; every table says them."""

    margin: float = 0.02
    """Degraded: the metric is worse than the golden run's by more than this; its direction says which way that is."""
    chance: float = 0.05
    """At chance level: the metric is not better than guessing by more than this, and the golden run's is."""
    result: str = "metric"
    """What makes a training identical: the final `metric`, as the published studies compare, or every bit of the
    final `weights`."""

    def __post_init__(self) -> None:
        for name in ("margin", "chance"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise UsageError(f"{name}: expected a number, 0 or more, found {shown(value)}")
        checked_choice("result", self.result, ("metric", "weights"))

    def to_json(self) -> dict[str, Json]:
        """Every threshold by its name."""
        return asdict(self)


def judge(
    seen: Observation,
    golden: Observation,
    thresholds: Thresholds | None = None,
    *,
    chance: float | None = None,
    direction: Direction = Direction.HIGHER,
) -> Outcome:
    """The verdict on what was seen, against the golden run and the metric of one who guesses."""
    limits = thresholds or Thresholds()
    sign = direction.sign
    if seen.end is End.LOST:
        return Outcome.UNKNOWN
    if seen.nonfinite_at is not None or seen.extreme_at is not None:
        return Outcome.NEV
    if seen.end in (End.CRASHED, End.OVERTIME) or not seen.metrics:
        return Outcome.FAILED
    final, reference = seen.metrics[-1], golden.metrics[-1]
    if not math.isfinite(final):
        return Outcome.NEV
    if chance is not None and sign * final <= sign * chance + limits.chance < sign * reference:
        return Outcome.FAILED
    if sign * final < sign * reference - limits.margin:
        return Outcome.DEGRADED
    if limits.result == "weights" and seen.digest != golden.digest:
        return Outcome.CHANGED
    # Without training the result is what the model says, sample by sample.
    inferred = len(golden.metrics) == 1 and bool(seen.mismatches)
    return Outcome.CHANGED if final != reference or inferred else Outcome.IDENTICAL
