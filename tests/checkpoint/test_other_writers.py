"""Journals of other writers tell of versions that were retired since: nobody waits for those, and nobody is warned."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from small_job import until

import evergrad as eg
from evergrad.checkpoint import Version
from evergrad.checkpoint.tiers import persistent
from evergrad.checkpoint.tiers.persistent import PersistentStore
from evergrad.errors import RestoreError
from living_agents import agents_of

SECONDS = 60.0
OTHERS = [("another node", True, True), ("another node", False, True), ("another node", True, False)]
OTHERS += [("another node", False, False), ("this node", True, False), ("this node", False, True)]
"""Where versions were saved, and whether with an agent; whether one restores them."""


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((300,), float(step)), "step": step}


def tiers(folder: Path, kinds: str) -> list[Any]:
    made = {
        "memory": eg.Memory(),
        "local": eg.Local(folder / "disk"),
        "persistent": eg.Persistent(str(folder / "shared")),
    }
    return [made[kind] for kind in kinds.split("+")]


def checkpointer(folder: Path, kinds: str, *, agent: bool, node: str = "this node") -> eg.Checkpointer:
    return eg.Checkpointer(folder / "run", tiers=tiers(folder, kinds), agent=agent, node=node, linger_s=0.1)


def saved(folder: Path, shm: Path, kinds: str, *, agent: bool, node: str, steps: range = range(1, 7)) -> None:
    """Save some steps, of which the persistent tier keeps the last two; the agent has left."""
    with checkpointer(folder, kinds, agent=agent, node=node) as ck:
        for step in steps:
            ck.save(step, state(step)).wait("persistent", timeout=SECONDS)
    until(lambda: not agents_of(shm))


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that this process commits in persistent tiers, also those that it cannot commit."""
    found: list[int] = []
    commit = PersistentStore.commit

    def noted(store: PersistentStore, version: Version, world_size: int) -> None:
        found.append(version.step)
        commit(store, version, world_size)

    monkeypatch.setattr(PersistentStore, "commit", noted)
    monkeypatch.setattr(persistent, "_PATIENCE_S", 0.1)
    return found


def agents_said(folder: Path) -> str:
    return "".join(path.read_text() for path in (folder / "run" / "agents").glob("*.log"))


@pytest.mark.parametrize("kinds", ["persistent", "memory+local+persistent"])
@pytest.mark.parametrize(("node", "writer", "reader"), OTHERS)
def test_versions_that_another_writer_retired_are_not_waited_for(
    node: str, writer: bool, reader: bool, kinds: str, tmp_path: Path, shm: Path, commits: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    saved(tmp_path, shm, kinds, agent=writer, node=node)
    assert {entry.name for entry in (tmp_path / "shared").glob("v*")} == {"v0000000005-01", "v0000000006-01"}
    commits.clear()
    with checkpointer(tmp_path, kinds, agent=reader) as ck:
        live = state(0)
        assert ck.restore(live) == 6
        assert live["step"] == 6
        assert {*commits} <= {6}, "a version that is gone was to be committed"
        for step in (7, 8):  # a warning would be an error
            ck.save(step, state(step)).wait("persistent", timeout=SECONDS)
        assert ck.restore(live) == 8
    assert [step for step in commits if step != 6] == ([] if reader else [7, 8])
    assert "not committed" not in caplog.text + agents_said(tmp_path)


@pytest.mark.parametrize("reader", [True, False])
def test_the_newest_version_that_another_node_completed_before_a_crash_is_committed(
    reader: bool, tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, shm, "persistent", agent=False, node="another node", steps=range(1, 4))
    with monkeypatch.context() as patch, checkpointer(tmp_path, "persistent", agent=False, node="another node") as ck:
        patch.setattr(PersistentStore, "commit", lambda *_: None)
        ck.save(4, state(4)).wait("persistent", timeout=SECONDS)
    commit = tmp_path / "shared" / "v0000000004-02" / "COMMIT.json"
    assert commit.with_name("rank-00000.json").exists()
    assert not commit.exists()
    with checkpointer(tmp_path, "persistent", agent=reader) as ck:
        live = state(0)
        assert ck.restore(live) == 4
        assert live["step"] == 4
    assert commit.exists()


@pytest.mark.parametrize("reader", [True, False])
def test_a_persistent_tier_that_was_removed_by_hand_is_one_error_and_delays_no_save(
    reader: bool, tmp_path: Path, shm: Path, commits: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, shm, "persistent", agent=True, node="another node")
    shutil.rmtree(tmp_path / "shared")
    with checkpointer(tmp_path, "persistent", agent=reader) as ck:
        live = state(0)
        with pytest.raises(RestoreError, match=r"step 6 .*v0000000006-01: nothing of it is there\.") as caught:
            ck.restore(live)
        assert "\n" not in str(caught.value)
        assert live["step"] == 0
        for step in (7, 8):
            ck.save(step, state(step)).wait("persistent", timeout=SECONDS)
        assert ck.restore(live) == 8
    assert commits == ([] if reader else [6, 7, 8])
    assert (caplog.text + agents_said(tmp_path)).count("not committed") == 1
