"""What a study has found so far: its cells, from the plan and the journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from evergrad.study.outcomes import Outcome
from evergrad.study.trials import Axes, Observation
from evergrad.training.settings import Direction


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
