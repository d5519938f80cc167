"""What a process trains: its model, its optimizers, and whatever else a joiner or a rollback must bring along."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from evergrad.errors import UsageError
from evergrad.recovery.optimizers import Optimizers
from evergrad.recovery.saving import together
from evergrad.recovery.snapshots import Snapshot, is_scaler
from evergrad.state import flatten, unflatten


@dataclass(frozen=True, slots=True)
class _Held:
    """A copy of everything: what only this rank has, what all ranks have, and the optimizers' states."""

    own: Snapshot
    shared: Snapshot
    optimizers: list[Any]


@dataclass(slots=True)
class Trained:
    """The same on all ranks, but for buffers."""

    model: nn.Module | None = None
    optimizers: Optimizers = field(default_factory=Optimizers)
    tracked: dict[str, Any] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    """What a step can change before it is applied, as it was at its beginning; None where nothing is ever redone."""
    _held: _Held | None = None

    def state(self) -> dict[str, Any]:
        """What a joiner gets of it."""
        return {
            "model": self._tensors(),
            "tracked": {name: thing.state_dict() for name, thing in self.tracked.items()},
            "optimizers": self.optimizers.states(),
        }

    def take_over(self, state: Any) -> None:
        """Be what another rank has sent; `UsageError` if this process has built another model."""
        given: dict[str, torch.Tensor] = state["model"]
        mine = self._tensors()
        for name in dict.fromkeys([*given, *mine]):
            here, there = (f"shape {list(each[name].shape)}" if name in each else "missing" for each in (mine, given))
            if here != there:
                raise UsageError(
                    f"job.wrap: this process has built another model than the rank whose state it takes: {name} is "
                    f"{there} there and {here} here. Build the same model in every process"
                )
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(given[name])
        for name, thing in self.tracked.items():
            if name in state["tracked"]:
                thing.load_state_dict(state["tracked"][name])
        self.optimizers.owe(state["optimizers"])

    def live(self) -> dict[str, torch.Tensor]:
        """The tensors themselves, by their paths in a saved state."""
        known = self.optimizers.known
        trained: dict[str, Any] = {"model": self.model} if self.model is not None else {}
        return flatten(trained | ({"optimizer": together(known)} if known else {})).tensors

    def look_for_optimizers(self) -> None:
        """Find the optimizers of the model, before the script hands them over."""
        self.optimizers.look(self.model.parameters() if self.model is not None else ())

    def hold(self) -> None:
        """Copy everything, so that `put_in_place` undoes whatever the script does until then. Twice is fine."""
        if self._held is None:
            own = Snapshot(list(self.model.buffers()) if self.model is not None else [], device="cpu")
            shared = Snapshot(list(self.model.parameters()) if self.model is not None else [], device="cpu")
            own.take({})
            shared.take(self.tracked)
            # On the CPU: there may be no room for all of it a second time on a device.
            self._held = _Held(own, shared, [_on_cpu(state) for state in self.optimizers.states()])

    @property
    def is_held(self) -> bool:
        """True if there is a copy that `put_in_place` would take."""
        return self._held is not None

    def put_in_place(self, *, own: bool = True) -> None:
        """Make everything what it was when `hold` was called, if it was; without `own` not generators and buffers."""
        if self._held is None:
            return
        self._held.shared.put_back(self.tracked, randomness=False)
        self.optimizers.owe(copy.deepcopy(self._held.optimizers))
        if own:
            self._held.own.put_back({})

    def let_go(self) -> None:
        """Drop the copy that `hold` has made."""
        self._held = None

    def begin_step(self) -> None:
        """Note what a redo of the step that begins now puts back."""
        if self.snapshot is not None:
            self.snapshot.take(self.tracked)
            self.optimizers.note_hyper_parameters()

    def put_back(self) -> None:
        """Undo everything that the step under way has changed."""
        assert self.snapshot is not None, "nothing is ever redone here"
        self.snapshot.put_back(self.tracked)
        self.optimizers.put_back_hyper_parameters()
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


def _on_cpu(state: Any) -> Any:
    """A copy of an optimizer's state with its tensors on the CPU; `load_state_dict` moves them to their parameters."""
    flat = flatten(state)
    return unflatten({path: tensor.detach().cpu().clone() for path, tensor in flat.tensors.items()}, flat.skeleton)
