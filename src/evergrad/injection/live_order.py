"""What is to happen in a running training: a fault and its draws, or the faults of a log again.

Into tensors that are all there at once (`happen`) exactly as into a file of them: the same seed, the same bits. What
passes by, as activations do, is only known as it comes: how many faults each tensor gets is drawn by the sizes of the
pass before (`shares`), and where in it on the tensor itself (`happen_in`), from a seed of its own.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import numpy as np

from evergrad.dtypes import DType
from evergrad.formats import Checkpoint
from evergrad.formats.checkpoint import Bits
from evergrad.injection.draws import Draws
from evergrad.injection.execution import alter
from evergrad.injection.faults import Fault
from evergrad.injection.injector import Selection, settings_told
from evergrad.injection.live import LiveState
from evergrad.injection.log import InjectionLog
from evergrad.injection.plan import Plan, plan
from evergrad.injection.population import population
from evergrad.injection.replay import aimed_at, repeated
from evergrad.injection.sampling import Amount, Sampling, sample
from evergrad.records import Json, Role, TensorInfo
from evergrad.state import Skeleton


@dataclass
class Happened:
    """What has happened so far, of how many attempts."""

    attempts: int = 0
    plans: list[Plan] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)

    @property
    def injected(self) -> int:
        """How many faults."""
        return sum(done.injected for done in self.plans)


class Order(ABC):
    """What is to happen; says nothing of when."""

    needs_sizes: bool
    """Whether `shares` has to know how large things are."""

    @abstractmethod
    def chosen(self, live: Checkpoint) -> list[TensorInfo]:
        """The tensors of these that may be hit; `UsageError` if there are none, or too few elements."""

    @abstractmethod
    def happen(self, live: LiveState) -> Happened:
        """Let all of it happen to these tensors."""

    @abstractmethod
    def shares(self, seen: Seen) -> tuple[Happened, dict[str, int]]:
        """How many faults each of what passes by gets, and what is known beforehand."""

    @abstractmethod
    def happen_in(self, live: LiveState, name: str, share: int) -> Plan:
        """Let a tensor's share happen to it."""

    @abstractmethod
    def settings(self) -> dict[str, Json]:
        """What the log says of it."""

    @abstractmethod
    def fault_told(self) -> Mapping[str, Json]:
        """The fault, as the log says it."""

    def log(self, happened: Happened, more: Mapping[str, Json]) -> InjectionLog:
        """What has happened, as a log like that of a file."""
        return InjectionLog(
            file="live state",
            out="",
            in_place=True,
            format=LiveState.format,
            fault=self.fault_told(),
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
class Drawn(Order):
    """A fault, drawn from a seed."""

    fault: Fault
    amount: Amount
    where: Selection | None
    types: Sequence[DType] | None
    sampling: Sampling
    allow_nonfinite: bool
    seed: int

    needs_sizes = True

    def chosen(self, live: Checkpoint) -> list[TensorInfo]:
        """By `where`, of the types that fit; whether so many faults have a place is tried out."""
        found = population(live, self.fault, self.where, self.types)
        sample(found, self.amount, self.sampling, Draws(self.seed))
        return found.tensors

    def happen(self, live: LiveState) -> Happened:
        """Population, sites and bits from one stream of draws, as in a file."""
        draws = Draws(self.seed)
        found = population(live, self.fault, self.where, self.types)
        sites = sample(found, self.amount, self.sampling, draws)
        done = plan(live, found, sites, self.fault, draws, sampling=self.sampling, allow_nonfinite=self.allow_nonfinite)
        alter(live, tuple(done.columns))
        return Happened(sites.attempts, [done], found.left_out)

    def shares(self, seen: Seen) -> tuple[Happened, dict[str, int]]:
        """Drawn as sites are; of each only the tensor counts."""
        found = population(seen, self.fault, self.where, self.types)
        sites = sample(found, self.amount, self.sampling, Draws(self.seed))
        counts = np.bincount(sites.tensors, minlength=len(found.tensors)).tolist()
        shares = {info.name: count for info, count in zip(found.tensors, counts, strict=True) if count}
        return Happened(sites.attempts, [], found.left_out), shares

    def happen_in(self, live: LiveState, name: str, share: int) -> Plan:
        """From a seed of the tensor's own; of a tensor that has become smaller than its share, every element."""
        draws = Draws(mixed(self.seed, name))
        found = population(live, self.fault, None, self.types)
        room = int(found.sizes.sum()) if self.sampling == "element" else share
        sites = sample(found, Amount(count=min(share, room)), self.sampling, draws)
        done = plan(live, found, sites, self.fault, draws, sampling=self.sampling, allow_nonfinite=self.allow_nonfinite)
        alter(live, tuple(done.columns))
        return done

    def settings(self) -> dict[str, Json]:
        """As `eg.inject` writes them."""
        return settings_told(self.amount, self.where, self.types, self.sampling, self.allow_nonfinite, self.seed)

    def fault_told(self) -> Mapping[str, Json]:
        """The fault itself."""
        return self.fault.to_json()


@dataclass(frozen=True)
class Again(Order):
    """The faults of a log: the same elements and bits, nothing drawn."""

    source: InjectionLog

    needs_sizes = False

    def chosen(self, live: Checkpoint) -> list[TensorInfo]:
        """Those that the log names, if they are what they were."""
        return [live.tensors[aimed_at(live, column, None).tensor] for column in self.source.columns]

    def happen(self, live: LiveState) -> Happened:
        """Every column, wherever its tensor is now."""
        return Happened(self.source.attempts, [self._repeated(live, self.source)])

    def shares(self, seen: Seen) -> tuple[Happened, dict[str, int]]:
        """What the log says, whatever was seen."""
        return Happened(self.source.attempts), {column.tensor: len(column) for column in self.source.columns}

    def happen_in(self, live: LiveState, name: str, share: int) -> Plan:
        """The log's column of that tensor."""
        mine = tuple(column for column in self.source.columns if column.tensor == name)
        return self._repeated(live, replace(self.source, columns=mine))

    def settings(self) -> dict[str, Json]:
        """The log's, and whose they are."""
        return {**self.source.settings, "replay_of": self.source.digest}

    def fault_told(self) -> Mapping[str, Json]:
        """The log's."""
        return self.source.fault

    def _repeated(self, live: LiveState, log: InjectionLog) -> Plan:
        done = repeated(live, log, {})
        alter(live, tuple(done.columns))
        return done


class Seen(Checkpoint):
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


def mixed(seed: int, *what: str | int) -> int:
    """A seed of its own for a part of what is drawn."""
    text = "|".join(map(str, (seed, *what)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big")
