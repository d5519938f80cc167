"""What every rank must have alike, by name: parameters, optimizer state, and the plain values beside it.

Buffers are not here: they differ between ranks by right. Neither is what is tracked, which may be a rank's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from evergrad.errors import StateError
from evergrad.records import Json
from evergrad.recovery.guard.digests import digest_bytes, digest_tensors
from evergrad.state import Skeleton, flatten, join, unflatten

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(frozen=True, slots=True)
class Value:
    """A plain value: how it is read, as text, and how it is set; None if it cannot be."""

    read: Callable[[], str]
    put: Callable[[str], None] | None = None


@dataclass(frozen=True, slots=True)
class Replica:
    """One rank's copy. Tensors are the live ones: writing to them heals them."""

    tensors: Mapping[str, torch.Tensor]
    values: Mapping[str, Value] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def digests(self, paths: Iterable[str] | None = None) -> dict[str, bytes]:
        """The digest of everything, or of what is at these paths."""
        chosen = [*self.tensors, *self.values] if paths is None else list(paths)
        found = digest_tensors({path: self.tensors[path] for path in chosen if path in self.tensors})
        return found | {path: digest_bytes(self.values[path].read().encode()) for path in chosen if path in self.values}


@dataclass(frozen=True, slots=True)
class Change:
    """What differs between two copies of a tensor: how many elements, and the first of them."""

    count: int = 0
    first: int = -1
    """The index of the first element that differs, counted through all of them."""
    expected: Json = None
    found: Json = None
    bits: int = 0
    """The bits in which this element differs, as a mask."""

    def plus(self, later: Change) -> Change:
        """Together with what differs further on."""
        return replace(self, count=self.count + later.count) if self.count else later

    def __str__(self) -> str:
        if not self.count:
            return "the same when it was read again"
        more = f" and {self.count - 1} more" if self.count > 1 else ""
        mask = f", bits {self.bits:#x}" if self.bits else ""
        where = f"element {self.first}: " if self.first >= 0 else ""
        return f"{where}expected {self.expected}, found {self.found}{mask}{more}"


def replica_of(model: nn.Module | None, optimizers: Sequence[Optimizer] = ()) -> Replica:
    """The replica of a model and its optimizers: `optimizer/…`, or `optimizer/<number>/…` if there are several.

    Paths are those that `flatten` gives `optimizer.state_dict()`.
    """
    named = model.named_parameters() if model is not None else ()
    tensors = {f"model/{name}": parameter.detach() for name, parameter in named}
    values: dict[str, Value] = {}
    for number, optimizer in enumerate(optimizers):
        root = "optimizer" if len(optimizers) == 1 else f"optimizer/{number}"
        numbers: dict[torch.Tensor, int] = {}
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                numbers.setdefault(parameter, len(numbers))
            rest = {key: value for key, value in group.items() if key != "params"}
            _take(f"{root}/param_groups/{index}", rest, group, tensors, values)
        for parameter, state in optimizer.state.items():
            if parameter in numbers and isinstance(state, dict):
                _take(f"{root}/state/{numbers[parameter]}", state, state, tensors, values)
    return Replica(tensors, values)


def _take(
    place: str,
    found: Mapping[Any, Any],
    live: dict[Any, Any],
    tensors: dict[str, torch.Tensor],
    values: dict[str, Value],
) -> None:
    for key, value in found.items():
        path = join(place, str(key))
        if isinstance(value, torch.Tensor):
            tensors[path] = value.detach()
            continue
        try:
            inside = flatten({"value": value}).tensors
        except StateError:  # a function, say: it has no form that could be compared
            continue
        tensors |= {path + name.removeprefix("value"): tensor for name, tensor in inside.items()}
        values[path] = _value(live, key, can_be_set=not inside)


def _value(live: dict[Any, Any], key: Any, *, can_be_set: bool) -> Value:
    def read() -> str:
        return flatten({"value": live[key]}).skeleton.dumps()

    def put(text: str) -> None:
        live[key] = unflatten({}, Skeleton.loads(text))["value"]

    return Value(read, put if can_be_set else None)


def shown_value(text: str) -> str:
    """A plain value as people read it."""
    root: Any = Skeleton.loads(text).root
    return json.dumps(root["dict"][0][1])


def change_between(expected: torch.Tensor, found: torch.Tensor, dtype: torch.dtype, start: int = 0) -> Change:
    """How bytes differ from those that were expected, of elements of this type; `start` is the first one's index."""
    kind = _BITS[dtype.itemsize]
    shape = (-1, dtype.itemsize // kind.itemsize)
    one, two = expected.cpu().view(kind).view(shape), found.cpu().view(kind).view(shape)
    wrong = (one != two).any(dim=1).nonzero().flatten()
    if not wrong.numel():
        return Change()
    first = int(wrong[0])
    mask = (1 << 8 * kind.itemsize) - 1
    bits = int(one[first, 0]) & mask ^ int(two[first, 0]) & mask
    values = [_shown(side[first].clone().view(dtype)) for side in (one, two)]
    return Change(wrong.numel(), start + first, values[0], values[1], bits if shape[1] == 1 else 0)


def _shown(element: torch.Tensor) -> Json:
    value = (element.float() if element.is_floating_point() and element.dtype.itemsize < 4 else element).item()
    return value if isinstance(value, bool | int) else str(value)
