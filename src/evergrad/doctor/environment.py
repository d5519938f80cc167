"""What else is there: Slurm, a browser, the clock, and settings of ours in the environment."""

from __future__ import annotations

import ctypes
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from evergrad.doctor.check import Check, checked

_SLURM = ("sbatch", "squeue", "scancel", "srun")
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FIRST_TIME = 1_735_689_600.0  # 2025: a clock before that was never set
_UNSYNCHRONISED = 0x40  # STA_UNSYNC of adjtimex


def look(folder: Path) -> Iterator[Check]:
    """Slurm's commands, a browser, the clock, EVERGRAD_* variables."""
    yield from checked("slurm", _slurm)
    yield from checked("browser", _browser)
    yield from checked("clock", _clock)
    yield from checked("settings", _settings)


def _slurm() -> Check:
    found = {name: shutil.which(name) for name in _SLURM}
    there = [name for name in _SLURM if found[name]]
    facts = dict(found)
    if not there:
        return Check("slurm", "ok", "not found: studies run on this machine or on Dask", facts=facts)
    missing = [name for name in _SLURM if not found[name]]
    if missing:
        todo = "install Slurm's client commands, or load their module"
        return Check("slurm", "degraded", f"{', '.join(there)}, without {', '.join(missing)}", todo, facts)
    return Check("slurm", "ok", ", ".join(there), facts=facts)


def _browser() -> Check:
    found = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        return Check("browser", "ok", "no Chromium here; only the tests of reports use one")
    return Check("browser", "ok", found, facts={"path": found})


def _clock() -> Check:
    now = time.time()
    told = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < _FIRST_TIME:
        return Check("clock", "failed", f"{told}: was never set", "set it, or let it follow a time service")
    follows = _synchronised()
    if follows:
        return Check("clock", "ok", f"{told}, synchronised")
    todo = "on several machines, and for S3, let it follow one (chrony, systemd-timesyncd)"
    if follows is False:
        return Check("clock", "ok", f"{told}; it follows no time service, which one machine does not need", todo)
    return Check("clock", "unknown", f"{told}; whether it follows a time service cannot be seen", todo)


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


def _settings() -> Check:
    found = {name: os.environ[name] for name in sorted(os.environ) if name.startswith("EVERGRAD_")}
    if not found:
        return Check("settings", "ok", "no EVERGRAD_* variable is set")
    secret = ("SECRET", "KEY", "TOKEN")
    shown = [name if any(word in name for word in secret) else f"{name}={value}" for name, value in found.items()]
    return Check("settings", "ok", ", ".join(shown))
