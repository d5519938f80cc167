"""Workers of a Dask cluster: one that exists, on any number of machines, or one of this machine's own.

Dask carries tasks and results, both as JSON texts. The work itself is done by a child of each Dask worker, the same
process as on a single machine: a task that crashes or runs over its limit takes the child with it, never the Dask
worker, and children of several threads share nothing. A child ends with its Dask worker; when whoever asked for the
task is gone, so is the child, and an idle one ends a while later.

Dask's own protocol pickles between client, scheduler and workers, and trusts whoever can reach them: that is the
concern of whoever runs the cluster. A cluster of this machine's own listens on the loopback address alone.

Where a Dask worker dies, its task is lost. A scheduler that is not ours may run it again before it says so, as often as
its `allowed-failures` says; it is collected once all the same.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import queue
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import Any

from evergrad.errors import UsageError
from evergrad.study.executors.base import Executor, Task, TaskResult, TaskStatus
from evergrad.study.executors.local import LocalProcesses
from evergrad.wording import install_hint, short_repr

_ANSWER_S = 10.0
_WORKERS_S = 60.0
_COUNT_S = 5.0
_LOOK_S = 0.2
_LINGER_S = 60.0


class DaskCluster(Executor):
    """The cluster of a scheduler, `tcp://host:port`, or as many processes here as cores.

    Workers must see the study's folder under the same path, and must have Evergrad.
    """

    def __init__(
        self,
        folder: Path,
        perform: str,
        *,
        scheduler: str | None = None,
        workers: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Workers: how many to start, or to wait for where there is a scheduler."""
        distributed = _distributed()
        if workers is not None and workers < 1:
            raise UsageError(f"workers: expected at least 1, found {workers}")
        self._owner = uuid.uuid4().hex
        self._told = (self._owner, str(Path(folder).absolute()), perform, dict(environment or {}))
        self._waiting: deque[Task] = deque()
        self._under_way: dict[str, Any] = {}
        self._ended: queue.SimpleQueue[TaskResult] = queue.SimpleQueue()
        self._is_closed = False
        self._cluster: Any = None
        if scheduler is None:
            workers = workers or len(os.sched_getaffinity(0))
            self._cluster = distributed.LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                host="127.0.0.1",
                dashboard_address="127.0.0.1:0",  # None would take port 8787, and complain where another has it
                memory_limit=0,  # the work is not in the process that would be limited
                silence_logs=logging.CRITICAL,  # workers that come and go are our business, and told as what was lost
                scheduler_kwargs={"allowed_failures": 0, "dashboard": False},
            )
        self._address = scheduler or str(self._cluster.scheduler_address)
        try:
            self._client = distributed.Client(self._cluster or scheduler, timeout=_ANSWER_S, set_as_default=False)
        except (OSError, ValueError) as error:
            if self._cluster is not None:
                self._cluster.close()
            raise UsageError(f"{self._address}: no Dask scheduler answers there ({error})") from error
        try:
            self._client.wait_for_workers(workers or 1, timeout=_WORKERS_S)
        except TimeoutError as error:
            self.close()
            raise UsageError(
                f"{self._address}: expected {workers or 1} Dask workers, found fewer after {_WORKERS_S:g} s"
            ) from error
        self.slots = 1
        self._count()

    def submit(self, task: Task) -> None:
        """Take a task; returns at once."""
        if self._is_closed:
            raise UsageError(f"task {short_repr(task.id)}: this executor is closed")
        self._waiting.append(task)
        self._dispatch()

    def collect(self, wait_s: float) -> list[TaskResult]:
        """What is over by now; waits for a first one, if any is under way."""
        ended: list[TaskResult] = []
        if self._is_closed:
            return ended
        with suppress(queue.Empty):
            if self._under_way:
                ended.append(self._ended.get(timeout=max(0.0, wait_s)))
            while True:
                ended.append(self._ended.get_nowait())
        for one in ended:
            self._under_way.pop(one.id, None)
        try:
            self._dispatch()
        except UsageError:
            if not ended:  # else it is said next time
                raise
        return ended

    def close(self) -> None:
        """End everything, finished or not."""
        if self._is_closed:
            return
        self._is_closed = True
        self._waiting.clear()
        with suppress(Exception):  # a scheduler that is gone has ended it all
            self._client.cancel(list(self._under_way.values()))
            self._client.run(dismiss, self._owner, on_error="ignore")
        self._under_way.clear()
        self._client.close()
        if self._cluster is not None:
            self._cluster.close()

    def _dispatch(self) -> None:
        if time.monotonic() - self._counted > _COUNT_S:
            self._count()
        # No more than there are threads: what waits at a worker that dies is lost with it.
        while self._waiting and len(self._under_way) < self.slots:
            task = self._waiting[0]
            text = json.dumps(task.to_json(), allow_nan=False)
            key = f"evergrad-{self._owner}-{uuid.uuid4().hex}"
            if self._client.status not in ("running", "connecting"):  # it would wait for ever
                raise UsageError(
                    f"{self._address}: the Dask scheduler is gone. Start it, and the study again: it goes on"
                )
            future = self._client.submit(run, *self._told, text, key=key, pure=False, retries=0)
            self._waiting.popleft()
            self._under_way[task.id] = future
            future.add_done_callback(lambda done, id=task.id: self._ended.put(_task_result(id, done)))

    def _count(self) -> None:
        """Workers come and go."""
        self._counted = time.monotonic()
        if self._client.status == "running":
            with suppress(OSError):  # a scheduler that is away for a moment
                self.slots = max(1, sum(self._client.nthreads().values()))


def run(owner: str, folder: str, perform: str, environment: dict[str, str], text: str) -> str:
    """Do a task; on a Dask worker, which calls this."""
    worker = _distributed().get_worker()
    key = worker.get_current_task()
    task = Task.from_json(json.loads(text))

    def is_wanted() -> bool:
        state = worker.state.tasks.get(key)
        return state is not None and state.state in ("executing", "long-running")

    if not Path(folder).is_dir():
        reason = (
            f"{folder} is not visible on worker {worker.address}: put --out on a file system that all workers share"
        )
        return json.dumps(TaskResult(task.id, TaskStatus.BROKEN, reason=reason).to_json())
    child = _CHILDREN.pop_idle(owner)
    if child is None:
        place = "".join(char if char.isalnum() else "-" for char in str(worker.name))
        name = f"dask-{place}-{_CHILDREN.number(owner)}"
        child = LocalProcesses(Path(folder), perform, workers=1, environment=environment, name=name)
    try:
        child.submit(task)
        while not (ended := child.collect(_LOOK_S)):
            if not is_wanted():
                child.close()
                return json.dumps(TaskResult(task.id, TaskStatus.LOST, reason="nobody waits for it any more").to_json())
    except BaseException:
        child.close()
        raise
    _CHILDREN.give_back(owner, child)
    return json.dumps(ended[0].to_json())


def dismiss(owner: str) -> None:
    """End the idle children of an executor; on a Dask worker."""
    _CHILDREN.dismiss(owner)


class _Children:
    """The idle children of this Dask worker, by whose they are."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[str, dict[LocalProcesses, threading.Timer]] = {}
        self._numbers: Counter[str] = Counter()

    def number(self, owner: str) -> int:
        with self._lock:
            self._numbers[owner] += 1
            return self._numbers[owner]

    def pop_idle(self, owner: str) -> LocalProcesses | None:
        with self._lock:
            idle = self._idle.get(owner)
            if not idle:
                return None
            child, timer = idle.popitem()
        timer.cancel()
        return child

    def give_back(self, owner: str, child: LocalProcesses) -> None:
        # Whoever was killed dismisses nobody.
        timer = threading.Timer(_LINGER_S, self._forget, (owner, child))
        timer.daemon = True
        with self._lock:
            self._idle.setdefault(owner, {})[child] = timer
        timer.start()

    def dismiss(self, owner: str) -> None:
        with self._lock:
            idle = self._idle.pop(owner, {})
        for child, timer in idle.items():
            timer.cancel()
            child.close()

    def _forget(self, owner: str, child: LocalProcesses) -> None:
        with self._lock:
            timer = self._idle.get(owner, {}).pop(child, None)
        if timer is not None:
            child.close()


_CHILDREN = _Children()


def _distributed() -> Any:
    try:
        return importlib.import_module("distributed")
    except ImportError as error:
        raise UsageError(f"a Dask cluster needs distributed: {install_hint('dask')}") from error


def _task_result(id: str, future: Any) -> TaskResult:
    """What became of a task; in a thread of Dask's."""
    try:
        return TaskResult.from_json(json.loads(future.result(timeout=_WORKERS_S)))
    except _distributed().KilledWorker as error:
        return TaskResult(id, TaskStatus.LOST, reason=f"Dask worker {error.last_worker.address} died")
    except (CancelledError, OSError, TimeoutError) as error:
        return TaskResult(id, TaskStatus.LOST, reason=f"Dask has lost it: {getattr(error, 'reason', error)}")
    except Exception as error:
        return TaskResult(id, TaskStatus.BROKEN, reason=f"{type(error).__name__} on a Dask worker: {error}")
