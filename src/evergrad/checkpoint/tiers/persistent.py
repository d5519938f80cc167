"""The persistent tier: an object store or a shared file system, which outlives every node.

    <url>/JOB.json                                  whose it is
          v0000000120-02/rank-00003.safetensors     the shard; with `Compress`, rank-00003.safetensors.zst
                         rank-00003.json            its manifest, after it
                         COMMIT.json                last: without it the version does not exist

`PersistentStore` says what is where, and in which order things come and go; how bytes get there is the business of
the buckets (`object_store.py` and its variants).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import xxhash

from evergrad import _files
from evergrad._files import locked, open_file, read_small
from evergrad.checkpoint.shard_manifest import Manifest
from evergrad.checkpoint.tiers.base import Copy, EnclosingRunFolder, Gone, Redaction, Site, Store, Tier, Torn, Work
from evergrad.checkpoint.tiers.commits import (
    COMMIT_NAME,
    CommitIndex,
    CommitRecord,
    StoredShard,
    map_in_threads,
    payload_name,
)
from evergrad.checkpoint.tiers.compress import ENCODING, Compress, pack, unpack
from evergrad.checkpoint.tiers.object_store import (
    BucketAccess,
    Chunk,
    FsspecBucket,
    ObjectBucket,
    PosixBucket,
    Retry,
    parse_bandwidth,
    shared_throttle,
)
from evergrad.checkpoint.tiers.s3 import MIN_PART_BYTES, S3Bucket
from evergrad.checkpoint.version import Version
from evergrad.errors import DamagedFile, FileAccessError, FormatError, TierError, UsageError, reason, said
from evergrad.formats.version_records import read_record, record_bytes, shard_name, shard_rank
from evergrad.wording import did_you_mean, install_hint

# Bringing a shard from a shared tier into a folder of the node, where it can be mapped.

RANGE_BYTES = 16 << 20
_PARALLEL = 4


def fetch_shard(
    bucket: ObjectBucket, name: str, shard: StoredShard, manifest: bytes, folder: Path
) -> tuple[Path, Path]:
    """Download a payload, unpack it if need be, and put its manifest beside it, last; gives both files.

    What is there already is used again. Of several processes that want the same shard, one downloads it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = shard_name(shard.rank)
    target, record = folder / f"{stem}.safetensors", folder / f"{stem}.json"
    with locked(folder / f".{stem}.lock"):
        if not _is_fetched(target, record, shard):
            _files.remove(record)
            size = Manifest.from_bytes(manifest, bucket.label(name), digests=False).size
            partial = folder / f".{stem}.partial"
            try:
                if shard.is_packed:
                    _unpack(bucket, name, shard, size, folder / f".{stem}.packed", partial)
                else:
                    _download(bucket, name, shard.stored, partial)
                _files.rename(partial, target)
                _files.publish(record, manifest)
            finally:
                _files.remove(partial)
    return target, record


def _is_fetched(target: Path, record: Path, shard: StoredShard) -> bool:
    try:
        there = xxhash.xxh3_128_hexdigest(read_small(record))
        return there == shard.manifest and target.stat().st_size == shard.size
    except OSError:
        return False


def _download(bucket: ObjectBucket, name: str, size: int, path: Path) -> None:
    """Several ranges at a time, each tried again for itself."""
    found = bucket.size(name)
    if found != size:
        raise DamagedFile(bucket.label(name), "wrong length", expected=f"{size} bytes", found=found)
    fd = _files.create(path)
    try:
        _files.resize(fd, size)

        def bring(begin: int) -> None:
            end = min(begin + RANGE_BYTES, size)
            data = bucket.read(name, begin, end)
            if len(data) != end - begin:
                raise DamagedFile(bucket.label(name), "cut short", expected=f"{end - begin} bytes", found=len(data))
            _files.write(fd, data, begin)

        with ThreadPoolExecutor(_PARALLEL) as pool:
            for _ in pool.map(bring, range(0, size, RANGE_BYTES)):
                pass
        _files.fsync(fd)
    finally:
        os.close(fd)


def _unpack(bucket: ObjectBucket, name: str, shard: StoredShard, size: int, packed: Path, path: Path) -> None:
    source = bucket.path(name)
    try:
        if source is None:
            _download(bucket, name, shard.stored, packed)
            source = packed
        fd = _files.create(path)
        try:
            at = 0
            for raw in unpack(_chunks(source), size, bucket.label(name)):
                _files.write(fd, raw, at)
                at += len(raw)
            _files.resize(fd, at)
            _files.fsync(fd)
        finally:
            os.close(fd)
    finally:
        _files.remove(packed)


def _chunks(path: Path) -> Iterator[bytes]:
    with open_file(path) as file:
        while chunk := file.read(1 << 20):
            yield chunk


# What lies below the URL of a persistent tier, and in which order it comes and goes.
#
# A version exists if and only if its COMMIT.json is there and sound. It is written when every rank's payload and
# manifest are, and removed before any of them. Records are read once: they never change.

JOB_NAME = "JOB.json"
_SCHEMA_VERSION = 1
_PATIENCE_S = 2.0
_log = logging.getLogger(__name__)


class PersistentStore(Store):
    """The versions of a job below a URL, shared by all nodes."""

    shared: ClassVar[bool] = True

    def __init__(
        self, bucket: ObjectBucket, site: Site, *, adopt: bool = False, compress: Compress | None = None
    ) -> None:
        self._bucket, self._site, self._adopt, self._compress = bucket, site, adopt, compress
        self._ledger = CommitIndex(bucket)
        place = bucket.path("")
        self._home = EnclosingRunFolder(None) if place is None else EnclosingRunFolder.of(place, site.run_dir)
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
        commits = [commit for commit in self._ledger.read_all().values() if isinstance(commit, CommitRecord)]
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
        for version, commit in self._ledger.read_all().items():
            if isinstance(commit, CommitRecord):
                shards = commit.shards if rank is None else commit.shards[rank : rank + 1]
                found += [self._copy(version, shard.rank, shard.name) for shard in shards]
        return found

    def begun(self, rank: int | None = None) -> list[Copy]:
        found = []
        for version, commit in self._ledger.read_all().items():
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
        for version, commit in self._ledger.read_all().items():
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
            shards = map_in_threads(lambda rank: self._checked(version, rank, world_size, names), range(world_size))
            record = CommitRecord.of(shards)
            try:
                self._bucket.write(f"{version.name}/{COMMIT_NAME}", record.to_bytes())
            except (TierError, FileNotFoundError):
                if not self._is_committed(record):  # else another node was first, and wrote the same
                    raise
            self._ledger.remember(record)
        try:
            self.remove_leftovers(version)
        except TierError as error:
            _log.warning("%s", error)

    def _is_committed(self, record: CommitRecord) -> bool:
        with suppress(FileAccessError):
            return self._ledger.commit(record.version) == record
        return False

    def remove_leftovers(self, newest: Version) -> None:
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


def _check_reachable(bucket: ObjectBucket) -> None:
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


_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*(?=://)", re.IGNORECASE)
_S3 = ("s3", "s3a")


@dataclass(frozen=True, slots=True)
class Persistent(Tier):
    """Flush versions to any fsspec URL (`s3://bucket/prefix`), or to an absolute path on a shared file system.

    The first save of an attempt and every n-th after it go there; `keep` committed versions stay. `bandwidth` limits
    the uploads of a process ("50 MB/s"), `options` are fsspec's for the URL (they may hold credentials, and are never
    shown). A place that another job owns is read from, and written to only with `adopt=True`, which takes it over.
    What fails and may pass is tried again for `patience_s`.

    >>> Persistent("s3://bucket/r50", every=10, bandwidth="50 MB/s", options={"secret": "x"})
    Persistent(url='s3://bucket/r50', every=10, keep=2, bandwidth=50000000.0)
    """

    kind: ClassVar[str] = "persistent"
    survives_reboot: ClassVar[bool] = True
    slow: ClassVar[bool] = True
    shared: ClassVar[bool] = True
    url: str
    every: int = 1
    keep: int = 2
    bandwidth: float | str | None = None
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    adopt: bool = False
    compress: Mapping[str, Any] | None = field(default=None, hash=False)
    patience_s: float = 60.0
    part_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", _normal(self.url))
        object.__setattr__(self, "bandwidth", parse_bandwidth(self.bandwidth))
        for name in ("every", "keep"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise UsageError(f"Persistent({name}={value!r}): expected 1 or more")
        if type(self.part_bytes) is not int or self.part_bytes < MIN_PART_BYTES:
            raise UsageError(
                f"Persistent(part_bytes={self.part_bytes!r}): expected {MIN_PART_BYTES} or more, S3's least"
            )
        if not isinstance(self.patience_s, int | float) or not 0 <= self.patience_s < float("inf"):
            raise UsageError(f"Persistent(patience_s={self.patience_s!r}): expected seconds, 0 or more")
        object.__setattr__(self, "options", _plain(self.options))
        if self.compress is not None:
            object.__setattr__(self, "compress", Compress.from_json(self.compress).to_json())

    def is_due(self, count: int) -> bool:
        """The first save of an attempt, and every n-th after it."""
        return count % self.every == 0

    def store(self, site: Site) -> Store:
        """What is below the URL."""
        packing = None if self.compress is None else Compress.from_json(self.compress)
        return PersistentStore(self._bucket(), site, adopt=self.adopt, compress=packing)

    def _bucket(self) -> ObjectBucket:
        redact = Redaction(self.options)
        retry = Retry(redact(self.url), self.patience_s, redact)
        assert not isinstance(self.bandwidth, str)
        throttle = shared_throttle(self.url, self.bandwidth)
        access = BucketAccess(self.url, dict(self.options), retry, redact, throttle, self.part_bytes)
        scheme, _, rest = self.url.partition("://")
        if scheme == "file":
            return PosixBucket(access, Path(rest))
        return S3Bucket(access) if scheme in _S3 else FsspecBucket(access)

    def __repr__(self) -> str:
        """Without options, and without a password in the URL."""
        shown = {"url": Redaction(self.options)(self.url), "every": self.every, "keep": self.keep}
        if self.bandwidth is not None:
            shown["bandwidth"] = self.bandwidth
        if self.adopt:
            shown["adopt"] = True
        if self.compress is not None:
            shown["compress"] = dict(self.compress)
        return f"Persistent({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def _normal(url: str | os.PathLike[str]) -> str:
    """One spelling of each URL; a plain absolute path is a file's."""
    text = os.fspath(url)
    if not isinstance(text, str) or not text:
        raise UsageError(f"Persistent(url={url!r}): expected a URL, or an absolute path")
    scheme = _SCHEME.match(text)
    if scheme is None:
        if not os.path.isabs(text):
            raise UsageError(f"Persistent({text!r}): expected a URL such as s3://bucket/prefix, or an absolute path")
        return f"file://{os.path.normpath(text)}"
    name, rest = scheme[0].lower(), text[len(scheme[0]) + 3 :]
    if name in ("file", "local"):
        if not rest.startswith("/"):
            raise UsageError(f"Persistent({text!r}): expected file:// and an absolute path, such as file:///shared/r50")
        return f"file://{os.path.normpath(rest)}"
    shown = Redaction()(text)
    if name in _S3 and not rest.strip("/"):
        raise UsageError(f"Persistent({shown!r}): names no bucket")
    from fsspec.registry import known_implementations, registry

    if name not in known_implementations and name not in registry:
        raise UsageError(
            f"Persistent({shown!r}): unknown protocol {name!r}."
            f"{did_you_mean(name, [*known_implementations, *registry])} "
            "There are file, s3, and all that fsspec knows."
        )
    return f"{name}://{rest.rstrip('/')}"


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that reach the agent as they are."""
    try:
        read = json.loads(json.dumps(options))
        if isinstance(read, dict) and read == options:
            return read
    except (TypeError, ValueError):
        pass
    raise UsageError("Persistent(options=…): expected a dict of JSON values, with strings as keys")
