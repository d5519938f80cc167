"""Gradients in buckets: which parameters lie in which, and one bucket on its way through a reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.futures import Future

from evergrad.recovery.transport import Ticket

Layout: TypeAlias = "tuple[tuple[int, ...], ...]"
"""The numbers of the parameters in each bucket, in order. The order of summation, so the last bit, depends on it."""

Hook: TypeAlias = "Callable[[Any, Any], Future[torch.Tensor]]"
"""What DDP calls a comm hook: (state, bucket) → a future of the bucket's reduced gradients."""


class Bucket:
    """What a comm hook is given: as torch's own GradBucket, but it can be made, and be reduced a second time."""

    def __init__(self, index: int, buffer: torch.Tensor, parameters: Sequence[torch.Tensor], is_last: bool) -> None:
        self._index, self._buffer, self._parameters, self._is_last = index, buffer, list(parameters), is_last

    def index(self) -> int:
        """Its number in the order of reduction, from 0."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """All of its gradients, flat; after the reduction, what they have become."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Reduce this instead, as compression does."""
        self._buffer = buffer

    def parameters(self) -> list[torch.Tensor]:
        """The parameters whose gradients it holds."""
        return self._parameters

    def gradients(self) -> list[torch.Tensor]:
        """The gradient of each parameter, as views of the buffer."""
        sizes = [parameter.numel() for parameter in self._parameters]
        parts = torch.split(self._buffer, sizes)
        return [shaped(part, parameter) for part, parameter in zip(parts, self._parameters, strict=True)]

    def is_last(self) -> bool:
        """Whether no other bucket comes after it."""
        return self._is_last


class Part:
    """One bucket in one backward pass."""

    def __init__(self, index: int, numbers: tuple[int, ...], buffer: torch.Tensor, is_last: bool) -> None:
        self.index, self.numbers, self.buffer, self.is_last = index, numbers, buffer, is_last
        self.local: torch.Tensor | None = None
        """This rank's own gradients, unscaled, as long as they may have to be reduced again."""
        self.promised: Future[torch.Tensor] = Future()
        """What DDP waits for."""
        self.ticket: Ticket | None = None
        self.reduced: Future[torch.Tensor] | None = None
        """Completed when the collective is over; the hooks' own work hangs on it."""
        self.outcome: Future[torch.Tensor] | None = None

    @property
    def is_arrived(self) -> bool:
        """Whether `collect` has nothing to wait for."""
        return self.ticket is not None and self.ticket.is_done

    def collect(self) -> None:
        """Wait for the reduction and put its result into the buffer; `GroupBroken` if there will be none."""
        assert self.ticket is not None
        ticket, self.ticket = self.ticket, None
        ticket.wait()
        assert self.reduced is not None
        assert self.outcome is not None
        reduced, self.reduced = self.reduced, None
        reduced.set_result(self._sent)
        result = self.outcome.value()
        self.outcome = None
        if result.data_ptr() != self.buffer.data_ptr():
            self.buffer.copy_(result)

    def begin(self, ticket: Ticket, sent: torch.Tensor) -> Future[torch.Tensor]:
        """The collective is under way with this tensor; the future that hooks may hang their own work on."""
        self.ticket, self._sent = ticket, sent
        self.reduced = Future()
        return self.reduced

    def give_up(self) -> None:
        """There will be no result; nobody may wait for one."""
        self.ticket = self.reduced = self.outcome = None


def flattened(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A gradient in the order in which DDP's buckets hold it: that of the parameter's memory (channels last, say)."""
    if parameter.is_contiguous():
        return gradient.reshape(-1)
    ordered = torch.empty_strided(parameter.shape, parameter.stride(), dtype=gradient.dtype, device=gradient.device)
    return ordered.copy_(gradient).as_strided((gradient.numel(),), (1,))


def shaped(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The way back, as a view."""
    if parameter.is_contiguous():
        return flat.view(parameter.shape)
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
