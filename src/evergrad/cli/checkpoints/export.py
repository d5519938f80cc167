"""`evergrad checkpoints export`: a version as one plain file."""

from __future__ import annotations

from typing import Annotated

import typer

from evergrad.cli.checkpoints.arguments import RunDir, VersionArgument, catalogue_of
from evergrad.cli.completion import one_of
from evergrad.cli.output import JsonOption, print_json, printable, size
from evergrad.errors import UsageError

EPILOG = (
    "Examples:\n\n  evergrad checkpoints export runs/r50 latest r50.safetensors\n\n"
    "  evergrad checkpoints export s3://bucket/r50 120 model.pt --where 'model/**'\n\n"
    "Exit codes: 0 written · 2 usage, unreadable input, or a shard that is missing or damaged (nothing is written)."
)


def export(
    run_dir: RunDir,
    version: VersionArgument,
    out: Annotated[str, typer.Argument(metavar="OUT", help="A file (.safetensors .pt .h5 .npz), or a folder for DCP.")],
    format: Annotated[
        str | None,
        typer.Option(
            help="If the ending does not tell: safetensors, pt, h5, npz, dcp.",
            autocompletion=one_of("safetensors", "pt", "h5", "npz", "dcp"),
        ),
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="Whose values to take of what each rank has for itself.")] = 0,
    where: Annotated[list[str] | None, typer.Option(help="Only these tensors; as in inspect. Repeatable.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Write the whole state of a version as one file: sharded tensors put together, every digest checked first."""
    from evergrad.checkpoint.catalogue.export import export_version
    from evergrad.formats.version_folder import UNVERIFIED

    catalogue = catalogue_of(run_dir)
    seen = catalogue.look()
    entry = catalogue.resolve(version, catalogue.entries(seen))
    if entry.retired:
        raise UsageError(f"{entry.version.name}: nothing of it is left to export")
    done = export_version(entry, seen, out, format=format, rank=rank, where=where, overwrite=overwrite)
    if as_json:
        row = {"version": entry.version.name, "out": str(done.path), "format": done.format}
        print_json({**row, "tensors": done.tensors, "total_bytes": done.size_bytes, "unverified": entry.unverified})
    else:
        if entry.unverified:
            print(printable(f"unverified: {entry.version.name} ({UNVERIFIED})"))
        told = f"{entry.version.name} as {done.format}, {done.tensors} tensors, {size(done.size_bytes)}"
        print(printable(f"{done.path}: {told}"))
    return 0
