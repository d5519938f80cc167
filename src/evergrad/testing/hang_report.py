"""Waiting for a job with a limit; if it does not end by itself, each process is asked where it is, and then ended.

A process that hangs cannot be asked. But Python can be told beforehand to print all its stacks when it is aborted
(`faulthandler`), and then an abort is the question: the answer is in the process's log. Also of a stopped one, which
is continued for it.
"""

from __future__ import annotations

import os
import re
import select
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evergrad._forkserver import ForkserverChild, OwnChild
from evergrad.errors import FormatError
from evergrad.records import record_from_json, record_to_json
from evergrad.timeline import read_events

ABORTED = "Fatal Python error: Aborted"
"""How a process begins to tell where it is."""

_ANSWERS_WITHIN_S = 5.0
_SETTLES_WITHIN_S = 3.0
_FRAMES = 30
_STATES = {"R": "running", "S": "waiting", "D": "waiting in the kernel", "T": "stopped", "t": "stopped", "Z": "ended"}


@dataclass(frozen=True, slots=True)
class StuckProcess:
    """A process that was still there when time was up."""

    uid: int
    who: str
    """`rank 1`, as of the last generation; or what it was started as."""
    state: str
    """`stopped`, `waiting`, `running` …, by the kernel."""
    stack: str = ""
    """Its Python stacks, if it told."""

    def __str__(self) -> str:
        return f"{self.who} (uid {self.uid}, {self.state})"


@dataclass(frozen=True, slots=True)
class LauncherExit:
    """How a launcher ended."""

    exit_code: int
    """Below zero, the signal that ended it."""
    timed_out: bool = False
    stuck: tuple[StuckProcess, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return record_to_json(self)

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> LauncherExit:
        """Back from plain values."""
        return record_from_json(cls, row)


def await_end(launcher: OwnChild | ForkserverChild, pidfd: int, run: Path, timeout_s: float) -> LauncherExit:
    """Wait for a launcher; when time is up it is ended, with all it started.

    `run` is the folder of its run, for its timeline and logs.
    """
    if _wait([pidfd], timeout_s):
        return LauncherExit(launcher.wait())
    found = _abort_for_stacks(launcher.pid, pidfd, run)
    # What they said goes through the launcher, which ends by itself now, or tries to go on without them.
    _wait([pidfd], _SETTLES_WITHIN_S)
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)  # the kernel ends its processes with it
    code = launcher.wait()
    return LauncherExit(code, True, tuple(StuckProcess(uid, who, state, _stack(run, uid)) for uid, who, state in found))


def _abort_for_stacks(launcher: int, pidfd: int, run: Path) -> list[tuple[int, str, str]]:
    """Abort every process of the job; who they were, and what they were doing."""
    found, handles = [], []
    for uid, who, pid in _running_processes(run):
        with suppress(OSError):
            handle = os.pidfd_open(pid)
            handles.append(handle)
            state, parent = _process_state(pid)  # after the handle: it cannot have become another's number since
            if parent == launcher and state != "Z":
                found.append((handle, uid, who, _STATES.get(state, state)))
    # The launcher would end the others when the first of them ends, before they have said where they are.
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
    try:
        for handle, *_ in found:
            with suppress(OSError):
                signal.pidfd_send_signal(handle, signal.SIGABRT)
                signal.pidfd_send_signal(handle, signal.SIGCONT)
        limit = time.monotonic() + _ANSWERS_WITHIN_S
        left = list(handles)
        while left and (ready := _wait(left, limit - time.monotonic())):
            left = [handle for handle in left if handle not in ready]
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
    for handle in handles:
        os.close(handle)
    return [(uid, who, state) for _, uid, who, state in found]


def _running_processes(run: Path) -> list[tuple[int, str, int]]:
    """Whom the timeline knows to be started and not ended: uid, who, pid."""
    started: dict[int, tuple[str, int]] = {}
    members: list[int] = []
    with suppress(FormatError):
        for event in read_events(run / "timeline.jsonl"):
            fields: dict[str, Any] = event.fields
            if event.event == "process_started":
                started[fields["uid"]] = fields["label"], fields["pid"]
            elif event.event == "process_exited":
                started.pop(fields["uid"], None)
            elif event.event == "plan":
                members = fields["members"]
    return [
        (uid, f"rank {members.index(uid)}" if uid in members else label, pid)
        for uid, (label, pid) in sorted(started.items())
    ]


def _stack(run: Path, uid: int) -> str:
    """What a process printed when it was aborted, without what is not a stack."""
    try:
        text = (run / "logs" / f"{uid}.log").read_text(errors="replace")
    except OSError:
        return ""
    _, found, stacks = text.rpartition(ABORTED)
    # In a fork, what is below the script is the launcher's own way there.
    lines = re.split(r"\n+Extension modules:|\n.*<frozen runpy>", stacks)[0].strip().splitlines() if found else []
    lines = [line for line in lines if "<frozen importlib" not in line]
    return "\n".join([*lines[:_FRAMES], *(["…"] if len(lines) > _FRAMES else [])])


def _process_state(pid: int) -> tuple[str, int]:
    """State and parent of a process."""
    text = Path(f"/proc/{pid}/stat").read_text()
    state, parent, *_ = text.rpartition(")")[2].split()  # its name comes before, and may hold anything
    return state, int(parent)


def _wait(descriptors: list[int], timeout_s: float) -> list[int]:
    """Those of them that are readable, or closed at the other end; none when time is up."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(max(0.0, timeout_s) * 1000)]
