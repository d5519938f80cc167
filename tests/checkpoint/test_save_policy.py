"""When a checkpoint is due, by a clock that the test turns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import evergrad as eg
from evergrad.checkpoint import Progress, Version
from evergrad.checkpoint.save_policy import SavePolicyRuntime, checked_policies, daly_interval_s
from evergrad.errors import TierError, UsageError


class Clock:
    """Stands still until it is turned."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Saved:
    """A save whose way to the disk the test decides on."""

    version = Version(1, 1)

    def __init__(self) -> None:
        self.is_done, self.error = False, None

    def captured(self) -> None:
        pass

    def done(self) -> bool:
        return self.is_done

    def exception(self, timeout: float | None = None) -> TierError | None:
        return self.error


class Loop:
    """A training loop in fake time: what a step and a save take, and at which steps it saved."""

    def __init__(self, policy: Any, *, step_s: float = 1.0, save_s: float = 0.0, heeds: bool = True) -> None:
        self.clock = Clock()
        self.cadence = SavePolicyRuntime(policy, preempt_signals=(), clock=self.clock)
        self.step_s, self.save_s, self.heeds = step_s, save_s, heeds
        self.step = 0

    def run(self, steps: int) -> list[int]:
        """The steps at which a checkpoint was needed."""
        found = []
        for _ in range(steps):
            self.step += 1
            self.clock.now += self.step_s
            if self.cadence.need_checkpoint():
                found.append(self.step)
                if self.heeds:
                    self.save()
        return found

    def save(self) -> None:
        self.cadence.begin_save()
        self.clock.now += self.save_s
        self.cadence.saved()


def progress(**known: Any) -> Progress:
    return Progress(**{"steps": 1, "seconds": 0.0, **known})


def test_every_so_many_steps() -> None:
    assert Loop(eg.EverySteps(3)).run(10) == [3, 6, 9]
    assert Loop(4).run(10) == [4, 8]


def test_every_so_many_seconds() -> None:
    # Time begins with the first call, and again when a save has returned.
    assert Loop(eg.EverySeconds(10), step_s=4.0, save_s=100.0).run(12) == [4, 7, 10]


def test_saves_take_no_more_than_their_part_of_the_time() -> None:
    loop = Loop(eg.MaxOverhead(0.1), step_s=1.0, save_s=2.0)
    assert loop.run(70) == [1, 21, 41, 61]


def test_a_cost_that_rises_makes_saves_rarer() -> None:
    loop = Loop(eg.MaxOverhead(0.1), save_s=1.0)
    few = len(loop.run(100))
    loop.save_s = 4.0
    loop.run(100)  # a single slow save changes nothing: the median of the last few counts
    assert len(loop.run(100)) < few / 2


def test_youngs_and_dalys_interval_is_kept() -> None:
    loop = Loop(eg.YoungDaly(mtbf_s=3600.0), step_s=10.0, save_s=5.0)
    steps = loop.run(200)
    interval = daly_interval_s(5.0, 3600.0)
    assert steps[0] == 1
    gaps = {after - before for before, after in itertools.pairwise(steps)}
    assert gaps == {-(-interval // 10)}


@pytest.mark.parametrize(
    ("cost_s", "mtbf_s", "expected"),
    [
        (60.0, 11160.0, 1117.6),  # 3.1 h: the job of 16,384 GPUs
        (300.0, 86400.0, 7001.4),  # Young's root is 7200 s
        (0.5, 11160.0, 105.3),
        (1800.0, 3600.0, 2500.0),
        (3600.0, 3600.0, 2974.0),
        (7199.999, 3600.0, 3200.0),  # 8/9 of the mean time, where the formula ends
        (7200.0, 3600.0, 3600.0),
        (90000.0, 3600.0, 3600.0),
        (0.0, 3600.0, 0.0),
    ],
)
def test_dalys_numbers(cost_s: float, mtbf_s: float, expected: float) -> None:
    assert daly_interval_s(cost_s, mtbf_s) == pytest.approx(expected, abs=0.05)


costs, times = st.floats(1e-3, 1e4), st.floats(1.0, 1e7)


@given(costs, costs, times)
def test_what_costs_more_is_done_more_rarely(one: float, other: float, mtbf_s: float) -> None:
    cheap, dear = sorted((one, other))
    assert daly_interval_s(cheap, mtbf_s) <= daly_interval_s(dear, mtbf_s) * (1 + 1e-9)
    overhead = eg.MaxOverhead(0.02)
    assert overhead.interval_s(progress(cost_s=cheap)) <= overhead.interval_s(progress(cost_s=dear))


@given(costs, times, times)
def test_what_fails_more_rarely_is_saved_more_rarely(cost_s: float, one: float, other: float) -> None:
    often, rarely = sorted((max(one, cost_s), max(other, cost_s)))
    assert daly_interval_s(cost_s, often) <= daly_interval_s(cost_s, rarely) * (1 + 1e-9)


@given(costs, times)
def test_dalys_interval_is_near_youngs_where_saves_are_cheap(cost_s: float, mtbf_s: float) -> None:
    young = (2 * cost_s * mtbf_s) ** 0.5
    assert daly_interval_s(cost_s, mtbf_s) <= young
    if cost_s < mtbf_s / 1000:
        assert daly_interval_s(cost_s, mtbf_s) > 0.95 * young


def test_a_save_that_is_not_durable_is_not_followed_by_another() -> None:
    policy = eg.YoungDaly(mtbf_s=1000.0)
    fast = progress(seconds=50.0, cost_s=1.0)
    assert policy.is_due(fast)
    assert not policy.is_due(progress(seconds=50.0, cost_s=1.0, durable_s=120.0))
    assert policy.interval_s(progress(cost_s=1.0, durable_s=120.0)) == 120.0


def test_how_long_a_save_takes_to_be_durable_is_measured() -> None:
    clock, seen = Clock(), []

    class Look:
        def is_due(self, progress: Progress) -> bool:
            seen.append(progress)
            return False

    cadence = SavePolicyRuntime(Look(), preempt_signals=(), clock=clock)
    assert not cadence.need_checkpoint()
    saved: Any = Saved()
    cadence.begin_save()
    clock.now += 2.0
    cadence.saved(saved, ["local"])
    clock.now += 5.0
    cadence.need_checkpoint()
    assert seen[-1] == Progress(steps=1, seconds=5.0, cost_s=2.0, durable_s=None)
    saved.is_done = True
    cadence.need_checkpoint()
    assert seen[-1] == Progress(steps=2, seconds=5.0, cost_s=2.0, durable_s=7.0)

    failed: Any = Saved()
    failed.is_done, failed.error = True, TierError("full")
    cadence.begin_save()
    cadence.saved(failed, ["local"])
    clock.now += 1e6
    cadence.need_checkpoint()
    assert seen[-1].durable_s == 7.0, "one that failed was never durable"


def test_the_first_call_is_due_so_that_the_cost_gets_known() -> None:
    for policy in (eg.MaxOverhead(0.01), eg.YoungDaly(1e6)):
        assert Loop(policy, save_s=10.0).run(5) == [1]
    assert Loop(eg.EverySeconds(1e6)).run(5) == []


def test_what_nobody_heeds_is_asked_again() -> None:
    assert Loop(eg.EverySteps(3), heeds=False).run(6) == [3, 4, 5, 6]
    assert Loop(eg.EverySeconds(3), heeds=False).run(6) == [4, 5, 6]


def test_a_save_that_nobody_asked_for_counts_as_well() -> None:
    loop = Loop(eg.EverySteps(3))
    assert loop.run(2) == []
    loop.save()
    assert loop.run(4) == [5]


def test_of_several_policies_the_first_that_is_due_decides() -> None:
    assert Loop([eg.EverySteps(5), eg.EverySeconds(100)]).run(11) == [5, 10]
    assert Loop([eg.EverySteps(500), eg.EverySeconds(4)]).run(11) == [5, 9]
    assert Loop((3, eg.EverySeconds(100))).run(4) == [3]
    assert Loop([]).run(4) == []


def test_without_a_policy_nothing_is_due() -> None:
    assert Loop(None).run(50) == []


def test_a_policy_of_ones_own_is_anything_that_decides() -> None:
    class AtPowersOfTwo:
        def is_due(self, progress: Progress) -> bool:
            return progress.is_first and progress.steps == 4

    assert Loop(AtPowersOfTwo()).run(20) == [4]


def test_a_save_that_failed_is_tried_again_but_not_at_every_step() -> None:
    loop = Loop(eg.MaxOverhead(0.1), heeds=False)
    tried = []
    for step in range(40):
        loop.clock.now += 1.0
        if loop.cadence.need_checkpoint():
            tried.append(step)
            loop.cadence.begin_save()
            loop.clock.now += 0.5  # and it raises
    assert tried[0] == 0
    assert 2 <= len(tried) <= 5


class Others:
    """What the other ranks of a job say, and what this one said."""

    def __init__(self, *numbers: float) -> None:
        self.numbers, self.mine = list(numbers), [0.0]

    def __call__(self, mine: list[float]) -> list[float]:
        self.mine = mine
        return list(map(max, mine, self.numbers))


def test_a_job_asks_by_its_own_steps_and_one_rank_that_is_due_is_enough() -> None:
    cadence, silent = SavePolicyRuntime(3, preempt_signals=()), Others(0, -1, -1)
    assert cadence.has_policy
    assert [cadence.is_due(steps, silent) for steps in (1, 2, 3, 4)] == [False, False, True, True]
    assert cadence.is_due(1, Others(1, -1, -1))
    assert not SavePolicyRuntime().has_policy


def test_in_a_job_a_clock_counts_from_the_last_save() -> None:
    clock, silent = Clock(), Others(0, -1, -1)
    cadence = SavePolicyRuntime(eg.EverySeconds(10), preempt_signals=(), clock=clock)
    assert not cadence.is_due(1, silent)
    clock.now += 10
    assert cadence.is_due(2, silent)
    cadence.begin_save()
    clock.now += 2
    cadence.saved()
    clock.now += 9
    assert not cadence.is_due(1, silent)
    clock.now += 1
    assert cadence.is_due(2, silent)


def test_in_a_job_a_save_is_judged_by_the_slowest_rank_once_all_know_what_it_has_cost() -> None:
    clock = Clock()
    cadence = SavePolicyRuntime(eg.MaxOverhead(0.5), preempt_signals=(), clock=clock)
    assert cadence.is_due(1, Others(0, -1, -1)), "the first is due, so that the cost gets known"
    cadence.begin_save()
    clock.now += 1
    cadence.saved()
    clock.now += 3
    slow = Others(0, 4, -1)
    assert not cadence.is_due(1, slow), "what it has cost the others is not known yet"
    assert slow.mine == [0.0, 1.0, -1.0]
    clock.now += 4
    assert not cadence.is_due(2, slow), "4 s a save, so 8 s between two"
    clock.now += 1
    assert cadence.is_due(3, slow)


def test_a_rank_that_has_just_joined_a_job_has_no_vote() -> None:
    cadence, silent = SavePolicyRuntime([1, eg.MaxOverhead(0.5)], preempt_signals=()), Others(0, 2, -1)
    assert not cadence.is_due(1, silent, votes=False)
    assert silent.mine[0] == 0
    assert cadence.is_due(2, silent)


def test_intervals_can_be_looked_at() -> None:
    assert eg.EverySteps(10).interval_s(progress(steps=5, seconds=2.0)) == 4.0
    assert eg.EverySeconds(7).interval_s(progress()) == 7
    assert eg.MaxOverhead(0.5).interval_s(progress()) is None
    assert eg.YoungDaly(100.0).interval_s(progress()) is None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: eg.EverySteps(0), "1 or more, found 0"),
        (lambda: eg.EverySteps(2.5), "whole number of steps, 1 or more, found 2.5"),
        (lambda: eg.EverySteps(True), "found True"),
        (lambda: eg.EverySeconds(-1), "EverySeconds: expected a number of seconds, more than 0, found -1"),
        (lambda: eg.EverySeconds(float("nan")), "found nan"),
        (lambda: eg.MaxOverhead(2), "at most 1, found 2"),
        (lambda: eg.MaxOverhead("2%"), "found '2%'"),
        (lambda: eg.YoungDaly(0), "mtbf_s, more than 0, found 0"),
        (lambda: eg.YoungDaly(float("inf")), "found inf"),
        (lambda: checked_policies(-5), "1 or more, found -5"),
        (lambda: checked_policies("often"), "policy: expected a number of steps, .*found 'often'"),
        (lambda: checked_policies(eg.EverySteps), "policy: expected"),
        (lambda: checked_policies([10, None]), "policy: expected .*found None"),
        (lambda: SavePolicyRuntime(exit_code=256), "exit_code: expected a whole number from 0 to 255, found 256"),
        (lambda: SavePolicyRuntime(exit_code=True), "exit_code"),
        (lambda: SavePolicyRuntime(grace_s=-1.0), "grace_s: expected a number of seconds, 0 or more, found -1.0"),
        (lambda: SavePolicyRuntime(grace_s="long"), "grace_s"),
        (lambda: SavePolicyRuntime(preempt_signals="SIGTERM"), "expected a sequence of signal names, found 'SIGTERM'"),
        (lambda: SavePolicyRuntime(preempt_signals=["TERM"]), "expected names such as 'SIGTERM', found 'TERM'"),
        (lambda: SavePolicyRuntime(preempt_signals=[0]), "found 0"),
        (lambda: SavePolicyRuntime(preempt_signals=["SIGKILL"]), "SIGKILL cannot be watched"),
    ],
)
def test_wrong_input_is_one_line(make: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_wrong_input_leaves_nothing_behind(tmp_path: Any) -> None:
    wrong: Sequence[dict[str, Any]] = [{"policy": 0}, {"grace_s": -1}, {"exit_code": 999}, {"preempt_signals": "x"}]
    for settings in wrong:
        with pytest.raises(UsageError):
            eg.Checkpointer(tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()
