"""The script of `evergrad run`: a plain loop around `eg.join`, with a line in the log for each applied step."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from benchmarks.recovery.workload import Log, Samples, make_model, parser, workload_of
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import evergrad as eg


def main() -> None:
    """Train so many steps, whoever dies."""
    options = parser()
    options.add_argument("--checkpoints", type=Path, help="where to save; nowhere if it is not given")
    options.add_argument("--every", type=int, default=10, help="steps between two saves")
    work = workload_of(options)
    log = Log(work.out, int(os.environ["EVERGRAD_UID"]))
    checkpointer = eg.Checkpointer(work.checkpoints) if work.checkpoints else None
    job = eg.join(checkpointer, every=work.every if checkpointer else None)
    net = make_model(work)
    model = job.wrap(net, bucket_cap_mb=work.bucket_mb)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    samples = Samples(job.world_size * work.batch * (work.steps + 1), work.width)
    was_applied = True
    for x, y in job.batches(DataLoader(samples, batch_size=work.batch, shuffle=True)):
        if not was_applied:  # the generation has formed, and the step is done again
            log.write("again", step=job.applied, generation=job.generation)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        was_applied = job.step(optimizer)
        if was_applied:
            log.write("applied", step=job.applied, generation=job.generation)
        if job.applied >= work.steps:
            break
    if checkpointer is not None:
        checkpointer.close()


if __name__ == "__main__":
    main()
