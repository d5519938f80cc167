"""`evergrad checkpoints report`: a job's versions as a page."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from evergrad.cli.checkpoints.arguments import RunDir, catalogue_of, say_unseen
from evergrad.cli.output import JsonOption, near, print_json, printable
from evergrad.errors import UsageError

EPILOG = (
    "Examples:\n\n  evergrad checkpoints report runs/r50\n\n"
    "  evergrad checkpoints report s3://bucket/r50 --out r50.html\n\n"
    "Without plotly what is wrong is printed and no page is written.\n\n"
    "Exit codes: 0 written · 2 usage, unreadable input, or no page could be written."
)


def report(
    run_dir: RunDir,
    out: Annotated[Path | None, typer.Option(help="The page; RUN_DIR/checkpoints.html by default.")] = None,
    as_json: JsonOption = False,
) -> int:
    """Write a page: what is wrong, which versions can be restored, where they are, and what came from what."""
    from evergrad import __version__
    from evergrad.report.checkpoints_page import answer, checkpoints_page, look, problems
    from evergrad.report.page import checked_target, missing_for, plain_text, write_page

    catalogue = catalogue_of(run_dir)
    if out is None:
        if catalogue.home.run_dir is None:
            raise UsageError(f"{catalogue.label}: is a tier, and no page is put there. Name a file: --out FILE")
        out = catalogue.home.run_dir / "checkpoints.html"
    checked_target(out)
    seen = look(catalogue)
    made = f"evergrad checkpoints report {__version__}, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}"
    made_page = checkpoints_page(seen, made)
    missing = missing_for(made_page)
    page = None if missing else write_page(made_page, out)
    if as_json:
        print_json(
            {
                "job": seen.job,
                "page": None if page is None else str(page),
                "answer": [plain_text(line) for line in answer(seen)],
                "problems": [plain_text(line) for line in problems(seen)],
                "versions": [entry.to_json() for entry in seen.entries],
            }
        )
    else:
        say_unseen(seen.unseen)
        for line in answer(seen)[:1] + [line for line in problems(seen) if not line.startswith("Not seen")]:
            print(printable(plain_text(line)))
    if page is None:
        print(printable(f"evergrad: no page is written: {missing}"), file=sys.stderr)
        return 2
    if not as_json:
        print(printable(f"{near(page)}: all of it, as a page"))
    return 0
