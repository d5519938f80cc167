"""Ranks in one process, one thread each, over real gloo groups; and bits that are flipped behind torch's back."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from evergrad.recovery.process_group import GlooGroup, Group

LIMIT_S = 30.0


def together(*acts: Callable[[], Any]) -> list[Any]:
    """Do all at once, one thread each; the first error of any is raised here."""
    found: list[Any] = [None] * len(acts)
    errors: list[BaseException] = []

    def act(number: int) -> None:
        try:
            found[number] = acts[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=act, args=[number], daemon=True) for number in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "a rank waits for ever"
    if errors:
        raise errors[0]
    return found


@contextmanager
def gloo(size: int) -> Iterator[list[Group]]:
    """A group of so many ranks, as each of them sees it."""
    store = HashStore()

    def make(rank: int) -> Group:
        return GlooGroup(store, rank, size, host="127.0.0.1", timeout=timedelta(seconds=LIMIT_S))

    groups: list[Group] = together(*(lambda rank=rank: make(rank) for rank in range(size)))  # type: ignore[misc]
    try:
        yield groups
    finally:
        together(*(group.close for group in groups))


class Net(nn.Module):
    """A little of everything: a convolution in channels-last order, a norm with buffers, a head in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(5)
        self.head = nn.Linear(5, 7).bfloat16()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.norm(self.conv(x)).mean((2, 3)) * self.scale
        out: torch.Tensor = self.head(features.bfloat16())
        return out.float()


def trained() -> tuple[Net, torch.optim.Optimizer]:
    """A model and its optimizer after a few steps: the same each time."""
    return copy.deepcopy(_trained())


@cache
def _trained() -> tuple[Net, torch.optim.Optimizer]:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(4, 3, 8, 8)).square().mean().backward()
        optimizer.step()
    return net, optimizer


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Flip one bit in place, by the element's logical index; torch does not notice, as with a real fault."""
    place = 0
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        element, index = divmod(element, size)
        place += index * stride
    width = tensor.element_size()
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    raw[(tensor.storage_offset() + place) * width + bit // 8] ^= 1 << bit % 8
