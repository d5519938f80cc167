"""`evergrad checkpoints pin`: keep a version, and give it a name."""

from __future__ import annotations

from typing import Annotated

import typer

from evergrad.cli.checkpoints.arguments import RunDir, VersionArgument, catalogue_of
from evergrad.cli.output import JsonOption, print_json, printable
from evergrad.errors import CheckpointError, UsageError

EPILOG = (
    "Examples:\n\n  evergrad checkpoints pin runs/r50 120 --tag best\n\n"
    "  evergrad checkpoints pin runs/r50 best --unpin\n\n"
    "Exit codes: 0 done · 2 usage, unreadable input, or the version is gone."
)


def pin(
    run_dir: RunDir,
    version: VersionArgument,
    tag: Annotated[str | None, typer.Option(help="A name for it; another version that had the name loses it.")] = None,
    unpin: Annotated[
        bool, typer.Option("--unpin", help="Let it go, with all its tags; with --tag, take only that tag away.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Keep a version: retention and rm leave it alone until it is unpinned."""
    catalogue = catalogue_of(run_dir, to_change=True)
    pins = catalogue.pins
    entries = catalogue.entries()
    tagged = pins.tags().get(version)
    if unpin and tagged is not None and all(entry.version != tagged for entry in entries):
        found = tagged  # a tag may outlive all that was known of its version
    else:
        found = catalogue.resolve(version, entries).version
    if unpin:
        if tag is not None:
            if pins.tags().get(tag) != found and not pins.is_damaged(tag):
                raise UsageError(f"{found.name} has no tag {tag!r}")
            pins.untag(tag)
        else:
            pins.unpin(found)
    else:
        if catalogue.resolve(found.name, entries).retired:
            raise UsageError(f"{found.name} is gone: there is nothing to keep")
        if tag is not None:
            pins.tag(found, tag)
        else:
            pins.pin(found)
        # Retention may have looked at the pins just before: then it takes the version all the same.
        if catalogue.resolve(found.name, catalogue.entries()).retired:
            raise CheckpointError(f"{found.name} was retired at this very moment: it is pinned, and gone")
    known = pins.tags()
    tags = sorted(name for name, at in known.items() if at == found)
    pinned = found in pins.pinned(known)
    if as_json:
        print_json({"version": found.name, "pinned": pinned, "tags": list(tags)})
    else:
        names = f", tag {', '.join(tags)}" if tags else ""
        print(printable(f"{found.name}: {'pinned' if pinned else 'not pinned'}{names}"))
    return 0
