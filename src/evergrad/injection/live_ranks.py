"""Which ranks live faults happen on, and where they would be erased at once.

DDP's constructor gives rank 0's parameters and buffers to all ranks, and each forward pass begins with rank 0's buffers
for all: what was hit on another rank before that is gone, and a study would have measured nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evergrad.errors import UsageError
from evergrad.injection.live_order import mixed
from evergrad.injection.live_targets import is_wrapped
from evergrad.records import Role, TensorInfo
from evergrad.wording import shown

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Ranks:
    """The ranks that are hit, None for all; and this process among them."""

    chosen: tuple[int, ...] | None
    own: int
    world: int | None
    """How many there are; None if nobody has said."""

    @classmethod
    def of(cls, chosen: Sequence[int] | None, own: int | None) -> Ranks:
        """Checked; a process that is told nothing asks torch.distributed, and is rank 0 of one without it."""
        from torch import distributed

        joined = distributed.is_available() and distributed.is_initialized()
        world = distributed.get_world_size() if joined else 1 if own is None else None
        if own is None:
            own = distributed.get_rank() if joined else 0
        elif not _is_rank(own):
            raise UsageError(f"rank: expected this process's rank, from 0 on, found {shown(own)}")
        if chosen is None:
            return cls(None, own, world)
        if not isinstance(chosen, (list, tuple, range, set, frozenset)) or not chosen:
            raise UsageError(f"ranks: expected a list of ranks such as [1], found {shown(chosen)}")
        for rank in chosen:
            if not _is_rank(rank):
                raise UsageError(f"ranks: expected ranks from 0 on, found {shown(rank)}")
            if world is not None and rank >= world:
                there = "this process is the only one" if world == 1 else f"there are 0 to {world - 1}"
                raise UsageError(f"ranks: rank {rank} is not there: {there}")
        return cls(tuple(dict.fromkeys(chosen)), own, world)

    @property
    def is_hit(self) -> bool:
        """Whether anything happens in this process."""
        return self.chosen is None or self.own in self.chosen

    def seed(self, seed: int) -> int:
        """Each rank's draws are its own. One rank alone has those of a file, and so have all where none are named."""
        return seed if self.chosen is None or len(self.chosen) == 1 else mixed(seed, "rank", self.own)

    def refuse_erased(self, model: nn.Module, *, is_state: bool, bare: bool) -> None:
        """Refuse what wrapping the model would erase."""
        if not is_state or bare or is_wrapped(model) or not self._others():
            return
        raise UsageError(
            f"rank {self._others()[0]}: the model is not wrapped yet, and DDP's constructor gives rank 0's parameters "
            "and buffers to every rank: the fault would be erased. Wrap it first (bare=True if it never will be)."
        )

    def refuse_shared(self, model: nn.Module, hit: Sequence[TensorInfo]) -> None:
        """Refuse buffers that the next forward pass replaces by rank 0's."""
        if not is_wrapped(model) or not getattr(model, "broadcast_buffers", False) or not self._others():
            return
        buffers = [info.name for info in hit if info.role is Role.BUFFER]
        if buffers:
            raise UsageError(
                f"rank {self._others()[0]}: {buffers[0]} is a buffer, and DDP gives rank 0's buffers to every rank "
                "before each forward pass: the fault would be erased. Hit rank 0, or select other tensors."
            )

    def _others(self) -> list[int]:
        """The ranks that are hit, but for rank 0."""
        if self.chosen is not None:
            return [rank for rank in self.chosen if rank]
        return [self.own or 1] if self.own or (self.world or 1) > 1 else []


def _is_rank(value: object) -> bool:
    return type(value) is int and value >= 0
