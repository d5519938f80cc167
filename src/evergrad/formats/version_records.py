"""The JSON beside the shards of a version, read and rewritten by itself: manifests and `COMMIT.json`.

Each begins with a digest of the rest of it (`{"check": "<xxh3_128>", …`), and holds digests of other bytes: a manifest
those of its shard's header and tensors, `COMMIT.json` those of the manifests. A digest has a fixed length, so that a
record is altered by putting other digits in place of some; everything else stays, byte for byte.
"""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import xxhash

from evergrad._files import file_errors, open_file, replacing
from evergrad.errors import DamagedFile, FormatError, LimitExceeded, said
from evergrad.formats.byte_source import current_dry_run

COMMIT = "COMMIT.json"
MANIFEST = re.compile(r"(rank-(\d{5,9}))\.json")
PREFIX = b'{"check": "'
MAX_RECORD_BYTES = 1 << 28
T = TypeVar("T")

_DIGITS = 32
_BODY = len(PREFIX) + _DIGITS + len(b'", ')
_DECODER = json.JSONDecoder()
_SPACE = " \t\r\n"
_HEX = set("0123456789abcdef")


class HasRecords(ABC):
    """A checkpoint with records that follow when its bytes change."""

    @abstractmethod
    def records(self) -> list[Path]:
        """Every record that an alteration may change; each is replaced in one step, never written into."""

    @abstractmethod
    def keep_records_unchanged(self) -> None:
        """Let the records be from here on: for whoever only asks where bytes lie, and need not wait for digests."""


class DigestPlace(NamedTuple):
    """A digest in a record: what it says, and the byte at which it stands."""

    digest: str
    offset: int


class ListedShard(NamedTuple):
    """A shard as `COMMIT.json` lists it."""

    rank: int
    name: str
    manifest: DigestPlace


class RecordFile:
    """One record as it is or, in a rehearsal, as it would be by now; changed in memory until `save`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with file_errors(path), open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_RECORD_BYTES:
                raise LimitExceeded(path, "record", expected=f"at most {MAX_RECORD_BYTES} bytes", found=size)
            data = bytearray(file.read())
        noted = current_dry_run()
        if noted is not None and path in noted.files:
            for offset, new in noted.files[path].writes.items():
                data[offset : offset + len(new)] = new
        self.data = bytes(data)
        self._puts: dict[int, bytes] = {}

    @cached_property
    def holds(self) -> bool:
        """Whether the digest that it begins with is that of the rest."""
        return has_own_digest(self.data)

    @cached_property
    def body(self) -> Mapping[str, Any]:
        """What it says; `DamagedFile` if that is no JSON object."""
        try:
            found = json.loads(self._text)
        except (ValueError, RecursionError) as error:
            raise DamagedFile(self.path, f"is not JSON: {said(error)}") from None
        if not isinstance(found, dict):
            raise DamagedFile(self.path, "is no JSON object", found=type(found).__name__)
        return found

    @property
    def digest(self) -> str:
        """Of the whole file, as it was read."""
        return _hex(self.data).decode()

    def table(self, member: str) -> Mapping[str, Any]:
        """A member that is an object; an empty one if it is none, or not there."""
        found = self.body.get(member)
        return found if isinstance(found, dict) else {}

    def number(self, member: str) -> int:
        """A member that is a whole number, from 0; −1 if it is none."""
        found = self.body.get(member)
        return found if type(found) is int and found >= 0 else -1

    def digests(self) -> dict[str, DigestPlace]:
        """Of a manifest: the digest of every stored tensor."""
        return self._named("digests")

    def elsewhere(self) -> dict[str, tuple[int, DigestPlace]]:
        """Of a manifest: tensors that another rank's shard holds, with that rank."""
        if not self.table("elsewhere"):  # the common case, and no need to look for places
            return {}
        ranks = {path: place[0] for path, place in self.table("elsewhere").items() if isinstance(place, list) and place}
        return {path: (ranks[path], place) for path, place in self._named("elsewhere").items() if path in ranks}

    def listed(self) -> list[ListedShard]:
        """Of `COMMIT.json`: the shards that the version consists of."""
        found = []
        for at in _items(self._text, self._at("shards")):
            members = dict(_members(self._text, at))
            entry = _DECODER.raw_decode(self._text, at)[0]
            place = self._digest_at(members["manifest"]) if "manifest" in members else None
            if place is None or type(entry.get("rank")) is not int:
                raise DamagedFile(self.path, "lists a shard without rank and manifest", found=f"{entry!s:.80}")
            found.append(ListedShard(entry["rank"], str(entry.get("name", "")), place))
        return found

    def put(self, place: DigestPlace, digest: str) -> None:
        """Put another digest there; nothing is written yet."""
        if digest != place.digest:
            self._puts[place.offset] = digest.encode()

    @property
    def with_new_digests(self) -> RecordFile | None:
        """The record with what was put, and its own digest if that held; None if nothing was."""
        if not self._puts:
            return None
        if self.holds:
            self._puts[len(PREFIX)] = _hex(self._patched()[_BODY:])
        new = object.__new__(RecordFile)
        new.path, new.data, new._puts = self.path, self._patched(), self._puts
        return new

    def save(self) -> None:
        """Replace the file in one step; in a rehearsal, note what would change."""
        noted = current_dry_run()
        if noted is not None:
            noted.edits_of(self.path).writes.update(self._puts)
            return
        with replacing(self.path) as temporary:
            temporary.write_bytes(self.data)

    @cached_property
    def _text(self) -> str:
        # One character a byte, so that places count bytes; what is not ASCII comes as escapes.
        return self.data.decode("latin-1")

    def _patched(self) -> bytes:
        data = bytearray(self.data)
        for offset, new in self._puts.items():
            data[offset : offset + len(new)] = new
        return bytes(data)

    def _named(self, member: str) -> dict[str, DigestPlace]:
        """The digests in a table, by name."""
        found = {}
        for name, at in _members(self._text, self._at(member)):
            place = self._digest_at(at)
            if place is None:
                raise DamagedFile(self.path, f"{name!r:.80} has no digest")
            found[name] = place
        return found

    def _at(self, member: str) -> int:
        """Where a member's value begins, or that of nothing."""
        assert self.body is not None, "only what was read as JSON is walked"
        return dict(_members(self._text, 0)).get(member, len(self._text))

    def _digest_at(self, at: int) -> DigestPlace | None:
        """The last text of the value that begins there, if it is a digest."""
        _, end = _DECODER.raw_decode(self._text, at)
        offset = self._text.rfind('"', at, self._text.rfind('"', at, end)) + 1
        digest = self._text[offset : offset + _DIGITS]
        is_one = offset > at and set(digest) <= _HEX and self._text[offset + _DIGITS : offset + _DIGITS + 1] == '"'
        return DigestPlace(digest, offset) if is_one else None


def record_bytes(body: Mapping[str, Any]) -> bytes:
    """A record as it is written: JSON, with a digest of all that follows it first."""
    text = json.dumps(body).encode()[1:] + b"\n"
    return PREFIX + _hex(text) + b'", ' + text


def has_own_digest(data: bytes) -> bool:
    """Whether a record begins with the digest of the rest of it."""
    claimed = data[len(PREFIX) : len(PREFIX) + _DIGITS]
    return data.startswith(PREFIX) and claimed == _hex(data[_BODY:])


def read_record(data: bytes) -> dict[str, Any]:
    """The JSON object of a record; `ValueError` if it is none, or if its own digest does not hold.

    Records of earlier versions that carry no digest are read as they are.

    >>> read_record(record_bytes({"id": "r50"}))["id"], read_record(b'{"id": "r50"}')["id"]
    ('r50', 'r50')
    """
    if data.startswith(PREFIX) and not has_own_digest(data):
        raise ValueError("it is not as it was written")
    try:
        found = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"expected an object, found {type(found).__name__}")
    return found


def shard_name(rank: int) -> str:
    """What a rank's files are called, before the ending.

    >>> shard_name(3), shard_rank("rank-00003"), shard_rank("COMMIT")
    ('rank-00003', 3, None)
    """
    return f"rank-{rank:05d}"


def shard_rank(stem: str) -> int | None:
    """The rank whose files are called so; None if no rank's are."""
    number = stem.removeprefix("rank-")
    return int(number) if number != stem and number.isascii() and number.isdigit() else None


def read_sound_record(path: Path) -> RecordFile | None:
    """The record at a path if its digest holds and it is JSON; None if not, or if there is none."""
    try:
        record = RecordFile(path)
        return record if record.holds and record.body is not None else None
    except FormatError:
        return None


def parsed_or_none(read: Callable[[], T]) -> T | None:
    """What a record lists; None if it makes no sense."""
    try:
        return read()
    except FormatError:
        return None


def is_record(path: Path) -> bool:
    """Whether a file begins as a record does."""
    try:
        with open_file(path) as file:
            return file.read(len(PREFIX)) == PREFIX
    except OSError:
        return False


def _hex(data: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(data).encode()


def _members(text: str, at: int) -> Iterator[tuple[str, int]]:
    """The members of the object that begins there, each with the place of its value; none of anything else."""
    if text[at : at + 1] != "{":
        return
    at = _skip(text, at + 1)
    while text[at] != "}":
        name, at = _DECODER.raw_decode(text, at)
        at = _skip(text, _skip(text, at) + 1)  # behind the colon
        yield name, at
        at = _next(text, at)


def _items(text: str, at: int) -> Iterator[int]:
    """The places of the items of the list that begins there; none of anything else."""
    if text[at : at + 1] != "[":
        return
    at = _skip(text, at + 1)
    while text[at] != "]":
        yield at
        at = _next(text, at)


def _next(text: str, at: int) -> int:
    """Behind the value that begins there, and the comma after it."""
    at = _skip(text, _DECODER.raw_decode(text, at)[1])
    return _skip(text, at + 1) if text[at] == "," else at


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] in _SPACE and at < len(text):
        at += 1
    return at
