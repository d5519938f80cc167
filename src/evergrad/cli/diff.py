"""`evergrad diff`: how two checkpoints differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evergrad.cli.mistakes import given_path
from evergrad.cli.output import JsonOption, print_json, print_rows, printable, progress
from evergrad.wording import counted

if TYPE_CHECKING:
    from evergrad.records import Comparison, TensorDiff

_SHOWN_VALUES = 20

EPILOG = (
    "Examples:\n\n  evergrad diff before.pt after.pt\n\n"
    "  evergrad diff model.pt model.safetensors --where 'model/**'\n\n"
    "  evergrad diff model.pt model.npz --tensors-only\n\n"
    "Exit codes: 0 the same, bit for bit · 1 different, or unknown: something could not be compared, and is named, or "
    "there was nothing to compare · 2 usage or unreadable input."
)


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", parser=given_path, help="A checkpoint: any file or folder.")],
    b: Annotated[
        Path, typer.Argument(metavar="B", parser=given_path, help="Another one, in the same or another format.")
    ],
    where: Annotated[
        list[str] | None, typer.Option(help="Only these tensors and values; as in inspect. Repeatable.")
    ] = None,
    tensors_only: Annotated[
        bool, typer.Option("--tensors-only", help="Leave out values besides tensors, as convert --tensors-only does.")
    ] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Show equal tensors too.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Compare two checkpoints tensor by tensor, across formats.

    Equal means bit for bit; values besides tensors count as well. The `module.`
    and `_orig_mod.` prefixes of DDP and torch.compile are ignored. Where no name
    is shared, layers are matched by shape and order. What cannot be compared is
    named, and makes the verdict "unknown": values too, if the other format holds
    none, unless --tensors-only leaves them out.
    """
    from evergrad.formats import compare

    with progress("comparing") as advance:
        comparison = compare(a, b, where=where, tensors_only=tensors_only, progress=advance)
    if as_json:
        print_json(comparison.to_json())
    else:
        _print(comparison, show_all)
    return 0 if comparison.equal else 1


def _print(comparison: Comparison, show_all: bool) -> None:
    if comparison.note:
        print(printable(comparison.note))
    rows = comparison.tensors if show_all else comparison.different
    if rows:
        columns = ("tensor", "verdict", "changed", "max |Δ|", "non-finite")
        print_rows(
            columns,
            rows,
            lambda row: (row.name, _verdict(row), _changed(row), _delta(row), _nonfinite(row)),
            right=columns[2:],
        )
        print()
    if comparison.values:
        print("values:")
        for line in comparison.values[:_SHOWN_VALUES]:
            print(f"  {printable(line)}")
        if len(comparison.values) > _SHOWN_VALUES:
            print(f"  and {len(comparison.values) - _SHOWN_VALUES} more")
        print()
    for name, what in list(comparison.uncompared.items())[:_SHOWN_VALUES]:
        print(f"not compared: {printable(name)} ({printable(what)})")
    if len(comparison.uncompared) > _SHOWN_VALUES:
        print(f"not compared: {len(comparison.uncompared) - _SHOWN_VALUES} more; --json names all")
    print(_summary(comparison))


def _summary(comparison: Comparison) -> str:
    left_out = len(comparison.left_out)
    more = f"; {counted(left_out, 'value')} besides tensors {'were' if left_out > 1 else 'was'} not compared"
    return _told(comparison) + (more if left_out else "")


def _told(comparison: Comparison) -> str:
    tensors, values, rest = len(comparison.tensors), len(comparison.values), len(comparison.uncompared)
    if not tensors and not comparison.compared and not values and not rest:
        return "nothing to compare: no tensors" + ("" if comparison.left_out else " and no values")
    compared = counted(comparison.compared, "value") if comparison.compared else ""
    alike = " and ".join(filter(None, [f"{tensors} tensors" if tensors else "", compared]))
    if comparison.equal:
        return f"equal: all {alike}, bit for bit"
    missed = f"{rest} more could not be compared" if rest else ""
    if comparison.verdict == "unknown":
        return f"unknown: {alike} are equal, {missed}" if alike else f"unknown: {missed.replace(' more', '')}"
    told = f", {values} value{'s' if values != 1 else ''}" if values else ""
    return f"different: {len(comparison.different)} of {tensors} tensors{told}" + (f"; {missed}" if missed else "")


def _verdict(row: TensorDiff) -> str:
    name = f" (there: {row.other_name})" if row.other_name else ""
    return f"{row.status} {row.detail}".strip() + name


def _changed(row: TensorDiff) -> str:
    return f"{row.changed:,} of {row.numel:,}" if row.changed else ""


def _delta(row: TensorDiff) -> str:
    return f"{row.max_abs:.3g}" if row.changed else ""


def _nonfinite(row: TensorDiff) -> str:
    return f"{row.nonfinite_a:,} → {row.nonfinite_b:,}" if row.nonfinite_a or row.nonfinite_b else ""
