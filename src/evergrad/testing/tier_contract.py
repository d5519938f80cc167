"""What every tier promises, as a test suite that pytest runs over any of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from evergrad.checkpoint.agent.pipeline import DigestModule
from evergrad.checkpoint.arena import Arena, ArenaTicket
from evergrad.checkpoint.capture.capture import ArenaWriter, CapturePlan
from evergrad.checkpoint.restore.shards import Shard
from evergrad.checkpoint.shard_manifest import Manifest
from evergrad.checkpoint.tiers import Copy, Site, Store, Tier, Work, read_tiers
from evergrad.checkpoint.version import Version
from evergrad.errors import TierError


class TierContract:
    """Subclass it, say how to make the tier, and let pytest collect it."""

    def make(self, folder: Path) -> Tier:
        """A tier that keeps what it keeps in or below a folder."""
        raise TypeError(f"{type(self).__name__} must say how to make its tier")

    def _store(self, folder: Path) -> tuple[Store, Site]:
        site = Site("job-1", "n0", folder / "arenas", folder / "run")
        site.arenas.mkdir(exist_ok=True)
        site.run_dir.mkdir(exist_ok=True)
        (tier,) = read_tiers([self.make(folder).to_json()])  # as the agent gets it
        store = tier.store(site)
        store.check()
        return store, site

    def test_its_settings_survive_the_way_to_the_agent(self, tmp_path: Path) -> None:
        """JSON there and back gives the same tier."""
        tier = self.make(tmp_path)
        assert read_tiers([tier.to_json()]) == [tier]
        assert tier.keep >= 1

    def test_nothing_is_found_before_something_was_put(self, tmp_path: Path) -> None:
        """An empty tier is no error."""
        store, _ = self._store(tmp_path)
        assert store.find() == []
        assert store.find(0) == []

    def test_what_was_put_is_found_and_intact(self, tmp_path: Path) -> None:
        """Manifest and bytes are those of the capture."""
        store, site = self._store(tmp_path)
        for rank in (0, 1):
            with capture_shard(site, Version(7, 1), rank) as work:
                store.put(work)
                (copy,) = store.find(rank)
                assert (copy.version, copy.rank) == (Version(7, 1), rank)
                assert _is_intact(copy, float(rank))
        assert sorted(copy.rank for copy in store.find()) == [0, 1]

    def test_putting_the_same_capture_twice_changes_nothing(self, tmp_path: Path) -> None:
        """An agent that was killed before it could say so puts it again."""
        store, site = self._store(tmp_path)
        with capture_shard(site, Version(7, 1), 0) as work:
            store.put(work)
            store.put(work)
            (copy,) = store.find(0)
            assert _is_intact(copy, 0.0)

    def test_without_its_manifest_a_shard_is_not_there(self, tmp_path: Path) -> None:
        """The manifest is what makes it complete; what is left is said to be torn."""
        store, site = self._store(tmp_path)
        with capture_shard(site, Version(7, 1), 0) as work:
            store.put(work)
            (copy,) = store.find(0)
            copy.manifest.unlink()
            assert store.find(0) == []
            assert list(store.torn(0)) == [Version(7, 1)]

    def test_what_was_dropped_is_gone_and_may_be_dropped_again(self, tmp_path: Path) -> None:
        """Dropping one shard leaves the others."""
        store, site = self._store(tmp_path)
        with capture_shard(site, Version(7, 1), 0) as first, capture_shard(site, Version(7, 1), 1) as second:
            store.put(first)
            store.put(second)
            (copy,) = store.find(0)
            store.drop(copy)
            store.drop(copy)
            assert store.find(0) == []
            (other,) = store.find(1)
            assert _is_intact(other, 1.0)

    def test_a_version_after_a_dropped_one_is_intact(self, tmp_path: Path) -> None:
        """Whatever a tier recycles, nothing of the old shard shows."""
        store, site = self._store(tmp_path)
        for step, size in ((1, 5000), (2, 3000), (3, 9000)):
            with capture_shard(site, Version(step, 1), 0, float(step), size) as work:
                store.put(work)
                (copy,) = store.find(0)
                assert _is_intact(copy, float(step))
                store.drop(copy)


@contextmanager
def capture_shard(
    site: Site, version: Version, rank: int, value: float | None = None, size: int = 5000
) -> Iterator[Work]:
    """A small shard in an arena, as a trainer leaves it; every element is `value`, or the rank."""
    arena = Arena.lease(site.arenas, rank, 0)
    assert arena is not None
    state = {"a": torch.full((size,), float(rank) if value is None else value), "step": version.step}
    plan = CapturePlan.of(state)
    arena.reserve(plan.layout.size)
    gathered = plan.gather(state)
    assert arena.buffer is not None
    assert gathered is not None
    header = plan.header(gathered, {})
    assert header is not None
    arena.mark_empty()
    ArenaWriter(plan, arena.buffer).copy(gathered)
    arena.buffer[: len(header)] = header
    ticket = ArenaTicket(0, True, version.step, version.attempt, rank, 2, plan.layout.size, "2026-01-01T00:00:00Z")
    arena.mark_captured(ticket)
    manifest = Manifest(site.job, version, rank, 2, plan.layout.size, 0, ticket.time, "", {}, site.node)
    work = Work(arena.ticket, arena.files, memoryview(arena.buffer), site, manifest)
    DigestModule().run(work)
    try:
        yield work
    finally:
        work.shard.release()
        arena.close()


def _is_intact(copy: Copy, value: float) -> bool:
    with Shard(copy, "job-1") as shard:
        return shard.verify() == [] and bool((shard.tensor("a") == value).all())


# What a tier that all nodes share promises besides: a version is there when it was committed, whole, or not at all.

_RANKS = (0, 1)


class SharedTierContract(TierContract):
    """As `TierContract`, for tiers with `commit`: subclass it, say how to make the tier, and let pytest collect it."""

    def test_what_was_put_is_found_and_intact(self, tmp_path: Path) -> None:
        """Once it was committed: manifest and bytes are those of the capture, for every node."""
        store, site = self._store(tmp_path)
        self._put(store, site, Version(7, 1))
        store.commit(Version(7, 1), 2)
        for seen in (store, self._store(tmp_path)[0]):
            assert sorted((copy.rank, copy.version) for copy in seen.find()) == [(0, Version(7, 1)), (1, Version(7, 1))]
            for rank in _RANKS:
                (copy,) = seen.find(rank)
                assert _is_intact_shared_tier_contract(seen, copy, tmp_path / "fetched", float(rank))
                quick, whole = (seen.read_manifest(copy, digests=digests) for digests in (False, True))
                for name in ("job", "version", "rank", "world_size", "size", "parent", "meta", "encoding"):
                    assert getattr(quick, name) == getattr(whole, name)
                assert whole.digests

    def test_putting_the_same_capture_twice_changes_nothing(self, tmp_path: Path) -> None:
        """Before the commit and after it."""
        store, site = self._store(tmp_path)
        for _ in range(2):
            self._put(store, site, Version(7, 1))
            self._put(store, site, Version(7, 1))
            store.commit(Version(7, 1), 2)
            store.commit(Version(7, 1), 2)
        for copy in store.find():
            assert _is_intact_shared_tier_contract(store, copy, tmp_path / "fetched", float(copy.rank))

    def test_without_its_manifest_a_shard_is_not_there(self, tmp_path: Path) -> None:
        """What is not committed is not found, is known to be begun, and is said to be torn."""
        store, site = self._store(tmp_path)
        with capture_shard(site, Version(7, 1), 0) as work:
            store.put(work)
        assert store.find() == []
        assert [(copy.version, copy.rank) for copy in store.begun()] == [(Version(7, 1), 0)]
        assert store.begun(1) == []
        assert list(store.torn(0)) == [Version(7, 1)]

    def test_a_version_with_a_missing_shard_cannot_be_committed(self, tmp_path: Path) -> None:
        """Whoever thinks that all is there is told what is not."""
        store, site = self._store(tmp_path)
        with capture_shard(site, Version(7, 1), 0) as work:
            store.put(work)
        try:
            store.commit(Version(7, 1), 2)
        except TierError as error:
            assert "rank 1" in str(error)
        else:
            raise AssertionError("committed without the shard of rank 1")
        assert store.find() == []

    def test_what_was_dropped_is_gone_and_may_be_dropped_again(self, tmp_path: Path) -> None:
        """With its first shard the whole version; with the last nothing is left of it."""
        store, site = self._store(tmp_path)
        self._put(store, site, Version(7, 1))
        store.commit(Version(7, 1), 2)
        copies = store.find()
        store.drop(copies[0])
        assert store.find() == []
        assert [copy.rank for copy in self._store(tmp_path)[0].begun()] == [1]
        for copy in (*copies, *copies):
            store.drop(copy)
        assert self._store(tmp_path)[0].find() == []
        assert store.begun() == []
        assert store.torn(0) == {}

    def test_a_version_after_a_dropped_one_is_intact(self, tmp_path: Path) -> None:
        """Whatever a tier recycles, nothing of the old shard shows."""
        store, site = self._store(tmp_path)
        for step, size in ((1, 5000), (2, 3000), (3, 9000)):
            self._put(store, site, Version(step, 1), float(step), size)
            store.commit(Version(step, 1), 2)
            copies = store.find()
            assert len(copies) == len(_RANKS)
            assert all(
                _is_intact_shared_tier_contract(store, copy, tmp_path / "fetched", float(step)) for copy in copies
            )
            for copy in copies:
                store.drop(copy)

    @staticmethod
    def _put(store: Store, site: Site, version: Version, value: float | None = None, size: int = 5000) -> None:
        for rank in _RANKS:
            with capture_shard(site, version, rank, value, size) as work:
                store.put(work)


def _is_intact_shared_tier_contract(store: Store, copy: Copy, folder: Path, value: float) -> bool:
    with Shard(store.fetch(copy, folder), "job-1") as shard:
        return shard.verify() == [] and bool((shard.tensor("a") == value).all())
