"""Failures of the gentler kinds in whole jobs: what only takes time changes nothing."""

from __future__ import annotations

from collections.abc import Callable

from forkserver import Ran


def weights(ran: Ran, *, code: int = 0) -> set[str]:
    assert ran.code == code, ran.said
    return {result["weights"] for result in ran.results.values()}


def test_slow_stopped_and_cut_ranks_change_nothing_but_the_time(launch: Callable[..., Ran]) -> None:
    failures = ["slow rank=1 step=2 by=3 for=0.5 phase=forward", "stop node=0 step=4 for=0.2"]
    failures += ["cut rank=1 step=6 bucket=0 at=during for=0.3"]
    options = [word for failure in failures for word in ("--fail", failure)]
    ran = launch("-n", 2, *options, name="disturbed")
    assert weights(ran) == weights(launch("-n", 2, name="undisturbed"))
    (slowed,) = ran.events("slowdown_injected")
    assert (slowed["rank"], slowed["by"], slowed["for_s"]) == (1, 3.0, 0.5)
    (stopping,) = ran.events("stop_injected")
    assert sorted(stopping["ranks"]) == [0, 1]
    assert [event["rank"] for kind in ("network_cut_injected", "network_restored") for event in ran.events(kind)] == [
        1,
        1,
    ]
    assert len(ran.events("plan")) == 1, "nobody was lost"


def test_a_kill_at_a_time_is_survived(launch: Callable[..., Ran]) -> None:
    ran = launch("-n", 3, "--fail", "kill rank=1 time=0")
    assert len(weights(ran)) == 1
    (killing,) = ran.events("kill_injected")
    assert killing["ranks"] == [1]
    assert [len(event["members"]) for event in ran.events("plan")] == [3, 2]


def test_a_soft_error_hits_the_model_that_trains(launch: Callable[..., Ran]) -> None:
    ran = launch("-n", 2, "--fail", "flip rank=1 step=3 where=model/** fault=setvalue:value=5 seed=2")
    assert len(weights(ran, code=6)) == 2, "one rank trains on with another model than the rest"
    (flipped,) = ran.events("bit_flip_injected")
    assert (flipped["rank"], flipped["after"], flipped["seed"]) == (1, 5.0, 2)
