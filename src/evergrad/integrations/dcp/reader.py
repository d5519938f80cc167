"""DCP's metadata, rebuilt from the shards of a version, and the answers to its reads.

What is cut is cut anew by DCP's own planner: it sees every rank's piece. A tensor or a value that is not cut is this
rank's own where the job has as many ranks as it had, and the lowest rank's otherwise, as DCP takes one for all.
"""

from __future__ import annotations

import io
import math
import os
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

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
from evergrad.checkpoint.placement import Place
from evergrad.checkpoint.ranks import Ranks
from evergrad.checkpoint.version import Version
from evergrad.errors import DamagedFile, RestoreError, UsageError
from evergrad.integrations.dcp.intact import Held, Intact, find
from evergrad.state.skeleton import decode


class TierReader(StorageReader):
    """Reads the newest intact version of a checkpointer's job, or one. All ranks of the job use one alike.

    Every digest is compared before the first tensor is touched; a version that is torn or corrupt is passed over for
    the one before, and that is logged. Versions that `Checkpointer.save` wrote can be read as well.
    """

    def __init__(self, checkpointer: Checkpointer, version: Version | int | None = None) -> None:
        """`version` asks for one, by step or exactly: it is then that one or an error."""
        self._checkpointer, self._asked = checkpointer, version
        self._found: list[Intact] = []
        self._held: dict[MetadataIndex, Held] = {}
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

    def _intact(self) -> Intact:
        if not self._found:
            self._found.append(find(self._checkpointer, self._asked))
        return self._found[0]

    def _read(self, plan: LoadPlan, planner: LoadPlanner, intact: Intact) -> None:
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


def _close(found: list[Intact]) -> None:
    while found:
        found.pop().close()


def _pieces(name: str, held: list[Held | None]) -> list[Held]:
    """The pieces of a tensor, each once; together they have to be all of it."""
    kept: dict[tuple[int, ...], Held] = {}
    whole: Place | None = None
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


def _chunk(held: Held) -> ChunkStorageMetadata:
    assert held.place is not None
    return ChunkStorageMetadata(torch.Size(held.place.offset), torch.Size(held.place.shape))


def _paths(held: Held) -> Iterator[tuple[int, str]]:
    """The tensors that are read, each with the rank in whose shard it lies; a value may have some inside."""
    if held.leaf.tensor is not None:
        yield held.holder, held.leaf.tensor
    for path, holder in held.inside:
        yield holder, path


def _value(held: Held, view: Callable[[int, str], torch.Tensor]) -> io.BytesIO:
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
