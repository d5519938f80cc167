"""In this process, one task after the other: for debuggers, and for tests."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from evergrad.errors import EvergradError
from evergrad.study.executors.base import Executor, Task, TaskResult, TaskStatus
from evergrad.study.executors.worker import resolve


class InProcess(Executor):
    """Nothing runs before somebody collects. Limits are not kept: nobody is there to keep them."""

    slots = 1

    def __init__(self, folder: Path, perform: str) -> None:
        self._folder, self._perform = folder, resolve(perform)
        self._waiting: deque[Task] = deque()

    def submit(self, task: Task) -> None:
        """Keep it for later."""
        self._waiting.append(task)

    def collect(self, wait_s: float) -> list[TaskResult]:
        """Do the oldest task."""
        if not self._waiting:
            return []
        task = self._waiting.popleft()
        try:
            return [TaskResult(task.id, TaskStatus.DONE, self._perform(self._folder, task.work))]
        except EvergradError as error:
            return [TaskResult(task.id, TaskStatus.BROKEN, reason=str(error))]
        except Exception as error:
            return [TaskResult(task.id, TaskStatus.BROKEN, reason=f"{type(error).__name__}: {error}")]

    def close(self) -> None:
        """Forget what was not done."""
        self._waiting.clear()
