"""The agents that one test has started."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["agents_of", "end_agents"]


def agents_of(folder: Path) -> list[int]:
    """The agents whose shared memory is there: those of one test."""
    found = []
    marker = f"EVERGRAD_SHM={folder}".encode()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                command = Path("/proc", entry, "cmdline").read_bytes()
                environment = Path("/proc", entry, "environ").read_bytes()
                if b"agent" in command.split(b"\0") and marker in environment.split(b"\0"):
                    found.append(int(entry))
            except OSError:
                continue
    return found


def end_agents(folder: Path) -> None:
    """Wait until they have left by themselves; those that have not after a while are killed."""
    end = time.monotonic() + 10
    while agents := agents_of(folder):
        if time.monotonic() > end:
            for pid in agents:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
