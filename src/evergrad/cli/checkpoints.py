"""`evergrad checkpoints`: the versions of a job."""

from __future__ import annotations

import json
import sys
import time
from calendar import timegm
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evergrad.cli.output import (
    JsonOption,
    complete_words,
    console,
    print_json,
    printable,
    progress,
    relative_path,
    size,
)
from evergrad.errors import CheckpointError, UsageError
from evergrad.wording import did_you_mean

if TYPE_CHECKING:
    from evergrad.checkpoint.catalogue.catalogue import Catalogue, CatalogueEntry
    from evergrad.checkpoint.catalogue.lineage import Lineage, LineageNode
    from evergrad.checkpoint.catalogue.survey import Survey
    from evergrad.checkpoint.catalogue.verify import CopyVerdict
    from evergrad.records import Json

__all__ = ["app"]

# What the verbs of `evergrad checkpoints` have in common: their arguments, and how they show a version.

RunDir = Annotated[str, typer.Argument(metavar="RUN_DIR", help="The job's run folder, or a persistent tier's URL.")]
VersionArgument = Annotated[
    str, typer.Argument(metavar="VERSION", help="A step, a name such as v0000000120-02, a tag, or 'latest'.")
]
_UNITS = ((86400 * 2, 86400, "d"), (3600 * 2, 3600, "h"), (120, 60, "min"), (0, 1, "s"))


def catalogue_of(run_dir: str, *, to_change: bool = False) -> Catalogue:
    """The catalogue of a run folder or URL; a verb that changes something wants the run folder."""
    from evergrad.checkpoint.catalogue.catalogue import Catalogue

    catalogue = Catalogue(run_dir)
    if catalogue.location.run_dir is None and to_change:
        raise UsageError(
            f"{catalogue.label}: is a tier of job {catalogue.location.job}. To change it, name its run folder."
        )
    return catalogue


def check_tier(catalogue: Catalogue, tier: str | None) -> None:
    """`UsageError` for a tier that the job does not have."""
    kinds = list(dict.fromkeys(each.kind for each in catalogue.location.tiers))
    if tier is not None and tier not in kinds:
        raise UsageError(f"there is no tier {tier!r}.{did_you_mean(tier, kinds)} There are {', '.join(kinds)}.")


def warn_unreachable(unseen: Iterable[str]) -> None:
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


def pin_text(entry: CatalogueEntry) -> str:
    """Its tags, or that it is pinned."""
    return ", ".join(entry.tags) or ("pinned" if entry.pinned else "")


def verdict_text(entry: CatalogueEntry) -> str:
    """The verdict of the checks; `unverified` if the digests are not those of the capture, unless a check failed."""
    return "unverified" if entry.unverified and entry.verified != "failed" else entry.verified


def location_text(entry: CatalogueEntry) -> str:
    """The tiers that it is whole in, or what became of it."""
    return ", ".join(entry.tiers) if entry.tiers else "spread over tiers" if entry.restorable else entry.state


# `evergrad checkpoints export`: a version as one plain file.

EPILOG_EXPORT = (
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
            help="The format, if the ending does not tell: safetensors, pt, h5, npz, dcp.",
            autocompletion=complete_words("safetensors", "pt", "h5", "npz", "dcp"),
        ),
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="The rank whose own values are exported.")] = 0,
    where: Annotated[list[str] | None, typer.Option(help="Only these tensors; as in inspect. Repeatable.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Write the whole state of a version as one file: sharded tensors put together, every digest checked first."""
    from evergrad.checkpoint.catalogue.export import export_version
    from evergrad.formats.version_folder import UNVERIFIED

    catalogue = catalogue_of(run_dir)
    seen = catalogue.survey()
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


# `evergrad checkpoints lineage`: which version came from which.

EPILOG_LINEAGE = (
    "Examples:\n\n  evergrad checkpoints lineage runs/r50\n\n"
    "  evergrad checkpoints lineage runs/r50 --picture r50.svg\n\n"
    "● can be restored · ○ is gone · ◌ is not known here · ◉ ◎ are pinned\n\n"
    "Exit codes: 0 shown · 2 usage or unreadable input."
)


def lineage(
    run_dir: RunDir,
    picture: Annotated[Path | None, typer.Option(help="Draw the lineage into this file, as SVG.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the picture if it exists.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Show what each version was trained from: in its attempt, across restarts, across jobs; newest first."""
    from evergrad.checkpoint.catalogue.lineage import trace_lineage

    if picture is not None:
        _check_picture(picture, overwrite)
    catalogue = catalogue_of(run_dir)
    traced = trace_lineage(catalogue)
    if picture is not None:
        from evergrad._files import replacing
        from evergrad.checkpoint.catalogue.lineage import draw_svg

        with replacing(picture) as temporary:
            temporary.write_text(draw_svg(traced), encoding="utf-8")
    if as_json:
        print_json(traced.to_json())
    elif picture is not None:
        count = len(traced.nodes)
        print(printable(f"{picture}: {count} version{'' if count == 1 else 's'}"))
    else:
        warn_unreachable(traced.notes)
        _print_lineage(traced)
    return 0


def _check_picture(picture: Path, overwrite: bool) -> None:
    if picture.suffix != ".svg":
        raise UsageError(f"{picture}: the picture is drawn as SVG: choose a name that ends in .svg")
    if picture.exists() and not overwrite:
        raise UsageError(f"{picture}: exists already. Choose another name, or replace it: --overwrite.")
    if not picture.absolute().parent.is_dir():
        raise UsageError(f"{picture}: there is no folder {str(picture.parent)!r}")


def _print_lineage(traced: Lineage) -> None:
    from rich.text import Text

    from evergrad.checkpoint.catalogue.lineage import draw

    out = console()
    if not traced.nodes:
        print(printable(f"{traced.job}: no versions"))
    for drawing, node in draw(traced):
        row = Text(f"{drawing}  ", style="cyan")
        if node is not None:
            row.append(printable(_name(node, traced.job)), style="bold" if node.appearance == "restorable" else "dim")
            row.append(printable(_told(node)), style="")
        out.print(row, overflow="ellipsis", no_wrap=True)


def _name(node: LineageNode, job: str) -> str:
    return node.version.name if node.job == job else f"{node.job}/{node.version.name}"


def _told(node: LineageNode) -> str:
    if node.entry is None:
        return "  not known here"
    kept = f"[{', '.join(node.tags)}]" if node.tags else "[pinned]" if node.pinned else ""
    told = [f"step {node.version.step}", location_text(node.entry), f"{age(node.entry.time)} ago", kept]
    return "  " + " · ".join(filter(None, told))


# `evergrad checkpoints ls`: which versions there are.

EPILOG_LS = (
    "Examples:\n\n  evergrad checkpoints ls runs/r50\n\n  evergrad checkpoints ls s3://bucket/r50 --json\n\n"
    "Exit codes: 0 listed · 2 usage or unreadable input."
)
_WIDE = 120
_SPARED = ("step", "attempt", "parent")
_WHOLE = ("version", "age", "ranks", "size", "verified")


def ls(
    run_dir: RunDir,
    show_all: Annotated[bool, typer.Option("--all", help="Show versions that are gone, too.")] = False,
    as_json: JsonOption = False,
) -> int:
    """List the versions of a job, newest first, with the tiers that hold all of each."""
    catalogue = catalogue_of(run_dir)
    seen = catalogue.survey()
    entries = catalogue.entries(seen)
    shown = [entry for entry in entries if show_all or not entry.retired]
    if as_json:
        rows = [entry.to_json() for entry in shown]
        print_json({"job": catalogue.location.job, "versions": list(rows), "unseen": list(seen.unseen)})
        return 0
    warn_unreachable(seen.unseen)
    if shown:
        _print_ls(shown)
        print()
    gone = len(entries) - len(shown)
    more = f", and {gone} retired (--all)" if gone else ""
    print(printable(f"{catalogue.location.job}: {len(shown)} version{'' if len(shown) == 1 else 's'}{more}"))
    return 0


def _print_ls(entries: list[CatalogueEntry]) -> None:
    from rich.table import Table
    from rich.text import Text

    out = console()
    rows = []
    for entry in entries:
        version = entry.version
        rows.append({
            "version": version.name, "step": version.step, "attempt": version.attempt, "age": age(entry.time),
            "ranks": entry.world_size or "?", "size": size(entry.size_bytes), "tiers": location_text(entry),
            "verified": verdict_text(entry), "guard": "ok" if entry.guarded else "", "kept": pin_text(entry),
            "parent": entry.parent or "",
        })  # fmt: skip
    columns = list(rows[0])
    if out.width < _WIDE:  # what the name says too, what nobody has, and what show tells
        columns = [name for name in columns if name not in _SPARED and any(row[name] != "" for row in rows)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        right = name in ("step", "attempt", "age", "ranks", "size")
        table.add_column(name, overflow="fold", justify="right" if right else "left", no_wrap=name in _WHOLE)
    for entry, row in zip(entries, rows, strict=True):
        table.add_row(*(Text(printable(row[name])) for name in columns), style="dim" if entry.retired else None)
    out.print(table)


# `evergrad checkpoints pin`: keep a version, and give it a name.

EPILOG_PIN = (
    "Examples:\n\n  evergrad checkpoints pin runs/r50 120 --tag best\n\n"
    "  evergrad checkpoints pin runs/r50 best --unpin\n\n"
    "Exit codes: 0 done · 2 usage, unreadable input, or the version is gone."
)


def pin(
    run_dir: RunDir,
    version: VersionArgument,
    tag: Annotated[
        str | None, typer.Option(help="A name for the version; another version that had the name loses it.")
    ] = None,
    unpin: Annotated[
        bool, typer.Option("--unpin", help="Remove the pin and all tags; with --tag, remove only that tag.")
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


# `evergrad checkpoints report`: a job's versions as a page.

EPILOG_REPORT = (
    "Examples:\n\n  evergrad checkpoints report runs/r50\n\n"
    "  evergrad checkpoints report s3://bucket/r50 --out r50.html\n\n"
    "Without plotly what is wrong is printed and no page is written.\n\n"
    "Exit codes: 0 written · 2 usage, unreadable input, or no page could be written."
)


def report(
    run_dir: RunDir,
    out: Annotated[Path | None, typer.Option(help="The page; RUN_DIR/checkpoints.html by default.")] = None,
    as_json: JsonOption = False,
) -> int:
    """Write a page: what is wrong, which versions can be restored, where they are, and what came from what."""
    from evergrad import __version__
    from evergrad.report.checkpoints_page import checkpoints_answer, checkpoints_page, problems, survey_job
    from evergrad.report.html import checked_target, missing_dependency, plain_text, write_page

    catalogue = catalogue_of(run_dir)
    if out is None:
        if catalogue.location.run_dir is None:
            raise UsageError(f"{catalogue.label}: is a tier, and no page is put there. Name a file: --out FILE")
        out = catalogue.location.run_dir / "checkpoints.html"
    checked_target(out)
    seen = survey_job(catalogue)
    made = f"evergrad checkpoints report {__version__}, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}"
    made_page = checkpoints_page(seen, made)
    missing = missing_dependency(made_page)
    page = None if missing else write_page(made_page, out)
    if as_json:
        print_json(
            {
                "job": seen.job,
                "page": None if page is None else str(page),
                "answer": [plain_text(line) for line in checkpoints_answer(seen)],
                "problems": [plain_text(line) for line in problems(seen)],
                "versions": [entry.to_json() for entry in seen.entries],
            }
        )
    else:
        warn_unreachable(seen.unseen)
        for line in checkpoints_answer(seen)[:1] + [line for line in problems(seen) if not line.startswith("Not seen")]:
            print(printable(plain_text(line)))
    if page is None:
        print(printable(f"evergrad: no page is written: {missing}"), file=sys.stderr)
        return 2
    if not as_json:
        print(printable(f"{relative_path(page)}: all of it, as a page"))
    return 0


# `evergrad checkpoints rm`: remove a version.

EPILOG_RM = (
    "Examples:\n\n  evergrad checkpoints rm runs/r50 120 --dry-run\n\n"
    "  evergrad checkpoints rm runs/r50 120 --tier persistent --yes\n\n"
    "Exit codes: 0 removed · 2 usage, unreadable input, pinned, or the newest that can be restored."
)


def rm(
    run_dir: RunDir,
    version: VersionArgument,
    tier: Annotated[
        str | None,
        typer.Option(help="Only from this tier.", autocompletion=complete_words("memory", "local", "persistent")),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Remove even the newest that can be restored.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed; remove nothing.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Remove a version from every tier that can be reached, or from one. It stays in the history."""
    from evergrad.checkpoint.catalogue.catalogue import plan_removal

    catalogue = catalogue_of(run_dir, to_change=True)
    check_tier(catalogue, tier)
    seen = catalogue.survey()
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
        warn_unreachable(seen.unseen)
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


# `evergrad checkpoints show`: everything that is known of one version.

EPILOG_SHOW = (
    "Examples:\n\n  evergrad checkpoints show runs/r50 latest\n\n  evergrad checkpoints show runs/r50 120 --json\n\n"
    "Exit codes: 0 shown · 2 usage or unreadable input."
)


def show(run_dir: RunDir, version: VersionArgument, as_json: JsonOption = False) -> int:
    """Show a version: where each rank's shard is, what was noted with it, when it was checked."""
    catalogue = catalogue_of(run_dir)
    seen = catalogue.survey()
    entry = catalogue.resolve(version, catalogue.entries(seen))
    shards = _shards(entry, seen)
    if as_json:
        verdicts: list[Json] = [
            {"tier": each.tier, "time": each.time, "verdict": each.verdict, "why": each.why} for each in entry.verdicts
        ]
        rows: list[Json] = list(shards)
        print_json({**entry.to_json(), "verdicts": verdicts, "shards": rows, "unseen": list(seen.unseen)})
        return 0
    warn_unreachable(seen.unseen)
    _print_show(entry, shards)
    return 0


def _shards(entry: CatalogueEntry, seen: Survey) -> list[dict[str, Json]]:
    from evergrad.errors import EvergradError

    rows: list[dict[str, Json]] = []
    for found in sorted(seen.shards.get(entry.version, []), key=lambda found: found.copy.rank):
        copy = found.copy
        row: dict[str, Json] = {"rank": copy.rank, "tier": copy.tier}
        row |= {"shard": copy.url or str(copy.shard), "manifest": "" if copy.url else str(copy.manifest)}
        try:
            manifest = found.manifest()
            row |= {"node": manifest.node, "size_bytes": manifest.size, "tensors": len(manifest.digests)}
        except (EvergradError, OSError) as error:
            row |= {"node": found.node, "size_bytes": None, "tensors": None, "damaged": str(error)}
        rows.append(row)
    return rows


def _verified(entry: CatalogueEntry) -> str:
    from evergrad.formats.version_folder import UNVERIFIED

    if verdict_text(entry) == "unverified":
        return f"unverified: {UNVERIFIED}"
    return f"{entry.verified} ({entry.verified_at})" if entry.verified_at else "never"


def _print_show(entry: CatalogueEntry, shards: list[dict[str, Json]]) -> None:
    from rich.table import Table
    from rich.text import Text

    version = entry.version
    facts = [
        ("version", f"{version.name}: step {version.step}, attempt {version.attempt}"),
        ("job", entry.job),
        ("saved", f"{entry.time} ({age(entry.time)} ago)" if entry.time else "not known"),
        ("ranks", str(entry.world_size or "not known")),
        ("size", size(entry.size_bytes)),
        ("tiers", location_text(entry)),
        *([("damaged", entry.damaged)] if entry.damaged else []),
        ("kept", pin_text(entry) or "no"),
        ("parent", entry.parent or "none"),
        ("digest", entry.digest or "not noted"),
        ("verified", _verified(entry)),
        ("guarded", entry.guarded_at or "no"),
        ("meta", json.dumps(dict(entry.meta), ensure_ascii=False) if entry.meta else "none"),
    ]
    for name, fact in facts:
        print(f"{name:9} {printable(fact)}")
    for each in entry.verdicts:
        if each.why:
            print(f"{'':9} {printable(f'{each.tier}: {each.verdict}: {each.why}')}")
    if shards:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("rank", "tier", "node", "size", "tensors", "shard"):
            table.add_column(name, overflow="fold")
        for row in shards:
            nbytes = row["size_bytes"]
            told = size(nbytes) if isinstance(nbytes, int) else row["damaged"]
            cells = (row["rank"], row["tier"], row["node"], told, row["tensors"], row["shard"])
            table.add_row(*(Text(printable("?" if cell is None else cell)) for cell in cells))
        print()
        console().print(table)


# `evergrad checkpoints verify`: is every copy what was captured?

EPILOG_VERIFY = (
    "Examples:\n\n  evergrad checkpoints verify runs/r50\n\n"
    "  evergrad checkpoints verify runs/r50 120 --tier local --json\n\n"
    "Exit codes: 0 every copy that could be reached is intact · 1 something is wrong, or could not be checked · "
    "2 usage or unreadable input."
)


def verify(
    run_dir: RunDir,
    version: Annotated[
        str | None, typer.Argument(metavar="[VERSION]", help="Only this version: a step, a name, a tag, 'latest'.")
    ] = None,
    tier: Annotated[
        str | None,
        typer.Option(
            help="Only in this tier: memory, local, persistent.",
            autocompletion=complete_words("memory", "local", "persistent"),
        ),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Check every digest of every rank's shard, in every tier that can be reached, and note the verdict."""
    catalogue = catalogue_of(run_dir)
    check_tier(catalogue, tier)
    seen = catalogue.survey()
    entries = catalogue.entries(seen)
    chosen = [catalogue.resolve(version, entries)] if version is not None else entries
    chosen = [entry for entry in chosen if _copies(entry, seen, tier)]
    if version is not None and not chosen:
        where = f"in tier {tier}" if tier is not None else "left that could be checked"
        raise UsageError(f"{version}: nothing of it is {where}")
    found = _check(catalogue, chosen, seen, tier)
    sound = all(_verdict(verdicts) == "ok" for _, verdicts in found)
    if as_json:
        rows: list[Json] = [
            {
                "version": entry.version.name,
                "verdict": _verdict(verdicts),
                "copies": [each.to_json() for each in verdicts],
            }
            for entry, verdicts in found
        ]
        print_json({"job": catalogue.location.job, "versions": rows, "unseen": list(seen.unseen)})
    else:
        warn_unreachable(seen.unseen)
        _print_verify(found)
    return 0 if sound else 1


def _copies(entry: CatalogueEntry, seen: Survey, tier: str | None) -> int:
    damaged = sum(tier in (None, kind) for kind in seen.damaged.get(entry.version, {}))
    damaged += entry.state == "damaged" and tier in (None, "memory")
    return damaged + sum(tier in (None, each.copy.tier) for each in seen.shards.get(entry.version, []))


def _check(
    catalogue: Catalogue, entries: list[CatalogueEntry], seen: Survey, tier: str | None
) -> list[tuple[CatalogueEntry, list[CopyVerdict]]]:
    from evergrad.checkpoint.catalogue.verify import check_version
    from evergrad.checkpoint.run_folder import node_name

    found = []
    total = sum(entry.size_bytes // max(entry.world_size, 1) * _copies(entry, seen, tier) for entry in entries)
    done = 0
    with progress("verifying") as advance:

        def step(count: int) -> None:
            nonlocal done
            done += count
            advance(done, total)

        for entry in entries:
            verdicts = check_version(entry, seen, tier=tier, progress=step)
            found.append((entry, verdicts))
            for kind in dict.fromkeys(each.tier for each in verdicts if each.place or each.rank < 0):
                of_kind = [each for each in verdicts if each.tier == kind]
                verdict = _verdict(of_kind)
                whole = {each.rank for each in of_kind} >= set(range(entry.world_size))
                if verdict == "failed" or (verdict == "ok" and whole):
                    whose = ((f"rank {each.rank}: " if each.rank >= 0 else "", each) for each in of_kind)
                    why = next((f"{rank}{each.why}" for rank, each in whose if each.verdict == "failed"), "")
                    writer = f"verify-{node_name()}"
                    catalogue.note_verified(entry.version, kind, ok=verdict == "ok", why=why, writer=writer)
    return found


def _verdict(verdicts: list[CopyVerdict]) -> str:
    """The worst: failed, else unknown, else ok."""
    all_of_them = {each.verdict for each in verdicts}
    return next((verdict for verdict in ("failed", "unknown") if verdict in all_of_them), "ok")


def _print_verify(found: list[tuple[CatalogueEntry, list[CopyVerdict]]]) -> None:
    from rich.table import Table
    from rich.text import Text

    if not found:
        print("nothing to verify")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("version", "verdict", "tiers", "what"):
        table.add_column(name, overflow="fold")
    for entry, verdicts in found:
        tiers = ", ".join(dict.fromkeys(each.tier for each in verdicts if each.tier))
        bad = [each for each in verdicts if each.verdict != "ok"]
        what = f"{len(verdicts)} cop{'y' if len(verdicts) == 1 else 'ies'}" if not bad else _what(bad[0])
        cells = (entry.version.name, _verdict(verdicts), tiers, what)
        table.add_row(*(Text(printable(cell)) for cell in cells))
        for each in bad[1:]:
            table.add_row("", "", "", Text(printable(_what(each))))
    console().print(table)
    wrong, unknown = (sum(_verdict(verdicts) == what for _, verdicts in found) for what in ("failed", "unknown"))
    more = f", {unknown} not known" if unknown else ""
    print(f"\n{wrong} of {len(found)} version{'' if len(found) == 1 else 's'} wrong{more}")


def _what(verdict: CopyVerdict) -> str:
    rank, tier = "" if verdict.rank < 0 else f"rank {verdict.rank}", f"tier {verdict.tier}" if verdict.tier else ""
    where = " in ".join(filter(None, (rank, tier)))
    return f"{where}: {verdict.why}"


app = typer.Typer(
    name="checkpoints",
    help="The versions that a job has saved: list, check, keep, remove, export them, and see what came from what.",
    epilog="Examples:\n\n  evergrad checkpoints ls runs/r50 --json\n\n  evergrad checkpoints verify runs/r50\n\n"
    "  evergrad checkpoints export runs/r50 latest model.safetensors --where 'model/**'\n\n"
    "RUN_DIR is the job's run folder; verbs that change nothing also take the URL of a persistent tier. VERSION is a "
    "step, a name such as v0000000120-02, a tag, or 'latest'. Every verb has --json.\n\n"
    "Exit codes: 0 fine · 1 verify: something is wrong or could not be checked · 2 usage or unreadable input.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.command("ls", epilog=EPILOG_LS)(ls)
app.command("show", epilog=EPILOG_SHOW)(show)
app.command("verify", epilog=EPILOG_VERIFY)(verify)
app.command("pin", epilog=EPILOG_PIN)(pin)
app.command("rm", epilog=EPILOG_RM)(rm)
app.command("export", epilog=EPILOG_EXPORT)(export)
app.command("lineage", epilog=EPILOG_LINEAGE)(lineage)
app.command("report", epilog=EPILOG_REPORT)(report)
