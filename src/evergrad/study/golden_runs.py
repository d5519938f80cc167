"""Making golden runs: a training without a fault, up to its checkpoint and on from there.

Where a training has several ranks, every one of them is here: rank 0 writes, the others wait until it has.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from evergrad.errors import StudyError, UsageError
from evergrad.formats.durable import fsync
from evergrad.state.paths import split
from evergrad.study.golden import (
    CHECKPOINT,
    Golden,
    digest_file,
    fresh_folder,
    golden_folder,
    keep_golden,
    read_golden,
)
from evergrad.study.observing import Course, observe
from evergrad.study.trials import Command, Observation, Rules, Trial
from evergrad.training.mechanisms import make_session
from evergrad.training.mechanisms.session import Snapshot
from evergrad.training.settings import Training
from evergrad.training.workloads.registry import make_workload
from evergrad.wording import first_line


def made_golden(folder: Path, trial: Trial) -> Golden:
    """The golden run of a trial's training; made, if it is not there."""
    settings, key = trial.training, trial.training.key
    found = read_golden(folder, key)
    meet()  # nobody writes before all have looked
    if found is not None and (golden_folder(folder, key) / found.checkpoint).exists():
        if isinstance(settings, Command):
            from evergrad.study.commands import check_golden

            check_golden(settings, golden_folder(folder, key) / found.checkpoint, found.observation)
        return found
    place = golden_folder(folder, key)
    if is_first():
        fresh_folder(folder, key)
    if isinstance(settings, Command):
        golden = _run_golden(place, settings)
    else:
        golden = _train_golden(place, settings, trial.rules)
    if is_first():
        if (place / golden.checkpoint).is_file():
            fsync(place / golden.checkpoint)
        keep_golden(folder, golden)
    meet()
    return golden


def is_first() -> bool:
    """Whether this process is rank 0, or has no others beside it."""
    return not _is_spread() or torch.distributed.get_rank() == 0


def meet() -> None:
    """Wait for the other ranks, if there are any."""
    if _is_spread():
        torch.distributed.barrier()


def _is_spread() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _run_golden(place: Path, settings: Command) -> Golden:
    from evergrad.study.commands import make_golden
    from evergrad.study.commands.state_files import read_state

    observation, checkpoint = make_golden(settings, place)
    return Golden(
        key=settings.key,
        settings=settings.to_json(),
        observation=observation,
        checkpoint=checkpoint.name,
        digest=read_state(checkpoint, math.inf).digest,
        chance=settings.chance,
        direction=settings.judged_by,
        facts={"workload": settings.command},
    )


def _train_golden(place: Path, training: Training, rules: Rules) -> Golden:
    workload = make_workload(training)
    session = make_session(training, workload)
    while session.epoch < training.checkpoint:
        for number in range(session.steps_per_epoch):
            session.step(number)
    state = session.snapshot()
    if is_first():
        _save(_nested(state), place / CHECKPOINT)
    meet()
    began = perf_counter()
    seen = observe(session, training.epochs, rules, Course.empty(session, training.epochs), golden=True)
    seen = replace(seen, seconds=perf_counter() - began)
    check_sound(training, seen, rules)
    return Golden(
        key=training.key,
        settings=training.to_json(),
        observation=seen,
        checkpoint=CHECKPOINT,
        digest=digest_file(place / CHECKPOINT),
        chance=workload.data.chance,
        direction=workload.judged_by,
        facts={**workload.facts, **workload.data.facts, **_spread(training)},
    )


def check_sound(training: Training, seen: Observation, rules: Rules) -> None:
    """A golden run that is itself beyond the rules can judge nothing."""
    if seen.nonfinite_at is None and seen.extreme_at is None:
        return
    found = (
        f"a non-finite {seen.nonfinite_in}" if seen.nonfinite_in else f"a {seen.extreme_in} beyond {rules.extreme:g}"
    )
    raise UsageError(
        f"the golden run of {training.name} is not sound: it has {found} without any fault. Choose a smaller "
        f"learning_rate (now {training.learning_rate:g}), another precision (now {training.precision}) or a larger "
        "rules.extreme."
    )


def _save(state: dict[str, Any], path: Path) -> None:
    try:
        torch.save(state, path)
    except (OSError, RuntimeError) as error:
        said = first_line(error, 160)
        raise StudyError(f"{path}: the checkpoint cannot be written: {said}. Make room, and run again.") from error


def _spread(training: Training) -> dict[str, str]:
    """Where and on how many ranks it runs, if that is not one process on a CPU."""
    found = {} if training.device == "cpu" else {"device": torch.cuda.get_device_name(training.device)}
    if training.ranks > 1:
        found["ranks"] = f"{training.ranks} of {training.mechanism}, {torch.distributed.get_backend()}"
    return found


def _nested(state: Snapshot) -> dict[str, Any]:
    """As people save it: `{"model": …, "optimizer": {"state": {0: …}}, "epoch": …}`."""
    nested: dict[str, Any] = {"model": {}, "optimizer": {"state": {}}, "epoch": state.epoch}
    for name, tensor in state.tensors.items():
        kind, *rest = split(name)
        if kind == "model":
            (key,) = rest
            nested["model"][key] = tensor.cpu()
        else:
            _, index, slot = rest
            nested["optimizer"]["state"].setdefault(int(index), {})[slot] = tensor.cpu()
    return nested
