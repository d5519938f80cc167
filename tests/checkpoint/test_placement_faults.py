"""One rank fares differently from the others: none waits for it, and none gets another state than the rest."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from programs import run_python

PROGRAM = Path(__file__).with_name("placement_faults.py")
Results = dict[str, str]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    """How every scenario ended: all in one run."""
    folder = tmp_path_factory.mktemp("ranks")
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    shm = tempfile.mkdtemp(prefix="evergrad-test-", dir=root)
    log = folder / "output.txt"
    try:
        done = run_python(PROGRAM, folder, env={**os.environ, "EVERGRAD_SHM": shm}, output=log)
        assert done.returncode == 0, log.read_text()
        yield json.loads((folder / "results.json").read_text())
    finally:
        shutil.rmtree(shm, ignore_errors=True)


def test_one_rotten_copy_is_replaced_by_another_though_that_leaves_tensors_to_other_ranks(results: Results) -> None:
    assert results["rotten copy"] == ""


def test_another_jobs_record_in_the_place_of_a_shards_is_passed_over(results: Results) -> None:
    assert results["misplaced record"] == ""


def test_notes_that_are_no_json_on_one_rank_fail_that_version_on_all_and_no_later_one(results: Results) -> None:
    assert results["notes"] == ""


def test_what_was_each_ranks_own_inside_a_list_is_left_alone(results: Results) -> None:
    assert results["lists"] == ""


def test_whatever_resize_gives_on_one_rank_all_hear_of_it(results: Results) -> None:
    assert results["odd answers"] == ""


def test_two_nodes_may_commit_the_same_version_at_once(results: Results) -> None:
    assert results["two nodes"] == ""


def test_two_nodes_may_commit_the_same_version_at_once_from_processes_with_one_number(results: Results) -> None:
    if results["same numbers"].startswith("skip: "):
        pytest.skip(f"no process namespaces here: {results['same numbers'].splitlines()[0]}")
    assert results["same numbers"] == ""


def test_the_last_version_is_committed_when_all_ranks_have_closed(results: Results) -> None:
    assert results["close"] == ""
