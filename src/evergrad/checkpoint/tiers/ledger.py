"""Which versions there are below a URL, by their commit records: read once, because they never change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import xxhash

from evergrad.checkpoint.run_folder import say_once
from evergrad.checkpoint.tiers.buckets import Bucket
from evergrad.checkpoint.tiers.commit import COMMIT_NAME, Commit, StoredShard
from evergrad.checkpoint.tiers.contract import Copy
from evergrad.checkpoint.version import Version
from evergrad.errors import DamagedFile, FileAccessError, FormatError, TierError
from evergrad.formats.version_records import shard_name

_A = TypeVar("_A")
_B = TypeVar("_B")
_PARALLEL = 8


class Ledger:
    """The records of a bucket. Thread-safe."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._commits: dict[Version, Commit] = {}
        self._lock = threading.Lock()

    def forget(self, version: Version | None = None) -> None:
        """Read a record again, or all of them: someone may have changed what should not change."""
        with self._lock:
            if version is None:
                self._commits.clear()
            else:
                self._commits.pop(version, None)

    def survey(self) -> dict[Version, Commit | FormatError | None]:
        """Every version, with its record, what is wrong with that, or None: one listing, one read for each new one."""
        versions = self.versions()
        with self._lock:
            self._commits = {version: self._commits[version] for version in versions if version in self._commits}

        def record(version: Version) -> Commit | FormatError | None:
            try:
                return self.commit(version)
            except FormatError as error:
                is_closed = isinstance(error, FileAccessError)
                say_once(f"{error}: {version} is {'left out' if is_closed else 'not committed without it'}")
                return error

        return dict(zip(versions, together(record, versions), strict=True))

    def versions(self) -> list[Version]:
        """Every version that has something there, oldest first."""
        found = (Version.parse(item.name) for item in self._bucket.items() if item.is_folder)
        return sorted((version for version in found if version is not None), key=Version.age)

    def names(self, version: Version) -> dict[str, int]:
        """The objects of a version, with their sizes."""
        return {item.name: item.size for item in self._bucket.items(version.name) if not item.is_folder}

    def commit(self, version: Version) -> Commit | None:
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
        commit = Commit.from_bytes(data, self._bucket.label(name), version)
        self.remember(commit)
        return commit

    def remember(self, commit: Commit) -> None:
        """Keep a record that was written or read."""
        if self._bucket.path(COMMIT_NAME) is None:  # a file is quickly read again
            with self._lock:
                self._commits[commit.version] = commit

    def shard(self, commit: Commit, copy: Copy) -> StoredShard:
        """What a record says of a rank's shard."""
        if not 0 <= copy.rank < commit.world_size:
            raise TierError(
                f"{self._bucket.label(copy.version.name)}: has {commit.world_size} ranks, and no {copy.rank}"
            )
        return commit.shards[copy.rank]

    def manifest(self, commit: Commit, shard: StoredShard) -> bytes:
        """A rank's manifest, which is what was committed."""
        name = f"{commit.version.name}/{shard_name(shard.rank)}.json"
        data = self._bucket.read(name)
        found = xxhash.xxh3_128_hexdigest(data)
        if found != shard.manifest:
            raise DamagedFile(self._bucket.label(name), "not what was committed", expected=shard.manifest, found=found)
        return data


def together(call: Callable[[_A], _B], items: Sequence[_A]) -> list[_B]:
    """The calls' results, several at a time."""
    if len(items) < 2:
        return [call(item) for item in items]
    with ThreadPoolExecutor(min(_PARALLEL, len(items))) as pool:
        return list(pool.map(call, items))
