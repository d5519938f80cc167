"""Putting a verified shard into a live state, in place.

`prepare` compares the two and touches nothing; `PreparedLoad.apply` then fills, sets and calls.

| in the live state          | what happens to it                                                                |
|----------------------------|-----------------------------------------------------------------------------------|
| tensor, array              | filled in place                                                                   |
| module                     | parameters and buffers are filled in place                                        |
| module with a say in it    | `load_state_dict` with new tensors: it has an override, hooks or extra state      |
| optimizer                  | `load_state_dict` with its own tensors filled, or new ones if it has none yet     |
| other with `load_state_dict` | that is called with new tensors, and judges for itself                          |
| anything else: a value     | replaced in the dict or list that holds it; in a tuple, by a new tuple            |

Tensors, arrays and objects have to be the same on both sides. Values follow the checkpoint:

- A container that holds nothing but values, on both sides, is one value: it gets the checkpoint's content and
  keeps its identity. What it had gathered since (a history, metrics by step) is gone, as a rollback wants it.
- In a dict that also holds tensors or objects, and in the outermost one, a single value that only the checkpoint has
  is added; a value that only the live dict has is a mismatch, and so is a container that only the checkpoint
  has: it may be the state of an object that was forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from types import NoneType
from typing import Any, TypeAlias

import numpy as np
import torch

from evergrad.checkpoint.capture.dtensor import local_tensor
from evergrad.checkpoint.restore.copy_in import ShardSource, fill
from evergrad.checkpoint.restore.mismatches import (
    LoadPlan,
    LoadStateDictCall,
    Mismatch,
    children,
    compare,
    describe,
    live_tensors,
    optimizer_call,
    owns_loading,
    rebuilding,
)
from evergrad.dtypes import DType
from evergrad.errors import StateError, nearest
from evergrad.records import Json, TensorInfo
from evergrad.state import ROOT, Skeleton, Where, join, outline, select
from evergrad.state.paths import segments
from evergrad.state.selection import tensor_info
from evergrad.state.tree import is_stateful

# Walking a live state and a checkpoint's skeleton side by side, to find what goes where and what does not fit.
#
# Nothing is touched here. The walk collects tensors to fill, values to set and objects to call; `LoadPlan` can then
# be cut down to the tensors that were asked for, or to those that fit.

Replacement: TypeAlias = Callable[[], Any]
"""Makes the value that has to take a live value's place in its container."""


def match_state(state: object, source: ShardSource, *, strict: bool) -> LoadPlan:
    """What it takes to bring a live state to the values of a checkpoint."""
    walk = _StateMatcher(source, strict)
    try:
        replacement = walk.pair(state, source.skeleton.root, None, value_as_whole=False)
    except RecursionError:
        raise StateError("the state is nested too deep, or contains itself") from None
    if replacement is not None:
        what = f"the state is a {type(state).__name__}, whose values cannot be replaced (expected a dict or a list)"
        walk.plan.mismatches.append(Mismatch(ROOT, what))
    return walk.plan


class _StateMatcher:
    def __init__(self, source: ShardSource, strict: bool) -> None:
        self.source = source
        self.shapes = source.shapes
        self.strict = strict
        self.plan = LoadPlan()

    def pair(self, live: Any, node: Json, path: str | None, *, value_as_whole: bool = True) -> Replacement | None:
        """Plan the loading of a node into a live value; what has to be done to its container is returned."""
        if isinstance(live, torch.Tensor):
            self._tensor(live, node, path or ROOT)
            return None
        if isinstance(live, np.ndarray):
            return self._array(live, node, path or ROOT)
        if is_stateful(live):
            self._object(live, node, path)
            return None
        if _is_container(live) and (not value_as_whole or _holds_tensors(live) or Skeleton(node).tensor_names()):
            return self._container(live, node, path)
        return self._value(live, node, path or ROOT)

    def _mismatch(self, path: str, what: str, tensors: Iterable[str] = (), **flags: bool) -> None:
        self.plan.mismatches.append(Mismatch(path, what, frozenset(tensors), **flags))

    def _missing(self, live: Any, path: str) -> None:
        tensors = live_tensors(live, path) if not isinstance(live, torch.Tensor) else {path}
        self._mismatch(path, "not in the checkpoint", tensors, missing=True)

    def _unexpected(self, node: Json, path: str) -> None:
        tensors = Skeleton(node).tensor_names()
        count = f" ({len(tensors)} tensors)" if len(tensors) > 1 else ""
        self._mismatch(path, f"in the checkpoint{count}, and not in the state given", tensors, unexpected=True)

    def _tensor(self, live: torch.Tensor, node: Json, path: str) -> None:
        mismatch = compare(path, live, node, self.shapes)
        if mismatch is not None:
            self.plan.mismatches.append(mismatch)
        else:
            assert isinstance(node, dict)
            self.plan.fills.append((str(node["tensor"]), local_tensor(live)))

    def _array(self, live: np.ndarray, node: Json, path: str) -> Replacement | None:
        if isinstance(node, dict) and "array" in node:  # of strings, say: a value
            rebuild = rebuilding(node)
            value = rebuild()
            if live.flags.writeable and value.dtype == live.dtype and value.shape == live.shape:
                self.plan.settings.append(lambda: np.copyto(live, value))
                return None
            return rebuild
        if not isinstance(node, dict) or "ndarray" not in node:
            names = {path, *Skeleton(node).tensor_names()}
            self._mismatch(path, f"expected a NumPy array, found {describe(node)} in the checkpoint", names)
            return None
        name = str(node["ndarray"])
        dtype, shape = self.shapes[name]
        if DType.of_numpy(live.dtype) is not dtype or live.shape != shape:
            what = f"expected {live.dtype} {live.shape}, found {dtype} {shape} in the checkpoint"
            self._mismatch(path, what, {name})
        elif not live.flags.writeable:
            self._mismatch(path, "the NumPy array is read-only, so nothing can be loaded into it", {name})
        else:
            self.plan.fills.append((name, live))
        return None

    def _object(self, live: Any, node: Json, path: str | None) -> None:
        place, names = path or ROOT, frozenset(Skeleton(node).tensor_names())
        if not callable(getattr(live, "load_state_dict", None)):
            kind = f"{type(live).__module__}.{type(live).__qualname__}"
            self._mismatch(place, f"a {kind} has state_dict() and no load_state_dict() to restore it by", names)
        elif objects := Skeleton(node).objects():
            self._mismatch(place, f"{objects[0][0]} was a {objects[0][1]}, which cannot be rebuilt", names)
        elif isinstance(live, torch.nn.Module):
            self._module(live, node, path, names)
        elif isinstance(live, torch.optim.Optimizer):
            call, mismatches = optimizer_call(live, node, path, self.shapes)
            self.plan.calls.append(call)
            self.plan.mismatches.extend(mismatches)
        else:
            self.plan.calls.append(LoadStateDictCall(place, live, node, names))

    def _module(self, live: torch.nn.Module, node: Json, path: str | None, names: frozenset[str]) -> None:
        state, entries = live.state_dict(), children(node)
        if entries is None:
            self._mismatch(path or ROOT, f"expected a module's state, found {describe(node)} in the checkpoint", names)
            return
        owns, renames = owns_loading(live, state)
        if owns:  # extra state is for the module's own code, whatever it is
            state = {name: tensor for name, tensor in state.items() if not name.endswith("_extra_state")}
            entries = {name: child for name, child in entries.items() if not str(name).endswith("_extra_state")}
        fitting = _StateMatcher(self.source, self.strict)
        fitting._mapping(state, entries, path, grows=False)
        found = fitting.plan.mismatches
        if owns:
            self.plan.calls.append(
                LoadStateDictCall(path or ROOT, live, node, names, divisible=True, lenient=not self.strict)
            )
            if renames:  # what does not fit as it is may fit once it has been renamed: its own code judges
                found = [] if self.strict else [each for each in found if not (each.missing or each.unexpected)]
        else:
            self.plan.fills.extend(fitting.plan.fills)
        self.plan.mismatches.extend(found)

    def _container(self, live: Any, node: Json, path: str | None) -> Replacement | None:
        entries, items = children(node), _items(node)
        if isinstance(live, Mapping) and entries is not None:
            self._mapping(live, entries, path)
        elif isinstance(live, (list, tuple)) and items is not None:
            return self._sequence(live, items, path)
        else:
            kind = "a dict" if isinstance(live, Mapping) else f"a {type(live).__name__}"
            names = {*live_tensors(live, path), *Skeleton(node).tensor_names()}
            self._mismatch(path or ROOT, f"expected {kind}, found {describe(node)} in the checkpoint", names)
        return None

    def _mapping(
        self, live: Mapping[Any, Any], entries: dict[Any, Json], path: str | None, *, grows: bool = True
    ) -> None:
        for key, segment in segments(live).items():
            below = join(path, segment)
            if key not in entries:
                self._missing(live[key], below)
                continue
            replacement = self.pair(live[key], entries[key], below)
            if replacement is None:
                continue
            if isinstance(live, MutableMapping):
                self._set(live, key, replacement)
            else:
                self._mismatch(below, f"a value in a {type(live).__name__} cannot be replaced (expected a dict)")
        if live.keys() >= entries.keys():
            return
        for key, segment in segments(entries).items():
            if key in live:
                continue
            node = entries[key]
            if grows and isinstance(live, MutableMapping) and _is_single(node):
                self._set(live, key, rebuilding(node))
            else:
                self._unexpected(node, join(path, segment))

    def _sequence(self, live: Any, nodes: list[Json], path: str | None) -> Replacement | None:
        replacements: dict[int, Replacement] = {}
        for index, child in enumerate(live):
            below = join(path, str(index))
            if index >= len(nodes):
                self._missing(child, below)
            elif (replacement := self.pair(child, nodes[index], below)) is not None:
                replacements[index] = replacement
        for index in range(len(live), len(nodes)):
            self._unexpected(nodes[index], join(path, str(index)))
        if isinstance(live, list):
            for index, replacement in replacements.items():
                self._set(live, index, replacement)
        elif replacements:
            return lambda: _like(live, [replacements[i]() if i in replacements else x for i, x in enumerate(live)])
        return None

    def _value(self, live: Any, node: Json, path: str) -> Replacement | None:
        if names := Skeleton(node).tensor_names():
            self._mismatch(path, f"expected a value, found {describe(node)} in the checkpoint", {path, *names})
            return None
        if objects := Skeleton(node).objects():
            self._mismatch(path, f"in the checkpoint it is a {objects[0][1]}, which cannot be rebuilt")
            return None
        if _is_value(live, node):
            return None
        rebuild = rebuilding(node)
        if isinstance(live, MutableMapping) and children(node) is not None:
            self.plan.settings.append(lambda: _refill(live, rebuild()))
        elif isinstance(live, list) and isinstance(node, dict) and "list" in node:
            self._set(live, slice(None), rebuild)
        elif isinstance(live, tuple) and isinstance(node, dict) and "tuple" in node:
            return lambda: _like(live, rebuild())
        else:
            return rebuild
        return None

    def _set(self, container: Any, key: Any, replacement: Replacement) -> None:
        self.plan.settings.append(lambda: container.__setitem__(key, replacement()))


def _items(node: Json) -> list[Json] | None:
    """The items of a list's or a tuple's node."""
    items = node.get("list", node.get("tuple")) if isinstance(node, dict) else None
    return items if isinstance(items, list) else None


def _is_single(node: Json) -> bool:
    """Whether a node is one value and no container: a container could be the state of an object that was forgotten."""
    return not isinstance(node, dict) or not node.keys() & {
        "tensor", "ndarray", "dict", "odict", "list", "tuple", "set", "frozenset", "object",
    }  # fmt: skip


def _is_container(live: object) -> bool:
    return isinstance(live, (Mapping, list, tuple)) and type(live).__module__ != "torch"  # torch.Size is a value


def _holds_tensors(live: Any) -> bool:
    """Whether a live value has parts that are tensors, arrays or objects with a state."""
    if isinstance(live, Mapping):
        return is_stateful(live) or any(_holds_tensors(child) for child in live.values())
    if isinstance(live, (list, tuple)):
        return is_stateful(live) or any(_holds_tensors(child) for child in live)
    if isinstance(live, np.ndarray):
        return DType.of_numpy(live.dtype) is not None
    if isinstance(live, (str, int, float, NoneType)):  # soon said, and most values are one of these
        return False
    return isinstance(live, torch.Tensor) or is_stateful(live)


def _is_value(live: object, node: Json) -> bool:
    """Whether a live value already is what a node stands for, types and bits included."""
    try:
        # repr tells 1 from True and 1.0, and 0.0 from -0.0; == does not.
        return repr(outline(live, lambda _: False).root) == repr(node)
    except StateError:
        return False


def _like(live: tuple[Any, ...], items: Iterable[Any]) -> tuple[Any, ...]:
    """A tuple of the live one's kind: a named tuple stays one."""
    make = getattr(live, "_make", tuple)
    made = make(items)
    assert isinstance(made, tuple)
    return made


def _refill(live: MutableMapping[Any, Any], values: Mapping[Any, Any]) -> None:
    live.clear()
    live.update(values)


class PreparedLoad:
    """What will be done to a state; made by `prepare`, while nothing has been touched yet."""

    skipped: tuple[str, ...]
    """With `strict=False`, what is left as it is, one line each."""

    def __init__(self, source: ShardSource, plan: LoadPlan, skipped: tuple[str, ...]) -> None:
        self._source = source
        self._plan = plan
        self.skipped = skipped

    def apply(self) -> None:
        """Load: first tensors, then values, and last, in the order of the state, the objects that load themselves.

        Only the code of those objects can fail here; the `StateError` names the object, and the rest is loaded.
        """
        fill(self._source, self._plan.fills)
        for setting in self._plan.settings:
            setting()
        for call in self._plan.calls:
            call.run(self._source)


def prepare(state: object, source: ShardSource, *, strict: bool = True, where: Where | None = None) -> PreparedLoad:
    """Find out how to load a shard into a live state, and everything that does not fit, before touching it.

    Raises `StateError` for the first of the mismatches: a path that only one side has, another shape, dtype or
    kind. With `strict=False`, what fits is loaded and the rest is listed in `skipped`.

    With `where` (as in `select`), only the tensors it chooses are loaded, and only they have to fit. An object that
    loads itself is loaded, with its values, if all of its tensors are chosen, and is a mismatch if only some are (a
    module can be loaded in part). Objects without tensors and values in containers are left alone.
    """
    plan = match_state(state, source, strict=strict)
    if where is not None:
        plan.restrict(frozenset(select(_selectable(source, plan), where)))
    plan.resolve_shared_memory(source)
    if not plan.mismatches:
        return PreparedLoad(source, plan, ())
    if strict:
        raise StateError(_message(plan.mismatches, source))
    skipped = tuple(str(mismatch) for mismatch in plan.mismatches)
    plan.drop_mismatches()
    return PreparedLoad(source, plan, skipped)


def _selectable(source: ShardSource, plan: LoadPlan) -> dict[str, TensorInfo]:
    """What `where` can choose from: also what only the live state has, to be missed if it is chosen."""
    roles, found = source.skeleton.roles, dict(source.shapes)
    for mismatch in plan.mismatches:
        for path in sorted(mismatch.tensors):
            found.setdefault(path, (DType.FLOAT32, (0,)))
    return {path: tensor_info(path, shape, dtype, roles) for path, (dtype, shape) in found.items()}


def _message(mismatches: list[Mismatch], source: ShardSource) -> str:
    first = mismatches[0]
    line = str(first)
    if first.missing:
        # A misspelt name is missing on one side and unexpected on the other.
        known = [mismatch.path for mismatch in mismatches if mismatch.unexpected]
        if close := nearest(first.path, known) or nearest(first.path, source.shapes):
            line += ". Did you mean " + " or ".join(repr(name) for name in close) + "?"
    if len(mismatches) > 1:
        line += f" (and {len(mismatches) - 1} more)"
    return f"{line}{'' if line.endswith('?') else '.'} strict=False loads what fits"
