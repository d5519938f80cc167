"""Slurm jobs as workers, with submitit's own processes in Slurm's place; tests/slurm has a real one."""

from __future__ import annotations

import os
import signal
import socket
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from evergrad._wire import Garbled, Secret, Wire
from evergrad.errors import EvergradError, UsageError
from evergrad.study.executors import base, listener, slurm
from evergrad.study.executors.base import Task, TaskResult, TaskStatus
from evergrad.study.executors.listener import WorkerListener
from evergrad.study.executors.slurm import SlurmCluster
from evergrad.study.executors.slurm_worker import LEAVE_SIGNAL, SlurmWorkerSettings, serve
from evergrad.testing import ExecutorContract

REHEARSAL = "evergrad.study.executors.selftest:perform"
ECHO = {"do": "echo", "value": 1}


class TestSlurmCluster(ExecutorContract):
    executor = "evergrad.study.executors.slurm:SlurmCluster"
    options = {"jobs": 2, "cluster": "local"}  # noqa: RUF012

    def test_a_task_is_lost_with_its_job_and_another_takes_its_place(self) -> None:
        found = self.ended(Task("killer", {"do": "parent"}), *(Task(f"t{i}", ECHO) for i in range(3)))
        assert found["killer"].status is TaskStatus.LOST
        for part in ("Slurm job ", "its connection has ended", "logs/slurm-"):
            assert part in found["killer"].reason
        assert {found[f"t{i}"].status for i in range(3)} == {TaskStatus.DONE}

    def test_all_that_is_pickled_is_where_only_its_user_may_go(self) -> None:
        self.ended(Task("one", ECHO))
        assert self._folder is not None
        private = Path(self._folder.name) / "slurm"
        (run,) = private.iterdir()
        assert {stat.S_IMODE(path.stat().st_mode) for path in (private, run)} == {0o700}
        assert stat.S_IMODE((run / "order.json").stat().st_mode) == 0o600
        pickles = list(Path(self._folder.name).rglob("*.pkl"))
        assert pickles
        assert {path.parent for path in pickles} == {run}


def run(executor: SlurmCluster, *works: dict[str, Any]) -> list[TaskResult]:
    for number, work in enumerate(works):
        executor.submit(Task(str(number), work))
    ended: list[TaskResult] = []
    until = time.monotonic() + 60
    while len(ended) < len(works):
        assert time.monotonic() < until, ended
        ended += executor.collect(1.0)
    return ended


@pytest.fixture
def slurm_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Commands of Slurm's that say what a test lets them say; what they were told is in `told`."""
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "_LOOK_S", 0.01)
    monkeypatch.setattr(slurm, "_AGAIN_S", 0.01)

    def says(**scripts: str) -> Path:
        for name in ("sbatch", "srun", "squeue", "scancel"):
            script = f'#!/bin/sh\necho "{name} $*" >> {tools}/told\n{scripts.get(name, "")}\n'
            (tools / name).write_text(script)
            (tools / name).chmod(0o755)
        return tools / "told"

    return says


def test_a_job_that_slurm_does_not_take_is_told_in_its_words(slurm_says: Any, tmp_path: Path) -> None:
    slurm_says(sbatch="echo 'sbatch: error: invalid partition specified: nope' >&2; exit 1")
    with SlurmCluster(tmp_path / "out", REHEARSAL, jobs=2, partition="nope") as executor:
        found = run(executor, ECHO, ECHO)
    for one in found:
        assert one.status is TaskStatus.BROKEN
        assert "no Slurm job gets ready, 3 have tried" in one.reason
        assert "invalid partition specified: nope" in one.reason
        assert "\n" not in one.reason


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("FAILED|NonZeroExitCode", "FAILED (NonZeroExitCode)"),
        ("PENDING|PartitionTimeLimit", "PENDING (PartitionTimeLimit)"),
    ],
)
def test_jobs_that_never_get_ready_are_given_up_with_what_slurm_says(
    slurm_says: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str, said: str
) -> None:
    monkeypatch.setattr(base, "FAILED_STARTS", 1)
    told = slurm_says(sbatch="echo Submitted batch job 7", squeue=f"echo '7|{row}'")
    with SlurmCluster(tmp_path / "out", REHEARSAL, cpus=3, options={"account": "physics"}) as executor:
        (ended,) = run(executor, ECHO)
        script = next((tmp_path / "out").rglob("*submission*.sh")).read_text()
    assert ended.status is TaskStatus.BROKEN
    assert f"Slurm job 7: {said}" in ended.reason
    for line in ("--account=physics", "--cpus-per-task=3", "--no-requeue", "--signal=USR2@300", "--time=60"):
        assert f"#SBATCH {line}" in script
    assert "scancel --quiet 7" in told.read_text()


def test_jobs_of_a_killed_runner_are_cancelled_by_the_next_and_those_of_a_living_one_are_not(
    slurm_says: Any, tmp_path: Path
) -> None:
    told = slurm_says()
    left = tmp_path / "out" / "slurm" / "evergrad-00ff"
    left.mkdir(parents=True)
    with SlurmCluster(tmp_path / "out", REHEARSAL), SlurmCluster(tmp_path / "out", REHEARSAL):
        assert told.read_text() == "scancel --quiet --name=evergrad-00ff\n"
        assert len(list(left.parent.iterdir())) == 2
    assert not list(left.parent.iterdir())


def test_a_folder_that_others_may_enter_holds_no_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slurm").mkdir(0o777)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "chmod", lambda *_: None)  # a file system that knows no such thing
        with pytest.raises(UsageError, match="expected a folder that only you may enter, found drwx"):
            SlurmCluster(tmp_path, REHEARSAL, cluster="local")
    (tmp_path / "slurm").rmdir()
    (tmp_path / "slurm").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="expected a folder that only you may enter"):
        SlurmCluster(tmp_path, REHEARSAL, cluster="local")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"jobs": 0}, "jobs: expected at least 1, found 0"),
        ({"minutes": 1}, "minutes: expected at least 2, found 1"),
        ({"cpus": 0}, "cpus: expected at least 1, found 0"),
        ({"cluster": "cloud"}, "cluster: expected slurm or local"),
        ({"options": {"account": "a\n#SBATCH --uid=0"}}, "options: expected names and values of sbatch's"),
        ({"host": "203.0.113.7", "cluster": "slurm"}, "host: cannot listen on '203.0.113.7'"),
    ],
)
def test_what_cannot_be_asked_for_is_named(slurm_says: Any, tmp_path: Path, options: dict[str, Any], said: str) -> None:
    slurm_says()
    with pytest.raises(UsageError, match=said):
        SlurmCluster(tmp_path / "out", REHEARSAL, **({"cluster": "local"} | options))


def test_a_task_with_more_processes_than_a_job_has_cpus_is_refused(tmp_path: Path) -> None:
    executor = SlurmCluster(tmp_path, REHEARSAL, cluster="local", cpus=2)
    with pytest.raises(UsageError, match="'ddp' starts 4 processes: jobs have 2 cpus each"):
        executor.submit(Task("ddp", ECHO, processes=4))
    executor.close()
    with pytest.raises(UsageError, match="closed"):
        executor.submit(Task("late", ECHO))


def test_without_slurm_or_submitit_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"no Slurm here: expected the commands sbatch, .* found no sbatch"):
        SlurmCluster(tmp_path, REHEARSAL)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UsageError, match=r"pip install .*\[slurm\]"):
        slurm.SlurmJobs(tmp_path, slurm.SlurmJobOptions())


def wires(secret: bytes = b"s" * 32, other: bytes = b"s" * 32) -> tuple[Wire, Wire]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = socket.create_connection(server.getsockname(), 10)
        here, _ = server.accept()
    ends = (here, secret, True), (there, other, False)
    runner, worker = (Wire(link, Secret(known), is_runner=side, longest=1 << 20) for link, known, side in ends)
    return runner, worker


def exchanged(runner: Wire, worker: Wire) -> list[dict[str, Any]]:
    """What the runner hears once nonces were exchanged: what the worker was told to send before, if anything."""
    says = bool(worker._unsealed)
    runner.wait(0.0)
    greet(worker)
    return greet(runner) or (heard(runner) if says else [])


def greet(wire: Wire) -> list[dict[str, Any]]:
    """Wait for the other's nonce; what has come with it."""
    messages: list[dict[str, Any]] = []
    while not wire._key:
        wire.wait(10)
        messages += wire.receive() or []
    return messages


def heard(wire: Wire) -> list[dict[str, Any]]:
    """What has come, which may come in parts."""
    while (messages := wire.receive()) == []:
        wire.wait(10)
    return messages or []


def test_messages_arrive_once_both_have_proven_the_secret() -> None:
    runner, worker = wires()
    worker.send({"job": 1, "text": "ä\n"})
    assert not runner.is_proven
    assert exchanged(runner, worker) == [{"job": 1, "text": "ä\n"}]
    assert runner.is_proven
    worker.close()
    runner.wait(10)
    assert runner.receive() is None
    runner.close()


def test_who_does_not_know_the_secret_is_not_heard() -> None:
    runner, worker = wires(b"s" * 32, b"t" * 32)
    worker.send({"job": 1})
    with pytest.raises(Garbled, match="not sealed by our secret"):
        exchanged(runner, worker)
    assert not runner.is_proven
    runner.close()
    worker.close()


@pytest.mark.parametrize("how", ["altered", "repeated", "left out", "sent back"])
def test_what_is_tampered_with_on_the_way_is_not_heard(how: str) -> None:
    runner, worker = wires()
    assert exchanged(runner, worker) == []
    assert worker._key is not None
    assert runner._key is not None
    lines = [worker._sealed(worker._key, b'{"a": %d}' % number) for number in range(2)]
    back = runner._sealed(runner._key, b'{"a": 0}')
    sent = {
        "altered": [lines[0].replace(b'"a"', b'"b"')],
        "repeated": [lines[0], lines[0]],
        "left out": [lines[1]],
        "sent back": [back],
    }[how]
    worker.link.send(b"".join(sent))
    with pytest.raises(Garbled, match="not sealed"):
        heard(runner)
    runner.close()
    worker.close()


def test_a_recorded_connection_cannot_be_played_again() -> None:
    runner, worker = wires()
    greeting = worker._nonce + b"\n"
    worker.send({"job": 1})
    assert exchanged(runner, worker) == [{"job": 1}]
    worker._said = 0
    assert worker._key is not None
    recorded = greeting + worker._sealed(worker._key, b'{"job": 1}')
    another, thief = wires()
    thief.link.send(recorded)
    with pytest.raises(Garbled, match="not sealed"):
        heard(another)
    for wire in (runner, worker, another, thief):
        wire.close()


def test_a_stranger_gets_nothing_but_a_nonce_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    hall = WorkerListener("127.0.0.1")
    strangers = [socket.create_connection(("127.0.0.1", hall.port), 10) for _ in range(3)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    strangers[1].sendall(b"x" * 5000)
    while len(hall._since) != 1 or hall._since.keys() != quiet(hall, strangers[2]):
        assert hall.wait(10) == ([], [])
    monkeypatch.setattr(listener, "_STRANGER_S", 0.0)
    assert hall.wait(0.0) == ([], [])
    assert not hall._since
    for stranger in strangers:
        assert len(all_of(stranger)) <= 33
        stranger.close()
    hall.close()


def quiet(hall: WorkerListener, stranger: socket.socket) -> set[Wire]:
    return {wire for wire in hall._since if wire.link.getpeername() == stranger.getsockname()}


def all_of(link: socket.socket) -> bytes:
    """What comes until it is closed, in whatever way."""
    said = b""
    with suppress(ConnectionResetError):
        while part := link.recv(100):
            said += part
    return said


def test_a_job_whose_runner_is_gone_ends_with_a_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    order = SlurmWorkerSettings(("127.0.0.1",), port, "00" * 32, str(tmp_path), REHEARSAL, tuple(sys.path), {})
    order.write(tmp_path / "order.json")
    assert SlurmWorkerSettings.read(tmp_path / "order.json") == order
    (tmp_path / "open.json").write_bytes((tmp_path / "order.json").read_bytes())
    (tmp_path / "open.json").chmod(0o644)
    with pytest.raises(EvergradError, match=r"expected a file of mode 0600 of this user, found 0644"):
        SlurmWorkerSettings.read(tmp_path / "open.json")
    handlers = {one: signal.getsignal(one) for one in (signal.SIGTERM, LEAVE_SIGNAL)}
    try:
        with pytest.raises(EvergradError, match=f"cannot be reached from .*127.0.0.1:{port}"):
            serve(str(tmp_path / "order.json"), 1)
        with pytest.raises(EvergradError, match=r"no order to read .*the runner is gone"):
            serve(str(tmp_path / "missing.json"), 1)
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)
