"""`Compress`: an element of the list of tiers that packs what goes to the slow tier behind it."""

from __future__ import annotations

import json
import os
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from evergrad._digest import digest_threads
from evergrad.checkpoint.tiers.base import Tier
from evergrad.dtypes import DType
from evergrad.errors import DamagedFile, UsageError
from evergrad.formats.safetensors import DTYPES, DTYPES_KEY, MAX_HEADER_BYTES
from evergrad.wording import did_you_mean, install_hint

# zstd-shuffle: the exact packing of shards for slow tiers.
#
# The bytes of a tensor are regrouped by their place in the element (all first bytes, then all second bytes …): signs
# and exponents are alike, and next to each other they shrink. The result is cut into frames that are packed and
# unpacked each for itself, so that memory stays bounded, however large the shard is.
#
#     file:  frame, frame, …
#     frame: 24 bytes (a zstd skippable frame): magic, 16, "EGS1", item size, bytes unpacked, bytes packed
#            a zstd frame of that many bytes, with its own checksum
#
# It is an ordinary `.zst` file: `zstd -t` tests it, and `zstd -d` gives the regrouped bytes.

ENCODING = "zstd-shuffle"
FRAME_BYTES = 8 << 20
_HEAD = struct.Struct("<II4sIII")
_SKIPPABLE, _TAG = 0x184D2A5E, b"EGS1"
_ITEM_SIZES = (1, 2, 4, 8, 16)
_MOST_PACKED = FRAME_BYTES + (FRAME_BYTES >> 8) + 1024


def require_zstandard() -> Any:
    """The library; `UsageError` that says how to get it, if it is missing."""
    try:
        import zstandard
    except ImportError:
        raise UsageError(f'Compress("zstd") needs the zstandard library: {install_hint("zstd")}') from None
    return zstandard


def pack(payload: Sequence[memoryview], level: int) -> Iterator[bytes]:
    """The packed bytes of a shard, frame by frame; the same bytes whenever the same shard is packed."""
    zstandard = require_zstandard()

    def packed(raw: bytes, item_size: int) -> bytes:
        # One compressor a frame: they are not shared between threads, and a frame is large.
        made: bytes = zstandard.ZstdCompressor(level=level, write_checksum=True).compress(_shuffled(raw, item_size))
        return _HEAD.pack(_SKIPPABLE, 16, _TAG, item_size, len(raw), len(made)) + made

    count = digest_threads()
    with ThreadPoolExecutor(count) as pool:
        waiting: deque[Future[bytes]] = deque()
        for raw, item_size in _cut(payload):
            waiting.append(pool.submit(packed, raw, item_size))
            if len(waiting) > count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def unpack(chunks: Iterable[bytes], size: int, where: str | os.PathLike[str]) -> Iterator[bytes]:
    """The bytes of a shard of `size`, frame by frame; `DamagedFile` for anything that `pack` did not write.

    Nothing in the file is believed before it is checked: no frame can ask for more than `FRAME_BYTES`.
    """
    zstandard = require_zstandard()
    reader = _Reader(chunks, where)
    given = 0
    while head := reader.take(_HEAD.size, may_end=True):
        magic, length, tag, item_size, raw_size, packed_size = _HEAD.unpack(head)
        at = f"frame at byte {reader.taken - _HEAD.size}"
        if (magic, length, tag) != (_SKIPPABLE, 16, _TAG) or item_size not in _ITEM_SIZES:
            raise DamagedFile(where, f"{at}: not a frame")
        if not 0 < raw_size <= FRAME_BYTES or not 0 < packed_size <= _MOST_PACKED or raw_size % item_size:
            raise DamagedFile(where, f"{at}: impossible sizes", found=f"{packed_size} and {raw_size} bytes")
        given += raw_size
        if given > size:
            raise DamagedFile(where, f"{at}: more than the shard holds", expected=f"{size} bytes", found=given)
        packed = reader.take(packed_size)
        try:
            if zstandard.get_frame_parameters(packed).content_size != raw_size:
                raise DamagedFile(where, f"{at}: unpacks to another size", expected=f"{raw_size} bytes")
            raw = zstandard.ZstdDecompressor(max_window_size=2 * FRAME_BYTES).decompress(
                packed, max_output_size=raw_size, allow_extra_data=False
            )
        except (zstandard.ZstdError, ValueError) as error:
            raise DamagedFile(where, f"{at}: cannot be unpacked: {error}") from None
        if len(raw) != raw_size:
            raise DamagedFile(where, f"{at}: wrong length", expected=f"{raw_size} bytes", found=len(raw))
        yield _unshuffled(raw, item_size)
    if given != size:
        raise DamagedFile(where, "cut short", expected=f"{size} bytes unpacked", found=given)


class _Reader:
    """Exactly so many bytes at a time, from chunks of any size."""

    def __init__(self, chunks: Iterable[bytes], where: str | os.PathLike[str]) -> None:
        self._chunks, self._where = iter(chunks), where
        self._held = bytearray()
        self.taken = 0

    def take(self, count: int, *, may_end: bool = False) -> bytes:
        while len(self._held) < count:
            chunk = next(self._chunks, None)
            if chunk is None:
                if may_end and not self._held:
                    return b""
                raise DamagedFile(self._where, "cut short", expected=f"{count} bytes more", found=len(self._held))
            self._held += chunk
        found = bytes(memoryview(self._held)[:count])
        del self._held[:count]
        self.taken += count
        return found


def _shuffled(raw: bytes, item_size: int) -> bytes:
    return raw if item_size == 1 else np.frombuffer(raw, np.uint8).reshape(-1, item_size).T.tobytes()


def _unshuffled(raw: bytes, item_size: int) -> bytes:
    return raw if item_size == 1 else np.frombuffer(raw, np.uint8).reshape(item_size, -1).T.tobytes()


def _cut(payload: Sequence[memoryview]) -> Iterator[tuple[bytes, int]]:
    """The payload in frames' worth of bytes, each with the item size of what is in it."""
    views = [view.cast("B") for view in payload]
    for begin, end, item_size in _runs(views):
        for start in range(begin, end, FRAME_BYTES):
            stop = min(start + FRAME_BYTES, end)
            yield _slice(views, start, stop), item_size if (stop - start) % item_size == 0 else 1


def _runs(views: Sequence[memoryview]) -> list[tuple[int, int, int]]:
    """Stretches of one item size. What the header does not tell goes byte by byte: that is larger, and as exact."""
    total = sum(map(len, views))
    data_start = 8 + int.from_bytes(_slice(views, 0, 8), "little")
    if data_start > min(total, 8 + MAX_HEADER_BYTES):
        return [(0, total, 1)]
    try:
        header = json.loads(_slice(views, 8, data_start))
        true_types = json.loads(header.pop("__metadata__", {}).get(DTYPES_KEY, "{}"))
        spans = sorted(
            (row["data_offsets"][0], row["data_offsets"][1], _item_size(row, true_types.get(path)))
            for path, row in header.items()
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return [(0, total, 1)]
    runs = [(0, data_start, 1)]
    for begin, end, item_size in spans:
        start, reached, before = runs[-1]
        if begin == end:
            continue
        if data_start + begin != reached or data_start + end > total:
            break
        if item_size == before:
            runs[-1] = (start, data_start + end, before)
        else:
            runs.append((reached, data_start + end, item_size))
    if runs[-1][1] < total:
        runs.append((runs[-1][1], total, 1))
    return runs


def _item_size(row: dict[str, Any], true_type: Any) -> int:
    return DType(true_type[0]).itemsize if true_type else DTYPES[row["dtype"]].itemsize


def _slice(views: Sequence[memoryview], begin: int, end: int) -> bytes:
    """Bytes of the payload, wherever the views meet."""
    found = []
    at = 0
    for view in views:
        if begin < at + len(view) and at < end:
            found.append(view[max(0, begin - at) : end - at])
        at += len(view)
    return b"".join(found)


_LEVELS = range(1, 20)


@dataclass(frozen=True, slots=True)
class Compress:
    """Pack shards, exactly, before they go to the slow tier that follows.

    >>> Compress("zstd", level=3).to_json()
    {'codec': 'zstd', 'level': 3}
    """

    codec: str = "zstd"
    level: int = 1

    def __post_init__(self) -> None:
        if self.codec != "zstd":
            hint = did_you_mean(str(self.codec), ["zstd"])
            raise UsageError(f"Compress({self.codec!r}): unknown codec.{hint} There is 'zstd'.")
        if type(self.level) is not int or self.level not in _LEVELS:
            raise UsageError(f"Compress(level={self.level!r}): expected 1 to {_LEVELS[-1]}")
        require_zstandard()

    def to_json(self) -> dict[str, Any]:
        """The settings, as the tier behind it keeps them."""
        return {"codec": self.codec, "level": self.level}

    @classmethod
    def from_json(cls, settings: Mapping[str, Any]) -> Compress:
        """The settings that `to_json` gave."""
        try:
            return cls(**settings)
        except TypeError as error:
            raise UsageError(f"compress={dict(settings)!r}: {error}") from None


def join_compression(tiers: Sequence[Tier | Compress]) -> list[Tier]:
    """The tiers alone, each `Compress` folded into the slow tier that follows it."""
    joined: list[Tier] = []
    waiting: Compress | None = None
    for each in tiers:
        if isinstance(each, Compress):
            if waiting is not None:
                raise _misplaced("another Compress")
            waiting = each
            continue
        if waiting is not None:
            if not getattr(each, "slow", False) or not _can_pack(each):
                raise _misplaced(type(each).__name__)
            each = replace(each, compress=waiting.to_json())  # type: ignore[type-var]
            waiting = None
        joined.append(each)
    if waiting is not None:
        raise _misplaced("nothing")
    return joined


def _can_pack(tier: object) -> bool:
    return is_dataclass(tier) and any(field.name == "compress" for field in fields(tier))


def _misplaced(found: str) -> UsageError:
    return UsageError(
        "tiers: Compress goes before a slow tier, such as Persistent: zstd is slower than a local disk "
        f"(found {found} behind it)"
    )
