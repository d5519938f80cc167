"""What loading a checkpoint into a live state will do, and what stands in its way; nothing is done yet."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from evergrad.checkpoint.restore.filling import Source, fill, fresh, is_expanded, same_bits, without_repeats
from evergrad.errors import StateError
from evergrad.records import Json
from evergrad.state import Skeleton, join
from evergrad.state.skeleton import decode, decode_value


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One thing that the live state and the checkpoint do not agree on."""

    path: str
    what: str
    tensors: frozenset[str] = frozenset()
    """The tensors that cannot be loaded because of it."""
    missing: bool = False
    """Whether the checkpoint has nothing of that name; it may have one that is spelt otherwise."""
    unexpected: bool = False

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


@dataclass(slots=True)
class Call:
    """One `load_state_dict` to be called, with the part of the checkpoint that it gets."""

    path: str
    target: Any
    node: Json
    names: frozenset[str]
    """The tensors of its part."""
    divisible: bool = False
    """Whether it can be given some of its tensors only: modules can."""
    lenient: bool = False
    """Whether it is told, by `strict=False`, that some are left out."""
    live: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors of its own that are filled and given back to it, instead of new ones."""
    devices: dict[str, torch.device] = field(default_factory=dict)
    like: dict[str, Any] = field(default_factory=dict)
    """Tensors that it gets as pieces of a DTensor, cut as this one is."""

    def leave_out(self, names: frozenset[str], *, values: bool) -> None:
        """Give it its part without these tensors, and with or without what is no tensor."""
        assert isinstance(self.node, dict)
        kept: list[Json] = []
        for entry in _entries(self.node):
            own = Skeleton(entry[1]).tensor_names()
            if (own or values) and not own & names:
                kept.append(entry)
        self.node = {**self.node, "dict" if "dict" in self.node else "odict": kept}
        self.names -= names
        self.lenient = True

    def run(self, source: Source) -> None:
        """Load; what goes wrong in the object's own code becomes a `StateError` that names it."""
        fill(source, self.live.items())
        tensors = self.live | fresh(source, sorted(self.names - self.live.keys()), self.devices)
        for name, model in self.like.items():
            if name in tensors and name not in self.live:
                tensors[name] = _spread(tensors[name], model)
        value = decode(self.node, tensors.__getitem__)
        try:
            if self.lenient and "strict" in inspect.signature(self.target.load_state_dict).parameters:
                self.target.load_state_dict(value, strict=False)
            else:
                self.target.load_state_dict(value)
        except Exception as error:
            kind = type(self.target)
            raise StateError(
                f"{self.path}: {kind.__module__}.{kind.__qualname__}.load_state_dict failed: "
                f"{type(error).__name__}: {error}. The state is now partly loaded: restore it again before using it"
            ) from error


@dataclass(slots=True)
class LoadPlan:
    """What loading will do: fill tensors, set values, call objects; and what stands in the way."""

    fills: list[tuple[str, torch.Tensor | np.ndarray]] = field(default_factory=list)
    settings: list[Callable[[], None]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)

    def restrict(self, chosen: frozenset[str]) -> None:
        """Keep only what loads these tensors; values go with the object whose tensors are all chosen."""
        self.fills = [(path, target) for path, target in self.fills if path in chosen]
        self.settings = []
        self.mismatches = [mismatch for mismatch in self.mismatches if mismatch.tensors & chosen]
        calls, self.calls = self.calls, []
        for call in calls:
            others = call.names - chosen
            if not call.names & chosen:
                continue
            if others and not call.divisible:
                what = f"can only be loaded whole, and {len(others)} of its {len(call.names)} tensors were not selected"
                self.mismatches.append(Mismatch(call.path, what, call.names))
                continue
            if others:
                call.leave_out(others, values=False)
            self.calls.append(call)

    def settle_shared_memory(self, source: Source) -> None:
        """Write memory that several elements or several tensors share once, if the checkpoint agrees on its value."""
        owners: dict[int, tuple[str, torch.Tensor]] = {}
        fills, self.fills = self.fills, []
        for name, target in fills:
            what = ""
            if isinstance(target, torch.Tensor) and target.numel():
                if is_expanded(target):
                    view = source.tensor(name)
                    if not same_bits(without_repeats(view, target).expand(view.shape), view):
                        what = "is expanded, and the checkpoint has different values where it has one"
                owner, other = owners.setdefault(target.data_ptr(), (name, target))
                if owner != name and _is_tied(other, target):
                    if same_bits(source.tensor(name), source.tensor(owner)):
                        continue
                    what = f"shares its memory with {owner}, and the checkpoint has different values for the two"
            if what:
                self.mismatches.append(Mismatch(name, what, frozenset({name})))
            else:
                self.fills.append((name, target))

    def drop_mismatches(self) -> None:
        """Keep only what fits: an object that can only be loaded whole is left as it is if a part of it does not."""
        bad = frozenset[str]().union(*(mismatch.tensors for mismatch in self.mismatches))
        places = {mismatch.path for mismatch in self.mismatches}
        self.fills = [(path, target) for path, target in self.fills if path not in bad]
        self.calls = [
            call
            for call in self.calls
            if call.divisible or not (call.names & bad or places & {call.path, join(call.path, "param_groups")})
        ]
        for call in self.calls:
            if call.divisible:
                call.leave_out(call.names & bad, values=True)


def children(node: Json) -> dict[Any, Json] | None:
    """The entries of a dict's node by key; None if it is no dict."""
    if not isinstance(node, dict) or not node.keys() & {"dict", "odict"}:
        return None
    return {key if isinstance(key, str) else decode_value(key): child for key, child in _entries(node)}


def describe(node: Json) -> str:
    """A node in a few words."""
    if not isinstance(node, dict):
        return f"the value {str(node)[:40]!r}" if isinstance(node, str) else f"the value {node}"
    kind = next(iter(node), "dict")
    return {"ndarray": "a NumPy array", "odict": "a dict"}.get(kind, f"a {kind}")


def rebuilding(node: Json) -> Callable[[], Any]:
    """Makes the value of a node that holds no tensor, anew each time."""
    decode_value(node)  # what cannot be rebuilt is found now, before anything is touched
    return lambda: decode_value(node)


def _spread(piece: torch.Tensor, model: Any) -> torch.Tensor:
    """A rank's piece as the DTensor that it is a piece of."""
    made = type(model).from_local(
        piece, model.device_mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride()
    )
    assert isinstance(made, torch.Tensor)
    return made


def _is_tied(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors that begin at the same address are the same memory, seen in the same way."""
    return (a.device, a.dtype, a.shape, a.stride()) == (b.device, b.dtype, b.shape, b.stride())


def _entries(node: dict[str, Json]) -> list[Any]:
    entries = node["dict"] if "dict" in node else node["odict"]
    assert isinstance(entries, list)
    return entries
