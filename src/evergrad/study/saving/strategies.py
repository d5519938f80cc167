"""How a training is saved on its way: not at all, by rank 0 alone, or by Evergrad.

| | save | restore |
|---|---|---|
| `none` | nothing | – |
| `root` | rank 0 writes a file by `torch.save`, and fsync; all wait at a barrier until it has | rank 0 reads the file, and broadcasts tensor by tensor |
| `evergrad` | each rank copies its state into shared memory; the node's agent brings it to the local disk, and every tenth to the shared one | each rank from the nearest tier that has it |

Every rank has one of these, and all call the same methods in the same order. A save is of the live tensors of a
session; restoring puts what was saved back into them. What a save costs its training is the time that `save` takes; what
is left to do then goes on beside the training, until `drain`.
"""  # noqa: E501

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from evergrad.checkpoint.checkpointer import Checkpointer
from evergrad.checkpoint.tiers import Local, Memory, Persistent
from evergrad.errors import StudyError, UsageError
from evergrad.formats.durable import fsync
from evergrad.state.paths import split
from evergrad.study.trials import SAVINGS
from evergrad.wording import checked_choice

if TYPE_CHECKING:
    from evergrad.checkpoint import Pending

FLUSH_EVERY = 10
"""Of Evergrad's saves, every so-manyth goes to the shared file system."""

_FILE = "root.pt"
_LINGER_S = 15.0
"""How long an agent stays without trainers: longer than a group of ranks takes to start."""


class Strategy(ABC):
    """One rank's part of saving a training."""

    @abstractmethod
    def save(self, step: int) -> None:
        """Save the state after that many steps; returns when the training may go on."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until everything that was saved is durable."""

    @abstractmethod
    def restore(self) -> int:
        """Take up the newest state that was saved; after how many steps it was."""

    @abstractmethod
    def close(self) -> None:
        """Let go of whatever it holds; may be called twice."""


def make_strategy(
    name: str, folder: Path, state: Mapping[str, Tensor], shared: Sequence[str], cores: Sequence[int], *, ready: bool
) -> Strategy:
    """A strategy by its name. `shared` names the tensors that are equal on all ranks; `cores` are this machine's.

    `ready`: what saves need is made now, and not at the first ones.
    """
    checked_choice("saving", name, SAVINGS)
    if name == "root":
        return RootSaving(folder, state)
    return EvergradSaving(folder, state, shared, cores, ready=ready) if name == "evergrad" else NoSaving()


class NoSaving(Strategy):
    """The training as it is."""

    def save(self, step: int) -> None:
        """Nothing."""

    def drain(self) -> None:
        """Nothing is under way."""

    def restore(self) -> int:
        """There is nothing to restore."""
        raise UsageError("saving: 'none' has nothing to restart from. Choose root or evergrad, or restarts = false.")

    def close(self) -> None:
        """Nothing is held."""


class RootSaving(Strategy):
    """Rank 0 writes, all wait; rank 0 reads, all are told."""

    def __init__(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        self._path, self._state = folder / _FILE, state

    def save(self, step: int) -> None:
        """As training scripts do it; the file is whole or not there."""
        if distributed.get_rank() == 0:
            beside = self._path.with_suffix(".new")
            torch.save({"step": step, "state": dict(self._state)}, beside)
            fsync(beside)
            os.replace(beside, self._path)
            fsync(self._path.parent)
        distributed.barrier()

    def drain(self) -> None:
        """A save is durable when it returns."""

    def restore(self) -> int:
        """Into the live tensors, rank 0's first."""
        step = torch.zeros(1, dtype=torch.int64)
        if distributed.get_rank() == 0:
            found = torch.load(self._path, map_location="cpu", weights_only=True)
            step[0] = found["step"]
            with torch.no_grad():
                for name, tensor in self._state.items():
                    tensor.copy_(found["state"][name])
        under_way = [distributed.broadcast(tensor, 0, async_op=True) for tensor in (step, *self._state.values())]
        for one in under_way:
            assert one is not None
            one.wait()
        return int(step)

    def close(self) -> None:
        """No file is open."""


class EvergradSaving(Strategy):
    """Memory and the node's own disk at every save, a shared file system at every tenth."""

    def __init__(
        self,
        folder: Path,
        state: Mapping[str, Tensor],
        shared: Sequence[str],
        cores: Sequence[int],
        *,
        ready: bool,
    ) -> None:
        self._state = _nested(state)
        self._pending: list[tuple[Pending, str]] = []
        self._saves = 0
        tiers = [Memory(), Local(), Persistent(str(folder / "shared"), every=FLUSH_EVERY)]
        # The first rank to come starts the agent, which works beside all of them: not on that rank's core alone.
        with _on_cores(cores):
            self._checkpointer = Checkpointer(
                folder / "run",
                tiers,
                replicated=list(shared),
                reserve=self._state if ready else None,
                linger_s=_LINGER_S,
            )

    def save(self, step: int) -> None:
        """Returns after the copy."""
        pending = self._checkpointer.save(step, self._state)
        is_flushed = self._saves % FLUSH_EVERY == 0  # the first of an attempt, and every tenth after it
        self._pending.append((pending, "persistent" if is_flushed else "local"))
        self._saves += 1

    def drain(self) -> None:
        """Every version in the furthest tier that it goes to; those of the local disk make place for later ones."""
        for place, (pending, tier) in enumerate(self._pending, 1):
            if tier == "persistent" or place == len(self._pending):
                pending.wait(tier)
                if tier == "persistent":
                    pending.wait("local")
        self._pending.clear()

    def restore(self) -> int:
        """From the nearest tier, each digest checked."""
        step = self._checkpointer.restore(self._state)
        if step is None:
            raise StudyError("nothing was saved that could be restored")
        self._saves = 0
        return step

    def close(self) -> None:
        """The agent finishes what is under way, and leaves."""
        self._checkpointer.close()


def _nested(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """`model/conv1.weight` as `{"model": {"conv1.weight": …}}`; what has more parts keeps them."""
    found: dict[str, Any] = {}
    for name, tensor in state.items():
        *folders, last = split(name)
        place = found
        for one in folders:
            place = place.setdefault(one, {})
        place[last] = tensor
    return found


@contextmanager
def _on_cores(cores: Sequence[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
