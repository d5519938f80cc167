"""Tests under a real Slurm: only when they are asked for (`make test-slurm`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, why_not


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slurm: needs Slurm and root; run by `make test-slurm`")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Not even looked at by other runs."""
    return None if "slurm" in str(config.option.markexpr) else True


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four nodes, named eg0 to eg3."""
    if why := why_not():
        pytest.skip(why)
    with Cluster(tmp_path_factory.mktemp("slurm"), nodes=4) as found:
        yield found
