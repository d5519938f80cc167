"""A run as records: its processes, its generations, what interrupted them, and what else was noticed.

All moments are seconds since the run began. What the timeline does not tell is None, and never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Literal

from evergrad.records import Json

SCHEMA_VERSION = 1

State = Literal["starting", "spare", "training", "recovering", "gone"]
"""Before the first plan · waits to be called · in a generation · between two of them · failed, if alive or not."""


Shade = Literal["", "good", "bad"]
"""How a notice is meant."""


@dataclass(frozen=True, slots=True)
class Span:
    """A process was in this state for so long."""

    state: State
    begin_s: float
    end_s: float
    what: str = ""
    """What it was then: its rank and generation."""


@dataclass(slots=True)
class Process:
    """One process that the launcher started."""

    uid: int
    label: str
    """What it was started as: `rank 2`, `spare 4`."""
    node: str = ""
    pid: int | None = None
    started_s: float | None = None
    exited_s: float | None = None
    code: int | None = None
    ranks: list[int] = field(default_factory=list)
    """The ranks that it was, in order, each once."""
    spans: list[Span] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What it was started as, and what it became."""
        own = f"rank {self.ranks[0]}" if self.ranks else ""
        return f"{self.label} → {own}" if own and own != self.label else self.label


@dataclass(frozen=True, slots=True)
class Phase:
    """One part of an interruption."""

    name: Literal["unseen", "agreeing", "recovering"]
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class Loss:
    """One process that a generation has lost."""

    uid: int
    who: str
    """Its rank, in words."""
    how: str
    """`died (SIGKILL)`, `has been stopped for 1.1 s`."""
    failed_s: float | None = None
    """When it failed, where it was made to; nobody notes that of a failure that simply happens."""
    injected: str = ""
    """What was done to it on purpose: `kill`, `stop`, `cut`."""


@dataclass(frozen=True, slots=True)
class Interruption:
    """A generation ended before the job did: how, and how the next one began."""

    generation: int
    """The one that ended."""
    kind: Literal["failure", "planned"]
    what: str
    """What happened, in words."""
    lost: tuple[Loss, ...] = ()
    left: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    step: int | None = None
    """How many steps were applied by then."""
    failed_s: float | None = None
    seen_s: float | None = None
    """When the first of the others knew: a rank that reports, or the launcher."""
    seen_by: str = ""
    decided_s: float | None = None
    """When the plan for the next generation was written."""
    joined_s: float | None = None
    """When the last joiner had the job's state."""
    going_on_s: float | None = None
    """When the first rank had applied a step again."""
    strategy: str = ""
    verdict: str = ""
    """What survivors did: redo, repair, retry, restart."""
    ranks_before: int = 0
    ranks: int | None = None
    """How many the next generation has; None if there was none."""
    steps_redone: int | None = None
    bytes_handed: int = 0
    exact: bool = True
    """Whether, by the plan, the job went on as it would have without."""
    overtaken: bool = False
    """The next generation broke, too, before it had applied a step."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What lies between those moments that are known; without what ended before it began: see `clocks_disagree`."""
        return tuple(phase for phase in self._measured() if phase.seconds >= 0)

    @property
    def phases_s(self) -> dict[str, float | None]:
        """How long each phase took of which both moments are known; None if its end lies before its beginning."""
        return {phase.name: phase.seconds if phase.seconds >= 0 else None for phase in self._measured()}

    @property
    def clocks_disagree(self) -> bool:
        """Whether a moment lies before the one that led to it: they are of machines whose clocks differ."""
        known = [at_s for at_s in self._moments() if at_s is not None]
        return any(after < before for before, after in pairwise(known))

    @property
    def begin_s(self) -> float | None:
        """The first moment that is known."""
        return self.failed_s if self.failed_s is not None else self.seen_s

    @property
    def seconds(self) -> float | None:
        """From the failure, or where that is not on record from when it was seen, to the next applied step."""
        begin = self.begin_s
        return None if begin is None or self.going_on_s is None or self.clocks_disagree else self.going_on_s - begin

    def to_json(self) -> dict[str, Json]:
        """As `evergrad timeline --json` prints it."""
        phases: dict[str, Json] = {
            name: None if seconds is None else round(seconds, 6) for name, seconds in self.phases_s.items()
        }
        told = {"phases_s": phases, "seconds": self.seconds, "clocks_disagree": self.clocks_disagree}
        return asdict(self) | told

    def _moments(self) -> tuple[float | None, float | None, float | None, float | None]:
        return self.failed_s, self.seen_s, self.decided_s, self.going_on_s

    def _measured(self) -> tuple[Phase, ...]:
        names: tuple[Literal["unseen", "agreeing", "recovering"], ...] = ("unseen", "agreeing", "recovering")
        pairs = zip(names, pairwise(self._moments()), strict=True)
        return tuple(Phase(name, a, b) for name, (a, b) in pairs if a is not None and b is not None)


@dataclass(frozen=True, slots=True)
class Generation:
    """The ranks that trained together, from one plan to the next."""

    number: int
    begin_s: float
    end_s: float
    members: tuple[str, ...]
    """What each rank was started as, by rank."""
    joined: tuple[str, ...] = ()
    first_step: int | None = None
    """How many steps were applied when it began, as far as is on record."""


@dataclass(frozen=True, slots=True)
class Noticed:
    """Something that interrupted nobody: a healed flip, a rank that was late, a save that was left out."""

    at_s: float
    who: str
    what: str
    mark: Shade = ""


@dataclass(frozen=True, slots=True)
class RunStory:
    """What a timeline tells of a run."""

    command: str
    outcome: str
    """As of the launcher; empty if no end is on record."""
    message: str
    seconds: float
    """To the end, or to the last event that there is."""
    num_ranks: int
    num_spares: int
    steps: int | None
    processes: tuple[Process, ...]
    generations: tuple[Generation, ...]
    interruptions: tuple[Interruption, ...]
    noticed: tuple[Noticed, ...]
    progress: tuple[tuple[float, int], ...]
    """When how many steps were applied, wherever the timeline says so."""
    samples_lost: int
    """Samples that no step used although they were dealt, by the books of the epochs."""
    inexact: str
    """Why the result is not what it would have been without failures; empty if nothing says so."""
    unverified: str
    """The reason why that is unknown, as the launcher recorded it; empty if it was compared or not recorded."""
    is_told_exact: bool
    """True if the launcher has compared the ranks, and recorded that the result is exact."""
    is_spread: bool
    """Several machines, each with a clock of its own: durations are differences of wall clocks."""
    settings: Mapping[str, Json]
    num_events: int
    notes: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[Interruption, ...]:
        """What was not planned."""
        return tuple(each for each in self.interruptions if each.kind == "failure")

    @property
    def exact(self) -> bool | None:
        """Whether the run went on as it would have without failures, to the last bit; None if that is not told."""
        if self.inexact:
            return False
        if self.outcome != "finished" or not self.generations or not self.is_told_exact:
            return None
        is_told = all(each.ranks is not None for each in self.failures) and not any(each.mark for each in self.noticed)
        return True if is_told else None

    def to_json(self) -> dict[str, Json]:
        """As `evergrad timeline --json` prints it; without spans and progress, which are for pictures."""
        processes: list[Json] = [
            {key: value for key, value in asdict(each).items() if key != "spans"} for each in self.processes
        ]
        return {
            "schema_version": SCHEMA_VERSION,
            "command": self.command,
            "outcome": self.outcome or None,
            "message": self.message,
            "seconds": round(self.seconds, 6),
            "ranks": self.num_ranks,
            "spares": self.num_spares,
            "steps": self.steps,
            "exact": self.exact,
            "inexact": self.inexact,
            "unverified": self.unverified,
            "samples_lost": self.samples_lost,
            "clocks_differ": self.is_spread,
            "failures": [each.to_json() for each in self.failures],
            "planned": [each.to_json() for each in self.interruptions if each.kind == "planned"],
            "generations": [asdict(each) for each in self.generations],
            "noticed": [asdict(each) for each in self.noticed],
            "processes": processes,
            "events": self.num_events,
            "notes": list(self.notes),
        }
