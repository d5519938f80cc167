"""The processes of a job: none outlives the launcher, a signal reaches each once, a death is noticed at once.

- Every process is the head of a process group of its own: Ctrl-C in a terminal reaches the launcher alone, which
  passes it on. What a process that died has started in its group (workers that load data) goes with it.
- The kernel kills every process when the launcher's main thread ends, however it ends (PR_SET_PDEATHSIG). A checkpoint
  agent, in a session of its own, stays: its work is to finish what dead trainers have left.
- The launcher adopts what its processes leave behind (PR_SET_CHILD_SUBREAPER): agents stay in its tree, where a
  scheduler looks for what belongs to the job, and are not left as zombies.

Signals arrive in the main thread; so this is used there, and only `poke` by others.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

from evergrad._forkserver import (
    OwnChild,
    detach,
    ended,
    fork,
    guarded,
    kill_group,
    run_script,
    set_subreaper,
)
from evergrad.errors import UsageError
from evergrad.recovery.heartbeat import ProcessHealth
from evergrad.recovery.launch.settings import ProcessPlacement

LEAVE_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask everyone to leave."""
FORWARDED_SIGNALS = (*LEAVE_SIGNALS, signal.SIGUSR1, signal.SIGUSR2)
"""What is heeded rather than died of."""
SAME_NOTICE_S = 1.0
"""A signal that comes again within this time is the same notice by another way; later, somebody insists."""


@dataclass(frozen=True, slots=True, eq=False)
class Child:
    """One process of the job."""

    uid: int
    label: str
    """What its lines begin with: `rank 2`, `spare 4`."""
    pid: int
    stdout: int
    """Where its output is read; whoever reads closes it."""
    stderr: int


class ProcessExit(NamedTuple):
    """A process is gone."""

    child: Child
    code: int
    """Its exit code; below zero, the signal that ended it."""


class WaitResult(NamedTuple):
    """What came since the last look."""

    exits: list[ProcessExit]
    signals: list[int]
    """Those that the launcher was sent, in order."""


class Children:
    """The living processes of the job, from `with` to its end; what still lives then is killed."""

    _here: socket.socket
    _there: socket.socket

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("a job is launched from the main thread: signals arrive there")
        self._living: dict[int, tuple[Child, subprocess.Popen[bytes] | OwnChild]] = {}
        self._groups: set[int] = set()
        self._signals: deque[int] = deque()
        self._before: dict[int, Any] = {}
        self._selector = selectors.DefaultSelector()
        self._was_subreaper = 0
        self._wakeup_before = -1

    @property
    def living(self) -> list[Child]:
        """By uid."""
        return [self._living[uid][0] for uid in sorted(self._living)]

    def start(
        self,
        uid: int,
        label: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        forked: bool = False,
        inherited: Collection[int] = (),
    ) -> Child:
        """Start one more process, from nothing or as a fork of this one, with these descriptors of ours.

        Its output waits in pipes.
        """
        process: subprocess.Popen[bytes] | OwnChild
        if forked:
            process, *ends = _fork(command, environment, inherited)
        else:
            process, *ends = _open(command, environment, inherited)
        child = Child(uid, label, process.pid, *ends)
        self._living[uid] = child, process
        self._groups.add(process.pid)
        return child

    def wait(self, timeout_s: float) -> WaitResult:
        """Until something happens, somebody pokes, or the time is over."""
        if self._selector.select(max(0.0, timeout_s)):
            with suppress(BlockingIOError):
                while len(self._here.recv(4096)) == 4096:
                    pass
        signals = []
        while self._signals:
            signals.append(self._signals.popleft())
        return WaitResult(self._exits(), signals)

    def wake(self) -> None:
        """Let `wait` return; from any thread."""
        with suppress(OSError):  # full: it will return anyway; closed: nobody waits
            self._there.send(b"\0")

    def send(self, number: int, uids: Collection[int] | None = None) -> None:
        """Send every living process, or these, a signal; SIGKILL also to what it has started in its group."""
        for child in self.living:
            if uids is not None and child.uid not in uids:
                continue
            if number == signal.SIGKILL:
                kill_group(child.pid)
                continue
            with suppress(ProcessLookupError):
                os.kill(child.pid, number)

    def __enter__(self) -> Children:
        self._here, self._there = socket.socketpair()
        self._here.setblocking(False)
        self._there.setblocking(False)
        self._selector.register(self._here, selectors.EVENT_READ)
        self._wakeup_before = signal.set_wakeup_fd(self._there.fileno(), warn_on_full_buffer=False)
        for number in (*FORWARDED_SIGNALS, signal.SIGCHLD):
            if number == signal.SIGCHLD or not _is_to_be_ignored(number):
                self._before[number] = signal.signal(number, self._note)
        self._was_subreaper = set_subreaper(1)
        return self

    def __exit__(self, *_: object) -> None:
        self.send(signal.SIGKILL)
        for _child, process in self._living.values():
            process.wait()
        self._living.clear()
        self._reap_adopted()
        set_subreaper(self._was_subreaper)
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
        signal.set_wakeup_fd(self._wakeup_before)
        self._selector.close()
        self._here.close()
        self._there.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:  # that only ends the wait: who it was is asked of each
            self._signals.append(number)

    def _exits(self) -> list[ProcessExit]:
        found = []
        for uid, (child, process) in list(self._living.items()):
            # Look first and reap later: until then the number cannot become another group's.
            seen = ended(child.pid)
            if seen is None:
                continue
            if seen.si_code != os.CLD_EXITED or seen.si_status != 0:
                kill_group(child.pid)
            del self._living[uid]
            found.append(ProcessExit(child, process.wait()))
        self._reap_adopted()
        return found

    def _reap_adopted(self) -> None:
        """Of what dead processes have left and we have adopted; never what others in this process have started."""
        with suppress(ChildProcessError):
            while seen := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                try:
                    is_ours = os.getpgid(seen.si_pid) in self._groups or os.getsid(seen.si_pid) != os.getsid(0)
                except ProcessLookupError:
                    return
                if not is_ours or any(child.pid == seen.si_pid for child, _ in self._living.values()):
                    return
                os.waitpid(seen.si_pid, os.WNOHANG)


def _open(
    command: Sequence[str], environment: Mapping[str, str], inherited: Collection[int]
) -> tuple[subprocess.Popen[bytes], int, int]:
    process = subprocess.Popen(
        guarded(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        process_group=0,
        pass_fds=tuple(inherited),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = (os.dup(pipe.fileno()) for pipe in (process.stdout, process.stderr))
    process.stdout.close()
    process.stderr.close()
    return process, out, err


def _fork(
    command: Sequence[str], environment: Mapping[str, str], inherited: Collection[int]
) -> tuple[OwnChild, int, int]:
    """Run `python -u [-m] script arguments` in a fork of this process, which has imported torch.

    Only before this process has threads. To the script it is as if it had been started by itself, but for modules that
    are imported already.
    """
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()

    def run() -> int:
        detach(out_end, err_end, environment, inherited)
        sys.orig_argv[:] = command
        return run_script(command[command.index("-u") + 1 :])

    child = fork(run, leads_group=True)
    os.close(out_end)
    os.close(err_end)
    return child, out, err


def _is_to_be_ignored(number: int) -> bool:
    """Whether this process was started to ignore a signal, and does.

    `nohup` has SIGHUP ignored. A shell has SIGINT ignored in what it starts in the background, as Ctrl-C is for others.
    Without a terminal there is no Ctrl-C: a SIGINT is from somebody who means this process, such as a scheduler or CI,
    which may have started everything in the background.
    """
    if signal.getsignal(number) != signal.SIG_IGN:
        return False
    return number != signal.SIGINT or _has_terminal()


def _has_terminal() -> bool:
    """Whether a terminal controls this process."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


# The processes of a job, wherever they run: here (`local_processes`), on other nodes (`remote_nodes`), or both
# (`JobProcesses`).


class ProcessSet(ABC):
    """Some processes of a job. For the main thread of the launcher; nothing here waits."""

    @property
    @abstractmethod
    def living(self) -> list[Child]:
        """Those that run, as far as is known, by uid."""

    @abstractmethod
    def start(
        self, place: ProcessPlacement, generation: int | None, nodes: Sequence[int], *, forked: bool = False
    ) -> None:
        """Start one more; `nodes` is the node of every process so far, by uid. `UsageError` if that is impossible."""

    @abstractmethod
    def send(self, number: int, uids: Collection[int] | None = None) -> None:
        """Send every living process, or these, a signal; SIGKILL also to what it has started in its group."""

    @abstractmethod
    def health(self) -> dict[int, ProcessHealth]:
        """What living processes show of themselves, by uid."""

    @abstractmethod
    def stack(self, uid: int) -> str:
        """Where the script of a process was when it was last heard of; empty if nobody knows."""


class JobProcesses(ProcessSet):
    """Those on this node and those on the others."""

    def __init__(self, here: ProcessSet, elsewhere: Callable[[], ProcessSet | None], node: int) -> None:
        """`elsewhere` may come later: nothing runs on other nodes before."""
        self._here, self._elsewhere, self._node = here, elsewhere, node

    @property
    def living(self) -> list[Child]:
        """By uid."""
        return sorted((child for part in self._parts() for child in part.living), key=lambda child: child.uid)

    def start(
        self, place: ProcessPlacement, generation: int | None, nodes: Sequence[int], *, forked: bool = False
    ) -> None:
        """Where its place is."""
        part = self._here if place.node == self._node else self._elsewhere()
        assert part is not None, f"{place.label} is to start on node {place.node}, and there is no way to it yet"
        part.start(place, generation, nodes, forked=forked)

    def send(self, number: int, uids: Collection[int] | None = None) -> None:
        """To all of them, everywhere."""
        for part in self._parts():
            part.send(number, uids)

    def health(self) -> dict[int, ProcessHealth]:
        """Of all."""
        return {uid: process_health for part in self._parts() for uid, process_health in part.health().items()}

    def stack(self, uid: int) -> str:
        """Of whoever knows."""
        return next((stack for part in self._parts() if (stack := part.stack(uid))), "")

    def _parts(self) -> list[ProcessSet]:
        elsewhere = self._elsewhere()
        return [self._here] if elsewhere is None else [self._here, elsewhere]
