"""What the tiers of a job hold now, as far as this machine sees: looked up, and nothing made or changed.

A job is looked up by its run folder, or by the URL of a persistent tier. Which tiers it has is in the records of its
attempts, and in the tickets of its arenas. A tier of the node's own is looked at for every node whose folder can be
seen here; a tier that cannot be reached is named in `Survey.unseen`, because what is there is then not known.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from evergrad._files import read_small
from evergrad.checkpoint.run_folder import (
    arenas_root,
    find_arenas,
    former_homes,
    moved_along,
    node_name,
    read_identity,
    safe_name,
)
from evergrad.checkpoint.shard_manifest import Manifest
from evergrad.checkpoint.tiers import Copy, Local, Memory, Site, Store, Tier, read_tiers
from evergrad.checkpoint.tiers.base import Redaction
from evergrad.checkpoint.version import Version
from evergrad.errors import EvergradError, FileAccessError, FormatError, UsageError, reason, said
from evergrad.formats.version_records import read_record


@dataclass(frozen=True, slots=True)
class JobLocation:
    """Where a job is looked up."""

    job: str
    run_dir: Path | None
    """None if the job is known by the URL of a tier alone."""
    tiers: tuple[Tier, ...]
    """Nearest first."""
    attempts: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """What was noted of each attempt when it began."""
    complaints: tuple[str, ...] = ()
    """Tiers that are recorded and cannot be looked at, and damaged records of tiers."""


@dataclass(frozen=True, slots=True)
class FoundShard:
    """A complete shard, and the store that it was found in."""

    copy: Copy
    store: Store
    node: str
    """The folder of the node that it is on; empty where all nodes share the tier."""

    def manifest(self, *, digests: bool = True) -> Manifest:
        """Its record; `FormatError` if that is damaged, `FileNotFoundError` if it is gone."""
        return self.store.read_manifest(self.copy, digests=digests)


@dataclass(slots=True)
class Survey:
    """The complete shards that there are, by version, nearest first."""

    shards: dict[Version, list[FoundShard]] = field(default_factory=dict)
    nodes: set[str] = field(default_factory=set)
    """The folders of nodes that were looked into."""
    unseen: list[str] = field(default_factory=list)
    """Tiers that could not be looked at, and why."""
    begun: dict[Version, list[FoundShard]] = field(default_factory=dict)
    """Complete shards in a shared tier without a sound record of their version, which a restore commits if whole."""
    damaged: dict[Version, dict[str, str]] = field(default_factory=dict)
    """By version and kind of tier: what is wrong with the record by which it was committed."""

    rests: dict[Version, str] = field(default_factory=dict)
    """Versions of which only unrestorable remains are in memory, each with its damage."""

    def is_begun(self, version: Version, world_size: int) -> bool:
        """Return True if every rank's shard lies in a shared tier and only the version's record is missing."""
        ranks = {found.copy.rank for found in self.begun.get(version, [])}
        return bool(world_size) and ranks >= set(range(world_size))

    def ranks(self, version: Version, tier: str | None = None) -> set[int]:
        """The ranks whose shards of a version are there, in one tier or in any."""
        found = self.shards.get(version, [])
        return {each.copy.rank for each in found if tier in (None, each.copy.tier)}

    def tiers(self, version: Version, world_size: int) -> tuple[str, ...]:
        """The tiers in which every rank's shard of a version is."""
        kinds = dict.fromkeys(each.copy.tier for each in self.shards.get(version, []))
        return tuple(kind for kind in kinds if self.ranks(version, kind) >= set(range(world_size)))


def find_job(where: str | os.PathLike[str], tiers: Sequence[Tier] = ()) -> JobLocation:
    """The job of a run folder or of a tier's URL; `UsageError` or `FileAccessError` if there is none.

    `tiers` are looked at besides those that are on record; a URL is reached with their settings.
    """
    text = os.fspath(where)
    if "://" in text:
        return _home_at_url(text, text, tiers)
    folder = Path(text).absolute()
    if not folder.is_dir():
        raise FileAccessError(text, "there is no such run folder" if not folder.exists() else "is no folder")
    folder = folder.resolve()
    job = read_identity(folder)
    if job is None:
        if (folder / "JOB.json").is_file():
            return _home_at_url(f"file://{folder}", text, tiers)
        raise FileAccessError(text, "is no run folder: there is no job.json in it")
    attempts, damaged = _attempts(folder)
    specs = [spec for number in sorted(attempts, reverse=True) for spec in _specs(attempts[number].get("tiers"))]
    specs += _specs_of_tickets(job)
    specs.append(Local().to_json())
    homes = former_homes(folder, job)
    chosen, complaints = _read([moved_along(spec, homes, folder) for spec in specs])
    return JobLocation(job, folder, tuple(_distinct([*tiers, *chosen])), attempts, (*damaged, *complaints))


def survey(home: JobLocation, only: str | None = None) -> Survey:
    """Look at all tiers of a job, or at those of one kind."""
    found = Survey(unseen=[] if only else list(home.complaints))
    seen: set[tuple[str, str]] = set()
    for tier in home.tiers:
        if only not in (None, tier.kind):
            continue
        is_shared = not isinstance(tier, (Local, Memory))
        for site in tier_sites(home, tier):
            node = "" if is_shared else site.node
            try:
                store = tier.store(site)
                copies = store.find()
                for copy in copies:
                    place = copy.url or str(copy.manifest)
                    if (copy.tier, place) not in seen and (not is_shared or _is_of(home.job, copy, store)):
                        seen.add((copy.tier, place))
                        found.shards.setdefault(copy.version, []).append(FoundShard(copy, store, node))
                if is_shared:
                    _look_uncommitted(found, home.job, tier.kind, store)
                found.nodes |= {node} if node else set()
                if isinstance(tier, Memory):
                    _look_rests(found, site, store)
            except (EvergradError, OSError) as error:
                found.unseen.append(f"tier {tier.kind}: {error}")
    return found


def _look_uncommitted(found: Survey, job: str, kind: str, store: Store) -> None:
    """Note what lies in a shared tier and is not committed, or not any more."""
    torn = store.torn(0)
    for version, why in torn.items():
        if why.was_complete:
            found.damaged.setdefault(version, {})[kind] = why.what
    for copy in store.begun() if torn else ():
        if _is_of(job, copy, store):
            found.begun.setdefault(copy.version, []).append(FoundShard(copy, store, ""))


def _look_rests(found: Survey, site: Site, store: Store) -> None:
    """Note what lies in arenas that no trainer holds, and is no copy of a version."""
    for rank in {files.rank for files in find_arenas(site.arenas, rests=True) if not files.is_locked()}:
        for version, torn in store.torn(rank).items():
            found.rests.setdefault(version, torn.what)


def tier_sites(home: JobLocation, tier: Tier) -> list[Site]:
    """The parts of a tier that can be seen here: of one that the nodes have each for itself, one a node."""
    run_dir = home.run_dir or Path(os.devnull)
    return [Site(home.job, node, arenas_root() / home.job / node, run_dir) for node in _nodes(home, tier)]


def with_access_settings(tier: Tier, tiers: Sequence[Tier]) -> Tier:
    """A tier with the settings that it takes to get in: those of one at the same URL, or else in the same bucket."""
    spec = tier.to_json()
    known = [each.to_json() for each in tiers if each.kind == tier.kind]
    for part in (slice(None), slice(2)):  # all of the URL; its service and bucket
        for settings in known if "url" in spec else ():
            if urlsplit(settings["url"])[part] == urlsplit(spec["url"])[part]:
                return read_tiers([settings | {"url": spec["url"]}])[0]
    return tier


def _home_at_url(url: str, said: str, tiers: Sequence[Tier]) -> JobLocation:
    (tier,) = read_tiers([{"kind": "persistent", "url": url}])
    tier = with_access_settings(tier, tiers)
    store = tier.store(Site("", safe_name(node_name()), Path(os.devnull), Path(os.devnull)))
    owner = getattr(store, "owner", None)
    job = owner() if callable(owner) else None
    if not isinstance(job, str) or not job:
        raise UsageError(f"{Redaction()(said)}: no job has versions there: there is no JOB.json")
    return JobLocation(job, None, (tier,))


def _is_of(job: str, copy: Copy, store: Store) -> bool:
    """Whether a copy in a shared tier is this job's: one that was adopted holds another one's, too."""
    try:
        return store.read_manifest(copy, digests=False).job == job
    except (FormatError, OSError):
        return True  # damaged: whoever checks it says so


def _nodes(home: JobLocation, tier: Tier) -> list[str]:
    """The nodes whose part of a tier can be seen here."""
    if isinstance(tier, Memory):
        return _folders(arenas_root() / home.job)
    if isinstance(tier, Local):
        if tier.path is None and home.run_dir is None:
            return []
        return _folders(tier.root(home.run_dir or Path()) / home.job)
    return [safe_name(node_name())]


def _folders(parent: Path) -> list[str]:
    with suppress(OSError):
        return sorted(entry.name for entry in os.scandir(parent) if entry.is_dir())
    return []


def _attempts(folder: Path) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """Return the notes of each attempt, and the records that cannot be read."""
    found, damaged = {}, []
    for path in sorted((folder / "attempts").glob("*.json")):
        if path.stem.isdecimal():
            try:
                found[int(path.stem)] = read_record(read_small(path))
            except (OSError, ValueError) as error:
                damaged.append(
                    f"{path}: {reason(error) if isinstance(error, OSError) else said(error)}: its tiers are not known"
                )
    return found, damaged


def _specs(value: object) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        yield from (spec for spec in value if isinstance(spec, dict))


def _specs_of_tickets(job: str) -> list[dict[str, Any]]:
    """What trainers on this machine said: with the settings that are too private for the run folder."""
    tickets = []
    for node in _folders(arenas_root() / job):
        found = (files.read_ticket() for files in find_arenas(arenas_root() / job / node))
        tickets += [ticket for ticket in found if ticket is not None]
    tickets.sort(key=lambda ticket: ticket.version.age(), reverse=True)
    return [spec for ticket in tickets for spec in _specs(ticket.tiers)]


def _read(specs: Sequence[dict[str, Any]]) -> tuple[list[Tier], list[str]]:
    """The tiers of the records, memory first; those that this Evergrad cannot make are named."""
    tiers: list[Tier] = [Memory()]
    complaints: dict[str, None] = {}
    for spec in specs:
        try:
            tiers += read_tiers([spec])
        except (EvergradError, TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            complaints[str(error)] = None
    return tiers, list(complaints)


def _distinct(tiers: Sequence[Tier]) -> list[Tier]:
    """Each place once, whatever else its settings say; of two the one that says more, in the order of kinds."""
    found: dict[tuple[str, str], Tier] = {}
    for tier in tiers:
        settings = tier.to_json()
        place = str(settings.get("url") or settings.get("path") or "")
        known = found.get((tier.kind, place))
        if known is None or len(json.dumps(known.to_json())) < len(json.dumps(settings)):
            found[tier.kind, place] = tier
    kinds = list(dict.fromkeys(tier.kind for tier in found.values()))
    return sorted(found.values(), key=lambda tier: (tier.survives_reboot, tier.slow, kinds.index(tier.kind)))
