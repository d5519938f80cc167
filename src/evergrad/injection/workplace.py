"""Where an injection takes place: in the files themselves, or in a copy that appears whole or not at all.

A checkpoint of several files that was named by one of them (an index) is copied into a folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from evergrad.errors import FileAccessError, UsageError
from evergrad.formats import Checkpoint
from evergrad.formats.checkpoint import Progress
from evergrad.formats.data_file import file_errors, open_file
from evergrad.formats.durable import check_replaceable, fsync, replacing, temporary_name
from evergrad.formats.version_records import Recorded

_FICLONE = 0x40049409
_COPY_BYTES = 1 << 26


@dataclass(frozen=True)
class Workplace:
    """The files of one checkpoint: by which path they are known, and the folder in which their names count."""

    path: Path
    root: Path
    files: tuple[Path, ...]
    records: tuple[Path, ...] = ()
    """Files with digests of the others: replaced in one step, and left behind when a single file is copied."""

    @classmethod
    def of(cls, ck: Checkpoint, given: Path) -> Workplace:
        """The place of an open checkpoint that was named by this path."""
        path = given if given.is_dir() else ck.path
        files = tuple(dict.fromkeys(file for file in ck.files() if file.is_file()))
        records = tuple(ck.records()) if isinstance(ck, Recorded) else ()
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
    def copied(self, beside: Path, progress: Progress | None = None) -> Iterator[Workplace]:
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
            yield Workplace(path, root, files)
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

    def appear_as(self, out: Path, *, overwrite: bool) -> None:
        """Move a copy, durably, to where it belongs; not over what has come there since, unless `overwrite`."""
        place = self.path if self.single else self.root
        with file_errors(out, "cannot be written"):
            for folder, _, names in os.walk(place) if place.is_dir() else ():
                for name in names:
                    fsync(Path(folder) / name)
                fsync(Path(folder))
            if self.single:
                fsync(place)
            if self.single and not overwrite and not _linked(place, out):
                raise FileExistsError(errno.EEXIST, "exists by now")
            if os.path.lexists(place):
                os.replace(place, out)  # of a folder, only onto an empty one
            fsync(out.parent)


def check_writable(files: Iterable[Path], *, replaced: bool) -> None:
    """Refuse files that may not be altered or, if they are to be replaced, folders that may not; nothing is done."""
    for file in files:
        for path in (file, file.resolve().parent) if replaced else (file,):
            if not os.access(path, os.W_OK, effective_ids=True):
                raise FileAccessError(path, "cannot be altered: permission denied")


@contextmanager
def exclusive(files: Iterable[Path]) -> Iterator[None]:
    """Refuse to alter files that another process is altering, or has locked; locks go with the process."""
    with ExitStack() as stack:
        for path in sorted({file.resolve() for file in files}):
            stack.enter_context(_locked(path))
        yield


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with file_errors(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileAccessError(
                path, "is locked: another process uses or alters it", hint="Try again later."
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(fd)


def replace_file(new: Path, old: Path) -> None:
    """Let a file take another's place, durably and in one step, with the permissions that the other had."""
    with file_errors(old, "cannot be replaced"):
        target = old.resolve()
        shutil.copymode(target, new)
        fsync(new)
        try:
            os.replace(new, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            with replacing(target) as beside:  # a link that leads to another file system
                shutil.copyfile(new, beside)
        fsync(target.parent)


def _leads_to_folder(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):  # links that lead to each other
        return entry.is_dir()
    return False


def _leads_to_file(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):
        return entry.is_file()
    return False


def _linked(place: Path, out: Path) -> bool:
    """Give a file its place unless there is one; False if there is. Where there are no links, the caller moves it."""
    try:
        os.link(place, out)
        place.unlink()
    except FileExistsError:
        return False
    except OSError:
        return not os.path.lexists(out)
    return True


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
