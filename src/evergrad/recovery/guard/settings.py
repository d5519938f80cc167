"""How closely a job is guarded against silent corruption."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from evergrad.errors import UsageError, nearest
from evergrad.records import Json

Healing: TypeAlias = Literal["majority", "verified"]
"""What becomes of replicas that differ: the minority gets the majority's bytes; or all go back to the newest version
that was saved when a check had found all replicas alike."""

_HEALING = ("majority", "verified")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSettings:
    """What `job.guard` was told; checked when it is built."""

    every: int = 50
    """Steps between two checks."""
    norm_factor: float = 10.0
    """A gradient norm beyond this many times the median of the last steps is suspicious."""
    range_factor: float = 10.0
    """A parameter beyond this many times the largest that its tensor ever had at a check is suspicious."""
    heal: Healing = "majority"
    stop: bool = False
    """Whether the job stops when a gradient is not finite, and is not the second time either."""

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise UsageError(f"job.guard(every={self.every!r}): expected a number of steps, 1 or more")
        for name in ("norm_factor", "range_factor"):
            factor = getattr(self, name)
            fits = isinstance(factor, int | float) and not isinstance(factor, bool)
            if not (fits and math.isfinite(factor) and factor > 1):
                raise UsageError(f"job.guard({name}={factor!r}): expected a number greater than 1")
        if self.heal not in _HEALING:
            close = nearest(str(self.heal), _HEALING, 1)
            hint = f". Did you mean {close[0]!r}?" if close else ""
            raise UsageError(f"job.guard(heal={self.heal!r}): expected one of {', '.join(_HEALING)}{hint}")
        if not isinstance(self.stop, bool):
            raise UsageError(f"job.guard(stop={self.stop!r}): expected True or False")

    def to_json(self) -> dict[str, Json]:
        """As the timeline shows them."""
        return {
            "every": self.every,
            "norm_factor": self.norm_factor,
            "range_factor": self.range_factor,
            "heal": self.heal,
            "stop": self.stop,
        }
