"""Which tensors lie in the same memory, and how to bring that back.

Tied weights, views and expanded tensors are recorded relative to the storage that holds them. A tensor that
is contiguous and alone needs no record: its shape says everything. Only the range of a storage that some
tensor uses is kept, so a ten-element slice of a huge storage costs ten elements.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from evergrad.dtypes import DType
from evergrad.errors import StateError
from evergrad.records import Json

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 16  # the widest element: a kept range starts where every element type may start


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a tensor lies: `offset` bytes into `storage`, strides in elements."""

    path: str
    storage: Hashable
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, path: str, tensor: torch.Tensor) -> Placement:
        """Where a live tensor lies."""
        return cls(
            path,
            (str(tensor.device), tensor.untyped_storage().data_ptr()),
            int(tensor.storage_offset()) * tensor.element_size(),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.element_size(),
        )


@dataclass(frozen=True, slots=True)
class View:
    """A tensor's place in a kept storage: its number, byte offset, and strides in elements."""

    storage: int
    offset: int
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sharing:
    """The kept storages' sizes in bytes, and the tensors that are views of them."""

    sizes: tuple[int, ...] = ()
    views: Mapping[str, View] = field(default_factory=dict)

    def to_json(self) -> dict[str, Json]:
        """Sizes, and a `[storage, offset, strides]` a view."""
        return {
            "sizes": list(self.sizes),
            "views": {path: [v.storage, v.offset, list(v.stride)] for path, v in self.views.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Sharing:
        """Read back what `to_json` wrote; ValueError or TypeError if it is something else."""
        sizes, views = data["sizes"], data["views"]
        if not isinstance(sizes, list) or not isinstance(views, dict):
            raise ValueError("sharing is not a list of sizes and a table of views")
        read = {str(p): View(int(s), int(o), tuple(int(n) for n in stride)) for p, (s, o, stride) in views.items()}
        return cls(tuple(int(size) for size in sizes), read)

    def aliases(self, forms: Mapping[str, Hashable]) -> dict[str, str]:
        """Tensors that are another one under a second name: path → the first path of the same view.

        `forms` says what a view does not, the shape and the type of each tensor that is asked about.
        """
        first: dict[Hashable, str] = {}
        found: dict[str, str] = {}
        for path, view in self.views.items():
            if path in forms:
                original = first.setdefault((view, forms[path]), path)
                if original != path:
                    found[path] = original
        return found

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors with their sharing; those that already share as recorded are kept as they are."""
        out = dict(tensors)
        groups: dict[int, list[str]] = {}
        for path, view in self.views.items():
            if path in out:
                groups.setdefault(view.storage, []).append(path)
        for number, paths in groups.items():
            if not self._holds(out, paths):
                out.update(self._rebuild(number, {path: out[path] for path in paths}))
        return out

    def _holds(self, tensors: Mapping[str, torch.Tensor], paths: list[str]) -> bool:
        starts = set()
        for path in paths:
            tensor, view = tensors[path], self.views[path]
            if tensor.stride() != view.stride:
                return False
            offset = tensor.storage_offset() * tensor.element_size()
            starts.add((tensor.untyped_storage().data_ptr(), offset - view.offset))
        return len(starts) == 1

    def _rebuild(self, number: int, members: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        import torch

        if not 0 <= number < len(self.sizes):
            raise StateError(f"{next(iter(members))}: storage {number} is not one of {len(self.sizes)} kept ones")
        end = 0
        for path, tensor in members.items():
            view = self.views[path]
            if view.offset % tensor.element_size():
                raise StateError(f"{path}: byte {view.offset} of its storage is no place for {tensor.dtype}")
            stop = view.offset + byte_extent(tuple(tensor.shape), view.stride, tensor.element_size())
            if len(view.stride) != tensor.dim() or min((view.offset, *view.stride)) < 0 or stop > self.sizes[number]:
                raise StateError(
                    f"{path}: view of shape {tuple(tensor.shape)}, strides {view.stride} at byte {view.offset} "
                    f"does not fit into its storage of {self.sizes[number]} bytes"
                )
            end = max(end, stop)
        memory = np.zeros(end, np.uint8)  # as much as the tensors reach, whatever size is claimed
        for path, tensor in members.items():
            _write_strided(memory, self.views[path], tensor)
        device = next(iter(members.values())).device
        storage = torch.from_numpy(memory).to(device).untyped_storage()
        return {
            path: torch.empty(0, dtype=tensor.dtype, device=device).set_(
                storage, self.views[path].offset // tensor.element_size(), tuple(tensor.shape), self.views[path].stride
            )
            for path, tensor in members.items()
        }


def find_sharing(placements: Iterable[Placement]) -> Sharing:
    """What has to be remembered so that these tensors can share memory again."""
    groups: dict[Hashable, list[Placement]] = {}
    for placement in placements:
        if math.prod(placement.shape):  # an empty tensor lies nowhere
            groups.setdefault(placement.storage, []).append(placement)
    sizes: list[int] = []
    views: dict[str, View] = {}
    for members in groups.values():
        if len(members) == 1 and is_contiguous(members[0].shape, members[0].stride):
            continue
        start = min(member.offset for member in members) // _ALIGNMENT * _ALIGNMENT
        stop = max(member.offset + byte_extent(member.shape, member.stride, member.itemsize) for member in members)
        for member in members:
            views[member.path] = View(len(sizes), member.offset - start, member.stride)
        sizes.append(stop - start)
    return Sharing(tuple(sizes), views)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a C-contiguous tensor."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements follow each other in C order; axes of one element do not matter."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size == 0:
            return True
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def byte_extent(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if 0 in shape:
        return 0
    return (sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1) * itemsize


def _write_strided(memory: np.ndarray, view: View, tensor: torch.Tensor) -> None:
    """Copy a tensor into its place; NumPy, unlike torch, also writes where elements overlap."""
    import torch

    dtype = DType.of_dense(tensor.dtype)
    element = np.dtype((np.void, dtype.itemsize))
    source = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().view(element)
    target = np.ndarray(
        tuple(tensor.shape),
        element,
        buffer=memory.data,
        offset=view.offset,
        strides=tuple(step * dtype.itemsize for step in view.stride),
    )
    target[...] = source.reshape(tuple(tensor.shape))
