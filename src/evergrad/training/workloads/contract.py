"""A workload: model, data and metric. A few lines of Python make one of your own.

    import torch
    from evergrad.training import Dataset, Workload

    def mine():                                       # a plan says  workload = "mine.py:mine"
        x, y = torch.randn(600, 20), torch.randint(0, 2, (600,))
        data = Dataset("noise", x[:500], y[:500], x[500:], y[500:], chance=0.5)
        return Workload(model=lambda: torch.nn.Linear(20, 2), data=data)

Rules. `model` is called with the generator already seeded, and gives the same bits each time. Data are whole tensors in
memory, never altered. `loss`, `metric` and `predict` are functions of outputs and targets alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn

from evergrad.training.direction import Direction, direction_by_name

MakeOptimizer: TypeAlias = "Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]"


@dataclass(frozen=True, slots=True)
class Dataset:
    """Samples to learn from and samples to judge by."""

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    chance: float | None = None
    """The metric of one who guesses; None: unknown, and then no training ends at chance level."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What tables say of it: where it is from, how large."""


def top1(outputs: Tensor) -> Tensor:
    """The class that each output favours; NaN favours none, -1."""
    best: Tensor = outputs.argmax(-1)
    return torch.where(outputs.isnan().any(-1), torch.full_like(best, -1), best)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The part of the targets that the outputs favour."""
    return (top1(outputs) == targets).double().mean()


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of classes, or of the next token at every place."""
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


@dataclass(frozen=True, slots=True)
class Workload:
    """What is trained, on what, and how it is judged."""

    model: Callable[[], nn.Module]
    data: Dataset
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    metric: Callable[[Tensor, Tensor], Tensor] = accuracy
    direction: str = ""
    """The metric's direction, `higher_is_better` or `lower_is_better`. Empty: by the function's name (`loss`: lower);
    a name that says nothing is higher."""
    predict: Callable[[Tensor], Tensor] = top1
    """What is compared, sample by sample, with what the golden run's model said."""
    optimizer: MakeOptimizer | None = None
    """None: as the plan says."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What tables say of the model: its width, and what differs from the published one."""

    @property
    def judged_by(self) -> Direction:
        """The metric's direction, as given or by the function's name."""
        return Direction(self.direction) if self.direction else direction_by_name(getattr(self.metric, "__name__", ""))
