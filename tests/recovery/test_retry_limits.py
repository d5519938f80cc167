"""When a job is given up: what comes back every time is no accident."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evergrad.recovery import coordinator
from evergrad.recovery.coordinator import RetryLimits
from evergrad.recovery.membership import MembershipPlan

FIRST = MembershipPlan(0, (0, 1))


def test_generations_that_come_to_no_point_are_enough_only_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "_MAX_FUTILE_GENERATIONS", 3)
    job, again = RetryLimits(0), MembershipPlan(1, (0, 1))
    for _ in range(2):
        assert job.limit_reached(FIRST, again) == ""
        assert job.limit_reached(FIRST, again) == ""
        assert job.limit_reached(FIRST, replace(again, dead=(1,))) == "", "somebody was lost: this is another matter"
    assert job.limit_reached(FIRST, again) == ""
    assert job.limit_reached(FIRST, again) == ""
    assert job.limit_reached(FIRST, again) == "3 generations in a row came to no point; the last"


def test_a_job_goes_back_to_one_version_a_few_times_and_to_another_as_often() -> None:
    job, further = RetryLimits(0), replace(FIRST, point=1)
    for _ in range(coordinator._MAX_RETURNS_TO_VERSION):
        for version in ("v10", "v20"):
            assert job.limit_reached(FIRST, replace(further, version=version)) == ""
    objection = job.limit_reached(FIRST, replace(further, version="v10"))
    assert objection == "the job has gone back 5 times to v10, and its ranks differ again"


def test_restarts_are_used_up() -> None:
    job = RetryLimits(1)
    assert job.no_restart == ""
    job.restarted()
    assert job.no_restart == "1 of 1 were used"
    assert RetryLimits(0).no_restart == "0 of 0 were used"
