"""A training script with what larger ones have: scaler, hooks, two optimizers, loaders of every kind.

python rich_trainer.py OUT [--loader KIND] [--scaler] [--hooks] …: every process that finishes leaves OUT/<uid>.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import evergrad as eg
from evergrad.recovery.membership import StoreKeys
from evergrad.recovery.store import StoreClient

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--loader", choices=("shuffled", "weighted", "batches", "stream"), default="shuffled")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--scaler", action="store_true")
parser.add_argument("--hooks", action="store_true")
parser.add_argument("--samples", type=int, default=48)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--break-after", type=int, help="leave the first epoch after so many steps")
parser.add_argument("--checkpoints", type=Path)
parser.add_argument("--every", type=int)
parser.add_argument("--fall", type=int, help="the process of this number dies before generation 1 has formed")
parser.add_argument("--await-spare", type=int, help="at step 8 everyone waits until the spare of this number waits")
parser.add_argument("--one-optimizer", action="store_true")
parser.add_argument("--die-once", type=Path, help="rank 1 dies at step 9, unless this file is there, which it makes")
options = parser.parse_args()
BATCH, OVERFLOWS = 4, (2, 5)


class Stream:
    """An endless file of numbers, of which this rank reads its share; only it knows where it is."""

    def __init__(self, rank: int, ranks: int, length: int) -> None:
        self.rank, self.ranks, self.length, self.place = rank, ranks, length, 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while self.place < self.length:
            self.place += 1
            number = (self.place * self.ranks + self.rank) * BATCH
            samples = torch.arange(number, number + BATCH)
            yield torch.sin(samples[:, None] * torch.arange(1, 9) * 0.1), samples
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place, "rank": self.rank, "ranks": self.ranks}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self.rank, self.ranks = state["place"], state["rank"], state["ranks"]


class Groups:
    """Batches of a user's own: neighbours together, in an order that only this process draws."""

    def __iter__(self) -> Iterator[list[int]]:
        for begin in torch.randperm(options.samples // BATCH).tolist():
            yield list(range(begin * BATCH, begin * BATCH + BATCH))

    def __len__(self) -> int:
        return options.samples // BATCH


def loader_of(rank: int, ranks: int) -> Any:
    if options.loader == "stream":
        return Stream(rank, ranks, options.samples // BATCH // ranks)
    data = TensorDataset(torch.randn(options.samples, 8, generator=torch.Generator().manual_seed(0)),
                         torch.arange(options.samples))  # fmt: skip
    if options.loader == "weighted":
        sampler = WeightedRandomSampler(torch.linspace(1, 2, options.samples).tolist(), options.samples)
        return DataLoader(data, batch_size=BATCH, sampler=sampler, num_workers=options.workers)
    if options.loader == "batches":
        return DataLoader(data, batch_sampler=Groups(), num_workers=options.workers)  # type: ignore[arg-type]
    return DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=options.workers)


torch.set_num_threads(1)
checkpointer = eg.Checkpointer(options.checkpoints, agent=False) if options.checkpoints else None
job = eg.join(checkpointer, every=options.every)
torch.manual_seed(1)
body = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64))
net = nn.Sequential(body, nn.Linear(64, 1))
torch.manual_seed(100 + job.rank)
hooked: list[int] = []


def counting(hook: Any) -> Any:
    def counted(state: Any, bucket: Any) -> Any:
        hooked.append(bucket.index())
        return hook(state, bucket)

    return counted


model = job.wrap(net, bucket_cap_mb=0.008, hooks=[fp16_compress_wrapper, counting] if options.hooks else [])
optimizers: list[torch.optim.Optimizer]
if options.one_optimizer:
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)]
else:
    optimizers = [
        torch.optim.SGD(body.parameters(), lr=0.05, momentum=0.9),
        torch.optim.AdamW(net[1].parameters(), lr=0.01),
    ]
scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], step_size=3, gamma=0.5)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=options.scaler)
job.track(scheduler=scheduler, scaler=scaler)
seen_lr: list[float] = []
optimizers[0].register_step_pre_hook(lambda one, *_: seen_lr.append(one.param_groups[0]["lr"]))
loader = loader_of(job.rank, job.world_size)

steps: dict[int, dict[str, Any]] = {}
epochs: list[int] = []
for epoch in range(options.epochs):
    epochs.append(0)
    for x, samples in job.batches(loader):
        step, is_idle = job.applied, job.idle
        if options.await_spare is not None and step == 8:
            host, _, port = os.environ["EVERGRAD_STORE"].rpartition(":")
            StoreClient(host, int(port), secret=None).wait(StoreKeys.waiting(options.await_spare))
        if options.die_once and step == 9 and job.rank == 1 and not options.die_once.exists():
            options.die_once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        for optimizer in optimizers:
            optimizer.zero_grad()
        hooked.clear()
        loss = model(x).square().mean()
        overflows = options.scaler and step in OVERFLOWS and job.rank == 1
        scaler.scale(loss * (float("inf") if overflows else 1.0)).backward()
        for optimizer in optimizers if options.scaler else ():
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 10.0)
        seen_lr.clear()
        was_applied = job.step(*optimizers)
        if job.applied == step:
            if job.generation == 1 and os.environ.get("EVERGRAD_UID") == str(options.fall):
                os.kill(os.getpid(), signal.SIGKILL)
            continue  # it is done again
        epochs[-1] += 1
        steps[step] = {
            "loss": loss.item(), "applied": was_applied, "scale": scaler.get_scale(), "hooked": list(hooked),
            "samples": [] if is_idle else samples.tolist(), "world_size": job.world_size,
            "lr": scheduler.get_last_lr()[0], "seen_lr": list(seen_lr),
        }  # fmt: skip
        if was_applied:
            scheduler.step()
        if epoch == 0 and epochs[0] == options.break_after:
            break

weights = b"".join(one.detach().numpy().tobytes() for one in net.parameters())
state = b"".join(one.numpy().tobytes() for one in net.state_dict().values())
result = {
    "rank": job.rank, "world_size": job.world_size, "generation": job.generation, "applied": job.applied,
    "weights": hashlib.sha256(weights).hexdigest(), "state": hashlib.sha256(state).hexdigest(),
    "steps": steps, "epochs": epochs, "scale": scaler.get_scale(),
}  # fmt: skip
options.out.mkdir(parents=True, exist_ok=True)
partial = options.out / f"{os.environ.get('EVERGRAD_UID', os.environ.get('RANK', 'alone'))}.partial"
partial.write_text(json.dumps(result))
partial.replace(partial.with_suffix(".json"))  # a process that is killed here leaves no half of it
if checkpointer is not None:
    checkpointer.close()
