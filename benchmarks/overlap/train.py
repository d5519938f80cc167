"""Training in turns, in the same processes: plain DDP and its step, a job, and the same job with overlap.

Run by `evergrad run`. The job is one: between two steps its updates are moved into backward, or out of it, so that both
have the same model, batches and memory. A block of steps belongs to one contender, and all ranks begin it together.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from benchmarks.recovery.workload import Samples, Workload, make_model, parser, workload_of
from torch import distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import evergrad as eg

WARM_UP = 6
"""Steps of each before the first block: buckets are laid out anew after the first."""
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.001),
}


class Ours:
    """One job, with overlap or without."""

    def __init__(self, work: Workload, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self._job = eg.join()
        net = make_model(work)
        self._optimizer = make(net.parameters())
        self._model = self._job.wrap(net, bucket_cap_mb=work.bucket_mb, optimizer=self._optimizer, overlap=True)
        self._batches = iter(self._job.batches(DataLoader(_samples(work), batch_size=work.batch, shuffle=True)))
        self._overlap = self._job._rank_state.optimizers.overlap

    def step(self, overlap: bool) -> None:
        """One step; it is only at its end that the next one may be another kind."""
        gradients = self._job._barrier.gradients
        assert gradients is not None
        gradients.overlap = self._job._rank_state.optimizers.overlap = self._overlap if overlap else None
        x, y = next(self._batches)
        self._optimizer.zero_grad()
        cross_entropy(self._model(x), y).backward()  # type: ignore[no-untyped-call]
        if not self._job.step(self._optimizer):
            raise RuntimeError("a step was not applied, and nothing was to fail")

    @property
    def held_bytes(self) -> int:
        assert self._overlap is not None
        return self._overlap.held_bytes

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._model.parameters())


def plain(work: Workload, make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[], None]:
    """One step of a training with DDP."""
    net = make_model(work)
    model = DistributedDataParallel(net, bucket_cap_mb=work.bucket_mb, gradient_as_bucket_view=True)
    optimizer, samples = make(net.parameters()), _samples(work)
    batches = iter(DataLoader(samples, batch_size=work.batch, sampler=DistributedSampler(samples, shuffle=True)))

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _samples(work: Workload) -> Samples:
    blocks = 2 * WARM_UP + 2 * work.rounds * work.steps + 1
    return Samples(dist.get_world_size() * work.batch * blocks, work.width)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Rounds of a block each; what they took goes to a file of this rank's."""
    options = parser()
    options.add_argument("--rounds", type=int, default=8)
    options.add_argument("--optimizer", choices=OPTIMIZERS, default="Adam")
    work = workload_of(options)
    make = OPTIMIZERS[work.optimizer]
    dist.init_process_group("gloo")
    job = Ours(work, make)
    variants: dict[str, Callable[[], None]] = {
        "DDP": plain(work, make),
        "evergrad": lambda: job.step(overlap=False),
        "evergrad, overlap": lambda: job.step(overlap=True),
    }
    resident = 0
    for name, step in variants.items():
        if name == "evergrad, overlap":
            gc.collect()
            resident = _resident_bytes()  # everything but the undo log is there
        for _ in range(WARM_UP):
            step()
    memory = {
        "parameters": job.num_parameters,
        "held_bytes": job.held_bytes,
        "grown_bytes": _resident_bytes() - resident,
    }
    names, blocks = list(variants), []
    for turn in range(work.rounds):
        first = turn % len(names)
        block: dict[str, float] = {}
        for name in names[first:] + names[:first]:
            gc.collect()  # what another one leaves behind is not this one's to clear
            dist.barrier()
            times = []
            for _ in range(work.steps):
                start = time.perf_counter()
                variants[name]()
                times.append(time.perf_counter() - start)
            block[name] = statistics.median(times)
        blocks.append(block)
    found = {"blocks": blocks, "memory": memory}
    (work.out / f"{os.environ['RANK']}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
