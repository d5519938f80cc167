"""The guard in a job: a flip on one rank is found, named, healed; and what is suspicious is done again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from forkserver import Ran

Launch = Callable[..., Ran]
EPOCH = ["--epochs", 1]


@pytest.fixture(scope="module")
def undisturbed(job_runner: object, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return job_runner.run(tmp_path_factory.mktemp("undisturbed"), "-n", 4, arguments=[*EPOCH, "--guard", 2])  # type: ignore[attr-defined]


def ends(ran: Ran, what: str = "weights") -> set[str]:
    return {result[what] for result in ran.results.values()}


def test_a_guard_changes_nothing_and_finds_nothing_where_nothing_is_wrong(launch: Launch, undisturbed: Ran) -> None:
    unguarded = launch("-n", 4, arguments=EPOCH)
    assert undisturbed.code == 0, undisturbed.said
    assert ends(unguarded, "state") == ends(undisturbed, "state")
    checks = undisturbed.events("guard_check")
    assert [(check["step"], check["status"]) for check in checks] == [(2, "ok"), (4, "ok"), (6, "ok")][: len(checks)]
    assert len(checks) >= 2
    assert not undisturbed.events("step_suspicious")


@pytest.mark.parametrize(
    ("where", "rank"),
    [
        ("model/4.weight", 1),
        ("optimizer/state/2/exp_avg", 3),
        ("optimizer/state/0/step", 2),
        ("model/1.running_var", 0),
    ],
)
def test_a_flip_on_one_rank_is_found_named_and_healed(launch: Launch, undisturbed: Ran, where: str, rank: int) -> None:
    fault = f"flip rank={rank} step=3 phase=optimizer where={where} bits=mantissa"
    ran = launch("-n", 4, "--fail", fault, arguments=[*EPOCH, "--guard", 2])
    assert ran.code == 0, ran.said
    assert ran.events("bit_flip_injected")
    found = ran.events("corruption_found")  # what the optimizer has wrong it has put into the weights by then
    assert where in {each["path"] for each in found}
    assert {(each["rank"], each["step"], each["healed"]) for each in found} == {(rank, 4, True)}
    assert ends(ran) == ends(undisturbed)
    assert ends(ran, "state") == ends(undisturbed, "state"), "as if it had never been"


def test_a_wild_gradient_is_noticed_before_the_step_and_the_step_done_again(launch: Launch) -> None:
    """The flip comes before the forward pass: without the guard it would be in every rank's weights."""
    arguments = ["--epochs", 3, "--guard", 50]
    undisturbed = launch("-n", 3, name="undisturbed", arguments=arguments)
    fault = "flip rank=1 step=12 phase=forward where=model/8.weight bits=exponent-msb"
    ran = launch("-n", 3, "--fail", fault, arguments=arguments)
    assert ran.code == 0, ran.said
    assert ran.events("step_suspicious"), ran.said
    (found,) = ran.events("corruption_found")
    assert (found["path"], found["rank"], found["healed"]) == ("model/8.weight", 1, True)
    assert ends(ran) == ends(undisturbed)
    assert ends(ran, "state") == ends(undisturbed, "state")


def test_without_a_majority_all_go_back_to_what_was_verified(launch: Launch, tmp_path: Path) -> None:
    arguments = ["--epochs", 2, "--guard", 2, "--checkpoints", tmp_path / "ck", "--every", 4]
    undisturbed = launch("-n", 2, name="undisturbed", arguments=["--epochs", 2])
    fault = "flip rank=1 step=5 phase=optimizer where=model/0.weight bits=exponent"
    ran = launch("-n", 2, "--fail", fault, arguments=arguments)
    assert ran.code == 0, ran.said
    assert "no majority" in ran.events("guard_check")[2]["reason"], ran.said
    assert {event["version"][:11] for event in ran.events("rollback_to_version")} == {"v0000000004"}
    assert [event["step"] for event in ran.events("restored") if event["step"]] == [4, 4]
    assert ends(ran) == ends(undisturbed)


def test_without_a_majority_or_a_version_the_job_stops_and_says_so(launch: Launch) -> None:
    fault = "flip rank=1 step=3 phase=optimizer where=model/0.weight bits=exponent"
    ran = launch("-n", 2, "--fail", fault, arguments=[*EPOCH, "--guard", 2])
    assert ran.code == 2, ran.said
    assert "model/0.weight" in ran.stderr
    assert "no version to go back to" in ran.stderr


def test_a_rank_lost_at_a_check_is_survived(launch: Launch, undisturbed: Ran) -> None:
    """The spare that takes its place comes to the check that all others repeat."""
    ran = launch(
        "-n", 4, "--spares", 1,
        "--fail", "kill rank=2 step=4 phase=data", "--fail", "kill rank=1 step=5 phase=optimizer",
        arguments=[*EPOCH, "--guard", 2, "--await-spare", 4],
    )  # fmt: skip
    assert ran.code == 0, ran.said
    assert {check["status"] for check in ran.events("guard_check")} == {"ok"}
    assert len(ends(ran)) == 1
