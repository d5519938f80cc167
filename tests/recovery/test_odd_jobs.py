"""Places at which it is easy to go wrong: changes, notices and checks that meet one another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from evergrad.testing import JobRun, run_job

SCRIPT = Path(__file__).parent / "odd_trainer.py"


def odd(what: str, *arguments: object, folder: Path, **how: Any) -> JobRun:
    how["options"] = [
        "--heartbeat-timeout",
        30,
        *how.get("options", ()),
    ]  # a busy machine is no reason to be taken for dead
    return run_job(SCRIPT, what, *map(str, arguments), folder=folder / "job", **{"timeout": 60.0, **how})


def test_a_spare_that_joins_between_epochs_is_not_found_to_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERGRAD_WAIT_FOR_SPARES", "2")
    ran = odd("dies between epochs", "--guard", 4, "--epochs", 2, folder=tmp_path, ranks=2, spares=1)
    ran.assert_finished()
    ran.assert_survived(1)
    ran.assert_equal_weights()


def test_a_job_of_one_rank_grows_into_one_training(tmp_path: Path) -> None:
    grows = {"ranks": 1, "spares": 1, "options": ["--max-ranks", 2]}
    ran = odd("nothing", "--await-change", "--epochs", 3, folder=tmp_path, **grows)
    ran.assert_finished()
    assert len(ran.weights) == 2
    ran.assert_equal_weights()


def test_a_planned_change_sends_nobody_back_to_a_checkpoint(tmp_path: Path) -> None:
    ran = odd(
        "nothing", "--checkpoints", "{folder}/ck", "--every", 5, "--await-change", "--samples", 200,
        folder=tmp_path, ranks=2, spares=1, strategy="restart", options=["--max-ranks", 3],
    )  # fmt: skip
    ran.assert_finished()
    assert not any(event["restart"] for event in ran.events("plan"))
    assert len(ran.weights) == 3


@pytest.mark.parametrize("saves", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_notices_that_come_one_after_the_other_let_all_leave_in_good_order(tmp_path: Path, saves: bool) -> None:
    more = ["--checkpoints", "{folder}/ck"] if saves else []
    ran = odd("asked one after the other", *more, folder=tmp_path, ranks=2)
    assert ran.exit_code == 75, ran.stderr
    assert not ran.events("process_lost"), ran.stderr
    assert [event["reason"] for event in ran.events("rank_left")] == [
        "the others go on without it",
        "all ranks were asked to",
    ]


@pytest.mark.slow
def test_who_leaves_a_job_that_is_too_small_then_leaves_all_the_same(tmp_path: Path) -> None:
    ran = odd(
        "one is asked", "--checkpoints", "{folder}/ck", "--every", 2, "--pause", 0.05, folder=tmp_path, ranks=2,
        options=["--min-ranks", 2],
    )  # fmt: skip
    ran.assert_finished()
    assert "Traceback" not in ran.stderr
    assert not ran.events("process_lost")


def test_one_rank_alone_heeds_a_notice_too(tmp_path: Path) -> None:
    ran = odd("alone and asked", "--checkpoints", "{folder}/ck", "--every", 100, folder=tmp_path, ranks=1)
    assert ran.exit_code == 75, ran.stderr
    (left,) = ran.events("rank_left")
    assert left["step"] == 6


def test_a_rank_that_dies_as_all_leave_does_not_start_the_job_again(tmp_path: Path) -> None:
    ran = odd("dies as it saves", "--checkpoints", "{folder}/ck", "--every", 100, folder=tmp_path, ranks=2)
    assert ran.exit_code == 75, ran.stderr
    assert not ran.events("process_spawned")


def test_processes_that_the_script_has_forked_can_be_ended(tmp_path: Path) -> None:
    ran = odd("ends a process", folder=tmp_path, ranks=2)
    ran.assert_finished()
    assert re.findall(r"ended with (\S+)", ran.stdout) == ["-15", "-15"]
    assert not ran.events("leave_requested")


def test_a_forward_pass_after_the_step_is_no_corruption(tmp_path: Path) -> None:
    ran = odd("looks at the loss", "--guard", 4, folder=tmp_path, ranks=3)
    ran.assert_finished()
    assert ran.events("guard_check")
    assert not ran.events("corruption_found")


def test_a_job_whose_loaders_only_know_their_own_place_does_not_grow(tmp_path: Path) -> None:
    ran = odd("own place", "--pause", 0.1, folder=tmp_path, ranks=2, spares=1, options=["--max-ranks", 3])
    ran.assert_finished()
    samples = re.findall(r"sample (\d+)", ran.stdout)
    assert len(samples) == len(set(samples)) == 24


def test_a_job_whose_ranks_always_differ_again_ends_and_says_so(tmp_path: Path) -> None:
    ran = odd(
        "differs again and again", "--checkpoints", "{folder}/ck", "--every", 4, "--guard", 4, "--samples", 200,
        folder=tmp_path, ranks=2,
    )  # fmt: skip
    assert ran.exit_code == 1, ran.stderr
    assert "5 times to v0000000008" in ran.stderr


def test_who_has_closed_may_take_its_time(tmp_path: Path) -> None:
    ran = odd("works on after it", folder=tmp_path, ranks=2, options=["--hang-timeout", "1.5", "--warn-after", "1"])
    ran.assert_finished()
    assert not ran.events("process_lost")
