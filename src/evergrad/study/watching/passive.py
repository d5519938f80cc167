"""Guards against silent corruption as they can be asked without letting them act: each only says whether it speaks up.

`norm`, `range` and `replicas` are made of the pieces that `job.guard` is made of, with its settings, and forget at a
restart what they had seen, as it does. What that guard does then (do the step again, heal, go back) is left out, and so
is its care for buffers, which needs a neighbour's copy of them. Two more are there to compare with: `non-finite`, the
check that everybody writes, and `checkpoint range`, which looks once, when a checkpoint is loaded.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping

import torch
from torch import Tensor

from evergrad.recovery.guard.digest_tree import DigestTree
from evergrad.recovery.guard.norms import Magnitude, Norms, Ranges
from evergrad.recovery.guard.replicas import replica_of
from evergrad.recovery.guard.settings import GuardSettings
from evergrad.study.watching.contract import GUARD_EVERY, gathered
from evergrad.training.mechanisms.session import Session


class Passive(ABC):
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


class Norm(Passive):
    """The gradient's norm in every step: not finite, or far beyond the median of the last ones."""

    name = "norm"

    def __init__(self, session: Session, settings: GuardSettings) -> None:
        self._session, self._norms = session, Norms(settings.norm_factor)

    def at_gradients(self) -> bool:
        """A norm that is far off counts for the median all the same: the step is applied, as a job's is in the end."""
        reading = self._norms.read(_gradients(self._session))
        self._norms.applied(reading)
        return reading.is_suspicious


class Range(Passive):
    """Parameters at every check: not finite, or far beyond the largest that their tensor had at any check before."""

    name = "range"

    def __init__(self, session: Session, settings: GuardSettings) -> None:
        self._every, self._ranges = settings.every, Ranges(settings.range_factor)
        self._parameters = {name: one.detach() for name, one in session.module.named_parameters()}

    def after_step(self, step: int, loss: Tensor) -> bool | None:
        """The first check has nothing to go by, but whether numbers are finite."""
        if step % self._every:
            return None
        found = self._ranges.read(self._parameters)
        self._ranges.accept(found)
        return bool(found)


class Replicas(Passive):
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
        roots = gathered(self._session, root.to(self._session.weights().device))
        return bool((roots != roots[0]).any())


class NonFinite(Passive):
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


class CheckpointRange(Passive):
    """A checkpoint against what was noted when it was saved: the largest magnitude of each of its tensors."""

    name = "checkpoint range"

    def __init__(self, session: Session, settings: GuardSettings, noted: Mapping[str, float]) -> None:
        self._session, self._ranges = session, Ranges(settings.range_factor)
        self._ranges.accept(Magnitude(path, largest, largest) for path, largest in noted.items())

    def at_load(self) -> bool:
        """Parameters, buffers and optimizer state."""
        return bool(self._ranges.read(self._session.state()))


def passive_guards(session: Session, noted: Mapping[str, float]) -> list[Passive]:
    """All that this training can have: one rank has nobody to compare with. `noted`: with the checkpoint."""
    settings = GuardSettings(every=GUARD_EVERY)
    found: list[Passive] = [Norm(session, settings), Range(session, settings)]
    if session.ranks > 1:
        found.append(Replicas(session, settings))
    return [*found, NonFinite(session), CheckpointRange(session, settings, noted)]


def _gradients(session: Session) -> list[Tensor]:
    return [one.grad for one in session.module.parameters() if one.grad is not None]
