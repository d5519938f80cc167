"""Failures that come while the job recovers from another one, and several at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from forkserver import JobRunner, Ran

Launch = Callable[..., Ran]
EPOCH = ["--epochs", 1]


@pytest.fixture(scope="module")
def undisturbed(job_runner: JobRunner, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    ran = job_runner.run(tmp_path_factory.mktemp("undisturbed"), "-n", 4, arguments=EPOCH)
    return {result["state"] for result in ran.results.values()}


@pytest.mark.parametrize(
    ("strategy", "second", "where"),
    [
        ("rollback", "kill rank=0 step=2 phase=agreement", "the first rank, which waits for the decision"),
        pytest.param(
            "rollback", "kill rank=3 step=2 phase=recovery", "a rank that forms the next group", marks=pytest.mark.slow
        ),
        ("rollback", "kill rank=1 step=2 phase=recovery", "the spare that gets the state"),
        pytest.param("rollback", "kill rank=0 step=2 phase=recovery", "the rank that gives it", marks=pytest.mark.slow),
        pytest.param(
            "forward",
            "kill rank=0 step=2 phase=agreement",
            "the first rank, which waits for the decision",
            marks=pytest.mark.slow,
        ),
        ("forward", "kill rank=2 step=2 phase=recovery", "a rank that repairs its gradients"),
        ("forward", "stop rank=0 step=2 phase=recovery", "a rank that stops in the middle of that"),
    ],
    ids=lambda value: value.replace(" ", "-"),
)
def test_a_failure_while_the_job_recovers_is_survived(
    launch: Launch, undisturbed: set[str], strategy: str, second: str, where: str
) -> None:
    ran = launch(
        "-n", 4, "--spares", 2, "--strategy", strategy,
        *(["--heartbeat-timeout", 1] if second.startswith("stop") else []),
        "--fail", "kill rank=1 step=2 bucket=1 at=during", "--fail", second,
        arguments=[*EPOCH, "--await-spare", 5],
    )  # fmt: skip
    assert ran.code == 0, f"{where}: {ran.said}"
    assert len(ran.events("process_lost")) == 2, ran.said
    assert len({result["weights"] for result in ran.results.values()}) == 1
    (books,) = ran.events("epoch")
    assert books["twice"] == 0
    assert books["unused"] == 0
    if strategy == "rollback":
        assert books["lost"] == 0
        exact = {result["state"] for result in ran.results.values()} == undisturbed
        assert exact or ran.events("inexact"), "as undisturbed, or it says why not"


def test_half_of_the_ranks_at_once_and_then_one_more(launch: Launch) -> None:
    ran = launch(
        "-n", 4, "--spares", 1, "--fail", "kill random=2 step=2 bucket=0 at=during", "--fail", "kill rank=0 step=3",
        arguments=[*EPOCH, "--await-spare", 4],
    )  # fmt: skip
    assert ran.code == 0, ran.said
    assert len(ran.results) == 2
    assert len({result["weights"] for result in ran.results.values()}) == 1


def test_all_but_one_are_too_few_and_the_job_stops_with_what_to_do(launch: Launch) -> None:
    ran = launch("-n", 3, "--min-ranks", 2, "--fail", "kill random=2 step=2", arguments=EPOCH)
    assert ran.code == 4, ran.said
    assert "--min-ranks" in ran.stderr
