"""A training script that changes hyper-parameters by hand, and does things between its epochs; run by `evergrad run`.

python hyper_trainer.py OUT [OPTIONS]: every process that finishes leaves OUT/<uid>.json: digests of weights, buffers
and optimizer state, and the learning rates that it trained with, by step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler, random_split

import evergrad as eg

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument(
    "--lr", choices=["scheduler", "set", "own-counter", "multiplied", "one-cycle", "lambda"], default="set"
)
parser.add_argument("--evaluate", choices=["no", "dropout", "rank 0"], default="no", help="between epochs")
parser.add_argument("--evaluate-after-steps", choices=["no", "all", "rank 0"], default="no", help="every third")
parser.add_argument(
    "--evaluate-in-steps", choices=["no", "job.rank", "RANK"], default="no", help="on rank 0, every third"
)
parser.add_argument("--die-after-epoch", type=int, help="rank 1 does, before it evaluates")
parser.add_argument("--epoch-scheduler", action="store_true", help="a scheduler that steps between epochs")
parser.add_argument("--untracked-epoch-scheduler", action="store_true", help="that one, not given to job.track")
parser.add_argument("--generator", choices=["torch", "numpy", "python", "object"], help="noise from one of its own")
parser.add_argument("--generator-unused", action="store_true", help="it draws before the loop alone")
parser.add_argument("--optimizers", type=int, default=1)
parser.add_argument("--late-optimizer", action="store_true", help="made inside of the loop")
parser.add_argument("--drift", action="store_true", help="a joiner's weights change after its first step")
parser.add_argument("--own-split", action="store_true", help="each process takes other samples: no seed")
parser.add_argument("--own-sampler", action="store_true", help="one that draws from torch's generator")
parser.add_argument("--zero-grad", choices=["none", "zeros", "never", "after"], default="none")
parser.add_argument("--checkpoints", type=Path)
parser.add_argument("--every", type=int, default=3)
parser.add_argument("--until", type=int, help="leave the loop after so many steps")
parser.add_argument("--guard", type=int)
parser.add_argument("--await-generation", type=int, help="train until twelve steps of it are applied")
options = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(1)
features = torch.randn(64, 12)
data: Dataset[Any] = TensorDataset(features, (features.sum(1) > 0).long())
if options.own_split:
    data = random_split(data, [48, 16], torch.Generator().manual_seed(os.getpid()))[0]
if options.own_sampler:
    loader = DataLoader(data, batch_size=8, sampler=WeightedRandomSampler(torch.arange(64) + 1.0, 64))
else:
    loader = DataLoader(data, batch_size=8, shuffle=True)
net = nn.ModuleDict({
    "body": nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2)),
    "head": nn.Linear(24, 2),
})  # fmt: skip


class Whole(nn.Module):
    """The two parts in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.parts["head"](self.parts["body"](x))
        return out


checkpointer = eg.Checkpointer(options.checkpoints, agent=False) if options.checkpoints else None
job = eg.join(checkpointer, every=options.every if checkpointer else None)
was_spare = job.rank < 0
is_master = os.environ["RANK"] == "0"
torch.manual_seed(100 + job.rank)
model = job.wrap(Whole())


def make_optimizers() -> list[torch.optim.Optimizer]:
    """One for everything, or one for each part."""
    if options.optimizers == 1:
        decayed = [parameter for parameter in net.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in net.parameters() if parameter.dim() == 1]
        return [torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.02)]
    return [torch.optim.AdamW(net[name].parameters(), lr=0.02) for name in ("body", "head")]


made: list[torch.optim.Optimizer] = [] if options.late_optimizer else make_optimizers()
scheduler = torch.optim.lr_scheduler.StepLR(made[0], step_size=1, gamma=0.7) if made else None
if scheduler is not None and (options.epoch_scheduler or options.lr == "scheduler"):
    job.track(scheduler=scheduler)
stepwise: Any = scheduler
if options.lr == "one-cycle":
    stepwise = torch.optim.lr_scheduler.OneCycleLR(made[0], max_lr=0.05, total_steps=24)
elif options.lr == "lambda":
    stepwise = torch.optim.lr_scheduler.LambdaLR(made[0], lambda number: 1 / (1 + number))
if options.guard:
    job.guard(every=options.guard)


class Noise:
    """Random numbers from a generator of the script's own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def draw(self) -> float:
        return float(torch.rand((), generator=self.generator))


noise = Noise()
numbers, drawn_by = np.random.default_rng(5), random.Random(5)
draw = {
    "torch": noise.draw,
    "object": noise.draw,
    "numpy": numbers.random,
    "python": drawn_by.random,
    None: lambda: 0.0,
}[options.generator]
rates: dict[int, list[float]] = {}
counter = 0
last: int | None = -1 if options.await_generation is None else None
for epoch in range(options.epochs):
    model.train()
    for x, y in job.batches(loader):
        if not made:
            made.extend(make_optimizers())
        if last is None and job.generation >= options.await_generation:
            last = job.applied + 12
        step = counter if options.lr == "own-counter" else job.applied
        for group in [group for optimizer in made for group in optimizer.param_groups]:
            if options.lr in ("set", "own-counter"):
                group["lr"] = 0.02 * (1 + math.cos(0.3 * step)) / 2 + 0.001
            elif options.lr == "multiplied":
                group["lr"] *= 0.9
        for optimizer in made if options.zero_grad in ("none", "zeros") else ():
            optimizer.zero_grad(set_to_none=options.zero_grad == "none")
        is_first = is_master if options.evaluate_in_steps == "RANK" else job.rank == 0
        if options.evaluate_in_steps != "no" and is_first and job.applied % 3 == 0:
            with torch.no_grad():
                model.module(features[:16])
        if not options.generator_unused:
            x = x + 0.1 * draw()
        nn.functional.cross_entropy(model(x), y).backward()
        rates[job.applied] = [group["lr"] for optimizer in made for group in optimizer.param_groups]
        was_applied = job.step(*made)
        for optimizer in made if options.zero_grad == "after" else ():
            optimizer.zero_grad()
        if was_applied:
            counter += 1
            if options.lr in ("scheduler", "one-cycle", "lambda"):
                stepwise.step()
            if options.drift and was_spare:
                with torch.no_grad():
                    net["head"].bias += 0.125
            evaluates = options.evaluate_after_steps == "all" or (options.evaluate_after_steps[-1] == str(job.rank))
            if evaluates and job.applied % 3 == 0:
                with torch.no_grad():
                    model.module(features[:16])
        if last is None:
            time.sleep(0.01)
        if job.applied in (options.until, last):
            break
    if options.die_after_epoch == epoch and job.rank == 1 and job.generation == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if options.evaluate == "dropout" or (options.evaluate == "rank 0" and job.rank == 0):
        with torch.no_grad():  # dropout stays on, and draws random numbers; batch norm takes the batch in
            model.module(features[:16])
    if (options.epoch_scheduler or options.untracked_epoch_scheduler) and scheduler is not None:
        scheduler.step()
    if job.applied in (options.until, last):
        break


def digest_of(things: Any) -> str:
    """A digest of nested dicts and lists of tensors and numbers."""
    found = hashlib.blake2b(digest_size=8)

    def take(thing: Any) -> None:
        if isinstance(thing, torch.Tensor):
            found.update(thing.detach().cpu().numpy().tobytes())
        elif isinstance(thing, dict):
            for key, value in thing.items():
                found.update(str(key).encode())
                take(value)
        elif isinstance(thing, list | tuple):
            for value in thing:
                take(value)
        else:
            found.update(repr(thing).encode())

    take(things)
    return found.hexdigest()


states = [optimizer.state_dict() for optimizer in made]
result = {
    "rank": job.rank, "generation": job.generation, "steps": job.applied, "rates": rates,
    "weights": digest_of([*net.parameters()]), "buffers": digest_of([*net.buffers()]),
    "optimizer": digest_of(states), "entries": [len(state["state"]) for state in states],
    "random": digest_of(torch.get_rng_state()),
    "scheduler": scheduler.state_dict()["last_epoch"] if scheduler is not None else None,
}  # fmt: skip
options.out.mkdir(parents=True, exist_ok=True)
partial = options.out / f"{os.environ.get('EVERGRAD_UID', 'alone')}.partial"
partial.write_text(json.dumps(result))
partial.replace(partial.with_suffix(".json"))  # a process that is killed here leaves no half of it
if checkpointer is not None:
    checkpointer.close()
