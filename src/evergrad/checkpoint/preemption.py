"""Signals that ask a job to leave, noted for the training loop to act on.

The handlers do nothing but note, and call the handler that was there before. A second signal of the same kind is
somebody who insists: it gets what it would have got without us. A scheduler and a launcher often both pass on one
notice, so a repetition right after the first is no insisting.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from evergrad.checkpoint.ranks import Ranks
from evergrad.errors import CheckpointError, UsageError
from evergrad.wording import signal_name

if TYPE_CHECKING:
    from torch import Tensor


_log = logging.getLogger(__name__)
_SAME_NOTICE_S = 1.0
_UNWATCHABLE = {signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}


class SignalNotice(NamedTuple):
    """A signal that has come."""

    number: int
    time_s: float
    """By the watch's clock."""


class SignalWatch:
    """Notes signals from `begin` to `end`."""

    def __init__(self, signals: Sequence[int], clock: Callable[[], float]) -> None:
        self._signals, self._clock = tuple(signals), clock
        self._before: dict[int, Any] = {}
        """What was there before, of the signals that are watched now."""
        self._times: dict[int, float] = {}
        self._begun = self._ended = False
        self._pid = os.getpid()

    first: SignalNotice | None = None
    """The first signal that came."""

    def install(self) -> None:
        """Install the handlers, once; only the main thread can."""
        if self._begun or self._ended:
            return
        self._begun = True
        if not self._signals:
            return
        if threading.current_thread() is not threading.main_thread():
            _log.warning(
                "no signal is watched: need_checkpoint() and should_exit() were first called outside the main thread"
            )
            return
        for number in self._signals:
            before = signal.getsignal(number)
            if before is None:  # set by C code: it could not be put back
                _log.warning("%s is not watched: it has a handler that is not Python's", signal_name(number))
                continue
            self._before[number] = before
            signal.signal(number, self._note)
        _watches.add(self)

    def uninstall(self) -> None:
        """Put the old handlers back. Where another one was put above ours, ours only passes signals on from now."""
        self._ended = True
        self._put_back()

    def _put_back(self) -> None:
        for number, before in list(self._before.items()):
            # Equal, not identical: each look at a method gives another object.
            if signal.getsignal(number) == self._note:
                with suppress(ValueError):  # not in the main thread
                    signal.signal(number, before)
                    del self._before[number]

    def _note(self, number: int, frame: FrameType | None) -> None:
        before, now = self._before.get(number, signal.SIG_DFL), self._clock()
        insists = now - self._times.setdefault(number, now) >= _SAME_NOTICE_S
        if insists or self._ended or os.getpid() != self._pid:
            is_on_top = signal.getsignal(number) == self._note
            if is_on_top or before == signal.SIG_DFL:
                signal.signal(number, before)
                signal.raise_signal(number)
                return
        elif self.first is None:
            self.first = SignalNotice(number, now)
        if callable(before):
            before(number, frame)


def checked_signals(names: Sequence[str | int]) -> tuple[int, ...]:
    """The numbers of signals that are given by name or number."""
    if isinstance(names, str | int) or not isinstance(names, Sequence):
        raise UsageError(f"preempt_signals: expected a sequence of signal names, found {names!r}")
    return tuple(dict.fromkeys(_checked_signal(name) for name in names))


def _checked_signal(name: str | int) -> int:
    number: int | None = None
    if isinstance(name, str):
        number = getattr(signal.Signals, name, None)
    elif isinstance(name, int) and not isinstance(name, bool) and name in signal.valid_signals():
        number = name
    if number is None:
        raise UsageError(f"preempt_signals: expected names such as 'SIGTERM', found {name!r}")
    if number in _UNWATCHABLE:
        raise UsageError(f"preempt_signals: {signal_name(number)} cannot be watched")
    return int(number)


_watches: weakref.WeakSet[SignalWatch] = weakref.WeakSet()


def _put_back_in_child() -> None:
    for _ in list(_watches):  # as often as one could lie above another
        for watch in list(_watches):
            watch._put_back()


# A data loader's worker that is asked to terminate has to: it does not train, and saves nothing.
os.register_at_fork(after_in_child=_put_back_in_child)


# How all ranks come to the same answer without waiting for each other.
#
# Each call waits for the round that the call before began, and begins the next one with this rank's votes. What comes
# out is the largest of each vote, the same on every rank, one call later. A round takes place in the background, in a
# gloo group of its own, and is normally over long before the next call.
#
# Who hangs on to a gloo group keeps its sockets open, and its destructor waits for whatever is still under way. So
# after an error everything is dropped at once, for the others to notice; and a round that does not end is never
# destroyed.

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


class AsyncVote:
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

    def finish_round(self) -> Votes | None:
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

    def start_round(self, votes: Votes) -> None:
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
        self.abandon()

    def abandon(self) -> None:
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
        self.abandon()

    def _check(self) -> None:
        if self._broken is not None:
            raise CheckpointError(self._broken)

    def _break(self, why: str) -> NoReturn:
        self._broken = (
            f"rank {self._rank} of {self._world_size}: the ranks cannot agree on when to save: {why}. "
            "A rank is gone, or does not call alike; a new process group begins afresh."
        )
        self.abandon()
        raise CheckpointError(self._broken)


_living: weakref.WeakSet[AsyncVote] = weakref.WeakSet()


def _close_all() -> None:
    for agreement in list(_living):
        agreement.close()


# A group that is destroyed while the interpreter is taken down can hang it.
atexit.register(_close_all)
