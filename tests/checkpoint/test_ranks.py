"""Jobs of several ranks, on one node or several: real processes, a real gloo group."""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from ranked import holds_rank_state, rank_checkpointer, rank_state
from torch import distributed

import evergrad as eg
from evergrad.checkpoint import Version
from evergrad.cli import main
from evergrad.errors import CheckpointError, EvergradError, RestoreError
from ranks import Rank, run_ranks

ONE = pytest.param(1, marks=pytest.mark.slow)
"""All ranks on one node, which is the easier case."""


def save_three(me: Rank) -> None:
    me.join()
    with rank_checkpointer(me) as ck:
        for step in (10, 20, 30):
            ck.save(step, rank_state(me, step)).wait(timeout=60)
        assert [record.step for record in ck.versions()] == [30, 20]
        assert ck.versions()[0].world_size == me.world_size


def restore_30(me: Rank) -> None:
    me.join()
    with rank_checkpointer(me) as ck:
        live = rank_state(me, 0)
        assert ck.restore(live) == 30
        assert holds_rank_state(me, live, 30)
        ck.save(31, rank_state(me, 31)).wait(timeout=60)  # and it goes on, as a new attempt
        assert ck.versions()[0].version == Version(31, 2)


@pytest.mark.parametrize("nodes", [ONE, 2])
def test_every_rank_gets_its_own_state_back(tmp_path: Path, nodes: int) -> None:
    run_ranks(4, save_three, tmp_path, nodes=nodes)
    run_ranks(4, restore_30, tmp_path, nodes=nodes)


def construct_before_the_group(me: Rank) -> None:
    with rank_checkpointer(me) as ck:
        me.join()
        ck.save(10, rank_state(me, 10)).wait(timeout=60)
        live = rank_state(me, 0)
        assert ck.restore(live) == 10
        assert holds_rank_state(me, live, 10)


def test_the_process_group_may_be_made_after_the_checkpointer(tmp_path: Path) -> None:
    run_ranks(2, construct_before_the_group, tmp_path, nodes=1)


def die_before_the_second(me: Rank) -> None:
    """Rank 1 is killed after all have saved step 10, before it saves step 20."""
    me.join()
    ck = rank_checkpointer(me)
    ck.save(10, rank_state(me, 10)).wait(timeout=60)
    distributed.barrier()
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    pending = ck.save(20, rank_state(me, 20))
    try:
        pending.wait(timeout=0.5)
    except TimeoutError:
        pass
    else:
        raise AssertionError("step 20 counts as committed, and rank 1 never saved it")
    assert [record.step for record in ck.versions()] == [10]
    os._exit(0)


def restore_10(me: Rank) -> None:
    me.join()
    with rank_checkpointer(me) as ck:
        live = rank_state(me, 0)
        assert ck.restore(live) == 10
        assert holds_rank_state(me, live, 10)
        ck.save(20, rank_state(me, 20)).wait(timeout=60)
        assert ck.restore(live) == 20
        assert holds_rank_state(me, live, 20)


@pytest.mark.parametrize("nodes", [ONE, 2])
def test_a_version_that_one_rank_never_saved_is_visible_to_none(tmp_path: Path, nodes: int) -> None:
    run_ranks(2, die_before_the_second, tmp_path, nodes=nodes, codes=[0, -signal.SIGKILL])
    run_ranks(2, restore_10, tmp_path, nodes=nodes)


def corrupt_30(me: Rank) -> None:
    """A bit of the last rank's shard flips, in every tier."""
    if me.rank == me.world_size - 1:
        name = f"rank-{me.rank:05d}"
        shards = [*me.folder.glob(f"disk/*/*/v0000000030-01/{name}.safetensors")]
        shards += Path(os.environ["EVERGRAD_SHM"]).rglob(f"{name}.*.safetensors")
        assert len(shards) >= 2
        for shard in shards:
            with suppress(FileNotFoundError), shard.open("r+b") as file:  # an agent that leaves takes the older arena
                file.seek(-3, os.SEEK_END)
                byte = file.read(1)[0]
                file.seek(-3, os.SEEK_END)
                file.write(bytes([byte ^ 4]))


def restore_20(me: Rank) -> None:
    me.join()
    with rank_checkpointer(me) as ck:
        live = rank_state(me, 0)
        assert ck.restore(live) == 20, "one rank has no intact shard of step 30: all go back"
        assert holds_rank_state(me, live, 20)


@pytest.mark.parametrize("nodes", [ONE, 3])
def test_if_one_rank_has_no_intact_shard_all_go_back_together(tmp_path: Path, nodes: int) -> None:
    run_ranks(3, save_three, tmp_path, nodes=nodes)
    run_ranks(3, corrupt_30, tmp_path, nodes=nodes)
    run_ranks(3, restore_20, tmp_path, nodes=nodes)


def other_world_size(me: Rank, before: int) -> None:
    me.join()
    with rank_checkpointer(me) as ck:
        try:
            ck.restore(rank_state(me, 0))
        except RestoreError as error:
            assert f"each rank's own when {before} ranks saved it" in str(error), error
            assert f"this job has {me.world_size}. Pass resize=" in str(error), error
        else:
            raise AssertionError("restored at another world size")


def test_another_number_of_ranks_is_refused_in_words(tmp_path: Path) -> None:
    run_ranks(3, save_three, tmp_path, nodes=1)
    run_ranks(2, other_world_size, tmp_path, 3, nodes=1)


def mismatch_on_one(me: Rank) -> None:
    me.join()
    with rank_checkpointer(me) as ck:
        live = rank_state(me, 0)
        if me.rank == 0:
            live["a"] = torch.zeros(99)
        before = live["a"].clone()
        try:
            ck.restore(live)
        except EvergradError as error:
            assert "99" in str(error), error
            assert (me.rank == 0) or str(error).startswith("rank 0: "), error
        else:
            raise AssertionError("restored, and rank 0's state does not fit")
        assert torch.equal(live["a"], before)


def test_a_mismatch_on_one_rank_touches_no_rank(tmp_path: Path) -> None:
    run_ranks(2, save_three, tmp_path, nodes=1)
    run_ranks(2, mismatch_on_one, tmp_path, nodes=1)


def forget_the_shared_folder(me: Rank) -> None:
    """Each rank has a run folder of its own: the ranks cannot see each other's notes."""
    me.join()
    with eg.Checkpointer(me.folder / f"run-{me.rank}", tiers=[eg.Memory()]) as ck:
        try:
            ck.save(1, rank_state(me, 1))
        except CheckpointError as error:
            assert "All nodes must share the run folder" in str(error), error
        else:
            raise AssertionError("saved")


def test_a_run_folder_that_is_not_shared_is_noticed(tmp_path: Path) -> None:
    run_ranks(2, forget_the_shared_folder, tmp_path, nodes=2)


def lag(me: Rank) -> None:
    """A version is committed for nobody before the slowest rank has delivered."""
    me.join()
    with rank_checkpointer(me, tiers=[eg.Memory()]) as ck:
        ck.save(10, rank_state(me, 10)).wait(timeout=60)
        if me.rank == 0:
            distributed.barrier()
            pending = ck.save(20, rank_state(me, 20))
        else:
            pending = ck.save(20, rank_state(me, 20))
            time.sleep(0.2)
            assert not pending.done(), "committed, and rank 0 has not saved it"
            distributed.barrier()
        pending.wait(timeout=60)
        live = rank_state(me, 0)
        assert ck.restore(live) == 20
        assert holds_rank_state(me, live, 20)


@pytest.mark.parametrize("nodes", [ONE, 2])
def test_nothing_is_committed_before_the_slowest_rank_has_delivered(tmp_path: Path, nodes: int) -> None:
    run_ranks(2, lag, tmp_path, nodes=nodes)


def in_threads(me: Rank) -> None:
    me.join()
    with rank_checkpointer(me, agent=False) as ck:
        for step in (10, 20, 30):
            ck.save(step, rank_state(me, step)).wait(timeout=60)
        live = rank_state(me, 0)
        assert ck.restore(live) == 30
        assert holds_rank_state(me, live, 30)


@pytest.mark.parametrize("nodes", [ONE, 2])
def test_without_agents_the_same_holds(tmp_path: Path, nodes: int) -> None:
    run_ranks(2, in_threads, tmp_path, nodes=nodes)


def fail_on_one(me: Rank) -> None:
    """Rank 1 cannot save step 20: nobody waits for it, and the next saves work."""
    me.join()
    with rank_checkpointer(me, tiers=[eg.Memory()]) as ck:
        ck.save(10, rank_state(me, 10)).wait(timeout=60)
        if me.rank == 1:
            try:
                ck.save(20, {"bad": object()})
            except EvergradError as error:
                assert "bad" in str(error), error
            else:
                raise AssertionError("saved")
        else:
            failed = ck.save(20, rank_state(me, 20)).exception(timeout=60)
            assert failed is not None
            assert "rank 1: not captured: StateError" in str(failed), failed
        distributed.barrier()
        warnings.simplefilter("ignore", eg.CheckpointWarning)
        for step in (30, 40, 50):
            ck.save(step, rank_state(me, step)).wait(timeout=60)
        live = rank_state(me, 0)
        assert ck.restore(live) == 50
        assert holds_rank_state(me, live, 50)


@pytest.mark.parametrize("nodes", [ONE, 2])
def test_a_rank_that_cannot_save_keeps_no_other_waiting(tmp_path: Path, nodes: int) -> None:
    run_ranks(2, fail_on_one, tmp_path, nodes=nodes)


def new_group(me: Rank) -> None:
    """After a failure the survivors make another process group: that is another attempt."""
    me.join()
    with rank_checkpointer(me) as ck:
        ck.save(10, rank_state(me, 10)).wait(timeout=60)
        for generation in (2, 3):
            distributed.destroy_process_group()
            me.join()
            assert ck.save(10 + generation, rank_state(me, 1)).wait(timeout=60).attempt == generation


def test_another_process_group_is_another_attempt(tmp_path: Path) -> None:
    run_ranks(2, new_group, tmp_path, nodes=1)


def lose_a_disk(me: Rank) -> None:
    """The last rank's node comes back with nothing."""
    if me.rank == me.world_size - 1:
        for path in (*me.folder.glob("disk/*/*/*/*"), *Path(os.environ["EVERGRAD_SHM"]).rglob("rank-*")):
            if f"rank-{me.rank:05d}" in path.name:
                path.unlink()


def refuse_to_start_anew(me: Rank) -> None:
    me.join()
    with rank_checkpointer(me) as ck:
        try:
            ck.restore(rank_state(me, 0))
        except RestoreError as error:
            assert f"is not whole: rank {me.world_size - 1}: " in str(error), error
            assert "was committed" in str(error), error
        else:
            raise AssertionError("as if nothing had ever been saved")


def test_a_job_that_lost_a_disk_does_not_start_anew_by_itself(tmp_path: Path) -> None:
    run_ranks(2, save_three, tmp_path, nodes=2)
    run_ranks(2, lose_a_disk, tmp_path, nodes=2)
    run_ranks(2, refuse_to_start_anew, tmp_path, nodes=2)


def save_in_memory(me: Rank) -> None:
    me.join()
    with rank_checkpointer(me, tiers=[eg.Memory()], agent=False) as ck:
        ck.save(10, rank_state(me, 10)).wait(timeout=60)
        distributed.barrier()


def lose_the_digests_of_one(me: Rank) -> None:
    """The manifest of the last rank's arena is gone."""
    if me.rank == me.world_size - 1:
        (manifest,) = Path(os.environ["EVERGRAD_SHM"]).rglob(f"rank-{me.rank:05d}.*.json")
        manifest.unlink()


def restore_unverified(me: Rank) -> None:
    """Every rank says that one rank's digests are not those of the capture."""
    me.join()
    with rank_checkpointer(me, tiers=[eg.Memory()], agent=False) as ck:
        live = rank_state(me, 0)
        assert ck.restore(live) == 10
        assert holds_rank_state(me, live, 10)
        assert ck.restored is not None
        assert ck.restored.unverified
        distributed.barrier()
        assert [record.unverified for record in ck.versions()] == [True]
        distributed.barrier()


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_version_that_is_unverified_on_one_rank_is_so_for_all(
    tmp_path: Path, nodes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(2, save_in_memory, tmp_path, nodes=nodes)
    run_ranks(2, lose_the_digests_of_one, tmp_path, nodes=nodes)
    run_ranks(2, restore_unverified, tmp_path, nodes=nodes)
    folder = tmp_path / "run"

    def listed() -> list[bool]:
        capsys.readouterr()
        assert main(["checkpoints", "ls", str(folder), "--json"]) == 0
        return [row["unverified"] for row in json.loads(capsys.readouterr().out)["versions"]]

    assert listed() == [True]
    for journal in folder.glob("catalogue/*.jsonl"):
        journal.unlink()
    assert listed() == [True], "by the manifests alone"
