"""The few things that a shared tier does with objects, over any fsspec file system.

An object appears whole or not at all where the store can do that, and what is written last carries a digest of itself
where it cannot. Every call may be made again: `Retry` decides how often. Names are relative to the tier's URL.
"""

from __future__ import annotations

import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from evergrad.checkpoint.tiers.redaction import Redaction
from evergrad.checkpoint.tiers.retry import Retry
from evergrad.checkpoint.tiers.throttle import Throttle
from evergrad.errors import TierError

_T = TypeVar("_T")
_made: dict[tuple[int, str], Any] = {}
_making = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_making.release)
Chunk = bytes | memoryview
Source = Callable[[], Iterator[Chunk]]
"""Gives the bytes of an object from its beginning, each time it is called."""


class Item(NamedTuple):
    """Something in a listing."""

    name: str
    size: int
    is_folder: bool


@dataclass(frozen=True, slots=True)
class Access:
    """How a store is reached."""

    url: str
    options: dict[str, Any]
    retry: Retry
    redact: Redaction
    throttle: Throttle | None
    part_bytes: int


class Bucket(ABC):
    """Objects below a URL. Methods may be called from any thread; what is missing is `FileNotFoundError`."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.where = access.redact(access.url)
        """The URL, as messages may show it."""

    @abstractmethod
    def items(self, folder: str = "") -> list[Item]:
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
    def upload(self, name: str, source: Source, size: int) -> int:
        """Write a large object of about that size; gives how many bytes it has. Memory is bounded."""

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove objects, in this order; they may be gone already."""

    def abandon(self, prefix: str, is_over: Callable[[str], bool]) -> None:  # noqa: B027 - most stores leave nothing
        """Remove what is left of uploads that were begun below a prefix, never completed, and are over."""

    def path(self, name: str) -> Path | None:
        """The file that an object is, if it is one."""
        return None

    def pay(self, size_bytes: int) -> None:
        """Wait until so many bytes may be sent."""
        if self.access.throttle is not None:
            self.access.throttle.take(size_bytes)

    def label(self, name: str) -> str:
        """An object's URL, as messages may show it."""
        return f"{self.where}/{name}"


class FsspecBucket(Bucket):
    """Any file system that fsspec knows, by its general calls."""

    def __init__(self, access: Access) -> None:
        super().__init__(access)
        self._key = f"{access.url.partition('://')[0]} {json.dumps(access.options, sort_keys=True)}"

    @property
    def _library(self) -> str:
        return "the library for this URL"

    def items(self, folder: str = "") -> list[Item]:
        def look() -> list[Item]:
            fs, root = self._fs()
            fs.invalidate_cache()
            place = f"{root}/{folder}".rstrip("/")
            try:
                rows = fs.ls(place, detail=True)
            except FileNotFoundError:
                return []
            items = (
                Item(row["name"].rstrip("/").rpartition("/")[2], row.get("size") or 0, _is_folder(row)) for row in rows
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

    def upload(self, name: str, source: Source, size: int) -> int:
        def put() -> int:
            fs, root = self._fs()
            fs.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
            total = 0
            file = fs.open(f"{root}/{name}", "wb")
            try:
                for part in rechunk(source(), min(self.access.part_bytes, 16 << 20)):
                    self.pay(len(part))
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
