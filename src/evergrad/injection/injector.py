"""Soft errors in checkpoints: drawn from a seed, logged before they happen, applied to any format."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Literal, TypeAlias

from evergrad import _files
from evergrad._files import (
    check_replaceable,
    exclusive,
    file_errors,
    fsync_path,
    link_or_rename,
    open_file,
    replace_file,
    temporary_name,
)
from evergrad.dtypes import DType
from evergrad.errors import EvergradError, FileAccessError, UsageError
from evergrad.formats import Checkpoint, open_checkpoint
from evergrad.formats.byte_source import DryRun, FileEdits, NeedsRewrite, record_dry_run
from evergrad.formats.checkpoint import ProgressCallback
from evergrad.formats.version_records import HasRecords
from evergrad.injection.byte_patches import Patch, diff_rewritten_file, sha256
from evergrad.injection.faults import Fault
from evergrad.injection.injection_plan import Column, InjectionPlan, plan_injection
from evergrad.injection.log import FileChange, InjectionLog, default_log_path, log_exists_error, logs_of
from evergrad.injection.rng import GENERATOR, Draws
from evergrad.injection.sampling import Amount, Sampling, population, sample
from evergrad.records import Json, Role
from evergrad.state.selection import Where
from evergrad.wording import checked_choice, did_you_mean

# Where an injection takes place: in the files themselves, or in a copy that appears whole or not at all.
#
# A checkpoint of several files that was named by one of them (an index) is copied into a folder.

_FICLONE = 0x40049409
_COPY_BYTES = 1 << 26


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of one checkpoint: by which path they are known, and the folder in which their names count."""

    path: Path
    root: Path
    files: tuple[Path, ...]
    records: tuple[Path, ...] = ()
    """Files with digests of the others: replaced in one step, and left behind when a single file is copied."""

    @classmethod
    def of(cls, ck: Checkpoint, given: Path) -> CheckpointFiles:
        """The place of an open checkpoint that was named by this path."""
        path = given if given.is_dir() else ck.path
        files = tuple(dict.fromkeys(file for file in ck.files() if file.is_file()))
        records = tuple(ck.records()) if isinstance(ck, HasRecords) else ()
        return cls(path, path if path.is_dir() else path.parent, files, records)

    @property
    def locked(self) -> tuple[Path, ...]:
        """What nobody else may alter meanwhile."""
        return tuple(dict.fromkeys((*self.files, *self.records)))

    @property
    def single(self) -> bool:
        """Whether the checkpoint is one file, named by its own path."""
        return not self.path.is_dir() and len(self.files) == 1

    def name(self, file: Path) -> str:
        """A file's name within the checkpoint."""
        return file.name if self.single else os.path.relpath(file, self.root)

    def file(self, name: str) -> Path:
        """The file of that name; of a single one, whatever it is called by now."""
        is_record = any(record.name == name for record in self.records)
        return self.path if self.single and not is_record else self.root / name

    def check_out(self, out: Path, overwrite: bool) -> None:
        """Refuse a place for the copy that is taken, or is not there."""
        if os.path.lexists(out):
            if out.exists() and any(out.samefile(file) for file in (self.path, *self.files) if file.exists()):
                raise UsageError(f"{out}: is the source. To alter it itself: in_place=True, or --in-place.")
            if not out.is_dir():
                check_replaceable(out)
            if out.is_dir() or not self.single:
                raise UsageError(
                    f"{out}: exists already, and {'it' if out.is_dir() else 'the source'} is no single file"
                )
            if not overwrite:
                raise UsageError(
                    f"{out}: exists already. Choose another name, or replace it: overwrite=True, or --overwrite."
                )
        if not out.parent.is_dir():
            raise UsageError(f"{out}: there is no folder {str(out.parent)!r}")
        if self.path.is_dir() and out.resolve().is_relative_to(self.path.resolve()):
            raise UsageError(f"{out}: lies within the folder that is to be copied")

    @contextmanager
    def temporary_copy(self, beside: Path, progress: ProgressCallback | None = None) -> Iterator[CheckpointFiles]:
        """A copy of everything under a temporary name beside a path; what is left of it goes in the end."""
        place = temporary_name(beside)
        done, total = 0, sum(file.stat().st_size for file in self.files)

        def copy(source: str, target: str) -> None:
            nonlocal done
            _copy_file(Path(source), Path(target))
            done += os.path.getsize(target)
            if progress is not None:
                progress(done, max(total, done))

        try:
            with file_errors(beside, "cannot be written"):
                if self.single:
                    copy(str(self.path), str(place))
                elif self.path.is_dir():
                    self._copy_folder(place, copy)
                else:
                    place.mkdir()
                    for file in self.files:
                        copy(str(file), str(place / self.name(file)))
            path = place if self.single or self.path.is_dir() else place / self.path.name
            root = place if not self.single else place.parent
            files = (place,) if self.single else tuple(place / self.name(file) for file in self.files)
            yield CheckpointFiles(path, root, files)
        finally:
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place, ignore_errors=True)
            else:
                with suppress(OSError):
                    place.unlink()

    def _copy_folder(self, place: Path, copy: Callable[[str, str], None]) -> None:
        """Copy the folder with all its files.

        A link to a folder stays a link unless files of the checkpoint lie behind it: it may lead to its own parent, or
        to half of the disk. Links that lead nowhere, pipes, sockets and devices hold nothing to copy.
        """
        waiting, made = [(self.path, place)], []
        while waiting:
            source, target = waiting.pop()
            target.mkdir()
            made.append((source, target))
            with os.scandir(source) as entries:
                for entry in entries:
                    path, beside = Path(entry.path), target / entry.name
                    if _leads_to_folder(entry):
                        if entry.is_symlink() and not any(file.is_relative_to(path) for file in self.files):
                            beside.symlink_to(path.resolve())
                        else:
                            waiting.append((path, beside))
                    elif _leads_to_file(entry):
                        copy(str(path), str(beside))
        for source, target in reversed(made):  # only now: a folder may be closed to new files
            shutil.copymode(source, target)

    def move_to(self, out: Path, *, overwrite: bool) -> None:
        """Move a copy, durably, to where it belongs; not over what has come there since, unless `overwrite`."""
        place = self.path if self.single else self.root
        with file_errors(out, "cannot be written"):
            for folder, _, names in os.walk(place) if place.is_dir() else ():
                for name in names:
                    fsync_path(Path(folder) / name)
                fsync_path(Path(folder))
            if self.single:
                fsync_path(place)
            if self.single and not overwrite:
                try:
                    link_or_rename(place, out)
                except FileExistsError:
                    raise FileExistsError(errno.EEXIST, "exists by now") from None
                _files.remove(place)
            else:
                _files.rename(place, out)  # of a folder, only onto an empty one
            _files.fsync_folder(out.parent)


def check_writable(files: Iterable[Path], *, replaced: bool) -> None:
    """Refuse files that may not be altered or, if they are to be replaced, folders that may not; nothing is done."""
    for file in files:
        for path in (file, file.resolve().parent) if replaced else (file,):
            if not os.access(path, os.W_OK, effective_ids=True):
                raise FileAccessError(path, "cannot be altered: permission denied")


def _leads_to_folder(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):  # links that lead to each other
        return entry.is_dir()
    return False


def _leads_to_file(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):
        return entry.is_file()
    return False


def _copy_file(source: Path, target: Path) -> None:
    """Share the blocks where the file system can, else copy within the kernel."""
    with open_file(source) as old, target.open("xb") as new:
        try:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
        except OSError:
            _copy_range(old.fileno(), new.fileno())
    shutil.copymode(source, target)


def _copy_range(old: int, new: int) -> None:
    left = os.fstat(old).st_size
    while left:
        try:
            count = os.copy_file_range(old, new, min(left, _COPY_BYTES))
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF):
                raise
            count = _write_all(new, os.read(old, min(left, _COPY_BYTES)))
        if count == 0:
            raise OSError(errno.EIO, "the file became shorter while it was copied")
        left -= count


def _write_all(fd: int, data: bytes) -> int:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return len(data)


# From a plan to altered files: rehearse, write the log, and only then change the first byte.
#
# What has a place of its own in a file is patched there. A file that has to be rewritten (compressed data) is altered
# in a copy, which then takes its place in one step; its log holds the bytes that were there.

Digest = Literal["blocks", "full"]


@dataclass(frozen=True)
class OutputSettings:
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

    def check(self, place: CheckpointFiles) -> None:
        """Refuse, before anything is written, what cannot be."""
        if self.log is not None:
            with file_errors(self.log, "cannot be written"):
                if os.path.lexists(self.log):
                    raise log_exists_error(self.log)
                if not self.log.parent.is_dir():
                    raise UsageError(f"{self.log}: there is no folder {str(self.log.parent)!r}")
                if self.out is not None and self.out.resolve() == self.log.resolve():
                    raise UsageError(f"{self.log}: is the place of the result, and the log needs one of its own")
        if self.out is not None:
            with file_errors(self.out, "cannot be written"):
                place.check_out(self.out, self.overwrite)


@dataclass(frozen=True)
class PreparedInjection:
    """What is going to happen, all found out and nothing done."""

    files: CheckpointFiles
    dry_run: DryRun
    patched: bool
    """Whether everything has a place of its own; else the files are rewritten."""
    log: InjectionLog
    output: OutputSettings

    def execute(self, progress: ProgressCallback | None = None) -> InjectionLog:
        """Do it. Call it outside of the rehearsal."""
        outcome, place = self.output, self.files
        if outcome.dry_run:
            return self.log
        with ExitStack() as stack:
            work = place
            if outcome.out is not None or not self.patched:
                work = stack.enter_context(place.temporary_copy(outcome.out or place.path, progress))
            if self.patched:
                return _patch(self.log, place, work, self.dry_run, outcome)
            return _rewrite(self.log, place, work, outcome)


def prepare_injection(
    ck: Checkpoint,
    noted: DryRun,
    given: Path,
    plan: InjectionPlan,
    outcome: OutputSettings,
    *,
    attempts: int,
    fault: Mapping[str, Json],
    settings: Mapping[str, Json],
    left_out: Mapping[str, list[str]],
) -> PreparedInjection:
    """Find out what a plan does to the files of a checkpoint that was opened within the rehearsal `noted`."""
    place = CheckpointFiles.of(ck, given)
    outcome.check(place)
    columns = tuple(plan.columns)
    patched = True
    try:
        apply_columns(ck, columns)
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
    return PreparedInjection(place, noted, patched, log, outcome)


def apply_columns(ck: Checkpoint, columns: tuple[Column, ...]) -> None:
    """Alter what the columns say; within a rehearsal, nothing is."""
    for column in columns:
        ends = column.net_changes()
        ck.xor(column.tensor, *ends.elements(ends.old ^ ends.new))


def _patch(
    log: InjectionLog, place: CheckpointFiles, work: CheckpointFiles, noted: DryRun, outcome: OutputSettings
) -> InjectionLog:
    patches: list[Patch] = []
    files: list[FileChange] = []
    for file, changes in noted.files.items():
        if place.single and outcome.out is not None and file in place.records:
            continue  # they stay with the original
        name = place.name(file)
        patch, change = _prepare_patch(work.file(name), name, changes, outcome)
        patch.whole = outcome.in_place and file in place.records
        patches.append(patch)
        files.append(change)
    log = _save_log(replace(log, files=tuple(files)), place, outcome)
    with _undo_on_error(log, work, outcome):
        for patch in patches:
            patch.write()
        if outcome.out is not None:
            work.move_to(outcome.out, overwrite=outcome.overwrite)
    return log


def _prepare_patch(path: Path, name: str, changes: FileEdits, outcome: OutputSettings) -> tuple[Patch, FileChange]:
    """The patch of one file with the bytes it will have, and what the log says of it."""
    kept = FileEdits(changes.xors, {} if outcome.stale_checksum else changes.writes)
    patch = Patch.read(path, kept)
    full = sha256(path) if outcome.digest == "full" else ""
    before = patch.digest()
    seals = []
    for addresses, rows in kept.xors:
        patch.put_rows(addresses, patch.rows(addresses, rows.shape[1]) ^ rows)
    for offset, data in kept.writes.items():
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


def _rewrite(log: InjectionLog, place: CheckpointFiles, work: CheckpointFiles, outcome: OutputSettings) -> InjectionLog:
    """Alter a copy by the format's own means, and find out what that did to its files."""
    with open_checkpoint(work.path) as ck:
        apply_columns(ck, log.columns)  # for real: no rehearsal is under way here
    changes = [(file, diff_rewritten_file(file, work.file(place.name(file)), place.name(file))) for file in place.files]
    kept = [(file, change) for file, change in changes if change is not None]
    log = _save_log(replace(log, files=tuple(change for _, change in kept)), place, outcome)
    with _undo_on_error(log, work, outcome):
        if outcome.out is not None:
            work.move_to(outcome.out, overwrite=outcome.overwrite)
        else:
            for file, change in kept:
                replace_file(work.file(change.name), file)
    return log


def _save_log(log: InjectionLog, place: CheckpointFiles, outcome: OutputSettings) -> InjectionLog:
    """Make the log durable: from here on, whatever happens can be undone."""
    target = outcome.out if outcome.out is not None else place.path
    if outcome.in_place:
        log = replace(log, follows=tuple(known.digest for known in logs_of(place.path, outcome.log)))
    return log.save_at(outcome.log or default_log_path(target), numbered=outcome.log is None)


@contextmanager
def _undo_on_error(log: InjectionLog, work: CheckpointFiles, outcome: OutputSettings) -> Iterator[None]:
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


Selection: TypeAlias = "list[str | re.Pattern[str] | Role]"
"""What `where` names, as a list."""

_MAX_SEED = 1 << 128
_FLAGS = {"a": re.ASCII, "i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE}


def inject(
    path: str | PathLike[str],
    fault: Fault,
    *,
    count: int | None = None,
    fraction: float | None = None,
    rate: float | None = None,
    hours: float = 1.0,
    probability: float | None = None,
    where: Where = None,
    sampling: Sampling = "element",
    dtypes: Iterable[str] | None = None,
    allow_nonfinite: bool = True,
    seed: int = 0,
    out: str | PathLike[str] | None = None,
    in_place: bool = False,
    log: str | PathLike[str] | None = None,
    stale_checksum: bool = False,
    digest: Digest = "blocks",
    overwrite: bool = False,
    dry_run: bool = False,
    progress: ProgressCallback | None = None,
) -> InjectionLog:
    """Put faults into a checkpoint of any format, and return the log of what was done.

    The result goes to a copy, `out`, or with `in_place=True` into the file itself. The log is durable before the first
    byte changes; it is kept at `log`, by default at `<out>.faults.jsonl`, and `eg.undo` and `eg.replay` take it.

    How many: `count` faults, a `fraction` of the selected elements, or a `rate` in FIT per Mbit over `hours`; each
    attempt comes about with `probability`, which alone attempts every element once. Where: the tensors that `where`
    selects (as in `eg.select`), of these `dtypes`; `sampling` draws elements, all different, or, as the literature
    does, a tensor first and then an element of it. `allow_nonfinite=False` draws again what would become NaN or
    infinite. The same seed gives the same bits on every platform.

    Checksums of the container follow, as for an error in memory; `stale_checksum=True` leaves them: rot at rest.

    >>> log = inject("model.h5", BitFlip("exponent"), count=10, seed=7, out="bad.h5")     # doctest: +SKIP
    """
    if not isinstance(fault, Fault):
        raise UsageError(f"fault {fault!r:.80}: expected a fault such as BitFlip(bits='exponent')")
    checked_seed(seed)
    amount = Amount(count, fraction, rate, hours, probability)
    types = None if dtypes is None else dtypes_of(dtypes)
    items = items_of(where)
    given = Path(path)
    outcome = OutputSettings(
        out=None if out is None else Path(out),
        in_place=in_place,
        log=None if log is None else Path(log),
        stale_checksum=stale_checksum,
        digest=digest,
        overwrite=overwrite,
        dry_run=dry_run,
    )
    draws = Draws(seed)
    with ExitStack() as locks:
        with record_dry_run(stale=stale_checksum) as noted, open_checkpoint(given) as ck:
            if in_place:
                locks.enter_context(exclusive(CheckpointFiles.of(ck, given).locked))
            chosen = population(ck, fault, items, types)
            sites = sample(chosen, amount, sampling, draws)
            planned = plan_injection(
                ck, chosen, sites, fault, draws, sampling=sampling, allow_nonfinite=allow_nonfinite
            )
            settings = settings_to_json(amount, items, types, sampling, allow_nonfinite, seed)
            job = prepare_injection(
                ck,
                noted,
                given,
                planned,
                outcome,
                attempts=sites.attempts,
                fault=fault.to_json(),
                settings={**settings, "digest": digest},
                left_out=chosen.left_out,
            )
        return job.execute(progress)


def checked_seed(seed: object) -> int:
    """A seed that the generator takes; `UsageError` for anything else."""
    if type(seed) is not int or not 0 <= seed < _MAX_SEED:
        raise UsageError(f"seed {seed!r:.60}: expected a whole number from 0 to 2**128 − 1")
    return seed


def dtypes_of(names: Iterable[str]) -> list[DType]:
    """Element types by their names; `UsageError` for one that is none."""
    asked = [names] if isinstance(names, str) else list(names)
    found = [DType.named(name) for name in asked]
    if not found or None in found:
        hint = f".{did_you_mean(str(asked[found.index(None)]), [*DType])}" if None in found else ""
        raise UsageError(f"dtypes {names!r:.100}: expected one or more of {', '.join(DType)}{hint}")
    return [kind for kind in found if kind is not None]


def items_of(where: Where) -> Selection | None:
    """The selection as a list, which can be read twice."""
    if where is None:
        return None
    if isinstance(where, (str, re.Pattern)):
        return [where]
    if not isinstance(where, Iterable):
        raise UsageError(f"where {where!r:.100}: expected a name, a pattern, a role or a list of these")
    return list(where)


def selection_to_json(where: Selection | None) -> Json:
    """The selection as text that selects the same again."""
    if where is None:
        return None
    told: list[Json] = []
    for item in where:
        if isinstance(item, re.Pattern):
            flags = "".join(sign for sign, flag in _FLAGS.items() if item.flags & flag)
            told.append(f"re:{f'(?{flags})' if flags else ''}{item.pattern}")
        else:
            told.append(f"role:{item}" if isinstance(item, Role) else item)
    return told


def settings_to_json(
    amount: Amount,
    where: Selection | None,
    types: Sequence[DType] | None,
    sampling: Sampling,
    allow_nonfinite: bool,
    seed: int,
) -> dict[str, Json]:
    """What the log says of a drawn injection: enough to draw the same again."""
    return {
        "amount": amount.to_json(),
        "where": selection_to_json(where),
        **({"dtypes": [str(kind) for kind in types]} if types is not None else {}),
        "sampling": sampling,
        "allow_nonfinite": allow_nonfinite,
        "seed": seed,
        "generator": GENERATOR,
    }
