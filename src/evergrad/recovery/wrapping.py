"""What a wrapped model is, alone and among others, and what the reduction of its gradients sees of the job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evergrad.errors import UsageError
from evergrad.recovery.buckets import Layout
from evergrad.recovery.engine import Engine
from evergrad.recovery.failures.words import Phase
from evergrad.recovery.transport import Group
from evergrad.recovery.window import Window


class Around:
    """The job, as `Gradients` sees it."""

    def __init__(
        self,
        engine: Engine,
        window: Window,
        site: Callable[..., None],
        ended: Callable[[], None],
    ) -> None:
        self._engine, self._window, self._site, self._ended = engine, window, site, ended
        self._weight: tuple[object, float] = (None, 1.0)

    def group(self) -> Group:
        """The group of the present generation."""
        return self._engine.crew.group()

    def weight(self) -> float:
        """By samples, of all batches since the last reduction."""
        course, among = self._engine.course, self._engine.contributors()
        reduced, count = self._window.reduced, len(self._window)
        first, stop = course.index + min(reduced, count - 1), course.index + count
        key = (first, stop, course.epoch, course.rank, tuple(among))
        if self._weight[0] != key:
            self._weight = key, course.weight(range(first, stop), among)
        return self._weight[1]

    def passes(self) -> int:
        """How many passes the job has brought to their end."""
        return self._engine.course.passes

    @property
    def layout(self) -> Layout | None:
        """What all ranks have agreed on."""
        return self._engine.course.layout

    @layout.setter
    def layout(self, layout: Layout | None) -> None:
        self._engine.course.layout = layout

    def root(self) -> int:
        """A rank that was there from the beginning."""
        return self._engine.root

    def misused(self) -> str:
        """A backward pass belongs to a batch of the job; a step of any other could not be done again."""
        if self._window.forwarded < len(self._window):
            return (
                "a batch was fetched between the forward pass and job.step: the job takes it for one of this step, so "
                "a step that is done again would begin with it. Fetch the next batch after job.step; to fetch ahead, "
                "use the workers of a DataLoader"
            )
        if self._window:
            return ""
        return (
            "backward through the model of job.wrap without a batch of job.batches: the job cannot weigh its "
            "gradients, or do the step again when a rank is lost. Take batches from the job, one job.step for each: "
            "for batch in job.batches(loader). For a pass that is no part of the training use model.module"
        )

    def shares_buffers(self) -> bool:
        """Only in a step that every rank makes alike."""
        return len(self._window) > 0 and not self._engine.is_repairing

    def site(self, bucket: int, at: str) -> None:
        """A place where a failure may be scheduled."""
        self._site(Phase.BACKWARD, bucket, at)

    def ended(self) -> None:
        """The pass is over."""
        self._ended()


class Unwrapped(DistributedDataParallel):
    """A wrapped model without other ranks: a DDP to scripts that ask, which reduces nothing."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)  # not DDP's, which needs a process group
        self.module = module
        self.device = next(module.parameters()).device
        self.device_ids = self.output_device = self.process_group = None  # type: ignore[assignment]
        self.dim = 0
        self.broadcast_buffers = self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.find_unused_parameters = self.gradient_as_bucket_view = self.static_graph = False

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the model gives."""
        return self.module(*inputs, **named)

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Refused, as among others: `job.wrap` takes hooks."""
        raise UsageError("register_comm_hook: expected hooks in job.wrap(model, hooks=[…]), which wrap its all-reduce")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
