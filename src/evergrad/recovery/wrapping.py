"""What a wrapped model is, alone and among others, and what the reduction of its gradients sees of the job."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from evergrad.recovery.buckets import Layout
from evergrad.recovery.engine import Engine
from evergrad.recovery.failures.schedule import Phase
from evergrad.recovery.transport import Group

__all__ = ["Around", "Unwrapped"]


class Around:
    """The job, as `Gradients` sees it."""

    def __init__(
        self,
        engine: Engine,
        window: Callable[[], tuple[int, int]],
        site: Callable[..., None],
        ended: Callable[[], None],
    ) -> None:
        """`window` tells how many batches of the step under way have been reduced, and how many there are."""
        self._engine, self._window, self._site, self._ended = engine, window, site, ended
        self._weight: tuple[object, float] = (None, 1.0)

    def group(self) -> Group:
        """The group of the present generation."""
        return self._engine.crew.group()

    def weight(self) -> float:
        """By samples, of all batches since the last reduction."""
        course, among = self._engine.course, self._engine.contributors()
        reduced, count = self._window()
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

    def shares_buffers(self) -> bool:
        """Only in a step that every rank makes alike."""
        return self._window()[1] > 0 and not self._engine.is_repairing

    def site(self, bucket: int, at: str) -> None:
        """A place where a failure may be scheduled."""
        self._site(Phase.BACKWARD, bucket, at)

    def ended(self) -> None:
        """The pass is over."""
        self._ended()


class Unwrapped(nn.Module):
    """A wrapped model without other ranks: what scripts expect of DDP, at no cost."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the model gives."""
        return self.module(*inputs, **named)

    def no_sync(self) -> AbstractContextManager[None]:
        """There is nothing to synchronise."""
        return nullcontext()
