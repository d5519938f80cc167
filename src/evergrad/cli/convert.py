"""`evergrad convert`: from one format to another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evergrad.cli.completion import one_of
from evergrad.cli.mistakes import given_path
from evergrad.cli.output import JsonOption, print_json, printable, size
from evergrad.wording import counted

if TYPE_CHECKING:
    from evergrad.records import Json

EPILOG = (
    "Examples:\n\n  evergrad convert model.pt model.safetensors\n\n"
    "  evergrad convert checkpoint-500/ all.pt --tensors-only\n\n"
    "  evergrad convert model.pt model.npz --dry-run\n\n"
    "Exit codes: 0 written · 1 with --skip-unread: written without some tensors, which are named; with --dry-run: "
    "something would be lost · "
    "2 usage, unreadable input, or something would be lost (nothing is written then)."
)
_SHOWN = 20


def convert(
    a: Annotated[Path, typer.Argument(metavar="A", parser=given_path, help="A checkpoint: any file or folder.")],
    b: Annotated[
        Path, typer.Argument(metavar="B", parser=given_path, help="The file to write; its ending names the format.")
    ],
    to: Annotated[
        str | None,
        typer.Option(
            help="The format, if the ending does not tell: torch-zip, safetensors, hdf5, npz, npy.",
            autocompletion=one_of("torch-zip", "safetensors", "hdf5", "npz", "npy"),
        ),
    ] = None,
    tensors_only: Annotated[
        bool, typer.Option("--tensors-only", help="Agree to keep tensors and names, and nothing else.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace B if it exists.")] = False,
    skip_unread: Annotated[
        bool,
        typer.Option(
            "--skip-unread", help="With --tensors-only: leave out tensors that cannot be converted (exit 1 if any)."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be lost (exit 1 if something); write nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Convert a checkpoint exactly, or refuse and say what would be lost.

    Tensors stay the same to the bit; nesting, key types, numbers and tied tensors are kept too.
    Tensors of other kinds (quantised, sparse, …), and of types that the target lacks (bfloat16 in npz), are
    refused, also with --tensors-only, unless --skip-unread leaves them out.
    """
    from evergrad import formats
    from evergrad.errors import UsageError

    if skip_unread and not tensors_only:
        raise UsageError("--skip-unread needs --tensors-only")
    with formats.open_checkpoint(a) as source:
        if dry_run:
            losses = formats.losses(source, b, to=to)
            if as_json:
                print_json({"out": str(b), "losses": list(losses)})
            else:
                print("\n".join(f"would lose: {printable(loss)}" for loss in losses) or "nothing would be lost")
            return 1 if losses else 0
        written = formats.convert(
            source, b, to=to, tensors_only=tensors_only, skip_unread=skip_unread, overwrite=overwrite
        )
        left_out = formats.left_out(source, b, to=to) if tensors_only else {}
        unread = formats.unread_tensors(source) if tensors_only else {}
        unwritable = formats.unwritable_tensors(source, b, to=to) if tensors_only else {}
        kept = {name: info.nbytes for name, info in source.tensors.items() if name not in unwritable}
        parts = {name: kept[name] for name in formats.parts_of_unread(source) if name in kept} if unread else {}
        whole = [nbytes for name, nbytes in kept.items() if name not in parts]
    if as_json:
        more: dict[str, Json] = {"left_out": dict(left_out)} if left_out else {}
        if parts:
            more |= {"parts": len(parts), "parts_bytes": sum(parts.values())}
        print_json({"out": str(written), "tensors": len(whole), "total_bytes": sum(whole), **more})
    else:
        for name, what in list(left_out.items())[:_SHOWN]:
            print(f"left out: {printable(name)} ({printable(what)})")
        if len(left_out) > _SHOWN:
            print(f"left out: {len(left_out) - _SHOWN} more; --json names all")
        told = [f"{counted(len(whole), 'tensor')}, {size(sum(whole))}"]
        if parts:
            told.append(f"{counted(len(parts), 'part')} of tensors that are left out, {size(sum(parts.values()))}")
        if left_out:
            values = len(left_out) - len(unwritable)
            told += [f"{counted(len(unwritable), 'tensor')} left out"] if unwritable else []
            told += [f"{counted(values, 'value')} left out"] if values else []
        print(f"{printable(written)}: {'; '.join(told)}")
    return 1 if unread or unwritable else 0
