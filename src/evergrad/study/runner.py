"""Running a study: golden runs first, then every trial that is missing, each result into the journal at once.

Whatever is killed, at whatever time: the journal holds what had ended, and the same command runs exactly what is
missing. A trial whose worker is lost is tried again here, then counts as `unknown` and is tried by the next run.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from evergrad.errors import StudyError, UsageError
from evergrad.study.executors.base import Executor, Task, TaskResult, TaskStatus
from evergrad.study.folder import SCRATCH, JournalEntry, StudyFolder, TrialJournal
from evergrad.study.golden import GoldenRun, read_golden
from evergrad.study.plan import Plan
from evergrad.study.provenance import run_facts
from evergrad.study.results import Results, StudyProgress, results_from, results_of
from evergrad.study.run_estimate import default_workers, duration
from evergrad.study.statistics import proportion_interval
from evergrad.study.trials import Command, Observation, Trial, TrialEnd, crashed_by_itself, golden_work, trial_work
from evergrad.wording import checked_choice, short_repr

PERFORM = "evergrad.study.tasks:perform"
"""The function that runs a task of a study, as executors are told of it."""

_ATTEMPTS = 3
_LOST_IN_A_ROW = 12
_WAIT_S = 0.5

_SLURM_JOBS = 4


@dataclass(frozen=True, slots=True)
class StudyRunStatus:
    """How far a run is."""

    phase: str
    """`golden` or `trials`."""
    done: int
    due: int
    lost: int = 0
    seconds: float = 0.0
    """Since this run began."""
    ran: int = 0
    """Trials that this run has brought to an end."""

    @property
    def left_s(self) -> float | None:
        """Seconds to go, by the pace so far."""
        return (self.due - self.done) * self.seconds / self.ran if self.ran else None

    @property
    def what(self) -> str:
        """Name the phase: `golden runs` or `trials`."""
        return "golden runs" if self.phase == "golden" else "trials"

    @property
    def outlook(self) -> str:
        """Tell the time to go, as far as it is known, and how many workers were lost; may be empty."""
        left = [f"{duration(self.left_s)} to go"] if self.left_s is not None else []
        return ", ".join([*left, f"{self.lost} workers lost"] if self.lost else left)

    def __str__(self) -> str:
        """One line.

        >>> print(StudyRunStatus("trials", 30, 60, seconds=300, ran=30))
        trials: 30 of 60, 5.0 min to go
        """
        return ", ".join(filter(None, (f"{self.what}: {self.done:,} of {self.due:,}", self.outlook)))


@dataclass(frozen=True, slots=True)
class ExecutorSettings:
    """Where the trials of a study run. Settings that the executor does not have are refused."""

    kind: str = "local"
    """`local`: processes of this machine. `dask` and `slurm`: a cluster. `in-process`: this process, one trial after
    the other, for debuggers; workers compute with one thread, so call `torch.set_num_threads(1)` before."""
    scheduler: str | None = None
    """The address of a Dask scheduler; without it, a cluster on this machine."""
    partition: str | None = None
    """Of Slurm; without it, Slurm's default."""
    minutes: int | None = None
    """The limit of each Slurm job: 60. The next takes the place of one that is over."""
    sbatch: Mapping[str, str] = field(default_factory=dict)
    """Other options of sbatch, by name: `{"account": "physics"}`."""
    host: str | None = None
    """By which Slurm jobs reach this machine; without it, by its name."""

    def __post_init__(self) -> None:
        checked_choice("executor", self.kind, ("local", "dask", "slurm", "in-process"))
        for name, kind in _BELONGS_TO.items():
            if getattr(self, name) and self.kind != kind:
                raise UsageError(f"{name}: goes with executor {kind}, found executor {self.kind}")

    def make(self, plan: Plan, folder: Path, workers: int | None = None) -> Executor:
        """Start the executor for the trials of this plan."""
        if self.kind == "slurm":
            from evergrad.study.executors.slurm import SlurmCluster

            # The ranks of a training are processes of one job; where time is measured, no other job runs beside it.
            cpus = max(getattr(cell.training, "ranks", 1) for cell in plan.cells)
            jobs = workers or (1 if any(cell.saving is not None for cell in plan.cells) else _SLURM_JOBS)
            return SlurmCluster(
                folder,
                PERFORM,
                jobs=jobs,
                cpus=cpus,
                partition=self.partition,
                minutes=self.minutes or 60,
                options=self.sbatch,
                host=self.host,
            )
        if self.kind == "dask":
            from evergrad.study.executors.dask import DaskCluster

            if self.scheduler is not None:  # workers is how many to wait for
                return DaskCluster(folder, PERFORM, scheduler=self.scheduler, workers=workers)
            return DaskCluster(folder, PERFORM, workers=workers or default_workers(plan))
        if self.kind == "in-process":
            from evergrad.study.executors.in_process import InProcess

            return InProcess(folder, PERFORM)
        from evergrad.study.executors.local import LocalProcesses

        return LocalProcesses(folder, PERFORM, workers=workers or default_workers(plan))


_BELONGS_TO = {"scheduler": "dask", "partition": "slurm", "minutes": "slurm", "sbatch": "slurm", "host": "slurm"}


def run_study(
    plan: str | Path | Plan,
    out: str | Path,
    *,
    scale: str | None = None,
    trials_per_cell: int | None = None,
    seed: int | None = None,
    device: str | None = None,
    workers: int | None = None,
    executor: str | ExecutorSettings | Executor | Callable[[Path], Executor] = "local",
    progress: Callable[[StudyRunStatus], object] | None = None,
) -> Results:
    """Run a study: golden runs, then every trial that is missing; the same call again goes on.

    `plan` is a name of the gallery, the path of a plan in TOML, or a `Plan`; `out` is the study's folder, new or one
    to go on in. `scale` (tiny, small, paper …), `trials_per_cell`, `seed` and `device` replace the plan's; a
    `Plan` has them already. `workers` is the number of trials at once: as many as keep the cores busy, or 4 Slurm jobs.

    `executor` is `local`, `dask`, `slurm` or `in-process`, `ExecutorSettings`, an `Executor` of your own, which stays
    open, or a function that makes one from the folder, which is closed. `progress` is called with how far the run is.

    >>> import evergrad as eg
    >>> results = eg.run_study("bitflip-nev", "runs/nev", scale="tiny", progress=print)    # doctest: +SKIP
    golden runs: 0 of 3
    trials: 42 of 150, 31 s to go
    >>> print(results.table("paper"))                                                   # doctest: +SKIP
    """
    given = {"scale": scale, "trials_per_cell": trials_per_cell, "seed": seed, "device": device}
    if isinstance(executor, str):
        executor = ExecutorSettings(executor)
    if workers is not None and (type(workers) is not int or workers < 1):
        raise UsageError(f"workers: expected a whole number, 1 or more, found {short_repr(workers)}")
    command: tuple[str, ...] = ()
    if isinstance(plan, Plan):
        for name, value in given.items():
            if value is not None:
                raise UsageError(f"{name}: goes with a name or a path, found a Plan. Give it to Plan.read instead.")
    else:
        typed = str(plan)
        plan = Plan.read(plan, scale=scale, trials_per_cell=trials_per_cell, seed=seed, device=device)
        command = _command(typed, plan)
    proportion_interval(0, 1)  # a missing library is better known before the work than after it
    folder = StudyFolder(Path(out))
    with folder.locked():
        folder.write_plan(plan, plan.name or plan.study, plan.overrides)
        shutil.rmtree(folder.path / SCRATCH, ignore_errors=True)  # of workers that were killed
        run = _Run(plan, folder, progress or (lambda _: None))
        if not run.progress.unfinished():
            return results_from(run.progress, run.kept)
        with TrialJournal(folder.journal) as journal, _opened(executor, plan, folder.path, workers) as opened:
            journal.append_run(run_facts(command))
            run.make_golden(opened)
            run.run_trials(opened, journal)
    return results_of(folder.path)


@contextmanager
def _opened(
    executor: ExecutorSettings | Executor | Callable[[Path], Executor], plan: Plan, folder: Path, workers: int | None
) -> Iterator[Executor]:
    """The executor; one that is made here is closed here."""
    if isinstance(executor, Executor):
        yield executor
        return
    made = executor.make(plan, folder, workers) if isinstance(executor, ExecutorSettings) else executor(folder)
    with made:
        yield made


def _command(name: str, plan: Plan) -> tuple[str, ...]:
    """The command that makes these results again; a study does not depend on how many workers there were."""
    words = ["evergrad", "study", "run", name]
    if plan.scale:
        words += ["--scale", plan.scale]
    for key, value in plan.overrides.items():
        words += ["--trials-per-cell" if key == "trainings" else f"--{key}", str(value)]
    return tuple(words)


class _Run:
    """One run of a study, from what is there to what is missing."""

    def __init__(self, plan: Plan, folder: StudyFolder, report: Callable[[StudyRunStatus], object]) -> None:
        self.folder, self.progress, self.report = folder, StudyProgress.of(plan), report
        self.kept = self.progress.read_folder(folder)  # the journal as this run begins, in brief
        self.began = monotonic()
        self.ran = self.lost = self.in_a_row = 0
        self.patience = _LOST_IN_A_ROW
        self.attempts: Counter[str] = Counter()
        self.deaths: Counter[str] = Counter()

    def make_golden(self, executor: Executor) -> None:
        """The golden run of every training that trials are missing of; each also tries where its cells aim."""
        waiting: dict[str, Task] = {}
        for cells in self.progress.unfinished():
            aims = [cell.plan.trial(0) for cell in cells]
            key = aims[0].training.key
            waiting[key] = Task(f"golden {key}", golden_work(aims[0], aims), processes=_processes(aims[0]))
        due = len(waiting)
        for task in waiting.values():
            executor.submit(task)
        tried: Counter[str] = Counter()
        while waiting:
            self.report(StudyRunStatus("golden", due - len(waiting), due, seconds=monotonic() - self.began))
            for ended in executor.collect(_WAIT_S):
                key = ended.id.removeprefix("golden ")
                if ended.status is TaskStatus.DONE and ended.result is not None:
                    golden = read_golden(self.folder.path, key)
                    assert isinstance(golden, GoldenRun), "a golden run that was made is there"
                    self.progress.add_golden(golden)
                    del waiting[key]
                elif ended.status is TaskStatus.BROKEN or tried[key] + 1 >= _ATTEMPTS:
                    raise StudyError(f"the golden run cannot be made: {ended.reason}")
                else:
                    tried[key] += 1
                    executor.submit(waiting[key])
        # A journal may know trials of a golden run that had to be made again.
        self.progress.add_journal(self.kept)

    def run_trials(self, executor: Executor, journal: TrialJournal) -> None:
        """Keep the executor busy until nothing is missing."""
        missing, running = self.progress.missing(), dict[str, Trial]()
        self.patience = max(_LOST_IN_A_ROW, 3 * executor.slots)  # a machine that goes takes many workers at once
        again: list[Trial] = []
        began = monotonic()
        while True:
            while len(running) < 2 * executor.slots:
                trial = again.pop() if again else next(missing, None)
                if trial is None:
                    break
                if trial.id not in running:
                    running[trial.id] = trial
                    executor.submit(Task(trial.id, trial_work(trial), self._limit(trial), _processes(trial)))
            self.report(self._progress(began))
            if not running:
                break
            entries, broken = [], None
            for ended in executor.collect(_WAIT_S):
                trial = running.pop(ended.id)
                try:
                    seen = self._observation_of(ended)
                except StudyError as error:
                    broken = error
                    continue
                if seen is None:
                    again.append(trial)
                else:
                    entries.append(JournalEntry(trial, seen, self.progress.golden_run_id(trial)))
            if entries:
                journal.append(entries)
                for entry in entries:
                    self.progress.add_trial(entry)
                    self.ran += 1
            if broken is not None:  # after what has ended well is safe
                raise broken

    def _observation_of(self, ended: TaskResult) -> Observation | None:
        """What the end of a task tells of its trial; None: it has to be tried again."""
        if ended.status is TaskStatus.DONE and ended.result is not None:
            self.in_a_row = 0
            return Observation.from_json(ended.result)
        if ended.status is TaskStatus.BROKEN:
            raise StudyError(f"trial {ended.id} cannot be run: {ended.reason}")
        if ended.status is TaskStatus.OVERTIME:
            return Observation(end=TrialEnd.OVERTIME, reason=ended.reason)
        self.lost += 1
        self.in_a_row += 1
        if self.in_a_row >= self.patience:
            raise StudyError(f"{self.in_a_row} workers were lost one after the other, the last: {ended.reason}")
        self.attempts[ended.id] += 1
        if crashed_by_itself(ended.reason):
            self.deaths[ended.id] += 1
            if self.deaths[ended.id] > 1:
                return Observation(end=TrialEnd.CRASHED, reason=ended.reason)
        if self.attempts[ended.id] < _ATTEMPTS:
            return None
        return Observation(end=TrialEnd.LOST, reason=ended.reason)

    def _limit(self, trial: Trial) -> float:
        """Far beyond what the golden run took; a first trial also loads model and data."""
        cell = next(cell for cell in self.progress.cells if cell.plan.training.key == trial.training.key)
        assert cell.golden is not None
        own = trial.training.timeout_s if isinstance(trial.training, Command) else 0.0
        return max(own + 60, 120 + 20 * cell.golden.observation.seconds)

    def _progress(self, began: float) -> StudyRunStatus:
        progress = self.progress
        return StudyRunStatus("trials", progress.done, progress.due, self.lost, monotonic() - began, self.ran)


def _processes(trial: Trial) -> int:
    return 1 if isinstance(trial.training, Command) else trial.training.ranks
