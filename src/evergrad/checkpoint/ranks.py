"""Which rank this is, and how all ranks come to one decision.

The default process group of torch.distributed is looked up at each call: it may be made after the checkpointer, and
made anew after a failure. Where ranks do not use one, as in a job that survives losses, whoever knows them says so by
`follow`. Without either, this process is alone.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from evergrad.errors import CheckpointError

_T = TypeVar("_T")
_followed: Callable[[], Ranks] | None = None


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank among all, as of now."""

    rank: int
    world_size: int
    group: weakref.ref[object] | None
    """Tells one process group from the next, and keeps none alive; None if alone."""
    exchange: Callable[[Any], list[Any]] | None = field(default=None, compare=False)
    """How to gather what every rank has; None if torch.distributed does."""

    @classmethod
    def now(cls) -> Ranks:
        """Whom `follow` names, else the default process group."""
        if _followed is not None:
            return _followed()
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return cls(0, 1, None)
        return cls(distributed.get_rank(), distributed.get_world_size(), weakref.ref(distributed.group.WORLD))

    def gather(self, mine: _T) -> list[_T]:
        """What every rank has, in the order of ranks. Every rank must call it."""
        if self.world_size == 1:
            return [mine]
        if self.exchange is not None:
            return self.exchange(mine)
        from torch import distributed

        found: list[_T | None] = [None] * self.world_size
        distributed.all_gather_object(found, mine)
        return cast("list[_T]", found)

    def run_on_all(self, act: Callable[[], _T]) -> _T:
        """Do something on every rank; if it fails on one, it fails on all, and all say where."""
        result: _T | None = None
        mine: Exception | None = None
        try:
            result = act()
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            mine = error
        failures = self.gather(None if mine is None else str(mine) or type(mine).__name__)
        if mine is not None:
            raise mine
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise CheckpointError(f"rank {rank}: {failure}")
        return cast("_T", result)


def follow(ranks: Callable[[], Ranks] | None) -> None:
    """From now on, go by what this says of the ranks, instead of by the default process group; None: no longer."""
    global _followed  # noqa: PLW0603 (there is one job in a process)
    _followed = ranks


def is_distributed() -> bool:
    """Whether there are, or may be, other ranks."""
    if _followed is not None:
        return True
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()
