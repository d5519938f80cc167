"""A job's own versions: what of it is saved, and how it comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from evergrad.checkpoint import Checkpointer, rng_state
from evergrad.checkpoint.pending import Pending
from evergrad.errors import UsageError
from evergrad.recovery.data_position import DataPosition


class DeferredOptimizers:
    """Takes the place of optimizers that are not known yet, and keeps what they will have to load."""

    def __init__(self) -> None:
        self.state: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Nothing yet."""
        return {}

    def load_state_dict(self, state: Any) -> None:
        """What the optimizers will get."""
        self.state = state

    def states(self) -> list[Any]:
        """The state of each of them."""
        if self.state is None:
            return []
        return [self.state] if "param_groups" in self.state else list(self.state.values())


class JobCheckpoints:
    """Saves and restores model, optimizers, tracked things, generators and the place in the data, all together."""

    def __init__(self, checkpointer: Checkpointer, every: int | None) -> None:
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise UsageError(f"eg.join(every={every!r}): expected a number of steps, 1 or more")
        self._checkpointer, self._every = checkpointer, every
        self._saved = self._began = -1
        self._pending: Pending | None = None

    def is_due(self, step: int, agree: Callable[[list[float]], list[float]] | None) -> bool:
        """True if the state after so many steps is to be saved; `agree` is the largest over all ranks, if it works."""
        is_due = self._every is not None and step > 0 and step % self._every == 0 and step != self._saved
        if agree is None or not self._checkpointer.has_policy:
            return is_due
        is_known, since = self._began >= 0 or self._saved >= 0 or step == 1, max(self._saved, self._began, 0)
        self._began = step - 1 if self._began < 0 else self._began
        wants = self._checkpointer.is_due(step - since, agree, votes=is_known)
        return is_due or wants

    def save(
        self,
        model: nn.Module | None,
        optimizers: Sequence[Optimizer],
        tracked: Mapping[str, Any],
        position: DataPosition,
        *,
        now: bool = False,
    ) -> None:
        """Capture everything; it is finished in the background, or with `now` before this returns."""
        if self._saved != position.step:
            self._saved = position.step
            self._pending = self._checkpointer.save(
                position.step, self._state(model, one_or_numbered(optimizers), tracked, position)
            )
        if now and self._pending is not None:
            self._pending.wait()

    def note_guarded(self) -> None:
        """What was just saved was found to be alike on all ranks."""
        if self._pending is not None:
            self._checkpointer.note_guarded(self._pending.version)

    def newest_guarded(self) -> str:
        """The newest version of which that was noted, by its name, as all ranks find it; empty if there is none."""
        version = self._checkpointer.newest_guarded()
        return "" if version is None else version.name

    def restore(
        self,
        model: nn.Module | None,
        optimizers: Sequence[Optimizer],
        tracked: Mapping[str, Any],
        position: DataPosition,
        *,
        version: str = "",
    ) -> tuple[int, list[Any]] | None:
        """Bring everything back, on all ranks; the step, and the states of optimizers that are not known yet.

        The newest version, or this one. None if there is nothing to restore.
        """
        later = DeferredOptimizers()
        known: Any = one_or_numbered(optimizers) if optimizers else later
        state = self._state(model, known, tracked, position)
        step = self._checkpointer.restore(state, version=version or None, resize=_by_rank)
        if step is None:
            return None
        self._saved = step
        return step, later.states()

    def restore_local_state(self, model: nn.Module | None, rank: int) -> int | None:
        """What only one rank had, its generators and buffers, as it was when it last saved; the step, or None."""
        state: dict[str, Any] = {"rng": rng_state()}
        buffers = []
        if model is not None:
            state["model"] = model
            buffers = [f"model/{name}" for name, _ in model.named_buffers()]
        return self._checkpointer.restore_rank(state, rank, ["rng/**", *buffers])

    def _state(
        self, model: nn.Module | None, optimizer: Any, tracked: Mapping[str, Any], position: DataPosition
    ) -> dict[str, Any]:
        state: dict[str, Any] = {"rng": rng_state(), "job": position, "optimizer": optimizer}
        if model is not None:
            state["model"] = model
        if tracked:
            state["tracked"] = dict(tracked)
        return state


def one_or_numbered(optimizers: Sequence[Optimizer]) -> Any:
    """One is itself; several are known by their numbers."""
    return optimizers[0] if len(optimizers) == 1 else dict(enumerate(optimizers))


def _by_rank(path: str, saved: Sequence[Any], rank: int, world_size: int) -> Any:
    """With another number of ranks: each goes on with what the rank of its number had; buffers are the first one's."""
    return saved[0] if isinstance(saved[0], torch.Tensor) and not path.startswith("rng/") else saved[rank % len(saved)]
