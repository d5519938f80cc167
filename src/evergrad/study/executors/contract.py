"""Where trials run: a few tasks at a time, on processes of this machine or of a cluster.

A task is a JSON object, and so is its result: nothing else crosses, so that any cluster will do. The work is done by
one function, named `module:function`, that takes the study's folder and the task and gives the result. A worker keeps
whatever that function keeps between calls; this is what makes trials cheap.

Rules for executors:

- Every submitted task is collected once: done, broken, overtime or lost. A lost one may have run, even to its end.
- A worker that dies takes only the task it was at with it; another takes its place.
- Workers end with whoever holds the executor, however that ends, SIGKILL too: by the kernel on one machine, on a
  cluster by a connection or a heartbeat that stops.
- `close` ends what runs, and may be called twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, Self

from evergrad.errors import EvergradError
from evergrad.records import Json


class Fate(StrEnum):
    """What became of a task."""

    DONE = "done"
    BROKEN = "broken"
    """The function raised an error: it would again, so this is for a person."""
    OVERTIME = "overtime"
    """It took longer than its limit and was ended."""
    LOST = "lost"
    """Its worker is gone."""


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work."""

    id: str
    work: Mapping[str, Json]
    limit_s: float | None = None
    processes: int = 1
    """That the work starts by itself: a cluster reserves as many cores."""

    def to_json(self) -> dict[str, Json]:
        """As a worker on another machine is told of it."""
        return {"id": self.id, "work": dict(self.work), "limit_s": self.limit_s}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Task:
        """Back from `to_json`."""
        return cls(told["id"], told["work"], told["limit_s"])


@dataclass(frozen=True, slots=True)
class Ended:
    """A task that is over."""

    id: str
    fate: Fate
    result: Mapping[str, Json] | None = None
    """Of a task that is done."""
    reason: str = ""
    """Of any other: one line, whatever it is made of."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", str(EvergradError(self.reason)))

    def to_json(self) -> dict[str, Json]:
        """As a worker on another machine tells it."""
        result = None if self.result is None else dict(self.result)
        return {"id": self.id, "fate": str(self.fate), "result": result, "reason": self.reason}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Ended:
        """Back from `to_json`; KeyError or ValueError if it is something else."""
        return cls(told["id"], Fate(told["fate"]), told["result"], str(told["reason"]))


class Executor(ABC):
    """Runs tasks. One thread uses it."""

    slots: int
    """How many tasks it runs at once; submit more, twice as many, to keep it busy."""

    @abstractmethod
    def submit(self, task: Task) -> None:
        """Take a task; returns at once."""

    @abstractmethod
    def collect(self, wait_s: float) -> list[Ended]:
        """What is over by now; waits for a first one, but not longer than this."""

    @abstractmethod
    def close(self) -> None:
        """End everything, finished or not."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
