"""What survivors are told, from what they saw."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad.recovery import decide as module
from evergrad.recovery.decide import (
    STRATEGIES,
    StopDecision,
    Strategy,
    decide,
    is_after_others_finished,
    is_exact,
    with_relaunched_members,
)
from evergrad.recovery.membership import MembershipPlan, PointKind, SurvivorReport, Verdict

BEGIN, STEP, END, JOIN = PointKind.BEGIN, PointKind.STEP, PointKind.END, PointKind.JOIN
PROCEED, RETRY, REDO, REPAIR, RESTART, LEAVE = Verdict
FOUR = MembershipPlan(3, (10, 11, 12, 13), point=5)


def saw(plan: MembershipPlan, uid: int, point: int, kind: PointKind = STEP, **more: Any) -> SurvivorReport:
    rank = plan.rank_of(uid)
    assert rank is not None
    return SurvivorReport(uid, rank, plan.generation, point, kind, step=point, **more)


def after(
    plan: MembershipPlan, reports: Iterable[SurvivorReport], strategy: Strategy = "rollback", **known: Any
) -> MembershipPlan:
    """The next plan; who has neither reported nor finished is dead."""
    found = _decided(plan, reports, strategy, **known)
    assert isinstance(found, MembershipPlan), found
    return found


def _decided(
    plan: MembershipPlan, reports: Iterable[SurvivorReport], strategy: Strategy, **known: Any
) -> MembershipPlan | StopDecision:
    seen = {report.uid: report for report in reports}
    dead = set(plan.members) - seen.keys() - known.get("finished", set()) | known.pop("dead", set())
    return decide(plan, seen, strategy=strategy, dead=dead, **known)


def all_at(
    plan: MembershipPlan, uids: Sequence[int], point: int, kind: PointKind = STEP, **more: Any
) -> list[SurvivorReport]:
    return [saw(plan, uid, point, kind, **more) for uid in uids]


@pytest.mark.parametrize(
    ("kind", "strategy", "verdict"),
    [
        (BEGIN, "rollback", RETRY),
        (BEGIN, "forward", RETRY),
        (BEGIN, "restart", RESTART),
        (END, "rollback", RETRY),
        (END, "forward", RETRY),
        (END, "restart", RESTART),
        (JOIN, "rollback", RETRY),
        (JOIN, "forward", RETRY),
        (JOIN, "restart", RESTART),
        (STEP, "rollback", REDO),
        (STEP, "forward", REPAIR),
        (STEP, "restart", RESTART),
    ],
)
def test_the_kind_of_point_and_the_strategy_say_what_survivors_do(
    kind: PointKind, strategy: Strategy, verdict: Verdict
) -> None:
    plan = after(FOUR, all_at(FOUR, (10, 12, 13), 7, kind, buckets=2), strategy)
    assert plan.verdicts == {10: verdict, 12: verdict, 13: verdict}
    assert (plan.generation, plan.members, plan.previous, plan.dead) == (4, (10, 12, 13), FOUR.members, (11,))
    assert (plan.point, plan.kind, plan.restart, plan.relaunch) == (7, kind, verdict is RESTART, False)
    assert (plan.joiners, plan.source, plan.calls) == ((), None, ())


def test_whoever_is_behind_goes_ahead() -> None:
    plan = after(FOUR, [saw(FOUR, 10, 6), saw(FOUR, 11, 7), saw(FOUR, 13, 6)], spares=[20])
    assert plan.verdicts == {10: PROCEED, 11: REDO, 13: PROCEED}
    assert (plan.point, plan.members, plan.source) == (7, (10, 11, 20, 13), 11)  # its state is that of point 7


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_take_a_point_for_different_ones_cannot_go_on(strategy: Strategy) -> None:
    stop = _decided(FOUR, [*all_at(FOUR, [10, 11], 7, BEGIN), saw(FOUR, 12, 7, STEP)], strategy, can_restart=True)
    assert isinstance(stop, StopDecision)
    assert stop.is_mistake
    assert stop.reason.endswith("rank 1 begins an epoch, and rank 2 is in a step")
    assert isinstance(
        after(FOUR, [*all_at(FOUR, [10, 11], 7, JOIN), saw(FOUR, 12, 7, STEP)], "rollback"), MembershipPlan
    )


def test_nobody_can_be_two_points_behind() -> None:
    with pytest.raises(AssertionError, match="is at 5"):
        after(FOUR, [saw(FOUR, 10, 5), saw(FOUR, 11, 7)])


def test_someone_may_still_report() -> None:
    with pytest.raises(AssertionError, match="may still report"):
        decide(FOUR, {10: saw(FOUR, 10, 6)}, strategy="rollback", dead={11, 12})


def test_who_died_after_its_report_is_dead() -> None:
    plan = after(FOUR, [saw(FOUR, 10, 6), saw(FOUR, 11, 7), saw(FOUR, 12, 6), saw(FOUR, 13, 6)], dead={11})
    assert (plan.members, plan.dead, plan.point) == ((10, 12, 13), (11,), 6)
    assert set(plan.verdicts.values()) == {REDO}  # nobody who lives has passed point 6


@pytest.mark.parametrize("kind", [STEP, END])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_where_one_has_finished_the_others_go_ahead(kind: PointKind, strategy: Strategy) -> None:
    reports = all_at(FOUR, (11, 12), 9, kind, done=(0, 1) if kind is STEP else (), buckets=2 if kind is STEP else 0)
    plan = after(FOUR, reports, strategy, finished={10}, spares=[20], min_ranks=4)
    assert plan.verdicts == {11: PROCEED, 12: PROCEED}
    assert (plan.members, plan.dead, plan.point, plan.kind) == ((11, 12), (13,), 10, END)
    assert not plan.joiners  # there is nothing left to do
    assert is_after_others_finished(plan)
    assert not is_exact(plan), "a rank has died"


def test_ranks_that_do_not_hear_that_the_job_is_over_end_as_if_they_had() -> None:
    plan = after(FOUR, all_at(FOUR, (11, 12), 9, END), finished={10, 13})
    assert is_after_others_finished(plan)
    assert is_exact(plan)


def test_one_that_left_early_has_not_passed_what_lacks_gradients() -> None:
    reports = [saw(FOUR, 11, 9, done=(0, 1), buckets=2), saw(FOUR, 12, 9, done=(0,), buckets=2)]
    plan = after(FOUR, reports, finished={10, 13})
    assert plan.verdicts == {11: REDO, 12: REDO}
    assert (plan.members, plan.dead) == ((11, 12), ())


def test_what_all_have_reduced_is_kept() -> None:
    reports = [
        saw(FOUR, 10, 7, done=(0, 1, 3), buckets=4),
        saw(FOUR, 11, 7, done=(0, 3), buckets=4),
        saw(FOUR, 13, 7, done=(0, 2, 3), buckets=4),
    ]
    assert after(FOUR, reports, "forward").todo == (1, 2)


def test_who_goes_ahead_will_reduce_everything_so_all_do() -> None:
    reports = [saw(FOUR, 10, 6, done=(0, 1), buckets=2), saw(FOUR, 11, 7, done=(0,), buckets=2)]
    plan = after(FOUR, reports, "forward")
    assert plan.verdicts == {10: PROCEED, 11: REPAIR}
    assert plan.todo == (0, 1)


def test_ranks_with_other_buckets_cannot_repair() -> None:
    with pytest.raises(AssertionError, match="number of buckets"):
        after(FOUR, [saw(FOUR, 10, 7, buckets=2), saw(FOUR, 11, 7, buckets=3)], "forward")


@pytest.mark.parametrize("strategy", ["rollback", "restart"])
def test_spares_take_the_places_of_the_dead(strategy: Strategy) -> None:
    plan = after(FOUR, all_at(FOUR, (10, 12), 7), strategy, spares=[20, 21, 22])
    assert (plan.members, plan.joiners, plan.takes) == ((10, 20, 12, 21), (20, 21), {20: 1, 21: 3})
    if strategy == "rollback":
        # What 11 had is with 12, what 13 had is with 10.
        assert (plan.source, plan.keepers) == (10, {20: 12, 21: 10})
    else:
        assert (plan.source, plan.keepers, plan.held) == (None, {}, {})
    assert is_exact(plan)


def test_where_spares_run_out_places_vanish() -> None:
    plan = after(FOUR, all_at(FOUR, (13,), 7), spares=[20])
    assert (plan.members, plan.takes, plan.keepers) == ((20, 13), {20: 0}, {})  # 11 held what 10 had
    assert not is_exact(plan)


def test_of_two_ranks_each_keeps_the_others_things() -> None:
    pair = MembershipPlan(0, (0, 1))
    assert after(pair, [saw(pair, 1, 4)], spares=[2]).keepers == {2: 1}


def test_the_last_one_goes_on_alone() -> None:
    plan = after(FOUR, [saw(FOUR, 12, 7)])
    assert (plan.members, plan.verdicts, plan.dead) == ((12,), {12: REDO}, (10, 11, 13))
    alone = after(plan, [saw(plan, 12, 9)])
    assert (alone.members, alone.dead, alone.held) == ((12,), (), {})


def test_before_the_first_point_nobody_keeps_anything() -> None:
    start = MembershipPlan(0, (0, 1, 2))
    plan = after(start, all_at(start, (0, 2), 0, BEGIN), spares=[3])
    assert (plan.members, plan.source, plan.keepers) == ((0, 3, 2), 0, {})
    assert not is_exact(plan)


def test_a_generation_that_passed_no_point_has_moved_nothing() -> None:
    smaller = after(FOUR, all_at(FOUR, (10, 12, 13), 7))  # 11 is gone, and 12 still holds what it had
    again = after(smaller, all_at(smaller, (12, 13), 7), spares=[20])
    assert again.takes == {20: 0}
    assert again.keepers == {}, "10's things were with 11"
    other = after(smaller, all_at(smaller, (10, 12), 7), spares=[20])
    assert other.keepers == {20: 10}, "13's things are with 10"
    moved = after(smaller, all_at(smaller, (12, 13), 8), spares=[20])
    assert moved.keepers == {20: 12}, "a point was passed, and 12 is the one after 10 now"


def test_a_joiner_without_state_stays_a_joiner() -> None:
    joined = after(FOUR, all_at(FOUR, (10, 12, 13), 7), spares=[20])
    assert (joined.source, joined.keepers) == (10, {20: 12})
    reports = [saw(joined, 20, 7, has_state=False), *all_at(joined, (12, 13), 7)]
    plan = after(joined, reports)  # the source has died
    assert (plan.members, plan.joiners, plan.source) == ((20, 12, 13), (20,), 12)
    assert (plan.verdicts[20], plan.takes, plan.keepers) == (RETRY, {20: 1}, {20: 12})


def test_what_a_joiner_without_state_was_told_does_not_count_as_progress() -> None:
    joined = after(FOUR, [saw(FOUR, 10, 7), *all_at(FOUR, (12, 13), 6)], spares=[20])
    assert joined.point == 7
    plan = after(joined, [saw(joined, 20, 7, has_state=False), *all_at(joined, (12, 13), 6)])
    assert (plan.point, plan.verdicts) == (6, {20: RETRY, 12: REDO, 13: REDO})


def test_who_takes_the_place_of_a_joiner_gets_what_it_would_have_got() -> None:
    joined = after(FOUR, all_at(FOUR, (10, 12, 13), 7), spares=[20])
    plan = after(joined, all_at(joined, (10, 12, 13), 7), spares=[21])
    assert (plan.members, plan.takes, plan.keepers) == ((10, 21, 12, 13), {21: 1}, {21: 12})
    assert is_exact(plan)


def test_during_a_repair_spares_are_called_and_come_in_before_the_next_step() -> None:
    repair = after(FOUR, all_at(FOUR, (10, 12, 13), 7, buckets=1), "forward", spares=[20, 21])
    assert (repair.members, repair.calls, repair.vacant, repair.joiners) == ((10, 12, 13), (20,), ((1, 11),), ())
    assert not is_exact(repair)
    plan = after(repair, all_at(repair, repair.members, 8, JOIN), "forward", spares=[20, 21])
    assert (plan.members, plan.joiners, plan.source) == ((10, 20, 12, 13), (20,), 10)
    assert (plan.calls, plan.vacant, plan.takes, plan.keepers) == ((), (), {}, {})
    assert set(plan.verdicts.values()) == {RETRY}
    assert not is_exact(plan)


def test_a_called_spare_that_died_is_not_waited_for() -> None:
    repair = after(FOUR, all_at(FOUR, (10, 12, 13), 7, buckets=1), "forward", spares=[20])
    plan = after(repair, all_at(repair, repair.members, 8, JOIN), "forward")
    assert (plan.members, plan.joiners, plan.calls, plan.vacant) == ((10, 12, 13), (), (), ())


def test_places_vacant_before_and_now_are_filled_together() -> None:
    repair = after(FOUR, all_at(FOUR, (10, 12, 13), 7, buckets=1), "forward", spares=[20, 21])
    again = after(repair, all_at(repair, (10, 13), 7, buckets=1), "forward", spares=[20, 21])
    assert (again.members, again.calls, again.vacant) == ((10, 13), (20, 21), ((1, 11), (2, 12)))
    plan = after(again, all_at(again, (10, 13), 8, JOIN), "forward", spares=[20, 21])
    assert plan.members == (10, 20, 21, 13)
    at_once = after(repair, all_at(repair, (10, 13), 8, JOIN), "forward", spares=[20, 21])
    assert (at_once.members, at_once.takes, at_once.keepers) == ((10, 20, 21, 13), {21: 1}, {21: 13})


def test_a_joiner_learns_rather_from_one_that_has_not_done_its_backward_pass() -> None:
    repair = after(FOUR, all_at(FOUR, (10, 12, 13), 7, buckets=1), "forward", spares=[20])
    joined = after(repair, all_at(repair, repair.members, 8, JOIN), "forward", spares=[20])
    reports = [saw(joined, 10, 8, buckets=2), saw(joined, 20, 8, JOIN, has_state=False), saw(joined, 12, 8, JOIN)]
    plan = after(joined, reports, "forward")
    assert plan.verdicts == {10: REPAIR, 20: RETRY, 12: RETRY}
    assert (plan.kind, plan.source, plan.todo) == (STEP, 12, (0, 1))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_too_few_ranks_stop_the_job_and_say_what_to_do(strategy: Strategy) -> None:
    found = _decided(FOUR, all_at(FOUR, (10,), 7, buckets=1), strategy, spares=[20], min_ranks=3)
    assert found == StopDecision(
        "too few ranks: 1 of 4 left, 1 spare waiting, 3 needed",
        "Start it again with more spares or a lower --min-ranks; with a checkpointer it goes on where it saved.",
    )
    assert isinstance(
        _decided(FOUR, all_at(FOUR, (10,), 7, buckets=1), strategy, spares=[20], min_ranks=2), MembershipPlan
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_too_few_ranks_start_anew_where_they_can(strategy: Strategy) -> None:
    plan = after(FOUR, all_at(FOUR, (10,), 7), strategy, min_ranks=2, can_restart=True)
    assert (plan.restart, plan.relaunch, plan.members, plan.point) == (True, True, (), 7)
    assert (plan.verdicts, plan.dead, plan.previous) == ({10: RESTART}, (11, 12, 13), FOUR.members)


def test_without_survivors_spares_alone_cannot_go_on() -> None:
    found = _decided(FOUR, [], "rollback", spares=[20, 21, 22, 23])
    assert isinstance(found, StopDecision)
    assert "0 of 4 left, 4 spares waiting, 1 needed" in found.reason
    assert after(FOUR, [], spares=[20], can_restart=True).relaunch


def test_those_without_the_state_alone_cannot_go_on() -> None:
    joined = after(FOUR, all_at(FOUR, (10,), 7), spares=[20, 21, 22])
    reports = [saw(joined, uid, 7, has_state=False) for uid in (20, 21)]
    assert isinstance(_decided(joined, reports, "rollback"), StopDecision)
    assert after(joined, reports, can_restart=True).relaunch


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_restart_that_came_to_no_point_is_begun_again(strategy: Strategy) -> None:
    back = MembershipPlan(4, (10, 20, 12), previous=(10, 11, 12), point=7, joiners=(20,), restart=True)
    reports = [saw(back, 10, 6), saw(back, 20, 7, BEGIN, has_state=False)]
    plan = after(back, reports, strategy, spares=[21])
    assert (plan.restart, plan.relaunch, plan.point, plan.source) == (True, False, 7, None)
    assert (plan.verdicts, plan.members, plan.joiners) == ({10: RESTART, 20: RESTART}, (10, 20, 21), (21,))
    if strategy != "restart":
        later = after(back, all_at(back, (10, 20), 8, buckets=1), strategy)
        assert not later.restart


def test_plans_and_reports_survive_the_store() -> None:
    repair = after(FOUR, all_at(FOUR, (10, 12, 13), 7, buckets=1), "forward", spares=[20])
    assert repair.vacant
    assert repair.held
    assert MembershipPlan.from_json(repair.to_json()) == repair
    report = saw(FOUR, 10, 7, done=(1,), buckets=2, has_state=False)
    assert SurvivorReport.from_json(report.to_json()) == report


@st.composite
def courses(draw: st.DrawFn) -> tuple[Strategy, int, int, list[list[int]]]:
    """A job of so many ranks and spares, and what happens in each of its generations: numbers to draw from."""
    numbers = st.lists(st.integers(0, 2**16), min_size=12, max_size=12)
    return (
        draw(st.sampled_from(STRATEGIES)),
        draw(st.integers(1, 6)),
        draw(st.integers(0, 4)),
        draw(st.lists(numbers, min_size=1, max_size=6)),
    )


@given(courses())
def test_whatever_dies_wherever_the_others_go_on_together(course: tuple[Strategy, int, int, list[list[int]]]) -> None:
    strategy, num_ranks, num_spares, happenings = course
    plan, spares = MembershipPlan(0, tuple(range(num_ranks))), list(range(100, 100 + num_spares))
    at = dict.fromkeys(plan.members, 0)
    """The point that each rank stands before; a joiner without state is not here."""
    for numbers in happenings:
        lives = [uid for uid, number in zip(plan.members, numbers, strict=False) if number % 4]
        reports = _reports(plan, at, numbers)
        found = decide(
            plan,
            {uid: reports[uid] for uid in lives},
            strategy=strategy,
            spares=spares,
            dead=set(plan.members) - set(lives),
        )
        able = [uid for uid in lives if reports[uid].has_state]
        if isinstance(found, StopDecision):
            assert not able
            assert strategy != "restart" or not lives
            return
        _check(plan, found, {uid: reports[uid] for uid in lives}, strategy, spares)
        furthest = max((reports[uid].point for uid in able), default=0)
        at = {uid: furthest if found.verdicts[uid] is not PROCEED else reports[uid].point for uid in able}
        if found.restart:
            at = dict.fromkeys(found.members, found.point)
        spares = [uid for uid in spares if uid not in found.members]
        plan = found


def _reports(plan: MembershipPlan, at: dict[int, int], numbers: list[int]) -> dict[int, SurvivorReport]:
    """What ranks can see: each of them stood before a point, and this generation came to some later one, or to none."""
    went_on = numbers[6] % 3
    kind = (BEGIN, END, STEP, STEP, STEP)[numbers[7] % 5]
    if plan.calls and went_on:
        kind = JOIN
    reports = {}
    for place, uid in enumerate(plan.members):
        behind = numbers[place % 6] // 4 % 2
        done = tuple(bucket for bucket in range(3) if numbers[place % 6] >> (bucket + 3) & 1)
        if went_on:
            # A point was passed, so all have the state; whoever is behind had reduced everything.
            point = plan.point + went_on
            behind = behind if kind is not JOIN else 0
            reports[uid] = saw(
                plan, uid, point - behind, STEP if behind else kind, done=(0, 1, 2) if behind else done, buckets=3
            )
        elif uid in at:
            ahead = at[uid] == plan.point
            reports[uid] = saw(plan, uid, at[uid], kind if ahead else STEP, done=done, buckets=3)
        else:
            reports[uid] = saw(plan, uid, plan.point, kind, has_state=False)
    return reports


def _check(
    plan: MembershipPlan,
    found: MembershipPlan,
    reports: dict[int, SurvivorReport],
    strategy: Strategy,
    spares: list[int],
) -> None:
    """What is true of every plan."""
    able = {uid: report for uid, report in reports.items() if report.has_state}
    assert MembershipPlan.from_json(found.to_json()) == found
    assert found.generation == plan.generation + 1
    assert found.previous == plan.members
    assert len(set(found.members)) == len(found.members) >= 1
    assert set(reports) <= set(found.members) <= set(reports) | set(spares)
    assert [uid for uid in found.members if uid in reports] == [uid for uid in plan.members if uid in reports]
    assert set(found.dead) == set(plan.members) - set(reports)
    assert found.verdicts.keys() == reports.keys()
    # Called spares come in order, none is both called and in, and no place is wasted while one waits.
    called = [uid for uid in spares if uid in found.members or uid in found.calls]
    assert called == spares[: len(called)]
    assert not set(found.calls) & set(found.members)
    assert len(found.vacant) == len(found.calls)
    assert len(called) == min(len(spares), len(found.dead) + len(plan.vacant))
    # Joiners are those without the state.
    assert set(found.joiners) == set(found.members) - set(reports if found.restart else able)
    for uid in found.joiners:
        assert uid in found.takes or plan.vacant, "a joiner has a place"
    assert set(found.keepers) <= set(found.joiners)
    assert set(found.keepers.values()) | set(found.held.values()) <= set(able)
    assert all(uid != keeper for uid, keeper in found.held.items())
    if found.restart:
        assert set(found.verdicts.values()) <= {RESTART}
        assert found.source is None
        return
    furthest = max(report.point for report in able.values())
    assert found.point == furthest
    assert (found.source is None) == (not found.joiners)
    if found.source is not None:
        assert able[found.source].point == furthest
        assert found.verdicts[found.source] is not PROCEED
    for uid, report in able.items():
        assert (found.verdicts[uid] is PROCEED) == (report.point < furthest)
    repairing = [uid for uid, verdict in found.verdicts.items() if verdict is REPAIR]
    assert not (repairing and strategy != "forward")
    assert not (found.calls and not repairing)
    if repairing:
        assert not set(found.members) - set(reports), "nobody new comes in during a repair"
        for bucket in range(3):
            kept = len(repairing) == len(found.members) and all(bucket in reports[uid].done for uid in repairing)
            assert (bucket in found.todo) == (not kept)


def test_a_relaunch_keeps_the_living_then_takes_spares_then_starts_processes() -> None:
    plan = MembershipPlan(3, (), previous=(0, 1, 2), verdicts={1: Verdict.RESTART}, relaunch=True)
    started: list[tuple[int, int | None]] = []

    def start(rank: int, before: int | None) -> int:
        started.append((rank, before))
        return 90 + rank

    whole = with_relaunched_members(plan, 4, [7], start)
    assert whole.members == (7, 1, 92, 93)
    assert whole.joiners == (7, 92, 93)
    assert started == [(2, 2), (3, None)], "the last place had nobody before"


def simply_decided(
    plan: MembershipPlan,
    reports: Mapping[int, SurvivorReport],
    *,
    strategy: Strategy,
    spares: Sequence[int],
    min_ranks: int,
    max_ranks: int,
    can_restart: bool,
    finished: Set[int],
    dead: Set[int],
) -> MembershipPlan | StopDecision:
    """The rules of `decide` as plainly as they can be written, whatever that costs with many ranks."""
    present = {uid: reports[uid] for uid in plan.members if uid in reports and uid not in finished and uid not in dead}
    gone = tuple(uid for uid in plan.members if uid not in present and uid not in finished)
    left = tuple(uid for uid in present if present[uid].leaves)
    if finished and present and all(module._may_be_passed(report) for report in present.values()):
        return module._last(plan, present, gone)
    able = {uid: report for uid, report in present.items() if report.has_state}
    staying = {uid: report for uid, report in able.items() if uid not in left}
    here = [uid for uid in present if uid not in left]
    planned = not gone and all(report.planned for report in present.values())
    way = module._resumption(plan, present, able, strategy, is_planned=planned)
    repairs = REPAIR in list(way.verdicts.values())

    places = list(plan.members)
    for position, uid in sorted(plan.vacant):
        places.insert(position, uid)
    seats: list[tuple[int, int]] = []  # who sits there, and who did before
    unused = list(spares)
    for uid in places:
        if uid in here:
            seats.append((uid, uid))
        elif unused and (uid in (*gone, *left) or uid in [old for _, old in plan.vacant]):
            seats.append((unused.pop(0), uid))
    is_new = [uid not in here for uid, _ in seats]
    if not (repairs or way.restarts or True in [report.keeps_place for report in able.values()]):
        for uid in [uid for uid in spares if uid not in [seated for seated, _ in seats]]:
            if len(seats) < max_ranks:
                seats.append((uid, uid))
                is_new.append(True)
    members = tuple(uid for (uid, _), new in zip(seats, is_new, strict=True) if not (repairs and new))
    calls = tuple(uid for (uid, _), new in zip(seats, is_new, strict=True) if repairs and new)
    if not (here if way.restarts else staying) or len(members) + len(calls) < min_ranks:
        if can_restart:
            return module._relaunch(plan, way, set(here), gone, left)
        return module._too_few(plan, len(staying), len(spares), min_ranks)
    joiners = tuple(uid for uid in members if uid not in able and not (way.restarts and uid in present))
    after = dict(seats)
    held = {} if way.restarts else module._held(plan, staying, way.point, {uid: after[uid] for uid in members})
    source = module._source(members, way.verdicts, staying, way.point) if joiners and not way.restarts else None
    return MembershipPlan(
        plan.generation + 1,
        members,
        previous=plan.members,
        joiners=joiners,
        source=source,
        point=way.point,
        step=max((report.step for report in able.values()), default=plan.step),
        kind=way.kind,
        verdicts=way.verdicts,
        takes={uid: plan.members.index(after[uid]) for uid in joiners if after[uid] in plan.members},
        keepers={uid: held[uid] for uid in joiners if uid in held},
        todo=module._todo(members, way.verdicts, present) if repairs else (),
        dead=gone,
        left=left,
        restart=way.restarts,
        version=way.version,
        calls=calls,
        vacant=tuple((place, old) for place, ((_, old), new) in enumerate(zip(seats, is_new, strict=True))
                     if repairs and new),
        held=held,
    )  # fmt: skip


@st.composite
def situations(draw: st.DrawFn) -> tuple[MembershipPlan, dict[int, SurvivorReport], dict[str, Any]]:
    """Any plan, possible or not, and what became of its members."""
    uids = draw(st.permutations(range(14)))
    num_ranks, num_spares = draw(st.integers(1, 8)), draw(st.integers(0, 5))
    members, others = tuple(uids[:num_ranks]), uids[num_ranks:]
    spares, old = others[:num_spares], others[num_spares:]
    vacant = tuple((draw(st.integers(0, 10)), uid) for uid in old[: draw(st.integers(0, 3))])
    holders = st.dictionaries(st.sampled_from(members), st.sampled_from(members))
    plan = MembershipPlan(
        3,
        members,
        point=draw(st.integers(4, 5)),
        vacant=vacant,
        held=draw(holders),
        restart=draw(st.booleans()) and draw(st.booleans()),
        version=draw(st.sampled_from(["", "v7"])),
    )
    kind = draw(st.sampled_from([BEGIN, STEP, STEP, STEP, END, JOIN]))
    is_planned = kind is JOIN and draw(st.booleans())
    reports = {}
    dead, finished = set(), set()
    for rank, uid in enumerate(members):
        fate = draw(st.sampled_from(["here"] * 6 + ["dead", "dead late", "finished"]))
        if fate != "dead":
            behind = kind is not JOIN and draw(st.booleans())
            reports[uid] = SurvivorReport(
                uid, rank, 3, 6 - behind, STEP if behind else kind, draw(st.integers(3, 6)),
                first=draw(st.sampled_from([-1, -1, 5])) if kind is STEP else -1,
                done=draw(st.sampled_from([(), (0,), (0, 1)])), buckets=2,
                has_state=draw(st.sampled_from([True, True, True, False])),
                leaves=kind is JOIN and draw(st.booleans()),
                planned=is_planned, tries=draw(st.sampled_from([0, 0, 0, 1])),
                back_to=draw(st.sampled_from([""] * 9 + ["v3"])),
                keeps_place=draw(st.sampled_from([False] * 9 + [True])),
            )  # fmt: skip
        if fate.startswith("dead"):
            dead.add(uid)
        elif fate == "finished":
            finished.add(uid)
    known = {
        "strategy": draw(st.sampled_from(STRATEGIES)),
        "spares": spares,
        "min_ranks": draw(st.integers(1, 4)),
        "max_ranks": draw(st.integers(0, 14)),
        "can_restart": draw(st.booleans()),
        "finished": finished,
        "dead": dead,
    }
    return plan, reports, known


def _outcome_of(
    decided: Callable[..., MembershipPlan | StopDecision],
    situation: tuple[MembershipPlan, dict[int, SurvivorReport], dict[str, Any]],
) -> MembershipPlan | StopDecision | str:
    plan, reports, known = situation
    try:
        return decided(plan, reports, **known)
    except AssertionError as error:  # a situation that cannot be
        return f"refused: {str(error).splitlines()[0]}"


@settings(max_examples=400)
@given(situations())
def test_decisions_are_those_of_the_rules_written_plainly(
    situation: tuple[MembershipPlan, dict[int, SurvivorReport], dict[str, Any]],
) -> None:
    found, expected = _outcome_of(decide, situation), _outcome_of(simply_decided, situation)
    assert found == expected
    if isinstance(found, MembershipPlan) and isinstance(expected, MembershipPlan):
        # Equal dicts may differ in their order, which the store keeps.
        assert json.loads(found.to_json()) == json.loads(expected.to_json())


class Counted(int):
    """An id that counts how often it is compared or hashed."""

    looks = 0

    def __eq__(self, other: object) -> bool:
        Counted.looks += 1
        return int.__eq__(self, other)  # type: ignore[arg-type]

    def __hash__(self) -> int:
        Counted.looks += 1
        return int.__hash__(self)


def _lost(
    ranks: int, part: int, kind: PointKind = STEP, **more: Any
) -> tuple[MembershipPlan, dict[int, SurvivorReport], set[int]]:
    """A generation of so many ranks, of which every so-manyth died."""
    plan = MembershipPlan(3, tuple(Counted(uid) for uid in range(ranks)), point=5)
    dead = {uid for uid in plan.members if part and not uid % part}
    seen = {uid: SurvivorReport(uid, rank, 3, 7, kind, 7, buckets=2, **more) for rank, uid in enumerate(plan.members)}
    return plan, {uid: report for uid, report in seen.items() if uid not in dead}, dead


def _decides_after_losses(ranks: int, strategy: Strategy, part: int, spares: int) -> None:
    plan, reports, dead = _lost(ranks, part)
    decide(plan, reports, strategy=strategy, dead=dead, spares=[Counted(ranks + each) for each in range(spares)])


def _decides_while_half_leave(ranks: int) -> None:
    plan, reports, _ = _lost(ranks, 0, JOIN, planned=True)
    leaving = {uid: SurvivorReport(uid, uid, 3, 7, JOIN, 7, planned=True, leaves=bool(uid % 2)) for uid in plan.members}
    decide(plan, reports | leaving, strategy="rollback")


def _decides_to_grow(ranks: int) -> None:
    plan, reports, _ = _lost(ranks, 0, JOIN, planned=True)
    spares = [Counted(ranks + each) for each in range(ranks // 2)]
    decide(plan, reports, strategy="rollback", spares=spares, max_ranks=2 * ranks)


def _fills_vacant_places(ranks: int) -> None:
    plan, reports, _ = _lost(ranks, 0, JOIN, planned=True)
    vacant = tuple((2 * place, Counted(10 * ranks + place)) for place in range(ranks // 2))
    gapped = MembershipPlan(3, plan.members, point=5, vacant=vacant)
    decide(gapped, reports, strategy="rollback", spares=[Counted(ranks + each) for each in range(ranks // 2)])


def _relaunches(ranks: int) -> None:
    plan, reports, dead = _lost(ranks, 2)
    found = decide(plan, reports, strategy="restart", dead=dead, min_ranks=ranks, can_restart=True)
    assert isinstance(found, MembershipPlan)
    with_relaunched_members(found, ranks, [Counted(2 * ranks)], lambda rank, before: Counted(3 * ranks + rank))


def _asks_for_every_rank(ranks: int) -> None:
    plan, _, _ = _lost(ranks, 0)
    assert [plan.rank_of(uid) for uid in plan.members] == list(range(ranks))
    assert plan.rank_of(Counted(ranks)) is None


@pytest.mark.parametrize(
    "does",
    [
        *(
            pytest.param(lambda n, s=strategy, p=part: _decides_after_losses(n, s, p, n), id=f"{strategy}-{part}")
            for strategy in STRATEGIES
            for part in (2, 50)
        ),
        _decides_while_half_leave,
        _decides_to_grow,
        _fills_vacant_places,
        _relaunches,
        _asks_for_every_rank,
    ],
)
def test_twice_the_ranks_are_twice_the_work(does: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in comparisons of ids and of verdicts, not in seconds: four times would be quadratic."""

    def compared(self: Verdict, other: object) -> bool:
        Counted.looks += 1
        return str.__eq__(self, other)  # type: ignore[arg-type]

    monkeypatch.setattr(Verdict, "__eq__", compared)
    monkeypatch.setattr(Verdict, "__hash__", str.__hash__)
    looks = []
    for ranks in (300, 600):
        Counted.looks = 0
        does(ranks)
        looks.append(Counted.looks)
    assert looks[1] <= 2.5 * looks[0] + 100, looks
