"""Jobs that go on with another number of ranks: real processes, a real gloo group, FSDP2 and DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import evergrad as eg
from evergrad.checkpoint.tensor_placement import ALL, Placements, TensorPiece
from evergrad.errors import DamagedFile, RestoreError
from ranks import Rank, run_ranks

_KEPT: list[nn.Module] = []  # a wrapper that is collected joins threads of gloo
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


def checkpointer(me: Rank, *tiers: Any, **settings: Any) -> eg.Checkpointer:
    chosen = tiers or (eg.Memory(), eg.Local(me.folder / "disk", keep=9))
    return eg.Checkpointer(me.folder / "run", tiers=list(chosen), **settings)


def trained(me: Rank, kind: str, steps: int = 3) -> dict[str, Any]:
    """A model under FSDP2 or DDP, and its optimizer, after a few steps."""
    torch.manual_seed(7)
    model: nn.Module = Net()
    wrapped = model
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (me.world_size,))  # also where there is a GPU
        for layer in (model.first, model.last):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
        _KEPT.append(wrapped)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(me.rank)
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


def save(me: Rank, kind: str, *tiers: Callable[[Rank], Any]) -> None:
    """Save a trained model, and write what it is in one piece to whole.pt."""
    me.join()
    state = trained(me, kind)
    with checkpointer(me, *(tier(me) for tier in tiers)) as ck:
        pending = ck.save(30, state)
        for tier in ck._stores:
            pending.wait(tier, timeout=60)
    gathered = whole(state)
    if me.rank == 0:
        torch.save(gathered, me.folder / "whole.pt")


def restore(
    me: Rank, kind: str, *tiers: Callable[[Rank], Any], steps: int = 0, version: int | str | None = None
) -> None:
    """Restore into a job that has done so many steps of its own: without any, its optimizer has no state yet."""
    if me.world_size > 1 or kind != "plain":
        me.join()
    state = trained(me, kind, steps)
    with checkpointer(me, *(tier(me) for tier in tiers)) as ck:
        asked = {} if version is None else {"version": version}
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


def _bucket(me: Rank) -> Any:
    return eg.Persistent(f"file://{me.folder}/bucket", keep=9)


def _disk(me: Rank) -> Any:
    return eg.Local(me.folder / "disk", keep=9)


def test_fsdp2_on_four_ranks_goes_on_with_four_with_two_with_one_and_without_fsdp(tmp_path: Path) -> None:
    run_ranks(4, save, tmp_path, "fsdp")
    run_ranks(4, restore, tmp_path, "fsdp")
    run_ranks(2, partial(restore, version=30), tmp_path, "fsdp")
    run_ranks(1, partial(restore, steps=2, version=30), tmp_path, "fsdp")
    run_ranks(1, partial(restore, version=30), tmp_path, "plain")


def test_fsdp2_on_four_ranks_goes_on_with_three_from_the_bucket_alone(tmp_path: Path) -> None:
    run_ranks(4, save, tmp_path, "fsdp", _disk, _bucket)
    run_ranks(3, restore, tmp_path, "fsdp", _bucket)
    run_ranks(1, partial(restore, version=30), tmp_path, "plain", _bucket)


@pytest.mark.slow
def test_ddp_on_four_ranks_goes_on_with_two_and_with_one(tmp_path: Path) -> None:
    run_ranks(4, save, tmp_path, "ddp")
    run_ranks(2, restore, tmp_path, "ddp")
    run_ranks(1, partial(restore, steps=1, version=30), tmp_path, "plain")


@pytest.mark.slow
def test_ddp_on_four_ranks_goes_on_from_the_bucket_alone(tmp_path: Path) -> None:
    run_ranks(4, save, tmp_path, "ddp", _disk, _bucket)
    run_ranks(4, restore, tmp_path, "ddp", _bucket)
    run_ranks(2, partial(restore, version=30), tmp_path, "ddp", _bucket)


@pytest.mark.slow
def test_what_ddp_saved_can_be_cut_by_fsdp2(tmp_path: Path) -> None:
    run_ranks(2, save, tmp_path, "ddp")
    run_ranks(2, restore, tmp_path, "fsdp")
    run_ranks(3, partial(restore, version=30), tmp_path, "fsdp")


def own_state(me: Rank, value: int) -> dict[str, Any]:
    return {
        "cursor": value + me.rank,
        "rng": torch.full((3,), value + me.rank),
        "epoch": value,
        "shared": torch.ones(2),
    }


def save_own(me: Rank) -> None:
    me.join()
    with checkpointer(me, replicated="shared") as ck:
        ck.save(30, own_state(me, 10)).wait(timeout=60)


def restore_own(me: Rank) -> None:
    if me.world_size > 1:
        me.join()
    with checkpointer(me, replicated="shared") as ck:
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


def test_of_what_was_each_ranks_own_the_user_says_who_gets_what(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    for world_size, function in ((4, save_own), (2, restore_own), (1, restore_own)):
        run_ranks(world_size, function, tmp_path, output=output)
    assert "rank 1: rng: was each rank's own" in output.read_text()


def claim_what_differs(me: Rank) -> None:
    """Said to be replicated, and not equal on all ranks: it is each rank's own after all."""
    me.join()
    with checkpointer(me, eg.Local(me.folder / "disk"), _bucket(me), replicated=True) as ck:
        state = {"same": torch.arange(1000.0), "differs": torch.full((1000,), float(me.rank)), "rank": me.rank}
        ck.save(30, state).wait("persistent", timeout=60)


def get_what_differs(me: Rank) -> None:
    me.join()
    with checkpointer(me, _bucket(me), replicated=True) as ck:
        state = {"same": torch.zeros(1000), "differs": torch.zeros(1000), "rank": -1}
        assert ck.restore(state) == 30
        assert torch.equal(state["same"], torch.arange(1000.0))
        assert torch.equal(state["differs"], torch.full((1000,), float(me.rank)))
        assert state["rank"] == me.rank


@pytest.mark.slow
def test_what_is_called_replicated_and_differs_is_each_ranks_own(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    run_ranks(3, claim_what_differs, tmp_path, output=output)
    run_ranks(3, get_what_differs, tmp_path, output=output)
    assert "no intact shard" not in output.read_text()


def big() -> dict[str, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    _KEPT.append(nn.parallel.DistributedDataParallel(model))
    return {"model": _KEPT[-1]}


def save_big(me: Rank) -> None:
    me.join()
    with checkpointer(me, eg.Local(me.folder / "disk"), _bucket(me)) as ck:
        ck.save(30, big()).wait("persistent", timeout=60)


def test_what_all_ranks_have_alike_is_flushed_once_in_balanced_parts(tmp_path: Path) -> None:
    run_ranks(4, save_big, tmp_path)
    sizes = [shard.stat().st_size for shard in tmp_path.glob("bucket/v*/rank-*.safetensors")]
    once = 12 * (64 * 64 + 64) * 4
    assert len(sizes) == 4
    assert once < sum(sizes) < once + 4 * 32768, sizes
    assert max(sizes) < 1.5 * min(sizes), sizes


def test_placements_survive_the_way_through_a_manifest_and_the_narrowest_counts() -> None:
    said = Placements(("model/",), ("model/bn",), {"model/fc.weight": TensorPiece((4, 2), (2, 0), (2, 2))})
    assert Placements.from_json(said.to_json()) == said
    kinds = [said.kind(path) for path in ("model/fc.weight", "model/bn", "model/fc.bias", "modelled")]
    assert kinds == ["sharded", "first", "replicated", "own"]
    assert Placements((ALL,)).kind("anything") == "replicated"


@pytest.mark.parametrize(
    "data",
    [
        {"sharded": {"a": {"shape": [4], "offset": [3], "piece": [2]}}},
        {"sharded": {"a": {"shape": [4], "offset": [-1], "piece": [2]}}},
        {"sharded": {"a": {"shape": [4, 2], "offset": [0], "piece": [2]}}},
        {"sharded": ["a"]},
        {"replicated": [7]},
    ],
)
def test_placements_that_cannot_be_are_refused(data: dict[str, Any]) -> None:
    with pytest.raises(DamagedFile, match="the placements cannot be"):
        Placements.from_json(data)
