"""From logs and timelines to numbers: what one kill cost, and where the time went."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.harness import Sample

from evergrad.timeline import Event, read_events

__all__ = ["PHASES", "Kill", "Line", "kills_of", "lines_of", "phases", "recoveries"]

WARM_UP = 4
"""Steps of a generation that are not counted: the first ones set up what the others use."""
PHASES = ("noticed by survivors", "known to the launcher", "plan", "verdict heard", "group, hand-over", "the step")


@dataclass(frozen=True, slots=True)
class Line:
    """What one process wrote; `step` counts applied steps."""

    t: float
    who: int
    event: str
    step: int
    generation: int


@dataclass(frozen=True, slots=True)
class Kill:
    """A SIGKILL: when, and in which generation."""

    t: float
    who: int
    generation: int


def lines_of(folder: Path) -> list[Line]:
    """All processes' lines, in the order of time."""
    texts = [text for path in folder.glob("*.jsonl") for text in path.read_text(encoding="utf-8").splitlines()]
    return sorted((Line(**json.loads(text)) for text in texts), key=lambda line: line.t)


def kills_of(lines: Iterable[Line], timeline: Path | None = None) -> list[Kill]:
    """From the rivals' own lines, or from a timeline of `evergrad run`."""
    if timeline is None:
        return [Kill(line.t, line.who, line.generation) for line in lines if line.event == "killing"]
    found, generation = [], 0
    for event in read_events(timeline):
        if event.event == "plan":
            generation = _number(event, "generation")
        elif event.event == "kill_injected":
            found.append(Kill(event.monotonic, int(event.source.split()[-1]), generation))
    return found


def recoveries(lines: Sequence[Line], kills: Sequence[Kill], *, by_generation: bool = True) -> list[Sample]:
    """What each kill cost; one after which nothing was applied any more is left out.

    `median_s`, `time_s`: until the median survivor, and until all of them, have applied a step after the break;
    `full_s`: until also those that took a dead one's place; `back_s`: until more steps are applied than ever
    before. `by_generation` is False where a generation has no number: then the first new step counts.
    """
    found: list[Sample] = []
    for kill, end in zip(kills, [*(kill.t for kill in kills[1:]), float("inf")], strict=True):
        applied = [line for line in lines if line.event == "applied" and line.t < end]
        before = [line for line in applied if line.t < kill.t or line.generation <= kill.generation]
        if not by_generation:
            before = [line for line in before if line.t < kill.t]
        reached = max((line.step for line in before), default=0)
        after = [line for line in applied if line.t > kill.t and line not in before]
        if not by_generation:
            after = [line for line in after if line.step > reached]
        first = {line.who: line for line in reversed(after)}
        survived = {line.who for line in before if line.generation == kill.generation} & first.keys()
        if not survived:
            continue
        times = [first[who].t - kill.t for who in survived]
        sample = {
            "step_s": step_time(before, kill),
            "median_s": statistics.median(times),
            "time_s": max(times),
            "lost_steps": float(reached + 1 - min(first[who].step for who in survived)),
        }
        sample["beyond_s"] = sample["time_s"] - 2 * sample["step_s"]
        back = {line.who: line.t for line in reversed(after) if line.step > reached}
        if survived <= back.keys():
            sample["back_s"] = max(back[who] for who in survived) - kill.t
        if len(first) > len(survived) or kill.who in survived:
            sample["full_s"] = max(line.t for line in first.values()) - kill.t
        found.append(sample)
    return found


def step_time(lines: Iterable[Line], kill: Kill) -> float:
    """The median step of the generation that was hit, before it was."""
    times: dict[int, list[float]] = {}
    for line in lines:
        if line.generation == kill.generation and line.t < kill.t:
            times.setdefault(line.who, []).append(line.t)
    counted = [each[WARM_UP:] for each in times.values()]
    return statistics.median(b - a for each in counted for a, b in pairwise(each))


def phases(lines: Sequence[Line], timeline: Path, kills: Sequence[Kill]) -> list[Sample]:
    """Where the time until the last survivor's first step went, for each kill; the phases add up to it."""
    events = list(read_events(timeline))
    found: list[Sample] = []
    for kill, end in zip(kills, [*(kill.t for kill in kills[1:]), float("inf")], strict=True):
        within = [event for event in events if kill.t <= event.monotonic < end]
        old, new = kill.generation, kill.generation + 1
        of_old = {name: _times(within, name, old) for name in ("process_lost", "report")}
        of_new = {name: _times(within, name, new) for name in ("plan", "verdict", "recovered")}
        if not all(of_old.values()) or not all(of_new.values()):
            continue
        again = [line.t for line in lines if line.event == "again" and kill.t < line.t < end]
        marks = [
            kill.t,
            max(of_old["report"]),
            max(of_old["process_lost"]),
            max(of_new["plan"]),
            max(of_new["verdict"]),
        ]
        marks += [max(again) if again else marks[-1], max(of_new["recovered"])]
        for index in range(1, len(marks)):  # what came before it was its turn takes no time of its own
            marks[index] = max(marks[index], marks[index - 1])
        found.append({name: b - a for name, a, b in zip(PHASES, marks[:-1], marks[1:], strict=True)})
    return found


def _times(events: Iterable[Event], name: str, generation: int) -> list[float]:
    return [event.monotonic for event in events if event.event == name and _number(event, "generation") == generation]


def _number(event: Event, name: str) -> int:
    value = event.fields[name]
    assert isinstance(value, int)
    return value
