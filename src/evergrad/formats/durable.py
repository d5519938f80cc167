"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from evergrad.errors import FileAccessError
from evergrad.formats.data_file import file_errors


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
        temporary = _temporary(target)
    try:
        with file_errors(path, "cannot be written"):
            yield temporary
            if target.exists():
                os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))
            fsync(temporary)
            os.replace(temporary, target)
            fsync(target.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """As `replacing`, but for a new file only: `FileExistsError` if there is one by now, and it stays as it is."""
    with file_errors(path, "cannot be written"):
        temporary = _temporary(path)
    try:
        with file_errors(path, "cannot be written"):
            yield temporary
            fsync(temporary)
        try:
            os.link(temporary, path)  # unlike a rename, never over an existing file
        except FileExistsError:
            raise
        except OSError:  # a file system without links, or a name that cannot be
            if os.path.lexists(path):
                raise FileExistsError(str(path)) from None
            with file_errors(path, "cannot be written"):
                os.rename(temporary, path)
        with file_errors(path, "cannot be made durable"):
            fsync(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink()


def check_replaceable(path: Path) -> None:
    """Refuse to put a file in the place of what is there and is none: a device, a pipe, a folder."""
    if path.exists() and not path.is_file():
        raise FileAccessError(path, "is no file, and is not replaced by one", hint="Choose another name.")


def temporary_name(target: Path) -> Path:
    """A name beside the target that nobody takes for it."""
    stem = target.name.encode()[:100].decode("utf-8", "ignore")
    return target.with_name(f".{stem}.{os.getpid()}-{secrets.token_hex(4)}.partial")


def fsync(path: Path) -> None:
    """Make a file or folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _temporary(target: Path) -> Path:
    """A new, empty file beside the target."""
    temporary = temporary_name(target)
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    return temporary
