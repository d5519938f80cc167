"""Soft errors in a live state: the injector's own draws, on tensors that are in use.

The state is offered as a checkpoint is, so that the injector's population, sampling and plan serve it unchanged: the
same seed hits the same elements and bits as it would in a file of the same tensors. Only what is touched is copied from
a device and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from evergrad.dtypes import DType
from evergrad.formats import Checkpoint
from evergrad.formats.checkpoint import Bits
from evergrad.formats.offset_checkpoint import describe
from evergrad.injection.columns import Hit
from evergrad.injection.draws import Draws
from evergrad.injection.faults import Fault
from evergrad.injection.plan import Plan, plan
from evergrad.injection.population import population
from evergrad.injection.sampling import Amount, sample
from evergrad.records import Role
from evergrad.state import Placement, Skeleton, Where
from evergrad.state.sharing import find_sharing

if TYPE_CHECKING:
    import torch


def flip(
    state: Mapping[str, torch.Tensor], fault: Fault, *, count: int = 1, where: str | None = None, seed: int = 0
) -> list[Hit]:
    """Let faults happen to the tensors of a state, by their paths; what was done, in the order in which it was.

    >>> import torch
    >>> from evergrad.injection import BitFlip
    >>> weight = torch.ones(4)
    >>> [hit] = flip({"model/fc.weight": weight}, BitFlip("sign"), seed=1)
    >>> print(hit), weight.tolist()
    model/fc.weight[3] bit 0 (sign): 1 → -1
    (None, [1.0, 1.0, 1.0, -1.0])
    """
    planned = Aim(LiveState(state), fault, where).hit(count, seed)
    return [hit for column in planned.columns for hit in column.hits()]


class Aim:
    """A fault and what it may hit, worked out once for many injections into the same live tensors."""

    def __init__(self, live: LiveState, fault: Fault, where: Where = None) -> None:
        self._live, self._fault = live, fault
        self.population = population(live, fault, where)

    def hit(self, count: int, seed: int) -> Plan:
        """Let this many faults happen; what was done."""
        draws = Draws(seed)
        sites = sample(self.population, Amount(count=count), "element", draws)
        planned = plan(self._live, self.population, sites, self._fault, draws)
        for column in planned.columns:
            ends = column.ends()
            self._live.xor(column.tensor, *ends.elements(ends.old ^ ends.new))
        return planned


class LiveState(Checkpoint):
    """Tensors in memory, offered as those of a file are; `xor` alters them in place, without autograd's notice."""

    format = "live state"

    def __init__(self, state: Mapping[str, torch.Tensor], roles: Mapping[str, Role] | None = None) -> None:
        """By their paths; what has no dense elements of a known type is left out. Known roles need no guess."""
        self.path = Path("live state")
        self.others: Mapping[str, str] = {}
        self.metadata: Mapping[str, str] = {}
        known = [(name, tensor, DType.of_torch(tensor.dtype)) for name, tensor in state.items()]
        # Of `data`: a soft error is no operation, and must not count as one that autograd has to know of.
        self._live = {name: tensor.data for name, tensor, dtype in known if dtype is not None and _is_dense(tensor)}
        places = [(Placement.of(name, self._live[name]), dtype) for name, _, dtype in known if name in self._live]
        self.tensors = describe((place, dtype) for place, dtype in places if dtype is not None)
        if roles:
            named = self.tensors.items()
            self.tensors = {name: replace(info, role=roles.get(name, info.role)) for name, info in named}
        self.skeleton = replace(Skeleton.of_names(self._live), sharing=find_sharing(place for place, _ in places))

    def addresses(self, name: str, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int64] | None:
        """The byte of its storage at which each element begins."""
        self._info(name)
        tensor = self._live[name]
        at = np.full(tuple(tensor.shape), tensor.storage_offset(), np.int64)
        for axis, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            at += (np.arange(size) * step).reshape([-1 if other == axis else 1 for other in range(tensor.dim())])
        return at.reshape(-1)[start:stop] * tensor.element_size()

    def close(self) -> None:
        """There is nothing to let go of."""

    def _read_bits(self, name: str, start: int, stop: int) -> Bits:
        return self._bits_at(name, np.arange(start, stop))

    def _bits_at(self, name: str, indices: npt.NDArray[np.int64]) -> Bits:
        numbers, places = self._numbers(name, indices)
        found: Bits = numbers[places].cpu().numpy().view(self.tensors[name].dtype.bits)
        return found

    def _xor_bits(self, name: str, indices: npt.NDArray[np.int64], patterns: Bits) -> Bits:
        import torch

        old = self._bits_at(name, indices)
        once, rows = np.unique(indices, return_inverse=True)
        new = self._bits_at(name, once)
        np.bitwise_xor.at(new, rows, patterns)
        numbers, places = self._numbers(name, once)
        signed = new.view(np.uint8 if new.itemsize == 1 else f"i{new.itemsize}")
        numbers[places] = torch.from_numpy(signed).to(numbers.device)
        return old

    def _numbers(self, name: str, indices: npt.NDArray[np.int64]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The tensor's own memory as integers, and where in it the elements are."""
        import torch

        tensor, info = self._live[name], self.tensors[name]
        parts = torch.view_as_real(tensor) if info.dtype.parts == 2 else tensor
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[info.dtype.layout.part_bytes]
        numbers = parts.view(whole)
        places = np.unravel_index(indices, info.shape or (1,))
        if not info.shape:
            numbers = numbers.unsqueeze(0)
        return numbers, tuple(torch.from_numpy(np.ascontiguousarray(one)).to(numbers.device) for one in places)


def _is_dense(tensor: torch.Tensor) -> bool:
    import torch

    return tensor.layout is torch.strided and not tensor.is_meta
