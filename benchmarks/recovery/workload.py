"""What every contender trains: one model, one kind of data, and the log that each process writes.

Its scripts run under launchers, and with torchft under another interpreter: it imports torch alone.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

__all__ = ["CLASSES", "Log", "Samples", "Workload", "make_model", "parser", "workload_of"]

CLASSES = 10


class Workload(argparse.Namespace):
    """How large it is, and how long it runs."""

    out: Path
    width: int
    layers: int
    batch: int
    steps: int
    bucket_mb: float


def parser() -> argparse.ArgumentParser:
    """The options of every script; each adds its own."""
    options = argparse.ArgumentParser()
    options.add_argument("out", type=Path, help="the folder for the logs, one a process")
    options.add_argument("--width", type=int, default=512)
    options.add_argument("--layers", type=int, default=10)
    options.add_argument("--batch", type=int, default=32)
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--bucket-mb", type=float, default=1.25)
    return options


def workload_of(options: argparse.ArgumentParser) -> Workload:
    """What this process was told, with torch set up for it: one thread a rank."""
    torch.set_num_threads(1)
    found = options.parse_args(namespace=Workload())
    found.out.mkdir(parents=True, exist_ok=True)
    return found


def make_model(workload: Workload) -> nn.Module:
    """A perceptron of equal layers, the same one in every process."""
    torch.manual_seed(1)
    width = workload.width
    layers: list[nn.Module] = []
    for _ in range(workload.layers):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """As many samples as are asked for, of which a thousand differ: an epoch of any length in little memory."""

    def __init__(self, count: int, width: int) -> None:
        generator = torch.Generator().manual_seed(2)
        self._count = count
        self._features = torch.randn(1000, width, generator=generator)
        self._labels = torch.randint(0, CLASSES, (1000,), generator=generator)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._features[index % 1000], self._labels[index % 1000]


class Log:
    """One process's lines, each by a single write: whoever is killed leaves what it has written.

    Times are of the monotonic clock, which all processes of a machine share.
    """

    def __init__(self, folder: Path, who: int) -> None:
        self._who = who
        self._fd = os.open(folder / f"{who}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, event: str, *, step: int, generation: int) -> None:
        """`step` counts the steps that were applied; `generation` how often the membership has changed."""
        line = {"t": time.monotonic(), "who": self._who, "event": event, "step": step, "generation": generation}
        os.write(self._fd, (json.dumps(line) + "\n").encode())
