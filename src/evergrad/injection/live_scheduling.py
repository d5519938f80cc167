"""When live faults happen: steps are counted, and every hook comes off as soon as all is done.

Steps are counted by the optimizer, one call a step, or told by a clock, which is asked before each forward pass. The
model is hooked in the step itself only, and where sizes have to be seen in the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from evergrad.injection.live_targets import Target
from evergrad.injection.log import InjectionLog
from evergrad.records import Json

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


class LiveInjection:
    """Faults that are scheduled in a running training, or that have happened in it.

    A fault happens once, also if its step is done again. As a context manager it removes at its end what has not
    happened by then; that is an error if the step has gone by.
    """

    def __init__(self, schedule: Schedule | None = None) -> None:
        """None where nothing is to happen: on another rank."""
        self._schedule = schedule

    @property
    def done(self) -> bool:
        """Whether there is nothing left to wait for."""
        return self._schedule is None or self._schedule.is_done

    @property
    def log(self) -> InjectionLog | None:
        """What has happened on this rank; None if nothing has."""
        return None if self._schedule is None else self._schedule.log

    def remove(self) -> None:
        """Take off every hook; what has not happened will not. Twice is fine."""
        if self._schedule is not None:
            self._schedule.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if kind is None and self._schedule is not None:
                self._schedule.look()
        finally:
            self.remove()

    def __repr__(self) -> str:
        faults = 0 if self.log is None else self.log.injected
        state = "done" if self.done else "waiting" if self._schedule and self._schedule.is_open else "removed"
        return f"<LiveInjection: {state}, {faults} faults>"


class Schedule:
    """One target, its step, and the hooks that tell when that is."""

    def __init__(
        self,
        target: Target,
        model: nn.Module,
        step: int,
        *,
        now: int,
        clock: Callable[[], int] | None,
        settings: Mapping[str, Json],
    ) -> None:
        self.is_open, self.is_done = True, False
        self.log: InjectionLog | None = None
        self._target, self._model, self._step, self._settings = target, model, step, settings
        # Sizes are seen in the step before.
        self._first = step - 1 if target.watches and target.order.needs_sizes else step
        self._present, self._clock = now, clock
        self._is_listening = False
        self._handles: list[Any] = []
        target.over, target.failed = self._end, self.close

    def begin(self, optimizer: Optimizer | None) -> None:
        """Hook what has to be hooked; what can happen at once does."""
        if self._clock is None and optimizer is not None:
            self._handles.append(optimizer.register_step_post_hook(self._count))
        if self._clock is not None or self._present >= self._first:
            self._listen()
        if self._present == self._step:
            self._target.strike()
        elif self._present == self._first:
            self._target.watch()

    def look(self) -> None:
        """Raise what there is to be said if the step has gone by."""
        present = self._present if self._clock is None else self._clock()
        if self.is_open and present > self._step:
            self.close()
            raise self._target.missed(self._step)

    def close(self) -> None:
        """Take off every hook; twice is fine."""
        if self.is_open:
            self.is_open = False
            happened = self._target.happened
            if self.log is None and happened is not None and happened.plans:  # some of them, before it was over
                self.log = self._target.order.log(happened, self._settings)
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
        self._target.close()

    def _end(self) -> None:
        """Everything has happened."""
        assert self._target.happened is not None
        self.log = self._target.order.log(self._target.happened, self._settings)
        self.is_done = True
        self.close()

    def _listen(self) -> None:
        if not self._is_listening:
            self._is_listening = True
            self._handles.append(self._model.register_forward_pre_hook(self._before_pass))

    def _count(self, *_: object) -> None:
        """The optimizer has made a step."""
        self._present += 1
        if self._present >= self._first and self.is_open:
            self.look()
            self._listen()

    def _before_pass(self, model: nn.Module, _: object) -> None:
        if not self.is_open or not model.training:
            return
        self.look()
        present = self._present if self._clock is None else self._clock()
        if present == self._step:
            self._target.strike()
        elif present == self._first:
            self._target.watch()
