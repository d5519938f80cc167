"""What happened in a run, and when: JSON lines that several processes append to one file.

A line is written by a single `write` to a file opened for appending, so lines of different processes never mix, and
whoever is killed leaves at most its last one torn. Every line stands for itself:

    {"schema_version": 2, "time": 1766.., "monotonic": 4211.., "source": "uid 2", "event": "recovered", "step": 11}

`time` is the wall clock. `monotonic` never jumps and is the same clock for all processes of one machine: differences
between two events are taken from it. `event` is an identifier. Every line names its version, because several processes
append to one file and the files of several nodes are merged by appending lines.

Lines of version 1 are read, and their events get the names of version 2 (`_RENAMED`). Newer versions are refused.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from evergrad._jsonl import Appender, read_lines
from evergrad.errors import DamagedFile, FileAccessError, UnsupportedContent, said
from evergrad.records import Json

SCHEMA_VERSION = 2

_log = logging.getLogger(__name__)
_OWN = ("schema_version", "time", "monotonic", "source", "event")

# Version 1: the fields of every event, and the names that events have in version 2. An event that is not listed has the
# same name in both. The field `why` is `reason` in version 2.
_OWN_1 = ("schema_version", "time", "mono", "who", "event")
_RENAMED = {
    # launcher
    "begin": "launcher_started",
    "end": "launcher_ended",
    "start": "process_started",
    "exit": "process_exited",
    "stop": "signal_sent",
    "signal": "signal_received",
    "node here": "node_joined",
    "node gone": "node_left",
    "late": "rank_late",
    "all wait": "deadlock",
    # coordinator
    "broken": "generation_broken",
    "change": "change_requested",
    "death": "process_lost",
    "spawn": "process_spawned",
    "ranks differ": "ranks_differ",
    "finished": "job_finished",
    "failed": "job_failed",
    "fatal": "job_fatal",
    "too-few": "job_too_few",
    "diverged": "job_diverged",
    "left": "job_left",
    # ranks
    "joined": "rank_joined",
    "leaves": "rank_left",
    "going on": "recovered",
    "handed over": "state_sent",
    "begins anew": "process_restarted",
    "stuck": "process_stuck",
    "goes back": "rollback_to_version",
    "not saved": "save_skipped",
    "asked to leave": "leave_requested",
    "weights": "weight_digests",
    # guard
    "guard": "guard_enabled",
    "unguarded": "guard_unavailable",
    "checked": "guard_check",
    "corrupted": "corruption_found",
    "suspicious": "step_suspicious",
    # injected failures
    "killing": "kill_injected",
    "stopping": "stop_injected",
    "slowed": "slowdown_injected",
    "cut": "network_cut_injected",
    "healed": "network_restored",
    "flipped": "bit_flip_injected",
}
_RENAMED_WITH_UIDS = {"late": "reports_late", "asked to leave": "leave_injected"}
"""Two names of version 1 stood for two events each: of these pairs, one has the field `uids`."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened."""

    time: float
    """Seconds since 1970."""
    monotonic: float
    """Seconds by the machine's monotonic clock."""
    source: str
    """The process that recorded it: `launcher`, `uid 2`."""
    event: str
    fields: dict[str, Json] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line, without its end."""
        head = {"schema_version": SCHEMA_VERSION, "time": self.time, "monotonic": self.monotonic}
        return json.dumps(head | {"source": self.source, "event": self.event} | self.fields, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Event:
        """The event of a line of version 1 or 2; `ValueError` if it is none."""
        values: Any = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"expected an object, found {type(values).__name__}")
        version = values.get("schema_version", 1)
        if version not in (1, SCHEMA_VERSION):
            raise _OtherSchema(version)
        own = _OWN_1 if version == 1 else _OWN
        if missing := [name for name in own[1:] if name not in values]:
            raise ValueError(f"{missing[0]} is missing")
        time_s, monotonic_s, source, event = (values[name] for name in own[1:])
        if not (_is_number(time_s) and _is_number(monotonic_s) and isinstance(source, str) and isinstance(event, str)):
            raise ValueError(f"{own[1]} and {own[2]} are numbers, {own[3]} and {own[4]} are texts")
        if not (math.isfinite(time_s) and math.isfinite(monotonic_s)):
            raise ValueError(f"expected times that a clock shows, found {time_s} and {monotonic_s}")
        rest = {name: value for name, value in values.items() if name not in own}
        if version == 1:
            event, rest = _renamed(event, rest)
        return cls(float(time_s), float(monotonic_s), source, event, rest)


def _renamed(event: str, fields: dict[str, Json]) -> tuple[str, dict[str, Json]]:
    """An event of version 1 under its names in version 2; the name of an unknown event is kept."""
    name = _RENAMED.get(event, event)
    if "uids" in fields:
        name = _RENAMED_WITH_UIDS.get(event, name)
    if "reason" not in fields:
        fields = {"reason" if key == "why" else key: value for key, value in fields.items()}
    return name, fields


class Recorder:
    """Appends events to a timeline. Threads may share it, and so may processes that are forked.

    A timeline that cannot be written any more, on a full disk, stops nobody: it is said once in the log.
    """

    def __init__(self, path: str | PathLike[str], source: str) -> None:
        self.path, self.source = Path(path), source
        self._complained = False
        try:
            self._log: Appender | None = Appender(self.path, any_kind=True)
        except OSError as error:
            raise FileAccessError(self.path, f"the timeline cannot be written: {error.strerror}") from None

    def record(self, event: str, /, **fields: Any) -> None:
        """Something happened, now."""
        if taken := [name for name in fields if name in _OWN]:
            raise TypeError(f"{taken[0]} is what every event has: name the field otherwise")
        values = {name: _plain(value) for name, value in fields.items()}
        line = Event(time.time(), time.monotonic(), self.source, event, values).to_json() + "\n"
        if self._log is None:
            return
        try:
            self._log.append(line.encode())
        except OSError as error:
            if not self._complained:
                self._complained = True
                _log.warning("%s: %s: event %s is lost: %s", self.path, self.source, event, error.strerror)

    def close(self) -> None:
        """Nothing is recorded from now on; no other thread is recording any more. Twice is fine."""
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_events(path: str | PathLike[str], damaged: list[int] | None = None) -> Iterator[Event]:
    """The events of a timeline, in the order in which they were written; a torn last line is passed over.

    With a list for the numbers of `damaged` lines those are passed over, too; else the first one is a `DamagedFile`.
    """
    path = Path(path)
    sound = 0
    other: tuple[int, _OtherSchema] | None = None
    try:
        with open(path, "rb") as file:
            for number, line, is_torn in read_lines(file):
                try:
                    yield Event.from_json(line)
                    sound += 1
                except _OtherSchema as error:
                    if damaged is None:
                        raise _unsupported(path, error) from None
                    other = other or (number, error)  # damaged, if lines around it are ours
                    damaged.append(number)
                except (ValueError, OverflowError, RecursionError) as error:
                    if is_torn:
                        continue
                    if damaged is None:
                        raise DamagedFile(path, f"line {number} is no event of a timeline: {said(error)}") from None
                    damaged.append(number)
    except OSError as error:
        raise FileAccessError(path, f"the timeline cannot be read: {error.strerror}") from None
    if other is not None and not sound:
        raise _unsupported(path, other[1])


def _unsupported(path: Path, found: _OtherSchema) -> UnsupportedContent:
    return UnsupportedContent(
        path, "a timeline of another version", expected=f"schema 1 or {SCHEMA_VERSION}", found=str(found)
    )


class _OtherSchema(ValueError):
    """An event of a version that is not known here."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: Any) -> Json:
    """As JSON has it; NaN and infinities, which it has not, as texts, and so is everything that it does not know."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return str(value)
