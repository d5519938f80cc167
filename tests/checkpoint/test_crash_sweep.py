"""Trainers and agents that are killed after any storage call: what was safe is there, whole, and saving goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from evergrad import _files
from evergrad.testing import StorageCalls
from programs import run_python

PROGRAM = Path(__file__).with_name("crashing.py")
ALL = ("memory+local", "local", "memory")


def swept(folder: Path, victim: str, strides: dict[str, int], *, seconds: float = 100, **more: Any) -> dict[str, Any]:
    """What `crashing.py` saw, for each choice of tiers; its own failure is the test's."""
    plans = [
        {"victim": victim, "tiers": tiers, "first": 1, "stride": stride, "limit": 9999, "launched": True, **more}
        for tiers, stride in strides.items()
    ]
    done = run_python(PROGRAM, folder, *map(json.dumps, plans), timeout=seconds)
    assert done.returncode == 0, done.stderr[-6000:]
    return dict(zip(strides, map(json.loads, done.stdout.splitlines()), strict=True))


def test_a_trainer_may_be_killed_after_any_storage_call(tmp_path: Path) -> None:
    found = swept(tmp_path, "trainer", {"memory+local": 3, "local": 13, "memory": 11})
    assert found["memory+local"]["points"] >= 8
    assert {"nothing", "old", "new"} == set(found["memory+local"]["seen"])


def test_a_trainer_without_agent_may_be_killed_after_any_storage_call(tmp_path: Path) -> None:
    found = swept(tmp_path, "thread", {"memory+local": 11, "local": 37, "memory": 29})
    assert found["memory+local"]["points"] >= 12
    assert {"nothing", "old", "new"} == set(found["memory+local"]["seen"])


@pytest.mark.slow
def test_training_goes_on_when_the_agent_is_killed_after_any_storage_call(tmp_path: Path) -> None:
    found = swept(tmp_path, "agent", {"memory+local": 13, "local": 43, "memory": 23})
    assert found["memory+local"]["points"] >= 10


def test_trainer_and_agent_may_be_killed_together_after_any_storage_call_of_the_agent(tmp_path: Path) -> None:
    found = swept(tmp_path, "both", {"memory+local": 13, "local": 43, "memory": 23})
    assert found["memory+local"]["points"] >= 10
    assert {"nothing", "new"} <= set(found["memory+local"]["seen"])


@pytest.mark.slow
def test_trainer_and_agent_may_be_killed_together_after_any_storage_call_of_the_trainer(tmp_path: Path) -> None:
    found = swept(tmp_path, "couple", {"memory+local": 5, "memory": 13})
    assert {"nothing", "old", "new"} == set(found["memory+local"]["seen"])


def test_a_trainer_may_be_killed_when_it_has_copied_and_not_said_so(tmp_path: Path) -> None:
    found = swept(tmp_path, "copier", dict.fromkeys(("memory+local", "memory"), 1))
    # The fourth is copied while the third may still be on its way.
    assert found["memory"]["points"] == found["memory+local"]["points"] == 5


@pytest.mark.slow
def test_a_trainer_starts_another_agent_by_itself(tmp_path: Path) -> None:
    found = swept(tmp_path, "agent", {"memory+local": 60}, first=30, limit=2, launched=False)
    assert found["memory+local"]["points"] == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tiers", ALL)
@pytest.mark.parametrize(
    ("victim", "least"),
    [("trainer", 20), ("thread", 50), ("agent", 40), ("both", 40), ("couple", 20), ("copier", 5)],
)
def test_every_single_storage_call(victim: str, least: int, tiers: str, tmp_path: Path) -> None:
    found = swept(tmp_path, victim, {tiers: 1}, seconds=500)
    assert found[tiers]["points"] >= least


def test_every_change_of_a_file_system_is_seen_once(tmp_path: Path) -> None:
    with StorageCalls(below=tmp_path) as seen:
        _files.make_folder(tmp_path / "a")
        fd = _files.create(tmp_path / "a" / "b")
        _files.allocate(fd, 10_000)
        _files.write(fd, b"12345", 9_998)
        _files.resize(fd, 5)
        _files.fsync(fd)
        os.close(fd)
        _files.rename(tmp_path / "a" / "b", tmp_path / "c")
        _files.publish(tmp_path / "a" / "d", b"text")
        _files.link(tmp_path / "a" / "d", tmp_path / "e")
        _files.remove(tmp_path / "a" / "d")
        _files.remove_folder(tmp_path / "a")
        _files.make_folder(tmp_path.parent / f"{tmp_path.name}-beside")
    assert [call.number for call in seen.calls] == list(range(1, len(seen.calls) + 1))
    assert [(call.name, call.size) for call in seen.calls] == [
        ("make_folder", 0),
        ("create", 0),
        ("allocate", 10_000),
        ("write", 3),
        ("resize", -9_998),
        ("fsync", 0),
        ("rename", 0),
        *[("create", 0), ("resize", 0), ("write", 4), ("fsync", 0), ("rename", 0), ("fsync_folder", 0)],
        ("link", 0),
        ("remove", -4),
        ("remove_folder", 0),
    ]
    assert seen.calls[3].path == str(tmp_path / "a" / "b")
    assert {call.name for call in seen.calls} == set(_files.CALLS)
    assert _files.rename.__module__ == "evergrad._files"
    assert not hasattr(_files.rename, "__wrapped__")
