"""Worker processes on this machine, each with one task at a time.

No thread (see `base.QueueingExecutor`) and no fork. Descriptors of the runner, the lock of the study's folder among
them, do not
reach the workers. What a worker prints is in `logs/` in the folder.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import time
from collections.abc import Mapping
from pathlib import Path

from evergrad._forkserver import ONE_THREAD
from evergrad._wire import Garbled
from evergrad.errors import UsageError
from evergrad.study.executors.base import FAILED_STARTS, QueueingExecutor, Task, TaskResult, TaskStatus
from evergrad.study.executors.worker_process import WorkerLog, WorkerProcess
from evergrad.wording import short_repr

_START_S = 300.0
"""Importing torch from a slow file system takes minutes; longer than this is a start that hangs."""
_LOOK_S = 1.0
"""How often to look for what no descriptor tells: a worker that died while a fork of it lives, a log that grows."""


class LocalProcesses(QueueingExecutor[bytes]):
    """As many worker processes as cores, started when there is work for them."""

    def __init__(
        self,
        folder: Path,
        perform: str,
        *,
        workers: int | None = None,
        environment: Mapping[str, str] | None = None,
        name: str = "worker",
    ) -> None:
        if workers is not None and workers < 1:
            raise UsageError(f"workers: expected at least 1, found {workers}")
        self.slots = workers or len(os.sched_getaffinity(0))
        super().__init__(perform, "worker")
        self._folder = Path(folder).absolute()
        self._name = name
        self._environment = {**os.environ, **ONE_THREAD, **(environment or {})}
        self._workers: dict[int, WorkerProcess] = {}
        self._logs: dict[int, WorkerLog] = {}
        self._looked = 0.0
        self._selector = selectors.DefaultSelector()

    def _encode(self, task: Task) -> bytes:
        return json.dumps({"id": task.id, "work": dict(task.work)}, allow_nan=False).encode() + b"\n"

    def _stop_workers(self) -> None:
        for worker in self._workers.values():
            worker.end()
        for log in self._logs.values():
            log.close()
        self._selector.close()
        self._workers.clear()

    def _dispatch(self) -> None:
        for worker in list(self._workers.values()):
            if self._waiting and worker.is_ready and worker.task is None:
                task, line = self._waiting[0]
                if self._send(worker, line):
                    self._waiting.popleft()
                    worker.task = task
                    worker.until = math.inf if task.limit_s is None else time.monotonic() + task.limit_s
        starting = sum(not worker.is_ready for worker in self._workers.values())
        for number in range(self.slots):
            # While those that are there do the work, a place that cannot be filled is left empty.
            if starting >= len(self._waiting) or (self._failed_starts >= FAILED_STARTS and self._has_worker):
                break
            if number not in self._workers:
                self._start(number)
                starting += 1

    @property
    def _is_busy(self) -> bool:
        return any(worker.task for worker in self._workers.values())

    @property
    def _has_worker(self) -> bool:
        return any(worker.is_ready for worker in self._workers.values())

    def _start(self, number: int) -> None:
        if number not in self._logs:
            self._logs[number] = WorkerLog(self._folder / "logs" / f"{self._name}-{number}.log")
        until = time.monotonic() + _START_S
        try:
            worker = WorkerProcess(number, self._folder, self._perform, self._logs[number], self._environment, until)
        except OSError as error:  # no more processes, no more memory
            self._count_failed_start(str(error))
            return
        self._workers[number] = worker
        self._selector.register(worker.answers, selectors.EVENT_READ, worker)
        self._send(worker)

    def _send(self, worker: WorkerProcess, line: bytes = b"") -> bool:
        """Whether it can be sent, or is; the rest of a long one follows when the worker reads."""
        is_pending = worker.tasks in self._selector.get_map()
        try:
            is_sent = worker.send(line)
        except BrokenPipeError:
            self._remove_worker(worker)
            return False
        if is_sent and is_pending:
            self._selector.unregister(worker.tasks)
        elif not is_sent and not is_pending:
            self._selector.register(worker.tasks, selectors.EVENT_WRITE, worker)
        return True

    def _poll(self, wait_s: float) -> None:
        nearest = min((worker.until for worker in self._workers.values()), default=math.inf)
        for key, events in self._selector.select(max(0.0, min(wait_s, nearest - time.monotonic(), _LOOK_S))):
            worker: WorkerProcess = key.data
            if self._workers.get(worker.number) is worker:  # else it was buried a moment ago
                if events & selectors.EVENT_WRITE:
                    self._send(worker)
                else:
                    self._receive(worker)
        now = time.monotonic()
        for worker in list(self._workers.values()):
            if worker.until <= now:
                self._enforce_limit(worker)
        if now - self._looked >= _LOOK_S:
            self._looked = now
            for worker in list(self._workers.values()):
                worker.log.trim()
                if worker.is_over:
                    self._receive(worker)
                    self._remove_worker(worker)
        self._dispatch()

    def _receive(self, worker: WorkerProcess) -> None:
        try:
            lines = worker.receive()
            if lines is None:
                self._remove_worker(worker)
            for line in lines or ():
                self._handle_message(worker, line)
        except Garbled as error:
            self._remove_worker(worker, f"{error}")

    def _handle_message(self, worker: WorkerProcess, line: bytes) -> None:
        try:
            told = json.loads(line)
        except ValueError:
            told = None
        if not isinstance(told, dict):
            raise Garbled(f"sent {short_repr(line.decode(errors='replace'))}, which is no answer")
        if told.get("ready") is True and not worker.is_ready:
            worker.is_ready, worker.until = True, math.inf
        elif "unfit" in told and not worker.is_ready:
            self._remove_worker(worker, str(told["unfit"]))
        elif worker.task is not None and told.get("id") == worker.task.id:
            if isinstance(result := told.get("result"), dict):
                ended = TaskResult(worker.task.id, TaskStatus.DONE, result)
            else:
                ended = TaskResult(worker.task.id, TaskStatus.BROKEN, reason=str(told.get("broken")))
            self._ended.append(ended)
            worker.task, worker.until = None, math.inf
            self._failed_starts = 0
        else:
            raise Garbled(f"answered what it was not asked: {short_repr(told)}")

    def _enforce_limit(self, worker: WorkerProcess) -> None:
        if worker.task is None:
            self._remove_worker(worker, f"it was not ready after {_START_S:g} s")
        else:
            task, worker.task = worker.task, None
            self._remove_worker(worker)
            reason = f"task {task.id} took longer than its limit of {task.limit_s:g} s and was ended"
            self._ended.append(TaskResult(task.id, TaskStatus.OVERTIME, reason=reason))

    def _remove_worker(self, worker: WorkerProcess, why: str = "") -> None:
        """End a worker, if it has not ended itself; what becomes of its task, or of all if none can be started."""
        if self._workers.get(worker.number) is not worker:
            return
        del self._workers[worker.number]
        for descriptor in (worker.answers, worker.tasks):
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
        how = worker.end()
        if worker.task is not None:
            self._add_lost(worker.task, f"worker {worker.number} {why or how}; what it printed is in {worker.log.path}")
        elif not worker.is_ready:
            self._count_failed_start(why or f"{how}: {worker.log.last_lines() or 'it printed nothing'}")
