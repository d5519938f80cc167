"""The machine: cores, memory and limits, as this process has them; a container or Slurm may give less than there is."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from evergrad.doctor.check import Check, checked

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_MEMORY = (  # limit, use, and what of it is of files: versions 2 and 1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_LITTLE_MEMORY = 2e9
_FEW_FILES = 1024


def look() -> Iterator[Check]:
    """Cores, memory, open files, locked memory."""
    yield from checked("cores", _cores)
    yield from checked("memory", _memory)
    yield from checked("open files", _open_files)
    yield from checked("locked memory", _locked)


def cgroup_cores(root: Path = _CGROUPS, own: Path = _OWN) -> float | None:
    """How many cores this process's cgroups grant, if any of them limits them; versions 2 and 1."""
    granted = []
    for group in _groups(root, own, "cpu"):
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = (group / "cpu.max").read_text().split()[:2]
            granted += [] if quota == "max" else [int(quota) / int(period)]
        with suppress(OSError, ValueError, ZeroDivisionError):
            share = int((group / "cpu.cfs_quota_us").read_text())
            granted += [] if share <= 0 else [share / int((group / "cpu.cfs_period_us").read_text())]
    return min(granted, default=None)


def cgroup_memory(root: Path = _CGROUPS, own: Path = _OWN) -> tuple[int, int] | None:
    """The limit of this process's cgroups that leaves least, and what of it is in use; None without one."""
    found = []
    for group in _groups(root, own, "memory"):
        for limit, used, file_pages in _MEMORY:
            with suppress(OSError, ValueError):
                bound = int((group / limit).read_text())
                if bound < 1 << 60:  # version 1 says "none" by a huge number
                    found.append((bound, max(0, int((group / used).read_text()) - _cached(group, file_pages))))
    return min(found, key=lambda each: each[0] - each[1], default=None)


def _groups(root: Path, own: Path, controller: str) -> Iterator[Path]:
    """The cgroup that this process is in, and those around it: Slurm and systemd set limits on any of them."""
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, names, place = line.split(":", 2)
            if names and controller not in names.split(","):
                continue
            base = root / controller if names else root
            group = base / place.lstrip("/")
            while group != base and base in group.parents:
                yield group
                group = group.parent
    yield from (root, root / controller)


def _cached(group: Path, name: str) -> int:
    """What the kernel gives back as soon as anyone asks: pages of files that nobody has read for a while."""
    with suppress(OSError, ValueError):
        for line in (group / "memory.stat").read_text().splitlines():
            if line.split()[0] == name:
                return int(line.split()[1])
    return 0


def available_bytes() -> int | None:
    """How much memory this process could still get."""
    found = _meminfo().get("MemAvailable")
    group = cgroup_memory()
    bounds = [value for value in (found, max(0, group[0] - group[1]) if group else None) if value is not None]
    return min(bounds) if bounds else None


def _cores() -> Check:
    usable = float(len(os.sched_getaffinity(0)))
    quota = cgroup_cores()
    there = os.cpu_count() or 0
    granted = min(usable, quota) if quota is not None else usable
    told = f"{granted:g}" + (f" of the machine's {there} may be used" if granted < there else "")
    facts = {"usable": granted, "there": there, "cgroup": quota}
    if granted < 2:
        return Check("cores", "degraded", told, "with two or more, saves are finished beside training", facts)
    return Check("cores", "ok", told, facts=facts)


def _memory() -> Check:
    info = _meminfo()
    available, total = available_bytes(), info.get("MemTotal")
    if available is None or total is None:
        return Check("memory", "unknown", "/proc/meminfo cannot be read")
    group = cgroup_memory()
    limit = f", limited to {group[0] / 1e9:.1f} GB by its cgroup" if group and group[0] < total else ""
    told = f"{available / 1e9:.1f} of {total / 1e9:.1f} GB available{limit}"
    facts = {"available_bytes": available, "total_bytes": total, "cgroup_bytes": group[0] if group else None}
    if available < _LITTLE_MEMORY:
        todo = "every rank takes about half a gigabyte for torch alone: run fewer ranks, or end something else"
        return Check("memory", "degraded", told, todo, facts)
    return Check("memory", "ok", told, facts=facts)


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    told = f"up to {_count(soft)}" + (f" (to be raised to {_count(hard)})" if hard != soft else "")
    if soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
        return Check("open files", "degraded", told, f"ulimit -n {_FEW_FILES}", {"soft": soft})
    return Check("open files", "ok", told, facts={"soft": soft})


def _locked() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limited = soft != resource.RLIM_INFINITY
    told = f"up to {soft / 1e6:.1f} MB" if limited else "without a limit"
    if limited and _infiniband():
        todo = "NCCL over InfiniBand wants more: ulimit -l unlimited"
        return Check("locked memory", "degraded", told, todo, {"soft": soft})
    return Check("locked memory", "ok", told, facts={"soft": soft})


def _infiniband() -> bool:
    with suppress(OSError):
        return bool(os.listdir("/sys/class/infiniband"))
    return False


def _meminfo() -> dict[str, int]:
    found: dict[str, int] = {}
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            with suppress(ValueError, IndexError):
                found[name] = int(rest.split()[0]) * 1024
    return found


def _count(limit: int) -> str:
    return "any number" if limit == resource.RLIM_INFINITY else f"{limit:,}"
