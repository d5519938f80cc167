"""Trainings that a worker keeps loaded between trials.

A worker trusts nobody's golden run blindly: before its first trial it repeats the run from the checkpoint, which also
gives the weights that distances are taken from. One that does not get the same bits (another processor, another
version of torch) refuses, because its trials could not be judged.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from evergrad.errors import StudyError, UsageError
from evergrad.formats import open_checkpoint
from evergrad.injection.faults import fault_of
from evergrad.injection.live_faults import Aim, LiveState
from evergrad.records import Role
from evergrad.study.aiming import aimed_at
from evergrad.study.golden import Golden, digest_file, golden_folder, read_golden
from evergrad.study.golden_runs import check_sound
from evergrad.study.observing import Course, observe
from evergrad.study.trials import Observation, Rules, Trial
from evergrad.training.mechanisms import make_session
from evergrad.training.mechanisms.session import Session, Snapshot
from evergrad.training.settings import Training
from evergrad.training.workloads.registry import make_workload

_KEPT = 4
"""Trainings that a worker keeps loaded."""
_ROLES = {"weights": Role.MODEL, "buffers": Role.BUFFER, "optimizer": Role.OPTIMIZER}


@dataclass(slots=True)
class Warm:
    """A training that is loaded, proven to repeat its golden run, and ready for trials."""

    session: Session
    take_up: Callable[[], None]
    course: Course
    golden: Golden
    live: LiveState
    aims: dict[tuple[str, ...], Aim] = field(default_factory=dict)

    def aim(self, trial: Trial) -> Aim:
        """What this trial's faults may hit; the same for all trials of a cell."""
        key = (trial.fault, trial.where, trial.layer, trial.target)
        if key not in self.aims:
            self.aims[key] = Aim(self.live, fault_of(trial.fault), self.names(trial))
        return self.aims[key]

    def names(self, trial: Trial) -> list[str]:
        """The tensors of the state that this trial's faults may hit."""
        tensors = self.live.tensors
        names = aimed_at(tensors, trial.where, trial.layer, self.session.parameters())
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


_warm: OrderedDict[tuple[str, str], Warm] = OrderedDict()


def warm(folder: Path, training: Training, rules: Rules) -> Warm:
    """The loaded training; loads it, and repeats its golden run, if it is not loaded yet."""
    place = (str(folder), training.key)
    if place in _warm:
        _warm.move_to_end(place)
        return _warm[place]
    golden = read_golden(folder, training.key)
    if golden is None:
        raise StudyError(f"{golden_folder(folder, training.key)}: the golden run is missing. Run the study again.")
    while len(_warm) >= _KEPT:
        _warm.popitem(last=False)
    workload = make_workload(training)
    if workload.judged_by is not golden.direction:
        place_of = golden_folder(folder, training.key)
        raise StudyError(
            f"workload {training.name}: its metric is {workload.judged_by.value}, the golden run was recorded as "
            f"{golden.direction.value}. Remove {place_of} and run the study again; its trials stay as they are."
        )
    session = make_session(training, workload)
    session.restore(read_snapshot(golden_folder(folder, training.key), golden, session))
    take_up = session.remember()
    course = Course.empty(session, training.epochs)
    # Twice, the second time as trials do: what is left over from the first would show.
    for number in range(2):
        take_up()
        again = observe(session, training.epochs, rules, course, golden=number == 0)
        check_sound(training, again, rules)
        if session.rank == 0:  # the golden run is rank 0's; what another rank does otherwise, its gradients tell it
            _check_repeated(training, again, golden.observation, "" if number == 0 else "once more ")
    parameters = session.parameters()
    roles = {name: Role.MODEL if name in parameters else Role.BUFFER for name in session.state() if _is_model(name)}
    _warm[place] = Warm(session, take_up, course, golden, LiveState(session.state(), roles))
    return _warm[place]


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


def read_snapshot(place: Path, golden: Golden, session: Session) -> Snapshot:
    """The checkpoint of a golden run, as this session takes it up."""
    path = place / golden.checkpoint
    if digest_file(path) != golden.digest:
        raise StudyError(f"{path}: is not the checkpoint of its golden run any more. Remove {place} and run again.")
    with open_checkpoint(path) as ck:
        tensors = {name: ck.read(name) for name in session.state()}
    epoch = golden.settings["checkpoint"]
    assert isinstance(epoch, int)
    return Snapshot(epoch, tensors)
