"""The optimizer within backward: each bucket's parameters are updated as soon as its gradients are reduced.

A step that was begun may have to be taken back, as a whole or by buckets. So before an update what it changes is
copied: parameters and optimizer state, 12 bytes a parameter for Adam in float32, in memory that every step uses again.

What a script does between `backward()` and `job.step()` comes too late: clipping, another learning rate. Autograd has
no more use for a parameter whose gradient is complete; it refuses by itself where a script has (`weight.detach()`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import optim
from torch.optim import Optimizer

from evergrad.errors import UsageError
from evergrad.recovery.local_state import is_scaler

PER_PARAMETER: tuple[type[Optimizer], ...] = (
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)
"""Optimizers that update every parameter from its own gradient and state alone: in any order, with the same result."""

_ADVICE = "or leave overlap=True out"
_Kind: TypeAlias = "tuple[torch.device, torch.dtype]"


def refuse_overlap(
    optimizer: Optimizer | None,
    *,
    batch_policy: str = "shrink",
    find_unused_parameters: bool = False,
    tracked: Mapping[str, Any] | None = None,
) -> None:
    """`UsageError` where updates cannot come as soon as gradients are reduced."""
    where = "job.wrap(overlap=True)"
    if optimizer is None:
        raise UsageError(f"{where}: expected the optimizer too: job.wrap(model, optimizer=optimizer, overlap=True)")
    if type(optimizer) not in PER_PARAMETER:
        raise UsageError(
            f"{where}: {type(optimizer).__qualname__} is not known to update each parameter by itself. Use one of "
            f"torch.optim's {', '.join(sorted(kind.__name__ for kind in PER_PARAMETER))}, {_ADVICE}"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UsageError(f"{where}: an update that is differentiable cannot be taken back: use differentiable=False")
    if find_unused_parameters:
        raise UsageError(f"{where}: with find_unused_parameters=True it is known too late what was used: leave out one")
    if batch_policy == "scale_lr":
        raise UsageError(
            f"{where}: batch_policy='scale_lr' needs the rate before it is known who is lost. Use 'shrink' or "
            f"'constant', {_ADVICE}"
        )
    for name, thing in (tracked or {}).items():
        if is_scaler(thing) and thing.is_enabled():
            raise UsageError(
                f"{where}: the scaler that is tracked as {name!r} has to see all gradients before the first update. "
                f"Train in bfloat16 without one, {_ADVICE}"
            )


class OptimizerOverlap:
    """One optimizer, stepped bucket by bucket; what it has done in the step under way can be undone.

    Not undoable (nothing is copied then) where a step is never done again. Only for one thread at a time, which need
    not always be the same one.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor], *, undoable: bool) -> None:
        """`parameters` are those that have gradients; buckets know them by their numbers."""
        self.optimizer = optimizer
        self.applied: dict[int, tuple[int, ...]] = {}
        """The parameters that were updated in the step under way, by bucket."""
        self._parameters, self._log = list(parameters), _Log(optimizer) if undoable else None
        self._sizes: list[int] = []
        self._group_of: dict[int, int] = {}
        self._shares: dict[tuple[int, ...], list[tuple[int, list[torch.Tensor]]]] = {}
        self._ordered = -1
        self._know_groups()

    def make_undoable(self) -> None:
        """A step may be done again after all."""
        self._log = self._log or _Log(self.optimizer)

    @property
    def held_bytes(self) -> int:
        """The memory in which that is kept which would have to be put back."""
        return 0 if self._log is None else self._log.size_bytes

    def apply(self, bucket: int, numbers: tuple[int, ...]) -> None:
        """Update the parameters of a bucket from their gradients."""
        assert bucket not in self.applied, f"bucket {bucket} was applied already"
        if not self.applied:
            self._know_groups()
        if numbers not in self._shares:
            self._shares[numbers] = self._share(numbers)
        share = self._shares[numbers]
        if self._log is not None:
            self._log.take(bucket, [parameter for _, members in share for parameter in members])
        self.applied[bucket] = numbers  # from here on there may be something to undo
        if share:
            self._step(share)

    def undo(self, buckets: Iterable[int] | None = None) -> None:
        """Make parameters and optimizer state of these buckets, or of all, what they were before the step."""
        if self._log is None:
            return
        for bucket in [*self.applied] if buckets is None else [*buckets]:
            if self.applied.pop(bucket, None) is not None:
                self._log.put_back(bucket)

    def finish(self) -> None:
        """The step is over, and stays."""
        count = sum(len(numbers) for numbers in self.applied.values())
        assert count == len(self._parameters), f"{count} of {len(self._parameters)} parameters were updated"
        self.applied.clear()
        if self._log is not None:
            self._log.forget()
        state = self.optimizer.state
        if len(state) != self._ordered:  # it came into being by buckets; in files it lies as it always did
            members = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            found = {parameter: state[parameter] for parameter in members if parameter in state}
            state.clear()
            state.update(found)
            self._ordered = len(state)

    def _step(self, share: list[tuple[int, list[torch.Tensor]]]) -> None:
        """The optimizer's own step, in which it sees nothing but these parameters."""
        optimizer = self.optimizer
        whole = optimizer.param_groups
        members = [whole[index]["params"] for index, _ in share]
        try:
            for index, some in share:
                whole[index]["params"] = some
            optimizer.param_groups = [whole[index] for index, _ in share]
            optimizer.step()
        finally:
            optimizer.param_groups = whole
            for (index, _), all_of_them in zip(share, members, strict=True):
                whole[index]["params"] = all_of_them

    def _share(self, numbers: tuple[int, ...]) -> list[tuple[int, list[torch.Tensor]]]:
        """By parameter group: those of these parameters that are in it."""
        found: dict[int, list[torch.Tensor]] = {}
        for number in numbers:
            parameter = self._parameters[number]
            if (index := self._group_of.get(id(parameter))) is not None:
                found.setdefault(index, []).append(parameter)
        return sorted(found.items(), key=lambda item: item[0])

    def _know_groups(self) -> None:
        """Look at the parameter groups again; a script may have added one."""
        optimizer = self.optimizer
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            raise UsageError(
                f"overlap=True: {type(optimizer).__qualname__} has step hooks, which would run once a bucket. Remove "
                f"them, {_ADVICE}"
            )
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        if sizes == self._sizes:
            return
        known = {id(parameter) for parameter in self._parameters}
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in known:
                    raise UsageError(
                        f"overlap=True: a parameter of shape {tuple(parameter.shape)} in group {index} of the "
                        f"optimizer is not the wrapped model's, so it is never updated. Wrap both as one, {_ADVICE}"
                    )
        self._sizes = sizes
        self._group_of = {
            id(parameter): index for index, group in enumerate(optimizer.param_groups) for parameter in group["params"]
        }
        self._shares.clear()


@dataclass(slots=True)
class _Before:
    """What the update of one bucket changes, as it was."""

    states: list[tuple[torch.Tensor, dict[str, Any] | None]] = field(default_factory=list)
    """Each parameter's optimizer state; None where there was none."""
    copies: dict[_Kind, tuple[list[torch.Tensor], list[torch.Tensor]]] = field(default_factory=dict)
    """Tensors, and what was in them."""


class _Log:
    """What has to be put back, in memory that is used again in every step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._before: dict[int, _Before] = {}
        self._memory: dict[tuple[int, str], torch.Tensor] = {}

    @property
    def size_bytes(self) -> int:
        return sum(copy.nbytes for copy in self._memory.values())

    def take(self, bucket: int, parameters: Sequence[torch.Tensor]) -> None:
        """Note how these parameters and their states are."""
        before = self._before[bucket] = _Before()
        for parameter in parameters:
            state = self._optimizer.state.get(parameter)
            before.states.append((parameter, None if state is None else dict(state)))
            self._keep(before, parameter, "", parameter)
            for name, value in (state or {}).items():
                if isinstance(value, torch.Tensor):
                    self._keep(before, parameter, name, value)
        with torch.no_grad():
            for tensors, copies in before.copies.values():
                torch._foreach_copy_(copies, tensors)

    def put_back(self, bucket: int) -> None:
        """Make them as they were; a state that there was not is gone again."""
        before = self._before.pop(bucket)
        with torch.no_grad():
            for tensors, copies in before.copies.values():
                torch._foreach_copy_(tensors, copies)
        for parameter, state in before.states:
            if state is None:
                self._optimizer.state.pop(parameter, None)
            else:
                now = self._optimizer.state[parameter]
                now.clear()
                now.update(state)

    def forget(self) -> None:
        """Nothing will be put back any more."""
        self._before.clear()

    def _keep(self, before: _Before, parameter: torch.Tensor, name: str, tensor: torch.Tensor) -> None:
        key = id(parameter), name
        copy = self._memory.get(key)
        if copy is None or (copy.shape, copy.dtype, copy.device) != (tensor.shape, tensor.dtype, tensor.device):
            copy = self._memory[key] = torch.empty_like(tensor, requires_grad=False)
        tensors, copies = before.copies.setdefault((tensor.device, tensor.dtype), ([], []))
        tensors.append(tensor)
        copies.append(copy)
