"""A plan: what is asked, as data. A grid of axes, some trainings in every cell, and what is fixed for all.

    study = "mine"                     # a name
    seed = 1

    [axes]                             # every combination is a cell
    model = ["alexnet", "vgg11"]
    flips = [1, 10, 100]

    [training]                         # the same in every cell: see `Training`
    data = "digits"
    checkpoint = 2                     # epochs before the checkpoint …
    epochs = 1                         # … and after it

    [trial]
    fault = "bitflip"
    where = "role:model"

    [sampling]
    trainings = 50                     # in every cell; without it, what half_width asks for

    [scale.small.training]             # what --scale small changes
    epochs = 3

Any setting of `Training` and of `[trial]` may be an axis. `[when.model.vgg11]` holds what is different for that value
of that axis, `[scale.paper.when.…]` at one scale. A `[command]` table in the place of `[training]` studies any
program: see `Command`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from evergrad.errors import UsageError
from evergrad.records import Json
from evergrad.study.plan_files import PlanText, read_plan_text
from evergrad.study.trials import Axes, Command, Rules, Saving, Thresholds, Trial
from evergrad.training.settings import Training
from evergrad.wording import checked_choice, short_repr

SCALES = ("tiny", "small", "paper")

MOST_TRIALS = 5_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How many trainings a cell gets, and how sure its rate then is."""

    trainings: int | None = None
    """None: as many as `half_width` asks for."""
    half_width: float = 0.05
    """Of the interval of a rate: ±5 %."""
    confidence: float = 0.95
    interval: str = "wilson"
    stop: bool = False
    """Stop a cell when its interval, valid at any time, is narrow enough; `trainings` is then the most."""

    def __post_init__(self) -> None:
        if self.trainings is not None and (type(self.trainings) is not int or not 1 <= self.trainings <= MOST_TRIALS):
            raise UsageError(f"trainings: expected a whole number, 1 or more, found {short_repr(self.trainings)}")
        for name, most in (("half_width", 0.5), ("confidence", 1.0)):
            value = getattr(self, name)
            if type(value) is not float or not 0 < value < most:
                raise UsageError(f"{name}: expected a number between 0 and {most:g}, found {short_repr(value)}")
        checked_choice("interval", self.interval, ("wilson", "clopper-pearson"))
        if type(self.stop) is not bool:
            raise UsageError(f"stop: expected true or false, found {short_repr(self.stop)}")

    @property
    def method(self) -> str:
        """Of the intervals in tables: one that was looked at repeatedly needs one that allows for that."""
        return "anytime" if self.stop else self.interval

    @property
    def max_trainings(self) -> int:
        """Trainings in a cell, at most."""
        if self.trainings is not None:
            return self.trainings
        if self.stop:
            from evergrad.study.statistics import stopping_time

            return stopping_time(0.5, self.half_width, self.confidence)
        from evergrad.study.statistics import sample_size

        return sample_size(self.half_width, self.confidence)


@dataclass(frozen=True, kw_only=True)
class CellPlan:
    """One cell of the grid, and how its trials are made."""

    axes: Axes
    training: Training | Command
    fault: str
    flips: int
    where: str
    layer: str
    corrupt: int
    rules: Rules
    trainings: int
    seed: int
    target: str = "state"
    step: int = 0
    saving: Saving | None = None

    def trial(self, repetition: int) -> Trial:
        """The trial of that number. Its seed comes from the study's and from all that makes this cell what it is, so
        that no two cells draw alike, in this study or in another one."""
        seed = int.from_bytes(_digest(f"{self._drawn_from}, {repetition}]", 7), "big")
        return Trial(
            id=_digest(f"{self._determined_by} {seed}", 8).hex(),
            axes=self.axes,
            repetition=repetition,
            seed=seed,
            training=self.training,
            fault=self.fault,
            flips=self.flips,
            where=self.where,
            layer=self.layer,
            ranks=self.corrupt,
            rules=self.rules,
            target=self.target,
            step=self.step,
            saving=self.saving,
        )

    @cached_property
    def _drawn_from(self) -> str:
        # The same faults on every device: what differs then is what the device makes of them.
        training = replace(self.training, device="cpu") if isinstance(self.training, Training) else self.training
        cell = [
            self.seed,
            training.key,
            self.fault,
            self.flips,
            self.where,
            self.layer,
            self.corrupt,
            *self._seed_extras,
        ]
        return json.dumps(cell)[:-1]

    @cached_property
    def _determined_by(self) -> str:
        aim = [self.fault, self.flips, self.where, self.layer, self.corrupt, *self._seed_extras]
        return json.dumps([self.training.key, *aim, self.rules.to_json()], sort_keys=True)

    @property
    def _seed_extras(self) -> list[Json]:
        """What else makes the cell what it is; nothing for a fault in a checkpoint, as it was before there was more."""
        found: list[Json] = [] if (self.target, self.step) == ("state", 0) else [self.target, self.step]
        return found if self.saving is None else [*found, self.saving.to_json()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A checked plan at one scale."""

    study: str
    title: str
    question: str
    source: str
    differs: str
    scale: str
    seed: int
    rows: str
    columns: str
    axes: Mapping[str, tuple[str | int | float, ...]]
    sampling: Sampling
    thresholds: Thresholds
    rules: Rules
    cells: tuple[CellPlan, ...]
    text: str
    """The TOML that it was read from."""
    base: str = ""
    """The folder that paths in it start from."""
    name: str = ""
    """The gallery's name of it, or the path of its file."""
    overrides: Mapping[str, Json] = field(default_factory=dict)
    """The settings that replaced those of the text: `device`, `trainings`, `seed`."""

    @classmethod
    def read(
        cls,
        name_or_path: str | Path,
        *,
        scale: str | None = None,
        trials_per_cell: int | None = None,
        seed: int | None = None,
        device: str | None = None,
    ) -> Plan:
        """Read a study of the gallery or a TOML file; `trials_per_cell`, `seed`, `device` replace its own.

        >>> Plan.read("bitflip-nev", scale="tiny", trials_per_cell=3).trials
        36
        """
        if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", device):
            raise UsageError(f"device: expected cpu, cuda or cuda:1, found {short_repr(device)}")
        given: dict[str, Json] = {"device": device, "trainings": trials_per_cell, "seed": seed}
        overrides = {key: value for key, value in given.items() if value is not None}
        return cls.of(read_plan_text(name_or_path), scale, overrides)

    @classmethod
    def of(
        cls,
        source: PlanText,
        scale: str | None = None,
        overrides: Mapping[str, Json] | None = None,
        *,
        check_files: bool = True,
    ) -> Plan:
        """Check a plan at a scale; `overrides` come from outside: `device`, `trainings`, `seed`.

        Without `check_files` a study can be looked at where its program is not.
        """
        from evergrad.study.plan_reader import PlanReader

        return PlanReader(source, scale, overrides or {}, check_files).plan()

    @property
    def trials(self) -> int:
        """Of all cells, at most."""
        return sum(cell.trainings for cell in self.cells)

    def by_training(self) -> dict[str, list[CellPlan]]:
        """Cells that share a golden run, in the plan's order."""
        found: dict[str, list[CellPlan]] = {}
        for cell in self.cells:
            found.setdefault(cell.training.key, []).append(cell)
        return found


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=size).digest()
