"""What every executor promises, as a test suite that pytest runs over any of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, ClassVar

from evergrad.study.executors.base import Executor, Task, TaskResult, TaskStatus
from evergrad.study.executors.worker import resolve

_PERFORM = "evergrad.study.executors.selftest:perform"
_PATIENCE_S = 60.0

_RUNNER = """
import json, sys
path, made_by, folder, options, perform = json.loads(sys.argv[1])
sys.path[:] = path
from pathlib import Path
from evergrad.study.executors.base import Task
from evergrad.study.executors.worker import resolve
executor = resolve(made_by)(Path(folder), perform, **options)
for number in range(executor.slots):
    executor.submit(Task(str(number), {"do": "stay", "pipe": "alive", "inside": ("command", "call")[number % 2]}))
while True:
    executor.collect(60)
"""


class ExecutorContract:
    """Subclass it, say which executor and with what it is made, and let pytest collect it.

    >>> class TestLocalProcesses(ExecutorContract):
    ...     executor = "evergrad.study.executors.local:LocalProcesses"
    ...     options = {"workers": 2}
    """

    executor: ClassVar[str]
    """`module:Class`; it is made with a folder, the name of the work's function, and the options."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Numbers and texts; with them it must run two tasks at once."""

    _folder: ClassVar[tempfile.TemporaryDirectory[str] | None] = None
    _shared: ClassVar[Executor | None] = None

    @classmethod
    def shared(cls) -> Executor:
        """One for all the tests, whatever happened to its workers in those before."""
        if cls._shared is None:
            cls._folder = tempfile.TemporaryDirectory()
            cls._shared = resolve(cls.executor)(Path(cls._folder.name), _PERFORM, **cls.options)
        return cls._shared

    @classmethod
    def teardown_class(cls) -> None:
        """As pytest calls it after the last test."""
        if cls._shared is not None and cls._folder is not None:
            cls._shared.close()
            cls._folder.cleanup()
        cls._shared = cls._folder = None

    @classmethod
    def ended(cls, *tasks: Task) -> dict[str, TaskResult]:
        """Submit them and wait for all: by id, each once."""
        executor = cls.shared()
        for task in tasks:
            executor.submit(task)
        found: list[TaskResult] = []
        until = time.monotonic() + _PATIENCE_S
        while len(found) < len(tasks):
            assert time.monotonic() < until, f"of {len(tasks)} tasks only {len(found)} were ever over: {found}"
            found += executor.collect(1.0)
        found += executor.collect(0.0)
        assert sorted(one.id for one in found) == sorted(task.id for task in tasks)
        return {one.id: one for one in found}

    def test_every_task_is_collected_once_with_what_its_work_gives(self) -> None:
        """More tasks than workers; their results are JSON, whatever is in it."""
        values: list[Any] = [None, "ä\n✓", [1, {"a": 0.1}], 1 << 60, {"deep": [[]]}, "long" * 100_000]
        found = self.ended(*(Task(f"t{i}", {"do": "echo", "value": value}) for i, value in enumerate(values)))
        assert self._folder is not None
        for i, value in enumerate(values):
            ended = found[f"t{i}"]
            assert (ended.status, ended.reason) == (TaskStatus.DONE, "")
            assert ended.result is not None
            assert ended.result["value"] == value
            assert ended.result["folder"] == self._folder.name

    def test_what_a_worker_keeps_is_there_for_its_next_task(self) -> None:
        """The processes are few, and each has counted its tasks."""
        count = 4 * self.shared().slots
        found = self.ended(*(Task(f"t{i}", {"do": "echo", "value": i}) for i in range(count)))
        results = [ended.result for ended in found.values() if ended.result is not None]
        assert len(results) == count
        assert len({result["process"] for result in results}) <= self.shared().slots
        assert len({(result["process"], result["count"]) for result in results}) == count

    def test_an_error_is_told_with_its_text(self) -> None:
        """Of one that was raised on purpose the text alone; of any other its kind and place too."""
        found = self.ended(
            Task("ours", {"do": "refuse", "text": "no such layer"}),
            Task("other", {"do": "fail", "text": "bad\nshape"}),
            Task("fine", {"do": "echo", "value": 1}),
        )
        assert found["ours"] == TaskResult("ours", TaskStatus.BROKEN, None, "no such layer")
        assert found["other"].status is TaskStatus.BROKEN
        for part in ("ValueError", "selftest.py:", r"bad\nshape"):
            assert part in found["other"].reason
        assert found["fine"].status is TaskStatus.DONE

    def test_a_worker_that_dies_takes_only_its_own_task_along(self) -> None:
        """Those of others, and those that wait, are done."""
        echoes = [Task(f"t{i}", {"do": "echo", "value": i}) for i in range(4)]
        found = self.ended(*echoes[:2], Task("killed", {"do": "die", "signal": "SIGKILL"}), *echoes[2:])
        assert found["killed"].status is TaskStatus.LOST
        assert "SIGKILL" in found["killed"].reason
        assert {found[task.id].status for task in echoes} == {TaskStatus.DONE}

    def test_a_task_over_its_limit_is_ended_with_all_it_has_started(self) -> None:
        """Nothing of it is left, and the next task is done."""
        alive = self._alive()
        stay = {"do": "stay", "pipe": "alive", "inside": "command"}
        found = self.ended(Task("long", stay, 0.2), Task("next", {"do": "echo", "value": 1}))
        assert found["long"].status is TaskStatus.OVERTIME
        assert "0.2 s" in found["long"].reason
        assert found["next"].status is TaskStatus.DONE
        alive.await_end()

    def test_closing_ends_every_worker(self) -> None:
        """At work or idle, with what they have started; closing twice is fine."""
        executor = self.shared()
        alive = self._alive()
        self.ended(Task("idle", {"do": "stay", "pipe": "alive", "inside": "nothing"}))
        assert alive.await_lines(1)
        executor.submit(Task("busy", {"do": "stay", "pipe": "alive", "inside": "command"}))
        while not alive.await_lines(1, 0.0):
            assert executor.collect(0.05) == []
        executor.close()
        alive.await_end()
        executor.close()
        assert executor.collect(0.0) == []
        self.teardown_class()

    def test_workers_end_with_a_runner_that_is_killed(self, tmp_path: Path) -> None:
        """By SIGKILL, so nobody has closed anything; and even in a call that lets nothing else of Python run."""
        alive = _WorkersPipe(tmp_path)
        told = json.dumps([sys.path, self.executor, str(tmp_path), dict(self.options), _PERFORM])
        command = [sys.executable, "-c", _RUNNER, told]
        with (
            open(tmp_path / "said", "wb") as said,
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said) as runner,
        ):
            try:
                assert alive.await_lines(2), (tmp_path / "said").read_text()
            finally:
                runner.kill()
        alive.await_end()

    @classmethod
    def _alive(cls) -> _WorkersPipe:
        cls.shared()
        assert cls._folder is not None
        return _WorkersPipe(Path(cls._folder.name))


class _WorkersPipe:
    """A named pipe that workers hold open: it ends when the last of them does."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "alive"
        self._path.unlink(missing_ok=True)
        os.mkfifo(self._path)
        self._pipe = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)

    def await_lines(self, count: int, wait_s: float = _PATIENCE_S) -> bool:
        """Whether so many more workers have opened it by then."""
        found = b""
        while found.count(b"\n") < count and wait([self._pipe], wait_s):
            found += os.read(self._pipe, 1000)
        return found.count(b"\n") >= count

    def await_end(self) -> None:
        """Until none has."""
        os.close(os.open(self._path, os.O_WRONLY))  # what nobody has ever opened has no end either
        while wait([self._pipe], _PATIENCE_S):
            if not os.read(self._pipe, 1000):
                os.close(self._pipe)
                return
        raise AssertionError("a worker, or what it has started, is still there")
