"""Digests (xxh3, 128 bits) of bytes, files, spans of a shard and tensors, at memory speed.

Manifests, golden runs and journals hold them: the bytes that each is taken over never change. The library lets go of
the interpreter while it hashes, so plain threads are enough. Nothing here imports torch. Digests of tensors on a device
are in `recovery/guard/digests.py`, the sha256 of injection logs in `injection/patches.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import xxhash

from evergrad.errors import FileAccessError, reason

if TYPE_CHECKING:
    import torch

Span = tuple[int, int]
"""Where something begins and ends in a shard."""

_T = TypeVar("_T")
_ENOUGH_FOR_THREADS = 4 << 20
_BLOCK = 4 << 20


def digest_bytes(data: bytes | memoryview) -> bytes:
    """The digest of some bytes, as 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def digest_chunks(chunks: Iterable[bytes | memoryview]) -> str:
    """The digest of chunks one after the other, in hexadecimal.

    >>> digest_chunks([b"ab", b"c"]) == digest_chunks([b"abc"]) == digest_bytes(b"abc").hex()
    True
    """
    found = xxhash.xxh3_128()
    for chunk in chunks:
        found.update(chunk)
    return found.hexdigest()


def digest_file(path: Path) -> str:
    """The digest of a file's bytes."""
    try:
        with path.open("rb") as file:
            return digest_chunks(iter(lambda: file.read(_BLOCK), b""))
    except OSError as error:
        raise FileAccessError(path, f"cannot be read: {reason(error)}") from error


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes in logical order, flat: the tensor's own memory if that is in order, else a copy."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def digest_labelled(tensors: Iterable[tuple[bytes, torch.Tensor]]) -> str:
    """The digest of tensors on any device, each with its label before its bytes, in hexadecimal."""

    def chunks() -> Iterator[bytes | memoryview]:
        for label, tensor in tensors:
            yield label
            if tensor.numel():
                yield bytes_of(tensor.cpu()).numpy().data

    return digest_chunks(chunks())


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
