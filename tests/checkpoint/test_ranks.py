"""Jobs of several ranks, on one node or several: real processes, a real gloo group."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evergrad.cli import main
from programs import run_python

PROGRAM = Path(__file__).with_name("ranked.py")


def run(scenario: str, world_size: int, nodes: int, folder: Path) -> None:
    log = folder / "output.txt"
    done = run_python(PROGRAM, scenario, world_size, nodes, folder, output=log)
    assert done.returncode == 0, log.read_text()


ONE = pytest.param(1, marks=pytest.mark.slow)
"""All ranks on one node, which is the easier case."""


@pytest.mark.parametrize("nodes", [ONE, 2])
def test_every_rank_gets_its_own_state_back(tmp_path: Path, nodes: int) -> None:
    run("restore", 4, nodes, tmp_path)


def test_the_process_group_may_be_made_after_the_checkpointer(tmp_path: Path) -> None:
    run("late group", 2, 1, tmp_path)


@pytest.mark.parametrize("nodes", [ONE, 2])
def test_a_version_that_one_rank_never_saved_is_visible_to_none(tmp_path: Path, nodes: int) -> None:
    run("death", 2, nodes, tmp_path)


@pytest.mark.parametrize("nodes", [ONE, 3])
def test_if_one_rank_has_no_intact_shard_all_go_back_together(tmp_path: Path, nodes: int) -> None:
    run("corruption", 3, nodes, tmp_path)


def test_another_number_of_ranks_is_refused_in_words(tmp_path: Path) -> None:
    run("world size", 3, 1, tmp_path)


def test_a_mismatch_on_one_rank_touches_no_rank(tmp_path: Path) -> None:
    run("mismatch", 2, 1, tmp_path)


def test_a_run_folder_that_is_not_shared_is_noticed(tmp_path: Path) -> None:
    run("not shared", 2, 2, tmp_path)


@pytest.mark.parametrize("nodes", [ONE, 2])
def test_nothing_is_committed_before_the_slowest_rank_has_delivered(tmp_path: Path, nodes: int) -> None:
    run("lag", 2, nodes, tmp_path)


@pytest.mark.parametrize("nodes", [ONE, 2])
def test_without_agents_the_same_holds(tmp_path: Path, nodes: int) -> None:
    run("threads", 2, nodes, tmp_path)


@pytest.mark.parametrize("nodes", [ONE, 2])
def test_a_rank_that_cannot_save_keeps_no_other_waiting(tmp_path: Path, nodes: int) -> None:
    run("failure", 2, nodes, tmp_path)


def test_another_process_group_is_another_attempt(tmp_path: Path) -> None:
    run("new group", 2, 1, tmp_path)


def test_a_job_that_lost_a_disk_does_not_start_anew_by_itself(tmp_path: Path) -> None:
    run("lost disk", 2, 2, tmp_path)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_version_that_is_unverified_on_one_rank_is_so_for_all(
    tmp_path: Path, nodes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run("digests of one", 2, nodes, tmp_path)
    folder = tmp_path / "run"

    def listed() -> list[bool]:
        capsys.readouterr()
        assert main(["checkpoints", "ls", str(folder), "--json"]) == 0
        return [row["unverified"] for row in json.loads(capsys.readouterr().out)["versions"]]

    assert listed() == [True]
    for journal in folder.glob("catalogue/*.jsonl"):
        journal.unlink()
    assert listed() == [True], "by the manifests alone"
