"""The report of a study: its question, the answer in words, then every table and figure that the answer rests on."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

from evergrad.report.blocks import Block, Commands, Facts, Page, Prose, Section
from evergrad.report.markup import literal
from evergrad.report.page import write_page
from evergrad.report.published import Published, published_for
from evergrad.report.study_answer import answer
from evergrad.report.study_bits import bit_blocks
from evergrad.report.study_curves import curve_blocks, final_blocks
from evergrad.report.study_data import StudyData, study_data
from evergrad.report.study_rates import heat_blocks, rate_blocks
from evergrad.report.study_tables import data_table, lead_measure, measures_shown, published_blocks
from evergrad.report.study_watched import watched_figures
from evergrad.report.study_worst import worst_blocks
from evergrad.study.comparisons import compare_cells
from evergrad.study.results import Results
from evergrad.study.table_notes import varying_axes
from evergrad.study.tables import comparisons_table, summary_table, trends_table
from evergrad.study.watched_tables import watched_kinds, watched_table

REPORT = "report.html"

_WATCHED_TITLES = {"costs": "What it costs", "spread": "How far faults spread", "guards": "What guards see"}


def write_study_report(folder: Path, out: Path | None = None) -> Path:
    """Write the report of the study in a folder, to DIR/report.html if not told otherwise; returns the file."""
    return write_page(study_page(folder), out or folder / REPORT)


def study_page(folder: Path) -> Page:
    """The page; a study with no finished trial has one that says so."""
    data = study_data(folder)
    results = data.results
    published = published_for(results)
    lead = lead_measure(results, data.plan, published)
    known = any(cell.known for cell in results.cells)
    sections = [*_results_sections(data, lead, published)] if known else []
    sections.append(Section("Settings, versions, machine", _facts(data), "settings"))
    sections.append(Section("How to cite, and how to go on", _citing(data), "cite"))
    return Page(
        title=data.plan.title or data.plan.study,
        kind=f"study report · {data.plan.study}{f' at scale {results.scale}' if results.scale else ''}",
        question=data.plan.question,
        answer=answer(data, lead),
        sections=[section for section in sections if section.blocks],
        made=f"Evergrad {_version()}, {time.strftime('%Y-%m-%d %H:%M %Z')}",
    )


def _results_sections(data: StudyData, lead: str, published: Published | None) -> list[Section]:
    results = data.results
    kinds = watched_kinds(results)
    sections = [
        Section(title, [*watched_figures(results, kind), data_table(watched_table(results, kind))], kind)
        for kind, title in _WATCHED_TITLES.items()
        if kind in kinds
    ]
    if "costs" in kinds:  # trainings without a fault: outcomes and their rates say nothing
        return sections
    if "guards" in kinds:
        return [*sections, *_course_sections(data, lead)]
    bits = bit_blocks(data, lead)
    sections.append(Section("Sensitivity by bit", bits, "bits"))
    main: list[Block] = [] if bits else rate_blocks(results, lead, published)
    for measure in measures_shown(lead):
        main += published_blocks(results, measure, published)
    sections.append(Section("The study's table", main, "table"))
    sections.append(Section("Sensitivity by place", heat_blocks(results, lead), "places"))
    if published is not None and published.table is not None:
        told = Prose(
            f"As published by {literal(published.source)}; models, data and scale are not those of this study."
        )
        sections.append(Section("As published", [told, published.table], "published", folded=True))
    return [*sections, *_course_sections(data, lead)]


def _course_sections(data: StudyData, lead: str) -> list[Section]:
    """What every study of faults has: all its numbers, and its trainings."""
    results = data.results
    return [
        Section("All columns", [data_table(summary_table(results))], "columns"),
        Section("Which cells differ", _comparisons(results, lead), "comparisons", folded=True),
        Section("How trainings went on", [*final_blocks(data), *curve_blocks(data)], "curves"),
        Section("The worst trials", worst_blocks(data), "worst"),
    ]


def _comparisons(results: Results, lead: str) -> list[Block]:
    blocks: list[Block] = []
    found = compare_cells(results)
    if found:
        table = comparisons_table(results, found)
        blocks += [Prose("\n\n".join(table.notes[:2])), data_table(table)]
    measure = lead if lead in ("nev", "rwc") else "nev"
    if results.rows in varying_axes(results):
        trends = trends_table(results, results.rows, measure)
        if trends.rows:
            blocks += [Prose(trends.notes[0]), data_table(trends)]
    return blocks


def _facts(data: StudyData) -> list[Block]:
    facts = [(name, value) for name, value in data.results.facts.items() if value]
    return [Facts([*facts, *(("note", note) for note in data.results.notes[:20])])]


def _citing(data: StudyData) -> list[Block]:
    folder = shlex.quote(str(data.folder))
    told = f"Evergrad {_version()}, study {data.plan.study}, seed {data.plan.seed}"
    pairs = [("tool", told + (f", commit {data.results.facts['commit']}" if "commit" in data.results.facts else ""))]
    if data.plan.source:
        pairs.insert(0, ("after", data.plan.source))
    if data.plan.differs:
        pairs.insert(1, ("what differs", data.plan.differs))
    lines = [
        ("Every table as CSV, Markdown and LaTeX, and every trial", f"evergrad study export {folder}"),
        ("This page again, after more trainings", f"evergrad study report {folder}"),
    ]
    return [Facts(pairs), Commands(lines)]


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("evergrad")
    except PackageNotFoundError:
        return ""
