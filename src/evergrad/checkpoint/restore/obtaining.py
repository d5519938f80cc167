"""Getting at a version's bytes: one rank's own shard, or as many ranks' as its state is made of.

A copy in a shared tier is first fetched into a folder of the node. A copy whose digests do not hold is passed over for
the next one.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evergrad.checkpoint.capture.dtensor import Wanted, can_be_spread, declared, known, local_of, stateful_paths
from evergrad.checkpoint.manifest import Manifest
from evergrad.checkpoint.placement import Placements
from evergrad.checkpoint.ranks import Ranks
from evergrad.checkpoint.restore.assembled import Assembled, needs
from evergrad.checkpoint.restore.filling import Source
from evergrad.checkpoint.restore.objects import live_tensors
from evergrad.checkpoint.restore.resizing import Resize, own_tensors, own_values, refuse, resize
from evergrad.checkpoint.restore.shard import Shard, fetch_intact
from evergrad.checkpoint.tiers import Copy, Store
from evergrad.errors import DamagedFile, EvergradError
from evergrad.state import Skeleton, Where


@dataclass(slots=True)
class Obtained:
    """A version as something that can be loaded from: verified, and mapped until it is closed."""

    source: Source
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
class Obtaining:
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
    _wanted: Wanted | None = None

    def own(self, copies: Sequence[Copy], told: list[str]) -> Obtained | None:
        """This rank's own shard, from the nearest copy that is intact."""
        for copy in copies:
            shard = self._open(copy, None, told)
            if shard is None:
                continue
            if shard.manifest.elsewhere:  # a part of it is in other ranks' shards
                shard.close()
                continue
            saved = Placements.from_json(shard.manifest.placements).sharded
            whole = not saved and not can_be_spread()  # then nobody has to look at tens of thousands of tensors
            return Obtained(shard, [shard], fits=whole or self._room().fits(saved))
        return None

    def assembled(
        self, copies: Mapping[int, Sequence[Copy]], saved_size: int, ranks: Ranks, told: list[str]
    ) -> Obtained | None:
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
    ) -> Obtained | None:
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
            source = Assembled(shards, base, self._room())
            values = own_values(shards) if differ else []
            skipped = self._resize(source, shards, tensors, values, len(manifests), ranks)
            source.check()
            order = [shards[base], *(shard for rank, shard in shards.items() if rank != base)]
            obtained = Obtained(source, order, skipped=skipped)
            shards = {}
            return obtained
        finally:
            for shard in shards.values():
                shard.close()

    def _resize(
        self,
        source: Assembled,
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

    def _room(self) -> Wanted:
        """The pieces that the live state has room for."""
        if self._wanted is None:
            self._wanted = Wanted(self.state, live_tensors(self.state, None))
        return self._wanted

    def _live_placements(self) -> Placements:
        leaves = live_tensors(self.state, None)
        local = {path: local_of(leaf) for path, leaf in leaves.items()}
        return declared(self.replicated, local, Skeleton(None)).merged(known(self.state, leaves))
