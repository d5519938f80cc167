"""Data-parallel training: plain DistributedDataParallel, a replica of the model on every rank.

The ranks share each batch, so that a training of 8 ranks takes the steps that one of a single rank takes. Everything is
as people run it: DDP with its default settings, gloo on CPUs, NCCL where every rank has a GPU of its own. What differs
between replicas stays different, as it does there: DDP compares nothing, and broadcasts nothing but buffers.

What is evaluated is rank 0's replica: the one that people evaluate and save. What is looked for in the state is looked
for on every rank, and ranks learn it from each other in one small exchange a step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from evergrad.errors import UsageError
from evergrad.training.mechanisms.session import Evaluation
from evergrad.training.mechanisms.single import SingleSession, deterministic
from evergrad.training.settings import Training
from evergrad.training.workloads.workload import Workload


class DdpSession(SingleSession):
    """One rank's replica. Every rank of torch.distributed's default group makes one, and calls the same methods."""

    def __init__(self, training: Training, workload: Workload) -> None:
        there = distributed.get_world_size() if distributed.is_initialized() else 1
        if there != training.ranks or not distributed.is_initialized():
            raise UsageError(f"mechanism ddp: expected a group of {training.ranks} ranks, found {there}")
        if training.batch_size % training.ranks:
            raise UsageError(f"batch_size: expected a multiple of {training.ranks} ranks, found {training.batch_size}")
        self.rank, self.ranks = distributed.get_rank(), there
        self._magnitude: Tensor | None = None
        super().__init__(training, workload)
        self.module = DistributedDataParallel(self._model)
        self._fix_bucket_layout()

    def step(self, number: int) -> Tensor:
        """A step of all ranks; the mean of their losses."""
        loss = super().step(number)
        seen = self._all_gather(torch.stack([loss.double(), super().magnitude()]))
        self._magnitude = seen[:, 1].amax()
        return seen[:, 0].mean()

    def magnitude(self) -> Tensor:
        """Of all ranks' state. After a step it is known already."""
        if self._magnitude is None:
            return self._all_gather(super().magnitude().reshape(1)).amax()
        found, self._magnitude = self._magnitude, None
        return found

    def make_reset(self) -> Callable[[], None]:
        """In flat copies, as one process does."""
        back = super().make_reset()

        def take_up() -> None:
            self._magnitude = None
            back()

        return take_up

    def evaluate(self) -> Evaluation:
        """Rank 0's replica; the others learn what it came to, but not each prediction."""
        told = torch.zeros(2, dtype=torch.float64, device=self._device)
        found = None
        if self.rank == 0:
            found = super().evaluate()
            told.copy_(torch.tensor([found.metric, found.magnitude], dtype=torch.float64))
        distributed.broadcast(told, 0)
        metric, magnitude = told.tolist()
        return found or Evaluation(metric, torch.zeros(0), magnitude)

    def _all_gather(self, mine: Tensor) -> Tensor:
        """Every rank's numbers, a row each."""
        rows = [torch.empty_like(mine) for _ in range(self.ranks)]
        distributed.all_gather(rows, mine)
        return torch.stack(rows)

    def _fix_bucket_layout(self) -> None:
        """DDP makes its buckets anew after its first pass; where a number lies in them decides in which order it is
        summed up over the ranks. So that all steps of all trials are alike, two passes come before them."""
        back = super().make_reset()
        with deterministic(self._device):
            for _ in range(2):
                self._gradients(0)
        self.optimizer.zero_grad(set_to_none=True)
        back()
