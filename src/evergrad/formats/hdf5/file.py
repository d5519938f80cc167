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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evergrad import _files
from evergrad._files import file_errors
from evergrad.dtypes import DType
from evergrad.errors import DamagedFile, EvergradError, FileAccessError, LimitExceeded, UnsupportedContent, reason, said
from evergrad.formats.byte_source import ByteSource, DataFile, NeedsRewrite, current_dry_run
from evergrad.formats.checkpoint import OtherTensor
from evergrad.formats.region import StoredChecksum
from evergrad.wording import install_hint

CHUNK_CACHE_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class EmbeddedFile:
    """Where an HDF5 file lies within a larger one, such as a member of a zip."""

    source: ByteSource
    offset: int
    size: int
    stored_checksum: Callable[[], StoredChecksum | None]
    extract: Callable[[], Path]
    """Copy it to a file of its own, which stands for it from now on."""


class Hdf5File:
    """One HDF5 file, alone or within another file. Not thread-safe."""

    def __init__(self, path: Path, place: EmbeddedFile | None = None) -> None:
        self.path = path
        self.embedded = place
        self._h5 = import_h5py(path)
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
    def data(self) -> ByteSource:
        """The bytes in which offsets of the file count, beyond `base`."""
        if self.embedded is not None:
            return self.embedded.source
        assert self._data is not None
        return self._data

    @property
    def base(self) -> int:
        """Where the HDF5 file begins in `data`."""
        return self.embedded.offset if self.embedded is not None else 0

    @property
    def size(self) -> int:
        """Bytes of the HDF5 file."""
        return self.embedded.size if self.embedded is not None else self.data.size

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

    def stored_checksum(self) -> StoredChecksum | None:
        """The checksum that the enclosing container has over this file."""
        return self.embedded.stored_checksum() if self.embedded is not None else None

    def dataset(self, where: bytes, *, cache_bytes: int = 0) -> Any:
        """The library's low-level handle on a data set; the last one is kept, so that its chunk cache is of use."""
        handle = self.root
        if self._current is None or self._current[0] != where:
            self.release_dataset()
            with hdf5_errors(self.path, where.decode("utf-8", "replace")):
                access = self._h5.h5p.create(self._h5.h5p.DATASET_ACCESS)
                access.set_chunk_cache(4099, cache_bytes, 0.75)
                self._current = (where, self._h5.h5d.open(handle.id, where, access))
        return self._current[1]

    def release_dataset(self) -> None:
        """Drop the data set in use: what the library had cached of it goes to the file."""
        if self._current is not None:
            self._current = None
            if self._altered:
                with hdf5_errors(self.path, "cannot be altered"):
                    self._handle.flush()

    def writable_root(self) -> Any:
        """The file object, opened for writing only now."""
        handle = self.root
        if current_dry_run() is not None:
            raise NeedsRewrite
        if self._altered:
            return handle
        self.release_dataset()
        if self.embedded is not None:
            self._own = self.embedded.extract()
            self._data, self.embedded = DataFile(self._own), None
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
        self.release_dataset()
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
                    _files.fsync(file.fileno())
        finally:
            if self._data is not None:
                self._data.close()

    def _open(self, mode: str) -> None:
        with hdf5_errors(self.path, "is damaged"):
            if self._own is None:
                assert self.embedded is not None
                self._handle = self._h5.File(_EmbeddedReader(self.embedded), mode, locking=False)
                return
            now = self._own.stat()
            if self._identity not in (None, (now.st_dev, now.st_ino)):
                raise FileAccessError(self.path, "was replaced since it was opened", hint="Open it again.")
            self._identity = (now.st_dev, now.st_ino)
            self._handle = self._h5.File(self._own, mode, locking=False)


class _EmbeddedReader(io.RawIOBase):
    """A part of some bytes as a file that can be read."""

    def __init__(self, place: EmbeddedFile) -> None:
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


def import_h5py(path: Path, what: str = "is an HDF5 file, and h5py is not installed") -> Any:
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


# HDF5's element types, and which of ours they are, bit for bit.

Element = tuple[DType, bool]
"""One of our types, and whether its bytes are in big-endian order."""

_CLASSES = {
    2: "times",
    3: "strings",
    4: "bit fields",
    5: "opaque bytes",
    6: "records",
    7: "references",
    8: "an enumeration",
    9: "lists of varying length",
    10: "arrays",
}
# Sign, exponent and mantissa of floats that are not IEEE's: (size, exponent bits, mantissa bits, bias).
_FLOATS = {
    (2, 8, 7, 127): DType.BFLOAT16,
    (1, 4, 3, 7): DType.FLOAT8_E4M3FN,
    (1, 5, 2, 15): DType.FLOAT8_E5M2,
}


class ElementTypes:
    """Tells types apart. A type is served only if it is ours to the last bit; the rest is described."""

    def __init__(self, h5py: Any) -> None:
        self._t = t = h5py.h5t
        self._plain: dict[tuple[int, int, int], list[tuple[Any, Element]]] = {}
        for order, big in (("LE", False), ("BE", True)):
            for width in (8, 16, 32, 64):
                self._add(getattr(t, f"STD_I{width}{order}"), DType(f"int{width}"), big)
                self._add(getattr(t, f"STD_U{width}{order}"), DType(f"uint{width}"), big)
            for width in (16, 32, 64):
                self._add(getattr(t, f"IEEE_F{width}{order}"), DType(f"float{width}"), big)

    def of(self, kind: Any) -> Element | str:
        """Our type and its byte order, or a description of what it is instead."""
        number = kind.get_class()
        if number in (self._t.INTEGER, self._t.FLOAT):
            found = self._number(kind, number)
        elif number == self._t.ENUM:
            found = self._boolean(kind)
        elif number == self._t.COMPOUND or number == getattr(self._t, "COMPLEX", -1):
            found = self._complex(kind, compound=number == self._t.COMPOUND)
        else:
            found = None
        if found is not None:
            return found
        if number in (self._t.INTEGER, self._t.FLOAT):
            return (
                f"{kind.get_size()}-byte {'integers' if number == self._t.INTEGER else 'floats'} of an unusual layout"
            )
        return _CLASSES.get(number, f"elements of class {number}")

    def _add(self, kind: Any, dtype: DType, big: bool) -> None:
        key = (kind.get_class(), kind.get_size(), kind.get_order())
        self._plain.setdefault(key, []).append((kind, (dtype, big and dtype.itemsize > 1)))

    def _number(self, kind: Any, number: int) -> Element | None:
        size, order = kind.get_size(), kind.get_order()
        for known, element in self._plain.get((number, size, order), ()):
            if kind == known:
                return element
        if number != self._t.FLOAT or size > 2:
            return None
        sign, exponent_at, exponent, mantissa_at, mantissa = kind.get_fields()
        dtype = _FLOATS.get((size, exponent, mantissa, kind.get_ebias()))
        usual = (sign, exponent_at, mantissa_at) == (8 * size - 1, mantissa, 0)
        return (dtype, order == self._t.ORDER_BE and size > 1) if dtype is not None and usual else None

    def _boolean(self, kind: Any) -> Element | None:
        """h5py's enumeration of FALSE and TRUE."""
        if kind.get_size() != 1 or kind.get_nmembers() != 2:
            return None
        members = {kind.get_member_name(i): kind.get_member_value(i) for i in range(2)}
        return (DType.BOOL, False) if members == {b"FALSE": 0, b"TRUE": 1} else None

    def _complex(self, kind: Any, *, compound: bool) -> Element | None:
        """A record of two floats, `r` and `i`, without a gap; or, since HDF5 2.0, a complex number."""
        if compound:
            if kind.get_nmembers() != 2 or [kind.get_member_name(i) for i in range(2)] != [b"r", b"i"]:
                return None
            part = kind.get_member_type(0)
            other = kind.get_member_type(1)
            if part != other or kind.get_member_offset(0) != 0 or kind.get_member_offset(1) != part.get_size():
                return None
        else:
            part = kind.get_super()
        if part.get_class() != self._t.FLOAT or kind.get_size() != 2 * part.get_size():
            return None
        found = self._number(part, self._t.FLOAT)
        if found is None or found[0] not in (DType.FLOAT16, DType.FLOAT32, DType.FLOAT64):
            return None
        return DType(f"complex{2 * 8 * found[0].itemsize}"), found[1]


# Every data set of an HDF5 file, by path: walked link by link, nothing outside the file followed.

MAX_DEPTH = 128
MAX_OBJECTS = 2_000_000
MAX_REPEATED = 100_000  # objects under a second name of their group: a few links can make exponentially many
MAX_PATH_CHARS = 1 << 16


@dataclass(frozen=True, slots=True)
class DataSetEntry:
    """A data set whose elements are served: the object, whatever names it has."""

    address: int
    where: bytes  # a path of hard links that leads to it
    shape: tuple[int, ...]
    dtype: DType
    big_endian: bool
    offset: int | None = None  # where a contiguous one is, from the start of the HDF5 file


@dataclass(slots=True)
class FileListing:
    """What a file holds: data sets by path, everything else with a description."""

    entries: dict[str, DataSetEntry] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    groups: dict[str, bytes] = field(default_factory=dict)
    """Each with a path of hard links that leads to it."""


def list_file(file: Hdf5File) -> FileListing:
    """Walk the file; the cost grows with its objects, and each is looked at once however many names it has."""
    with hdf5_errors(file.path, "the listing is damaged"):
        return _Walk(file).run()


_Link = tuple[bytes, int, int]  # name, kind, address


class _Walk:
    def __init__(self, file: Hdf5File) -> None:
        self._file = file
        self._h5 = import_h5py(file.path)
        self._elements = ElementTypes(self._h5)
        self._known: dict[int, DataSetEntry | str | list[_Link]] = {}
        self._soft: dict[str, str] = {}
        self._left, self._repeats = MAX_OBJECTS, MAX_REPEATED
        self._walked: set[int] = set()
        self._listing = FileListing()

    def run(self) -> FileListing:
        root = self._h5.h5g.open(self._file.root.id, b"/")
        address = self._h5.h5o.get_info(root).addr
        self._known[address] = self._links(root)
        self._group(root, b"", "", address, frozenset())
        for name, target in self._soft.items():
            self._resolve(name, target)
        return self._listing

    def _group(self, group: Any, where: bytes, prefix: str, address: int, above: frozenset[int]) -> None:
        """List what a group links to; `group` is None where only the names differ from a walk before."""
        if len(above) >= MAX_DEPTH or len(where) > MAX_PATH_CHARS:
            raise LimitExceeded(self._file.path, "groups", expected=f"at most {MAX_DEPTH} deep", found=prefix[:80])
        links = self._known[address]
        assert isinstance(links, list)
        if address in self._walked:
            self._repeats -= len(links) + 1
        self._walked.add(address)
        for raw, kind, target in links:
            self._left -= 1
            if self._left < 0 or self._repeats < 0:
                raise LimitExceeded(self._file.path, "objects", expected=f"at most {MAX_OBJECTS}")
            name = prefix + raw.decode("utf-8", "backslashreplace")
            if kind != self._h5.h5l.TYPE_HARD:
                self._link(group, where, raw, kind, name)
            elif raw in (b"", b".") or b"/" in raw or name in self._listing.entries:
                self._listing.others[name or "''"] = "an object whose name cannot be addressed"
            elif target == address or target in above:
                self._listing.others[name] = "a link back to a group above it"
            else:
                self._object(group, where + raw, raw, name, target, above | {address})

    def _object(self, group: Any, where: bytes, raw: bytes, name: str, address: int, above: frozenset[int]) -> None:
        known, opened = self._known.get(address), None
        if known is None:
            opened = self._h5.h5o.open(group if group is not None else self._file.root.id, raw if group else where)
            known = self._known[address] = self._describe(opened, where, address)
        if isinstance(known, DataSetEntry):
            self._listing.entries[name] = known
        elif isinstance(known, str):
            self._listing.others[name] = known
        else:
            self._listing.groups[name] = where
            self._group(opened, where + b"/", name + "/", address, above)

    def _describe(self, opened: Any, where: bytes, address: int) -> DataSetEntry | str | list[_Link]:
        if isinstance(opened, self._h5.h5g.GroupID):
            return self._links(opened)
        if not isinstance(opened, self._h5.h5d.DatasetID):
            return "a named type"
        element = self._elements.of(opened.get_type())
        if isinstance(element, str):
            what = f"a data set of {element}"
            return what if element == "strings" else OtherTensor(what)
        # Most data sets lie at an offset, which is quick to see; asking how they were created takes longest of all.
        offset = opened.get_offset()
        elsewhere = "" if offset is not None else self._elsewhere(opened.get_create_plist())
        if elsewhere:
            return elsewhere
        space = opened.get_space()
        # A null space has no shape at all; it holds nothing, as a vector of no elements does.
        null = space.get_simple_extent_type() == self._h5.h5s.NULL
        shape = (0,) if null else tuple(int(n) for n in space.get_simple_extent_dims())
        return DataSetEntry(address, where, shape, *element, offset)

    def _elsewhere(self, creation: Any) -> str:
        """What a data set is that keeps its elements somewhere else."""
        layout = creation.get_layout()
        if layout == self._h5.h5d.VIRTUAL:
            return OtherTensor("a virtual data set, made of others")
        if layout == self._h5.h5d.CONTIGUOUS and creation.get_external_count():
            return OtherTensor("a data set whose bytes are in other files, which are left alone")
        return ""

    def _links(self, group: Any) -> list[_Link]:
        found: list[_Link] = []

        def take(name: bytes, info: Any) -> bool | None:
            found.append((name, info.type, info.u))
            return True if len(found) > MAX_OBJECTS else None

        group.links.iterate(take, info=True)
        return found

    def _link(self, group: Any, where: bytes, raw: bytes, kind: int, name: str) -> None:
        if kind == self._h5.h5l.TYPE_EXTERNAL:
            self._listing.others[name] = OtherTensor("a link to another file, which is left alone")
            return
        if kind != self._h5.h5l.TYPE_SOFT:
            self._listing.others[name] = f"a link of an unknown kind ({kind})"
            return
        group = self._file.root.id if group is None else group
        value = group.links.get_val(raw if group is not self._file.root.id else where + raw)
        target = value.decode("utf-8", "backslashreplace")
        start = [] if target.startswith("/") else name.split("/")[:-1]
        self._soft[name] = "/".join([*start, *(part for part in target.split("/") if part not in ("", "."))])

    def _resolve(self, name: str, target: str) -> None:
        """A soft link to a data set is a second name for it. Our own listing resolves it, and not the library."""
        for _ in range(16):
            if target not in self._soft:
                break
            target = self._soft[target]
        if target in self._listing.entries and name not in self._listing.entries:
            self._listing.entries[name] = self._listing.entries[target]
        else:
            there = "a group" if target in self._listing.groups else "nothing that can be served"
            self._listing.others[name] = f"a soft link to {target[:200]!r}, {there}"
