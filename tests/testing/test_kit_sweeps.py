"""A sweep has every place once, a sample something of everything, and a case fails what breaks a promise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_kit_assertions import epoch, job, weights, without

from evergrad.errors import UsageError
from evergrad.recovery.failures.schedule import Failure
from evergrad.testing import Case, JobRun, Script, sweep

KILL = Failure.parse("kill rank=1 step=3")
CASE = Case(Script("train.py"), "rollback", 1, KILL)


def test_a_sweep_is_every_combination_once() -> None:
    cases = sweep(
        "train.py", "--lr", 0.1, ranks=3, steps=[0, 4], phases=["forward"], buckets=[0],
        kinds=["kill", "exception times=2"], strategies=["rollback", "forward"], spares=[0, 1],
    )  # fmt: skip
    assert len(cases) == len({str(case) for case in cases}) == 3 * 2 * (1 + 3) * 2 * 2 * 2
    assert cases[0].job.arguments == ("--lr", "0.1")
    assert "forward, 1 spare, exception rank=2 step=4 bucket=0 at=after times=2" in [*map(str, cases)]


def test_a_sample_is_the_same_for_a_seed_and_covers_what_it_can() -> None:
    cases = sweep("train.py", ranks=4, steps=[0, 1, 2], buckets=[0], strategies=["rollback", "forward"], spares=[0, 1])
    sample = cases.sample(7, seed=3)
    assert [*sample] == [*cases.sample(7, seed=3)] != [*cases.sample(7, seed=4)]
    assert len({(case.failure.phase, case.failure.bucket, case.failure.at) for case in sample}) == 7
    assert {case.failure.rank for case in sample} == {0, 1, 2, 3}
    assert {case.failure.step for case in sample} == {0, 1, 2}
    assert {(case.strategy) for case in sample} == {"rollback", "forward"}
    assert [*cases.sample(10_000)] == [*cases]


@pytest.mark.parametrize(
    "wrong",
    [{"phases": ["sideways"]}, {"kinds": ["kil"]}, {"strategies": ["hope"]}, {"steps": []}, {"strategies": []}],
)
def test_a_sweep_of_what_cannot_be_is_refused_at_once(wrong: dict[str, list[str]]) -> None:
    with pytest.raises(UsageError):
        sweep("train.py", **wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        sweep("train.py").sample(0)


def broken(how: str) -> JobRun:
    match how:
        case "hung":
            return job(timed_out=True)
        case "failed":
            return job(exit_code=1)
        case "left over":
            return job(summary={"never_happened": ["kill rank=1 step=3"]})
        case "nobody died":
            return job(summary={"failures_survived": 0})
        case "apart":
            return without("weight_digests", job(), weights(0, 0), weights(2, 1, "cc"))
        case "lost":
            return without("epoch", job(), epoch(0), epoch(1, lost=1, used_once=9, uses=11))
        case "twice":
            return without("epoch", job(), epoch(0), epoch(1, twice=1, uses=13))
        case "short":
            return without("epoch", job(), epoch(0))
        case "not exact":
            return without("weight_digests", job(), weights(0, 0, "cc"), weights(2, 1, "cc"))
        case "other buffers":
            return without("weight_digests", job(), weights(0, 0), weights(2, 1, state="ee"))
    raise AssertionError(how)


HOWS = ("hung", "failed", "left over", "nobody died", "apart", "lost", "twice", "short", "not exact", "other buffers")


@pytest.mark.parametrize("how", HOWS)
def test_a_case_fails_whatever_breaks_a_promise(how: str) -> None:
    CASE.judge(job(), job())
    with pytest.raises(AssertionError):
        CASE.judge(broken(how), job())


def test_a_case_demands_no_more_than_was_promised() -> None:
    lost = broken("lost")
    other = without("weight_digests", lost, weights(0, 0, "cc"), weights(2, 1, "cc"))
    replace(CASE, strategy="forward").judge(replace(other, summary={**lost.summary, "exact": False}), job())
    left = without("epoch", job(), epoch(0), epoch(1, unused=1, used_once=9, uses=11))
    with pytest.raises(AssertionError, match="accounted for"):
        replace(CASE, strategy="forward").judge(left, job())
    slow = Failure.parse("exception rank=1 step=3")
    replace(CASE, failure=slow).judge(without("epoch", job()), without("epoch", job()))
