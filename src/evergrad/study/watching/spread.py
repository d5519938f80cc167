"""How far a fault has come: parameters are compared, bit by bit, with the golden run's at the same step.

Each rank counts the elements that differ in each of its parameters, and the ranks exchange these counts: one small
message a look. From them come three numbers, each a part of the whole:

    elements   of all parameters of all ranks, those that differ
    layers     of the model's layers, those in which anything differs on any rank
    ranks      of the ranks, those in which anything differs

A layer is a module that has parameters of its own, batch normalisation too. A tied parameter belongs to all of its
layers. Buffers and optimizer state are not compared: what matters of them shows in the parameters a step later.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evergrad.recovery.guard.digest_tree import module_of
from evergrad.study.trials import Series
from evergrad.study.watching.contract import Watched, Watcher, gathered

if TYPE_CHECKING:
    from evergrad.study.observing import Course
    from evergrad.training.mechanisms.session import Session

_MOST_LOOKS = 200
_FIRST = 10
"""Steps that are all looked at, however long the training is: that is where a fault spreads."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Spread(Watcher):
    """Compares with the golden run at its beginning, and after the steps of which its course has kept the weights."""

    def __init__(self, session: Session, course: Course, steps: int) -> None:
        self._session, self._course = session, course
        self._sizes = [one.numel() for one in session.module.parameters()]
        self._layers: dict[str, list[int]] = {}
        for name, number in session.parameters().items():
            self._layers.setdefault(module_of(name), []).append(number)
        looks = math.ceil(steps / course.every)
        self._thin, self._last = max(1, math.ceil(looks / _MOST_LOOKS)), looks - 1
        self._after: list[int] = []
        self._counts: list[Tensor] = []

    def begin(self) -> None:
        """Point 0: a fault in the checkpoint's weights is there, and has not spread."""
        assert self._course.before is not None, "the golden run comes first"
        self._look(0, self._course.before)

    def after(self, step: int, loss: Tensor) -> None:
        """Look, if the course has that step and it is one of those that are looked at."""
        look, between = divmod(step - 1, self._course.every)
        if between == 0 and (step <= _FIRST or look % self._thin == 0 or look == self._last):
            self._look(step, self._course.weights[look])

    def found(self) -> Watched:
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
        return Watched(spread={name: Series(1, tuple(numbers)) for name, numbers in values.items()})

    def end(self) -> None:
        """Nothing is hooked in."""

    def _look(self, step: int, reference: Tensor) -> None:
        weights = self._session.weights()
        kind = _BITS[weights.element_size()]  # as whole numbers: a NaN is the same as itself, and 0 is not -0
        differs = weights.view(kind) != reference.view(kind)
        counts = torch.stack([part.count_nonzero() for part in torch.split(differs, self._sizes)])
        self._after.append(step)
        self._counts.append(gathered(self._session, counts))
