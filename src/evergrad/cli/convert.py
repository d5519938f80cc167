"""`evergrad convert`: from one format to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evergrad.cli.completion import one_of
from evergrad.cli.output import JsonOption, print_json, printable, size

__all__ = ["EPILOG", "convert"]

EPILOG = (
    "Examples:\n\n  evergrad convert model.pt model.safetensors\n\n"
    "  evergrad convert checkpoint-500/ all.pt --tensors-only\n\n"
    "  evergrad convert model.pt model.npz --dry-run\n\n"
    "Exit codes: 0 written · 1 with --dry-run: something would be lost · "
    "2 usage, unreadable input, or something would be lost (nothing is written then)."
)


def convert(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint: any file or folder.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The file to write; its ending names the format.")],
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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be lost (exit 1 if something); write nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Convert a checkpoint exactly, or refuse and say what would be lost.

    Tensors stay the same to the bit; nesting, key types, numbers and tied tensors are kept too.
    """
    from evergrad import formats

    with formats.open_checkpoint(a) as source:
        if dry_run:
            losses = formats.losses(source, b, to=to)
            if as_json:
                print_json({"out": str(b), "losses": list(losses)})
            else:
                print("\n".join(f"would lose: {printable(loss)}" for loss in losses) or "nothing would be lost")
            return 1 if losses else 0
        written = formats.convert(source, b, to=to, tensors_only=tensors_only, overwrite=overwrite)
        count, total = len(source.tensors), sum(info.nbytes for info in source.tensors.values())
    if as_json:
        print_json({"out": str(written), "tensors": count, "total_bytes": total})
    else:
        print(f"{printable(written)}: {count} tensors, {size(total)}")
    return 0
