"""Finds state of the script that neither the model, the optimizers nor `job.track` hold.

A process that joins, or that begins again from a checkpoint, runs the script from its beginning. A scheduler, a step
counter or a generator that is not tracked begins anew there, and so do those of all ranks if the whole job begins
again: ranks are alike then, and a comparison of ranks finds nothing. So the process looks for such state itself, and
reports what nobody can verify:

| state | found because |
|---|---|
| a scheduler of one of the job's optimizers | it is stepped, and was not where the job is when the job went on |
| hyper-parameters that the script sets | it has not asked the job where it is; or the job began with the same ones |
| generators in its variables and objects | numbers are drawn after the state was taken up, or when a step is redone |
"""

from __future__ import annotations

import gc
import hashlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from evergrad.recovery.course import OPENING
from evergrad.recovery.snapshots import is_scaler

__all__ = ["Untracked", "find_generators", "find_schedulers", "hyper_parameters_digest"]

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


@dataclass(slots=True)
class _Scheduler:
    """A scheduler that is not tracked, as it was at the first step after a restore."""

    scheduler: Any
    began_at: int
    last: int


class Untracked:
    """The untracked state of one process; what is found is reported once a kind."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self.has_read_step = False
        """True if the script has asked the job where it is, since the last step."""
        self._since = -1
        """The step that this process has restored; -1 if it has restored none, or all is reported."""
        self._went_on_at = (0, 0)
        """The step and the epoch of the first step since then."""
        self._epoch = -1
        self._hyper = ""
        """The hyper-parameters after the last step, as a digest; empty if they are not known."""
        self._schedulers: list[_Scheduler] | None = None
        self._generators: list[tuple[str, Any, Any]] = []
        self._where = ""

    def restored(self, step: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """This process goes on from a checkpoint, and its script's own code begins to count now."""
        self._since, self._schedulers, self.has_read_step = step, None, False
        self._hyper = hyper_parameters_digest(groups) if groups else ""

    def watch_generators(self, where: str, tracked: Mapping[str, Any], loaders: Iterable[Any]) -> None:
        """Report if numbers are drawn from the script's own generators from now on; `where` says what happened now."""
        if not self._where:
            self._where = where
            self._generators = [
                (name, one, _state_of(one)) for name, one in find_generators(_namespaces(), tracked, loaders)
            ]

    def before_step(
        self, step: int, epoch: int, opening: list[str], optimizers: Sequence[Optimizer], tracked: Mapping[str, Any]
    ) -> None:
        """A step is about to be applied: look at what the script has done since the last one."""
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        if step == len(opening) < OPENING:
            opening.append(hyper_parameters_digest(groups))
        self._look_at_generators()
        if self._since < 0:
            return
        if self._schedulers is None:
            self._went_on_at, self._epoch = (step, epoch), epoch
            self._schedulers = [
                _Scheduler(one, one.last_epoch, one.last_epoch) for one in find_schedulers(optimizers, tracked)
            ]
        moved = self._look_at_schedulers(epoch)
        if self._since >= 0 and not moved and not any(not is_scaler(thing) for thing in tracked.values()):
            self._look_at_hyper_parameters(step, opening, groups)
        self._epoch = epoch

    def after_step(self, optimizers: Sequence[Optimizer]) -> None:
        """A step was applied: from here on the script prepares the next one."""
        self.has_read_step = False
        if self._since >= 0:
            self._hyper = hyper_parameters_digest([group for one in optimizers for group in one.param_groups])

    def _look_at_schedulers(self, epoch: int) -> bool:
        """Report the first untracked scheduler that is stepped and began anew; True if any was stepped."""
        moved = False
        for one in self._schedulers or ():
            if one.scheduler.last_epoch == one.last:
                continue
            moved, one.last = True, one.scheduler.last_epoch
            # Code between epochs runs also for those that are over, and brings such a scheduler where the job is.
            step, at_epoch = self._went_on_at
            expected = [step] if epoch == self._epoch else [step, at_epoch]
            if one.began_at not in expected or isinstance(one.scheduler, ReduceLROnPlateau):
                self._doubt(
                    f"the script steps a {type(one.scheduler).__qualname__} that is not tracked, and that began anew "
                    f"when the job went on from step {self._since}: job.track(scheduler=scheduler)"
                )
                break
        return moved

    def _look_at_hyper_parameters(self, step: int, opening: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> None:
        now, index = hyper_parameters_digest(groups), step - self._went_on_at[0]
        if not self._hyper or now == self._hyper:
            return
        if step != index < len(opening) and opening[index] == now:
            self._doubt(
                f"step {step}, after the job went on from step {self._since}, has the hyper-parameters that step "
                f"{index} had, so a counter of the script seems to have begun anew: compute them from job.applied"
            )
        elif not self.has_read_step:
            self._doubt(
                f"the script has set hyper-parameters for step {step}, after the job went on from step {self._since}, "
                "and nobody knows from what: compute them from job.applied, or give job.track what they come from"
            )

    def _look_at_generators(self) -> None:
        for name, generator, state in self._generators:
            if _state_of(generator) != state:
                self._generators = []
                self._report(
                    f"the script draws random numbers from its own generator {name!r}, which is not tracked, "
                    f"{self._where}: draw them from torch, numpy.random or random themselves"
                )
                break

    def _doubt(self, why: str) -> None:
        self._since = -1
        self._report(why)


def hyper_parameters_digest(groups: Sequence[Mapping[str, Any]]) -> str:
    """A digest of the hyper-parameters of parameter groups."""
    found = hashlib.blake2b(digest_size=8)
    for group in groups:
        for key in sorted(key for key in group if key != "params"):
            value = group[key]
            found.update(f"{key}={value.tolist() if isinstance(value, torch.Tensor) else value!r};".encode())
    return found.hexdigest()


def find_schedulers(optimizers: Sequence[Optimizer], tracked: Mapping[str, Any]) -> list[Any]:
    """All schedulers of these optimizers in this process that are neither tracked nor parts of tracked ones."""
    wanted = {id(optimizer.param_groups) for optimizer in optimizers}
    known = {id(part) for thing in tracked.values() for part in _parts(thing)}
    kinds: dict[type, bool] = {}
    found = []
    for thing in gc.get_objects():
        kind = type(thing)  # not isinstance, which would ask proxies for their class
        if kind not in kinds:
            kinds[kind] = issubclass(kind, LRScheduler)
        if not kinds[kind] or id(thing) in known:
            continue
        groups = getattr(getattr(thing, "optimizer", None), "param_groups", None)
        if id(groups) in wanted and isinstance(getattr(thing, "last_epoch", None), int):
            found.append(thing)
    return found


def find_generators(
    namespaces: Iterable[Mapping[str, Any]], tracked: Mapping[str, Any], loaders: Iterable[Any]
) -> list[tuple[str, Any]]:
    """The generators among these variables, and in attributes of the script's own objects, by name.

    Those of the job's loaders are left out, because the job deals the data; so are those that tracked things hold.
    """
    ours: list[Any] = [
        torch.default_generator,
        getattr(random, "_inst", None),
        getattr(np.random.mtrand, "_rand", None),
    ]
    for loader in loaders:
        ours += [getattr(part, "generator", None) for part in (loader, getattr(loader, "sampler", None))]
    known = {id(one) for one in ours} | {id(part) for thing in tracked.values() for part in _parts(thing)}
    found: dict[int, tuple[str, Any]] = {}

    def take(name: str, thing: Any) -> bool:
        is_one = isinstance(thing, _GENERATORS) and not isinstance(thing, random.SystemRandom)
        if is_one and id(thing) not in known:
            found.setdefault(id(thing), (name, thing))
        return is_one

    for names in namespaces:
        for name, thing in list(names.items()):
            if not take(name, thing) and type(thing).__module__ == "__main__":
                for inner, part in list(getattr(thing, "__dict__", {}).items()):
                    take(f"{name}.{inner}", part)
    for loader in loaders:
        for inner, part in list(getattr(getattr(loader, "dataset", None), "__dict__", {}).items()):
            take(f"dataset.{inner}", part)
    return list(found.values())


def _namespaces() -> Iterator[Mapping[str, Any]]:
    """The variables of the script: of its main module, and of every function of it that is being run."""
    main = sys.modules.get("__main__")
    if main is not None:
        yield vars(main)
    frame = sys._getframe(1)
    while frame is not None:
        if not str(frame.f_globals.get("__name__", "")).startswith(("evergrad.", "importlib", "runpy")):
            yield frame.f_locals
        frame = frame.f_back  # type: ignore[assignment]


def _parts(thing: Any) -> list[Any]:
    """A tracked thing, and the objects that it consists of."""
    inner = list(getattr(thing, "__dict__", {}).values())
    lists = [one for value in inner if isinstance(value, list | tuple) for one in value]
    return [thing, *inner, *lists]


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    state = generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()
    return _plain(state)


def _plain(state: Any) -> Any:
    """A copy of NumPy's state of a generator that can be compared: nested, with arrays as bytes."""
    if isinstance(state, Mapping):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, tuple):
        return tuple(map(_plain, state))
    return state.tobytes() if isinstance(state, np.ndarray) else state
