"""Where a job is in its data: epoch, batch, step; how the epoch is dealt, and the batches of this rank.

The same on all ranks, but for the rank that the batches are fetched for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from evergrad.errors import StateError
from evergrad.recovery.dataloader_adapter import BatchIterator, BatchSource, SampleOrder
from evergrad.recovery.elastic_sampler import BatchMode, ElasticEpoch, SampleCounts
from evergrad.recovery.gradients import BucketLayout
from evergrad.recovery.local_state import RngSnapshot
from evergrad.recovery.process_group import Group

OPENING = 4
"""Hyper-parameters of so many first steps of a job are kept, to recognise a script that begins anew."""
_NUMBERS = ("epoch", "index", "step", "point", "passes")


class DataPosition:
    """The job's way through its data.

    An epoch is one call of `job.batches`. A step takes one batch, or several where gradients are accumulated; `index`
    is the first batch of the step that comes next.
    """

    def __init__(self, num_ranks: int = 1, mode: BatchMode = "shrink") -> None:
        """`num_ranks` are those that the job began with, `mode` what fewer of them mean for a step."""
        self._num_ranks, self._mode = num_ranks, mode
        self.epoch = self.index = self.step = self.point = self.passes = 0
        self.opening: list[str] = []
        """Digests of the hyper-parameters of the job's first steps."""
        self.is_begun = False
        """Whether this epoch's first point has been passed."""
        self.layout: BucketLayout | None = None
        """How gradients lie in buckets: agreed by all ranks."""
        self.deal: ElasticEpoch | None = None
        self.rank = 0
        """The rank that this process has in the deal."""
        self._order: SampleOrder | None = None
        self._is_shared = False
        self._source: BatchSource | None = None
        self._batches: BatchIterator | None = None
        self._fetched = 0
        self._loader_state: Any = None
        self._known_data: dict[str, str] = {}
        """Digests of the dataset of whoever gave this process the state."""

    @property
    def source(self) -> BatchSource:
        """The loader of this epoch."""
        assert self._source is not None
        return self._source

    def begin_epoch(self, source: BatchSource, seed: int, rank: int, world_size: int) -> None:
        """Begin an epoch, or go on with one that this process has been told of."""
        self._source, self.rank = source, rank
        if source.opaque:
            loader_state, self._loader_state = self._loader_state, None
            if loader_state is not None:
                source.loader.load_state_dict(loader_state)
            if self._batches is None:
                self._batches = source.iterate(keep_rng=self.is_begun)
            return
        if self._order is None:
            self._order = source.order(self.epoch, seed)
        if self.deal is None:
            self._deal_afresh(world_size)
        elif self.deal.units != len(self._order):
            raise StateError(
                f"epoch {self.epoch}: the loader has {len(self._order)} samples or batches, and {self.deal.units} when "
                "the epoch began. Go on with the same data"
            )
        elif self.is_begun:  # it may have been dealt to another number of ranks
            self.deal.redeal(self.index, world_size, batch=self._mode)
        self._look_ahead(keep_rng=self.is_begun)

    def share_order(self, group: Group, root: int) -> None:
        """Where each rank may have found another order: take one rank's."""
        if self._source is None or not self._source.must_share or self._is_shared:
            return
        if group.size == 1:
            self._is_shared = True
            return
        assert self._order is not None
        order, ends = self._order, self._order.ends
        sizes = torch.tensor([len(order.indices), -1 if ends is None else len(ends)])
        group.broadcast(sizes, root).wait()
        total, count = (int(size) for size in sizes)
        is_mine = group.rank == root
        indices = torch.from_numpy(order.indices.copy()) if is_mine else torch.empty(total, dtype=torch.int64)
        group.broadcast(indices, root).wait()
        bounds = None
        if count >= 0:
            found = torch.from_numpy(ends.copy()) if is_mine and ends is not None else torch.empty(count).long()
            group.broadcast(found, root).wait()
            bounds = found.numpy()
        self._order, self._is_shared = SampleOrder(indices.numpy(), bounds), True
        self._deal_afresh(group.size)
        self._look_ahead(keep_rng=True)

    def share_again(self) -> None:
        """Some ranks may have got the order and others not: what counts is what all get together."""
        self._is_shared = False

    def skip_end(self) -> bool:
        """Go to the next epoch if no batch of this one is left; whether it is so."""
        is_over = self.deal is not None and self.index >= self.deal.num_batches
        if is_over:
            self.point += 1
            self.end_epoch()
        return is_over

    def fetch(self, index: int) -> Any:
        """The batch of this rank; `StopIteration` where an opaque loader ends."""
        assert self._batches is not None
        if self.deal is not None and index != self._fetched:
            self._look_ahead(keep_rng=True, first=index)
        self._fetched += 1
        return next(self._batches)

    def is_idle(self, index: int) -> bool:
        """Whether this rank's share of a batch counts for nothing."""
        return self.deal is not None and index >= 0 and self.deal.share(self.rank, index).idle

    def weight(self, indices: range, among: list[int]) -> float:
        """What this rank's gradients of these batches count for among these ranks of the deal."""
        if self.deal is None or not len(indices):
            return 1 / len(among)
        return self.deal.weight(self.rank, indices, among=among)

    def redeal(self, rank: int, world_size: int) -> bool:
        """The ranks are others now, from the next step on; whether that changes this rank's batches."""
        if self.deal is None:
            self.rank = rank
            return False
        if not self.is_begun:  # nothing of it is used: deal it afresh, as if there had never been more ranks
            self._deal_afresh(world_size)
        before, self.rank = (self.rank, self.deal.world_size), rank
        if self.is_begun:
            self.deal.redeal(self.index, world_size, batch=self._mode)
        if before == (rank, self.deal.world_size) and self.is_begun:
            return False
        self._look_ahead(keep_rng=True)
        return True

    def applied(self, count: int, lost: list[int]) -> None:
        """A step of so many batches was applied, without the shares of these ranks of the deal."""
        if self.deal is not None:
            self.deal.lose(self.index, self.index + count, lost)
        self.index += count
        self.step += 1

    def end_epoch(self) -> SampleCounts | None:
        """This epoch is over; its books."""
        books = self.deal.accounting.summary() if self.deal is not None else None
        self._drop()
        self.deal = self._order = None
        self._is_shared = self.is_begun = False
        self.epoch, self.index = self.epoch + 1, 0
        return books

    def close_loader(self) -> None:
        """Let go of the loader."""
        self._drop()

    @property
    def opaque_loader(self) -> Any:
        """The loader, if only it knows where it is."""
        return self._source.loader if self._source is not None and self._source.opaque else None

    @property
    def differing_data(self) -> str:
        """The first part of the dataset that was another one where the state comes from; empty if none is known."""
        mine = self.source.data
        return next((name for name, one in self._known_data.items() if mine.get(name, one) != one), "")

    def set_loader_state(self, state: Any) -> None:
        """Where this rank's own loader is to go on."""
        self._loader_state = state

    def state_dict(self) -> dict[str, Any]:
        """All that another rank needs, or this one after a restart."""
        local_state = self.opaque_loader
        return {
            **{name: getattr(self, name) for name in _NUMBERS},
            "is_begun": self.is_begun,
            "layout": self.layout,
            "opening": list(self.opening),
            "data": dict(self._source.data) if self._source is not None else {},
            "deal": self.deal.state_dict() if self.deal is not None and self.is_begun else None,
            "order": self._order.state_dict() if self._order is not None and self._is_shared else None,
            "loader": local_state.state_dict() if local_state is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Be where another rank is, or where this one was."""
        self._drop()
        for name in _NUMBERS:
            setattr(self, name, int(state[name]))
        self.is_begun = bool(state["is_begun"])
        self.layout = state["layout"]
        self.opening = list(state.get("opening", []))  # versions of earlier releases have none of these two
        self._known_data = dict(state.get("data", {}))
        self.deal = ElasticEpoch.from_state(state["deal"]) if state["deal"] is not None else None
        self._order = SampleOrder.from_state(state["order"]) if state["order"] is not None else None
        self._is_shared = self._order is not None and self.is_begun
        self._loader_state = state["loader"]

    def _deal_afresh(self, world_size: int) -> None:
        """Deal a whole epoch, of which nothing has been used yet."""
        assert self._order is not None
        keeps_size = self._mode == "constant" and world_size != self._num_ranks
        self.deal = self.source.deal(self._order, self._num_ranks if keeps_size else world_size)
        if keeps_size:
            self.deal.redeal(0, world_size, batch="constant")

    def _look_ahead(self, *, keep_rng: bool, first: int | None = None) -> None:
        """Have the loader fetch this rank's batches from one on."""
        self._drop()
        self._fetched = self.index if first is None else first
        self._batches = self.source.iterate(self._mine(self._fetched), keep_rng=keep_rng)

    def _mine(self, first: int) -> Iterator[list[int]]:
        assert self.deal is not None
        assert self._order is not None
        deal, order, rank = self.deal, self._order, self.rank
        for index in range(first, deal.num_batches):
            yield order[np.asarray(deal.share(rank, index).positions)]

    def _drop(self) -> None:
        batches, self._batches = self._batches, None
        if batches is not None:
            batches.close()


# The step under way: the batches that the script has been given for it, to be given again if it is redone.


@dataclass(slots=True)
class StepBatch:
    """A batch, and the generators as they were when it was given."""

    batch: Any
    randomness: RngSnapshot | None


@dataclass(slots=True)
class StepBatches:
    """One batch, or several where gradients are accumulated."""

    batches: list[StepBatch] = field(default_factory=list)
    to_repeat: deque[StepBatch] = field(default_factory=deque)
    """Batches of a step that is redone, which come before any others."""
    reduced: int = 0
    """How many of the batches given have been reduced."""
    forwarded: int = 0
    """The number of batches given when the wrapped model last ran forward with gradients."""
    must_redo: bool = False
    """Whether the step has to be done again."""

    def __len__(self) -> int:
        return len(self.batches)

    def __bool__(self) -> bool:
        return bool(self.batches)

    def give(self, batch: Any, *, redoable: bool) -> StepBatch:
        """One more batch for the script."""
        self.batches.append(StepBatch(batch, RngSnapshot() if redoable else None))
        return self.batches[-1]

    def next_repeated(self) -> StepBatch | None:
        """The next batch of a step that is redone, with the generators as they were then; None if none is left."""
        if not self.to_repeat:
            return None
        given = self.to_repeat.popleft()
        assert given.randomness is not None, "batches come again where generators were noted"
        given.randomness.restore()
        self.batches.append(given)
        return given

    def redo(self) -> None:
        """All of its batches come again."""
        self.to_repeat = deque([*self.batches, *self.to_repeat])
        self.clear()

    def note_forward(self, *_: object) -> None:
        """Note that the wrapped model runs forward; a hook of it."""
        if torch.is_grad_enabled():
            self.forwarded = len(self.batches)

    def clear(self) -> None:
        """The step is over."""
        self.batches.clear()
        self.reduced = self.forwarded = 0
        self.must_redo = False
