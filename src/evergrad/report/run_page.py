"""The page of a run: what happened in words, pictures of it, and tables of failures, generations and the rest."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

from evergrad.records import Json
from evergrad.report.document import Block, Cell, Column, Commands, DataTable, Facts, Figure, Page, Prose, Section
from evergrad.report.run_figures import (
    CLOCKS_DISAGREE,
    MOST,
    answer,
    compared_figure,
    duration,
    processes_figure,
    steps_figure,
    then,
    zoom_figure,
)
from evergrad.report.run_model import Interruption, RunFolder, RunStory
from evergrad.wording import counted

_ROWS = 300


def run_page(story: RunStory, folder: RunFolder, made: str) -> Page:
    """The page; `made` says by what, and when."""
    name = folder.path.absolute().name
    return Page(
        title=name or str(folder.path),
        kind="timeline of a run",
        question="What happened in this run, and what did each failure cost?",
        answer=answer(story),
        sections=[section for section in _sections(story, folder) if section.blocks],
        made=made,
    )


def _sections(story: RunStory, folder: RunFolder) -> list[Section]:
    zooms = [zoom_figure(story, each, number) for number, each in enumerate(story.failures[:MOST], 1)]
    drawn = [figure for figure in (compared_figure(story), *zooms) if figure is not None]
    return [
        Section("Processes over time", _figures(processes_figure(story)), "processes"),
        Section("Failures", [*_failures(story), *drawn, *_undrawn(story)], "failures"),
        Section("Steps over time", _figures(steps_figure(story)), "steps"),
        Section("What else was noticed", _noticed(story), "noticed"),
        Section("Generations", _generations(story), "generations", folded=len(story.generations) > 12),
        Section("Processes", _processes(story), "all-processes", folded=True),
        Section("Settings", [Facts(_facts(story, folder))], "settings", folded=True),
        Section("To go on", [Commands(_commands(folder))], "commands"),
    ]


def _figures(figure: Figure | None) -> list[Block]:
    return [figure] if figure is not None else []


def _undrawn(story: RunStory) -> list[Block]:
    more = len(story.failures) - MOST
    return [Prose(f"The first {MOST} failures are drawn one by one; {counted(more, 'more')}.")] if more > 0 else []


def _failures(story: RunStory) -> list[Block]:
    if not story.failures:
        return [Prose("None is on record.")] if story.generations else []
    columns = [
        Column("#", "number"),
        Column("what"),
        Column("after step", "number", "how many steps were applied when the generation broke"),
        Column("not seen", "number", "from the failure until another process knew; ? where nobody noted the failure"),
        Column("agreeing", "number", "from then until the plan for the next generation"),
        Column("recovering", "number", "from the plan until the first rank had applied a step again"),
        Column("in all", "number", "from the failure, or from when it was seen, to that step"),
        Column(
            "then",
            help="what survivors did (redo, repair, retry, restart), who joined, and the ranks left if fewer; "
            "overtaken where the next generation broke, too, before a step was applied",
        ),
        Column("redone", "number", "steps that were done again"),
        Column("exact", help="whether, by the plan, the job went on as it would have without the failure"),
    ]
    rows = [_failure(number, each) for number, each in enumerate(story.failures[:_ROWS], 1)]
    return [DataTable(columns, rows, _limited(len(rows), len(story.failures)))]


def _failure(number: int, each: Interruption) -> list[Cell]:
    took, redone = each.phases_s, each.steps_redone
    exact = "" if each.ranks is None or each.overtaken else "yes" if each.exact else "no"
    return [
        _number(number),
        Cell(each.what),
        _number(each.step),
        *(
            _time(took.get(name)) if name not in took or took[name] is not None else Cell(CLOCKS_DISAGREE)
            for name in ("unseen", "agreeing", "recovering")
        ),
        _time(each.seconds) if not each.clocks_disagree else Cell(CLOCKS_DISAGREE),
        Cell(then(each), mark="bad" if each.ranks is None else ""),
        _number(redone),
        Cell(exact, mark="good" if exact == "yes" else ""),
    ]


def _noticed(story: RunStory) -> list[Block]:
    if not story.noticed:
        return []
    columns = [Column("after", "number"), Column("who"), Column("what")]
    worst = sorted(story.noticed, key=lambda each: each.mark != "bad")[:_ROWS]  # if not all fit, those
    rows = [
        [_time(each.at_s), Cell(each.who), Cell(each.what[:500], mark=each.mark)]
        for each in sorted(worst, key=lambda each: each.at_s)
    ]
    return [DataTable(columns, rows, _limited(len(rows), len(story.noticed)))]


def _generations(story: RunStory) -> list[Block]:
    if not story.generations:
        return []
    columns = [
        Column("generation", "number"),
        Column("began", "number", "after the launcher had begun"),
        Column("lasted", "number"),
        Column("after step", "number"),
        Column("ranks", "number"),
        Column("members", help="what each rank was started as, by rank"),
        Column("joined"),
    ]
    rows = [
        [
            _number(each.number),
            _time(each.begin_s),
            _time(each.end_s - each.begin_s),
            _number(each.first_step),
            _number(len(each.members)),
            Cell(_some(each.members)),
            Cell(_some(each.joined)),
        ]
        for each in story.generations[:_ROWS]
    ]
    return [DataTable(columns, rows, _limited(len(rows), len(story.generations)))]


def _processes(story: RunStory) -> list[Block]:
    columns = [
        Column("started as"), Column("was"), Column("node"), Column("process", "number"), Column("started", "number"),
        Column("ended", "number"), Column("exit code", "number"),
    ]  # fmt: skip
    rows = [
        [
            Cell(each.label),
            Cell(_some([f"rank {rank}" for rank in each.ranks]) or "no rank"),
            Cell(each.node),
            _number(each.pid),
            _time(each.started_s),
            _time(each.exited_s),
            Cell("?" if each.code is None else str(each.code), each.code, "" if each.code in (0, None) else "bad"),
        ]
        for each in story.processes[:_ROWS]
    ]
    return [DataTable(columns, rows, _limited(len(rows), len(story.processes)))] if rows else []


def _facts(story: RunStory, folder: RunFolder) -> list[tuple[str, str]]:
    record = folder.record
    began = folder.events[0].time
    pairs = [
        ("command", story.command),
        ("folder", str(folder.path.absolute())),
        ("host", _shown(record.get("host"))),
        ("began", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(began)) if 0 <= began < 4e9 else ""),
        ("events", f"{story.num_events:,}"),
    ]
    pairs += [(key.replace("_", " "), _shown(value)) for key, value in story.settings.items()]
    never = _summary(record).get("never_happened")
    if isinstance(never, list) and never:
        pairs.append(("scheduled and never happened", _shown(never)))
    return [(key, value) for key, value in pairs if value]


def _commands(folder: RunFolder) -> list[tuple[str, str]]:
    from shlex import quote

    run = quote(str(folder.path))
    return [
        ("This page anew, from what is on record then", f"evergrad timeline {run}"),
        ("The same as data", f"evergrad timeline {run} --no-page --json"),
    ]


def _summary(record: Mapping[str, Json]) -> dict[str, Json]:
    found = record.get("summary")
    return found if isinstance(found, dict) else {}


def _shown(value: Json) -> str:
    if value is None or value in ([], ""):
        return ""
    told = value if isinstance(value, str) else json.dumps(value)
    return told if len(told) <= 400 else f"{told[:400]}…"


def _some(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names) if len(names) <= 16 else f"{', '.join(names[:8])} … ({len(names)} in all)"


def _limited(shown: int, count: int) -> str:
    return f"{shown:,} of {count:,}; evergrad timeline --json has them all." if shown < count else ""


def _number(value: int | None) -> Cell:
    return Cell("?" if value is None else f"{value:,}", value)


def _time(seconds: float | None) -> Cell:
    return Cell(duration(seconds), seconds)
