"""Ranks of which one fares differently from the others: `python placement_faults.py FOLDER`.

torch is imported once, and every scenario runs in turn, each in a folder of its own. Its phases are jobs of their own,
with so many ranks, forked before there is any other thread. FOLDER/results.json says how each scenario ended: empty if
well, else what its ranks printed.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import evergrad as eg
from evergrad.checkpoint.agent.pipeline import Engine
from evergrad.checkpoint.manifest import Manifest
from evergrad.errors import EvergradError, TierError, UsageError
from evergrad.testing import StorageCalls

PATIENCE_S = 60.0
_NEW_PROCESS_NUMBERS = 0x20000000  # CLONE_NEWPID


class Rank:
    """One rank of one phase."""

    def __init__(self, rank: int, world_size: int, folder: Path, number: int) -> None:
        self.rank, self.world_size, self.folder = rank, world_size, folder
        self._group = f"file://{folder}/store-{number}"

    def join(self) -> None:
        if self.world_size > 1:
            limit = timedelta(seconds=PATIENCE_S)  # a rank that is left alone shall say so
            distributed.init_process_group("gloo", self._group, limit, self.world_size, self.rank)

    def checkpointer(self, *, every: int = 1, bucket: bool = True, **settings: Any) -> eg.Checkpointer:
        tiers: list[Any] = [eg.Local(self.folder / "disk", keep=9)]
        if bucket:
            tiers.append(eg.Persistent(f"file://{self.folder}/bucket", every=every, keep=99))
        return eg.Checkpointer(self.folder / "run", tiers=tiers, agent=False, **settings)

    def committed(self) -> list[str]:
        return sorted(path.parent.name for path in self.folder.glob("bucket/v*/COMMIT.json"))


def together(me: Rank) -> None:
    if me.world_size > 1:
        distributed.barrier()


# --- one copy is damaged ------------------------------------------------------------------------------------------


def alike(value: float) -> dict[str, Any]:
    """What all ranks have; large enough that each flushes a part of it."""
    return {"x": torch.arange(20_000.0) * value, "y": torch.full((10_000,), value)}


def save_alike(me: Rank) -> None:
    me.join()
    with me.checkpointer(replicated=True) as ck:
        pending = ck.save(10, {**alike(1), "own": torch.full((10,), float(me.rank))})
        for tier in ("local", "persistent"):
            pending.wait(tier, timeout=PATIENCE_S)
        together(me)
    shards = [Manifest.read(path) for path in me.folder.glob("bucket/v*/rank-*.json")]
    assert any(shard.elsewhere for shard in shards), "no rank left anything to another: this tests nothing"


def rot_on_the_disk(me: Rank) -> None:
    (shard,) = me.folder.glob("disk/*/*/v*/rank-00001.safetensors")
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)


def misplace_a_record(me: Rank) -> None:
    """On the disk lies what another job says of its rank 1."""
    (record,) = me.folder.glob("disk/*/*/v*/rank-00001.json")
    record.write_bytes(replace(Manifest.read(record), job="another-12345678").to_bytes())


def restore_alike(me: Rank) -> None:
    me.join()
    with me.checkpointer(replicated=True) as ck:
        live = {**alike(0), "own": torch.full((10,), -1.0)}
        assert ck.restore(live, resize=lambda path, saved, rank, world_size: saved[1]) == 10
        assert all(torch.equal(live[name], tensor) for name, tensor in alike(1).items())
        expected = me.rank if me.world_size == 2 else 1
        assert live["own"].tolist() == [expected] * 10
        together(me)


# --- one rank cannot save -----------------------------------------------------------------------------------------


def note_what_is_no_json(me: Rank) -> None:
    me.join()
    warnings.simplefilter("ignore", eg.CheckpointWarning)
    with me.checkpointer(every=2) as ck:
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
    together(me)
    assert me.committed() == ["v0000000010-01", "v0000000050-01"], me.committed()


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
    me.join()
    with me.checkpointer(bucket=False) as ck:
        ck.save(10, {**owned(10 + me.rank), "epoch": 7}).wait(timeout=PATIENCE_S)
        together(me)


def leave_lists_alone(me: Rank) -> None:
    me.join()
    with me.checkpointer(bucket=False) as ck:
        live = {**owned(-1), "epoch": 0}
        tensors = [live["list"][0], live["deep"][0]["inner"][0], live["dict"]["tensor"]]
        assert ck.restore(live, strict=False) == 10
        assert live.pop("epoch") == 7, "what was the same on all ranks is restored"
        assert all(tensor.tolist() == [-1.0] * 3 for tensor in tensors), tensors
        assert str(live) == str(owned(-1)), live
        assert ck.restored is not None
        assert any(line.startswith("list/0: was each rank's own") for line in ck.restored.skipped), ck.restored.skipped


class Wordless(Exception):
    def __str__(self) -> str:
        raise KeyError("no words")


class Exhausting:
    def state_dict(self) -> dict[str, Any]:
        raise MemoryError  # which has no words either


def answer_oddly(me: Rank) -> None:
    """Rank 2's function does something odd: no rank waits for it, and none is touched."""
    me.join()

    def wordless(saved: torch.Tensor) -> object:
        raise Wordless

    odd: list[Callable[[torch.Tensor], object]] = [
        torch.Tensor.to_sparse, lambda saved: object(), lambda saved: None, lambda saved: saved[:2],
        lambda saved: saved.to("meta"), lambda saved: saved["nothing"], wordless, lambda saved: Exhausting(),
    ]  # fmt: skip
    with me.checkpointer(bucket=False) as ck:
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
    os.environ["EVERGRAD_NODE"] = f"n{me.rank}"
    me.join()
    with ExitStack() as stack:
        ck = stack.enter_context(me.checkpointer())
        stack.enter_context(Meeting(me))
        for step in range(1, 11):
            ck.save(step, {"x": torch.full((3,), float(step))}).wait("persistent", timeout=PATIENCE_S)
            together(me)
    met = [path for path in me.folder.glob("v*-01.0") if path.with_suffix(".1").exists()]
    assert len(met) == 10, "they have not always met"
    assert len(me.committed()) == 10
    together(me)
    assert not list(me.folder.glob("bucket/v*/.COMMIT.json*")), "something is left"


def close_without_waiting(me: Rank) -> None:
    """Nobody looks at what the other has done meanwhile, as between two looks."""
    Engine._watch = lambda self: None  # type: ignore[method-assign]
    me.join()
    ck = me.checkpointer()
    ck.save(10, {"x": torch.full((1000,), float(me.rank))})
    ck.close()
    together(me)
    assert me.committed() == ["v0000000010-01"], "both have closed, and it is not committed"


Phase = tuple[int, Callable[[Rank], None]]
SCENARIOS: dict[str, list[Phase]] = {
    "rotten copy": [(2, save_alike), (1, rot_on_the_disk), (2, restore_alike), (1, restore_alike)],
    "misplaced record": [(2, save_alike), (1, misplace_a_record), (1, restore_alike)],
    "notes": [(2, note_what_is_no_json)],
    "lists": [(2, save_own), (1, leave_lists_alone)],
    "odd answers": [(2, save_own), (3, answer_oddly)],
    "two nodes": [(2, commit_at_once)],
    "same numbers": [(2, commit_at_once)],
    "close": [(2, close_without_waiting)],
}


def run_rank(phase: Callable[[Rank], None], me: Rank) -> int:
    torch.set_num_threads(1)
    signal.alarm(110)
    try:
        phase(me)
        if distributed.is_initialized():
            distributed.destroy_process_group()
    except BaseException:
        print(f"rank {me.rank} of {me.world_size}, {phase.__name__}:\n{traceback.format_exc()}", flush=True)
        return 1
    return 0


def renumbered(act: Callable[[], int]) -> int:
    """Do something as process 2 of a namespace; process 1 gets no alarm."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_PROCESS_NUMBERS):
        print(f"skip: {os.strerror(ctypes.get_errno())}", flush=True)
        return 0

    def second() -> int:
        assert os.getpid() == 1
        return forked(lambda: act() if os.getpid() == 2 else 3)

    return forked(second)


def forked(act: Callable[[], int]) -> int:
    if (child := os.fork()) == 0:
        os._exit(act())
    return abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def run(scenario: str, folder: Path) -> str:
    """How it ended: empty if well."""
    folder.mkdir()
    log = folder / "output.txt"
    for number, (world_size, phase) in enumerate(SCENARIOS[scenario]):
        children = []
        for rank in range(world_size):
            me = Rank(rank, world_size, folder, number)
            if (child := os.fork()) == 0:
                out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                os.dup2(out, 1)
                os.dup2(out, 2)
                if scenario == "same numbers":
                    os._exit(renumbered(lambda me=me, phase=phase: run_rank(phase, me)))  # type: ignore[misc]
                os._exit(run_rank(phase, me))
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes) or log.read_text().startswith("skip: "):
            return f"{log.read_text()}phase {number}: exit codes {codes}"
    return ""


def main() -> None:
    folder = Path(sys.argv[1])
    results = {}
    for number, scenario in enumerate(sys.argv[2:] or SCENARIOS):
        began = time.monotonic()
        results[scenario] = run(scenario, folder / f"s{number}")
        print(f"{scenario}: {time.monotonic() - began:.1f} s")
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
