"""`evergrad doctor`: is this machine fit for it?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evergrad.cli.output import JsonOption, console, print_json, printable
from evergrad.errors import UsageError

if TYPE_CHECKING:
    from evergrad.doctor import Check
    from evergrad.records import Json

EPILOG = (
    "Examples:\n\n  evergrad doctor\n\n  evergrad doctor --folder /scratch --json\n\n"
    "ok: will do · degraded: works, and something can be done for more · failed: has to be mended · "
    "unknown: could not be judged. What to do stands after the arrow.\n\n"
    "Exit codes: 0 nothing failed · 1 something failed · 2 usage."
)
_STYLES = {"ok": "green", "degraded": "yellow", "failed": "bold red", "unknown": "dim"}


def doctor(
    folder: Annotated[Path, typer.Option(metavar="DIR", help="Measure the disk of this folder.")] = Path(),
    as_json: JsonOption = False,
) -> int:
    """Look at this machine: versions, extras, GPUs, memory, disk speed, limits; and say what to do.

    Takes some seconds: torch is imported, and at most 64 MB are written to the
    folder and removed. Nothing else is changed, and no network is used.
    """
    from evergrad import __version__
    from evergrad.doctor import examine, worst

    if not folder.is_dir():
        what = "is no folder" if folder.exists() else "there is no such folder"
        raise UsageError(f"--folder: {folder}: {what}. Name one whose disk is to be measured.")
    groups: list[tuple[str, list[Check]]] = []
    with _telling() as tell:
        for group in examine(folder, tell=tell):
            groups.append(group)
    checks = [check for _, found in groups for check in found]
    verdict = worst(checks)
    if as_json:
        rows: list[Json] = [{"group": name, **check.to_json()} for name, found in groups for check in found]
        print_json({"evergrad": __version__, "verdict": verdict, "checks": rows})
    else:
        _print(groups)
        counts = [(each, sum(check.verdict == each for check in checks)) for each in _STYLES]
        print(f"\n{verdict}: {', '.join(f'{count} {each}' for each, count in counts if count)}")
    return 1 if verdict == "failed" else 0


def _print(groups: list[tuple[str, list[Check]]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, max_width=16)
    table.add_column(overflow="fold")
    for number, (name, found) in enumerate(groups):
        if number:
            table.add_row("", "", "")
        table.add_row(Text(name, style="bold"), "", "")
        for check in found:
            told = Text(printable(check.found))
            if check.todo:
                told.append(f"\n→ {printable(check.todo)}", style="" if check.verdict == "ok" else "bold")
            table.add_row(Text(check.verdict, style=_STYLES[check.verdict]), Text(printable(check.name)), told)
    console().print(table)


@contextmanager
def _telling() -> Iterator[Callable[[str], None]]:
    """What is looked at now, on a terminal; gone when it has been."""
    from rich.console import Console

    screen = Console(stderr=True)
    if not screen.is_terminal or screen.is_dumb_terminal or not sys.stderr.isatty():
        yield lambda what: None
        return
    with screen.status("…") as status:
        yield lambda what: status.update(f"{what} …")
