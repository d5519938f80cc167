"""`evergrad verify`: is a checkpoint sound?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evergrad.cli.mistakes import given_path
from evergrad.cli.output import JsonOption, print_json, print_rows, printable, progress
from evergrad.wording import counted

if TYPE_CHECKING:
    from evergrad.formats.verify import TensorVerdict, Verification
    from evergrad.records import Check

EPILOG = (
    "Examples:\n\n  evergrad verify model.pt\n\n"
    "  evergrad verify checkpoint-500/ --where role:optimizer --strict --json\n\n"
    "Exit codes: 0 nothing wrong · 1 something is, or something could not be read and has no checksum, and is named, "
    "or a version has no digests of its capture (with --strict: or a tensor has no checksum) · "
    "2 usage or unreadable input."
)
_SHOWN = 20


def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", parser=given_path, help="A checkpoint: any file or folder.")],
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
    if verification.nothing_checked:
        return 1 if strict else 0
    if verification.unverified or verification.doubts:
        return 1
    return 1 if verification.verdict in _wrong(strict) else 0


def _print(verification: Verification, show_all: bool) -> None:
    rows = verification.tensors if show_all else verification.wrong
    parts = {part: check for part, check in verification.container.items() if show_all or check in _wrong(False)}

    def cells(row: TensorVerdict | tuple[str, Check]) -> tuple[str, str, str, str, str]:
        if isinstance(row, tuple):
            part, check = row
            what = "its check failed" if check in _wrong(False) else "no tensor"
            return part, check.value, check.value, "", what
        return row.name, row.verdict.value, row.checksum.value, row.values.value, _what(row)

    if rows or parts:
        both: list[TensorVerdict | tuple[str, Check]] = [*rows, *parts.items()]
        print_rows(("tensor", "verdict", "checksum", "values", "what"), both, cells)
        print()
    for name, check in verification.others.items():
        if check in _wrong(False):
            print(f"{check}: {printable(name)}, which is listed and not read: its checksum does not hold")
    doubted = [row for row in verification.tensors if row.doubt]
    for row in doubted[:_SHOWN]:
        print(f"unknown: {printable(row.name)} ({printable(row.doubt)})")
    if len(doubted) > _SHOWN:
        print(f"unknown: {len(doubted) - _SHOWN} more; --json names all")
    for name, what in list(verification.unverified.items())[:_SHOWN]:
        print(f"not verified: {printable(name)} ({printable(what)})")
    if len(verification.unverified) > _SHOWN:
        print(f"not verified: {len(verification.unverified) - _SHOWN} more; --json names all")
    for name, why in list(verification.doubts.items())[:_SHOWN]:
        print(f"unverified: {printable(name)} ({printable(why)})")
    if len(verification.doubts) > _SHOWN:
        print(f"unverified: {len(verification.doubts) - _SHOWN} more; --json names all")
    print(printable(_summary(verification)))


def _what(row: TensorVerdict) -> str:
    """The reason; begun with the tensor's name where it points at one of its elements."""
    if row.reason.startswith("["):
        return f"{row.name}{row.reason}"
    return f"{row.name} {row.reason}" if row.reason.startswith("= ") else row.reason


def _summary(verification: Verification) -> str:
    from evergrad.records import Check

    if verification.nothing_checked:
        sound = sum(check is Check.OK for check in verification.container.values())
        return f"nothing to verify: {verification.format}, no tensors" + (
            f" ({counted(sound, 'other part')} with a checksum that holds)" if sound else ""
        )
    tensors = verification.tensors
    bad_parts = sum(check in _wrong(False) for check in verification.container.values())
    doubted = sum(bool(tensor.doubt) for tensor in tensors)
    unsealed = sum(tensor.checksum == "unknown" for tensor in tensors) - doubted
    told = [f"{len(verification.wrong)} of {len(tensors)} tensors wrong"]
    if bad_parts:
        told.append(f"{bad_parts} of {len(verification.container)} other parts wrong")
    if verification.unverified:
        told.append(f"{len(verification.unverified)} more not verified")
    if verification.doubts:
        told.append(f"{unsealed} without a digest from the time of the capture")
    elif unsealed:
        told.append(f"{unsealed} without a checksum" if unsealed < len(tensors) else "no checksums in this format")
    if doubted:
        told.append(f"{doubted} with checksums for a part only")
    return f"{verification.verdict}: {verification.format}, {', '.join(told)}"


def _wrong(strict: bool) -> tuple[str, ...]:
    return ("failed", "degraded", "unknown") if strict else ("failed", "degraded")
