"""Workers that are Slurm jobs: each serves many tasks, so that the scheduler is asked for jobs and not for trials.

Jobs report to the runner over a connection that both prove a secret on (`_wire`); it is in a file that only their user
can read, and nothing else is listened to. Where it breaks, the other end is gone: a job whose runner was killed ends at
once, one that has not begun by then ends when it does, and a machine that is gone is noticed after `wire.SILENCE_S`.
Before its time limit a job finishes what it is at and another takes its place.

No thread: see `base.QueueingExecutor`. What a worker prints is in `logs/` in the folder.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import secrets
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evergrad._files import take_lock
from evergrad._wire import Garbled, Wire
from evergrad.errors import FileAccessError, UsageError
from evergrad.study.executors.base import QueueingExecutor, Task, TaskResult
from evergrad.study.executors.listener import WorkerListener
from evergrad.study.executors.slurm_worker import LEAVE_SIGNAL, SlurmWorkerSettings, serve
from evergrad.wording import checked_choice, install_hint, short_repr

# The Slurm jobs of one executor: submitted by submitit, watched by squeue, ended by scancel.
#
# submitit pickles the function that a job calls, and jobs unpickle it: whoever could write there could run code with
# your rights. So all of it is in a folder that only you may enter, `slurm/` in the study's, with a fresh folder a
# run. Jobs carry that folder's name: those that a killed runner has left behind are found by it, and ended by the
# next.

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
_END_S_JOBS = 10.0
_LISTED_S = 60.0
_LEAVE_S = 300


class NotSubmitted(Exception):
    """Slurm does not take a job; its own words."""


@dataclass(frozen=True, slots=True)
class SlurmJobStatus:
    """How a job stands, as Slurm says."""

    text: str
    is_running: bool = False
    is_over: bool = False
    is_hopeless: bool = False


@dataclass(frozen=True, slots=True)
class SlurmJobOptions:
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
                raise UsageError(
                    f"options: expected names and values of sbatch's, found {short_repr(f'{key}={value}')}"
                )

    @property
    def leave_s(self) -> int:
        """How long before its limit a job begins nothing new."""
        return min(_LEAVE_S, self.minutes * 60 // 4)


class SlurmJobs:
    """Those of one executor; `cluster` is `slurm`, or `local` for processes here that submitit has in its place."""

    def __init__(self, folder: Path, wanted: SlurmJobOptions, cluster: str = "slurm") -> None:
        submitit = _submitit()
        self._is_slurm = cluster == "slurm"
        if self._is_slurm:
            missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
            if missing:
                raise UsageError(f"no Slurm here: expected the commands {', '.join(_TOOLS)}, found no {missing[0]}")
        if "%" in str(folder):  # Slurm would put a number there
            raise UsageError(f"{folder}: Slurm takes no path with a '%' in it")
        private = _make_private_folder(folder / "slurm")
        self._cancel_orphans(private)
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

    def statuses(self) -> dict[str, SlurmJobStatus] | None:
        """Of every job that is not forgotten; None when Slurm gives no answer."""
        if not self._is_slurm:
            return {id: _job_status(job.state, "") for id, job in self._jobs.items()}
        code, text = _run_command("squeue", "--noheader", "--states=all", f"--name={self.name}", "--format=%i|%T|%r")
        if code:
            return None
        listed = {id: _job_status(state, reason) for id, state, reason in _rows(text)}
        # Where squeue's answers are kept for a while, a new job is not in them yet.
        known = time.monotonic() - _LISTED_S
        return {
            id: listed.get(id, SlurmJobStatus("Slurm does not list it", is_over=self._asked[id] < known))
            for id in self._jobs
        }

    def log(self, id: str) -> Path:
        """Where it prints."""
        return Path(self._jobs[id].paths.stderr)

    def last_output(self, id: str) -> str:
        """The last lines that it has printed, as one."""
        with suppress(OSError):
            lines = [line.strip() for line in self.log(id).read_text(errors="replace")[-4000:].splitlines()]
            return " | ".join([line for line in lines if line][-2:])
        return ""

    def cancel(self, id: str) -> None:
        """End it, if it is not over."""
        job = self._jobs.pop(id)
        if self._is_slurm:
            _run_command("scancel", "--quiet", id)
        else:
            _end_here([job])

    def close(self) -> None:
        """End all of them, and remove the folder."""
        if self._is_slurm:
            if self._has_asked:  # also for one of which no id was heard
                _run_command("scancel", "--quiet", f"--name={self.name}")
        else:
            _end_here(list(self._jobs.values()))
        self._jobs.clear()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def _cancel_orphans(self, private: Path) -> None:
        """End the jobs, and remove the folders, of runners that are gone."""
        for folder in private.glob("evergrad-*"):
            try:
                lock = _locked(folder)
            except BlockingIOError:
                continue
            if self._is_slurm:
                _run_command("scancel", "--quiet", f"--name={folder.name}")
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _submitit() -> Any:
    try:
        return importlib.import_module("submitit")
    except ImportError as error:
        raise UsageError(f"Slurm jobs need submitit: {install_hint('slurm')}") from error


def _make_private_folder(folder: Path) -> Path:
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
        take_lock(descriptor)
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor


def _run_command(*command: str) -> tuple[int, str]:
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


def _job_status(state: str, reason: str) -> SlurmJobStatus:
    words = f"{state} ({reason})" if reason not in ("", "None") else state
    return SlurmJobStatus(
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
    until = time.monotonic() + _END_S_JOBS
    while not all(job.done() for job in jobs) and time.monotonic() < until:
        time.sleep(0.01)


_AGAIN_S = 1.0
"""Before the second try, then twice as long, up to half a minute."""
_START_S = 600.0
"""From when Slurm says that it runs; importing from a slow file system takes minutes."""
_WORDS_S = 5.0
"""How long to wait for what Slurm says of a job that is gone."""
_LOOK_S = 0.5
_END_S = 5.0
_SUBMIT_S = 1.0
"""The longest to be busy with submitting jobs, while results wait."""


@dataclass(eq=False, slots=True)
class _Job:
    number: int
    id: str
    asked: float
    """When it was submitted."""
    connection: Wire | None = None
    node: str = ""
    task: Task | None = None
    is_leaving: bool = False
    running: float | None = None
    """Since when Slurm says that it runs."""
    gone: float | None = None
    """Since when its connection is no more."""
    gone_reason: str = ""

    @property
    def is_pending(self) -> bool:
        return self.connection is None and self.gone is None

    @property
    def is_serving(self) -> bool:
        return self.connection is not None and not self.is_leaving


class SlurmCluster(QueueingExecutor[dict[str, Any]]):
    """As many jobs as asked for, submitted when there is work for them.

    Nodes must see the study's folder under the same path, have the same Evergrad there, and reach this machine. That
    is by its name; `host` is another name or address of it, and then nothing else is listened on.
    """

    def __init__(
        self,
        folder: Path,
        perform: str,
        *,
        jobs: int = 1,
        partition: str | None = None,
        minutes: int = 60,
        cpus: int = 1,
        options: Mapping[str, str] | None = None,
        host: str | None = None,
        environment: Mapping[str, str] | None = None,
        cluster: str = "slurm",
    ) -> None:
        """Minutes and cpus are of each job, options others of sbatch's; cluster "local" tries it without Slurm."""
        if jobs < 1:
            raise UsageError(f"jobs: expected at least 1, found {jobs}")
        checked_choice("cluster", cluster, ("slurm", "local"))
        self.slots = jobs
        super().__init__(perform, "Slurm job")
        self._cpus = cpus
        self._jobs: dict[int, _Job] = {}
        self._number = 0
        self._start_at = self._looked = 0.0
        folder = Path(folder).absolute()
        self._logs = folder / "logs"
        self._slurm = SlurmJobs(folder, SlurmJobOptions(partition, minutes, cpus, options), cluster)
        try:
            self._listener = WorkerListener("127.0.0.1" if cluster == "local" else host)
        except BaseException:
            self._slurm.close()
            raise
        self._settings_path = self._slurm.folder / "order.json"
        SlurmWorkerSettings(
            addresses=self._listener.addresses,
            port=self._listener.port,
            secret=self._listener.secret.hex(),
            folder=str(folder),
            perform=perform,
            path=tuple(str(Path(entry or ".").absolute()) for entry in sys.path),
            environment=dict(environment or {}),
        ).write(self._settings_path)

    def _encode(self, task: Task) -> dict[str, Any]:
        if task.processes > self._cpus:
            raise UsageError(
                f"task {short_repr(task.id)} starts {task.processes} processes: jobs have {self._cpus} cpus each"
            )
        told = task.to_json()
        json.dumps(told, allow_nan=False)
        return told

    @property
    def _is_busy(self) -> bool:
        return any(job.task for job in self._jobs.values())

    @property
    def _has_worker(self) -> bool:
        return any(job.is_serving for job in self._jobs.values())

    def _stop_workers(self) -> None:
        wires = [job.connection for job in self._jobs.values() if job.connection is not None]
        for wire in wires:
            wire.send({"end": True})
        until = time.monotonic() + _END_S
        for wire in wires:  # a job closes its end after its child is gone
            while (left := until - time.monotonic()) > 0:
                wire.wait(left)
                try:
                    if wire.receive() is None:
                        break
                except Garbled:
                    break
        self._listener.close()
        self._slurm.close()
        self._jobs.clear()

    def _dispatch(self) -> None:
        for job in list(self._jobs.values()):
            if job.connection is None or job.task is not None:
                continue
            if job.is_leaving:
                self._listener.send(job.connection, {"end": True})
                self._disconnect(job, "its time is over")
            elif self._waiting:
                job.task, told = self._waiting.popleft()
                self._listener.send(job.connection, told)
        until = time.monotonic() + _SUBMIT_S
        while self._start_at <= time.monotonic() < until:
            coming = sum(job.is_pending for job in self._jobs.values())
            serving = sum(job.is_serving for job in self._jobs.values())
            if coming >= len(self._waiting) or coming + serving >= self.slots:
                break
            self._start()

    def _start(self) -> None:
        self._number += 1
        try:
            id = self._slurm.submit(self._settings_path, self._number)
        except NotSubmitted as error:
            self._count_failed_start(str(error))
        else:
            self._jobs[self._number] = _Job(self._number, id, time.monotonic())

    def _poll(self, wait_s: float) -> None:
        came, ready = self._listener.wait(max(0.0, min(wait_s, _LOOK_S)))
        for wire, told in came:
            job = self._jobs.get(told.get("job", 0))
            if job is None or not job.is_pending:  # one that was given up
                self._listener.drop(wire)
                continue
            job.connection, job.node = wire, str(told.get("node"))
            self._listener.assign(wire, job)
            self._listener.send(wire, {"welcome": True})
        for job in ready:
            self._receive(job)
        self._check_jobs(time.monotonic())
        self._dispatch()

    def _receive(self, job: _Job) -> None:
        if job.connection is None:
            return
        try:
            messages = job.connection.receive()
            if messages is None:
                self._disconnect(job, "its connection has ended")
            for told in messages or ():
                self._handle_message(job, told)
        except Garbled as error:
            self._disconnect(job, f"it {error}")

    def _handle_message(self, job: _Job, told: dict[str, Any]) -> None:
        if told.get("leaving") is True:
            job.is_leaving = True
            return
        if job.task is None or told.get("id") != job.task.id:
            raise Garbled(f"answered what it was not asked: {short_repr(told)}")
        try:
            ended = TaskResult.from_json(told)
        except (KeyError, ValueError) as error:  # another version of us
            raise Garbled(f"answered what cannot be read: {short_repr(told)}") from error
        self._ended.append(ended)
        job.task = None
        self._failed_starts = 0

    def _disconnect(self, job: _Job, why: str) -> None:
        """A job's connection is no more: what Slurm says of it comes a moment later."""
        assert job.connection is not None
        self._listener.drop(job.connection)
        job.connection, job.gone, job.gone_reason = None, time.monotonic(), why

    def _check_jobs(self, now: float) -> None:
        """At what no connection tells: jobs that wait, fail to start, or are gone."""
        coming = [job for job in self._jobs.values() if job.is_pending]
        gone = [job for job in self._jobs.values() if job.gone is not None]
        waited = min((now - job.asked for job in coming), default=0.0)
        if not (coming or gone) or now - self._looked < (_LOOK_S if gone else min(15.0, max(1.0, waited / 4))):
            return
        self._looked = now
        standings = self._slurm.statuses()
        for job in gone:
            assert job.gone is not None
            standing = (standings or {}).get(job.id, SlurmJobStatus("Slurm does not answer"))
            if standing.is_over or now - job.gone > _WORDS_S:
                self._remove_job(job, standing)
        if standings is None:
            return
        for job in coming:
            standing = standings[job.id]
            if standing.is_running and job.running is None:
                job.running = now
            if standing.is_over or standing.is_hopeless:
                self._give_up(job, f"Slurm job {job.id}: {standing.text}")
            elif job.running is not None and now - job.running > _START_S:
                at = f"{' or '.join(self._listener.addresses)}, port {self._listener.port}"
                self._give_up(job, f"Slurm job {job.id} runs, and has not reported after {_START_S:g} s to {at}")

    def _remove_job(self, job: _Job, standing: SlurmJobStatus) -> None:
        del self._jobs[job.number]
        self._slurm.cancel(job.id)
        if job.task is not None:
            log = self._logs / f"slurm-{job.number}-0.log"
            where = f"Slurm job {job.id} on {job.node}"
            reason = f"{where} is gone, {job.gone_reason}: {standing.text}; what it printed is in {log}"
            self._add_lost(job.task, reason)

    def _give_up(self, job: _Job, why: str) -> None:
        del self._jobs[job.number]
        printed = self._slurm.last_output(job.id)
        self._slurm.cancel(job.id)
        self._count_failed_start(f"{why}: {printed}" if printed else why)

    def _count_failed_start(self, why: str) -> None:
        super()._count_failed_start(why)
        # Another try a while later: a limit on how many jobs one may have holds for longer than a moment.
        self._start_at = time.monotonic() + min(30.0, _AGAIN_S * 2.0 ** (self._failed_starts - 1))
