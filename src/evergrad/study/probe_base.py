"""What a watcher is: it looks at a training that has a fault, after each step, and alters nothing.

- Every rank has its own, and all are called in the same order: `begin`, `after` each step, `found`. So they may talk to
  each other, by `gather_rows`. What rank 0's `found` says is what is kept.
- The training that is watched ends with the bits of one that is not.
- `end` takes every hook off again, also when the training has raised an error; twice is fine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

from evergrad.study.trials import Series

if TYPE_CHECKING:
    from torch import Tensor

    from evergrad.training.mechanisms.session import Session

GUARDS = ("norm", "range", "replicas", "non-finite", "checkpoint range")
"""The guards that are asked, by the names they have in tables."""
GUARD_EVERY = 10
"""Steps between two checks of `range` and `replicas`. Without being told, a job has 50: more than many trials take."""


@dataclass(frozen=True, slots=True)
class ProbeReadings:
    """What was seen, as an `Observation` has it."""

    spread: Mapping[str, Series] = field(default_factory=dict)
    alarms: Mapping[str, int | None] = field(default_factory=dict)
    costs: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def merge(self, other: ProbeReadings) -> ProbeReadings:
        """Together with what another watcher has seen."""
        return ProbeReadings(
            {**self.spread, **other.spread}, {**self.alarms, **other.alarms}, {**self.costs, **other.costs}
        )


class TrialProbe(ABC):
    """One rank's eyes. See above."""

    @abstractmethod
    def start(self) -> None:
        """The fault has happened, if it is one of the checkpoint; no step has been taken."""

    @abstractmethod
    def after_step(self, step: int, loss: Tensor) -> None:
        """That step, counted from 1, is done; its loss is that of the whole batch."""

    @abstractmethod
    def readings(self) -> ProbeReadings:
        """What was seen; no step follows."""

    @abstractmethod
    def remove_hooks(self) -> None:
        """Take off what was hooked in."""


class TrialProbes:
    """All watchers of a trial, from `with` to its end."""

    def __init__(self, probes: Sequence[TrialProbe] = ()) -> None:
        self._probes = probes

    def start(self) -> None:
        """As `TrialProbe.begin`."""
        for one in self._probes:
            one.start()

    def after_step(self, step: int, loss: Tensor) -> None:
        """As `TrialProbe.after`."""
        for one in self._probes:
            one.after_step(step, loss)

    def readings(self) -> ProbeReadings:
        """What all of them have seen."""
        found = ProbeReadings()
        for one in self._probes:
            found = found.merge(one.readings())
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for one in self._probes:
            one.remove_hooks()


def gather_rows(session: Session, mine: Tensor) -> Tensor:
    """Every rank's numbers, a row each; the same shape and type on all of them."""
    if session.ranks == 1:
        return mine.unsqueeze(0)
    import torch

    rows = [torch.empty_like(mine) for _ in range(session.ranks)]
    torch.distributed.all_gather(rows, mine)
    return torch.stack(rows)
