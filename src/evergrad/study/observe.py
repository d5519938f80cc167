"""Watching a training after its checkpoint: step by step, against the golden run's own course."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from evergrad._digest import digest_labelled
from evergrad.errors import EvergradError
from evergrad.recovery.guard.norms import magnitudes
from evergrad.study.probe_base import TrialProbes
from evergrad.study.probes import make_probes
from evergrad.study.trials import Observation, Rules, Series, TrialEnd
from evergrad.training.mechanisms.session import Evaluation, Session

_TRAJECTORY_BYTES = 256 << 20
"""What a golden run's weights, step by step, may take in a worker's memory."""
_LOOK_EVERY = 16
"""Steps between two looks at what is still on a GPU: a look waits for it."""


@dataclass(slots=True)
class GoldenTrajectory:
    """The golden run's weights along its way, and what its model said at the restart."""

    every: int = 1
    """Steps between two that are kept: more than one where all would not fit into memory."""
    weights: list[Tensor] = field(default_factory=list)
    start_evaluation: Evaluation | None = None
    start_weights: Tensor | None = None
    """The weights at the restart."""
    magnitudes: dict[str, float] = field(default_factory=dict)
    """The largest |number| of each tensor at the restart."""

    @classmethod
    def empty(cls, session: Session, epochs: int) -> GoldenTrajectory:
        """To be filled by the golden run."""
        weights = session.weights()
        size = weights.numel() * weights.element_size() * session.steps_per_epoch * epochs * session.ranks
        return cls(every=max(1, math.ceil(size / _TRAJECTORY_BYTES)))


def observe(
    session: Session,
    epochs: int,
    rules: Rules,
    trajectory: GoldenTrajectory,
    *,
    golden: bool = False,
) -> Observation:
    """Let the session train on from where it stands; the golden run fills the course that trials are compared with."""
    look = _Recording(session, rules, trajectory, golden)
    steps = epochs * session.steps_per_epoch
    with TrialProbes() if golden else make_probes(session, rules, trajectory, steps) as probes:
        return _observe_steps(session, epochs, trajectory, look, probes, golden)


class TrainingFailed(Exception):
    """The training has raised an error; what was seen before it."""

    def __init__(self, seen: Observation) -> None:
        super().__init__("the training has raised an error")
        self.observation = seen


def _observe_steps(
    session: Session, epochs: int, trajectory: GoldenTrajectory, look: _Recording, probes: TrialProbes, golden: bool
) -> Observation:
    probes.start()
    start = session.evaluate()
    if golden:
        trajectory.start_evaluation = start
        trajectory.start_weights, trajectory.magnitudes = session.weights().clone(), magnitudes(session.state())
    assert trajectory.start_evaluation is not None, "the golden run comes first"
    mismatches = int((start.predictions != trajectory.start_evaluation.predictions).sum())
    metrics = [start.metric]
    look.check_output(start)
    look.check_state(session.magnitude())
    try:
        _train(session, epochs, look, probes, metrics)
    except EvergradError:
        raise
    except Exception as error:
        told = look.observed_fields
        raise TrainingFailed(
            Observation(end=TrialEnd.CRASHED, metrics=tuple(metrics), mismatches=mismatches, **told)
        ) from error
    look.fetch()
    watched = probes.readings()
    finished = look.steps == epochs * session.steps_per_epoch and not look.should_stop
    return Observation(
        end=TrialEnd.FINISHED if finished else TrialEnd.ABANDONED,
        reason="" if finished else look.stop_reason,
        metrics=tuple(metrics),
        **look.observed_fields,
        digest=digest_of(session) if finished else "",
        mismatches=mismatches,
        predictions=start.predictions.numel(),
        spread=watched.spread,
        alarms=watched.alarms,
        costs=watched.costs,
    )


def _train(session: Session, epochs: int, look: _Recording, probes: TrialProbes, metrics: list[float]) -> None:
    for _ in range(epochs):
        if look.should_stop:
            return
        for number in range(session.steps_per_epoch):
            loss = session.step(number)
            probes.after_step(look.steps + 1, loss)
            if look.after_step(loss):
                return
        seen = session.evaluate()
        look.check_output(seen)
        metrics.append(seen.metric)


def digest_of(session: Session) -> str:
    """Of the model's parameters and buffers, by name and bits."""
    return digest_labelled((name.encode(), one) for name, one in session.state().items() if name.startswith("model/"))


class _Recording:
    """What has been seen so far. Numbers stay on the device until somebody has to know."""

    def __init__(self, session: Session, rules: Rules, trajectory: GoldenTrajectory, golden: bool) -> None:
        self.losses: list[float] = []
        self.magnitudes: list[float] = []
        self.distances: list[float] = []
        self.nonfinite: tuple[int | None, str] = (None, "")
        self.extreme: tuple[int | None, str] = (None, "")
        self.steps = 0
        self._session, self._rules, self._course, self._golden = session, rules, trajectory, golden
        self._unfetched: list[Tensor] = []
        self._every = 1 if session.weights().device.type == "cpu" else _LOOK_EVERY

    @property
    def observed_fields(self) -> dict[str, Any]:
        """As an observation has it."""
        return {
            "steps": self.steps,
            "losses": Series.of(self.losses),
            "distances": Series.of(self.distances, self._course.every),
            "magnitudes": Series.of(self.magnitudes),
            "nonfinite_at": self.nonfinite[0],
            "nonfinite_in": self.nonfinite[1],
            "extreme_at": self.extreme[0],
            "extreme_in": self.extreme[1],
        }

    @property
    def should_stop(self) -> bool:
        """Whether a rule says that enough has been seen."""
        abandon = self._rules.abandon
        seen = (self.nonfinite, "non-finite"), (self.extreme, "extreme")
        return self._session.any_rank(any(rule in abandon and at is not None for (at, _), rule in seen))

    @property
    def stop_reason(self) -> str:
        """The rule that ended it."""
        step, where = self.nonfinite if self.nonfinite[0] is not None else self.extreme
        kind = "non-finite" if self.nonfinite[0] is not None else "extreme"
        return f"{kind} {where} after step {step}"

    def after_step(self, loss: Tensor) -> bool:
        """After one step; whether it was the last that is needed."""
        numbers = [loss.double(), self._session.magnitude().double()]
        if self.steps % self._course.every == 0:
            numbers.append(self._distance())
        self.steps += 1
        self._unfetched.append(torch.stack(numbers))
        if self.steps % self._every == 0:
            self.fetch()
        return self.should_stop

    def fetch(self) -> None:
        """Bring what waits on the device here."""
        first = self.steps - len(self._unfetched) + 1
        for step, row in enumerate(_fetched(self._unfetched), first):
            loss, magnitude, *distance = row
            self.losses.append(loss)
            self.magnitudes.append(magnitude)
            self.distances.extend(distance)
            self._check_value(loss, "loss", step)
            self._check_value(magnitude, "state", step)
        self._unfetched.clear()

    def check_state(self, magnitude: Tensor) -> None:
        """The state as it is now."""
        self._check_value(float(magnitude), "state", self.steps)

    def check_output(self, seen: Evaluation) -> None:
        """What the model says now."""
        self.fetch()
        self._check_value(seen.magnitude, "output", self.steps)
        self._check_value(seen.metric, "metric", self.steps)

    def _check_value(self, value: float, where: str, step: int) -> None:
        if not math.isfinite(value):
            if self.nonfinite[0] is None:
                self.nonfinite = (step, where)
        elif abs(value) > self._rules.extreme and self.extreme[0] is None:
            self.extreme = (step, where)

    def _distance(self) -> Tensor:
        weights = self._session.weights()
        if self._golden:
            self._course.weights.append(weights.clone())
            return torch.zeros((), dtype=torch.float64, device=weights.device)
        reference = self._course.weights[self.steps // self._course.every]
        if weights.dtype in (torch.float16, torch.bfloat16):  # squares of these would overflow
            return torch.dist(weights.float(), reference.float()).double()
        return torch.dist(weights, reference).double()


def _fetched(rows: Sequence[Tensor]) -> list[list[float]]:
    if not rows:
        return []
    lengths = [len(row) for row in rows]
    flat = torch.cat(list(rows)).tolist()
    found, at = [], 0
    for length in lengths:
        found.append([float(number) for number in flat[at : at + length]])
        at += length
    return found
