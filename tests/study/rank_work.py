"""What ranks are told to do in tests of their groups."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed


def gather(folder: Path, work: Mapping[str, Any]) -> dict[str, Any]:
    """The sum of the ranks' numbers, and which process this is."""
    number = torch.tensor([float(distributed.get_rank() + 1)])
    distributed.all_reduce(number)
    return {"sum": number.item(), "pid": os.getpid(), "cores": sorted(os.sched_getaffinity(0)), "value": work["value"]}


def fall(folder: Path, work: Mapping[str, Any]) -> dict[str, Any]:
    """One rank does what it is told, while the others wait for it."""
    if distributed.get_rank() == work["rank"]:
        if work["how"] == "raise":
            raise ValueError("this one fails")
        if work["how"] == "answer":
            return {"end": "early"}
        os.kill(os.getpid(), signal.Signals[work["how"]])
    distributed.barrier()
    return {"end": "late"}
