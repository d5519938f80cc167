"""Live faults among real DDP ranks: on k of n, still there steps later; and in what ranks send each other."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import evergrad as eg
from evergrad.errors import UsageError
from ranks import Rank, run_ranks

RANKS = 4
STEPS = 5
HIT_AT = 2


class Twin:
    """One training: the same model on every rank, other batches on each."""

    def __init__(self, group: Any = None) -> None:
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 7), nn.Linear(7, 2))
        self.model = DistributedDataParallel(self.net, process_group=group, bucket_cap_mb=0.0001)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.batches = torch.Generator().manual_seed(distributed.get_rank())

    def run(self, steps: int) -> Twin:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 6, generator=self.batches)).square().mean().backward()
            self.optimizer.step()
        return self

    def bits(self) -> str:
        return "".join(one.detach().numpy().tobytes().hex() for one in self.net.parameters())

    def weights(self) -> dict[str, list[float]]:
        return {f"model/{name}": one.detach().reshape(-1).tolist() for name, one in self.net.named_parameters()}


def differing(mine: dict[str, list[float]], other: dict[str, list[float]]) -> list[list[Any]]:
    return [[name, n] for name in mine for n, value in enumerate(mine[name]) if value != other[name][n]]


def corrupt_one(me: Rank, ranks: list[int]) -> dict[str, Any]:
    """A model hit on some ranks before step 2, trained on for three steps more."""
    me.join()
    twin = Twin().run(HIT_AT)
    faults = eg.inject_live(
        twin.model, twin.optimizer, eg.Scale(1.5), count=3, step=HIT_AT, now=HIT_AT, ranks=ranks, seed=3
    )
    log = faults.log
    twin.run(STEPS - HIT_AT)
    hits = [] if log is None else [[hit.tensor, hit.index] for hit in log.faults()]
    return {"done": faults.done, "weights": twin.weights(), "hits": hits, "seed": log and str(log.settings["seed"])}


@pytest.mark.parametrize("ranks", [[1], [0, 3]])
def test_what_is_hit_on_some_ranks_is_there_three_steps_later_where_their_logs_say(
    tmp_path: Path, ranks: list[int]
) -> None:
    found = run_ranks(RANKS, corrupt_one, tmp_path, ranks)
    clean = found[2]["weights"]
    for rank, answer in enumerate(found):
        assert answer["done"]
        assert differing(answer["weights"], clean) == sorted(
            answer["hits"], key=lambda hit: (list(clean).index(hit[0]), hit[1])
        )
        assert len(answer["hits"]) == (3 if rank in ranks else 0)
    seeds = [found[rank]["seed"] for rank in ranks]
    assert seeds == ["3"] if len(ranks) == 1 else len({"3", *seeds}) == 3
    assert len({str(found[rank]["hits"]) for rank in ranks}) == len(ranks), "each rank draws for itself"


def ask_for_what_ddp_would_erase(me: Rank) -> dict[str, Any]:
    """What is said of a model that is not wrapped yet, of buffers that DDP shares, and of ranks that are not there."""
    me.join()
    said = []
    twin = Twin()
    for model, chosen in ((twin.net, {}), (twin.model, {"target": "buffers"}), (twin.model, {"ranks": [4]})):
        try:
            eg.inject_live(model, twin.optimizer, eg.BitFlip(), **{"count": 1, "ranks": [0, 2]} | chosen)  # type: ignore[arg-type]
            said.append("")
        except UsageError as error:
            said.append(str(error))
    bare = eg.inject_live(twin.net, twin.optimizer, eg.BitFlip(), count=1, ranks=[2], bare=True)
    return {"said": said, "bare": bare.log is not None}


def test_what_ddp_would_erase_is_refused(tmp_path: Path) -> None:
    found = run_ranks(RANKS, ask_for_what_ddp_would_erase, tmp_path)
    bare, buffers, ranks = found[0]["said"]
    assert "rank 2: the model is not wrapped yet, and DDP's constructor gives rank 0's parameters" in bare
    assert "Wrap it first" in bare
    assert "rank 2: model/1.running_mean is a buffer" in buffers
    assert "rank 4 is not there: there are 0 to 3" in ranks
    assert all(answer["said"] == found[0]["said"] for answer in found), "on every rank alike"
    assert [answer["bare"] for answer in found] == [False, False, True, False], "a model that is never wrapped"


def communicate(me: Rank, ranks: int, *, count: int, received: bool) -> dict[str, Any]:
    """In a group of the first ranks, buckets of rank 1 are hit in step 3; before, all is as in another training."""
    me.join()
    group = distributed.new_group(list(range(ranks)))
    if me.rank >= ranks:
        return {}
    plain, hit = Twin(group), Twin(group)
    faults = eg.inject_live(
        hit.model, hit.optimizer, eg.SetValue(3.0), target="communication", count=count, step=3, ranks=[1],
        seed=1, received=received,
    )  # fmt: skip
    before = plain.run(3).bits() == hit.run(3).bits()  # the last of them with our hook, on rank 1 alone
    at = plain.run(1).bits() == hit.run(1).bits()
    log = faults.log
    return {
        "same before": before,
        "same at": at,
        "weights": hit.bits(),
        "done": faults.done,
        "hits": [] if log is None else [str(one) for one in log.faults()],
    }


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_a_rank_sends_reaches_all_and_nothing_else_is_touched(tmp_path: Path, ranks: int) -> None:
    found = run_ranks(RANKS, partial(communicate, count=4, received=False), tmp_path, ranks)[:ranks]
    assert all(answer["same before"] for answer in found), "our hook reduces as DDP does, to the last bit"
    assert not any(answer["same at"] for answer in found)
    assert len({answer["weights"] for answer in found}) == 1, "all ranks have received the same"
    assert [len(answer["hits"]) for answer in found] == [0, 4] + [0] * (ranks - 2)
    assert all(hit.startswith("communication/bucket-") for hit in found[1]["hits"])


def test_what_a_rank_receives_is_its_own_matter(tmp_path: Path) -> None:
    found = run_ranks(RANKS, partial(communicate, count=1, received=True), tmp_path, 2)[:2]
    assert [answer["same before"] for answer in found] == [True, True]
    assert [answer["same at"] for answer in found] == [True, False]
    assert found[1]["done"]


def wrap_anew(me: Rank) -> dict[str, Any]:
    """A comm hook of the user's own, without and with room for faults in it."""

    me.join()

    def own(state, bucket):  # type: ignore[no-untyped-def]
        return _mean(bucket)

    said = []
    for hook in (own, eg.comm_faults(own)):
        twin = Twin()
        twin.model.register_comm_hook(None, hook)
        faults = eg.inject_live(
            twin.model, twin.optimizer, eg.BitFlip("mantissa"), target="communication", count=1, step=3, ranks=[0]
        )
        try:
            twin.run(4)
            said.append(f"done: {faults.done}")
        except UsageError as error:
            twin.run(1)  # the others are in it
            said.append(str(error))
    return {"said": said}


def _mean(bucket: Any) -> Any:
    sent: Any = distributed.all_reduce(bucket.buffer().div_(distributed.get_world_size()), async_op=True)
    return sent.get_future().then(lambda future: future.value()[0])


def test_a_comm_hook_that_is_there_already_has_to_let_faults_in(tmp_path: Path) -> None:
    found = run_ranks(RANKS, wrap_anew, tmp_path)
    without, wrapped = found[0]["said"]
    assert "model.register_comm_hook(state, eg.comm_faults(hook))" in without
    assert wrapped == "done: True"
