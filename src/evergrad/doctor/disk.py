"""A folder's disk, measured: how fast it takes bytes for good, gives them back, and makes a small write durable.

What is written has no name in the folder (`O_TMPFILE`; where a file system cannot do that, the name goes as soon as
the file is open), so that nothing is left however this ends. It is bounded by size and by time.
"""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median

from evergrad.doctor.check import Check, checked
from evergrad.doctor.shared_memory import filesystem_of
from evergrad.errors import reason

_BLOCK = 1 << 22
_MOST_BYTES = 1 << 26
_MOST_S = 0.7  # for writing, and again for reading
_SMALL = 4096
_TIMES = 7
_SLOW_BYTES_PER_S = 50e6
_SLOW_SYNC_S = 0.05
_LITTLE_ROOM = 2e9


def look(folder: Path) -> Iterator[Check]:
    """Room, speed, and whether the folder's clock is ours."""
    yield from checked("disk", lambda: _look(folder))


def measure(folder: Path, most_bytes: int = _MOST_BYTES, most_s: float = _MOST_S) -> dict[str, float]:
    """Write, make durable, read back and compare; bytes a second, and seconds for a small durable write."""
    block = secrets.token_bytes(_BLOCK)  # a disk that compresses must not look faster than it is
    with tempfile.TemporaryFile(dir=folder, prefix=".evergrad-doctor-", buffering=0) as file:
        fd = file.fileno()
        small = []
        for _ in range(_TIMES):
            begin = time.perf_counter()
            os.pwrite(fd, block[:_SMALL], 0)
            os.fsync(fd)
            small.append(time.perf_counter() - begin)
            if sum(small) > most_s:
                break
        skew = os.fstat(fd).st_mtime - time.time()
        begin, size = time.perf_counter(), 0
        while size < most_bytes and (not size or time.perf_counter() - begin < most_s):
            size += os.pwrite(fd, block, size) if size % _BLOCK == 0 else os.pwrite(fd, block[size % _BLOCK :], size)
        os.fsync(fd)
        wrote_s = time.perf_counter() - begin
        with suppress(OSError):
            os.posix_fadvise(fd, 0, size, os.POSIX_FADV_DONTNEED)
        begin, direct = time.perf_counter(), True
        try:
            right = _read_back(fd, size, block, os.O_DIRECT, most_s)
        except OSError:  # a file system without it
            direct = False
            begin = time.perf_counter()
            right = _read_back(fd, size, block, 0, most_s)
        read_s = time.perf_counter() - begin
    return {
        "write_bytes_per_s": size / wrote_s,
        "read_bytes_per_s": abs(right) / read_s,
        "durable_write_s": median(small),
        "skew_s": skew,
        "direct": direct,
        "intact": right > 0,
        "written_bytes": size,
    }


def _read_back(fd: int, size: int, block: bytes, flags: int, most_s: float) -> int:
    """How many bytes were read; negative if they are not what was written."""
    begin, done = time.perf_counter(), 0
    with mmap.mmap(-1, _BLOCK) as buffer:  # aligned, as O_DIRECT wants it
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | flags)
        try:
            while done < size and time.perf_counter() - begin < most_s:
                count = os.preadv(again, [buffer], done)
                if not count or buffer[:count] != block[:count]:
                    return -max(done + count, 1)
                done += count
                if count < _BLOCK:
                    break
        finally:
            os.close(again)
    return done


def _look(folder: Path) -> Iterator[Check]:
    name = "disk"
    elsewhere = "choose another folder: --folder DIR"
    place = f"{folder} ({filesystem_of(folder) or 'file system not known'})"
    try:
        room = os.statvfs(folder)
        free = room.f_bavail * room.f_frsize
        found = measure(folder)
    except OSError as error:
        yield Check(name, "failed", f"{place}: cannot be written: {reason(error)}", elsewhere)
        return
    facts = {**found, "free_bytes": free}
    told = (
        f"{place}: {free / 1e9:.1f} GB free; writes {_rate(found['write_bytes_per_s'])}, reads "
        f"{_rate(found['read_bytes_per_s'])}{'' if found['direct'] else ' (perhaps from memory)'}, "
        f"a small durable write takes {found['durable_write_s'] * 1e3:.2g} ms"
    )
    if not found["intact"]:
        yield Check(name, "failed", f"{place}: gave back other bytes than were written", "do not use it", facts)
    elif free < _LITTLE_ROOM:
        yield Check(name, "degraded", told, f"little room: remove something, or {elsewhere}", facts)
    elif found["write_bytes_per_s"] < _SLOW_BYTES_PER_S or found["durable_write_s"] > _SLOW_SYNC_S:
        todo = "slow: let the local tier be on another disk, and save less often (eg.YoungDaly)"
        yield Check(name, "degraded", told, todo, facts)
    else:
        yield Check(name, "ok", told, facts=facts)
    if abs(found["skew_s"]) > 2:
        yield Check(
            "disk's clock",
            "degraded",
            f"{abs(found['skew_s']):.0f} s {'ahead of' if found['skew_s'] > 0 else 'behind'} this machine's",
            "let both follow the same time service",
        )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.0f} MB/s" if bytes_per_s < 1e9 else f"{bytes_per_s / 1e9:.1f} GB/s"
