"""Soft errors in a live state: the injector's own draws, on tensors that are in use.

The state is offered as a checkpoint is, so that the injector's population, sampling and plan serve it unchanged: the
same seed hits the same elements and bits as it would in a file of the same tensors. Only what is touched is copied from
a device and back.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import numpy.typing as npt

from evergrad.dtypes import DType
from evergrad.formats import Checkpoint
from evergrad.formats.checkpoint import Bits
from evergrad.formats.offset_checkpoint import describe
from evergrad.injection.faults import Fault
from evergrad.injection.injection_plan import Hit, InjectionPlan, plan_injection
from evergrad.injection.injector import Selection, apply_columns, settings_to_json
from evergrad.injection.log import InjectionLog
from evergrad.injection.replay import map_column, plan_replay
from evergrad.injection.rng import Draws
from evergrad.injection.sampling import Amount, Sampling, population, sample
from evergrad.records import Json, Role, TensorInfo
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
    planned = PreparedFault(LiveState(state), fault, where).inject(count, seed)
    return [hit for column in planned.columns for hit in column.hits()]


class PreparedFault:
    """A fault and what it may hit, worked out once for many injections into the same live tensors."""

    def __init__(self, live: LiveState, fault: Fault, where: Where = None) -> None:
        self._live, self._fault = live, fault
        self.population = population(live, fault, where)

    def inject(self, count: int, seed: int) -> InjectionPlan:
        """Let this many faults happen; what was done."""
        draws = Draws(seed)
        sites = sample(self.population, Amount(count=count), "element", draws)
        planned = plan_injection(self._live, self.population, sites, self._fault, draws)
        for column in planned.columns:
            ends = column.net_changes()
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


# What is to happen in a running training: a fault and its draws, or the faults of a log again.
#
# Into tensors that are all there at once (`happen`) exactly as into a file of them: the same seed, the same bits.
# What passes by, as activations do, is only known as it comes: how many faults each tensor gets is drawn by the sizes
# of the pass before (`shares`), and where in it on the tensor itself (`happen_in`), from a seed of its own.


@dataclass
class InjectedFaults:
    """What has happened so far, of how many attempts."""

    attempts: int = 0
    plans: list[InjectionPlan] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)

    @property
    def injected(self) -> int:
        """How many faults."""
        return sum(done.injected for done in self.plans)


class LiveFaults(ABC):
    """What is to happen; says nothing of when."""

    needs_sizes: bool
    """Whether `shares` has to know how large things are."""

    @abstractmethod
    def eligible_tensors(self, live: Checkpoint) -> list[TensorInfo]:
        """The tensors of these that may be hit; `UsageError` if there are none, or too few elements."""

    @abstractmethod
    def inject(self, live: LiveState) -> InjectedFaults:
        """Let all of it happen to these tensors."""

    @abstractmethod
    def shares(self, seen: ObservedTensors) -> tuple[InjectedFaults, dict[str, int]]:
        """How many faults each of what passes by gets, and what is known beforehand."""

    @abstractmethod
    def inject_share(self, live: LiveState, name: str, share: int) -> InjectionPlan:
        """Let a tensor's share happen to it."""

    @abstractmethod
    def settings(self) -> dict[str, Json]:
        """What the log says of it."""

    @abstractmethod
    def fault_to_json(self) -> Mapping[str, Json]:
        """The fault, as the log says it."""

    def log(self, happened: InjectedFaults, more: Mapping[str, Json]) -> InjectionLog:
        """What has happened, as a log like that of a file."""
        return InjectionLog(
            file="live state",
            out="",
            in_place=True,
            format=LiveState.format,
            fault=self.fault_to_json(),
            settings={**self.settings(), **more},
            attempts=happened.attempts,
            injected=happened.injected,
            changed=sum(done.changed for done in happened.plans),
            nonfinite=sum(done.nonfinite for done in happened.plans),
            columns=tuple(column for done in happened.plans for column in done.columns),
            files=(),
            left_out={reason: tuple(names) for reason, names in happened.left_out.items()},
        )


@dataclass(frozen=True)
class DrawnFaults(LiveFaults):
    """A fault, drawn from a seed."""

    fault: Fault
    amount: Amount
    where: Selection | None
    types: Sequence[DType] | None
    sampling: Sampling
    allow_nonfinite: bool
    seed: int

    needs_sizes = True

    def eligible_tensors(self, live: Checkpoint) -> list[TensorInfo]:
        """By `where`, of the types that fit; whether so many faults have a place is tried out."""
        found = population(live, self.fault, self.where, self.types)
        sample(found, self.amount, self.sampling, Draws(self.seed))
        return found.tensors

    def inject(self, live: LiveState) -> InjectedFaults:
        """Population, sites and bits from one stream of draws, as in a file."""
        draws = Draws(self.seed)
        found = population(live, self.fault, self.where, self.types)
        sites = sample(found, self.amount, self.sampling, draws)
        done = plan_injection(
            live, found, sites, self.fault, draws, sampling=self.sampling, allow_nonfinite=self.allow_nonfinite
        )
        apply_columns(live, tuple(done.columns))
        return InjectedFaults(sites.attempts, [done], found.left_out)

    def shares(self, seen: ObservedTensors) -> tuple[InjectedFaults, dict[str, int]]:
        """Drawn as sites are; of each only the tensor counts."""
        found = population(seen, self.fault, self.where, self.types)
        sites = sample(found, self.amount, self.sampling, Draws(self.seed))
        counts = np.bincount(sites.tensors, minlength=len(found.tensors)).tolist()
        shares = {info.name: count for info, count in zip(found.tensors, counts, strict=True) if count}
        return InjectedFaults(sites.attempts, [], found.left_out), shares

    def inject_share(self, live: LiveState, name: str, share: int) -> InjectionPlan:
        """From a seed of the tensor's own; of a tensor that has become smaller than its share, every element."""
        draws = Draws(derived_seed(self.seed, name))
        found = population(live, self.fault, None, self.types)
        room = int(found.sizes.sum()) if self.sampling == "element" else share
        sites = sample(found, Amount(count=min(share, room)), self.sampling, draws)
        done = plan_injection(
            live, found, sites, self.fault, draws, sampling=self.sampling, allow_nonfinite=self.allow_nonfinite
        )
        apply_columns(live, tuple(done.columns))
        return done

    def settings(self) -> dict[str, Json]:
        """As `eg.inject` writes them."""
        return settings_to_json(self.amount, self.where, self.types, self.sampling, self.allow_nonfinite, self.seed)

    def fault_to_json(self) -> Mapping[str, Json]:
        """The fault itself."""
        return self.fault.to_json()


@dataclass(frozen=True)
class ReplayedFaults(LiveFaults):
    """The faults of a log: the same elements and bits, nothing drawn."""

    source: InjectionLog

    needs_sizes = False

    def eligible_tensors(self, live: Checkpoint) -> list[TensorInfo]:
        """Those that the log names, if they are what they were."""
        return [live.tensors[map_column(live, column, None).tensor] for column in self.source.columns]

    def inject(self, live: LiveState) -> InjectedFaults:
        """Every column, wherever its tensor is now."""
        return InjectedFaults(self.source.attempts, [self._repeated(live, self.source)])

    def shares(self, seen: ObservedTensors) -> tuple[InjectedFaults, dict[str, int]]:
        """What the log says, whatever was seen."""
        return InjectedFaults(self.source.attempts), {column.tensor: len(column) for column in self.source.columns}

    def inject_share(self, live: LiveState, name: str, share: int) -> InjectionPlan:
        """The log's column of that tensor."""
        mine = tuple(column for column in self.source.columns if column.tensor == name)
        return self._repeated(live, replace(self.source, columns=mine))

    def settings(self) -> dict[str, Json]:
        """The log's, and whose they are."""
        return {**self.source.settings, "replay_of": self.source.digest}

    def fault_to_json(self) -> Mapping[str, Json]:
        """The log's."""
        return self.source.fault

    def _repeated(self, live: LiveState, log: InjectionLog) -> InjectionPlan:
        done = plan_replay(live, log, {})
        apply_columns(live, tuple(done.columns))
        return done


class ObservedTensors(Checkpoint):
    """What has passed by: how large it was and of which type, without what it held."""

    format = LiveState.format

    def __init__(self, seen: Mapping[str, tuple[DType, tuple[int, ...]]]) -> None:
        self.path = Path("live state")
        self.others: Mapping[str, str] = {}
        self.metadata: Mapping[str, str] = {}
        self.tensors = {
            name: TensorInfo(name, shape, dtype, Role.OTHER, math.prod(shape) * dtype.itemsize)
            for name, (dtype, shape) in seen.items()
        }
        self.skeleton = Skeleton.of_names(self.tensors)

    def close(self) -> None:
        """There is nothing to let go of."""

    def _read_bits(self, name: str, start: int, stop: int) -> Bits:
        self._refuse(name)

    def _xor_bits(self, name: str, indices: object, patterns: Bits) -> Bits:
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise AssertionError(f"{name} has passed by")


def derived_seed(seed: int, *what: str | int) -> int:
    """A seed of its own for a part of what is drawn."""
    text = "|".join(map(str, (seed, *what)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big")
