"""`evergrad timeline`: what happened in a run, as a table and as a page."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evergrad.cli.mistakes import given_path
from evergrad.cli.output import JsonOption, console, near, print_json, printable
from evergrad.errors import UsageError

if TYPE_CHECKING:
    from evergrad.report.document import Page
    from evergrad.report.run_model import Interruption, RunFolder, RunStory

EPILOG = (
    "Examples:\n\n  evergrad timeline runs/kill\n\n  evergrad timeline runs/kill --out kill.html\n\n"
    "  evergrad timeline runs/kill --json --no-page\n\n"
    "seen: from the failure until another process knew · agreed: until the plan for the next generation · going on: "
    "until the first rank had applied a step again. Where nobody noted when it failed, seen is a question mark and in "
    "all counts from there. A run that goes on is shown as it stands.\n\n"
    "Without plotly the table is printed, no page is written, and a line says how to get it.\n\n"
    "Exit codes: 0 told · 2 usage, no timeline that can be read, or no page where --out asks for one."
)
_SHOWN = 40


def timeline(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", parser=given_path, help="The folder of the run: evergrad run --out.")
    ],
    out: Annotated[Path | None, typer.Option(help="The page; RUN/timeline.html by default.")] = None,
    no_page: Annotated[bool, typer.Option("--no-page", help="Print only: write no page.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Tell what happened in a run: each failure from its moment to the next step, as a table and as a page."""
    from evergrad.report.page import checked_target, missing_for, write_page
    from evergrad.report.run_events import analyse
    from evergrad.report.run_model import read_run

    if out is not None and no_page:
        raise UsageError("--out and --no-page: expected one of them, found both")
    if out is not None and not out.absolute().parent.is_dir():
        raise UsageError(f"{out}: there is no folder {str(out.parent)!r}")
    target = None if no_page else checked_target(out if out is not None else run / "timeline.html")
    folder = read_run(run)
    story = analyse(folder.events, folder.notes)
    if not as_json:
        _print(story)
    page, missing = None, ""
    if target is not None:
        page = _page(story, folder)
        missing = missing_for(page)
    written = write_page(page, target) if page is not None and target is not None and not missing else None
    if as_json:
        print_json({"run": str(run), "page": None if written is None else str(written), **story.to_json()})
    elif written is not None:
        print(printable(f"{near(written)}: the same as a page, with pictures"))
    if missing:
        print(printable(f"evergrad: no page is written: {missing}"), file=sys.stderr)
    # A page that was asked for by its name is a result; the one beside the table is an addition to it.
    return 2 if missing and out is not None else 0


def _page(story: RunStory, folder: RunFolder) -> Page:
    from evergrad import __version__
    from evergrad.report.run_page import run_page

    made = f"evergrad timeline {__version__}, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}"
    return run_page(story, folder, made)


def _print(story: RunStory) -> None:
    from evergrad.report.run_figures import caveats, summary
    from evergrad.wording import counted

    if story.failures:
        _print_failures(story.failures[:_SHOWN])
        more = len(story.failures) - _SHOWN
        print(f"… and {counted(more, 'more failure')}: --json has them all\n" if more > 0 else "")
    for note in story.notes:
        print(printable(note))
    print(printable(summary(story)))
    if story.inexact:
        print(printable(f"not as without failures: {story.inexact}"))
    elif story.failures and story.unverified and story.outcome == "finished":
        print(printable(f"not verified to be as without failures: {story.unverified}"))
    for line in caveats(story):
        print(line)


def _print_failures(failures: tuple[Interruption, ...]) -> None:
    from rich.table import Table
    from rich.text import Text

    from evergrad.report.run_figures import duration, then

    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for name in ("failure", "step", "seen", "agreed", "going on", "in all", "then"):
        is_number = name not in ("failure", "then")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for each in failures:
        took = {phase.name: duration(phase.seconds) for phase in each.phases}
        cells = (
            each.what, "?" if each.step is None else each.step, took.get("unseen", "?"), took.get("agreeing", "?"),
            took.get("recovering", "?"), duration(each.seconds), then(each),
        )  # fmt: skip
        table.add_row(*(Text(printable(cell)) for cell in cells))
    out = console()
    out.width = min(out.width, 80)  # one row a failure: what is long is folded
    out.print(table)
