"""Finds state of the script that neither the model, the optimizers nor `job.track` hold.

A process that joins, or that begins again from a checkpoint, runs the script from its beginning. A scheduler, a step
counter or a generator that is not tracked begins anew there, and so do those of all ranks if the whole job begins
again: ranks are alike then, and a comparison of ranks finds nothing. So the process looks for such state itself, and
reports what nobody can verify:

| state | found because |
|---|---|
| a scheduler of one of the job's optimizers | it is stepped, and was not where the job is when the job went on |
| hyper-parameters that the script sets | nothing shows that they come from where the job is, and not from a counter |
| generators in its variables and objects | numbers are drawn after the state was taken up, or when a step is redone |
| gradients that it keeps over a step | the first backward pass of a step finds some that are not 0 |

A counter of the script begins at 0 again. If the first hyper-parameters that the script sets after a restore are others
than those that the job began with, they do not come from such a counter. Hyper-parameters that change later for the
first time could, and so could those that do not change, of a script whose code sets some: that it reads `job.applied`,
to log it say, is no proof.
"""

from __future__ import annotations

import dis
import functools
import gc
import hashlib
import inspect
import os
import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from evergrad.recovery.data_position import OPENING
from evergrad.recovery.local_state import is_scaler

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_MANY_OBJECTS = 40_000
"""So many objects of the script are searched for generators, the nearest first: up to about 20 ms."""
_FIRST_ITEMS = 64
"""So many items of each list or dict."""
_HYPER_PARAMETERS = frozenset(["lr", "weight_decay", "momentum", "betas", "eps", "dampening", "alpha", "initial_lr"])
_LEAVES = (torch.Tensor, np.ndarray, str, bytes, int, float, complex, type(None), Path, LRScheduler, Optimizer)
_OF_MODULES = frozenset(vars(nn.Module())) - {"_modules"}
"""Attributes that every module has: tensors and hooks."""
_LIBRARIES = tuple(
    {sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(Path(library.__file__).parents[1]) + os.sep for library in (torch, np) if library.__file__}
)
_OF_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Parts of paths: of the user's own packages, of another environment that is on the path, of Debian."""


class KeptGradients:
    """Finds gradients that a script keeps from one step to the next, by leaving out `zero_grad`.

    A joiner has none of them, a checkpoint holds none, and a step that is done again begins without. A script does so
    in every step or in none: the second step of this process is watched, and no other one unless that is done again.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._hooks: list[Any] = []
        self._unseen: set[int] = set()
        """Ids of parameters that no backward pass of the watched step has reached yet."""
        self._found: list[torch.Tensor] = []
        self._is_watching = self._are_kept = self._is_reported = False
        self._dropped = ""

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Look at the gradients of these parameters, before a backward pass adds to them."""
        self._hooks = [each.register_hook(functools.partial(self._look, each)) for each in parameters]  # type: ignore[no-untyped-call]

    def applied(self, parameters: Iterable[torch.Tensor]) -> None:
        """A step was applied: the next one is watched; what was found in one that was watched is final."""
        if not self._hooks:
            return
        if self._is_watching:
            self._judge()
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
        else:
            self._is_watching, self._unseen = True, {id(each) for each in parameters}

    def dropped(self, how: str) -> None:
        """Gradients from before were dropped on some rank; `how` says by what."""
        self._dropped = self._dropped or how
        self._judge()
        self._is_watching = False

    def _look(self, parameter: torch.Tensor, _: torch.Tensor) -> None:
        if self._is_watching and id(parameter) in self._unseen:
            self._unseen.discard(id(parameter))
            if parameter.grad is not None and parameter.grad.layout is torch.strided:
                self._found.append(parameter.grad.any())

    def _judge(self) -> None:
        self._are_kept = self._are_kept or any(bool(each) for each in self._found)
        self._found.clear()
        if self._are_kept and self._dropped and not self._is_reported:
            self._is_reported = True
            self._report(
                f"the script keeps gradients from step to step (no zero_grad), and they were dropped where "
                f"{self._dropped}. Call optimizer.zero_grad() in each step"
            )


@dataclass(slots=True)
class _Scheduler:
    """A scheduler that is not tracked, as it was at the first step after a restore."""

    scheduler: Any
    began_at: int
    last: int


class UntrackedState:
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
        self._numbers: list[float] = []
        """The same as numbers."""
        self._last_step = -1
        self._may_set = False
        """True if code of the script sets hyper-parameters, and nothing is tracked that it may have them from."""
        self._is_opening = False
        """True in the first steps of the job."""
        self._is_by_job = False
        """True if the script has set hyper-parameters that no counter that began anew would give."""
        self._schedulers: list[_Scheduler] | None = None
        self._generators: list[tuple[str, Any, Any]] = []
        self._where = ""

    def restored(self, step: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """This process goes on from a checkpoint, and its script's own code begins to count now."""
        self._since, self._schedulers, self.has_read_step, self._is_by_job = step, None, False, False
        self._hyper, self._numbers = hyper_parameters_digest(groups) if groups else "", _numbers_of(groups)

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
        self._is_opening = step == len(opening) < OPENING
        if self._is_opening:
            opening.append(self._change(groups))
        self._look_at_generators()
        if self._since < 0:
            return
        if self._schedulers is None:
            self._went_on_at, self._epoch = (step, epoch), epoch
            self._schedulers = [
                _Scheduler(one, one.last_epoch, one.last_epoch) for one in find_schedulers(optimizers, tracked)
            ]
            self._may_set = sets_hyper_parameters(_script_code())
        gives = any(map(_may_give_hyper_parameters, tracked.values()))
        self._may_set &= not gives
        moved = self._look_at_schedulers(epoch)
        if self._since >= 0 and not moved and not gives:
            self._look_at_hyper_parameters(step, opening, groups)
        self._epoch, self._last_step = epoch, step

    def after_step(self, optimizers: Sequence[Optimizer]) -> None:
        """A step was applied: from here on the script prepares the next one."""
        self.has_read_step = False
        if self._since >= 0 or self._is_opening:
            groups = [group for one in optimizers for group in one.param_groups]
            self._hyper, self._numbers = hyper_parameters_digest(groups), _numbers_of(groups)

    def end(self) -> None:
        """The script's training is over: report hyper-parameters that it may have set by a counter that began anew."""
        is_anew = self._since >= 0 and self._last_step >= self._went_on_at[0] > 0
        if is_anew and self._may_set and not self._is_by_job:
            self._doubt(
                "the script sets hyper-parameters, and they did not change in the first steps after the job went on "
                f"from step {self._since}: they may come from job.applied, or from a counter that began anew. Use a "
                "scheduler, and job.track(scheduler=scheduler)"
            )

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
        index = step - self._went_on_at[0]
        if not self._hyper or index == step or hyper_parameters_digest(groups) == self._hyper:
            return
        known = opening[: self._went_on_at[0]]  # later ones were made after this restore
        if index < len(known) and _repeats(self._change(groups), index, known):
            self._doubt(
                f"step {step}, after the job went on from step {self._since}, has the hyper-parameters that step "
                f"{index} had, so a counter of the script seems to have begun anew: compute them from job.applied"
            )
            return
        self._is_by_job = self._is_by_job or index < len(known)
        if not self.has_read_step:
            self._doubt(
                f"the script has set hyper-parameters for step {step}, after the job went on from step {self._since}, "
                "and nobody knows from what: compute them from job.applied, or give job.track what they come from"
            )
        elif not self._is_by_job:
            self._doubt(
                f"the script has set hyper-parameters for step {step}, and none in the first steps after the job went "
                f"on from step {self._since}: they may come from job.applied, or from a counter that began anew. Use a "
                "scheduler, and job.track(scheduler=scheduler)"
            )

    def _change(self, groups: Sequence[Mapping[str, Any]]) -> str:
        """The hyper-parameters of a step, and by what they were multiplied since the last one: two digests."""
        now = _numbers_of(groups)
        factors = ""
        if len(now) == len(self._numbers) and now != self._numbers:
            ratios = [f"{new / old:.9g}" if old else repr(new) for new, old in zip(now, self._numbers, strict=True)]
            factors = hashlib.blake2b(" ".join(ratios).encode(), digest_size=8).hexdigest()
        return f"{hyper_parameters_digest(groups)} {factors}"

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


def _numbers_of(groups: Sequence[Mapping[str, Any]]) -> list[float]:
    """The numbers among the hyper-parameters of parameter groups."""
    found: list[float] = []
    for group in groups:
        for key in sorted(key for key in group if key != "params"):
            value = group[key].tolist() if isinstance(group[key], torch.Tensor) else group[key]
            found += [float(one) for one in (value if isinstance(value, list | tuple) else [value]) if _is_number(one)]
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _repeats(change: str, index: int, opening: Sequence[str]) -> bool:
    """True if a counter that began anew would have changed the hyper-parameters like this, so many steps later."""
    values, factors = change.split(" ")
    known, known_factors = opening[index].split(" ")
    if values == known:
        return True
    # A factor that is the same in every step needs no counter.
    every = {each.split(" ")[1] for each in opening[1:]}
    return bool(factors) and factors == known_factors and (len(opening) < OPENING or len(every) > 1)


def _may_give_hyper_parameters(tracked: Any) -> bool:
    """True if a script may compute hyper-parameters from this, which a restore brings back."""
    return not (is_scaler(tracked) or isinstance(tracked, nn.Module))


def find_schedulers(optimizers: Sequence[Optimizer], tracked: Mapping[str, Any]) -> list[Any]:
    """All schedulers of these optimizers in this process that are neither tracked nor parts of tracked ones."""
    wanted = {id(optimizer.param_groups) for optimizer in optimizers}
    known = {id(part) for thing in tracked.values() for part in parts_of(thing)}
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


def sets_hyper_parameters(codes: Iterable[types.CodeType]) -> bool:
    """Return True if any of this code has an assignment such as `group["lr"] = rate` or `group["lr"] *= 0.1`.

    >>> sets_hyper_parameters([compile('for group in groups: group["lr"] *= 0.5', "", "exec")])
    True
    >>> sets_hyper_parameters([compile('print(groups[0]["lr"])', "", "exec")])
    False
    """
    left, seen = list(codes), set()
    while left:
        code = left.pop()
        if code in seen:
            continue
        seen.add(code)
        left += [part for part in code.co_consts if isinstance(part, types.CodeType)]
        if _HYPER_PARAMETERS.isdisjoint(part for part in code.co_consts if isinstance(part, str)):
            continue
        operations = list(dis.get_instructions(code))
        # A plain assignment has its key right before it; an augmented one has copied it before.
        plain = any(
            one.opname == "STORE_SUBSCR" and before.opname == "LOAD_CONST" and before.argval in _HYPER_PARAMETERS
            for before, one in pairwise(operations)
            if isinstance(before.argval, str)
        )
        augmented = any(
            one.opname == "LOAD_CONST" and isinstance(one.argval, str) and one.argval in _HYPER_PARAMETERS
            and after.opname in ("COPY", "DUP_TOP_TWO")
            for one, after in pairwise(operations)
        )  # fmt: skip
        if plain or augmented:
            return True
    return False


def _script_code() -> Iterator[types.CodeType]:
    """The code of the script that is being run, and of what its modules define."""
    yield from (frame.f_code for frame in _frames())
    # By type throughout: objects that make up their attributes, such as those of torch.classes, may raise anything.
    modules = [module for module in [*sys.modules.values()] if issubclass(type(module), types.ModuleType)]
    for module in filter(_is_of_script, modules):
        for thing in [*vars(module).values()]:
            for part in [thing, *(vars(thing).values() if issubclass(type(thing), type) else ())]:
                if issubclass(type(part), (staticmethod, classmethod, types.MethodType)):
                    part = part.__func__
                if issubclass(type(part), types.FunctionType):
                    yield part.__code__


def find_generators(
    namespaces: Iterable[Mapping[str, Any]], tracked: Mapping[str, Any], loaders: Iterable[Any]
) -> list[tuple[str, Any]]:
    """The generators that these variables and the loaders' datasets reach, by name; the script's objects are searched.

    Those of data loaders and of their samplers are left out, because the job deals the data; so are those that tracked
    things hold.
    """
    ours: list[Any] = [
        torch.default_generator,
        getattr(random, "_inst", None),
        getattr(np.random.mtrand, "_rand", None),
    ]
    for loader in loaders:
        ours += [getattr(part, "generator", None) for part in (loader, getattr(loader, "sampler", None))]
    known = {id(one) for one in ours} | {id(part) for thing in tracked.values() for part in parts_of(thing)}
    left: deque[tuple[str, Any]] = deque()
    for loader in loaders:
        left.append(("dataset", getattr(loader, "dataset", None)))
    for names in namespaces:
        left += [(name, thing) for name, thing in list(names.items()) if not name.startswith("__")]
    found, seen, kept = [], set(known), []
    num_left = _MANY_OBJECTS
    while left:
        name, thing = left.popleft()
        if issubclass(type(thing), _LEAVES) or id(thing) in seen:
            continue
        seen.add(id(thing))
        kept.append(thing)  # else another object may get its number
        if issubclass(type(thing), _GENERATORS):
            if not isinstance(thing, random.SystemRandom):
                found.append((name, thing))
            continue
        with suppress(Exception):  # of properties of a user's object; a search must not end the training
            more = [(name + label, part) for label, part in _reached_from(thing)][:num_left]
            num_left -= len(more)
            left += more
    return found


def _reached_from(thing: Any) -> Iterator[tuple[str, Any]]:
    """The objects that one of the script's own objects holds, each with what is added to its name."""
    match thing:
        case dict() | types.MappingProxyType():
            yield from ((f"[{key!r}]", part) for key, part in [*thing.items()][:_FIRST_ITEMS])
        case list() | tuple() | set() | frozenset() | deque():
            yield from ((f"[{index}]", part) for index, part in enumerate([*thing][:_FIRST_ITEMS]))
        case types.ModuleType() | type():
            if _is_of_script(thing):
                yield from ((f".{name}", part) for name, part in [*vars(thing).items()] if not name.startswith("__"))
        case types.FunctionType():
            if _is_of_script(thing):
                cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
                yield from ((f".{name}", cell.cell_contents) for name, cell in cells if _is_filled(cell))
                yield from (
                    ("()", part) for part in (*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values())
                )
        case types.MethodType() | types.BuiltinMethodType():
            yield "", thing.__self__
        case types.GeneratorType():
            yield from ((f".{name}", part) for name, part in (inspect.getgeneratorlocals(thing) or {}).items())
        case functools.partial():
            yield from (("()", part) for part in (thing.func, *thing.args, *thing.keywords.values()))
    yield from _attributes(thing)


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object, in its dict and in slots, without those of the job and of a loader's sampling."""
    kind = type(thing)
    if kind.__module__.partition(".")[0] in ("builtins", "evergrad"):
        return
    names = getattr(thing, "__dict__", None)
    if isinstance(thing, torch.utils.data.DataLoader):
        names = {"dataset": thing.dataset}
    elif isinstance(thing, torch.utils.data.Sampler):
        names = {}
    if isinstance(names, dict):
        for name, part in [*names.items()]:
            if name == "_modules" and isinstance(thing, nn.Module):
                yield from ((f".{child}", module) for child, module in [*part.items()])
            elif name not in _OF_MODULES:
                yield f".{name}", part
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            slot = base.__dict__.get(name)
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    yield f".{name}", slot.__get__(thing)
                except AttributeError:  # nothing is in it
                    continue
    if _is_of_script(kind):
        yield "", kind  # attributes of the class


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_of_script(thing: Any) -> bool:
    """True for a module of the user's, and for what such a module defines; not for those of libraries."""
    if issubclass(type(thing), types.ModuleType):
        name = vars(thing).get("__name__")
    else:
        name = getattr(thing, "__module__", None)
    if not isinstance(name, str) or name not in sys.modules:
        return False
    if name == "__main__":
        return True
    # Modules that are made at run time, such as torch.classes, have no path of their own: that of their package counts.
    package = name.partition(".")[0]
    files = [getattr(sys.modules.get(each), "__dict__", {}).get("__file__") for each in (package, name)]
    file = next(filter(None, files), None)  # a folder without __init__.py is a package without a path
    return package != "evergrad" and isinstance(file, str) and not _is_of_library(file)


def _is_of_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or any(part in file for part in _OF_LIBRARIES)


def _namespaces() -> Iterator[Mapping[str, Any]]:
    """The variables of the script: of its main module, and of every function of it that is being run."""
    main = sys.modules.get("__main__")
    if main is not None:
        yield vars(main)
    yield from (frame.f_locals for frame in _frames())


def _frames() -> Iterator[types.FrameType]:
    """The calls that are being run and are the script's, the innermost first."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if not str(frame.f_globals.get("__name__", "")).startswith(("evergrad.", "importlib", "runpy")):
            yield frame
        frame = frame.f_back


def parts_of(thing: Any) -> list[Any]:
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
