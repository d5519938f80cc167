"""Sharing out a flush: what all ranks have alike is uploaded once, in balanced parts.

Every rank holds a whole copy of what is replicated. Each tensor of it has one rank that uploads it, which all work out
alike from names and sizes. That rank tells the digests of its part in the run folder, `shares/<version>/`; another one
leaves a tensor out only if the digest it is told is that of its own. So a tensor that differs, on a rank that had a bit
flipped or was never replicated, is uploaded by that rank as well, and a rank that hears nothing uploads all it has.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import xxhash

from evergrad import _files
from evergrad._files import read_small
from evergrad.checkpoint.shard_layout import ShardEntry, cut, parse_header
from evergrad.checkpoint.shard_manifest import Manifest
from evergrad.checkpoint.tensor_placement import Placements
from evergrad.checkpoint.tiers import Work
from evergrad.checkpoint.version import Version
from evergrad.formats.version_records import shard_name

_log = logging.getLogger(__name__)
_PATIENCE_S = 30.0


class UploadDeduplication:
    """What the ranks of a job tell each other of the parts that they upload."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "shares"

    def publish(self, manifest: Manifest, entries: Sequence[ShardEntry]) -> None:
        """Tell the digests of this rank's part."""
        mine = {
            path: manifest.digests[path] for path, owner in _owners(manifest, entries).items() if owner == manifest.rank
        }
        folder = self._folder / manifest.version.name
        for path in (self._folder, folder):
            _files.make_folder(path)
        _files.publish(folder / f"{shard_name(manifest.rank)}.json", json.dumps(mine).encode())

    def without_duplicates(self, work: Work, given_up: Callable[[], bool]) -> Work:
        """The work without what others upload; waits for them a little, or until it is given up."""
        manifest = work.manifest
        if manifest.world_size == 1:
            return work
        parsed = parse_header(work.shard, work.files.shard)
        owners = _owners(manifest, parsed.layout.entries)
        others = sorted({owner for owner in owners.values() if owner != manifest.rank})
        told: dict[str, tuple[int, str]] = {}
        end = time.monotonic() + _PATIENCE_S
        for rank in others:
            news = self._hear(manifest.version, rank, end, given_up)
            told |= {path: (rank, digest) for path, digest in news.items() if owners.get(path) == rank}
        elsewhere = {path: place for path, place in told.items() if manifest.digests.get(path) == place[1]}
        if not elsewhere:
            return work
        header, kept = cut(work.shard, parsed, elsewhere)
        pieces = [memoryview(header)]
        pieces += (work.shard[begin:end] for begin, end in _runs(kept))
        described = replace(
            manifest,
            size=sum(map(len, pieces)),
            data_start=len(header),
            header=xxhash.xxh3_128_hexdigest(header),
            digests={entry.path: manifest.digests[entry.path] for entry in kept},
            elsewhere=elsewhere,
        )
        return replace(work, manifest=described, pieces=pieces)

    def tidy(self, newest: Version) -> None:
        """Remove what was told of versions before this one."""
        with suppress(OSError):
            for name in os.listdir(self._folder):
                version = Version.parse(name)
                if version is not None and version.age() < newest.age():
                    with suppress(OSError):
                        for entry in os.listdir(self._folder / name):
                            _files.remove(self._folder / name / entry)
                        _files.remove_folder(self._folder / name)

    def _hear(self, version: Version, rank: int, end: float, given_up: Callable[[], bool]) -> Mapping[str, str]:
        path = self._folder / version.name / f"{shard_name(rank)}.json"
        pause = 0.01
        while True:
            with suppress(OSError, ValueError, RecursionError):
                told = json.loads(read_small(path))
                return told if isinstance(told, dict) else {}
            if time.monotonic() > end or given_up():
                _log.warning("%s: rank %d does not tell what it uploads: it is uploaded here as well", version, rank)
                return {}
            time.sleep(pause)
            pause = min(1.5 * pause, 0.5)
            with suppress(OSError):
                os.listdir(path.parent)  # makes NFS look again


def _owners(manifest: Manifest, entries: Sequence[ShardEntry]) -> dict[str, int]:
    """Who uploads each tensor that all ranks are said to have, so that every rank has about as much."""
    said = Placements.from_json(manifest.placements)
    shared = [entry for entry in entries if entry.nbytes and said.kind(entry.path) in ("replicated", "first")]
    shared.sort(key=lambda entry: (-entry.nbytes, entry.path))
    loads = [(0, rank) for rank in range(manifest.world_size)]
    owners = {}
    for entry in shared:
        load, rank = heapq.heappop(loads)
        owners[entry.path] = rank
        heapq.heappush(loads, (load + entry.nbytes, rank))
    return owners


def _runs(entries: Sequence[ShardEntry]) -> list[tuple[int, int]]:
    """Where the entries lie, neighbours joined."""
    runs: list[tuple[int, int]] = []
    for entry in entries:
        begin, end = entry.offset, entry.offset + entry.nbytes
        if runs and runs[-1][1] == begin:
            runs[-1] = (runs[-1][0], end)
        elif entry.nbytes:
            runs.append((begin, end))
    return runs
