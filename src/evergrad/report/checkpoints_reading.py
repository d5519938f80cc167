"""What is known of a job's versions, looked up once: entries, what each tier holds, lineage."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from evergrad.checkpoint.catalogue.lineage import Lineage, trace
from evergrad.checkpoint.catalogue.records import Catalogue, CatalogueEntry
from evergrad.checkpoint.catalogue.survey import Survey
from evergrad.checkpoint.version import Version


@dataclass(frozen=True, slots=True)
class Holding:
    """What one tier holds of one version."""

    ranks: int
    """How many ranks' shards are there."""
    written_s: float | None = None
    """When the last of their records was written there, by the file's time; None where it is no file."""


@dataclass(frozen=True, slots=True)
class JobVersions:
    """The versions of a job."""

    job: str
    where: str
    """The run folder or URL that it was looked up by, without a password."""
    entries: tuple[CatalogueEntry, ...]
    """Newest first."""
    tiers: tuple[str, ...]
    """The kinds of its tiers, nearest first."""
    holdings: Mapping[tuple[Version, str], Holding]
    lineage: Lineage
    unseen: tuple[str, ...]
    """Tiers that could not be looked at, and why."""
    attempts: int
    has_history: bool
    """Whether it was looked up by its run folder; by a URL only what the tier holds is known."""


def look(catalogue: Catalogue) -> JobVersions:
    """Look at every tier of a job; nothing is made or changed."""
    seen = catalogue.look()
    entries = tuple(catalogue.entries(seen))
    home = catalogue.home
    kinds = tuple(dict.fromkeys(tier.kind for tier in home.tiers))
    if not any(found.copy.tier == "memory" for copies in seen.shards.values() for found in copies):
        kinds = tuple(kind for kind in kinds if kind != "memory")  # it is looked at always, and had by few
    return JobVersions(
        job=home.job,
        where=catalogue.label,
        entries=entries,
        tiers=kinds,
        holdings={
            (entry.version, kind): holding
            for entry in entries
            for kind in kinds
            if (holding := _holding(seen, entry.version, kind)) is not None
        },
        lineage=trace(catalogue),
        unseen=tuple(seen.unseen),
        attempts=len({entry.version.attempt for entry in entries}),
        has_history=home.run_dir is not None,
    )


def _holding(seen: Survey, version: Version, kind: str) -> Holding | None:
    copies = [found.copy for found in seen.shards.get(version, []) if found.copy.tier == kind]
    if not copies:
        return None
    written = []
    for copy in copies:
        if not copy.url and copy.generation is None:  # in memory records are written again with every save
            with suppress(OSError):
                written.append(copy.manifest.stat().st_mtime)
    return Holding(len({copy.rank for copy in copies}), max(written, default=None))
