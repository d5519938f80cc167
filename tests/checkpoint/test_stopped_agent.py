"""An agent that is stopped or hangs: it is waited for with a limit, ended, named, and replaced; nothing is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from small_job import holds, state, until

import evergrad as eg
from evergrad._files import holder, locked, process
from evergrad.checkpoint.agent import client
from evergrad.checkpoint.agent.agent import agent_process
from evergrad.checkpoint.agent.client import AgentClient
from evergrad.checkpoint.pending import SaveTracker
from evergrad.checkpoint.run_folder import RunFolder, arena_folder, find_arenas
from evergrad.cli import main
from evergrad.errors import CheckpointError, UsageError
from living_agents import agents_of

SECONDS = 120.0


def is_gone(pid: int) -> bool:
    found = process(pid)
    return found is None or found.has_ended


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents may be silent for three seconds."""
    monkeypatch.setenv("EVERGRAD_AGENT_TIMEOUT", "3")


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that is stopped, and goes on afterwards if it is still there."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: (found := process(pid)) is None or found.is_stopped or found.has_ended)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.usefixtures("quick")
def test_restore_goes_on_without_an_agent_that_is_stopped_and_names_it(
    tmp_path: Path, shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with eg.Checkpointer(tmp_path, linger_s=30) as ck:
        for step in (1, 2):
            ck.save(step, state(step)).wait(timeout=SECONDS)
        (agent,) = agents_of(shm)
        with stopped(agent):
            ck.save(3, state(3))
            live = state(0)
            assert ck.restore(live) == 3
            assert holds(live, 3)
        said = [record.getMessage() for record in caplog.records if f"process {agent}" in record.getMessage()]
        assert said == [
            f"the agent (process {agent}) has said nothing for 3 s: it is stopped. It was ended: starting another"
        ]
        # It was continued above. It does nothing any more, and another one serves.
        assert is_gone(agent)
        with pytest.warns(eg.CheckpointWarning, match=f"process {agent}"):
            ck.save(4, state(4)).wait(timeout=SECONDS)
        assert [record.step for record in ck.versions()] == [4, 3]
        assert agents_of(shm) not in ([], [agent])


@pytest.mark.usefixtures("quick")
def test_save_and_wait_go_on_without_an_agent_that_is_stopped(tmp_path: Path, shm: Path) -> None:
    with eg.Checkpointer(tmp_path, linger_s=30) as ck:
        ck.save(1, state(1)).wait(timeout=SECONDS)
        (agent,) = agents_of(shm)
        with stopped(agent):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", eg.CheckpointWarning)
                for step in (2, 3, 4):  # more than there are arenas
                    pending = ck.save(step, state(step))
            assert pending.wait(timeout=SECONDS).step == 4
        live = state(0)
        assert ck.restore(live) == 4
        assert holds(live, 4)


@pytest.mark.usefixtures("quick")
def test_a_trainer_that_comes_to_a_stopped_agent_is_served_by_another(tmp_path: Path, shm: Path) -> None:
    with eg.Checkpointer(tmp_path, linger_s=30) as ck:
        ck.save(1, state(1)).wait(timeout=SECONDS)
    (agent,) = agents_of(shm)
    with stopped(agent), eg.Checkpointer(tmp_path, linger_s=30) as ck:
        live = state(0)
        assert ck.restore(live) == 1
        assert holds(live, 1)
        with pytest.warns(eg.CheckpointWarning, match=f"process {agent}"):
            ck.save(2, state(2)).wait(timeout=SECONDS)
    assert is_gone(agent)


@pytest.mark.usefixtures("quick")
def test_a_trainer_without_agent_ends_one_that_stays_stopped(
    tmp_path: Path, shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with eg.Checkpointer(tmp_path, linger_s=30) as ck:
        ck.save(1, state(1)).wait(timeout=SECONDS)
    (agent,) = agents_of(shm)
    with stopped(agent), eg.Checkpointer(tmp_path, agent=False) as ck:
        live = state(0)
        assert ck.restore(live) == 1
        for step in (2, 3, 4):
            ck.save(step, state(step)).wait(timeout=SECONDS)
    assert is_gone(agent)
    said = [record.getMessage() for record in caplog.records if f"process {agent}" in record.getMessage()]
    assert said == [f"the agent (process {agent}) stays stopped. It was ended: this process does its work"]


@pytest.mark.usefixtures("quick")
def test_of_several_ranks_one_ends_it_and_all_get_the_same_new_one(tmp_path: Path, shm: Path) -> None:
    job = RunFolder.open(tmp_path)
    links = [AgentClient(job, SaveTracker(), (), 30.0) for _ in range(4)]
    try:
        for link in links:
            link.await_finished(0)
        (agent,) = agents_of(shm)
        with stopped(agent):
            for link in links:
                link.await_finished(0)
        until(lambda: all(link.pid not in (None, agent) for link in links))
        assert [link.pid for link in links] == agents_of(shm) * 4
    finally:
        for link in links:
            link.close()


def test_an_agent_that_is_busy_is_not_ended(tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERGRAD_AGENT_TIMEOUT", "20")
    (tmp_path / "slow_module.py").write_text(
        textwrap.dedent(
            """
            import os, time
            from dataclasses import dataclass

            @dataclass
            class Slow:
                path: str
                name: str = "slow"
                after: str = "digest"

                def run(self, work):
                    while not os.path.exists(self.path):
                        time.sleep(0.02)
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from slow_module import Slow  # type: ignore[import-not-found]

    go = tmp_path / "go"
    with eg.Checkpointer(tmp_path / "run", modules=[Slow(str(go))], linger_s=30) as ck:
        pending = ck.save(1, state(1))
        assert isinstance(ck._client, AgentClient)
        (agent,) = agents_of(shm)
        heard = ck._client._heard
        until(lambda: ck._client._heard >= heard + 22)  # type: ignore[attr-defined]
        assert not pending.done()
        go.touch()
        pending.wait(timeout=SECONDS)
        assert agents_of(shm) == [agent]


def test_the_first_save_is_not_taken_for_one_of_an_earlier_process_by_an_agent_that_starts_slowly(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Python runs this file when it starts. Trainers can connect to the agent already when it calls asyncio.run.
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(
            """
            import asyncio, sys, time

            if "agent" in sys.orig_argv:
                run = asyncio.run

                def run_later(main):
                    time.sleep(1)
                    return run(main)

                asyncio.run = run_later
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with eg.Checkpointer(tmp_path / "run", linger_s=0) as ck:
        ck.save(1, state(1)).wait(timeout=SECONDS)
        (found,) = ck.versions()
        assert not found.unverified
    until(lambda: not agents_of(shm))


@pytest.mark.usefixtures("quick")
def test_one_that_cannot_be_ended_is_an_error_that_names_it_until_it_goes_on(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "end_agent", lambda _: False)
    with eg.Checkpointer(tmp_path, linger_s=30) as ck:
        ck.save(1, state(1)).wait(timeout=SECONDS)
        (agent,) = agents_of(shm)
        with stopped(agent):
            pending = ck.save(2, state(2))
            said = rf"the agent \(process {agent}\) has said nothing for 3 s, and cannot be ended from here: end it"
            with pytest.raises(CheckpointError, match=said):
                pending.wait(timeout=SECONDS)
            with pytest.raises(CheckpointError, match=said):
                ck.restore(state(0))
        until(lambda: ck._tracker._broken is None)
        live = state(0)
        assert ck.restore(live) == 2
        assert agents_of(shm) == [agent]


def test_a_job_that_was_stopped_whole_goes_on_with_its_agent(tmp_path: Path, shm: Path) -> None:
    code = """
        import sys, time, torch, evergrad as eg
        from pathlib import Path
        ck = eg.Checkpointer(sys.argv[1], linger_s=30)
        ck.save(1, {"a": torch.ones(3)}).wait()
        print("saved", flush=True)
        sys.stdin.readline()
        ck.save(2, {"a": torch.ones(3)}).wait()
        print(ck._tracker.errors(), flush=True)
    """
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "EVERGRAD_AGENT_TIMEOUT": "4"},
    )
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    try:
        assert trainer.stdout.readline() == "saved\n"
        (agent,) = agents_of(shm)
        with stopped(trainer.pid), stopped(agent):
            time.sleep(5)  # longer than an agent may say nothing
            os.kill(trainer.pid, signal.SIGCONT)
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        assert trainer.stdout.readline() == "[]\n"
        assert agents_of(shm) == [agent]
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdin.close()
        trainer.stdout.close()


def test_the_verb_says_that_the_agent_is_stopped(tmp_path: Path, shm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with eg.Checkpointer(tmp_path, linger_s=30) as ck:
        ck.save(1, state(1)).wait(timeout=SECONDS)
    (agent,) = agents_of(shm)
    with stopped(agent):
        assert main(["agent", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert f"process {agent}, which is stopped: continue it (kill -CONT {agent}), or end it" in err
    os.kill(agent, signal.SIGTERM)


@pytest.mark.parametrize("damaged", [b"", b"\xff\xfe", b'{"pid": 1, "started": 1}', b'{"pid": [], "started": {}}'])
def test_a_damaged_note_of_the_agent_leads_to_no_other_process(damaged: bytes, tmp_path: Path) -> None:
    with eg.Checkpointer(tmp_path) as ck:
        ck.save(1, state(1)).wait(timeout=SECONDS)
        folder = arena_folder(RunFolder.open(tmp_path))
        found = agent_process(folder)
        assert found is not None
        assert isinstance(ck._client, AgentClient)
        assert found[0] == ck._client.pid
        (folder / "agent.lock").write_bytes(damaged)
        assert agent_process(folder) is None


def test_a_lock_that_a_stopped_process_holds_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        with locked(path):
            os.write(writing, b"x")
            signal.pause()
        os._exit(0)
    try:
        assert os.read(reading, 1) == b"x"
        assert holder(path) == child
        refused = pytest.raises(CheckpointError, match=f"lock: held by process {child}, which is stopped")
        with stopped(child), refused, locked(path, patience_s=0.2):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
    with locked(path):  # the kernel has let go of it
        assert holder(path) == os.getpid()


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan"])
def test_a_wrong_time_limit_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERGRAD_AGENT_TIMEOUT", text)
    with pytest.raises(UsageError, match=f"EVERGRAD_AGENT_TIMEOUT='{text}': expected seconds, more than 0"):
        eg.Checkpointer(tmp_path)
    assert not find_arenas(arena_folder(RunFolder.open(tmp_path)))
