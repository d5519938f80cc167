"""`evergrad verify`: is a checkpoint sound?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evergrad.cli.output import JsonOption, console, print_json, printable, progress

if TYPE_CHECKING:
    from evergrad.formats.verify import TensorVerdict, Verification

__all__ = ["EPILOG", "verify"]

EPILOG = (
    "Examples:\n\n  evergrad verify model.pt\n\n"
    "  evergrad verify checkpoint-500/ --where role:optimizer --strict --json\n\n"
    "Exit codes: 0 nothing wrong · 1 something is (with --strict: or could not be checked) · "
    "2 usage or unreadable input."
)


def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A checkpoint: any file or folder.")],
    where: Annotated[list[str] | None, typer.Option(help="Only these tensors; as in inspect. Repeatable.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="A tensor without a checksum counts as wrong.")] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Show sound tensors too.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Look for damage: checksums that do not hold, NaN and infinities, values that no training makes.

    Where a format has no checksums (safetensors, npy, plain HDF5), a flipped
    low bit leaves no trace: such tensors are "unknown", not "ok".
    """
    from evergrad.formats import verify as verify_checkpoint

    with progress("verifying") as advance:
        verification = verify_checkpoint(file, where=where, progress=advance)
    if as_json:
        print_json(verification.to_json())
    else:
        _print(verification, show_all)
    if _nothing_checked(verification):
        return 1 if strict else 0
    return 1 if verification.verdict in _wrong(strict) else 0


def _print(verification: Verification, show_all: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    rows = verification.tensors if show_all else verification.wrong
    parts = {part: check for part, check in verification.container.items() if show_all or check in _wrong(False)}
    if rows or parts:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("tensor", overflow="fold")
        table.add_column("verdict")
        table.add_column("checksum")
        table.add_column("values")
        table.add_column("what", overflow="fold")
        for row in rows:
            cells = (row.name, row.verdict, row.checksum, row.values, _what(row))
            table.add_row(*(Text(printable(cell)) for cell in cells))
        for part, check in parts.items():
            what = "the checksum does not hold" if check in _wrong(False) else "no tensor"
            table.add_row(*(Text(printable(cell)) for cell in (part, check, check, "", what)))
        console().print(table)
        print()
    print(printable(_summary(verification)))


def _what(row: TensorVerdict) -> str:
    """The reason; begun with the tensor's name where it points at one of its elements."""
    if row.reason.startswith("["):
        return f"{row.name}{row.reason}"
    return f"{row.name} {row.reason}" if row.reason.startswith("= ") else row.reason


def _nothing_checked(verification: Verification) -> bool:
    return not verification.tensors and not verification.container


def _summary(verification: Verification) -> str:
    if _nothing_checked(verification):
        return f"nothing to verify: {verification.format}, no tensors"
    tensors = verification.tensors
    bad_parts = sum(check in _wrong(False) for check in verification.container.values())
    unsealed = sum(tensor.checksum == "unknown" for tensor in tensors)
    told = [f"{len(verification.wrong)} of {len(tensors)} tensors wrong"]
    if bad_parts:
        told.append(f"{bad_parts} of {len(verification.container)} other parts wrong")
    if unsealed:
        told.append(f"{unsealed} without a checksum" if unsealed < len(tensors) else "no checksums in this format")
    return f"{verification.verdict}: {verification.format}, {', '.join(told)}"


def _wrong(strict: bool) -> tuple[str, ...]:
    return ("failed", "degraded", "unknown") if strict else ("failed", "degraded")
