"""From a plan's text to its cells: every table and key checked, and the line of a wrong one named."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from evergrad.errors import UsageError
from evergrad.injection.faults import fault_of
from evergrad.records import Json
from evergrad.study.plan import MOST_TRIALS, CellPlan, Plan, Sampling
from evergrad.study.plan_files import LocatedValues, PlanText
from evergrad.study.trials import (
    PROBES,
    SAVING_STRATEGIES,
    TARGETS,
    TRANSIENT_TARGETS,
    Axes,
    Command,
    Rules,
    Saving,
    Thresholds,
)
from evergrad.training.mechanisms import MECHANISMS
from evergrad.training.settings import Direction, Training
from evergrad.training.workloads.registry import check_fit
from evergrad.wording import checked_choice, did_you_mean, join_with_or, short_repr

# The `[training]` or `[command]` of a cell, from the values that a plan has for it.

_MOST_RANKS = 128


def training_of(found: LocatedValues, base: str) -> Training:
    """Checked, as far as that goes without torch; `UsageError` begins with the key that is wrong."""
    training = Training(**{name: value for name, (value, _) in found.items()}, base=base)
    checked_choice("mechanism", training.mechanism, MECHANISMS)
    if training.mechanism == "single" and training.ranks != 1:
        raise UsageError(f"ranks: the mechanism 'single' has 1, found {training.ranks}")
    if training.mechanism == "ddp" and training.ranks > _MOST_RANKS:
        raise UsageError(f"ranks: expected at most {_MOST_RANKS}, which one machine runs, found {training.ranks}")
    if training.mechanism == "ddp" and training.device.startswith("cuda:"):
        raise UsageError(
            f"device: ranks of ddp find their own GPUs, expected cuda, found {short_repr(training.device)}"
        )
    if training.mechanism == "ddp" and training.batch_size % training.ranks:
        raise UsageError(
            f"batch_size: expected a multiple of the {training.ranks} ranks, which share a batch, "
            f"found {training.batch_size}"
        )
    if not training.workload:
        check_fit(training.model, training.data)
    return training


def command_of(found: LocatedValues, base: str, check_files: bool) -> Command:
    """Checked; with `check_files` what it names has to be there."""
    from evergrad.study.external_training import check_command

    values: dict[str, Any] = {name: value for name, (value, _) in found.items()}
    if "command" not in values:
        raise UsageError('command: expected one such as "python train.py --resume {checkpoint}", found none')
    for name, value in values.items():
        if name in ("chance", "timeout_s"):
            if type(value) not in (int, float):
                raise UsageError(f"{name}: expected a number, found {short_repr(value)}")
            values[name] = float(value)
        elif not isinstance(value, str):
            expected = join_with_or([*Direction]) if name == "direction" else "a text"
            raise UsageError(f"{name}: expected {expected}, found {short_repr(value)}")
    if "direction" in values:
        checked_choice("direction", values["direction"], [*Direction])
    command = Command(**values, base=base)
    if check_files:
        check_command(command)
    return command


# The `[trial]` of a cell: its keys checked, by themselves and against each other.

_SAVING = ["saving", "save_every", "restarts"]
TRIAL_KEYS = ["fault", "flips", "where", "layer", "corrupt", "target", "step", *_SAVING]

_TEXTS = ("fault", "where", "layer", "target", "saving")
_STATE = {"state": "role:model", "weights": "role:model", "buffers": "role:buffer", "optimizer": "role:optimizer"}
"""What of the state a target means, where the plan does not say it."""


def check_aim(source: PlanText, aim: Mapping[str, Any], found: LocatedValues) -> None:
    """Every key of `[trial]` by itself."""
    for name in _TEXTS:
        if not isinstance(aim.get(name, ""), str):
            source.fail(found[name][1], f"{name}: expected a text, found {short_repr(aim[name])}")
    value = aim.get("flips", 1)
    if type(value) is not int or not 1 <= value < 1 << 40:
        source.fail(found["flips"][1], f"flips: expected a whole number, 1 or more, found {short_repr(value)}")
    for name in ("corrupt", "step", "save_every"):
        value = aim.get(name, 0)
        if type(value) is not int or not 0 <= value < 1 << 40:
            source.fail(found[name][1], f"{name}: expected a whole number, 0 or more, found {short_repr(value)}")
    for name, allowed in (("target", TARGETS), ("saving", SAVING_STRATEGIES)):
        if name in aim:
            try:
                checked_choice(name, aim[name], allowed)
            except UsageError as error:
                source.fail(found[name][1], str(error))
    if type(aim.get("restarts", False)) is not bool:
        source.fail(found["restarts"][1], f"restarts: expected true or false, found {short_repr(aim['restarts'])}")
    if "fault" in aim:
        try:
            fault_of(aim["fault"])
        except UsageError as error:
            source.fail(found["fault"][1], str(error))


def check_moment(source: PlanText, aim: Mapping[str, Any], found: LocatedValues, *, is_command: bool) -> None:
    """What a program of the user's own, or what is in no checkpoint, cannot be asked for."""
    for name, usual in (("target", "state"), ("step", 0), *((key, None) for key in _SAVING)):
        if is_command and name in aim and aim[name] != usual:
            source.fail(found[name][1], f"{name}: of a command only the checkpoint file can be hit")
    target = aim.get("target")
    if aim.get("layer") and target in TRANSIENT_TARGETS:
        expected = "goes with state, weights, buffers or optimizer"
        source.fail(found["layer"][1], f"layer: {expected}; of {target} say where")


def corrupt_of(
    source: PlanText, aim: Mapping[str, Any], made: Training | Command, found: LocatedValues, cell: Axes
) -> int:
    """How many ranks are hit; no more than there are."""
    count, ranks = int(aim.get("corrupt", 1)), made.ranks if isinstance(made, Training) else 1
    at = found["corrupt"][1] if "corrupt" in found else ("trial", "corrupt")
    if count == 0 and isinstance(made, Command):
        source.fail(at, "corrupt: expected 1, since a command has one process, found 0")
    if count > ranks:
        text = ", ".join(f"{name} {value}" for name, value in cell.items())
        source.fail(at, f"impossible cell ({text}): corrupt {count} of {ranks}: there are not so many ranks")
    return count


def where_of(aim: Mapping[str, Any], *, is_command: bool) -> str:
    """What may be hit: as the plan says, or as its target means; of a command, all of the file."""
    usual = "" if is_command else _STATE.get(aim.get("target", "state"), "")
    return str(aim.get("where", usual))


def saving_of(aim: Mapping[str, Any]) -> Saving | None:
    """What a trial that measures costs is to do; None: it has a fault."""
    if "saving" not in aim:
        return None
    return Saving(
        strategy=str(aim["saving"]), every=int(aim.get("save_every", 0)), restarts=bool(aim.get("restarts", False))
    )


_TOP = ("study", "title", "question", "source", "differs", "seed", "rows", "columns")
_TABLES = ("axes", "training", "command", "trial", "rules", "thresholds", "sampling", "when", "scale")
_TRAINING = [one.name for one in fields(Training) if one.name != "base"]
_COMMAND = [one.name for one in fields(Command) if one.name != "base"]


class PlanReader:
    """One plan being checked, at one scale."""

    def __init__(
        self, source: PlanText, scale: str | None, overrides: Mapping[str, Json], check_files: bool = True
    ) -> None:
        self.source, self.overrides, self.check_files = source, overrides, check_files
        scales = [str(name) for name in source.table("scale")]
        source.check_keys((), [*_TOP, *_TABLES])
        for name in scales:
            source.check_keys(
                ("scale", name), ["axes", "training", "command", "trial", "rules", "thresholds", "sampling", "when"]
            )
        if scale is None:
            scale = "" if not scales else "tiny" if "tiny" in scales else scales[0]
        elif scale not in scales:
            hint = did_you_mean(scale, scales)
            raise UsageError(f"{source.name}: scale: expected {join_with_or(scales)}, found {short_repr(scale)}.{hint}")
        self.scale = scale

    def plan(self) -> Plan:
        """The whole of it."""
        axes = self._axes()
        sampling: Sampling = self._settings("sampling", Sampling)
        rules = self._rules()
        cells = tuple(self._cells(axes, sampling, rules))
        thresholds: Thresholds = self._settings("thresholds", Thresholds)
        silent = any(isinstance(cell.training, Command) and "{output}" not in cell.training.command for cell in cells)
        if thresholds.result == "weights" and silent:
            self.source.fail(("thresholds", "result"), "result: weights can be compared if the command has {output}")
        self._check_distinct(cells)
        keys = list(axes)
        varying = [name for name, values in axes.items() if len(values) > 1] or keys
        total = sum(cell.trainings for cell in cells)
        if total > MOST_TRIALS:
            self.source.fail(("axes",), f"the grid has {total:,} trials: expected at most {MOST_TRIALS:,}")
        return Plan(
            study=self._text("study", required=True),
            title=self._text("title") or self._text("study"),
            question=" ".join(self._text("question").split()),
            source=self._text("source"),
            differs=" ".join(self._text("differs").split()),
            scale=self.scale,
            seed=self._seed(),
            rows=(rows := self._axis("rows", keys, "flips" if "flips" in varying else varying[0] if varying else "")),
            columns=self._axis("columns", keys, _across([name for name in varying if name != rows])),
            axes=axes,
            sampling=sampling,
            thresholds=thresholds,
            rules=rules,
            cells=cells,
            text=self.source.text,
            base=self.source.base,
            name=self.source.name,
            overrides=self.overrides,
        )

    def _check_distinct(self, cells: Sequence[CellPlan]) -> None:
        """No two cells are the same trials under two names."""
        seen: dict[str, CellPlan] = {}
        for cell in cells:
            other = seen.setdefault(cell.trial(0).id, cell)
            if other is not cell:
                self.source.fail(("axes",), f"the cells {dict(other.axes)} and {dict(cell.axes)} are the same trials")

    def _text(self, key: str, *, required: bool = False) -> str:
        value = self.source.values.get(key, "")
        if not isinstance(value, str) or (required and not value):
            self.source.fail((key,), f"{key}: expected a text, found {short_repr(value) if value else 'none'}")
        return str(value)

    def _seed(self) -> int:
        value: Any = self.overrides.get("seed", self.source.values.get("seed", 0))
        if type(value) is not int or not 0 <= value < 1 << 63:
            self.source.fail(("seed",), f"seed: expected a whole number, 0 or more, found {short_repr(value)}")
        return value

    def _axis(self, key: str, known: list[str], default: str) -> str:
        value = self._text(key) or default
        if value and known and value not in known:
            hint = did_you_mean(value, known)
            self.source.fail((key,), f"{key}: expected an axis ({', '.join(known)}), found {short_repr(value)}.{hint}")
        return value

    def _merged(self, table: str) -> dict[str, tuple[Any, tuple[str, ...]]]:
        """Each key of a table, and of the scale's: its value, and where it is written."""
        found: dict[str, tuple[Any, tuple[str, ...]]] = {
            key: (value, (table, key)) for key, value in self.source.table(table).items()
        }
        if self.scale:
            for key, value in self.source.table("scale", self.scale, table).items():
                found[key] = (value, ("scale", self.scale, table, key))
        return found

    def _only(self, table: str, known: list[str]) -> None:
        self.source.check_keys((table,), known)
        for scale in self.source.table("scale"):
            self.source.check_keys(("scale", scale, table), known)

    def _settings(self, table: str, kind: type[Any]) -> Any:
        """A settings object out of a table; its own complaint gets the line of the key that it begins with."""
        self._only(table, [one.name for one in fields(kind)])
        found = self._merged(table)
        if table == "sampling" and "trainings" in self.overrides:
            found["trainings"] = (self.overrides["trainings"], (table, "trainings"))
        values = {key: float(value) if _is_real(value, key) else value for key, (value, _) in found.items()}
        return self._made(lambda: kind(**values), found, (table,))

    def _made(self, make: Any, found: LocatedValues, table: tuple[str, ...]) -> Any:
        try:
            return make()
        except UsageError as error:
            key = str(error).partition(":")[0].split("=")[0].split()[0]
            self.source.fail(found[key][1] if key in found else table, str(error))

    def _rules(self) -> Rules:
        self._only("rules", ["extreme", "abandon", "watch"])
        found = self._merged("rules")
        extreme, at = found.get("extreme", (1e10, ("rules",)))
        if type(extreme) not in (int, float) or not 0 < extreme < math.inf:
            self.source.fail(at, f"extreme: expected a number above 0, found {short_repr(extreme)}")
        abandon, at = found.get("abandon", (["non-finite"], ("rules",)))
        self._check_words("abandon", abandon, ("non-finite", "extreme"), at)
        watch, at = found.get("watch", ([], ("rules",)))
        self._check_words("watch", watch, PROBES, at)
        return Rules(extreme=float(extreme), abandon=tuple(abandon), watch=tuple(watch))

    def _check_words(self, name: str, value: Any, known: Sequence[str], at: tuple[str, ...]) -> None:
        """A list of words that are known."""
        wrong = [str(one) for one in value if one not in known] if isinstance(value, list) else [""]
        if wrong:
            expected = " and ".join(repr(one) for one in known)
            hint = f".{did_you_mean(wrong[0], known)}" if wrong[0] else ""
            self.source.fail(at, f"{name}: expected a list of {expected}, found {short_repr(value)}{hint}")

    def _axes(self) -> dict[str, tuple[str | int | float, ...]]:
        settings = _COMMAND if self._is_command() else _TRAINING
        known = [*TRIAL_KEYS, *settings]
        self._only("axes", known)
        found: dict[str, tuple[str | int | float, ...]] = {}
        for name, (values, at) in self._merged("axes").items():
            if not isinstance(values, list) or not values:
                self.source.fail(at, f"{name}: expected a list of values, found {short_repr(values)}")
            for value in values:
                if type(value) not in (str, int, float):
                    self.source.fail(at, f"{name}: expected texts or numbers, found {short_repr(value)}")
            if len(set(values)) < len(values):
                self.source.fail(at, f"{name}: every value once, found {short_repr(values)}")
            found[name] = tuple(values)
        return found

    def _is_command(self) -> bool:
        if "command" in self.source.values and "training" in self.source.values:
            self.source.fail(("command",), "a plan has [command] or [training], not both")
        return "command" in self.source.values

    def _cells(
        self, axes: Mapping[str, tuple[str | int | float, ...]], sampling: Sampling, rules: Rules
    ) -> Iterator[CellPlan]:
        base = "command" if self._is_command() else "training"
        settings = _COMMAND if base == "command" else _TRAINING
        self._only(base, settings)
        self._only("trial", TRIAL_KEYS)
        fixed, trial = self._merged(base), self._merged("trial")
        most, seed = sampling.max_trainings, self._seed()
        clean: set[str] = set()
        for place in itertools.product(*axes.values()):
            cell = dict(zip(axes, place, strict=True))
            given = {name: (value, self._place_of(name)) for name, value in cell.items()}
            found = fixed | trial | self._special(cell, settings) | given
            aim = {name: found.pop(name)[0] for name in TRIAL_KEYS if name in found}
            check_aim(self.source, aim, fixed | trial | given)
            check_moment(self.source, aim, fixed | trial | given, is_command=base == "command")
            made = self._trained(base, found)
            corrupt, saving = corrupt_of(self.source, aim, made, given, cell), saving_of(aim)
            if corrupt == 0 and saving is None:
                # Without a fault it is one and the same run, whatever else the axes say, and however often.
                if made.key in clean:
                    continue
                clean.add(made.key)
            yield CellPlan(
                axes=cell or {"flips": int(aim.get("flips", 1))},
                training=made,
                fault=str(aim.get("fault", "bitflip")),
                flips=0 if saving is not None else int(aim.get("flips", 1)),
                where=where_of(aim, is_command=base == "command"),
                layer=str(aim.get("layer", "")),
                corrupt=corrupt,
                rules=rules,
                trainings=most if corrupt or saving is not None else 1,
                seed=seed,
                target=str(aim.get("target", "state")),
                step=int(aim.get("step", 0)),
                saving=saving,
            )

    def _trained(self, base: str, found: LocatedValues) -> Training | Command:
        """What a cell trains, from the values that it has."""
        made: Training | Command
        if base == "command":
            made = self._made(lambda: command_of(found, self.source.base, self.check_files), found, (base,))
        else:
            if "device" in self.overrides:
                found = {**found, "device": (self.overrides["device"], (base,))}
            made = self._made(lambda: training_of(found, self.source.base), found, (base,))
        return made

    def _place_of(self, axis: str) -> tuple[str, ...]:
        """Where the values of an axis are written."""
        return ("scale", self.scale, "axes", axis) if self._in_scale(axis) else ("axes", axis)

    def _in_scale(self, axis: str) -> bool:
        return bool(self.scale) and axis in self.source.table("scale", self.scale, "axes")

    def _special(self, cell: Axes, settings: list[str]) -> dict[str, tuple[Any, tuple[str, ...]]]:
        """What `[when.<axis>.<value>]` says for this cell; the scale's own comes last."""
        found: dict[str, tuple[Any, tuple[str, ...]]] = {}
        homes = [("when",), ("scale", self.scale, "when")] if self.scale else [("when",)]
        for home in homes:
            for axis in self.source.table(*home):
                known = [*TRIAL_KEYS, *settings]
                if axis not in known:
                    hint = f"{did_you_mean(axis, known)} Allowed: {', '.join(known)}"
                    self.source.fail((*home, axis), f"unknown axis {short_repr(axis)} in [{'.'.join(home)}].{hint}")
                for value in self.source.table(*home, axis):
                    place = (*home, axis, value)
                    self.source.check_keys(place, settings)
                    if str(cell.get(axis)) == value:
                        found |= {key: (one, (*place, key)) for key, one in self.source.table(*place).items()}
        return found


def _is_real(value: Any, key: str) -> bool:
    return type(value) is int and key in ("half_width", "confidence", "margin", "chance")


def _across(others: list[str]) -> str:
    return "model" if "model" in others else others[-1] if others else ""
