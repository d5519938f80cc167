"""The `[training]` or `[command]` of a cell, from the values that a plan has for it."""

from __future__ import annotations

from typing import Any

from evergrad.errors import UsageError
from evergrad.study.plan_files import Found
from evergrad.study.trials import Command
from evergrad.training.mechanisms import MECHANISMS
from evergrad.training.settings import Direction, Training
from evergrad.training.workloads.registry import check_fit
from evergrad.wording import checked_choice, listed, shown

_MOST_RANKS = 128


def training_of(found: Found, base: str) -> Training:
    """Checked, as far as that goes without torch; `UsageError` begins with the key that is wrong."""
    training = Training(**{name: value for name, (value, _) in found.items()}, base=base)
    checked_choice("mechanism", training.mechanism, MECHANISMS)
    if training.mechanism == "single" and training.ranks != 1:
        raise UsageError(f"ranks: the mechanism 'single' has 1, found {training.ranks}")
    if training.mechanism == "ddp" and training.ranks > _MOST_RANKS:
        raise UsageError(f"ranks: expected at most {_MOST_RANKS}, which one machine runs, found {training.ranks}")
    if training.mechanism == "ddp" and training.device.startswith("cuda:"):
        raise UsageError(f"device: ranks of ddp find their own GPUs, expected cuda, found {shown(training.device)}")
    if training.mechanism == "ddp" and training.batch_size % training.ranks:
        raise UsageError(
            f"batch_size: expected a multiple of the {training.ranks} ranks, which share a batch, "
            f"found {training.batch_size}"
        )
    if not training.workload:
        check_fit(training.model, training.data)
    return training


def command_of(found: Found, base: str, check_files: bool) -> Command:
    """Checked; with `check_files` what it names has to be there."""
    from evergrad.study.commands import check_command

    values: dict[str, Any] = {name: value for name, (value, _) in found.items()}
    if "command" not in values:
        raise UsageError('command: expected one such as "python train.py --resume {checkpoint}", found none')
    for name, value in values.items():
        if name in ("chance", "timeout_s"):
            if type(value) not in (int, float):
                raise UsageError(f"{name}: expected a number, found {shown(value)}")
            values[name] = float(value)
        elif not isinstance(value, str):
            expected = listed([*Direction]) if name == "direction" else "a text"
            raise UsageError(f"{name}: expected {expected}, found {shown(value)}")
    if "direction" in values:
        checked_choice("direction", values["direction"], [*Direction])
    command = Command(**values, base=base)
    if check_files:
        check_command(command)
    return command
