"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from evergrad.formats.region import file_errors

__all__ = ["replacing"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place, durably, if the block ends well.

    Permissions of a replaced file are kept; a symbolic link keeps pointing to the file it names. A crash
    leaves the old file, and at most a temporary one named `.<name>.….partial` beside it.
    """
    with file_errors(path, "cannot be written"):
        try:
            target = path.resolve()
        except RuntimeError as error:  # links that lead to each other
            raise OSError(str(error)) from None
        stem = target.name.encode()[:100].decode("utf-8", "ignore")
        temporary = target.with_name(f".{stem}.{os.getpid()}-{secrets.token_hex(4)}.partial")
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    try:
        with file_errors(path, "cannot be written"):
            yield temporary
            if target.exists():
                os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))
            _fsync(temporary)
            os.replace(temporary, target)
            _fsync(target.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
