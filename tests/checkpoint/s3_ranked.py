"""A job of two ranks on two nodes that saves to a bucket: `python s3_ranked.py FOLDER URL OPTIONS`.

torch is imported once; the ranks are forked before there is any other thread. The model as it was saved, which DDP
keeps alike on all ranks, is written to FOLDER/whole.pt.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path

import torch
from torch import distributed, nn

import evergrad as eg
import evergrad.checkpoint.checkpointer

WORLD_SIZE = 2


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))


def run_rank(rank: int, folder: Path, url: str, options: str) -> None:
    os.environ["EVERGRAD_NODE"] = f"n{rank}"
    distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE)
    torch.manual_seed(1)
    wrapped = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.Adam(wrapped.parameters())
    torch.manual_seed(10 + rank)
    wrapped(torch.randn(4, 32)).square().sum().backward()
    optimizer.step()
    tiers = [eg.Memory(), eg.Local(folder / "disk"), eg.Persistent(url, options=json.loads(options))]
    with eg.Checkpointer(folder / "run", tiers=tiers) as ck:
        pending = ck.save(30, {"model": wrapped.module, "optimizer": optimizer, "epoch": 7})
        pending.wait(timeout=60)
        pending.wait("persistent", timeout=60)
    if rank == 0:
        torch.save({"model": wrapped.module.state_dict(), "optimizer": optimizer.state_dict()}, folder / "whole.pt")
    distributed.destroy_process_group()


def main() -> int:
    folder, url, options = sys.argv[1:]
    children = []
    for rank in range(WORLD_SIZE):
        if (child := os.fork()) == 0:
            try:
                torch.set_num_threads(1)
                signal.alarm(90)
                run_rank(rank, Path(folder), url, options)
            except BaseException:
                print(f"rank {rank}:\n{traceback.format_exc()}", flush=True)
                os._exit(1)
            os._exit(0)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
