"""What tests of jobs share: launches that do not import torch again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forkserver import JobRunner, Ran


@pytest.fixture(scope="session")
def job_runner() -> Iterator[JobRunner]:
    """One for all tests of a worker."""
    found = JobRunner()
    yield found
    found.close()


@pytest.fixture
def launch(job_runner: JobRunner, tmp_path: Path, shm: Path) -> Callable[..., Ran]:
    """Run a job in a folder of this test: `launch("-n", 4, name="a", arguments=["--epochs", 1])`."""

    def run(*options: object, name: str = "job", **more: object) -> Ran:
        return job_runner.run(tmp_path / name, *options, **more)  # type: ignore[arg-type]

    return run
