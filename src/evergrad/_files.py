"""The calls that change a file system, files that appear whole or not at all, and locks on files.

CALLS names the functions that change a file system, each one call of it. They are all here so that their order can be
read, and so that a test can stop a process after any one of them: `evergrad.testing` replaces them in this module, and
everything else looks them up here when it calls them, as `_files.rename(…)`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from evergrad.errors import CheckpointError, FileAccessError, reason

CALLS = (
    "allocate",
    "create",
    "fsync",
    "fsync_folder",
    "link",
    "make_folder",
    "remove",
    "remove_folder",
    "rename",
    "resize",
    "write",
)

_NO_DIRECT = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
_QUICK_S, _SLOW_S = 0.001, 0.05
_PATIENCE_S = 30.0


class NoFile(OSError):
    """A named pipe, a socket or a device is in the place of a file."""


# The calls that change a file system.


def make_folder(path: Path, mode: int = 0o777) -> bool:
    """Make one folder; False if it is there already."""
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        return False
    return True


def make_folders(path: Path) -> None:
    """Make a folder and those above it that are missing, each durable in the one above."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for each in reversed(missing):
        if make_folder(each):
            fsync_folder(each.parent)


def create(path: Path, *, direct: bool = False, new: bool = False) -> int:
    """Open a file for writing, made if need be, or only if it is `new`: else `FileExistsError`.

    `direct` goes round the page cache where the file system can.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if new else 0)
    if direct and hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
    return os.open(path, flags, 0o666)


def allocate(fd: int, size: int) -> None:
    """Reserve a file's bytes, so that a full disk shows now and not in the middle; the file gets that length."""
    if size:
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in _NO_DIRECT:  # a file system that cannot reserve: writing will tell
                raise
    os.ftruncate(fd, size)


def resize(fd: int, size: int) -> None:
    """Cut a file to its length."""
    os.ftruncate(fd, size)


def write(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of the data at an offset."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def fsync(fd: int) -> None:
    """Make a file's bytes durable."""
    os.fsync(fd)


def fsync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename(source: Path, target: Path) -> None:
    """Give a file another name, in one step, over whatever had that name."""
    os.rename(source, target)


def link(source: Path, target: Path) -> None:
    """Give a file a second name, never over whatever has that name: `FileExistsError`."""
    os.link(source, target)


def remove(path: Path) -> None:
    """Remove a file; it may be gone already."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def remove_folder(path: Path) -> None:
    """Remove an empty folder; one that is gone, or holds something, is left as it is."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


# Files that appear whole or not at all, made of those calls.


def publish(path: Path, text: bytes) -> None:
    """Write a small file that appears whole or not at all, and stays: write, fsync, rename, fsync of the folder."""
    temporary = temporary_name(path)
    try:
        fd = create(temporary)
        try:
            resize(fd, 0)
            write(fd, text, 0)
            fsync(fd)
        finally:
            os.close(fd)
        rename(temporary, path)
    except OSError:
        with suppress(OSError):
            remove(temporary)
        raise
    fsync_folder(path.parent)


def rewrite(path: Path, data: bytes, temporary: Path) -> None:
    """Write a small file over the one before in one step, by way of `temporary`; a crash of the machine may undo it."""
    fd = open_regular(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        write(fd, data, 0)
    finally:
        os.close(fd)
    rename(temporary, path)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place, durably, if the block ends well.

    Permissions of a replaced file are kept; a symbolic link keeps pointing to the file it names. A crash
    leaves the old file, and at most a temporary one named `.<name>.….partial` beside it. What is there and is no
    file, such as a device or a folder, is refused.
    """
    with file_errors(path, "cannot be written"):
        check_replaceable(path)
        try:
            target = path.resolve()
        except RuntimeError as error:  # links that lead to each other
            raise OSError(str(error)) from None
        temporary = _new_temporary(target)
    try:
        with file_errors(path, "cannot be written"):
            yield temporary
            if target.exists():
                os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))
            fsync_path(temporary)
            rename(temporary, target)
            fsync_folder(target.parent)
    except BaseException:
        with suppress(OSError):
            remove(temporary)
        raise


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """As `replacing`, but for a new file only: `FileExistsError` if there is one by now, and it stays as it is."""
    with file_errors(path, "cannot be written"):
        temporary = _new_temporary(path)
    try:
        with file_errors(path, "cannot be written"):
            yield temporary
            fsync_path(temporary)
        try:
            link_or_rename(temporary, path)
        except FileExistsError:
            raise
        except OSError as error:
            raise FileAccessError(path, f"cannot be written: {reason(error)}") from error
        with file_errors(path, "cannot be made durable"):
            fsync_folder(path.parent)
    finally:
        with suppress(OSError):
            remove(temporary)


def link_or_rename(source: Path, target: Path) -> None:
    """Give a file a name that must be free: `FileExistsError` if it is not. The file may keep its old name, too."""
    try:
        link(source, target)  # unlike a rename, never over an existing file
    except FileExistsError:
        raise
    except OSError:  # a file system without links, or a name that cannot be
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        rename(source, target)


def replace_file(new: Path, old: Path) -> None:
    """Let a file take another's place, durably and in one step, with the permissions that the other had."""
    with file_errors(old, "cannot be replaced"):
        target = old.resolve()
        shutil.copymode(target, new)
        fsync_path(new)
        try:
            rename(new, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            with replacing(target) as beside:  # a link that leads to another file system
                shutil.copyfile(new, beside)
        fsync_folder(target.parent)


def replace_folder(new: Path, target: Path) -> None:
    """Let a folder take the place of another, if there is one, durably; what it holds is durable already."""
    old = temporary_name(target) if target.exists() else None
    if old is not None:
        rename(target, old)
    try:
        rename(new, target)
    except OSError:
        if old is not None:
            rename(old, target)
        raise
    fsync_folder(target.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def fsync_path(path: Path) -> None:
    """Make a file's bytes, or the names in a folder, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fsync(fd)
    finally:
        os.close(fd)


def check_replaceable(path: Path) -> None:
    """Refuse to put a file in the place of what is there and is none: a device, a pipe, a folder."""
    if path.exists() and not path.is_file():
        raise FileAccessError(path, "is no file, and is not replaced by one", hint="Choose another name.")


def temporary_name(target: Path) -> Path:
    """A name beside the target that nobody takes for it."""
    # On a shared file system another machine may write the same name at the same time, from a process as numbered.
    stem = target.name.encode()[:100].decode("utf-8", "ignore")
    return target.with_name(f".{stem}.{os.getpid()}-{secrets.token_hex(4)}.partial")


def _new_temporary(target: Path) -> Path:
    """A new, empty file beside the target."""
    temporary = temporary_name(target)
    os.close(create(temporary, new=True))
    return temporary


# Opening files to read.


@contextmanager
def file_errors(path: Path, what: str = "cannot be read") -> Iterator[None]:
    """Turn what the file system refuses into one clear line."""
    try:
        yield
    except OSError as error:
        raise FileAccessError(path, f"{what}: {reason(error)}") from error


def open_file(path: Path) -> BinaryIO:
    """Open a file to read; anything but a file is refused, and never waited for: `OSError`."""
    return os.fdopen(open_regular(path), "rb")


def read_small(path: Path) -> bytes:
    """Read a small file from its beginning to its end; anything but a file is refused, as by `open_file`."""
    with open_file(path) as file:
        return file.read()


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Open a descriptor of a file; `NoFile` or `IsADirectoryError` for anything else, which is never waited for.

    Opening a named pipe waits until somebody opens its other end, and a device may never end.
    """
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a named pipe that nobody reads
            raise NoFile(error.errno, f"expected a file, found {_kind(os.stat(path).st_mode)}", str(path)) from None
        raise
    found = os.fstat(fd).st_mode
    if stat.S_ISREG(found):
        return fd
    os.close(fd)
    if stat.S_ISDIR(found):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise NoFile(errno.EINVAL, f"expected a file, found {_kind(found)}", str(path))


def _kind(mode: int) -> str:
    return "a named pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"


# Locks.


class Process(tuple[int, int, str]):
    """A process of this machine: its id, when it started (in clock ticks since boot), and its state."""

    __slots__ = ()

    @property
    def is_stopped(self) -> bool:
        """True if a signal or a debugger has stopped it."""
        return self[2] in ("T", "t")

    @property
    def has_ended(self) -> bool:
        """True if only its exit code is left of it."""
        return self[2] in ("Z", "X", "x")


def process(pid: int) -> Process | None:
    """The process of an id; None if there is none."""
    with suppress(OSError, ValueError, IndexError):
        state, *rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return Process((pid, int(rest[18]), state))
    return None


def take_lock(fd: int, *, shared: bool = False) -> None:
    """Lock an open file until it is closed; `BlockingIOError` if another process holds its lock. Never waits."""
    fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


def is_locked(path: Path, *, shared: bool = False) -> bool:
    """Return True if a living process holds the lock on a file; a shared lock counts only if `shared`.

    Processes that look at the same moment do not take each other for the holder, unless `shared`.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        take_lock(fd, shared=not shared)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def holder(path: Path) -> int | None:
    """The id of the process that took the lock on a file; None if the kernel does not say."""
    with suppress(OSError, ValueError, IndexError):
        inode = os.stat(path).st_ino
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and int(fields[5].rpartition(":")[2]) == inode and int(fields[4]) > 0:
                return int(fields[4])
    return None


def open_lock(path: Path) -> int:
    """Open a file to be locked, made if need be; a named pipe, a socket or a device in its place is replaced."""
    while True:
        with suppress(NoFile):
            return open_regular(path, os.O_RDWR | os.O_CREAT, 0o600)
        remove(path)


def removal_advice(path: Path) -> str:
    """Say how to go on where a folder or a link is in the place of a file; empty where there is neither."""
    with suppress(OSError):
        if path.is_symlink():
            return f" It is a symbolic link to {os.readlink(path)}: remove it."
        if path.is_dir():
            return " Remove it."
    return ""


@contextmanager
def exclusive(files: Iterable[Path]) -> Iterator[None]:
    """Refuse to alter files that another process is altering, or has locked; locks go with the process."""
    with ExitStack() as stack:
        for path in sorted({file.resolve() for file in files}):
            stack.enter_context(_exclusive(path))
        yield


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    with file_errors(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            take_lock(fd)
        except BlockingIOError:
            raise FileAccessError(
                path, "is locked: another process uses or alters it", hint="Try again later."
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(fd)


@contextmanager
def locked(path: Path, patience_s: float = _PATIENCE_S) -> Iterator[None]:
    """Hold the lock on a file, made if need be; a second process waits here.

    `CheckpointError` if the holder stays stopped for `patience_s`. One that runs is waited for: it may have much to do.
    """
    fd = open_lock(path)
    try:
        pause, stopped_s = _QUICK_S, 0.0
        while True:
            try:
                take_lock(fd)
                break
            except BlockingIOError:
                pass
            # Pauses are counted, and not the clock read: this process may be stopped, too.
            time.sleep(pause)
            pause = min(2 * pause, _SLOW_S)
            pid = holder(path) if pause == _SLOW_S else None
            found = process(pid) if pid is not None else None
            stopped_s = stopped_s + pause if found is not None and found.is_stopped else 0.0
            if stopped_s >= patience_s:
                raise CheckpointError(
                    f"{path}: held by process {pid}, which is stopped. Continue it (kill -CONT {pid}), or end it."
                )
        yield
    finally:
        os.close(fd)
