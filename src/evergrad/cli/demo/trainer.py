"""The trainers that the demo kills and preempts, and what they train."""

from __future__ import annotations

import os
import signal
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

_EVERY = 10
_PACE_S = 0.02  # a step of a model worth the name takes longer: the demo's would outrun every signal


class Spirals:
    """Two spirals to be told apart: the data, a small network with dropout, its optimizer; always the same."""

    def __init__(self) -> None:
        import torch

        import evergrad as eg

        torch.manual_seed(7)
        turn = torch.rand(1000).sqrt() * 9
        self._label = torch.arange(1000) % 2
        angle = turn + self._label * torch.pi
        self._points = torch.stack([angle.cos(), angle.sin()], 1) * turn[:, None] / 9
        layer = torch.nn.Linear
        self._model = torch.nn.Sequential(
            layer(2, 64), torch.nn.Tanh(), torch.nn.Dropout(0.1), layer(64, 64), layer(64, 2)
        )
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=0.01)
        self.state = {"model": self._model, "optimizer": self._optimizer, "rng": eg.rng_state()}

    def step(self) -> float:
        """Train one step; its loss."""
        self._optimizer.zero_grad()
        loss: Any = self._loss()
        loss.backward()
        self._optimizer.step()
        return float(loss.item())

    def loss(self) -> float:
        """The loss as things are, without dropout and without a step."""
        import torch

        with torch.no_grad():
            self._model.eval()
            loss = float(self._loss())
            self._model.train()
            return loss

    def _loss(self) -> Any:
        import torch

        return torch.nn.functional.cross_entropy(self._model(self._points), self._label)


def train(run_dir: Path | None, steps: int, kill_at: int | None = None) -> tuple[int, list[float]]:
    """Train, saving every tenth step; where it began, and the loss of every step from there on.

    Without a run folder nothing is saved. At `kill_at`, right after the save has returned, the process kills itself.
    """
    import evergrad as eg

    task = Spirals()
    ck = eg.Checkpointer(run_dir, linger_s=1) if run_dir is not None else None
    begin = (ck.restore(task.state) or 0) if ck is not None else 0
    losses = []
    for step in range(begin + 1, steps + 1):
        losses.append(task.step())
        if ck is not None and step % _EVERY == 0:
            ck.save(step, task.state, meta={"loss": losses[-1]})
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    if ck is not None:
        ck.close()
    return begin, losses


def train_until_asked(run_dir: Path, url: str) -> NoReturn:
    """Train until a signal comes, every second save also to the URL; ends the process with the code for that."""
    import evergrad as eg

    task = Spirals()
    tiers = [eg.Memory(), eg.Local(), eg.Persistent(url, every=2)]
    with eg.Checkpointer(run_dir, tiers, policy=_EVERY, linger_s=1) as ck:
        for step in count(1):
            loss = task.step()
            time.sleep(_PACE_S)
            if ck.need_checkpoint():
                ck.save(step, task.state, meta={"loss": loss})
            if ck.should_exit():
                break
    sys.exit(ck.exit_code)
