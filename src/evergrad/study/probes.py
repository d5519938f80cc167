"""Probes of a trial: how far a fault spreads, and which guards notice it; they see everything and alter nothing.

`probe_base.py` has the contract, and how ranks learn from each other.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from evergrad.recovery.guard.norms import GradientNorms, MagnitudeHistory, SuspiciousMagnitude
from evergrad.recovery.guard.replicas import DigestTree, GuardSettings, module_of, replica_of
from evergrad.study.probe_base import GUARD_EVERY, ProbeReadings, TrialProbe, TrialProbes, gather_rows
from evergrad.study.trials import Series
from evergrad.training.mechanisms.session import Session

if TYPE_CHECKING:
    from evergrad.study.observe import GoldenTrajectory
    from evergrad.study.trials import Rules

__all__ = ["make_probes"]


def make_probes(session: Session, rules: Rules, trajectory: GoldenTrajectory, steps: int) -> TrialProbes:
    """The watchers that the rules ask for, of a training that will take so many steps; on each of its ranks alike."""
    found: list[TrialProbe] = []
    if "spread" in rules.watch:
        found.append(SpreadProbe(session, trajectory, steps))
    if "guards" in rules.watch:
        found.append(GuardProbe(session, trajectory))
    return TrialProbes(found)


# Guards against silent corruption as they can be asked without letting them act: each only says whether it speaks up.
#
# `norm`, `range` and `replicas` are made of the pieces that `job.guard` is made of, with its settings, and forget at
# a restart what they had seen, as it does. What that guard does then (do the step again, heal, go back) is left out,
# and so is its care for buffers, which needs a neighbour's copy of them. Two more are there to compare with: `non-
# finite`, the check that everybody writes, and `checkpoint range`, which looks once, when a checkpoint is loaded.


class PassiveGuard(ABC):
    """A guard that is asked at three moments. It says whether it speaks up; None: it did not even look."""

    name: str

    def at_load(self) -> bool | None:
        """The checkpoint has been loaded."""
        return None

    def at_gradients(self) -> bool | None:
        """Gradients are reduced, and not applied."""
        return None

    def after_step(self, step: int, loss: Tensor) -> bool | None:
        """That step, counted from 1, is applied."""
        return None


class NormGuard(PassiveGuard):
    """The gradient's norm in every step: not finite, or far beyond the median of the last ones."""

    name = "norm"

    def __init__(self, session: Session, settings: GuardSettings) -> None:
        self._session, self._norms = session, GradientNorms(settings.norm_factor)

    def at_gradients(self) -> bool:
        """A norm that is far off counts for the median all the same: the step is applied, as a job's is in the end."""
        reading = self._norms.read(_gradients(self._session))
        self._norms.applied(reading)
        return reading.is_suspicious


class RangeGuard(PassiveGuard):
    """Parameters at every check: not finite, or far beyond the largest that their tensor had at any check before."""

    name = "range"

    def __init__(self, session: Session, settings: GuardSettings) -> None:
        self._every, self._ranges = settings.every, MagnitudeHistory(settings.range_factor)
        self._parameters = {name: one.detach() for name, one in session.module.named_parameters()}

    def after_step(self, step: int, loss: Tensor) -> bool | None:
        """The first check has nothing to go by, but whether numbers are finite."""
        if step % self._every:
            return None
        found = self._ranges.read(self._parameters)
        self._ranges.accept(found)
        return bool(found)


class ReplicaGuard(PassiveGuard):
    """Digests of parameters and optimizer state at every check, compared over the ranks."""

    name = "replicas"

    def __init__(self, session: Session, settings: GuardSettings) -> None:
        self._session, self._every = session, settings.every

    def after_step(self, step: int, loss: Tensor) -> bool | None:
        """The roots of the digests alone: which tensor it is that differs is another question."""
        if step % self._every:
            return None
        replica = replica_of(self._session.module, [self._session.optimizer])
        root = torch.frombuffer(bytearray(DigestTree(replica.digests()).root), dtype=torch.uint8)
        roots = gather_rows(self._session, root.to(self._session.weights().device))
        return bool((roots != roots[0]).any())


class NonFiniteGuard(PassiveGuard):
    """`torch.isfinite` of gradients and loss in every step."""

    name = "non-finite"

    def __init__(self, session: Session) -> None:
        self._session = session

    def at_gradients(self) -> bool:
        """Each parameter's, one look at the device."""
        finite = [torch.isfinite(one).all() for one in _gradients(self._session)]
        return bool(finite) and not bool(torch.stack(finite).all())

    def after_step(self, step: int, loss: Tensor) -> bool:
        """The loss of the whole batch."""
        return not bool(torch.isfinite(loss))


class CheckpointRangeGuard(PassiveGuard):
    """A checkpoint against what was noted when it was saved: the largest magnitude of each of its tensors."""

    name = "checkpoint range"

    def __init__(self, session: Session, settings: GuardSettings, noted: Mapping[str, float]) -> None:
        self._session, self._ranges = session, MagnitudeHistory(settings.range_factor)
        self._ranges.accept(SuspiciousMagnitude(path, largest, largest) for path, largest in noted.items())

    def at_load(self) -> bool:
        """Parameters, buffers and optimizer state."""
        return bool(self._ranges.read(self._session.state()))


def passive_guards(session: Session, noted: Mapping[str, float]) -> list[PassiveGuard]:
    """All that this training can have: one rank has nobody to compare with. `noted`: with the checkpoint."""
    settings = GuardSettings(every=GUARD_EVERY)
    found: list[PassiveGuard] = [NormGuard(session, settings), RangeGuard(session, settings)]
    if session.ranks > 1:
        found.append(ReplicaGuard(session, settings))
    return [*found, NonFiniteGuard(session), CheckpointRangeGuard(session, settings, noted)]


def _gradients(session: Session) -> list[Tensor]:
    return [one.grad for one in session.module.parameters() if one.grad is not None]


# Which guards speak up in a trial, when, and what they cost.
#
# All of them watch the same trial, so that they are compared on the very same faults; none acts, and training goes
# on, so that it is seen how late a late one is. An alarm is any rank's: ranks learn of each other's at the end.
#
# A guard's seconds are those of rank 0, asked by itself: the median of its looks, times the looks, by all steps. A
# step's own are from the beginning of its forward pass to the end of its update, without the guards that were asked
# meanwhile.

_NEVER = 1 << 62


class GuardProbe(TrialProbe):
    """Asks every guard at each of its moments, and takes the time."""

    def __init__(self, session: Session, trajectory: GoldenTrajectory) -> None:
        self._session = session
        self._guards = passive_guards(session, trajectory.magnitudes)
        self._alarms = {guard.name: _NEVER for guard in self._guards}
        self._seconds: dict[str, dict[int, float]] = {guard.name: {} for guard in self._guards}
        self._step = 0
        self._began = self._asked = 0.0
        self._steps: list[float] = []
        self._hooks: list[RemovableHandle] = []

    def start(self) -> None:
        """From here on the training is hooked."""
        for guard in self._guards:
            self._run_guard(guard.name, guard.at_load)
        session = self._session
        self._hooks = [
            session.module.register_forward_pre_hook(self._before_forward),
            session.optimizer.register_step_pre_hook(self._before_update),
            session.optimizer.register_step_post_hook(self._after_update),
        ]

    def after_step(self, step: int, loss: Tensor) -> None:
        """What is looked at between two steps."""
        for guard in self._guards:
            self._run_guard(guard.name, lambda guard=guard: guard.after_step(step, loss))  # type: ignore[misc]

    def readings(self) -> ProbeReadings:
        """The first alarm of any rank; 0 is at the load. Seconds a step, by guard, and those of the step itself."""
        device = self._session.weights().device
        mine = torch.tensor(list(self._alarms.values()), dtype=torch.int64, device=device)
        first: list[int] = gather_rows(self._session, mine).amin(0).tolist()
        alarms = {name: None if step == _NEVER else step for name, step in zip(self._alarms, first, strict=True)}
        if not self._steps:
            return ProbeReadings(alarms=alarms)
        costs = {"step": (median(self._steps),)}
        for name, looks in self._seconds.items():
            each = median(looks.values()) if looks else 0.0
            costs[f"guard {name}"] = (each * len(looks) / len(self._steps),)
        return ProbeReadings(alarms=alarms, costs=costs)

    def remove_hooks(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _run_guard(self, name: str, question: Callable[[], bool | None]) -> None:
        began = self._now()
        speaks_up = question()
        took = self._now() - began
        self._asked += took
        if speaks_up is None:
            return
        looks = self._seconds[name]
        looks[self._step] = looks.get(self._step, 0.0) + took
        if speaks_up:
            self._alarms[name] = min(self._alarms[name], self._step)

    def _before_forward(self, *_: Any) -> None:
        """A forward pass begins. The last one before an update is the step's."""
        # Hooks run in the order in which they came: a fault in the gradients that was scheduled since must come first.
        self._hooks[1].remove()
        self._hooks[1] = self._session.optimizer.register_step_pre_hook(self._before_update)
        self._began, self._asked = self._now(), 0.0

    def _before_update(self, *_: Any) -> None:
        self._step += 1
        for guard in self._guards:
            self._run_guard(guard.name, guard.at_gradients)

    def _after_update(self, *_: Any) -> None:
        self._steps.append(self._now() - self._began - self._asked)

    def _now(self) -> float:
        device = self._session.weights().device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # or somebody else's work would be taken for the guard's
        return perf_counter()


# How far a fault has come: parameters are compared, bit by bit, with the golden run's at the same step.
#
# Each rank counts the elements that differ in each of its parameters, and the ranks exchange these counts: one small
# message a look. From them come three numbers, each a part of the whole:
#
#     elements   of all parameters of all ranks, those that differ
#     layers     of the model's layers, those in which anything differs on any rank
#     ranks      of the ranks, those in which anything differs
#
# A layer is a module that has parameters of its own, batch normalisation too. A tied parameter belongs to all of its
# layers. Buffers and optimizer state are not compared: what matters of them shows in the parameters a step later.

_MOST_LOOKS = 200
_FIRST = 10
"""Steps that are all looked at, however long the training is: that is where a fault spreads."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SpreadProbe(TrialProbe):
    """Compares with the golden run at its beginning, and after the steps of which its course has kept the weights."""

    def __init__(self, session: Session, trajectory: GoldenTrajectory, steps: int) -> None:
        self._session, self._course = session, trajectory
        self._sizes = [one.numel() for one in session.module.parameters()]
        self._layers: dict[str, list[int]] = {}
        for name, number in session.parameters().items():
            self._layers.setdefault(module_of(name), []).append(number)
        looks = math.ceil(steps / trajectory.every)
        self._thin, self._last = max(1, math.ceil(looks / _MOST_LOOKS)), looks - 1
        self._after: list[int] = []
        self._counts: list[Tensor] = []

    def start(self) -> None:
        """Point 0: a fault in the checkpoint's weights is there, and has not spread."""
        assert self._course.start_weights is not None, "the golden run comes first"
        self._compare(0, self._course.start_weights)

    def after_step(self, step: int, loss: Tensor) -> None:
        """Look, if the course has that step and it is one of those that are looked at."""
        look, between = divmod(step - 1, self._course.every)
        if between == 0 and (step <= _FIRST or look % self._thin == 0 or look == self._last):
            self._compare(step, self._course.weights[look])

    def readings(self) -> ProbeReadings:
        """`after` says after how many steps each of the values was taken."""
        rows: list[list[list[int]]] = torch.stack(self._counts).tolist()
        whole, ranks = sum(self._sizes) * self._session.ranks, self._session.ranks
        elements, layers, hit = list[float](), list[float](), list[float]()
        for row in rows:  # one for each look: ranks x parameters
            elements.append(sum(map(sum, row)) / whole)
            touched = {number for counts in row for number, count in enumerate(counts) if count}
            layers.append(sum(not touched.isdisjoint(numbers) for numbers in self._layers.values()) / len(self._layers))
            hit.append(sum(any(counts) for counts in row) / ranks)
        values = {"after": list(map(float, self._after)), "elements": elements, "layers": layers, "ranks": hit}
        return ProbeReadings(spread={name: Series(1, tuple(numbers)) for name, numbers in values.items()})

    def remove_hooks(self) -> None:
        """Nothing is hooked in."""

    def _compare(self, step: int, reference: Tensor) -> None:
        weights = self._session.weights()
        kind = _BITS[weights.element_size()]  # as whole numbers: a NaN is the same as itself, and 0 is not -0
        differs = weights.view(kind) != reference.view(kind)
        counts = torch.stack([part.count_nonzero() for part in torch.split(differs, self._sizes)])
        self._after.append(step)
        self._counts.append(gather_rows(self._session, counts))
