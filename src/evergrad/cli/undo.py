"""`evergrad undo`: every byte back to what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evergrad.cli.mistakes import given_path
from evergrad.cli.output import JsonOption, near, print_json, printable, progress

EPILOG = (
    "Examples:\n\n  evergrad undo bad.pt.faults.jsonl\n\n  evergrad undo faults.jsonl moved/bad.pt\n\n"
    "Exit codes: 0 the file is as it was · 2 usage, or a file that changed since (nothing is changed then)."
)


def undo(
    log: Annotated[Path, typer.Argument(metavar="LOG", parser=given_path, help="The log of the injection.")],
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", parser=given_path, help="The altered file or folder, if it has moved since."),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Bring a file back, byte for byte, to what it was before an injection.

    An injection that was killed half-way is undone too. Several injections into
    the same file are undone newest first.
    """
    from evergrad import injection

    with progress("restoring") as advance:
        done = injection.undo(log, file, progress=advance)
    if as_json:
        print_json(done.to_json())
    elif done.was is injection.Was.CLEAN:
        print(f"{printable(near(done.path))}: nothing to undo, it is as it was before the injection")
    else:
        found = "was injected only in part; " if done.was is injection.Was.PARTLY else ""
        where = printable(near(done.path))
        what = f"{done.elements:,} element{'s' if done.elements != 1 else ''} restored"
        print(f"{where}: {found}{what}, byte for byte as before")
    return 0
