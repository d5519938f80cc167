"""What a rank can obtain: its own shards, and those of the others that it sees."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from evergrad.checkpoint.tiers import Copy, Store
from evergrad.checkpoint.version import Version
from evergrad.errors import EvergradError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank tells the others of a version."""

    world_size: int
    own: bool
    """Whether it has its own shard, whole."""
    seen: frozenset[int]
    """The ranks whose shards it can read."""

    def obtainable(self, world_size: int) -> bool:
        """Whether it could go on with this version, in a job of so many ranks."""
        return (self.own and self.world_size == world_size) or self.seen >= set(range(self.world_size))


@dataclass(slots=True)
class Shelf:
    """Every copy that this rank sees, by version and rank, nearest first; and what it tells of that."""

    copies: dict[Version, dict[int, list[Copy]]] = field(default_factory=dict)
    offers: dict[Version, Offer] = field(default_factory=dict)
    damaged: dict[Version, str] = field(default_factory=dict)
    """Of this rank's own shards: complete once, and not any more."""
    torn: dict[Version, str] = field(default_factory=dict)
    """Of this rank's own shards: never complete."""


def look(job: str, stores: Mapping[str, Store], rank: int, world_size: int) -> Shelf:
    """Look at all tiers."""
    shelf = Shelf()
    sizes: dict[Version, int] = {}
    own: set[Version] = set()
    unverified: set[Copy] = set()
    for store in stores.values():
        try:
            # Of one rank, a folder that cannot be listed is found as well, and said to be damaged.
            own_copies = [] if store.shared else store.find(rank)
            copies = own_copies + [copy for copy in store.find() if store.shared or copy.rank != rank]
            torn = store.torn(rank)
        except (EvergradError, OSError) as error:
            _log.warning("rank %d: %s", rank, error)
            continue
        # What is wrong with a copy matters only where no nearer tier has the version.
        for version, (what, was_complete) in torn.items():
            if version not in own:
                if was_complete:
                    shelf.damaged[version] = what
                else:
                    shelf.torn.setdefault(version, what)  # the nearest tier had it first, and tells what became of it
        for copy in copies:
            version = copy.version
            # The manifests of other ranks are read when they are needed; one tells how many ranks there were.
            if copy.rank == rank or version not in sizes:
                try:
                    manifest = store.read_manifest(copy, digests=False)
                except (EvergradError, OSError) as error:
                    if copy.rank == rank and version not in own:
                        shelf.damaged[version] = str(error)
                    continue
                if manifest.job != job:
                    continue
                sizes[version] = manifest.world_size
                unverified |= {copy} if manifest.unverified else set()
                if copy.rank == rank and manifest.world_size == world_size and not store.shared:
                    own.add(version)
            shelf.copies.setdefault(version, {}).setdefault(copy.rank, []).append(copy)
    for version in {*shelf.damaged, *shelf.torn}:
        if sizes.get(version, world_size) != world_size and version not in own:  # this rank had no shard of it
            shelf.damaged.pop(version, None)
            shelf.torn.pop(version, None)
    for version, by_rank in shelf.copies.items():
        for copies in by_rank.values():  # first those that still have the digests of their capture
            copies.sort(key=unverified.__contains__)
        shelf.offers[version] = Offer(sizes[version], version in own, frozenset(by_rank))
    return shelf
