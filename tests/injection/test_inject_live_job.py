"""Faults in the buckets of a job's model, whose reduction is not DDP's: `job.wrap(model, hooks=[eg.comm_faults])`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_wrapper

import evergrad as eg
from evergrad.errors import UsageError
from evergrad.injection import LiveInjection
from evergrad.recovery.gradients import BucketLayout, GradientReducer
from evergrad.recovery.process_group import CollectiveWork, Group, Op


class Alike(Group):
    """Two ranks with the same gradients."""

    rank, size = 0, 2

    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum") -> CollectiveWork:
        return CollectiveWork(lambda: tensor.mul_(self.size))

    def broadcast(self, tensor: torch.Tensor, root: int) -> CollectiveWork:
        return CollectiveWork()

    def send(self, tensor: torch.Tensor, to: int) -> CollectiveWork:
        raise NotImplementedError

    def receive(self, tensor: torch.Tensor, sender: int) -> CollectiveWork:
        raise NotImplementedError

    def interrupt(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass


class Around:
    """A job as a reduction sees it."""

    layout: BucketLayout | None = None

    def __init__(self, hooks: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
        self.gradients = GradientReducer(self.net, self, keep=True, hooks=hooks, bucket_cap_mb=0.0001)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.applied = 0

    def group(self) -> Group:
        return Alike()

    def weight(self) -> float:
        return 0.5

    def passes(self) -> int:
        return self.applied

    def root(self) -> int:
        return 0

    def misuse(self) -> str:
        return ""

    def shares_buffers(self) -> bool:
        return False

    def reach_site(self, bucket: int, at: str) -> None:
        pass

    def backward_ended(self) -> None:
        self.gradients.finish_reduction()

    def run(self, steps: int) -> Around:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.pass_once()
            self.optimizer.step()
            self.applied += 1
        return self

    def pass_once(self) -> None:
        self.gradients.module(torch.ones(2, 6)).square().mean().backward()

    def hit(self, **settings: Any) -> LiveInjection:
        return eg.inject_live(
            self.gradients.module, self.optimizer, eg.SetValue(50.0), target="communication", count=2, step=3,
            clock=lambda: self.applied, rank=1, ranks=[1], **settings,
        )  # fmt: skip

    def weights(self) -> list[list[float]]:
        return [one.detach().reshape(-1).tolist() for one in self.net.parameters()]


@pytest.mark.parametrize("received", [False, True])
def test_a_job_s_buckets_are_hit_in_their_step_and_not_when_it_is_done_again(received: bool) -> None:
    job, plain = Around([eg.comm_faults]), Around([])
    faults = job.hit(received=received)
    assert job.run(3).weights() == plain.run(3).weights()
    job.pass_once()
    assert faults.done
    assert faults.log is not None
    assert faults.log.injected == 2
    assert int((torch.cat(job.gradients.reduced) == 50.0).sum()) == 2, "two ranks that send the same have its mean"
    job.gradients.discard()
    job.pass_once()
    plain.optimizer.zero_grad()
    plain.pass_once()
    again = [parameter.grad for parameter in job.net.parameters()]
    assert all(torch.equal(one, two.grad) for one, two in zip(again, plain.net.parameters(), strict=True))  # type: ignore[arg-type]


def test_other_comm_hooks_go_with_it() -> None:
    job = Around([eg.comm_faults, bf16_compress_wrapper])
    faults = job.hit()
    job.run(4)
    assert faults.log is not None
    assert {str(column.dtype) for column in faults.log.columns} == {"bfloat16"}, "what is sent is compressed"


def test_a_job_without_room_for_faults_says_how_to_make_some() -> None:
    job = Around([])
    job.hit()
    with pytest.raises(UsageError, match=r"job.wrap\(model, hooks=\[eg.comm_faults\]\)"):
        job.run(5)
