"""Storage that crashes, is full, read-only or slow: for tests of what is left, what is said, and what goes on.

The checkpointer changes a file system by the functions of `evergrad._files` that `CALLS` names.
`StorageCalls` stands in for all of them, within one process: that of a trainer with `agent=False`, or an agent that a
test runs itself (`evergrad.checkpoint.agent.agent.run_agent`, in a process that it forked).

A sweep kills a fresh process after its first call, after its second, and so on, until one ends by itself:

>>> with kill_after(17):                                                    # doctest: +SKIP
...     train()
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from evergrad import _files


@dataclass(frozen=True, slots=True)
class StorageCall:
    """One call: the how-manieth, of which function, on which file, and for how many bytes."""

    number: int
    """From 1, in the order in which they began."""
    name: str
    path: str
    size: int = 0
    """What a write or a reservation adds to the file's length; what a cut or a removal takes away is negative."""


class StorageCalls:
    """Within the context, sees every storage call of this process; of all threads, and only below a folder if given.

    A subclass overrides `before`, which may raise what the call then raises, or `after`, which comes whether the call
    succeeded or not. `calls` is what there was.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder, StorageCalls() as seen:
    ...     _files.publish(Path(folder, "a"), b"some text")
    >>> [(call.number, call.name) for call in seen.calls]
    [(1, 'create'), (2, 'resize'), (3, 'write'), (4, 'fsync'), (5, 'rename'), (6, 'fsync_folder')]
    """

    def __init__(self, below: str | os.PathLike[str] | None = None) -> None:
        self.calls: list[StorageCall] = []
        self._below = None if below is None else os.path.realpath(below)
        self._lock = threading.Lock()
        self._originals: dict[str, Callable[..., Any]] = {}

    def before(self, call: StorageCall) -> None:
        """A call begins."""

    def after(self, call: StorageCall) -> None:
        """A call has ended."""

    def __enter__(self) -> Self:
        for name in _files.CALLS:
            self._originals[name] = original = getattr(_files, name)
            setattr(_files, name, self._wrapped(name, original))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, original in self._originals.items():
            setattr(_files, name, original)
        self._originals.clear()

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(place: Path | int, *arguments: Any, **settings: Any) -> Any:
            path = _path(place)
            if self._below is not None and not f"{path}/".startswith(f"{self._below}/"):
                return original(place, *arguments, **settings)
            with self._lock:
                call = StorageCall(len(self.calls) + 1, name, path, _growth(name, place, arguments))
                self.calls.append(call)
            self.before(call)
            try:
                return original(place, *arguments, **settings)
            finally:
                self.after(call)

        return wrapper


class FullStorage(StorageCalls):
    """A disk with room for so many more bytes of files; what is cut or removed makes room again."""

    def __init__(self, room_bytes: int = 0, below: str | os.PathLike[str] | None = None) -> None:
        super().__init__(below)
        self.room_bytes = room_bytes

    def before(self, call: StorageCall) -> None:
        """ENOSPC, if the file would grow by more than there is."""
        with self._lock:
            if call.size > self.room_bytes or (call.name == "make_folder" and self.room_bytes <= 0):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), call.path)
            self.room_bytes -= call.size


class ReadOnlyStorage(StorageCalls):
    """A file system that was remounted read-only: it reads, and nothing changes any more."""

    def before(self, call: StorageCall) -> None:
        """EROFS, always."""
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), call.path)


class SlowStorage(StorageCalls):
    """A file system that takes its time for every call."""

    def __init__(self, seconds: float, below: str | os.PathLike[str] | None = None) -> None:
        super().__init__(below)
        self._seconds = seconds

    def before(self, call: StorageCall) -> None:
        """Wait."""
        time.sleep(self._seconds)


def kill_after(number: int, *others: int, below: str | os.PathLike[str] | None = None) -> StorageCalls:
    """SIGKILL after the n-th storage call: of the processes given, and last of this one; 0 never comes."""
    return _Fatal(number, others, below)


class _Fatal(StorageCalls):
    def __init__(self, number: int, others: tuple[int, ...], below: str | os.PathLike[str] | None) -> None:
        super().__init__(below)
        self._number, self._others = number, others

    def after(self, call: StorageCall) -> None:
        if call.number == self._number:
            for pid in self._others:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def _path(place: Path | int) -> str:
    if isinstance(place, int):
        return os.readlink(f"/proc/self/fd/{place}")
    return os.path.join(os.path.realpath(place.parent), place.name)


def _growth(name: str, place: Path | int, arguments: tuple[Any, ...]) -> int:
    """By how much a call changes a file's length."""
    try:
        found = os.stat(place)
    except OSError:
        return 0
    if name == "remove":
        return -found.st_size
    if name == "resize":
        return int(arguments[0]) - found.st_size
    if name == "allocate":
        return max(0, int(arguments[0]) - found.st_size)
    if name == "write":
        return max(0, int(arguments[1]) + len(arguments[0]) - found.st_size)
    return 0
