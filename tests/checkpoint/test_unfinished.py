"""What was captured and not finished when everybody was killed: it is finished before a version is chosen, and compared
with the digests that were taken when it was captured."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import die_with, holds_rank_state, rank_checkpointer, rank_state, stop_agent
from small_job import holds, state, until
from torch import distributed

import evergrad as eg
from evergrad import _files
from evergrad.checkpoint import Version
from evergrad.checkpoint.catalogue import history as journal
from evergrad.checkpoint.catalogue.catalogue import Catalogue
from evergrad.checkpoint.checkpointer import CheckpointWarning
from evergrad.cli import main
from evergrad.errors import RestoreError, TierError, UsageError
from living_agents import agents_of
from ranks import Rank, run_ranks

SECONDS = 60.0


def killed_with_its_agent(folder: Path, shm: Path, tiers: Callable[[], list[Any]]) -> None:
    """A trainer commits step 1, then captures steps 2 and 3 while its agent is stopped; then both are killed."""
    if (child := os.fork()) == 0:
        try:
            torch.set_num_threads(1)
            signal.alarm(120)
            ck = eg.Checkpointer(folder / "run", tiers=tiers())
            ck.save(1, state(1)).wait(timeout=SECONDS)
            until(lambda: ck._tracker.is_free(0, ck._state_capture._arenas[0].ticket.generation))
            (agent,) = agents_of(shm)
            os.kill(agent, signal.SIGSTOP)
            for step in (2, 3):
                ck.save(step, state(step))
            os.kill(agent, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("agent", [True, False])
@pytest.mark.parametrize("kinds", ["persistent", "local", "local+persistent", "memory+persistent"])
def test_what_was_captured_is_restored_whoever_was_killed(
    kinds: str, agent: bool, tmp_path: Path, shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def tiers() -> list[Any]:
        made = {
            "memory": eg.Memory(),
            "local": eg.Local(tmp_path / "disk"),
            "persistent": eg.Persistent(str(tmp_path / "shared"), bandwidth=15_000),  # a shard takes longer than a look
        }
        return [made[kind] for kind in kinds.split("+")]

    killed_with_its_agent(tmp_path, shm, tiers)
    with eg.Checkpointer(tmp_path / "run", tiers=tiers(), agent=agent) as ck:
        live = state(0)
        assert ck.restore(live) == 3
        assert holds(live, 3)
        assert ck.versions()[0].step == 3
        # Nobody had digested it when it was found: that is said, and not called verified.
        assert ck.restored is not None
        assert ck.restored.unverified
        assert ck.versions()[0].unverified
        ck.save(4, state(4)).wait(timeout=SECONDS)
        assert not ck.versions()[0].unverified
    assert sum("step 3 (attempt 1) in tier" in record.getMessage() for record in caplog.records) == 1


def capture_and_die(me: Rank) -> None:
    """All ranks return from saving steps 20 and 30 while their agents are stopped; then everybody is killed."""
    me.join()
    ck = rank_checkpointer(me, tiers=[eg.Persistent(str(me.folder / "shared"), bandwidth=1_500)])
    ck.save(10, rank_state(me, 10)).wait(timeout=60)
    agent = stop_agent(ck)
    for step in (20, 30):
        ck.save(step, rank_state(me, step))
    die_with(agent)


def restore_what_was_captured(me: Rank) -> None:
    me.join()
    with rank_checkpointer(me, tiers=[eg.Persistent(str(me.folder / "shared"), bandwidth=1_500)]) as ck:
        live = rank_state(me, 0)
        assert ck.restore(live) == 30
        assert holds_rank_state(me, live, 30)
        assert [record.step for record in ck.versions()] == [30, 20]


@pytest.mark.parametrize("nodes", [1, 2])
def test_all_ranks_restore_what_all_had_captured(nodes: int, tmp_path: Path) -> None:
    run_ranks(2, capture_and_die, tmp_path, nodes=nodes, codes=-signal.SIGKILL)
    run_ranks(2, restore_what_was_captured, tmp_path, nodes=nodes)


@pytest.mark.parametrize("agent", [True, False])
@pytest.mark.parametrize("damaged", [False, True])
def test_a_version_that_only_lacks_its_commit_is_committed_before_one_is_chosen(
    damaged: bool, agent: bool, tmp_path: Path, shm: Path
) -> None:
    tiers = [eg.Persistent(str(tmp_path / "shared"))]
    with eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=False) as ck:
        for step in (1, 2):
            ck.save(step, state(step)).wait(timeout=SECONDS)
    commit = tmp_path / "shared" / "v0000000002-01" / "COMMIT.json"
    before = commit.read_bytes()
    if damaged:
        commit.write_bytes(before[:-20])
    else:
        commit.unlink()
    for entry in shm.iterdir():  # as after a reboot
        shutil.rmtree(entry)
    with eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=agent) as ck:
        live = state(0)
        assert ck.restore(live) == 2
        assert holds(live, 2)
    assert commit.read_bytes() == before


# --- storage that refuses -------------------------------------------------------------------------------------------


def refused(
    folder: Path, tiers: list[Any], place: str, *, before: tuple[int, ...], steps: tuple[int, ...]
) -> list[Path]:
    """Save some steps, then some that the storage refuses, because a file is where their folders should be."""
    obstacles = []
    with eg.Checkpointer(folder / "run", tiers=tiers, agent=False) as ck:
        for step in before:
            ck.save(step, state(step)).wait(timeout=SECONDS)
        for step in steps:
            home = (folder / place) if place == "shared" else next((folder / place).glob("*/*"))
            home.mkdir(exist_ok=True)
            obstacles.append(home / Version(step, 1).name)
            obstacles[-1].write_bytes(b"in the way")
            with warnings.catch_warnings():  # of the one before
                warnings.simplefilter("ignore", CheckpointWarning)
                assert ck.save(step, state(step)).exception(timeout=SECONDS) is not None
    return obstacles


@pytest.mark.parametrize("agent", [True, False])
@pytest.mark.parametrize("place", ["shared", "disk"])
def test_a_captured_version_that_the_storage_refuses_is_an_error_and_is_tried_again(
    place: str, agent: bool, tmp_path: Path, shm: Path
) -> None:
    tiers: list[Any] = [eg.Persistent(str(tmp_path / "shared")) if place == "shared" else eg.Local(tmp_path / "disk")]
    (obstacle,) = refused(tmp_path, tiers, place, before=(1,), steps=(2,))
    with eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=agent) as ck:
        live = state(0)
        for _ in range(2):
            with pytest.raises(RestoreError) as caught:
                ck.restore(live)
            assert str(caught.value).startswith("step 2 (attempt 1) was captured by every rank, and cannot be finished")
            assert "ot a directory" in str(caught.value)
            assert str(caught.value).endswith("or go back to step 1 (attempt 1) by restore(version=1).")
            assert "\n" not in str(caught.value)
        with pytest.raises(RestoreError, match="cannot be finished"):
            ck.restore(live, version="latest")
        with pytest.raises(RestoreError, match="cannot be finished"):
            ck.restore(live, version=2)
        assert holds(live, 0), "something was loaded"
        assert ck.restore(live, version=1) == 1
        assert holds(live, 1)
        obstacle.unlink()
        assert ck.restore(live) == 2
        assert holds(live, 2)
        assert ck.restored is not None
        assert not ck.restored.unverified
        ck.save(3, state(3)).wait(timeout=SECONDS)
        assert ck.restore(live) == 3


@pytest.mark.parametrize("agent", [True, False])
def test_a_first_version_that_the_storage_refuses_is_no_new_start(agent: bool, tmp_path: Path, shm: Path) -> None:
    tiers = [eg.Persistent(str(tmp_path / "shared"))]
    (obstacle,) = refused(tmp_path, tiers, "shared", before=(), steps=(2,))
    with eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=agent) as ck:
        live = state(0)
        with pytest.raises(RestoreError, match=r"step 2 \(attempt 1\) was captured.*To start anew, choose another run"):
            ck.restore(live)
        ck.save(1, state(1)).wait(timeout=SECONDS)  # a new attempt: its first save leaves the only copy alone
    with eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=agent) as ck:
        assert ck.restore(live) == 1, "what was saved since is newer"
        obstacle.unlink()
        with pytest.raises(UsageError, match="there is no version 2"):  # overtaken: it is not finished any more
            ck.restore(live, version=2)


def test_of_several_that_the_storage_refuses_the_newest_is_named(tmp_path: Path, shm: Path) -> None:
    tiers = [eg.Persistent(str(tmp_path / "shared"))]
    obstacles = refused(tmp_path, tiers, "shared", before=(1,), steps=(2, 3))
    with eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=False) as ck:
        live = state(0)
        with pytest.raises(RestoreError, match=r"^step 3 \(attempt 1\) was captured"):
            ck.restore(live)
        obstacles[0].unlink()
        with pytest.raises(RestoreError, match=r"step 3 .*restore\(version=2\)"):  # it was finished meanwhile
            ck.restore(live)
        assert ck.restore(live, version=2) == 2
        obstacles[1].unlink()
        assert ck.restore(live) == 3


def test_a_version_whose_record_cannot_be_written_is_an_error(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = [eg.Persistent(str(tmp_path / "shared"))]
    publish = _files.publish

    def full(path: Path, data: bytes) -> None:
        if path.name == "COMMIT.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        publish(path, data)

    with eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=False) as ck:
        ck.save(1, state(1)).wait(timeout=SECONDS)
        monkeypatch.setattr(_files, "publish", full)
        assert ck.save(2, state(2)).exception(timeout=SECONDS) is not None
    with eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=False) as ck:
        live = state(0)
        with pytest.raises(RestoreError, match=r"step 2 .*not committed.*restore\(version=1\)"):
            ck.restore(live)
        monkeypatch.setattr(_files, "publish", publish)
        assert ck.restore(live) == 2


def test_a_nearer_tier_makes_up_for_storage_that_refuses(tmp_path: Path, shm: Path) -> None:
    tiers = [eg.Memory(), eg.Persistent(str(tmp_path / "shared"))]
    refused(tmp_path, tiers, "shared", before=(1,), steps=(2,))
    with eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=False) as ck:
        assert ck.restore(state(0)) == 2
        assert ck.restored is not None
        assert ck.restored.tier == "memory"


def save_what_is_refused(me: Rank) -> None:
    """Step 10 is committed; of step 20 the storage refuses the shard of the last rank."""
    me.join()
    shared = me.folder / "shared"
    with rank_checkpointer(me, tiers=[eg.Persistent(str(shared))]) as ck:
        ck.save(10, rank_state(me, 10)).wait(timeout=60)
        if me.rank == 0:
            (shared / "v0000000020-01" / f".rank-{me.world_size - 1:05d}.safetensors.partial").mkdir(parents=True)
        distributed.barrier()
        assert ck.save(20, rank_state(me, 20)).exception(timeout=60) is not None
        distributed.barrier()


def refuse_to_go_back(me: Rank) -> None:
    """No rank goes back by itself, all can when asked to, and all have step 20 when the storage works again."""
    me.join()
    shared = me.folder / "shared"
    with rank_checkpointer(me, tiers=[eg.Persistent(str(shared))]) as ck:
        live = rank_state(me, 0)
        try:
            ck.restore(live)
        except RestoreError as error:
            assert str(error).startswith("step 20 (attempt 1) was captured by every rank"), error
            assert str(error).endswith("restore(version=10)."), error
        else:
            raise AssertionError("an older version was restored")
        assert holds_rank_state(me, live, 0)
        assert ck.restore(live, version=10) == 10
        if me.rank == 0:
            next((shared / "v0000000020-01").glob(".rank-*.partial")).rmdir()
        distributed.barrier()
        assert ck.restore(live) == 20
        assert holds_rank_state(me, live, 20)


def tear_what_is_refused(me: Rank) -> None:
    """Step 10 is committed; step 20 is captured by rank 0 alone, and the storage refuses it."""
    me.join()
    shared = me.folder / "shared"
    with rank_checkpointer(me, tiers=[eg.Persistent(str(shared))]) as ck:
        ck.save(10, rank_state(me, 10)).wait(timeout=60)
        if me.rank == 0:
            (shared / "v0000000020-01").write_bytes(b"in the way")
            assert ck.save(20, rank_state(me, 20)).exception(timeout=60) is not None
        distributed.barrier()


def go_back_from_torn(me: Rank) -> None:
    me.join()
    with rank_checkpointer(me, tiers=[eg.Persistent(str(me.folder / "shared"))]) as ck:
        live = rank_state(me, 0)
        assert ck.restore(live) == 10
        assert holds_rank_state(me, live, 10)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(
    "phases",
    [(save_what_is_refused, refuse_to_go_back), (tear_what_is_refused, go_back_from_torn)],
    ids=["refused", "refused and torn"],
)
def test_ranks_agree_on_a_version_that_the_storage_refuses(
    phases: tuple[Callable[[Rank], None], ...], nodes: int, tmp_path: Path
) -> None:
    for phase in phases:
        run_ranks(2, phase, tmp_path, nodes=nodes)


# --- digests that are gone ------------------------------------------------------------------------------------------


def arena_of(shm: Path, step: int) -> Path:
    """The shard of the arena that holds a step."""
    for manifest in shm.rglob("rank-00000.*.json"):
        if json.loads(manifest.read_bytes())["step"] == step:
            return manifest.with_suffix(".safetensors")
    raise AssertionError(f"no arena holds step {step}")


def flip(path: Path) -> None:
    """Flip a bit of the last tensor's bytes."""
    data = bytearray(path.read_bytes())
    data[-7] ^= 4
    with path.open("r+b") as file:
        file.write(data)


def saved(folder: Path, kinds: str, *steps: int) -> list[Any]:
    made = {
        "memory": eg.Memory(),
        "local": eg.Local(folder / "disk"),
        "persistent": eg.Persistent(str(folder / "shared")),
    }
    tiers = [made[kind] for kind in kinds.split("+")]
    with eg.Checkpointer(folder / "run", tiers=tiers, agent=False) as ck:
        for step in steps:
            pending = ck.save(step, state(step))
            for kind in kinds.split("+"):
                pending.wait(kind, timeout=SECONDS)
    return tiers


@pytest.mark.parametrize("agent", [True, False])
@pytest.mark.parametrize("kinds", ["memory+local", "memory+persistent"])
@pytest.mark.parametrize("manifest", ["gone", "damaged"])
def test_an_arena_without_its_digests_is_compared_with_those_of_another_copy(
    manifest: str, kinds: str, agent: bool, tmp_path: Path, shm: Path
) -> None:
    tiers = saved(tmp_path, kinds, 1, 2)
    arena = arena_of(shm, 2)
    flip(arena)
    if manifest == "gone":
        arena.with_suffix(".json").unlink()
    else:
        arena.with_suffix(".json").write_bytes(b"{")
    with eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=agent) as ck:
        live = state(0)
        assert ck.restore(live) == 2
        assert holds(live, 2), "a flipped bit was loaded"
        assert ck.restored is not None
        assert (ck.restored.tier, ck.restored.unverified) == (kinds.partition("+")[2], False)
        assert not ck.versions()[0].unverified


def test_an_intact_arena_without_its_digests_gets_those_of_another_copy(tmp_path: Path, shm: Path) -> None:
    tiers = saved(tmp_path, "memory+local", 1, 2)
    arena_of(shm, 2).with_suffix(".json").unlink()
    with eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=False) as ck:
        live = state(0)
        assert ck.restore(live) == 2
        assert ck.restored is not None
        assert (ck.restored.tier, ck.restored.unverified) == ("memory", False)


def test_without_digests_anywhere_a_version_is_unverified_and_says_so(
    tmp_path: Path, shm: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = saved(tmp_path, "memory", 1, 2)
    arena_of(shm, 2).with_suffix(".json").unlink()
    run = str(tmp_path / "run")
    with eg.Checkpointer(run, tiers=tiers, agent=False) as ck:
        live = state(0)
        assert ck.restore(live) == 2
        assert holds(live, 2)
        assert ck.restored is not None
        assert ck.restored.unverified
        assert ck.versions()[0].unverified
    said = [record.getMessage() for record in caplog.records if "rank 0: step 2" in record.getMessage()]
    assert said == [
        "rank 0: step 2 (attempt 1) in tier memory is unverified: the digests of rank 0 were taken after a restart, "
        "with none from the time of the capture to compare"
    ]
    capsys.readouterr()
    assert main(["checkpoints", "ls", run]) == 0
    assert "unverified" in capsys.readouterr().out
    assert main(["checkpoints", "ls", run, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["versions"][0]
    assert (row["step"], row["verified"], row["unverified"]) == (2, "unknown", True)
    assert main(["checkpoints", "verify", run, "2", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["versions"][0]["verdict"] == "unknown"
    assert main(["checkpoints", "show", run, "2"]) == 0
    assert "verified  unverified: digests were taken after a restart" in capsys.readouterr().out
    main(["checkpoints", "report", run, "--out", str(tmp_path / "page.html")])
    why = "digests were taken after a restart, with none from the time of the capture to compare"
    assert f"Unverified: v0000000002-01: {why}." in capsys.readouterr().out
    assert main(["checkpoints", "export", run, "2", str(tmp_path / "out.safetensors")]) == 0
    assert capsys.readouterr().out.startswith(f"unverified: v0000000002-01 ({why})\n")
    assert main(["checkpoints", "export", run, "2", str(tmp_path / "out.pt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unverified"] is True
    assert main(["checkpoints", "export", run, "1", str(tmp_path / "one.pt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unverified"] is False


def test_a_check_that_failed_before_the_digests_were_taken_again_is_not_shown(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = saved(tmp_path, "memory", 1, 2)
    arena, run = arena_of(shm, 2), str(tmp_path / "run")
    arena.with_suffix(".json").unlink()

    def verify(when: str) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(journal, "time_now", lambda: when)
            assert main(["checkpoints", "verify", run, "2"]) == 1

    def listed() -> tuple[str, bool]:
        capsys.readouterr()
        assert main(["checkpoints", "ls", run, "--json"]) == 0
        row = next(row for row in json.loads(capsys.readouterr().out)["versions"] if row["step"] == 2)
        return row["verified"], row["unverified"]

    verify("2020-01-01T00:00:00Z")
    assert listed() == ("failed", False)
    with eg.Checkpointer(run, tiers=tiers, agent=False) as ck:
        assert ck.restore(state(0)) == 2
        assert listed() == ("unknown", True)
        flip(arena)
        verify("2099-01-01T00:00:00Z")
        assert listed() == ("failed", True)


def test_the_catalogue_knows_that_an_arena_without_digests_is_not_what_was_captured(tmp_path: Path, shm: Path) -> None:
    tiers = saved(tmp_path, "memory", 1, 2)
    arena = arena_of(shm, 2)
    flip(arena)
    arena.with_suffix(".json").unlink()
    with eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=False) as ck:
        live = state(0)
        assert ck.restore(live) != 2
        assert holds(live, 0) or holds(live, 1)


@pytest.mark.parametrize("agent", [True, False])
def test_a_version_in_memory_alone_that_is_lost_is_an_error_not_a_new_start(
    tmp_path: Path, shm: Path, agent: bool
) -> None:
    tiers = saved(tmp_path, "memory", 1)
    arena = arena_of(shm, 1)
    flip(arena)
    arena.with_suffix(".json").unlink()
    with eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=agent) as ck:
        live = state(0)
        with pytest.raises(RestoreError, match=r"step 1 \(attempt 1\) was .*is not what was captured.*Nothing was"):
            ck.restore(live)
        assert holds(live, 0)


@pytest.mark.parametrize("how", ["gone", "emptied", "random"])
@pytest.mark.parametrize("agent", [True, False])
def test_arenas_without_tickets_and_manifests_are_an_error_not_a_new_start(
    how: str, agent: bool, tmp_path: Path, shm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers, run = saved(tmp_path, "memory", 1, 2), str(tmp_path / "run")
    for arena in list(shm.rglob("rank-*.safetensors")):
        for path in (arena.with_suffix(".ticket"), arena.with_suffix(".json")):
            if how == "gone":
                path.unlink()
            else:
                path.write_bytes(b"" if how == "emptied" else os.urandom(300))
    capsys.readouterr()
    for _ in range(2):
        assert main(["checkpoints", "ls", run, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["versions"]
        assert [(row["step"], row["state"], bool(row["digest"])) for row in rows] == [
            (2, "damaged", True),
            (1, "damaged", True),
        ]
        assert ".ticket: is " in rows[0]["damaged"]
        assert main(["checkpoints", "ls", run]) == 0
        assert "retired" not in capsys.readouterr().out
        assert main(["checkpoints", "verify", run, "2"]) == 1
        assert main(["checkpoints", "show", run, "2"]) == 0
        assert main(["checkpoints", "report", run, "--out", str(tmp_path / "page.html")]) == 0
        with eg.Checkpointer(run, tiers=tiers, agent=agent, linger_s=0.3) as ck:
            live = state(0)
            with pytest.raises(RestoreError, match=r"step 2 \(attempt 1\) .*\.ticket: is .*Nothing was") as caught:
                ck.restore(live)
            assert "\n" not in str(caught.value)
            assert holds(live, 0)
        until(lambda: not agents_of(shm))  # and what it leaves is still an error
        capsys.readouterr()


def test_arenas_that_were_removed_are_a_new_start(
    tmp_path: Path, shm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a reboot: of what was in memory alone nothing is left."""
    tiers = saved(tmp_path, "memory", 1, 2)
    for entry in shm.iterdir():
        shutil.rmtree(entry)
    for reserve in (None, state(0)):
        with eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=False, reserve=reserve) as ck:
            assert ck.restore(state(0)) is None
    assert main(["checkpoints", "ls", str(tmp_path / "run")]) == 0
    assert "0 versions, and 2 retired" in capsys.readouterr().out


def test_a_rest_in_memory_hides_no_version_on_a_disk(tmp_path: Path, shm: Path) -> None:
    tiers = saved(tmp_path, "memory+local", 1, 2)
    for path in (*shm.rglob("*.ticket"), *shm.rglob("rank-*.json")):
        path.unlink()
    with eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=False) as ck:
        assert ck.restore(state(0)) == 2
    assert [entry.state for entry in Catalogue(tmp_path / "run").entries()] == ["restorable"] * 2


def test_a_first_version_that_was_never_complete_is_a_new_start(tmp_path: Path, shm: Path) -> None:
    tiers = saved(tmp_path, "memory", 1)
    arena_of(shm, 1).with_suffix(".json").unlink()
    for history in (tmp_path / "run" / "catalogue").glob("*.jsonl"):
        history.unlink()
    with eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=False) as ck:
        ck._client.await_finished = lambda *_, **__: []  # type: ignore[method-assign]  # nobody finishes it
        assert ck.restore(state(0)) is None


def test_digests_that_were_taken_before_a_crash_are_kept_where_memory_is_no_tier(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service refuses; a bit of the arena flips; the next trainer notices it by the digests of the first."""
    shared = tmp_path / "shared"
    tiers = [eg.Persistent(str(shared), patience_s=0.1)]
    with eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=False) as ck:
        ck.save(1, state(1)).wait(timeout=SECONDS)
        (shared / "v0000000002-01").write_bytes(b"in the way")
        assert ck.save(2, state(2)).exception(timeout=SECONDS) is not None
    (shared / "v0000000002-01").unlink()
    (digests,) = [path for path in shm.rglob("*.digests") if json.loads(path.read_bytes())["step"] == 2]
    flip(digests.with_suffix(".safetensors"))
    with eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=False) as ck:
        live = state(0)
        assert ck.restore(live) == 1
        assert holds(live, 1)


def test_a_later_check_does_not_call_it_ok(tmp_path: Path, shm: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Flushed from an arena that nobody had digested, a version stays unverified in the tiers it goes to."""
    tiers = saved(tmp_path, "memory", 1, 2)
    arena_of(shm, 2).with_suffix(".json").unlink()
    with eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=False) as ck:
        ck.restore(state(0))
    with caplog.at_level(logging.WARNING), eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=False) as ck:
        assert ck.restore(state(0)) == 2
        assert ck.versions()[0].unverified


@pytest.mark.parametrize("agent", [True, False])
def test_a_version_is_committed_though_its_arena_is_damaged_when_another_copy_is_flushed(
    agent: bool, tmp_path: Path, shm: Path
) -> None:
    tiers = [eg.Memory(), eg.Local(tmp_path / "disk"), eg.Persistent(str(tmp_path / "shared"), patience_s=0.1)]
    obstacle = tmp_path / "shared" / "v0000000002-01"
    with eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=False) as ck:
        ck.save(1, state(1)).wait("persistent", timeout=SECONDS)
        obstacle.write_bytes(b"")
        pending = ck.save(2, state(2))
        pending.wait("local", timeout=SECONDS)
        with pytest.raises(TierError, match="Not a directory"):
            pending.wait("persistent", timeout=SECONDS)
    obstacle.unlink()
    (manifest,) = (path for path in shm.glob("*/*/*/rank-*.json") if b'"step": 2,' in path.read_bytes())
    manifest.unlink()
    with manifest.with_suffix(".safetensors").open("rb+") as arena:
        arena.seek(-100, os.SEEK_END)
        arena.write(b"\xff")
    with eg.Checkpointer(tmp_path / "run", tiers=tiers, agent=agent, linger_s=0.3) as ck:
        live = state(0)
        assert ck.restore(live) == 2
        assert holds(live, 2)
        until((obstacle / "COMMIT.json").exists)
        until(lambda: ck.versions()[0].tiers[-1] == "persistent")
        ck.save(3, state(3)).wait("persistent", timeout=SECONDS)
