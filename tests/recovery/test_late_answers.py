"""A rank that does not hear that a point was passed goes ahead with those who do, whatever they are at by then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from forkserver import Ran
from sweep import used_twice

LATE = Path(__file__).with_name("late_trainer.py")
STEP = ("--fail", "kill rank=1 step=4 phase=optimizer")
"""Rank 1 dies when all have reached the point of step 4: two pass it, one does not hear of it."""


@pytest.mark.parametrize(
    ("options", "arguments", "late"),
    [
        pytest.param([*STEP], [], "2@4/step", id="rollback"),
        pytest.param([*STEP, "--strategy", "forward"], [], "2@4/step", id="forward"),
        pytest.param([*STEP, "--strategy", "forward", "--spares", 1], [], "0@4/step", id="forward, spare"),
        pytest.param([*STEP, "--batch-policy", "scale_lr"], [], "2@4/step", id="scale_lr"),
        pytest.param([], ["--validate"], "0@6/end", id="end of epoch, validation"),
        pytest.param(["--spares", 1], ["--validate"], "0@6/end", id="end of epoch, validation, spare"),
    ],
)
def test_a_late_rank_goes_ahead_with_the_others(
    launch: Callable[..., Ran],
    monkeypatch: pytest.MonkeyPatch,
    options: list[object],
    arguments: list[str],
    late: str,
) -> None:
    monkeypatch.setenv("EVERGRAD_TEST_LATE", late)
    if late.endswith("end"):
        monkeypatch.setenv("EVERGRAD_TEST_DIES", late.replace("0@", "1@"))
    ran = launch("-n", 4, *options, script=LATE, arguments=arguments)
    assert ran.code == 0, ran.said
    assert "proceed" in {event["verdict"] for event in ran.events("verdict")}
    assert len({result["weights"] for result in ran.results.values()}) == 1
    assert not used_twice(ran)
    assert all(not epoch["unused"] and not epoch["twice"] for epoch in ran.events("epoch"))
