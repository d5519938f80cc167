"""Bringing a shard from a shared tier into a folder of the node, where it can be mapped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from evergrad.checkpoint import storage
from evergrad.checkpoint.locks import locked
from evergrad.checkpoint.manifest import Manifest
from evergrad.checkpoint.tiers.buckets import Bucket
from evergrad.checkpoint.tiers.commit import StoredShard
from evergrad.checkpoint.tiers.frames import unpack
from evergrad.errors import DamagedFile
from evergrad.formats.data_file import open_file, read_small
from evergrad.formats.version_records import shard_name

RANGE_BYTES = 16 << 20
_PARALLEL = 4


def fetch_shard(bucket: Bucket, name: str, shard: StoredShard, manifest: bytes, folder: Path) -> tuple[Path, Path]:
    """Download a payload, unpack it if need be, and put its manifest beside it, last; gives both files.

    What is there already is used again. Of several processes that want the same shard, one downloads it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = shard_name(shard.rank)
    target, record = folder / f"{stem}.safetensors", folder / f"{stem}.json"
    with locked(folder / f".{stem}.lock"):
        if not _is_fetched(target, record, shard):
            storage.remove(record)
            size = Manifest.from_bytes(manifest, bucket.label(name), digests=False).size
            partial = folder / f".{stem}.partial"
            try:
                if shard.is_packed:
                    _unpack(bucket, name, shard, size, folder / f".{stem}.packed", partial)
                else:
                    _download(bucket, name, shard.stored, partial)
                storage.rename(partial, target)
                storage.publish(record, manifest)
            finally:
                storage.remove(partial)
    return target, record


def _is_fetched(target: Path, record: Path, shard: StoredShard) -> bool:
    try:
        there = xxhash.xxh3_128_hexdigest(read_small(record))
        return there == shard.manifest and target.stat().st_size == shard.size
    except OSError:
        return False


def _download(bucket: Bucket, name: str, size: int, path: Path) -> None:
    """Several ranges at a time, each tried again for itself."""
    found = bucket.size(name)
    if found != size:
        raise DamagedFile(bucket.label(name), "wrong length", expected=f"{size} bytes", found=found)
    fd = storage.create(path)
    try:
        storage.resize(fd, size)

        def bring(begin: int) -> None:
            end = min(begin + RANGE_BYTES, size)
            data = bucket.read(name, begin, end)
            if len(data) != end - begin:
                raise DamagedFile(bucket.label(name), "cut short", expected=f"{end - begin} bytes", found=len(data))
            storage.write(fd, data, begin)

        with ThreadPoolExecutor(_PARALLEL) as pool:
            for _ in pool.map(bring, range(0, size, RANGE_BYTES)):
                pass
        storage.fsync(fd)
    finally:
        os.close(fd)


def _unpack(bucket: Bucket, name: str, shard: StoredShard, size: int, packed: Path, path: Path) -> None:
    source = bucket.path(name)
    try:
        if source is None:
            _download(bucket, name, shard.stored, packed)
            source = packed
        fd = storage.create(path)
        try:
            at = 0
            for raw in unpack(_chunks(source), size, bucket.label(name)):
                storage.write(fd, raw, at)
                at += len(raw)
            storage.resize(fd, at)
            storage.fsync(fd)
        finally:
            os.close(fd)
    finally:
        storage.remove(packed)


def _chunks(path: Path) -> Iterator[bytes]:
    with open_file(path) as file:
        while chunk := file.read(1 << 20):
            yield chunk
