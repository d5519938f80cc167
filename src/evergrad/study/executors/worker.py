"""A worker process: does one task at a time for its runner, and ends with it.

It inherits three descriptors: tasks come in on the first as JSON lines, answers go out on the second, and the third is
its lifeline, a pipe whose other end only the runner holds. Stdout and stderr are free for what the work prints.

    →  {"folder": …, "perform": "module:function", "path": […]}     once
    ←  {"ready": true}  or  {"unfit": reason}                       once
    →  {"id": …, "work": {…}}
    ←  {"id": …, "result": {…}}  or  {"id": …, "broken": reason}

It leads a process group of its own: whatever the work starts in that group ends with the worker.
"""

from __future__ import annotations

import faulthandler
import importlib
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from evergrad._forkserver import end_group_with
from evergrad.errors import EvergradError, UsageError
from evergrad.wording import short_repr

LONGEST_ANSWER = 16 << 20
"""Bytes of a line that the runner reads."""


def resolve(spelling: str) -> Callable[..., Any]:
    """What `module:name` means.

    >>> resolve("os.path:join")("a", "b")
    'a/b'
    """
    module, _, name = spelling.partition(":")
    if not module or not name.isidentifier():
        raise UsageError(f"expected module:function, found {short_repr(spelling)}")
    found = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise UsageError(f"{spelling}: module {module} has no function {name!r}")
    return found  # type: ignore[no-any-return]


def serve(tasks: int, answers: int, lifeline: int) -> None:
    """The process itself: until there are no more tasks."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # a cluster tells whoever serves that its time is nearly over
    end_group_with(lifeline)
    for descriptor in (tasks, answers, lifeline):
        os.set_inheritable(descriptor, False)  # a command that the work starts would keep them open
    faulthandler.enable()  # says on stderr, which is the log, where it was when it died
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that the log has what was printed before that
    with os.fdopen(tasks, "rb") as lines, os.fdopen(answers, "wb", buffering=0) as out:
        told = json.loads(lines.readline())
        sys.path[:] = told["path"]
        try:
            perform = resolve(told["perform"])
        except Exception as error:
            _send(out, {"unfit": _error_text(error)})
            return
        _send(out, {"ready": True})
        for line in lines:
            task = json.loads(line)
            _send(out, {"id": task["id"], **run_task(perform, Path(told["folder"]), task["work"])})


def run_task(perform: Callable[..., Any], folder: Path, work: dict[str, Any]) -> dict[str, Any]:
    """The answer to a task: its result, or why there is none."""
    try:
        result = perform(folder, work)
        if not isinstance(result, dict):
            raise TypeError(f"expected a JSON object as the result, found {short_repr(result)}")
        length = len(json.dumps(result, allow_nan=False))
        if length > LONGEST_ANSWER // 2:
            raise ValueError(f"a result of {length} bytes is too long (expected at most {LONGEST_ANSWER // 2})")
        return {"result": result}
    except (Exception, SystemExit) as error:
        return {"broken": _error_text(error)}


def _error_text(error: BaseException) -> str:
    """One line; an error that nobody raised on purpose also says where it came from."""
    if isinstance(error, EvergradError):
        return str(error)
    traceback.print_exception(error)
    ours = (__file__, importlib.__file__, "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in ours]
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    text = f": {error}" if str(error) else ""
    return str(EvergradError(f"{type(error).__name__}{place}{text}"))


def _send(out: IO[bytes], answer: dict[str, Any]) -> None:
    left = memoryview(json.dumps(answer).encode() + b"\n")
    while left:
        left = left[out.write(left) :]
