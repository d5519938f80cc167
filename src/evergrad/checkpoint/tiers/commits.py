"""COMMIT.json: what makes a version of a shared tier exist. Any agent writes the same bytes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import xxhash

from evergrad.checkpoint.run_folder import warn_once
from evergrad.checkpoint.shard_manifest import Manifest
from evergrad.checkpoint.tiers.base import Copy
from evergrad.checkpoint.tiers.object_store import ObjectBucket
from evergrad.checkpoint.version import Version
from evergrad.errors import DamagedFile, FileAccessError, FormatError, TierError, said
from evergrad.formats.version_records import COMMIT, has_own_digest, record_bytes, shard_name

COMMIT_NAME = COMMIT
SCHEMA_VERSION = 1
_MAX_RANKS = 1_000_000


@dataclass(frozen=True, slots=True)
class StoredShard:
    """One shard of a version, as it lies in the store."""

    rank: int
    name: str
    size: int
    """Bytes of the shard, unpacked."""
    stored: int
    """Bytes in the store."""
    manifest: str
    """Digest (xxh3_128) of the manifest's bytes."""

    @property
    def is_packed(self) -> bool:
        """Whether it has to be unpacked."""
        return self.name.endswith(".zst")


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """The record of a whole version. It carries a digest of itself, as a manifest does."""

    job: str
    version: Version
    world_size: int
    time: str
    shards: Sequence[StoredShard]
    """Of every rank, in order."""
    parent: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    encoding: str = ""
    unverified: tuple[int, ...] = ()
    """The ranks whose digests were taken again after a restart: see `Manifest.unverified`."""

    @classmethod
    def of(cls, shards: Sequence[tuple[bytes, Manifest, int]]) -> CommitRecord:
        """From all ranks' manifests, in order: as bytes, as read, and how many bytes of payload are stored."""
        first = shards[0][1]
        stored = tuple(
            StoredShard(m.rank, payload_name(m.rank, m.encoding), m.size, size, xxhash.xxh3_128_hexdigest(data))
            for data, m, size in shards
        )
        return cls(
            first.job, first.version, first.world_size, first.time, stored, first.parent, first.meta, first.encoding,
            tuple(manifest.rank for _, manifest, _ in shards if manifest.unverified),
        )  # fmt: skip

    def to_bytes(self) -> bytes:
        """The record as JSON, its own digest first."""
        body = {
            "schema_version": SCHEMA_VERSION,
            "job": self.job,
            "step": self.version.step,
            "attempt": self.version.attempt,
            "world_size": self.world_size,
            "time": self.time,
            "parent": self.parent,
            "meta": dict(self.meta),
            "encoding": self.encoding,
            "shards": [asdict(shard) for shard in self.shards],
        }
        if self.unverified:
            body["unverified"] = list(self.unverified)
        return record_bytes(body)

    @classmethod
    def from_bytes(cls, data: bytes, where: str, version: Version) -> CommitRecord:
        """Read and check a record; `DamagedFile` if it is not as it was written, or of another version."""
        if not has_own_digest(data):
            raise DamagedFile(where, "the record is not as it was written")
        try:
            body = json.loads(data)
            if body["schema_version"] != SCHEMA_VERSION:
                raise DamagedFile(where, f"schema {body['schema_version']!r}", expected=SCHEMA_VERSION)
            shards = tuple(StoredShard(**shard) for shard in body["shards"])
            found = cls(
                str(body["job"]), Version(body["step"], body["attempt"]), body["world_size"], str(body["time"]),
                shards, body["parent"], {**body["meta"]}, str(body["encoding"]), tuple(body.get("unverified", ())),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedFile(where, f"lacks what it should have: {said(error)}") from None
        if found.version != version:
            raise DamagedFile(where, "of another version", expected=version, found=found.version)
        if not 0 < len(shards) <= _MAX_RANKS or len(shards) != found.world_size:
            raise DamagedFile(where, "not every rank's shard", expected=found.world_size, found=len(shards))
        for rank, shard in enumerate(shards):
            names = (payload_name(rank, ""), payload_name(rank, "zstd-shuffle"))
            sizes = (shard.size, shard.stored)
            if shard.rank != rank or shard.name not in names or not all(type(n) is int and n >= 0 for n in sizes):
                raise DamagedFile(where, f"not the shard of rank {rank}", found=f"{shard.name!s:.80}")
        return found


def payload_name(rank: int, encoding: str) -> str:
    """What a shard is called in a shared tier.

    >>> payload_name(3, ""), payload_name(3, "zstd-shuffle")
    ('rank-00003.safetensors', 'rank-00003.safetensors.zst')
    """
    return f"{shard_name(rank)}.safetensors{'.zst' if encoding else ''}"


# Which versions there are below a URL, by their commit records: read once, because they never change.

_A = TypeVar("_A")
_B = TypeVar("_B")
_PARALLEL = 8


class CommitIndex:
    """The records of a bucket. Thread-safe."""

    def __init__(self, bucket: ObjectBucket) -> None:
        self._bucket = bucket
        self._commits: dict[Version, CommitRecord] = {}
        self._lock = threading.Lock()

    def forget(self, version: Version | None = None) -> None:
        """Read a record again, or all of them: someone may have changed what should not change."""
        with self._lock:
            if version is None:
                self._commits.clear()
            else:
                self._commits.pop(version, None)

    def read_all(self) -> dict[Version, CommitRecord | FormatError | None]:
        """Every version, with its record, what is wrong with that, or None: one listing, one read for each new one."""
        versions = self.versions()
        with self._lock:
            self._commits = {version: self._commits[version] for version in versions if version in self._commits}

        def record(version: Version) -> CommitRecord | FormatError | None:
            try:
                return self.commit(version)
            except FormatError as error:
                is_closed = isinstance(error, FileAccessError)
                warn_once(f"{error}: {version} is {'left out' if is_closed else 'not committed without it'}")
                return error

        return dict(zip(versions, map_in_threads(record, versions), strict=True))

    def versions(self) -> list[Version]:
        """Every version that has something there, oldest first."""
        found = (Version.parse(item.name) for item in self._bucket.items() if item.is_folder)
        return sorted((version for version in found if version is not None), key=Version.age)

    def names(self, version: Version) -> dict[str, int]:
        """The objects of a version, with their sizes."""
        return {item.name: item.size for item in self._bucket.items(version.name) if not item.is_folder}

    def commit(self, version: Version) -> CommitRecord | None:
        """The record of a version; None if it has none, `DamagedFile` if it is not sound.

        `FileAccessError` if there is something that cannot be read, such as a folder of that name.
        """
        known = self._commits.get(version)
        if known is not None:
            return known
        name = f"{version.name}/{COMMIT_NAME}"
        try:
            data = self._bucket.read(name)
        except FileNotFoundError:
            return None
        commit = CommitRecord.from_bytes(data, self._bucket.label(name), version)
        self.remember(commit)
        return commit

    def remember(self, commit: CommitRecord) -> None:
        """Keep a record that was written or read."""
        if self._bucket.path(COMMIT_NAME) is None:  # a file is quickly read again
            with self._lock:
                self._commits[commit.version] = commit

    def shard(self, commit: CommitRecord, copy: Copy) -> StoredShard:
        """What a record says of a rank's shard."""
        if not 0 <= copy.rank < commit.world_size:
            raise TierError(
                f"{self._bucket.label(copy.version.name)}: has {commit.world_size} ranks, and no {copy.rank}"
            )
        return commit.shards[copy.rank]

    def manifest(self, commit: CommitRecord, shard: StoredShard) -> bytes:
        """A rank's manifest, which is what was committed."""
        name = f"{commit.version.name}/{shard_name(shard.rank)}.json"
        data = self._bucket.read(name)
        found = xxhash.xxh3_128_hexdigest(data)
        if found != shard.manifest:
            raise DamagedFile(self._bucket.label(name), "not what was committed", expected=shard.manifest, found=found)
        return data


def map_in_threads(call: Callable[[_A], _B], items: Sequence[_A]) -> list[_B]:
    """The calls' results, several at a time."""
    if len(items) < 2:
        return [call(item) for item in items]
    with ThreadPoolExecutor(min(_PARALLEL, len(items))) as pool:
        return list(pool.map(call, items))
