"""`evergrad checkpoints ls`: which versions there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from evergrad.cli.checkpoints.arguments import RunDir, age, catalogue_of, kept, say_unseen, verified, where_it_is
from evergrad.cli.output import JsonOption, console, print_json, printable, size

if TYPE_CHECKING:
    from evergrad.checkpoint.catalogue.records import CatalogueEntry

EPILOG = (
    "Examples:\n\n  evergrad checkpoints ls runs/r50\n\n  evergrad checkpoints ls s3://bucket/r50 --json\n\n"
    "Exit codes: 0 listed · 2 usage or unreadable input."
)
_WIDE = 120
_SPARED = ("step", "attempt", "parent")
_WHOLE = ("version", "age", "ranks", "size", "verified")


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

    out = console()
    rows = []
    for entry in entries:
        version = entry.version
        rows.append({
            "version": version.name, "step": version.step, "attempt": version.attempt, "age": age(entry.time),
            "ranks": entry.world_size or "?", "size": size(entry.size_bytes), "tiers": where_it_is(entry),
            "verified": verified(entry), "guard": "ok" if entry.guarded else "", "kept": kept(entry),
            "parent": entry.parent or "",
        })  # fmt: skip
    columns = list(rows[0])
    if out.width < _WIDE:  # what the name says too, what nobody has, and what show tells
        columns = [name for name in columns if name not in _SPARED and any(row[name] != "" for row in rows)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        right = name in ("step", "attempt", "age", "ranks", "size")
        table.add_column(name, overflow="fold", justify="right" if right else "left", no_wrap=name in _WHOLE)
    for entry, row in zip(entries, rows, strict=True):
        table.add_row(*(Text(printable(row[name])) for name in columns), style="dim" if entry.retired else None)
    out.print(table)
