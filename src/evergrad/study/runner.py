"""Running a study: golden runs first, then every trial that is missing, each result into the journal at once.

Whatever is killed, at whatever time: the journal holds what had ended, and the same command runs exactly what is
missing. A trial whose worker is lost is tried again here, then counts as `unknown` and is tried by the next run.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from evergrad.errors import StudyError
from evergrad.records import Json
from evergrad.study.executors.base import Ended, Executor, Fate, Task
from evergrad.study.folder import SCRATCH, Entry, Journal, StudyFolder
from evergrad.study.golden import Golden, read_golden
from evergrad.study.plan import Plan
from evergrad.study.provenance import run_facts
from evergrad.study.results import Results, Tally, results_of
from evergrad.study.statistics import proportion_interval
from evergrad.study.trials import Command, End, Observation, Trial, golden_work, is_own_doing, trial_work

PERFORM = "evergrad.study.tasks:perform"

_ATTEMPTS = 3
_LOST_IN_A_ROW = 12
_WAIT_S = 0.5

MakeExecutor = Callable[[Path], Executor]


@dataclass(frozen=True, slots=True)
class Progress:
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


def run_study(
    plan: Plan,
    out: Path,
    make_executor: MakeExecutor,
    *,
    name: str = "",
    overrides: Mapping[str, Json] | None = None,
    command: tuple[str, ...] = (),
    report: Callable[[Progress], None] = lambda _: None,
) -> Results:
    """Run what is missing of a study, in its folder; returns what it has found."""
    proportion_interval(0, 1)  # a missing library is better known before the work than after it
    folder = StudyFolder(out)
    with folder.locked():
        folder.keep_plan(plan, name or plan.study, overrides or {})
        shutil.rmtree(out / SCRATCH, ignore_errors=True)  # of workers that were killed
        run = _Run(plan, folder, report)
        if run.prepare():
            with Journal(folder.journal) as journal, make_executor(out) as executor:
                journal.note_run(run_facts(command))
                run.make_golden(executor)
                run.run_trials(executor, journal)
    return results_of(out)


class _Run:
    """One run of a study, from what is there to what is missing."""

    def __init__(self, plan: Plan, folder: StudyFolder, report: Callable[[Progress], None]) -> None:
        self.folder, self.tally, self.report = folder, Tally.of(plan), report
        self.began = monotonic()
        self.ran = self.lost = self.in_a_row = 0
        self.patience = _LOST_IN_A_ROW
        self.attempts: Counter[str] = Counter()
        self.deaths: Counter[str] = Counter()

    def prepare(self) -> bool:
        """Take up what is there; whether anything is missing."""
        self.tally.take_up(self.folder)
        return bool(self.tally.unfinished())

    def make_golden(self, executor: Executor) -> None:
        """The golden run of every training that trials are missing of; each also tries where its cells aim."""
        waiting: dict[str, Task] = {}
        for cells in self.tally.unfinished():
            aims = [cell.plan.trial(0) for cell in cells]
            key = aims[0].training.key
            waiting[key] = Task(f"golden {key}", golden_work(aims[0], aims), processes=_processes(aims[0]))
        due = len(waiting)
        for task in waiting.values():
            executor.submit(task)
        tried: Counter[str] = Counter()
        while waiting:
            self.report(Progress("golden", due - len(waiting), due, seconds=monotonic() - self.began))
            for ended in executor.collect(_WAIT_S):
                key = ended.id.removeprefix("golden ")
                if ended.fate is Fate.DONE and ended.result is not None:
                    golden = read_golden(self.folder.path, key)
                    assert isinstance(golden, Golden), "a golden run that was made is there"
                    self.tally.take_golden(golden)
                    del waiting[key]
                elif ended.fate is Fate.BROKEN or tried[key] + 1 >= _ATTEMPTS:
                    raise StudyError(f"the golden run cannot be made: {ended.reason}")
                else:
                    tried[key] += 1
                    executor.submit(waiting[key])
        # A journal may know trials of a golden run that had to be made again.
        self.tally.take_journal(self.folder.kept(brief=True))

    def run_trials(self, executor: Executor, journal: Journal) -> None:
        """Keep the executor busy until nothing is missing."""
        missing, running = self.tally.missing(), dict[str, Trial]()
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
                    seen = self._seen(ended)
                except StudyError as error:
                    broken = error
                    continue
                if seen is None:
                    again.append(trial)
                else:
                    entries.append(Entry(trial, seen, self.tally.mark(trial)))
            if entries:
                journal.append(entries)
                for entry in entries:
                    self.tally.take(entry)
                    self.ran += 1
            if broken is not None:  # after what has ended well is safe
                raise broken

    def _seen(self, ended: Ended) -> Observation | None:
        """What the end of a task tells of its trial; None: it has to be tried again."""
        if ended.fate is Fate.DONE and ended.result is not None:
            self.in_a_row = 0
            return Observation.from_json(ended.result)
        if ended.fate is Fate.BROKEN:
            raise StudyError(f"trial {ended.id} cannot be run: {ended.reason}")
        if ended.fate is Fate.OVERTIME:
            return Observation(end=End.OVERTIME, reason=ended.reason)
        self.lost += 1
        self.in_a_row += 1
        if self.in_a_row >= self.patience:
            raise StudyError(f"{self.in_a_row} workers were lost one after the other, the last: {ended.reason}")
        self.attempts[ended.id] += 1
        if is_own_doing(ended.reason):
            self.deaths[ended.id] += 1
            if self.deaths[ended.id] > 1:
                return Observation(end=End.CRASHED, reason=ended.reason)
        if self.attempts[ended.id] < _ATTEMPTS:
            return None
        return Observation(end=End.LOST, reason=ended.reason)

    def _limit(self, trial: Trial) -> float:
        """Far beyond what the golden run took; a first trial also loads model and data."""
        cell = next(cell for cell in self.tally.cells if cell.plan.training.key == trial.training.key)
        assert cell.golden is not None
        own = trial.training.timeout_s if isinstance(trial.training, Command) else 0.0
        return max(own + 60, 120 + 20 * cell.golden.observation.seconds)

    def _progress(self, began: float) -> Progress:
        tally = self.tally
        return Progress("trials", tally.done, tally.due, self.lost, monotonic() - began, self.ran)


def _processes(trial: Trial) -> int:
    return 1 if isinstance(trial.training, Command) else trial.training.ranks
