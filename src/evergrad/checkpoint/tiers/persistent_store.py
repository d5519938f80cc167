"""What lies below the URL of a persistent tier, and in which order it comes and goes.

A version exists if and only if its COMMIT.json is there and sound. It is written when every rank's payload and
manifest are, and removed before any of them. Records are read once: they never change.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from evergrad.checkpoint.manifest import Manifest
from evergrad.checkpoint.tiers.buckets import Bucket, Chunk
from evergrad.checkpoint.tiers.commit import COMMIT_NAME, Commit, payload_name
from evergrad.checkpoint.tiers.compress import Compress
from evergrad.checkpoint.tiers.contract import Copy, Gone, RunFolder, Site, Store, Torn, Work
from evergrad.checkpoint.tiers.fetching import fetch_shard
from evergrad.checkpoint.tiers.frames import ENCODING, pack
from evergrad.checkpoint.tiers.ledger import Ledger, together
from evergrad.checkpoint.version import Version
from evergrad.errors import DamagedFile, FileAccessError, FormatError, TierError, reason, said
from evergrad.formats.version_records import read_record, record_bytes, shard_name, shard_rank
from evergrad.wording import install_hint

JOB_NAME = "JOB.json"
_SCHEMA_VERSION = 1
_PATIENCE_S = 2.0
_log = logging.getLogger(__name__)


class PersistentStore(Store):
    """The versions of a job below a URL, shared by all nodes."""

    shared: ClassVar[bool] = True

    def __init__(self, bucket: Bucket, site: Site, *, adopt: bool = False, compress: Compress | None = None) -> None:
        self._bucket, self._site, self._adopt, self._compress = bucket, site, adopt, compress
        self._ledger = Ledger(bucket)
        place = bucket.path("")
        self._home = RunFolder(None) if place is None else RunFolder.of(place, site.run_dir)
        self._lock = threading.Lock()
        self._is_ours = False

    def check(self) -> None:
        _check_reachable(self._bucket)

    def owner(self) -> str | None:
        """The job that writes here, by its newest version if `JOB.json` is damaged; None if none does yet."""
        return self._owner()[0]

    def _owner(self) -> tuple[str | None, bool]:
        """The job that writes here, and whether `JOB.json` says so."""
        try:
            record = read_record(self._bucket.read(JOB_NAME))
            if record["schema_version"] == _SCHEMA_VERSION and isinstance(record["id"], str):
                return str(record["id"]), True
            why = f"schema {record['schema_version']!r}"
        except FileNotFoundError:
            return None, True
        except (ValueError, KeyError, TypeError, FileAccessError) as error:
            why = said(error)
        commits = [commit for commit in self._ledger.survey().values() if isinstance(commit, Commit)]
        owner = commits[-1].job if commits else None  # oldest first
        found = f"by its newest version it is job {owner}'s" if owner is not None else "no version says it either"
        _log.warning("%s: does not say whose this is (%s): %s", self._bucket.label(JOB_NAME), why, found)
        return owner, False

    def forget(self) -> None:
        """Read every record again: someone may have changed what should not change."""
        self._ledger.forget()

    def put(self, work: Work) -> None:
        with self._told(f"{work.version.name}/{shard_name(work.rank)}"):
            self._claim()
            # What is owed may hold credentials, and which use of an arena it was means nothing here.
            encoding = "" if self._compress is None else ENCODING
            manifest = replace(work.manifest, owed=(), generation=0, encoding=encoding)
            if self._is_stored(manifest):
                return
            payload = work.payload()
            if (length := sum(view.nbytes for view in payload)) != manifest.size:
                raise TierError(
                    f"{work.version}, rank {work.rank}: {length} bytes, and its manifest says {manifest.size}"
                )
            compress = self._compress

            def source() -> Iterator[Chunk]:
                return iter(payload) if compress is None else pack(payload, compress.level)

            folder = work.version.name
            self._bucket.upload(f"{folder}/{payload_name(work.rank, encoding)}", source, manifest.size)
            # The manifest last: a torn save must look like no save.
            self._bucket.write(f"{folder}/{shard_name(work.rank)}.json", manifest.to_bytes())

    def find(self, rank: int | None = None) -> list[Copy]:
        found = []
        for version, commit in self._ledger.survey().items():
            if isinstance(commit, Commit):
                shards = commit.shards if rank is None else commit.shards[rank : rank + 1]
                found += [self._copy(version, shard.rank, shard.name) for shard in shards]
        return found

    def begun(self, rank: int | None = None) -> list[Copy]:
        found = []
        for version, commit in self._ledger.survey().items():
            if commit is None or isinstance(
                commit, DamagedFile
            ):  # a damaged record is written again, as all agree on it
                names = self._ledger.names(version)
                for name in sorted(names):
                    stem, _, ending = name.partition(".")
                    number = shard_rank(stem)
                    if ending == "json" and number is not None and rank in (None, number):
                        payloads = [payload_name(number, encoding) for encoding in ("", ENCODING)]
                        found += [self._copy(version, number, each) for each in payloads if each in names][:1]
        return found

    def torn(self, rank: int) -> dict[Version, Torn]:
        found = {}
        for version, commit in self._ledger.survey().items():
            if commit is None:
                found[version] = Torn(f"{self._bucket.label(version.name)}: no {COMMIT_NAME}")
            elif isinstance(commit, FormatError):
                found[version] = Torn(str(commit), was_complete=True)
        return found

    def commit(self, version: Version, world_size: int) -> None:
        with self._told(f"{version.name}/{COMMIT_NAME}"):
            self._claim()
            try:
                known = self._ledger.commit(version)
            except (DamagedFile, FileAccessError) as error:
                _log.warning("%s: it is written again, from the manifests", error)
                known = None
            if known is not None:
                if (known.job, known.world_size) != (self._site.job, world_size):
                    raise TierError(
                        f"{self._bucket.label(version.name)}: was committed by job {known.job}, {known.world_size} "
                        f"ranks (expected job {self._site.job}, {world_size})"
                    )
                return
            names = self._listed(version, world_size)
            if not names:
                raise Gone(f"{self._bucket.label(version.name)}: nothing of it is there")
            shards = together(lambda rank: self._checked(version, rank, world_size, names), range(world_size))
            record = Commit.of(shards)
            try:
                self._bucket.write(f"{version.name}/{COMMIT_NAME}", record.to_bytes())
            except (TierError, FileNotFoundError):
                if not self._is_committed(record):  # else another node was first, and wrote the same
                    raise
            self._ledger.remember(record)
        try:
            self.tidy(version)
        except TierError as error:
            _log.warning("%s", error)

    def _is_committed(self, record: Commit) -> bool:
        with suppress(FileAccessError):
            return self._ledger.commit(record.version) == record
        return False

    def tidy(self, newest: Version) -> None:
        """Remove what crashes have left of this job's versions before a committed one."""
        over, left_alone = [], set()
        for version in self._ledger.versions():
            if version.age() < newest.age():
                try:
                    if self._ledger.commit(version) is not None:
                        continue
                except (DamagedFile, FileAccessError):
                    left_alone.add(version)  # was committed once: for a person to look at
                    continue
                names = self._ledger.names(version)
                if self._is_our_leftover(version, names):
                    self._bucket.remove(f"{version.name}/{name}" for name in sorted(names))
                    over.append(version)
                else:
                    left_alone.add(version)

        def is_over(name: str) -> bool:
            folder, _, rest = name.partition("/")
            version = Version.parse(folder)
            if version is None or version in left_alone:
                return False
            # Of the newest one all shards are there; its record another node may be writing at this moment.
            return version.age() < newest.age() or (version == newest and rest.lstrip(".").startswith("rank-"))

        self._bucket.abandon("", is_over)
        if over:
            _log.info("%s: removed what was left of %s", self._bucket.where, ", ".join(v.name for v in over))

    def read_manifest(self, copy: Copy, *, digests: bool = True) -> Manifest:
        record = f"{copy.version.name}/{shard_name(copy.rank)}.json"
        try:
            commit = self._ledger.commit(copy.version)
        except (DamagedFile, FileAccessError):  # as if it had none: it can be written again
            commit = None
        if commit is None:
            return Manifest.from_bytes(self._bucket.read(record), self._bucket.label(record), digests=digests)
        shard = self._ledger.shard(commit, copy)
        if digests:
            return Manifest.from_bytes(self._ledger.manifest(commit, shard), self._bucket.label(record))
        return Manifest(
            job=commit.job, version=commit.version, rank=shard.rank, world_size=commit.world_size, size=shard.size,
            data_start=0, time=commit.time, header="", digests={}, parent=commit.parent, meta=commit.meta,
            encoding=ENCODING if shard.is_packed else "", unverified=shard.rank in commit.unverified,
        )  # fmt: skip

    def fetch(self, copy: Copy, folder: Path) -> Copy:
        if not copy.url:
            return copy
        name = f"{copy.version.name}/{shard_name(copy.rank)}"
        with self._told(name):
            commit = self._ledger.commit(copy.version)
            if commit is None:
                raise FileNotFoundError(COMMIT_NAME)
            shard = self._ledger.shard(commit, copy)
            try:
                data = self._ledger.manifest(commit, shard)
                path = f"{copy.version.name}/{shard.name}"
                files = fetch_shard(self._bucket, path, shard, data, folder / copy.version.name)
            except FileNotFoundError:
                self._ledger.forget(copy.version)  # another node has dropped it
                raise
            except OSError as error:
                raise TierError(f"{error.filename or folder}: {reason(error)}") from error
        return replace(copy, shard=files[0], manifest=files[1])

    def drop(self, copy: Copy) -> None:
        folder, stem = copy.version.name, shard_name(copy.rank)
        with self._told(f"{folder}/{stem}"):
            with suppress(DamagedFile, FileAccessError):
                commit = self._ledger.commit(copy.version)
                if commit is not None and commit.job != self._site.job:
                    raise TierError(f"{self._bucket.label(folder)}: belongs to job {commit.job}, and is left to it")
            self._ledger.forget(copy.version)
            # First what makes it visible: a half-removed version must look like none.
            payloads = [f"{folder}/{payload_name(copy.rank, encoding)}" for encoding in ("", ENCODING)]
            self._bucket.remove([f"{folder}/{COMMIT_NAME}", f"{folder}/{stem}.json", *payloads])
            over = tuple(f"{folder}/{start}" for start in (stem, COMMIT_NAME))
            self._bucket.abandon(f"{folder}/", lambda name: name.endswith("/") or name.startswith(over))

    def _claim(self) -> None:
        """See that nobody else writes here, and say who does."""
        self._home.check("persistent")
        with self._lock:
            if self._is_ours:
                return
            record = {"schema_version": _SCHEMA_VERSION, "id": self._site.job, "made": datetime.now(UTC).isoformat()}
            text = record_bytes(record)
            owner, is_said = self._owner()
            if owner in (None, self._site.job) and not is_said:
                self._bucket.write(JOB_NAME, text)
                owner = self._site.job
            elif owner is None:
                with suppress(FileExistsError):  # someone was quicker
                    self._bucket.write(JOB_NAME, text, new=True)
                owner = self.owner()
            if owner != self._site.job:
                if not self._adopt:
                    raise TierError(f"{self._bucket.where}: belongs to job {owner}: choose another URL, or adopt=True")
                _log.warning("%s: taken over from job %s", self._bucket.where, owner)
                self._bucket.write(JOB_NAME, text)
            self._is_ours = True

    def _is_stored(self, manifest: Manifest) -> bool:
        """Whether this very shard was put before; an error if another one has its place."""
        folder = manifest.version.name
        record = f"{folder}/{shard_name(manifest.rank)}.json"
        try:
            found = Manifest.from_bytes(self._bucket.read(record), self._bucket.label(record))
            if _content(found) != _content(manifest):
                raise TierError(
                    f"{self._bucket.label(record)}: {found.version} of job {found.job} is there already, and is "
                    "not what was captured now: remove it, or choose another URL"
                )
            stored = self._bucket.size(f"{folder}/{payload_name(found.rank, found.encoding)}")
        except (FileNotFoundError, DamagedFile):
            return False
        return bool(found.encoding) or stored == found.size

    def _checked(
        self, version: Version, rank: int, world_size: int, names: dict[str, int]
    ) -> tuple[bytes, Manifest, int]:
        """A rank's manifest, in bytes and as read, and the size of its payload; `TierError` if it is not all there."""
        record = f"{shard_name(rank)}.json"
        if record not in names:
            raise TierError(f"{self._bucket.label(version.name)}: the shard of rank {rank} is not there yet")
        data = self._bucket.read(f"{version.name}/{record}")
        try:
            manifest = Manifest.from_bytes(data, self._bucket.label(f"{version.name}/{record}"), digests=False)
        except DamagedFile as error:
            raise TierError(str(error)) from None
        expected = (self._site.job, version, rank, world_size)
        if (manifest.job, manifest.version, manifest.rank, manifest.world_size) != expected:
            raise TierError(f"{self._bucket.label(version.name)}/{record}: describes another shard")
        payload = payload_name(rank, manifest.encoding)
        stored = names.get(payload)
        if stored is None or (not manifest.encoding and stored != manifest.size):
            found = "missing" if stored is None else f"{stored} bytes, and not {manifest.size}"
            raise TierError(f"{self._bucket.label(version.name)}/{payload}: {found}")
        return data, manifest, stored

    def _listed(self, version: Version, world_size: int) -> dict[str, int]:
        """What lies there of a version; a network file system may take a moment to show what another node wrote."""
        end = time.monotonic() + _PATIENCE_S
        while True:
            is_over = time.monotonic() > end  # asked once more when it is, however long an answer takes
            names = self._ledger.names(version)
            if is_over or all(f"{shard_name(rank)}.json" in names for rank in range(world_size)):
                return names
            time.sleep(0.1)

    def _is_our_leftover(self, version: Version, names: dict[str, int]) -> bool:
        """Whether what is left of a version is ours to remove."""
        for name in names:
            if name.endswith(".json"):
                label = self._bucket.label(f"{version.name}/{name}")
                with suppress(DamagedFile, FileAccessError, FileNotFoundError):
                    manifest = Manifest.from_bytes(self._bucket.read(f"{version.name}/{name}"), label, digests=False)
                    return manifest.job == self._site.job
        return self._is_ours

    def _copy(self, version: Version, rank: int, name: str) -> Copy:
        shard, manifest = f"{version.name}/{name}", f"{version.name}/{shard_name(rank)}.json"
        files = self._bucket.path(shard), self._bucket.path(manifest)
        if files[0] is not None and files[1] is not None:
            url = "" if not name.endswith(".zst") else self._bucket.label(shard)
            return Copy("persistent", version, rank, files[0], files[1], url=url)
        url = self._bucket.label(shard)
        return Copy("persistent", version, rank, Path(url), Path(self._bucket.label(manifest)), url=url)

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Something that is missing where it must not be is an error of the tier."""
        try:
            yield
        except FileNotFoundError:
            raise TierError(f"{self._bucket.label(name)}: is gone: someone else has removed it") from None


def _content(manifest: Manifest) -> tuple[object, ...]:
    """What tells one capture from another; how much of it was left to other ranks may differ from try to try."""
    left = {path: digest for path, (_, digest) in manifest.elsewhere.items()}
    return manifest.job, manifest.version, manifest.rank, manifest.world_size, {**left, **manifest.digests}


def _check_reachable(bucket: Bucket) -> None:
    """Quickly, and without a request: the library is there, and a folder could be written to."""
    scheme, _, rest = bucket.access.url.partition("://")
    if scheme == "file":
        folder = Path(rest)
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        if not folder.is_dir():
            raise TierError(f"{folder}: tier persistent: is no folder")
        is_read_only = bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
        if is_read_only or not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
            why = os.strerror(errno.EROFS if is_read_only else errno.EACCES).lower()
            raise TierError(f"{folder}: tier persistent: cannot be written to: {why}")
        return
    from fsspec.registry import known_implementations

    home = str(known_implementations.get(scheme, {}).get("class", "")).partition(".")[0]
    if home and find_spec(home) is None:
        how = install_hint("s3") if scheme in ("s3", "s3a") else f"pip install {home}"
        raise TierError(f"{bucket.where}: needs the library {home}: {how}")
