"""The journal: one line a trial, appended and never altered.

A line is a JSON object that carries a sum of itself. Whoever is killed leaves at most the last line torn; a line that
is torn or altered is said, its trial counts as not run, and everything else stays. Later lines of the same trial
replace earlier ones, so that a trial whose worker was lost can be run again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import xxhash

from evergrad.errors import FileAccessError, StudyError, reason
from evergrad.records import Json
from evergrad.study.trials import End, Observation, Trial

SCHEMA_VERSION = 1

_LONGEST_LINE = 16 << 20
_SUM = b', "sum": '


@dataclass(frozen=True, slots=True)
class Entry:
    """A trial that was run."""

    trial: Trial
    observation: Observation
    golden: str = ""
    """The mark of the golden run that it began with."""

    @property
    def known(self) -> bool:
        """Whether anything was learnt: a lost one runs again."""
        return self.observation.end is not End.LOST


@dataclass(slots=True)
class Kept:
    """What a journal holds."""

    entries: dict[str, Entry] = field(default_factory=dict)
    """By the trial's id; the newest of each."""
    runs: list[dict[str, Json]] = field(default_factory=list)
    """Who wrote when: versions, commit, machine."""
    damaged: list[str] = field(default_factory=list)
    """Lines that could not be used, each in words."""


def read_journal(path: Path, *, brief: bool = False, only: Collection[str] | None = None) -> Kept:
    """Everything that is sound in a journal; nothing if there is none. In brief, without what was seen step by step.

    `only` names the trials that are wanted, of a journal that is too long to be kept as a whole.
    """
    kept = Kept()
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(_LONGEST_LINE):
                number += 1
                _take(kept, line, f"{path.name} line {number}", brief, only)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise FileAccessError(path, f"cannot be read: {reason(error)}") from error
    return kept


def _take(kept: Kept, line: bytes, where: str, brief: bool, only: Collection[str] | None) -> None:
    if not line.strip():
        return
    try:
        content, mark, end = line.rstrip(b"\n").rpartition(_SUM)
        told: Any = json.loads(line)
        if not mark or end != f'"{_sum(content)}"}}'.encode():
            raise ValueError("its sum is not that of its content")
        if told["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema version {told['schema_version']}, expected {SCHEMA_VERSION}")
        if told["kind"] == "run":
            kept.runs.append(told)
            return
        if only is not None and told["trial"]["id"] not in only:
            return
        seen = Observation.from_json(told["observation"], brief=brief)
        entry = Entry(Trial.from_json(told["trial"]), seen, str(told["golden"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        torn = "" if line.endswith(b"\n") else ", torn by whoever wrote it"
        kept.damaged.append(f"{where}: {error or type(error).__name__}{torn}; its trial runs again")
        return
    before = kept.entries.get(entry.trial.id)
    if before is None or entry.known or not before.known:
        kept.entries[entry.trial.id] = entry


class Journal:
    """A journal that is being written. Whoever writes holds the study's lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            size = os.fstat(self._fd).st_size
            if size and os.pread(self._fd, 1, size - 1) != b"\n":
                os.write(self._fd, b"\n")  # a torn line stays as it is, and ends here
        except OSError as error:
            raise FileAccessError(path, f"cannot be written: {reason(error)}") from error

    def append(self, entries: Iterable[Entry]) -> None:
        """Add entries, durably; all of them or, on a full disk, none."""
        self._write(
            {
                "kind": "trial",
                "golden": one.golden,
                "trial": one.trial.to_json(),
                "observation": one.observation.to_json(),
            }
            for one in entries
        )

    def note_run(self, facts: Mapping[str, Json]) -> None:
        """Say who writes from here on."""
        self._write([{"kind": "run", **facts}])

    def _write(self, records: Iterable[dict[str, Json]]) -> None:
        lines = []
        for record in records:
            content = json.dumps({"schema_version": SCHEMA_VERSION, **record}, allow_nan=False)[:-1].encode()
            lines.append(content + _SUM + f'"{_sum(content)}"}}\n'.encode())
        data = b"".join(lines)
        before = os.fstat(self._fd).st_size
        try:
            written = 0
            while written < len(data):
                written += os.write(self._fd, data[written:])
            os.fdatasync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, before)  # half a line would only have to be explained later
            raise StudyError(
                f"{self._path}: {len(lines)} results could not be written: {reason(error)}. "
                "What was written before is sound: make room, and run the same command again."
            ) from error

    def close(self) -> None:
        """Nothing more is written."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _sum(content: bytes) -> str:
    return xxhash.xxh3_64(content).hexdigest()
