"""A version of the checkpointer: a folder with every rank's shard and manifest, and `COMMIT.json` on shared tiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from evergrad.errors import DamagedFile, FormatError, UnsupportedContent
from evergrad.formats.addressed import AddressedCheckpoint
from evergrad.formats.beside import Beside
from evergrad.formats.contract import Checkpoint, Format, Probe
from evergrad.formats.data_file import close_all
from evergrad.formats.folders import CompositeCheckpoint, by_file
from evergrad.formats.version_following import following, is_listed
from evergrad.formats.version_records import COMMIT, MANIFEST, Record, Recorded, is_record, shard_name, sound
from evergrad.formats.version_shard import SHARD, ShardCheckpoint, manifest_beside, open_shard
from evergrad.records import Check

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


class VersionCheckpoint(CompositeCheckpoint, Recorded):
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

    def leave_records(self) -> None:
        """Alter bytes alone from here on."""
        for part in self._sealed():
            part.leave_records()

    def close(self) -> None:
        """Make changes durable in every shard, then let the records follow, each once for all of them."""
        try:
            news = {part.manifest: part.news() for part in self._sealed()}
        finally:
            super().close()
        for record in following(news):
            record.save()

    def container_checks(self) -> Mapping[str, Check]:
        """Headers, manifests and `COMMIT.json`, each by its file; what is missing has failed."""
        checks = {f"{stem}.safetensors/header": Check.FAILED for stem in self._damaged}
        for part in self._sealed():
            checks[f"{part.path.name}/header"] = part.header_check()
        manifests = {path.name: sound(path) for path in self.records() if path.name != COMMIT}
        commit = sound(self.path / COMMIT) if (self.path / COMMIT).exists() else None
        whole = commit or next((found for found in manifests.values() if found is not None), None)
        for name, manifest in manifests.items():
            good = manifest is not None and whole is not None and self._fits(name, manifest, whole, commit, manifests)
            checks[name] = Check.of(good)
        if (self.path / COMMIT).exists():
            checks[COMMIT] = Check.of(commit is not None)
        return checks | {f"{name} (missing)": Check.FAILED for name in self._missing}

    def _sealed(self) -> list[ShardCheckpoint]:
        """The shards that have a manifest."""
        return [part for part in self._by_stem.values() if isinstance(part, ShardCheckpoint)]

    def _fits(
        self,
        name: str,
        manifest: Record,
        whole: Record,
        commit: Record | None,
        manifests: Mapping[str, Record | None],
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


def _identity(record: Record) -> tuple[Any, ...]:
    return tuple(record.body.get(member) for member in _OF_THE_VERSION)


def _world_size(read: Callable[[Path], Record | None], records: list[Path]) -> int:
    """As the first record has it that is read in this way."""
    return next((max(found.number("world_size"), 0) for path in records if (found := read(path)) is not None), 0)


def _readable(path: Path) -> Record | None:
    """A record whose digest may not hold, as a killed injection leaves it: names must not change with that."""
    try:
        record = Record(path)
        return record if record.body else None
    except FormatError:
        return None


def _expected(folder: Path, stems: set[str]) -> tuple[int, list[str]]:
    """How many ranks a version has, as far as its records say; and the shards and manifests that are not there."""
    names = {child.name for child in folder.iterdir()}
    known = stems | {found[1] for name in names if (found := MANIFEST.fullmatch(name))}
    records = [folder / name for name in (COMMIT, *(f"{stem}.json" for stem in sorted(known)))]
    world_size = _world_size(sound, records) or _world_size(_readable, records)
    # What a record claims is believed within reason: a billion ranks are not all named.
    wanted = {shard_name(rank) for rank in range(min(world_size, len(known) + _MAX_MISSING))}
    missing = []
    for stem in sorted(wanted | known):
        missing += [f"{stem}.safetensors"] if stem not in stems else []
        missing += [f"{stem}.json"] if f"{stem}.json" not in names else []
    return world_size, missing
