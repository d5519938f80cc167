"""A run as records: its processes, its generations, what interrupted them, and what else was noticed.

All moments are seconds since the run began. What the timeline does not tell is None, and never guessed.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from shlex import quote
from typing import Literal

from evergrad._files import read_small
from evergrad.errors import DamagedFile, FileAccessError, UsageError
from evergrad.records import Json
from evergrad.timeline import Event, read_events
from evergrad.wording import count_of

SCHEMA_VERSION = 1

ProcessState = Literal["starting", "spare", "training", "recovering", "gone"]
"""Before the first plan · waits to be called · in a generation · between two of them · failed, if alive or not."""


Shade = Literal["", "good", "bad"]
"""How a notice is meant."""


@dataclass(frozen=True, slots=True)
class Span:
    """A process was in this state for so long."""

    state: ProcessState
    begin_s: float
    end_s: float
    what: str = ""
    """What it was then: its rank and generation."""


@dataclass(slots=True)
class ProcessHistory:
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
class InterruptionPhase:
    """One part of an interruption."""

    name: Literal["unseen", "agreeing", "recovering"]
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class LostProcess:
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
    lost: tuple[LostProcess, ...] = ()
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
    def phases(self) -> tuple[InterruptionPhase, ...]:
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

    def _measured(self) -> tuple[InterruptionPhase, ...]:
        names: tuple[Literal["unseen", "agreeing", "recovering"], ...] = ("unseen", "agreeing", "recovering")
        pairs = zip(names, pairwise(self._moments()), strict=True)
        return tuple(InterruptionPhase(name, a, b) for name, (a, b) in pairs if a is not None and b is not None)


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
class Anomaly:
    """Something that interrupted nobody: a healed flip, a rank that was late, a save that was left out."""

    at_s: float
    who: str
    what: str
    mark: Shade = ""


@dataclass(frozen=True, slots=True)
class RunAnalysis:
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
    processes: tuple[ProcessHistory, ...]
    generations: tuple[Generation, ...]
    interruptions: tuple[Interruption, ...]
    anomalies: tuple[Anomaly, ...]
    progress: tuple[tuple[float, int], ...]
    """When how many steps were applied, wherever the timeline says so."""
    samples_lost: int
    """Samples that no step used although they were dealt, by the books of the epochs."""
    inexact: str
    """Why the result is not what it would have been without failures; empty if nothing says so."""
    unverified: str
    """The reason why that is unknown, as the launcher recorded it; empty if it was compared or not recorded."""
    is_recorded_exact: bool
    """True if the launcher has compared the ranks, and recorded that the result is exact."""
    is_multinode: bool
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
        if self.outcome != "finished" or not self.generations or not self.is_recorded_exact:
            return None
        is_told = all(each.ranks is not None for each in self.failures) and not any(
            each.mark for each in self.anomalies
        )
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
            "clocks_differ": self.is_multinode,
            "failures": [each.to_json() for each in self.failures],
            "planned": [each.to_json() for each in self.interruptions if each.kind == "planned"],
            "generations": [asdict(each) for each in self.generations],
            "noticed": [asdict(each) for each in self.anomalies],
            "processes": processes,
            "events": self.num_events,
            "notes": list(self.notes),
        }


# An event with its place in the run, and its fields as far as they are what they should be.


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """An event, and when it was: seconds since the run began."""

    at_s: float
    source: Event

    @property
    def event(self) -> str:
        """What happened."""
        return self.source.event

    @property
    def who(self) -> str:
        """Who saw it."""
        return self.source.source

    @property
    def uid(self) -> int | None:
        """The process that saw it; None for a launcher."""
        name, _, rest = self.source.source.partition(" ")
        return int(rest) if name == "uid" and rest.isascii() and rest.isdigit() and len(rest) < 10 else None

    @property
    def fields(self) -> Mapping[str, Json]:
        """What else was said of it."""
        return self.source.fields


def int_field(fields: Mapping[str, Json], name: str) -> int | None:
    """A whole number, or None.

    >>> int_field({"step": 3, "rank": True}, "step"), int_field({"rank": True}, "rank")
    (3, None)
    """
    value = fields.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def float_field(fields: Mapping[str, Json], name: str) -> float | None:
    """A finite number, or None.

    >>> float_field({"by": 3}, "by"), float_field({"by": 10**400}, "by"), float_field({"by": float("nan")}, "by")
    (3.0, None, None)
    """
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    with suppress(OverflowError):  # JSON's whole numbers have no end
        return float(value) if math.isfinite(value) else None
    return None


def int_list_field(fields: Mapping[str, Json], name: str) -> tuple[int, ...]:
    """Those whole numbers that a list holds."""
    value = fields.get(name)
    if not isinstance(value, list):
        return ()
    return tuple(each for each in value if isinstance(each, int) and not isinstance(each, bool))


def text_field(fields: Mapping[str, Json], name: str) -> str:
    """A text; empty if there is none."""
    value = fields.get(name)
    return value if isinstance(value, str) else ""


# The events of a run, sorted into where they belong: by kind, by generation, by process; and its plans.


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """A plan: one generation."""

    at_s: float
    generation: int
    members: tuple[int, ...]
    joiners: tuple[int, ...]
    dead: tuple[int, ...]
    left: tuple[int, ...]
    verdicts: tuple[str, ...]
    strategy: str
    is_restart: bool
    exact: bool
    ranks: Mapping[int, int] = field(compare=False)
    """The rank of each process that has one."""

    def rank_of(self, uid: int) -> int | None:
        """The rank of a process; None if it has none."""
        return self.ranks.get(uid)


@dataclass(slots=True)
class EventIndex:
    """The events of a run, sorted into where they belong."""

    events: Sequence[TimedEvent]
    is_multinode: bool = False
    """Several machines, whose clocks may disagree."""
    plans: dict[int, GenerationPlan] = field(default_factory=dict)
    processes: dict[int, ProcessHistory] = field(default_factory=dict)
    by_generation: dict[tuple[str, int], list[TimedEvent]] = field(default_factory=lambda: defaultdict(list))
    """Those that name a generation: by event and generation."""
    by_event: dict[str, list[TimedEvent]] = field(default_factory=lambda: defaultdict(list))
    _first_by: dict[tuple[str, int, int], TimedEvent] = field(default_factory=dict)
    """The first that a process told of itself: by event, generation and process."""

    def __post_init__(self) -> None:
        for moment in self.events:
            self.by_event[moment.event].append(moment)
            generation = int_field(moment.fields, "generation")
            if generation is not None:
                self.by_generation[moment.event, generation].append(moment)
                if (uid := moment.uid) is not None:
                    self._first_by.setdefault((moment.event, generation, uid), moment)
        for moment in self.by_event["plan"]:
            plan = _plan(moment)
            if plan is not None and plan.generation not in self.plans:
                self.plans[plan.generation] = plan
        for moment in self.by_event["process_started"]:
            self._start(moment)
        for moment in self.by_event["process_exited"]:
            process = self.processes.get(_or(int_field(moment.fields, "uid"), -1))
            if process is not None and process.exited_s is None:
                process.exited_s, process.code = moment.at_s, int_field(moment.fields, "code")
        for plan in self.plans.values():
            for rank, uid in enumerate(plan.members):
                process = self.processes.setdefault(uid, ProcessHistory(uid, f"process {uid}"))
                if rank not in process.ranks:
                    process.ranks.append(rank)

    def between(self, event: str, since_s: float, until_s: float) -> list[TimedEvent]:
        """The events of one kind from a moment on, and before another one."""
        moments = self.by_event[event]
        first = bisect_left(moments, since_s, key=lambda moment: moment.at_s)
        return moments[first : bisect_left(moments, until_s, key=lambda moment: moment.at_s)]

    def first_by(self, event: str, generation: int, uid: int) -> TimedEvent | None:
        """What a process told first of a generation, of one kind."""
        return self._first_by.get((event, generation, uid))

    def label(self, uid: int) -> str:
        """What a process was started as."""
        process = self.processes.get(uid)
        return process.label if process is not None else f"process {uid}"

    def rank_in(self, uid: int, generation: int) -> str:
        """What a process was in a generation, in words."""
        plan = self.plans.get(generation)
        rank = plan.rank_of(uid) if plan is not None else None
        return self.label(uid) if rank is None else f"rank {rank}"

    def _start(self, moment: TimedEvent) -> None:
        uid = int_field(moment.fields, "uid")
        if uid is not None and uid not in self.processes:
            label, node = text_field(moment.fields, "label") or f"process {uid}", text_field(moment.fields, "node")
            self.processes[uid] = ProcessHistory(uid, label, node, int_field(moment.fields, "pid"), moment.at_s)


def _plan(moment: TimedEvent) -> GenerationPlan | None:
    generation, verdicts = int_field(moment.fields, "generation"), moment.fields.get("verdicts")
    if generation is None or generation < 0:
        return None
    members = int_list_field(moment.fields, "members")
    return GenerationPlan(
        moment.at_s,
        generation,
        members,
        int_list_field(moment.fields, "joiners"),
        int_list_field(moment.fields, "dead"),
        int_list_field(moment.fields, "left"),
        tuple(verdicts) if isinstance(verdicts, dict) else (),
        text_field(moment.fields, "strategy"),
        moment.fields.get("restart") is True,
        moment.fields.get("exact") is not False,
        {uid: rank for rank, uid in reversed(list(enumerate(members)))},  # named twice: the first counts
    )


def _or(value: int | None, other: int) -> int:
    return other if value is None else value


# What the folder of a run holds: its events, its record, and whether its launcher still lives.

_NAMED = 5  # damaged lines, at most
_SAME_BOOT_S = 60.0  # how far clocks may have been put since


@dataclass(frozen=True, slots=True)
class RunFiles:
    """What was read."""

    path: Path
    events: tuple[Event, ...]
    record: Mapping[str, Json]
    """`run.json`; empty if there is none that can be read."""
    notes: tuple[str, ...]
    """What a reader has to know of how complete this is."""


def read_run(folder: Path) -> RunFiles:
    """The run in a folder; `UsageError` or `FormatError` if there is none that can be read."""
    if folder.name == "timeline.jsonl" and folder.is_file():
        raise UsageError(
            f"{folder}: is the timeline itself. Name its folder: evergrad timeline {quote(str(folder.parent))}"
        )
    if not folder.is_dir():
        what = "is no folder. Expected that of evergrad run --out" if folder.exists() else "there is no such folder"
        raise FileAccessError(folder, what)
    timeline = folder / "timeline.jsonl"
    if not timeline.is_file():
        raise FileAccessError(folder, f"there is no timeline.jsonl in it. {_hint(folder)}")
    others = sorted(path for path in folder.glob("timeline-*.jsonl") if path.is_file())  # no pipe is waited for
    events: list[Event] = []
    damaged: list[str] = []
    for path in (timeline, *others):
        numbers: list[int] = []
        events += read_events(path, numbers)
        damaged += [f"{path.name}:{number}" for number in numbers]
    if damaged and not events:
        for path in (timeline, *others):
            list(read_events(path))  # says what is wrong with the first line that is
    if not events:
        raise DamagedFile(timeline, "no event in it: the run was ended before it began, or has not begun yet")
    record, is_sound = _record(folder / "run.json")
    notes = [] if is_sound else ["run.json is damaged, and left out."]
    if not any(event.event == "launcher_ended" and event.source == "launcher" for event in events):
        notes.append(_unended(events, record))
    if damaged:
        few = ", ".join(damaged[:_NAMED]) + (f" and {len(damaged) - _NAMED} more" if len(damaged) > _NAMED else "")
        notes.append(f"{count_of(len(damaged), 'line is', 'lines are')} damaged, and left out: {few}.")
    if others:
        notes.append(f"The timelines of {len(others)} other nodes were not merged: the head did not end in good order.")
    return RunFiles(folder, tuple(events), record, tuple(notes))


def _hint(folder: Path) -> str:
    if (folder / "job.json").is_file():
        return f"It is a job's run folder: evergrad checkpoints report {quote(str(folder))}"
    if (folder / "plan.toml").is_file() or (folder / "journal.jsonl").is_file():
        return f"It is a study's: evergrad study report {quote(str(folder))}"
    found = sorted(path.parent.name for path in folder.glob("*/timeline.jsonl"))[:3] if _is_small(folder) else []
    return f"There is one in {', '.join(found)}." if found else "Expected the folder of evergrad run --out."


def _is_small(folder: Path) -> bool:
    with suppress(OSError):
        return sum(1 for _ in folder.iterdir()) < 1000
    return False


def _record(path: Path) -> tuple[Mapping[str, Json], bool]:
    """Return the content of `run.json` and whether it could be read; empty if there is no such file."""
    try:
        found = json.loads(read_small(path))
        return (found, True) if isinstance(found, dict) else ({}, False)
    except FileNotFoundError:
        return {}, True
    except (OSError, ValueError, RecursionError):
        return {}, False


def _unended(events: list[Event], record: Mapping[str, Json]) -> str:
    begin = next((event for event in events if event.event == "launcher_started"), None)
    pid = begin.fields.get("pid") if begin is not None else None
    if begin is None or not isinstance(pid, int) or isinstance(pid, bool) or pid <= 0:
        return "No end is on record, and not which process was the launcher."
    host = record.get("host")
    if host != socket.gethostname():
        where = f"its launcher is on {host}" if isinstance(host, str) else "run.json does not say where it was launched"
        return f"No end is on record. Whether it goes on is not known here: {where}."
    if _lives(pid, begin):
        return f"The run goes on: this is how it stands. Its launcher is process {pid}."
    return f"No end is on record, and the launcher, process {pid}, is gone: the run was cut short."


def _lives(pid: int, begin: Event) -> bool:
    """Whether the launcher is there, and not another process that was given its number since."""
    booted_s = time.time() - time.monotonic()
    if abs(booted_s - (begin.time - begin.monotonic)) > _SAME_BOOT_S:
        return False
    with suppress(OSError, ValueError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        state, *rest = stat.rpartition(")")[2].split()
        return state != "Z" and int(rest[18]) / os.sysconf("SC_CLK_TCK") <= begin.monotonic + 1.0
    return False
