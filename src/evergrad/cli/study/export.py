"""`evergrad study export`: a study's tables and trials as files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evergrad.cli.output import JsonOption, near, print_json, printable
from evergrad.cli.study.arguments import StudyDir

EPILOG = (
    "Example:\n\n  evergrad study export runs/nev --to tables\n\n"
    "Exit codes: 0 written · 2 usage, no study there, or a folder that cannot be written."
)


def export(
    folder: StudyDir,
    to: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where to; DIR/export without it.")] = None,
    as_json: JsonOption = False,
) -> int:
    """Write every table as CSV, Markdown and LaTeX, the trials as CSV, the results as JSON, and the plan."""
    from evergrad.study.exporting import export_study

    written = export_study(folder, to or folder / "export")
    if as_json:
        print_json({"files": [str(path) for path in written]})
        return 0
    for path in written:
        print(printable(near(path)))
    return 0
