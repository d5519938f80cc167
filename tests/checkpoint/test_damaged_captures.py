"""The newest version was captured and never finished; the small files beside its arena are damaged."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from ranked import die_with, holds_rank_state, rank_checkpointer, rank_state, rank_tiers, stop_agent
from small_job import holds, state, until

import evergrad as eg
from evergrad.errors import RestoreError
from living_agents import agents_of, end_agents
from ranks import Rank, run_ranks

SECONDS = 60.0
DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "flipped": lambda data: data[:96] + bytes([data[96] ^ 2]) + data[97:],
    "cut": lambda data: data[: len(data) // 2],
    "emptied": lambda _: b"",
    "removed": lambda _: None,
}


class Captured:
    """A job with steps 1 to 3, and step 4, which was only captured, in the arena of step 2. It can be put back."""

    def __init__(self, folder: Path, kinds: str) -> None:
        self.folder, self.kinds, self._kept = folder / "job", kinds, folder / "kept"
        self.shm = self.folder / "shm"
        self.shm.mkdir(parents=True)
        if (child := os.fork()) == 0:
            try:
                self._train()
            finally:
                os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        shutil.copytree(self.folder, self._kept, ignore=lambda *_: ["agent.sock"])

    def checkpointer(self, *, agent: bool) -> eg.Checkpointer:
        made = {
            "memory": eg.Memory(),
            "local": eg.Local(self.folder / "disk"),
            "persistent": eg.Persistent(str(self.folder / "shared")),
        }
        tiers = [made[kind] for kind in self.kinds.split("+")]
        return eg.Checkpointer(self.folder / "run", tiers=tiers, agent=agent, linger_s=0.1)

    def _train(self) -> None:
        torch.set_num_threads(1)
        signal.alarm(120)
        ck = self.checkpointer(agent=True)
        for step in (1, 2, 3):
            ck.save(step, state(step)).wait(self.kinds.rpartition("+")[2], timeout=SECONDS)
        until(lambda: ck._tracker.is_free(1, ck._state_capture._arenas[1].ticket.generation))
        (agent,) = agents_of(self.shm)
        os.kill(agent, signal.SIGSTOP)
        ck.save(4, state(4))
        os.kill(agent, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def put_back(self) -> None:
        """As it was when all were killed."""
        end_agents(self.shm)
        for entry in self.folder.iterdir():
            shutil.rmtree(entry)
        for entry in self._kept.iterdir():
            shutil.copytree(entry, self.folder / entry.name)

    @property
    def arena(self) -> Path:
        """The shard of step 4, as it was captured."""
        (ticket,) = (path for path in self.shm.rglob("rank-*.ticket") if b'"step": 4,' in path.read_bytes())
        return ticket.with_suffix(".safetensors")


@pytest.fixture
def captured(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Captured]:
    monkeypatch.setenv("EVERGRAD_SHM", str(tmp_path / "job" / "shm"))
    job = Captured(tmp_path, request.param)
    yield job
    end_agents(job.shm)


def damage(path: Path, how: str) -> None:
    data = DAMAGES[how](path.read_bytes())
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)


# --- tickets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agent", [True, False])
@pytest.mark.parametrize("captured", ["memory", "memory+local", "persistent"], indirect=True)
def test_restore_goes_back_from_a_capture_without_its_ticket_and_names_that_in_one_line(
    captured: Captured, agent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for how in ["flipped", "removed"] if agent else DAMAGES:
        captured.put_back()
        ticket = captured.arena.with_suffix(".ticket")
        damage(ticket, how)
        caplog.clear()
        with captured.checkpointer(agent=agent) as ck:
            live = state(0)
            assert ck.restore(live) == 3, how
            assert holds(live, 3), how
            lines = [record.getMessage() for record in caplog.records if str(ticket) in record.getMessage()]
            assert len(lines) == 1, (how, caplog.text)
            assert lines[0].startswith("rank 0: step 4 (attempt 1) "), how
            assert lines[0].endswith(". Restoring step 3 (attempt 1)."), how
            ck.save(5, state(5)).wait(timeout=SECONDS)
            assert ck.restore(live) == 5, how


@pytest.mark.parametrize("captured", ["memory", "memory+local", "persistent"], indirect=True)
def test_a_capture_with_its_ticket_is_restored(captured: Captured) -> None:
    with captured.checkpointer(agent=False) as ck:
        live = state(0)
        assert ck.restore(live) == 4
        assert holds(live, 4)


def capture_a_third_and_die(me: Rank, kinds: str) -> None:
    """Steps 10 and 20 are saved; step 30 is captured by all ranks while their agents are stopped; all are killed."""
    me.join()
    ck = rank_checkpointer(me, tiers=rank_tiers(me, kinds))
    for step in (10, 20):
        ck.save(step, rank_state(me, step)).wait(timeout=60)
    agent = stop_agent(ck)
    ck.save(30, rank_state(me, 30))
    die_with(agent)


def damage_the_ticket_of_one(me: Rank) -> None:
    """A bit of the last rank's ticket of step 30 flips."""
    if me.rank == me.world_size - 1:
        (ticket,) = (
            path
            for path in Path(os.environ["EVERGRAD_SHM"]).rglob(f"rank-{me.rank:05d}.*.ticket")
            if b'"step": 30' in path.read_bytes()
        )
        ticket.write_bytes(ticket.read_bytes().replace(b'"step": 30', b'"step": 31'))
        (me.folder / "damaged").write_text(str(ticket))


def restore_20_and_name_the_ticket(me: Rank, kinds: str) -> None:
    """Every rank goes back, and says so in one line that names the one ticket."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("evergrad").addHandler(handler)
    me.join()
    with rank_checkpointer(me, tiers=rank_tiers(me, kinds)) as ck:
        live = rank_state(me, 0)
        assert ck.restore(live) == 20
        assert holds_rank_state(me, live, 20)
        ticket = (me.folder / "damaged").read_text()
        lines = [line for line in said if ticket in line]
        assert len(lines) == 1, said
        assert lines[0].startswith(f"rank {me.rank}: step 30 (attempt 1) "), lines
        assert lines[0].endswith(". Restoring step 20 (attempt 1)."), lines


@pytest.mark.parametrize(("kinds", "nodes"), [("memory", 2), ("memory+local", 1), ("persistent", 1), ("persistent", 2)])
def test_all_ranks_go_back_and_name_the_one_ticket_that_is_damaged(kinds: str, nodes: int, tmp_path: Path) -> None:
    run_ranks(2, capture_a_third_and_die, tmp_path, kinds, nodes=nodes, codes=-signal.SIGKILL)
    run_ranks(2, damage_the_ticket_of_one, tmp_path, nodes=nodes)
    run_ranks(2, restore_20_and_name_the_ticket, tmp_path, kinds, nodes=nodes)


# --- headers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agent", [True, False])
@pytest.mark.parametrize("captured", ["memory", "memory+local", "persistent"], indirect=True)
def test_a_capture_with_a_damaged_header_is_named_and_the_way_back_is_said(
    captured: Captured, agent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    arena = captured.arena
    data = arena.read_bytes()
    at = data.index(b'{"__metadata__"') + 1  # the quote: the header is no JSON any more
    arena.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with captured.checkpointer(agent=agent) as ck:
        live = state(0)
        for _ in range(2):
            with pytest.raises(RestoreError) as caught:
                ck.restore(live)
            text = str(caught.value)
            assert text.startswith("step 4 (attempt 1) was captured by every rank, and can never be finished: rank 0: ")
            assert f"{arena}: the header of what was captured is damaged. Nothing was touched." in text
            assert text.endswith(" Go back to step 3 (attempt 1) by restore(version=3).")
            assert "JSONDecodeError" not in text
        assert holds(live, 0)
        assert ck.restore(live, version=3) == 3
        assert holds(live, 3)
        for step in (5, 6):
            ck.save(step, state(step)).wait(timeout=SECONDS)
        assert ck.restore(live) == 6
    assert "JSONDecodeError" not in caplog.text


# --- manifests in memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("agent", [True, False])
@pytest.mark.parametrize("captured", ["memory"], indirect=True)
def test_no_manifest_of_what_was_in_the_arena_before_is_left_beside_a_capture(
    captured: Captured, agent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged one would be taken for that of the capture."""
    assert not captured.arena.with_suffix(".json").exists()
    with captured.checkpointer(agent=agent) as ck:
        live = state(0)
        assert ck.restore(live) == 4
        assert holds(live, 4)
        assert ck.restored is not None
        assert ck.restored.unverified
        assert ck.versions()[0].unverified
    assert "rank 0: step 4 (attempt 1) in tier memory is unverified: " in caplog.text
