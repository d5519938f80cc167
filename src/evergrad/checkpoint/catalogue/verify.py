"""Opening copies of a version's shards, and checking every digest of every one of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from evergrad.checkpoint.catalogue.catalogue import CatalogueEntry
from evergrad.checkpoint.catalogue.survey import FoundShard, Survey
from evergrad.checkpoint.restore.shards import Shard
from evergrad.errors import EvergradError, RestoreError
from evergrad.records import Json


@dataclass(frozen=True, slots=True)
class CopyVerdict:
    """What became of checking one copy of one rank's shard."""

    tier: str
    rank: int
    """−1 where it is the record of the whole version that is wrong."""
    place: str
    verdict: Literal["ok", "failed", "unknown"]
    why: str = ""

    def to_json(self) -> dict[str, Json]:
        """As `evergrad checkpoints verify --json` prints it."""
        return {"tier": self.tier, "rank": self.rank, "place": self.place, "verdict": self.verdict, "why": self.why}


@contextmanager
def opened(found: FoundShard, job: str, folder: Path) -> Iterator[Shard]:
    """A copy as a mapped shard; one that is in no file system is brought into the folder first."""
    with Shard(found.store.fetch(found.copy, folder), job) as shard:
        yield shard


def check_version(
    entry: CatalogueEntry,
    seen: Survey,
    *,
    tier: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[CopyVerdict]:
    """Check every digest of every copy that can be reached, in all tiers or in one.

    A rank of which there is no copy at all is `failed`, or `unknown` if its node cannot be seen from here.
    """
    verdicts = []
    for found in seen.shards.get(entry.version, []):
        if tier in (None, found.copy.tier):
            verdicts.append(_check(found, entry.job))
            if progress is not None:
                progress(entry.size_bytes // max(entry.world_size, 1))
    there = seen.ranks(entry.version, tier)
    for kind, why in seen.damaged.get(entry.version, {}).items():
        if tier in (None, kind):
            verdicts.append(CopyVerdict(kind, -1, "", "failed", why))
            there |= {found.copy.rank for found in seen.begun.get(entry.version, []) if found.copy.tier == kind}
    if entry.state == "damaged" and tier in (None, "memory"):
        verdicts.append(CopyVerdict("memory", -1, "", "failed", entry.damaged))
    for rank in sorted(set(range(entry.world_size)) - there):
        node = entry.nodes.get(rank, "")
        if seen.unseen or (node and node not in seen.nodes):
            verdicts.append(
                CopyVerdict(tier or "", rank, "", "unknown", f"node {node or '?'} cannot be seen from here")
            )
        else:
            verdicts.append(CopyVerdict(tier or "", rank, "", "failed", "there is no shard of this rank"))
    return verdicts


@contextmanager
def open_intact(entry: CatalogueEntry, seen: Survey, ranks: Sequence[int], folder: Path) -> Iterator[dict[int, Shard]]:
    """An intact copy of each rank's shard, every digest checked; `RestoreError` if a rank has none."""
    shards: dict[int, Shard] = {}
    try:
        for rank in ranks:
            shards[rank] = _open_one(entry, seen, rank, folder)
        yield shards
        for shard in shards.values():
            if not shard.is_current():
                raise RestoreError(f"{shard.copy.shard}: a trainer overwrote it while it was read. Try again.")
    finally:
        for shard in shards.values():
            shard.close()


def _open_one(entry: CatalogueEntry, seen: Survey, rank: int, folder: Path) -> Shard:
    copies = [found for found in seen.shards.get(entry.version, []) if found.copy.rank == rank]
    # Files first: nobody writes over them. What has to be fetched comes last.
    copies.sort(key=lambda found: (bool(found.copy.url), found.copy.use is not None))
    complaints = []
    for found in copies:
        try:
            shard = Shard(found.store.fetch(found.copy, folder), entry.job)
        except (EvergradError, OSError) as error:
            complaints.append(f"tier {found.copy.tier}: {error}")
            continue
        try:
            wrong = shard.complaint()
        except BaseException as error:
            shard.close()
            if not isinstance(error, (EvergradError, OSError)):
                raise
            wrong = str(error)
        if not wrong:
            return shard
        shard.close()
        complaints.append(f"tier {found.copy.tier}: {wrong}")
    complaints += [f"tier {kind}: {why}" for kind, why in seen.damaged.get(entry.version, {}).items()]
    complaints += [f"tier memory: {entry.damaged}"] if entry.state == "damaged" else []
    raise RestoreError(
        f"{entry.version.name}: no intact shard of rank {rank}: {'; '.join(complaints) or 'none can be seen from here'}"
    )


def _check(found: FoundShard, job: str) -> CopyVerdict:
    copy, place = found.copy, found.copy.url or str(found.copy.shard)
    try:
        with tempfile.TemporaryDirectory(prefix="evergrad-") as folder, opened(found, job, Path(folder)) as shard:
            wrong = shard.complaint()
            if not shard.is_current():
                return CopyVerdict(copy.tier, copy.rank, place, "unknown", "a trainer overwrote it meanwhile")
            if shard.manifest.unverified and not wrong:
                why = "its digests were taken after a restart, with none from the time of the capture to compare"
                return CopyVerdict(copy.tier, copy.rank, place, "unknown", why)
            return CopyVerdict(copy.tier, copy.rank, place, "failed" if wrong else "ok", wrong)
    except (EvergradError, OSError) as error:
        return CopyVerdict(copy.tier, copy.rank, place, "failed", str(error))
