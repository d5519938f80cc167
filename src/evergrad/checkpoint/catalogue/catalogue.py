"""The catalogue: every version that a job ever had, with what is left of it now."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import xxhash

from evergrad._files import is_locked
from evergrad.checkpoint.catalogue.history import CatalogueJournal, History, ShardNote, VerificationNote
from evergrad.checkpoint.catalogue.pins import Pins, resolve
from evergrad.checkpoint.catalogue.survey import FoundShard, JobLocation, Survey, find_job, survey
from evergrad.checkpoint.run_folder import safe_name, time_text
from evergrad.checkpoint.shard_manifest import Manifest
from evergrad.checkpoint.tiers import Tier
from evergrad.checkpoint.tiers.base import Redaction
from evergrad.checkpoint.version import Version
from evergrad.errors import CheckpointError, FormatError, UsageError
from evergrad.records import Json

State = Literal["restorable", "partial", "uncommitted", "damaged", "retired", "torn", "unknown"]
"""Whole somewhere · some shards are here · only in a shared tier whose record of it is damaged or missing · only a
damaged rest is in memory · gone · gone, and never whole · some tier could not be looked at."""


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One version of a job: what is known of it, and where it is."""

    job: str
    version: Version
    state: State
    tiers: tuple[str, ...]
    """The tiers in which every rank's shard is."""
    parent: str | None
    """What it was trained from: the version before it in its attempt, or what the attempt was restored from."""
    time: str
    world_size: int
    size_bytes: int
    """Of all ranks' shards."""
    digest: str = ""
    """Of all tensors of all ranks, where every shard was noted; equal states have equal ones."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    verified: Literal["ok", "failed", "unknown"] = "unknown"
    verified_at: str = ""
    verdicts: tuple[VerificationNote, ...] = ()
    pinned: bool = False
    tags: tuple[str, ...] = ()
    nodes: Mapping[int, str] = field(default_factory=dict)
    """The node that each rank was on, as far as was noted."""
    guarded_at: str = ""
    """When a guard found all ranks' states alike as it was saved; empty if none did. `verified` is about its files."""
    unverified: bool = False
    """True if a rank's digests were taken again after a restart, with none from the time of the capture to compare."""
    damaged: str = ""
    """The damage of the version's record in a shared tier, or of its remains in memory; empty if there is none."""

    @property
    def guarded(self) -> bool:
        """Whether a guard found the state that it was saved of sound."""
        return bool(self.guarded_at)

    @property
    def retired(self) -> bool:
        """Whether nothing of it is left."""
        return self.state in ("retired", "torn")

    @property
    def restorable(self) -> bool:
        """Whether every rank's shard is in some tier."""
        return self.state == "restorable"

    def to_json(self) -> dict[str, Json]:
        """The row that `evergrad checkpoints ls --json` prints."""
        return {
            "version": self.version.name,
            "step": self.version.step,
            "attempt": self.version.attempt,
            "job": self.job,
            "state": self.state,
            "tiers": list(self.tiers),
            "parent": self.parent,
            "time": self.time,
            "world_size": self.world_size,
            "size_bytes": self.size_bytes,
            "digest": self.digest,
            "meta": dict(self.meta),
            "verified": self.verified,
            "verified_at": self.verified_at,
            "unverified": self.unverified,
            "damaged": self.damaged,
            "guarded": self.guarded,
            "guarded_at": self.guarded_at,
            "pinned": self.pinned,
            "tags": list(self.tags),
        }


class Catalogue:
    """The versions of a job, looked up by its run folder or by the URL of a persistent tier. Making one does nothing.

    With a URL there is no history and nothing can be pinned: only what the tier holds is known.
    """

    def __init__(self, where: str | os.PathLike[str], tiers: Sequence[Tier] = ()) -> None:
        """`tiers` are looked at besides those that the run folder has on record."""
        self.where = os.fspath(where)
        self.label = Redaction()(self.where)
        """As messages may show it: a URL may hold a password."""
        self._tiers = tuple(tiers)

    @cached_property
    def location(self) -> JobLocation:
        """The job, and its tiers."""
        return find_job(self.where, self._tiers)

    @property
    def pins(self) -> Pins:
        """Pins and tags; `UsageError` for a URL."""
        return Pins(self._run_dir())

    def note_verified(self, version: Version, tier: str, *, ok: bool, why: str = "", writer: str = "verify") -> None:
        """Every digest of a version in a tier was checked. With a URL there is no place to note that."""
        if self.location.run_dir is not None:
            self._journal.note_verified(version, tier, ok=ok, why=why, writer=writer)

    def note_guarded(self, version: Version, *, writer: str = "guard") -> None:
        """The state that a version was saved of was alike on all ranks. With a URL there is no place to note that."""
        if self.location.run_dir is not None:
            self._journal.note_guarded(version, writer=writer)

    def survey(self) -> Survey:
        """What the tiers hold now."""
        return survey(self.location)

    def entries(self, seen: Survey | None = None) -> list[CatalogueEntry]:
        """Every version, newest first. One listing a tier, and one manifest of each rank, without its digests."""
        seen = self.survey() if seen is None else seen
        run_dir = self.location.run_dir
        history = CatalogueJournal(run_dir).read() if run_dir is not None else History()
        known = Pins(run_dir).tags() if run_dir is not None else {}
        pinned = Pins(run_dir).pinned(known) if run_dir is not None else set()
        tags: dict[Version, list[str]] = {}
        for name, version in known.items():
            tags.setdefault(version, []).append(name)
        entries: list[CatalogueEntry] = []
        last: dict[int, str] = {}  # attempt → its version before
        for version in sorted({*history.shards, *seen.shards, *seen.damaged}, key=Version.age):
            found = [*seen.shards.get(version, []), *seen.begun.get(version, [])]
            notes = _noted(version, found, history.shards.get(version, {}))
            origin = last.get(version.attempt) or self.origin(version.attempt, notes)
            last[version.attempt] = version.name
            noted = history.verdicts.get(version, {}).values()
            verdicts = tuple(verdict for verdict in noted if not _is_outdated(verdict, found))
            entry = _entry(
                self.location.job, version, notes, seen, origin, verdicts, version in pinned, tags.get(version, [])
            )
            entries.append(replace(entry, guarded_at=history.guarded.get(version, "")))
        return entries[::-1]

    def resolve(self, text: str, entries: Sequence[CatalogueEntry] | None = None) -> CatalogueEntry:
        """The version that a person means: a step, a version's name, a tag, "latest"; `UsageError` if none."""
        entries = self.entries() if entries is None else entries
        by_version = {entry.version: entry for entry in entries}
        tags = {tag: entry.version for entry in entries for tag in entry.tags}
        usable = [entry.version for entry in entries if entry.restorable]
        try:
            return by_version[resolve(text, by_version, tags, usable)]
        except UsageError as error:
            raise UsageError(f"{self.label}: {error}") from None

    def origin(self, attempt: int, notes: Mapping[int, ShardNote] | None = None) -> str | None:
        """What an attempt was restored from: a version's name, after `<job>/` if it is another job's."""
        recorded = self.location.attempts.get(attempt, {}).get("parent")
        if isinstance(recorded, str) and recorded:
            return recorded
        return next((note.parent for note in (notes or {}).values() if note.parent), None)

    @cached_property
    def _journal(self) -> CatalogueJournal:
        return CatalogueJournal(Path(self.where).absolute())

    def _run_dir(self) -> Path:
        if self.location.run_dir is None:
            raise UsageError(f"{self.label}: pins are kept in the run folder of a job: name that instead of the URL")
        return self.location.run_dir


def _noted(version: Version, found: Sequence[FoundShard], history: Mapping[int, ShardNote]) -> dict[int, ShardNote]:
    """Return the shard notes of a version, completed from manifests for ranks without a note.

    Whether a shard is unverified is said by the manifests of its copies: it is, if all of them say so. Only where none
    can be read the note counts.
    """
    notes = dict(history)
    manifests: dict[int, Manifest] = {}
    for each in found:
        rank = each.copy.rank
        if rank not in manifests or manifests[rank].unverified:
            with suppress(FormatError, CheckpointError, OSError):
                manifests[rank] = each.manifest(digests=False)
    for rank, manifest in sorted(manifests.items()):
        note = notes.get(rank) or ShardNote(
            version, rank, manifest.world_size, manifest.size, "", manifest.time, manifest.parent, manifest.meta,
            manifest.node,
        )  # fmt: skip
        notes[rank] = replace(note, unverified=manifest.unverified)
    return notes


def _is_outdated(verdict: VerificationNote, found: Sequence[FoundShard]) -> bool:
    """Return True if a check failed before a restart took the digests of a copy in that tier again."""
    for each in found if verdict.verdict == "failed" else ():
        if each.copy.tier == verdict.tier and not each.copy.url:
            with suppress(FormatError, CheckpointError, OSError):
                written = each.copy.manifest.stat().st_mtime
                if each.manifest(digests=False).unverified and time_text(written) > verdict.time:
                    return True
    return False


def _entry(
    job: str,
    version: Version,
    notes: Mapping[int, ShardNote],
    seen: Survey,
    parent: str | None,
    verdicts: tuple[VerificationNote, ...],
    pinned: bool,
    tags: Sequence[str],
) -> CatalogueEntry:
    first = notes[min(notes)] if notes else None
    world_size = first.world_size if first is not None else 0
    tiers = seen.tiers(version, world_size) if world_size else ()
    present = {each.copy.tier for each in seen.shards.get(version, [])}
    relevant = [verdict for verdict in verdicts if verdict.tier in present] or list(verdicts)
    worst = sorted(relevant, key=lambda verdict: (verdict.verdict == "failed", verdict.time))[-1:]
    return CatalogueEntry(
        job=job,
        version=version,
        state=_state(seen, version, world_size, len(notes)),
        tiers=tiers,
        parent=parent,
        time=first.time if first is not None else "",
        world_size=world_size,
        size_bytes=sum(note.size for note in notes.values()),
        digest=_digest(notes) if len(notes) == world_size else "",
        meta=first.meta if first is not None else {},
        verified=worst[0].verdict if worst else "unknown",
        verified_at=worst[0].time if worst else "",
        verdicts=verdicts,
        pinned=pinned,
        tags=tuple(sorted(tags)),
        nodes={rank: safe_name(note.node) for rank, note in notes.items() if note.node},
        unverified=any(note.unverified for note in notes.values()),
        damaged=_wrong(seen, version),
    )


def _state(seen: Survey, version: Version, world_size: int, noted: int) -> State:
    """What is left of a version of which so many shards were noted."""
    here = seen.ranks(version)
    if world_size and here >= set(range(world_size)):
        return "restorable"
    if here:
        return "partial"
    if version in seen.damaged or version in seen.begun:
        return "uncommitted"
    if _is_rest(seen, version):
        return "damaged"
    if seen.unseen:
        return "unknown"
    return "retired" if noted == world_size else "torn"


def _is_rest(seen: Survey, version: Version) -> bool:
    """Return True if only damaged remains in memory are left of a version that no newer one has replaced."""
    return version in seen.rests and not any(each.age() >= version.age() for each in seen.shards)


def _wrong(seen: Survey, version: Version) -> str:
    told = list(seen.damaged.get(version, {}).values())
    return "; ".join([*told, seen.rests[version]] if _is_rest(seen, version) else told)


def _digest(notes: Mapping[int, ShardNote]) -> str:
    """Of all ranks' digests; nothing where one is not known."""
    if not notes or not all(note.digest for note in notes.values()):
        return ""
    return xxhash.xxh3_128_hexdigest("\n".join(f"{rank} {notes[rank].digest}" for rank in sorted(notes)).encode())


# Removing a version by hand: what stands against it, and doing it.


@dataclass(frozen=True, slots=True)
class Removal:
    """The copies that go, and those that cannot."""

    entry: CatalogueEntry
    going: tuple[FoundShard, ...]
    held: tuple[FoundShard, ...] = ()
    """In the memory of a running trainer: its next saves overwrite them."""
    left: tuple[str, ...] = ()
    """Damaged records of the version whose shards cannot be found through them and stay."""

    def run(self) -> None:
        """Remove them; `TierError` if that cannot be done. Each manifest goes first: a rest is no version."""
        for found in self.going:
            found.store.drop(found.copy)


def plan_removal(
    entry: CatalogueEntry, entries: Sequence[CatalogueEntry], seen: Survey, *, tier: str | None, force: bool
) -> Removal:
    """What removing a version would do; `UsageError` if it is pinned, or the last that a restore would take."""
    name = entry.version.name
    # Without a record it is no version, and yet the next restore commits what is whole.
    there = [*seen.shards.get(entry.version, []), *seen.begun.get(entry.version, [])]
    copies = [found for found in there if tier in (None, found.copy.tier)]
    begun = {found.copy.tier for found in seen.begun.get(entry.version, [])}
    damaged = seen.damaged.get(entry.version, {})
    left = tuple(why for kind, why in damaged.items() if tier in (None, kind) and kind not in begun)
    if not copies:
        where = f"in tier {tier}" if tier is not None else "left"
        why = f" that can be removed: {'; '.join(left)}. Remove that by hand." if left else ""
        raise UsageError(f"{name}: nothing of it is {where}{why}")
    if entry.pinned:
        tags = f" (tag {', '.join(entry.tags)})" if entry.tags else ""
        raise UsageError(f"{name} is pinned{tags}: unpin it first, with 'evergrad checkpoints pin … {name} --unpin'")
    usable = [each.version for each in entries if each.restorable]
    begun_whole = [each.version for each in entries if seen.is_begun(each.version, each.world_size)]
    newest = {max(versions, key=Version.age) for versions in (usable, usable + begun_whole) if versions}
    rest = {found.copy.rank for found in there if tier is not None and found.copy.tier != tier}
    stays = rest >= set(range(entry.world_size))
    if entry.version in newest and not stays and not force:
        raise UsageError(f"{name} is the newest version that can be restored: to remove it all the same, say --force")
    held = tuple(found for found in copies if _is_held(found))
    return Removal(entry, tuple(found for found in copies if found not in held), held, left)


def _is_held(found: FoundShard) -> bool:
    """Whether a running trainer may write to the copy at any moment, with a manifest of something newer."""
    return found.copy.use is not None and is_locked(found.copy.shard.with_suffix(".ticket"))
