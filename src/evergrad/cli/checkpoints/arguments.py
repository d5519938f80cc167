"""What the verbs of `evergrad checkpoints` have in common: their arguments, and how they show a version."""

from __future__ import annotations

import sys
import time
from calendar import timegm
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from evergrad.cli.output import printable
from evergrad.errors import UsageError
from evergrad.wording import meant

if TYPE_CHECKING:
    from evergrad.checkpoint.catalogue.records import Catalogue, CatalogueEntry

RunDir = Annotated[str, typer.Argument(metavar="RUN_DIR", help="The job's run folder, or a persistent tier's URL.")]
VersionArgument = Annotated[
    str, typer.Argument(metavar="VERSION", help="A step, a name such as v0000000120-02, a tag, or 'latest'.")
]
_UNITS = ((86400 * 2, 86400, "d"), (3600 * 2, 3600, "h"), (120, 60, "min"), (0, 1, "s"))


def catalogue_of(run_dir: str, *, to_change: bool = False) -> Catalogue:
    """The catalogue of a run folder or URL; a verb that changes something wants the run folder."""
    from evergrad.checkpoint.catalogue.records import Catalogue

    catalogue = Catalogue(run_dir)
    if catalogue.home.run_dir is None and to_change:
        raise UsageError(
            f"{catalogue.label}: is a tier of job {catalogue.home.job}. To change it, name its run folder."
        )
    return catalogue


def check_tier(catalogue: Catalogue, tier: str | None) -> None:
    """`UsageError` for a tier that the job does not have."""
    kinds = list(dict.fromkeys(each.kind for each in catalogue.home.tiers))
    if tier is not None and tier not in kinds:
        raise UsageError(f"there is no tier {tier!r}.{meant(tier, kinds)} There are {', '.join(kinds)}.")


def say_unseen(unseen: Iterable[str]) -> None:
    """Name the tiers that could not be looked at, on stderr: what is there is not known."""
    for line in unseen:
        print(f"evergrad: not seen: {printable(line)}", file=sys.stderr)


def age(moment: str) -> str:
    """How long ago a recorded time was, in a person's units; the text itself if it is no time."""
    try:
        seconds = max(0, int(time.time()) - timegm(time.strptime(moment, "%Y-%m-%dT%H:%M:%SZ")))
    except (ValueError, OverflowError):
        return moment
    return next(f"{seconds // unit} {name}" for least, unit, name in _UNITS if seconds >= least)


def kept(entry: CatalogueEntry) -> str:
    """Its tags, or that it is pinned."""
    return ", ".join(entry.tags) or ("pinned" if entry.pinned else "")


def verified(entry: CatalogueEntry) -> str:
    """The verdict of the checks; `unverified` if the digests are not those of the capture, unless a check failed."""
    return "unverified" if entry.unverified and entry.verified != "failed" else entry.verified


def where_it_is(entry: CatalogueEntry) -> str:
    """The tiers that it is whole in, or what became of it."""
    return ", ".join(entry.tiers) if entry.tiers else "spread over tiers" if entry.restorable else entry.state
