"""Executors: the contract over each of them, and what is theirs alone."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from evergrad.errors import UsageError
from evergrad.study.executors import dask
from evergrad.study.executors.base import Executor, Task, TaskResult, TaskStatus
from evergrad.study.executors.dask import DaskCluster
from evergrad.study.executors.local import LocalProcesses
from evergrad.study.executors.worker import resolve
from evergrad.study.executors.worker_process import WorkerLog
from evergrad.testing import ExecutorContract

REHEARSAL = "evergrad.study.executors.selftest:perform"


class TestLocalProcesses(ExecutorContract):
    executor = "evergrad.study.executors.local:LocalProcesses"
    options = {"workers": 2}  # noqa: RUF012


class TestDaskCluster(ExecutorContract):
    executor = "evergrad.study.executors.dask:DaskCluster"
    options = {"workers": 2}  # noqa: RUF012

    def test_it_listens_on_loopback_alone(self) -> None:
        self.shared()
        here = psutil.Process()
        found = {
            link.laddr.ip
            for process in (here, *here.children(recursive=True))
            for link in process.net_connections("inet")
            if link.status == psutil.CONN_LISTEN
        }
        assert found == {"127.0.0.1"}

    def test_a_cluster_of_others_is_used_and_left_alone(self) -> None:
        alive = self._alive()
        with DaskCluster(Path(self._folder.name), REHEARSAL, scheduler=self.shared()._address) as guest:
            assert guest.slots == 2
            stay = {"do": "stay", "pipe": "alive"}
            assert {one.status for one in run(guest, ECHO, {**stay, "inside": "nothing"})} == {TaskStatus.DONE}
            assert alive.await_lines(1)
            guest.submit(Task("busy", {**stay, "inside": "command"}))
            assert alive.await_lines(1)
        alive.await_end()
        assert self.ended(Task("still", ECHO))["still"].status is TaskStatus.DONE

    def test_a_folder_that_workers_do_not_see_is_named(self, tmp_path: Path) -> None:
        with DaskCluster(tmp_path / "nowhere", REHEARSAL, scheduler=self.shared()._address) as guest:
            (ended,) = run(guest, ECHO)
        assert ended.status is TaskStatus.BROKEN
        assert f"{tmp_path}/nowhere is not visible on worker tcp://127.0.0.1" in ended.reason
        assert "share" in ended.reason

    def test_a_task_is_lost_with_its_dask_worker_and_another_takes_its_place(self) -> None:
        found = self.ended(Task("killer", {"do": "parent"}), *(Task(f"t{i}", ECHO) for i in range(3)))
        assert found["killer"].status is TaskStatus.LOST
        assert "Dask worker tcp://127.0.0.1" in found["killer"].reason
        assert {found[f"t{i}"].status for i in range(3)} == {TaskStatus.DONE}

    def test_closing_ends_every_worker(self, capfd: pytest.CaptureFixture[str]) -> None:
        super().test_closing_ends_every_worker()
        assert capfd.readouterr() == ("", "")


ECHO = {"do": "echo", "value": 1}


def run(executor: Executor, *works: dict[str, Any], limit_s: float | None = None) -> list[TaskResult]:
    for number, work in enumerate(works):
        executor.submit(Task(str(number), work, limit_s))
    ended: list[TaskResult] = []
    while len(ended) < len(works):
        ended += executor.collect(1.0)
    return sorted(ended, key=lambda one: one.id)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalProcesses]:
    folder, environment = tmp_path_factory.mktemp("study"), {"MKL_NUM_THREADS": "3"}
    with LocalProcesses(folder, "executor_work:perform", workers=1, environment=environment) as executor:
        yield executor


def test_a_worker_has_none_of_the_runners_descriptors_and_leads_its_session(
    local: LocalProcesses, tmp_path: Path
) -> None:
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(lock, True)
    (ended,) = run(local, {"do": "describe"})
    os.close(lock)
    assert ended.result is not None
    assert str(tmp_path / "lock") not in ended.result["opened"]
    assert ended.result["leads"] is True


def test_a_worker_computes_with_one_thread_unless_told_otherwise(local: LocalProcesses) -> None:
    (ended,) = run(local, {"do": "describe"})
    assert ended.result is not None
    assert ended.result["environment"]["OMP_NUM_THREADS"] == "1"
    assert ended.result["environment"]["MKL_NUM_THREADS"] == "3"


def test_what_workers_print_is_in_the_folder(local: LocalProcesses, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(local, {"do": "print"})[0].status is TaskStatus.DONE
    assert "to stdout\nto stderr\n" in (local._folder / "logs" / "worker-0.log").read_text()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("work", "said"),
    [
        ({"do": "crash"}, "worker 0 ended with SIGSEGV"),
        ({"do": "fork"}, "worker 0 ended with exit code 3"),
        ({"do": "babble", "text": "{]\n"}, "worker 0 sent '{]', which is no answer"),
        ({"do": "babble", "text": '{"id": "another"}\n'}, "worker 0 answered what it was not asked"),
    ],
)
def test_how_a_worker_was_lost_is_said(local: LocalProcesses, work: dict[str, Any], said: str) -> None:
    (ended,) = run(local, work)
    assert ended.status is TaskStatus.LOST
    assert said in ended.reason
    assert "logs/worker-0.log" in ended.reason


@pytest.mark.parametrize(
    ("work", "said"),
    [
        ({"do": "leave"}, "SystemExit at "),
        ({"do": "give", "what": "nan"}, "not JSON compliant"),
        ({"do": "give", "what": "list"}, "expected a JSON object as the result, found []"),
        ({"do": "give", "what": "long"}, "is too long"),
    ],
)
def test_work_that_gives_no_result_is_broken(local: LocalProcesses, work: dict[str, Any], said: str) -> None:
    (ended,) = run(local, work)
    assert ended.status is TaskStatus.BROKEN
    assert said in ended.reason


def test_a_log_keeps_the_latest_and_stays_small(tmp_path: Path) -> None:
    log = WorkerLog(tmp_path / "logs" / "worker-0.log")
    os.write(log.descriptor, b"early\n" + b"." * (3 << 20) + b"\nlate\n")
    log.trim()
    os.write(log.descriptor, b"later\n")
    log.close()
    text = log.path.read_bytes()
    assert len(text) < 1 << 20
    assert b"early" not in text
    assert text.endswith(b"\nlate\nlater\n")


@pytest.mark.parametrize(
    ("perform", "said"),
    [
        ("no_such_module:perform", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("executor_crash:perform", "ended with exit code 7: libdevice.so: no such device"),
    ],
)
def test_work_that_no_worker_can_begin_is_broken_and_not_tried_for_ever(
    tmp_path: Path, perform: str, said: str
) -> None:
    with LocalProcesses(tmp_path, perform, workers=1) as executor:
        found = run(executor, ECHO, ECHO)
    assert {one.status for one in found} == {TaskStatus.BROKEN}
    for one in found:
        assert "no worker gets ready, 3 have tried" in one.reason
        assert said in one.reason


def test_a_function_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="executor_work:missing: module executor_work has no function 'missing'"):
        resolve("executor_work:missing")
    with pytest.raises(UsageError, match="expected module:function, found 'executor_work'"):
        resolve("executor_work")


def test_a_closed_executor_takes_nothing(tmp_path: Path) -> None:
    executor = LocalProcesses(tmp_path, REHEARSAL)
    executor.close()
    with pytest.raises(UsageError, match="closed"):
        executor.submit(Task("late", ECHO))
    with pytest.raises(UsageError, match="workers: expected at least 1, found 0"):
        LocalProcesses(tmp_path, REHEARSAL, workers=0)


def test_a_scheduler_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask, "_ANSWER_S", 0.2)
    with pytest.raises(UsageError, match=r"tcp://127\.0\.0\.1:9: no Dask scheduler answers there"):
        DaskCluster(tmp_path, REHEARSAL, scheduler="tcp://127.0.0.1:9")


def test_an_idle_child_that_nobody_dismisses_ends_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    class Child:
        closed = threading.Event()

        def close(self) -> None:
            self.closed.set()

    children, child = dask._Children(), Child()
    children.give_back("someone", child)
    assert children.pop_idle("another") is None
    assert children.pop_idle("someone") is child
    monkeypatch.setattr(dask, "_LINGER_S", 0.0)
    children.give_back("someone", child)
    assert child.closed.wait(30)
    assert children.pop_idle("someone") is None


def test_without_dask_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UsageError, match=r"pip install .*\[dask\]"):
        DaskCluster(tmp_path, REHEARSAL)


def test_what_became_of_a_task_is_one_line_and_survives_the_way_between_machines() -> None:
    ended = TaskResult("t1", TaskStatus.LOST, reason="gone\n\x1b[31m" + "x" * 1000)
    assert ended.reason.isprintable()
    assert len(ended.reason) <= 600
    for one in (ended, TaskResult("t2", TaskStatus.DONE, {"value": [1, None]})):
        assert TaskResult.from_json(json.loads(json.dumps(one.to_json()))) == one
    task = Task("t3", {"do": "echo"}, 2.5)
    assert Task.from_json(json.loads(json.dumps(task.to_json()))) == task
