"""Every call by which the checkpointer changes a file system, and nothing else.

All of them are here so that their order can be read, and so that tests can stop a process after any one of them:
`evergrad.testing` wraps the functions that `__all__` names. Callers use them as `storage.rename(…)`.
"""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path

__all__ = [
    "allocate",
    "create",
    "fsync",
    "fsync_folder",
    "make_folder",
    "make_folders",
    "publish",
    "remove",
    "remove_folder",
    "rename",
    "resize",
    "write",
]

_NO_DIRECT = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


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


def create(path: Path, *, direct: bool = False) -> int:
    """Open a file for writing, made if need be; `direct` goes round the page cache where the file system can."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
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


def publish(path: Path, text: bytes) -> None:
    """Write a small file that appears whole or not at all, and stays: write, fsync, rename, fsync of the folder."""
    # On a shared file system another machine may publish the same name at the same time, from a process as numbered.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
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
