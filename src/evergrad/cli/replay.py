"""`evergrad replay`: the faults of a log again, in the same or another checkpoint."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evergrad.cli.inject import report
from evergrad.cli.mistakes import given_path
from evergrad.cli.output import JsonOption, progress
from evergrad.errors import DamagedFile, FileAccessError, reason, said

if TYPE_CHECKING:
    from evergrad.injection.replay import Rename

EPILOG = (
    "Examples:\n\n  evergrad replay faults.jsonl model.pt --out bad.pt\n\n"
    "  evergrad replay faults.jsonl model.keras --rename auto --out bad.keras\n\n"
    "  evergrad replay faults.jsonl other.pt --rename map.toml --out bad.pt\n\n"
    "map.toml: 'conv1.weight' = 'predictor/conv1/W', or "
    "'fc.weight' = { to = 'dense/kernel', axes = [1, 0] } where the axes have another order.\n\n"
    "Exit codes: 0 done · 2 usage or unreadable input (nothing is changed then)."
)


def replay(
    log: Annotated[Path, typer.Argument(metavar="LOG", parser=given_path, help="The log of an injection.")],
    other: Annotated[
        Path, typer.Argument(metavar="OTHER", parser=given_path, help="A checkpoint: any file or folder.")
    ],
    rename: Annotated[
        str | None, typer.Option(help="auto: match tensors across frameworks; or a TOML file of names.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option(help="With --rename auto: the file that was injected, if it has moved.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write a copy with the faults here.")] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Alter OTHER itself.")] = False,
    log_to: Annotated[
        Path | None, typer.Option("--log", help="Where to keep the new log. Default: OUT.faults.jsonl.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would happen; change nothing.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Let the faults of a log happen again: the same elements, the same bits.

    Nothing is drawn. Onto the same file that gives the same bytes.
    """
    from evergrad import injection

    names: Rename = None
    if rename is not None:
        names = "auto" if rename == "auto" else _read_map(Path(rename))
    with progress("copying") as advance:
        done = injection.replay(
            log,
            other,
            rename=names,
            source=source,
            out=out,
            in_place=in_place,
            log_to=log_to,
            overwrite=overwrite,
            dry_run=dry_run,
            progress=advance,
        )
    report(done, as_json, out if out is not None else other)
    return 0


def _read_map(path: Path) -> Rename:
    """Names, or names with axes, from a TOML file; quoted or dotted keys mean the same."""
    from evergrad.formats import Match
    from evergrad.formats.data_file import read_small

    try:
        told = tomllib.loads(read_small(path).decode("utf-8-sig"))
    except OSError as error:
        what = f"cannot be read: {reason(error)}"
        raise FileAccessError(path, what, hint="Give 'auto', or a TOML file of names.") from None
    except (ValueError, RecursionError) as error:
        raise DamagedFile(path, f"is no TOML: {said(error)}") from None
    found: dict[str, str | Match] = {}

    def take(prefix: str, table: dict[str, object]) -> None:
        for key, value in table.items():
            name = f"{prefix}{key}"
            if isinstance(value, str):
                found[name] = value
            elif isinstance(value, dict) and isinstance(value.get("to"), str):
                axes = value.get("axes")
                if axes is not None and not (isinstance(axes, list) and sorted(axes) == list(range(len(axes)))):
                    raise DamagedFile(path, f"{name}: axes", expected="an order such as [1, 0]", found=axes)
                found[name] = Match(name, value["to"], tuple(axes) if axes else None)
            elif isinstance(value, dict):  # an unquoted conv1.weight is a table to TOML
                take(f"{name}.", value)
            else:
                raise DamagedFile(path, f"{name}: wrong value", expected="a name in quotes", found=value)

    take("", told)
    return found
