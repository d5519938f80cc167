"""Processes that have torch loaded and fork children, and children that end with their parent.

Importing torch takes seconds, a fork takes milliseconds. A process that forks has one thread: a lock that another
thread holds at that moment stays locked in the child.

- `preload` and `fork`: this process forks children of its own, as `evergrad run --preload` does with ranks.
- `Forkserver`: another process forks them, because this one has threads, or has used torch.
- `guarded`: a command that is started with `subprocess` and ends with this process.
- `end_group_with`: a process group that ends when a pipe closes.

No child survives its parent, also if that is killed: the kernel ends it (PR_SET_PDEATHSIG), no code of ours has to run.
The forkserver of `multiprocessing` does not give this: its children outlive SIGKILL, its process is shared with every
library that uses one, and a child imports the main script again.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from time import monotonic
from typing import TYPE_CHECKING, Any

from evergrad.wording import signal_name

if TYPE_CHECKING:
    from evergrad.records import Json

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""In the environment of a process that has a core to itself: with more threads, processes wait for each other."""
START_S = 300.0
"""Importing torch from a slow file system takes minutes; longer than this is a start that hangs."""

_TORCH = ("torch", "torch._dynamo", "torch.utils.data", "torch.nn.parallel")
"""DDP and optimizers import `torch._dynamo` when they are first used."""
_UNCAUGHT = 70
"""Exit code of a fork in which our own code raised."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37
_READ = 1 << 16
_globals: list[dict[str, Any]] = []
"""Of scripts that have ended: freed with the process, not before, as gloo's threads may wait for the interpreter."""


def preload(*modules: str) -> None:
    """Import torch and these modules, as far as they are there; one thread a process and errors only, unless set."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name in (*_TORCH, *modules):
        with suppress(ImportError):
            importlib.import_module(name)


# A child of this process.


class OwnChild:
    """A process that this one has started, and waits for."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def wait(self) -> int:
        """Its exit code, once it has ended; below zero, the signal that ended it."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code


def fork(run: Callable[[], int], *, leads_group: bool = False) -> OwnChild:
    """Run a function in a fork of this process; it ends with the code that the function returns, and with this process.

    Signals are handled there as in a new process. `leads_group`: it is the head of a process group of its own.
    """
    assert threading.active_count() == 1, "a fork of a process with threads may wait for a lock for ever"
    parent = os.getpid()
    _flush()
    pid = os.fork()
    if pid:
        if leads_group:
            with suppress(OSError):  # the child does it too: whoever is first, the group is there before it is used
                os.setpgid(pid, pid)
        return OwnChild(pid)
    code = _UNCAUGHT
    try:
        if leads_group:
            os.setpgid(0, 0)
        end_with_parent(parent)
        _reset_signals()
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed()  # Python's own generator does that by itself
        code = run()
    except BaseException:
        traceback.print_exc()  # an exit that says nothing could not be explained by anybody
    finally:
        _flush()
        os._exit(code)  # an orderly end would run what the parent has left for its own


def end_with_parent(parent: int) -> None:
    """In a child: the kernel kills it when its parent ends, however that ends; if it has ended before, so do we."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _reset_signals() -> None:
    """Default handling of what the parent has handlers for; what it ignores stays ignored, as in a new process."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def detach(stdout: int, stderr: int, environment: Mapping[str, str], keep: Collection[int] = ()) -> None:
    """In a fork: have output, environment and descriptors of one's own; others than `keep` are closed."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    first = 3
    for descriptor in sorted(keep):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, 1 << 16)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(0, closefd=False),
        os.fdopen(1, "w", 1, closefd=False, errors="backslashreplace"),
        os.fdopen(2, "w", 1, closefd=False, errors="backslashreplace"),
    )
    os.environ.clear()
    os.environ.update(environment)


def run_script(words: Sequence[str]) -> int:
    """In a fork: run `[-m] script arguments` as `__main__` to its end; its exit code."""

    def run() -> None:
        if words[0] == "-m":
            sys.argv = list(words[1:])
            sys.path.insert(0, "")
            _globals.append(runpy.run_module(words[1], run_name="__main__", alter_sys=True))
        else:
            sys.argv = list(words)
            sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
            _globals.append(runpy.run_path(words[0], run_name="__main__"))

    return run_to_end(run)


def run_to_end(run: Callable[[], object]) -> int:
    """In a fork: call a function as a program, through what it has left for its exit; its exit code."""
    try:
        run()
        code = 0
    except SystemExit as error:
        code = _code_of(error)
    except BaseException as error:
        trace = error.__traceback__  # from the script on: as it would be without us
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = 1
    shutdown: Any = getattr(threading, "_shutdown", None)
    if shutdown is not None:
        shutdown()
    atexit._run_exitfuncs()
    _flush()
    return code


def _code_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


# Children that are started with `subprocess`, their groups, and how they ended.

# Run between fork and the command. Not in the forked child itself: Python code there, in a process with threads, can
# wait for a lock for ever.
_GUARD = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)})
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def guarded(command: Sequence[str]) -> list[str]:
    """The command that runs this one so that it ends with the thread of ours that starts it."""
    return [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), *command]


def end_group_with(lifeline: int) -> None:
    """The kernel kills this process's group when the other end of this pipe closes.

    No thread has to wake up for it, which it could not while C code holds the interpreter's lock; and unlike a parent's
    end it does not matter which thread started the process.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    waiting = select.poll()
    waiting.register(lifeline)
    if waiting.poll(0):  # it closed before
        os.killpg(0, signal.SIGKILL)


def kill_group(pid: int) -> None:
    """Kill the process group that a child leads, if it is there; once the child is reaped it may be another's."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def ended(pid: int) -> os.waitid_result | None:
    """How a child has ended, if it has; it is not reaped, so that its number stays its own."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def set_subreaper(value: int) -> int:
    """Whether orphans below this process become its own; returns what was set before."""
    libc, before = ctypes.CDLL(None), ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, value, 0, 0, 0)
    return before.value


def describe_exit(code: int) -> str:
    """How a process ended, in words; below zero, the signal that ended it. Timelines have these words too.

    >>> describe_exit(-9), describe_exit(7)
    ('SIGKILL', 'exit code 7')
    """
    return signal_name(-code) if code < 0 else f"exit code {code}"


# A process that forks children for this one.
#
# Messages are JSON on a socket pair that keeps them apart:
#
#     ←  {"ready": true}
#     →  {"fork": "module:function"}        with descriptors: the work as a file, then those for the child
#     ←  {"pid": 4711}                      with one: its pidfd
#     ←  {"pid": 4711, "code": -9}          it has ended
#
# The forkserver ends when its owner is gone, and its children with it.

_MOST_DESCRIPTORS = 16
# Not -m: the module may have been imported with its packages, and would be run a second time.
_SERVE = "import sys; from evergrad._forkserver import serve; serve(int(sys.argv[1]), sys.argv[2:])"


class ForkserverLost(Exception):
    """The forkserver cannot start, or has ended, and its children with it."""


class ForkserverChild:
    """A child of a forkserver; it is known by a descriptor, so that no other process is ever taken for it."""

    def __init__(self, server: Forkserver, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.code: int | None = None
        """Its exit code as far as it is known; `first_ended` asks."""
        self._server = server

    def wait(self) -> int:
        """Its exit code, once it has ended; below zero, the signal that ended it. `ForkserverLost` if nobody knows."""
        self._server.first_ended([self], None)
        assert self.code is not None
        return self.code

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def __del__(self) -> None:
        os.close(self.pidfd)


class Forkserver:
    """A process that has torch and some modules loaded, and forks children from it. Not for several threads."""

    def __init__(self, *modules: str, environment: Mapping[str, str], new_session: bool = False) -> None:
        """`new_session`: Ctrl-C in a terminal does not reach it."""
        self._children: dict[int, ForkserverChild] = {}
        self._owner = os.getpid()
        self._is_lost = False
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # a message at a time
        with theirs:
            self.process = subprocess.Popen(
                # -P: the folder in which somebody started us is not where we find our own modules.
                [sys.executable, "-P", "-c", _SERVE, str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=dict(environment),
                start_new_session=new_session,
            )
        self._link.settimeout(START_S)
        try:
            self._receive()
        except BaseException:
            self.close()
            raise

    @property
    def is_there(self) -> bool:
        """Whether it can fork children for this process."""
        return not self._is_lost and self._owner == os.getpid() and self.process.poll() is None

    def fork(self, function: str, work: Mapping[str, Json], descriptors: Sequence[int] = ()) -> ForkserverChild:
        """Call `module:function` in a new child with this work, as JSON, and with these descriptors.

        Its exit code is what the function returns.
        """
        with open(os.memfd_create("evergrad-work"), "w+b") as file:  # a message would limit its length
            file.write(json.dumps(dict(work)).encode())
            file.flush()
            message = json.dumps({"fork": function}).encode()
            try:
                socket.send_fds(self._link, [message], [file.fileno(), *descriptors])
            except OSError:
                raise self._lost() from None
        pidfd = None
        while pidfd is None:
            pid, pidfd = self._receive()
        child = self._children[pid] = ForkserverChild(self, pid, pidfd)
        return child

    def first_ended(self, children: Iterable[ForkserverChild], limit_s: float | None) -> ForkserverChild | None:
        """One of these that has ended, or does within that time."""
        waited = list(children)
        until = None if limit_s is None else monotonic() + limit_s
        while True:
            for child in waited:
                if child.code is not None:
                    return child
            left = None if until is None else max(0.0, until - monotonic())
            if not wait([self._link], left):
                return None
            self._receive()

    def close(self) -> None:
        """End it, and its children. Twice is fine."""
        self._is_lost = True
        self._link.close()
        if self._owner != os.getpid():
            return
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _receive(self) -> tuple[int, int | None]:
        """The next message: whom it is of, and the descriptor of one that is new."""
        try:
            text, descriptors, _, _ = socket.recv_fds(self._link, _READ, 1)
        except OSError:
            text = b""
        if not text:
            raise self._lost()
        told = json.loads(text)
        pid = int(told.get("pid", 0))
        if "code" in told:
            self._children.pop(pid).code = int(told["code"])
        return pid, descriptors[0] if descriptors else None

    def _lost(self) -> ForkserverLost:
        self._is_lost = True
        return ForkserverLost("the forkserver has ended")


def serve(descriptor: int, modules: Sequence[str]) -> None:
    """The forkserver itself: until its owner is gone."""
    preload(*modules)
    link = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with suppress(ConnectionError):
        link.sendall(b'{"ready": true}')
        while True:
            readable = wait([link.fileno(), wake])
            if wake in readable:
                os.read(wake, _READ)
                _reap(link)
            if link.fileno() in readable and not _fork_asked(link):
                break
    os._exit(0)  # nothing is left to do, and taking torch apart takes its time


def _fork_asked(link: socket.socket) -> bool:
    """Fork the child that a message asks for; False after the last message."""
    text, descriptors, _, _ = socket.recv_fds(link, _READ, _MOST_DESCRIPTORS)
    if not text:
        return False
    function: str = json.loads(text)["fork"]

    def run() -> int:
        link.close()
        with open(descriptors[0], "rb") as file:
            file.seek(0)
            work = json.load(file)
        module, _, name = function.partition(":")
        return int(getattr(importlib.import_module(module), name)(work, *descriptors[1:]))

    child = fork(run)
    pidfd = os.pidfd_open(child.pid)  # it is not reaped yet: the number is its own
    socket.send_fds(link, [json.dumps({"pid": child.pid}).encode()], [pidfd])
    for one in (pidfd, *descriptors):
        os.close(one)
    return True


def _reap(link: socket.socket) -> None:
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            told = {"pid": found[0], "code": os.waitstatus_to_exitcode(found[1])}
            link.sendall(json.dumps(told).encode())
