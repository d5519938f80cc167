"""What a process trains: its model, its optimizers, and whatever else a joiner or a rollback must bring along."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from evergrad.recovery.optimizers import Optimizers
from evergrad.recovery.saving import together
from evergrad.recovery.snapshots import Snapshot, is_scaler
from evergrad.state import flatten

__all__ = ["Trained"]


@dataclass(slots=True)
class Trained:
    """The same on all ranks, but for buffers."""

    model: nn.Module | None = None
    optimizers: Optimizers = field(default_factory=Optimizers)
    tracked: dict[str, Any] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    """What a step can change before it is applied, as it was at its beginning; None where nothing is ever redone."""

    def state(self) -> dict[str, Any]:
        """What a joiner gets of it."""
        return {
            "model": self._tensors(),
            "tracked": {name: thing.state_dict() for name, thing in self.tracked.items()},
            "optimizers": self.optimizers.states(),
        }

    def take_over(self, state: Any) -> None:
        """Be what another rank has sent."""
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                tensor.copy_(state["model"][name])
        for name, thing in self.tracked.items():
            if name in state["tracked"]:
                thing.load_state_dict(state["tracked"][name])
        self.optimizers.owe(state["optimizers"])

    def live(self) -> dict[str, torch.Tensor]:
        """The tensors themselves, by their paths in a saved state."""
        known = self.optimizers.known
        trained: dict[str, Any] = {"model": self.model} if self.model is not None else {}
        return flatten(trained | ({"optimizer": together(known)} if known else {})).tensors

    def put_back(self) -> None:
        """Nothing of the step under way remains in it."""
        assert self.snapshot is not None, "nothing is ever redone here"
        self.snapshot.put_back(self.tracked)
        for optimizer in self.optimizers.known:
            optimizer.zero_grad(set_to_none=True)

    @property
    def scale(self) -> float | None:
        """By what a tracked gradient scaler has multiplied the gradients; None if there is none."""
        scaler = next((thing for thing in self.tracked.values() if is_scaler(thing) and thing.is_enabled()), None)
        return None if scaler is None else float(scaler.get_scale())

    def _tensors(self) -> dict[str, torch.Tensor]:
        if self.model is None:
            return {}
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
