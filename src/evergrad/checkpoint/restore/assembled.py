"""One rank's state out of several ranks' shards: cut anew, or put together from where the bytes are.

Needed when a job goes on with another number of ranks, or cuts its tensors in another way, and for versions in a
shared tier, where what all ranks have alike is stored once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import combinations

import torch

from evergrad.checkpoint.capture.dtensor import Wanted
from evergrad.checkpoint.manifest import Manifest
from evergrad.checkpoint.placement import Place, Placements
from evergrad.checkpoint.restore.nodes import without
from evergrad.checkpoint.restore.shard import Shard
from evergrad.dtypes import DType
from evergrad.errors import RestoreError
from evergrad.records import Json
from evergrad.state import Sharing, Skeleton

_FEW = 128  # pieces that are compared with each other


def needs(
    manifests: Mapping[int, Manifest], base: int, wanted: Wanted, *, everywhere: Iterable[str] = ()
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


class Assembled:
    """A source for `prepare`: the state of one rank, in memory that is made when a tensor is asked for."""

    def __init__(self, shards: Mapping[int, Shard], base: int, wanted: Wanted) -> None:
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
            return self._part(self._holder(name), name, Place.of_whole(self._forms[name][1]), place)
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

    def _place(self, path: str) -> Place:
        name = self._stored(path)
        whole = self._said.sharded[name].whole if name in self._said.sharded else self._forms[name][1]
        return self._wanted.get(path, whole)

    def _part(self, rank: int, name: str, held: Place, part: Place) -> torch.Tensor:
        tensor = self._shards[rank].tensor(name)
        return tensor if held == part else tensor[part.slices(held)]


def _holders(name: str, place: Place, places: Mapping[int, Mapping[str, Place]]) -> dict[int, Place]:
    """The ranks whose pieces make up a place, each part of it once."""
    found: dict[int, Place] = {}
    seen: set[Place] = set()
    for rank, theirs in sorted(places.items()):
        held = theirs.get(name)
        if held is not None and held not in seen and held.whole == place.whole and held.overlap(place) is not None:
            seen.add(held)
            found[rank] = held
    return found
