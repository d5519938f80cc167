"""Tensors and objects that are spread over ranks: what of them this rank holds, and what is known of them.

A `DTensor` is stored as this rank's piece, with its place in the whole. Of a module under DDP or FSDP2 it is known
that all ranks have the same parameters, and that rank 0's buffers are as good as any; so it is of an optimizer of
such parameters.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.optim import Optimizer

from evergrad.checkpoint.ranks import is_distributed
from evergrad.checkpoint.tensor_placement import ALL, Placements, TensorPiece
from evergrad.dtypes import DType
from evergrad.errors import StateError
from evergrad.state import Skeleton, Where, join, select
from evergrad.state.paths import segments
from evergrad.state.selection import tensor_info
from evergrad.state.tree import is_stateful


def may_have_dtensors() -> bool:
    """Whether there can be a DTensor in this process."""
    return "torch.distributed.tensor" in sys.modules


def is_dtensor(tensor: object) -> TypeGuard[Any]:
    """Whether a tensor is a DTensor; nothing is imported to find out."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor lies in this rank's memory: itself, or its piece of a DTensor."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        local = tensor.to_local()
    assert isinstance(local, torch.Tensor)
    return local


def sharding_spec(tensor: torch.Tensor) -> object:
    """What the place of a piece depends on, to be compared; None for a tensor that is not cut."""
    return (tensor.device_mesh, tensor.placements, tensor.shape) if is_dtensor(tensor) else None


def piece_of(path: str, tensor: torch.Tensor) -> TensorPiece | None:
    """The place of this rank's piece; None for a tensor that is not cut."""
    if not is_dtensor(tensor):
        return None
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise StateError(f"{path}: a DTensor with a pending reduction cannot be stored (call full_tensor() first)")
    for level, placement in enumerate(tensor.placements):
        # Alone it leaves a rank every n-th block, which has no single place; below the cut that it goes with, it has.
        split = getattr(placement, "split_factor", None)
        if split is not None and split != _cuts(tensor, level, placement.dim):
            raise StateError(f"{path}: a DTensor that is cut by {placement} in strides cannot be stored")
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tuple(local_tensor(tensor).shape)
    if tuple(shape) != local:
        raise StateError(f"{path}: this rank's piece of a DTensor is {local}, and {tuple(shape)} was expected of it")
    # Of an empty piece the offset may lie anywhere.
    begins = tuple(min(begin, size - n) for begin, n, size in zip(offset, shape, tensor.shape, strict=True))
    return TensorPiece(tuple(tensor.shape), begins, local)


def _cuts(tensor: Any, level: int, dim: int) -> int:
    """Into how many parts the mesh dimensions behind one cut the same dimension of a tensor."""
    later = range(level + 1, len(tensor.placements))
    return math.prod(tensor.device_mesh.size(n) for n in later if getattr(tensor.placements[n], "dim", None) == dim)


class WantedPieces:
    """The pieces that a live state has room for; of an optimizer without state, those that it will have."""

    def __init__(self, state: object, leaves: Mapping[str, torch.Tensor]) -> None:
        self._exact = {path: place for path, leaf in leaves.items() if (place := piece_of(path, leaf)) is not None}
        self._slots: dict[str, TensorPiece] = {}
        for path, thing in things(state, _is_known):
            if isinstance(thing, Optimizer):
                parameters = (parameter for group in thing.param_groups for parameter in group["params"])
                for number, parameter in enumerate(parameters):
                    slots = join(path, f"state/{number}")
                    if (place := piece_of(slots, parameter)) is not None:
                        self._slots[slots] = place

    def get(self, path: str, whole: tuple[int, ...]) -> TensorPiece:
        """The piece of a tensor of that shape that is wanted; all of it, if it is not cut here."""
        place = self._exact.get(path) or self._slots.get(path.rpartition("/")[0])
        # A live tensor of another shape is a mismatch, which whoever compares the two will name.
        return place if place is not None and place.whole == whole else TensorPiece.of_whole(whole)

    def fits(self, saved: Mapping[str, TensorPiece]) -> bool:
        """Whether a rank's shard has just the pieces that are wanted."""
        return self._exact.keys() <= saved.keys() and all(
            self.get(path, place.whole) == place for path, place in saved.items()
        )


def known(state: object, leaves: Mapping[str, torch.Tensor]) -> Placements:
    """What can be told of a state, whose leaves are given as they are: DTensors as DTensors."""
    sharded = {path: place for path, leaf in leaves.items() if (place := piece_of(path, leaf)) is not None}
    replicated: dict[str, None] = {}
    first: dict[str, None] = {}
    if sharded or is_distributed():
        wrapped = _Wrapped()
        objects = list(things(state, _is_known))
        for _, thing in objects:
            if isinstance(thing, nn.Module):
                wrapped.look(thing)
        for path, thing in objects:
            prefix = ALL if path is None else f"{path}/"
            if isinstance(thing, nn.Module) and wrapped.is_known(thing):
                replicated[prefix] = None
                first |= {join(path, name): None for name, _ in thing.named_buffers(remove_duplicate=False)}
            elif isinstance(thing, Optimizer) and wrapped.steps(thing):
                replicated[prefix] = None
        # Tensors of plain dicts, as `model.state_dict()` gives them, are known by their memory.
        for path, leaf in leaves.items():
            if path not in sharded and (address := local_tensor(leaf).data_ptr()):
                if address in wrapped.parameters:
                    replicated[path] = None
                elif address in wrapped.buffers:
                    first[path] = None
    prefixes = [pattern for pattern in replicated if pattern == ALL or pattern[-1:] == "/"]
    covered = Placements(tuple(prefixes), tuple(first))
    single = [path for path in replicated if path not in prefixes and covered.kind(path) == "own"]
    return Placements((*prefixes, *single), tuple(first), sharded)


def declared(where: Where | bool, tensors: Mapping[str, torch.Tensor], skeleton: Skeleton) -> Placements:
    """What the user says is the same on all ranks: everything, or what `select` finds."""
    if where is True or where is False:
        return Placements((ALL,) if where else ())
    infos = {
        path: tensor_info(path, tuple(tensor.shape), DType.of_dense(tensor.dtype), skeleton.roles)
        for path, tensor in tensors.items()
    }
    return Placements(tuple(select(infos, where)))


def things(
    state: object, is_one: Callable[[object], bool], path: str | None = None
) -> Iterator[tuple[str | None, Any]]:
    """The things of a kind in the containers of a state, with their paths; what is in them is their own."""
    if is_one(state):
        yield path, state
    elif isinstance(state, Mapping):
        for key, segment in segments(state).items():
            yield from things(state[key], is_one, join(path, segment))
    elif isinstance(state, (list, tuple)):
        for index, child in enumerate(state):
            yield from things(child, is_one, join(path, str(index)))


def stateful_paths(state: object) -> Iterator[str | None]:
    """Where objects are in a state that load themselves, and are no modules."""
    return (path for path, thing in things(state, is_stateful) if not isinstance(thing, nn.Module))


class _Wrapped:
    """The memory of all modules that are under DDP or FSDP."""

    def __init__(self) -> None:
        self.parameters: set[int] = set()
        self.buffers: set[int] = set()
        for thing in _ddp_modules():
            self._take(thing, buffers=bool(thing.broadcast_buffers))

    def look(self, module: nn.Module) -> None:
        """Take a module of the state in, if its parameters are cut."""
        if any(is_dtensor(parameter) for parameter in module.parameters()):
            self._take(module, buffers=True)

    def is_known(self, module: nn.Module) -> bool:
        """Whether all parameters of a module are under DDP or FSDP, and there are some."""
        addresses = [local_tensor(parameter).data_ptr() for parameter in module.parameters()]
        return bool(addresses) and all(address in self.parameters or not address for address in addresses)

    def steps(self, optimizer: Optimizer) -> bool:
        """Whether all that an optimizer steps is."""
        found = [local_tensor(param).data_ptr() for group in optimizer.param_groups for param in group["params"]]
        return bool(found) and all(address in self.parameters or not address for address in found)

    def _take(self, module: nn.Module, *, buffers: bool) -> None:
        self.parameters |= {local_tensor(parameter).data_ptr() for parameter in module.parameters()}
        if buffers:
            self.buffers |= {buffer.data_ptr() for buffer in module.buffers() if buffer.numel()}


def _ddp_modules() -> Iterator[Any]:
    """Every DDP that lives: users save `model.module` as often as `model`, and a module does not know its wrapper."""
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    if parallel is not None:
        wrapper = parallel.DistributedDataParallel
        # By type(): isinstance would ask proxies for their class, and wake them. And once for each: DDP is an abstract
        # base class, of which every question takes a microsecond, and there are a million objects.
        kinds: dict[type, bool] = {}
        for thing in gc.get_objects():
            kind = type(thing)
            if kind not in kinds:
                kinds[kind] = issubclass(kind, wrapper)
            if kinds[kind]:
                yield thing


def _is_known(thing: object) -> bool:
    return isinstance(thing, (nn.Module, Optimizer))
