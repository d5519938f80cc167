"""How a process ended, in words; and what those words tell of the trial that it was at."""

from __future__ import annotations

import re

from evergrad.checkpoint.preemption import signal_name

_DEADLY = re.compile(r"SIG(SEGV|BUS|FPE|ILL|ABRT)")


def how_it_ended(code: int) -> str:
    """After the name of the process: `died: SIGKILL`, for -9.

    >>> how_it_ended(-11), how_it_ended(3)
    ('died: SIGSEGV', 'ended with exit code 3')
    """
    return f"ended with exit code {code}" if code >= 0 else f"died: {signal_name(-code)}"


def is_own_doing(how: str) -> bool:
    """Whether a process died of what it did itself: twice in the same trial, and it is the fault's doing.

    >>> is_own_doing("rank 1 died: SIGSEGV"), is_own_doing("rank 1 died: SIGKILL")
    (True, False)
    """
    return _DEADLY.search(how) is not None
