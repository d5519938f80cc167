"""`evergrad inject`, `undo`, `replay`: soft errors in a checkpoint file."""

from __future__ import annotations

import shlex
import sys
import tomllib
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evergrad.cli.output import JsonOption, complete_words, given_path, print_json, printable, progress, relative_path
from evergrad.errors import DamagedFile, FileAccessError, UsageError, reason, said
from evergrad.wording import did_you_mean

if TYPE_CHECKING:
    from evergrad.injection import Fault, InjectionLog
    from evergrad.injection.replay import Rename


EPILOG = (
    "Examples:\n\n"
    "  evergrad inject model.pt --bits exponent --count 10 --seed 7 --out bad.pt\n\n"
    "  evergrad inject model.h5 --fault scale --factor 4500 --count 1 --where 'model/**' --in-place\n\n"
    "  evergrad inject model.safetensors --rate 5000 --hours 720 --dry-run\n\n"
    "  evergrad inject --config published.yaml --out bad.h5\n\n"
    "What was done is in the log, OUT.faults.jsonl; evergrad undo and evergrad replay take it.\n\n"
    "Exit codes: 0 done · 2 usage or unreadable input (nothing is changed then)."
)

_SHOWN = 10
# The options that each fault takes, as its class calls them; and those that all of them take.
_TAKES = {
    "bitflip": ("bits", "burst"),
    "bitmask": ("mask",),
    "scale": ("factor",),
    "stuckat": ("value", "bits", "burst"),
    "setvalue": ("value",),
}
_ALL_TAKE = ("elements", "stride")
_NEEDS = {"bitmask": "mask", "scale": "factor", "stuckat": "value", "setvalue": "value"}


def inject(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", parser=given_path, help="A checkpoint: any file or folder.")
    ] = None,
    fault: Annotated[
        str | None,
        typer.Option(
            help="bitflip (the default), bitmask, scale, stuckat or setvalue.",
            autocompletion=complete_words("bitflip", "bitmask", "scale", "stuckat", "setvalue"),
        ),
    ] = None,
    bits: Annotated[
        str | None,
        typer.Option(
            help="A bit by number (0 is the sign), 1-8, sign, exponent, exponent-msb or mantissa.",
            autocompletion=complete_words("sign", "exponent", "exponent-msb", "mantissa"),
        ),
    ] = None,
    burst: Annotated[int | None, typer.Option(help="The number of adjacent bits that one fault flips.")] = None,
    mask: Annotated[
        str | None, typer.Option(help="The bits that the fault bitmask flips, such as 101101, at a random alignment.")
    ] = None,
    factor: Annotated[float | None, typer.Option(help="The factor that the fault scale multiplies by.")] = None,
    value: Annotated[
        float | None, typer.Option(help="The value of the fault setvalue, also nan; of the fault stuckat, 0 or 1.")
    ] = None,
    elements: Annotated[
        int | None, typer.Option(help="The number of neighbouring elements that one fault hits alike.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="The distance between the elements of one fault, with --elements.")
    ] = None,
    count: Annotated[int | None, typer.Option(help="The number of faults.")] = None,
    fraction: Annotated[
        float | None, typer.Option(help="The number of faults, as a share of the selected elements, 0 to 1.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="The rate of faults in FIT per Mbit; with --hours their number is drawn (Poisson)."),
    ] = None,
    hours: Annotated[float, typer.Option(help="The number of hours at --rate.")] = 1.0,
    probability: Annotated[
        float | None,
        typer.Option(help="The probability that an attempt becomes a fault; alone, every element is attempted."),
    ] = None,
    where: Annotated[
        list[str] | None, typer.Option(help="Only these tensors: name, glob, re:…, role:…. Repeatable.")
    ] = None,
    sampling: Annotated[
        str | None,
        typer.Option(
            help="element (the default), all different; or tensor first, as in the literature.",
            autocompletion=complete_words("element", "tensor"),
        ),
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Only tensors of this type. Repeatable.")] = None,
    finite_only: Annotated[
        bool, typer.Option("--finite-only", help="Draw again what would become NaN or infinite.")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same bits, everywhere. Default: 0.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write a copy with the faults here.")] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Alter FILE itself.")] = False,
    log: Annotated[Path | None, typer.Option(help="The file of the log. Default: OUT.faults.jsonl.")] = None,
    stale_checksum: Annotated[
        bool, typer.Option("--stale-checksum", help="Leave checksums as they are: rot at rest, not an error in memory.")
    ] = False,
    digest: Annotated[
        str,
        typer.Option(
            help="What is digested: blocks (the blocks that change) or full (whole files too).",
            autocompletion=complete_words("blocks", "full"),
        ),
    ] = "blocks",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
    config: Annotated[
        Path | None, typer.Option(help="Published injector settings: YAML, TOML or JSON. Options here come first.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would happen; change nothing.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Put soft errors into a checkpoint: repeatable from a seed, logged, undoable.

    Flips one bit a fault unless told otherwise. Checksums of the file follow,
    so that it loads as if the error had happened in memory.
    """
    from evergrad import injection

    arguments: dict[str, Any] = {}
    if config is not None:
        published = injection.PublishedSettings.load(config, hdf5_file=file)
        arguments = published.to_inject()
        for note in published.notes:
            print(f"evergrad: {printable(note)}", file=sys.stderr)
    given = {"bits": bits, "burst": burst, "mask": mask, "factor": factor, "value": value}
    given |= {"elements": elements, "stride": stride}
    if config is None or fault is not None:
        arguments["fault"] = _fault(fault or "bitflip", given)
    else:
        arguments["fault"] = _changed(arguments["fault"], given)
    amounts = {"count": count, "fraction": fraction, "rate": rate}
    if any(amount is not None for amount in amounts.values()):
        arguments |= amounts  # also those that are None: they take the place of what the settings say
    chosen = {"probability": probability, "where": where, "sampling": sampling, "dtypes": dtype, "seed": seed}
    arguments |= {name: option for name, option in chosen.items() if option is not None}
    if finite_only:
        arguments["allow_nonfinite"] = False
    path = file if file is not None else arguments.get("path")
    if path is None:
        raise UsageError("which file? Name a checkpoint: evergrad inject FILE …")
    arguments |= {"path": path, "digest": digest}
    with progress("copying") as advance:
        done = injection.inject(
            **arguments,
            hours=hours,
            out=out,
            in_place=in_place,
            log=log,
            stale_checksum=stale_checksum,
            overwrite=overwrite,
            dry_run=dry_run,
            progress=advance,
        )
    report(done, as_json, out if out is not None else path)
    return 0


def report(log: InjectionLog, as_json: bool, out: Path) -> None:
    """What happened: counts, the first faults in words, and where everything is, by the names that were given."""
    if as_json:
        print_json(log.summary() | {"out": str(out) if log.out else None})
        return
    hits = list(islice(log.faults(), _SHOWN + 1))
    for hit in hits[:_SHOWN]:
        print(printable(hit))
    if len(hits) > _SHOWN:
        print(f"and {sum(len(column) for column in log.columns) - _SHOWN:,} more")
    settings = log.settings
    how = "drawn by element" if settings.get("sampling") == "element" else "drawn by tensor first, then element"
    how = f"repeated from log {str(settings['replay_of'])[:8]}" if "replay_of" in settings else how
    print(
        f"{log.attempts:,} attempted, {log.injected:,} injected, {log.changed:,} changed, "
        f"{log.nonfinite:,} non-finite; {how}, seed {settings.get('seed')}"
    )
    for why, names in log.left_out.items():
        shown = ", ".join(_short(printable(name)) for name in names[:3]) + (" …" if len(names) > 3 else "")
        print(f"left out, {why}: {len(names)} tensor{'s' if len(names) != 1 else ''} ({shown})")
    if log.path is None:
        print("dry run: nothing was changed")
    else:
        undo = (
            f"to undo it, evergrad undo {printable(shlex.quote(str(log.path)))}" if log.injected else "nothing was hit"
        )
        print(f"{printable(out)}: {undo}")


def _short(name: str, most: int = 40) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _changed(fault: Fault, given: dict[str, Any]) -> Fault:
    """The fault that settings say, with what the command line says otherwise."""
    settings = _settings(type(fault).__name__.lower(), given)
    return replace(fault, **settings)  # type: ignore[type-var]


def _fault(name: str, given: dict[str, Any]) -> Fault:
    from evergrad.injection.faults import FAULTS

    if name not in _TAKES:
        # Settings have options of their own here: of stuckat:value=1 the first word is the fault.
        hint = did_you_mean(name.partition(":")[0], _TAKES)
        raise UsageError(f"unknown fault {name!r} (expected {', '.join(_TAKES)}).{hint}")
    settings = _settings(name, given)
    needed = _NEEDS.get(name)
    if needed is not None and needed not in settings:
        raise UsageError(f"{name} needs --{needed}")
    return FAULTS[name](**settings)


def _settings(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The options that were given, if the fault takes them."""
    settings = {option: value for option, value in given.items() if value is not None}
    takes = (*_TAKES[name], *_ALL_TAKE)
    wrong = next((option for option in settings if option not in takes), None)
    if wrong is not None:
        raise UsageError(f"--{wrong} is not for {name} (it takes {', '.join('--' + option for option in takes)})")
    if name == "stuckat" and settings.get("value") in (0, 1):
        settings["value"] = int(settings["value"])
    return settings


# `evergrad undo`: every byte back to what it was.

EPILOG_UNDO = (
    "Examples:\n\n  evergrad undo bad.pt.faults.jsonl\n\n  evergrad undo faults.jsonl moved/bad.pt\n\n"
    "Exit codes: 0 the file is as it was · 2 usage, or a file that changed since (nothing is changed then)."
)


def undo(
    log: Annotated[Path, typer.Argument(metavar="LOG", parser=given_path, help="The log of the injection.")],
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", parser=given_path, help="The altered file or folder, if it has moved since."),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Bring a file back, byte for byte, to what it was before an injection.

    An injection that was killed half-way is undone too. Several injections into
    the same file are undone newest first.
    """
    from evergrad import injection

    with progress("restoring") as advance:
        done = injection.undo(log, file, progress=advance)
    if as_json:
        print_json(done.to_json())
    elif done.found_state is injection.FoundState.CLEAN:
        print(f"{printable(relative_path(done.path))}: nothing to undo, it is as it was before the injection")
    else:
        found = "was injected only in part; " if done.found_state is injection.FoundState.PARTLY else ""
        where = printable(relative_path(done.path))
        what = f"{done.elements:,} element{'s' if done.elements != 1 else ''} restored"
        print(f"{where}: {found}{what}, byte for byte as before")
    return 0


# `evergrad replay`: the faults of a log again, in the same or another checkpoint.

EPILOG_REPLAY = (
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
        Path | None, typer.Option("--log", help="The file of the new log. Default: OUT.faults.jsonl.")
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
    from evergrad._files import read_small
    from evergrad.formats import Match

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
