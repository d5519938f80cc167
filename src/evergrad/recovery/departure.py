"""SIGTERM, the notice of a preemption: heeded between two steps, so that a rank leaves with its work done.

The script keeps a handler of its own, if it has one. Where a rank waits for a decision of the launcher it could not
heed the notice: there the signal does what it always did, and ends the process.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType


class Departure:
    """Whether this process has been asked to leave."""

    def __init__(self, asked: Callable[[int], None]) -> None:
        """`asked` is called with the signal's number, in the main thread."""
        self._asked = asked
        self._watches = False

    def watch(self) -> None:
        """Heed the signal from now on; nothing happens where somebody else does, or outside of the main thread."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not self._watches and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._watches = True
            signal.signal(signal.SIGTERM, self._heed)
            _shield_forks()

    def close(self) -> None:
        """Heed it no more. Twice is fine."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and self._watches and signal.getsignal(signal.SIGTERM) == self._heed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._watches = False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside of this the signal ends the process, as it does by default."""
        is_main = threading.current_thread() is threading.main_thread()
        if not (is_main and self._watches and signal.getsignal(signal.SIGTERM) == self._heed):
            yield
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, self._heed)

    def _heed(self, number: int, frame: FrameType | None) -> None:
        self._asked(number)


@cache
def _shield_forks() -> None:
    """What the script forks (a data loader's workers) was never asked to leave with its work done: it just ends.

    The signal is held back around a fork: Python forgets, in the child, one that comes in the midst of it.
    """

    def hold() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def let_go() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def become_ordinary() -> None:
        handler = signal.getsignal(signal.SIGTERM)
        if isinstance(getattr(handler, "__self__", None), Departure):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        let_go()

    os.register_at_fork(before=hold, after_in_parent=let_go, after_in_child=become_ordinary)
