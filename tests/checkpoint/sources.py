"""A verified shard in memory: what `prepare` needs of one, without a file; and loading it under watch."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from evergrad.checkpoint.restore.load_state import prepare
from evergrad.dtypes import DType
from evergrad.errors import StateError
from evergrad.state import Skeleton, flatten
from evergrad.testing import raw_bytes


class MemorySource:
    """A state as it was when this was made; remembers which tensors were asked for and where they lie."""

    def __init__(self, state: object) -> None:
        flat = flatten(state)
        self.skeleton = Skeleton.loads(flat.skeleton.dumps())
        self._tensors = {
            path: tensor.cpu().clone(memory_format=torch.contiguous_format) for path, tensor in flat.tensors.items()
        }
        self.shapes: Mapping[str, tuple[DType, tuple[int, ...]]] = {
            path: (DType.of_torch(tensor.dtype), tuple(tensor.shape)) for path, tensor in self._tensors.items()
        }
        self._checksums = self._sum()

    def tensor(self, path: str) -> torch.Tensor:
        """The tensor itself: whoever keeps or writes it is found out by `untouched`."""
        return self._tensors[path]

    def untouched(self) -> bool:
        """Whether nobody wrote to a tensor of this source."""
        return self._sum() == self._checksums

    def addresses(self) -> set[int]:
        """Where its memory begins, to find out who kept it."""
        return {tensor.data_ptr() for tensor in self._tensors.values() if tensor.numel()}

    def _sum(self) -> dict[str, int]:
        return {path: zlib.crc32(raw_bytes(tensor)) for path, tensor in self._tensors.items()}


class SharedSource(MemorySource):
    """The same, with tied tensors and views lying in each other's memory as they did: as on a map of aliases."""

    def __init__(self, state: object) -> None:
        super().__init__(state)
        self._tensors = self.skeleton.sharing.restore(self._tensors)
        self._checksums = self._sum()


def bytes_of(state: object) -> tuple[dict[str, bytes], str]:
    """All of a state, to find out whether anything was touched."""
    flat = flatten(state)
    return {path: raw_bytes(tensor) for path, tensor in flat.tensors.items()}, repr(flat.skeleton.root)


def load(state: object, source: MemorySource, **options: Any) -> tuple[str, ...]:
    """Load, and see to it that the source was neither written to nor handed out."""
    loading = prepare(state, source, **options)
    loading.apply()
    assert source.untouched(), "the shard was written to"
    kept = {tensor.data_ptr() for tensor in flatten(state).tensors.values()} & source.addresses()
    assert not kept, "a tensor of the shard was handed out"
    return loading.skipped


@dataclass(frozen=True)
class Refusal:
    """The error with which a state is refused, and whether the state was changed."""

    text: str
    has_touched: bool

    @property
    def is_clean(self) -> bool:
        """One line, and nothing was touched."""
        return "\n" not in self.text and not self.has_touched


def refusal(state: object, source: MemorySource, **options: Any) -> Refusal:
    """Prepare to load what has to be refused."""
    before = bytes_of(state)
    with pytest.raises(StateError) as caught:
        prepare(state, source, **options)
    return Refusal(str(caught.value), bytes_of(state) != before)


def network(seed: int = 0) -> nn.Module:
    """A small one with tied weights and statistics."""
    torch.manual_seed(seed)
    made = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 32),
        nn.Linear(32, 32),
    )
    made[6].weight = made[5].weight
    return made
