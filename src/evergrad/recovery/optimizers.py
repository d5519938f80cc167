"""The optimizers of a job: known from the first step on, owed a state until then, stepped by a scaler if any."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from evergrad.errors import UsageError
from evergrad.recovery.overlapping import Overlap, refuse_overlap
from evergrad.recovery.snapshots import is_scaler

__all__ = ["Optimizers"]


class Optimizers:
    """A process learns of its optimizers when it first calls `job.step`: a joiner gets their states there.

    One that is overlapped with backward is known before, and has done its work when `job.step` is called.
    """

    def __init__(self) -> None:
        self.known: tuple[Optimizer, ...] = ()
        self.overlap: Overlap | None = None
        self._owed: list[Any] = []

    def meet(self, optimizers: tuple[Optimizer, ...]) -> None:
        """Know them, and give them what they are owed."""
        if self.known and self.known != optimizers:
            if self.overlap is not None:
                raise UsageError(
                    f"job.step: with overlap=True there is one optimizer, that of job.wrap; found {len(optimizers)}, "
                    "or another one. Put all parameters into its groups, or leave overlap=True out"
                )
            raise UsageError("job.step: other optimizers than before. Give it all of them, each time")
        if not self.known and (greedy := next((one for one in optimizers if _needs_closure(one)), None)):
            raise UsageError(
                f"job.step: {type(greedy).__qualname__} evaluates the model as often as it likes within a step, which "
                "cannot be taken back when a rank is lost. Use an optimizer that steps without a closure"
            )
        self.known = optimizers
        self._pay()

    def owe(self, states: Iterable[Any]) -> None:
        """What they get: at once if they are known, or when they are met."""
        self._owed = list(states)
        if self.known:
            self._pay()

    def _pay(self) -> None:
        optimizers, owed, self._owed = self.known, self._owed, []
        if owed and len(owed) != len(optimizers):
            raise UsageError(f"job.step: {len(optimizers)} optimizers, and the job has states of {len(owed)}")
        for optimizer, state in zip(optimizers, owed, strict=False):
            optimizer.load_state_dict(state)

    def states(self) -> list[Any]:
        """What a joiner gets: their states, or those that they are still owed."""
        return self._owed or [one.state_dict() for one in self.known]

    def apply(self, tracked: Mapping[str, Any], factor: float) -> bool:
        """Step them all, at this share of their learning rate; False if a scaler found gradients that overflowed."""
        if self.overlap is not None:
            refuse_overlap(self.overlap.optimizer, tracked=tracked)
            self.overlap.finish()
            return True
        groups = [group for optimizer in self.known for group in optimizer.param_groups] if factor != 1 else []
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * factor
        scaler = next((thing for thing in tracked.values() if is_scaler(thing) and thing.is_enabled()), None)
        was_applied = True
        for optimizer in self.known:
            if scaler is None:
                optimizer.step()
                continue
            scaler.step(optimizer)
            found = scaler._found_inf_per_device(optimizer) if hasattr(scaler, "_found_inf_per_device") else {}
            was_applied &= not any(bool(value.item()) for value in found.values())
        if scaler is not None:
            scaler.update()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        return was_applied


def _needs_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
