"""The training of the recovery benchmark, with a guard or without; run by `evergrad run`.

Blocks of as many steps as lie between two checks, so that there is one check in each. What a block took goes to a
file of this rank's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from benchmarks.recovery.workload import Samples, make_model, parser, workload_of
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import evergrad as eg

EVERY = 50


def main() -> None:
    """The first block warms up, and is not counted."""
    options = parser()
    options.add_argument("--blocks", type=int, default=6)
    options.add_argument("--guard", action="store_true")
    work = workload_of(options)
    job = eg.join()
    net = make_model(work)
    model = job.wrap(net, bucket_cap_mb=work.bucket_mb)
    if work.guard:
        job.guard(every=EVERY)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    samples = Samples(job.world_size * work.batch * EVERY * (work.blocks + 1), work.width)
    ends: list[float] = []
    for x, y in job.batches(DataLoader(samples, batch_size=work.batch, shuffle=True)):
        # Before a block's first step, and so after the check of the block before.
        if job.applied % EVERY == 0 and len(ends) == job.applied // EVERY:
            ends.append(time.perf_counter())
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        job.step(optimizer)  # what the guard finds suspicious comes again, and counts as its cost
    blocks = [(after - before) / EVERY for before, after in pairwise(ends[1:])]
    (work.out / f"{os.environ['RANK']}.json").write_text(json.dumps(blocks), encoding="utf-8")


if __name__ == "__main__":
    main()
