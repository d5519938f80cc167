"""DCP's metadata, rebuilt from the shards of a version, and the answers to its reads.

What is cut is cut anew by DCP's own planner: it sees every rank's piece. A tensor or a value that is not cut is this
rank's own where the job has as many ranks as it had, and the lowest rank's otherwise, as DCP takes one for all.
"""

from __future__ import annotations

import io
import logging
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from evergrad.checkpoint import Checkpointer
from evergrad.checkpoint.ranks import Ranks
from evergrad.checkpoint.restore.shards import Shard, fetch_intact
from evergrad.checkpoint.tensor_placement import Placements, TensorPiece
from evergrad.checkpoint.tiers import Copy, Store
from evergrad.checkpoint.version import Version
from evergrad.dtypes import DType
from evergrad.errors import CheckpointError, DamagedFile, FormatError, RestoreError, StateError, UsageError
from evergrad.records import Json
from evergrad.state import Skeleton
from evergrad.state.skeleton import decode, decode_value

# Which name DCP has for what a shard holds.
#
# A shard stores the nested state as it was. DCP speaks of flat names: keys joined by dots, with a list taken apart
# only if there are tensors or dicts in it, and a tuple never. The names follow from the skeleton, so they are not
# stored; a version that `Checkpointer.save` wrote has them too.

Keys = tuple[str | int, ...]
"""How DCP gets to a leaf: the key of each dict as text, the index in each list."""


class DcpLeaf(NamedTuple):
    """Something that DCP has one name for."""

    keys: Keys
    node: Json

    @property
    def tensor(self) -> str | None:
        """The path of the tensor that this is; None for a value."""
        return str(self.node["tensor"]) if isinstance(self.node, dict) and "tensor" in self.node else None


def leaves(root: Json) -> dict[str, DcpLeaf]:
    """Every leaf of a state by DCP's name for it; `StateError` if DCP could not tell two apart.

    >>> model = {"odict": [["fc.weight", {"tensor": "model/fc.weight"}]]}
    >>> {name: leaf.keys for name, leaf in leaves({"dict": [["model", model], ["betas", {"list": [1]}]]}).items()}
    {'model.fc.weight': ('model', 'fc.weight'), 'betas': ('betas',)}
    """
    if _entries(root) is None:
        raise StateError("the state is no dict, and DCP names things by the keys of dicts")
    found: dict[str, DcpLeaf] = {}
    for leaf in _walk((), root):
        name = ".".join(map(str, leaf.keys))
        if name in found:
            raise StateError(f"{name}: two leaves have this name in DCP: {found[name].keys} and {leaf.keys}")
        found[name] = leaf
    return found


def _walk(keys: Keys, node: Json) -> Iterator[DcpLeaf]:
    entries = _entries(node)
    if entries is not None:
        for key, child in entries:
            yield from _walk((*keys, str(decode_value(key))), child)
    elif _is_taken_apart(node):
        for index, child in enumerate(_items(node)):
            yield from _walk((*keys, index), child)
    else:
        yield DcpLeaf(keys, node)


def _is_taken_apart(node: Json) -> bool:
    """Whether DCP goes into a list: there is a tensor or a dict in it, or a list of that kind."""
    return any(
        isinstance(item, dict) and ("tensor" in item or _entries(item) is not None or _is_taken_apart(item))
        for item in _items(node)
    )


def _entries(node: Json) -> list[Any] | None:
    if isinstance(node, dict):
        for kind in ("dict", "odict"):
            if isinstance(found := node.get(kind), list):
                return found
    return None


def _items(node: Json) -> list[Json]:
    items = node.get("list") if isinstance(node, dict) else None
    return items if isinstance(items, list) else []


# The newest version whose shards are all as they were captured, whoever saved it and however many there were.
#
# Every rank says which shards it sees. All take the newest version of which every shard is seen by someone, share the
# shards out among those who see them, and check every digest. What a shard holds is then told to all, so that each
# rank knows the whole version, and opens another rank's shard only if it needs a piece of it.

_log = logging.getLogger(__name__)


class StoredItem(NamedTuple):
    """What a shard holds under one of DCP's names."""

    leaf: DcpLeaf
    dtype: DType | None = None
    """None for a value."""
    place: TensorPiece | None = None
    is_cut: bool = False
    """Whether this is a piece of a tensor that is spread over ranks."""
    holder: int = 0
    """The rank in whose shard the bytes lie."""
    inside: tuple[tuple[str, int], ...] = ()
    """Tensors inside a value, each with the rank in whose shard it lies."""


@dataclass(slots=True)
class VisibleShards:
    """What this rank sees: the copies of each version's shards, nearest first, by the rank that saved them."""

    job: str
    mapped: Mapping[Path, mmap.mmap]
    copies: dict[Version, dict[int, list[tuple[Store, Copy]]]] = field(default_factory=dict)
    sizes: dict[Version, int] = field(default_factory=dict)
    damaged: dict[Version, str] = field(default_factory=dict)
    unverified: set[Copy] = field(default_factory=set)
    """Copies whose digests were taken again after a restart: others come first."""

    @classmethod
    def of(cls, checkpointer: Checkpointer, ranks: Ranks) -> VisibleShards:
        """Look into every tier; what the agent is still finishing is waited for."""
        checkpointer._check_usable()
        checkpointer._finish_captures(ranks)
        sight = cls(checkpointer._run_folder.id, checkpointer._state_capture.mapped())
        for store in checkpointer._stores.values():
            try:
                copies = store.find()
            except CheckpointError as error:
                _log.warning("rank %d: %s", ranks.rank, error)
                continue
            for copy in copies:
                sight._take(store, copy)
        return sight

    def _take(self, store: Store, copy: Copy) -> None:
        try:
            manifest = store.read_manifest(copy, digests=False)
        except (FormatError, CheckpointError, OSError) as error:
            self.damaged[copy.version] = str(error)
            return
        if manifest.job == self.job:
            self.copies.setdefault(copy.version, {}).setdefault(copy.rank, []).append((store, copy))
            self.sizes[copy.version] = manifest.world_size
            self.unverified |= {copy} if manifest.unverified else set()

    def open(self, version: Version, rank: int, paths: Iterable[str] | None, folder: Path) -> tuple[Shard | None, str]:
        """The nearest copy of a shard that is as it was captured, all of it or some paths; or what is wrong."""
        complaints = []
        wanted = None if paths is None else list(paths)
        copies = self.copies.get(version, {}).get(rank, [])
        for store, copy in sorted(copies, key=lambda found: found[1] in self.unverified):
            shard, what = fetch_intact(store, copy, self.job, folder, mapped=self.mapped, paths=wanted)
            if shard is not None:
                if shard.manifest.unverified:
                    _log.warning("%s, rank %d, in tier %s is unverified: digests were taken after a restart",
                                 version, rank, copy.tier)  # fmt: skip
                return shard, what
            complaints.append(f"{version}, rank {rank}, in tier {copy.tier}: {what}")
        return None, "; ".join(complaints) or f"{version}: no shard of rank {rank} can be reached from here"


class IntactVersion:
    """A version whose every shard was found as it was captured. To be closed."""

    def __init__(self, version: Version, world_size: int, sight: VisibleShards) -> None:
        self.version, self.world_size = version, world_size
        self.held: list[dict[str, StoredItem]] = []
        """What each rank saved."""
        self._sight = sight
        self._shards: dict[int, Shard] = {}
        self._fetched = tempfile.TemporaryDirectory(prefix="evergrad-dcp-", ignore_cleanup_errors=True)

    def check(self, ranks: Sequence[int]) -> list[str]:
        """Open the shards of these ranks and compare every digest; what is wrong."""
        wrong = []
        for rank in ranks:
            shard, complaint = self._sight.open(self.version, rank, None, Path(self._fetched.name))
            if shard is None:
                wrong.append(complaint)
            else:
                self._shards[rank] = shard
        return wrong

    def describe(self) -> dict[int, dict[str, StoredItem]]:
        """What the shards that are open hold."""
        return {rank: _held(shard) for rank, shard in self._shards.items()}

    def shard(self, rank: int, paths: Iterable[str]) -> Shard:
        """The shard of a rank. One that another rank has checked is checked here again, as far as it is needed."""
        if rank not in self._shards:
            shard, complaint = self._sight.open(self.version, rank, paths, Path(self._fetched.name))
            if shard is None:
                raise RestoreError(f"{complaint}. Nothing was loaded from it.")
            self._shards[rank] = shard
        return self._shards[rank]

    def check_current(self) -> None:
        """An error if an arena was overwritten while it was read."""
        for shard in self._shards.values():
            if not shard.is_current():
                raise RestoreError(f"{shard.copy.shard}: overwritten while it was read: load again")

    def close(self) -> None:
        """Unmap the shards; no tensor of them may be used any more. Twice is fine."""
        while self._shards:
            self._shards.popitem()[1].close()
        self._fetched.cleanup()


def find_intact(checkpointer: Checkpointer, asked: Version | int | None) -> IntactVersion:
    """The newest intact version, or the one asked for. Every rank must call it.

    `UsageError` if there is none of that step, `RestoreError` if there are versions and none is intact, or none at all.
    """
    ranks = Ranks.now()
    sight = VisibleShards.of(checkpointer, ranks)
    sizes: dict[Version, int] = {}
    seen: dict[Version, dict[int, list[int]]] = {}
    mine = {version: sorted(found) for version, found in sight.copies.items()}
    complaints: dict[Version, list[str]] = {}
    for reader, (theirs, their_sizes, damaged) in enumerate(ranks.gather((mine, sight.sizes, sight.damaged))):
        sizes |= their_sizes
        for version, saved in theirs.items():
            for rank in saved:
                seen.setdefault(version, {}).setdefault(rank, []).append(reader)
        for version, what in damaged.items():
            complaints.setdefault(version, []).append(what)
    for version in sorted(seen, key=Version.age, reverse=True):
        if asked is not None and asked not in (version, version.step):
            continue
        if missing := [rank for rank in range(sizes[version]) if rank not in seen[version]]:
            complaints.setdefault(version, []).append(f"{version} is not whole: no shard of rank {missing[0]}")
            continue
        found, wrong = _try(IntactVersion(version, sizes[version], sight), seen[version], ranks)
        complaints.setdefault(version, []).extend(wrong)
        if found is not None:
            for newer in sorted(complaints, key=Version.age, reverse=True):
                if newer.age() >= version.age() and complaints[newer]:
                    told = "; ".join(dict.fromkeys(complaints[newer]))
                    _log.warning("rank %d: %s. Loading %s.", ranks.rank, told, version)
            return found
    raise _nothing(checkpointer, asked, sorted({*seen, *complaints}, key=Version.age, reverse=True), complaints)


def _try(intact: IntactVersion, seen: Mapping[int, list[int]], ranks: Ranks) -> tuple[IntactVersion | None, list[str]]:
    """Check a version together; what is wrong with it, wherever that was found."""
    mine = []
    for saved in range(intact.world_size):
        readers = seen[saved]
        if ranks.rank == (saved if saved in readers else readers[saved % len(readers)]):
            mine.append(saved)
    wrong = intact.check(mine)
    described: dict[int, dict[str, StoredItem]] = {}
    try:
        described = intact.describe()
    except (FormatError, StateError) as error:
        wrong.append(f"{intact.version}: {error}")
    told = ranks.gather((wrong, {} if wrong else described))
    wrong = [line for lines, _ in told for line in lines]
    if wrong:
        intact.close()
        return None, wrong
    every = {rank: held for _, part in told for rank, held in part.items()}
    intact.held = [every[rank] for rank in range(intact.world_size)]
    return intact, []


def _held(shard: Shard) -> dict[str, StoredItem]:
    parsed, manifest = shard.parsed, shard.manifest
    placements = Placements.from_json(parsed.placements, str(shard.copy.shard))
    known = {**shard.shapes, **parsed.absent}
    known |= {alias: parsed.absent[path] for alias, path in parsed.absent_aliases.items()}

    def holder(path: str) -> int:
        return manifest.elsewhere.get(parsed.absent_aliases.get(path, path), (manifest.rank, ""))[0]

    found = {}
    for name, leaf in leaves(parsed.skeleton.root).items():
        path = leaf.tensor
        if path is None:
            inside = tuple((inner, holder(inner)) for inner in sorted(Skeleton(leaf.node).tensor_names()))
            found[name] = StoredItem(leaf, holder=manifest.rank, inside=inside)
            continue
        dtype, shape = known[path]
        cut = placements.sharded.get(path)
        found[name] = StoredItem(leaf, dtype, cut or TensorPiece.of_whole(shape), cut is not None, holder(path))
    return found


def _nothing(
    checkpointer: Checkpointer,
    asked: Version | int | None,
    known: list[Version],
    complaints: Mapping[Version, list[str]],
) -> Exception:
    reasons = "; ".join(dict.fromkeys(line for version in known for line in complaints.get(version, ())))
    if asked is not None and not any(asked in (version, version.step) for version in known):
        steps = ", ".join(str(version.step) for version in known[:8])
        return UsageError(f"there is no version {asked}. There are {steps or 'none'}.")
    if known:
        what = f"version {asked} cannot be loaded" if asked is not None else "none of the versions is intact"
        return RestoreError(f"{what}: {reasons}. Nothing was touched.")
    return RestoreError(f"{checkpointer._run_folder.run_dir}: there is no version to load")


class TierReader(StorageReader):
    """Reads the newest intact version of a checkpointer's job, or one. All ranks of the job use one alike.

    Every digest is compared before the first tensor is touched; a version that is torn or corrupt is passed over for
    the one before, and that is logged. Versions that `Checkpointer.save` wrote can be read as well.
    """

    def __init__(self, checkpointer: Checkpointer, version: Version | int | None = None) -> None:
        """`version` asks for one, by step or exactly: it is then that one or an error."""
        self._checkpointer, self._asked = checkpointer, version
        self._found: list[IntactVersion] = []
        self._held: dict[MetadataIndex, StoredItem] = {}
        weakref.finalize(self, _close, self._found)

    @property
    def version(self) -> Version:
        """The version that is read. Every rank must ask; finding it out is the first part of loading."""
        return self._intact().version

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another read begins; a `checkpoint_id` is the step to read."""
        self.close()
        if checkpoint_id is None:
            return
        if not self.validate_checkpoint_id(checkpoint_id):
            raise UsageError(f"checkpoint_id={checkpoint_id!r}: expected a step, a whole number")
        self._asked = int(os.fspath(checkpoint_id))

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """What the version holds, from the skeletons and placements of all ranks' shards."""
        intact, ranks = self._intact(), Ranks.now()
        order = list(range(intact.world_size))
        if ranks.world_size == intact.world_size:
            order.insert(0, order.pop(ranks.rank))
        listed: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._held = {}
        keys = {}
        for rank in order:
            for name, held in intact.held[rank].items():
                if name in listed:
                    continue
                keys[name] = held.leaf.keys
                if held.dtype is None:
                    listed[name] = BytesStorageMetadata()
                    self._held[MetadataIndex(name)] = held
                    continue
                pieces = [held] if not held.is_cut else _pieces(name, [intact.held[other].get(name) for other in order])
                assert held.place is not None
                listed[name] = TensorStorageMetadata(
                    TensorProperties(dtype=held.dtype.torch), torch.Size(held.place.whole), [_chunk(p) for p in pieces]
                )
                self._held |= {MetadataIndex(name, _chunk(piece).offsets): piece for piece in pieces}
        return Metadata(listed, planner_data=keys, storage_data={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: the version is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy from the mapped, verified shards; then let go of them."""
        intact = self._intact()
        try:
            self._read(plan, planner, intact)
            intact.check_current()
        finally:
            self.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def close(self) -> None:
        """Let go of the shards; the next read looks for a version again."""
        _close(self._found)
        self._held = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a step."""
        return str(checkpoint_id).isdecimal()

    def __enter__(self) -> TierReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _intact(self) -> IntactVersion:
        if not self._found:
            self._found.append(find_intact(self._checkpointer, self._asked))
        return self._found[0]

    def _read(self, plan: LoadPlan, planner: LoadPlanner, intact: IntactVersion) -> None:
        wanted = [(item, self._held[item.storage_index]) for item in plan.items]
        needed: dict[int, set[str]] = {}
        for _, held in wanted:
            for holder, path in _paths(held):
                needed.setdefault(holder, set()).add(path)
        for holder, paths in sorted(needed.items()):
            intact.shard(holder, paths)  # all of them, before the first tensor is touched

        def view(holder: int, path: str) -> torch.Tensor:
            return intact.shard(holder, ()).tensor(path)

        targets, views = [], []
        for item, held in wanted:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _value(held, view))
                continue
            stored = held.leaf.tensor
            assert stored is not None
            source = _narrowed(view(held.holder, stored), item)
            target = planner.resolve_tensor(item).detach()
            if target.shape != source.shape:
                name, shape = item.storage_index.fqn, tuple(source.shape)
                raise RestoreError(f"{name}: the planner gave a place of {tuple(target.shape)} for {shape}")
            targets.append((item, target))
            views.append(source)
        with torch.no_grad():
            if targets:
                torch._foreach_copy_([target for _, target in targets], views)
        for item, target in targets:
            planner.commit_tensor(item, target)


def _close(found: list[IntactVersion]) -> None:
    while found:
        found.pop().close()


def _pieces(name: str, held: list[StoredItem | None]) -> list[StoredItem]:
    """The pieces of a tensor, each once; together they have to be all of it."""
    kept: dict[tuple[int, ...], StoredItem] = {}
    whole: TensorPiece | None = None
    for piece in held:
        if piece is None or piece.place is None:
            continue
        whole = whole or piece.place
        if piece.place.whole != whole.whole:
            raise DamagedFile(
                name, "ranks saved pieces of different tensors", expected=whole.whole, found=piece.place.whole
            )
        if piece.place.numel:
            kept.setdefault(piece.place.offset, piece)
    count = sum(piece.place.numel for piece in kept.values() if piece.place is not None)
    assert whole is not None
    if count != math.prod(whole.whole):
        raise DamagedFile(name, "pieces are missing", expected=f"{math.prod(whole.whole)} elements", found=count)
    return list(kept.values())


def _chunk(held: StoredItem) -> ChunkStorageMetadata:
    assert held.place is not None
    return ChunkStorageMetadata(torch.Size(held.place.offset), torch.Size(held.place.shape))


def _paths(held: StoredItem) -> Iterator[tuple[int, str]]:
    """The tensors that are read, each with the rank in whose shard it lies; a value may have some inside."""
    if held.leaf.tensor is not None:
        yield held.holder, held.leaf.tensor
    for path, holder in held.inside:
        yield holder, path


def _value(held: StoredItem, view: Callable[[int, str], torch.Tensor]) -> io.BytesIO:
    """A value as DCP's planner wants it: what torch.save makes of it, here and now."""
    holders = dict(held.inside)
    value = decode(held.leaf.node, lambda path: view(holders[path], path).clone())
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def _narrowed(tensor: torch.Tensor, item: ReadItem) -> torch.Tensor:
    for axis, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        if length != tensor.shape[axis]:
            tensor = tensor.narrow(axis, start, length)
    return tensor
