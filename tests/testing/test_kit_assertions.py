"""Each assertion on a job passes a sound one, and fails, in words that help, what it is there to find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evergrad.recovery.elastic_sampler import SampleAccounting
from evergrad.testing import JobRun, StuckProcess
from evergrad.timeline import Event

SUMMARY = {
    "outcome": "finished",
    "message": "",
    "failures_survived": 1,
    "exact": True,
    "inexact": "",
    "never_happened": [],
}


def event(kind: str, who: str = "launcher", **fields: Any) -> Event:
    return Event(0.0, 0.0, who, kind, fields)


def weights(uid: int, rank: int, weights: str = "aa", state: str = "bb", steps: int = 8) -> Event:
    about = {"rank": rank, "uid": uid, "generation": 1, "steps": steps}
    return event("weight_digests", f"uid {uid}", **about, weights=weights, state=state)


def epoch(number: int, **changes: int) -> Event:
    books = SampleAccounting(10)
    books.record_used(0, 12)  # two of padding
    row = {name: value for name, value in books.summary().to_json().items() if name != "schema_version"}
    return event("epoch", "uid 0", epoch=number, step=4 * (number + 1), **row | changes)


def job(*events: Event, **changes: Any) -> JobRun:
    """A job of two ranks, of which one was lost, and a spare; with other events if some are given."""
    timeline = events or (
        event("plan", members=[0, 1]),
        event("process_exited", uid=1, code=-9),
        event("plan", members=[0, 2]),
        epoch(0),
        epoch(1),
        weights(0, 0),
        weights(2, 1),
        event("process_exited", uid=0, code=0),
        event("process_exited", uid=2, code=0),
    )
    known = {"exit_code": 0, "stdout": "out\n", "stderr": "last words\n", "timeout": 60.0, "folder": Path("/tmp/job")}
    return JobRun(timeline=timeline, summary=SUMMARY | changes.pop("summary", {}), **known | changes)


def without(kind: str, run: JobRun, *more: Event) -> JobRun:
    """Without the events of a kind; with others in their place."""
    left = [one for one in run.timeline if one.event != kind]
    return replace(run, timeline=[*left, *more])


def refused(act: Callable[[], None]) -> str:
    with pytest.raises(AssertionError) as caught:
        act()
    said = str(caught.value)
    assert "--- the end of stderr:\nlast words\n" in said
    assert said.endswith("--- all of it: /tmp/job")
    return said


def all_of(run: JobRun) -> list[Callable[[], None]]:
    return [
        run.assert_no_hang,
        run.assert_finished,
        run.assert_failures_happened,
        run.assert_equal_weights,
        run.assert_no_sample_lost,
        run.assert_no_sample_repeated,
        run.assert_samples_accounted_for,
        lambda: run.assert_survived(1),
        lambda: run.assert_same_result(job(), state=True),
    ]


def test_a_sound_job_passes_everything() -> None:
    for act in all_of(job()):
        act()
    assert {rank: one.uid for rank, one in job().weights.items()} == {0: 0, 1: 2}
    assert sorted(job().sample_counts) == [0, 1]


def test_a_job_that_hung_passes_nothing_and_says_who_and_where() -> None:
    stuck = [
        StuckProcess(0, "rank 0", "waiting", "File train.py, line 9 in all_reduce"),
        StuckProcess(3, "rank 1", "stopped"),
    ]
    for act in all_of(job(timed_out=True, stuck=stuck, exit_code=1)):
        said = refused(act)
        assert "expected that the job ends by itself within 60 s, found still there: rank 0 (uid 0, waiting)" in said
        assert "rank 1 (uid 3, stopped)" in said
        assert "--- rank 0, where it was:\nFile train.py, line 9 in all_reduce" in said


def test_stacks_that_the_job_recorded_itself_are_shown_where_there_are_no_others() -> None:
    run = job(event("hang", "uid 1", stack="line 7 in forward"), timed_out=True)
    assert "--- uid 1, where it was:\nline 7 in forward" in refused(run.assert_no_hang)
    run = job(event("process_lost", uid=3, rank=2, stack="line 8 in backward"), timed_out=True)
    assert "--- rank 2, where it was:\nline 8 in backward" in refused(run.assert_no_hang)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"exit_code": 4, "summary": {"outcome": "too-few", "message": "0 of 2 left"}}, "exit code 4: 0 of 2 left"),
        ({"exit_code": -9, "summary": {"outcome": "no end"}}, "exit code -9"),
        ({"summary": {"outcome": "interrupted", "message": "SIGTERM"}}, "SIGTERM"),
    ],
)
def test_a_job_that_did_not_finish_fails_but_it_did_not_hang(changes: dict[str, Any], found: str) -> None:
    run = job(**changes)
    run.assert_no_hang()
    for act in (
        run.assert_finished,
        run.assert_equal_weights,
        run.assert_no_sample_lost,
        run.assert_samples_accounted_for,
    ):
        assert found in refused(act)


def test_more_or_fewer_losses_than_expected_fail_and_name_what_never_happened() -> None:
    run = job(summary={"failures_survived": 0, "never_happened": ["kill rank=1 step=99"]})
    run.assert_survived(0)
    assert "expected 1, found 0\nnever happened: 'kill rank=1 step=99'" in refused(lambda: run.assert_survived(1))
    assert "expected 2, found 1" in refused(lambda: job().assert_survived(2))


def test_a_failure_that_never_happened_or_that_nobody_knows_of_fails() -> None:
    assert "'kill rank=1'" in refused(job(summary={"never_happened": ["kill rank=1"]}).assert_failures_happened)
    assert "nobody knows" in refused(replace(job(), summary={}).assert_failures_happened)


def test_weights_that_differ_between_ranks_fail() -> None:
    run = without("weight_digests", job(), weights(0, 0), weights(2, 1, "cc"))
    assert "0: 'aa after 8 steps', 1: 'cc after 8 steps'" in refused(run.assert_equal_weights)


def test_weights_that_were_not_recorded_are_not_equal() -> None:
    for left in ([], [weights(0, 0)], [weights(0, 0), weights(1, 1)]):
        assert "does the script call eg.join" in refused(without("weight_digests", job(), *left).assert_equal_weights)
    assert "of 0 ranks" in refused(without("plan", job()).assert_equal_weights)


def test_weights_of_a_rank_that_was_lost_or_left_or_closed_twice_do_not_count() -> None:
    run = without("weight_digests", job(), weights(0, 0), weights(1, 1, "cc"), weights(2, 1), weights(2, 1, "dd"))
    run.assert_equal_weights()
    assert run.weights.keys() == {0, 1}


@pytest.mark.parametrize("changes", [{"lost": 2, "used_once": 8}, {"unused": 2, "used_once": 8}, {"used_once": 9}])
def test_lost_samples_fail(changes: dict[str, int]) -> None:
    run = without("epoch", job(), epoch(0), epoch(1, **changes))
    said = refused(run.assert_no_sample_lost)
    assert "expected none lost in epoch 1, found 10 units:" in said


def test_what_the_loader_drops_is_not_lost() -> None:
    without("epoch", job(), epoch(0, dropped=2, used_once=8)).assert_no_sample_lost()


@pytest.mark.parametrize("changes", [{"twice": 1, "uses": 13}, {"uses": 13}])
def test_repeated_samples_fail(changes: dict[str, int]) -> None:
    run = without("epoch", job(), epoch(0, **changes), epoch(1))
    assert "expected none repeated in epoch 0" in refused(run.assert_no_sample_repeated)
    run.assert_no_sample_lost()


def test_samples_that_went_with_a_rank_are_accounted_for_and_those_that_were_left_are_not() -> None:
    without("epoch", job(), epoch(0, lost=2, used_once=8, uses=10)).assert_samples_accounted_for()
    left = without("epoch", job(), epoch(0, unused=2, used_once=8, uses=10))
    assert "expected every one accounted for in epoch 0" in refused(left.assert_samples_accounted_for)


def test_books_that_are_missing_fail() -> None:
    for name in ("assert_no_sample_lost", "assert_no_sample_repeated", "assert_samples_accounted_for"):
        assert "no books on the timeline" in refused(getattr(without("epoch", job()), name))
        gap = without("epoch", job(), epoch(0), epoch(2))
        assert "those of epochs [0, 2]" in refused(getattr(gap, name))
        assert "3 epochs, found those of epochs [0, 1]" in refused(lambda name=name: getattr(job(), name)(epochs=3))
        getattr(job(), name)(epochs=2)


def test_an_epoch_that_was_done_again_has_its_last_books() -> None:
    run = without("epoch", job(), epoch(0, unused=2, used_once=8), epoch(0))
    run.assert_no_sample_lost(epochs=1)


def test_another_result_than_undisturbed_fails_and_repeats_what_the_job_says_of_it() -> None:
    other = without("weight_digests", job(), weights(0, 0, "cc"), weights(2, 1, "cc"))
    assert "expected cc, as undisturbed" in refused(lambda: job().assert_same_result(other))
    inexact = job(summary={"exact": False, "inexact": "by forward"})
    assert "not as without failures: by forward" in refused(lambda: inexact.assert_same_result(other))
    longer = without("weight_digests", job(), weights(0, 0, steps=9), weights(2, 1, steps=9))
    assert "expected 9, as undisturbed, found 8" in refused(lambda: job().assert_same_result(longer))


def test_other_buffers_than_undisturbed_fail_if_they_are_asked_for() -> None:
    other = without("weight_digests", job(), weights(0, 0), weights(2, 1, state="ee"))
    job().assert_same_result(other)
    said = refused(lambda: job().assert_same_result(other, state=True))
    assert "expected {1: 'ee'}, as undisturbed, by rank, found {1: 'bb'}" in said


def test_nothing_is_the_same_as_an_undisturbed_job_that_did_not_finish() -> None:
    assert "exit code 1" in refused(lambda: job().assert_same_result(job(exit_code=1)))
