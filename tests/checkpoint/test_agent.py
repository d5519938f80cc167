"""The agent as a process: it outlives the trainer, is restarted when it dies, serves its user alone, and leaves."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_job import until

import evergrad as eg
from evergrad._files import is_locked, locked
from evergrad.checkpoint import Version
from evergrad.checkpoint.agent import agent as serving
from evergrad.checkpoint.agent import client
from evergrad.checkpoint.agent.agent import SOCKET, socket_address
from evergrad.checkpoint.agent.client import AgentClient
from evergrad.checkpoint.agent.events import Committed
from evergrad.checkpoint.pending import Pending, SaveTracker
from evergrad.checkpoint.run_folder import RunFolder, arena_folder, find_arenas
from evergrad.errors import EvergradError, SaveRefused, TierError, UsageError
from living_agents import agents_of


def state(value: float, size: int = 1000) -> dict[str, Any]:
    return {"a": torch.full((size,), value), "epoch": int(value)}


def holds(found: dict[str, Any], value: float) -> bool:
    return bool((found["a"] == value).all() and found["epoch"] == value)


def in_child(act: Callable[[], None]) -> int:
    """Run something in a forked process; its exit status."""
    if (child := os.fork()) == 0:
        try:
            torch.set_num_threads(1)  # the parent's other threads are not there
            signal.alarm(60)
            act()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(9)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_trainer_killed_right_after_save_has_saved(tmp_path: Path) -> None:
    def train() -> None:
        ck = eg.Checkpointer(tmp_path)
        for step in (1, 2, 3):
            ck.save(step, state(step, size=1_000_000))
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(train) == -signal.SIGKILL
    with eg.Checkpointer(tmp_path) as ck:
        live = state(0, size=1_000_000)
        assert ck.restore(live) == 3
        assert holds(live, 3)
        assert "memory" in ck.versions()[0].tiers


def test_the_version_becomes_durable_without_any_trainer(tmp_path: Path, shm: Path) -> None:
    def train() -> None:
        eg.Checkpointer(tmp_path, tiers=[eg.Local(tmp_path / "disk")]).save(3, state(3, size=1_000_000))
        os.kill(os.getpid(), signal.SIGKILL)

    in_child(train)
    until(lambda: not agents_of(shm))  # it left by itself, so nothing is owed
    manifest = next((tmp_path / "disk").rglob("rank-00000.json"))
    assert json.loads(manifest.read_text())["step"] == 3
    assert not list(shm.rglob("*.safetensors"))  # flushed, and memory is no tier: given back


def test_an_agent_that_dies_is_replaced_and_nothing_is_lost(tmp_path: Path, shm: Path) -> None:
    with eg.Checkpointer(tmp_path) as ck:
        ck.save(1, state(1)).wait()
        for step in (10, 20):
            (agent,) = agents_of(shm)
            pending = ck.save(step, state(step))
            os.kill(agent, signal.SIGKILL)
            assert pending.wait(timeout=60) == Version(step, 1)
            until(lambda: ck._tracker._errors)
            with pytest.warns(eg.CheckpointWarning, match=r"the agent \(process \d+\) is gone"):
                ck.save(step + 1, state(step)).wait(timeout=60)
    assert len(agents_of(shm)) <= 1


def test_an_agent_that_dies_with_its_trainer_leaves_what_was_captured(tmp_path: Path, shm: Path) -> None:
    def train() -> None:
        ck = eg.Checkpointer(tmp_path, tiers=[eg.Local(tmp_path / "disk")])
        ck.save(1, state(1)).wait()
        (agent,) = agents_of(shm)
        os.kill(agent, signal.SIGSTOP)  # captured, and nobody to finish it
        ck.save(2, state(2))
        os.kill(agent, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(train) == -signal.SIGKILL
    with eg.Checkpointer(tmp_path, tiers=[eg.Local(tmp_path / "disk")]) as ck:
        live = state(0)
        assert ck.restore(live) == 2
        assert holds(live, 2)


def test_the_agent_leaves_and_the_newest_version_stays_in_memory(tmp_path: Path, shm: Path) -> None:
    with eg.Checkpointer(tmp_path) as ck:
        for step in (1, 2, 3):
            ck.save(step, state(step)).wait()
        assert len(agents_of(shm)) == 1
    until(lambda: not agents_of(shm))
    (arena,) = find_arenas(arena_folder(RunFolder.open(tmp_path)))
    ticket = arena.read_ticket()
    assert ticket is not None
    assert ticket.version == Version(3, 1)
    with eg.Checkpointer(tmp_path) as ck:
        live = state(0)
        assert ck.restore(live) == 3
        assert ck.restored is not None
        assert ck.restored.tier == "memory"
        assert holds(live, 3)


def test_asked_to_stop_it_first_finishes_what_is_owed(tmp_path: Path, shm: Path) -> None:
    def train() -> None:
        ck = eg.Checkpointer(tmp_path, tiers=[eg.Local(tmp_path / "disk")], linger_s=60)
        ck.save(3, state(3, size=10_000_000))
        os.kill(agents_of(shm)[0], signal.SIGTERM)
        os._exit(0)

    in_child(train)
    until(lambda: not agents_of(shm))
    assert list((tmp_path / "disk").rglob("v0000000003-01/rank-00000.json"))


def test_an_agent_that_leaves_while_a_trainer_is_connected_logs_no_traceback(tmp_path: Path, shm: Path) -> None:
    with eg.Checkpointer(tmp_path, tiers=[eg.Local(tmp_path / "disk")]) as ck:
        ck.save(1, state(1)).wait(timeout=60)
        (agent,) = agents_of(shm)
        os.kill(agent, signal.SIGTERM)
        until(lambda: agent not in agents_of(shm))
        until(lambda: ck._tracker._errors)
        with pytest.warns(eg.CheckpointWarning, match=rf"the agent \(process {agent}\) is gone"):
            ck.save(2, state(2)).wait(timeout=60)
    (log,) = (tmp_path / "agents").glob("*.log")
    assert f"agent {agent} leaves" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_whoever_reads_the_trainers_pipe_does_not_wait_for_the_agent(tmp_path: Path, shm: Path) -> None:
    code = """
        import sys, torch, evergrad as eg
        ck = eg.Checkpointer(sys.argv[1], linger_s=20)
        ck.save(1, {"a": torch.ones(3)}).wait()
        print("done")
    """
    reading, writing = os.pipe()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        pass_fds=[writing],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    os.close(writing)
    assert done.stdout == "done\n"
    (agent,) = agents_of(shm)
    assert os.read(reading, 1) == b""  # at its end: nobody has the other side
    os.close(reading)
    os.kill(agent, signal.SIGTERM)


def test_a_new_checkpointer_takes_over_the_agent_also_with_other_tiers(tmp_path: Path, shm: Path) -> None:
    with eg.Checkpointer(tmp_path, tiers=[eg.Memory()], linger_s=20) as first:
        first.save(1, state(1)).wait()
        (agent,) = agents_of(shm)
    with eg.Checkpointer(tmp_path, tiers=[eg.Memory(), eg.Local(tmp_path / "disk")], linger_s=20) as second:
        live = state(0)
        assert second.restore(live) == 1
        second.save(2, state(2)).wait(tier="local")
        assert agents_of(shm) == [agent]
        assert [record.step for record in second.versions()] == [2, 1]
    os.kill(agent, signal.SIGTERM)


def test_a_trainer_of_an_older_attempt_is_refused(tmp_path: Path) -> None:
    with eg.Checkpointer(tmp_path) as old, eg.Checkpointer(tmp_path) as new:
        old.save(1, state(1)).wait()
        new.save(1, state(2)).wait()
        until(old._tracker.refusal)
        with pytest.raises(SaveRefused, match="attempt 1 of the job is over: attempt 2 runs it now"):
            old.save(2, state(3))
        new.save(2, state(4)).wait()
        live = state(0)
        assert new.restore(live) == 2
        assert holds(live, 4)


def test_two_jobs_do_not_meet(tmp_path: Path, shm: Path) -> None:
    with eg.Checkpointer(tmp_path / "a" / "run") as a, eg.Checkpointer(tmp_path / "b" / "run") as b:
        a.save(1, state(1)).wait()
        b.save(2, state(2)).wait()
        assert len(agents_of(shm)) == 2
        live = state(0)
        assert a.restore(live) == 1
        assert holds(live, 1)
        assert b.restore(live) == 2
        assert holds(live, 2)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_another_user_is_not_served(tmp_path: Path) -> None:
    with eg.Checkpointer(tmp_path) as ck:
        ck.save(1, state(1)).wait()
        folder = arena_folder(RunFolder.open(tmp_path))

        def knock() -> None:
            os.setuid(65534)
            with pytest.raises(PermissionError):
                socket_address(folder)

        assert in_child(knock) == 0
        # Even with every door open, the kernel tells the agent who knocks.
        for path in (folder, *list(folder.parents)[:3]):
            path.chmod(0o755)
        (folder / SOCKET).chmod(0o666)

        def enter() -> None:
            os.setuid(65534)
            fd, address = socket_address(folder)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(address)
                connection.settimeout(30)
                assert connection.recv(1) == b""
            os.close(fd)

        assert in_child(enter) == 0


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_two_users_do_not_meet(shm: Path) -> None:
    shm.chmod(0o1777)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)
        mine, theirs = Path(folder, "mine"), Path(folder, "theirs")
        with eg.Checkpointer(mine) as ck:
            ck.save(1, state(1)).wait()

            def be_another() -> None:
                os.setuid(65534)
                with eg.Checkpointer(theirs, agent=False) as other:
                    other.save(2, state(2)).wait()
                    live = state(0)
                    assert other.restore(live) == 2
                    assert holds(live, 2)
                with pytest.raises(EvergradError, match=r"cannot be|permission denied"):
                    eg.Checkpointer(mine, agent=False)

            assert in_child(be_another) == 0
            live = state(0)
            assert ck.restore(live) == 1
            assert holds(live, 1)
    assert sorted(path.name for path in shm.iterdir()) == ["evergrad-0", "evergrad-65534"]


def test_a_version_that_a_new_agent_does_not_know_is_reported_as_lost() -> None:
    board = SaveTracker()
    board.start_attempt(0, 1)
    old, new = (Pending(Version(step, 1), ["local"], "local", board) for step in (10, 20))
    board.handle_event(Committed(20, 1, "local"))
    assert new.wait() == Version(20, 1)
    assert not old.done()
    board.fail_retired_versions(["local"])
    with pytest.raises(TierError, match="an agent died since: it was retired, or lost"):
        old.wait()


def test_a_socket_only_its_user_can_open(tmp_path: Path) -> None:
    with eg.Checkpointer(tmp_path):
        folder = arena_folder(RunFolder.open(tmp_path))
        assert (folder / SOCKET).stat().st_mode & 0o077 == 0
        assert folder.stat().st_mode & 0o077 == 0


def test_a_launchers_own_agent_is_used(tmp_path: Path, shm: Path) -> None:
    RunFolder.open(tmp_path)
    command = [sys.executable, "-m", "evergrad", "agent", str(tmp_path), "--node", "n7", "--linger", "30", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launched:
        assert launched.stdout is not None
        said = json.loads(launched.stdout.readline())
        assert (said["node"], said["pid"]) == ("n7", launched.pid)
        with eg.Checkpointer(tmp_path, node="n7") as ck:
            ck.save(1, state(1)).wait()
            assert agents_of(shm) == [launched.pid]
        second = subprocess.run(command[:-1], capture_output=True, text=True, timeout=60, check=True)
        assert "another agent serves node n7" in second.stdout
        launched.terminate()
        assert launched.wait(30) == 0


def test_modules_of_the_users_own_run_in_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
        from dataclasses import dataclass
        from pathlib import Path

        @dataclass
        class Mark:
            folder: str
            name: str = "mark"
            after: str = "memory"

            def run(self, work):
                import os, sys
                assert "torch" not in sys.modules
                Path(self.folder, f"{work.version.name}.{os.getpid()}").touch()
    """
    (tmp_path / "marking.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    marking = __import__("marking")
    (tmp_path / "marks").mkdir()
    with eg.Checkpointer(tmp_path / "run", modules=[marking.Mark(str(tmp_path / "marks"))]) as ck:
        ck.save(1, state(1)).wait()
    until(lambda: any((tmp_path / "marks").iterdir()))  # a module may run after its version is in memory
    (mark,) = (tmp_path / "marks").iterdir()
    assert mark.name.startswith("v0000000001-01.")
    assert int(mark.suffix[1:]) != os.getpid()


def test_a_module_that_the_agent_cannot_import_is_refused_at_once(tmp_path: Path) -> None:
    class Inside:
        name = "inside"

        def run(self, work: object) -> None:
            raise AssertionError

    with pytest.raises(UsageError, match="agent=False"):
        eg.Checkpointer(tmp_path, modules=[Inside()])


def test_an_agent_that_left_because_its_start_took_too_long_is_started_again(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, start = [0.0], AgentClient._start
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late[0], sleep=time.sleep)
    monkeypatch.setattr(client, "time", clock)

    def slowly(self: AgentClient) -> None:
        late[0] += 100.0
        if late[0] > 100.0:  # the first one is gone before anybody comes
            start(self)

    monkeypatch.setattr(AgentClient, "_start", slowly)
    with eg.Checkpointer(tmp_path) as ck:
        ck.save(1, state(1)).wait()
        assert len(agents_of(shm)) == 1
    assert late == [200.0]


def test_an_agent_does_not_leave_before_whoever_starts_it_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, looks = RunFolder.open(tmp_path), []
    with ExitStack() as starting:
        starting.enter_context(locked(arena_folder(job) / serving.START_LOCK))

        def look(path: Path) -> bool:
            looks.append(path.name)
            if len(looks) == 3:
                starting.close()
            return is_locked(path)

        monkeypatch.setattr(serving, "_FIRST_TRAINER_S", 0.0)
        monkeypatch.setattr(serving, "is_locked", look)
        assert serving.run_agent(job, linger_s=0.0)
    assert looks[:3] == [serving.START_LOCK] * 3


def test_nonsense_on_the_socket_does_not_end_the_agent(tmp_path: Path, shm: Path) -> None:
    with eg.Checkpointer(tmp_path) as ck:
        (agent,) = agents_of(shm)
        folder = arena_folder(RunFolder.open(tmp_path))
        for nonsense in (
            b"\0\0\n",
            b"[]\n",
            b'{"op": "captured"}\n',
            b"{" * 100,
            b'{"op": "captured", "rank": 9, "index": 0, "generation": 1}\n',
        ):
            fd, address = socket_address(folder)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(address)
                connection.sendall(nonsense)
            os.close(fd)
        ck.save(1, state(1)).wait()
        assert agents_of(shm) == [agent]
