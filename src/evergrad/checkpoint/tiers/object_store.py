"""The few things that a shared tier does with objects, over any fsspec file system.

An object appears whole or not at all where the store can do that, and what is written last carries a digest of itself
where it cannot. Every call may be made again: `Retry` decides how often. Names are relative to the tier's URL.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from evergrad import _files
from evergrad._files import NoFile, open_file, take_lock
from evergrad.checkpoint.arena import open_files_hint
from evergrad.checkpoint.tiers.base import Redaction
from evergrad.errors import EvergradError, FileAccessError, TierError, UsageError, reason

# Trying again: what may pass is tried for a while, what cannot pass is said at once.

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 10.0
_WILL_NOT_PASS = {
    errno.EACCES, errno.EDQUOT, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.EMFILE, errno.EMSGSIZE,
    errno.ENAMETOOLONG, errno.ENFILE, errno.ENOENT, errno.ENOSPC, errno.ENOSYS, errno.ENOTDIR, errno.EPERM, errno.EROFS,
}  # fmt: skip
# Refused with a 4xx, and right the next time.
_MAY_PASS = {
    "BadDigest", "ConditionalRequestConflict", "IncompleteBody", "OperationAborted", "RequestTimeout", "SlowDown",
    "Throttling", "ThrottlingException", "TooManyRequests", "XAmzContentSHA256Mismatch",
}  # fmt: skip
_OURS = (EvergradError, TypeError, ValueError, LookupError, AttributeError, ImportError, AssertionError)
_SETTINGS = {"NoCredentialsError", "PartialCredentialsError", "ParamValidationError", "ProfileNotFound"}


class Retry:
    """Calls that may be made any number of times, and are, until one succeeds or patience ends."""

    def __init__(
        self,
        where: str,
        patience_s: float,
        redact: Redaction,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._where, self._patience_s, self._redact = where, patience_s, redact
        self._clock, self._sleep = clock, sleep

    def __call__(self, what: str, call: Callable[[], _T]) -> _T:
        """What the call gives; `FileNotFoundError` and `FileExistsError` as they come, else `TierError`."""
        began, tried, wait_s = self._clock(), 0, FIRST_WAIT_S
        while True:
            tried += 1
            try:
                return call()
            except (FileNotFoundError, FileExistsError, EvergradError):
                raise
            except Exception as error:
                why = self._redact(_in_words(error))
                pause_s = wait_s * random.uniform(0.5, 1.0)  # nodes that failed together must not come back together
                over = self._clock() - began + pause_s > self._patience_s
                if over or not _may_pass(error):
                    times = f" (tried {tried} times)" if tried > 1 else ""
                    raise TierError(f"{self._where}: {what}: {why}{times}.{_hint(error)}") from None
                _log.warning("%s: %s: %s; trying again (%d)", self._where, what, why, tried)
            self._sleep(pause_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def error_code(error: BaseException | None) -> tuple[str, int]:
    """The store's own name of an error, and its HTTP status; an empty name and 0 if it has none."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return str(response.get("Error", {}).get("Code", "")), status if isinstance(status, int) else 0
        error = error.__cause__
    return "", 0


def _may_pass(error: Exception) -> bool:
    code, status = error_code(error)
    if code in _MAY_PASS or status >= 500 or status in (408, 429):
        return status != 501
    if 400 <= status < 500 or isinstance(error, _OURS) or type(error).__name__ in _SETTINGS:
        return False
    return not (isinstance(error, OSError) and error.errno in _WILL_NOT_PASS) and not isinstance(error, PermissionError)


def _in_words(error: Exception) -> str:
    code, status = error_code(error)
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        text = open_files_hint(error)
    named = f"{code} ({status}): " if code and code not in text else ""
    return f"{named}{text}".strip().rstrip(".").replace("\n", " ")[:300]


def _hint(error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return " Free some space, or choose another URL."
    if isinstance(error, PermissionError) or number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return " Check the credentials and permissions."
    return ""


# A budget of bytes per second for everything that a process uploads to one place.

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b(?:ytes)?\s*/\s*s(?:ec)?\s*", re.IGNORECASE)
_shared: dict[tuple[int, str, float], Throttle] = {}
_lock = threading.Lock()


class Throttle:
    """Lets so many bytes a second pass, averaged over the last second or the largest piece."""

    def __init__(
        self,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._free_at = clock()
        self._lock = threading.Lock()

    def acquire(self, size_bytes: int) -> None:
        """Wait until the bytes before these are paid for; what comes next will wait for these."""
        with self._lock:
            now = self._clock()
            begin = max(now, self._free_at)
            self._free_at = begin + size_bytes / self._rate
        if begin > now:
            self._sleep(begin - now)


def shared_throttle(url: str, bytes_per_s: float | None) -> Throttle | None:
    """The one budget of this process for a URL."""
    if bytes_per_s is None:
        return None
    with _lock:
        return _shared.setdefault((os.getpid(), url, bytes_per_s), Throttle(bytes_per_s))


def parse_bandwidth(value: float | str | None) -> float | None:
    """Bytes per second.

    >>> parse_bandwidth("50 MB/s"), parse_bandwidth("1.5 GiB/s"), parse_bandwidth(1000)
    (50000000.0, 1610612736.0, 1000.0)
    """
    if value is None:
        return None
    rate = 0.0
    if isinstance(value, str):
        if found := _TEXT.fullmatch(value):
            rate = float(found[1]) * _UNITS[(found[2] or "").lower()]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        rate = float(value)
    if not 0 < rate < float("inf"):
        raise UsageError(f"bandwidth={value!r}: expected bytes per second, such as 5e7 or '50 MB/s'")
    return rate


_made: dict[tuple[int, str], Any] = {}
_making = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_making.release)
Chunk = bytes | memoryview
ChunkSource = Callable[[], Iterator[Chunk]]
"""Gives the bytes of an object from its beginning, each time it is called."""


class ListedObject(NamedTuple):
    """Something in a listing."""

    name: str
    size: int
    is_folder: bool


@dataclass(frozen=True, slots=True)
class BucketAccess:
    """How a store is reached."""

    url: str
    options: dict[str, Any]
    retry: Retry
    redact: Redaction
    throttle: Throttle | None
    part_bytes: int


class ObjectBucket(ABC):
    """Objects below a URL. Methods may be called from any thread; what is missing is `FileNotFoundError`."""

    def __init__(self, access: BucketAccess) -> None:
        self.access = access
        self.where = access.redact(access.url)
        """The URL, as messages may show it."""

    @abstractmethod
    def items(self, folder: str = "") -> list[ListedObject]:
        """What is directly in a folder, or at the top; nothing if it is not there."""

    @abstractmethod
    def read(self, name: str, begin: int | None = None, end: int | None = None) -> bytes:
        """An object, or a range of it."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes of an object."""

    @abstractmethod
    def write(self, name: str, data: bytes, *, new: bool = False) -> None:
        """Write a small object; `FileExistsError` if it is to be new and is not, where the store can tell."""

    @abstractmethod
    def upload(self, name: str, source: ChunkSource, size: int) -> int:
        """Write a large object of about that size; gives how many bytes it has. Memory is bounded."""

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove objects, in this order; they may be gone already."""

    def abandon(self, prefix: str, is_over: Callable[[str], bool]) -> None:  # noqa: B027 - most stores leave nothing
        """Remove what is left of uploads that were begun below a prefix, never completed, and are over."""

    def path(self, name: str) -> Path | None:
        """The file that an object is, if it is one."""
        return None

    def await_bandwidth(self, size_bytes: int) -> None:
        """Wait until so many bytes may be sent."""
        if self.access.throttle is not None:
            self.access.throttle.acquire(size_bytes)

    def label(self, name: str) -> str:
        """An object's URL, as messages may show it."""
        return f"{self.where}/{name}"


class FsspecBucket(ObjectBucket):
    """Any file system that fsspec knows, by its general calls."""

    def __init__(self, access: BucketAccess) -> None:
        super().__init__(access)
        self._key = f"{access.url.partition('://')[0]} {json.dumps(access.options, sort_keys=True)}"

    @property
    def _library(self) -> str:
        return "the library for this URL"

    def items(self, folder: str = "") -> list[ListedObject]:
        def look() -> list[ListedObject]:
            fs, root = self._fs()
            fs.invalidate_cache()
            place = f"{root}/{folder}".rstrip("/")
            try:
                rows = fs.ls(place, detail=True)
            except FileNotFoundError:
                return []
            items = (
                ListedObject(row["name"].rstrip("/").rpartition("/")[2], row.get("size") or 0, _is_folder(row))
                for row in rows
            )
            return [item for item in items if not item.name.startswith(".")]

        return self._retry(f"listing {folder or 'versions'}", look)

    def read(self, name: str, begin: int | None = None, end: int | None = None) -> bytes:
        def get() -> bytes:
            fs, root = self._fs()
            return bytes(fs.cat_file(f"{root}/{name}", start=begin, end=end))

        return self._retry(f"reading {name}", get)

    def size(self, name: str) -> int:
        def look() -> int:
            fs, root = self._fs()
            fs.invalidate_cache()
            return int(fs.info(f"{root}/{name}")["size"])

        return self._retry(f"looking at {name}", look)

    def write(self, name: str, data: bytes, *, new: bool = False) -> None:
        def put() -> None:
            fs, root = self._fs()
            fs.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
            fs.pipe_file(f"{root}/{name}", data)

        self._retry(f"writing {name}", put)

    def upload(self, name: str, source: ChunkSource, size: int) -> int:
        def put() -> int:
            fs, root = self._fs()
            fs.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
            total = 0
            file = fs.open(f"{root}/{name}", "wb")
            try:
                for part in rechunk(source(), min(self.access.part_bytes, 16 << 20)):
                    self.await_bandwidth(len(part))
                    file.write(part)
                    total += len(part)
            except BaseException:
                with suppress(Exception):
                    file.discard()
                file.closed = True  # closing would store what there is
                raise
            file.close()
            return total

        return self._retry(f"uploading {name}", put)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self._retry(f"removing {name}", lambda name=name: self._remove(name))  # type: ignore[misc]

    def abandon(self, prefix: str, is_over: Callable[[str], bool]) -> None:
        folder = prefix.rpartition("/")[0]
        folders = [folder] if folder else [item.name for item in self.items() if item.is_folder]
        for name in folders:
            if is_over(f"{name}/") and not self.items(name):
                with suppress(Exception):  # an empty folder, where there are folders, does no harm
                    fs, root = self._fs()
                    fs.rmdir(f"{root}/{name}")

    def _remove(self, name: str) -> None:
        fs, root = self._fs()
        fs.rm_file(f"{root}/{name}")

    def _retry(self, what: str, call: Callable[[], _T]) -> _T:
        return self.access.retry(what, call)

    def _fs(self) -> tuple[Any, str]:
        """The file system, and the path of the tier in it."""
        # One a process: it costs a while to make, is safe for threads, and does not survive a fork.
        key = (os.getpid(), self._key)
        made = _made.get(key)
        if made is None:
            with _making:
                made = _made.get(key) or self._make()
                _made[key] = made
        return made, str(made._strip_protocol(self.access.url)).rstrip("/")

    def _make(self) -> Any:
        from fsspec.core import url_to_fs

        try:
            fs, _ = url_to_fs(self.access.url, **self._options(), skip_instance_cache=True)
        except ImportError as error:
            raise TierError(f"{self.where}: needs {self._library}: {error}") from None
        except (ValueError, TypeError, KeyError) as error:
            raise TierError(f"{self.where}: cannot be opened: {self.access.redact(error)}") from None
        return fs

    def _options(self) -> dict[str, Any]:
        return dict(self.access.options)


def rechunk(chunks: Iterable[Chunk], size: int) -> Iterator[bytes]:
    """The same bytes in pieces of one size, but for the last.

    >>> list(rechunk([b"abcde", b"", b"fg"], 3))
    [b'abc', b'def', b'g']
    """
    held: list[Chunk] = []
    length = 0
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while length + len(view) >= size:
            yield b"".join((*held, view[: size - length]))
            view = view[size - length :]
            held, length = [], 0
        if view:
            held.append(view)
            length += len(view)
    if held:
        yield b"".join(held)


def _is_folder(row: dict[str, Any]) -> bool:
    return str(row.get("type")) == "directory"


# A shared file system: the same few operations, each safe against a crash at any point.

_CHUNK = 16 << 20
_PARTIAL = ".partial"


class PosixBucket(ObjectBucket):
    """Files below a folder. All changes go through `_files.py`."""

    def __init__(self, access: BucketAccess, root: Path) -> None:
        super().__init__(access)
        self._root = root

    def items(self, folder: str = "") -> list[ListedObject]:
        def look() -> list[ListedObject]:
            try:
                with os.scandir(self._root / folder) as entries:
                    found = []
                    for entry in entries:
                        with suppress(FileNotFoundError):
                            if not entry.name.startswith("."):
                                found.append(_item(entry))
                    return found
            except (FileNotFoundError, NotADirectoryError):
                return []

        return self._retry(f"listing {folder or 'versions'}", look)

    def read(self, name: str, begin: int | None = None, end: int | None = None) -> bytes:
        def get() -> bytes:
            try:
                with open_file(self._root / name) as file:
                    file.seek(begin or 0)
                    return file.read() if end is None else file.read(end - (begin or 0))
            except OSError as error:  # a matter of this file, and not of the place
                if isinstance(error, (IsADirectoryError, PermissionError, NoFile)) or error.errno == errno.ELOOP:
                    raise FileAccessError(self._root / name, f"cannot be read: {reason(error)}") from error
                raise

        return self._retry(f"reading {name}", get)

    def size(self, name: str) -> int:
        return self._retry(f"looking at {name}", lambda: os.stat(self._root / name).st_size)

    def write(self, name: str, data: bytes, *, new: bool = False) -> None:
        def put() -> None:
            path = self._root / name
            if new and path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            _files.make_folders(path.parent)
            _files.publish(path, data)

        self._retry(f"writing {name}", put)

    def upload(self, name: str, source: ChunkSource, size: int) -> int:
        def put() -> int:
            path = self._root / name
            partial = path.with_name(f".{path.name}{_PARTIAL}")
            _files.make_folders(path.parent)
            with _written(partial) as fd:
                total = 0
                try:
                    for part in rechunk(source(), _CHUNK):
                        self.await_bandwidth(len(part))
                        _files.write(fd, part, total)
                        total += len(part)
                    _files.resize(fd, total)  # what was there before may have been longer
                    _files.fsync(fd)
                    _files.rename(partial, path)
                except OSError:
                    with suppress(OSError):
                        _files.remove(partial)  # a full disk shall not stay full for this
                    raise
            _files.fsync_folder(path.parent)
            return total

        return self._retry(f"writing {name}", put)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            path = self._root / name

            def gone(path: Path = path) -> None:
                _files.remove(path)
                _files.fsync_folder(path.parent)  # a COMMIT.json must not come back without its shards

            with suppress(FileNotFoundError):
                self._retry(f"removing {name}", gone)

    def abandon(self, prefix: str, is_over: Callable[[str], bool]) -> None:
        folder, _, stem = prefix.rpartition("/")
        folders = [folder] if folder else [item.name for item in self.items() if item.is_folder]
        for name in folders:
            with suppress(FileNotFoundError):
                self._retry(f"clearing {name}", lambda name=name: self._clear(name, stem, is_over))  # type: ignore[misc]

    def path(self, name: str) -> Path | None:
        return self._root / name

    def _clear(self, folder: str, stem: str, is_over: Callable[[str], bool]) -> None:
        """Remove the partial files of a folder that are over, and the folder itself if it is, and nothing is in it."""
        for entry in os.listdir(self._root / folder):
            if entry.startswith(f".{stem}") and entry.endswith(_PARTIAL) and is_over(f"{folder}/{entry[1:]}"):
                _files.remove(self._root / folder / entry)
        if is_over(f"{folder}/"):  # else someone may be about to write there
            _files.remove_folder(self._root / folder)

    def _retry(self, what: str, call: Callable[[], _T]) -> _T:
        return self.access.retry(what, call)


def _item(entry: os.DirEntry[str]) -> ListedObject:
    """Return the item of a folder entry; for symbolic links that form a loop, the link itself."""
    try:
        return ListedObject(entry.name, entry.stat().st_size, entry.is_dir())
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return ListedObject(entry.name, entry.stat(follow_symlinks=False).st_size, False)


@contextmanager
def _written(partial: Path) -> Iterator[int]:
    """A partial file, open and locked; what another process writes is left to it, and waited for."""
    fd = _files.create(partial)
    try:
        try:
            take_lock(fd)
        except BlockingIOError:
            raise OSError(errno.EBUSY, "another process is writing it") from None
        except OSError:
            pass  # a file system without locks
        yield fd
    finally:
        os.close(fd)
