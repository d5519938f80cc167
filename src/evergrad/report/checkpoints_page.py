"""The page of a job's versions: what is wrong, what can be restored, where it is, and what came from what."""

from __future__ import annotations

from shlex import quote

from evergrad.checkpoint.catalogue.records import CatalogueEntry
from evergrad.report.blocks import Block, Cell, Column, Commands, DataTable, Facts, Figure, Mark, Page, Prose, Section
from evergrad.report.checkpoints_figures import lineage_figure, saved_s, sizes_figure, tiers_figure
from evergrad.report.checkpoints_reading import JobVersions
from evergrad.report.checkpoints_words import answer, is_usable, problems, size
from evergrad.report.markup import literal

_ROWS = 1000
_STATES: dict[str, Mark] = {
    "restorable": "good",
    "partial": "bad",
    "uncommitted": "bad",
    "damaged": "bad",
    "torn": "bad",
    "retired": "muted",
    "unknown": "",
}
_VERDICTS: dict[str, Mark] = {"ok": "good", "failed": "bad", "unknown": "muted"}


def checkpoints_page(seen: JobVersions, made: str) -> Page:
    """The page; `made` says by what, and when."""
    return Page(
        title=f"Versions of {seen.job}",
        kind="checkpoints of a job",
        question="Which versions are there, where are they, and can they be restored?",
        answer=answer(seen),
        sections=[section for section in _sections(seen) if section.blocks],
        made=made,
    )


def _sections(seen: JobVersions) -> list[Section]:
    return [
        Section("What is wrong", [Prose("\n\n".join(found))] if (found := problems(seen)) else [], "wrong"),
        Section("Versions and tiers", _figure(tiers_figure(seen)), "tiers"),
        Section("All versions", _versions(seen), "versions"),
        Section("Lineage", [*_figure(lineage_figure(seen)), *_notes(seen)], "lineage"),
        Section("Sizes", _figure(sizes_figure(seen)), "sizes"),
        Section("Facts", [Facts(_facts(seen))], "facts", folded=True),
        Section("To go on", [Commands(_commands(seen))], "commands"),
    ]


def _figure(figure: Figure | None) -> list[Block]:
    return [figure] if figure is not None else []


def _notes(seen: JobVersions) -> list[Block]:
    return (
        [Prose("\n\n".join(f"Not followed: {literal(note)}" for note in seen.lineage.notes))]
        if seen.lineage.notes
        else []
    )


def _versions(seen: JobVersions) -> list[Block]:
    if not seen.entries:
        return []
    columns = [
        Column("version", help="its step, and after the hyphen its attempt"),
        Column("step", "number"),
        Column("captured", help="when it was copied from the trainer, UTC"),
        Column("ranks", "number"),
        Column("size", "number", "of all ranks' shards"),
        Column(
            "state", help="restorable: every rank's shard is in some tier; partial: some are; retired and torn: none"
        ),
        Column("tiers", help="those that hold every rank's shard"),
        Column("verified", help="what the last `evergrad checkpoints verify` found, if there was one"),
        Column("guard", help="ok: a guard found all ranks alike when it was saved"),
        Column("kept", help="pinned, or its tags"),
        Column("parent", help="what it was trained from"),
    ]
    rows = [_row(entry) for entry in seen.entries[:_ROWS]]
    more = len(seen.entries) - len(rows)
    caption = (
        f"The newest {len(rows):,} of {len(seen.entries):,}; evergrad checkpoints ls --all has them." if more else ""
    )
    return [DataTable(columns, rows, caption)]


def _row(entry: CatalogueEntry) -> list[Cell]:
    version, saved = entry.version, saved_s(entry)
    kept = ", ".join(entry.tags) or ("pinned" if entry.pinned else "")
    return [
        Cell(version.name),
        Cell(f"{version.step:,}", version.step),
        Cell(entry.time.replace("T", " ").removesuffix("Z") or "?", saved),
        Cell(str(entry.world_size or "?"), entry.world_size or None),
        Cell(size(entry.size_bytes), entry.size_bytes),
        Cell(entry.state, mark=_STATES[entry.state]),
        Cell(", ".join(entry.tiers)),
        Cell(_verified(entry), mark=_VERDICTS[entry.verified]),
        Cell("ok" if entry.guarded else "", mark="good" if entry.guarded else ""),
        Cell(kept),
        Cell(entry.parent or ""),
    ]


def _facts(seen: JobVersions) -> list[tuple[str, str]]:
    usable = [entry for entry in seen.entries if is_usable(entry)]
    return [
        ("job", seen.job),
        ("looked up by", seen.where),
        ("tiers", ", ".join(seen.tiers) or "none"),
        ("attempts", str(seen.attempts)),
        ("versions", f"{len(seen.entries):,}, of which {len(usable):,} can be restored"),
        ("bytes that can be restored", size(sum(entry.size_bytes for entry in usable))),
    ]


def _commands(seen: JobVersions) -> list[tuple[str, str]]:
    where = quote(seen.where)
    commands = [("Check every digest of every copy, and note it", f"evergrad checkpoints verify {where}")]
    newest = next((entry for entry in seen.entries if is_usable(entry)), None)
    if newest is not None:
        name = newest.version.name
        commands.append(("All that is known of the newest", f"evergrad checkpoints show {where} {name}"))
        commands.append(("The newest as one file", f"evergrad checkpoints export {where} {name} model.safetensors"))
    return commands


def _verified(entry: CatalogueEntry) -> str:
    return "unverified" if entry.unverified and entry.verified != "failed" else entry.verified
