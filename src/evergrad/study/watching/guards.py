"""Which guards speak up in a trial, when, and what they cost.

All of them watch the same trial, so that they are compared on the very same faults; none acts, and training goes on, so
that it is seen how late a late one is. An alarm is any rank's: ranks learn of each other's at the end.

A guard's seconds are those of rank 0, asked by itself: the median of its looks, times the looks, by all steps. A step's
own are from the beginning of its forward pass to the end of its update, without the guards that were asked meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from evergrad.study.watching.contract import Watched, Watcher, gathered
from evergrad.study.watching.passive import passive_guards

if TYPE_CHECKING:
    from evergrad.study.observing import Course
    from evergrad.training.mechanisms.session import Session

_NEVER = 1 << 62


class Guards(Watcher):
    """Asks every guard at each of its moments, and takes the time."""

    def __init__(self, session: Session, course: Course) -> None:
        self._session = session
        self._guards = passive_guards(session, course.magnitudes)
        self._alarms = {guard.name: _NEVER for guard in self._guards}
        self._seconds: dict[str, dict[int, float]] = {guard.name: {} for guard in self._guards}
        self._step = 0
        self._began = self._asked = 0.0
        self._steps: list[float] = []
        self._hooks: list[RemovableHandle] = []

    def begin(self) -> None:
        """From here on the training is hooked."""
        for guard in self._guards:
            self._ask(guard.name, guard.at_load)
        session = self._session
        self._hooks = [
            session.module.register_forward_pre_hook(self._passes),
            session.optimizer.register_step_pre_hook(self._has_gradients),
            session.optimizer.register_step_post_hook(self._is_applied),
        ]

    def after(self, step: int, loss: Tensor) -> None:
        """What is looked at between two steps."""
        for guard in self._guards:
            self._ask(guard.name, lambda guard=guard: guard.after_step(step, loss))  # type: ignore[misc]

    def found(self) -> Watched:
        """The first alarm of any rank; 0 is at the load. Seconds a step, by guard, and those of the step itself."""
        device = self._session.weights().device
        mine = torch.tensor(list(self._alarms.values()), dtype=torch.int64, device=device)
        first: list[int] = gathered(self._session, mine).amin(0).tolist()
        alarms = {name: None if step == _NEVER else step for name, step in zip(self._alarms, first, strict=True)}
        if not self._steps:
            return Watched(alarms=alarms)
        costs = {"step": (median(self._steps),)}
        for name, looks in self._seconds.items():
            each = median(looks.values()) if looks else 0.0
            costs[f"guard {name}"] = (each * len(looks) / len(self._steps),)
        return Watched(alarms=alarms, costs=costs)

    def end(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _ask(self, name: str, question: Callable[[], bool | None]) -> None:
        began = self._now()
        speaks_up = question()
        took = self._now() - began
        self._asked += took
        if speaks_up is None:
            return
        looks = self._seconds[name]
        looks[self._step] = looks.get(self._step, 0.0) + took
        if speaks_up:
            self._alarms[name] = min(self._alarms[name], self._step)

    def _passes(self, *_: Any) -> None:
        """A forward pass begins. The last one before an update is the step's."""
        # Hooks run in the order in which they came: a fault in the gradients that was scheduled since must come first.
        self._hooks[1].remove()
        self._hooks[1] = self._session.optimizer.register_step_pre_hook(self._has_gradients)
        self._began, self._asked = self._now(), 0.0

    def _has_gradients(self, *_: Any) -> None:
        self._step += 1
        for guard in self._guards:
            self._ask(guard.name, guard.at_gradients)

    def _is_applied(self, *_: Any) -> None:
        self._steps.append(self._now() - self._began - self._asked)

    def _now(self) -> float:
        device = self._session.weights().device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # or somebody else's work would be taken for the guard's
        return perf_counter()
