"""A shared file system: the same few operations, each safe against a crash at any point."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from evergrad.checkpoint import storage
from evergrad.checkpoint.tiers.buckets import Access, Bucket, Item, Source, rechunk
from evergrad.errors import FileAccessError, reason
from evergrad.formats.data_file import NoFile, open_file

_T = TypeVar("_T")
_CHUNK = 16 << 20
_PARTIAL = ".partial"


class PosixBucket(Bucket):
    """Files below a folder. All changes go through `checkpoint/storage.py`."""

    def __init__(self, access: Access, root: Path) -> None:
        super().__init__(access)
        self._root = root

    def items(self, folder: str = "") -> list[Item]:
        def look() -> list[Item]:
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
            storage.make_folders(path.parent)
            storage.publish(path, data)

        self._retry(f"writing {name}", put)

    def upload(self, name: str, source: Source, size: int) -> int:
        def put() -> int:
            path = self._root / name
            partial = path.with_name(f".{path.name}{_PARTIAL}")
            storage.make_folders(path.parent)
            with _written(partial) as fd:
                total = 0
                try:
                    for part in rechunk(source(), _CHUNK):
                        self.pay(len(part))
                        storage.write(fd, part, total)
                        total += len(part)
                    storage.resize(fd, total)  # what was there before may have been longer
                    storage.fsync(fd)
                    storage.rename(partial, path)
                except OSError:
                    with suppress(OSError):
                        storage.remove(partial)  # a full disk shall not stay full for this
                    raise
            storage.fsync_folder(path.parent)
            return total

        return self._retry(f"writing {name}", put)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            path = self._root / name

            def gone(path: Path = path) -> None:
                storage.remove(path)
                storage.fsync_folder(path.parent)  # a COMMIT.json must not come back without its shards

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
                storage.remove(self._root / folder / entry)
        if is_over(f"{folder}/"):  # else someone may be about to write there
            storage.remove_folder(self._root / folder)

    def _retry(self, what: str, call: Callable[[], _T]) -> _T:
        return self.access.retry(what, call)


def _item(entry: os.DirEntry[str]) -> Item:
    """Return the item of a folder entry; for symbolic links that form a loop, the link itself."""
    try:
        return Item(entry.name, entry.stat().st_size, entry.is_dir())
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return Item(entry.name, entry.stat(follow_symlinks=False).st_size, False)


@contextmanager
def _written(partial: Path) -> Iterator[int]:
    """A partial file, open and locked; what another process writes is left to it, and waited for."""
    fd = storage.create(partial)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(errno.EBUSY, "another process is writing it") from None
        except OSError:
            pass  # a file system without locks
        yield fd
    finally:
        os.close(fd)
