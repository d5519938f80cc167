"""How a training is spread over processes, and what a study may do with it while it is warm.

A `Session` is one rank's part of a training: model, optimizer and data, loaded once and used for many trials. Every
rank of a mechanism calls the same methods in the same order, so that collectives meet; with `single` there is one rank.

- `state` is this rank's live tensors by path (`model/…`, `optimizer/…`), the very memory that training uses: what a
  fault alters there, the next step meets. That is after wrapping: DDP's own broadcast at construction is past.
- `restore` copies; it never lends. What a snapshot holds is the same after any number of trials.
- Restoring and repeating the same steps gives the same bits.
- What a study decides on is the same on every rank: `step` gives the loss of the whole batch (a pipeline's last stage
  tells the others), `magnitude` and `evaluate` look at all ranks' state and samples, and `agree` ends a trial on all of
  them or on none. `weights` is this rank's share; squares of distances add up.
- Replicas have one checkpoint, rank 0's, and every rank begins with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class TrainingSnapshot:
    """A state outside of the session: tensors by path, and how many epochs it has been trained."""

    epoch: int
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What the model says of the test samples."""

    metric: float
    predictions: Tensor
    """On the CPU."""
    magnitude: float
    """The largest |output|; NaN if one is NaN."""


class Session(ABC):
    """One rank's part of a warm training. Not to be used by several threads."""

    rank: int
    ranks: int
    steps_per_epoch: int
    epoch: int
    """Epochs that the present state has been trained."""
    module: nn.Module
    """What a step calls: the model, in whatever the mechanism wraps it; live faults hook in here."""
    optimizer: Optimizer
    """What a step updates parameters with."""

    @abstractmethod
    def state(self) -> Mapping[str, Tensor]:
        """The live tensors of this rank."""

    @abstractmethod
    def snapshot(self) -> TrainingSnapshot:
        """A copy of the state."""

    @abstractmethod
    def restore(self, snapshot: TrainingSnapshot) -> None:
        """Take up the state of a snapshot, by copying."""

    @abstractmethod
    def make_reset(self) -> Callable[[], None]:
        """Keep the present state beside the session; calling what this gives takes it up again, at memory speed."""

    @abstractmethod
    def parameters(self) -> Mapping[str, int]:
        """The number that the optimizer has for each of the model's parameters, by the names of `state`."""

    @abstractmethod
    def step(self, number: int) -> Tensor:
        """The step of that number in the present epoch; its loss, still on the device. The last one ends the epoch."""

    @abstractmethod
    def weights(self) -> Tensor:
        """The parameters one after the other: live, and not to be altered."""

    @abstractmethod
    def magnitude(self) -> Tensor:
        """The largest |number| in this rank's floating-point state, still on the device; NaN if one is NaN."""

    def any_rank(self, settled: bool) -> bool:
        """Whether any rank says so."""
        return settled

    @abstractmethod
    def evaluate(self) -> Evaluation:
        """Judge the present model; alters nothing."""
