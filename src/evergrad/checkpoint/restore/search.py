"""Finding the version to go on with: the newest that every rank can obtain, intact.

Every rank says what it can obtain; all take the newest that all have named. Each then checks the digests of its
nearest copy, and of the next if they are wrong; if one rank has no intact copy, all go back to the version before.
Nothing of the live state is touched before all ranks hold verified shards that fit. A newer version that all ranks have
captured, and that could not be finished, is an error: going back behind it, or starting anew, is the user's decision.

A rank takes its own shard where it can. With another number of ranks, another cut of the tensors, or a version that
only a shared tier has, the state is assembled from several (`obtaining.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from evergrad.checkpoint.arena import check_open_files
from evergrad.checkpoint.catalogue.journal import Journal, ShardNote
from evergrad.checkpoint.events import Unfinished
from evergrad.checkpoint.finish.completion import Completion
from evergrad.checkpoint.manifest import Manifest
from evergrad.checkpoint.ranks import Ranks
from evergrad.checkpoint.restore.loading import Loading, prepare
from evergrad.checkpoint.restore.obtaining import Obtained, Obtaining
from evergrad.checkpoint.restore.offers import Offer, Shelf, look
from evergrad.checkpoint.tiers import Store
from evergrad.checkpoint.version import Version, VersionRecord
from evergrad.errors import EvergradError, RestoreError, UsageError
from evergrad.state import Where

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
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
class _News:
    """What a rank tells all others."""

    offers: Mapping[Version, Offer]
    damaged: Mapping[Version, str]
    torn: Mapping[Version, str]
    committed: Version | None
    unfinished: Sequence[Unfinished]


def restore(
    request: Request,
    job: str,
    stores: Mapping[str, Store],
    ranks: Ranks,
    obtaining: Obtaining,
    committed: Version | None,
    journal: Journal | None = None,
    unfinished: Sequence[Unfinished] = (),
) -> Restored | None:
    """Restore the newest version that all ranks can obtain, or the one asked for; None if there is none at all.

    `committed` is the newest version that is known to have been complete where it survives a reboot; the `journal` of
    the job tells which ones were complete in any tier. `unfinished` is what this node knows of captured versions.
    """
    shelf = ranks.together(lambda: look(job, stores, ranks.rank, ranks.world_size))
    news = ranks.gather(_News(shelf.offers, shelf.damaged, shelf.torn, committed, unfinished))
    size = ranks.world_size
    seen = {version for each in news for version in each.offers}
    common = {v for v in seen if all(v in each.offers and each.offers[v].obtainable(size) for each in news)}
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
        restored = _try(request, version, shelf, [each.offers[version] for each in news], ranks, obtaining, complaints)
        if restored is not None:
            for newer in sorted(complaints, key=Version.age, reverse=True):
                if newer.age() >= version.age():
                    _log.warning("rank %d: %s. Restoring %s.", ranks.rank, "; ".join(complaints[newer]), version)
            return restored
    _refuse_older(request, waiting, hopeless, None)
    _nothing(request, candidates, complaints, news, ranks, journal, lost)
    return None


def list_versions(
    job: str, stores: Mapping[str, Store], completion: Completion, rank: int, journal: Journal
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


def _asked(request: Request, version: Version) -> bool:
    asked = request.version
    return asked is None or version == asked or (isinstance(asked, int) and version.step == asked)


def _incomplete(common: set[Version], news: Sequence[_News], world_size: int) -> dict[Version, list[str]]:
    """Versions that some rank has at least a part of, and not every rank can obtain, in words."""
    found: dict[Version, list[str]] = {}
    begun = {version for each in news for version in (*each.offers, *each.damaged, *each.torn)}
    for version in begun - common:
        reasons = []
        for rank, each in enumerate(news):
            offer = each.offers.get(version)
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
    common: set[Version], news: Sequence[_News]
) -> tuple[dict[Version, list[str]], dict[Version, list[str]]]:
    """Versions that every rank had captured and that not every rank can obtain: those that could not be put into a
    tier, and those whose arenas are damaged, both in words. All ranks get the same.
    """
    waiting: dict[Version, list[str]] = {}
    lost: dict[Version, list[str]] = {}
    by_version: dict[Version, list[Unfinished]] = {}
    for told in news:
        for each in told.unfinished:
            by_version.setdefault(each.version, []).append(each)
    for version, parts in by_version.items():
        if version in common:
            continue
        of_all = set(range(max(each.world_size for each in parts)))
        there = {rank for each in parts for rank in each.ranks}
        for rank, told in enumerate(news):
            offer = told.offers.get(version)
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
    request: Request, waiting: Mapping[Version, list[str]], hopeless: Container[Version], older: Version | None
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


def _try(
    request: Request,
    version: Version,
    shelf: Shelf,
    offers: Sequence[Offer],
    ranks: Ranks,
    obtaining: Obtaining,
    complaints: dict[Version, list[str]],
) -> Restored | None:
    """Load one version, if every rank can obtain intact shards."""
    copies, told = shelf.copies[version], complaints.setdefault(version, [])
    ways: list[Callable[[], Obtained | None]] = []
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


def _obtain_together(way: Callable[[], Obtained | None], ranks: Ranks) -> tuple[Obtained | None, Sequence[bool | None]]:
    """What this rank has obtained; and of every rank whether that fits its state, None if it has nothing intact.

    An error, which is not a matter of which copy, is one on all ranks: none waits for another.
    """
    obtained: Obtained | None = None
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


def _load_together(request: Request, obtained: Obtained, ranks: Ranks) -> Restored:
    loading = ranks.together(
        lambda: prepare(request.state, obtained.source, strict=request.strict, where=request.where)
    )
    mine = [(shard.manifest.rank, shard.copy.tier) for shard in obtained.shards if shard.manifest.unverified]
    unverified = sorted({each for told in ranks.gather(mine) for each in told})
    return ranks.together(lambda: _load(loading, obtained, ranks.rank, unverified))


def _load(loading: Loading, obtained: Obtained, rank: int, unverified: Sequence[tuple[int, str]]) -> Restored:
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


def _nothing(
    request: Request,
    candidates: list[Version],
    complaints: dict[Version, list[str]],
    news: Sequence[_News],
    ranks: Ranks,
    journal: Journal | None,
    lost_captures: Mapping[Version, list[str]],
) -> None:
    """There is nothing to restore; an error, if there should have been."""
    ranks.together(check_open_files)  # what could not be opened was taken for missing
    told = ranks.gather([line for version in sorted(complaints, key=Version.age) for line in complaints[version]])
    reasons = "; ".join(dict.fromkeys(line for lines in told for line in lines))
    known = sorted({version for each in news for version in each.offers}, key=Version.age, reverse=True)
    if request.version is not None and any(_asked(request, version) for version in (*known, *complaints)):
        raise RestoreError(f"version {request.version} cannot be restored: {reasons}. Nothing was touched.")
    if request.version is not None:
        steps = ", ".join(str(version.step) for version in known[:8])
        raise UsageError(f"there is no version {request.version}. There are {steps or 'none'}.")
    other_size = any(offer.world_size != ranks.world_size for each in news for offer in each.offers.values())
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
