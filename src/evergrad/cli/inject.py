"""`evergrad inject`: soft errors in a checkpoint."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evergrad.cli.completion import one_of
from evergrad.cli.mistakes import given_path
from evergrad.cli.output import JsonOption, print_json, printable, progress
from evergrad.errors import UsageError
from evergrad.wording import meant

if TYPE_CHECKING:
    from evergrad.injection import Fault, InjectionLog

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
            autocompletion=one_of("bitflip", "bitmask", "scale", "stuckat", "setvalue"),
        ),
    ] = None,
    bits: Annotated[
        str | None,
        typer.Option(
            help="A bit by number (0 is the sign), 1-8, sign, exponent, exponent-msb or mantissa.",
            autocompletion=one_of("sign", "exponent", "exponent-msb", "mantissa"),
        ),
    ] = None,
    burst: Annotated[int | None, typer.Option(help="Adjacent bits that go together.")] = None,
    mask: Annotated[str | None, typer.Option(help="Of bitmask: 101101, XORed at a random alignment.")] = None,
    factor: Annotated[float | None, typer.Option(help="Of scale: what to multiply by.")] = None,
    value: Annotated[float | None, typer.Option(help="Of stuckat, 0 or 1; of setvalue, the value, also nan.")] = None,
    elements: Annotated[int | None, typer.Option(help="Neighbouring elements that one fault hits alike.")] = None,
    stride: Annotated[int | None, typer.Option(help="With --elements: how far apart they are.")] = None,
    count: Annotated[int | None, typer.Option(help="How many faults.")] = None,
    fraction: Annotated[float | None, typer.Option(help="Or a share of the selected elements, 0 to 1.")] = None,
    rate: Annotated[
        float | None, typer.Option(help="Or FIT per Mbit; with --hours the number is drawn (Poisson).")
    ] = None,
    hours: Annotated[float, typer.Option(help="Hours at --rate.")] = 1.0,
    probability: Annotated[
        float | None, typer.Option(help="Of each attempt to come about; alone, every element is attempted.")
    ] = None,
    where: Annotated[
        list[str] | None, typer.Option(help="Only these tensors: name, glob, re:…, role:…. Repeatable.")
    ] = None,
    sampling: Annotated[
        str | None,
        typer.Option(
            help="element (the default), all different; or tensor first, as in the literature.",
            autocompletion=one_of("element", "tensor"),
        ),
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Only tensors of this type. Repeatable.")] = None,
    finite_only: Annotated[
        bool, typer.Option("--finite-only", help="Draw again what would become NaN or infinite.")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same bits, everywhere. Default: 0.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write a copy with the faults here.")] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Alter FILE itself.")] = False,
    log: Annotated[Path | None, typer.Option(help="Where to keep the log. Default: OUT.faults.jsonl.")] = None,
    stale_checksum: Annotated[
        bool, typer.Option("--stale-checksum", help="Leave checksums as they are: rot at rest, not an error in memory.")
    ] = False,
    digest: Annotated[
        str,
        typer.Option(
            help="blocks: of what is touched; full: of whole files too.", autocompletion=one_of("blocks", "full")
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
    for reason, names in log.left_out.items():
        shown = ", ".join(_short(printable(name)) for name in names[:3]) + (" …" if len(names) > 3 else "")
        print(f"left out, {reason}: {len(names)} tensor{'s' if len(names) != 1 else ''} ({shown})")
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
        hint = meant(name.partition(":")[0], _TAKES)
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
