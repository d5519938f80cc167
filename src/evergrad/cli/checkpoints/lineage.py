"""`evergrad checkpoints lineage`: which version came from which."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evergrad.cli.checkpoints.arguments import RunDir, age, catalogue_of, say_unseen, where_it_is
from evergrad.cli.output import JsonOption, console, print_json, printable
from evergrad.errors import UsageError

if TYPE_CHECKING:
    from evergrad.checkpoint.catalogue.lineage import Lineage, Node

EPILOG = (
    "Examples:\n\n  evergrad checkpoints lineage runs/r50\n\n"
    "  evergrad checkpoints lineage runs/r50 --picture r50.svg\n\n"
    "● can be restored · ○ is gone · ◌ is not known here · ◉ ◎ are pinned\n\n"
    "Exit codes: 0 shown · 2 usage or unreadable input."
)


def lineage(
    run_dir: RunDir,
    picture: Annotated[Path | None, typer.Option(help="Draw it into this file, as SVG.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the picture if it exists.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Show what each version was trained from: in its attempt, across restarts, across jobs; newest first."""
    from evergrad.checkpoint.catalogue.lineage import trace

    if picture is not None:
        _check_picture(picture, overwrite)
    catalogue = catalogue_of(run_dir)
    traced = trace(catalogue)
    if picture is not None:
        from evergrad.checkpoint.catalogue.picture import draw_svg
        from evergrad.formats.durable import replacing

        with replacing(picture) as temporary:
            temporary.write_text(draw_svg(traced), encoding="utf-8")
    if as_json:
        print_json(traced.to_json())
    elif picture is not None:
        count = len(traced.nodes)
        print(printable(f"{picture}: {count} version{'' if count == 1 else 's'}"))
    else:
        say_unseen(traced.notes)
        _print(traced)
    return 0


def _check_picture(picture: Path, overwrite: bool) -> None:
    if picture.suffix != ".svg":
        raise UsageError(f"{picture}: the picture is drawn as SVG: choose a name that ends in .svg")
    if picture.exists() and not overwrite:
        raise UsageError(f"{picture}: exists already. Choose another name, or replace it: --overwrite.")
    if not picture.absolute().parent.is_dir():
        raise UsageError(f"{picture}: there is no folder {str(picture.parent)!r}")


def _print(traced: Lineage) -> None:
    from rich.text import Text

    from evergrad.checkpoint.catalogue.graph import draw

    out = console()
    if not traced.nodes:
        print(printable(f"{traced.job}: no versions"))
    for drawing, node in draw(traced):
        row = Text(f"{drawing}  ", style="cyan")
        if node is not None:
            row.append(printable(_name(node, traced.job)), style="bold" if node.look == "restorable" else "dim")
            row.append(printable(_told(node)), style="")
        out.print(row, overflow="ellipsis", no_wrap=True)


def _name(node: Node, job: str) -> str:
    return node.version.name if node.job == job else f"{node.job}/{node.version.name}"


def _told(node: Node) -> str:
    if node.entry is None:
        return "  not known here"
    kept = f"[{', '.join(node.tags)}]" if node.tags else "[pinned]" if node.pinned else ""
    told = [f"step {node.version.step}", where_it_is(node.entry), f"{age(node.entry.time)} ago", kept]
    return "  " + " · ".join(filter(None, told))
