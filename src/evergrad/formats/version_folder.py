"""A version of the checkpointer: a folder with every rank's shard and manifest, and `COMMIT.json` on shared tiers."""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from evergrad._files import file_errors, open_file
from evergrad.errors import DamagedFile, FileAccessError, FormatError, UnsupportedContent
from evergrad.formats.byte_source import close_all, current_dry_run, xor_rows
from evergrad.formats.checkpoint import Bits, Checkpoint, Format, Probe
from evergrad.formats.folders import CompositeCheckpoint, by_file
from evergrad.formats.offset_checkpoint import AddressedCheckpoint
from evergrad.formats.safetensors import Safetensors
from evergrad.formats.unsupported_files import Beside
from evergrad.formats.version_records import (
    COMMIT,
    MANIFEST,
    DigestPlace,
    HasRecords,
    RecordFile,
    is_record,
    parsed_or_none,
    read_sound_record,
    shard_name,
)
from evergrad.records import Check

# Which records of a version follow when tensors change: manifests, those that refer to them, and `COMMIT.json`.

_NO_ELSEWHERE = b'"elsewhere": {}'


def updated_records(news: Mapping[Path, Mapping[str, str]]) -> list[RecordFile]:
    """Every record that has to change, as it has to be, when tensors have other digests: by manifest, by stored name.

    They are read anew, for others may have changed them since. To be saved in this order, and after the tensors: a
    crash then leaves digests that do not hold, which a restore passes over.
    """
    touched: dict[Path, RecordFile] = {}
    changes: dict[tuple[int, str], tuple[str, str]] = {}
    for path, digests in news.items():
        if not digests or (manifest := read_sound_record(path)) is None:
            continue
        for stored, place in (parsed_or_none(manifest.digests) or {}).items():
            if stored in digests:
                manifest.put(place, digests[stored])
                changes[manifest.number("rank"), stored] = place.digest, digests[stored]
        touched[path] = manifest
    if not changes:
        return []
    folder = next(iter(touched)).parent
    for path in manifests_that_share(folder):
        record = touched.get(path) or read_sound_record(path)
        for stored, (holder, place) in ((parsed_or_none(record.elsewhere) or {}) if record is not None else {}).items():
            before, after = changes.get((holder, stored), ("", ""))
            if record is not None and place.digest == before:
                touched.setdefault(path, record).put(place, after)
    altered = [(old, new) for old in touched.values() if (new := old.with_new_digests) is not None]
    commit = read_sound_record(folder / COMMIT)
    if commit is not None:
        manifests = {old.number("rank"): (old.digest, new.digest) for old, new in altered}
        for entry in parsed_or_none(commit.listed) or ():
            before, after = manifests.get(entry.rank, ("", ""))
            if entry.manifest.digest == before:
                commit.put(entry.manifest, after)
    last = commit.with_new_digests if commit is not None else None
    return [*(new for _, new in altered), *([last] if last is not None else [])]


def manifests_that_share(folder: Path) -> list[Path]:
    """Manifests that name tensors as held by another rank."""
    beside = sorted(path for path in folder.iterdir() if MANIFEST.fullmatch(path.name))
    return [path for path in beside if _names_others(path)]


def is_listed(commit: RecordFile | None, manifest: RecordFile) -> bool:
    """Whether `COMMIT.json` is sound, and lists this manifest as it is."""
    entries = (parsed_or_none(commit.listed) if commit is not None else None) or ()
    return (manifest.number("rank"), manifest.digest) in {(entry.rank, entry.manifest.digest) for entry in entries}


def _names_others(manifest: Path) -> bool:
    try:
        with open_file(manifest) as file:
            return _NO_ELSEWHERE not in file.read()
    except OSError:
        return False


# One rank's shard with its manifest beside it: a safetensors file whose tensors have digests.
#
# The digest is no CRC: it follows a change by being taken anew, over all of the tensor. So it is taken once, when the
# checkpoint is closed, and only where it held before: what was damaged stays known as damaged.

SHARD = re.compile(r"(rank-(\d{5,9}))\.safetensors(\.zst)?")
_BLOCK = 1 << 22  # a multiple of every element's size

Rows = tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]

UNVERIFIED = "digests were taken after a restart, with none from the time of the capture to compare"
"""The reason for which a version is unverified."""


class ShardCheckpoint(AddressedCheckpoint, HasRecords):
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
        self._digests: Mapping[str, DigestPlace] | None = None
        self._is_read = self._is_doubted = False
        self._follows = True
        self._seen: set[str] = set()
        self._changed: dict[str, str] = {}
        """Stored tensors that were altered, each with a name by which it is found here."""

    def _xor_bits(self, name: str, indices: npt.NDArray[np.int64], patterns: Bits) -> Bits:
        noted = current_dry_run()
        if self._follows and not (noted is not None and noted.stale):
            self._will_change(name)
        return super()._xor_bits(name, indices, patterns)

    def checksum(self, name: str) -> Check:
        """Compare the bytes with the digest in the manifest; `unknown` if that is damaged or was taken later."""
        self._info(name)
        if self._table() is None:
            return Check.UNKNOWN
        stored = self._stored(name)  # none: the manifest is of other tensors
        return self._unless_doubtful(Check.of(stored is not None and self._holds(name, stored)))

    def container_checks(self) -> Mapping[str, Check]:
        """The header, the manifest and, where there is one, `COMMIT.json`."""
        commit, manifest = self.path.with_name(COMMIT), self._manifest()
        checks = {"header": self.header_check(), self.manifest.name: Check.of(self._table() is not None)}
        if commit.exists():
            checks[COMMIT] = Check.of(manifest is not None and is_listed(read_sound_record(commit), manifest))
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
        return self._unless_doubtful(Check.of(found == manifest.body.get("header")))

    @property
    def doubts(self) -> Mapping[str, str]:
        """The shard itself, if its digests are not those of the capture."""
        self._table()
        return {self.path.name: UNVERIFIED} if self._is_doubted else {}

    def _unless_doubtful(self, check: Check) -> Check:
        """A digest that holds proves nothing about the time before it was taken."""
        return Check.UNKNOWN if check is Check.OK and self.doubts else check

    def records(self) -> list[Path]:
        """The manifest, those of ranks that share tensors of this one, and `COMMIT.json`."""
        commit, others = self.path.with_name(COMMIT), set(manifests_that_share(self.path.parent)) - {self.manifest}
        return [self.manifest, *sorted(others), *([commit] if commit.exists() else [])]

    def keep_records_unchanged(self) -> None:
        """Alter bytes alone from here on."""
        self._follows = False

    def close(self) -> None:
        """Make changes durable, then let the records follow."""
        try:
            news = self.changed_digests()
        finally:
            super().close()
        for record in updated_records({self.manifest: news}):
            record.save()

    def changed_digests(self) -> dict[str, str]:
        """The digests of tensors that were altered, by stored name, in a rehearsal as they would be; asked for once."""
        noted, changed, self._changed = current_dry_run(), self._changed, {}
        rows = noted.edits_of(self.path).xors if noted is not None and changed else []
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
        if current_dry_run() is None and not os.access(self.manifest.parent, os.W_OK, effective_ids=True):
            raise FileAccessError(self.manifest, "cannot be replaced: permission denied")
        if self._holds(name, stored):
            self._changed[stored] = name
        self._seen.add(stored)

    def _manifest(self) -> RecordFile | None:
        """The manifest, if it is sound and of this shard."""
        found = read_sound_record(self.manifest)
        match = SHARD.fullmatch(self.path.name)
        return found if found is not None and match and found.number("rank") == int(match[2]) else None

    def _table(self) -> Mapping[str, DigestPlace] | None:
        """The digests of the manifest; None if it cannot be believed."""
        if not self._is_read:
            manifest = self._manifest()
            self._digests = parsed_or_none(manifest.digests) if manifest is not None else None
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


_ZSTD = (b"\x28\xb5\x2f\xfd", *(bytes((0x50 + n, 0x2A, 0x4D, 0x18)) for n in range(16)))  # a frame; one to skip
_MAX_MISSING = 64
_OF_THE_VERSION = ("job", "step", "attempt", "world_size")

Parts = Mapping[str, AddressedCheckpoint]


class VersionFolder(Format):
    """A folder such as `v0000000120-02`; or one shard of it, which is a safetensors file with digests beside it.

    Tensors of a job with one rank are named as in its shard, those of several behind the rank: `rank-00003/…`.
    """

    name = "evergrad version"

    def recognises(self, probe: Probe) -> bool:
        """A folder with a manifest or `COMMIT.json`, a shard with its manifest beside it, or a packed shard."""
        if probe.is_folder:
            names = [name for name in probe.names if MANIFEST.fullmatch(name)]
            return any(is_record(probe.path / name) for name in [*sorted(names), COMMIT] if name in probe.names)
        name = SHARD.fullmatch(probe.path.name)
        if name is None:
            return False
        return probe.head.startswith(_ZSTD) if name[3] else manifest_beside(probe.path) is not None

    def open(self, path: Path) -> Checkpoint:
        """Read the header of every shard; no digest is taken before it is asked for."""
        if not path.is_dir():
            return _opened(path)
        shards = {name[1]: child for child in sorted(path.iterdir()) if (name := SHARD.fullmatch(child.name))}
        parts: dict[str, AddressedCheckpoint] = {}
        damaged: dict[str, str] = {}
        try:
            for stem, shard in shards.items():
                try:
                    parts[stem] = _opened(shard)
                except DamagedFile as error:  # it must not hide the state of the others
                    damaged[stem] = str(error)
            return VersionCheckpoint(path, parts, damaged)
        except BaseException:
            close_all(parts.values())
            raise


class VersionCheckpoint(CompositeCheckpoint, HasRecords):
    """The shards of a version as one checkpoint; those that are missing or damaged are listed as others."""

    def __init__(self, path: Path, parts: Parts, damaged: Mapping[str, str]) -> None:
        self._by_stem = dict(parts)
        self._damaged = damaged
        world_size, self._missing = _expected(path, {*parts, *damaged})
        others = dict.fromkeys(self._missing, "a file that is missing")
        others |= {f"{stem}.safetensors": f"a file that cannot be read: {why}" for stem, why in damaged.items()}
        if len(parts) == 1 and world_size <= 1:
            (only,) = parts.values()
            names: dict[str, tuple[Checkpoint, str]] = {name: (only, name) for name in only.tensors}
            skeleton, others = only.skeleton, {**others, **only.others}
            other_names: dict[str, tuple[Checkpoint, str]] = {name: (only, name) for name in only.others}
        else:
            folder = by_file(VersionFolder.name, path, parts, Beside(others))
            others = dict(folder.others)
            names = {f"{stem}/{name}": (part, name) for stem, part in sorted(parts.items()) for name in part.tensors}
            skeleton = folder.skeleton
            other_names = {f"{stem}/{name}": (part, name) for stem, part in parts.items() for name in part.others}
        super().__init__(
            VersionFolder.name,
            path,
            list(parts.values()),
            names,
            skeleton=skeleton,
            others=others,
            other_names=other_names,
            other_files={f"{stem}.safetensors": path / f"{stem}.safetensors" for stem in damaged},
        )

    def files(self) -> list[Path]:
        """Every shard, every manifest, `COMMIT.json`."""
        shards = sorted(child for child in self.path.iterdir() if SHARD.fullmatch(child.name))
        return [*shards, *self.records()]

    def records(self) -> list[Path]:
        """Every manifest, and `COMMIT.json`."""
        found = sorted(child for child in self.path.iterdir() if MANIFEST.fullmatch(child.name))
        commit = self.path / COMMIT
        return [*found, *([commit] if commit.exists() else [])]

    def keep_records_unchanged(self) -> None:
        """Alter bytes alone from here on."""
        for part in self._shards_with_manifest():
            part.keep_records_unchanged()

    def close(self) -> None:
        """Make changes durable in every shard, then let the records follow, each once for all of them."""
        try:
            news = {part.manifest: part.changed_digests() for part in self._shards_with_manifest()}
        finally:
            super().close()
        for record in updated_records(news):
            record.save()

    def container_checks(self) -> Mapping[str, Check]:
        """Headers, manifests and `COMMIT.json`, each by its file; what is missing has failed."""
        checks = {f"{stem}.safetensors/header": Check.FAILED for stem in self._damaged}
        for part in self._shards_with_manifest():
            checks[f"{part.path.name}/header"] = part.header_check()
        manifests = {path.name: read_sound_record(path) for path in self.records() if path.name != COMMIT}
        commit = read_sound_record(self.path / COMMIT) if (self.path / COMMIT).exists() else None
        whole = commit or next((found for found in manifests.values() if found is not None), None)
        for name, manifest in manifests.items():
            good = manifest is not None and whole is not None and self._fits(name, manifest, whole, commit, manifests)
            checks[name] = Check.of(good)
        if (self.path / COMMIT).exists():
            checks[COMMIT] = Check.of(commit is not None)
        return checks | {f"{name} (missing)": Check.FAILED for name in self._missing}

    def _shards_with_manifest(self) -> list[ShardCheckpoint]:
        """The shards that have a manifest."""
        return [part for part in self._by_stem.values() if isinstance(part, ShardCheckpoint)]

    def _fits(
        self,
        name: str,
        manifest: RecordFile,
        whole: RecordFile,
        commit: RecordFile | None,
        manifests: Mapping[str, RecordFile | None],
    ) -> bool:
        """Whether a manifest is of this version and rank, as it was committed, and agrees with those of other ranks."""
        try:
            return (
                _identity(manifest) == _identity(whole)
                and f"{shard_name(manifest.number('rank'))}.json" == name
                and (commit is None or is_listed(commit, manifest))
                and len(manifest.digests()) == len(manifest.table("digests"))
                and all(
                    (held := manifests.get(f"{shard_name(rank)}.json")) is not None
                    and held.table("digests").get(path) == place.digest
                    for path, (rank, place) in manifest.elsewhere().items()
                )
            )
        except FormatError:
            return False


def _opened(shard: Path) -> AddressedCheckpoint:
    if shard.name.endswith(".zst"):
        version = shard.absolute().parent
        hint = f"Export it first: evergrad checkpoints export {quote(str(version.parent))} {quote(version.name)} OUT"
        raise UnsupportedContent(shard, "packed with zstd", hint=hint)
    return open_shard(shard)


def _identity(record: RecordFile) -> tuple[Any, ...]:
    return tuple(record.body.get(member) for member in _OF_THE_VERSION)


def _world_size(read: Callable[[Path], RecordFile | None], records: list[Path]) -> int:
    """As the first record has it that is read in this way."""
    return next((max(found.number("world_size"), 0) for path in records if (found := read(path)) is not None), 0)


def _readable(path: Path) -> RecordFile | None:
    """A record whose digest may not hold, as a killed injection leaves it: names must not change with that."""
    try:
        record = RecordFile(path)
        return record if record.body else None
    except FormatError:
        return None


def _expected(folder: Path, stems: set[str]) -> tuple[int, list[str]]:
    """How many ranks a version has, as far as its records say; and the shards and manifests that are not there."""
    names = {child.name for child in folder.iterdir()}
    known = stems | {found[1] for name in names if (found := MANIFEST.fullmatch(name))}
    records = [folder / name for name in (COMMIT, *(f"{stem}.json" for stem in sorted(known)))]
    world_size = _world_size(read_sound_record, records) or _world_size(_readable, records)
    # What a record claims is believed within reason: a billion ranks are not all named.
    wanted = {shard_name(rank) for rank in range(min(world_size, len(known) + _MAX_MISSING))}
    missing = []
    for stem in sorted(wanted | known):
        missing += [f"{stem}.safetensors"] if stem not in stems else []
        missing += [f"{stem}.json"] if f"{stem}.json" not in names else []
    return world_size, missing
