"""Jobs that go on with another number of ranks: `python resharded.py SCENARIO FOLDER`.

Each scenario is a list of phases; each phase is a job of its own, with so many ranks, forked before there is any
other thread. What the whole state was, in one piece, is written to FOLDER/whole.pt by whoever saved it.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first step of an optimizer would import it, in every rank
import torch.distributed.fsdp
import torch.distributed.tensor
from torch import distributed, nn

import evergrad as eg
import evergrad.checkpoint.checkpointer
from evergrad.errors import RestoreError

FEATURES = 7  # divides by nothing: pieces of different sizes, and empty ones


class Net(nn.Module):
    """Tied weights, a norm with buffers, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 5)
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


class Rank:
    """One rank of one phase."""

    def __init__(self, rank: int, world_size: int, folder: Path, number: int) -> None:
        self.rank, self.world_size, self.folder = rank, world_size, folder
        self._group = f"file://{folder}/store-{number}"

    def join(self) -> None:
        distributed.init_process_group("gloo", self._group, rank=self.rank, world_size=self.world_size)

    def checkpointer(self, *tiers: Any, **settings: Any) -> eg.Checkpointer:
        chosen = tiers or (eg.Memory(), eg.Local(self.folder / "disk", keep=9))
        return eg.Checkpointer(self.folder / "run", tiers=list(chosen), **settings)

    def trained(self, kind: str, steps: int = 3) -> dict[str, Any]:
        """A model under FSDP2 or DDP, and its optimizer, after a few steps."""
        torch.manual_seed(7)
        model: nn.Module = Net()
        wrapped = model
        if kind == "fsdp":
            mesh = torch.distributed.device_mesh.init_device_mesh(
                "cpu", (self.world_size,)
            )  # also where there is a GPU
            for layer in (model.first, model.last):
                torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
            torch.distributed.fsdp.fully_shard(model, mesh=mesh)
        elif kind == "ddp":
            wrapped = nn.parallel.DistributedDataParallel(model)
            self.wrapped = wrapped  # kept alive: what is saved is the module inside
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(self.rank)
        for _ in range(steps):
            optimizer.zero_grad()
            wrapped(torch.randn(8, FEATURES, generator=generator)).square().sum().backward()
            optimizer.step()
        return {"model": model, "optimizer": optimizer, "epoch": steps}


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor in one piece; rank 0's buffers are everybody's. All ranks call it."""
    found: dict[str, torch.Tensor] = {}
    for name, value in _leaves({"model": state["model"].state_dict(), "optimizer": state["optimizer"].state_dict()}):
        full = value.full_tensor() if hasattr(value, "full_tensor") else value.detach().clone()
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            distributed.broadcast(full, 0)
        found[name] = full
    return found


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves(child, f"{name}/{key}")


def save(kind: str, *tiers: Callable[[Rank], Any], **settings: Any) -> Callable[[Rank], None]:
    def phase(me: Rank) -> None:
        me.join()
        state = me.trained(kind)
        with me.checkpointer(*(tier(me) for tier in tiers), **settings) as ck:
            pending = ck.save(30, state)
            for tier in ck._stores:
                pending.wait(tier, timeout=60)
        gathered = whole(state)
        if me.rank == 0:
            torch.save(gathered, me.folder / "whole.pt")

    return phase


def restore(kind: str, *tiers: Callable[[Rank], Any], steps: int = 0, **asked: Any) -> Callable[[Rank], None]:
    """Restore into a job that has done so many steps of its own: without any, its optimizer has no state yet."""

    def phase(me: Rank) -> None:
        if me.world_size > 1 or kind != "plain":
            me.join()
        state = me.trained(kind, steps)
        with me.checkpointer(*(tier(me) for tier in tiers)) as ck:
            assert ck.restore(state, **asked) == 30
            assert state["epoch"] == 3
            expected = torch.load(me.folder / "whole.pt", weights_only=True)
            found = whole(state)
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(found[name], tensor), name
            assert ck.restored is not None
            ck.save(31, state).wait(timeout=60)  # and it goes on
            assert ck.restore(state, version=31) == 31

    return phase


def own_state(me: Rank, value: int) -> dict[str, Any]:
    return {
        "cursor": value + me.rank,
        "rng": torch.full((3,), value + me.rank),
        "epoch": value,
        "shared": torch.ones(2),
    }


def save_own(me: Rank) -> None:
    me.join()
    with me.checkpointer(replicated="shared") as ck:
        ck.save(30, own_state(me, 10)).wait(timeout=60)


def restore_own(me: Rank) -> None:
    if me.world_size > 1:
        me.join()
    with me.checkpointer(replicated="shared") as ck:
        state = own_state(me, 0)
        try:
            ck.restore(state)
        except RestoreError as error:
            assert "rng (and 1 more) was each rank's own when 4 ranks saved it" in str(error), error
        else:
            raise AssertionError("nobody said what each rank gets")
        assert state["cursor"] == me.rank, "touched"
        seen = []

        def choose(path: str, saved: list[Any], rank: int, world_size: int) -> Any:
            assert (rank, world_size, len(saved)) == (me.rank, me.world_size, 4)
            seen.append(path)
            return saved[3 - rank]

        assert ck.restore(state, resize=choose) == 30
        assert sorted(seen) == ["cursor", "rng"]
        assert (state["cursor"], state["rng"].tolist(), state["epoch"]) == (13 - me.rank, [13 - me.rank] * 3, 10)
        left = own_state(me, 0)
        assert ck.restore(left, strict=False) == 30
        assert (left["cursor"], left["epoch"]) == (me.rank, 10)
        assert left["rng"].tolist() == [me.rank] * 3


def claim_what_differs(me: Rank) -> None:
    """Said to be replicated, and not equal on all ranks: it is each rank's own after all."""
    me.join()
    with me.checkpointer(eg.Local(me.folder / "disk"), _bucket(me), replicated=True) as ck:
        state = {"same": torch.arange(1000.0), "differs": torch.full((1000,), float(me.rank)), "rank": me.rank}
        ck.save(30, state).wait("persistent", timeout=60)


def get_what_differs(me: Rank) -> None:
    me.join()
    with me.checkpointer(_bucket(me), replicated=True) as ck:
        state = {"same": torch.zeros(1000), "differs": torch.zeros(1000), "rank": -1}
        assert ck.restore(state) == 30
        assert torch.equal(state["same"], torch.arange(1000.0))
        assert torch.equal(state["differs"], torch.full((1000,), float(me.rank)))
        assert state["rank"] == me.rank


def _bucket(me: Rank) -> Any:
    return eg.Persistent(f"file://{me.folder}/bucket", keep=9)


def check_shares(me: Rank) -> None:
    """What is alike was stored once, and in parts of about the same size."""
    if me.rank == 0:
        shards = sorted(me.folder.glob("bucket/v*/rank-*.safetensors"))
        whole_size = next(me.folder.glob("disk/*/*/v*/rank-00000.safetensors")).stat().st_size
        assert len(shards) == 4
        assert sum(shard.stat().st_size for shard in shards) < 2 * whole_size + 4 * 4096, "stored more than once"


def big(me: Rank) -> dict[str, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    me.wrapped = nn.parallel.DistributedDataParallel(model)
    return {"model": me.wrapped}


def save_big(me: Rank) -> None:
    me.join()
    with me.checkpointer(eg.Local(me.folder / "disk"), _bucket(me)) as ck:
        ck.save(30, big(me)).wait("persistent", timeout=60)


def check_big(me: Rank) -> None:
    shards = sorted(me.folder.glob("bucket/v*/rank-*.safetensors"))
    sizes = [shard.stat().st_size for shard in shards]
    once = 12 * (64 * 64 + 64) * 4
    assert len(sizes) == 4
    assert once < sum(sizes) < once + 4 * 32768, sizes
    assert max(sizes) < 1.5 * min(sizes), sizes


def _disk(me: Rank) -> Any:
    return eg.Local(me.folder / "disk", keep=9)


Phase = tuple[int, Callable[[Rank], None]]
SCENARIOS: dict[str, list[Phase]] = {
    "fsdp": [
        (4, save("fsdp")),
        (4, restore("fsdp")),
        (2, restore("fsdp", version=30)),
        (1, restore("fsdp", steps=2, version=30)),
        (1, restore("plain", version=30)),
    ],
    "fsdp bucket": [
        (4, save("fsdp", _disk, _bucket)), (3, restore("fsdp", _bucket)), (1, restore("plain", _bucket, version=30)),
    ],
    "ddp": [(4, save("ddp")), (2, restore("ddp")), (1, restore("plain", steps=1, version=30))],
    "ddp bucket": [
        (4, save("ddp", _disk, _bucket)), (4, restore("ddp", _bucket)), (2, restore("ddp", _bucket, version=30)),
    ],
    "ddp to fsdp": [(2, save("ddp")), (2, restore("fsdp")), (3, restore("fsdp", version=30))],
    "own": [(4, save_own), (2, restore_own), (1, restore_own)],
    "claims": [(3, claim_what_differs), (3, get_what_differs)],
    "shares": [(4, save_big), (1, check_big)],
}  # fmt: skip


def run_rank(phase: Callable[[Rank], None], me: Rank) -> None:
    torch.set_num_threads(1)
    signal.alarm(90)
    try:
        phase(me)
        if distributed.is_initialized():
            distributed.destroy_process_group()
    except BaseException:
        print(f"rank {me.rank} of {me.world_size}:\n{traceback.format_exc()}", flush=True)
        os._exit(1)
    os._exit(0)


def main() -> int:
    scenario, folder = sys.argv[1], Path(sys.argv[2])
    for number, (world_size, phase) in enumerate(SCENARIOS[scenario]):
        children = []
        for rank in range(world_size):
            if (child := os.fork()) == 0:
                run_rank(phase, Rank(rank, world_size, folder, number))
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            print(f"phase {number} of {scenario}: exit codes {codes}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
