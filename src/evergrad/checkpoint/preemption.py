"""Signals that ask a job to leave, noted for the training loop to act on.

The handlers do nothing but note, and call the handler that was there before. A second signal of the same kind is
somebody who insists: it gets what it would have got without us. A scheduler and a launcher often both pass on one
notice, so a repetition right after the first is no insisting.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, NamedTuple

from evergrad.errors import UsageError

_log = logging.getLogger(__name__)
_SAME_NOTICE_S = 1.0
_UNWATCHABLE = {signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}


class Notice(NamedTuple):
    """A signal that has come."""

    number: int
    time_s: float
    """By the watch's clock."""


class Watch:
    """Notes signals from `begin` to `end`."""

    def __init__(self, signals: Sequence[int], clock: Callable[[], float]) -> None:
        self._signals, self._clock = tuple(signals), clock
        self._before: dict[int, Any] = {}
        """What was there before, of the signals that are watched now."""
        self._times: dict[int, float] = {}
        self._begun = self._ended = False
        self._pid = os.getpid()

    first: Notice | None = None
    """The first signal that came."""

    def begin(self) -> None:
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

    def end(self) -> None:
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
            self.first = Notice(number, now)
        if callable(before):
            before(number, frame)


def checked_signals(names: Sequence[str | int]) -> tuple[int, ...]:
    """The numbers of signals that are given by name or number."""
    if isinstance(names, str | int) or not isinstance(names, Sequence):
        raise UsageError(f"preempt_signals: expected a sequence of signal names, found {names!r}")
    return tuple(dict.fromkeys(_checked_signal(name) for name in names))


def signal_name(number: int) -> str:
    """`SIGTERM`, for 15."""
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals
        return f"signal {number}"


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


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


def _put_back_in_child() -> None:
    for _ in list(_watches):  # as often as one could lie above another
        for watch in list(_watches):
            watch._put_back()


# A data loader's worker that is asked to terminate has to: it does not train, and saves nothing.
os.register_at_fork(after_in_child=_put_back_in_child)
