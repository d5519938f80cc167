"""Logs of JSON lines that are only ever appended to: one writer, one reader.

A line is appended by a single `write`, so lines of several processes never mix. A process that is killed leaves at most
the last line torn; a later writer either ends that line or leaves it to readers, who leave it out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

from evergrad._files import open_regular

LONGEST_LINE = 64 << 20
"""Bytes of a line that are read by default; longer lines are cut, which makes them damaged."""


class Line(NamedTuple):
    """A line as it was read, with its end."""

    number: int
    """From 1."""
    data: bytes
    is_torn: bool
    """True if the file ends within it."""


class Appender:
    """Appends to a log, which is made if need be. Threads may share it, and so may processes that are forked."""

    def __init__(self, path: Path, *, end_torn_line: bool = False, any_kind: bool = False) -> None:
        """`end_torn_line` is for a log with one writer at a time: a torn last line ends here, and stays as it is.

        Anything but a file is refused, and never waited for, unless it may be of `any_kind`, such as /dev/null.
        """
        flags = (os.O_RDWR if end_torn_line else os.O_WRONLY) | os.O_CREAT | os.O_APPEND
        self._fd = os.open(path, flags | os.O_CLOEXEC, 0o666) if any_kind else open_regular(path, flags)
        try:
            size = self.size
            if end_torn_line and size and os.pread(self._fd, 1, size - 1) != b"\n":
                self.append(b"\n")
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """The log's length in bytes."""
        return os.fstat(self._fd).st_size

    def append(self, lines: bytes) -> None:
        """Append whole lines. On a full disk the last of them may be torn: `OSError`."""
        while lines:
            lines = lines[os.write(self._fd, lines) :]

    def append_durably(self, lines: bytes) -> None:
        """Append whole lines, durably; after an `OSError`, none of them. For a log with one writer at a time."""
        before = self.size
        try:
            self.append(lines)
            os.fdatasync(self._fd)
        except OSError:
            os.ftruncate(self._fd, before)  # half a line would only have to be explained later
            raise

    def close(self) -> None:
        """Nothing more is appended. Twice is fine."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_lines(file: BinaryIO, longest: int = LONGEST_LINE) -> Iterator[Line]:
    """Read the lines of a log from where the file stands. Only the first `longest` bytes of each are kept."""
    number = 0
    while data := file.readline(longest):
        number += 1
        rest = data
        while len(rest) == longest and not rest.endswith(b"\n"):
            rest = file.readline(longest)
        yield Line(number, data, not rest.endswith(b"\n"))


def split_whole(data: bytes) -> tuple[bytes, bytes]:
    """Split what was read of a log into its whole lines and what follows the last of them."""
    end = data.rfind(b"\n") + 1
    return data[:end], data[end:]
