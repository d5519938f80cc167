"""The Slurm jobs of one executor: submitted by submitit, watched by squeue, ended by scancel.

submitit pickles the function that a job calls, and jobs unpickle it: whoever could write there could run code with
your rights. So all of it is in a folder that only you may enter, `slurm/` in the study's, with a fresh folder a run.
Jobs carry that folder's name: those that a killed runner has left behind are found by it, and ended by the next.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import re
import secrets
import shutil
import stat
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evergrad.errors import FileAccessError, UsageError
from evergrad.study.executors.slurm_worker import LEAVE_SIGNAL, serve
from evergrad.wording import install_hint, shown

_OVER = re.compile(
    "BOOT_FAIL|CANCELLED|COMPLETED|DEADLINE|FAILED|NODE_FAIL|OUT_OF_MEMORY|PREEMPTED|REVOKED|TIMEOUT|"
    "FINISHED|INTERRUPTED"  # as submitit says of its own processes
)
_HOPELESS = re.compile(
    "BadConstraints|DependencyNeverSatisfied|InvalidAccount|InvalidQOS|PartitionNodeLimit|PartitionTimeLimit|"
    "launch_failed_requeued_held"
)
"""Reasons to wait for which nobody has to wait."""
_TOOLS = ("sbatch", "srun", "squeue", "scancel")
_COMMAND_S = 60.0
_END_S = 10.0
_LISTED_S = 60.0
_LEAVE_S = 300


class NotSubmitted(Exception):
    """Slurm does not take a job; its own words."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How a job stands, as Slurm says."""

    words: str
    is_running: bool = False
    is_over: bool = False
    is_hopeless: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """What each job asks of Slurm."""

    partition: str | None = None
    minutes: int = 60
    cpus: int = 1
    options: Mapping[str, str] | None = None
    """Any others of sbatch's, by their long names: account, qos, gres, mem."""

    def __post_init__(self) -> None:
        for name, least, found in (("minutes", 2, self.minutes), ("cpus", 1, self.cpus)):
            if found < least:
                raise UsageError(f"{name}: expected at least {least}, found {found}")
        for key, value in (self.options or {}).items():
            if not key.replace("-", "").isalnum() or not (key + value).isprintable():
                raise UsageError(f"options: expected names and values of sbatch's, found {shown(f'{key}={value}')}")

    @property
    def leave_s(self) -> int:
        """How long before its limit a job begins nothing new."""
        return min(_LEAVE_S, self.minutes * 60 // 4)


class Jobs:
    """Those of one executor; `cluster` is `slurm`, or `local` for processes here that submitit has in its place."""

    def __init__(self, folder: Path, wanted: Wanted, cluster: str = "slurm") -> None:
        submitit = _submitit()
        self._is_slurm = cluster == "slurm"
        if self._is_slurm:
            missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
            if missing:
                raise UsageError(f"no Slurm here: expected the commands {', '.join(_TOOLS)}, found no {missing[0]}")
        if "%" in str(folder):  # Slurm would put a number there
            raise UsageError(f"{folder}: Slurm takes no path with a '%' in it")
        private = _private(folder / "slurm")
        self._sweep(private)
        self.name = f"evergrad-{secrets.token_hex(6)}"
        self.folder = private / self.name
        self.folder.mkdir(0o700)
        self._lock = _locked(self.folder)
        self._jobs: dict[str, Any] = {}
        self._asked: dict[str, float] = {}
        self._has_asked = False
        if self._is_slurm:
            self._submitit = submitit.SlurmExecutor(self.folder)
            # No requeueing: a job that began anew would report a second time.
            more = {"no-requeue": True, "signal": f"{LEAVE_SIGNAL.name[3:]}@{wanted.leave_s}", **(wanted.options or {})}
            self._submitit.update_parameters(
                job_name=self.name,
                partition=wanted.partition,
                time=wanted.minutes,
                cpus_per_task=wanted.cpus,
                additional_parameters=more,
            )
        else:
            self._submitit = submitit.LocalExecutor(self.folder)
            self._submitit.update_parameters(timeout_min=wanted.minutes, signal_delay_s=wanted.leave_s)

    def submit(self, order: Path, number: int) -> str:
        """One more; its id."""
        self._has_asked = True
        asked = time.monotonic()
        try:
            job = self._submitit.submit(serve, str(order), number)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            raise NotSubmitted(str(error)) from error
        self._jobs[job.job_id] = job
        self._asked[job.job_id] = asked
        return str(job.job_id)

    def standings(self) -> dict[str, Standing] | None:
        """Of every job that is not forgotten; None when Slurm gives no answer."""
        if not self._is_slurm:
            return {id: _standing(job.state, "") for id, job in self._jobs.items()}
        code, text = _said("squeue", "--noheader", "--states=all", f"--name={self.name}", "--format=%i|%T|%r")
        if code:
            return None
        listed = {id: _standing(state, reason) for id, state, reason in _rows(text)}
        # Where squeue's answers are kept for a while, a new job is not in them yet.
        known = time.monotonic() - _LISTED_S
        return {
            id: listed.get(id, Standing("Slurm does not list it", is_over=self._asked[id] < known)) for id in self._jobs
        }

    def log(self, id: str) -> Path:
        """Where it prints."""
        return Path(self._jobs[id].paths.stderr)

    def printed(self, id: str) -> str:
        """The last lines that it has printed, as one."""
        with suppress(OSError):
            lines = [line.strip() for line in self.log(id).read_text(errors="replace")[-4000:].splitlines()]
            return " | ".join([line for line in lines if line][-2:])
        return ""

    def forget(self, id: str) -> None:
        """End it, if it is not over."""
        job = self._jobs.pop(id)
        if self._is_slurm:
            _said("scancel", "--quiet", id)
        else:
            _end_here([job])

    def close(self) -> None:
        """End all of them, and remove the folder."""
        if self._is_slurm:
            if self._has_asked:  # also for one of which no id was heard
                _said("scancel", "--quiet", f"--name={self.name}")
        else:
            _end_here(list(self._jobs.values()))
        self._jobs.clear()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def _sweep(self, private: Path) -> None:
        """End the jobs, and remove the folders, of runners that are gone."""
        for folder in private.glob("evergrad-*"):
            try:
                lock = _locked(folder)
            except BlockingIOError:
                continue
            if self._is_slurm:
                _said("scancel", "--quiet", f"--name={folder.name}")
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _submitit() -> Any:
    try:
        return importlib.import_module("submitit")
    except ImportError as error:
        raise UsageError(f"Slurm jobs need submitit: {install_hint('slurm')}") from error


def _private(folder: Path) -> Path:
    """A folder that is ours alone: what is pickled there is run."""
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            folder.chmod(0o700)
            found = folder.lstat()
    except OSError as error:
        raise FileAccessError(folder, f"cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        mode = f"{stat.filemode(found.st_mode)} of user {found.st_uid}"
        raise UsageError(f"{folder}: expected a folder that only you may enter, found {mode}. Put --out elsewhere")
    return folder


def _locked(folder: Path) -> int:
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor


def _said(*command: str) -> tuple[int, str]:
    """What a command of Slurm's says, and with which exit code."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_COMMAND_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, done.stdout


def _rows(text: str) -> list[tuple[str, str, str]]:
    rows = [line.strip().split("|", 2) for line in text.splitlines()]
    return [(row[0], row[1], row[2]) for row in rows if len(row) == 3]


def _standing(state: str, reason: str) -> Standing:
    words = f"{state} ({reason})" if reason not in ("", "None") else state
    return Standing(
        words,
        is_running=state == "RUNNING",
        is_over=_OVER.fullmatch(state) is not None,
        is_hopeless=state == "PENDING" and _HOPELESS.fullmatch(reason) is not None,
    )


def _end_here(jobs: list[Any]) -> None:
    """End submitit's own processes, which are children of this one."""
    for job in jobs:
        if not job.done():
            job.cancel()
    until = time.monotonic() + _END_S
    while not all(job.done() for job in jobs) and time.monotonic() < until:
        time.sleep(0.01)
