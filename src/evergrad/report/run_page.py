"""The page of a run: what happened in words, pictures of it, and tables of failures, generations and the rest."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

from evergrad.records import Json
from evergrad.report.page_model import (
    Commands,
    DataTable,
    Facts,
    Figure,
    Prose,
    ReportBlock,
    ReportPage,
    Section,
    TableCell,
    TableColumn,
)
from evergrad.report.run_figures import (
    CLOCKS_DISAGREE,
    MOST,
    compared_figure,
    duration,
    processes_figure,
    run_answer,
    steps_figure,
    verdict_text,
    zoom_figure,
)
from evergrad.report.run_model import Interruption, RunAnalysis, RunFiles
from evergrad.wording import count_of

_ROWS = 300


def run_page(story: RunAnalysis, folder: RunFiles, made: str) -> ReportPage:
    """The page; `made` says by what, and when."""
    name = folder.path.absolute().name
    return ReportPage(
        title=name or str(folder.path),
        kind="timeline of a run",
        question="What happened in this run, and what did each failure cost?",
        answer=run_answer(story),
        sections=[section for section in _sections(story, folder) if section.blocks],
        made=made,
    )


def _sections(story: RunAnalysis, folder: RunFiles) -> list[Section]:
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


def _figures(figure: Figure | None) -> list[ReportBlock]:
    return [figure] if figure is not None else []


def _undrawn(story: RunAnalysis) -> list[ReportBlock]:
    more = len(story.failures) - MOST
    return [Prose(f"The first {MOST} failures are drawn one by one; {count_of(more, 'more')}.")] if more > 0 else []


def _failures(story: RunAnalysis) -> list[ReportBlock]:
    if not story.failures:
        return [Prose("None is on record.")] if story.generations else []
    columns = [
        TableColumn("#", "number"),
        TableColumn("what"),
        TableColumn("after step", "number", "how many steps were applied when the generation broke"),
        TableColumn(
            "not seen", "number", "from the failure until another process knew; ? where nobody noted the failure"
        ),
        TableColumn("agreeing", "number", "from then until the plan for the next generation"),
        TableColumn("recovering", "number", "from the plan until the first rank had applied a step again"),
        TableColumn("in all", "number", "from the failure, or from when it was seen, to that step"),
        TableColumn(
            "then",
            help="what survivors did (redo, repair, retry, restart), who joined, and the ranks left if fewer; "
            "overtaken where the next generation broke, too, before a step was applied",
        ),
        TableColumn("redone", "number", "steps that were done again"),
        TableColumn("exact", help="whether, by the plan, the job went on as it would have without the failure"),
    ]
    rows = [_failure(number, each) for number, each in enumerate(story.failures[:_ROWS], 1)]
    return [DataTable(columns, rows, _limited(len(rows), len(story.failures)))]


def _failure(number: int, each: Interruption) -> list[TableCell]:
    took, redone = each.phases_s, each.steps_redone
    exact = "" if each.ranks is None or each.overtaken else "yes" if each.exact else "no"
    return [
        _number(number),
        TableCell(each.what),
        _number(each.step),
        *(
            _time(took.get(name)) if name not in took or took[name] is not None else TableCell(CLOCKS_DISAGREE)
            for name in ("unseen", "agreeing", "recovering")
        ),
        _time(each.seconds) if not each.clocks_disagree else TableCell(CLOCKS_DISAGREE),
        TableCell(verdict_text(each), mark="bad" if each.ranks is None else ""),
        _number(redone),
        TableCell(exact, mark="good" if exact == "yes" else ""),
    ]


def _noticed(story: RunAnalysis) -> list[ReportBlock]:
    if not story.anomalies:
        return []
    columns = [TableColumn("after", "number"), TableColumn("who"), TableColumn("what")]
    worst = sorted(story.anomalies, key=lambda each: each.mark != "bad")[:_ROWS]  # if not all fit, those
    rows = [
        [_time(each.at_s), TableCell(each.who), TableCell(each.what[:500], mark=each.mark)]
        for each in sorted(worst, key=lambda each: each.at_s)
    ]
    return [DataTable(columns, rows, _limited(len(rows), len(story.anomalies)))]


def _generations(story: RunAnalysis) -> list[ReportBlock]:
    if not story.generations:
        return []
    columns = [
        TableColumn("generation", "number"),
        TableColumn("began", "number", "after the launcher had begun"),
        TableColumn("lasted", "number"),
        TableColumn("after step", "number"),
        TableColumn("ranks", "number"),
        TableColumn("members", help="what each rank was started as, by rank"),
        TableColumn("joined"),
    ]
    rows = [
        [
            _number(each.number),
            _time(each.begin_s),
            _time(each.end_s - each.begin_s),
            _number(each.first_step),
            _number(len(each.members)),
            TableCell(_some(each.members)),
            TableCell(_some(each.joined)),
        ]
        for each in story.generations[:_ROWS]
    ]
    return [DataTable(columns, rows, _limited(len(rows), len(story.generations)))]


def _processes(story: RunAnalysis) -> list[ReportBlock]:
    columns = [
        TableColumn("started as"), TableColumn("was"), TableColumn("node"),
            TableColumn("process", "number"), TableColumn("started", "number"),
        TableColumn("ended", "number"), TableColumn("exit code", "number"),
    ]  # fmt: skip
    rows = [
        [
            TableCell(each.label),
            TableCell(_some([f"rank {rank}" for rank in each.ranks]) or "no rank"),
            TableCell(each.node),
            _number(each.pid),
            _time(each.started_s),
            _time(each.exited_s),
            TableCell("?" if each.code is None else str(each.code), each.code, "" if each.code in (0, None) else "bad"),
        ]
        for each in story.processes[:_ROWS]
    ]
    return [DataTable(columns, rows, _limited(len(rows), len(story.processes)))] if rows else []


def _facts(story: RunAnalysis, folder: RunFiles) -> list[tuple[str, str]]:
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


def _commands(folder: RunFiles) -> list[tuple[str, str]]:
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


def _number(value: int | None) -> TableCell:
    return TableCell("?" if value is None else f"{value:,}", value)


def _time(seconds: float | None) -> TableCell:
    return TableCell(duration(seconds), seconds)
