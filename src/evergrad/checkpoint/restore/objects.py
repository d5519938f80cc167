"""Objects with a `state_dict()`: which may be filled in place, and which have to be asked to load themselves.

A module's `state_dict()` is its own memory, so filling that memory is loading, unless some class of it has a
say in loading (an override, a hook, extra state). An optimizer, a scheduler, a sampler and anything else gets
its part of the checkpoint through its own `load_state_dict`, in memory of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.optim import Optimizer

from evergrad.checkpoint.capture.dtensor import is_spread, local_of
from evergrad.checkpoint.restore.filling import is_expanded, obstacle
from evergrad.checkpoint.restore.load_plan import Call, Mismatch, children, describe
from evergrad.dtypes import DType
from evergrad.errors import StateError
from evergrad.records import Json
from evergrad.state import ROOT, Skeleton, join, outline

Shapes: TypeAlias = Mapping[str, tuple[DType, tuple[int, ...]]]

_DTYPES = {dtype.torch: dtype for dtype in DType}


def compare(path: str, tensor: torch.Tensor, node: Json, shapes: Shapes) -> Mismatch | None:
    """What keeps a live tensor from being filled with what the checkpoint has at its place."""
    if not isinstance(node, dict) or "tensor" not in node:
        names = Skeleton(node).tensor_names()
        return Mismatch(path, f"expected a tensor, found {describe(node)} in the checkpoint", frozenset({path, *names}))
    name, tensor = str(node["tensor"]), local_of(tensor)
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


def optimizer_call(optimizer: Optimizer, node: Json, path: str | None, shapes: Shapes) -> tuple[Call, list[Mismatch]]:
    """How to load an optimizer: torch's `load_state_dict` keeps the tensors it is given, so they are made for it.

    The checkpoint decides which parameters have state. Where the optimizer already has the same, that memory
    is filled and handed back; torch's rules for dtypes and devices apply as after `torch.load`.
    """
    names = frozenset(Skeleton(node).tensor_names())
    call = Call(path or ROOT, optimizer, node, names)
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
        elif (address := local_of(tensor).data_ptr()) not in taken and not is_expanded(local_of(tensor)):
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
            if is_spread(param) and shapes[name][1] == local_of(param).shape:
                call.like[name] = param
    return call, mismatches


def _is_own_memory(module: Module, live: Mapping[str, Any]) -> bool:
    """Whether what `state_dict()` gave is the memory of the module's parameters and buffers, and not a copy."""
    owned: dict[str, torch.Tensor] = dict(module.named_buffers(remove_duplicate=False))
    owned.update(module.named_parameters(remove_duplicate=False))
    for name, tensor in live.items():
        own = owned.get(name)
        if own is None or is_spread(own) != is_spread(tensor):
            return False
        own, tensor = local_of(own), local_of(tensor)
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
