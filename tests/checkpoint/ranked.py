"""A job of several ranks, for tests: `python ranked.py SCENARIO WORLD_SIZE NODES FOLDER [TIERS]`.

torch is imported once; the ranks are forked before there is any other thread. Each runs the scenario's phases in
turn, as a new job each: a fresh process group, a fresh checkpointer. A rank that fails prints its traceback.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import evergrad as eg
import evergrad.checkpoint.checkpointer
from evergrad.checkpoint import Version
from evergrad.errors import CheckpointError, EvergradError, RestoreError


class Rank:
    """One rank of one phase."""

    def __init__(self, rank: int, world_size: int, nodes: int, folder: Path, phase: str, kinds: str) -> None:
        self.rank, self.world_size, self.folder, self._kinds = rank, world_size, folder, kinds
        self._group = f"file://{folder}/store-{phase}"
        os.environ["EVERGRAD_NODE"] = f"n{rank * nodes // world_size}"

    def join(self) -> None:
        distributed.init_process_group("gloo", self._group, rank=self.rank, world_size=self.world_size)

    def tiers(self) -> list[Any]:
        """The tiers of a scenario that is run with several."""
        made = {
            "memory": eg.Memory(),
            "local": eg.Local(self.folder / "disk"),
            "persistent": eg.Persistent(str(self.folder / "shared")),
        }
        return [made[kind] for kind in self._kinds.split("+")]

    def checkpointer(self, **settings: Any) -> eg.Checkpointer:
        tiers = settings.pop("tiers", [eg.Memory(), eg.Local(self.folder / "disk")])
        return eg.Checkpointer(self.folder / "run", tiers=tiers, **settings)

    def state(self, value: float) -> dict[str, Any]:
        return {"a": torch.full((100,), value * 100 + self.rank), "rank": self.rank, "step": int(value)}

    def holds(self, state: dict[str, Any], value: float) -> bool:
        same = bool((state["a"] == value * 100 + self.rank).all())
        return same and (state["rank"], state["step"]) == (self.rank, value)


def save_three(me: Rank) -> None:
    me.join()
    with me.checkpointer() as ck:
        for step in (10, 20, 30):
            ck.save(step, me.state(step)).wait(timeout=60)
        assert [record.step for record in ck.versions()] == [30, 20]
        assert ck.versions()[0].world_size == me.world_size


def restore_30(me: Rank) -> None:
    me.join()
    with me.checkpointer() as ck:
        live = me.state(0)
        assert ck.restore(live) == 30
        assert me.holds(live, 30)
        ck.save(31, me.state(31)).wait(timeout=60)  # and it goes on, as a new attempt
        assert ck.versions()[0].version == Version(31, 2)


def construct_before_the_group(me: Rank) -> None:
    with me.checkpointer() as ck:
        me.join()
        ck.save(10, me.state(10)).wait(timeout=60)
        live = me.state(0)
        assert ck.restore(live) == 10
        assert me.holds(live, 10)


def die_before_the_second(me: Rank) -> None:
    """Rank 1 is killed after all have saved step 10, before it saves step 20."""
    me.join()
    ck = me.checkpointer()
    ck.save(10, me.state(10)).wait(timeout=60)
    distributed.barrier()
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    pending = ck.save(20, me.state(20))
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
    with me.checkpointer() as ck:
        live = me.state(0)
        assert ck.restore(live) == 10
        assert me.holds(live, 10)
        ck.save(20, me.state(20)).wait(timeout=60)
        assert ck.restore(live) == 20
        assert me.holds(live, 20)


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
    with me.checkpointer() as ck:
        live = me.state(0)
        assert ck.restore(live) == 20, "one rank has no intact shard of step 30: all go back"
        assert me.holds(live, 20)


def other_world_size(me: Rank) -> None:
    if me.rank >= me.world_size - 1:
        return
    me.world_size -= 1
    me.join()
    with me.checkpointer() as ck:
        try:
            ck.restore(me.state(0))
        except RestoreError as error:
            assert f"each rank's own when {me.world_size + 1} ranks saved it" in str(error), error
            assert f"this job has {me.world_size}. Pass resize=" in str(error), error
        else:
            raise AssertionError("restored at another world size")


def mismatch_on_one(me: Rank) -> None:
    me.join()
    with me.checkpointer() as ck:
        live = me.state(0)
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


def forget_the_shared_folder(me: Rank) -> None:
    """Each rank has a run folder of its own: the ranks cannot see each other's notes."""
    me.join()
    with eg.Checkpointer(me.folder / f"run-{me.rank}", tiers=[eg.Memory()]) as ck:
        try:
            ck.save(1, me.state(1))
        except CheckpointError as error:
            assert "All nodes must share the run folder" in str(error), error
        else:
            raise AssertionError("saved")


def lag(me: Rank) -> None:
    """A version is committed for nobody before the slowest rank has delivered."""
    me.join()
    with me.checkpointer(tiers=[eg.Memory()]) as ck:
        ck.save(10, me.state(10)).wait(timeout=60)
        if me.rank == 0:
            distributed.barrier()
            pending = ck.save(20, me.state(20))
        else:
            pending = ck.save(20, me.state(20))
            time.sleep(0.2)
            assert not pending.done(), "committed, and rank 0 has not saved it"
            distributed.barrier()
        pending.wait(timeout=60)
        live = me.state(0)
        assert ck.restore(live) == 20
        assert me.holds(live, 20)


def fail_on_one(me: Rank) -> None:
    """Rank 1 cannot save step 20: nobody waits for it, and the next saves work."""
    me.join()
    with me.checkpointer(tiers=[eg.Memory()]) as ck:
        ck.save(10, me.state(10)).wait(timeout=60)
        if me.rank == 1:
            try:
                ck.save(20, {"bad": object()})
            except EvergradError as error:
                assert "bad" in str(error), error
            else:
                raise AssertionError("saved")
        else:
            failed = ck.save(20, me.state(20)).exception(timeout=60)
            assert failed is not None
            assert "rank 1: not captured: StateError" in str(failed), failed
        distributed.barrier()
        warnings.simplefilter("ignore", eg.CheckpointWarning)
        for step in (30, 40, 50):
            ck.save(step, me.state(step)).wait(timeout=60)
        live = me.state(0)
        assert ck.restore(live) == 50
        assert me.holds(live, 50)


def new_group(me: Rank) -> None:
    """After a failure the survivors make another process group: that is another attempt."""
    me.join()
    with me.checkpointer() as ck:
        ck.save(10, me.state(10)).wait(timeout=60)
        for generation in (2, 3):
            distributed.destroy_process_group()
            me._group += "+"
            me.join()
            assert ck.save(10 + generation, me.state(1)).wait(timeout=60).attempt == generation


def lose_a_disk(me: Rank) -> None:
    """The last rank's node comes back with nothing."""
    if me.rank == me.world_size - 1:
        for path in (*me.folder.glob("disk/*/*/*/*"), *Path(os.environ["EVERGRAD_SHM"]).rglob("rank-*")):
            if f"rank-{me.rank:05d}" in path.name:
                path.unlink()


def refuse_to_start_anew(me: Rank) -> None:
    me.join()
    with me.checkpointer() as ck:
        try:
            ck.restore(me.state(0))
        except RestoreError as error:
            assert f"is not whole: rank {me.world_size - 1}: " in str(error), error
            assert "was committed" in str(error), error
        else:
            raise AssertionError("as if nothing had ever been saved")


def in_threads(me: Rank) -> None:
    me.join()
    with me.checkpointer(agent=False) as ck:
        for step in (10, 20, 30):
            ck.save(step, me.state(step)).wait(timeout=60)
        live = me.state(0)
        assert ck.restore(live) == 30
        assert me.holds(live, 30)


def _stop_agent(ck: eg.Checkpointer) -> int:
    """Stop the node's agent once it is done with the first arena; all ranks return when every agent is stopped."""
    while not ck._board.is_free(0, ck._recorder._arenas[0].ticket.generation):
        time.sleep(0.01)
    distributed.barrier()
    agent = getattr(ck._link, "pid", None)
    assert isinstance(agent, int)
    os.kill(agent, signal.SIGSTOP)
    distributed.barrier()
    return agent


def _die_with(agent: int) -> None:
    """Kill the stopped agent and this process, once all ranks are here."""
    distributed.barrier()
    with suppress(ProcessLookupError):  # another rank of the node was first
        os.kill(agent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def capture_and_die(me: Rank) -> None:
    """All ranks return from saving steps 20 and 30 while their agents are stopped; then everybody is killed."""
    me.join()
    ck = me.checkpointer(tiers=[eg.Persistent(str(me.folder / "shared"), bandwidth=1_500)])
    ck.save(10, me.state(10)).wait(timeout=60)
    agent = _stop_agent(ck)
    for step in (20, 30):
        ck.save(step, me.state(step))
    _die_with(agent)


def restore_what_was_captured(me: Rank) -> None:
    me.join()
    with me.checkpointer(tiers=[eg.Persistent(str(me.folder / "shared"), bandwidth=1_500)]) as ck:
        live = me.state(0)
        assert ck.restore(live) == 30
        assert me.holds(live, 30)
        assert [record.step for record in ck.versions()] == [30, 20]


def capture_a_third_and_die(me: Rank) -> None:
    """Steps 10 and 20 are saved; step 30 is captured by all ranks while their agents are stopped; all are killed."""
    me.join()
    ck = me.checkpointer(tiers=me.tiers())
    for step in (10, 20):
        ck.save(step, me.state(step)).wait(timeout=60)
    agent = _stop_agent(ck)
    ck.save(30, me.state(30))
    _die_with(agent)


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


def restore_20_and_name_the_ticket(me: Rank) -> None:
    """Every rank goes back, and says so in one line that names the one ticket."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("evergrad").addHandler(handler)
    me.join()
    with me.checkpointer(tiers=me.tiers()) as ck:
        live = me.state(0)
        assert ck.restore(live) == 20
        assert me.holds(live, 20)
        ticket = (me.folder / "damaged").read_text()
        lines = [line for line in said if ticket in line]
        assert len(lines) == 1, said
        assert lines[0].startswith(f"rank {me.rank}: step 30 (attempt 1) "), lines
        assert lines[0].endswith(". Restoring step 20 (attempt 1)."), lines


def save_in_memory(me: Rank) -> None:
    me.join()
    with me.checkpointer(tiers=[eg.Memory()], agent=False) as ck:
        ck.save(10, me.state(10)).wait(timeout=60)
        distributed.barrier()


def lose_the_digests_of_one(me: Rank) -> None:
    """The manifest of the last rank's arena is gone."""
    if me.rank == me.world_size - 1:
        (manifest,) = Path(os.environ["EVERGRAD_SHM"]).rglob(f"rank-{me.rank:05d}.*.json")
        manifest.unlink()


def restore_unverified(me: Rank) -> None:
    """Every rank says that one rank's digests are not those of the capture."""
    me.join()
    with me.checkpointer(tiers=[eg.Memory()], agent=False) as ck:
        live = me.state(0)
        assert ck.restore(live) == 10
        assert me.holds(live, 10)
        assert ck.restored is not None
        assert ck.restored.unverified
        distributed.barrier()
        assert [record.unverified for record in ck.versions()] == [True]
        distributed.barrier()


def save_what_is_refused(me: Rank) -> None:
    """Step 10 is committed; of step 20 the storage refuses the shard of the last rank."""
    me.join()
    shared = me.folder / "shared"
    with me.checkpointer(tiers=[eg.Persistent(str(shared))]) as ck:
        ck.save(10, me.state(10)).wait(timeout=60)
        if me.rank == 0:
            (shared / "v0000000020-01" / f".rank-{me.world_size - 1:05d}.safetensors.partial").mkdir(parents=True)
        distributed.barrier()
        assert ck.save(20, me.state(20)).exception(timeout=60) is not None
        distributed.barrier()


def refuse_to_go_back(me: Rank) -> None:
    """No rank goes back by itself, all can when asked to, and all have step 20 when the storage works again."""
    me.join()
    shared = me.folder / "shared"
    with me.checkpointer(tiers=[eg.Persistent(str(shared))]) as ck:
        live = me.state(0)
        try:
            ck.restore(live)
        except RestoreError as error:
            assert str(error).startswith("step 20 (attempt 1) was captured by every rank"), error
            assert str(error).endswith("restore(version=10)."), error
        else:
            raise AssertionError("an older version was restored")
        assert me.holds(live, 0)
        assert ck.restore(live, version=10) == 10
        if me.rank == 0:
            next((shared / "v0000000020-01").glob(".rank-*.partial")).rmdir()
        distributed.barrier()
        assert ck.restore(live) == 20
        assert me.holds(live, 20)


def tear_what_is_refused(me: Rank) -> None:
    """Step 10 is committed; step 20 is captured by rank 0 alone, and the storage refuses it."""
    me.join()
    shared = me.folder / "shared"
    with me.checkpointer(tiers=[eg.Persistent(str(shared))]) as ck:
        ck.save(10, me.state(10)).wait(timeout=60)
        if me.rank == 0:
            (shared / "v0000000020-01").write_bytes(b"in the way")
            assert ck.save(20, me.state(20)).exception(timeout=60) is not None
        distributed.barrier()


def go_back_from_torn(me: Rank) -> None:
    me.join()
    with me.checkpointer(tiers=[eg.Persistent(str(me.folder / "shared"))]) as ck:
        live = me.state(0)
        assert ck.restore(live) == 10
        assert me.holds(live, 10)


SCENARIOS: dict[str, list[Callable[[Rank], None]]] = {
    "restore": [save_three, restore_30],
    "late group": [construct_before_the_group],
    "death": [die_before_the_second, restore_10],
    "corruption": [save_three, corrupt_30, restore_20],
    "world size": [save_three, other_world_size],
    "mismatch": [save_three, mismatch_on_one],
    "not shared": [forget_the_shared_folder],
    "lag": [lag],
    "threads": [in_threads],
    "failure": [fail_on_one],
    "new group": [new_group],
    "captured": [capture_and_die, restore_what_was_captured],
    "ticket of one": [capture_a_third_and_die, damage_the_ticket_of_one, restore_20_and_name_the_ticket],
    "digests of one": [save_in_memory, lose_the_digests_of_one, restore_unverified],
    "refused": [save_what_is_refused, refuse_to_go_back],
    "refused and torn": [tear_what_is_refused, go_back_from_torn],
    "lost disk": [save_three, lose_a_disk, refuse_to_start_anew],
}


def run_rank(phase: Callable[[Rank], None], me: Rank) -> None:
    torch.set_num_threads(1)
    signal.alarm(90)
    try:
        phase(me)
        if distributed.is_initialized():
            distributed.destroy_process_group()
    except BaseException:
        print(f"rank {me.rank} in {phase.__name__}:\n{traceback.format_exc()}", flush=True)
        os._exit(1)
    os._exit(0)


def main() -> int:
    scenario, world_size, nodes, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    kinds = sys.argv[5] if len(sys.argv) > 5 else "memory+local"
    for phase in SCENARIOS[scenario]:
        children = []
        for rank in range(world_size):
            if (child := os.fork()) == 0:
                run_rank(phase, Rank(rank, world_size, nodes, folder, phase.__name__, kinds))
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        expected = [0] * world_size
        if phase is die_before_the_second:
            expected[1] = -signal.SIGKILL
        if phase in (capture_and_die, capture_a_third_and_die):
            expected = [-signal.SIGKILL] * world_size
        if codes != expected:
            print(f"{phase.__name__}: exit codes {codes}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
