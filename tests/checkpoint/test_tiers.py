"""Memory and local disk keep what every tier promises."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import evergrad as eg
from evergrad.checkpoint.tiers import Tier, read_tiers
from evergrad.checkpoint.version import Version
from evergrad.errors import UsageError
from evergrad.testing import TierContract, capture_shard


class TestMemory(TierContract):
    def make(self, folder: Path) -> Tier:
        return eg.Memory()


class TestLocal(TierContract):
    def make(self, folder: Path) -> Tier:
        return eg.Local(folder / "disk")


class TestLocalInTheRunFolder(TierContract):
    def make(self, folder: Path) -> Tier:
        return eg.Local()


class TestLocalOnTmpfs(TierContract):
    """A file system without O_DIRECT."""

    def make(self, folder: Path) -> Tier:
        return eg.Local(Path(os.environ["EVERGRAD_SHM"]) / "disk")


def test_a_retired_shard_is_written_over(tmp_path: Path) -> None:
    contract = TestLocal()
    store, site = contract._store(tmp_path)
    inodes = set()
    for step in (1, 2, 3, 4):
        with capture_shard(site, Version(step, 1), 0) as work:
            store.put(work)
        (copy,) = store.find(0)
        inodes.add(copy.shard.stat().st_ino)
        store.drop(copy)
    assert len(inodes) == 1
    spares = [path for path in (tmp_path / "disk").rglob("*") if path.is_file()]
    assert [path.name for path in spares] == [".spare-rank-00000"]


@pytest.mark.parametrize("spec", [{}, {"kind": "tape"}, {"kind": "local", "speed": 3}])
def test_a_tier_that_does_not_exist_is_refused_by_name(spec: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"tape|None|speed"):
        read_tiers([spec])
