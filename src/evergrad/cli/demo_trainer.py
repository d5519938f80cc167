"""The trainer that the demo kills: `python -m evergrad.cli.demo_trainer RUN_DIR STEPS KILL_AT`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

__all__ = ["main", "train"]


def train(run_dir: Path | None, steps: int, kill_at: int | None = None) -> tuple[int, list[float]]:
    """Train on two spirals, saving every tenth step; where it began, and the loss of every step from there on.

    Without a run folder nothing is saved. At `kill_at`, right after the save has returned, the process kills itself.
    """
    import torch

    import evergrad as eg

    torch.manual_seed(7)
    turn = torch.rand(1000).sqrt() * 9
    label = torch.arange(1000) % 2
    angle = turn + label * torch.pi
    points = torch.stack([angle.cos(), angle.sin()], 1) * turn[:, None] / 9
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 64), torch.nn.Linear(64, 2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer, "rng": eg.rng_state()}
    ck = eg.Checkpointer(run_dir, linger_s=1) if run_dir is not None else None
    begin = (ck.restore(state) or 0) if ck is not None else 0
    losses = []
    for step in range(begin + 1, steps + 1):
        optimizer.zero_grad()
        loss: Any = torch.nn.functional.cross_entropy(model(points), label)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if ck is not None and step % 10 == 0:
            ck.save(step, state, meta={"loss": losses[-1]})
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    if ck is not None:
        ck.close()
    return begin, losses


def main() -> None:
    """Train until killed."""
    train(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))


if __name__ == "__main__":
    main()
