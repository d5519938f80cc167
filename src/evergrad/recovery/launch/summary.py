"""How a job ended, and the folder that keeps it.

RUN/run.json         what was launched, and how it ended
RUN/timeline.jsonl   every event, of all processes
RUN/logs/<uid>.log   what each process printed

On several machines all of them write here. Lines that two machines append to one file of a network file system can
overwrite each other, so each node but the head has its own, RUN/timeline-<node>.jsonl, until the job ends: then the
head appends them to the one, and removes them. Where the head died they stay as they are.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from evergrad._files import replacing
from evergrad._jsonl import Appender, split_whole
from evergrad.errors import FileAccessError, UsageError, reason
from evergrad.records import Json
from evergrad.recovery.launch.settings import LaunchSettings
from evergrad.wording import count_of

_SCHEMA_VERSION = 1
NO_FINGERPRINT = "left no fingerprint"
"""The end of the line about ranks that could not be compared."""
NOTHING_TO_COMPARE = "job.wrap was given no model, so nothing of the ranks was compared"
NOBODY_JOINED = "no rank called eg.join, so nothing of the ranks was compared"
_NOT_WORTH_A_WORD = (NO_FINGERPRINT, NOTHING_TO_COMPARE, NOBODY_JOINED)
_NAMED_SPARES = 3


@dataclass(frozen=True, slots=True)
class Summary:
    """How a job ended."""

    outcome: str
    """`finished`, `diverged`, `failed`, `fatal`, `too-few`, `left`, `interrupted`; or, of a node that lost the head,
    `cut-off`."""
    exit_code: int
    """What the launcher ends with."""
    message: str
    """Why, if it did not finish."""
    steps: int
    failures_survived: int
    generations: int
    seconds: float
    run: Path
    inexact: str = ""
    """The reason why the result differs from that of a run without failures; empty if no reason is known."""
    unverified: str = ""
    """The reason why that is unknown; empty if the states of all ranks were compared and nothing else is in doubt."""
    never: tuple[str, ...] = ()
    """Scheduled failures that did not happen."""
    joined: bool = True
    """True if any process has called `eg.join`; if none did, the job had no steps that could be counted."""
    ended_spares: tuple[str, ...] = ()
    """Spares that ended while the job went on, and how."""

    @property
    def exact(self) -> bool | None:
        """True if the result is that of the run without failures, to the last bit; None if that is not known."""
        return False if self.inexact else None if self.unverified else True

    @property
    def timeline(self) -> Path:
        """Where every event is."""
        return self.run / "timeline.jsonl"

    def __str__(self) -> str:
        failures = f"{count_of(self.failures_survived, 'failure')} survived"
        generations, steps = count_of(self.generations, "generation"), count_of(self.steps, "step")
        why = "" if self.outcome == "finished" else f": {self.message.rstrip('.')}"
        how = f"; not as without failures: {self.inexact}" if self.inexact and self.outcome != "diverged" else ""
        # A script that trains nothing leaves no fingerprints, and is not worth a word unless somebody was lost.
        is_doubtful = self.generations > 1 or not self.unverified.endswith(_NOT_WORTH_A_WORD)
        if self.exact is None and self.outcome == "finished" and is_doubtful:
            how = f"; not verified to be as without failures: {self.unverified}"
        more = len(self.ended_spares) - _NAMED_SPARES
        how += "".join(f"; {spare}" for spare in self.ended_spares[:_NAMED_SPARES])
        how += f"; {count_of(more, 'other spare')} ended early" if more > 0 else ""
        if self.joined and not self.steps and self.outcome == "finished":
            steps += " of the job: job.step was never called"
        facts = f"{steps}, {failures}, {generations}, {self.seconds:.1f} s{how}"
        if not self.joined:
            why += (
                ": no rank called eg.join: ran as under torchrun"
                if self.outcome == "finished"
                else "; no rank called eg.join"
            )
            facts = f"{self.seconds:.1f} s"
        return f"{self.outcome}{why} ({facts}). See: evergrad timeline {shlex.quote(str(self.run))}"

    def to_json(self) -> dict[str, Json]:
        """What `evergrad run --json` prints."""
        return {
            "schema_version": _SCHEMA_VERSION,
            "outcome": self.outcome,
            "exit_code": self.exit_code,
            "message": self.message,
            "steps": self.steps,
            "failures_survived": self.failures_survived,
            "generations": self.generations,
            "seconds": round(self.seconds, 3),
            "exact": self.exact,
            "inexact": self.inexact,
            "unverified": self.unverified,
            "never_happened": [*self.never],
            "joined": self.joined,
            "ended_spares": [*self.ended_spares],
            "run": str(self.run),
            "timeline": str(self.timeline),
        }


def make_folder(settings: LaunchSettings) -> Path:
    """The folder of the run, new or empty."""
    run = settings.out
    try:
        if run is not None:
            run.mkdir(parents=True, exist_ok=True)
            if any(run.iterdir()):
                raise UsageError(f"--out {run}: expected a new or an empty folder, found {_found_in(run)}")
        else:
            name = f"{Path(settings.script).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
            run = _make_new(Path("runs"), name)
        try:
            (run / "logs").mkdir()
        except FileExistsError:  # another launcher was quicker by a moment
            raise UsageError(f"--out {run}: expected a new or an empty folder, found {_found_in(run)}") from None
    except OSError as error:
        raise FileAccessError(error.filename or str(run), f"no folder for the run: {reason(error)}") from None
    return run.absolute()


def merge_timelines(run: Path) -> None:
    """Append what other nodes have recorded to the one timeline; those that cannot be read stay."""
    for path in sorted(run.glob("timeline-*.jsonl")):
        with suppress(OSError):
            whole, _ = split_whole(path.read_bytes())
            with Appender(run / "timeline.jsonl") as timeline:
                timeline.append(whole)
            path.unlink()


def write_record(run: Path, settings: LaunchSettings, started_s: float, summary: Summary | None = None) -> None:
    """Write `run.json`, whole or not at all: at the beginning, and again at the end."""
    record: dict[str, Json] = {
        "schema_version": _SCHEMA_VERSION,
        "command": [*settings.command],
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "started": started_s,
        "settings": settings.to_json(),
    }
    if summary is not None:
        record |= {"ended": time.time(), "summary": summary.to_json()}
    with replacing(run / "run.json") as path:
        path.write_text(json.dumps(record, indent=2) + "\n")


def _found_in(run: Path) -> str:
    """What is in a folder that should be empty."""
    from evergrad.recovery.launch.rendezvous import HeadAddress

    head = None
    with suppress(FileAccessError):
        head = HeadAddress.read(run)
    if head is None:
        return "something in it"
    return f"the head of a job in it: process {head.pid} on {head.machine}. Is there a second node 0?"


def _make_new(parent: Path, name: str) -> Path:
    for again in range(1, 1000):
        run = parent / (name if again == 1 else f"{name}-{again}")
        with suppress(FileExistsError):
            run.mkdir(parents=True)
            return run
    raise FileExistsError(17, "a thousand runs in the same second", str(parent / name))
