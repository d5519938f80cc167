"""`evergrad checkpoints ls`: which versions there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from evergrad.cli.checkpoints.arguments import RunDir, age, catalogue_of, kept, say_unseen, where_it_is
from evergrad.cli.output import JsonOption, console, print_json, printable, size

if TYPE_CHECKING:
    from evergrad.checkpoint.catalogue.records import CatalogueEntry

__all__ = ["EPILOG", "ls"]

EPILOG = (
    "Examples:\n\n  evergrad checkpoints ls runs/r50\n\n  evergrad checkpoints ls s3://bucket/r50 --json\n\n"
    "Exit codes: 0 listed · 2 usage or unreadable input."
)


def ls(
    run_dir: RunDir,
    show_all: Annotated[bool, typer.Option("--all", help="Show versions that are gone, too.")] = False,
    as_json: JsonOption = False,
) -> int:
    """List the versions of a job, newest first, with the tiers that hold all of each."""
    catalogue = catalogue_of(run_dir)
    seen = catalogue.look()
    entries = catalogue.entries(seen)
    shown = [entry for entry in entries if show_all or not entry.retired]
    if as_json:
        rows = [entry.to_json() for entry in shown]
        print_json({"job": catalogue.home.job, "versions": list(rows), "unseen": list(seen.unseen)})
        return 0
    say_unseen(seen.unseen)
    if shown:
        _print(shown)
        print()
    gone = len(entries) - len(shown)
    more = f", and {gone} retired (--all)" if gone else ""
    print(printable(f"{catalogue.home.job}: {len(shown)} version{'' if len(shown) == 1 else 's'}{more}"))
    return 0


def _print(entries: list[CatalogueEntry]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("version", "step", "attempt", "age", "ranks", "size", "tiers", "verified", "guard", "kept", "parent"):
        right = name in ("step", "attempt", "age", "ranks", "size")
        table.add_column(name, overflow="fold", justify="right" if right else "left")
    for entry in entries:
        version = entry.version
        cells = (
            version.name, version.step, version.attempt, age(entry.time), entry.world_size or "?",
            size(entry.size_bytes), where_it_is(entry), entry.verified, "ok" if entry.guarded else "", kept(entry),
            entry.parent or "",
        )  # fmt: skip
        table.add_row(*(Text(printable(cell)) for cell in cells), style="dim" if entry.retired else None)
    console().print(table)
