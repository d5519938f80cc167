"""What every rank of a group does in the tests of live injection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import evergrad as eg
from evergrad.errors import UsageError

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


def corrupt_one(_: Path, work: dict[str, Any]) -> dict[str, Any]:
    """A model hit on some ranks before step 2, trained on for three steps more."""
    twin = Twin().run(HIT_AT)
    faults = eg.inject_live(
        twin.model, twin.optimizer, eg.Scale(1.5), count=3, step=HIT_AT, now=HIT_AT, ranks=work["ranks"], seed=3
    )
    log = faults.log
    twin.run(STEPS - HIT_AT)
    hits = [] if log is None else [[hit.tensor, hit.index] for hit in log.faults()]
    return {"done": faults.done, "weights": twin.weights(), "hits": hits, "seed": log and str(log.settings["seed"])}


def refused(_: Path, work: dict[str, Any]) -> dict[str, Any]:
    """What is said of a model that is not wrapped yet, of buffers that DDP shares, and of ranks that are not there."""
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


def communicate(_: Path, work: dict[str, Any]) -> dict[str, Any]:
    """Buckets of rank 1 hit in step 3: DDP's own reduction until then, which another training does throughout."""
    group = distributed.new_group(list(range(work["ranks"])))
    if distributed.get_rank() >= work["ranks"]:
        return {}
    plain, hit = Twin(group), Twin(group)
    faults = eg.inject_live(
        hit.model, hit.optimizer, eg.SetValue(3.0), target="communication", count=work["count"], step=3, ranks=[1],
        seed=1, received=work["received"],
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


def wrap_anew(_: Path, work: dict[str, Any]) -> dict[str, Any]:
    """A comm hook of the user's own, without and with room for faults in it."""

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
