"""Undo: every byte back to what it was, after an injection that ended and after one that was killed.

Every byte that an injection touches is, at any moment, the old or the new one. So a file is known to be as the
injection left it, wherever it stopped, when putting the old bytes back gives the digest from before; anything else has
changed since, and is refused.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from os import PathLike
from pathlib import Path

import numpy as np

from evergrad._files import exclusive, file_errors, replace_file
from evergrad.errors import EvergradError, FileAccessError, UsageError
from evergrad.formats import Checkpoint, open_checkpoint
from evergrad.formats.byte_source import DryRun, FileEdits, NeedsRewrite, record_dry_run
from evergrad.formats.checkpoint import Bits, ProgressCallback
from evergrad.formats.version_records import HasRecords
from evergrad.injection.byte_patches import Patch, restore_bytes, sha256
from evergrad.injection.injection_plan import Column
from evergrad.injection.injector import CheckpointFiles, check_writable
from evergrad.injection.log import FileChange, InjectionLog, logs_of, mark_undone
from evergrad.records import Json


class FoundState(StrEnum):
    """In which state an injection's files were found."""

    INJECTED = "injected"
    PARTLY = "partly injected"
    CLEAN = "clean"


@dataclass(frozen=True, slots=True)
class UndoResult:
    """What `undo` did: to which file or folder, and what it found there."""

    path: Path
    found_state: FoundState
    elements: int
    """How many elements have their old bits again; 0 if they had them already."""

    def to_json(self) -> dict[str, Json]:
        """What `evergrad undo --json` prints."""
        return {"file": str(self.path), "was": self.found_state.value, "restored": self.elements}


def undo(
    log: InjectionLog | str | PathLike[str],
    file: str | PathLike[str] | None = None,
    *,
    progress: ProgressCallback | None = None,
) -> UndoResult:
    """Bring a file back, byte for byte, to what it was before an injection; `file` if it has moved since.

    Several injections into the same file are undone newest first. A file that has changed since is refused, and
    nothing is written. An injection that was killed half-way is undone too.
    """
    log = log if isinstance(log, InjectionLog) else InjectionLog.load(log)
    target = _target(log, file)
    with open_checkpoint(target) as ck:
        files = CheckpointFiles.of(ck, target).locked
    with exclusive(files):
        _refuse_unless_last(log, target)
        place, found, patches = _inspect_files(log, target)
        if found is not FoundState.CLEAN:
            changed = [_file(place, change) for change in log.files]
            check_writable(changed, replaced=any(change.rewritten for change in log.files))
            check_writable([file for file in changed if file in place.records], replaced=True)
            for patch in patches:
                patch.write()
            for change in log.files:
                if change.rewritten:
                    _restore(place, change, progress)
        if log.path is not None and _is_its_own(log, target):
            mark_undone(log.path)
    restored = sum(_changed(column) for column in log.columns) if found is not FoundState.CLEAN else 0
    return UndoResult(target, found, restored)


def _changed(column: Column) -> int:
    """Elements with other bits than before."""
    ends = column.net_changes()
    return len(np.unique(ends.numbers[ends.old != ends.new] // column.dtype.parts))


def _target(log: InjectionLog, file: str | PathLike[str] | None) -> Path:
    if file is not None:
        return Path(file)
    if log.format == "live state":
        raise UsageError("the faults of this log happened in a running training, and in no file: restore a checkpoint")
    if not log.out or "\0" in log.out:
        raise UsageError("a dry run changed nothing: there is nothing to undo")
    out = Path(log.out)
    with file_errors(out):
        if out.exists() or log.path is None:
            return out
        beside = log.path.parent / out.name  # moved, log and all
        if not beside.exists():
            raise FileAccessError(out, "is not there any more", hint="Say where it is: evergrad undo LOG FILE.")
        return beside


def _is_its_own(log: InjectionLog, target: Path) -> bool:
    """Whether this is the file that the log names, and not a copy of it."""
    out = Path(log.out)
    return not out.exists() or out.resolve() == target.resolve()


def _inspect_files(log: InjectionLog, target: Path) -> tuple[CheckpointFiles, FoundState, list[Patch]]:
    """In which state the files are; and, for those that are patched, the blocks with their old bytes."""
    if any(change.rewritten for change in log.files):
        with open_checkpoint(target) as ck:
            place = CheckpointFiles.of(ck, target)
        states = [_state_of_rewritten(_file(place, change), change) for change in log.files]
        return place, _together(log.files, states), []
    kinds: list[DryRun] = []
    # The same addresses three times: which bytes were meant, what stood there, and what stands there now.
    for pick in (_mask, lambda column: column.old, lambda column: column.new):
        place, noted = _rehearsed(log, target, pick)
        kinds.append(noted)
    states, patches = [], []
    for change in log.files:
        path = _file(place, change)
        masks, olds, news = ([rows for _, rows in kind.edits_of(path).xors] for kind in kinds)
        addresses = [where for where, _ in kinds[0].edits_of(path).xors]
        changes = FileEdits(list(zip(addresses, masks, strict=True)), {at: old for at, old, _ in change.seals})
        patch, state = _restored(path, change, changes, olds, news)
        patch.whole = path in place.records
        states.append(state)
        patches.append(patch)
    return place, _together(log.files, states), patches


def _rehearsed(log: InjectionLog, target: Path, pick: Callable[[Column], Bits]) -> tuple[CheckpointFiles, DryRun]:
    with record_dry_run(stale=bool(log.settings.get("stale_checksum"))) as noted, open_checkpoint(target) as ck:
        if isinstance(ck, HasRecords):
            ck.keep_records_unchanged()  # the log knows what stood there
        for column in log.columns:
            _check_tensor(ck, column)
            ends = column.net_changes()
            try:
                ck.xor(column.tensor, *ends.elements(pick(ends)))
            except NeedsRewrite:
                raise _other(target, f"{column.tensor} is stored in another way") from None
        return CheckpointFiles.of(ck, target), noted


def _mask(column: Column) -> Bits:
    return np.full(len(column), np.iinfo(column.dtype.bits).max, column.dtype.bits)


def _restored(
    path: Path, change: FileChange, changes: FileEdits, olds: list[Bits], news: list[Bits]
) -> tuple[Patch, FoundState]:
    """The touched blocks of a file with their old bytes, if putting them back gives the digest from before."""
    patch = Patch.read(path, changes)
    if patch.size != change.size:
        raise _other(path, f"has {patch.size:,} bytes (expected {change.size:,})")
    found = patch.digest()
    either = True
    for (addresses, mask), old, new in zip(changes.xors, olds, news, strict=True):
        now = patch.rows(addresses, mask.shape[1])
        either = either and bool(np.all(((now & mask) == old) | ((now & mask) == new)))
        patch.put_rows(addresses, (now & ~mask) | old)
    for offset, before, after in change.seals:
        now_there = patch.bytes_at(offset, len(before))
        either = either and all(byte in pair for byte, *pair in zip(now_there, before, after, strict=True))
        patch.put(offset, before)
    if not either or patch.digest() != change.before:
        raise _other(path, f"has changed since (digest {found[:12]}…, expected {change.after[:12]}…)")
    if change.full_before and (whole := sha256(path, patch)) != change.full_before:
        raise _other(path, f"has changed since (without the faults sha256 {whole}, expected {change.full_before})")
    state = (
        FoundState.CLEAN
        if found == change.before
        else FoundState.INJECTED
        if found == change.after
        else FoundState.PARTLY
    )
    return patch, state


def _state_of_rewritten(path: Path, change: FileChange) -> FoundState:
    found = sha256(path)
    if found not in (change.before, change.after):
        raise _other(path, f"has changed since (sha256 {found}, expected {change.after[:12]}…)")
    return FoundState.CLEAN if found == change.before else FoundState.INJECTED


def _restore(place: CheckpointFiles, change: FileChange, progress: ProgressCallback | None) -> None:
    path = _file(place, change)
    kept = sum(len(image.old) for image in change.images)
    if change.size > path.stat().st_size + kept or any(i.offset + len(i.old) > change.size for i in change.images):
        raise _other(path, "cannot have been what the log says")
    if _state_of_rewritten(path, change) is FoundState.INJECTED:
        alone = CheckpointFiles(path, path.parent, (path,))
        with alone.temporary_copy(path, progress) as work:
            restore_bytes(work.path, change)
            replace_file(work.path, path)


def _refuse_unless_last(log: InjectionLog, target: Path) -> None:
    """An injection may only be undone once those that followed it are."""
    later = [known for known in logs_of(target, log.path) if log.digest in known.follows and not known.undone]
    waiting = [known for known in later if _is_in_effect(known.path, target)]
    followed = {digest for known in waiting for digest in known.follows}
    newest = [known.path for known in waiting if known.digest not in followed]
    if newest:
        hint = f"Undo that one first: evergrad undo {shlex.quote(str(newest[0]))}"
        raise UsageError(f"{target}: a later injection is still in effect. {hint}")


def _is_in_effect(path: Path, target: Path) -> bool:
    """Whether the file is as that injection left it: the last of those in effect is always known by that."""
    try:
        return _inspect_files(InjectionLog.load(path), target)[1] is not FoundState.CLEAN
    except EvergradError:
        return False


def _check_tensor(ck: Checkpoint, column: Column) -> None:
    info = ck.tensors.get(column.tensor)
    if info is None:
        raise _other(ck.path, f"has no tensor {column.tensor!r}")
    if (info.shape, info.dtype) != (column.shape, column.dtype):
        found, expected = f"{info.dtype} {info.shape}", f"{column.dtype} {column.shape}"
        raise _other(ck.path, f"{column.tensor} is {found} (expected {expected})")


def _file(place: CheckpointFiles, change: FileChange) -> Path:
    path = place.file(change.name)
    if not path.is_file():
        raise _other(place.path, f"has no file {change.name!r}")
    return path


def _other(path: Path, what: str) -> UsageError:
    return UsageError(
        f"{path}: {what}: it is not the file that the log is of, or was altered since. Nothing was changed"
    )


def _together(files: Sequence[FileChange], states: Sequence[FoundState]) -> FoundState:
    """The state of all files together; what did not change at all tells nothing."""
    telling = {state for change, state in zip(files, states, strict=True) if change.before != change.after}
    return telling.pop() if len(telling) == 1 else FoundState.PARTLY if telling else FoundState.CLEAN
