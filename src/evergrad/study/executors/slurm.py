"""Workers that are Slurm jobs: each serves many tasks, so that the scheduler is asked for jobs and not for trials.

Jobs report to the runner over a connection that both prove a secret on (`wire`); it is in a file that only their user
can read, and nothing else is listened to. Where it breaks, the other end is gone: a job whose runner was killed ends at
once, one that has not begun by then ends when it does, and a machine that is gone is noticed after `wire.SILENCE_S`.
Before its time limit a job finishes what it is at and another takes its place.

No thread: see `feeding`. What a worker prints is in `logs/` in the folder.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evergrad.errors import UsageError
from evergrad.study.executors.contract import Ended, Task
from evergrad.study.executors.feeding import Feeding
from evergrad.study.executors.process import Garbled
from evergrad.study.executors.reception import Reception
from evergrad.study.executors.slurm_jobs import Jobs, NotSubmitted, Standing, Wanted
from evergrad.study.executors.slurm_worker import Order
from evergrad.study.executors.wire import Wire
from evergrad.wording import checked_choice, shown

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
    wire: Wire | None = None
    node: str = ""
    task: Task | None = None
    is_leaving: bool = False
    running: float | None = None
    """Since when Slurm says that it runs."""
    gone: float | None = None
    """Since when its connection is no more."""
    why: str = ""

    @property
    def is_coming(self) -> bool:
        return self.wire is None and self.gone is None

    @property
    def is_serving(self) -> bool:
        return self.wire is not None and not self.is_leaving


class SlurmCluster(Feeding[dict[str, Any]]):
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
        self._slurm = Jobs(folder, Wanted(partition, minutes, cpus, options), cluster)
        try:
            self._reception = Reception("127.0.0.1" if cluster == "local" else host)
        except BaseException:
            self._slurm.close()
            raise
        self._order = self._slurm.folder / "order.json"
        Order(
            addresses=self._reception.addresses,
            port=self._reception.port,
            secret=self._reception.secret.hex(),
            folder=str(folder),
            perform=perform,
            path=tuple(str(Path(entry or ".").absolute()) for entry in sys.path),
            environment=dict(environment or {}),
        ).write(self._order)

    def _packed(self, task: Task) -> dict[str, Any]:
        if task.processes > self._cpus:
            raise UsageError(
                f"task {shown(task.id)} starts {task.processes} processes: jobs have {self._cpus} cpus each"
            )
        told = task.to_json()
        json.dumps(told, allow_nan=False)
        return told

    @property
    def _is_busy(self) -> bool:
        return any(job.task for job in self._jobs.values())

    @property
    def _is_served(self) -> bool:
        return any(job.is_serving for job in self._jobs.values())

    def _end(self) -> None:
        wires = [job.wire for job in self._jobs.values() if job.wire is not None]
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
        self._reception.close()
        self._slurm.close()
        self._jobs.clear()

    def _feed(self) -> None:
        for job in list(self._jobs.values()):
            if job.wire is None or job.task is not None:
                continue
            if job.is_leaving:
                self._reception.send(job.wire, {"end": True})
                self._part(job, "its time is over")
            elif self._waiting:
                job.task, told = self._waiting.popleft()
                self._reception.send(job.wire, told)
        until = time.monotonic() + _SUBMIT_S
        while self._start_at <= time.monotonic() < until:
            coming = sum(job.is_coming for job in self._jobs.values())
            serving = sum(job.is_serving for job in self._jobs.values())
            if coming >= len(self._waiting) or coming + serving >= self.slots:
                break
            self._start()

    def _start(self) -> None:
        self._number += 1
        try:
            id = self._slurm.submit(self._order, self._number)
        except NotSubmitted as error:
            self._could_not_start(str(error))
        else:
            self._jobs[self._number] = _Job(self._number, id, time.monotonic())

    def _listen(self, wait_s: float) -> None:
        came, ready = self._reception.wait(max(0.0, min(wait_s, _LOOK_S)))
        for wire, told in came:
            job = self._jobs.get(told.get("job", 0))
            if job is None or not job.is_coming:  # one that was given up
                self._reception.drop(wire)
                continue
            job.wire, job.node = wire, str(told.get("node"))
            self._reception.admit(wire, job)
            self._reception.send(wire, {"welcome": True})
        for job in ready:
            self._hear(job)
        self._look(time.monotonic())
        self._feed()

    def _hear(self, job: _Job) -> None:
        if job.wire is None:
            return
        try:
            messages = job.wire.receive()
            if messages is None:
                self._part(job, "its connection has ended")
            for told in messages or ():
                self._answer(job, told)
        except Garbled as error:
            self._part(job, f"it {error}")

    def _answer(self, job: _Job, told: dict[str, Any]) -> None:
        if told.get("leaving") is True:
            job.is_leaving = True
            return
        if job.task is None or told.get("id") != job.task.id:
            raise Garbled(f"answered what it was not asked: {shown(told)}")
        try:
            ended = Ended.from_json(told)
        except (KeyError, ValueError) as error:  # another version of us
            raise Garbled(f"answered what cannot be read: {shown(told)}") from error
        self._ended.append(ended)
        job.task = None
        self._failed_starts = 0

    def _part(self, job: _Job, why: str) -> None:
        """A job's connection is no more: what Slurm says of it comes a moment later."""
        assert job.wire is not None
        self._reception.drop(job.wire)
        job.wire, job.gone, job.why = None, time.monotonic(), why

    def _look(self, now: float) -> None:
        """At what no connection tells: jobs that wait, fail to start, or are gone."""
        coming = [job for job in self._jobs.values() if job.is_coming]
        gone = [job for job in self._jobs.values() if job.gone is not None]
        waited = min((now - job.asked for job in coming), default=0.0)
        if not (coming or gone) or now - self._looked < (_LOOK_S if gone else min(15.0, max(1.0, waited / 4))):
            return
        self._looked = now
        standings = self._slurm.standings()
        for job in gone:
            assert job.gone is not None
            standing = (standings or {}).get(job.id, Standing("Slurm does not answer"))
            if standing.is_over or now - job.gone > _WORDS_S:
                self._bury(job, standing)
        if standings is None:
            return
        for job in coming:
            standing = standings[job.id]
            if standing.is_running and job.running is None:
                job.running = now
            if standing.is_over or standing.is_hopeless:
                self._give_up(job, f"Slurm job {job.id}: {standing.words}")
            elif job.running is not None and now - job.running > _START_S:
                at = f"{' or '.join(self._reception.addresses)}, port {self._reception.port}"
                self._give_up(job, f"Slurm job {job.id} runs, and has not reported after {_START_S:g} s to {at}")

    def _bury(self, job: _Job, standing: Standing) -> None:
        del self._jobs[job.number]
        self._slurm.forget(job.id)
        if job.task is not None:
            log = self._logs / f"slurm-{job.number}-0.log"
            reason = (
                f"Slurm job {job.id} on {job.node} is gone, {job.why}: {standing.words}; what it printed is in {log}"
            )
            self._lose(job.task, reason)

    def _give_up(self, job: _Job, why: str) -> None:
        del self._jobs[job.number]
        printed = self._slurm.printed(job.id)
        self._slurm.forget(job.id)
        self._could_not_start(f"{why}: {printed}" if printed else why)

    def _could_not_start(self, why: str) -> None:
        super()._could_not_start(why)
        # Another try a while later: a limit on how many jobs one may have holds for longer than a moment.
        self._start_at = time.monotonic() + min(30.0, _AGAIN_S * 2.0 ** (self._failed_starts - 1))
