"""What whoever finishes versions tells the trainers: small records, one JSON line each on the agent's socket."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from evergrad.checkpoint.version import Version
from evergrad.errors import AgentError, said


@dataclass(frozen=True, slots=True)
class AgentEvent:
    """Something that a trainer should know."""

    kind: ClassVar[str]

    def to_json(self) -> str:
        """One line."""
        return json.dumps({"event": self.kind, **asdict(self)})


@dataclass(frozen=True, slots=True)
class Attached(AgentEvent):
    """The agent serves this trainer."""

    kind: ClassVar[str] = "attached"
    pid: int


@dataclass(frozen=True, slots=True)
class Alive(AgentEvent):
    """The agent runs: said every second, whatever else it does."""

    kind: ClassVar[str] = "alive"
    pid: int


@dataclass(frozen=True, slots=True)
class _OfVersion(AgentEvent):
    """What became of a version in a tier."""

    step: int
    attempt: int
    tier: str

    @property
    def version(self) -> Version:
        """Which version."""
        return Version(self.step, self.attempt)


@dataclass(frozen=True, slots=True)
class Committed(_OfVersion):
    """Every rank's shard of a version is complete in a tier."""

    kind: ClassVar[str] = "committed"


@dataclass(frozen=True, slots=True)
class Failed(_OfVersion):
    """A version will never be complete in a tier, and why."""

    kind: ClassVar[str] = "failed"
    why: str


@dataclass(frozen=True, slots=True)
class ArenasFree(AgentEvent):
    """The arenas of a rank that may be overwritten: index → the generation that is done with."""

    kind: ClassVar[str] = "free"
    rank: int
    arenas: dict[str, int]


@dataclass(frozen=True, slots=True)
class Refused(AgentEvent):
    """This trainer is not served any more: a later attempt runs the job."""

    kind: ClassVar[str] = "refused"
    attempt: int
    """The attempt that is refused: one that began since is not meant."""
    why: str


@dataclass(frozen=True, slots=True)
class UnfinishedVersion:
    """One node's knowledge of a version that is captured, or begun in a tier, and may be complete in none."""

    step: int
    attempt: int
    world_size: int
    ranks: list[int]
    """The ranks whose shards are in the arenas of this node, or in a tier that all nodes share."""
    damaged: list[int]
    """The ranks whose arenas on this node do not hold what was captured, or of whose shards nothing is left."""
    why: str
    """The reason why it could not be finished; empty if nothing failed here."""
    unreadable: list[int] = field(default_factory=list)
    """The ranks among `ranks` whose arenas on this node have a damaged header: they can never be finished."""

    @property
    def version(self) -> Version:
        """Which version."""
        return Version(self.step, self.attempt)


@dataclass(frozen=True, slots=True)
class CapturesFinished(AgentEvent):
    """Everything that was captured before the question can be found in a tier by now, or never will be."""

    kind: ClassVar[str] = "settled"
    question: int
    unfinished: list[UnfinishedVersion] = field(default_factory=list)


_KINDS: dict[str, type[AgentEvent]] = {
    cls.kind: cls for cls in (Alive, Attached, Committed, Failed, ArenasFree, Refused, CapturesFinished)
}


def read_event(line: str | bytes) -> AgentEvent:
    """The event of a line."""
    try:
        fields: dict[str, Any] = json.loads(line)
        if "unfinished" in fields:
            fields["unfinished"] = [UnfinishedVersion(**each) for each in fields["unfinished"]]
        return _KINDS[fields.pop("event")](**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AgentError(f"the agent said something that is no event: {line!r:.80} ({said(error)})") from None
