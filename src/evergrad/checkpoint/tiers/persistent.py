"""The persistent tier: an object store or a shared file system, which outlives every node.

    <url>/JOB.json                                  whose it is
          v0000000120-02/rank-00003.safetensors     the shard; with `Compress`, rank-00003.safetensors.zst
                         rank-00003.json            its manifest, after it
                         COMMIT.json                last: without it the version does not exist

`PersistentStore` says what is where, and in which order things come and go; how bytes get there is the business of
the buckets (`buckets.py` and its variants).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from evergrad.checkpoint.tiers.buckets import Access, Bucket, FsspecBucket
from evergrad.checkpoint.tiers.compress import Compress
from evergrad.checkpoint.tiers.contract import Site, Store, Tier
from evergrad.checkpoint.tiers.persistent_store import PersistentStore
from evergrad.checkpoint.tiers.posix_bucket import PosixBucket
from evergrad.checkpoint.tiers.redaction import Redaction
from evergrad.checkpoint.tiers.retry import Retry
from evergrad.checkpoint.tiers.s3_bucket import S3Bucket
from evergrad.checkpoint.tiers.s3_multipart import MIN_PART_BYTES
from evergrad.checkpoint.tiers.throttle import parse_bandwidth, shared_throttle
from evergrad.errors import UsageError
from evergrad.wording import meant

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

    def _bucket(self) -> Bucket:
        redact = Redaction(self.options)
        retry = Retry(redact(self.url), self.patience_s, redact)
        assert not isinstance(self.bandwidth, str)
        throttle = shared_throttle(self.url, self.bandwidth)
        access = Access(self.url, dict(self.options), retry, redact, throttle, self.part_bytes)
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
            f"Persistent({shown!r}): unknown protocol {name!r}.{meant(name, [*known_implementations, *registry])} "
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
