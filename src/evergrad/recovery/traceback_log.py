"""The traceback of a mistake in the script, under `evergrad run`: kept in the process's log, and not shown.

Every rank makes the same mistake, and the launcher says it in one line. As many tracebacks would hide that line.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from types import TracebackType

from evergrad.errors import UsageError


def keep_in_log(error: UsageError, *, is_said: bool) -> None:
    """Write where the script is, and this error, into the log now, and do not show it when it ends the process.

    Now, because the launcher ends all processes once it knows of the error. With `is_said` it says the error itself;
    else its text is printed by this process, as one line. If there is no log, the traceback is shown as ever.
    """
    if not _write(_where() + "".join(traceback.format_exception_only(error))):
        return
    before = sys.excepthook

    def show(kind: type[BaseException], found: BaseException, trace: TracebackType | None) -> None:
        if found is not error:
            before(kind, found, trace)
        elif not is_said:
            print(f"evergrad: {error}", file=sys.stderr)

    sys.excepthook = show


def _where() -> str:
    """The stack from the script on, without what has started it."""
    frames = traceback.extract_stack()[:-2]
    starts = [number for number, frame in enumerate(frames) if frame.filename in (runpy.__file__, "<frozen runpy>")]
    first = starts[-1] + 1 if starts else 0
    return "Traceback (most recent call last):\n" + "".join(traceback.format_list(frames[first:]))


def _write(text: str) -> bool:
    """Append to this process's log, which the launcher has made; False if that cannot be."""
    run, uid = os.environ.get("EVERGRAD_RUN"), os.environ.get("EVERGRAD_UID")
    if not run or not uid:
        return False
    try:
        log = os.open(os.path.join(run, "logs", f"{uid}.log"), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        data = text.encode(errors="backslashreplace")
        while data:
            data = data[os.write(log, data) :]
    except OSError:
        return False
    finally:
        os.close(log)
    return True
