"""One rank's shard with its manifest beside it: a safetensors file whose tensors have digests.

The digest is no CRC: it follows a change by being taken anew, over all of the tensor. So it is taken once, when the
checkpoint is closed, and only where it held before: what was damaged stays known as damaged.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from evergrad.errors import FileAccessError
from evergrad.formats.addressed import AddressedCheckpoint
from evergrad.formats.contract import Bits
from evergrad.formats.data_file import file_errors, open_file, xor_rows
from evergrad.formats.rehearsal import rehearsing
from evergrad.formats.safetensors import Safetensors
from evergrad.formats.version_following import following, is_listed, sharing
from evergrad.formats.version_records import (
    COMMIT,
    Place,
    Record,
    Recorded,
    believed,
    is_record,
    sound,
)
from evergrad.records import Check

SHARD = re.compile(r"(rank-(\d{5,9}))\.safetensors(\.zst)?")
_BLOCK = 1 << 22  # a multiple of every element's size

Rows = tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]

UNVERIFIED = "digests were taken after a restart, with none from the time of the capture to compare"
"""The reason for which a version is unverified."""


class ShardCheckpoint(AddressedCheckpoint, Recorded):
    """A shard that keeps its digests, and those above them, true when it is altered."""

    def __init__(self, inner: AddressedCheckpoint, manifest: Path) -> None:
        super().__init__(
            inner.format,
            inner.path,
            inner.tensors,
            inner.region,
            inner,
            skeleton=inner.skeleton,
            others=inner.others,
            metadata=inner.metadata,
            fingerprint=inner.fingerprint,
            check_other=inner.check_other,
        )
        self.manifest = manifest
        self._digests: Mapping[str, Place] | None = None
        self._is_read = self._is_doubted = False
        self._follows = True
        self._seen: set[str] = set()
        self._changed: dict[str, str] = {}
        """Stored tensors that were altered, each with a name by which it is found here."""

    def _xor_bits(self, name: str, indices: npt.NDArray[np.int64], patterns: Bits) -> Bits:
        noted = rehearsing()
        if self._follows and not (noted is not None and noted.stale):
            self._will_change(name)
        return super()._xor_bits(name, indices, patterns)

    def checksum(self, name: str) -> Check:
        """Compare the bytes with the digest in the manifest; `unknown` if that is damaged or was taken later."""
        self._info(name)
        if self._table() is None:
            return Check.UNKNOWN
        stored = self._stored(name)  # none: the manifest is of other tensors
        return self._doubted(Check.of(stored is not None and self._holds(name, stored)))

    def container_checks(self) -> Mapping[str, Check]:
        """The header, the manifest and, where there is one, `COMMIT.json`."""
        commit, manifest = self.path.with_name(COMMIT), self._manifest()
        checks = {"header": self.header_check(), self.manifest.name: Check.of(self._table() is not None)}
        if commit.exists():
            checks[COMMIT] = Check.of(manifest is not None and is_listed(sound(commit), manifest))
        return checks

    def header_check(self) -> Check:
        """Whether the file has its length, and the bytes before the tensors their digest."""
        manifest = self._manifest()
        if manifest is None:
            return Check.UNKNOWN
        end = manifest.number("data_start")
        with file_errors(self.path), open_file(self.path) as file:
            size = os.fstat(file.fileno()).st_size
            if manifest.number("size") != size or not 8 <= end <= size:
                return Check.FAILED
            found = xxhash.xxh3_128_hexdigest(file.read(end))
        return self._doubted(Check.of(found == manifest.body.get("header")))

    @property
    def doubts(self) -> Mapping[str, str]:
        """The shard itself, if its digests are not those of the capture."""
        self._table()
        return {self.path.name: UNVERIFIED} if self._is_doubted else {}

    def _doubted(self, check: Check) -> Check:
        """A digest that holds proves nothing about the time before it was taken."""
        return Check.UNKNOWN if check is Check.OK and self.doubts else check

    def records(self) -> list[Path]:
        """The manifest, those of ranks that share tensors of this one, and `COMMIT.json`."""
        commit, others = self.path.with_name(COMMIT), set(sharing(self.path.parent)) - {self.manifest}
        return [self.manifest, *sorted(others), *([commit] if commit.exists() else [])]

    def leave_records(self) -> None:
        """Alter bytes alone from here on."""
        self._follows = False

    def close(self) -> None:
        """Make changes durable, then let the records follow."""
        try:
            news = self.news()
        finally:
            super().close()
        for record in following({self.manifest: news}):
            record.save()

    def news(self) -> dict[str, str]:
        """The digests of tensors that were altered, by stored name, in a rehearsal as they would be; asked for once."""
        noted, changed, self._changed = rehearsing(), self._changed, {}
        rows = noted.of(self.path).rows if noted is not None and changed else []
        rows = sorted((row for row in rows if len(row[0])), key=_first)  # each is of one tensor, and none overlap
        found = {}
        for stored, name in changed.items():
            begin, end = self.region(name).extent
            mine = rows[bisect_left(rows, begin, key=_first) : bisect_left(rows, end, key=_first)]
            found[stored] = self._digest(name, mine)
        return found

    def _will_change(self, name: str) -> None:
        """Find out, before the first change of a tensor, whether its digest is one that has to follow."""
        stored = self._stored(name)
        if stored is None or stored in self._seen:
            return
        if rehearsing() is None and not os.access(self.manifest.parent, os.W_OK, effective_ids=True):
            raise FileAccessError(self.manifest, "cannot be replaced: permission denied")
        if self._holds(name, stored):
            self._changed[stored] = name
        self._seen.add(stored)

    def _manifest(self) -> Record | None:
        """The manifest, if it is sound and of this shard."""
        found = sound(self.manifest)
        match = SHARD.fullmatch(self.path.name)
        return found if found is not None and match and found.number("rank") == int(match[2]) else None

    def _table(self) -> Mapping[str, Place] | None:
        """The digests of the manifest; None if it cannot be believed."""
        if not self._is_read:
            manifest = self._manifest()
            self._digests = believed(manifest.digests) if manifest is not None else None
            self._is_doubted = manifest is not None and bool(manifest.body.get("unverified"))
            self._is_read = True
        return self._digests

    def _stored(self, name: str) -> str | None:
        """The name under which a tensor's bytes are stored: its own, or that of the one it is tied to."""
        known = self._table() or {}
        tied = (neighbour.name for neighbour in self.tensors[name].neighbours)
        return next((each for each in (name, *tied) if each in known), None)

    def _holds(self, name: str, stored: str) -> bool:
        """Whether a tensor has its digest; or had it, before it was altered here."""
        if stored in self._seen:
            return stored in self._changed
        known = self._table() or {}
        return self._digest(name) == known[stored].digest

    def _digest(self, name: str, changes: Sequence[Rows] = ()) -> str:
        """Of a tensor's bytes, with changes that are not made yet."""
        region, found = self.region(name), xxhash.xxh3_128()
        begin, end = region.extent
        for start in range(begin, end, _BLOCK):
            block = np.empty(min(_BLOCK, end - start), np.uint8)
            region.source.read_into(start, block)
            for addresses, rows in changes:
                mine = (addresses >= start) & (addresses < start + len(block))
                if mine.any():  # a block ends where an element does
                    xor_rows(block, addresses[mine] - start, rows[mine], 1)
            found.update(block.data)
        return found.hexdigest()


def open_shard(path: Path) -> AddressedCheckpoint:
    """Open a shard, with its manifest if there is one."""
    inner = Safetensors().open(path)
    assert isinstance(inner, AddressedCheckpoint)
    manifest = manifest_beside(path)
    return ShardCheckpoint(inner, manifest) if manifest is not None else inner


def manifest_beside(path: Path) -> Path | None:
    """The manifest of a rank's shard, if there is one; a damaged one only where the shard says that it is ours."""
    name = SHARD.fullmatch(path.name)
    if name is None or name[3]:
        return None
    manifest = path.with_name(f"{name[1]}.json")
    return manifest if is_record(manifest) or (manifest.is_file() and _is_ours(path)) else None


def _is_ours(shard: Path) -> bool:
    with file_errors(shard), open_file(shard) as file:
        return b'"evergrad.shard"' in file.read(4096)


def _first(row: Rows) -> int:
    return int(row[0][0])
