"""Locks on files, which end with the process that holds them, and what is known of that process."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from evergrad.checkpoint import storage
from evergrad.errors import CheckpointError
from evergrad.formats.data_file import NoFile, open_regular

_QUICK_S, _SLOW_S = 0.001, 0.05
_PATIENCE_S = 30.0


class Process(tuple[int, int, str]):
    """A process of this machine: its id, when it started (in clock ticks since boot), and its state."""

    __slots__ = ()

    @property
    def is_stopped(self) -> bool:
        """True if a signal or a debugger has stopped it."""
        return self[2] in ("T", "t")

    @property
    def has_ended(self) -> bool:
        """True if only its exit code is left of it."""
        return self[2] in ("Z", "X", "x")


def process(pid: int) -> Process | None:
    """The process of an id; None if there is none."""
    with suppress(OSError, ValueError, IndexError):
        state, *rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return Process((pid, int(rest[18]), state))
    return None


def is_locked(path: Path) -> bool:
    """Whether a living process holds a lock on a file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def holder(path: Path) -> int | None:
    """The id of the process that took the lock on a file; None if the kernel does not say."""
    with suppress(OSError, ValueError, IndexError):
        inode = os.stat(path).st_ino
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and int(fields[5].rpartition(":")[2]) == inode and int(fields[4]) > 0:
                return int(fields[4])
    return None


def open_lock(path: Path) -> int:
    """Open a file to be locked, made if need be; a named pipe, a socket or a device in its place is replaced."""
    while True:
        with suppress(NoFile):
            return open_regular(path, os.O_RDWR | os.O_CREAT, 0o600)
        storage.remove(path)


def removal_advice(path: Path) -> str:
    """Say how to go on where a folder or a link is in the place of a file; empty where there is neither."""
    with suppress(OSError):
        if path.is_symlink():
            return f" It is a symbolic link to {os.readlink(path)}: remove it."
        if path.is_dir():
            return " Remove it."
    return ""


@contextmanager
def locked(path: Path, patience_s: float = _PATIENCE_S) -> Iterator[None]:
    """Hold the lock on a file, made if need be; a second process waits here.

    `CheckpointError` if the holder stays stopped for `patience_s`. One that runs is waited for: it may have much to do.
    """
    fd = open_lock(path)
    try:
        pause, stopped_s = _QUICK_S, 0.0
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            # Pauses are counted, and not the clock read: this process may be stopped, too.
            time.sleep(pause)
            pause = min(2 * pause, _SLOW_S)
            pid = holder(path) if pause == _SLOW_S else None
            found = process(pid) if pid is not None else None
            stopped_s = stopped_s + pause if found is not None and found.is_stopped else 0.0
            if stopped_s >= patience_s:
                raise CheckpointError(
                    f"{path}: held by process {pid}, which is stopped. Continue it (kill -CONT {pid}), or end it."
                )
        yield
    finally:
        os.close(fd)
