"""Going on with another number of ranks: what each of them gets of what was one rank's own.

What all ranks have alike, and what is cut into pieces, can be given to any number. A random generator, a cursor, a
value that differs between ranks cannot: that is for the user's function to say, and an error without one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evergrad.checkpoint.manifest import Manifest
from evergrad.checkpoint.placement import Placements
from evergrad.checkpoint.restore.assembled import Assembled
from evergrad.checkpoint.restore.nodes import differences, replaced, value_at
from evergrad.checkpoint.restore.shard import Shard
from evergrad.errors import RestoreError, StateError
from evergrad.state import ROOT, flatten

Resize = Callable[[str, Sequence[Any], int, int], Any]
"""(path, what every rank had saved, new rank, new world size) → what this rank gets."""


def own_tensors(manifests: Mapping[int, Manifest], live: Placements) -> list[str]:
    """Paths of tensors that were a rank's own: never said to be replicated, or said so and not equal after all."""
    first = manifests[0]
    saved = Placements.from_json(first.placements)
    said = Placements((*saved.replicated, *live.replicated), (*saved.first, *live.first), saved.sharded)
    found = []
    for path in (*first.digests, *first.elsewhere):
        kind = said.kind(path)
        if kind in ("sharded", "first"):
            continue
        if kind == "own" or len({_digest(manifest, path) for manifest in manifests.values()}) > 1:
            found.append(path)
    return found


def own_values(shards: Mapping[int, Shard]) -> list[str]:
    """Paths of values that differ between ranks."""
    roots = [shards[rank].skeleton.root for rank in sorted(shards)]
    return sorted({path for root in roots[1:] for path in differences(roots[0], root, None)})


def resize(
    source: Assembled,
    shards: Mapping[int, Shard],
    tensors: Sequence[str],
    values: Sequence[str],
    choose: Resize,
    rank: int,
    world_size: int,
) -> None:
    """Let the user's function choose what this rank gets; the source then gives that."""
    for path in tensors:
        given = _chosen(choose, path, source.saved(path), rank, world_size)
        try:
            flat = flatten(given)
        except StateError as error:
            raise RestoreError(f"{path}: resize gave what cannot be a tensor: {error}") from error
        if flat.tensors.keys() != {ROOT}:
            raise RestoreError(f"{path}: resize gave a {type(given).__name__}, and a tensor is expected")
        source.given[path] = flat.tensors[ROOT]
    for path in values:
        saved = [value_at(shards[old].skeleton.root, path) for old in sorted(shards)]
        try:
            flat = flatten(_chosen(choose, path, saved, rank, world_size))
        except StateError as error:
            raise RestoreError(f"{path}: resize gave what cannot be a value: {error}") from error
        if flat.tensors:
            raise RestoreError(f"{path}: resize gave a tensor, and a value is expected")
        source.root = replaced(source.root, path, flat.skeleton.root)


def refuse(tensors: Sequence[str], values: Sequence[str], saved: int, now: int) -> RestoreError:
    """What to say where there is no function."""
    paths = [*tensors, *values]
    more = f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
    return RestoreError(
        f"{paths[0]}{more} was each rank's own when {saved} ranks saved it, and this job has {now}. Pass "
        "resize=function(path, saved, rank, world_size) to say what each gets, declare it with "
        "Checkpointer(replicated=…) if all have the same, or leave it out with strict=False."
    )


def _digest(manifest: Manifest, path: str) -> str:
    return manifest.digests.get(path) or manifest.elsewhere.get(path, (0, ""))[1]


def _chosen(choose: Resize, path: str, saved: Sequence[Any], rank: int, world_size: int) -> Any:
    try:
        return choose(path, saved, rank, world_size)
    except Exception as error:
        raise RestoreError(f"{path}: resize failed: {type(error).__name__}: {error}") from error
