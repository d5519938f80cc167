"""`evergrad checkpoints report`: a job's versions as a page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from evergrad.cli.checkpoints.arguments import RunDir, catalogue_of, say_unseen
from evergrad.cli.output import JsonOption, near, print_json, printable
from evergrad.errors import UsageError

__all__ = ["EPILOG", "report"]

EPILOG = (
    "Examples:\n\n  evergrad checkpoints report runs/r50\n\n"
    "  evergrad checkpoints report s3://bucket/r50 --out r50.html\n\n"
    "Exit codes: 0 written · 2 usage or unreadable input."
)


def report(
    run_dir: RunDir,
    out: Annotated[Path | None, typer.Option(help="The page; RUN_DIR/checkpoints.html by default.")] = None,
    as_json: JsonOption = False,
) -> int:
    """Write a page: what is wrong, which versions can be restored, where they are, and what came from what."""
    from evergrad import __version__
    from evergrad.report.checkpoints_page import checkpoints_page
    from evergrad.report.checkpoints_reading import look
    from evergrad.report.checkpoints_words import answer, problems
    from evergrad.report.page import checked_target, write_page

    catalogue = catalogue_of(run_dir)
    if out is None:
        if catalogue.home.run_dir is None:
            raise UsageError(f"{catalogue.label}: is a tier, and no page is put there. Name a file: --out FILE")
        out = catalogue.home.run_dir / "checkpoints.html"
    checked_target(out)
    seen = look(catalogue)
    made = f"evergrad checkpoints report {__version__}, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}"
    page = write_page(checkpoints_page(seen, made), out)
    if as_json:
        print_json(
            {
                "job": seen.job,
                "page": str(page),
                "answer": [*answer(seen)],
                "problems": [*problems(seen)],
                "versions": [entry.to_json() for entry in seen.entries],
            }
        )
        return 0
    say_unseen(seen.unseen)
    for line in answer(seen)[:1] + [line for line in problems(seen) if not line.startswith("Not seen")]:
        print(printable(line.strip("*")))
    print(printable(f"{near(page)}: all of it, as a page"))
    return 0
