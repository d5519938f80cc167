"""Fixtures for pytest: `pytest_plugins = ["evergrad.testing.plugin"]` in the conftest.py at the root of your tests.

def test_a_lost_rank_is_survived(run_job):
    run = run_job("train.py", ranks=4, failures="kill rank=1 step=3")
    run.assert_survived(1)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evergrad.testing import jobs


@pytest.fixture(scope="session")
def evergrad_forkserver() -> Iterator[None]:
    """The process that launches jobs ends with the tests."""
    yield
    jobs.close_forkserver()


@pytest.fixture
def run_job(tmp_path: Path, evergrad_forkserver: None) -> jobs.RunJob:
    """`evergrad.testing.run_job`, with a folder of this test for every job: `tmp_path/job-1`, `job-2` …"""
    count = 0

    def run(script: Any, *arguments: object, folder: Any = None, **settings: Any) -> Any:
        nonlocal count
        if folder is None:
            count += 1
            folder = tmp_path / f"job-{count}"
        return jobs.run_job(script, *arguments, folder=folder, **settings)

    return run
