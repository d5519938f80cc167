"""Whole jobs that lose a rank: whoever survives goes on, all alike, and with a spare as if nothing had been.

A part of the sweep over all ranks, places of a step, strategies and spares; `make sweep` runs all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from forkserver import JobRunner, Ran
from sweep import Case, cases

ALL = list(cases())
PART = [ALL[number * 25 % len(ALL)] for number in range(8)]


@pytest.fixture(scope="session")
def undisturbed(job_runner: JobRunner, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The same job without any failure."""
    ran = job_runner.run(tmp_path_factory.mktemp("undisturbed"), "-n", 4)
    assert ran.code == 0, ran.said
    return ran


def test_the_part_of_the_sweep_has_something_of_everything() -> None:
    assert {case.rank for case in PART} == {0, 1, 2, 3}
    assert {(case.strategy, case.spares) for case in PART} == {(case.strategy, case.spares) for case in ALL}
    assert len({case.site for case in PART}) >= 7


@pytest.mark.parametrize("case", PART, ids=str)
def test_a_lost_rank_is_survived(
    case: Case, job_runner: JobRunner, undisturbed: Ran, shm: Path, tmp_path: Path
) -> None:
    assert case.wrong(case.run(job_runner, tmp_path), undisturbed) is None


def test_two_ranks_lost_at_once_are_replaced_and_the_result_says_what_is_not_exact(
    launch: Callable[..., Ran], undisturbed: Ran, tmp_path: Path
) -> None:
    failures = ("--fail", "kill rank=1 step=5 bucket=0", "--fail", "kill rank=2 step=5 bucket=0")
    saving = ["--checkpoints", tmp_path / "checkpoints", "--every", 3]
    ran = launch("-n", 4, "--spares", 2, *failures, arguments=saving)
    assert ran.code == 0, ran.said
    assert len({result["weights"] for result in ran.results.values()}) == 1
    # Rank 2 kept what rank 1 had, and died with it; rank 3 lives, and has what rank 2 had.
    assert {event["rank"]: event["exact"] for event in ran.events("rank_joined")} == {1: False, 2: True}
    assert "what only rank 1 had (its random numbers, its buffers) comes from its save of step 3" in ran.stderr


def test_a_second_failure_right_after_the_first_leaves_the_others_going(launch: Callable[..., Ran]) -> None:
    failures = ("--fail", "kill rank=0 step=4 phase=forward", "--fail", "kill rank=1 step=4 bucket=1")
    ran = launch("-n", 4, *failures)
    assert ran.code == 0, ran.said
    # When the step is done again, by three ranks, the second of them is lost.
    assert [event["members"] for event in ran.events("plan")] == [[0, 1, 2, 3], [1, 2, 3], [1, 3]]
    assert len({result["weights"] for result in ran.results.values()}) == 1
    assert all(not epoch["unused"] and not epoch["twice"] and not epoch["lost"] for epoch in ran.events("epoch"))
