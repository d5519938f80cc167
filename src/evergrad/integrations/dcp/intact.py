"""The newest version whose shards are all as they were captured, whoever saved it and however many there were.

Every rank says which shards it sees. All take the newest version of which every shard is seen by someone, share the
shards out among those who see them, and check every digest. What a shard holds is then told to all, so that each rank
knows the whole version, and opens another rank's shard only if it needs a piece of it.
"""

from __future__ import annotations

import logging
import mmap
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from evergrad.checkpoint import Checkpointer
from evergrad.checkpoint.placement import Place, Placements
from evergrad.checkpoint.ranks import Ranks
from evergrad.checkpoint.restore.shard import Shard, fetch_intact
from evergrad.checkpoint.tiers import Copy, Store
from evergrad.checkpoint.version import Version
from evergrad.dtypes import DType
from evergrad.errors import CheckpointError, FormatError, RestoreError, StateError, UsageError
from evergrad.integrations.dcp.names import Leaf, leaves
from evergrad.state import Skeleton

_log = logging.getLogger(__name__)


class Held(NamedTuple):
    """What a shard holds under one of DCP's names."""

    leaf: Leaf
    dtype: DType | None = None
    """None for a value."""
    place: Place | None = None
    is_cut: bool = False
    """Whether this is a piece of a tensor that is spread over ranks."""
    holder: int = 0
    """The rank in whose shard the bytes lie."""
    inside: tuple[tuple[str, int], ...] = ()
    """Tensors inside a value, each with the rank in whose shard it lies."""


@dataclass(slots=True)
class Sight:
    """What this rank sees: the copies of each version's shards, nearest first, by the rank that saved them."""

    job: str
    mapped: Mapping[Path, mmap.mmap]
    copies: dict[Version, dict[int, list[tuple[Store, Copy]]]] = field(default_factory=dict)
    sizes: dict[Version, int] = field(default_factory=dict)
    damaged: dict[Version, str] = field(default_factory=dict)
    unverified: set[Copy] = field(default_factory=set)
    """Copies whose digests were taken again after a restart: others come first."""

    @classmethod
    def of(cls, checkpointer: Checkpointer, ranks: Ranks) -> Sight:
        """Look into every tier; what the agent is still finishing is waited for."""
        checkpointer._check_usable()
        checkpointer._settle(ranks)
        sight = cls(checkpointer._job.id, checkpointer._recorder.mapped())
        for store in checkpointer._stores.values():
            try:
                copies = store.find()
            except CheckpointError as error:
                _log.warning("rank %d: %s", ranks.rank, error)
                continue
            for copy in copies:
                sight._take(store, copy)
        return sight

    def _take(self, store: Store, copy: Copy) -> None:
        try:
            manifest = store.read_manifest(copy, digests=False)
        except (FormatError, CheckpointError, OSError) as error:
            self.damaged[copy.version] = str(error)
            return
        if manifest.job == self.job:
            self.copies.setdefault(copy.version, {}).setdefault(copy.rank, []).append((store, copy))
            self.sizes[copy.version] = manifest.world_size
            self.unverified |= {copy} if manifest.unverified else set()

    def open(self, version: Version, rank: int, paths: Iterable[str] | None, folder: Path) -> tuple[Shard | None, str]:
        """The nearest copy of a shard that is as it was captured, all of it or some paths; or what is wrong."""
        complaints = []
        wanted = None if paths is None else list(paths)
        copies = self.copies.get(version, {}).get(rank, [])
        for store, copy in sorted(copies, key=lambda found: found[1] in self.unverified):
            shard, what = fetch_intact(store, copy, self.job, folder, mapped=self.mapped, paths=wanted)
            if shard is not None:
                if shard.manifest.unverified:
                    _log.warning("%s, rank %d, in tier %s is unverified: digests were taken after a restart",
                                 version, rank, copy.tier)  # fmt: skip
                return shard, what
            complaints.append(f"{version}, rank {rank}, in tier {copy.tier}: {what}")
        return None, "; ".join(complaints) or f"{version}: no shard of rank {rank} can be reached from here"


class Intact:
    """A version whose every shard was found as it was captured. To be closed."""

    def __init__(self, version: Version, world_size: int, sight: Sight) -> None:
        self.version, self.world_size = version, world_size
        self.held: list[dict[str, Held]] = []
        """What each rank saved."""
        self._sight = sight
        self._shards: dict[int, Shard] = {}
        self._fetched = tempfile.TemporaryDirectory(prefix="evergrad-dcp-", ignore_cleanup_errors=True)

    def check(self, ranks: Sequence[int]) -> list[str]:
        """Open the shards of these ranks and compare every digest; what is wrong."""
        wrong = []
        for rank in ranks:
            shard, complaint = self._sight.open(self.version, rank, None, Path(self._fetched.name))
            if shard is None:
                wrong.append(complaint)
            else:
                self._shards[rank] = shard
        return wrong

    def describe(self) -> dict[int, dict[str, Held]]:
        """What the shards that are open hold."""
        return {rank: _held(shard) for rank, shard in self._shards.items()}

    def shard(self, rank: int, paths: Iterable[str]) -> Shard:
        """The shard of a rank. One that another rank has checked is checked here again, as far as it is needed."""
        if rank not in self._shards:
            shard, complaint = self._sight.open(self.version, rank, paths, Path(self._fetched.name))
            if shard is None:
                raise RestoreError(f"{complaint}. Nothing was loaded from it.")
            self._shards[rank] = shard
        return self._shards[rank]

    def check_current(self) -> None:
        """An error if an arena was overwritten while it was read."""
        for shard in self._shards.values():
            if not shard.is_current():
                raise RestoreError(f"{shard.copy.shard}: overwritten while it was read: load again")

    def close(self) -> None:
        """Unmap the shards; no tensor of them may be used any more. Twice is fine."""
        while self._shards:
            self._shards.popitem()[1].close()
        self._fetched.cleanup()


def find(checkpointer: Checkpointer, asked: Version | int | None) -> Intact:
    """The newest intact version, or the one asked for. Every rank must call it.

    `UsageError` if there is none of that step, `RestoreError` if there are versions and none is intact, or none at all.
    """
    ranks = Ranks.now()
    sight = Sight.of(checkpointer, ranks)
    sizes: dict[Version, int] = {}
    seen: dict[Version, dict[int, list[int]]] = {}
    mine = {version: sorted(found) for version, found in sight.copies.items()}
    complaints: dict[Version, list[str]] = {}
    for reader, (theirs, their_sizes, damaged) in enumerate(ranks.gather((mine, sight.sizes, sight.damaged))):
        sizes |= their_sizes
        for version, saved in theirs.items():
            for rank in saved:
                seen.setdefault(version, {}).setdefault(rank, []).append(reader)
        for version, what in damaged.items():
            complaints.setdefault(version, []).append(what)
    for version in sorted(seen, key=Version.age, reverse=True):
        if asked is not None and asked not in (version, version.step):
            continue
        if missing := [rank for rank in range(sizes[version]) if rank not in seen[version]]:
            complaints.setdefault(version, []).append(f"{version} is not whole: no shard of rank {missing[0]}")
            continue
        found, wrong = _try(Intact(version, sizes[version], sight), seen[version], ranks)
        complaints.setdefault(version, []).extend(wrong)
        if found is not None:
            for newer in sorted(complaints, key=Version.age, reverse=True):
                if newer.age() >= version.age() and complaints[newer]:
                    told = "; ".join(dict.fromkeys(complaints[newer]))
                    _log.warning("rank %d: %s. Loading %s.", ranks.rank, told, version)
            return found
    raise _nothing(checkpointer, asked, sorted({*seen, *complaints}, key=Version.age, reverse=True), complaints)


def _try(intact: Intact, seen: Mapping[int, list[int]], ranks: Ranks) -> tuple[Intact | None, list[str]]:
    """Check a version together; what is wrong with it, wherever that was found."""
    mine = []
    for saved in range(intact.world_size):
        readers = seen[saved]
        if ranks.rank == (saved if saved in readers else readers[saved % len(readers)]):
            mine.append(saved)
    wrong = intact.check(mine)
    described: dict[int, dict[str, Held]] = {}
    try:
        described = intact.describe()
    except (FormatError, StateError) as error:
        wrong.append(f"{intact.version}: {error}")
    told = ranks.gather((wrong, {} if wrong else described))
    wrong = [line for lines, _ in told for line in lines]
    if wrong:
        intact.close()
        return None, wrong
    every = {rank: held for _, part in told for rank, held in part.items()}
    intact.held = [every[rank] for rank in range(intact.world_size)]
    return intact, []


def _held(shard: Shard) -> dict[str, Held]:
    parsed, manifest = shard.parsed, shard.manifest
    placements = Placements.from_json(parsed.placements, str(shard.copy.shard))
    known = {**shard.shapes, **parsed.absent}
    known |= {alias: parsed.absent[path] for alias, path in parsed.absent_aliases.items()}

    def holder(path: str) -> int:
        return manifest.elsewhere.get(parsed.absent_aliases.get(path, path), (manifest.rank, ""))[0]

    found = {}
    for name, leaf in leaves(parsed.skeleton.root).items():
        path = leaf.tensor
        if path is None:
            inside = tuple((inner, holder(inner)) for inner in sorted(Skeleton(leaf.node).tensor_names()))
            found[name] = Held(leaf, holder=manifest.rank, inside=inside)
            continue
        dtype, shape = known[path]
        cut = placements.sharded.get(path)
        found[name] = Held(leaf, dtype, cut or Place.of_whole(shape), cut is not None, holder(path))
    return found


def _nothing(
    checkpointer: Checkpointer,
    asked: Version | int | None,
    known: list[Version],
    complaints: Mapping[Version, list[str]],
) -> Exception:
    reasons = "; ".join(dict.fromkeys(line for version in known for line in complaints.get(version, ())))
    if asked is not None and not any(asked in (version, version.step) for version in known):
        steps = ", ".join(str(version.step) for version in known[:8])
        return UsageError(f"there is no version {asked}. There are {steps or 'none'}.")
    if known:
        what = f"version {asked} cannot be loaded" if asked is not None else "none of the versions is intact"
        return RestoreError(f"{what}: {reasons}. Nothing was touched.")
    return RestoreError(f"{checkpointer._job.run_dir}: there is no version to load")
