"""`evergrad checkpoints verify`: is every copy what was captured?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from evergrad.cli.checkpoints.arguments import RunDir, catalogue_of, check_tier, say_unseen
from evergrad.cli.completion import one_of
from evergrad.cli.output import JsonOption, console, print_json, printable, progress
from evergrad.errors import UsageError

if TYPE_CHECKING:
    from evergrad.checkpoint.catalogue.checking import CopyVerdict
    from evergrad.checkpoint.catalogue.records import Catalogue, CatalogueEntry
    from evergrad.checkpoint.catalogue.survey import Survey
    from evergrad.records import Json

EPILOG = (
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
            help="Only in this tier: memory, local, persistent.", autocompletion=one_of("memory", "local", "persistent")
        ),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Check every digest of every rank's shard, in every tier that can be reached, and note the verdict."""
    catalogue = catalogue_of(run_dir)
    check_tier(catalogue, tier)
    seen = catalogue.look()
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
        print_json({"job": catalogue.home.job, "versions": rows, "unseen": list(seen.unseen)})
    else:
        say_unseen(seen.unseen)
        _print(found)
    return 0 if sound else 1


def _copies(entry: CatalogueEntry, seen: Survey, tier: str | None) -> int:
    damaged = sum(tier in (None, kind) for kind in seen.damaged.get(entry.version, {}))
    damaged += entry.state == "damaged" and tier in (None, "memory")
    return damaged + sum(tier in (None, each.copy.tier) for each in seen.shards.get(entry.version, []))


def _check(
    catalogue: Catalogue, entries: list[CatalogueEntry], seen: Survey, tier: str | None
) -> list[tuple[CatalogueEntry, list[CopyVerdict]]]:
    from evergrad.checkpoint.catalogue.checking import check_version
    from evergrad.checkpoint.job import node_name

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


def _print(found: list[tuple[CatalogueEntry, list[CopyVerdict]]]) -> None:
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
