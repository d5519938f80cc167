"""A study's folder: its plan, its journal, and one lock.

DIR/study.json       the plan, its scale, and what was given from outside
    journal.jsonl    one line a trial
    golden/…         golden runs and their checkpoints
    logs/…           what workers print
    lock             held by the process that runs the study; the kernel lets go of it when that process ends
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import xxhash

from evergrad._files import is_locked, read_small, replacing, take_lock
from evergrad._jsonl import Appender, Line, read_lines
from evergrad.errors import DamagedFile, FileAccessError, StudyError, UsageError, reason
from evergrad.formats.version_records import read_record, record_bytes
from evergrad.records import Json
from evergrad.study.plan import Plan
from evergrad.study.plan_files import parse
from evergrad.study.trials import Observation, Trial, TrialEnd

# The journal: one line a trial, appended and never altered.
#
# A line is a JSON object that carries a sum of itself. Whoever is killed leaves at most the last line torn; a line
# that is torn or altered is said, its trial counts as not run, and everything else stays. Later lines of the same
# trial replace earlier ones, so that a trial whose worker was lost can be run again.

SCHEMA_VERSION_JOURNAL = 1

_LONGEST_LINE = 16 << 20
_SUM = b', "sum": '


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A trial that was run."""

    trial: Trial
    observation: Observation
    golden: str = ""
    """The mark of the golden run that it began with."""

    @property
    def known(self) -> bool:
        """Whether anything was learnt: a lost one runs again."""
        return self.observation.end is not TrialEnd.LOST


@dataclass(slots=True)
class JournalContents:
    """What a journal holds."""

    entries: dict[str, JournalEntry] = field(default_factory=dict)
    """By the trial's id; the newest of each."""
    runs: list[dict[str, Json]] = field(default_factory=list)
    """Who wrote when: versions, commit, machine."""
    damaged: list[str] = field(default_factory=list)
    """Lines that could not be used, each in words."""


def read_journal(path: Path, *, brief: bool = False, only: Collection[str] | None = None) -> JournalContents:
    """Everything that is sound in a journal; nothing if there is none. In brief, without what was seen step by step.

    `only` names the trials that are wanted, of a journal that is too long to be kept as a whole.
    """
    kept = JournalContents()
    try:
        with path.open("rb") as file:
            for line in read_lines(file, _LONGEST_LINE):
                _add_line(kept, line, f"{path.name} line {line.number}", brief, only)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise FileAccessError(path, f"cannot be read: {reason(error)}") from error
    return kept


def _add_line(kept: JournalContents, line: Line, where: str, brief: bool, only: Collection[str] | None) -> None:
    if not line.data.strip():
        return
    try:
        content, mark, end = line.data.rstrip(b"\n").rpartition(_SUM)
        told: Any = json.loads(line.data)
        if not mark or end != f'"{_sum(content)}"}}'.encode():
            raise ValueError("its sum is not that of its content")
        if told["schema_version"] != SCHEMA_VERSION_JOURNAL:
            raise ValueError(f"schema version {told['schema_version']}, expected {SCHEMA_VERSION_JOURNAL}")
        if told["kind"] == "run":
            kept.runs.append(told)
            return
        if only is not None and told["trial"]["id"] not in only:
            return
        seen = Observation.from_json(told["observation"], brief=brief)
        entry = JournalEntry(Trial.from_json(told["trial"]), seen, str(told["golden"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        torn = ", torn by whoever wrote it" if line.is_torn else ""
        kept.damaged.append(f"{where}: {error or type(error).__name__}{torn}; its trial runs again")
        return
    before = kept.entries.get(entry.trial.id)
    if before is None or entry.known or not before.known:
        kept.entries[entry.trial.id] = entry


class TrialJournal:
    """A journal that is being written. Whoever writes holds the study's lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._log = Appender(path, end_torn_line=True)
        except OSError as error:
            raise FileAccessError(path, f"cannot be written: {reason(error)}") from error

    def append(self, entries: Iterable[JournalEntry]) -> None:
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

    def append_run(self, facts: Mapping[str, Json]) -> None:
        """Say who writes from here on."""
        self._write([{"kind": "run", **facts}])

    def _write(self, records: Iterable[dict[str, Json]]) -> None:
        lines = []
        for record in records:
            content = json.dumps({"schema_version": SCHEMA_VERSION_JOURNAL, **record}, allow_nan=False)[:-1].encode()
            lines.append(content + _SUM + f'"{_sum(content)}"}}\n'.encode())
        try:
            self._log.append_durably(b"".join(lines))
        except OSError as error:
            raise StudyError(
                f"{self._path}: {len(lines)} results could not be written: {reason(error)}. "
                "What was written before is sound: make room, and run the same command again."
            ) from error

    def close(self) -> None:
        """Nothing more is written."""
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _sum(content: bytes) -> str:
    return xxhash.xxh3_64(content).hexdigest()


SCHEMA_VERSION = 1
SCRATCH = "scratch"
"""Where trials of programs work; whatever is left there is nobody's."""

_MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class StudyFolder:
    """Where a study lives."""

    path: Path

    @property
    def journal(self) -> Path:
        """The journal's file."""
        return self.path / "journal.jsonl"

    def journal_contents(self, *, brief: bool = False) -> JournalContents:
        """What the journal holds; in brief, without what was seen step by step."""
        return read_journal(self.journal, brief=brief)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the one who runs this study; `StudyError` if another process is."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise FileAccessError(self.path, f"cannot be used: {reason(error)}") from error
        try:
            try:
                take_lock(fd)
            except OSError:
                holder = os.pread(fd, 64, 0).decode(errors="replace").strip()
                raise StudyError(
                    f"{self.path}: another process{f' ({holder})' if holder else ''} runs this study. Wait for it, or "
                    f"see 'evergrad study status {self.path}'."
                ) from None
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()}".encode(), 0)
            yield
        finally:
            os.close(fd)

    def is_running(self) -> bool:
        """Whether some process runs the study now."""
        return is_locked(self.path / "lock")

    def plan(self) -> Plan:
        """The plan that the folder was made for."""
        path = self.path / "study.json"
        try:
            if path.stat().st_size > _MOST_BYTES:
                raise ValueError(f"more than {_MOST_BYTES:,} bytes")
            told: Any = read_record(read_small(path))
            if told["schema_version"] != SCHEMA_VERSION:
                raise ValueError(f"schema version {told['schema_version']}, expected {SCHEMA_VERSION}")
            if not all(isinstance(told[name], str) for name in ("plan", "name", "base", "scale")):
                raise ValueError("plan, name, base and scale are texts")
            source, overrides = parse(told["plan"], told["name"], told["base"]), told["overrides"]
            if not isinstance(overrides, dict):
                raise ValueError("overrides are a table")
        except (FileNotFoundError, NotADirectoryError):
            raise UsageError(f"{self.path}: holds no study. 'evergrad study run NAME --out DIR' makes one.") from None
        except OSError as error:
            raise FileAccessError(path, f"cannot be read: {reason(error)}") from error
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            hint = "Run the study again with the same --out: its trials are in the journal."
            raise DamagedFile(path, f"is no record of a study: {error}", hint=hint) from None
        return Plan.of(source, told["scale"] or None, overrides, check_files=False)

    def _study(self, path: Path) -> str:
        """The name of the study in this record, as far as it can be read."""
        try:
            return str(json.loads(path.read_bytes())["study"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return ""

    def _others(self) -> list[str]:
        """What lies here, without files of ours whose writer was killed; those are removed."""
        for partial in self.path.glob(".study.json.*.partial"):
            partial.unlink(missing_ok=True)
        return os.listdir(self.path)

    def write_plan(self, plan: Plan, name: str, overrides: Mapping[str, Json]) -> None:
        """Make it the folder's plan. Another study's folder is refused; its own plan may grow and change."""
        path = self.path / "study.json"
        if path.exists():
            other = self._study(path) or plan.study
            if other != plan.study:
                raise UsageError(f"{self.path}: holds the study {other!r}, not {plan.study!r}. Choose another --out.")
        elif (found := set(self._others()) - {"lock"}) and "journal.jsonl" not in found:
            raise UsageError(f"{self.path}: is not empty, and holds no study. Choose a new folder.")
        told = {
            "schema_version": SCHEMA_VERSION,
            "study": plan.study,
            "scale": plan.scale,
            "name": name,
            "overrides": dict(overrides),
            "base": plan.base,
            "plan": plan.text,
        }
        with replacing(path) as temporary:
            temporary.write_bytes(record_bytes(told))
