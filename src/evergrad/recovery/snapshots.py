"""What a step can change before it is applied, as it was at the step's beginning, to be put back if it is redone.

Parameters and optimizer state are not here: nothing but an applied step changes them.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from evergrad.errors import StateError, UsageError
from evergrad.recovery.own import Randomness
from evergrad.state import flatten


class Snapshot:
    """Buffers, generators and tracked things at one moment; taken again and again into the same memory."""

    def __init__(self, buffers: Sequence[torch.Tensor], *, device: str | None = None) -> None:
        """Copies are on this device, or else beside what is copied."""
        self._buffers = list(buffers)
        self._copies = [torch.empty_like(buffer, device=device) for buffer in self._buffers]
        self._randomness: Randomness | None = None
        self._tracked: dict[str, Any] = {}

    def take(self, tracked: Mapping[str, Any]) -> None:
        """Note how things are."""
        with torch.no_grad():
            for kept, buffer in zip(self._copies, self._buffers, strict=True):
                kept.copy_(buffer)
        self._tracked = {name: copy.deepcopy(thing.state_dict()) for name, thing in tracked.items()}
        self._randomness = Randomness()

    def put_back(self, tracked: Mapping[str, Any], *, randomness: bool = True) -> None:
        """Make things as they were; without `randomness` the generators are left alone."""
        assert self._randomness is not None, "nothing was taken"
        with torch.no_grad():
            for kept, buffer in zip(self._copies, self._buffers, strict=True):
                buffer.copy_(kept)
        for name, thing in tracked.items():
            if name in self._tracked:
                thing.load_state_dict(copy.deepcopy(self._tracked[name]))
            if is_scaler(thing):
                reset_scaler(thing)
        if randomness:
            self._randomness.put_back()


def checked_tracked(things: Mapping[str, Any]) -> dict[str, Any]:
    """Things that can be tracked: with `state_dict` and `load_state_dict`, and a state that can be sent."""
    for name, thing in things.items():
        if not all(callable(getattr(thing, method, None)) for method in ("state_dict", "load_state_dict")):
            raise UsageError(
                f"job.track({name}=…): a {type(thing).__qualname__} has no state_dict and load_state_dict, so it can "
                "be neither rolled back nor given to a joiner"
            )
        try:
            flatten(thing.state_dict())
        except StateError as error:
            raise UsageError(f"job.track({name}=…): its state cannot be given to a joiner: {error}") from None
    return dict(things)


def is_scaler(thing: object) -> bool:
    """Whether this is a gradient scaler of AMP, or works like one."""
    return all(callable(getattr(thing, method, None)) for method in ("scale", "unscale_", "step", "update"))


def reset_scaler(scaler: Any) -> None:
    """Let a scaler forget that it has unscaled this step's gradients: they will come again."""
    if hasattr(scaler, "_per_optimizer_states"):
        from torch.amp.grad_scaler import _refresh_per_optimizer_state

        scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
