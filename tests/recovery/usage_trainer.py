"""A small training that does one thing otherwise than the documentation says: `python usage_trainer.py WHAT [options]`.

Every process that comes to the end prints a line `ended {…}` of JSON: what it was told, what it saw, its weights.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import evergrad as eg
from evergrad.errors import UsageError
from evergrad.recovery.membership import StoreKeys
from evergrad.recovery.store import StoreClient

parser = argparse.ArgumentParser()
parser.add_argument("what")
parser.add_argument("--checkpoints", type=Path)
parser.add_argument("--policy", type=int)
parser.add_argument("--out", type=Path)
parser.add_argument("--await-spare", type=int, help="ranks begin to train when the spare of this number waits")
options = parser.parse_args()
what: str = options.what
uid = int(os.environ.get("EVERGRAD_UID", "0"))
torch.set_num_threads(1)
torch.manual_seed(0)
x0 = torch.randn(96, 8)
data = TensorDataset(x0, x0.sum(1, keepdim=True))
ended: dict[str, Any] = {"uid": uid, "RANK": os.environ.get("RANK"), "WORLD_SIZE": os.environ.get("WORLD_SIZE")}


class Endless:
    """A loader of which only it knows where it is."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.place += 1
            yield x0[:4], x0[:4].sum(1, keepdim=True)

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Shard(Endless):
    """A loader of each rank's own, with one batch less on rank 1."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.length = 7 if rank == 1 else 8

    def __iter__(self) -> Iterator[Any]:
        while self.place < self.length:
            self.place += 1
            yield x0[:4], x0[:4].sum(1, keepdim=True)
        self.place = 0


class TwoNets(nn.Module):
    """A generator and a discriminator, in one module whose forward runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(x)


def fresh() -> nn.Module:
    if what.startswith("no wrap"):
        torch.manual_seed(uid)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def one_rank_group() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


def sharded() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    one_rank_group()
    module: nn.Module = fully_shard(fresh())
    return module


def sharded_before() -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    one_rank_group()
    return FullyShardedDataParallel(fresh(), device_id=torch.device("cpu"))


def replicated() -> nn.Module:
    one_rank_group()
    return nn.parallel.DistributedDataParallel(fresh())


def in_meta() -> nn.Module:
    with torch.device("meta"):
        return fresh()


MODELS: dict[str, Callable[[], Any]] = {
    "fully_shard": sharded,
    "FSDP": sharded_before,
    "DDP": replicated,
    "meta": in_meta,
    "frozen": lambda: fresh().requires_grad_(False),
    "lazy": lambda: nn.LazyLinear(1),
    "function": lambda: fresh().forward,
    "compiled": lambda: torch.compile(fresh(), backend="eager"),
    "two nets": TwoNets,
    "wider on rank 1": lambda: nn.Linear(8, 2 if job.rank == 1 else 1),
    "wider on spares": lambda: nn.Linear(8, 2 if job.rank < 0 else 1),
    "other order on rank 1": lambda: nn.ModuleDict({name: nn.Linear(8, 8) for name in ("ab", "ba")[job.rank == 1]}),
}


def finish(net: Any) -> None:
    """Say what became of this process."""
    weights = b"".join(one.detach().numpy().tobytes() for one in net.parameters())
    ended["weights"] = hashlib.sha256(weights).hexdigest()[:12]
    print(f"ended {json.dumps(ended)}", flush=True)
    sys.exit(0)


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    found = model(x)
    parts = found if isinstance(found, tuple) else (found,)
    return torch.stack([nn.functional.mse_loss(part, y) for part in parts]).sum()


def train_alone(net: Any) -> None:
    """As a script does that knows of no job."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for x, y in DataLoader(data, batch_size=4, shuffle=True):
        optimizer.zero_grad()
        loss_of(net, x, y).backward()
        optimizer.step()


if what == "no join, rank 1 fails" and os.environ["RANK"] == "1":
    sys.exit(3)
if what.startswith("no join"):
    net = fresh()
    train_alone(net)
    finish(net)
if what == "spare stays out" and os.environ.get("EVERGRAD_SPARE"):
    finish(fresh())
if what == "spare fails" and os.environ.get("EVERGRAD_SPARE"):
    sys.exit(7)
if what == "init_process_group":
    dist.init_process_group("gloo")
# nanoGPT's idiom, in three ways of writing it: who has no RANK takes itself for the only process.
is_distributed = "RANK" in os.environ and int(os.environ.get("RANK", "-1")) != -1 and bool(os.environ["WORLD_SIZE"])
is_master = not is_distributed or int(os.environ["RANK"]) == 0
if what == "RANK" and not is_distributed:
    net = fresh()
    train_alone(net)
    (options.out / f"{uid}.master").write_text("")
    finish(net)

checkpointer = None
if options.checkpoints:
    checkpointer = eg.Checkpointer(options.checkpoints, agent=False, policy=options.policy)
every = 3 if checkpointer and not options.policy else None
wrong: Any = "runs/x" if what == "joins with a path" else checkpointer
unknown: dict[str, Any] = {"evry": 3} if what == "joins with a wrong keyword" else {}
job = eg.join(wrong, every=0 if what == "every 0" else every, **unknown)
ended["before"] = job.rank
if what == "joins twice":
    eg.join()
if what == "spare fails later":
    if job.rank < 0:
        sys.exit(7)
    while '"process_lost"' not in Path(os.environ["EVERGRAD_TIMELINE"]).read_text():
        time.sleep(0.01)
if what == "tracks twice":
    job.track(counter=nn.Linear(1, 1))
    job.track(counter=nn.Linear(1, 1))
if what == "tracks without a name":
    job.track(nn.Linear(1, 1))  # type: ignore[call-arg]
if what == "guards nothing":
    job.guard()
net = MODELS.get(what, fresh)()
if what == "only join":
    train_alone(net)
    finish(net)
if what == "own optimizer first":  # before there is anything of the job to train
    train_alone(nn.Linear(8, 1))
if what == "unfreezes":
    net[0].requires_grad_(False)
if what == "wraps later":
    for _ in job.batches(DataLoader(data, batch_size=4)):
        pass
is_left_out = what.startswith("no wrap") or what == f"only rank {1 - job.rank} wraps"
wrap_options: dict[str, Any] = {"bucket_cap_mb": "x"} if what == "a wrong option" else {}
model = net if is_left_out else job.wrap(copy.deepcopy(net) if what == "copy is wrapped" else net, **wrap_options)
parts = [net.first, net.second] if isinstance(net, TwoNets) else [net]
optimizers = [torch.optim.SGD(part.parameters(), lr=0.01, momentum=0.9) for part in parts]
own = nn.Linear(8, 1)
own_optimizer = torch.optim.SGD(own.parameters(), lr=0.01)
if what == "parameters outside":
    optimizers[0].add_param_group({"params": list(own.parameters())})
if what == "unused parameters outside":  # that the loss does not reach
    optimizers[0].add_param_group({"params": list(own.parameters())})
if what == "another optimizer":
    optimizers.append(torch.optim.SGD(nn.Linear(8, 1).parameters(), lr=0.01))
if what == "head only":
    optimizers = [torch.optim.SGD(net[2].parameters(), lr=0.01)]
if what == "makes optimizer state":  # as loading a state into it may do
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers[0].step()
if what == "spare warms up" and job.rank >= 0:
    host, _, port = os.environ["EVERGRAD_STORE"].rpartition(":")
    StoreClient(host, int(port), secret=None).wait(StoreKeys.fatal)
    while True:  # until the launcher ends it
        time.sleep(1)
if what in ("warms up", "spare warms up"):
    loss_of(model, *data[:4]).backward()
if options.await_spare is not None and job.rank >= 0:
    host, _, port = os.environ["EVERGRAD_STORE"].rpartition(":")
    StoreClient(host, int(port), secret=None).wait(StoreKeys.waiting(options.await_spare))

loader: Any = DataLoader(data, batch_size=4, shuffle=True)
if what == "DistributedSampler":
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
elif what == "endless":
    loader = Endless()
elif what == "own loaders differ":
    loader = Shard(job.rank)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
if what == "scaler is tracked":
    job.track(scaler=scaler)
seen: list[int] = []
kept = job.batches(loader) if what == "one call of batches" else None
for epoch in range(2):
    if what == "DistributedSampler":
        loader.sampler.set_epoch(epoch)
    if what == "evaluates":
        with torch.no_grad():
            ended["losses"] = [loss_of(model, x, y).item() for x, y in job.batches(loader)]
        continue
    for number, (x, y) in enumerate(loader if what == "no batches" else kept or job.batches(loader)):
        if what == "skips a batch" and job.rank == 1 and job.batch_index == 2:
            continue
        if what == "breaks on one rank" and job.rank == 1 and job.batch_index == 4:
            break
        if what == "breaks by its own counter" and number == 6:
            break
        if what == "trailing passes":  # five batches a step, each reduced: the last two of an epoch go into none
            if job.batch_index % 5 == 0:
                optimizers[0].zero_grad()
            loss_of(model, x, y).backward()
            if job.batch_index % 5 == 4:
                job.step(*optimizers)
            continue
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=what != "no backward, zeros")
        if what != "no batches":
            seen.append(job.batch_index)
        if what == "nests":
            next(iter(job.batches(loader)))
        if what == "only accumulates":
            with model.no_sync():
                loss_of(model, x, y).backward()
            continue
        loss = loss_of(net if what == "wrapped is not called" else model, x, y)
        if not what.startswith("no backward") or job.batch_index == 0:
            loss = loss + loss_of(own, x, y) if what == "parameters outside" else loss
            (scaler.scale(loss) if "scaler" in what else loss).backward()
        if what == "scaler unscales":
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        if what.startswith("updates by hand"):
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= 0.01 * parameter.grad
            if what == "updates by hand, breaks":
                break
            continue
        if what == "no wrap, by hand":
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= 0.01 * parameter.grad
            continue
        if what == "first epoch only" and epoch == 1:
            continue
        if what in ("optimizer.step", "no wrap, optimizer.step"):
            optimizers[0].step()
            continue
        if what == "steps a list":
            job.step(optimizers)  # type: ignore[arg-type]
        if job.step(*optimizers) and what == "both steps" and job.applied == 2:
            optimizers[0].step()
        if what == "scaler unscales":
            scaler.update()
        if what == "own optimizer":
            own_optimizer.zero_grad()
            nn.functional.mse_loss(own(x), y).backward()
            own_optimizer.step()
        if what == "endless":
            time.sleep(0.01)
            if job.world_size > 1 and job.applied >= 12:
                break
            if job.world_size == 1 and "cannot_grow" in Path(os.environ["EVERGRAD_TIMELINE"]).read_text():
                break  # one rank, so it may
    if what == "endless" or (what == "rank 0 ends early" and job.rank == 0):
        break
    if what == "unfreezes":
        net[0].requires_grad_(True)
    if what == "between epochs" and epoch == 0:
        optimizers[0].step()
if what == "told to leave as it ends":
    try:
        job.step(*optimizers)
    except UsageError:
        shown = sys.excepthook
        sys.excepthook = lambda *error: (os.kill(os.getpid(), signal.SIGTERM), shown(*error))
        raise
ended |= {"rank": job.rank, "world_size": job.world_size, "applied": job.applied, "batches": seen, "master": is_master}
if checkpointer is not None:
    checkpointer.close()
finish(net)
