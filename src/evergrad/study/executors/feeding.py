"""Executors without a thread of their own: whoever submits or collects feeds the workers, and hears what they say.

A task waits here until a worker is free. Workers are started when there is work for them; where none gets ready, after
a few tries, all that waits is broken.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from typing import Generic, TypeVar

from evergrad.errors import UsageError
from evergrad.study.executors.contract import Ended, Executor, Fate, Task
from evergrad.wording import shown

FAILED_STARTS = 3
"""So many workers in a row that do not get ready are enough."""

_Packed = TypeVar("_Packed")
"""A task as workers are sent it."""


class Feeding(Executor, Generic[_Packed]):
    """What such executors have in common."""

    def __init__(self, perform: str, workers_are: str) -> None:
        """`workers_are` is what one worker is called in messages."""
        self._perform, self._workers_are = perform, workers_are
        self._waiting: deque[tuple[Task, _Packed]] = deque()
        self._ended: list[Ended] = []
        self._failed_starts = 0
        self._is_closed = False

    def submit(self, task: Task) -> None:
        """Take a task; returns at once."""
        if self._is_closed:
            raise UsageError(f"task {shown(task.id)}: this executor is closed")
        self._waiting.append((task, self._packed(task)))
        self._feed()

    def collect(self, wait_s: float) -> list[Ended]:
        """What is over by now; waits for a first one, if any is under way."""
        if self._is_closed:
            return []
        until = time.monotonic() + wait_s
        self._listen(0.0)
        while not self._ended and (self._waiting or self._is_busy):
            left = until - time.monotonic()
            if left <= 0:
                break
            self._listen(left)
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """End everything, finished or not."""
        if self._is_closed:
            return
        self._is_closed = True
        self._end()
        self._waiting.clear()
        self._ended.clear()

    @property
    @abstractmethod
    def _is_busy(self) -> bool:
        """Whether a worker is at a task."""

    @property
    @abstractmethod
    def _is_served(self) -> bool:
        """Whether there is a worker that takes tasks."""

    @abstractmethod
    def _packed(self, task: Task) -> _Packed:
        """A task as it will be sent; refused if it cannot be."""

    @abstractmethod
    def _feed(self) -> None:
        """Give free workers what waits, and start more of them if there is work for more."""

    @abstractmethod
    def _listen(self, wait_s: float) -> None:
        """Take in what workers say, waiting for a first word no longer than this; then feed."""

    @abstractmethod
    def _end(self) -> None:
        """End all workers."""

    def _lose(self, task: Task, reason: str) -> None:
        self._ended.append(Ended(task.id, Fate.LOST, reason=reason))

    def _could_not_start(self, why: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= FAILED_STARTS and not self._is_served:
            tried = f"{self._failed_starts} have tried. The last: {why}"
            reason = f"{self._perform}: no {self._workers_are} gets ready, {tried}"
            self._ended += [Ended(task.id, Fate.BROKEN, reason=reason) for task, _ in self._waiting]
            self._waiting.clear()
