"""A job's versions in words: what is wrong first, then what there is."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from evergrad.checkpoint.catalogue.records import CatalogueEntry
from evergrad.formats.version_folder import UNVERIFIED
from evergrad.report.checkpoints_reading import JobVersions
from evergrad.report.markup import literal
from evergrad.wording import counted

_TOLD = 6


def answer(seen: JobVersions) -> list[str]:
    """Paragraphs for the head of the page, the one to remember first."""
    if not seen.entries:
        return [f"**{literal(seen.job)} has no version yet.**", *problems(seen)]
    usable = [entry for entry in seen.entries if is_usable(entry)]
    told = f"{counted(len(seen.entries), 'version')} in {counted(seen.attempts, 'attempt')}"
    if not usable:
        return [f"**{told}, and none of them can be restored from what is seen here.**", *problems(seen)]
    newest = usable[0]
    where = ", ".join(newest.tiers) or "several tiers together"
    head = f"**{told}; {len(usable)} can be restored, the newest is {newest.version} in {literal(where)}.**"
    return [head, *problems(seen), *_state(seen, usable)]


def is_usable(entry: CatalogueEntry) -> bool:
    """Whether it is whole somewhere, and not only in copies that were damaged when last checked."""
    damaged = {verdict.tier for verdict in entry.verdicts if verdict.verdict == "failed"}
    return entry.restorable and (not damaged or any(tier not in damaged for tier in entry.tiers))


def problems(seen: JobVersions) -> list[str]:
    """What is wrong or not known, worst first, each in a sentence."""
    return [
        *_failed(seen),
        *(f"{entry.version.name}: {literal(entry.damaged.rstrip('.'))}." for entry in seen.entries if entry.damaged),
        *_incomplete(seen),
        *_unverified(seen),
        *(f"Not seen: {literal(line.rstrip('.'))}." for line in seen.unseen),
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
        f"{literal(verdict.why.rstrip('.')) or 'its digests are wrong'}"
        f"{'' if is_usable(entry) else ', and no other tier has all of it'}"
        for entry in seen.entries
        for verdict in entry.verdicts
        if verdict.verdict == "failed" and (entry.version, verdict.tier) in seen.holdings
    ]
    yield from (f"{line}." for line in found[:_TOLD])
    if len(found) > _TOLD:
        yield f"{counted(len(found) - _TOLD, 'more copy', 'more copies')} failed the last check: see the table."


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
            yield f"{counted(len(others), 'more version')} {'is' if len(others) == 1 else 'are'} {words}."


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
        yield f"Whole is not intact: nobody has checked their digests. `{literal(verify)}` does."
    else:
        sound = sum(entry.verified == "ok" for entry in usable)
        never = f", {unchecked} were never checked" if unchecked else ""
        yield f"{sound} of {len(usable)} were found intact when last checked{never}."
    guarded = sum(entry.guarded for entry in usable)
    if guarded:
        yield f"A guard found all ranks alike when {guarded} of them {'was' if guarded == 1 else 'were'} saved."
    kept = [entry.version.name + (f" ({literal(', '.join(entry.tags))})" if entry.tags else "")
            for entry in usable if entry.pinned or entry.tags]  # fmt: skip
    if kept:
        yield f"Kept whatever comes: {', '.join(kept[:_TOLD])}{' …' if len(kept) > _TOLD else ''}."
    retired = sum(entry.retired for entry in seen.entries)
    if retired:
        yield f"{counted(retired, 'version')} {'is' if retired == 1 else 'are'} gone, and known from the history."
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
