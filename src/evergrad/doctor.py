"""Is this machine fit for Evergrad? What is installed, how large and fast memory and disk are, what else there is.

Nothing is changed, nothing is left behind, nothing goes over a network. Torch is imported in a process of its own,
which may fail as it likes. Every check says `ok`, `degraded`, `failed` or `unknown`, and what to do.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import re
import resource
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from evergrad._forkserver import describe_exit
from evergrad.errors import reason
from evergrad.wording import install_hint

if TYPE_CHECKING:
    from evergrad.records import Json

__all__ = ["VERDICTS", "CheckResult", "examine", "worst"]

# One thing that was looked at: what was found, whether it will do, and what to do if not.

VERDICTS = ("failed", "degraded", "unknown", "ok")
"""The worst first. Degraded: it works, and something can be done for more. Unjudged is not passed: that is unknown."""


@dataclass(frozen=True)
class CheckResult:
    """A line of the doctor's; `facts` are the same in numbers, for programs."""

    name: str
    verdict: str
    found: str
    todo: str = ""
    facts: Mapping[str, Json] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.verdict in VERDICTS, self.verdict

    def to_json(self) -> dict[str, Json]:
        """As JSON."""
        return {
            "name": self.name,
            "verdict": self.verdict,
            "found": self.found,
            "todo": self.todo,
            "facts": dict(self.facts),
        }


def run_check(name: str, look: Callable[[], CheckResult | Iterable[CheckResult]]) -> Iterator[CheckResult]:
    """What a look has found. One that could not end says so, and the others go on: a doctor does not faint.

    >>> [check.found for check in run_check("disk", lambda: 1 / 0)]
    ['the check itself failed (ZeroDivisionError: division by zero)']
    """
    try:
        found = look()
        yield from [found] if isinstance(found, CheckResult) else found
    except Exception as error:
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        yield CheckResult(name, "unknown", f"the check itself failed ({what[:200]})")


def worst(checks: Iterable[CheckResult]) -> str:
    """The verdict of all of them together.

    >>> worst([CheckResult("a", "ok", ""), CheckResult("b", "unknown", "")])
    'unknown'
    """
    found = {check.verdict for check in checks}
    return next((verdict for verdict in VERDICTS if verdict in found), "ok")


# What else is there: Slurm, a browser, the clock, and settings of ours in the environment.

_SLURM = ("sbatch", "squeue", "scancel", "srun")
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FIRST_TIME = 1_735_689_600.0  # 2025: a clock before that was never set
_UNSYNCHRONISED = 0x40  # STA_UNSYNC of adjtimex


def check_environment(folder: Path) -> Iterator[CheckResult]:
    """Slurm's commands, a browser, the clock, EVERGRAD_* variables."""
    yield from run_check("slurm", _slurm)
    yield from run_check("browser", _browser)
    yield from run_check("clock", _clock)
    yield from run_check("settings", _settings)


def _slurm() -> CheckResult:
    found = {name: shutil.which(name) for name in _SLURM}
    there = [name for name in _SLURM if found[name]]
    facts = dict(found)
    if not there:
        return CheckResult("slurm", "ok", "not found: studies run on this machine or on Dask", facts=facts)
    missing = [name for name in _SLURM if not found[name]]
    if missing:
        todo = "install Slurm's client commands, or load their module"
        return CheckResult("slurm", "degraded", f"{', '.join(there)}, without {', '.join(missing)}", todo, facts)
    return CheckResult("slurm", "ok", ", ".join(there), facts=facts)


def _browser() -> CheckResult:
    found = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        return CheckResult("browser", "ok", "no Chromium here; only the tests of reports use one")
    return CheckResult("browser", "ok", found, facts={"path": found})


def _clock() -> CheckResult:
    now = time.time()
    told = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < _FIRST_TIME:
        return CheckResult("clock", "failed", f"{told}: was never set", "set it, or let it follow a time service")
    follows = _synchronised()
    if follows:
        return CheckResult("clock", "ok", f"{told}, synchronised")
    todo = "on several machines, and for S3, let it follow one (chrony, systemd-timesyncd)"
    if follows is False:
        return CheckResult("clock", "ok", f"{told}; it follows no time service, which one machine does not need", todo)
    return CheckResult("clock", "unknown", f"{told}; whether it follows a time service cannot be seen", todo)


def _synchronised() -> bool | None:
    """What the kernel says of its clock; None where it does not tell."""
    try:
        timex = (ctypes.c_ubyte * 512)()  # larger than the kernel's struct; all zero: only asks
        code = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):
        return None
    if code < 0:
        return None
    status = ctypes.c_int.from_buffer(timex, 40 if ctypes.sizeof(ctypes.c_long) == 8 else 20)
    return not status.value & _UNSYNCHRONISED


def _settings() -> CheckResult:
    found = {name: os.environ[name] for name in sorted(os.environ) if name.startswith("EVERGRAD_")}
    if not found:
        return CheckResult("settings", "ok", "no EVERGRAD_* variable is set")
    secret = ("SECRET", "KEY", "TOKEN")
    shown = [name if any(word in name for word in secret) else f"{name}={value}" for name, value in found.items()]
    return CheckResult("settings", "ok", ", ".join(shown))


# The machine: cores, memory and limits, as this process has them; a container or Slurm may give less than there is.

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_MEMORY = (  # limit, use, and what of it is of files: versions 2 and 1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_LITTLE_MEMORY = 2e9
_FEW_FILES = 1024


def check_machine() -> Iterator[CheckResult]:
    """Cores, memory, open files, locked memory."""
    yield from run_check("cores", _cores)
    yield from run_check("memory", _memory)
    yield from run_check("open files", _open_files)
    yield from run_check("locked memory", _locked)


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


def _cores() -> CheckResult:
    usable = float(len(os.sched_getaffinity(0)))
    quota = cgroup_cores()
    there = os.cpu_count() or 0
    granted = min(usable, quota) if quota is not None else usable
    told = f"{granted:g}" + (f" of the machine's {there} may be used" if granted < there else "")
    facts = {"usable": granted, "there": there, "cgroup": quota}
    if granted < 2:
        return CheckResult("cores", "degraded", told, "with two or more, saves are finished beside training", facts)
    return CheckResult("cores", "ok", told, facts=facts)


def _memory() -> CheckResult:
    info = _meminfo()
    available, total = available_bytes(), info.get("MemTotal")
    if available is None or total is None:
        return CheckResult("memory", "unknown", "/proc/meminfo cannot be read")
    group = cgroup_memory()
    limit = f", limited to {group[0] / 1e9:.1f} GB by its cgroup" if group and group[0] < total else ""
    told = f"{available / 1e9:.1f} of {total / 1e9:.1f} GB available{limit}"
    facts = {"available_bytes": available, "total_bytes": total, "cgroup_bytes": group[0] if group else None}
    if available < _LITTLE_MEMORY:
        todo = "every rank takes about half a gigabyte for torch alone: run fewer ranks, or end something else"
        return CheckResult("memory", "degraded", told, todo, facts)
    return CheckResult("memory", "ok", told, facts=facts)


def _open_files() -> CheckResult:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    told = f"up to {_count(soft)}" + (f" (to be raised to {_count(hard)})" if hard != soft else "")
    if soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
        return CheckResult("open files", "degraded", told, f"ulimit -n {_FEW_FILES}", {"soft": soft})
    return CheckResult("open files", "ok", told, facts={"soft": soft})


def _locked() -> CheckResult:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limited = soft != resource.RLIM_INFINITY
    told = f"up to {soft / 1e6:.1f} MB" if limited else "without a limit"
    if limited and _infiniband():
        todo = "NCCL over InfiniBand wants more: ulimit -l unlimited"
        return CheckResult("locked memory", "degraded", told, todo, {"soft": soft})
    return CheckResult("locked memory", "ok", told, facts={"soft": soft})


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


# The place of arenas: how large it is, whether it is memory, and how large a state it has room for.

_ARENAS = 2  # a rank
_RANKS = 8  # for the example of several
_LITTLE = 1e9  # docker gives 64 MB unless told otherwise


def check_shared_memory() -> Iterator[CheckResult]:
    """The room for arenas, below EVERGRAD_SHM or /dev/shm."""
    place = Path(os.environ.get("EVERGRAD_SHM") or "/dev/shm")
    yield from run_check("shared memory", lambda: _look_shared_memory(place))


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


def _look_shared_memory(place: Path) -> CheckResult:
    name = "shared memory"
    elsewhere = "set EVERGRAD_SHM to a folder on a tmpfs that you may write"
    try:
        room = os.statvfs(place)
        size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
        with tempfile.TemporaryFile(dir=place, buffering=0) as file:  # without a name: a crash leaves nothing
            file.write(b"\0" * 4096)
    except OSError as error:
        return CheckResult(name, "failed", f"{place}: cannot be written: {reason(error)}", elsewhere)
    own = place / f"evergrad-{os.getuid()}"
    if own.exists() and (own.is_symlink() or own.stat().st_uid != os.getuid() or own.stat().st_mode & 0o077):
        return CheckResult(name, "failed", f"{own} is not yours alone", f"remove it, or {elsewhere}")
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
        return CheckResult(
            name, "degraded", f"{told}; it is on {kind}, not in memory: saves block longer", elsewhere, facts
        )
    if usable < _LITTLE:
        todo = "make it larger (docker run --shm-size=8g; mount -o remount,size=8g), or " + elsewhere
        return CheckResult(name, "degraded", told, todo, facts)
    return CheckResult(name, "ok", told, facts=facts)


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


# A folder's disk, measured: how fast it takes bytes for good, gives them back, and makes a small write durable.
#
# What is written has no name in the folder (`O_TMPFILE`; where a file system cannot do that, the name goes as soon as
# the file is open), so that nothing is left however this ends. It is bounded by size and by time.

_BLOCK = 1 << 22
_MOST_BYTES = 1 << 26
_MOST_S = 0.7  # for writing, and again for reading
_SMALL = 4096
_TIMES = 7
_SLOW_BYTES_PER_S = 50e6
_SLOW_SYNC_S = 0.05
_LITTLE_ROOM = 2e9


def check_disk(folder: Path) -> Iterator[CheckResult]:
    """Room, speed, and whether the folder's clock is ours."""
    yield from run_check("disk", lambda: _look_disk(folder))


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


def _look_disk(folder: Path) -> Iterator[CheckResult]:
    name = "disk"
    elsewhere = "choose another folder: --folder DIR"
    place = f"{folder} ({filesystem_of(folder) or 'file system not known'})"
    try:
        room = os.statvfs(folder)
        free = room.f_bavail * room.f_frsize
        found = measure(folder)
    except OSError as error:
        yield CheckResult(name, "failed", f"{place}: cannot be written: {reason(error)}", elsewhere)
        return
    facts = {**found, "free_bytes": free}
    told = (
        f"{place}: {free / 1e9:.1f} GB free; writes {_rate(found['write_bytes_per_s'])}, reads "
        f"{_rate(found['read_bytes_per_s'])}{'' if found['direct'] else ' (perhaps from memory)'}, "
        f"a small durable write takes {found['durable_write_s'] * 1e3:.2g} ms"
    )
    if not found["intact"]:
        yield CheckResult(name, "failed", f"{place}: gave back other bytes than were written", "do not use it", facts)
    elif free < _LITTLE_ROOM:
        yield CheckResult(name, "degraded", told, f"little room: remove something, or {elsewhere}", facts)
    elif found["write_bytes_per_s"] < _SLOW_BYTES_PER_S or found["durable_write_s"] > _SLOW_SYNC_S:
        todo = "slow: let the local tier be on another disk, and save less often (eg.YoungDaly)"
        yield CheckResult(name, "degraded", told, todo, facts)
    else:
        yield CheckResult(name, "ok", told, facts=facts)
    if abs(found["skew_s"]) > 2:
        yield CheckResult(
            "disk's clock",
            "degraded",
            f"{abs(found['skew_s']):.0f} s {'ahead of' if found['skew_s'] > 0 else 'behind'} this machine's",
            "let both follow the same time service",
        )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.0f} MB/s" if bytes_per_s < 1e9 else f"{bytes_per_s / 1e9:.1f} GB/s"


# Torch, and what depends on it: looked at in another process, which may crash, hang or not start at all.

TorchProbe = dict[str, dict[str, Any]]
"""Of each part its facts, or the `error` that it ended with; what is missing was not reached."""

_LIMIT_S = 120.0

# A line a part, at once: what was known before a crash is not lost.
_CODE = r"""
import json, sys, warnings
warnings.simplefilter("ignore")
def part(name, look):
    try:
        facts = look()
    except BaseException as error:
        facts = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    print(json.dumps({name: facts}), flush=True)
def numpy():
    import numpy
    return {"version": numpy.__version__}
def xxhash():
    import xxhash
    return {"version": xxhash.VERSION, "digest": xxhash.xxh3_128_hexdigest(b"evergrad")}
def torch():
    import torch
    torch.ones(2).numpy()
    return {"version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads()}
def cuda():
    import torch
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append({"name": device.name, "total_bytes": total, "free_bytes": free})
    return {"built": torch.version.cuda or torch.version.hip, "devices": found}
def transports():
    import torch.distributed as dist
    if not dist.is_available():
        return {"gloo": False, "nccl": False}
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
def gloo():
    import datetime, torch, torch.distributed as dist
    limit = datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    return {"works": True}
for look in (numpy, xxhash, torch, cuda, transports, gloo):
    part(look.__name__, look)
"""


def probe_torch(python: str = sys.executable, limit_s: float = _LIMIT_S) -> TorchProbe:
    """Import torch in a process of its own, and ask it. What it says before it ends counts, however it ends."""
    found: TorchProbe = {}
    try:
        done = subprocess.run(
            [python, "-c", _CODE], stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=False
        )
        said, ended = done.stdout, f"the process that tried it ended with {describe_exit(done.returncode)}"
    except subprocess.TimeoutExpired as late:
        said, ended = late.stdout or b"", f"no answer within {limit_s:.0f} s"
    except OSError as error:
        said, ended = b"", f"no process could be started: {reason(error)}"
    for line in said.splitlines():
        try:
            told = json.loads(line)
        except ValueError:  # what a library printed
            continue
        if isinstance(told, dict):
            found |= {name: facts for name, facts in told.items() if isinstance(facts, dict)}
    for name in ("numpy", "xxhash", "torch", "cuda", "transports", "gloo"):
        found.setdefault(name, {"error": ended})
    return found


def check_torch(found: TorchProbe) -> Iterator[CheckResult]:
    """Devices, and how ranks can talk to each other."""
    yield from run_check("cuda", lambda: _cuda(found))
    yield from run_check("gloo", lambda: _gloo(found))
    yield from run_check("nccl", lambda: _nccl(found))


def _cuda(found: TorchProbe) -> Iterator[CheckResult]:
    facts = found["cuda"]
    there = _has_gpu()
    if "error" in facts:
        yield CheckResult("cuda", "failed" if there and "error" not in found["torch"] else "unknown", facts["error"])
        return
    devices = facts.get("devices") or []
    for index, device in enumerate(devices):
        free, total = device["free_bytes"] / 1e9, device["total_bytes"] / 1e9
        told = f"{device['name']}, {free:.1f} of {total:.1f} GB free"
        yield CheckResult(f"cuda:{index}", "ok", told, facts=device)
    if devices:
        return
    if not there:
        yield CheckResult("cuda", "ok", "no device: training runs on the CPU")
    elif facts.get("built"):
        todo = "see whether nvidia-smi works, and what CUDA_VISIBLE_DEVICES says"
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f" (CUDA_VISIBLE_DEVICES={hidden!r})" if hidden is not None else ""
        yield CheckResult("cuda", "degraded", f"there is a device, and torch cannot use it{why}", todo)
    else:
        yield CheckResult("cuda", "degraded", "there is a device, and this torch was built without CUDA",
                    "install torch's build for CUDA: https://pytorch.org/get-started")  # fmt: skip


def _gloo(found: TorchProbe) -> CheckResult:
    transports, tried = found["transports"], found["gloo"]
    if "error" in transports:
        return CheckResult("gloo", "unknown", transports["error"], "mend torch first")
    if not transports.get("gloo"):
        return CheckResult("gloo", "failed", "torch was built without it: ranks cannot talk to each other",
                     "install torch from PyPI")  # fmt: skip
    if "error" in tried:
        return CheckResult("gloo", "failed", tried["error"],
                     "see whether this host's name resolves: getent hosts $(hostname)")  # fmt: skip
    return CheckResult("gloo", "ok", "works, tried with one rank")


def _nccl(found: TorchProbe) -> CheckResult:
    transports, devices = found["transports"], found["cuda"].get("devices") or []
    if "error" in transports:
        return CheckResult("nccl", "unknown", transports["error"], "mend torch first")
    if transports.get("nccl"):
        return CheckResult("nccl", "ok", "built in" if devices else "built in, with no device to use it")
    if devices:
        return CheckResult("nccl", "degraded", "torch was built without it: ranks exchange gradients through gloo",
                     "install torch's build for CUDA: https://pytorch.org/get-started")  # fmt: skip
    return CheckResult("nccl", "ok", "not built in, and not needed without a GPU")


def _has_gpu() -> bool:
    return Path("/dev/kfd").exists() or any(Path("/dev").glob("nvidia[0-9]*"))


# What is installed: Evergrad, Python, what Evergrad needs, and the extras that it can use.

EXTRAS = {
    "hdf5": "HDF5 files: Keras, Chainer, PyTorch",
    "fast": "verify: checksums at memory speed",
    "s3": "the persistent tier on S3",
    "zstd": "compressed flushes: Compress('zstd')",
    "studies": "data and statistics of studies",
    "dask": "studies on a Dask cluster",
    "slurm": "studies in jobs of Slurm",
    "report": "reports that draw their plots",
    "yaml": "published injector settings in YAML",
}
"""What each extra is for. Those for work on Evergrad itself are not here."""

_IMPORTED = ("numpy", "torch", "xxhash")  # by the probe: an installed package may still not load


def check_software(probe: TorchProbe) -> Iterator[CheckResult]:
    """Evergrad, Python and what Evergrad cannot do without."""
    yield from run_check("evergrad", _evergrad)
    yield from run_check("python", _python)
    yield from run_check("system", _system)
    yield from run_check("requirements", lambda: _requirements(probe))


def check_extras() -> Iterator[CheckResult]:
    """Each extra: there, or what it is for and how to get it."""
    for name in EXTRAS:
        yield from run_check(name, lambda name=name: _extra(name))  # type: ignore[misc]


def missing_from(lines: list[str], extra: str = "") -> list[str]:
    """Of requirements as a package states them, those of one extra that are not met, each in words."""
    wrong = []
    for name, least in _of(lines, extra):
        found = _version(name)
        if found is None:
            wrong.append(f"{name} is missing")
        elif _numbers(found) < _numbers(least):
            wrong.append(f"{name} {found} is older than {least}")
    return wrong


def _evergrad() -> CheckResult:
    from evergrad import __version__

    return CheckResult("evergrad", "ok", __version__, facts={"version": __version__})


def _python() -> CheckResult:
    version = platform.python_version()
    facts = {"version": version, "executable": sys.executable}
    return CheckResult("python", "ok", f"{version} ({sys.executable})", facts=facts)


def _system() -> CheckResult:
    told = f"{platform.system()} {platform.release()} {platform.machine()}"
    if sys.platform != "linux":
        return CheckResult("system", "failed", f"{told}, and Evergrad is for Linux", "use Linux, a container or WSL 2")
    return CheckResult("system", "ok", told)


def _requirements(probe: TorchProbe) -> Iterator[CheckResult]:
    required = _required()
    if not required:
        todo = f"{install_hint()}, rather than a folder on PYTHONPATH"
        yield CheckResult("requirements", "unknown", "not installed as a package: what it needs is not known", todo)
    for name, least in _of(required, ""):
        found, loaded = _version(name), probe.get(name, {})
        version = loaded.get("version") or found
        if found is None and "version" not in loaded:
            yield CheckResult(name, "failed", "is missing", f"pip install '{name}>={least}'")
        elif name in _IMPORTED and "error" in loaded:
            told = f"{found} cannot be imported: {loaded['error']}"
            yield CheckResult(name, "failed", told, f"pip install --force-reinstall '{name}>={least}'")
        elif _numbers(str(version)) < _numbers(least):
            told = f"{version} is older than {least}"
            yield CheckResult(name, "failed", told, f"pip install --upgrade '{name}>={least}'")
        else:
            yield CheckResult(name, "ok", str(version), facts={"version": str(version)})


def _extra(name: str) -> CheckResult:
    wrong = missing_from(_required(), name)
    purpose = EXTRAS[name]
    if not any(True for _ in _of(_required(), name)):
        todo = install_hint(name)
        return CheckResult(name, "unknown", f"which packages it needs is not known ({purpose})", todo)
    if wrong:
        return CheckResult(name, "degraded", f"{', '.join(wrong)} ({purpose})", install_hint(name),
                     {"missing": list(wrong)})  # fmt: skip
    versions = {package: _version(package) for package, _ in _of(_required(), name)}
    told = ", ".join(f"{package} {version}" for package, version in versions.items())
    return CheckResult(name, "ok", f"{told} ({purpose})", facts=dict(versions))


def _required() -> list[str]:
    try:
        return metadata.requires("evergrad") or []
    except metadata.PackageNotFoundError:
        return []


def _of(lines: list[str], extra: str) -> Iterator[tuple[str, str]]:
    """Names and least versions: `h5py>=3.11; extra == 'hdf5'` is ('h5py', '3.11') of that extra."""
    for line in lines:
        requirement, _, marker = line.partition(";")
        of = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
        if (of.group(1) if of else "") == extra:
            name = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
            least = re.search(r">=\s*([0-9.]+)", requirement)
            if name:
                yield name.group(), least.group(1) if least else "0"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except (metadata.PackageNotFoundError, OSError, ValueError):
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """For comparing: 2.13.0+cpu is (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in found.group().split(".")] if found else [0]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def examine(
    folder: Path, *, tell: Callable[[str], None] = lambda what: None
) -> Iterator[tuple[str, list[CheckResult]]]:
    """Every check, group by group; `tell` hears what is looked at, before it is."""
    tell("importing torch")
    probe = probe_torch()
    yield "software", [*check_software(probe)]
    yield "extras", [*check_extras()]
    yield "devices", [*check_torch(probe)]
    tell("looking at memory and cores")
    yield "machine", [*check_machine()]
    tell("measuring the disk")
    yield "storage", [*check_shared_memory(), *check_disk(folder)]
    yield "around", [*check_environment(folder)]
