"""The elastic sampler: which units of an epoch go to which rank in which batch, also after the number of ranks changes.

A *unit* is a position in the epoch's order: a sample, or a whole batch of the user's own batch sampler. The sequence
that is dealt is 0, 1, …, units-1, from the beginning again where it is padded. Each step takes the next *block* of it,
and rank r of N takes r, r+N, … of the block. For equal blocks that are multiples of N this is what
`torch.utils.data.DistributedSampler` gives, batch by batch:

    >>> epoch = ElasticEpoch(10, world_size=2, batch_size=2)
    >>> [epoch.share(1, index).positions.tolist() for index in range(epoch.num_batches)]
    [[1, 3], [5, 7], [9]]

So what is unused after a step is always one stretch of the sequence, and dealing it again is to go on from there with
another block size and another N:

    >>> epoch.use(0, 1)
    >>> epoch.redeal(1, world_size=1)
    >>> [epoch.share(0, index).positions.tolist() for index in range(1, epoch.num_batches)]
    [[4, 5], [6, 7], [8, 9]]
    >>> epoch.use(1, 4)
    >>> epoch.accounting.summary().is_complete
    True

The accounting of samples: what became of every unit of an epoch: used, lost, dropped, or not yet used.

One byte a unit, written when a step has been applied and never before: a step that is rolled back leaves no trace.
The books do not ask how units were dealt. They are told which places of the dealt sequence went into a step, and count
for themselves, so that they can contradict the dealing.

    >>> books = SampleAccounting(5)
    >>> books.record_used(0, 6)  # five units for two ranks: unit 0 comes again as padding
    >>> print(books.summary())
    5 units: 5 used once, 0 lost, 0 dropped, 0 unused; 1 padding, 0 idle, 0 twice
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from evergrad.errors import StateError
from evergrad.records import Json

# What became of every unit of an epoch: used, lost, dropped, or not yet used.
#
# One byte a unit, written when a step has been applied and never before: a step that is rolled back leaves no trace.
# The books do not ask how units were dealt. They are told which places of the dealt sequence went into a step, and
# count for themselves, so that they can contradict the dealing.
#
#     >>> books = Books(5)
#     >>> books.record_used(0, 6)  # five units for two ranks: unit 0 comes again as padding
#     >>> print(books.summary())
#     5 units: 5 used once, 0 lost, 0 dropped, 0 unused; 1 padding, 0 idle, 0 twice

SCHEMA_VERSION = 1
_UNUSED, _USED, _LOST, _DROPPED = range(4)


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """The books of an epoch in numbers. Every unit is in one of `used_once`, `lost`, `dropped`, `unused`."""

    units: int
    uses: int
    """Units in all shares that went into applied steps, repeats included."""
    used_once: int
    padding: int
    """Further uses, which padding explains."""
    idle: int
    """Shares of weight 0, run by ranks that had none in a ragged step; not uses."""
    lost: int
    """Units whose gradients went with a rank (forward recovery)."""
    dropped: int
    """Units that the loader leaves out at the end of an epoch."""
    unused: int
    twice: int
    """Uses that nothing explains."""

    @property
    def is_balanced(self) -> bool:
        """Whether everything that was used is accounted for."""
        placed = self.used_once + self.lost + self.dropped + self.unused
        return self.twice == 0 and placed == self.units and self.uses == self.used_once + self.padding

    @property
    def is_complete(self) -> bool:
        """Whether, besides, nothing is left to use."""
        return self.is_balanced and self.unused == 0

    def __str__(self) -> str:
        return (
            f"{self.units} units: {self.used_once} used once, {self.lost} lost, {self.dropped} dropped, "
            f"{self.unused} unused; {self.padding} padding, {self.idle} idle, {self.twice} twice"
        )

    def to_json(self) -> dict[str, Json]:
        """As a row of plain values."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, row: str | bytes | Mapping[str, Any]) -> SampleCounts:
        """Back from a row, or from its text."""
        fields: dict[str, Any] = dict(json.loads(row) if isinstance(row, str | bytes) else row)
        version = fields.pop("schema_version", None)
        if version != SCHEMA_VERSION:
            raise StateError(f"the books of an epoch: expected schema_version {SCHEMA_VERSION}, found {version!r}")
        return cls(**fields)


class SampleAccounting:
    """The books of one epoch of `units`, of which all from `dropped_from` on are never dealt."""

    def __init__(self, units: int, dropped_from: int | None = None) -> None:
        self._marks: npt.NDArray[np.uint8] = np.zeros(units, np.uint8)
        if dropped_from is not None:
            self._marks[dropped_from:] = _DROPPED
        self._uses = self._padding = self._idle = self._twice = 0

    def record_used(self, first: int, stop: int, *, lost: npt.NDArray[np.bool_] | None = None, idle: int = 0) -> None:
        """Places first..stop-1 of the dealt sequence went into an applied step; those that `lost` marks did not.

        A place is a unit's number, and from `units` on the units come again from the beginning, as padding.
        """
        units = len(self._marks)
        whole = min(stop, units) - min(first, units)
        local_state, repeats = self._marks[min(first, units) : min(stop, units)], np.arange(max(first, units), stop)
        if lost is None:
            self._uses += stop - first
            self._twice += int(np.count_nonzero(local_state != _UNUSED))
            local_state[:] = _USED
        else:
            gone, used = lost[:whole], ~lost[:whole]
            self._uses += int(np.count_nonzero(~lost))
            self._twice += int(np.count_nonzero(local_state[used] != _UNUSED))
            local_state[used] = _USED
            local_state[gone & (local_state == _UNUSED)] = _LOST
            repeats = repeats[~lost[whole:]]
        self._idle += idle
        if len(repeats):
            # The repeat of a unit that was lost is the unit's one use; padding is what comes on top of that.
            again = np.unique(repeats % units)
            first_uses = again[(self._marks[again] == _UNUSED) | (self._marks[again] == _LOST)]
            self._marks[first_uses] = _USED
            self._padding += len(repeats) - len(first_uses)

    def repeat(self, count: int) -> None:
        """A unit that has just been entered was used so many times more, so that it is not alone in its batch."""
        self._uses += count
        self._padding += count

    def summary(self) -> SampleCounts:
        """The books in numbers, as of now."""
        found = [int(np.count_nonzero(self._marks == mark)) for mark in range(4)]
        return SampleCounts(
            units=len(self._marks),
            uses=self._uses,
            used_once=found[_USED],
            padding=self._padding,
            idle=self._idle,
            lost=found[_LOST],
            dropped=found[_DROPPED],
            unused=found[_UNUSED],
            twice=self._twice,
        )

    def state_dict(self) -> dict[str, object]:
        """All of it, in one array and plain numbers."""
        return {
            "marks": self._marks.copy(),
            "uses": self._uses,
            "padding": self._padding,
            "idle": self._idle,
            "twice": self._twice,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become the saved books; `StateError` if they are none."""
        try:
            marks = np.array(state["marks"], np.uint8)
            uses, padding, idle, twice = (int(state[key]) for key in ("uses", "padding", "idle", "twice"))
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"not the books of an epoch: {type(error).__name__}: {error}") from None
        if marks.ndim != 1 or (len(marks) and marks.max() > _DROPPED):
            raise StateError(f"the books of an epoch: expected one mark from 0 to {_DROPPED} a unit, found others")
        self._marks, self._uses, self._padding, self._idle, self._twice = marks, uses, padding, idle, twice


BatchMode: TypeAlias = Literal["shrink", "constant", "scale_lr"]
"""What a loss does to the samples a step: they shrink with the ranks (`scale_lr` too), or stay the same."""

_SETTINGS = ("units", "world_size", "batch_size", "pad", "drop_last", "booked")


@dataclass(frozen=True, slots=True)
class BatchShare:
    """What one rank runs in one batch."""

    positions: npt.NDArray[np.int64]
    padding: int = 0
    """How many of the last positions are repeats that make the ranks' shares equal."""
    idle: bool = False
    """The block has none for this rank: it runs a unit of another's so as to take part, and its gradient weighs 0."""

    @property
    def count(self) -> int:
        """What the share weighs: its units, repeats included as in DDP; 0 if idle."""
        return 0 if self.idle else len(self.positions)


@dataclass(frozen=True, slots=True)
class _Deal:
    """How the sequence is dealt from one batch on: places start..stop-1 of it, `block` a batch."""

    first: int
    world_size: int
    block: int
    start: int
    stop: int

    @property
    def end(self) -> int:
        """The number after its last batch."""
        return self.first - (self.start - self.stop) // self.block  # rounded up

    def places(self, index: int) -> tuple[int, int]:
        """Which places of the sequence a batch takes; at the end of this deal, none."""
        begin = min(self.start + (index - self.first) * self.block, self.stop)
        return begin, min(begin + self.block, self.stop)

    def active(self, index: int, least: int) -> int:
        """How many ranks the block of a batch is dealt to: fewer in a ragged one, for each to have `least` units."""
        begin, stop = self.places(index)
        return max(1, min(self.world_size, (stop - begin) // least))


class ElasticEpoch:
    """One epoch as it is dealt out, batch by batch, and its books.

    - Every rank has its own `ElasticEpoch`, and all are equal: whatever is asked of one follows from the calls before.
    - Batches are numbered from 0 through the whole epoch, however often it is dealt again.
    - With `pad` the ranks' shares are made equal by repeats from the beginning, without it the tail is dropped: what
      `drop_last` means to `DistributedSampler`. `drop_last` is the DataLoader's, and drops incomplete batches.
    - After a loss, what the undisturbed epoch would have used is used, each unit once: nothing is padded any more,
      what was to be dropped stays dropped, and in the last step a rank may have fewer units, or none, but not one
      alone (batch norm cannot learn of one; the very last unit is repeated, as padding). That is so with `drop_last`
      too: the one short step is the price of using every sample.
    - `share`, `counts`, `use` and `lose` take time by the size of a batch, whatever the size of the epoch.
    """

    def __init__(
        self, units: int, world_size: int, batch_size: int, *, pad: bool = True, drop_last: bool = False
    ) -> None:
        assert units >= 0, f"{units} units"
        assert world_size >= 1, f"{world_size} ranks"
        assert batch_size >= 1, f"{batch_size} units a batch"
        self._units, self._world_size, self._batch_size = units, world_size, batch_size
        self._pad, self._drop_last = pad, drop_last
        each = -(-units // world_size) if pad else units // world_size
        if drop_last:
            each -= each % batch_size
        self._live = min(units, each * world_size)
        """How many units, from the first on, the undisturbed epoch uses."""
        self._deals = [_Deal(0, world_size, world_size * batch_size, 0, each * world_size)]
        self._booked = 0
        """Batches before this one are in the books, or never will be."""
        self.accounting = SampleAccounting(units, self._live)

    @property
    def units(self) -> int:
        """How many units the epoch has."""
        return self._units

    @property
    def world_size(self) -> int:
        """How many ranks the units are dealt to now."""
        return self._deals[-1].world_size

    @property
    def num_batches(self) -> int:
        """How many batches the epoch has, as it is dealt now."""
        return self._deals[-1].end

    def share(self, rank: int, index: int) -> BatchShare:
        """What a rank runs in a batch; for a batch before the last re-deal, the rank it had then."""
        deal = self._deal(index)
        assert 0 <= rank < deal.world_size, f"rank {rank} of {deal.world_size}"
        (begin, stop), active, least = deal.places(index), self._active(deal, index), self._least(deal)
        if rank >= active or begin + rank >= stop:
            return BatchShare(
                self._at_least(np.arange(begin, min(begin + least, stop)), least) % self._units, idle=True
            )
        places = np.arange(begin + rank, stop, active, dtype=np.int64)
        if len(places) < least:  # the last unit of all, alone
            return BatchShare(self._at_least(places, least) % self._units, least - len(places))
        return BatchShare(places % self._units, int(np.count_nonzero(places >= self._units)))

    def counts(self, index: int) -> npt.NDArray[np.int64]:
        """How many units each rank has in a batch: repeats count, idle ranks have none."""
        deal = self._deal(index)
        (begin, stop), active = deal.places(index), self._active(deal, index)
        each, more = divmod(max(stop - begin, self._least(deal)), active)
        ranks = np.arange(deal.world_size)
        return np.where(ranks < active, each + (ranks < more).astype(np.int64), 0)

    def weight(self, rank: int, indices: Iterable[int], *, among: Collection[int] | None = None) -> float:
        """What a rank's gradient of these batches weighs in the mean: its units over those of all ranks.

        Exactly `1 / world_size` where all have equally many. `among` are the ranks that the mean is taken over (all);
        0 for every one of them if none of them has any.
        """
        rows = [self.counts(index) for index in indices]
        assert rows, "no batches to weigh"
        assert len({len(row) for row in rows}) == 1, "batches of different memberships have no common weight"
        counts = np.sum(rows, axis=0)
        ranks = range(len(counts)) if among is None else among
        assert rank in ranks, f"rank {rank} is not among {sorted(ranks)}"
        found = counts[list(ranks)]
        if found.any() and (found == found[0]).all():
            return 1 / len(ranks)
        return int(counts[rank]) / max(1, int(found.sum()))

    def redeal(self, index: int, world_size: int, *, batch: BatchMode = "shrink") -> None:
        """From a batch on, deal all that is left to this many ranks.

        A batch then takes `world_size` shares of the original size, or with "constant" as many units as the epoch
        began with. Where that is how it is dealt already, nothing changes, and padding stays: a spare took the place.
        """
        assert world_size >= 1, f"{world_size} ranks"
        assert batch in get_args(BatchMode), f"unknown batch mode {batch!r}"
        assert self._booked <= index <= self.num_batches, f"batch {index} is not in {self._booked}..{self.num_batches}"
        while len(self._deals) > 1 and self._deals[-1].first >= index:
            self._deals.pop()  # nobody has applied a step of it
        now = self._deals[-1]
        block = self._batch_size * (self._world_size if batch == "constant" else world_size)
        if (now.world_size, now.block) != (world_size, block):
            start = min(now.places(index)[0], self._live)
            self._deals.append(_Deal(index, world_size, block, start, self._live))

    def use(self, first: int, stop: int) -> None:
        """Batches first..stop-1 have been applied, with the shares of all ranks."""
        self.lose(first, stop, ())

    def lose(self, first: int, stop: int, ranks: Collection[int]) -> None:
        """Batches first..stop-1 have been applied without the shares of these ranks, which are lost."""
        assert self._booked <= first <= stop <= self.num_batches, (
            f"batches {first}..{stop - 1}: expected some of {self._booked}..{self.num_batches - 1}, each booked once"
        )
        for index in range(first, stop):
            deal = self._deal(index)
            assert all(0 <= rank < deal.world_size for rank in ranks), f"ranks {sorted(ranks)} of {deal.world_size}"
            (begin, end), active = deal.places(index), self._active(deal, index)
            idle = sum(rank not in ranks for rank in range(min(active, end - begin), deal.world_size))
            lost = np.isin(np.arange(end - begin) % active, list(ranks)) if ranks else None
            self.accounting.record_used(begin, end, lost=lost, idle=idle)
            if 0 < end - begin < self._least(deal) and 0 not in ranks:
                self.accounting.repeat(self._least(deal) - (end - begin))
        self._booked = stop

    def state_dict(self) -> dict[str, object]:
        """All of it, in arrays and plain values: for a checkpoint, and for a rank that joins."""
        return {
            **{name: getattr(self, f"_{name}") for name in _SETTINGS},
            "deals": np.array(
                [(deal.first, deal.world_size, deal.block, deal.start, deal.stop) for deal in self._deals], np.int64
            ),
            "books": self.accounting.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become the saved epoch; `StateError`, before anything is changed, if it is none."""
        try:
            units, world_size, batch_size, pad, drop_last, booked = (state[name] for name in _SETTINGS)
            found = ElasticEpoch(int(units), int(world_size), int(batch_size), pad=bool(pad), drop_last=bool(drop_last))
            found._booked = int(booked)
            found._deals = [_Deal(*row) for row in np.asarray(state["deals"]).tolist()]
            found.accounting.load_state_dict(state["books"])
            assert found.accounting.summary().units == found.units, "books of another epoch"
            assert found._deals, "no deals"
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise StateError(f"not the state of an epoch: {type(error).__name__}: {error}") from None
        self.__dict__.update(found.__dict__)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ElasticEpoch:
        """The epoch that was saved."""
        epoch = cls(0, 1, 1)
        epoch.load_state_dict(state)
        return epoch

    def _least(self, deal: _Deal) -> int:
        """How many units a share has at least, once units are dealt again: of one alone no batch norm can learn."""
        return min(2, self._batch_size) if deal is not self._deals[0] else 1

    def _active(self, deal: _Deal, index: int) -> int:
        return deal.active(index, self._least(deal)) if deal is not self._deals[0] else deal.world_size

    @staticmethod
    def _at_least(places: npt.NDArray[np.int64], least: int) -> npt.NDArray[np.int64]:
        return np.resize(places, max(len(places), least))

    def _deal(self, index: int) -> _Deal:
        """The deal that a batch is of."""
        assert 0 <= index < self.num_batches, f"batch {index} of {self.num_batches}"
        return next(deal for deal in reversed(self._deals) if deal.first <= index)
