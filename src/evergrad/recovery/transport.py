"""How ranks of one generation talk: the contract, and the group of one.

A group is made for one generation and never mended. Whatever goes wrong in it, and whatever is asked of it after
`interrupt`, ends in `GroupBroken`, on every rank, soon: a rank that sees an error interrupts its group, which its peers
see in turn. Calls start in the same order on all ranks, from one thread; only `interrupt` may come from another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch

from evergrad.errors import RecoveryError

Op: TypeAlias = Literal["sum", "max"]


class GroupBroken(RecoveryError):
    """A generation has ended: a rank is gone, or someone said so. The job gets over it; users do not meet it."""

    def __init__(self, message: str | None) -> None:
        super().__init__(message or "the group is gone")


class Ticket:
    """A collective under way. `wait` returns when it is done here, and raises `GroupBroken` if it never will be."""

    def __init__(self, wait: Callable[[], None] | None = None, is_done: Callable[[], bool] | None = None) -> None:
        """Without `is_done` nobody knows before they have waited."""
        self._wait, self._is_done = wait, is_done

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, without waiting; False where that is not known."""
        return self._wait is None or (self._is_done is not None and self._is_done())

    def wait(self) -> None:
        """Wait, once; waiting again for what is over returns at once."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()


class Group(ABC):
    """The ranks of one generation. Tensors are contiguous and changed in place; they may be on the CPU or on CUDA."""

    rank: int
    size: int
    num_begun: int = 0
    """The number of collectives that this rank has begun, in the same order as all ranks. Sends do not count."""

    @property
    def before(self) -> int:
        """The neighbour before this rank; before the first, the last."""
        return (self.rank - 1) % self.size

    @property
    def after(self) -> int:
        """The neighbour after this rank; after the last, the first."""
        return (self.rank + 1) % self.size

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum") -> Ticket:
        """Begin to combine a tensor of all ranks; each then has the result."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int) -> Ticket:
        """Begin to give one rank's tensor to all."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, to: int) -> Ticket:
        """Begin to send a tensor (on the CPU) to one rank."""

    @abstractmethod
    def receive(self, tensor: torch.Tensor, sender: int) -> Ticket:
        """Begin to receive what one rank sends, into a tensor (on the CPU) of the same size."""

    @abstractmethod
    def interrupt(self, reason: str) -> None:
        """Break the group, for this rank and so for its peers. From any thread; twice is fine."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. Twice is fine."""


class Alone(Group):
    """A group of one: nothing to do, nothing that can break."""

    rank, size = 0, 1

    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum") -> Ticket:
        return Ticket()

    def broadcast(self, tensor: torch.Tensor, root: int) -> Ticket:
        return Ticket()

    def send(self, tensor: torch.Tensor, to: int) -> Ticket:
        raise AssertionError("there is nobody to send to")

    def receive(self, tensor: torch.Tensor, sender: int) -> Ticket:
        raise AssertionError("there is nobody to receive from")

    def interrupt(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass


def swap(group: Group, mine: torch.Tensor, to: int, theirs: torch.Tensor, sender: int) -> None:
    """Send a tensor to one rank while receiving one from another, or from the same; `GroupBroken` if that fails."""
    sent = group.send(mine, to)
    group.receive(theirs, sender).wait()
    sent.wait()
