"""Making golden runs: a training without a fault, up to its checkpoint and on from there.

Where a training has several ranks, every one of them is here: rank 0 writes, the others wait until it has.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from evergrad._digest import digest_file
from evergrad._files import fsync_path
from evergrad.errors import StudyError, UsageError
from evergrad.formats import open_checkpoint
from evergrad.injection.faults import fault_of
from evergrad.injection.live_faults import LiveState, PreparedFault
from evergrad.records import Role
from evergrad.state.paths import split
from evergrad.study.golden import CHECKPOINT, GoldenRun, golden_folder, make_empty_folder, read_golden, write_golden
from evergrad.study.observe import GoldenTrajectory, observe
from evergrad.study.target_selection import select_targets
from evergrad.study.trials import Command, Observation, Rules, Trial
from evergrad.training.mechanisms import make_session
from evergrad.training.mechanisms.session import Session, TrainingSnapshot
from evergrad.training.settings import Training
from evergrad.training.workloads.registry import make_workload
from evergrad.wording import first_line


def ensure_golden(folder: Path, trial: Trial) -> GoldenRun:
    """The golden run of a trial's training; made, if it is not there."""
    settings, key = trial.training, trial.training.key
    found = read_golden(folder, key)
    wait_for_ranks()  # nobody writes before all have looked
    if found is not None and (golden_folder(folder, key) / found.checkpoint).exists():
        if isinstance(settings, Command):
            from evergrad.study.external_training import check_golden

            check_golden(settings, golden_folder(folder, key) / found.checkpoint, found.observation)
        return found
    place = golden_folder(folder, key)
    if is_rank_zero():
        make_empty_folder(folder, key)
    if isinstance(settings, Command):
        golden = _run_golden(place, settings)
    else:
        golden = _train_golden(place, settings, trial.rules)
    if is_rank_zero():
        if (place / golden.checkpoint).is_file():
            fsync_path(place / golden.checkpoint)
        write_golden(folder, golden)
    wait_for_ranks()
    return golden


def is_rank_zero() -> bool:
    """Whether this process is rank 0, or has no others beside it."""
    return not _is_spread() or torch.distributed.get_rank() == 0


def wait_for_ranks() -> None:
    """Wait for the other ranks, if there are any."""
    if _is_spread():
        torch.distributed.barrier()


def _is_spread() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _run_golden(place: Path, settings: Command) -> GoldenRun:
    from evergrad.study.external_training import make_golden, read_state

    observation, checkpoint = make_golden(settings, place)
    return GoldenRun(
        key=settings.key,
        settings=settings.to_json(),
        observation=observation,
        checkpoint=checkpoint.name,
        digest=read_state(checkpoint, math.inf).digest,
        chance=settings.chance,
        direction=settings.judged_by,
        facts={"workload": settings.command},
    )


def _train_golden(place: Path, training: Training, rules: Rules) -> GoldenRun:
    workload = make_workload(training)
    session = make_session(training, workload)
    while session.epoch < training.checkpoint:
        for number in range(session.steps_per_epoch):
            session.step(number)
    state = session.snapshot()
    if is_rank_zero():
        _save(_nested(state), place / CHECKPOINT)
    wait_for_ranks()
    began = perf_counter()
    seen = observe(session, training.epochs, rules, GoldenTrajectory.empty(session, training.epochs), golden=True)
    seen = replace(seen, seconds=perf_counter() - began)
    check_sound(training, seen, rules)
    return GoldenRun(
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


def _nested(state: TrainingSnapshot) -> dict[str, Any]:
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


# Trainings that a worker keeps loaded between trials.
#
# A worker trusts nobody's golden run blindly: before its first trial it repeats the run from the checkpoint, which
# also gives the weights that distances are taken from. One that does not get the same bits (another processor,
# another version of torch) refuses, because its trials could not be judged.

_KEPT = 4
"""Trainings that a worker keeps loaded."""
_ROLES = {"weights": Role.MODEL, "buffers": Role.BUFFER, "optimizer": Role.OPTIMIZER}


@dataclass(slots=True)
class LoadedTraining:
    """A training that is loaded, proven to repeat its golden run, and ready for trials."""

    session: Session
    reset: Callable[[], None]
    trajectory: GoldenTrajectory
    golden: GoldenRun
    live_state: LiveState
    prepared_faults: dict[tuple[str, ...], PreparedFault] = field(default_factory=dict)

    def prepared_fault(self, trial: Trial) -> PreparedFault:
        """What this trial's faults may hit; the same for all trials of a cell."""
        key = (trial.fault, trial.where, trial.layer, trial.target)
        if key not in self.prepared_faults:
            self.prepared_faults[key] = PreparedFault(self.live_state, fault_of(trial.fault), self.target_names(trial))
        return self.prepared_faults[key]

    def target_names(self, trial: Trial) -> list[str]:
        """The tensors of the state that this trial's faults may hit."""
        tensors = self.live_state.tensors
        names = select_targets(tensors, trial.where, trial.layer, self.session.parameters())
        if (role := _ROLES.get(trial.target)) is not None:
            names = [name for name in names if tensors[name].role is role]
            if not names:
                raise UsageError(f"where {trial.where!r}: selects nothing of the target, {trial.target}")
        if self.session.ranks > 1 and any(tensors[name].role is Role.BUFFER for name in names):
            raise UsageError(
                f"where {trial.where!r}: selects buffers, and DDP broadcasts rank 0's before every forward pass, which "
                "erases a fault on any other rank. Select role:model or role:optimizer."
            )
        return names


_loaded_trainings: OrderedDict[tuple[str, str], LoadedTraining] = OrderedDict()


def load_training(folder: Path, training: Training, rules: Rules) -> LoadedTraining:
    """The loaded training; loads it, and repeats its golden run, if it is not loaded yet."""
    place = (str(folder), training.key)
    if place in _loaded_trainings:
        _loaded_trainings.move_to_end(place)
        return _loaded_trainings[place]
    golden = read_golden(folder, training.key)
    if golden is None:
        raise StudyError(f"{golden_folder(folder, training.key)}: the golden run is missing. Run the study again.")
    while len(_loaded_trainings) >= _KEPT:
        _loaded_trainings.popitem(last=False)
    workload = make_workload(training)
    if workload.judged_by is not golden.direction:
        place_of = golden_folder(folder, training.key)
        raise StudyError(
            f"workload {training.name}: its metric is {workload.judged_by.value}, the golden run was recorded as "
            f"{golden.direction.value}. Remove {place_of} and run the study again; its trials stay as they are."
        )
    session = make_session(training, workload)
    session.restore(read_snapshot(golden_folder(folder, training.key), golden, session))
    take_up = session.make_reset()
    trajectory = GoldenTrajectory.empty(session, training.epochs)
    # Twice, the second time as trials do: what is left over from the first would show.
    for number in range(2):
        take_up()
        again = observe(session, training.epochs, rules, trajectory, golden=number == 0)
        check_sound(training, again, rules)
        if session.rank == 0:  # the golden run is rank 0's; what another rank does otherwise, its gradients tell it
            _check_repeated(training, again, golden.observation, "" if number == 0 else "once more ")
    parameters = session.parameters()
    roles = {name: Role.MODEL if name in parameters else Role.BUFFER for name in session.state() if _is_model(name)}
    _loaded_trainings[place] = LoadedTraining(session, take_up, trajectory, golden, LiveState(session.state(), roles))
    return _loaded_trainings[place]


def _is_model(name: str) -> bool:
    return name.startswith("model/")


def _check_repeated(training: Training, again: Observation, golden: Observation, when: str) -> None:
    if (again.digest, again.metrics) == (golden.digest, golden.metrics):
        return
    hint = (
        "Something in model, optimizer or data outlives a training: keep it in parameters or buffers."
        if when
        else "Use one kind of machine, one version of torch and one device for a study, or choose another folder."
    )
    raise StudyError(
        f"this worker does not repeat the golden run of {training.name} {when}: it ends with metric "
        f"{again.metrics[-1]:.6g} and weights {again.digest[:8]}, the golden run with {golden.metrics[-1]:.6g} and "
        f"{golden.digest[:8]}. {hint}"
    )


def read_snapshot(place: Path, golden: GoldenRun, session: Session) -> TrainingSnapshot:
    """The checkpoint of a golden run, as this session takes it up."""
    path = place / golden.checkpoint
    if digest_file(path) != golden.digest:
        raise StudyError(f"{path}: is not the checkpoint of its golden run any more. Remove {place} and run again.")
    with open_checkpoint(path) as ck:
        tensors = {name: ck.read(name) for name in session.state()}
    epoch = golden.settings["checkpoint"]
    assert isinstance(epoch, int)
    return TrainingSnapshot(epoch, tensors)
