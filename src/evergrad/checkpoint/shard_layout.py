"""How a shard lies in its file, and so in the arena: a padded JSON header, then tensors without gaps.

A shard is an ordinary safetensors file. Wide elements come first, so that every tensor is aligned, and tensors that
are alike lie side by side, so that many small ones can be copied by one call. The header is padded with spaces to a
multiple of 4 KiB, with room to spare: values that grow a little between two saves do not move the tensors.

Besides the keys of `formats/safetensors.py` its metadata holds `evergrad.shard`, a record of whose shard it is, and
`evergrad.placements`: which of its tensors are not the rank's own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from json.encoder import encode_basestring_ascii as quote
from os import PathLike
from typing import Any, NamedTuple

import xxhash

from evergrad.dtypes import DType
from evergrad.errors import DamagedFile, StateError, said
from evergrad.formats.gc_pause import gc_paused
from evergrad.formats.safetensors import (
    ALIASES_KEY,
    DTYPES,
    DTYPES_KEY,
    ELSEWHERE_KEY,
    MAX_HEADER_BYTES,
    SKELETON_KEY,
    WRITTEN,
)
from evergrad.records import Json
from evergrad.state import Skeleton

ALIGNMENT = 4096
SHARD_KEY = "evergrad.shard"
PLACEMENTS_KEY = "evergrad.placements"
_SPARE_BYTES = 1024  # for a step with more digits, a learning rate with more places, a longer note
_SPARE_SHARE = 32  # or this part of the header, if that is more: long histories grow faster


class TensorSpec(NamedTuple):
    """A tensor that is to be stored."""

    path: str
    dtype: DType
    shape: tuple[int, ...]
    nbytes: int


class ShardEntry(NamedTuple):
    """A stored tensor; `offset` counts from the start of the file."""

    path: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything in a shard is."""

    entries: tuple[ShardEntry, ...]
    """The stored tensors in the order of their bytes, without gaps."""
    aliases: Mapping[str, str]
    """Tied tensors: path → path of the entry that holds the bytes."""
    data_start: int
    """Where the header ends and the tensors begin: a multiple of 4096."""
    size: int
    """Bytes of the whole file."""


class HeaderRenderer:
    """The header's text, rendered once but for what changes between two saves.

    `skeleton` is the skeleton's JSON cut where values belong; `render` puts today's values there, and the shard
    record. Everything else of it, tens of thousands of entries, is only joined.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        aliases: Mapping[str, str],
        skeleton: Sequence[str],
        values: Sequence[bytes],
        shard: Mapping[str, Json],
        placements: Mapping[str, Json] | None = None,
    ) -> None:
        if any(spec.path == "__metadata__" for spec in specs):
            raise StateError("a tensor cannot be called '__metadata__' in a safetensors file")
        texts = {}
        foreign: dict[str, Json] = {s.path: [s.dtype.value, list(s.shape)] for s in specs if s.dtype not in WRITTEN}
        if foreign:
            texts[DTYPES_KEY] = _compact(foreign)
        if aliases:
            texts[ALIASES_KEY] = _compact(dict(aliases))
        if placements:
            texts[PLACEMENTS_KEY] = _compact(dict(placements))
        known = "".join(f"{quote(key)}:{quote(text)}," for key, text in texts.items())
        self._opening = f'{{"__metadata__":{{"format":"pt",{known}"{SHARD_KEY}":"'.encode()
        pieces = [escaped(piece) for piece in skeleton]
        pieces[0] = b'","' + SKELETON_KEY.encode() + b'":"' + pieces[0]
        self._between = pieces
        order = sorted(specs, key=lambda spec: (-spec.dtype.itemsize, spec.dtype.value, spec.shape))
        # Offsets in the header count from its end: they are known before its length is.
        begins = dict(
            zip((spec.path for spec in order), accumulate((s.nbytes for s in order), initial=0), strict=False)
        )
        rows = "".join(_row(spec, begins[spec.path]) for spec in specs)
        self._closing = f'"}}{rows}}}'.encode()
        length = len(self._opening) + len(self._closing) + sum(map(len, pieces)) + sum(map(len, values))
        length += len(escaped(_compact(dict(shard))))
        length += max(_SPARE_BYTES, length // _SPARE_SHARE)
        data_start = -(-(8 + length) // ALIGNMENT) * ALIGNMENT
        if data_start - 8 > MAX_HEADER_BYTES:
            raise StateError(
                f"names and values besides tensors take {length} bytes as JSON, and a safetensors file has room for "
                f"{MAX_HEADER_BYTES}: put long lists of numbers into tensors"
            )
        self._length = (data_start - 8).to_bytes(8, "little")
        entries = tuple(ShardEntry(*spec[:3], data_start + begins[spec.path], spec.nbytes) for spec in order)
        self.layout = Layout(entries, aliases, data_start, data_start + sum(spec.nbytes for spec in order))
        """Where every tensor goes."""

    def render(self, values: Sequence[bytes], shard: Mapping[str, Json]) -> bytes | None:
        """Everything before the tensors, exactly `data_start` bytes; None if today's values no longer fit."""
        parts = [self._length, self._opening, escaped(_compact(dict(shard))), self._between[0]]
        for value, piece in zip(values, self._between[1:], strict=True):
            parts += (value, piece)
        parts.append(self._closing)
        spare = self.layout.data_start - sum(map(len, parts))
        if spare < 0:
            return None
        parts.append(b" " * spare)
        return b"".join(parts)


class ParsedHeader(NamedTuple):
    """What the header of a shard says."""

    layout: Layout
    skeleton: Skeleton
    shard: dict[str, Any]
    placements: dict[str, Any]
    values: str
    """Digest of the skeleton: where two ranks' are equal, so are all their values that are no tensors."""
    absent: dict[str, tuple[DType, tuple[int, ...]]]
    """Tensors that another rank's shard holds: dtype and shape."""
    absent_aliases: dict[str, str]
    """Tied tensors of those: path → path of the one that is there."""


def escaped(text: str) -> bytes:
    """JSON text as it stands inside a JSON string. Piece by piece gives the same as the whole."""
    return quote(text)[1:-1].encode()


def parse_header(buffer: Any, path: str | PathLike[str] = "shard") -> ParsedHeader:
    """Read the header of a mapped shard; `DamagedFile`, naming `path`, if it contradicts itself or the file.

    The buffer may be longer than the shard, as an arena may be.
    """
    view = memoryview(buffer).cast("B")
    length = int.from_bytes(view[:8], "little")
    data_start = 8 + length
    if len(view) < 8 or length > MAX_HEADER_BYTES or data_start > len(view):
        raise DamagedFile(path, "the header is cut short", expected=f"{data_start} bytes", found=len(view))
    try:
        with gc_paused():
            header = json.loads(bytes(view[8:data_start]))
            metadata = header.pop("__metadata__")
            shard = {**json.loads(metadata[SHARD_KEY])}
            skeleton = Skeleton.loads(metadata[SKELETON_KEY])
            values = xxhash.xxh3_128_hexdigest(metadata[SKELETON_KEY].encode())
            entries = _entries(header, {**json.loads(metadata.get(DTYPES_KEY, "{}"))}, data_start)
            aliases = {**json.loads(metadata.get(ALIASES_KEY, "{}"))}
            placements = {**json.loads(metadata.get(PLACEMENTS_KEY, "{}"))}
            gone = {**json.loads(metadata.get(ELSEWHERE_KEY, "{}"))}
            forms = _Forms()
            absent = {path: forms[code, *shape][:2] for path, (code, shape) in gone.get("tensors", {}).items()}
            absent_aliases = {**gone.get("aliases", {})}
            tied = all(path in absent for path in absent_aliases.values())
            tied &= all(alias not in header and name in header for alias, name in aliases.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, StateError) as error:
        raise DamagedFile(path, f"not the header of a shard: {type(error).__name__}: {said(error)}") from None
    end = data_start
    for entry in entries:
        if entry.offset != end:
            raise DamagedFile(path, f"{entry.path!r}: a gap or an overlap", expected=f"byte {end}", found=entry.offset)
        end += entry.nbytes
    if end > len(view):
        raise DamagedFile(path, "tensors lie beyond the end", expected=f"{end} bytes", found=len(view))
    if not tied:
        raise DamagedFile(path, "a tied tensor is stored as well, or tied to none that is")
    return ParsedHeader(
        Layout(tuple(entries), aliases, data_start, end), skeleton, shard, placements, values, absent, absent_aliases
    )


def shard_record(buffer: Any, path: str | PathLike[str] = "shard") -> dict[str, Any]:
    """Return the identity of a mapped shard from its header alone; `DamagedFile` if the header lacks it."""
    length = int.from_bytes(buffer[:8], "little")
    if not 0 < length <= min(MAX_HEADER_BYTES, len(buffer) - 8):
        raise DamagedFile(path, "has no header")
    try:
        return {**json.loads(json.loads(buffer[8 : 8 + length])["__metadata__"][SHARD_KEY])}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedFile(path, f"not the header of a shard: {said(error)}") from None


def cut(buffer: Any, parsed: ParsedHeader, without: Container[str]) -> tuple[bytes, list[ShardEntry]]:
    """The header of a shard that lacks some tensors, and the entries that stay, where they lie in the whole one.

    What it lacks is described in `evergrad.elsewhere`: dtype and shape of each, and what was tied to it.
    """
    view = memoryview(buffer).cast("B")
    header = json.loads(bytes(view[8 : parsed.layout.data_start]))
    metadata = header.pop("__metadata__")
    kept = [entry for entry in parsed.layout.entries if entry.path not in without]
    gone = {
        entry.path: [entry.dtype.value, list(entry.shape)] for entry in parsed.layout.entries if entry.path in without
    }
    aliases = parsed.layout.aliases
    stay = {alias: path for alias, path in aliases.items() if path not in gone}
    elsewhere = {"tensors": gone, "aliases": {alias: path for alias, path in aliases.items() if path in gone}}
    metadata.pop(ALIASES_KEY, None)
    if stay:
        metadata[ALIASES_KEY] = _compact(stay)
    if DTYPES_KEY in metadata:
        foreign = json.loads(metadata[DTYPES_KEY])
        metadata[DTYPES_KEY] = _compact({path: what for path, what in foreign.items() if path not in gone})
    metadata[ELSEWHERE_KEY] = _compact(elsewhere)
    rows, begin = {}, 0
    for entry in kept:
        rows[entry.path] = {**header[entry.path], "data_offsets": [begin, begin + entry.nbytes]}
        begin += entry.nbytes
    text = _compact({"__metadata__": metadata, **rows}).encode()
    size = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT
    return (size - 8).to_bytes(8, "little") + text.ljust(size - 8), kept


def _row(spec: TensorSpec, begin: int) -> str:
    """A tensor's entry in the header, with the comma before it."""
    path, dtype, shape, nbytes = spec
    code = WRITTEN.get(dtype)
    if code is None:
        code, shape = "U8", (nbytes,)
    sizes = ",".join(map(str, shape))
    return f',{quote(path)}:{{"dtype":"{code}","shape":[{sizes}],"data_offsets":[{begin},{begin + nbytes}]}}'


class _Forms(dict[tuple[str, ...], tuple[DType, tuple[int, ...], int]]):
    """Dtype, shape and size of header entries: few different ones, so each is checked once."""

    def __missing__(self, form: tuple[Any, ...]) -> tuple[DType, tuple[int, ...], int]:
        code, *shape = form
        dtype = DTYPES.get(code) or DType(code)
        if not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"impossible shape {shape!s:.80}")
        self[form] = dtype, tuple(shape), math.prod(shape) * dtype.itemsize
        return self[form]


def _entries(rows: Mapping[str, Any], true_types: Mapping[str, Any], data_start: int) -> list[ShardEntry]:
    forms = _Forms()
    entries = []
    for path, row in rows.items():
        begin, end = row["data_offsets"]
        dtype, shape, nbytes = forms[row["dtype"], *row["shape"]]
        if path in true_types:
            code, true_shape = true_types[path]
            dtype, shape, nbytes = forms[code, *true_shape]
        if begin + nbytes != end or type(begin) is not int:
            raise ValueError(f"{path!r}: bytes {begin!s:.40} to {end!s:.40} are not {dtype} {shape!s:.80}")
        entries.append(ShardEntry(path, dtype, shape, data_start + begin, nbytes))
    # Empty tensors lie where the next one begins: before it, the wider first, as they were placed.
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes, -entry.dtype.itemsize))
    return entries


def _compact(data: dict[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False)
