"""What happened to a job's versions, as lines that are only ever appended.

    <run folder>/catalogue/<writer>.jsonl

Each writer has a file of its own, so that no two ever write to one at the same time; readers merge them. A version
that was retired stays in here. Each line carries a digest of itself: one that is torn or damaged is left out, and said.
Losing a line loses history, never a version: what can be restored is decided by the manifests in the tiers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from evergrad._digest import digest_chunks
from evergrad._files import open_file
from evergrad._jsonl import Appender, read_lines
from evergrad.checkpoint.run_folder import safe_name, time_now
from evergrad.checkpoint.shard_manifest import Manifest
from evergrad.checkpoint.version import Version
from evergrad.errors import reason
from evergrad.formats.version_records import read_record, record_bytes

_log = logging.getLogger(__name__)
SCHEMA_VERSION = 1
FOLDER = "catalogue"
"""The catalogue's folder in a run folder."""


@dataclass(frozen=True, slots=True)
class ShardNote:
    """A rank's shard became complete in its first tier."""

    version: Version
    rank: int
    world_size: int
    size: int
    digest: str
    time: str
    parent: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    node: str = ""
    unverified: bool = False
    """True if its digests were taken again after a restart: see `Manifest.unverified`."""


@dataclass(frozen=True, slots=True)
class VerificationNote:
    """A version was checked in a tier."""

    version: Version
    tier: str
    time: str
    verdict: Literal["ok", "failed"]
    why: str = ""


@dataclass(slots=True)
class History:
    """All that was noted: the shards of each version by rank, and the last verdict on each of its tiers."""

    shards: dict[Version, dict[int, ShardNote]] = field(default_factory=dict)
    verdicts: dict[Version, dict[str, VerificationNote]] = field(default_factory=dict)
    guarded: dict[Version, str] = field(default_factory=dict)
    """When a guard last found that the state that a version was saved of was sound."""


class CatalogueJournal:
    """The journals of a run folder. Making one touches nothing; any number of processes may have one."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._said = ""
        """The last report of a line that could not be written; empty since one was."""

    def note_shard(self, manifest: Manifest, writer: str) -> None:
        """A shard is complete. Said twice, it counts once. A full disk costs the line; a warning says so once."""
        self._append(
            writer,
            {
                "version": manifest.version.name,
                "rank": manifest.rank,
                "world_size": manifest.world_size,
                "size": manifest.size,
                "digest": shard_digest(manifest),
                "time": manifest.time,
                "parent": manifest.parent,
                "meta": dict(manifest.meta),
                "node": manifest.node,
                **({"unverified": True} if manifest.unverified else {}),
            },
        )

    def note_verified(self, version: Version, tier: str, *, ok: bool, why: str = "", writer: str = "verify") -> None:
        """Every digest of a version in a tier was checked."""
        self._append(writer, {"verified": version.name, "tier": tier, "time": time_now(), "ok": ok, "why": why})

    def note_guarded(self, version: Version, *, writer: str = "guard") -> None:
        """The state that this version was saved of was alike on all ranks. Whether its files are intact is not said."""
        self._append(writer, {"guarded": version.name, "time": time_now()})

    def read(self) -> History:
        """Everything that was noted, in one pass."""
        history = History()
        for path, lines in self._files():
            damaged = 0
            for line in lines:
                try:
                    record = read_record(line)
                    if record["schema_version"] != SCHEMA_VERSION:
                        continue
                    if "verified" in record:
                        _take_verdict(history, record)
                    elif "guarded" in record:
                        _take_guarded(history, record)
                    else:
                        _take_shard(history, record)
                except (ValueError, KeyError, TypeError, OverflowError):
                    damaged += 1
            if damaged:
                _log.warning("%s: %d damaged %s left out", path, damaged, "line is" if damaged == 1 else "lines are")
        return history

    def _files(self) -> Iterator[tuple[Path, list[bytes]]]:
        try:
            names = sorted(name for name in os.listdir(self._folder) if name.endswith(".jsonl"))
        except FileNotFoundError:
            return
        except OSError as error:
            _log.warning("%s: cannot be read: %s. The history in it is left out.", self._folder, reason(error))
            return
        for name in names:
            path = self._folder / name
            try:
                with open_file(path) as file:
                    lines = [line.data for line in read_lines(file)]
            except OSError as error:
                _log.warning("%s: left out of the history: %s", path, reason(error))
                continue
            yield path, [line for line in lines if line.strip()]

    def _append(self, writer: str, record: Mapping[str, Any]) -> None:
        line = record_bytes({"schema_version": SCHEMA_VERSION, **record})
        path = self._folder / f"{safe_name(writer)}.jsonl"
        try:
            self._folder.mkdir(exist_ok=True)
            with Appender(path, end_torn_line=True) as log:  # a line that a crash tore must not cost this one
                log.append(line)
            self._said = ""
        except OSError as error:
            what = f"{path}: not noted in the history: {reason(error)}"
            if what != self._said:  # a folder that was moved stays so for all that follows
                self._said = what
                _log.warning("%s", what)


def shard_digest(manifest: Manifest) -> str:
    """One digest (xxh3_128) for all tensors of a shard: equal states have equal ones, whatever the step."""
    digests = {**manifest.digests, **{path: digest for path, (_, digest) in manifest.elsewhere.items()}}
    lines = (f"{path}\0{digest}\n" for path, digest in sorted(digests.items()))
    return digest_chunks(line.encode("utf-8", "surrogatepass") for line in lines)


def _take_shard(history: History, record: Mapping[str, Any]) -> None:
    version = Version.parse(record["version"])
    rank, world_size, size = int(record["rank"]), int(record["world_size"]), int(record["size"])
    parent = record.get("parent")
    if version is None or not 0 <= rank < world_size or size < 0:
        return
    note = ShardNote(
        version,
        rank,
        world_size,
        size,
        str(record["digest"]),
        str(record["time"]),
        None if parent is None else str(parent),
        {**(record.get("meta") or {})},
        str(record.get("node") or ""),
        record.get("unverified") is True,
    )
    history.shards.setdefault(version, {})[rank] = note


def _take_verdict(history: History, record: Mapping[str, Any]) -> None:
    version = Version.parse(record["verified"])
    if version is None or not isinstance(record["ok"], bool):
        return
    verdict = VerificationNote(
        version, str(record["tier"]), str(record["time"]), "ok" if record["ok"] else "failed", str(record["why"])
    )
    known = history.verdicts.setdefault(version, {})
    before = known.get(verdict.tier)
    if before is None or before.time <= verdict.time:
        known[verdict.tier] = verdict


def _take_guarded(history: History, record: Mapping[str, Any]) -> None:
    version = Version.parse(record["guarded"])
    if version is not None:
        history.guarded[version] = max(str(record["time"]), history.guarded.get(version, ""))
