"""One rank's state out of several ranks' shards: cut anew, or put together from where the bytes are.

Needed when a job goes on with another number of ranks, or cuts its tensors in another way, and for versions in a
shared tier, where what all ranks have alike is stored once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations
from typing import Any

import torch

from evergrad.checkpoint.capture.dtensor import WantedPieces
from evergrad.checkpoint.restore.shards import Shard
from evergrad.checkpoint.shard_manifest import Manifest
from evergrad.checkpoint.tensor_placement import Placements, TensorPiece
from evergrad.dtypes import DType
from evergrad.errors import RestoreError, StateError
from evergrad.records import Json
from evergrad.state import ROOT, Sharing, Skeleton, escape, flatten, join
from evergrad.state.skeleton import decode_value

# Skeletons by path: where two differ, what is at a path, and the same with something replaced or left out.


def differences(a: Json, b: Json, path: str | None = None) -> Iterator[str]:
    """Where two skeletons have different values; where their form differs, the container."""
    if a == b:
        return
    below_a, below_b = _below(a), _below(b)
    if below_a is None or below_b is None or below_a.keys() != below_b.keys():
        yield path or ROOT
        return
    for segment, child in below_a.items():
        yield from differences(child, below_b[segment], join(path, segment))


def value_at(root: Json, path: str) -> Any:
    """What a skeleton has at a path that it has, and that holds no tensor."""
    node = root
    for segment in () if path == ROOT else path.split("/"):
        below = _below(node)
        assert below is not None, "the path was found in it"
        node = below[segment]
    return decode_value(node)


def replaced(root: Json, path: str, new: Json) -> Json:
    """A skeleton with another node at a path."""
    return _changed(root, None, lambda at, node: [new] if (at or ROOT) == path else None, frozenset({path}))[0]


def without(root: Json, paths: frozenset[str], at: str | None = None) -> Json:
    """A skeleton that lacks what is at some paths; a list or a tuple, where a place cannot be empty, goes whole."""
    left = _changed(root, at, lambda here, node: [] if here in paths else None, paths)
    return left[0] if left else {"dict": []}


def _changed(
    node: Json, at: str | None, change: Callable[[str | None, Json], list[Json] | None], paths: frozenset[str]
) -> list[Json]:
    """The node as it is to be: one, or none."""
    changed = change(at, node)
    if changed is not None:
        return changed
    below = _below(node)
    if below is None or not any(_is_on_the_way(at, path) for path in paths):
        return [node]
    assert isinstance(node, dict)
    kind = next(iter(node))
    made: list[Json] = []
    entries: Any = node[kind]
    for (segment, child), entry in zip(below.items(), entries, strict=True):
        found = _changed(child, join(at, segment), change, paths)
        if kind in ("dict", "odict"):
            made += ([entry[0], inner] for inner in found)
        elif not found:  # a place in a list cannot be empty: all of it goes
            return []
        else:
            made += found
    return [{**node, kind: made}]


def _is_on_the_way(at: str | None, path: str) -> bool:
    return at is None or path.startswith(f"{at}/")


def _below(node: Json) -> dict[str, Json] | None:
    """A container's children by the segment of their path; None if it is no container."""
    if isinstance(node, dict):
        kind = next(iter(node), None)
        children: Any = node.get(kind) if kind is not None else None
        if kind in ("dict", "odict"):
            return {_segment(key): child for key, child in children}
        if kind in ("list", "tuple"):
            return {str(index): child for index, child in enumerate(children)}
    return None


def _segment(key: Json) -> str:
    return escape(str(key if isinstance(key, str) else decode_value(key)))


_FEW = 128  # pieces that are compared with each other


def needs(
    manifests: Mapping[int, Manifest], base: int, wanted: WantedPieces, *, everywhere: Iterable[str] = ()
) -> dict[int, set[str]]:
    """Which tensors of which ranks' shards a state is made of; all of the base's own are.

    `everywhere` are paths that are needed of every rank.
    """
    said = Placements.from_json(manifests[base].placements)
    places = {rank: Placements.from_json(manifest.placements).sharded for rank, manifest in manifests.items()}
    found: dict[int, set[str]] = {base: set()}
    for path in (*manifests[base].digests, *manifests[base].elsewhere):
        if path in said.sharded:
            for rank in _holders(path, wanted.get(path, said.sharded[path].whole), places):
                found.setdefault(rank, set()).add(path)
        else:
            rank = manifests[base].elsewhere.get(path, (base, ""))[0]
            found.setdefault(rank, set()).add(path)
    for path in everywhere:
        for rank, manifest in manifests.items():
            holder = manifest.elsewhere.get(path, (rank, ""))[0]
            found.setdefault(holder, set()).add(path)
    return found


class ReshardedState:
    """A source for `prepare`: the state of one rank, in memory that is made when a tensor is asked for."""

    def __init__(self, shards: Mapping[int, Shard], base: int, wanted: WantedPieces) -> None:
        """The shards that `needs` named, verified. `wanted` are the pieces that the live state has room for."""
        self._shards, self._base, self._wanted = shards, shards[base], wanted
        self._said = Placements.from_json(self._base.manifest.placements)
        self._places = {rank: Placements.from_json(s.manifest.placements).sharded for rank, s in shards.items()}
        parsed = self._base.parsed
        self._aliases = {**parsed.layout.aliases, **parsed.absent_aliases}
        self._forms = {entry.path: (entry.dtype, entry.shape) for entry in parsed.layout.entries} | parsed.absent
        self.root: Json = self._base.skeleton.root
        """The skeleton's; may be replaced before it is used."""
        self.given: dict[str, torch.Tensor] = {}
        """Tensors that are taken instead of what was saved."""

    @cached_property
    def skeleton(self) -> Skeleton:
        """The base's; pieces share memory in their own way, which says nothing of the whole."""
        saved = self._base.skeleton
        views = {
            path: view
            for path, view in saved.sharing.views.items()
            if path not in self.given
            and self._place(path).shape == self._forms[self._stored(path)][1]
            and self._stored(path) not in self._said.sharded
        }
        return Skeleton(self.root, Sharing(saved.sharing.sizes, views), saved.roles)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[DType, tuple[int, ...]]]:
        """Every tensor as `tensor` gives it."""
        found = {}
        for path in (*self._forms, *self._aliases):
            dtype, _ = self._forms[self._stored(path)]
            found[path] = dtype, self._place(path).shape
        for path, tensor in self.given.items():
            known = DType.of_torch(tensor.dtype)
            if known is None:
                raise RestoreError(f"{path}: a tensor of {tensor.dtype} cannot be restored")
            found[path] = known, tuple(tensor.shape)
        return found

    def tensor(self, path: str) -> torch.Tensor:
        """The piece that is wanted of a tensor: a view of a shard where one has it, else new memory."""
        if path in self.given:
            return self.given[path]
        name, place = self._stored(path), self._place(path)
        if name not in self._said.sharded:
            return self._part(self._holder(name), name, TensorPiece.of_whole(self._forms[name][1]), place)
        holders = _holders(name, place, self._places)
        for rank, held in holders.items():
            if held.overlap(place) == place:
                return self._part(rank, name, held, place)
        out = torch.empty(place.shape, dtype=self._forms[name][0].torch)
        for rank, held in holders.items():
            common = held.overlap(place)
            assert common is not None
            out[common.slices(place)] = self._part(rank, name, held, common)
        return out

    def check(self) -> None:
        """Raise if some piece that is wanted is nowhere."""
        for path in self.shapes:
            name, place = self._stored(path), self._place(path)
            if path in self.given or name not in self._said.sharded:
                continue
            holders = _holders(name, place, self._places)
            have = sum(common.numel for held in holders.values() if (common := held.overlap(place)) is not None)
            if len(holders) <= _FEW and any(a.overlap(b) for a, b in combinations(holders.values(), 2)):
                raise RestoreError(f"{path}: pieces of it overlap, and none can be told to be right")
            if have != place.numel:
                raise RestoreError(f"{path}: {have} of {place.numel} elements are in the shards at hand")

    def leave_out(self, paths: Iterable[str]) -> None:
        """Take these out of what was saved: whoever compares it with a live state finds them missing."""
        self.root = without(self.root, frozenset(paths), None)

    def saved(self, path: str) -> list[torch.Tensor]:
        """What every rank had saved at a path."""
        name = self._stored(path)
        found = []
        for rank in range(self._base.manifest.world_size):
            holder = self._shards[rank].manifest.elsewhere.get(name, (rank, ""))[0]
            found.append(self._shards[holder].tensor(name).clone())
        return found

    def _stored(self, path: str) -> str:
        return self._aliases.get(path, path)

    def _holder(self, name: str) -> int:
        return self._base.manifest.elsewhere.get(name, (self._base.manifest.rank, ""))[0]

    def _place(self, path: str) -> TensorPiece:
        name = self._stored(path)
        whole = self._said.sharded[name].whole if name in self._said.sharded else self._forms[name][1]
        return self._wanted.get(path, whole)

    def _part(self, rank: int, name: str, held: TensorPiece, part: TensorPiece) -> torch.Tensor:
        tensor = self._shards[rank].tensor(name)
        return tensor if held == part else tensor[part.slices(held)]


def _holders(name: str, place: TensorPiece, places: Mapping[int, Mapping[str, TensorPiece]]) -> dict[int, TensorPiece]:
    """The ranks whose pieces make up a place, each part of it once."""
    found: dict[int, TensorPiece] = {}
    seen: set[TensorPiece] = set()
    for rank, theirs in sorted(places.items()):
        held = theirs.get(name)
        if held is not None and held not in seen and held.whole == place.whole and held.overlap(place) is not None:
            seen.add(held)
            found[rank] = held
    return found


# Going on with another number of ranks: what each of them gets of what was one rank's own.
#
# What all ranks have alike, and what is cut into pieces, can be given to any number. A random generator, a cursor, a
# value that differs between ranks cannot: that is for the user's function to say, and an error without one.

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
    source: ReshardedState,
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
