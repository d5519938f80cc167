"""The script of torchrun: plain DDP that saves with `torch.save` and resumes; one rank kills itself once a start."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from benchmarks.recovery.workload import Log, Samples, Workload, make_model, parser, workload_of
from torch import distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def train(work: Workload, rank: int, attempt: int) -> None:
    """From the newest checkpoint to the last step, or to the step at which this start is to fail."""
    log = Log(work.out, rank)
    net = make_model(work)
    model = DistributedDataParallel(net, bucket_cap_mb=work.bucket_mb)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    path: Path = work.checkpoint
    applied = 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        applied = saved["step"]
    samples = Samples(dist.get_world_size() * work.batch * (work.steps - applied), work.width)
    fails_at, victim = work.kill[attempt] if attempt < len(work.kill) else (-1, -1)
    loader = DataLoader(samples, batch_size=work.batch, sampler=DistributedSampler(samples))
    for x, y in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        if (applied, rank) == (fails_at, victim):
            log.write("killing", step=applied, generation=attempt)
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        applied += 1
        log.write("applied", step=applied, generation=attempt)
        if applied % work.every == 0 and rank == 0:
            part = path.with_suffix(".part")
            torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": applied}, part)
            part.replace(path)


def _kill(text: str) -> tuple[int, int]:
    step, rank = text.split(":")
    return int(step), int(rank)


def main() -> None:
    """As torchrun's documentation has it."""
    options = parser()
    options.add_argument("--checkpoint", type=Path, required=True)
    options.add_argument("--every", type=int, default=10, help="steps between two saves")
    options.add_argument("--kill", type=_kill, action="append", default=[], help="STEP:RANK, one for each start")
    work = workload_of(options)
    dist.init_process_group("gloo")
    train(work, dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
