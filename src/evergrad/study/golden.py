"""Golden runs: the fault-free twin of every trial, made once and kept beside its checkpoint.

    <study>/golden/<key>/checkpoint.pt    the state that trials begin with: an ordinary file
                         golden.json      what was seen of the run without a fault; written last

A folder without `golden.json` is a run that was cut short, and is made again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evergrad._files import replacing
from evergrad.errors import DamagedFile, FileAccessError, reason, said
from evergrad.formats.version_records import read_record, record_bytes
from evergrad.records import Json
from evergrad.study.trials import Observation
from evergrad.training.settings import Direction

SCHEMA_VERSION = 1
CHECKPOINT = "checkpoint.pt"

_RECORD = "golden.json"
_MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenRun:
    """A golden run, as trials are judged by it."""

    key: str
    settings: Mapping[str, Json]
    """What was trained: a `Training`'s or a `Command`'s."""
    observation: Observation
    checkpoint: str
    """The file's name in its folder."""
    digest: str
    """Of that file."""
    chance: float | None = None
    direction: Direction = Direction.HIGHER
    """The direction of the workload's metric; a command's is in its plan."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What tables say of model and data."""

    @property
    def run_id(self) -> str:
        """Which run it is, in a few letters: trials that began with another one do not count."""
        seen = self.observation
        told = [self.key, self.digest, seen.digest, [str(metric) for metric in seen.metrics]]
        return hashlib.blake2b(json.dumps(told).encode(), digest_size=6).hexdigest()

    def to_json(self) -> dict[str, Json]:
        """As `read_golden` reads it."""
        return {
            "schema_version": SCHEMA_VERSION,
            "key": self.key,
            "settings": dict(self.settings),
            "observation": self.observation.to_json(),
            "checkpoint": self.checkpoint,
            "digest": self.digest,
            "chance": self.chance,
            "direction": self.direction.value,
            "facts": dict(self.facts),
        }


def golden_folder(study: Path, key: str) -> Path:
    """Where the golden run of these settings is."""
    return study / "golden" / key


def make_empty_folder(study: Path, key: str) -> Path:
    """An empty folder for it; what a run that was cut short has left there is removed."""
    folder = golden_folder(study, key)
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise FileAccessError(folder, f"cannot be made: {reason(error)}") from error
    return folder


def write_golden(study: Path, golden: GoldenRun) -> None:
    """Write the record; from here on the run counts."""
    path = golden_folder(study, golden.key) / _RECORD
    told = golden.to_json()
    json.dumps(told, allow_nan=False)  # what JSON has not is spelt out before
    with replacing(path) as temporary:
        temporary.write_bytes(record_bytes(told))


def read_golden(study: Path, key: str) -> GoldenRun | None:
    """The golden run of these settings, if it has been made; `DamagedFile` if its record is not one of ours.

    A record without its checkpoint is no golden run: it is made again.
    """
    path = golden_folder(study, key) / _RECORD
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES:,} bytes")
        told: Any = read_record(path.read_bytes())
        if told["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema version {told['schema_version']}")
        chance = told["chance"]
        if chance is not None and (type(chance) not in (int, float) or not math.isfinite(chance)):
            raise ValueError(f"chance {chance!r}")
        if told["key"] != key or not told["observation"]["metrics"]:
            raise ValueError("it is not whole")
        return GoldenRun(
            key=str(told["key"]),
            settings=dict(told["settings"]),
            observation=Observation.from_json(told["observation"]),
            checkpoint=os.path.basename(told["checkpoint"]),
            digest=str(told["digest"]),
            chance=chance,
            direction=_direction(told.get("direction", Direction.HIGHER.value)),  # older records have none
            facts={str(name): str(text) for name, text in told["facts"].items()},
        )
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FileAccessError(path, f"cannot be read: {reason(error)}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        hint = f"Remove {path.parent} to make the golden run again; its trials stay as they are."
        raise DamagedFile(path, f"is no record of a golden run: {said(error)}", hint=hint) from None


def _direction(told: Any) -> Direction:
    try:
        return Direction(told)
    except ValueError:
        raise ValueError(f"direction {told!r}") from None
