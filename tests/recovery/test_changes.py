"""Planned changes: a rank leaves when it is asked to, others join between two steps, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from forkserver import Ran

Launch = Callable[..., Ran]


def weights(ran: Ran) -> set[str]:
    return {result["weights"] for result in ran.results.values()}


def assert_whole(ran: Ran, epochs: int) -> None:
    """Every sample of every epoch was used once."""
    books = ran.events("epoch")
    assert [row["epoch"] for row in books] == list(range(epochs)), ran.said
    for row in books:
        assert (row["used_once"], row["lost"], row["unused"], row["twice"]) == (row["units"], 0, 0, 0), row


@pytest.mark.parametrize("strategy", ["rollback", pytest.param("forward", marks=pytest.mark.slow)])
def test_a_rank_that_is_asked_to_leave_leaves_between_two_steps(launch: Launch, strategy: str) -> None:
    ran = launch("-n", 4, "--strategy", strategy, "--fail", "leave rank=2 step=3", arguments=["--epochs", 2])
    assert ran.code == 0, ran.said
    assert not ran.events("process_lost")
    (plan,) = [event for event in ran.events("plan") if event["generation"] == 1]
    assert plan["left"] == [2]
    assert plan["kind"] == "join"
    assert sorted(ran.results) == [0, 1, 3]
    assert_whole(ran, 2)
    assert len(weights(ran)) == 1
    assert "has left" in ran.stderr


def test_a_spare_takes_the_place_of_who_leaves_and_nothing_is_different(launch: Launch) -> None:
    undisturbed = launch("-n", 3, name="undisturbed", arguments=["--epochs", 2])
    ran = launch("-n", 3, "--spares", 1, "--fail", "leave rank=0 step=2", arguments=["--epochs", 2, "--await-spare", 3])
    assert ran.code == 0, ran.said
    assert sorted(ran.results) == [1, 2, 3]
    assert_whole(ran, 2)
    assert weights(ran) == weights(undisturbed)
    assert {result["state"] for result in ran.results.values()} == {
        result["state"] for result in undisturbed.results.values()
    }


def test_a_job_that_lost_a_rank_grows_back_when_a_new_one_waits(launch: Launch) -> None:
    ran = launch(
        "-n", 3, "--respawn", "--fail", "kill rank=1 step=2",
        arguments=["--epochs", 4, "--await-change", 1],
    )  # fmt: skip
    assert ran.code == 0, ran.said
    sizes = [len(event["members"]) for event in ran.events("plan")]
    assert sizes == [3, 2, 3], ran.said
    assert sorted(ran.results) == [0, 2, 3]
    assert_whole(ran, 4)
    assert len(weights(ran)) == 1


def test_a_job_grows_beyond_what_it_began_with_if_it_may(launch: Launch) -> None:
    ran = launch(
        "-n", 2, "--spares", 1, "--max-ranks", 3,
        arguments=["--epochs", 4, "--await-change", 0],
    )  # fmt: skip
    assert ran.code == 0, ran.said
    assert [len(event["members"]) for event in ran.events("plan")][-1] == 3
    assert sorted(ran.results) == [0, 1, 2]
    assert_whole(ran, 4)
    assert len(weights(ran)) == 1


def test_all_leave_together_with_a_last_checkpoint_and_the_next_run_goes_on_there(
    launch: Launch, tmp_path: Path
) -> None:
    checkpoints = ["--epochs", 2, "--checkpoints", tmp_path / "ck", "--every", 1000]
    undisturbed = launch("-n", 2, name="undisturbed", arguments=["--epochs", 2])
    first = launch("-n", 2, "--fail", "leave random=2 step=4", name="first", arguments=checkpoints)
    assert (first.code, first.results) == (75, {}), first.said
    left = first.events("rank_left")
    assert {event["step"] for event in left} == {5}
    second = launch("-n", 2, name="second", arguments=checkpoints)
    assert second.code == 0, second.said
    assert [event["step"] for event in second.events("restored")] == [5, 5]
    assert weights(second) == weights(undisturbed)
