"""Live injection on a CUDA device: every target, with the host's bits where the host has the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import evergrad as eg

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Training:
    """A small training on a device, from the same numbers everywhere."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(3)
        self.device = device
        net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
        self.model = net.to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def run(self, steps: int) -> Training:
        for step in range(steps):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(self.device)
            self.optimizer.zero_grad()
            self.model(x).square().mean().backward()
            self.optimizer.step()
        return self


@pytest.mark.parametrize("target", ["weights", "buffers", "optimizer", "state"])
def test_a_device_s_state_is_hit_where_the_host_s_is(target: str) -> None:
    logs = []
    for device in ("cpu", "cuda"):
        training = Training(device).run(1)
        faults = eg.inject_live(
            training.model, training.optimizer, eg.BitFlip("exponent"), target=target, count=6, seed=9
        )
        assert faults.log is not None
        logs.append(faults.log)
        for column in faults.log.columns:
            state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
            tensor = eg.flatten(state).tensors[column.tensor].cpu().reshape(-1)
            bits = tensor[column.numbers].view(torch.int32).numpy().view("u4")
            assert (bits == column.new).all()
    here, there = ([(hit.tensor, hit.index, hit.bits) for hit in log.faults()] for log in logs)
    assert here == there


@pytest.mark.parametrize("target", ["weights", "buffers", "optimizer", "gradients", "activations", "state"])
def test_every_target_is_hit_at_its_step_on_a_device(target: str) -> None:
    training, plain = Training("cuda"), Training("cuda").run(4)
    faults = eg.inject_live(training.model, training.optimizer, eg.Scale(3.0), target=target, count=4, step=3, seed=1)
    training.run(3)
    assert not faults.done
    training.run(1)
    assert faults.done
    assert faults.log is not None
    assert faults.log.injected == 4
    pairs = zip(training.model.state_dict().values(), plain.model.state_dict().values(), strict=True)
    assert any(not torch.equal(one, two) for one, two in pairs)


@pytest.mark.parametrize("received", [False, True])
def test_buckets_on_a_device_are_hit(tmp_path: Any, received: bool) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        training = Training("cuda")
        training.model = nn.parallel.DistributedDataParallel(training.model)  # type: ignore[assignment]
        faults = eg.inject_live(
            training.model, training.optimizer, eg.SetValue(7.0), target="communication", count=3, step=3,
            received=received,
        )  # fmt: skip
        training.run(4)
        assert faults.done
        assert faults.log is not None
        assert faults.log.injected == 3
        gradients = torch.cat([one.grad.reshape(-1) for one in training.model.parameters()])
        assert int((gradients == 7.0).sum()) == 3
    finally:
        torch.distributed.destroy_process_group()
