"""The `[trial]` of a cell: its keys checked, by themselves and against each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evergrad.errors import UsageError
from evergrad.injection.faults import fault_of
from evergrad.study.plan_files import Found, PlanText
from evergrad.study.trials import PASSING, SAVINGS, TARGETS, Axes, Command, Saving
from evergrad.training.settings import Training
from evergrad.wording import checked_choice, shown

_SAVING = ["saving", "save_every", "restarts"]
TRIAL_KEYS = ["fault", "flips", "where", "layer", "corrupt", "target", "step", *_SAVING]

_TEXTS = ("fault", "where", "layer", "target", "saving")
_STATE = {"state": "role:model", "weights": "role:model", "buffers": "role:buffer", "optimizer": "role:optimizer"}
"""What of the state a target means, where the plan does not say it."""


def check_aim(source: PlanText, aim: Mapping[str, Any], found: Found) -> None:
    """Every key of `[trial]` by itself."""
    for name in _TEXTS:
        if not isinstance(aim.get(name, ""), str):
            source.fail(found[name][1], f"{name}: expected a text, found {shown(aim[name])}")
    value = aim.get("flips", 1)
    if type(value) is not int or not 1 <= value < 1 << 40:
        source.fail(found["flips"][1], f"flips: expected a whole number, 1 or more, found {shown(value)}")
    for name in ("corrupt", "step", "save_every"):
        value = aim.get(name, 0)
        if type(value) is not int or not 0 <= value < 1 << 40:
            source.fail(found[name][1], f"{name}: expected a whole number, 0 or more, found {shown(value)}")
    for name, allowed in (("target", TARGETS), ("saving", SAVINGS)):
        if name in aim:
            try:
                checked_choice(name, aim[name], allowed)
            except UsageError as error:
                source.fail(found[name][1], str(error))
    if type(aim.get("restarts", False)) is not bool:
        source.fail(found["restarts"][1], f"restarts: expected true or false, found {shown(aim['restarts'])}")
    if "fault" in aim:
        try:
            fault_of(aim["fault"])
        except UsageError as error:
            source.fail(found["fault"][1], str(error))


def check_moment(source: PlanText, aim: Mapping[str, Any], found: Found, *, is_command: bool) -> None:
    """What a program of the user's own, or what is in no checkpoint, cannot be asked for."""
    for name, usual in (("target", "state"), ("step", 0), *((key, None) for key in _SAVING)):
        if is_command and name in aim and aim[name] != usual:
            source.fail(found[name][1], f"{name}: of a command only the checkpoint file can be hit")
    target = aim.get("target")
    if aim.get("layer") and target in PASSING:
        expected = "goes with state, weights, buffers or optimizer"
        source.fail(found["layer"][1], f"layer: {expected}; of {target} say where")


def corrupt_of(source: PlanText, aim: Mapping[str, Any], made: Training | Command, found: Found, cell: Axes) -> int:
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
