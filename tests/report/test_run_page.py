"""The story of a run: from events to phases, spans, words and a page; only what the timeline says is said."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tapes import Tape

from evergrad.report.html import page_html, write_page
from evergrad.report.run_analysis import analyse
from evergrad.report.run_figures import run_answer, summary
from evergrad.report.run_model import RunAnalysis, RunFiles, read_run
from evergrad.report.run_page import run_page
from evergrad.timeline import Event

OpenPage = Callable[..., Any]

REAL = Path(__file__).parent.parent / "data" / "run_kill"


def killed() -> Tape:
    """Rank 2 of four is killed after ten steps, and spare 4 takes its place."""
    tape = Tape()
    tape.kill(2, 10)
    tape.replace(2, 4)
    tape.go_on(11)
    tape.end(24)
    return tape


def told(tape: Tape) -> str:
    return " ".join(run_answer(analyse(tape.events)))


def page_of(tape: Tape, folder: Path) -> str:
    read = read_run(tape.write(folder))
    return page_html(run_page(analyse(read.events, read.notes), read, "made by a test"))


def test_the_phases_of_a_failure_are_those_of_its_events() -> None:
    (failure,) = analyse(killed().events).failures
    assert [(phase.name, round(phase.seconds, 6)) for phase in failure.phases] == [
        ("unseen", 0.010),
        ("agreeing", 0.043),
        ("recovering", 0.070),
    ]
    assert failure.seconds == pytest.approx(0.123)
    assert (failure.step, failure.seen_by, failure.verdict, failure.steps_redone) == (10, "rank 0", "redo", 1)
    assert [(loss.who, loss.how, loss.injected) for loss in failure.lost] == [("rank 2", "died (SIGKILL)", "kill")]
    assert failure.joined == ("spare 4",)


def test_a_real_run_is_told_as_it_was() -> None:
    """By: evergrad run -n 4 --spares 1 --preload --fail "kill rank=2 step=10 bucket=0" examples/ddp_evergrad.py."""
    story = analyse(read_run(REAL).events)
    assert summary(story) == ("4 ranks and 1 spare, 24 steps in 8.76 s: finished; 1 failure, 97 ms to the next step")
    words = " ".join(run_answer(story))
    assert "After step 10 rank 2 died (SIGKILL) (on purpose: kill): seen by rank 1 after 11 ms" in words
    assert "last bit" not in words, "it was recorded before ranks were compared"
    assert [process.name for process in story.processes][-1] == "spare 4 → rank 2"
    assert story.progress[0][1] == 0
    assert story.progress[-1][1] == 24


def test_a_death_that_is_noted_after_the_plan_still_belongs_to_it() -> None:
    tape = killed()
    death = next(event for event in tape.events if event.event == "process_lost")
    tape.events.remove(death)
    tape.events.append(Event(death.time + 0.03, death.monotonic + 0.03, death.source, death.event, death.fields))
    (failure,) = analyse(tape.events).failures
    assert failure.lost[0].how == "died (SIGKILL)"
    assert failure.seen_by == "rank 0"


def test_when_a_failure_simply_happens_its_moment_is_not_invented() -> None:
    tape = Tape()
    tape.kill(2, 10, injected=False)
    tape.replace(2, 4)
    tape.go_on(11)
    (failure,) = analyse(tape.events).failures
    assert failure.failed_s is None
    assert [phase.name for phase in failure.phases] == ["agreeing", "recovering"]
    assert "when it failed is not on record" in told(tape)


def test_ranks_that_are_lost_together_are_one_failure() -> None:
    tape = Tape(spares=2)
    first = tape.kill(1, 5)
    second = tape.kill(2, 5, after_ms=3)
    tape.members[1] = 4
    tape.replace(2, 5, dead=[first, second], joiners=[4, 5])
    tape.go_on(6)
    (failure,) = analyse(tape.events).failures
    assert [loss.who for loss in failure.lost] == ["rank 1", "rank 2"]
    assert "1 failure that took 2 ranks" in told(tape)


def test_who_leaves_on_purpose_has_not_failed() -> None:
    tape = Tape()
    for uid in tape.members:
        tape.tell(f"uid {uid}", "report", 1, generation=0, step=11, kind="join")
    tape.tell("launcher", "generation_broken", 1, generation=0, reason="others join or leave")
    tape.replace(2, 4, dead=[], left=[2], verdicts={"retry": 4})
    tape.end(24)
    story = analyse(tape.events)
    assert story.failures == ()
    assert [each.what for each in story.interruptions] == ["rank 2 left"]
    assert "no failure" in told(tape)
    assert "1 planned change of who trains: rank 2 left." in told(tape)


def test_a_generation_that_breaks_before_its_first_step_is_said_so() -> None:
    tape = Tape(spares=2)
    tape.kill(2, 10)
    tape.replace(2, 4)
    tape.kill(1, 10, after_ms=5)
    tape.replace(1, 5)
    tape.go_on(11)
    first, second = analyse(tape.events).failures
    assert (first.overtaken, first.seconds) == (True, None)
    assert (second.overtaken, second.generation) == (False, 1)
    assert "broke, too, before a step was applied" in told(tape)


@pytest.mark.parametrize("exact", [True, None])
def test_to_the_last_bit_is_said_where_the_ranks_were_compared(exact: bool | None) -> None:
    tape = Tape()
    tape.kill(2, 10)
    tape.replace(2, 4)
    tape.go_on(11)
    tape.end(24, exact=exact, unverified="" if exact else "rank 2 was lost between two steps")
    assert ("to the last bit" in told(tape)) == (exact is True)
    assert ("Not verified to be as without failures: rank 2 was lost" in told(tape)) == (exact is None)


def test_a_job_that_ends_with_a_failure_says_why_and_claims_nothing() -> None:
    tape = Tape(ranks=2, spares=0)
    tape.kill(1, 10)
    tape.end(10, "too-few", "too few ranks: 1 of 2 left")
    story = analyse(tape.events)
    assert (story.failures[0].ranks, story.exact) == (None, None)
    assert "too few ranks: 1 of 2 left" in told(tape)
    assert "last bit" not in told(tape)


def test_a_restart_counts_the_steps_that_are_done_again() -> None:
    tape = Tape()
    tape.kill(2, 37)
    tape.replace(2, 4, restart=True, verdicts={"restart": 3})
    tape.tell("uid 0", "restored", 5, step=30, in_process=True)
    tape.go_on(31)
    story = analyse(tape.events)
    assert story.failures[0].steps_redone == 7
    assert [step for _, step in story.progress] == [0, 37, 30, 31]
    assert "7 steps had to be done again" in told(tape)


def test_what_a_guard_has_healed_is_told_and_nothing_is_called_exact() -> None:
    tape = killed()
    tape.tell("uid 1", "corruption_found", 1, step=20, rank=1, path="model/w", what="element 3", healed=True)
    assert analyse(tape.events).exact is None
    assert "healed 1 tensor" in told(tape)
    assert "last bit" not in told(tape)


def test_fewer_ranks_and_lost_samples_are_not_as_without() -> None:
    tape = Tape(spares=0, strategy="forward")
    uid = tape.kill(2, 10)
    tape.members.remove(uid)
    tape.generation = 1
    tape.plan(20, dead=[uid], verdicts={"repair": 3}, strategy="forward", exact=False)
    tape.go_on(11)
    for lost in (3, 16):  # told again after a restart: the last counts
        tape.tell("uid 0", "epoch", 1, epoch=0, step=13, lost=lost)
    story = analyse(tape.events)
    assert (story.exact, story.samples_lost) == (False, 16)
    assert story.inexact == "generation 1 went on with 3 ranks, by forward"


def test_across_machines_the_wall_clock_is_what_there_is() -> None:
    tape = killed()
    begin = tape.events[0]
    begin.fields["settings"]["is_spread"] = True  # type: ignore[index, call-overload]
    elsewhere = [
        Event(e.time, e.monotonic + (7e5 if e.source == "uid 3" else 0), e.source, e.event, e.fields)
        for e in tape.events
    ]
    story = analyse(elsewhere)
    assert story.failures[0].seconds == pytest.approx(0.123, abs=1e-4)
    assert "wall clocks" in " ".join(run_answer(story))


@pytest.mark.parametrize("cut", range(2, 24, 3))
def test_a_run_that_is_cut_short_anywhere_is_told_up_to_there(cut: int, tmp_path: Path) -> None:
    tape = killed()
    tape.events = tape.events[:cut]
    story = analyse(tape.events)
    assert_sound(story)
    folder = tape.write(tmp_path)
    with open(folder / "timeline.jsonl", "a") as file:
        file.write('{"schema_version": 1, "ti')
    (note,) = read_run(folder).notes
    assert note.startswith("No end is on record")


def assert_sound(story: RunAnalysis) -> None:
    """Spans come one after the other, within the run, and no process does two things."""
    for process in story.processes:
        for before, after in zip(process.spans, process.spans[1:], strict=False):
            assert before.end_s <= after.begin_s + 1e-9, process
        for span in process.spans:
            assert 0 <= span.begin_s < span.end_s <= story.seconds + 1e-9, process
    json.dumps(story.to_json(), allow_nan=False)


def test_every_state_lasts_until_the_next_and_the_dead_stay_dead() -> None:
    story = analyse(killed().events)
    assert_sound(story)
    states = {process.name: [span.state for span in process.spans] for process in story.processes}
    assert states["rank 0"] == ["starting", "training", "recovering", "training"]
    assert states["rank 2"] == ["starting", "training", "gone"]
    assert states["spare 4 → rank 2"] == ["spare", "recovering", "training"]


def test_nobody_trains_before_it_has_started() -> None:
    tape = Tape(ranks=2, spares=0)
    first, *_, late = (event for event in tape.events if event.event == "process_started")
    tape.events.remove(late)
    tape.events.append(Event(late.time + 2, late.monotonic + 2, "launcher n1", "process_started", late.fields))
    tape.tell("uid 0", "epoch", 5000, epoch=0, step=5, lost=0)
    story = analyse(tape.events)
    assert_sound(story)
    assert first.monotonic < late.monotonic
    assert [(span.state, span.begin_s > 2) for span in story.processes[1].spans] == [("training", True)]


def test_fields_that_are_not_what_they_should_be_do_no_harm(tmp_path: Path) -> None:
    draw = random.Random(5)
    odd = [None, True, -1, 10**12, 10**400, 2.5, "x", [], [None, "1", -3], {}, {"a": 1}]
    folder = RunFiles(tmp_path, tuple(killed().events), {}, ())
    for _ in range(60):
        events = []
        for event in killed().events:
            fields = {k: draw.choice(odd) if draw.random() < 0.15 else v for k, v in event.fields.items()}
            events.append(Event(event.time, event.monotonic, event.source, event.event, fields))  # type: ignore[arg-type]
        story = analyse(events)
        json.dumps(story.to_json())
        assert run_page(story, folder, "").answer


def test_names_in_a_timeline_stay_texts_in_the_page(tmp_path: Path) -> None:
    bad = "</script><img src=x onerror=alert(1)>"
    tape = killed()
    tape.events = [
        Event(
            e.time,
            e.monotonic,
            e.source,
            e.event,
            {k: v + bad if isinstance(v, str) else v for k, v in e.fields.items()},
        )
        for e in tape.events
    ]
    made = page_of(tape, tmp_path)
    assert "<img" not in made
    assert "&lt;img" in made


def test_a_long_run_makes_a_small_page_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    tape = Tape(ranks=24, spares=0)
    for number in range(150):
        rank, new = number % 24, 24 + number
        tape.start(new, f"spare {new}")
        tape.kill(rank, number * 10, after_ms=60_000)
        tape.replace(rank, new)
        tape.go_on(number * 10 + 1)
    folder = read_run(tape.write(tmp_path))
    page = run_page(analyse(folder.events), folder, "")
    figures = [block for section in page.sections for block in section.blocks if hasattr(block, "traces")]
    assert sum(len(json.dumps(figure.traces)) for figure in figures) < 600_000
    assert "48 of 174 processes are drawn" in figures[0].caption
    assert any("more failures: see the table" in line for line in page.answer)


def test_a_browser_draws_every_picture_and_asks_nobody(tmp_path: Path, open_page: OpenPage) -> None:
    bad = "<img src='https://x.invalid'><b>"
    tape = Tape(spares=2)
    for number, rank in enumerate((2, 1)):
        tape.kill(rank, 10 * (number + 1))
        tape.replace(rank, 4 + number)
        tape.go_on(10 * (number + 1) + 1)
    tape.tell("uid 0", "save_skipped", 1, step=30, reason=bad)
    tape.end(40)
    folder = read_run(tape.write(tmp_path))
    page = write_page(run_page(analyse(folder.events), folder, "made by a test"), tmp_path / "timeline.html")
    opened = open_page(page, width=390, dark=True)
    assert opened.drawn() == 5  # processes, both failures compared, each by itself, steps
    assert (opened.errors, opened.requests, opened.overflow()) == ([], [], 0)
    rows = opened.page.locator("#figure-1 .ytick text").all_text_contents()
    assert rows[::-1] == ["rank 0", "rank 1", "rank 2", "rank 3", "spare 4 → rank 2", "spare 5 → rank 1"]
    assert bad in opened.page.inner_text("#noticed")
    assert opened.page.locator("#failures tbody tr").count() == 2
