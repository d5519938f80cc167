"""Saving changes nothing, and a restored run goes on as if nothing had happened: losses equal to the last bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import evergrad as eg


class Training:
    """A small network with everything that makes a step depend on the one before."""

    def __init__(self, seed: int = 3) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.05, total_steps=200)
        self.order = torch.Generator().manual_seed(seed)
        self.data = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        self.epoch: dict[str, Any] = {"left": [], "passed": 0}

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "rng": eg.rng_state(generators={"order": self.order}),
            "cursor": self.epoch,
        }

    def step(self) -> bytes:
        """One step on the next batch of a shuffled epoch; the loss, to the bit."""
        if not self.epoch["left"]:
            self.epoch["left"] = torch.randperm(64, generator=self.order).tolist()
            self.epoch["passed"] += 1
        batch, self.epoch["left"] = self.epoch["left"][:8], self.epoch["left"][8:]
        x = self.data[batch] * (1 + 0.1 * random.random()) + 0.01 * float(np.random.randn())
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach().numpy().tobytes()


def test_saving_in_every_step_changes_no_loss(tmp_path: Path) -> None:
    plain, saved = Training(), Training()
    losses = [plain.step() for _ in range(40)]
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    saved = Training()
    with eg.Checkpointer(tmp_path) as ck:
        found = []
        for step in range(40):
            found.append(saved.step())
            ck.save(step, saved.state())
    assert found == losses


def test_a_restored_run_continues_bit_identically(tmp_path: Path) -> None:
    golden = Training()
    with eg.Checkpointer(tmp_path) as ck:
        for step in range(1, 22):
            golden.step()
            pending = ck.save(step, golden.state())
        pending.wait()
    losses = [golden.step() for _ in range(30)]

    resumed = Training(seed=99)
    for _ in range(5):
        resumed.step()  # wherever it was
    with eg.Checkpointer(tmp_path) as ck:
        assert ck.restore(resumed.state()) == 21
    assert [resumed.step() for _ in range(30)] == losses


def test_every_captured_version_equals_a_copy_taken_at_the_same_step(tmp_path: Path) -> None:
    training, copies = Training(), {}
    with eg.Checkpointer(tmp_path, tiers=[eg.Local(keep=30)]) as ck:
        for step in range(1, 31):
            training.step()
            pending = ck.save(step, training.state())
            copies[step] = {path: tensor.clone() for path, tensor in eg.flatten(training.state()).tensors.items()}
        pending.wait()
        for step, tensors in copies.items():
            (shard,) = tmp_path.rglob(f"v{step:010d}-01/rank-00000.safetensors")
            with eg.open_checkpoint(shard) as found:
                for path, tensor in tensors.items():
                    assert torch.equal(found.read(path), tensor), (step, path)
