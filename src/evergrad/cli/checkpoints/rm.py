"""`evergrad checkpoints rm`: remove a version."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from evergrad.cli.checkpoints.arguments import RunDir, VersionArgument, catalogue_of, check_tier, say_unseen
from evergrad.cli.completion import one_of
from evergrad.cli.output import JsonOption, print_json, printable, size
from evergrad.errors import UsageError

EPILOG = (
    "Examples:\n\n  evergrad checkpoints rm runs/r50 120 --dry-run\n\n"
    "  evergrad checkpoints rm runs/r50 120 --tier persistent --yes\n\n"
    "Exit codes: 0 removed · 2 usage, unreadable input, pinned, or the newest that can be restored."
)


def rm(
    run_dir: RunDir,
    version: VersionArgument,
    tier: Annotated[
        str | None, typer.Option(help="Only from this tier.", autocompletion=one_of("memory", "local", "persistent"))
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Remove even the newest that can be restored.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed; remove nothing.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Remove a version from every tier that can be reached, or from one. It stays in the history."""
    from evergrad.checkpoint.catalogue.removal import plan_removal

    catalogue = catalogue_of(run_dir, to_change=True)
    check_tier(catalogue, tier)
    seen = catalogue.look()
    entries = catalogue.entries(seen)
    entry = catalogue.resolve(version, entries)
    catalogue.pins.pinned()  # a damaged tag may be this version's: then nothing is removed
    removal = plan_removal(entry, entries, seen, tier=tier, force=force)
    name = entry.version.name
    places = [found.copy.url or str(found.copy.shard) for found in removal.going]
    held = [str(found.copy.shard) for found in removal.held]
    stays = [f"stays, in the memory of a running trainer: {place}" for place in held]
    stays += [f"stays: {why}" for why in removal.left]
    if not as_json:
        say_unseen(seen.unseen)
        each = size(entry.size_bytes / max(entry.world_size, 1))
        print(printable(f"{name}: {len(places)} cop{'y' if len(places) == 1 else 'ies'} of about {each}"))
        for place in places:
            print(printable(f"  {place}"))
        for line in stays:
            print(printable(f"  {line}"))
    if not dry_run:
        if not yes and (as_json or not sys.stdin.isatty()):
            raise UsageError(f"{name}: nobody is there to be asked. Say --yes, or --dry-run.")
        if not yes and not typer.confirm("Remove it?"):
            raise typer.Abort
        removal.run()
    if as_json:
        print_json(
            {
                "version": name,
                "removed": list(places),
                "held": list(held),
                "left": list(removal.left),
                "dry_run": dry_run,
                "unseen": list(seen.unseen),
            }
        )
    else:
        but = ", except for what stays" if stays else ""
        print(printable(f"{name}: {'would be removed' if dry_run else 'removed'}{but}"))
    return 0
