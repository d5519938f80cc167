"""Finds scripts that leave out a call of the loop: they would train something else on each rank, and end well.

| the script | is stopped at |
|---|---|
| gives a call an argument that it does not have, or one of a wrong kind | that call |
| gives `job.wrap` a model that is sharded, wrapped or not there yet | `job.wrap` |
| calls `job.wrap` on some ranks only | `job.wrap`, or the first batch of the others |
| calls `job.step` without `job.wrap`, or trains parameters that are not the wrapped model's | its first `job.step` |
| calls `job.step` without a backward pass since the last one | that `job.step` |
| scales the loss by a gradient scaler that `job.track` was not given | the first `job.step` |
| loops again over the batches of one call of `job.batches` | the second loop |
| gives `job.step` optimizers that have none of the wrapped model's parameters | the first `job.step` of an epoch |
| runs backward through the wrapped model outside of `job.batches` | that backward |
| calls `optimizer.step()` on the wrapped model, and not `job.step` | that call; between epochs the next `job.batches` |
| calls `optimizer.step()` in `job.batches`, and wraps nothing | the end of the epoch |
| runs backward through the wrapped model in `job.batches`, and never calls `job.step` | the end of the epoch |
| joins, and calls optimizers of its own only | the end of the job |

An optimizer that has none of the wrapped model's parameters is the script's own affair, as long as there are steps of
the job too. So is a script that calls no optimizer: it evaluates.
"""

from __future__ import annotations

import gc
import inspect
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from evergrad.errors import UsageError
from evergrad.recovery.local_state import is_scaler
from evergrad.recovery.untracked_state import parts_of
from evergrad.wording import count_of, did_you_mean, join_with_or, short_repr

_P = ParamSpec("_P")
_R = TypeVar("_R")

_LOOP = (
    "A job trains by: model = job.wrap(model); for batch in job.batches(loader): …; loss.backward(); "
    "job.step(optimizer)"
)
_INSTEAD = (
    "Call job.step(optimizer) instead; a gradient scaler goes into job.track(scaler=scaler), and job.step uses it"
)
_SHARDED = {
    "FSDPModule": "fully_shard (FSDP2)",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "DeepSpeedEngine": "DeepSpeed",
    "DTensor": "DTensor",
}
_PACKAGES = ("deepspeed", "fairscale", "torch")
_REPLICATED = ("DistributedDataParallel", "DataParallel")
_REFUSED = ("process_group", "static_graph", "gradient_as_bucket_view", "delay_all_reduce_named_params", "device_mesh")
_METHODS = ("step", "state_dict", "load_state_dict")
_OWN = ("hooks", "find_unused_parameters", "optimizer", "overlap")


def refusing_wrong_arguments(
    name: str, stopping: Callable[..., AbstractContextManager[None]], expected: str = ""
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a call whose arguments the function does not take a `UsageError`, raised within `stopping(*arguments)`.

    A TypeError that comes from within the function is left as it is. `expected` is the call to advise; the signature by
    default.
    """

    def around(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(function)
        def call(*arguments: _P.args, **named: _P.kwargs) -> _R:
            try:
                return function(*arguments, **named)
            except TypeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                    raise
            with stopping(*arguments):
                raise _wrong_call(name, function, arguments, named, expected)

        return call

    return around


def described(thing: object) -> str:
    """Return what was found where something else was expected: its kind, or a text or a number itself."""
    if isinstance(thing, type):
        return f"the class {thing.__qualname__}"
    is_short = thing is None or isinstance(thing, str | int | float | os.PathLike)
    return short_repr(thing) if is_short else type(thing).__qualname__


def refuse_model(model: object) -> None:
    """`UsageError` for a model that `job.wrap` cannot take, with what to give it instead."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"job.wrap: expected a torch.nn.Module, found {type(model).__qualname__}")
    for name, module in model.named_modules():
        where = f"its module {name!r}" if name else "the model"
        if kind := _kind_of(module, _SHARDED):
            raise _sharded(where, kind)
        if kind := _kind_of(module, _REPLICATED):
            raise UsageError(
                f"job.wrap: {where} is a {kind} already, and job.wrap makes one itself. Give it the module inside, "
                "model.module"
            )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise UsageError(f"job.wrap: {name!r} has no shape yet. Run one forward pass before job.wrap")
        if tensor.is_meta:
            raise UsageError(
                f"job.wrap: {name!r} is on the meta device, so it has no values. Call model.to_empty(device=…) and "
                "initialise it before job.wrap"
            )
        if kind := _kind_of(tensor, _SHARDED):
            raise _sharded(repr(name), kind)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(
            "job.wrap: the model has no parameter that requires a gradient, so there is nothing to train. Leave "
            "job.wrap out where a script only evaluates"
        )


def refuse_options(hooks: object, options: Mapping[str, object]) -> None:
    """`UsageError` for options of `job.wrap` that neither the job nor DDP has, or that DDP has no choice of here."""
    ddp = [name for name in inspect.signature(DistributedDataParallel).parameters if name != "module"]
    if unknown := next((name for name in options if name not in ddp), ""):
        offered = [*_OWN, *(name for name in ddp if name not in (*_OWN, *_REFUSED))]
        raise UsageError(
            f"job.wrap({unknown}=…): expected {join_with_or(_OWN)}, or an option of DistributedDataParallel such as "
            f"bucket_cap_mb.{did_you_mean(unknown, offered)}"
        )
    if wrong := [name for name in _REFUSED if options.get(name)]:
        raise UsageError(f"job.wrap({wrong[0]}=…): that is not DDP's to choose here; leave it out")
    if isinstance(hooks, str) or not isinstance(hooks, Sequence) or not all(map(callable, hooks)):
        raise UsageError(
            f"job.wrap(hooks=…): expected a list of wrappers around a comm hook, [fp16_compress_wrapper], found "
            f"{described(hooks)}"
        )


def refuse_no_optimizers(given: Sequence[Any]) -> None:
    """`UsageError` if what `job.step` is given is no optimizer, or one of them twice."""
    if not given:
        raise UsageError("job.step: expected the optimizer, or all of them")
    for one in given:
        has_groups = isinstance(getattr(one, "param_groups", None), list)
        if isinstance(one, type) or not has_groups or not all(callable(getattr(one, name, None)) for name in _METHODS):
            raise UsageError(f"job.step: expected a torch.optim.Optimizer, found {described(one)}. {_instead_of(one)}")
    if len(set(map(id, given))) < len(given):
        names = ", ".join(type(one).__qualname__ for one in given)
        raise UsageError(
            f"job.step: expected each optimizer once, found {names}, one of them twice: it would make two updates of "
            "the same gradients"
        )


class OptimizerCalls:
    """Watches every optimizer of this process, from `eg.join` to `job.close`."""

    def __init__(self, noticed: Callable[[], None]) -> None:
        """`noticed` is called when an optimizer is about to change the wrapped model by itself; it may raise."""
        self._noticed = noticed
        self.by_job = False
        """True if the job itself steps an optimizer now."""
        self.direct = ""
        """The optimizer that last changed the wrapped model by itself since this was cleared; empty if none did."""
        self.others = 0
        """Steps of optimizers that have none of the wrapped model's parameters, since this was cleared."""
        self.in_all = 0
        """Steps that were not the job's, ever."""
        self._wrapped: frozenset[int] = frozenset()
        self._overlapped: Optimizer | None = None
        self._hook: Any = register_optimizer_step_pre_hook(self._before)

    def know(self, model: nn.Module, overlapped: Optimizer | None = None) -> None:
        """This is the model that is wrapped, and the optimizer that the job steps within backward."""
        self._wrapped, self._overlapped = frozenset(map(id, model.parameters())), overlapped

    def refuse_direct(self, where: str) -> None:
        """`UsageError` if an optimizer has changed the wrapped model by itself."""
        if self.direct:
            name, self.direct = self.direct, ""
            raise UsageError(
                f"{name}.step() was called {where}, on the model of job.wrap: the job does not know of that step, "
                f"cannot repeat it when a rank is lost, and counts none. {_INSTEAD}"
            )

    def refuse_epoch(self) -> None:
        """`UsageError` at the end of an epoch in a job without a step, if optimizers were stepped in it."""
        if self.others:
            raise UsageError(
                f"job.batches: the epoch is over, {count_of(self.others, 'step')} of an optimizer came from "
                "optimizer.step() and none from job.step, and no model was given to job.wrap: ranks train different "
                f"models. {_LOOP}"
            )

    def unused(self, has_model: bool) -> str:
        """Return the error of a job that made no step though optimizers were stepped; empty if none were."""
        if not self.in_all:
            return ""
        missing = "job.batches and job.step" if has_model else "job.wrap, job.batches and job.step"
        return (
            f"the script called eg.join and made {count_of(self.in_all, 'optimizer step')}, but never called "
            f"{missing}: each rank has trained a model of its own. {_LOOP}"
        )

    def close(self) -> None:
        """Watch no longer. Twice is fine."""
        self._hook.remove()

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        """An optimizer is about to step."""
        if self.by_job or optimizer is self._overlapped:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not any(id(parameter) in self._wrapped for parameter in parameters):
            self.others += 1
            self.in_all += 1
        elif _has_gradient(parameters):  # without, it only makes its state, as some loaders of checkpoints have it do
            self.direct = type(optimizer).__qualname__
            self.in_all += 1
            self._noticed()


class EpochBatches(Iterator[Any]):
    """The result of `job.batches`: the batches of one epoch, which can be iterated once.

    A DataLoader begins anew with each `for`; an iterator that has ended gives nothing, and an epoch would have no step.
    """

    def __init__(self, batches: Generator[Any, None, None], stopping: Callable[[], AbstractContextManager[None]]):
        self._batches, self._stopping = batches, stopping
        self._has_begun = self._has_ended = self._is_taken_in_parts = False

    def __iter__(self) -> EpochBatches:
        if self._has_ended and not self._is_taken_in_parts:
            with self._stopping():
                raise UsageError(
                    "job.batches: the batches of one call are one epoch, and this one is over: a second loop over them "
                    "would get none. Call job.batches(loader) anew for each epoch: for batch in job.batches(loader)"
                )
        if self._has_begun and not self._has_ended:  # as by islice, which asks again at the end
            self._is_taken_in_parts = True
        return self

    def __next__(self) -> Any:
        self._has_begun = True
        try:
            return next(self._batches)
        except StopIteration:
            self._has_ended = True
            raise

    def close(self) -> None:
        """Leave the epoch. Twice is fine."""
        self._batches.close()


def refuse_unrelated_optimizers(optimizers: Sequence[Optimizer], model: nn.Module) -> None:
    """`UsageError` if the optimizers of a step have no parameter of the wrapped model: it would stay as it is."""
    wrapped = frozenset(map(id, model.parameters()))
    found = [parameter for each in optimizers for group in each.param_groups for parameter in group["params"]]
    if any(id(parameter) in wrapped for parameter in found):
        return
    names = ", ".join(dict.fromkeys(type(each).__qualname__ for each in optimizers))
    raise UsageError(
        f"job.step: expected an optimizer with parameters of the model that job.wrap was given, found {names} with "
        f"{count_of(len(found), 'parameter')}, none of them that model's (they may be those of a copy): its "
        "steps would "
        "leave the wrapped model as it is. Build the optimizer from the wrapped model: model = job.wrap(model); "
        f"optimizer = {type(optimizers[0]).__qualname__}(model.parameters(), …)"
    )


def used_scalers() -> list[GradScaler]:
    """The gradient scalers of this process that have scaled a loss, by another factor than 1."""
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), GradScaler)]
    return [one for one in found if one.is_enabled() and one._scale is not None and one.get_scale() != 1.0]


def refuse_untracked_scaler(
    optimizers: Sequence[Optimizer], tracked: Mapping[str, Any], earlier: Sequence[GradScaler]
) -> None:
    """`UsageError` if a gradient scaler has scaled a loss, and nobody divides the gradients by its scale again.

    Those that had been used `earlier`, before the model was wrapped, are of another training.
    """
    known = {id(part) for thing in tracked.values() for part in parts_of(thing)} | {id(one) for one in earlier}
    for thing in used_scalers():
        states = thing._per_optimizer_states
        has_unscaled = any(id(one) in states and states[id(one)]["stage"] is OptState.UNSCALED for one in optimizers)
        if id(thing) not in known and not has_unscaled:
            raise UsageError(
                f"job.step: a {type(thing).__qualname__} has scaled a loss, and is not tracked, so the step would be "
                "made with scaled gradients. Call job.track(scaler=scaler) before the loop: job.step then calls the "
                "scaler's step and update. Or call scaler.unscale_(optimizer) before job.step, and update() after it"
            )


def refuse_parameters(optimizers: Sequence[Optimizer], reduced: Iterable[torch.Tensor]) -> None:
    """`UsageError` if a step would change parameters whose gradients are not reduced over ranks."""
    known = frozenset(map(id, reduced))
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in known and parameter.requires_grad and parameter.grad is not None:
                    raise UsageError(
                        f"job.step: group {index} of {type(optimizer).__qualname__} has a parameter of shape "
                        f"{tuple(parameter.shape)} whose gradient is not reduced over ranks: it was not in the model "
                        "that job.wrap was given, or required no gradient then. Put all that is trained into one "
                        "module, and wrap that"
                    )


def refuse_without_gradients(optimizers: Sequence[Optimizer]) -> None:
    """`UsageError` where no parameter of these optimizers has a gradient: without other ranks nothing else tells."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if all(parameter.grad is None for group in groups for parameter in group["params"]):
        raise UsageError(
            "job.step: no parameter of the optimizer has a gradient, so the step would change nothing. Call "
            "loss.backward() before job.step, and optimizer.zero_grad() before backward()"
        )


def unreduced(model: DistributedDataParallel) -> UsageError:
    """Return the error of a step of which not all backward passes have reduced gradients, with the likely cause."""
    if not getattr(model, "_lazy_init_ran", True):
        return UsageError(
            "job.step: the model that job.wrap returned was never called, so no gradients are reduced. Compute the "
            "loss by it, and not by the module that job.wrap was given: model = job.wrap(model); model(x)"
        )
    if all(parameter.grad is None for parameter in model.parameters()):
        return UsageError(
            "job.step: no backward pass has run through the wrapped model since the last step, or since its gradients "
            "were set to None. Call loss.backward() before job.step"
        )
    return UsageError(
        "job.step: no gradients of the last batch were reduced. Either loss.backward() was not called for it, or it "
        "ran under no_sync(), or the loss was not computed by the model that job.wrap returned, or it does not reach "
        "all parameters: job.wrap(model, find_unused_parameters=True)"
    )


def _wrong_call(
    name: str, function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any], expected: str
) -> UsageError:
    """The error of a call with these arguments, which the function does not take."""
    signature = inspect.signature(function)
    parameters = [one for one in signature.parameters.values() if one.name != "self"]
    known = [one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    try:
        signature.bind(*arguments, **named)
        why = "wrong arguments"
    except TypeError as error:
        why = str(error)
    unknown = next((one for one in named if one not in known), "")
    plain = [one.replace(annotation=one.empty) for one in parameters]
    expected = expected or f"{name}{signature.replace(parameters=plain, return_annotation=signature.empty)}"
    return UsageError(f"{name}: {why}.{did_you_mean(unknown, known) if unknown else ''} Expected {expected}")


def _instead_of(thing: Any) -> str:
    """Return what to do for somebody who has given this to `job.step` in place of an optimizer."""
    if isinstance(thing, list | tuple):
        return "Give it all of them, and no list: job.step(*optimizers)"
    if isinstance(getattr(thing, "optimizer", None), Optimizer):
        return "A scheduler goes into job.track(scheduler=scheduler): if job.step(optimizer): scheduler.step()"
    if is_scaler(thing):
        return "A gradient scaler goes into job.track(scaler=scaler), and job.step(optimizer) uses it"
    if isinstance(thing, torch.Tensor):
        return "Call loss.backward() before it, and then job.step(optimizer)"
    if isinstance(thing, nn.Module):
        return "Give it the optimizer of that model's parameters: job.step(optimizer)"
    if inspect.isroutine(thing):
        return "It takes no closure: compute the loss and call backward() before it, and then job.step(optimizer)"
    if callable(getattr(thing, "step", None)):
        return "One of your own is a subclass of torch.optim.Optimizer, with param_groups and state_dict"
    return "Give it what updates the model's parameters: job.step(optimizer)"


def _sharded(where: str, kind: str) -> UsageError:
    return UsageError(
        f"job.wrap: {where} is sharded over ranks by {kind}, and a rank that dies takes its part along. Give job.wrap "
        "a model that every rank has whole; for sharded models there are checkpoints (docs/placement.md)"
    )


def _kind_of(thing: object, names: Iterable[str]) -> str:
    """Which of these classes this is one of, by name: importing them all would take a while."""
    bases = {base.__name__ for base in type(thing).__mro__ if base.__module__.partition(".")[0] in _PACKAGES}
    found = next((name for name in names if name in bases), "")
    return _SHARDED.get(found, found)


def _has_gradient(parameters: Iterable[torch.Tensor]) -> bool:
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return any(bool(torch.count_nonzero(grad)) for grad in grads)
