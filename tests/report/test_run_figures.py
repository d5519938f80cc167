"""Pictures of a run: what is drawn lasts as long as it did, and rows have names of their own that fit."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from tapes import Tape

from evergrad.report.run_analysis import analyse
from evergrad.report.run_figures import STATES, bars, compared_figure, processes_figure, zoom_figure
from evergrad.report.run_model import ProcessHistory


def bars_of(traces: list[dict[str, Any]], row: str) -> Counter[str]:
    """Seconds in each state, as drawn in a row."""
    drawn: Counter[str] = Counter()
    for trace in traces:
        if "base" in trace:
            for name, seconds in zip(trace["y"], trace["x"], strict=True):
                drawn[trace["name"]] += seconds if name == row else 0
    return drawn


def labelled(*labels: str) -> Tape:
    """A run of processes with these labels that loses its first rank."""
    tape = Tape(ranks=len(labels) - 1, spares=1)
    for event in tape.events:
        if event.event == "process_started":
            event.fields["label"] = labels[int(str(event.fields["uid"]))]
    tape.kill(0, 10)
    tape.replace(0, len(labels) - 1)
    tape.go_on(11)
    tape.end(24)
    return tape


@pytest.mark.parametrize("recovering_ms", [70, 900])
def test_what_is_drawn_of_a_long_run_lasts_about_as_long_as_it_did(recovering_ms: float) -> None:
    tape = Tape(ranks=40, spares=30)
    for number in range(30):
        tape.kill(number, 10 + number)
        tape.replace(number, 40 + number)
        tape.go_on(11 + number, after_ms=recovering_ms)
    tape.end(80)
    story = analyse(tape.events)
    figure = processes_figure(story)
    assert figure is not None
    assert "the one that lasted longest is drawn" in figure.caption
    for uid in (0, 20, 29):
        process = story.processes[uid]
        drawn = bars_of(figure.traces, process.name)
        true: Counter[str] = Counter()
        for span in process.spans:
            true[STATES[span.state][0]] += span.end_s - span.begin_s
        assert sum(drawn.values()) == pytest.approx(sum(true.values()), rel=1e-3)
        for name, seconds in true.items():
            assert drawn[name] == pytest.approx(seconds, abs=0.05 * story.seconds), name


def test_rows_have_names_of_their_own_whatever_the_labels() -> None:
    alike = [(0, "a"), (1, "a (3)"), (2, "a (3, 2)"), (3, "a"), (4, "a")]
    order = bars([ProcessHistory(uid, label) for uid, label in alike], {uid: [] for uid, _ in alike}, 0.0, 1.0)[0]
    assert order["y"] == ["a", "a (3)", "a (3, 2)", "a (3, 3)", "a (4)"]


def test_long_labels_are_cut_beside_the_rows_and_whole_where_the_pointer_is() -> None:
    labels = [f"gpu-{place}.rack-with-a-long-name.datacentre.example.org" for place in range(4)]
    tape = labelled(*labels, "spare-host-with-a-very-long-name-indeed.example.org")
    tape.kill(1, 30, injected=False)
    tape.generation += 1
    tape.plan(10, dead=[1])
    tape.go_on(31)
    story = analyse(tape.events)
    figures = [processes_figure(story), compared_figure(story), zoom_figure(story, story.failures[0], 1)]
    made = [figure for figure in figures if figure is not None]
    assert len(made) == 3
    names = [name for figure in made for trace in figure.traces for name in trace["y"]]
    assert max(map(len, names)) <= 24
    assert any(labels[2] in text for trace in made[0].traces for text in trace.get("hovertext", ()))
