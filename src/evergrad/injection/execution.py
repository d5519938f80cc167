"""From a plan to altered files: rehearse, write the log, and only then change the first byte.

What has a place of its own in a file is patched there. A file that has to be rewritten (compressed data) is altered
in a copy, which then takes its place in one step; its log holds the bytes that were there.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from evergrad.errors import EvergradError, UsageError
from evergrad.formats import Checkpoint, open_checkpoint
from evergrad.formats.checkpoint import Progress
from evergrad.formats.data_file import Changes, NeedsRewrite, Rehearsal, file_errors
from evergrad.injection.columns import Column
from evergrad.injection.log import FileChange, InjectionLog, default_place, existing
from evergrad.injection.order import logs_of
from evergrad.injection.patches import Patch, sha256
from evergrad.injection.plan import Plan
from evergrad.injection.rewriting import rewritten
from evergrad.injection.workplace import Workplace, check_writable, replace_file
from evergrad.records import Json
from evergrad.wording import checked_choice

Digest = Literal["blocks", "full"]


@dataclass(frozen=True)
class Outcome:
    """Where the result goes, and how: a copy at `out`, or the file itself."""

    out: Path | None = None
    in_place: bool = False
    log: Path | None = None
    stale_checksum: bool = False
    digest: Digest = "blocks"
    overwrite: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        for path in (self.out, self.log):
            if path is not None and "\0" in str(path):
                raise UsageError(f"{str(path)!r:.100}: is no path")
        if self.out is not None and self.in_place:
            raise UsageError("out and in_place are two places for the result: choose one")
        if self.out is None and not self.in_place and not self.dry_run:
            raise UsageError(
                "where to? Write a copy (out=…, --out FILE), or alter the file itself (in_place=True, --in-place)"
            )
        checked_choice("digest", self.digest, ("blocks", "full"))

    def check(self, place: Workplace) -> None:
        """Refuse, before anything is written, what cannot be."""
        if self.log is not None:
            with file_errors(self.log, "cannot be written"):
                if os.path.lexists(self.log):
                    raise existing(self.log)
                if not self.log.parent.is_dir():
                    raise UsageError(f"{self.log}: there is no folder {str(self.log.parent)!r}")
                if self.out is not None and self.out.resolve() == self.log.resolve():
                    raise UsageError(f"{self.log}: is the place of the result, and the log needs one of its own")
        if self.out is not None:
            with file_errors(self.out, "cannot be written"):
                place.check_out(self.out, self.overwrite)


@dataclass(frozen=True)
class Job:
    """What is going to happen, all found out and nothing done."""

    place: Workplace
    noted: Rehearsal
    patched: bool
    """Whether everything has a place of its own; else the files are rewritten."""
    log: InjectionLog
    outcome: Outcome

    def carry_out(self, progress: Progress | None = None) -> InjectionLog:
        """Do it. Call it outside of the rehearsal."""
        outcome, place = self.outcome, self.place
        if outcome.dry_run:
            return self.log
        with ExitStack() as stack:
            work = place
            if outcome.out is not None or not self.patched:
                work = stack.enter_context(place.copied(outcome.out or place.path, progress))
            if self.patched:
                return _patch(self.log, place, work, self.noted, outcome)
            return _rewrite(self.log, place, work, outcome)


def prepare(
    ck: Checkpoint,
    noted: Rehearsal,
    given: Path,
    plan: Plan,
    outcome: Outcome,
    *,
    attempts: int,
    fault: Mapping[str, Json],
    settings: Mapping[str, Json],
    left_out: Mapping[str, list[str]],
) -> Job:
    """Find out what a plan does to the files of a checkpoint that was opened within the rehearsal `noted`."""
    place = Workplace.of(ck, given)
    outcome.check(place)
    columns = tuple(plan.columns)
    patched = True
    try:
        alter(ck, columns)
    except NeedsRewrite:
        patched = False
        if outcome.stale_checksum:
            raise UsageError(
                f"{given}: what is to be hit has no place of its own in the file (it is compressed, compact or was "
                f"never written): a checksum cannot be left stale there. Select other tensors, or let it follow."
            ) from None
    if outcome.in_place:
        check_writable(noted.files if patched else place.files, replaced=not patched)
        if not outcome.stale_checksum:
            check_writable(place.records, replaced=True)
    log = InjectionLog(
        file=str(given.absolute()),
        out="" if outcome.dry_run else str((outcome.out or place.path).absolute()),
        in_place=outcome.in_place,
        format=ck.format,
        fault=fault,
        settings={**settings, "stale_checksum": outcome.stale_checksum},
        attempts=attempts,
        injected=plan.injected,
        changed=plan.changed,
        nonfinite=plan.nonfinite,
        columns=columns,
        files=(),
        left_out={reason: tuple(names) for reason, names in left_out.items()},
    )
    return Job(place, noted, patched, log, outcome)


def alter(ck: Checkpoint, columns: tuple[Column, ...]) -> None:
    """Alter what the columns say; within a rehearsal, nothing is."""
    for column in columns:
        ends = column.ends()
        ck.xor(column.tensor, *ends.elements(ends.old ^ ends.new))


def _patch(log: InjectionLog, place: Workplace, work: Workplace, noted: Rehearsal, outcome: Outcome) -> InjectionLog:
    patches: list[Patch] = []
    files: list[FileChange] = []
    for file, changes in noted.files.items():
        if place.single and outcome.out is not None and file in place.records:
            continue  # they stay with the original
        name = place.name(file)
        patch, change = _prepare(work.file(name), name, changes, outcome)
        patch.whole = outcome.in_place and file in place.records
        patches.append(patch)
        files.append(change)
    log = _keep(replace(log, files=tuple(files)), place, outcome)
    with _undone_or_told(log, work, outcome):
        for patch in patches:
            patch.write()
        if outcome.out is not None:
            work.appear_as(outcome.out, overwrite=outcome.overwrite)
    return log


def _prepare(path: Path, name: str, changes: Changes, outcome: Outcome) -> tuple[Patch, FileChange]:
    """The patch of one file with the bytes it will have, and what the log says of it."""
    kept = Changes(changes.rows, {} if outcome.stale_checksum else changes.puts)
    patch = Patch.read(path, kept)
    full = sha256(path) if outcome.digest == "full" else ""
    before = patch.digest()
    seals = []
    for addresses, rows in kept.rows:
        patch.put_rows(addresses, patch.rows(addresses, rows.shape[1]) ^ rows)
    for offset, data in kept.puts.items():
        seals.append((offset, patch.bytes_at(offset, len(data)), data))
        patch.put(offset, data)
    change = FileChange(
        name=name,
        size=patch.size,
        before=before,
        after=patch.digest(),
        seals=tuple(seals),
        full_before=full,
        full_after=sha256(path, patch) if full else "",
    )
    return patch, change


def _rewrite(log: InjectionLog, place: Workplace, work: Workplace, outcome: Outcome) -> InjectionLog:
    """Alter a copy by the format's own means, and find out what that did to its files."""
    with open_checkpoint(work.path) as ck:
        alter(ck, log.columns)  # for real: no rehearsal is under way here
    changes = [(file, rewritten(file, work.file(place.name(file)), place.name(file))) for file in place.files]
    kept = [(file, change) for file, change in changes if change is not None]
    log = _keep(replace(log, files=tuple(change for _, change in kept)), place, outcome)
    with _undone_or_told(log, work, outcome):
        if outcome.out is not None:
            work.appear_as(outcome.out, overwrite=outcome.overwrite)
        else:
            for file, change in kept:
                replace_file(work.file(change.name), file)
    return log


def _keep(log: InjectionLog, place: Workplace, outcome: Outcome) -> InjectionLog:
    """Make the log durable: from here on, whatever happens can be undone."""
    target = outcome.out if outcome.out is not None else place.path
    if outcome.in_place:
        log = replace(log, follows=tuple(known.digest for known in logs_of(place.path, outcome.log)))
    return log.kept_at(outcome.log or default_place(target), numbered=outcome.log is None)


@contextmanager
def _undone_or_told(log: InjectionLog, work: Workplace, outcome: Outcome) -> Iterator[None]:
    """An error once the log is there: without its copy it is of no use, in place it undoes what has happened."""
    try:
        yield
    except BaseException as error:
        assert log.path is not None
        if outcome.out is not None:
            if work.path.exists():  # the copy is still under its temporary name, and goes with it
                with suppress(OSError):
                    log.path.unlink()
        elif isinstance(error, EvergradError):
            hint = f"Undo what was done: evergrad undo {shlex.quote(str(log.path))}"
            raise EvergradError(f"{error}. {hint}") from error
        raise
