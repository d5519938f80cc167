"""What our wrapping costs while nothing fails: the same training, plain and wrapped, in turns in the same processes.

Run by `evergrad run`. The plain ones use torch's default group, ours the one of the job; a block of steps belongs to
one of them, and all ranks begin it together.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
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


def plain(work: Workload, **options: Any) -> Callable[[], None]:
    """One step of a training with DDP."""
    net = make_model(work)
    model = DistributedDataParallel(net, bucket_cap_mb=work.bucket_mb, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    samples = _samples(work)
    loader = DataLoader(samples, batch_size=work.batch, sampler=DistributedSampler(samples, shuffle=True))
    batches: Iterator[Any] = iter(loader)

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def ours(work: Workload) -> Callable[[], None]:
    """One step of the same training as a part of a job."""
    job = eg.join()
    net = make_model(work)
    model = job.wrap(net, bucket_cap_mb=work.bucket_mb)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(_samples(work), batch_size=work.batch, shuffle=True)
    batches = iter(job.batches(loader))

    def step() -> None:
        x, y = next(batches)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        if not job.step(optimizer):
            raise RuntimeError("a step was not applied, and nothing was to fail")

    return step


def _samples(work: Workload) -> Samples:
    return Samples(dist.get_world_size() * work.batch * (WARM_UP + work.rounds * work.steps + 1), work.width)


def main() -> None:
    """Rounds of a block each; what they took goes to a file of this rank's."""
    options = parser()
    options.add_argument("--rounds", type=int, default=10)
    work = workload_of(options)
    dist.init_process_group("gloo")
    variants = {
        "DDP": plain(work),
        "DDP again": plain(work),
        "DDP, bucket view": plain(work, gradient_as_bucket_view=True),
        "evergrad": ours(work),
    }
    for step in variants.values():
        for _ in range(WARM_UP):
            step()
    names = list(variants)
    blocks: list[dict[str, float]] = []
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
    (work.out / f"{os.environ['RANK']}.json").write_text(json.dumps(blocks), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
