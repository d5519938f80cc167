"""What a study will take, before it is run: trials, time, and the width of its intervals."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from evergrad.records import Json
from evergrad.study.plan import Plan
from evergrad.study.trials import Command
from evergrad.training.settings import Training

_STEPS = 3
_SLOW_S = 0.5  # a step that takes so long is not the one that warms up
_TYPICAL, _WORST = 0.05, 0.5
"""Rates whose intervals are told: a rare outcome's, and the widest that there is."""
_START_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What is to be expected."""

    study: str
    cells: int
    trials: int
    workers: int
    seconds: float | None
    """If half of the trials are given up early; None: a program of the user's own."""
    longest_s: float
    """If none is."""
    confidence: float
    half_widths: tuple[float, float]
    """For a rate of 5 %, and of 50 %."""

    def to_json(self) -> dict[str, Json]:
        """By name."""
        low, high = self.half_widths
        return {
            "study": self.study,
            "cells": self.cells,
            "trials": self.trials,
            "workers": self.workers,
            "seconds": self.seconds,
            "longest_seconds": self.longest_s if self.seconds is not None else None,
            "confidence": self.confidence,
            "half_width": {"rate 0.05": low, "rate 0.5": high},
        }


def estimate(plan: Plan, workers: int | None = None, *, tell: Callable[[str], None] = lambda what: None) -> Estimate:
    """Work it out; each training is tried for a few steps, in this process. `tell` hears of each, before it is."""
    count = workers or default_workers(plan)
    total, known = 0.0, True
    for cells in plan.by_training().values():
        training = cells[0].training
        if isinstance(training, Command):
            known = False
            continue
        tell(f"trying {training.model} for a few steps")
        prepare, trial = _timed(training) if training.mechanism == "single" else _timed_by_ranks(training)
        # Every worker repeats the golden run once; the golden run itself is made by one.
        total += prepare + trial * (count + sum(cell.trainings for cell in cells))
    return Estimate(
        study=plan.study,
        cells=len(plan.cells),
        trials=plan.trials,
        workers=count,
        seconds=_START_S + total / count / 2 if known else None,
        longest_s=_START_S + total / count,
        confidence=plan.sampling.confidence,
        half_widths=_half_widths(plan),
    )


def default_workers(plan: Plan) -> int:
    """As many as keep the cores busy, each with the processes that its trials start; one, where time is measured."""
    most = max((cell.training.ranks for cell in plan.cells if not isinstance(cell.training, Command)), default=1)
    if any(cell.saving is not None for cell in plan.cells):
        return 1
    return max(1, len(os.sched_getaffinity(0)) // most)


def duration(seconds: float) -> str:
    """Format a time in the unit that suits its length.

    >>> duration(42.3), duration(150), duration(9000), duration(400_000)
    ('42 s', '2.5 min', '2.5 h', '4.6 days')
    """
    for limit, unit, name in ((90, 1, "s"), (5400, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}" if unit == 1 else f"{seconds / unit:.1f} {name}"
    return f"{seconds / 86400:.1f} days"


def time_rank(folder: Path, work: Mapping[str, Any]) -> dict[str, Json]:
    """What a rank has to say of it."""
    return {"seconds": [*_timed(Training.from_json(work))]}


def _timed_by_ranks(training: Training) -> tuple[float, float]:
    from evergrad.study.rank_group import RankGroup

    with RankGroup(training.ranks, device=training.device) as group:
        first = group.call("evergrad.study.run_estimate:time_rank", Path(), training.to_json())[0]
    assert first is not None
    prepare, trial = first["seconds"]
    return prepare, trial


def _timed(training: Training) -> tuple[float, float]:
    """Seconds for the epochs before the checkpoint, and for one trial."""
    import torch

    from evergrad.training.mechanisms import make_session
    from evergrad.training.workloads.registry import make_workload

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as workers have
    try:
        workload = make_workload(training)
        session = make_session(training, workload)
        first = perf_counter()
        for number in range(min(_STEPS, session.steps_per_epoch)):
            began = perf_counter()
            if began - first > _SLOW_S:
                break
            session.step(number)
            session.magnitude().item()
            step = perf_counter() - began
        began = perf_counter()
        if step < _SLOW_S:
            session.evaluate()
        judged = perf_counter() - began
    finally:
        torch.set_num_threads(threads)
    epoch = step * session.steps_per_epoch
    if step >= _SLOW_S:  # nobody wants to wait for it: a forward is a third of a step
        judged = epoch / 3 * len(workload.data.test_x) / len(workload.data.train_x)
    return epoch * training.checkpoint, epoch * training.epochs + judged * (1 + training.epochs)


def _half_widths(plan: Plan) -> tuple[float, float]:
    trainings, sampling = max(cell.trainings for cell in plan.cells), plan.sampling
    if sampling.stop:
        from evergrad.study.statistics import anytime_interval

        found = [
            anytime_interval(round(rate * trainings), trainings, sampling.confidence) for rate in (_TYPICAL, _WORST)
        ]
        low, high = ((top - bottom) / 2 for bottom, top in found)
        return low, high
    from evergrad.study.statistics import expected_half_width

    low, high = (expected_half_width(trainings, sampling.confidence, rate) for rate in (_TYPICAL, _WORST))
    return low, high
