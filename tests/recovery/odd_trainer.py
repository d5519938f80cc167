"""A small training in which something odd happens at a certain place: `python odd_trainer.py WHAT [options]`."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evergrad as eg

parser = argparse.ArgumentParser()
parser.add_argument("what")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--checkpoints")
parser.add_argument("--every", type=int, default=4)
parser.add_argument("--guard", type=int)
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--samples", type=int, default=64)
parser.add_argument("--await-change", action="store_true", help="at first, until the launcher lets somebody in")
options = parser.parse_args()


class OwnPlace:
    """A loader of which only it knows where it is: each rank has its own samples."""

    def __init__(self, shard: int) -> None:
        self.shard, self.place = shard, 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while self.place < 12:
            self.place += 1
            print(f"sample {self.shard * 1000 + self.place}", flush=True)
            yield torch.ones(4, 8), torch.zeros(4).long()

    def state_dict(self) -> dict[str, int]:
        return {"shard": self.shard, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.shard, self.place = state["shard"], state["place"]


torch.set_num_threads(1)
torch.manual_seed(1)
features = torch.randn(options.samples, 8)
data = TensorDataset(features, (features.sum(1) > 0).long())
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
checkpointer = eg.Checkpointer(options.checkpoints, agent=False) if options.checkpoints else None
job = eg.join(checkpointer, every=options.every if checkpointer else None)
uid = int(os.environ["EVERGRAD_UID"])
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
model = job.wrap(net)
if options.guard:
    job.guard(every=options.guard)
done: set[str] = set()


def happens(what: str, step: int, by: int | None = None) -> bool:
    """Whether this is the time, once, for this process."""
    is_now = options.what == what and job.applied == step and (by is None or by == uid) and what not in done
    done.update({what} if is_now else ())
    return is_now


def send(number: int) -> None:
    os.kill(os.getpid(), number)


if options.what == "dies as it saves" and checkpointer is not None:
    real = checkpointer.save

    def save(*some: Any, **more: Any) -> Any:
        if uid == 1:
            send(signal.SIGKILL)
        return real(*some, **more)

    checkpointer.save = save  # type: ignore[method-assign]

for epoch in range(options.epochs):
    loader: Any = OwnPlace(job.rank) if options.what == "own place" else DataLoader(data, batch_size=4, shuffle=True)
    for x, y in job.batches(loader):
        time.sleep(options.pause)
        while options.await_change and job.generation == 0 and job.applied == 3 and not job._worker.is_change_requested:
            time.sleep(0.001)
        if happens("asked one after the other", 5, by=0) or happens("one is asked", 5, by=0):
            send(signal.SIGTERM)
        if happens("dies as it saves", 5):
            send(signal.SIGTERM)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if happens("asked one after the other", 5, by=1):
            send(signal.SIGTERM)
        if happens("alone and asked", 5):
            send(signal.SIGTERM)
        if not job.step(optimizer):
            continue
        if happens("ends a process", 3):
            process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            process.start()
            process.terminate()
            process.join(30)
            print(f"ended with {process.exitcode}", flush=True)
            process.kill()
        if options.what == "differs again and again" and uid == 1 and job.applied >= 10:
            with torch.no_grad():
                next(net.parameters()).add_(1e-3)
        if options.what == "looks at the loss":
            with torch.no_grad():
                model(x)
    if options.what == "dies between epochs" and epoch == 0 and uid == 1 and not job.joining:
        send(signal.SIGKILL)
if options.what == "works on after it":
    job.close()
    time.sleep(2.5)
