"""What a tier that all nodes share promises besides: a version is there when it was committed, whole, or not at all."""

from __future__ import annotations

from pathlib import Path

from evergrad.checkpoint.restore.shard import Shard
from evergrad.checkpoint.tiers import Copy, Site, Store
from evergrad.checkpoint.version import Version
from evergrad.errors import TierError
from evergrad.testing.tier_contract import TierContract, captured

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
                assert _is_intact(seen, copy, tmp_path / "fetched", float(rank))
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
            assert _is_intact(store, copy, tmp_path / "fetched", float(copy.rank))

    def test_without_its_manifest_a_shard_is_not_there(self, tmp_path: Path) -> None:
        """What is not committed is not found, is known to be begun, and is said to be torn."""
        store, site = self._store(tmp_path)
        with captured(site, Version(7, 1), 0) as work:
            store.put(work)
        assert store.find() == []
        assert [(copy.version, copy.rank) for copy in store.begun()] == [(Version(7, 1), 0)]
        assert store.begun(1) == []
        assert list(store.torn(0)) == [Version(7, 1)]

    def test_a_version_with_a_missing_shard_cannot_be_committed(self, tmp_path: Path) -> None:
        """Whoever thinks that all is there is told what is not."""
        store, site = self._store(tmp_path)
        with captured(site, Version(7, 1), 0) as work:
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
            assert all(_is_intact(store, copy, tmp_path / "fetched", float(step)) for copy in copies)
            for copy in copies:
                store.drop(copy)

    @staticmethod
    def _put(store: Store, site: Site, version: Version, value: float | None = None, size: int = 5000) -> None:
        for rank in _RANKS:
            with captured(site, version, rank, value, size) as work:
                store.put(work)


def _is_intact(store: Store, copy: Copy, folder: Path, value: float) -> bool:
    with Shard(store.fetch(copy, folder), "job-1") as shard:
        return shard.verify() == [] and bool((shard.tensor("a") == value).all())
