"""What is written last beside a shard: whose it is, and the digest of every tensor in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from evergrad._files import read_small
from evergrad.checkpoint.version import Version
from evergrad.errors import DamagedFile, FileAccessError, reason, said
from evergrad.formats.version_records import has_own_digest, record_bytes

SCHEMA_VERSION = 1
_DIGESTS = b'"digests": {'


@dataclass(frozen=True, slots=True)
class Manifest:
    """The record of one shard. A shard without one does not exist: this is the last thing that is written.

    It carries a digest of itself, so that a bit that flips in a step or a note is noticed like one in a tensor.
    """

    job: str
    version: Version
    rank: int
    world_size: int
    size: int
    """Bytes of the whole shard file."""
    data_start: int
    """Where the header ends and the tensors begin."""
    time: str
    header: str
    """Digest (xxh3_128) of the bytes before `data_start`."""
    digests: Mapping[str, str]
    """Digest of every stored tensor, by path."""
    node: str = ""
    parent: str | None = None
    """The version that this attempt was restored from."""
    generation: int = 0
    """In memory: which use of the arena this describes."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    values: str = ""
    """Digest of all that is no tensor: where two ranks' are equal, so are their values."""
    placements: Mapping[str, Any] = field(default_factory=dict)
    """Which tensors are not this rank's own: see `checkpoint/placement.py`."""
    elsewhere: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Tensors of this rank that another one's shard of the same version holds: path → its rank, and the digest."""
    owed: Sequence[Mapping[str, Any]] = ()
    """Slow tiers that the shard is still to be flushed to, as `Tier.to_json` describes them."""
    encoding: str = ""
    """How the shard is packed where it lies, as the tier that packed it calls that; empty if it is not."""
    unverified: bool = False
    """True if the digests were taken again after a restart, with none from the time of the capture to compare."""

    def to_bytes(self) -> bytes:
        """The record as JSON, its own digest first."""
        body = {
            "schema_version": SCHEMA_VERSION,
            "job": self.job,
            "step": self.version.step,
            "attempt": self.version.attempt,
            "rank": self.rank,
            "world_size": self.world_size,
            "size": self.size,
            "data_start": self.data_start,
            "time": self.time,
            "node": self.node,
            "parent": self.parent,
            "generation": self.generation,
            "meta": dict(self.meta),
            "values": self.values,
            "placements": dict(self.placements),
            "owed": [dict(tier) for tier in self.owed],
            "encoding": self.encoding,
            "elsewhere": {path: list(place) for path, place in self.elsewhere.items()},
            "header": self.header,
            "digests": dict(self.digests),
        }
        if self.unverified:
            body = {"unverified": True} | body
        return record_bytes(body)

    @classmethod
    def read(cls, path: Path, *, digests: bool = True) -> Manifest:
        """Read and check a manifest; `DamagedFile` if it is not as it was written.

        Without `digests` those are left out: for tens of thousands of tensors, they are what takes time.
        """
        try:
            data = read_small(path)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise FileAccessError(path, f"cannot be read: {reason(error)}") from error
        return cls.from_bytes(data, path, digests=digests)

    @classmethod
    def from_bytes(cls, data: bytes, path: str | PathLike[str], *, digests: bool = True) -> Manifest:
        """As `read`, of bytes that came from a path or a URL."""
        if not has_own_digest(data):
            raise DamagedFile(path, "the manifest is not as it was written")
        if not digests:  # the last such text: notes come before, and a tensor's digest is no table
            data = data[: data.rfind(_DIGESTS)] + b'"digests": {}}'
        try:
            body = json.loads(data)
            if body["schema_version"] != SCHEMA_VERSION:
                what = f"a manifest of schema {body['schema_version']!r}"
                raise DamagedFile(path, what, expected=SCHEMA_VERSION)
            version = Version(body.pop("step"), body.pop("attempt"))
            unverified = bool(body.setdefault("unverified", False))
            fields = {name: body[name] for name in cls.__slots__ if name != "version"} | {"unverified": unverified}
            fields["elsewhere"] = {
                path: (int(rank), str(digest)) for path, (rank, digest) in fields["elsewhere"].items()
            }
            return cls(version=version, **fields)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedFile(path, f"the manifest lacks what it should have: {said(error)}") from None
