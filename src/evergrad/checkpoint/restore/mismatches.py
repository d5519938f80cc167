"""What loading a checkpoint into a live state will do, and what stands in its way; nothing is done yet."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.optim import Optimizer

from evergrad.checkpoint.capture.dtensor import is_dtensor, local_tensor
from evergrad.checkpoint.restore.copy_in import (
    ShardSource,
    fill,
    fresh,
    is_expanded,
    obstacle,
    same_bits,
    without_repeats,
)
from evergrad.dtypes import DType
from evergrad.errors import StateError
from evergrad.records import Json
from evergrad.state import ROOT, Skeleton, join, outline
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
class LoadStateDictCall:
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

    def run(self, source: ShardSource) -> None:
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
    calls: list[LoadStateDictCall] = field(default_factory=list)
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

    def resolve_shared_memory(self, source: ShardSource) -> None:
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


# Objects with a `state_dict()`: which may be filled in place, and which have to be asked to load themselves.
#
# A module's `state_dict()` is its own memory, so filling that memory is loading, unless some class of it has a say in
# loading (an override, a hook, extra state). An optimizer, a scheduler, a sampler and anything else gets its part of
# the checkpoint through its own `load_state_dict`, in memory of its own.

Shapes: TypeAlias = Mapping[str, tuple[DType, tuple[int, ...]]]

_DTYPES = {dtype.torch: dtype for dtype in DType}


def compare(path: str, tensor: torch.Tensor, node: Json, shapes: Shapes) -> Mismatch | None:
    """What keeps a live tensor from being filled with what the checkpoint has at its place."""
    if not isinstance(node, dict) or "tensor" not in node:
        names = Skeleton(node).tensor_names()
        return Mismatch(path, f"expected a tensor, found {describe(node)} in the checkpoint", frozenset({path, *names}))
    name, tensor = str(node["tensor"]), local_tensor(tensor)
    if reason := obstacle(tensor):
        return Mismatch(path, reason, frozenset({name}))
    dtype, shape = shapes[name]
    if shape != tensor.shape or dtype is not _DTYPES.get(tensor.dtype):
        expected = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        return Mismatch(path, f"expected {expected}, found {dtype} {shape} in the checkpoint", frozenset({name}))
    return None


def live_tensors(value: object, path: str | None) -> dict[str, torch.Tensor]:
    """Every tensor of a live value by its path, objects' included; none if some part of it could not be saved."""
    try:
        leaves = outline(value, lambda leaf: isinstance(leaf, torch.Tensor)).leaves
    except StateError:
        return {}
    return {(path or ROOT) if name == ROOT else join(path, name): leaf for name, leaf in leaves.items()}


def owns_loading(module: Module, live: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether loading has to go through the module's `load_state_dict`, and whether it may rename what it is given."""
    # torch's own norms override it for checkpoints older than torch 0.4 only; no shard is as old.
    plain_parts = {cls._load_from_state_dict for cls in (Module, _NormBase, _InstanceNorm)}
    owns = renames = False
    for part in module.modules():
        cls = type(part)
        renames |= cls.load_state_dict is not Module.load_state_dict or "load_state_dict" in vars(part)
        hooks = [hook for hook in part._load_state_dict_pre_hooks.values() if not _only_shards(hook)]
        renames |= cls._load_from_state_dict not in plain_parts or bool(hooks)
        owns |= not all(map(_only_shards, part._load_state_dict_post_hooks.values()))
        owns |= cls.set_extra_state is not Module.set_extra_state
    return owns or renames or not _is_own_memory(module, live), renames


def optimizer_call(
    optimizer: Optimizer, node: Json, path: str | None, shapes: Shapes
) -> tuple[LoadStateDictCall, list[Mismatch]]:
    """How to load an optimizer: torch's `load_state_dict` keeps the tensors it is given, so they are made for it.

    The checkpoint decides which parameters have state. Where the optimizer already has the same, that memory
    is filled and handed back; torch's rules for dtypes and devices apply as after `torch.load`.
    """
    names = frozenset(Skeleton(node).tensor_names())
    call = LoadStateDictCall(path or ROOT, optimizer, node, names)
    cls = type(optimizer)
    if cls.load_state_dict is not Optimizer.load_state_dict or optimizer._optimizer_load_state_dict_pre_hooks:
        return call, []  # it may rearrange what it is given: that is for its own code to judge
    expected = [len(group["params"]) for group in optimizer.param_groups]
    found = _group_sizes(node)
    if expected != found:
        what = f"expected parameter groups of {expected}, found {found or describe(node)} in the checkpoint"
        return call, [Mismatch(join(path, "param_groups"), what, names)]
    mismatches: list[Mismatch] = []
    taken: set[int] = set()
    for name, tensor in live_tensors(optimizer.state_dict(), path).items():
        if name not in names:
            continue
        if mismatch := compare(name, tensor, {"tensor": name}, shapes):
            mismatches.append(mismatch)
        # Memory that two entries share would get the values of the second.
        elif (address := local_tensor(tensor).data_ptr()) not in taken and not is_expanded(local_tensor(tensor)):
            if address:  # an empty piece lies nowhere
                taken.add(address)
            call.live[name] = tensor
    # What torch would move to the parameter's device anyway starts there, without a second copy on the host.
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for name in names:
        number, _, slot = name.removeprefix(join(path, "state/")).partition("/")
        if number.isdecimal() and int(number) < len(params) and slot != "step":
            param = params[int(number)]
            call.devices[name] = param.device
            if is_dtensor(param) and shapes[name][1] == local_tensor(param).shape:
                call.like[name] = param
    return call, mismatches


def _is_own_memory(module: Module, live: Mapping[str, Any]) -> bool:
    """Whether what `state_dict()` gave is the memory of the module's parameters and buffers, and not a copy."""
    owned: dict[str, torch.Tensor] = dict(module.named_buffers(remove_duplicate=False))
    owned.update(module.named_parameters(remove_duplicate=False))
    for name, tensor in live.items():
        own = owned.get(name)
        if own is None or is_dtensor(own) != is_dtensor(tensor):
            return False
        own, tensor = local_tensor(own), local_tensor(tensor)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return False
        if own.device != tensor.device or own.dtype != tensor.dtype or own.stride() != tensor.stride():
            return False
        if not own.is_meta and own.data_ptr() != tensor.data_ptr():
            return False
    return True


def _only_shards(hook: Any) -> bool:
    """Whether a hook is FSDP2's, which brings parameters back to pieces and leaves what is loaded alone."""
    function = getattr(hook, "hook", hook)
    return str(getattr(function, "__module__", "")).startswith("torch.distributed.fsdp._fully_shard")


def _group_sizes(node: Json) -> list[int] | None:
    """Parameters in each group of a saved optimizer; None if it is no optimizer's state."""
    groups: Any = (children(node) or {}).get("param_groups")
    try:
        params: list[Any] = [(children(group) or {})["params"] for group in groups["list"]]
        return [len(ids["list"]) for ids in params]
    except (KeyError, TypeError):
        return None
