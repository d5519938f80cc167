"""How all ranks come to the same answer without waiting for each other.

Each call waits for the round that the call before began, and begins the next one with this rank's votes. What comes
out is the largest of each vote, the same on every rank, one call later. A round takes place in the background, in a
gloo group of its own, and is normally over long before the next call.

Who hangs on to a gloo group keeps its sockets open, and its destructor waits for whatever is still under way. So after
an error everything is dropped at once, for the others to notice; and a round that does not end is never destroyed.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from evergrad.checkpoint.ranks import Ranks
from evergrad.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

_LAST_ROUND_S = 1.0


class Votes(NamedTuple):
    """What one rank has to say, and what all have said. Negative: nothing."""

    due: float = 0.0
    signal: float = 0.0
    """The number of the signal that has come, or 0."""
    overdue: float = 0.0
    """Whether the time to leave after that signal is over."""
    cost_s: float = -1.0
    durable_s: float = -1.0
    place: float = 0.0
    """Tells which call this is; it has to be the same on all ranks."""


class Agreement:
    """Rounds of votes among the ranks of one process group. All of them call `hear` and `say` alike."""

    def __init__(self, ranks: Ranks) -> None:
        """Make the group; every rank does."""
        from torch import distributed

        self._rank, self._world_size, self._pid = ranks.rank, ranks.world_size, os.getpid()
        if ranks.exchange is not None:
            raise UsageError(
                "in a job the ranks may change, so need_checkpoint and should_exit cannot be asked: "
                "eg.join(checkpointer=ck, every=100) saves by itself"
            )
        self._broken: str | None = None
        self._group: Any = None
        self._round: tuple[Any, Tensor] | None = None
        why = None
        try:
            self._group = distributed.new_group(backend="gloo")
        except (RuntimeError, ValueError) as error:
            why = f"no gloo group of all ranks can be made: {error}"
        if why is not None:
            self._break(why)
        _living.add(self)

    def hear(self) -> Votes | None:
        """Wait for the round under way, and give its result; None if there is none."""
        self._check()
        if self._round is None:
            return None
        (work, result), self._round = self._round, None
        why = None
        try:
            work.wait()
        except RuntimeError as error:
            why = str(error)
        del work  # before anything is raised: a traceback would keep it, and with it the sockets
        if why is not None:
            self._break(why)
        *votes, minus_place = result.tolist()
        heard = Votes(*votes)
        if heard.place != -minus_place:
            self._break("they do not all call need_checkpoint, should_exit and save in the same order")
        return heard

    def say(self, votes: Votes) -> None:
        """Begin the next round with this rank's votes. Returns at once."""
        import torch
        from torch import distributed

        self._check()
        assert self._round is None, "hear comes first"
        mine, work, why = torch.tensor([*votes, -votes.place], dtype=torch.float64), None, "its group was destroyed"
        try:
            work = distributed.all_reduce(mine, distributed.ReduceOp.MAX, group=self._group, async_op=True)
        except (RuntimeError, ValueError) as error:
            why = str(error)
        if work is None:
            self._break(why)
        self._round = work, mine

    def close(self) -> None:
        """Let go of the group, after the round under way if that ends soon."""
        if self._round is not None and os.getpid() == self._pid:
            with suppress(RuntimeError):
                self._round[0].wait(timedelta(seconds=_LAST_ROUND_S))
        self.drop()

    def drop(self) -> None:
        """Let go of the group at once."""
        is_child = os.getpid() != self._pid
        if is_child or (self._round is not None and not self._round[0].is_completed()):
            # The destructor would wait: for other ranks, half an hour, or in a forked child for threads that it lacks.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._round))
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._round = None
        if self._group is not None and not is_child:
            from torch import distributed

            with suppress(Exception):  # whoever destroyed all groups has destroyed this one
                distributed.destroy_process_group(self._group)
        self._group = None

    def __del__(self) -> None:
        self.drop()

    def _check(self) -> None:
        if self._broken is not None:
            raise CheckpointError(self._broken)

    def _break(self, why: str) -> NoReturn:
        self._broken = (
            f"rank {self._rank} of {self._world_size}: the ranks cannot agree on when to save: {why}. "
            "A rank is gone, or does not call alike; a new process group begins afresh."
        )
        self.drop()
        raise CheckpointError(self._broken)


_living: weakref.WeakSet[Agreement] = weakref.WeakSet()


def _close_all() -> None:
    for agreement in list(_living):
        agreement.close()


# A group that is destroyed while the interpreter is taken down can hang it.
atexit.register(_close_all)
