"""One rank fares differently from the others: none waits for it, and none gets another state than the rest."""

from __future__ import annotations

import ctypes
import os
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import evergrad as eg
from evergrad.checkpoint.agent.pipeline import Pipeline
from evergrad.checkpoint.shard_manifest import Manifest
from evergrad.errors import EvergradError, TierError, UsageError
from evergrad.testing import StorageCalls
from ranks import Rank, run_ranks

PATIENCE_S = 60.0
_NEW_PROCESS_NUMBERS = 0x20000000  # CLONE_NEWPID


def join(me: Rank) -> None:
    """Join the others; a rank that is left alone shall say so."""
    if me.world_size > 1:
        me.join(PATIENCE_S)


def checkpointer(me: Rank, *, every: int = 1, bucket: bool = True, **settings: Any) -> eg.Checkpointer:
    tiers: list[Any] = [eg.Local(me.folder / "disk", keep=9)]
    if bucket:
        tiers.append(eg.Persistent(f"file://{me.folder}/bucket", every=every, keep=99))
    return eg.Checkpointer(me.folder / "run", tiers=tiers, agent=False, **settings)


def committed(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("bucket/v*/COMMIT.json"))


def together(me: Rank) -> None:
    if me.world_size > 1:
        distributed.barrier()


# --- one copy is damaged ------------------------------------------------------------------------------------------


def alike(value: float) -> dict[str, Any]:
    """What all ranks have; large enough that each flushes a part of it."""
    return {"x": torch.arange(20_000.0) * value, "y": torch.full((10_000,), value)}


def save_alike(me: Rank) -> None:
    join(me)
    with checkpointer(me, replicated=True) as ck:
        pending = ck.save(10, {**alike(1), "own": torch.full((10,), float(me.rank))})
        for tier in ("local", "persistent"):
            pending.wait(tier, timeout=PATIENCE_S)
        together(me)
    shards = [Manifest.read(path) for path in me.folder.glob("bucket/v*/rank-*.json")]
    assert any(shard.elsewhere for shard in shards), "no rank left anything to another: this tests nothing"


def restore_alike(me: Rank) -> None:
    join(me)
    with checkpointer(me, replicated=True) as ck:
        live = {**alike(0), "own": torch.full((10,), -1.0)}
        assert ck.restore(live, resize=lambda path, saved, rank, world_size: saved[1]) == 10
        assert all(torch.equal(live[name], tensor) for name, tensor in alike(1).items())
        expected = me.rank if me.world_size == 2 else 1
        assert live["own"].tolist() == [expected] * 10
        together(me)


def rot_on_the_disk(folder: Path) -> None:
    (shard,) = folder.glob("disk/*/*/v*/rank-00001.safetensors")
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)


def misplace_a_record(folder: Path) -> None:
    """On the disk lies what another job says of its rank 1."""
    (record,) = folder.glob("disk/*/*/v*/rank-00001.json")
    record.write_bytes(replace(Manifest.read(record), job="another-12345678").to_bytes())


def test_one_rotten_copy_is_replaced_by_another_though_that_leaves_tensors_to_other_ranks(tmp_path: Path) -> None:
    run_ranks(2, save_alike, tmp_path)
    rot_on_the_disk(tmp_path)
    run_ranks(2, restore_alike, tmp_path)
    run_ranks(1, restore_alike, tmp_path)


def test_another_jobs_record_in_the_place_of_a_shards_is_passed_over(tmp_path: Path) -> None:
    run_ranks(2, save_alike, tmp_path)
    misplace_a_record(tmp_path)
    run_ranks(1, restore_alike, tmp_path)


# --- one rank cannot save -----------------------------------------------------------------------------------------


def note_what_is_no_json(me: Rank) -> None:
    join(me)
    warnings.simplefilter("ignore", eg.CheckpointWarning)
    with checkpointer(me, every=2) as ck:
        for step in (10, 20, 30, 40, 50):
            bad = step in (20, 30)
            meta = {"loss": float("nan") if bad and me.rank == 0 else 1.0}
            told = []
            try:
                pending = ck.save(step, {"x": torch.full((3,), float(step))}, meta=meta)
            except UsageError as error:
                told = [str(error)]
            else:
                for tier in ("local", "persistent") if step in (10, 30, 50) else ("local",):
                    try:
                        pending.wait(tier, timeout=PATIENCE_S)
                    except TierError as error:
                        assert "rank 0: not captured: UsageError" in str(error), error
                        told.append(str(error))
            expected = 0 if not bad else 2 if step == 30 and me.rank else 1  # once at save, or for each tier
            assert len(told) == expected, (step, told)
            together(me)


def test_notes_that_are_no_json_on_one_rank_fail_that_version_on_all_and_no_later_one(tmp_path: Path) -> None:
    run_ranks(2, note_what_is_no_json, tmp_path)
    assert committed(tmp_path) == ["v0000000010-01", "v0000000050-01"]


# --- another number of ranks --------------------------------------------------------------------------------------


def owned(value: float) -> dict[str, Any]:
    def tensor() -> torch.Tensor:
        return torch.full((3,), value)

    return {
        "list": [tensor()], "numbers": [int(value)], "pair": (int(value), "same"),
        "deep": [{"inner": [tensor(), "same"]}],
        "dict": {"number": int(value), "tensor": tensor()},
    }  # fmt: skip


def save_own(me: Rank) -> None:
    join(me)
    with checkpointer(me, bucket=False) as ck:
        ck.save(10, {**owned(10 + me.rank), "epoch": 7}).wait(timeout=PATIENCE_S)
        together(me)


def leave_lists_alone(me: Rank) -> None:
    join(me)
    with checkpointer(me, bucket=False) as ck:
        live = {**owned(-1), "epoch": 0}
        tensors = [live["list"][0], live["deep"][0]["inner"][0], live["dict"]["tensor"]]
        assert ck.restore(live, strict=False) == 10
        assert live.pop("epoch") == 7, "what was the same on all ranks is restored"
        assert all(tensor.tolist() == [-1.0] * 3 for tensor in tensors), tensors
        assert str(live) == str(owned(-1)), live
        assert ck.restored is not None
        assert any(line.startswith("list/0: was each rank's own") for line in ck.restored.skipped), ck.restored.skipped


def test_what_was_each_ranks_own_inside_a_list_is_left_alone(tmp_path: Path) -> None:
    run_ranks(2, save_own, tmp_path)
    run_ranks(1, leave_lists_alone, tmp_path)


class Wordless(Exception):
    def __str__(self) -> str:
        raise KeyError("no words")


class Exhausting:
    def state_dict(self) -> dict[str, Any]:
        raise MemoryError  # which has no words either


def answer_oddly(me: Rank) -> None:
    """Rank 2's function does something odd: no rank waits for it, and none is touched."""
    join(me)

    def wordless(saved: torch.Tensor) -> object:
        raise Wordless

    odd: list[Callable[[torch.Tensor], object]] = [
        torch.Tensor.to_sparse, lambda saved: object(), lambda saved: None, lambda saved: saved[:2],
        lambda saved: saved.to("meta"), lambda saved: saved["nothing"], wordless, lambda saved: Exhausting(),
    ]  # fmt: skip
    with checkpointer(me, bucket=False) as ck:
        for number, act in enumerate(odd):

            def choose(path: str, saved: Any, rank: int, size: int, act: Callable[[Any], object] = act) -> object:
                return act(saved[0]) if path == "list/0" and rank == 2 else saved[0]

            live = {**owned(-1), "epoch": 0}
            try:
                ck.restore(live, resize=choose)
            except Exception as error:
                if me.rank != 2:
                    assert isinstance(error, EvergradError), repr(error)
                    assert str(error).startswith("rank 2: "), error
            else:
                raise AssertionError(f"odd answer {number} was taken")
            assert str(live) == str({**owned(-1), "epoch": 0}), live
        assert ck.restore({**owned(-1), "epoch": 0}, resize=lambda path, saved, rank, size: saved[0]) == 10
        together(me)


def test_whatever_resize_gives_on_one_rank_all_hear_of_it(tmp_path: Path) -> None:
    run_ranks(2, save_own, tmp_path)
    run_ranks(3, answer_oddly, tmp_path)


# --- several commit the same version ------------------------------------------------------------------------------


class Meeting(StorageCalls):
    """Nodes that write a COMMIT.json all begin before one has ended, and the second ends after the first."""

    def __init__(self, me: Rank) -> None:
        super().__init__(me.folder / "bucket")
        self._me = me

    def before(self, call: Any) -> None:
        folder, _, name = call.path.rpartition("/")
        if ".COMMIT.json" not in name:
            return
        if call.name == "create":
            marks = [self._me.folder / f"{folder.rpartition('/')[2]}.{rank}" for rank in range(self._me.world_size)]
            marks[self._me.rank].touch()
            while not all(mark.exists() for mark in marks):
                time.sleep(0.001)
        elif call.name == "rename" and self._me.rank:
            while not (self._me.folder / "bucket" / folder.rpartition("/")[2] / "COMMIT.json").exists():
                time.sleep(0.001)


def commit_at_once(me: Rank) -> None:
    join(me)
    with ExitStack() as stack:
        ck = stack.enter_context(checkpointer(me))
        stack.enter_context(Meeting(me))
        for step in range(1, 11):
            ck.save(step, {"x": torch.full((3,), float(step))}).wait("persistent", timeout=PATIENCE_S)
            together(me)
    met = [path for path in me.folder.glob("v*-01.0") if path.with_suffix(".1").exists()]
    assert len(met) == 10, "they have not always met"
    assert len(committed(me.folder)) == 10
    together(me)
    assert not list(me.folder.glob("bucket/v*/.COMMIT.json*")), "something is left"


def commit_as_process_2(me: Rank) -> str:
    """Commit as process 2 of a new namespace; process 1 would get no alarm. The reason if there is no namespace."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_PROCESS_NUMBERS):
        return os.strerror(ctypes.get_errno())

    def second() -> None:
        assert os.getpid() == 2
        commit_at_once(me)

    assert exit_code_of(lambda: exit_code_of(second)) == 0
    return ""


def exit_code_of(act: Callable[[], object]) -> int:
    """Do something in a child; what it returns is its exit code."""
    if (child := os.fork()) == 0:
        code: Any = 1
        try:
            code = act() or 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    return abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def test_two_nodes_may_commit_the_same_version_at_once(tmp_path: Path) -> None:
    run_ranks(2, commit_at_once, tmp_path, nodes=2)


def test_two_nodes_may_commit_the_same_version_at_once_from_processes_with_one_number(tmp_path: Path) -> None:
    missing = run_ranks(2, commit_as_process_2, tmp_path, nodes=2)
    if any(missing):
        pytest.skip(f"no process namespaces here: {missing[0]}")


def close_without_waiting(me: Rank) -> None:
    """Nobody looks at what the other has done meanwhile, as between two looks."""
    Pipeline._watch = lambda self: None  # type: ignore[method-assign]
    join(me)
    ck = checkpointer(me)
    ck.save(10, {"x": torch.full((1000,), float(me.rank))})
    ck.close()
    together(me)
    assert committed(me.folder) == ["v0000000010-01"], "both have closed, and it is not committed"


def test_the_last_version_is_committed_when_all_ranks_have_closed(tmp_path: Path) -> None:
    run_ranks(2, close_without_waiting, tmp_path)
