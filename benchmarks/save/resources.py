"""What a save takes beside time: memory of this process, of those it started, of /dev/shm, and file descriptors."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
from pathlib import Path
from types import TracebackType

from benchmarks.harness import Sample

__all__ = ["Watch", "descriptors", "shared_memory"]

MIB = 2**20
INTERVAL_S = 0.003


def descriptors() -> int:
    """How many are open."""
    return len(os.listdir("/proc/self/fd"))


def shared_memory() -> int:
    """Bytes in use in /dev/shm, by whomever, with files that have no name any more."""
    found = os.statvfs("/dev/shm")
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def own(pid: int | str = "self") -> int:
    """Bytes of memory that nobody shares; 0 if the process is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def helpers(folder: Path) -> set[int]:
    """Processes that this one started, or that were started for a folder: an agent is nobody's child."""
    found = set()
    for name in os.listdir("/proc"):
        try:
            if name.isdecimal() and int(name) != os.getpid():
                parent = int(Path(f"/proc/{name}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
                if parent == os.getpid() or os.fsencode(folder) in Path(f"/proc/{name}/cmdline").read_bytes():
                    found.add(int(name))
        except OSError:
            continue
    return found


class Watch:
    """Looks every few milliseconds, from another thread: not for what is timed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what an earlier contender left behind would be used again, unseen
        self._descriptors, self._own, self._shared = descriptors(), own(), shared_memory()
        self._helpers = helpers(folder)
        self._peak = {"descriptors": 0, "own": 0, "shared": 0}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            last = self._end.is_set()
            with contextlib.suppress(OSError):  # who takes the last descriptor leaves none to look with
                now = {
                    "descriptors": descriptors() - self._descriptors,
                    "own": own() - self._own,
                    "shared": shared_memory() - self._shared,
                }
                self._peak = {key: max(value, self._peak[key]) for key, value in now.items()}
            if last:
                return
            self._end.wait(INTERVAL_S)

    def sample(self) -> Sample:
        """The most there was, above what there was before."""
        others = sum(own(pid) for pid in helpers(self._folder) - self._helpers)
        found = {"own_mib": self._peak["own"], "shared_mib": self._peak["shared"], "others_mib": others}
        in_mib = {key: value / MIB for key, value in found.items()}
        return in_mib | {"added_mib": sum(in_mib.values()), "descriptors": float(self._peak["descriptors"])}
