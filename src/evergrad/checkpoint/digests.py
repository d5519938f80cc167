"""The digest of every tensor of a shard (xxh3, 128 bits), taken and checked on all cores at memory speed.

The library lets go of the interpreter while it hashes, so plain threads are enough.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import xxhash

Span = tuple[int, int]
"""Where something begins and ends in a shard."""

_T = TypeVar("_T")
_ENOUGH_FOR_THREADS = 4 << 20


def digest_threads() -> int:
    """How many threads hash: one a core, up to four, beyond which memory is the limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(4, cores))


def digest_spans(shard: memoryview, spans: Sequence[Span]) -> list[str]:
    """The digest of each span, in order."""
    parts = balanced(spans, digest_threads(), lambda span: span[1] - span[0])
    if len(parts) == 1:
        return _digest(shard, spans)
    with ThreadPoolExecutor(len(parts)) as pool:
        return [digest for part in pool.map(lambda part: _digest(shard, part), parts) for digest in part]


def _digest(shard: memoryview, spans: Sequence[Span]) -> list[str]:
    hexdigest = xxhash.xxh3_128_hexdigest
    return [hexdigest(shard[begin:end]) for begin, end in spans]


def balanced(items: Sequence[_T], count: int, weight: Callable[[_T], int]) -> list[Sequence[_T]]:
    """The items in order, cut into at most `count` runs of about the same weight; one run if there is little."""
    total = sum(map(weight, items))
    if count == 1 or total < _ENOUGH_FOR_THREADS:
        return [items]
    parts: list[Sequence[_T]] = []
    begin = reached = 0
    for index, item in enumerate(items):
        reached += weight(item)
        if reached * count >= total * (len(parts) + 1):
            parts.append(items[begin : index + 1])
            begin = index + 1
    if begin < len(items):
        parts.append(items[begin:])
    return parts
