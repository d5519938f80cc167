"""Workloads of a few lines: one that no bit of a mantissa can touch, one that no flipped exponent leaves alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from evergrad.training import Dataset, Training, Workload


def _data() -> Dataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(160, 4, generator=generator)
    y = (x[:, 0] > 0).long()
    return Dataset("signs", x[:128], y[:128], x[128:], y[128:], chance=0.5, facts={"data": "signs"})


class Immune(nn.Module):
    """Answers by its input alone; the weights are there to be hit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((64,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        first = x[:, :1] * 4
        return torch.cat([-first, first], 1) + 0 * self.weight[:1].detach() * 0 + (self.weight * 0).sum()


class Sensitive(nn.Module):
    """Every weight is 1, whose top exponent bit makes it infinite, and every answer needs all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        first = x[:, :1] * self.weight.prod()
        return torch.cat([-first, first], 1)


class Picky(nn.Module):
    """Raises as soon as a weight is negative: a training that crashes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        if bool((self.weight < 0).any()):
            raise ValueError("negative weight")
        first = x[:, :1] * self.weight.mean()
        return torch.cat([-first, first], 1)


def immune() -> Workload:
    """See `Immune`."""
    return Workload(model=Immune, data=_data())


def sensitive() -> Workload:
    """See `Sensitive`."""
    return Workload(model=Sensitive, data=_data(), optimizer=lambda p: torch.optim.SGD(p, lr=1e-6, momentum=0.9))


def picky() -> Workload:
    """See `Picky`."""
    return Workload(model=Picky, data=_data(), optimizer=lambda p: torch.optim.SGD(p, lr=1e-6, momentum=0.9))


def small(training: Training) -> Workload:
    """A small network with everything: batch statistics, dropout, an optimizer with a history."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))

    return Workload(model=model, data=_data())


class Leaky(nn.Module):
    """Counts its calls where no checkpoint looks, and answers by the count."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        first = x[:, :1] * self.weight.mean() * (1 + self.calls % 7)
        return torch.cat([-first, first], 1)


class Counting(nn.Module):
    """Counts its calls in a buffer that checkpoints leave out; all the same a study takes it back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        first = x[:, :1] * self.weight.mean() * (1 + self.calls % 7)
        return torch.cat([-first, first], 1)


class Tied(nn.Module):
    """Two layers with one weight, and a buffer whose name says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("aaa_scale", torch.ones(4))
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.second(torch.relu(self.first(x * self.aaa_scale))))
        return y


def leaky() -> Workload:
    """See `Leaky`."""
    return Workload(model=Leaky, data=_data())


def counting() -> Workload:
    """See `Counting`."""
    return Workload(model=Counting, data=_data())


def tied() -> Workload:
    """See `Tied`."""
    return Workload(model=Tied, data=_data())


def asserting() -> Workload:
    """A model with a check of its own."""

    class Checked(Picky):
        def forward(self, x: Tensor) -> Tensor:
            assert not bool((self.weight < 0).any()), "negative"
            return super().forward(x)

    return Workload(model=Checked, data=_data(), optimizer=lambda p: torch.optim.SGD(p, lr=1e-6, momentum=0.9))


def held_out_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """A metric that is better lower, as its name says."""
    return nn.functional.cross_entropy(outputs, targets)


def lossy() -> Workload:
    """See `Picky`; judged by its loss."""
    return Workload(model=Picky, data=_data(), metric=held_out_loss)
