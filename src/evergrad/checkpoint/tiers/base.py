"""The contract of a tier.

A `Tier` is settings: frozen, made by the user, sent to the agent as JSON. A `Store` is that tier for one job on one
node. The invariants of every store:

- `put` returns when the shard is complete, and durable if the tier survives a reboot. Killed at any point before, it
  leaves what was complete complete, and nothing that `find` would give.
- `find` gives only what is complete: the manifest is there. Whether the bytes are still what they were is for the
  reader to check, by the digests.
- `drop` removes the manifest before anything else.
- Several ranks may be put at the same time, each by one thread; one rank never twice at once.

A tier that all nodes share has one thing more to say: that a version is whole. Its `find` gives only versions that
were committed; `begun` gives the shards of the others, and `commit` makes a version visible once all are there.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from evergrad.checkpoint.arena import ArenaFiles, ArenaTicket
from evergrad.checkpoint.shard_manifest import Manifest
from evergrad.checkpoint.version import Version
from evergrad.errors import TierError, UsageError
from evergrad.wording import did_you_mean

_KINDS: dict[str, type[Tier]] = {}


@dataclass(frozen=True, slots=True)
class Site:
    """Which job, on which node, with which folders."""

    job: str
    node: str
    arenas: Path
    run_dir: Path


@dataclass(slots=True)
class Work:
    """A captured shard on its way through the tiers."""

    ticket: ArenaTicket
    files: ArenaFiles
    shard: memoryview
    """The arena, mapped: header and tensors."""
    site: Site
    manifest: Manifest
    """With digests, from the first module of the chain on."""
    pieces: Sequence[memoryview] | None = None
    """What a shared tier is to store instead of the whole shard, in this order; the manifest then describes that."""

    def payload(self) -> Sequence[memoryview]:
        """The bytes to store, in order."""
        return (self.shard,) if self.pieces is None else self.pieces

    @property
    def version(self) -> Version:
        """The version that the shard belongs to."""
        return self.ticket.version

    @property
    def rank(self) -> int:
        """Whose shard it is."""
        return self.ticket.rank


@dataclass(frozen=True, slots=True)
class Copy:
    """A complete shard in a tier."""

    tier: str
    version: Version
    rank: int
    shard: Path
    manifest: Path
    use: int | None = None
    """In memory: the use of the arena that it is good for."""
    url: str = ""
    """Where it lies, if not in a file system: `Store.fetch` then brings it to `shard` and `manifest`."""


class EnclosingRunFolder(NamedTuple):
    """The run folder that a tier's place lies within: it is not made again where it was moved away from."""

    run_dir: Path | None
    """None if the place lies elsewhere."""

    @classmethod
    def of(cls, place: Path, run_dir: Path) -> EnclosingRunFolder:
        """The home of a place; nothing is made or changed."""
        within = Path(os.path.realpath(place)).is_relative_to(os.path.realpath(run_dir))
        return cls(run_dir if within and (run_dir / "job.json").exists() else None)

    def check(self, kind: str) -> None:
        """`TierError` if the run folder is not there any more."""
        if self.run_dir is not None and not (self.run_dir / "job.json").exists():
            raise TierError(f"{self.run_dir}: tier {kind}: the run folder was moved or removed, and is not made again.")


class Gone(TierError):
    """Nothing of a version is left in a shared tier, although somebody has noted all of it there."""


class Torn(NamedTuple):
    """Something that looks like a shard and cannot be used."""

    what: str
    was_complete: bool = False
    """Whether it is known to have been complete once: it is then a loss, and not a save that never ended."""


class Store(ABC):
    """A tier of one job on one node."""

    shared: ClassVar[bool] = False
    """Whether all nodes see the same: a rank's shard may then leave to another's what both have."""

    @abstractmethod
    def check(self) -> None:
        """Raise `TierError` if nothing could be put here now: missing, read-only."""

    @abstractmethod
    def put(self, work: Work) -> None:
        """Store a shard, with its manifest last; `TierError` if that cannot be done."""

    @abstractmethod
    def find(self, rank: int | None = None) -> list[Copy]:
        """Every complete shard that can be restored from, of all ranks that are seen here or of one."""

    def begun(self, rank: int | None = None) -> list[Copy]:
        """Complete shards of versions that are not visible yet, because they wait for `commit`."""
        return []

    def commit(self, version: Version, world_size: int) -> None:  # noqa: B027 - most tiers have nothing to say
        """All shards of a version are there: make it visible. Whoever sees that may say so, any number of times."""

    def read_manifest(self, copy: Copy, *, digests: bool = True) -> Manifest:
        """The record of a copy; as `Manifest.read`."""
        return Manifest.read(copy.manifest, digests=digests)

    def fetch(self, copy: Copy, folder: Path) -> Copy:
        """The copy as files that can be mapped: itself, or brought into the folder, unpacked. Digests are unchecked."""
        return copy

    @abstractmethod
    def torn(self, rank: int) -> dict[Version, Torn]:
        """What looks like a shard of a rank and is not complete, with what is wrong: for messages only."""

    @abstractmethod
    def drop(self, copy: Copy) -> None:
        """Remove a shard; it may be gone already."""


class Tier(ABC):
    """The settings of a tier. A subclass is a frozen dataclass whose fields are JSON."""

    kind: ClassVar[str]
    """How messages, records and `wait(tier=…)` call it."""
    survives_reboot: ClassVar[bool]
    slow: ClassVar[bool] = False
    """Whether it is flushed to in the background of the background: from a nearer tier, while saves go on."""
    shared: ClassVar[bool] = False
    """Whether all nodes see the same: a version is there once it was committed."""
    keep: int
    """Complete versions that stay."""

    def is_due(self, count: int) -> bool:
        """Whether the n-th save of an attempt, from 0, goes to this tier."""
        return True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _KINDS[cls.kind] = cls

    @abstractmethod
    def store(self, site: Site) -> Store:
        """The tier of a job on a node."""

    def to_json(self) -> dict[str, Any]:
        """The settings, with the kind."""
        return {"kind": self.kind, **asdict(self)}  # type: ignore[call-overload]


def without_secrets(spec: dict[str, Any]) -> dict[str, Any]:
    """Settings as others may read them: options of a storage service may hold keys, and a URL a password."""
    shown = {name: value for name, value in spec.items() if name != "options"}
    if isinstance(shown.get("url"), str):
        shown["url"] = without_password(shown["url"])
    return shown


def without_password(url: str) -> str:
    """A URL without the user and the password in it.

    >>> without_password("ftp://me:secret@host/x"), without_password("s3://bucket/a@b")
    ('ftp://host/x', 's3://bucket/a@b')
    """
    return re.sub(r"^([a-z][a-z0-9+.-]*://)[^/@]*@", r"\1", url, flags=re.IGNORECASE)


def tier_kinds() -> list[str]:
    """The kinds that there are."""
    return sorted(_KINDS)


def read_tiers(specs: Sequence[dict[str, Any]]) -> list[Tier]:
    """The tiers that `to_json` described; a kind is looked up, never imported."""
    tiers = []
    for spec in specs:
        settings = dict(spec)
        kind = settings.pop("kind", None)
        if kind not in _KINDS:
            raise UsageError(
                f"unknown tier {kind!r}.{did_you_mean(str(kind), _KINDS)} There are {', '.join(tier_kinds())}."
            )
        try:
            tiers.append(_KINDS[kind](**settings))
        except TypeError as error:
            raise UsageError(f"tier {kind}: {error}") from None
    return tiers


# Keeps credentials out of messages: of a tier's options, of URLs, of the environment.

_SECRET = re.compile(r"key|secret|token|pass|pwd|user|cred|account|auth|sas|connection|signature|cookie", re.IGNORECASE)
_USERINFO = re.compile(r"(?<=://)[^/@\s]+@")
_QUERY = re.compile(r"(?<=[?&])([^=&\s]*(?:key|secret|token|pass|sig|auth|cred)[^=&\s]*)=[^&\s'\"]+", re.IGNORECASE)
_FROM_ENVIRONMENT = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_SHORTEST = 4


class Redaction:
    """What must not be shown, and a way to show the rest.

    >>> hide = Redaction({"secret": "hunter22", "client_kwargs": {"endpoint_url": "http://me:pw@store:9000"}})
    >>> hide("signing with hunter22 failed at http://me:pw@store:9000/b?X-Amz-Signature=0af")
    'signing with *** failed at http://***@store:9000/b?X-Amz-Signature=***'
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        found = set(_secrets(options or {}, secret=False))
        self._secrets = sorted(found, key=lambda text: (-len(text), text))  # the longest first: one may hold another

    def __call__(self, text: object) -> str:
        """The text without what must not be shown."""
        shown = str(text)
        environment = [os.environ.get(name, "") for name in _FROM_ENVIRONMENT]
        for secret in (*self._secrets, *environment):
            if len(secret) >= _SHORTEST:
                shown = shown.replace(secret, "***")
        return _QUERY.sub(r"\1=***", _USERINFO.sub("***@", shown))


def _secrets(value: Any, *, secret: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            # `client_kwargs` holds secrets under names of its own; a name that says so makes all below it one.
            yield from _secrets(inner, secret=secret or bool(_SECRET.search(str(key))))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _secrets(inner, secret=secret)
    elif secret and isinstance(value, str):
        yield value
