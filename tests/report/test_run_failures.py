"""Which act ended a rank, what a chain of failures cost, and times that no clock can vouch for."""

from __future__ import annotations

import json

import pytest
from tapes import Tape

from evergrad.report.run_analysis import analyse
from evergrad.report.run_figures import run_answer, summary
from evergrad.report.run_model import Interruption, TimedEvent, float_field
from evergrad.timeline import Event


def only(tape: Tape) -> Interruption:
    """Its one failure, after which it goes on and ends."""
    tape.replace(2, 4)
    tape.go_on(11)
    tape.end(24)
    (failure,) = analyse(tape.events).failures
    return failure


def shifted(tape: Tape, by_s: float, *who: str) -> list[Event]:
    """The same with wall clocks of some that go wrong."""
    return [
        Event(e.time + (by_s if e.source in who else 0), e.monotonic, e.source, e.event, e.fields) for e in tape.events
    ]


def spread() -> Tape:
    """Rank 2 of four is killed, on another machine."""
    tape = Tape(is_spread=True)
    tape.kill(2, 10)
    tape.replace(2, 4)
    tape.go_on(11)
    tape.end(24)
    return tape


@pytest.mark.parametrize("act", ["network_cut_injected", "stop_injected", "slowdown_injected"])
def test_what_a_rank_has_outlived_is_not_why_it_died(act: str) -> None:
    tape = Tape()
    tape.tell("uid 2", act, 100, rank=2, for_s=2.0, **({"uids": [2]} if act == "stop_injected" else {}))
    if act == "network_cut_injected":
        tape.tell("uid 2", "network_restored", 2000, rank=2)
    tape.kill(2, 10, injected=False, after_ms=60_000)
    failure = only(tape)
    assert (failure.failed_s, failure.lost[0].injected) == (None, "")


@pytest.mark.parametrize("act", ["network_cut_injected", "stop_injected"])
def test_what_lasts_until_it_is_seen_is_why(act: str) -> None:
    tape = Tape()
    tape.tell("uid 2", act, 100, rank=2, for_s=2.0, **({"uids": [2]} if act == "stop_injected" else {}))
    tape.kill(2, 10, injected=False, after_ms=1500)
    failure = only(tape)
    assert failure.lost[0].injected == {"network_cut_injected": "cut", "stop_injected": "stop"}[act]
    assert failure.phases[0].seconds == pytest.approx(1.51)


def test_of_several_acts_the_last_before_it_was_seen_is_why() -> None:
    tape = Tape()
    tape.tell("launcher", "stop_injected", 100, ranks=[2], uids=[2])
    tape.kill(2, 10, after_ms=60_000)
    tape.tell("launcher", "kill_injected", 1, ranks=[2], uids=[2])
    failure = only(tape)
    assert failure.lost[0].injected == "kill"
    assert failure.phases[0].seconds == pytest.approx(0.010)


def overlapping() -> Tape:
    """Rank 1 is killed after rank 2's death was seen and before the plan, which still counts on it."""
    tape = Tape(spares=2)
    tape.kill(2, 10)
    tape.tell("uid 1", "kill_injected", 5, ranks=[1], uids=[1])
    tape.replace(2, 4)
    tape.tell("launcher", "process_lost", 1, uid=1, rank=1, code=-9, generation=1, how="SIGKILL")
    tape.replace(1, 5)
    return tape


def test_a_kill_before_the_plan_that_counts_on_the_rank_keeps_its_moment() -> None:
    tape = overlapping()
    tape.go_on(11)
    first, second = analyse(tape.events).failures
    assert [loss.injected for loss in (*first.lost, *second.lost)] == ["kill", "kill"]
    assert [(phase.name, round(phase.seconds, 3)) for phase in second.phases] == [
        ("unseen", 0.021),
        ("agreeing", 0.020),
        ("recovering", 0.070),
    ]


def test_an_act_explains_one_loss_and_no_later_one() -> None:
    tape = Tape(spares=2)
    tape.kill(2, 10)
    tape.tell("uid 1", "network_cut_injected", 5, rank=1, for_s=None)
    tape.replace(2, 4)
    tape.go_on(11)
    tape.kill(1, 20, injected=False)
    tape.replace(1, 5)
    _, second = analyse(tape.events).failures
    assert second.failed_s is None, "it had gone on since"


def test_a_chain_of_failures_is_one_in_the_headline_and_what_did_not_come_about_is_not_told() -> None:
    tape = overlapping()
    tape.go_on(11)
    tape.end(24)
    story = analyse(tape.events)
    assert summary(story).endswith(
        "1 failure and 1 more before it was over, that took 2 ranks, 149 ms to the next step"
    )
    first, second = (line for line in run_answer(story) if "died (SIGKILL)" in line)
    assert "Those left" not in first
    assert "Those left did the mini-batch again, spare 5 joined" in second


def test_the_last_of_a_chain_may_be_the_end_of_the_job() -> None:
    tape = Tape()
    tape.kill(2, 10)
    tape.replace(2, 4)
    tape.kill(1, 10, after_ms=5)
    tape.end(10, "too-few", "too few ranks")
    story = analyse(tape.events)
    assert [each.overtaken for each in story.failures] == [True, False]
    assert "Those left" not in " ".join(run_answer(story))


def test_a_time_below_nought_is_no_time() -> None:
    story = analyse(shifted(spread(), 0.02, "uid 2"))
    (failure,) = story.failures
    assert ([phase.name for phase in failure.phases], failure.seconds) == (["agreeing", "recovering"], None)
    told = json.loads(json.dumps(failure.to_json()))
    assert (told["phases_s"]["unseen"], told["seconds"], told["clocks_disagree"]) == (None, None, True)
    words = " ".join(run_answer(story))
    assert "0.0 ms" not in words
    assert "by a clock that disagrees" in words
    assert "of 1 failure a moment lies before what led to it" in words


@pytest.mark.parametrize("by_s", [5.0, -0.4, 0.4])
def test_no_clock_that_is_wrong_makes_a_negative_time(by_s: float) -> None:
    for who in (("uid 2",), ("uid 0", "uid 1"), ("launcher",)):
        for failure in analyse(shifted(spread(), by_s, *who)).failures:
            assert all(phase.seconds >= 0 for phase in failure.phases)
            assert failure.seconds is None or failure.seconds >= 0


def test_on_one_machine_clocks_do_not_disagree() -> None:
    tape = Tape(spares=2)
    first = tape.kill(1, 5, injected=False)
    second = tape.kill(2, 5, after_ms=3)
    tape.members[1] = 4
    tape.replace(2, 5, dead=[first, second], joiners=[4, 5])
    tape.go_on(6)
    (failure,) = analyse(tape.events).failures
    assert (failure.failed_s, failure.clocks_disagree) == (None, False)
    assert failure.lost[1].failed_s is not None


@pytest.mark.parametrize("outcome", ["finished", "failed", ""])
@pytest.mark.parametrize("exact", [True, None])
def test_exact_is_said_of_runs_alone_that_finished_and_whose_ranks_were_compared(
    outcome: str, exact: bool | None
) -> None:
    tape = Tape()
    if outcome:
        tape.end(24, outcome, exact=exact)
    assert analyse(tape.events).exact is (exact if outcome == "finished" else None)
    tape.events = [event for event in tape.events if event.event != "plan"]
    assert analyse(tape.events).exact is None


def test_a_bad_end_without_a_loss_is_not_called_no_failure() -> None:
    tape = Tape()
    tape.end(3, "failed", "the script ended with 1")
    assert summary(analyse(tape.events)).endswith("failed; no rank was lost")


def test_the_story_is_found_in_a_few_looks_at_each_event(monkeypatch: pytest.MonkeyPatch) -> None:
    tape = Tape(ranks=64, spares=4)
    for place in range(4):
        tape.kill(place, 10 + place)
        tape.replace(place, 64 + place)
        tape.go_on(11 + place)
    looks = 0
    uid = TimedEvent.uid

    def counting(moment: TimedEvent) -> int | None:
        nonlocal looks
        looks += 1
        return uid.__get__(moment)  # type: ignore[no-any-return, attr-defined]

    monkeypatch.setattr(TimedEvent, "uid", property(counting))
    assert len(analyse(tape.events).failures) == 4
    assert looks < 5 * len(tape.events)


@pytest.mark.parametrize(
    "value",
    [10**400, -(10**400), float("inf"), float("nan"), True, "3"],
    ids=["huge", "below", "infinite", "nan", "bool", "text"],
)
def test_a_number_that_is_none_does_no_harm(value: object) -> None:
    assert float_field({"by": value}, "by") is None  # type: ignore[dict-item]
    tape = Tape()
    tape.tell("uid 0", "slowdown_injected", 1, rank=1, by=value, for_s=value)
    tape.tell("uid 0", "stop_injected", 1, ranks=[1], uids=[1], for_s=value)
    assert len(analyse(tape.events).anomalies) == 1


def test_spares_that_end_and_jobs_that_cannot_grow_are_noticed() -> None:
    tape = Tape()
    tape.tell("launcher", "spare_ended", 1, uid=4, joined=False)
    tape.tell("uid 0", "cannot_grow", 1, reason="a spare waits to join, and cannot")
    tape.end(10)
    story = analyse(tape.events)
    assert [one.what for one in story.anomalies] == [
        "spare 4 ended its script without a rank",
        "a spare waits to join, and cannot",
    ]
