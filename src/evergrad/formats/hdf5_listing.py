"""Every data set of an HDF5 file, by path: walked link by link, nothing outside the file followed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from evergrad.dtypes import DType
from evergrad.errors import LimitExceeded
from evergrad.formats.contract import OtherTensor
from evergrad.formats.hdf5_file import Hdf5File, hdf5_errors, library
from evergrad.formats.hdf5_types import Elements

MAX_DEPTH = 128
MAX_OBJECTS = 2_000_000
MAX_REPEATED = 100_000  # objects under a second name of their group: a few links can make exponentially many
MAX_PATH_CHARS = 1 << 16


@dataclass(frozen=True, slots=True)
class Entry:
    """A data set whose elements are served: the object, whatever names it has."""

    address: int
    where: bytes  # a path of hard links that leads to it
    shape: tuple[int, ...]
    dtype: DType
    big_endian: bool
    offset: int | None = None  # where a contiguous one is, from the start of the HDF5 file


@dataclass(slots=True)
class Listing:
    """What a file holds: data sets by path, everything else with a description."""

    entries: dict[str, Entry] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    groups: dict[str, bytes] = field(default_factory=dict)
    """Each with a path of hard links that leads to it."""


def list_file(file: Hdf5File) -> Listing:
    """Walk the file; the cost grows with its objects, and each is looked at once however many names it has."""
    with hdf5_errors(file.path, "the listing is damaged"):
        return _Walk(file).run()


_Link = tuple[bytes, int, int]  # name, kind, address


class _Walk:
    def __init__(self, file: Hdf5File) -> None:
        self._file = file
        self._h5 = library(file.path)
        self._elements = Elements(self._h5)
        self._known: dict[int, Entry | str | list[_Link]] = {}
        self._soft: dict[str, str] = {}
        self._left, self._repeats = MAX_OBJECTS, MAX_REPEATED
        self._walked: set[int] = set()
        self._listing = Listing()

    def run(self) -> Listing:
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
        if isinstance(known, Entry):
            self._listing.entries[name] = known
        elif isinstance(known, str):
            self._listing.others[name] = known
        else:
            self._listing.groups[name] = where
            self._group(opened, where + b"/", name + "/", address, above)

    def _describe(self, opened: Any, where: bytes, address: int) -> Entry | str | list[_Link]:
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
        return Entry(address, where, shape, *element, offset)

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
