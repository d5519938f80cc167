"""What ranks and the coordinator tell each other through the store: reports, plans, and the names of the keys.

The ranks of a job pass *points* one after the other, numbered from 0: the beginning of an epoch, the end of every
backward pass that reduces gradients, the end of an epoch. A point is passed together: a rank that has passed one knows
that every other rank has reached it, with all gradients reduced, and that what only one rank has (its RNG, its
buffers) is held by its neighbour too. So ranks are never further apart than one point.

A *generation* is one membership of the job. When it breaks, every survivor reports the point that it could not pass,
the coordinator decides from the reports alone, and the plan of the next generation tells each one what to do:

    generation g breaks ──▶ broken/g ──▶ every survivor: report/g/<uid> ──▶ coordinator: plan/g+1 ──▶ all go on
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from evergrad.records import record_from_json, record_to_json

SCHEMA_VERSION = 1
EXIT_ALL_LEFT = 75
"""What ranks exit with when all of them were asked to leave, as a preempted training does."""


class PointKind(StrEnum):
    """What kind of point a rank could not pass."""

    BEGIN = "begin"
    STEP = "step"
    END = "end"
    JOIN = "join"
    """Not a point: everyone stopped before the next step, on purpose, to let others in or go."""


@dataclass(frozen=True, slots=True)
class EpochBoundary:
    """A rank at the beginning or the end of an epoch, where it waits for all others."""

    generation: int
    point: int
    kind: PointKind
    epoch: int
    rank: int
    num_begun: int
    """The number of collectives that this rank has begun in this generation."""

    def is_at(self, other: EpochBoundary) -> bool:
        """Return True if two ranks are at the same point of one generation, even if they take it for different ones."""
        return (self.generation, self.point) == (other.generation, other.point)

    def __str__(self) -> str:
        where = "begins" if self.kind is PointKind.BEGIN else "has come to the end of"
        return f"rank {self.rank} {where} epoch {self.epoch}"

    def to_json(self) -> str:
        """As text for the store."""
        return json.dumps(record_to_json(self) | {"schema_version": SCHEMA_VERSION})

    @classmethod
    def from_json(cls, text: str | bytes) -> EpochBoundary:
        """Back from text."""
        return record_from_json(cls, _fields(text))


class Verdict(StrEnum):
    """What a survivor does next."""

    PROCEED = "proceed"
    """Another survivor has passed your point, so it counts: all you need is there. Go on as if you had passed it."""
    RETRY = "retry"
    """Nobody has passed it, and nothing was lost: try again in the new generation (begin, end)."""
    REDO = "redo"
    """Nothing of this mini-batch remains; do it again."""
    REPAIR = "repair"
    """Keep the gradients that all survivors have reduced, reduce the others among survivors."""
    RESTART = "restart"
    """Back to the newest checkpoint."""
    LEAVE = "leave"
    """You are in no further generation, as you wished. Never in a plan: it follows from not being a member."""


@dataclass(frozen=True, slots=True)
class SurvivorReport:
    """What one survivor saw of a broken generation."""

    uid: int
    rank: int
    generation: int
    point: int
    """The number of the point that it could not pass."""
    kind: PointKind
    step: int
    """Steps that this rank has applied."""
    first: int = -1
    """The first point of the step under way, which may have several; -1: this one."""
    done: tuple[int, ...] = ()
    """The buckets that were reduced, of `buckets` in all."""
    buckets: int = 0
    reason: str = ""
    has_state: bool = True
    """Whether it has the job's state: not if it was to get it when the generation broke."""
    leaves: bool = False
    """Whether it wants to be in no further generation: all of its work is done up to this point (kind join)."""
    planned: bool = False
    """Whether all have agreed to end the generation here (kind join)."""
    tries: int = 0
    """How often the step under way has been done again by common consent, because its result was suspicious."""
    back_to: str = ""
    """The version that all have agreed to go back to, because what they have cannot be trusted."""
    keeps_place: bool = False
    """True if only the loader knows its place in the data, so that a new rank cannot be given a share."""

    @property
    def begun_at(self) -> int:
        """The point at which the step under way begins."""
        return self.point if self.first < 0 else self.first

    def to_json(self) -> str:
        """As text for the store."""
        return json.dumps(record_to_json(self) | {"schema_version": SCHEMA_VERSION})

    @classmethod
    def from_json(cls, text: str | bytes) -> SurvivorReport:
        """Back from text."""
        return record_from_json(cls, _fields(text))


@dataclass(frozen=True, slots=True)
class MembershipPlan:
    """One generation: who is in it, and how it begins."""

    generation: int
    members: tuple[int, ...]
    """The uid of each rank, by rank."""
    previous: tuple[int, ...] = ()
    """The members of the generation before, by rank."""
    joiners: tuple[int, ...] = ()
    """Members that have no state yet: called spares, and ranks that were started anew."""
    source: int | None = None
    """The uid that joiners get the job's state from; None if there is none to get: the job begins, or restarts."""
    point: int = 0
    """The point at which the members go on: for survivors that were told to proceed, the one after theirs."""
    step: int = 0
    """How many steps were applied, by those who reported."""
    kind: PointKind = PointKind.BEGIN
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    """What each survivor does, by uid."""
    takes: dict[int, int] = field(default_factory=dict)
    """Which rank of the generation before a joiner takes the place of, by uid; not for a place vacant since earlier."""
    keepers: dict[int, int] = field(default_factory=dict)
    """Who holds what only that rank had, by the joiner's uid; a joiner that is missing here goes on inexactly."""
    todo: tuple[int, ...] = ()
    """The buckets that are reduced again (repair)."""
    dead: tuple[int, ...] = ()
    """The uids that are gone since the generation before."""
    left: tuple[int, ...] = ()
    """The uids that have left in good order since then."""
    restart: bool = False
    """Everyone goes back to the newest checkpoint."""
    version: str = ""
    """Or rather to this one."""
    relaunch: bool = False
    """Every process starts the script anew first."""
    calls: tuple[int, ...] = ()
    """Spares that will take the place of dead ranks: everyone stops before the next step to let them in."""
    vacant: tuple[tuple[int, int], ...] = ()
    """The places they will take: position among members and vacant places together, and the uid of who had it."""
    held: dict[int, int] = field(default_factory=dict)
    """Who holds what only that member has, since the last point that was passed: in force until the next one is."""
    _ranks: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Each member's rank, by uid; made when the first is asked for."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self.members)

    def rank_of(self, uid: int) -> int | None:
        """The rank of a process in this generation; None if it has none."""
        if not self._ranks:
            # At once: threads of the coordinator may ask at the same time.
            self._ranks.update({member: rank for rank, member in enumerate(self.members)})
        return self._ranks.get(uid)

    def to_json(self) -> str:
        """As text for the store."""
        return json.dumps(record_to_json(self) | {"schema_version": SCHEMA_VERSION})

    @classmethod
    def from_json(cls, text: str | bytes) -> MembershipPlan:
        """Back from text."""
        return record_from_json(cls, _fields(text))


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The parts of one rank's state that all ranks must have alike, in a few bytes each."""

    step: int
    """The number of steps that this rank has applied."""
    values: dict[str, str]
    """Plain values by path, as text: hyper-parameters."""
    tensors: dict[str, str]
    """Digests of tensors by path: parameters and optimizer state."""

    def to_json(self) -> str:
        """As text for the store."""
        packed = zlib.compress(json.dumps({"values": self.values, "tensors": self.tensors}).encode(), 1)
        fields = {"schema_version": SCHEMA_VERSION, "step": self.step, "packed": base64.b64encode(packed).decode()}
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str | bytes) -> Fingerprint:
        """Back from text."""
        fields = _fields(text)
        return cls(fields["step"], **json.loads(zlib.decompress(base64.b64decode(fields["packed"]))))


def first_difference(found: Mapping[int, Fingerprint]) -> tuple[str, str]:
    """The path in which ranks differ, plain values before tensors, and a line about it; two empty texts if in none.

    >>> one = Fingerprint(3, {"optimizer/param_groups/0/lr": "0.1"}, {"model/w": "9f3c"})
    >>> two = Fingerprint(3, {"optimizer/param_groups/0/lr": "0.2"}, {"model/w": "02ab"})
    >>> first_difference({0: one, 1: two})[1]
    'optimizer/param_groups/0/lr is 0.1 on rank 0 and 0.2 on rank 1 (and 1 more difference)'
    """
    steps = {rank: each.step for rank, each in found.items()}
    if len(set(steps.values())) > 1:
        return "step", "applied steps: " + ", ".join(f"{step} on rank {rank}" for rank, step in sorted(steps.items()))
    wrong: list[tuple[str, str]] = []
    for kind in ("values", "tensors"):
        columns: dict[int, dict[str, str]] = {rank: getattr(each, kind) for rank, each in sorted(found.items())}
        for path in dict.fromkeys(path for column in columns.values() for path in column):
            seen = {rank: column.get(path) for rank, column in columns.items()}
            if len(set(seen.values())) > 1:
                wrong.append((path, _told(path, seen, is_value=kind == "values")))
    if not wrong:
        return "", ""
    more = len(wrong) - 1
    return wrong[0][0], wrong[0][1] + (f" (and {more} more difference{'s' * (more > 1)})" if more else "")


def _told(path: str, seen: Mapping[int, str | None], *, is_value: bool) -> str:
    """One difference in words: the rank that most others agree with, and the first that does not."""
    usual = Counter(seen.values()).most_common(1)[0][0]
    one = next(rank for rank, value in seen.items() if value == usual)
    other = next(rank for rank, value in seen.items() if value != usual)
    if usual is None or seen[other] is None:
        has, lacks = (other, one) if usual is None else (one, other)
        return f"{path} is there on rank {has} and missing on rank {lacks}"
    if is_value:
        return f"{path} is {usual} on rank {one} and {seen[other]} on rank {other}"
    return f"{path} on rank {other} is not what it is on rank {one}"


class StoreKeys:
    """The names under which the store holds things; g is a generation, uid a process."""

    fatal = "fatal"
    """A message: the job cannot go on, and nobody shall try."""
    progress = "progress"
    """JSON, a few times a second: what the status line shows."""

    @staticmethod
    def joined(uid: int) -> str:
        """This process called `eg.join`: JSON of what it brings (pid, whether it has a checkpointer)."""
        return f"joined/{uid}"

    @staticmethod
    def waiting(uid: int) -> str:
        """This process has no rank, and waits in `job.batches` to be called."""
        return f"waiting/{uid}"

    @staticmethod
    def called(uid: int) -> str:
        """The generation that a waiting process is called into."""
        return f"called/{uid}"

    @staticmethod
    def broken(generation: int) -> str:
        """Why a generation broke: JSON of who (uid) and what (reason), set by the first who knows."""
        return f"broken/{generation}"

    @staticmethod
    def news(uid: int, generation: int) -> str:
        """For one process alone, which waits for it: its generation broke, and why; or itself wants to wait no more."""
        return f"news/{uid}/{generation}"

    @staticmethod
    def change(generation: int) -> str:
        """Why all are to stop before their next step, if they are: somebody waits to join this generation."""
        return f"change/{generation}"

    @staticmethod
    def report(generation: int, uid: int) -> str:
        """The report of a survivor."""
        return f"report/{generation}/{uid}"

    @staticmethod
    def plan(generation: int) -> str:
        """The plan of a generation; once it is there it never changes."""
        return f"plan/{generation}"

    @staticmethod
    def wrapped(epoch: int) -> str:
        """A rank that has called `job.wrap` before this epoch, at the beginning of the job."""
        return f"wrapped/{epoch}"

    @staticmethod
    def unwrapped(epoch: int) -> str:
        """A rank that has begun this epoch without `job.wrap`, at the beginning of the job."""
        return f"unwrapped/{epoch}"

    misuse = "misuse"
    """Which calls the script leaves out, so that its training counts for nothing, if that is known only at the end."""

    inexact = "inexact"
    """Why the job is no longer exactly what it would have been, if it is not."""
    diverged = "diverged"
    """The first difference between ranks after a process joined; empty once a guard has healed it."""
    unverified = "unverified"
    """The reason why it is unknown whether the job is still exact, if it is unknown."""

    boundary = "boundary"
    """The last rank that has come to the beginning or the end of an epoch: a `EpochBoundary`."""
    boundary_met = "boundary-met"
    """The last boundary to which all ranks have come, as the first rank saw it."""

    @staticmethod
    def at_boundary(uid: int) -> str:
        """The last boundary to which this process has come."""
        return f"at-boundary/{uid}"

    @staticmethod
    def ended(uid: int) -> str:
        """This process has ended its script, with exit code 0."""
        return f"ended/{uid}"

    @staticmethod
    def begun(uid: int) -> str:
        """JSON of the step that this process has come to last: its first point, and the process's own state, if that
        has changed since the point before."""
        return f"begun/{uid}"

    @staticmethod
    def fingerprint(uid: int) -> str:
        """The fingerprint of a process that has ended its training."""
        return f"fingerprint/{uid}"

    @staticmethod
    def fired(index: int) -> str:
        """Under this, `/<time>` of a scheduled failure: in which generation it happened, and by whom."""
        return f"fired/{index}"


def _fields(text: str | bytes) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(text)
    version = fields.pop("schema_version")
    assert version == SCHEMA_VERSION, f"schema {version}: ranks and launcher are of different versions"
    return fields
