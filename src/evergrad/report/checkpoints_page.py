"""The page of a job's versions: what is wrong, what can be restored, where it is, and what came from what."""

from __future__ import annotations

import time
from calendar import timegm
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from shlex import quote
from typing import Any

from evergrad.checkpoint.catalogue.catalogue import Catalogue, CatalogueEntry
from evergrad.checkpoint.catalogue.lineage import Lineage, draw_svg, trace_lineage
from evergrad.checkpoint.catalogue.survey import Survey
from evergrad.checkpoint.version import Version
from evergrad.formats.version_folder import UNVERIFIED
from evergrad.report.html import escape_markup
from evergrad.report.page_model import (
    PALETTE,
    Commands,
    DataTable,
    Facts,
    Figure,
    Mark,
    Picture,
    Prose,
    ReportBlock,
    ReportPage,
    Section,
    TableCell,
    TableColumn,
)
from evergrad.report.run_figures import escape_figure_text
from evergrad.wording import count_of

# What is known of a job's versions, looked up once: entries, what each tier holds, lineage.


@dataclass(frozen=True, slots=True)
class TierContents:
    """What one tier holds of one version."""

    ranks: int
    """How many ranks' shards are there."""
    written_s: float | None = None
    """When the last of their records was written there, by the file's time; None where it is no file."""


@dataclass(frozen=True, slots=True)
class JobVersions:
    """The versions of a job."""

    job: str
    where: str
    """The run folder or URL that it was looked up by, without a password."""
    entries: tuple[CatalogueEntry, ...]
    """Newest first."""
    tiers: tuple[str, ...]
    """The kinds of its tiers, nearest first."""
    holdings: Mapping[tuple[Version, str], TierContents]
    lineage: Lineage
    unseen: tuple[str, ...]
    """Tiers that could not be looked at, and why."""
    attempts: int
    has_history: bool
    """Whether it was looked up by its run folder; by a URL only what the tier holds is known."""


def survey_job(catalogue: Catalogue) -> JobVersions:
    """Look at every tier of a job; nothing is made or changed."""
    seen = catalogue.survey()
    entries = tuple(catalogue.entries(seen))
    home = catalogue.location
    kinds = tuple(dict.fromkeys(tier.kind for tier in home.tiers))
    if not any(found.copy.tier == "memory" for copies in seen.shards.values() for found in copies):
        kinds = tuple(kind for kind in kinds if kind != "memory")  # it is looked at always, and had by few
    return JobVersions(
        job=home.job,
        where=catalogue.label,
        entries=entries,
        tiers=kinds,
        holdings={
            (entry.version, kind): holding
            for entry in entries
            for kind in kinds
            if (holding := _holding(seen, entry.version, kind)) is not None
        },
        lineage=trace_lineage(catalogue),
        unseen=tuple(seen.unseen),
        attempts=len({entry.version.attempt for entry in entries}),
        has_history=home.run_dir is not None,
    )


def _holding(seen: Survey, version: Version, kind: str) -> TierContents | None:
    copies = [found.copy for found in seen.shards.get(version, []) if found.copy.tier == kind]
    if not copies:
        return None
    written = []
    for copy in copies:
        if not copy.url and copy.use is None:  # in memory records are written again with every save
            with suppress(OSError):
                written.append(copy.manifest.stat().st_mtime)
    return TierContents(len({copy.rank for copy in copies}), max(written, default=None))


# A job's versions in words: what is wrong first, then what there is.

_TOLD = 6


def checkpoints_answer(seen: JobVersions) -> list[str]:
    """Paragraphs for the head of the page, the one to remember first."""
    if not seen.entries:
        return [f"**{escape_markup(seen.job)} has no version yet.**", *problems(seen)]
    usable = [entry for entry in seen.entries if is_usable(entry)]
    told = f"{count_of(len(seen.entries), 'version')} in {count_of(seen.attempts, 'attempt')}"
    if not usable:
        return [f"**{told}, and none of them can be restored from what is seen here.**", *problems(seen)]
    newest = usable[0]
    where = ", ".join(newest.tiers) or "several tiers together"
    head = f"**{told}; {len(usable)} can be restored, the newest is {newest.version} in {escape_markup(where)}.**"
    return [head, *problems(seen), *_state(seen, usable)]


def is_usable(entry: CatalogueEntry) -> bool:
    """Whether it is whole somewhere, and not only in copies that were damaged when last checked."""
    damaged = {verdict.tier for verdict in entry.verdicts if verdict.verdict == "failed"}
    return entry.restorable and (not damaged or any(tier not in damaged for tier in entry.tiers))


def problems(seen: JobVersions) -> list[str]:
    """What is wrong or not known, worst first, each in a sentence."""
    return [
        *_failed(seen),
        *(
            f"{entry.version.name}: {escape_markup(entry.damaged.rstrip('.'))}."
            for entry in seen.entries
            if entry.damaged
        ),
        *_incomplete(seen),
        *_unverified(seen),
        *(f"Not seen: {escape_markup(line.rstrip('.'))}." for line in seen.unseen),
    ]


def size(count: float) -> str:
    """Bytes in a person's units.

    >>> size(0), size(1536), size(244_000_000)
    ('0 B', '1.5 kB', '244.0 MB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.95 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} B" if unit == "B" else f"{count:,.1f} {unit}"


def _failed(seen: JobVersions) -> Iterator[str]:
    found = [
        f"{entry.version.name} is damaged in {verdict.tier}: "
        f"{escape_markup(verdict.why.rstrip('.')) or 'its digests are wrong'}"
        f"{'' if is_usable(entry) else ', and no other tier has all of it'}"
        for entry in seen.entries
        for verdict in entry.verdicts
        if verdict.verdict == "failed" and (entry.version, verdict.tier) in seen.holdings
    ]
    yield from (f"{line}." for line in found[:_TOLD])
    if len(found) > _TOLD:
        yield f"{count_of(len(found) - _TOLD, 'more copy', 'more copies')} failed the last check: see the table."


def _incomplete(seen: JobVersions) -> Iterator[str]:
    newest = seen.entries[0] if seen.entries else None
    if newest is not None and not newest.restorable:
        yield f"The newest version, {newest.version}, is {_state_of(newest)}."
    for state, words in (
        ("partial", "only in part here: other shards may be on other nodes, or lost"),
        ("uncommitted", "in a shared tier without a sound record of it: the next restore commits what is whole"),
        ("damaged", "in memory as a damaged rest alone, and cannot be restored"),
        ("torn", "gone, and never whole"),
    ):
        others = [entry for entry in seen.entries if entry.state == state and entry is not newest]
        if others:
            yield f"{count_of(len(others), 'more version')} {'is' if len(others) == 1 else 'are'} {words}."


def _unverified(seen: JobVersions) -> Iterator[str]:
    found = [entry.version.name for entry in seen.entries if entry.unverified and not entry.retired]
    if found:
        more = f" and {len(found) - _TOLD} more" if len(found) > _TOLD else ""
        yield f"Unverified: {', '.join(found[:_TOLD])}{more}: {UNVERIFIED}."


def _state(seen: JobVersions, usable: list[CatalogueEntry]) -> Iterator[str]:
    newest = usable[0]
    if newest.tiers == ("memory",):
        yield "The newest one is in memory alone: it does not outlive this machine."
    unchecked = sum(entry.verified == "unknown" for entry in usable)
    if unchecked == len(usable):
        verify = f"evergrad checkpoints verify {quote(seen.where)}"
        yield f"Whole is not intact: nobody has checked their digests. `{escape_markup(verify)}` does."
    else:
        sound = sum(entry.verified == "ok" for entry in usable)
        never = f", {unchecked} were never checked" if unchecked else ""
        yield f"{sound} of {len(usable)} were found intact when last checked{never}."
    guarded = sum(entry.guarded for entry in usable)
    if guarded:
        yield f"A guard found all ranks alike when {guarded} of them {'was' if guarded == 1 else 'were'} saved."
    kept = [entry.version.name + (f" ({escape_markup(', '.join(entry.tags))})" if entry.tags else "")
            for entry in usable if entry.pinned or entry.tags]  # fmt: skip
    if kept:
        yield f"Kept whatever comes: {', '.join(kept[:_TOLD])}{' …' if len(kept) > _TOLD else ''}."
    retired = sum(entry.retired for entry in seen.entries)
    if retired:
        yield f"{count_of(retired, 'version')} {'is' if retired == 1 else 'are'} gone, and known from the history."
    if not seen.has_history:
        yield "Looked up by a tier's URL: what other tiers hold, and what is gone, is not known."


def _state_of(entry: CatalogueEntry) -> str:
    return {
        "partial": "here only in part: other shards may be on other nodes, or lost",
        "uncommitted": "in a shared tier without a sound record of it: the next restore commits what is whole",
        "damaged": "in memory as a damaged rest alone",
        "retired": "gone",
        "torn": "gone, and never was whole",
        "unknown": "in no tier that could be looked at",
        "restorable": "whole",
    }[entry.state]


# Pictures of a job's versions: which tier holds which, what came from what, and how large they are.

_VERSIONS = 300  # drawn, the newest
_NODES = 600
_LANES = 40


def tiers_figure(seen: JobVersions) -> Figure | None:
    """A column a version, in the order of saves; a row a tier."""
    shown = list(reversed(seen.entries[:_VERSIONS]))
    if not shown:
        return None
    rows = ["saved", *seen.tiers]
    kinds: dict[str, list[tuple[int, str, str]]] = {}
    for column, entry in enumerate(shown):
        kinds.setdefault("gone" if entry.retired else "known", []).append((column, "saved", _hover(entry)))
        if entry.pinned or entry.tags:
            kinds.setdefault("kept", []).append((column, "saved", _hover(entry)))
        for kind in seen.tiers:
            holding = seen.holdings.get((entry.version, kind))
            if holding is None:
                continue
            bad = any(verdict.verdict == "failed" and verdict.tier == kind for verdict in entry.verdicts)
            is_whole = 0 < entry.world_size <= holding.ranks
            written = f"<br>last record written {_clock(holding.written_s)}" if holding.written_s is not None else ""
            hover = f"{_hover(entry)}<br>{kind}: shards of {holding.ranks} of {entry.world_size or '?'} ranks{written}"
            name = "damaged" if bad else "whole" if is_whole else "in part"
            kinds.setdefault(name, []).append((column, kind, hover))
    looks: dict[str, tuple[str, dict[str, Any]]] = {
        "known": ("saved", {"symbol": "circle", "size": 9, "color": PALETTE["muted"]}),
        "gone": ("gone from every tier", {"symbol": "circle-open", "size": 9, "color": PALETTE["muted"]}),
        "kept": ("pinned or tagged", {"symbol": "diamond-open", "size": 17, "color": PALETTE["warn"]}),
        "whole": ("whole", {"symbol": "square", "size": 13, "color": PALETTE["ok"]}),
        "in part": ("in part", {"symbol": "square-open", "size": 13, "color": PALETTE["warn"], "line": {"width": 2}}),
        "damaged": ("damaged, when last checked", {"symbol": "x", "size": 13, "color": PALETTE["bad"]}),
    }  # fmt: skip
    traces = [_scatter(name, kinds[kind], marker) for kind, (name, marker) in looks.items() if kind in kinds]
    every = max(1, len(shown) // 12)
    ticks = list(range(0, len(shown), every))
    caption = "Versions in the order of their saves, and which tier holds them now."
    if len(shown) < len(seen.entries):
        caption += f" The newest {len(shown)} of {len(seen.entries):,}."
    layout = {
        "xaxis": {
            "title": {"text": "step" + (", and attempt after the dot" if seen.attempts > 1 else "")},
            "tickvals": ticks,
            "ticktext": [_tick(shown[index], seen.attempts) for index in ticks],
            "range": [-0.7, len(shown) - 0.3],
            "showgrid": False,
            "zeroline": False,
        },
        "yaxis": {"type": "category", "categoryorder": "array", "categoryarray": rows[::-1],
                  "range": [-0.6, len(rows) - 0.4]},
        "hovermode": "closest",
    }  # fmt: skip
    return Figure("versions-and-tiers", traces, layout, caption, 150 + 44 * len(rows))


def sizes_figure(seen: JobVersions) -> Figure | None:
    """The size of each version, when it was saved."""
    known = [(saved, entry) for entry in seen.entries if (saved := saved_s(entry)) is not None][:_VERSIONS]
    if len({saved for saved, _ in known}) < 2:
        return None
    points = [(_stamp(saved), entry.size_bytes / 1e6, _hover(entry)) for saved, entry in reversed(known)]
    trace = _scatter("size", points, {"size": 7, "color": PALETTE["faulty"]})
    trace |= {"mode": "lines+markers", "line": {"width": 1, "dash": "dot", "color": PALETTE["faulty"]}}
    layout = {
        "xaxis": {"title": {"text": "saved, UTC"}, "type": "date"},
        "yaxis": {"title": {"text": "size of all shards, MB"}, "rangemode": "tozero"},
        "showlegend": False,
    }
    return Figure("sizes", [trace], layout, "How large each version is, and when it was captured, to the second.", 300)


def lineage_picture(seen: JobVersions) -> Picture | None:
    """The picture that `evergrad checkpoints lineage --picture` writes, of the newest versions."""
    drawn = seen.lineage.newest(_NODES, _LANES)
    if len(drawn.nodes) < 2:
        return None
    caption = "What each version was trained from: within its attempt, across restarts, across jobs."
    if len(drawn.nodes) < len(seen.lineage.nodes):
        caption += f" {len(drawn.nodes)} of {len(seen.lineage.nodes):,} versions are drawn, the newest."
    return Picture("lineage", draw_svg(drawn), caption)


def saved_s(entry: CatalogueEntry) -> float | None:
    """When it was captured, in seconds since 1970; None if that is not on record."""
    try:
        return float(timegm(time.strptime(entry.time, "%Y-%m-%dT%H:%M:%SZ")))
    except (ValueError, OverflowError):
        return None


def _scatter(name: str, points: list[Any], marker: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [point[0] for point in points],
        "y": [point[1] for point in points],
        "hovertext": [point[2] for point in points],
        "hoverinfo": "text",
        "marker": marker,
        "cliponaxis": False,
    }


def _hover(entry: CatalogueEntry) -> str:
    told = [
        f"<b>{entry.version.name}</b>",
        escape_figure_text(", ".join(entry.tags)) or ("pinned" if entry.pinned else ""),
        f"{entry.state}, {size(entry.size_bytes)}, {entry.world_size or '?'} ranks",
        escape_figure_text(f"saved {entry.time}"),
    ]
    return "<br>".join(filter(None, told))


def _tick(entry: CatalogueEntry, attempts: int) -> str:
    return f"{entry.version.step}·{entry.version.attempt}" if attempts > 1 else str(entry.version.step)


def _stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))


def _clock(seconds: float) -> str:
    return f"{_stamp(seconds)} UTC"


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


def checkpoints_page(seen: JobVersions, made: str) -> ReportPage:
    """The page; `made` says by what, and when."""
    return ReportPage(
        title=f"Versions of {seen.job}",
        kind="checkpoints of a job",
        question="Which versions are there, where are they, and can they be restored?",
        answer=checkpoints_answer(seen),
        sections=[section for section in _sections(seen) if section.blocks],
        made=made,
    )


def _sections(seen: JobVersions) -> list[Section]:
    return [
        Section("What is wrong", [Prose("\n\n".join(found))] if (found := problems(seen)) else [], "wrong"),
        Section("Versions and tiers", _figure(tiers_figure(seen)), "tiers"),
        Section("All versions", _versions(seen), "versions"),
        Section("Lineage", [*_figure(lineage_picture(seen)), *_notes(seen)], "lineage"),
        Section("Sizes", _figure(sizes_figure(seen)), "sizes"),
        Section("Facts", [Facts(_facts(seen))], "facts", folded=True),
        Section("To go on", [Commands(_commands(seen))], "commands"),
    ]


def _figure(figure: Figure | Picture | None) -> list[ReportBlock]:
    return [figure] if figure is not None else []


def _notes(seen: JobVersions) -> list[ReportBlock]:
    return (
        [Prose("\n\n".join(f"Not followed: {escape_markup(note)}" for note in seen.lineage.notes))]
        if seen.lineage.notes
        else []
    )


def _versions(seen: JobVersions) -> list[ReportBlock]:
    if not seen.entries:
        return []
    columns = [
        TableColumn("version", help="its step, and after the hyphen its attempt"),
        TableColumn("step", "number"),
        TableColumn("captured", help="when it was copied from the trainer, UTC"),
        TableColumn("ranks", "number"),
        TableColumn("size", "number", "of all ranks' shards"),
        TableColumn(
            "state", help="restorable: every rank's shard is in some tier; partial: some are; retired and torn: none"
        ),
        TableColumn("tiers", help="those that hold every rank's shard"),
        TableColumn("verified", help="what the last `evergrad checkpoints verify` found, if there was one"),
        TableColumn("guard", help="ok: a guard found all ranks alike when it was saved"),
        TableColumn("kept", help="pinned, or its tags"),
        TableColumn("parent", help="what it was trained from"),
    ]
    rows = [_row(entry) for entry in seen.entries[:_ROWS]]
    more = len(seen.entries) - len(rows)
    caption = (
        f"The newest {len(rows):,} of {len(seen.entries):,}; evergrad checkpoints ls --all has them." if more else ""
    )
    return [DataTable(columns, rows, caption)]


def _row(entry: CatalogueEntry) -> list[TableCell]:
    version, saved = entry.version, saved_s(entry)
    kept = ", ".join(entry.tags) or ("pinned" if entry.pinned else "")
    return [
        TableCell(version.name),
        TableCell(f"{version.step:,}", version.step),
        TableCell(entry.time.replace("T", " ").removesuffix("Z") or "?", saved),
        TableCell(str(entry.world_size or "?"), entry.world_size or None),
        TableCell(size(entry.size_bytes), entry.size_bytes),
        TableCell(entry.state, mark=_STATES[entry.state]),
        TableCell(", ".join(entry.tiers)),
        TableCell(_verified(entry), mark=_VERDICTS[entry.verified]),
        TableCell("ok" if entry.guarded else "", mark="good" if entry.guarded else ""),
        TableCell(kept),
        TableCell(entry.parent or ""),
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
