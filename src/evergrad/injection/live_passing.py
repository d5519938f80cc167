"""What live faults hit as it passes by: activations, and buckets on their way to the other ranks.

Such tensors live for a moment. The pass before the step shows how large they are, which decides how many faults each
gets; every one is then hit when it passes by in the step itself, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from evergrad.dtypes import DType
from evergrad.errors import UnknownTensor, UsageError
from evergrad.injection.injector import Selection
from evergrad.injection.live import LiveState
from evergrad.injection.live_order import Order, Seen
from evergrad.injection.live_targets import Target, inside
from evergrad.records import Role, TensorInfo
from evergrad.state import escape, select
from evergrad.state.paths import ROOT

if TYPE_CHECKING:
    import torch
    from torch import nn


class PassingTarget(Target):
    """Tensors that are met one by one in a pass."""

    watches = True
    what: str
    """What they are called."""

    def __init__(self, order: Order) -> None:
        super().__init__(order)
        self._seen: dict[str, tuple[DType, tuple[int, ...]]] = {}
        self._shares: dict[str, int] | None = None
        """What is still to happen, in the step."""

    def check(self, *, now: bool) -> list[TensorInfo]:
        """Sizes are those of the pass before: there has to be one."""
        if now and self.order.needs_sizes:
            raise UsageError(
                f"{self.what}: how large they are is seen in the step before, so that they cannot be hit in the very "
                "next one. Choose a later step."
            )
        return []

    def strike(self) -> None:
        """Deal the faults out by what was seen."""
        self.watch()
        if self._shares is not None:
            return
        with self.ending():
            if self.order.needs_sizes and not self._seen:
                raise self.unseen()
            self.happened, self._shares = self.order.shares(Seen(self._seen))
        if not self._shares:  # a rate may come to nothing
            self.over()

    def unseen(self) -> UsageError:
        """What to say when nothing passed by in the step before."""
        return UsageError(f"{self.what}: none passed by in the step before, so that nothing is known of them")

    def meet(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor passes by."""
        dtype = DType.of_torch(tensor.dtype)
        if self._shares is None:
            if dtype is not None:
                self._seen[name] = dtype, tuple(tensor.shape)
            return
        share = self._shares.get(name)
        if share is None:
            return
        assert self.happened is not None
        self.happened.plans.append(self.order.happen_in(LiveState({name: tensor}), name, share))
        del self._shares[name]
        if not self._shares:
            self.over()

    @property
    def left(self) -> Mapping[str, int]:
        """The faults that have not happened, by what they were meant for."""
        return self._shares or {}


class ActivationTarget(PassingTarget):
    """What modules give, in training mode: altered in the very memory that the next operation reads."""

    what = "activations"

    def __init__(
        self, order: Order, model: nn.Module, where: Selection | None, names: Iterable[str] | None = None
    ) -> None:
        """`where` chooses modules, by default those without modules below them; `names` are those of a log."""
        super().__init__(order)
        self._root = inside(model)
        self._modules = _modules(self._root, where)
        if names is not None:
            wanted = {name.removeprefix("activations/") for name in names}
            known = dict(self._root.named_modules())
            self._modules = {_path(name): known[name] for name in known if _owns(_path(name), wanted)}
            for name in wanted:
                if not any(_owns(path, {name}) for path in self._modules):
                    raise UnknownTensor(name, map(_path, known), what="module")

    def watch(self) -> None:
        """Listen to the modules."""
        if not self.handles:
            hooked = self._modules.items()
            self.handles += [module.register_forward_hook(self._listener(path)) for path, module in hooked]

    def missed(self, step: int) -> UsageError:
        """Modules that did not run, or no pass at all."""
        if self._shares is None:
            return UsageError(
                f"step {step} has gone by without a forward pass in training mode through the model that was given: "
                "no activation was hit. Give inject_live the module that the loop calls."
            )
        names = ", ".join(name.removeprefix("activations/") for name in list(self.left)[:3])
        return UsageError(
            f"step {step} has gone by, and faults found no place: {names} gave nothing in it. "
            "Choose modules that run in every step: where=…"
        )

    def unseen(self) -> UsageError:
        """The chosen modules did not run."""
        names = ", ".join(list(self._modules)[:3])
        return UsageError(f"activations: {names} gave nothing in the step before. Choose modules that run: where=…")

    def _listener(self, path: str) -> Callable[..., None]:
        def listen(_: nn.Module, __: object, output: object) -> None:
            if self._root.training:
                with self.ending():
                    for name, tensor in _outputs(f"activations/{path}", output):
                        self.meet(name, tensor)

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
