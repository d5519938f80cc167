"""Ranks that are forks of the launcher, once that has imported torch: they start at once, and share its memory.

Only before the launcher has threads; whoever is started later is a process of its own. To the script it is as if it had
been started by itself, but for modules that are imported already.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import random
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

_PRELOADED = ("torch", "torch._dynamo", "torch.utils.data", "torch.nn.parallel", "evergrad.recovery.joining")
_PR_SET_PDEATHSIG = 1
_kept: list[dict[str, Any]] = []
"""What a script has left: freed with the process, not before, as gloo's threads may wait for the interpreter then."""


class Forked:
    """A process that was forked, as `subprocess.Popen` would show it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def wait(self) -> int:
        """Its exit code, once it has ended; below zero, the signal that ended it."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code


def preload() -> None:
    """Import what every rank needs; with one thread a process and errors only, unless somebody says otherwise."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name in _PRELOADED:
        with suppress(ImportError):
            importlib.import_module(name)


def fork(command: Sequence[str], environment: Mapping[str, str], kept: Collection[int] = ()) -> tuple[Forked, int, int]:
    """Run a Python command (`python -u [-m] script arguments`) in a fork that keeps these descriptors."""
    assert threading.active_count() == 1, "a fork of a process with threads may wait for a lock for ever"
    launcher = os.getpid()
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            _detach(launcher, out_end, err_end, environment, kept)
            code = _run(list(command))
        except BaseException:
            traceback.print_exc()  # an exit that says nothing could not be explained by anybody
        finally:
            os._exit(code)
    os.close(out_end)
    os.close(err_end)
    return Forked(pid), out, err


def end_with_parent(parent: int) -> None:
    """In a fork: the kernel kills this process when its parent ends, however it ends; if it has ended, so do we."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _detach(launcher: int, out: int, err: int, environment: Mapping[str, str], kept: Collection[int]) -> None:
    """Be a process like any other that was started: own group, own output, default signals, own chance."""
    os.setpgid(0, 0)
    end_with_parent(launcher)
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    first = 3
    for fd in sorted(kept):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, 1 << 16)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(0, closefd=False),
        os.fdopen(1, "w", 1, closefd=False, errors="backslashreplace"),
        os.fdopen(2, "w", 1, closefd=False, errors="backslashreplace"),
    )
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _run(command: list[str]) -> int:
    """The script as `__main__`, to its end and through what it has left for its exit."""
    arguments = command[command.index("-u") + 1 :]
    sys.orig_argv[:] = command
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path.insert(0, "")
            _kept.append(runpy.run_module(arguments[1], run_name="__main__", alter_sys=True))
        else:
            sys.argv = arguments
            sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
            _kept.append(runpy.run_path(arguments[0], run_name="__main__"))
        code = 0
    except SystemExit as error:
        code = _code_of(error)
    except BaseException as error:
        _show(error)
        code = 1
    shutdown: Any = getattr(threading, "_shutdown", None)
    if shutdown is not None:
        shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    return code


def _code_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    """The traceback that the script would have had by itself."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
