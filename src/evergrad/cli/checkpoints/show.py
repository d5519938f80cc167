"""`evergrad checkpoints show`: everything that is known of one version."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from evergrad.cli.checkpoints.arguments import (
    RunDir,
    VersionArgument,
    age,
    catalogue_of,
    kept,
    say_unseen,
    verified,
    where_it_is,
)
from evergrad.cli.output import JsonOption, console, print_json, printable, size

if TYPE_CHECKING:
    from evergrad.checkpoint.catalogue.records import CatalogueEntry
    from evergrad.checkpoint.catalogue.survey import Survey
    from evergrad.records import Json

EPILOG = (
    "Examples:\n\n  evergrad checkpoints show runs/r50 latest\n\n  evergrad checkpoints show runs/r50 120 --json\n\n"
    "Exit codes: 0 shown · 2 usage or unreadable input."
)


def show(run_dir: RunDir, version: VersionArgument, as_json: JsonOption = False) -> int:
    """Show a version: where each rank's shard is, what was noted with it, when it was checked."""
    catalogue = catalogue_of(run_dir)
    seen = catalogue.look()
    entry = catalogue.resolve(version, catalogue.entries(seen))
    shards = _shards(entry, seen)
    if as_json:
        verdicts: list[Json] = [
            {"tier": each.tier, "time": each.time, "verdict": each.verdict, "why": each.why} for each in entry.verdicts
        ]
        rows: list[Json] = list(shards)
        print_json({**entry.to_json(), "verdicts": verdicts, "shards": rows, "unseen": list(seen.unseen)})
        return 0
    say_unseen(seen.unseen)
    _print(entry, shards)
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

    if verified(entry) == "unverified":
        return f"unverified: {UNVERIFIED}"
    return f"{entry.verified} ({entry.verified_at})" if entry.verified_at else "never"


def _print(entry: CatalogueEntry, shards: list[dict[str, Json]]) -> None:
    from rich.table import Table
    from rich.text import Text

    version = entry.version
    facts = [
        ("version", f"{version.name}: step {version.step}, attempt {version.attempt}"),
        ("job", entry.job),
        ("saved", f"{entry.time} ({age(entry.time)} ago)" if entry.time else "not known"),
        ("ranks", str(entry.world_size or "not known")),
        ("size", size(entry.size_bytes)),
        ("tiers", where_it_is(entry)),
        *([("damaged", entry.damaged)] if entry.damaged else []),
        ("kept", kept(entry) or "no"),
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
