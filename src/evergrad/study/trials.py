"""Trials and what is observed of them: the records that travel to workers, and back into the journal."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, TypeAlias

from evergrad.errors import UsageError
from evergrad.records import Json
from evergrad.training.settings import Direction, Training, direction_by_name
from evergrad.wording import checked_choice, short_repr

Axes: TypeAlias = "Mapping[str, str | int | float]"

TARGETS = ("state", "weights", "buffers", "optimizer", "gradients", "activations", "communication")
"""What a fault may hit: `state` is whatever `where` selects of weights, buffers and optimizer state."""
TRANSIENT_TARGETS = ("gradients", "activations", "communication")
"""Of those, what lives for one step and is in no checkpoint."""
SAVING_STRATEGIES = ("none", "root", "evergrad")
"""How a training may be saved on its way: see `saving.strategies`."""
PROBES = ("spread", "guards")
"""What else may be looked at in every step."""

_MOST_POINTS = 200
_COUNTS = ("steps", "nonfinite_at", "extreme_at", "mismatches", "predictions", "injected", "changed", "places")


class TrialEnd(StrEnum):
    """How a trial's training ended; what that means is the outcome's matter."""

    FINISHED = "finished"
    ABANDONED = "abandoned"
    """By a declared rule: what was seen decides the outcome already."""
    CRASHED = "crashed"
    """The training itself raised an error, or its process died of it."""
    OVERTIME = "overtime"
    LOST = "lost"
    """Its worker was lost for reasons of ours: nothing is known, and the trial runs again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Any training at all: a program that goes on from a checkpoint file and prints what it measures."""

    command: str
    """Goes on from `{checkpoint}`; with `{output}` it also writes the final state there."""
    checkpoint: str = ""
    """A clean checkpoint that exists; otherwise `prepare` writes one to `{checkpoint}`."""
    prepare: str = ""
    metric: str = "accuracy"
    """The key in JSON lines on stdout, or `pattern:` and a regular expression whose first group is the number."""
    direction: str = ""
    """The metric's direction, `higher_is_better` or `lower_is_better`. Empty: by its name, see `direction_by_name`."""
    loss: str = "loss"
    chance: float | None = None
    timeout_s: float = 0.0
    """0: ten times the golden run and a minute."""
    folder: str = "."
    """Where it is started, from `base` on."""
    base: str = ""
    """The plan's own folder; where that is makes no other training."""

    @property
    def key(self) -> str:
        """A short name for exactly these settings; the direction judges a run, and makes no other one."""
        told = {name: value for name, value in self.to_json().items() if name not in ("base", "direction")}
        return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=8).hexdigest()

    @property
    def judged_by(self) -> Direction:
        """The metric's direction, as given or by its name."""
        return Direction(self.direction) if self.direction else direction_by_name(self.metric)

    def to_json(self) -> dict[str, Json]:
        """Every setting by its name."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What is looked for while a training runs."""

    extreme: float = 1e10
    """A number in state, loss or outputs beyond this is extreme."""
    abandon: tuple[str, ...] = ("non-finite",)
    """Of `non-finite` and `extreme`: seeing it ends the trial."""
    watch: tuple[str, ...] = ()
    """Of `PROBES`: what else is looked at in every step, and takes its time."""

    def to_json(self) -> dict[str, Json]:
        """As `from_json` reads it; a trial that watches nothing more has the id that it always had."""
        told: dict[str, Json] = {"extreme": self.extreme, "abandon": list(self.abandon)}
        return {**told, "watch": list(self.watch)} if self.watch else told

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Rules:
        """Back from `to_json`."""
        return cls(extreme=float(told["extreme"]), abandon=tuple(told["abandon"]), watch=tuple(told.get("watch", ())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A training that is saved on its way, and perhaps restarted from what was saved: what that costs."""

    strategy: str
    """Of `SAVING_STRATEGIES`."""
    every: int = 0
    """Steps between two saves; 0: one at the end of each epoch."""
    restarts: bool = False
    """Whether all ranks are killed after every epoch, and new ones go on from what was saved."""

    def to_json(self) -> dict[str, Json]:
        """Every setting by its name."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One training of a study: from the checkpoint, with a fault."""

    id: str
    """A digest of everything below but the cell's axes: the same trial has the same id in every study."""
    axes: Axes
    """Which cell it belongs to."""
    repetition: int
    seed: int
    training: Training | Command
    fault: str
    """As `evergrad.injection.faults` reads it: `bitflip:bits=exponent`."""
    flips: int
    where: str = "role:model"
    layer: str = ""
    """A layer of the model, or `first`, `middle`, `last`; empty: all that `where` chooses."""
    ranks: int = 1
    """How many ranks are hit: which ones is drawn, and each has faults of its own."""
    rules: Rules = field(default_factory=Rules)
    target: str = "state"
    """Of `TARGETS`."""
    step: int = 0
    """After the checkpoint, from 0: state is hit before it, the rest while it runs."""
    saving: Saving | None = None
    """Of trials that measure what saving costs; they have no fault."""

    def to_json(self) -> dict[str, Json]:
        """As workers get it."""
        told: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        kind = "command" if isinstance(self.training, Command) else "training"
        told |= {"axes": dict(self.axes), "rules": self.rules.to_json(), "training": None}
        told["training"] = {"kind": kind, **self.training.to_json()}
        told["saving"] = None if self.saving is None else self.saving.to_json()
        return told

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Trial:
        """Back from `to_json`."""
        values = dict(told)
        training = dict(values["training"])
        kind = training.pop("kind")
        values["training"] = Command(**training) if kind == "command" else Training.from_json(training)
        values["rules"] = Rules.from_json(values["rules"])
        saving = values.get("saving")
        values["saving"] = None if saving is None else Saving(**saving)
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Series:
    """Numbers step by step, or of every so-manyth step where there are many."""

    every: int = 1
    values: tuple[float, ...] = ()

    @classmethod
    def of(cls, numbers: Sequence[float], every: int = 1) -> Series:
        """Thinned to a few hundred; the first is always kept."""
        thin = max(1, math.ceil(len(numbers) / _MOST_POINTS))
        return cls(every * thin, tuple(numbers[::thin]))

    def to_json(self) -> dict[str, Json]:
        """Numbers with six digits: what is compared exactly is compared elsewhere."""
        return {"every": self.every, "values": [_told(float(f"{value:.6g}")) for value in self.values]}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Series:
        """Back from `to_json`."""
        return cls(int(told["every"]), tuple(float(value) for value in told["values"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What was seen of one training after its checkpoint."""

    end: TrialEnd
    reason: str = ""
    steps: int = 0
    metrics: tuple[float, ...] = ()
    """At the restart, and after each epoch."""
    losses: Series = Series()
    distances: Series = Series()
    """Of the weights from the golden run's at the same step: Euclidean."""
    magnitudes: Series = Series()
    """The largest |number| in the state."""
    nonfinite_at: int | None = None
    """The first step after which a NaN or an infinity was seen; 0: at the restart."""
    nonfinite_in: str = ""
    """`state`, `loss`, `output` or `metric`."""
    extreme_at: int | None = None
    extreme_in: str = ""
    digest: str = ""
    """Of the model at the end, if it finished."""
    mismatches: int | None = None
    """Test samples of which the model says something else, at the restart, than the golden run's does there."""
    predictions: int = 0
    """Test samples in all."""
    injected: int = 0
    changed: int = 0
    """Faults that changed a bit."""
    places: int = 0
    """Bits that the faults could have hit."""
    seconds: float = 0.0
    spread: Mapping[str, Series] = field(default_factory=dict)
    """How far the fault has come, as parts of all `elements`, `layers` and `ranks`, `after` which steps; if watched."""
    alarms: Mapping[str, int | None] = field(default_factory=dict)
    """The first step after which each guard spoke up, from 1, or 0: at the load; None: it did not. If watched."""
    costs: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Seconds, by what took them: of trials that measure costs."""

    def to_json(self) -> dict[str, Json]:
        """NaN and infinities as texts; what was not watched is left out."""
        told: dict[str, Json] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, Mapping):
                if value:
                    told[one.name] = {name: _plain(part) for name, part in value.items()}
            elif isinstance(value, Series):
                told[one.name] = value.to_json()
            elif isinstance(value, tuple):
                told[one.name] = [_told(number) for number in value]
            else:
                told[one.name] = str(value) if isinstance(value, TrialEnd) else value
        return told

    @classmethod
    def from_json(cls, told: Mapping[str, Any], *, brief: bool = False) -> Observation:
        """Back from `to_json`, in brief without series; KeyError, TypeError or ValueError if it is something else."""
        values = dict(told)
        for name in ("losses", "distances", "magnitudes"):
            values[name] = Series() if brief else Series.from_json(values[name])
        values["spread"] = {str(name): Series.from_json(one) for name, one in values.get("spread", {}).items()}
        values["costs"] = {
            str(name): tuple(float(number) for number in numbers) for name, numbers in values.get("costs", {}).items()
        }
        values["alarms"] = {
            str(name): None if step is None else int(step) for name, step in values.get("alarms", {}).items()
        }
        values["metrics"] = tuple(float(value) for value in values["metrics"])
        values["end"] = TrialEnd(values["end"])
        found = cls(**values)
        for one in fields(cls):
            value = getattr(found, one.name)
            if one.name in _COUNTS and not (value is None or (type(value) is int and value >= 0)):
                raise ValueError(f"{one.name} {value!r}")
            if one.type == "str" and not isinstance(value, str):
                raise ValueError(f"{one.name} {value!r}")
        if type(found.seconds) not in (int, float):
            raise ValueError(f"seconds {found.seconds!r}")
        return found


def _plain(value: Series | tuple[float, ...] | int | None) -> Json:
    if isinstance(value, Series):
        return value.to_json()
    return [_told(number) for number in value] if isinstance(value, tuple) else value


def _told(value: float) -> Json:
    return value if math.isfinite(value) else str(value)


# What a trial's observation means: one outcome, the first of a scale that applies; thresholds are stated.


class Outcome(StrEnum):
    """A trial's verdict against the golden run, the worst first."""

    NEV = "nev"
    """A NaN, an infinity or an extreme value was seen in state, loss or outputs."""
    FAILED = "failed"
    """It stayed finite and crashed, never finished, or ended at chance level."""
    DEGRADED = "degraded"
    """It finished, with a metric worse than the golden run's by more than the margin."""
    CHANGED = "changed"
    """It finished with another result, and none of the above applies."""
    IDENTICAL = "identical"
    """It finished with the golden run's result."""
    UNKNOWN = "unknown"
    """Its worker was lost for reasons of ours; it runs again."""


OUTCOMES_WORST_FIRST = tuple(Outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Where one outcome ends and the next begins; every table says them."""

    margin: float = 0.02
    """Degraded: the metric is worse than the golden run's by more than this; its direction says which way that is."""
    chance: float = 0.05
    """At chance level: the metric is not better than guessing by more than this, and the golden run's is."""
    result: str = "metric"
    """What makes a training identical: the final `metric`, as the published studies compare, or every bit of the
    final `weights`."""

    def __post_init__(self) -> None:
        for name in ("margin", "chance"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                raise UsageError(f"{name}: expected a number, 0 or more, found {short_repr(value)}")
        checked_choice("result", self.result, ("metric", "weights"))

    def to_json(self) -> dict[str, Json]:
        """Every threshold by its name."""
        return asdict(self)


def judge(
    seen: Observation,
    golden: Observation,
    thresholds: Thresholds | None = None,
    *,
    chance: float | None = None,
    direction: Direction = Direction.HIGHER,
) -> Outcome:
    """The verdict on what was seen, against the golden run and the metric of one who guesses."""
    limits = thresholds or Thresholds()
    sign = direction.sign
    if seen.end is TrialEnd.LOST:
        return Outcome.UNKNOWN
    if seen.nonfinite_at is not None or seen.extreme_at is not None:
        return Outcome.NEV
    if seen.end in (TrialEnd.CRASHED, TrialEnd.OVERTIME) or not seen.metrics:
        return Outcome.FAILED
    final, reference = seen.metrics[-1], golden.metrics[-1]
    if not math.isfinite(final):
        return Outcome.NEV
    if chance is not None and sign * final <= sign * chance + limits.chance < sign * reference:
        return Outcome.FAILED
    if sign * final < sign * reference - limits.margin:
        return Outcome.DEGRADED
    if limits.result == "weights" and seen.digest != golden.digest:
        return Outcome.CHANGED
    # Without training the result is what the model says, sample by sample.
    inferred = len(golden.metrics) == 1 and bool(seen.mismatches)
    return Outcome.CHANGED if final != reference or inferred else Outcome.IDENTICAL


# What the words for a process's end tell of the trial that it was at.

_DEADLY = re.compile(r"SIG(SEGV|BUS|FPE|ILL|ABRT)")


def crashed_by_itself(how: str) -> bool:
    """Whether a process died of what it did itself: twice in the same trial, and it is the fault's doing.

    >>> crashed_by_itself("rank 1 ended with SIGSEGV"), crashed_by_itself("rank 1 ended with SIGKILL")
    (True, False)
    """
    return _DEADLY.search(how) is not None


# The tasks that a study gives to workers, as JSON.


def golden_work(trial: Trial, aims: Sequence[Trial]) -> dict[str, Json]:
    """Make the golden run of a trial's training, and try where these trials aim."""
    return {"kind": "golden", "trial": trial.to_json(), "aims": [one.to_json() for one in aims]}


def replay_work(trial: Trial) -> dict[str, Json]:
    """Run one trial, and tell every fault of it."""
    return {"kind": "replay", "trial": trial.to_json()}


def trial_work(trial: Trial) -> dict[str, Json]:
    """Run one trial."""
    return {"kind": "trial", "trial": trial.to_json()}
