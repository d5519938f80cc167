"""`evergrad study report`: a study as one page that opens anywhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from evergrad.cli.output import JsonOption, near, print_json, printable
from evergrad.cli.study.arguments import StudyDir

EPILOG = (
    "Examples:\n\n  evergrad study report runs/nev\n\n  evergrad study report runs/nev --out nev.html --open\n\n"
    "Without plotly the answer is printed and no page is written.\n\n"
    "Exit codes: 0 written · 2 usage, no study there, or a file that cannot be written."
)


def report(
    folder: StudyDir,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to; DIR/report.html without it.")] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Show it in a browser.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Write a study as one HTML file that needs no network: the answer in words, tables, figures, the worst trials."""
    from evergrad.report.page import checked_target, missing_for, plain_text, write_page
    from evergrad.report.study_page import REPORT, study_page

    path = checked_target(out or folder / REPORT)
    page = study_page(folder)
    answer = [plain_text(line) for line in page.answer]
    missing = missing_for(page)
    if not missing:
        write_page(page, path)
    if as_json:
        sections = [one.title for one in page.sections]
        print_json({"file": None if missing else str(path), "answer": [*answer], "sections": [*sections]})
    else:
        for line in answer:
            print(printable(line))
    if missing:
        print(printable(f"evergrad: no page is written: {missing}"), file=sys.stderr)
        return 2
    if not as_json:
        print(printable(near(path)))
    if open_it:
        typer.launch(path.absolute().as_uri())
    return 0
