"""`evergrad diff`: how two checkpoints differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evergrad.cli.output import JsonOption, console, print_json, progress

if TYPE_CHECKING:
    from evergrad.records import Comparison, TensorDiff

__all__ = ["EPILOG", "diff"]

EPILOG = (
    "Examples:\n\n  evergrad diff before.pt after.pt\n\n"
    "  evergrad diff model.pt model.safetensors --where 'model/**'\n\n"
    "Exit codes: 0 the same, bit for bit · 1 different · 2 usage or unreadable input."
)


def diff(
    a: Annotated[Path, typer.Argument(help="A checkpoint: any file or folder.")],
    b: Annotated[Path, typer.Argument(help="Another one, in the same or another format.")],
    where: Annotated[list[str] | None, typer.Option(help="Only these tensors of A; as in inspect. Repeatable.")] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Show equal tensors too.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Compare two checkpoints tensor by tensor, across formats.

    Equal means bit for bit. The `module.` and `_orig_mod.` prefixes of DDP and torch.compile are ignored.
    """
    from evergrad.formats import compare

    with progress("comparing") as advance:
        comparison = compare(a, b, where=where, progress=advance)
    if as_json:
        print_json(comparison.to_json())
    else:
        _print(comparison, show_all)
    return 0 if comparison.equal else 1


def _print(comparison: Comparison, show_all: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    if comparison.note:
        print(comparison.note)
    rows = comparison.tensors if show_all else comparison.different
    if rows:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("tensor", overflow="fold")
        table.add_column("verdict")
        table.add_column("changed", justify="right")
        table.add_column("max |Δ|", justify="right")
        table.add_column("non-finite", justify="right")
        for row in rows:
            table.add_row(Text(row.name), Text(_verdict(row)), _changed(row), _delta(row), _nonfinite(row))
        console().print(table)
        print()
    if comparison.equal:
        print(f"equal: all {len(comparison.tensors)} tensors, bit for bit")
    else:
        print(f"different: {len(comparison.different)} of {len(comparison.tensors)} tensors")


def _verdict(row: TensorDiff) -> str:
    name = f" (there: {row.other_name})" if row.other_name else ""
    return f"{row.status} {row.detail}".strip() + name


def _changed(row: TensorDiff) -> str:
    return f"{row.changed:,} of {row.numel:,}" if row.changed else ""


def _delta(row: TensorDiff) -> str:
    return f"{row.max_abs:.3g}" if row.changed else ""


def _nonfinite(row: TensorDiff) -> str:
    return f"{row.nonfinite_a:,} → {row.nonfinite_b:,}" if row.nonfinite_a or row.nonfinite_b else ""
