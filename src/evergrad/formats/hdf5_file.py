"""An open HDF5 file: the library's handle on its structure, and our own on its bytes.

The library (h5py, an optional dependency) reads the structure, and whatever has no place of its own in the file:
filtered chunks, compact data. Raw data are altered through a map. The two never look at the same bytes through
different caches: raw data are not kept in the library's chunk cache, and the library opens the file for
writing only when something has to go through it.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evergrad.errors import DamagedFile, EvergradError, FileAccessError, LimitExceeded, UnsupportedContent, reason, said
from evergrad.formats.data_file import Bytes, DataFile, file_errors
from evergrad.formats.region import Seal
from evergrad.formats.rehearsal import NeedsRewrite, rehearsing
from evergrad.wording import install_hint

CHUNK_CACHE_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Place:
    """Where an HDF5 file lies within a larger one, such as a member of a zip."""

    source: Bytes
    offset: int
    size: int
    seal: Callable[[], Seal | None]
    extract: Callable[[], Path]
    """Copy it to a file of its own, which stands for it from now on."""


class Hdf5File:
    """One HDF5 file, alone or within another file. Not thread-safe."""

    def __init__(self, path: Path, place: Place | None = None) -> None:
        self.path = path
        self.place = place
        self._h5 = library(path)
        self._own = path if place is None else None  # the file that the library can open by name
        self._data = DataFile(path) if place is None else None
        self._identity: tuple[int, int] | None = None
        self._altered = self._closed = False
        self._handle: Any = None
        self._current: tuple[bytes, Any] | None = None
        self._claims: dict[int, int] = {}
        try:
            self._open("r")
        except BaseException:
            self.close()
            raise

    @property
    def data(self) -> Bytes:
        """The bytes in which offsets of the file count, beyond `base`."""
        if self.place is not None:
            return self.place.source
        assert self._data is not None
        return self._data

    @property
    def base(self) -> int:
        """Where the HDF5 file begins in `data`."""
        return self.place.offset if self.place is not None else 0

    @property
    def size(self) -> int:
        """Bytes of the HDF5 file."""
        return self.place.size if self.place is not None else self.data.size

    @property
    def limit(self) -> int:
        """The most bytes that one data set of a file of this size may take when it is read."""
        return max(64 * self.size, 1 << 26)

    @property
    def root(self) -> Any:
        """The library's high-level file object."""
        if self._closed:
            raise FileAccessError(self.path, "is closed")
        return self._handle

    def seal(self) -> Seal | None:
        """The checksum that the enclosing container has over this file."""
        return self.place.seal() if self.place is not None else None

    def dataset(self, where: bytes, *, cache_bytes: int = 0) -> Any:
        """The library's low-level handle on a data set; the last one is kept, so that its chunk cache is of use."""
        handle = self.root
        if self._current is None or self._current[0] != where:
            self.let_go()
            with hdf5_errors(self.path, where.decode("utf-8", "replace")):
                access = self._h5.h5p.create(self._h5.h5p.DATASET_ACCESS)
                access.set_chunk_cache(4099, cache_bytes, 0.75)
                self._current = (where, self._h5.h5d.open(handle.id, where, access))
        return self._current[1]

    def let_go(self) -> None:
        """Drop the data set in use: what the library had cached of it goes to the file."""
        if self._current is not None:
            self._current = None
            if self._altered:
                with hdf5_errors(self.path, "cannot be altered"):
                    self._handle.flush()

    def writable_root(self) -> Any:
        """The file object, opened for writing only now."""
        handle = self.root
        if rehearsing() is not None:
            raise NeedsRewrite
        if self._altered:
            return handle
        self.let_go()
        if self.place is not None:
            self._own = self.place.extract()
            self._data, self.place = DataFile(self._own), None
        assert self._own is not None
        if not os.access(self._own, os.W_OK, effective_ids=True):
            raise FileAccessError(self.path, "cannot be altered: permission denied")
        handle.close()
        try:
            self._open("r+")
            self._altered = True
        except EvergradError:
            self._open("r")
            raise
        return self._handle

    def claim(self, address: int, starts: list[int]) -> int | None:
        """Note where chunks of a data set begin; return the first place that another data set has, too."""
        taken = (start for start in starts if self._claims.setdefault(start, address) != address)
        return next(taken, None)

    def refresh(self) -> None:
        """The library has made the file longer: see its bytes anew."""
        self.let_go()
        self._claims.clear()
        if self._data is not None and self._own is not None:
            self._data.close()
            self._data = DataFile(self._own)

    def close(self) -> None:
        """Make changes durable and let go of the file; twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._current = None
        try:
            if self._handle is not None:
                with hdf5_errors(self.path, "changes could not be made durable"):
                    self._handle.close()
            if self._altered and self._own is not None:
                with file_errors(self.path, "changes could not be made durable"), self._own.open("rb") as file:
                    os.fsync(file.fileno())
        finally:
            if self._data is not None:
                self._data.close()

    def _open(self, mode: str) -> None:
        with hdf5_errors(self.path, "is damaged"):
            if self._own is None:
                assert self.place is not None
                self._handle = self._h5.File(_Window(self.place), mode, locking=False)
                return
            now = self._own.stat()
            if self._identity not in (None, (now.st_dev, now.st_ino)):
                raise FileAccessError(self.path, "was replaced since it was opened", hint="Open it again.")
            self._identity = (now.st_dev, now.st_ino)
            self._handle = self._h5.File(self._own, mode, locking=False)


class _Window(io.RawIOBase):
    """A part of some bytes as a file that can be read."""

    def __init__(self, place: Place) -> None:
        self._place, self._at = place, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to an offset; the library also asks for the end."""
        self._at = offset + (0, self._at, self._place.size)[whence]
        return self._at

    def tell(self) -> int:
        """The present offset."""
        return self._at

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as there are bytes."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._place.size - self._at))
        view[:count] = self._place.source.read(self._place.offset + self._at, count)
        self._at += count
        return count


def library(path: Path, what: str = "is an HDF5 file, and h5py is not installed") -> Any:
    """h5py, imported when the first HDF5 file is opened or written; `what` is said of the path if it is missing."""
    try:
        import h5py
    except ImportError:
        raise UnsupportedContent(path, what, hint=install_hint("hdf5")) from None
    return h5py


@contextmanager
def hdf5_errors(path: Path, what: str) -> Iterator[None]:
    """Turn whatever the library raises into one clear line."""
    try:
        yield
    except MemoryError:
        raise LimitExceeded(path, f"{what}: does not fit into memory") from None
    except OSError as error:
        if error.errno is not None:
            raise FileAccessError(path, f"{what}: {reason(error)}") from None
        raise DamagedFile(path, f"{what}: {_first_line(error)}") from None
    except (
        RuntimeError,
        LookupError,
        ValueError,
        TypeError,
        OverflowError,
        AttributeError,
        NotImplementedError,
    ) as error:
        raise DamagedFile(path, f"{what}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return said(error)
    text = str(error.args[0]) if error.args else type(error).__name__
    return text.splitlines()[0] if text else type(error).__name__
