"""A study's folder: its plan, its journal, and one lock.

DIR/study.json       the plan, its scale, and what was given from outside
    journal.jsonl    one line a trial
    golden/…         golden runs and their checkpoints
    logs/…           what workers print
    lock             held by the process that runs the study; the kernel lets go of it when that process ends
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evergrad.errors import DamagedFile, FileAccessError, StudyError, UsageError, reason
from evergrad.formats.data_file import read_small
from evergrad.formats.durable import replacing
from evergrad.formats.version_records import read_record, record_bytes
from evergrad.records import Json
from evergrad.study.journal import Kept, read_journal
from evergrad.study.plan import Plan
from evergrad.study.plan_files import parse

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

    def kept(self, *, brief: bool = False) -> Kept:
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
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
        try:
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False

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

    def keep_plan(self, plan: Plan, name: str, overrides: Mapping[str, Json]) -> None:
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
