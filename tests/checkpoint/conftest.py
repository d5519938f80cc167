"""Every test has shared memory of its own, and no agent outlives it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from living_agents import end_agents


@pytest.fixture(autouse=True)
def shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in shared memory that only this test uses."""
    root = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="evergrad-test-", dir=root))
    monkeypatch.setenv("EVERGRAD_SHM", str(folder))
    monkeypatch.setenv("EVERGRAD_LINGER", "0.3")
    monkeypatch.delenv("EVERGRAD_NODE", raising=False)
    yield folder
    end_agents(folder)
    shutil.rmtree(folder, ignore_errors=True)
