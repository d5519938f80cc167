"""The place of arenas: how large it is, whether it is memory, and how large a state it has room for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from evergrad.doctor.check import Check, checked
from evergrad.doctor.machine import available_bytes
from evergrad.errors import reason

_ARENAS = 2  # a rank
_RANKS = 8  # for the example of several
_LITTLE = 1e9  # docker gives 64 MB unless told otherwise


def look() -> Iterator[Check]:
    """The room for arenas, below EVERGRAD_SHM or /dev/shm."""
    place = Path(os.environ.get("EVERGRAD_SHM") or "/dev/shm")
    yield from checked("shared memory", lambda: _look(place))


def filesystem_of(path: Path, mounts: str | None = None) -> str:
    """The kind of file system that a path is on: tmpfs, ext4, nfs4 …; empty if that is not known."""
    if mounts is None:
        mounts = Path("/proc/self/mounts").read_text(errors="replace")
    best, kind = "", ""
    real = str(path.resolve())
    for line in mounts.splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        at = words[1].replace("\\040", " ")
        if (real == at or real.startswith(at.rstrip("/") + "/")) and len(at) >= len(best):
            best, kind = at, words[2]
    return kind


def _look(place: Path) -> Check:
    name = "shared memory"
    elsewhere = "set EVERGRAD_SHM to a folder on a tmpfs that you may write"
    try:
        room = os.statvfs(place)
        size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
        with tempfile.TemporaryFile(dir=place, buffering=0) as file:  # without a name: a crash leaves nothing
            file.write(b"\0" * 4096)
    except OSError as error:
        return Check(name, "failed", f"{place}: cannot be written: {reason(error)}", elsewhere)
    own = place / f"evergrad-{os.getuid()}"
    if own.exists() and (own.is_symlink() or own.stat().st_uid != os.getuid() or own.stat().st_mode & 0o077):
        return Check(name, "failed", f"{own} is not yours alone", f"remove it, or {elsewhere}")
    memory = available_bytes()
    usable = free if memory is None else min(free, memory)  # a tmpfs promises more than there is
    state = usable // _ARENAS
    told = (
        f"{place}: {free / 1e9:.1f} of {size / 1e9:.1f} GB free: two arenas a rank for a state of up to {_gb(state)}, "
        f"or {_gb(state // _RANKS)} on each of {_RANKS} ranks"
    )
    facts = {"size_bytes": size, "free_bytes": free, "state_bytes": state}
    kind = filesystem_of(place)
    if kind not in ("tmpfs", "ramfs", ""):
        return Check(name, "degraded", f"{told}; it is on {kind}, not in memory: saves block longer", elsewhere, facts)
    if usable < _LITTLE:
        todo = "make it larger (docker run --shm-size=8g; mount -o remount,size=8g), or " + elsewhere
        return Check(name, "degraded", told, todo, facts)
    return Check(name, "ok", told, facts=facts)


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
