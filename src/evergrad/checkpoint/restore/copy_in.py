"""Copying a mapped shard's tensors: into memory that is there, or into fresh memory, never as an alias of the map.

The map belongs to the shard: a tensor of it that reached the user would be a file that training writes to, or
memory that goes away. Whatever leaves this module is memory of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from evergrad._digest import balanced
from evergrad.checkpoint.capture.dtensor import local_tensor
from evergrad.dtypes import DType
from evergrad.state import Skeleton

_LARGE_BYTES = 32 << 10  # from here on torch would start its threads
_PIECE_BYTES = 16 << 20
_MAX_THREADS = 4  # beyond which memory is the limit


class ShardSource(Protocol):
    """A mapped shard whose digests have been verified."""

    @property
    def skeleton(self) -> Skeleton:
        """The shape of the saved state, and its values."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[DType, tuple[int, ...]]]:
        """Dtype and shape of every tensor, tied ones included."""
        ...

    def tensor(self, path: str) -> torch.Tensor:
        """The tensor at a path, as a view on the map: to be read, never written to or handed on."""
        ...


@torch.no_grad()  # leaves that require gradients may be written to
def fill(source: ShardSource, targets: Iterable[tuple[str, torch.Tensor | np.ndarray]]) -> None:
    """Copy the tensor of each path into its target, which has the same dtype and shape."""
    large: list[tuple[torch.Tensor, torch.Tensor]] = []
    tensors: list[torch.Tensor] = []
    views: list[torch.Tensor] = []
    for path, target in targets:
        view = source.tensor(path)
        if isinstance(target, torch.Tensor):
            target = local_tensor(target)
        if isinstance(target, np.ndarray):
            np.copyto(target, view.numpy())
        elif target.is_conj() or target.is_neg():  # the ones that no call for many takes
            target.copy_(view)
        elif target.is_contiguous():
            if target.nbytes >= _LARGE_BYTES and target.is_cpu and view.is_contiguous():
                large.append((target, view))
            else:
                tensors.append(target)
                views.append(view)
        else:
            tensors.append(without_repeats(target, target))
            views.append(without_repeats(view, target))
    if tensors:
        torch._foreach_copy_(tensors, views)  # tens of thousands of small ones: the loop is in C++
    _copy_memory(large)


def fresh(
    source: ShardSource, paths: Iterable[str], devices: Mapping[str, torch.device] | None = None
) -> dict[str, torch.Tensor]:
    """New tensors with the values of these paths; those that shared memory when they were saved share it again.

    `devices` says where a tensor is to live; on the CPU otherwise. Shared and strided tensors begin on the CPU.
    """
    devices = devices or {}
    sharing = source.skeleton.sharing
    mapped = {path: source.tensor(path) for path in paths}
    views = {path: view for path, view in mapped.items() if path in sharing.views}
    out = {
        path: torch.empty(view.shape, dtype=view.dtype, device=devices.get(path))
        for path, view in mapped.items()
        if path not in views
    }
    fill(source, out.items())
    if views:
        rebuilt = sharing.restore(views)
        # Tensors that share on the map just as they are to share come back as given: they are still the map.
        kept = {path: view.clone() for path, view in views.items() if rebuilt[path] is view}
        out |= rebuilt | sharing.restore(kept)
    return out


def obstacle(tensor: torch.Tensor) -> str:
    """Why a tensor cannot be filled in place; empty if it can."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        if is_lazy(tensor):
            return "has no shape yet, so nothing can be loaded into it (run the module once)"
        wrapper: bool = is_traceable_wrapper_subclass(tensor)
        if wrapper:
            return f"is a {type(tensor).__module__}.{type(tensor).__qualname__}, which has no memory of its own to fill"
    if tensor.is_meta:
        return "is on the meta device, so there is no memory to load into (call to_empty(device=…) first)"
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized:
        return "is nested, sparse or quantised, and can only be loaded into a dense tensor"
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "was made in inference mode and may not be changed outside of it"
    if not tensor.data_ptr() and tensor.numel():
        return "has no memory: its storage was freed"
    return ""


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether one element in memory stands for a whole axis, as `expand` makes it."""
    if tensor.is_contiguous():  # soon said, and nearly always so
        return False
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def without_repeats(tensor: torch.Tensor, expanded: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor for which an expanded one of the same shape has memory; torch only writes to these.

    Where nothing is expanded, that is all of them.
    """
    for axis, (step, size) in enumerate(zip(expanded.stride(), expanded.shape, strict=True)):
        if step == 0 and size > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape are equal bit for bit: NaN equals NaN, 0.0 is not -0.0."""
    flat_a, flat_b = a.contiguous().reshape(-1), b.contiguous().reshape(-1)
    return a.shape == b.shape and torch.equal(flat_a.view(torch.uint8), flat_b.view(torch.uint8))


def _copy_memory(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy whole tensors on threads of our own.

    torch's threads meet after every tensor: where several ranks share the cores, each waits there for one that is not
    running.
    """
    pieces = [
        (target.data_ptr() + start, view.data_ptr() + start, min(_PIECE_BYTES, target.nbytes - start))
        for target, view in pairs
        for start in range(0, target.nbytes, _PIECE_BYTES)
    ]
    parts = balanced(pieces, min(_MAX_THREADS, torch.get_num_threads()), lambda piece: piece[2])
    if len(parts) == 1:
        _move(parts[0])
    else:
        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(_move, parts))
    # Autograd has to know, as after copy_: a graph from before must not be walked with values from after.
    torch.autograd.graph.increment_version([target for target, _ in pairs])


def _move(pieces: Iterable[tuple[int, int, int]]) -> None:
    for target, source, size in pieces:
        ctypes.memmove(target, source, size)  # without the interpreter's lock
