"""What a study has found so far: its cells, from the plan and the journal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from evergrad.study.folder import JournalContents, JournalEntry, StudyFolder
from evergrad.study.golden import GoldenRun, read_golden
from evergrad.study.plan import CellPlan, Plan
from evergrad.study.trials import OUTCOMES_WORST_FIRST, Axes, Command, Observation, Outcome, Trial, TrialEnd, judge
from evergrad.training.settings import Direction

if TYPE_CHECKING:
    from evergrad.study.table_formats import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The trials that have the same place on every axis."""

    axes: Axes
    due: int
    """Trials that the plan asks for; fewer where the study stopped when it knew enough."""
    counts: Mapping[Outcome, int]
    """How many trainings ended how; outcomes that none had are 0."""
    golden: float
    """The golden run's final metric."""
    golden_start: float
    """The golden run's metric at the restart."""
    direction: Direction = Direction.HIGHER
    """The direction of the metric."""
    starts: tuple[float, ...] = ()
    """Metric at the restart, of each training that has one."""
    finals: tuple[float, ...] = ()
    """Final metric of the trainings that finished finite, in the order of repetitions."""
    mismatches: tuple[float, ...] = ()
    """The part of test samples of which the restored model says something else than the golden one, each training."""
    nonfinite: int = 0
    """Of the trainings with N-EV, those in which a NaN or an infinity was seen; in the others, extreme values alone."""
    places: int = 0
    """Bits that a fault of this cell could have hit: what is sampled from."""
    interval: tuple[float, float] = (0.0, 1.0)
    """Of the rate of N-EV."""
    seen: tuple[Observation, ...] = ()
    """What was seen of each training, where more than its course was watched: spread, alarms or costs."""

    @property
    def trainings(self) -> int:
        """Those with a verdict, `unknown` included."""
        return sum(self.counts.values())

    @property
    def known(self) -> int:
        """Those whose outcome is known: what rates are taken over."""
        return self.trainings - self.counts[Outcome.UNKNOWN]

    @property
    def changed_result(self) -> int:
        """RWC: every known outcome but `identical`."""
        return self.known - self.counts[Outcome.IDENTICAL]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """A study's cells, and everything that tables have to say beside the numbers."""

    study: str
    title: str
    source: str
    """The published study whose shape this is, or nothing."""
    scale: str
    trials: int
    """Due."""
    cells: tuple[Cell, ...]
    axes: tuple[str, ...]
    """The names of the axes that vary, in the plan's order."""
    rows: str = "flips"
    """The axis that goes down the published table."""
    columns: str = "model"
    """The axis that goes across it."""
    confidence: float = 0.95
    interval: str = "wilson"
    """`wilson`, `clopper-pearson`, or `anytime` for a study that may stop when it knows enough."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Seed, commit, width, data, thresholds, what differs from the paper: by name, in the order of printing."""
    notes: tuple[str, ...] = ()
    """What a reader must know: damaged lines in the journal, cells that are not complete."""

    def table(self, kind: str | None = None) -> Table:
        """One table: see `evergrad.study.tables.study_table`."""
        from evergrad.study.tables import study_table

        return study_table(self, kind)


# From a plan and a journal to cells: which trials are due, what became of them, when a cell knows enough.

_LOOK_EVERY = 10
"""Trainings of a cell between two looks at whether it knows enough."""


@dataclass(slots=True)
class CellProgress:
    """One cell while its trials come in."""

    plan: CellPlan
    golden: GoldenRun | None = None
    entries: dict[int, JournalEntry] = field(default_factory=dict)
    """By repetition."""
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    enough_at: int | None = None
    """After how many trainings the cell knew enough."""
    _prefix: int = 0
    _nev: int = 0
    _unknown: int = 0

    @property
    def due(self) -> int:
        """How many trainings it gets: as planned, or as many as it took to know enough."""
        return self.plan.trainings if self.enough_at is None else min(self.enough_at, self.plan.trainings)

    @property
    def direction(self) -> Direction:
        """Return the metric's direction: a command's from the plan, a workload's from the record of its golden run."""
        if isinstance(self.plan.training, Command):
            return self.plan.training.judged_by
        return Direction.HIGHER if self.golden is None else self.golden.direction

    def add_trial(self, entry: JournalEntry, plan: Plan) -> None:
        """Count a trial of this cell."""
        assert self.golden is not None, "the golden run comes first"
        number = entry.trial.repetition
        self._unknown -= self.outcomes.get(number) is Outcome.UNKNOWN
        self.entries[number] = entry
        self.outcomes[number] = judge(
            entry.observation,
            self.golden.observation,
            plan.thresholds,
            chance=self.golden.chance,
            direction=self.direction,
        )
        self._unknown += self.outcomes[number] is Outcome.UNKNOWN
        if plan.sampling.stop:
            self._check_precision(plan)

    def _check_precision(self, plan: Plan) -> None:
        """Only trials without a gap before them count here: what ends early must not be heard first."""
        from evergrad.study.statistics import is_precise_enough

        while self.enough_at is None and self.outcomes.get(self._prefix, Outcome.UNKNOWN) is not Outcome.UNKNOWN:
            self._nev += self.outcomes[self._prefix] is Outcome.NEV
            self._prefix += 1
            at_look = self._prefix % _LOOK_EVERY == 0
            sampling = plan.sampling
            if at_look and is_precise_enough([(self._nev, self._prefix)], sampling.half_width, sampling.confidence):
                self.enough_at = self._prefix

    def counted(self) -> list[int]:
        """The repetitions that count. Those that were under way when the cell knew enough do not: how many there were,
        and which ended first, is chance of another kind."""
        return [number for number in sorted(self.outcomes) if number < self.due]

    def counts(self) -> dict[Outcome, int]:
        """How many trainings ended how."""
        found = dict.fromkeys(OUTCOMES_WORST_FIRST, 0)
        for number in self.counted():
            found[self.outcomes[number]] += 1
        return found

    @property
    def known(self) -> int:
        """Trainings that count, and whose outcome is known."""
        return len(self.outcomes) - self._unknown if self.enough_at is None else self.due


@dataclass(slots=True)
class StudyProgress:
    """A study while its trials come in."""

    plan: Plan
    cells: list[CellProgress]
    by_axes: dict[str, CellProgress]
    planned: int = 0
    """Trials of the journal that the plan has."""
    other_golden: int = 0
    """Of those, trials that began with another golden run."""

    @classmethod
    def of(cls, plan: Plan) -> StudyProgress:
        """With nothing in it."""
        cells = [CellProgress(cell) for cell in plan.cells]
        return cls(plan, cells, {_key(cell.plan.axes): cell for cell in cells})

    def add_golden(self, golden: GoldenRun) -> None:
        """The golden run of every cell with these settings."""
        for cell in self.cells:
            if cell.plan.training.key == golden.key:
                cell.golden = golden

    def add_journal(self, kept: JournalContents) -> None:
        """What is there already; trials that are not (or no longer) planned are passed over."""
        self.planned = self.other_golden = 0
        for cell in self.cells:
            if cell.golden is None:
                continue
            for number in range(cell.plan.trainings):
                trial = cell.plan.trial(number)
                entry = kept.entries.get(trial.id)
                if entry is None:
                    continue
                self.planned += 1
                if entry.golden == cell.golden.run_id:
                    cell.add_trial(JournalEntry(trial, entry.observation, entry.golden), self.plan)
                else:
                    self.other_golden += 1

    def read_folder(self, study: StudyFolder, *, brief: bool = True) -> JournalContents:
        """Golden runs and journal of a folder; what the journal holds, in brief without what was seen step by step."""
        for key in self.plan.by_training():
            if (golden := read_golden(study.path, key)) is not None:
                self.add_golden(golden)
        kept = study.journal_contents(brief=brief)
        self.add_journal(kept)
        return kept

    def add_trial(self, entry: JournalEntry) -> None:
        """A trial that has just ended."""
        self.by_axes[_key(entry.trial.axes)].add_trial(entry, self.plan)

    def golden_run_id(self, trial: Trial) -> str:
        """Of the golden run that a trial begins with."""
        golden = self.by_axes[_key(trial.axes)].golden
        assert golden is not None, "the golden run comes first"
        return golden.run_id

    def missing(self) -> Iterator[Trial]:
        """The trials that are due and not known, lazily: cells in turn, one training after the other."""
        for cells in self._by_training():
            for number in range(max(cell.plan.trainings for cell in cells)):
                for cell in cells:
                    if number < cell.due and cell.outcomes.get(number, Outcome.UNKNOWN) is Outcome.UNKNOWN:
                        yield cell.plan.trial(number)

    def unfinished(self) -> list[list[CellProgress]]:
        """Cells that trials are missing of, by their training."""
        found = ([cell for cell in cells if _is_open(cell)] for cells in self._by_training())
        return [cells for cells in found if cells]

    @property
    def due(self) -> int:
        """Trials in all."""
        return sum(cell.due for cell in self.cells)

    @property
    def done(self) -> int:
        """Trials with a verdict that is known."""
        return sum(cell.known for cell in self.cells)

    def _by_training(self) -> list[list[CellProgress]]:
        found: dict[str, list[CellProgress]] = {}
        for cell in self.cells:
            found.setdefault(cell.plan.training.key, []).append(cell)
        return list(found.values())


def results_of(folder: Path) -> Results:
    """What the study in a folder has found so far."""
    return results_from(*study_progress(folder))


def study_progress(folder: Path, *, brief: bool = True) -> tuple[StudyProgress, JournalContents]:
    """The trials of the study in a folder, counted, and its journal, in brief without what was seen step by step."""
    study = StudyFolder(folder)
    progress = StudyProgress.of(study.plan())
    return progress, progress.read_folder(study, brief=brief)


def results_from(progress: StudyProgress, kept: JournalContents) -> Results:
    """What a tally says, beside what its journal says of itself."""
    from evergrad.study.provenance import facts_of

    plan = progress.plan
    open_cells = sum(_is_open(cell) for cell in progress.cells)
    notes = [*kept.damaged]
    if progress.other_golden:
        notes.append(f"{progress.other_golden} trials began with another golden run: they do not count, and run again")
    if len(kept.entries) > progress.planned and all(cell.golden for cell in progress.cells):
        notes.append(
            f"{len(kept.entries) - progress.planned} trials in the journal are not, or no longer, of this plan"
        )
    if open_cells:
        notes.append(f"not complete: {open_cells} of {len(progress.cells)} cells have trials to come")
    return Results(
        study=plan.study,
        title=plan.title,
        source=plan.source,
        scale=plan.scale,
        trials=progress.due,
        cells=tuple(_cell(cell, plan) for cell in progress.cells),
        axes=tuple(name for name, values in plan.axes.items() if len(values) > 1) or tuple(plan.axes),
        rows=plan.rows,
        columns=plan.columns,
        confidence=plan.sampling.confidence,
        interval=plan.sampling.method,
        facts=facts_of(plan, _golden_runs(progress), kept.runs),
        notes=tuple(notes),
    )


def _golden_runs(progress: StudyProgress) -> list[GoldenRun]:
    found = {cell.golden.key: cell.golden for cell in progress.cells if cell.golden is not None}
    return list(found.values())


def _cell(progress: CellProgress, plan: Plan) -> Cell:
    counted = progress.counted()
    seen = [progress.entries[number].observation for number in counted]
    known = [one for one in seen if one.end is not TrialEnd.LOST]
    counts = progress.counts()
    golden = progress.golden.observation.metrics if progress.golden is not None else (float("nan"),)
    finished = [
        progress.entries[number].observation.metrics[-1]
        for number in counted
        if progress.outcomes[number] not in (Outcome.NEV, Outcome.UNKNOWN)
        and progress.entries[number].observation.end is TrialEnd.FINISHED
        and progress.entries[number].observation.metrics
    ]
    return Cell(
        axes={
            **progress.plan.axes,
            "flips": progress.plan.flips,
            **({"step": progress.plan.step} if progress.plan.step else {}),
        },
        due=progress.due,
        counts=counts,
        golden=golden[-1],
        golden_start=golden[0],
        direction=progress.direction,
        starts=tuple(one.metrics[0] for one in known if one.metrics),
        finals=tuple(finished),
        mismatches=tuple(
            one.mismatches / one.predictions for one in known if one.mismatches is not None and one.predictions
        ),
        nonfinite=sum(one.nonfinite_at is not None for one in known),
        places=max((one.places for one in known), default=0),
        interval=_interval(counts, plan),
        seen=tuple(one for one in known if one.spread or one.alarms or one.costs),
    )


def _interval(counts: Mapping[Outcome, int], plan: Plan) -> tuple[float, float]:
    hits, known = counts[Outcome.NEV], sum(counts.values()) - counts[Outcome.UNKNOWN]
    if plan.sampling.stop:
        from evergrad.study.statistics import anytime_interval

        return anytime_interval(hits, known, plan.sampling.confidence)
    from evergrad.study.statistics import proportion_interval

    return proportion_interval(hits, known, plan.sampling.confidence, plan.sampling.interval)


def _is_open(cell: CellProgress) -> bool:
    return any(cell.outcomes.get(number, Outcome.UNKNOWN) is Outcome.UNKNOWN for number in range(cell.due))


def _key(axes: Mapping[str, str | int | float]) -> str:
    return repr(sorted(axes.items()))
