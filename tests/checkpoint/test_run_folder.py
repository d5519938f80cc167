"""A job is known by its run folder, and no two jobs are taken for each other."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from evergrad.checkpoint.agent.inventory import CompletionLog
from evergrad.checkpoint.run_folder import RunFolder, arena_folder, arenas_root, node_name, remove_orphans, safe_name
from evergrad.checkpoint.version import Version
from evergrad.errors import CheckpointError, EvergradError


def test_a_run_folder_keeps_its_identity(tmp_path: Path) -> None:
    assert RunFolder.open(tmp_path / "r50").id == RunFolder.open(tmp_path / "r50").id
    assert RunFolder.open(tmp_path / "r50").id.startswith("r50-")


def test_a_run_folder_that_was_moved_is_the_same_job(tmp_path: Path) -> None:
    before = RunFolder.open(tmp_path / "r50").id
    (tmp_path / "r50").rename(tmp_path / "elsewhere")
    assert RunFolder.open(tmp_path / "elsewhere").id == before


def test_a_run_folder_under_a_second_name_is_the_same_job(tmp_path: Path) -> None:
    before = RunFolder.open(tmp_path / "r50").id
    (tmp_path / "link").symlink_to(tmp_path / "r50")
    assert RunFolder.open(tmp_path / "link").id == before


def test_a_copy_of_a_run_folder_is_another_job(tmp_path: Path) -> None:
    before = RunFolder.open(tmp_path / "r50").id
    shutil.copytree(tmp_path / "r50", tmp_path / "copy")
    assert RunFolder.open(tmp_path / "copy").id != before
    assert RunFolder.open(tmp_path / "r50").id == before


def test_a_run_folder_that_was_removed_and_made_again_is_another_job(tmp_path: Path) -> None:
    before = RunFolder.open(tmp_path / "r50").id
    shutil.rmtree(tmp_path / "r50")
    assert RunFolder.open(tmp_path / "r50").id != before


def test_ranks_that_start_at_once_agree_on_the_identity(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        assert len({*pool.map(lambda _: RunFolder.open(tmp_path / "r50").id, range(32))}) == 1


def test_no_two_attempts_have_the_same_number(tmp_path: Path) -> None:
    job = RunFolder.open(tmp_path)
    with ThreadPoolExecutor(16) as pool:
        numbers = list(pool.map(lambda _: job.begin_attempt(), range(40)))
    assert sorted(numbers) == list(range(1, 41))
    assert job.latest_attempt() == 40
    assert job.sees_attempt(40)
    assert not job.sees_attempt(41, patience_s=0)


@pytest.mark.parametrize("text", ["", "[]", '{"id": "../up", "schema_version": 1}', '{"id": "x", "schema_version": 9}'])
def test_a_foreign_job_record_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"job\.json"):
        RunFolder.open(tmp_path)


def test_a_file_cannot_be_a_run_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EvergradError, match="cannot be a run folder"):
        RunFolder.open(tmp_path / "file")


def test_the_node_is_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERGRAD_NODE", "n7")
    assert node_name() == "n7"
    assert node_name("n8") == "n8"


def test_names_of_folders_never_meet() -> None:
    texts = ["a", "a/b", "a-b", "a b", "..", ".", "a" * 200, "a" * 201, "ä"]
    names = [safe_name(text) for text in texts]
    assert len(set(names)) == len(texts)
    assert all("/" not in name and name not in (".", "..", "") for name in names)


def test_arenas_of_a_run_folder_that_is_gone_are_removed(tmp_path: Path) -> None:
    gone, stays = RunFolder.open(tmp_path / "gone"), RunFolder.open(tmp_path / "stays")
    for job in (gone, stays):
        (arena_folder(job) / "rank-00000.0.ticket").write_bytes(b"")
        (arena_folder(job) / "rank-00000.0.safetensors").write_bytes(bytes(4096))
    shutil.rmtree(tmp_path / "gone")
    assert remove_orphans() == [gone.id]
    assert not (arenas_root() / gone.id).exists()
    assert (arena_folder(stays) / "rank-00000.0.safetensors").exists()


def test_a_folder_that_others_can_open_is_no_place_for_arenas(tmp_path: Path) -> None:
    job = RunFolder.open(tmp_path)
    arenas_root().mkdir(mode=0o755)
    arenas_root().chmod(0o755)
    with pytest.raises(CheckpointError, match="only user"):
        arena_folder(job)


def test_what_another_node_completed_is_seen(tmp_path: Path) -> None:
    RunFolder.open(tmp_path)
    here, there = CompletionLog(tmp_path, "n0"), CompletionLog(tmp_path, "n1")
    version = Version(10, 1)
    here.note(version, "local", 0, 2)
    assert not here.is_complete(version, "local")
    assert here.missing(version, "local") == [1]
    there.note(version, "local", 1, 2)
    here.refresh()
    assert here.is_complete(version, "local")
    assert here.complete("local") == [version]


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    RunFolder.open(tmp_path)
    here, there = CompletionLog(tmp_path, "n0"), tmp_path / "complete" / "n1.jsonl"
    line = json.dumps(
        {"schema_version": 1, "version": "v0000000010-01", "tier": "local", "rank": 0, "world_size": 1}
    ).encode()
    there.write_bytes(line[:20])
    here.refresh()
    assert here.complete() == []
    there.write_bytes(line + b"\n")
    here.refresh()
    assert here.complete() == [Version(10, 1)]


def test_a_journal_that_was_made_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    RunFolder.open(tmp_path)
    here, there = CompletionLog(tmp_path, "n0"), CompletionLog(tmp_path, "n1")
    for step in range(5):
        there.note(Version(step, 1), "local", 0, 1)
    here.refresh()
    CompletionLog(tmp_path, "n1").note(Version(9, 2), "local", 0, 1)
    here.refresh()
    assert here.complete()[-1] == Version(9, 2)


def test_a_journal_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evergrad.checkpoint.agent.inventory._TOO_LONG", 2000)
    RunFolder.open(tmp_path)
    here, there = CompletionLog(tmp_path, "n0"), CompletionLog(tmp_path, "n1")
    for step in range(200):
        there.note(Version(step, 1), "local", 0, 1)
        if step:
            there.forget(Version(step - 1, 1), "local")
        here.refresh()
    assert (tmp_path / "complete" / "n1.jsonl").stat().st_size < 3000
    assert here.complete()[-1] == Version(199, 1)


def test_the_agent_imports_no_torch() -> None:
    code = "import sys, evergrad.checkpoint.agent.agent; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
