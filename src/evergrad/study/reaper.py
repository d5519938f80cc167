"""Stays beside a program that a study runs, and ends all that it has started: when it is over, or nobody waits for it.

    python -I -S reaper.py DESCRIPTOR PROGRAM ARGUMENT …

A script of its own with hardly an import, so that it starts in no time. The descriptor is one end of a socket whose
other end `external_process` holds: its end-of-file means that the program is to be ended, and comes also when
whoever holds it
dies, by SIGKILL too. What the program has started and left behind becomes a child of this process, whatever session or
group it is in, and so none of it stays.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import sys

_PR_SET_CHILD_SUBREAPER = 36
_SIGKILL, _SIGPIPE, _SIGXFSZ = 9, 13, 25


def run_and_reap(line: int, command: list[str]) -> None:
    """Run the command, tell how it ended (`exit -9`, or `failed` and why), and leave nothing of it."""
    os.set_inheritable(line, False)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        # Python ignores two signals, which its children would inherit.
        pid = os.posix_spawnp(command[0], command, os.environ, setpgroup=0, setsigdef=(_SIGPIPE, _SIGXFSZ))
    except OSError as error:
        _send_status(line, f"failed {error.strerror}")
        return
    _thread.start_new_thread(_end_with_caller, (line, pid))
    # Looked at and not yet taken away: until then its number cannot become another's.
    seen = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert seen is not None
    _send_status(line, f"exit {seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status}")
    _sweep()


def _end_with_caller(line: int, pid: int) -> None:
    try:
        while os.read(line, 64):
            continue
    except OSError:
        return  # there is no line any more: we are at the end
    _kill(pid)


def _send_status(line: int, text: str) -> bool:
    try:
        return os.write(line, text.encode()) > 0
    except OSError:
        return False  # nobody is there to be told


def _sweep() -> None:
    """Kill until there is nobody left. What forks meanwhile is found at the next look: its parent's end brings one."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
            for pid in _descendants():
                _kill(pid)
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, _SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # A program's name, in brackets, may hold anything.
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            continue  # gone by now
        children.setdefault(parent, []).append(int(name))
    found, waiting = [], [os.getpid()]
    while waiting:
        below = children.pop(waiting.pop(), [])
        found += below
        waiting += below
    return found


if __name__ == "__main__":
    run_and_reap(int(sys.argv[1]), sys.argv[2:])
