"""What live faults hit: the contract, and the targets that lie in memory between two passes.

Paths are those that a file of `{"model": model.state_dict(), "optimizer": optimizer.state_dict()}` has; of a wrapped
model, those of the model inside. Gradients have paths of their own: `gradients/<parameter>`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from evergrad.dtypes import DType
from evergrad.errors import UnknownTensor, UsageError
from evergrad.injection.injector import Selection
from evergrad.injection.live_faults import InjectedFaults, LiveFaults, LiveState, ObservedTensors
from evergrad.records import Role, TensorInfo
from evergrad.state import escape, flatten, select
from evergrad.state.paths import ROOT

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer


_ROLES = {"weights": Role.MODEL, "buffers": Role.BUFFER, "optimizer": Role.OPTIMIZER}


class LiveTarget(ABC):
    """What is hit in a step, and at which moment of it.

    `watch` comes before the passes of the step before, if the target wants that, `strike` before those of the step
    itself; both may come several times. When all has happened it calls `over`, which calls `close`.
    """

    needs_previous_step = False
    """Whether it has to see the pass before the step."""
    on_done: Callable[[], None]
    """Given by who schedules: everything has happened."""
    on_error: Callable[[], None]
    """The same after an error: nothing more will."""

    def __init__(self, order: LiveFaults) -> None:
        self.faults = order
        self.injected: InjectedFaults | None = None
        self.handles: list[Any] = []

    @abstractmethod
    def check(self, *, now: bool) -> list[TensorInfo]:
        """What may be hit, as far as it is known; `UsageError` if that is nothing. `now`: the step has come."""

    def observe_previous_step(self) -> None:  # noqa: B027 – most have nothing to see
        """The step before has come."""

    @abstractmethod
    def inject(self) -> None:
        """The step has come: hit, or hook what is to come in it."""

    @abstractmethod
    def missed_error(self, step: int) -> UsageError:
        """What to say when the step has gone by, and not everything has happened."""

    def close(self) -> None:
        """Take off every hook; twice is fine."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    @contextmanager
    def closing_on_error(self) -> Iterator[None]:
        """An error is the end of it."""
        try:
            yield
        except BaseException:
            self.on_error()
            raise


class StateTarget(LiveTarget):
    """Weights, buffers, optimizer state, or all of them: hit right before a forward pass."""

    def __init__(self, order: LiveFaults, target: str, model: nn.Module, optimizer: Optimizer | None) -> None:
        super().__init__(order)
        self._target, self._model, self._optimizer = target, model, optimizer

    def check(self, *, now: bool) -> list[TensorInfo]:
        """An optimizer makes its state in its first step: until then, what is not there yet may come."""
        state, roles = self._tensors()
        is_empty = self._target in ("optimizer", "state") and Role.OPTIMIZER not in roles.values()
        if is_empty and now and self._target == "optimizer":
            raise UsageError("optimizer: it has no state yet, which its first step makes. Choose a later step.")
        try:
            return self.faults.eligible_tensors(LiveState(state, roles))
        except UsageError:
            if is_empty and not now:
                return []
            raise

    def inject(self) -> None:
        """All of it, now."""
        with self.closing_on_error():
            self.injected = self.faults.inject(LiveState(*self._tensors()))
        self.on_done()

    def missed_error(self, step: int) -> UsageError:
        """Nobody called the model."""
        return UsageError(
            f"step {step} has gone by without a forward pass in training mode through the model that was given: "
            "nothing was hit. Give inject_live the module that the loop calls."
        )

    def _tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, Role]]:
        found = dict(_model_state(unwrap_model(self._model)))
        if self._optimizer is not None and self._target in ("optimizer", "state"):
            found.update((path, (tensor, Role.OPTIMIZER)) for path, tensor in _optimizer_state(self._optimizer).items())
        wanted = _ROLES.get(self._target)
        found = {path: one for path, one in found.items() if wanted is None or one[1] is wanted}
        return {path: one[0] for path, one in found.items()}, {path: one[1] for path, one in found.items()}


class GradientTarget(LiveTarget):
    """The gradients of parameters: hit right before the optimizer's step."""

    def __init__(self, order: LiveFaults, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(order)
        self._model, self._optimizer = model, optimizer
        self._is_acting = False

    def check(self, *, now: bool) -> list[TensorInfo]:
        """Gradients will be as their parameters are."""
        return self.faults.eligible_tensors(_live(self._model, lambda parameter: parameter))

    def inject(self) -> None:
        """Wait for the optimizer."""
        if not self.handles:
            self.handles.append(self._optimizer.register_step_pre_hook(self._act))

    def missed_error(self, step: int) -> UsageError:
        """Another optimizer has made the step."""
        return UsageError(f"step {step} has gone by without optimizer.step(): no gradient was hit. Give its optimizer.")

    def close(self) -> None:
        """Torch goes through an optimizer's hooks while they run: there it must wait for the next pass."""
        if self._is_acting:
            self.handles.append(self._model.register_forward_pre_hook(lambda *_: self.close()))
        else:
            super().close()

    def _act(self, *_: object) -> None:
        if self.injected is not None:
            return
        with self.closing_on_error():
            live = _live(self._model, lambda parameter: parameter.grad)
            if not live.tensors:
                raise UsageError("gradients: no parameter has one at optimizer.step(). Call backward() before it.")
            self.injected = self.faults.inject(live)
        self._is_acting = True
        try:
            self.on_done()
        finally:
            self._is_acting = False


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model itself, without what synchronises its gradients."""
    while is_wrapped(model):
        found: Any = model.module
        model = found
    return model


def is_wrapped(model: nn.Module) -> bool:
    """Whether this is DDP, or what a job of one rank has instead."""
    from torch import nn

    return isinstance(getattr(model, "module", None), nn.Module) and callable(getattr(model, "no_sync", None))


def _model_state(model: nn.Module) -> Iterator[tuple[str, tuple[torch.Tensor, Role]]]:
    """What its state dict holds of the model itself: copies that somebody puts there are not in use."""
    weights, buffers = {id(one) for one in model.parameters()}, {id(one) for one in model.buffers()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in weights or id(tensor) in buffers:
            yield f"model/{escape(name)}", (tensor, Role.MODEL if id(tensor) in weights else Role.BUFFER)


def _optimizer_state(optimizer: Optimizer) -> Mapping[str, torch.Tensor]:
    """What its state dict holds of what it uses itself, and no copies."""
    used = {one.untyped_storage().data_ptr() for one in _within((optimizer.state, optimizer.param_groups))}
    found = flatten({"optimizer": optimizer.state_dict()}).tensors
    return {path: tensor for path, tensor in found.items() if tensor.untyped_storage().data_ptr() in used}


def _within(value: object) -> Iterator[torch.Tensor]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _within(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _within(one)


def _live(model: nn.Module, of: Callable[[nn.Parameter], torch.Tensor | None]) -> LiveState:
    named = unwrap_model(model).named_parameters()
    found = {f"gradients/{escape(name)}": of(one) for name, one in named if one.requires_grad}
    state = {path: one for path, one in found.items() if one is not None}
    return LiveState(state, dict.fromkeys(state, Role.MODEL))


# What live faults hit as it passes by: activations, and buckets on their way to the other ranks.
#
# Such tensors live for a moment. The pass before the step shows how large they are, which decides how many faults
# each gets; every one is then hit when it passes by in the step itself, once.


class TransientTarget(LiveTarget):
    """Tensors that are met one by one in a pass."""

    needs_previous_step = True
    what: str
    """What they are called."""

    def __init__(self, order: LiveFaults) -> None:
        super().__init__(order)
        self._seen: dict[str, tuple[DType, tuple[int, ...]]] = {}
        self._shares: dict[str, int] | None = None
        """What is still to happen, in the step."""

    def check(self, *, now: bool) -> list[TensorInfo]:
        """Sizes are those of the pass before: there has to be one."""
        if now and self.faults.needs_sizes:
            raise UsageError(
                f"{self.what}: how large they are is seen in the step before, so that they cannot be hit in the very "
                "next one. Choose a later step."
            )
        return []

    def inject(self) -> None:
        """Deal the faults out by what was seen."""
        self.observe_previous_step()
        if self._shares is not None:
            return
        with self.closing_on_error():
            if self.faults.needs_sizes and not self._seen:
                raise self.unseen_error()
            self.injected, self._shares = self.faults.shares(ObservedTensors(self._seen))
        if not self._shares:  # a rate may come to nothing
            self.on_done()

    def unseen_error(self) -> UsageError:
        """What to say when nothing passed by in the step before."""
        return UsageError(f"{self.what}: none passed by in the step before, so that nothing is known of them")

    def on_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor passes by."""
        dtype = DType.of_torch(tensor.dtype)
        if self._shares is None:
            if dtype is not None:
                self._seen[name] = dtype, tuple(tensor.shape)
            return
        share = self._shares.get(name)
        if share is None:
            return
        assert self.injected is not None
        self.injected.plans.append(self.faults.inject_share(LiveState({name: tensor}), name, share))
        del self._shares[name]
        if not self._shares:
            self.on_done()

    @property
    def not_injected(self) -> Mapping[str, int]:
        """The faults that have not happened, by what they were meant for."""
        return self._shares or {}


class ActivationTarget(TransientTarget):
    """What modules give, in training mode: altered in the very memory that the next operation reads."""

    what = "activations"

    def __init__(
        self, order: LiveFaults, model: nn.Module, where: Selection | None, names: Iterable[str] | None = None
    ) -> None:
        """`where` chooses modules, by default those without modules below them; `names` are those of a log."""
        super().__init__(order)
        self._root = unwrap_model(model)
        self._modules = _modules(self._root, where)
        if names is not None:
            wanted = {name.removeprefix("activations/") for name in names}
            known = dict(self._root.named_modules())
            self._modules = {_path(name): known[name] for name in known if _owns(_path(name), wanted)}
            for name in wanted:
                if not any(_owns(path, {name}) for path in self._modules):
                    raise UnknownTensor(name, map(_path, known), what="module")

    def observe_previous_step(self) -> None:
        """Listen to the modules."""
        if not self.handles:
            hooked = self._modules.items()
            self.handles += [module.register_forward_hook(self._listener(path)) for path, module in hooked]

    def missed_error(self, step: int) -> UsageError:
        """Modules that did not run, or no pass at all."""
        if self._shares is None:
            return UsageError(
                f"step {step} has gone by without a forward pass in training mode through the model that was given: "
                "no activation was hit. Give inject_live the module that the loop calls."
            )
        names = ", ".join(name.removeprefix("activations/") for name in list(self.not_injected)[:3])
        return UsageError(
            f"step {step} has gone by, and faults found no place: {names} gave nothing in it. "
            "Choose modules that run in every step: where=…"
        )

    def unseen_error(self) -> UsageError:
        """The chosen modules did not run."""
        names = ", ".join(list(self._modules)[:3])
        return UsageError(f"activations: {names} gave nothing in the step before. Choose modules that run: where=…")

    def _listener(self, path: str) -> Callable[..., None]:
        def listen(_: nn.Module, __: object, output: object) -> None:
            if self._root.training:
                with self.closing_on_error():
                    for name, tensor in _outputs(f"activations/{path}", output):
                        self.on_tensor(name, tensor)

        return listen


def _modules(root: nn.Module, where: Selection | None) -> dict[str, nn.Module]:
    """By the path that a module's name is."""
    known = {_path(name): module for name, module in root.named_modules()}
    if where is None:
        return {path: module for path, module in known.items() if not any(module.children())}
    infos = {path: TensorInfo(path, (), DType.FLOAT32, Role.OTHER, 4) for path in known}
    chosen: set[str] = set()
    for item in where:
        name = item.removeprefix("activations/") if isinstance(item, str) and not isinstance(item, Role) else item
        try:
            chosen.update(select(infos, [name]))
        except UnknownTensor:
            raise UnknownTensor(getattr(name, "pattern", name), known, what="module") from None
    return {path: module for path, module in known.items() if path in chosen}


def _owns(path: str, names: set[str]) -> bool:
    """Whether a module gives one of these: itself, or an item of what it gives."""
    return any(name == path or name.startswith(f"{path}/") for name in names)


def _path(name: str) -> str:
    return escape(name) or ROOT


def _outputs(path: str, output: object) -> Iterator[tuple[str, Any]]:
    """The tensors in what a module gives; an only one has no more of a name than the module."""
    import torch

    if isinstance(output, torch.Tensor):
        yield path, output
    elif isinstance(output, Mapping):
        for key, one in output.items():
            yield from _outputs(f"{path}/{escape(str(key))}", one)
    elif isinstance(output, (list, tuple)):
        for index, one in enumerate(output):
            yield from _outputs(f"{path}/{index}", one)
