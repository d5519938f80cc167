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

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from evergrad.errors import EvergradError, UsageError
from evergrad.records import Json
from evergrad.wording import short_repr


class TaskStatus(StrEnum):
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
class TaskResult:
    """A task that is over."""

    id: str
    status: TaskStatus
    result: Mapping[str, Json] | None = None
    """Of a task that is done."""
    reason: str = ""
    """Of any other: one line, whatever it is made of."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", str(EvergradError(self.reason)))

    def to_json(self) -> dict[str, Json]:
        """As a worker on another machine tells it."""
        result = None if self.result is None else dict(self.result)
        return {"id": self.id, "fate": str(self.status), "result": result, "reason": self.reason}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> TaskResult:
        """Back from `to_json`; KeyError or ValueError if it is something else."""
        return cls(told["id"], TaskStatus(told["fate"]), told["result"], str(told["reason"]))


class Executor(ABC):
    """Runs tasks. One thread uses it."""

    slots: int
    """How many tasks it runs at once; submit more, twice as many, to keep it busy."""

    @abstractmethod
    def submit(self, task: Task) -> None:
        """Take a task; returns at once."""

    @abstractmethod
    def collect(self, wait_s: float) -> list[TaskResult]:
        """What is over by now; waits for a first one, but not longer than this."""

    @abstractmethod
    def close(self) -> None:
        """End everything, finished or not."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


# Executors without a thread of their own: whoever submits or collects feeds the workers, and hears what they say.
#
# A task waits here until a worker is free. Workers are started when there is work for them; where none gets ready,
# after a few tries, all that waits is broken.

FAILED_STARTS = 3
"""So many workers in a row that do not get ready are enough."""

_EncodedTask = TypeVar("_EncodedTask")
"""A task as workers are sent it."""


class QueueingExecutor(Executor, Generic[_EncodedTask]):
    """What such executors have in common."""

    def __init__(self, perform: str, workers_are: str) -> None:
        """`workers_are` is what one worker is called in messages."""
        self._perform, self._workers_are = perform, workers_are
        self._waiting: deque[tuple[Task, _EncodedTask]] = deque()
        self._ended: list[TaskResult] = []
        self._failed_starts = 0
        self._is_closed = False

    def submit(self, task: Task) -> None:
        """Take a task; returns at once."""
        if self._is_closed:
            raise UsageError(f"task {short_repr(task.id)}: this executor is closed")
        self._waiting.append((task, self._encode(task)))
        self._dispatch()

    def collect(self, wait_s: float) -> list[TaskResult]:
        """What is over by now; waits for a first one, if any is under way."""
        if self._is_closed:
            return []
        until = time.monotonic() + wait_s
        self._poll(0.0)
        while not self._ended and (self._waiting or self._is_busy):
            left = until - time.monotonic()
            if left <= 0:
                break
            self._poll(left)
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """End everything, finished or not."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stop_workers()
        self._waiting.clear()
        self._ended.clear()

    @property
    @abstractmethod
    def _is_busy(self) -> bool:
        """Whether a worker is at a task."""

    @property
    @abstractmethod
    def _has_worker(self) -> bool:
        """Whether there is a worker that takes tasks."""

    @abstractmethod
    def _encode(self, task: Task) -> _EncodedTask:
        """A task as it will be sent; refused if it cannot be."""

    @abstractmethod
    def _dispatch(self) -> None:
        """Give free workers what waits, and start more of them if there is work for more."""

    @abstractmethod
    def _poll(self, wait_s: float) -> None:
        """Take in what workers say, waiting for a first word no longer than this; then feed."""

    @abstractmethod
    def _stop_workers(self) -> None:
        """End all workers."""

    def _add_lost(self, task: Task, reason: str) -> None:
        self._ended.append(TaskResult(task.id, TaskStatus.LOST, reason=reason))

    def _count_failed_start(self, why: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= FAILED_STARTS and not self._has_worker:
            tried = f"{self._failed_starts} have tried. The last: {why}"
            reason = f"{self._perform}: no {self._workers_are} gets ready, {tried}"
            self._ended += [TaskResult(task.id, TaskStatus.BROKEN, reason=reason) for task, _ in self._waiting]
            self._waiting.clear()
