"""Finding the version to go on with: the newest that every rank can obtain, intact.

Every rank says what it can obtain; all take the newest that all have named. Each then checks the digests of its
nearest copy, and of the next if they are wrong; if one rank has no intact copy, all go back to the version before.
Nothing of the live state is touched before all ranks hold verified shards that fit. A newer version that all ranks have
captured, and that could not be finished, is an error: going back behind it, or starting anew, is the user's decision.

A rank takes its own shard where it can. With another number of ranks, another cut of the tensors, or a version that
only a shared tier has, the state is assembled from several (`find.py`).
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from evergrad.checkpoint.agent.events import UnfinishedVersion
from evergrad.checkpoint.agent.inventory import CompletionLog
from evergrad.checkpoint.arena import check_open_files
from evergrad.checkpoint.capture.dtensor import (
    WantedPieces,
    declared,
    known,
    local_tensor,
    may_have_dtensors,
    stateful_paths,
)
from evergrad.checkpoint.catalogue.history import CatalogueJournal, ShardNote
from evergrad.checkpoint.catalogue.pins import Pins, resolve
from evergrad.checkpoint.catalogue.survey import find_job, tier_sites, with_access_settings
from evergrad.checkpoint.ranks import Ranks
from evergrad.checkpoint.restore.copy_in import ShardSource
from evergrad.checkpoint.restore.load_state import PreparedLoad, prepare
from evergrad.checkpoint.restore.mismatches import live_tensors
from evergrad.checkpoint.restore.reshard import ReshardedState, Resize, needs, own_tensors, own_values, refuse, resize
from evergrad.checkpoint.restore.shards import Shard, fetch_intact
from evergrad.checkpoint.shard_manifest import Manifest
from evergrad.checkpoint.tensor_placement import Placements
from evergrad.checkpoint.tiers import Copy, Store, Tier, Torn, Work
from evergrad.checkpoint.version import Version, VersionRecord
from evergrad.errors import DamagedFile, EvergradError, RestoreError, TierError, UsageError
from evergrad.state import Skeleton, Where

# What a rank can obtain: its own shards, and those of the others that it sees.

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankAvailability:
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
class VisibleCopies:
    """Every copy that this rank sees, by version and rank, nearest first; and what it tells of that."""

    copies: dict[Version, dict[int, list[Copy]]] = field(default_factory=dict)
    availability: dict[Version, RankAvailability] = field(default_factory=dict)
    damaged: dict[Version, str] = field(default_factory=dict)
    """Of this rank's own shards: complete once, and not any more."""
    torn: dict[Version, str] = field(default_factory=dict)
    """Of this rank's own shards: never complete."""


def find_copies(job: str, stores: Mapping[str, Store], rank: int, world_size: int) -> VisibleCopies:
    """Look at all tiers."""
    shelf = VisibleCopies()
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
        shelf.availability[version] = RankAvailability(sizes[version], version in own, frozenset(by_rank))
    return shelf


# One rank's own part of the newest version that has it, taken by another process: without the other ranks.


def restore_rank(job: str, stores: Mapping[str, Store], rank: int, state: object, where: Where) -> Version | None:
    """Put what a rank had saved into a state, from the newest intact shard of it that lies at hand; its version.

    Only what `where` chooses is loaded, and only what fits. The version need not be complete: of the others nothing
    is taken.
    """
    copies = [copy for store in stores.values() for copy in store.find(rank) if not copy.url]
    copies.sort(key=lambda copy: (copy.version.step, copy.version.attempt, not _is_unverified(copy)), reverse=True)
    for copy in copies:
        try:
            with Shard(copy, job) as shard:
                if broken := shard.verify():
                    _log.warning("%s of rank %d in tier %s: %s is damaged", copy.version, rank, copy.tier, broken[0])
                    continue
                if shard.manifest.unverified:
                    _log.warning("%s of rank %d in tier %s is unverified", copy.version, rank, copy.tier)
                prepare(state, shard, strict=False, where=where).apply()
                return copy.version
        except (EvergradError, OSError) as error:
            _log.warning("%s of rank %d in tier %s cannot be read: %s", copy.version, rank, copy.tier, error)
    return None


def _is_unverified(copy: Copy) -> bool:
    """True if its digests were taken again after a restart: another copy comes first."""
    with suppress(EvergradError, OSError):
        return Manifest.read(copy.manifest, digests=False).unverified
    return False


# Where else a job can begin from: another job's run folder, the URL of a persistent tier, a DCP folder.


def is_dcp_folder(source: str | os.PathLike[str]) -> bool:
    """Whether this is a checkpoint of torch.distributed.checkpoint."""
    return "://" not in os.fspath(source) and Path(source, ".metadata").is_file()


def named_version(text: str, run_dir: Path | None, usable: list[Version]) -> Version:
    """The version that a name, a tag or a step in words stands for; of another job, whose tags are its own, a name."""
    if run_dir is not None:
        return resolve(text, usable, Pins(run_dir).tags(), usable)
    known = Version.parse(text)
    if known is None:
        raise UsageError(f"version={text!r}: of another job, expected a step, or a name such as {Version(120, 1).name}")
    return known


def stores_of(source: str | os.PathLike[str], tiers: list[Tier]) -> tuple[str, dict[str, Store]]:
    """Another job, and its tiers as far as they are seen here, nearest first.

    `tiers` are this job's: one with the same URL, or in the same bucket, has the settings that it takes to get in.
    """
    text = os.fspath(source)
    home = find_job(text, tiers if "://" in text else ())
    stores: dict[str, Store] = {}
    for tier in (with_access_settings(each, tiers) for each in home.tiers):
        parts = [tier.store(site) for site in tier_sites(home, tier)]
        known = stores.get(tier.kind)
        if parts:
            parts = parts if known is None else [known, *parts]
            stores[tier.kind] = _CombinedStore(parts) if len(parts) > 1 else parts[0]
    return home.job, stores


class _CombinedStore(Store):
    """The same tier on several nodes, or in several places, to read from."""

    def __init__(self, parts: list[Store]) -> None:
        self._parts = parts
        self._homes: dict[Copy, Store] = {}

    def check(self) -> None:
        for part in self._parts:
            part.check()

    def put(self, work: Work) -> None:
        raise TierError(f"{work.version}: another job's tier is only read from")

    def find(self, rank: int | None = None) -> list[Copy]:
        found = {copy: part for part in self._parts for copy in part.find(rank)}
        self._homes |= found
        return list(found)

    def read_manifest(self, copy: Copy, *, digests: bool = True) -> Manifest:
        return self._homes[copy].read_manifest(copy, digests=digests)

    def fetch(self, copy: Copy, folder: Path) -> Copy:
        return self._homes[copy].fetch(copy, folder)

    def torn(self, rank: int) -> dict[Version, Torn]:
        return {version: torn for part in self._parts for version, torn in part.torn(rank).items()}

    def drop(self, copy: Copy) -> None:
        raise TierError(f"{copy.version}: another job's tier is only read from")


# Getting at a version's bytes: one rank's own shard, or as many ranks' as its state is made of.
#
# A copy in a shared tier is first fetched into a folder of the node. A copy whose digests do not hold is passed over
# for the next one.


@dataclass(slots=True)
class OpenVersion:
    """A version as something that can be loaded from: verified, and mapped until it is closed."""

    source: ShardSource
    shards: Sequence[Shard]
    """The first one says what it is."""
    fits: bool = True
    """Whether pieces are cut as the live state has room for them."""
    skipped: tuple[str, ...] = ()

    @property
    def manifest(self) -> Manifest:
        """Of the shard that the values come from."""
        return self.shards[0].manifest

    @property
    def tier(self) -> str:
        """Where that shard was found."""
        return self.shards[0].copy.tier

    def overwritten(self) -> Path | None:
        """An arena that was used again while it was read."""
        return next((shard.copy.shard for shard in self.shards if not shard.is_current()), None)

    def close(self) -> None:
        """Unmap it."""
        for shard in self.shards:
            shard.close()


@dataclass(slots=True)
class VersionOpener:
    """How to get at versions of a job, for one live state."""

    job: str
    stores: Mapping[str, Store]
    state: object
    scratch: Path
    """A folder on this node for what has to be fetched."""
    mapped: Mapping[Path, mmap.mmap] = field(default_factory=dict)
    """Arenas that this process has mapped already."""
    choose: Resize | None = None
    strict: bool = True
    replicated: Where | bool = False
    _wanted: WantedPieces | None = None

    def own(self, copies: Sequence[Copy], told: list[str]) -> OpenVersion | None:
        """This rank's own shard, from the nearest copy that is intact."""
        for copy in copies:
            shard = self._open(copy, None, told)
            if shard is None:
                continue
            if shard.manifest.elsewhere:  # a part of it is in other ranks' shards
                shard.close()
                continue
            saved = Placements.from_json(shard.manifest.placements).sharded
            whole = not saved and not may_have_dtensors()  # then nobody has to look at tens of thousands of tensors
            return OpenVersion(shard, [shard], fits=whole or self._room().fits(saved))
        return None

    def assembled(
        self, copies: Mapping[int, Sequence[Copy]], saved_size: int, ranks: Ranks, told: list[str]
    ) -> OpenVersion | None:
        """This rank's state out of all shards that hold a part of it.

        What is needed of whom depends on the copies that are taken: one may leave to another rank what the next holds
        itself. So a copy that turns out to be damaged is left aside, and all begins anew with what is left.
        """
        left = {rank: list(copies[rank]) for rank in range(saved_size)}
        while True:
            manifests = self._manifests(left, told)
            if manifests is None:
                return None
            obtained = self._assemble(left, manifests, ranks, told)
            if obtained is not None:
                return obtained

    def _assemble(
        self, left: dict[int, list[Copy]], manifests: Mapping[int, Manifest], ranks: Ranks, told: list[str]
    ) -> OpenVersion | None:
        """As above, from the first copy that is left of each rank; None, and one copy less, if one is damaged."""
        same_size = len(manifests) == ranks.world_size
        base = ranks.rank if same_size else 0
        tensors: list[str] = []
        differ = False
        if not same_size:
            tensors = own_tensors(manifests, self._live_placements())
            differ = len({manifest.values for manifest in manifests.values()}) > 1
        needed = needs(manifests, base, self._room(), everywhere=tensors if self.choose else ())
        if differ or (tensors and self.choose):
            needed = {rank: needed.get(rank, set()) for rank in manifests}
        shards: dict[int, Shard] = {}
        try:
            for rank, paths in needed.items():
                shard = self._open(left[rank][0], paths, told)
                if shard is None:
                    left[rank].pop(0)
                    return None
                shards[rank] = shard
            source = ReshardedState(shards, base, self._room())
            values = own_values(shards) if differ else []
            skipped = self._resize(source, shards, tensors, values, len(manifests), ranks)
            source.check()
            order = [shards[base], *(shard for rank, shard in shards.items() if rank != base)]
            obtained = OpenVersion(source, order, skipped=skipped)
            shards = {}
            return obtained
        finally:
            for shard in shards.values():
                shard.close()

    def _resize(
        self,
        source: ReshardedState,
        shards: Mapping[int, Shard],
        tensors: Sequence[str],
        values: Sequence[str],
        saved_size: int,
        ranks: Ranks,
    ) -> tuple[str, ...]:
        """Settle what was each rank's own; what is left as it is, in words."""
        if not tensors and not values:
            return ()
        if self.choose is not None:
            resize(source, shards, tensors, values, self.choose, ranks.rank, ranks.world_size)
            return ()
        if self.strict:
            raise refuse(tensors, values, saved_size, ranks.world_size)
        # What loads itself is left out whole: it may not take half of what it gave.
        wholes = [path for path in stateful_paths(self.state) if path is not None]
        left = {
            next((whole for whole in wholes if path.startswith(f"{whole}/")), path): None
            for path in (*tensors, *values)
        }
        source.leave_out(left)
        return tuple(f"{path}: was each rank's own" for path in left)

    def _manifests(self, left: dict[int, list[Copy]], told: list[str]) -> dict[int, Manifest] | None:
        """The record of every rank's first copy; those without one are left aside, and unverified ones come last."""
        found: dict[int, Manifest] = {}
        for rank, copies in left.items():
            last = len(copies)
            while copies and rank not in found:
                try:
                    manifest = self.stores[copies[0].tier].read_manifest(copies[0])
                    if manifest.job != self.job:
                        raise DamagedFile(copies[0].manifest, "describes another job's shard", found=manifest.job)
                    last -= 1
                    if manifest.unverified and last > 0:
                        copies.append(copies.pop(0))
                        continue
                    found[rank] = manifest
                except (EvergradError, OSError) as error:
                    told.append(f"{copies[0].version} in tier {copies[0].tier}: {error}")
                    copies.pop(0)
                    last -= 1
            if rank not in found:
                return None
        return found

    def _open(self, copy: Copy, paths: Iterable[str] | None, told: list[str]) -> Shard | None:
        """A copy that is what was captured, or None, and what is wrong with it."""
        shard, complaint = fetch_intact(
            self.stores[copy.tier], copy, self.job, self.scratch, mapped=self.mapped, paths=paths
        )
        if shard is None:
            told.append(f"{copy.version} in tier {copy.tier}: {complaint}")
        return shard

    def _room(self) -> WantedPieces:
        """The pieces that the live state has room for."""
        if self._wanted is None:
            self._wanted = WantedPieces(self.state, live_tensors(self.state, None))
        return self._wanted

    def _live_placements(self) -> Placements:
        leaves = live_tensors(self.state, None)
        local = {path: local_tensor(leaf) for path, leaf in leaves.items()}
        return declared(self.replicated, local, Skeleton(None)).merged(known(self.state, leaves))


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """What is asked for."""

    state: object
    version: Version | int | None = None
    strict: bool = True
    where: Where | None = None
    newest: bool = False
    """True if `version` is the newest that can be obtained, and was not chosen by its name."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored, from where, and what was passed over on the way."""

    version: Version
    tier: str
    meta: dict[str, object]
    skipped: tuple[str, ...] = ()
    world_size: int = 1
    """How many ranks had saved it."""
    unverified: bool = False
    """True if the digests of any rank were taken again after a restart, with none from the capture to compare."""


@dataclass(frozen=True, slots=True)
class _RankReport:
    """What a rank tells all others."""

    availability: Mapping[Version, RankAvailability]
    damaged: Mapping[Version, str]
    torn: Mapping[Version, str]
    committed: Version | None
    unfinished: Sequence[UnfinishedVersion]


def restore(
    request: RestoreRequest,
    job: str,
    stores: Mapping[str, Store],
    ranks: Ranks,
    obtaining: VersionOpener,
    committed: Version | None,
    journal: CatalogueJournal | None = None,
    unfinished: Sequence[UnfinishedVersion] = (),
) -> Restored | None:
    """Restore the newest version that all ranks can obtain, or the one asked for; None if there is none at all.

    `committed` is the newest version that is known to have been complete where it survives a reboot; the `journal` of
    the job tells which ones were complete in any tier. `unfinished` is what this node knows of captured versions.
    """
    shelf = ranks.run_on_all(lambda: find_copies(job, stores, ranks.rank, ranks.world_size))
    news = ranks.gather(_RankReport(shelf.availability, shelf.damaged, shelf.torn, committed, unfinished))
    size = ranks.world_size
    seen = {version for each in news for version in each.availability}
    common = {v for v in seen if all(v in each.availability and each.availability[v].obtainable(size) for each in news)}
    candidates = [version for version in sorted(common, key=Version.age, reverse=True) if _asked(request, version)]
    complaints: dict[Version, list[str]] = _incomplete(common, news, size)
    for version in common:
        if why := shelf.damaged.get(version) or shelf.torn.get(version):
            complaints[version] = [f"{version}: {why}"]
    waiting, lost = _unfinished(common, news)
    hopeless = {each.version for told in news for each in told.unfinished if each.unreadable}
    complaints.update({**waiting, **lost})
    for version in candidates:
        _refuse_older(request, waiting, hopeless, version)
        restored = _try_version(
            request, version, shelf, [each.availability[version] for each in news], ranks, obtaining, complaints
        )
        if restored is not None:
            for newer in sorted(complaints, key=Version.age, reverse=True):
                if newer.age() >= version.age():
                    _log.warning("rank %d: %s. Restoring %s.", ranks.rank, "; ".join(complaints[newer]), version)
            return restored
    _refuse_older(request, waiting, hopeless, None)
    _refuse_if_lost(request, candidates, complaints, news, ranks, journal, lost)
    return None


def list_versions(
    job: str, stores: Mapping[str, Store], completion: CompletionLog, rank: int, journal: CatalogueJournal
) -> list[VersionRecord]:
    """Return the versions that this rank could restore, newest first, with the tiers that hold all of each.

    A version is unverified if one rank has no copy with the digests of its capture: by the manifests that are seen
    here, and by the catalogue where a rank's are on another node.
    """
    found: dict[Version, list[tuple[str, Manifest]]] = {}
    seen: dict[Version, dict[int, bool]] = {}
    for store in stores.values():
        for copy in store.find():
            with suppress(EvergradError, OSError):
                manifest = store.read_manifest(copy, digests=False)
                completion.note(copy.version, copy.tier, copy.rank, manifest.world_size)
                if manifest.job == job and manifest.version == copy.version:
                    of_ranks = seen.setdefault(copy.version, {})
                    of_ranks[copy.rank] = manifest.unverified and of_ranks.get(copy.rank, True)
    for store in stores.values():
        for copy in store.find(rank):
            with suppress(EvergradError, OSError):
                manifest = store.read_manifest(copy, digests=False)
                is_whole = completion.is_complete(copy.version, copy.tier)
                if is_whole and manifest.job == job and manifest.version == copy.version:
                    found.setdefault(copy.version, []).append((copy.tier, manifest))
    elsewhere = any(copies[0][1].world_size > len(seen.get(version, {})) for version, copies in found.items())
    noted = journal.read().shards if elsewhere else {}
    records = []
    for version, copies in sorted(found.items(), key=lambda item: item[0].age(), reverse=True):
        tiers, first = tuple(tier for tier, _ in copies), copies[0][1]
        notes = {number: note.unverified for number, note in noted.get(version, {}).items()}
        unverified = any((notes | seen.get(version, {})).values())
        size, meta = first.size, dict(first.meta)
        records.append(VersionRecord(version, tiers, first.time, first.world_size, size, meta, unverified))
    return records


def _asked(request: RestoreRequest, version: Version) -> bool:
    asked = request.version
    return asked is None or version == asked or (isinstance(asked, int) and version.step == asked)


def _incomplete(common: set[Version], news: Sequence[_RankReport], world_size: int) -> dict[Version, list[str]]:
    """Versions that some rank has at least a part of, and not every rank can obtain, in words."""
    found: dict[Version, list[str]] = {}
    begun = {version for each in news for version in (*each.availability, *each.damaged, *each.torn)}
    for version in begun - common:
        reasons = []
        for rank, each in enumerate(news):
            offer = each.availability.get(version)
            if offer is not None and offer.obtainable(world_size):
                continue
            why = each.damaged.get(version) or each.torn.get(version) or "no shard"
            if offer is not None and offer.world_size != world_size:
                lost = ", ".join(map(str, sorted(set(range(offer.world_size)) - offer.seen)))
                why = f"it was saved by {offer.world_size} ranks, and the shards of {lost} are not seen here"
            reasons.append(f"rank {rank}: {why}")
        found[version] = [f"{version} is not whole: {'; '.join(reasons[:3])}"]
    return found


def _unfinished(
    common: set[Version], news: Sequence[_RankReport]
) -> tuple[dict[Version, list[str]], dict[Version, list[str]]]:
    """Versions that every rank had captured and that not every rank can obtain: those that could not be put into a
    tier, and those whose arenas are damaged, both in words. All ranks get the same.
    """
    waiting: dict[Version, list[str]] = {}
    lost: dict[Version, list[str]] = {}
    by_version: dict[Version, list[UnfinishedVersion]] = {}
    for told in news:
        for each in told.unfinished:
            by_version.setdefault(each.version, []).append(each)
    for version, parts in by_version.items():
        if version in common:
            continue
        of_all = set(range(max(each.world_size for each in parts)))
        there = {rank for each in parts for rank in each.ranks}
        for rank, told in enumerate(news):
            offer = told.availability.get(version)
            if offer is not None and offer.world_size == len(of_all):
                there |= offer.seen | ({rank} if offer.own else set())
        damaged = {rank for each in parts for rank in each.damaged} - there
        whys = list(dict.fromkeys(each.why for each in parts if each.why))
        if there >= of_all and whys:
            never = "can never be" if any(each.unreadable for each in parts) else "cannot be"
            waiting[version] = [f"{version} was captured by every rank, and {never} finished: {'; '.join(whys[:3])}"]
        elif damaged and there | damaged >= of_all:
            lost[version] = [f"{version} was captured and is damaged: {'; '.join(whys[:3])}"]
    return waiting, lost


def _refuse_older(
    request: RestoreRequest, waiting: Mapping[Version, list[str]], hopeless: Container[Version], older: Version | None
) -> None:
    """`RestoreError` if a version that is captured and not finished would be passed over for an older one, or none.

    Those that are `hopeless` can never be finished: trying again is no way on.
    """
    found = [
        version
        for version in waiting
        if (request.newest or _asked(request, version)) and (older is None or older.age() < version.age())
    ]
    if not found:
        return
    newest = max(found, key=Version.age)
    what = f"{waiting[newest][0].rstrip('.')}. Nothing was touched."
    if newest not in hopeless:
        what += " Restore again when that is mended"
    if older is None:
        raise RestoreError(f"{what.rstrip('.')}. To start anew, choose another run folder.")
    name = repr(older.name) if older.step == newest.step else str(older.step)
    way = " Go" if newest in hopeless else ", or go"
    raise RestoreError(f"{what}{way} back to {older} by restore(version={name}).")


def _try_version(
    request: RestoreRequest,
    version: Version,
    shelf: VisibleCopies,
    offers: Sequence[RankAvailability],
    ranks: Ranks,
    obtaining: VersionOpener,
    complaints: dict[Version, list[str]],
) -> Restored | None:
    """Load one version, if every rank can obtain intact shards."""
    copies, told = shelf.copies[version], complaints.setdefault(version, [])
    ways: list[Callable[[], OpenVersion | None]] = []
    if all(offer.own and offer.world_size == ranks.world_size for offer in offers):
        ways.append(lambda: obtaining.own(copies.get(ranks.rank, []), told))
    if all(offer.seen >= set(range(offer.world_size)) for offer in offers):
        ways.append(lambda: obtaining.assembled(copies, offers[0].world_size, ranks, told))
    try:
        for way in ways:
            obtained, fits = _obtain_together(way, ranks)
            if obtained is None:
                continue
            try:
                lost = [rank for rank, fit in enumerate(fits) if fit is None]
                if lost:
                    told.append(f"{version}: no intact shard of rank {', '.join(map(str, lost))}")
                elif all(fits):  # if not, it is cut in another way, and has to be assembled
                    return _load_together(request, obtained, ranks)
            finally:
                obtained.close()
        return None
    finally:
        if not told:
            del complaints[version]


def _obtain_together(
    way: Callable[[], OpenVersion | None], ranks: Ranks
) -> tuple[OpenVersion | None, Sequence[bool | None]]:
    """What this rank has obtained; and of every rank whether that fits its state, None if it has nothing intact.

    An error, which is not a matter of which copy, is one on all ranks: none waits for another.
    """
    obtained: OpenVersion | None = None
    failure: Exception | None = None
    try:
        obtained = way()
    except Exception as error:
        failure = error
    try:
        why_not = "" if failure is None else str(failure) or type(failure).__name__
        told = ranks.gather((why_not, obtained.fits if obtained is not None else None))
        if failure is not None:
            raise failure
        for rank, (why, _) in enumerate(told):
            if why:
                raise RestoreError(f"rank {rank}: {why}")
    except BaseException:
        if obtained is not None:
            obtained.close()
        raise
    return obtained, [fit for _, fit in told]


def _load_together(request: RestoreRequest, obtained: OpenVersion, ranks: Ranks) -> Restored:
    loading = ranks.run_on_all(
        lambda: prepare(request.state, obtained.source, strict=request.strict, where=request.where)
    )
    mine = [(shard.manifest.rank, shard.copy.tier) for shard in obtained.shards if shard.manifest.unverified]
    unverified = sorted({each for told in ranks.gather(mine) for each in told})
    return ranks.run_on_all(lambda: _load(loading, obtained, ranks.rank, unverified))


def _load(loading: PreparedLoad, obtained: OpenVersion, rank: int, unverified: Sequence[tuple[int, str]]) -> Restored:
    """Load what was obtained; `unverified` are rank and tier of the shards of all ranks that are."""
    loading.apply()
    if (gone := obtained.overwritten()) is not None:
        raise RestoreError(f"{gone}: another trainer overwrote it while it was read. Stop that one, and restore again.")
    manifest = obtained.manifest
    left = {line.partition(":")[0] for line in obtained.skipped}
    skipped = (*(line for line in loading.skipped if line.partition(":")[0] not in left), *obtained.skipped)
    for line in skipped:
        _log.warning("rank %d: %s", rank, line)
    if unverified:
        tiers = ", ".join(sorted({tier for _, tier in unverified}))
        whose = ", ".join(str(number) for number in sorted({number for number, _ in unverified}))
        _log.warning(
            "rank %d: %s in tier %s is unverified: the digests of rank %s were taken after a restart, with none from "
            "the time of the capture to compare", rank, manifest.version, tiers, whose,
        )  # fmt: skip
    size = manifest.world_size
    return Restored(manifest.version, obtained.tier, dict(manifest.meta), skipped, size, bool(unverified))


def _refuse_if_lost(
    request: RestoreRequest,
    candidates: list[Version],
    complaints: dict[Version, list[str]],
    news: Sequence[_RankReport],
    ranks: Ranks,
    journal: CatalogueJournal | None,
    lost_captures: Mapping[Version, list[str]],
) -> None:
    """There is nothing to restore; an error, if there should have been."""
    ranks.run_on_all(check_open_files)  # what could not be opened was taken for missing
    told = ranks.gather([line for version in sorted(complaints, key=Version.age) for line in complaints[version]])
    reasons = "; ".join(dict.fromkeys(line for lines in told for line in lines))
    known = sorted({version for each in news for version in each.availability}, key=Version.age, reverse=True)
    if request.version is not None and any(_asked(request, version) for version in (*known, *complaints)):
        raise RestoreError(f"version {request.version} cannot be restored: {reasons}. Nothing was touched.")
    if request.version is not None:
        steps = ", ".join(str(version.step) for version in known[:8])
        raise UsageError(f"there is no version {request.version}. There are {steps or 'none'}.")
    other_size = any(offer.world_size != ranks.world_size for each in news for offer in each.availability.values())
    not_intact = RestoreError(
        f"none of the versions is intact: {reasons}. Nothing was touched. To start anew, choose another run folder."
    )
    if candidates or other_size or lost_captures or any(each.damaged for each in news):
        raise not_intact
    lost = [each.committed for each in news if each.committed is not None]
    if lost:
        newest = max(lost, key=Version.age)
        raise RestoreError(
            f"{newest} was committed, and no version is left that every rank can obtain"
            f"{f' ({reasons})' if reasons else ''}. To start anew, choose another run folder."
        )
    # What is left of a version that every rank had finished is a loss, and not a save that never ended.
    noted = journal.read().shards if journal is not None and complaints else {}
    was_whole = any(_is_whole(notes) for version, notes in noted.items() if version in complaints)
    if any(ranks.gather(was_whole)):
        raise not_intact
    if reasons:  # begun and never complete: as good as never saved
        _log.warning("rank %d: nothing to restore: %s", ranks.rank, reasons)


def _is_whole(notes: Mapping[int, ShardNote]) -> bool:
    """True if the shard of every rank was noted."""
    return set(notes) >= set(range(next(iter(notes.values())).world_size))
