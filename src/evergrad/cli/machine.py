"""`evergrad doctor`, `agent`: this machine, and the checkpoint agent on it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evergrad.cli.output import JsonOption, console, given_path, print_json, printable
from evergrad.errors import UsageError

if TYPE_CHECKING:
    from evergrad.doctor import CheckResult
    from evergrad.records import Json


EPILOG_DOCTOR = (
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
    groups: list[tuple[str, list[CheckResult]]] = []
    with _status_line() as tell:
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


def _print(groups: list[tuple[str, list[CheckResult]]]) -> None:
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
def _status_line() -> Iterator[Callable[[str], None]]:
    """What is looked at now, on a terminal; gone when it has been."""
    from rich.console import Console

    screen = Console(stderr=True)
    if not screen.is_terminal or screen.is_dumb_terminal or not sys.stderr.isatty():
        yield lambda what: None
        return
    with screen.status("…") as status:
        yield lambda what: status.update(f"{what} …")


# `evergrad agent`: finish the versions of a job on this node.

EPILOG_AGENT = (
    "Example: evergrad agent runs/r50 --node n1\n\nA Checkpointer starts one by itself; run it yourself where a daemon "
    "would be killed, as a child of your launcher.\n\nExit codes: 0 it served, or another one does · 2 usage, or it "
    "cannot serve."
)


def agent(
    run_dir: Annotated[
        Path,
        typer.Argument(metavar="RUN_DIR", parser=given_path, help="The job's run folder, as given to Checkpointer."),
    ],
    node: Annotated[str | None, typer.Option(help="This node's name; EVERGRAD_NODE, or the host's.")] = None,
    linger: Annotated[
        float | None, typer.Option(min=0, help="Seconds to stay without work and trainers; EVERGRAD_LINGER, or 60.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return when it serves, in a session of its own.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Digest, write and retire what trainers on this node capture, until nothing is owed and nobody is there."""
    import logging
    import os
    import sys

    from evergrad.checkpoint.agent.agent import linger_seconds, run_agent
    from evergrad.checkpoint.run_folder import RunFolder

    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(message)s"
    )
    if not run_dir.is_dir():
        from evergrad.errors import FileAccessError

        raise FileAccessError(run_dir, "is no run folder: a Checkpointer makes one")
    job = RunFolder.open(run_dir, node)

    def ready() -> None:
        if as_json:
            print_json({"job": job.id, "node": job.node, "pid": os.getpid(), "run_dir": str(job.run_dir)})
        elif not detach:
            print(f"{printable(job.id)}: agent {os.getpid()} serves node {printable(job.node)}", flush=True)
        sys.stdout.flush()

    if not run_agent(job, linger_s=linger_seconds(linger), detach=detach, ready=ready) and not as_json:
        print(f"{printable(job.id)}: another agent serves node {printable(job.node)}")
