"""Which flipped bits does each guard find? One bit in one of four ranks, again and again.

The ranks are threads of this process over a real gloo group. For each flip the digests are compared and the damage is
healed; the cheap guards are asked before that, as if there were no digests: the range of the parameters, and the norm
of the reduced gradient, in this step and in the next, which the flipped rank takes with what it has.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.functional import cross_entropy

from evergrad.dtypes import DType
from evergrad.records import Check
from evergrad.recovery.guard.local_state_guard import LocalStateGuard
from evergrad.recovery.guard.norms import GradientNorms, MagnitudeHistory
from evergrad.recovery.guard.replicas import GuardResult, GuardSettings, ReplicaCheck, replica_of
from evergrad.recovery.local_state import LocalState, NeighbourState
from evergrad.recovery.process_group import GlooGroup, Group

__all__ = ["PLACES", "Cell", "bit_classes", "detect"]

RANKS, WRONG, WIDTH, CLASSES, BATCH = 4, 2, 32, 10, 16
USUAL_STEPS = 24
PLACES = ("weights", "Adam state", "buffers")


@dataclass
class Cell:
    """How many of the flips in one place of one class of bits were found, by whom, and healed."""

    trials: int = 0
    digest: int = 0
    healed: int = 0
    range: int = 0
    norm: int = 0


def bit_classes(dtype: torch.dtype) -> dict[str, range]:
    """Sign, every exponent bit from the highest on, and the mantissa in groups."""
    known = DType.of_torch(dtype)
    assert known is not None
    mantissa, exponent = known.layout.mantissa_bits, known.layout.exponent_bits
    found = {"sign": range(mantissa + exponent, mantissa + exponent + 1)}
    for below in range(exponent):
        bit = mantissa + exponent - 1 - below
        found["exponent, top bit" if not below else f"exponent, top − {below}"] = range(bit, bit + 1)
    third = -(-mantissa // 3)
    for name, low in (("high", mantissa - third), ("middle", mantissa - 2 * third), ("low", 0)):
        stop = mantissa - 2 * third if name == "low" else low + third
        found[f"mantissa, {name}"] = range(max(low, 0), stop)
    return found


class Net(nn.Module):
    """A perceptron with a batch norm, all of it of one type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores, as float32."""
        out: torch.Tensor = self.body(x)
        return out.float()


@dataclass
class Rank:
    """One rank: what it trains, and its guards."""

    net: Net
    optimizer: torch.optim.Optimizer
    guard: ReplicaCheck
    own: LocalStateGuard
    keeping: NeighbourState = field(default_factory=NeighbourState)


class Job:
    """Four ranks after some steps."""

    def __init__(self, dtype: torch.dtype, groups: list[Group]) -> None:
        self.dtype, self.groups = dtype, groups
        self.draw = torch.Generator().manual_seed(9)
        self.centres = torch.randn(CLASSES, WIDTH, generator=self.draw)
        net = Net(dtype)
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        self.norms, self.ranges = GradientNorms(), MagnitudeHistory()
        for _ in range(USUAL_STEPS):
            reduced = self.gradient([net] * RANKS, self.batches())
            self.norms.applied(self.norms.read(reduced))
            self.apply(net, optimizer, reduced)
        self.ranges.read(dict(net.named_parameters()))
        self.ranks = [_rank(*copy.deepcopy((net, optimizer))) for _ in groups]

    def batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A mini-batch for each rank."""
        labels = torch.randint(0, CLASSES, (RANKS, BATCH), generator=self.draw)
        noise = torch.randn(RANKS, BATCH, WIDTH, generator=self.draw)
        return [((self.centres[y] + noise[rank]).to(self.dtype), y) for rank, y in enumerate(labels)]

    def gradient(self, nets: list[Net], batches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        """The mean of all ranks' gradients; buffers are left as they were."""
        total: list[torch.Tensor] = []
        for net, (x, y) in zip(nets, batches, strict=True):
            before = [buffer.clone() for buffer in net.buffers()]
            grads = torch.autograd.grad(cross_entropy(net(x), y), list(net.parameters()))
            for buffer, old in zip(net.buffers(), before, strict=True):
                buffer.data.copy_(old)
            total = [one + two for one, two in zip(total, grads, strict=True)] if total else list(grads)
        return [each / RANKS for each in total]

    def apply(self, net: Net, optimizer: torch.optim.Optimizer, reduced: list[torch.Tensor]) -> None:
        """One step."""
        for parameter, grad in zip(net.parameters(), reduced, strict=True):
            parameter.grad = grad
        optimizer.step()
        optimizer.zero_grad()

    def cheap(self) -> tuple[bool, bool]:
        """Whether range and norm find the wrong rank, on copies: now, or in the step after."""
        good, bad = (copy.deepcopy((self.ranks[n].net, self.ranks[n].optimizer)) for n in (0, WRONG))
        ranges, in_range, in_norm = copy.deepcopy(self.ranges), False, False  # it learns from what it sees
        for _ in range(2):
            in_range |= bool(ranges.read(dict(bad[0].named_parameters())))
            nets = [bad[0] if rank == WRONG else good[0] for rank in range(RANKS)]
            reduced = self.gradient(nets, self.batches())
            in_norm |= self.norms.read(reduced).is_suspicious
            self.apply(*good, reduced)
            self.apply(*bad, reduced)
        return in_range, in_norm

    def together(self, act: Callable[[int], Any]) -> list[Any]:
        """Every rank at once."""
        with ThreadPoolExecutor(RANKS) as pool:
            return list(pool.map(act, range(RANKS)))

    def pass_point(self) -> None:
        """Note buffers, and let neighbours hold them."""

        def act(rank: int) -> None:
            mine = self.ranks[rank]
            taken = LocalState(list(mine.net.buffers())).capture()
            mine.own.note(0, taken)
            mine.keeping.exchange(self.groups[rank], 0, taken, (rank - 1) % RANKS, sizes_vary=False)

        self.together(act)

    def check(self, place: str) -> GuardResult:
        """What the guard finds."""

        def act(rank: int) -> GuardResult:
            mine, group = self.ranks[rank], self.groups[rank]
            if place == "buffers":
                return mine.own.check(group, mine.keeping, (rank - 1) % RANKS, step=0)
            return mine.guard.check(group, replica_of(mine.net, [mine.optimizer]), step=0)

        found: GuardResult = self.together(act)[WRONG]
        return found

    def targets(self, place: str) -> dict[str, torch.Tensor]:
        """What may be hit on the wrong rank, by path."""
        mine = self.ranks[WRONG]
        if place == "buffers":
            found = {f"model/{name}": buffer for name, buffer in mine.net.named_buffers()}
        else:
            prefix = "model/" if place == "weights" else "optimizer/state"
            tensors = replica_of(mine.net, [mine.optimizer]).tensors
            found = {path: tensor for path, tensor in tensors.items() if path.startswith(prefix)}
        return {path: tensor for path, tensor in found.items() if tensor.dtype == self.dtype and tensor.dim()}


def detect(dtype: torch.dtype, trials: int, seed: int) -> dict[tuple[str, str], Cell]:
    """The counts, by place and class of bits."""
    draw = random.Random(seed)
    cells: dict[tuple[str, str], Cell] = {}
    with _gloo() as groups:
        job = Job(dtype, groups)
        job.pass_point()
        for place in PLACES:
            for name, bits in bit_classes(dtype).items():
                cell = cells[place, name] = Cell()
                for _ in range(trials):
                    _trial(job, place, draw, bits, cell)
    return cells


def _trial(job: Job, place: str, draw: random.Random, bits: range, cell: Cell) -> None:
    targets = job.targets(place)
    path = draw.choice(sorted(targets))
    tensor = targets[path]
    element, bit = draw.randrange(tensor.numel()), draw.choice(bits)
    raw = tensor.reshape(-1).view(torch.uint8).numpy()  # not through torch, which would take note of a change
    before = raw.copy()
    raw[element * tensor.element_size() + bit // 8] ^= 1 << bit % 8
    in_range, in_norm = job.cheap()
    checked = job.check(place)
    cell.trials += 1
    cell.range += in_range
    cell.norm += in_norm
    cell.digest += [(each.rank, each.path) for each in checked.differences] == [(WRONG, path)]
    cell.healed += checked.status is Check.DEGRADED and bool((raw == before).all())
    raw[:] = before


def _rank(net: Net, optimizer: torch.optim.Optimizer) -> Rank:
    buffers = {f"model/{name}": buffer for name, buffer in net.named_buffers()}
    return Rank(net, optimizer, ReplicaCheck(GuardSettings()), LocalStateGuard(buffers))


@contextmanager
def _gloo() -> Iterator[list[Group]]:
    store = HashStore()

    def make(rank: int) -> Group:
        return GlooGroup(store, rank, RANKS, host="127.0.0.1", timeout=timedelta(seconds=60))

    with ThreadPoolExecutor(RANKS) as pool:
        groups = list(pool.map(make, range(RANKS)))
    try:
        yield groups
    finally:
        with ThreadPoolExecutor(RANKS) as pool:
            list(pool.map(lambda group: group.close(), groups))
