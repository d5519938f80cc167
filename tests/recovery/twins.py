"""The same training twice in the same processes, under `evergrad run`: by plain DistributedDataParallel, then by a job.

python twins.py OUT [--branch] leaves OUT/<uid>.json with what each twin saw: losses, a digest of all it trained. With
--unsaid there is no plain twin, and the job is not told of the branch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import evergrad as eg

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--branch", action="store_true", help="a branch that one rank alone uses, now and then")
parser.add_argument("--unsaid", action="store_true")
parser.add_argument("--samples", type=int, default=70)
options = parser.parse_args()
EPOCHS, BUCKET_MB = 3, 0.01
KEPT: list[Any] = []
ACCUMULATE = 1 if options.branch else 2


class Net(nn.Module):
    """Batch norm, dropout, channels last, and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.body = nn.Sequential(nn.Linear(36, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 48))
        self.branch, self.head = nn.Linear(48, 48), nn.Linear(48, 1)
        self.uses_branch = not options.branch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(self.conv(x.view(-1, 1, 4, 4)).flatten(1))
        out: torch.Tensor = self.head(hidden + self.branch(hidden) if self.uses_branch else hidden)
        return out


class Twin:
    """One of the two; only what gives batches, wraps and steps differs."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.samples: list[list[int]] = []
        torch.manual_seed(2)
        self.net, self.step = Net(), 0
        if os.environ["RANK"] != "0":  # rank 0's weights count
            nn.init.zeros_(self.net.head.weight)
        features = torch.randn(options.samples, 16)
        self.data = TensorDataset(features, features.sum(1, keepdim=True), torch.arange(options.samples))

    def train(self, model: Any, batches: Iterator[Any], rank: int, length: int, apply: Any) -> None:
        """One epoch."""
        for index, (x, y, samples) in enumerate(batches):
            is_last = (index + 1) % ACCUMULATE == 0 or index + 1 == length
            self.net.uses_branch = not options.branch or (rank == 1 and self.step % 3 != 1)
            with nullcontext() if is_last else model.no_sync():
                loss = nn.functional.mse_loss(model(x), y) / ACCUMULATE
                loss.backward()
            self.losses.append(loss.item())
            self.samples.append(samples.tolist())
            if is_last:
                nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
                apply()
                self.step += 1

    def result(self) -> dict[str, Any]:
        state = b"".join(tensor.numpy().tobytes() for tensor in self.net.state_dict().values())
        weights = b"".join(one.detach().numpy().tobytes() for one in self.net.parameters())
        digests = {"state": hashlib.sha256(state).hexdigest(), "weights": hashlib.sha256(weights).hexdigest()}
        return digests | {"losses": self.losses, "samples": self.samples}


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def plain() -> dict[str, Any]:
    """As torch's tutorial has it."""
    dist.init_process_group("gloo")
    twin, rank = Twin(), dist.get_rank()
    torch.manual_seed(50 + rank)
    model = DistributedDataParallel(twin.net, bucket_cap_mb=BUCKET_MB, find_unused_parameters=options.branch)
    optimizer = optimizer_of(twin.net)
    sampler: DistributedSampler[Any] = DistributedSampler(twin.data)
    loader = DataLoader(twin.data, batch_size=5, sampler=sampler)

    def apply() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        twin.train(model, iter(loader), rank, len(loader), apply)
    # Not destroyed: DDP's destructor joins gloo's threads and holds the GIL, for which they may wait.
    KEPT.append(model)
    return twin.result()


def wrapped() -> dict[str, Any]:
    """The same, as a job."""
    job = eg.join()
    twin = Twin()
    torch.manual_seed(50 + job.rank)
    is_said = options.branch and not options.unsaid
    model = job.wrap(twin.net, bucket_cap_mb=BUCKET_MB, find_unused_parameters=is_said)
    optimizer = optimizer_of(twin.net)
    loader = DataLoader(twin.data, batch_size=5, shuffle=True)
    length = math.ceil(math.ceil(len(twin.data) / job.world_size) / 5)

    def apply() -> None:
        assert job.step(optimizer)
        optimizer.zero_grad()

    for _ in range(EPOCHS):
        twin.train(model, job.batches(loader), job.rank, length, apply)
    return twin.result()


torch.set_num_threads(1)
found = {"plain": {} if options.unsaid else plain(), "wrapped": wrapped()}
options.out.mkdir(parents=True, exist_ok=True)
partial = options.out / f"{os.environ['EVERGRAD_UID']}.partial"
partial.write_text(json.dumps(found))
partial.replace(partial.with_suffix(".json"))  # a process that is killed here leaves no half of it
