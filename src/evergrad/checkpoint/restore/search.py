"""Finding the version to go on with: the newest that every rank can obtain, intact.

Every rank says what it can obtain; all take the newest that all have named. Each then checks the digests of its
nearest copy, and of the next if they are wrong; if one rank has no intact copy, all go back to the version before.
Nothing of the live state is touched before all ranks hold a verified shard that fits.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from evergrad.checkpoint.manifest import Manifest
from evergrad.checkpoint.ranks import Ranks
from evergrad.checkpoint.restore.loading import Loading, prepare
from evergrad.checkpoint.restore.shard import Shard
from evergrad.checkpoint.tiers import Copy, Store
from evergrad.checkpoint.version import Version, VersionRecord
from evergrad.errors import CheckpointError, FormatError, RestoreError, UsageError
from evergrad.state import Where

__all__ = ["Request", "Restored", "list_versions", "restore"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for."""

    state: object
    version: Version | int | None = None
    strict: bool = True
    where: Where | None = None


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored, from where, and what was passed over on the way."""

    version: Version
    tier: str
    meta: dict[str, object]
    skipped: tuple[str, ...] = ()


@dataclass(slots=True)
class _Offer:
    """The copies of this rank's shards, nearest first, by version."""

    copies: dict[Version, list[Copy]] = field(default_factory=dict)
    world_sizes: dict[Version, int] = field(default_factory=dict)
    damaged: dict[Version, str] = field(default_factory=dict)
    torn: dict[Version, str] = field(default_factory=dict)
    committed: Version | None = None


def restore(
    request: Request,
    job: str,
    stores: Sequence[Store],
    ranks: Ranks,
    mapped: Mapping[Path, mmap.mmap],
    committed: Version | None,
) -> Restored | None:
    """Restore the newest version that all ranks can obtain, or the one asked for; None if there is none at all.

    `mapped` are arenas that this process has mapped already, `committed` is the newest version that is known to have
    been complete where it survives a reboot.
    """
    offer = _look(job, stores, ranks.rank)
    offer.committed = committed
    offers = ranks.gather(offer)
    common = set.intersection(*(set(each.copies) for each in offers))
    candidates = [version for version in sorted(common, key=Version.age, reverse=True) if _asked(request, version)]
    candidates = _of_this_size(candidates, [each.world_sizes for each in offers], ranks.world_size)
    complaints: dict[Version, list[str]] = _incomplete(common, offers)
    for version in common:
        if why := offer.damaged.get(version) or offer.torn.get(version):
            complaints[version] = [f"{version}: {why}"]
    for version in candidates:
        restored = _try(request, job, version, offer.copies[version], ranks, complaints, mapped)
        if restored is not None:
            for newer in sorted(complaints, key=Version.age, reverse=True):
                if newer.age() >= version.age():
                    _log.warning("rank %d: %s. Restoring %s.", ranks.rank, "; ".join(complaints[newer]), version)
            return restored
    _nothing(request, candidates, complaints, offers, ranks)
    return None


def list_versions(
    job: str, stores: Sequence[Store], is_complete: Callable[[Version, str], bool], rank: int
) -> list[VersionRecord]:
    """What this rank could restore, newest first, with the tiers that hold all of it."""
    found: dict[Version, tuple[Manifest, list[str]]] = {}
    for store in stores:
        for copy in store.find(rank):
            with suppress(FormatError, OSError):
                manifest = Manifest.read(copy.manifest, digests=False)
                if manifest.job == job and manifest.version == copy.version and is_complete(copy.version, copy.tier):
                    found.setdefault(copy.version, (manifest, []))[1].append(copy.tier)
    return [
        VersionRecord(version, tuple(tiers), manifest.time, manifest.world_size, manifest.size, dict(manifest.meta))
        for version, (manifest, tiers) in sorted(found.items(), key=lambda item: item[0].age(), reverse=True)
    ]


def _look(job: str, stores: Iterable[Store], rank: int) -> _Offer:
    """Every copy of this rank's shards that a manifest vouches for."""
    offer = _Offer()
    for store in stores:
        try:
            copies = store.find(rank)
            torn = store.torn(rank)
        except CheckpointError as error:
            _log.warning("rank %d: %s", rank, error)
            continue
        # What is wrong with a copy matters only where no nearer tier has the version.
        for version, (what, was_complete) in torn.items():
            if version not in offer.copies:
                (offer.damaged if was_complete else offer.torn)[version] = what
        for copy in copies:
            try:
                manifest = Manifest.read(copy.manifest, digests=False)
            except (FormatError, OSError) as error:
                if copy.version not in offer.copies:
                    offer.damaged[copy.version] = str(error)
                continue
            if manifest.job == job:
                offer.copies.setdefault(copy.version, []).append(copy)
                offer.world_sizes[copy.version] = manifest.world_size
    return offer


def _asked(request: Request, version: Version) -> bool:
    asked = request.version
    return asked is None or version == asked or (isinstance(asked, int) and version.step == asked)


def _of_this_size(versions: list[Version], sizes: list[dict[Version, int]], world_size: int) -> list[Version]:
    fitting = [version for version in versions if all(known.get(version) == world_size for known in sizes)]
    if versions and not fitting:
        saved = sizes[0].get(versions[0])
        raise RestoreError(
            f"{versions[0]} was saved by {saved} ranks, and this job has {world_size}: start it with {saved} ranks"
        )
    return fitting


def _incomplete(common: set[Version], offers: Sequence[_Offer]) -> dict[Version, list[str]]:
    """Versions that some rank has at least a part of, and not every rank all, in words."""
    found: dict[Version, list[str]] = {}
    begun = {version for offer in offers for version in (*offer.copies, *offer.damaged, *offer.torn)}
    for version in begun - common:
        reasons = []
        for rank, offer in enumerate(offers):
            if version not in offer.copies:
                why = offer.damaged.get(version) or offer.torn.get(version) or "no shard"
                reasons.append(f"rank {rank}: {why}")
        found[version] = [f"{version} is not whole: {'; '.join(reasons[:3])}"]
    return found


def _try(
    request: Request,
    job: str,
    version: Version,
    copies: list[Copy],
    ranks: Ranks,
    complaints: dict[Version, list[str]],
    mapped: Mapping[Path, mmap.mmap],
) -> Restored | None:
    """Load one version, if every rank has an intact copy of its shard."""
    shard = None
    for copy in copies:
        shard, complaint = _open(copy, job, mapped.get(copy.shard))
        if complaint:
            complaints.setdefault(version, []).append(complaint)
        if shard is not None:
            break
    try:
        intact = ranks.gather(shard is not None)
        if not all(intact):
            if shard is not None:
                lost = ", ".join(str(rank) for rank, good in enumerate(intact) if not good)
                complaints.setdefault(version, []).append(f"{version}: no intact shard of rank {lost}")
            return None
        assert shard is not None
        loading = ranks.together(lambda: prepare(request.state, shard, strict=request.strict, where=request.where))
        return ranks.together(lambda: _load(loading, shard))
    finally:
        if shard is not None:
            shard.close()


def _open(copy: Copy, job: str, mapped: mmap.mmap | None) -> tuple[Shard | None, str]:
    """A copy that is what was captured, or what is wrong with it."""
    where = f"{copy.version} in tier {copy.tier}"
    try:
        shard = Shard(copy, job, mapped)
    except (FormatError, OSError) as error:
        return None, f"{where}: {error}"
    try:
        wrong = shard.verify()
        if not wrong and shard.is_current():
            return shard, ""
        what = f"{wrong[0]}: not what was captured" if wrong else "overwritten meanwhile"
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        complaint = f"{where}: {what}{more}"
    except FormatError as error:
        complaint = f"{where}: {error}"
    shard.close()
    return None, complaint


def _load(loading: Loading, shard: Shard) -> Restored:
    loading.apply()
    if not shard.is_current():
        raise RestoreError(
            f"{shard.copy.shard}: another trainer overwrote it while it was read. Stop that one, and restore again."
        )
    manifest = shard.manifest
    for line in loading.skipped:
        _log.warning("rank %d: %s", manifest.rank, line)
    return Restored(manifest.version, shard.copy.tier, dict(manifest.meta), loading.skipped)


def _nothing(
    request: Request,
    candidates: list[Version],
    complaints: dict[Version, list[str]],
    offers: Sequence[_Offer],
    ranks: Ranks,
) -> None:
    """There is nothing to restore; an error, if there should have been."""
    told = ranks.gather([line for version in sorted(complaints, key=Version.age) for line in complaints[version]])
    reasons = "; ".join(dict.fromkeys(line for lines in told for line in lines))
    known = sorted({version for offer in offers for version in offer.copies}, key=Version.age, reverse=True)
    if request.version is not None and any(_asked(request, version) for version in (*known, *complaints)):
        raise RestoreError(f"version {request.version} cannot be restored: {reasons}. Nothing was touched.")
    if request.version is not None:
        steps = ", ".join(str(version.step) for version in known[:8])
        raise UsageError(f"there is no version {request.version}. There are {steps or 'none'}.")
    if candidates or any(offer.damaged for offer in offers):
        raise RestoreError(
            f"none of the versions is intact: {reasons}. Nothing was touched. To start anew, choose another run folder."
        )
    lost = [offer.committed for offer in offers if offer.committed is not None]
    if lost:
        newest = max(lost, key=Version.age)
        raise RestoreError(
            f"{newest} was committed, and no version is left that every rank can obtain"
            f"{f' ({reasons})' if reasons else ''}. To start anew, choose another run folder."
        )
    if reasons:  # begun and never complete: as good as never saved
        _log.warning("rank %d: nothing to restore: %s", ranks.rank, reasons)
