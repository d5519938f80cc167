"""What a plan knows of the tensors it was made for, and whether today's are like them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from evergrad.state.sharing import View


class Sources:
    """Shapes, types, devices, and who shares memory with whom.

    The same tensor objects are never expected: `module.state_dict()` makes new ones each time. What has to be the
    same is what a skeleton and a layout say of them.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], views: Mapping[str, View]) -> None:
        """Remember tensors as `flatten` gives them, with the sharing it found."""
        given = list(tensors.values())
        self._shapes = [tensor.shape for tensor in given]
        self._dtypes = [tensor.dtype for tensor in given]
        self._devices = [tensor.device for tensor in given]
        self._contiguous = [tensor.is_contiguous() for tensor in given]
        self.plain = [tensor.is_cpu and tensor.is_contiguous() for tensor in given]
        """For each tensor, whether it lies in host memory as it will in the file."""
        self.cuda = [tensor.device if tensor.is_cuda else None for tensor in given]
        """For each tensor, the CUDA device that it is on."""
        self._itemsizes = [tensor.element_size() for tensor in given]
        # Those with a record of how they lie: where in their storage, and with which strides.
        self._strides = {n: views[path].stride for n, path in enumerate(tensors) if path in views}
        self._places = {n: given[n].storage_offset() for n in self._strides}
        # Every tensor is in the group of its storage, which may be its own; an empty one lies nowhere.
        self._groups: dict[int, int | str] = {
            n: views[path].storage if path in views else path
            for n, (path, tensor) in enumerate(tensors.items())
            if tensor.numel()
        }
        self._addresses: list[int] = []
        self._offsets: list[int] = []

    def match(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        """Today's tensors as dense memory; None if they are not like those that were remembered."""
        try:
            if self._are_alike(tensors):
                return tensors
            # A conjugated or negated view is stored as what it shows, which lies elsewhere.
            if not any(tensor.is_conj() or tensor.is_neg() for tensor in tensors):
                return None
            resolved = [tensor.resolve_conj().resolve_neg() for tensor in tensors]
            return resolved if self._are_alike(resolved) else None
        except RuntimeError:  # sparse, nested, opaque: such tensors have no shape, no strides or no address
            return None

    def _are_alike(self, tensors: Sequence[torch.Tensor]) -> bool:
        addresses: list[int] = []
        offsets: list[Any] = []  # ints: symbolic ones, which torch's types allow for, exist in traced code only
        # One plain loop: with tens of thousands of tensors every further pass fetches all of them into the cache again.
        for tensor, shape, dtype, device, contiguous in zip(
            tensors, self._shapes, self._dtypes, self._devices, self._contiguous, strict=True
        ):
            if (
                tensor.shape != shape
                or tensor.dtype is not dtype
                or tensor.device != device
                or tensor.is_contiguous() is not contiguous
            ):
                return False
            addresses.append(tensor.data_ptr())
            offsets.append(tensor.storage_offset())
        for n, stride in self._strides.items():
            if tensors[n].stride() != stride or tensors[n].is_conj() or tensors[n].is_neg():
                return False
        if addresses != self._addresses or offsets != self._offsets:
            if not self._share_as_before(addresses, offsets):
                return False
            # While nothing moves, nothing is tied or untied either.
            self._addresses, self._offsets = addresses, offsets
        return True

    def _share_as_before(self, addresses: list[int], offsets: list[int]) -> bool:
        """Whether just those tensors share a storage that did, at the same places in it."""
        homes: dict[tuple[torch.device, int], int | str] = {}
        for n, group in self._groups.items():
            if not addresses[n]:  # a storage that was freed
                return False
            start = addresses[n] - offsets[n] * self._itemsizes[n]
            if homes.setdefault((self._devices[n], start), group) != group:
                return False
        return len(homes) == len(set(self._groups.values())) and all(offsets[n] == at for n, at in self._places.items())
