"""What a user's loader is: the order of its samples, and batches of any of them, made as the loader makes them.

    source = Source.of(loader)                     # one for each loader, kept as long as the loader is used
    order = source.order(epoch=0)                  # if source.must_share, one rank's counts for all
    epoch = source.deal(order, world_size)
    with source.iterate(order[epoch.share(rank, index).positions] for index in range(epoch.num_batches)) as batches:
        for batch in batches: ...

| what | its units are |
|---|---|
| `DataLoader(dataset)` | samples 0, 1, 2, … |
| `DataLoader(dataset, shuffle=True)` | samples, shuffled as `DistributedSampler` does; a generator is not asked |
| with a `DistributedSampler` | samples by its seed, shuffle and drop_last; its rank and num_replicas do not matter |
| with another sampler | samples in the order that it gives on one rank |
| with another batch sampler | its batches, as it gives them on one rank |
| stateful, and not a DataLoader over a map-style dataset | unknown (*opaque*): the user shards it by rank |

A torchdata `StatefulDataLoader` over a map-style dataset is treated as the DataLoader that it is: the job knows where
it is, and its own state is not asked.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import distributed
from torch.utils import data as torch_data
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from evergrad.checkpoint.rng import rng_state
from evergrad.errors import StateError, UsageError
from evergrad.recovery.elastic_sampler import ElasticEpoch

# Batches come in the order of the books: `in_order` is left at its default, whatever the loader says.
_PASSED_ON = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
)
_SAMPLERS: Any = torch_data.distributed
_TOO_MANY = 1_000
_DEPTH, _MOST_DIGESTS, _ROWS, _ITEMS = 3, 64, 64, 1024
"""Limits for the search of a dataset for data, and for the amount that is compared."""
_ADVICE = "Pass a DataLoader over a map-style dataset, or a loader with state_dict and load_state_dict"


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """Which samples the units of an epoch are, by position; two arrays at most, so that ranks can share it."""

    indices: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64] | None = None
    """Where units are batches: where each one ends in `indices`."""

    def __len__(self) -> int:
        return len(self.indices if self.ends is None else self.ends)

    def __getitem__(self, positions: npt.NDArray[np.int64]) -> list[int]:
        """The samples of these units."""
        if self.ends is None:
            found: list[int] = self.indices[positions].tolist()
            return found
        begins = (0 if position == 0 else self.ends[position - 1] for position in positions)
        slices = (self.indices[begin : self.ends[position]] for begin, position in zip(begins, positions, strict=True))
        return [int(index) for part in slices for index in part]

    def state_dict(self) -> dict[str, object]:
        """Both arrays."""
        return {"indices": self.indices, "ends": self.ends}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> SampleOrder:
        """The order that was saved; `StateError` if it is none."""
        try:
            indices, ends = np.asarray(state["indices"], np.int64), state["ends"]
            ends = None if ends is None else np.asarray(ends, np.int64)
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"not the order of an epoch: {type(error).__name__}: {error}") from None
        if ends is not None and (np.diff(ends, prepend=0) < 0).any() | (ends[-1:] != len(indices)).any():
            raise StateError(f"not the order of an epoch: batches do not end in {len(indices)} indices")
        return cls(indices, ends)


class BatchIterator(AbstractContextManager["BatchIterator"], Iterator[Any]):
    """The batches of one `iterate`. Closing it ends its workers, unless they are persistent or an opaque loader's."""

    def __init__(self, iterator: Iterator[Any], *, keep_workers: bool = False) -> None:
        self._iterator: Iterator[Any] | None = iterator
        self._keep_workers = keep_workers

    def __next__(self) -> Any:
        if self._iterator is None:
            raise StopIteration
        return next(self._iterator)

    def close(self) -> None:
        """Let go of what is under way. Twice is fine."""
        iterator, self._iterator = self._iterator, None
        if not self._keep_workers:
            _end_workers(iterator)

    def __exit__(self, *_: object) -> None:
        self.close()


class SamplerRanks:
    """Lets `DistributedSampler(dataset)` be made in a job, which has no default process group to ask for its rank.

    It takes the place of `torch.distributed` in the sampler's module; a default group, where there is one, goes first.
    """

    def __init__(self, ranks: Callable[[], tuple[int, int]]) -> None:
        """`ranks` gives this process's rank and how many there are."""
        self._ranks = ranks
        _SAMPLERS.dist = self

    def __getattr__(self, name: str) -> Any:
        return getattr(distributed, name)

    def get_rank(self) -> int:
        """Return the value of the default group, or else of the job."""
        return distributed.get_rank() if distributed.is_initialized() else self._ranks()[0]

    def get_world_size(self) -> int:
        """Return the value of the default group, or else of the job."""
        return distributed.get_world_size() if distributed.is_initialized() else self._ranks()[1]

    def close(self) -> None:
        """Give the module its own again. Twice is fine."""
        if _SAMPLERS.dist is self:
            _SAMPLERS.dist = distributed


class _Dealt(Iterable[Sequence[int]]):
    """The batch sampler of the inner DataLoader: whatever the next iteration is to run through."""

    def __init__(self) -> None:
        self.batches: Iterable[Sequence[int]] = ()

    def __iter__(self) -> Iterator[Sequence[int]]:
        return iter(self.batches)


class BatchSource:
    """A user's loader; `BatchSource.of` makes one.

    - The loader itself is never iterated, unless it is opaque, and never changed.
    - One `BatchSource` serves every epoch, so that persistent workers persist. Not thread safe.
    """

    def __init__(
        self,
        loader: Any,
        make: Callable[[int, int], SampleOrder] | None,
        *,
        must_share: bool = False,
        batch_size: int = 1,
        pad: bool = True,
        drop_last: bool = False,
    ) -> None:
        self.loader = loader
        self._make = make
        self.opaque = make is None
        """The order is the loader's secret: it is iterated as it is, and cannot be dealt again."""
        self.must_share = must_share
        """Each rank may find another order, and one rank's has to be made known to all."""
        self.batch_size, self.pad, self.drop_last = batch_size, pad, drop_last
        self._dealt = _Dealt()
        self._inner: DataLoader[Any] | None = None

    @cached_property
    def data(self) -> dict[str, str]:
        """Digests of samples of the dataset's contents, by name; empty for an opaque loader."""
        return {} if self.opaque else data_digests(self.loader.dataset)

    @classmethod
    def of(cls, loader: Any) -> BatchSource:
        """What this loader is; `UsageError` if its samples can be neither dealt nor found again."""
        kind = type(loader).__qualname__
        is_stateful = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
        if not isinstance(loader, DataLoader):
            if is_stateful and hasattr(loader, "__iter__"):
                return cls(loader, None)
            raise UsageError(f"job.batches: a {kind} cannot be dealt to ranks or found again after a loss. {_ADVICE}")
        local_state = next(
            (name for name in ("__iter__", "_get_iterator") if _overrides(loader, DataLoader, name)), None
        )
        if isinstance(loader.dataset, IterableDataset) or local_state is not None:
            if is_stateful:
                return cls(loader, None)
            why = (
                f"changes {local_state}"
                if local_state
                else f"has an IterableDataset ({type(loader.dataset).__qualname__})"
            )
            raise UsageError(f"job.batches: this {kind} {why}, so its samples cannot be dealt to ranks. {_ADVICE}")
        by = loader.batch_sampler
        if by is None:
            raise UsageError(
                f"job.batches: this {kind} has batch_size=None, and batches are what is dealt to ranks. "
                "Give it a batch_size, or a batch_sampler"
            )
        if not isinstance(by, BatchSampler) or _overrides(by, BatchSampler, "__iter__"):
            _refuse_shards(by)
            return cls(loader, lambda epoch, seed: _batches_of(by), must_share=True)
        sampler: Any = by.sampler
        settings: Any = {"batch_size": by.batch_size, "drop_last": by.drop_last}
        if isinstance(sampler, DistributedSampler) and not _overrides(sampler, DistributedSampler, "__iter__"):
            return cls(loader, _distributed(sampler), pad=not sampler.drop_last, **settings)
        if type(sampler) is SequentialSampler:
            return cls(loader, lambda epoch, seed: SampleOrder(np.arange(len(sampler), dtype=np.int64)), **settings)
        if _shuffles(sampler):
            return cls(loader, lambda epoch, seed: _shuffled(len(sampler), seed + epoch), **settings)
        _refuse_shards(sampler)
        return cls(loader, lambda epoch, seed: _samples_of(sampler), must_share=True, **settings)

    def order(self, epoch: int, seed: int = 0) -> SampleOrder:
        """The order of an epoch, numbered from 0. A `DistributedSampler` goes by its own seed, and by its own epoch
        once `set_epoch` has set one.

        If `must_share`, this runs the user's sampler and draws from its generator: all ranks should call it, so that
        their generators stay alike, and then all take the order of one.
        """
        assert self._make is not None, "an opaque loader has no known order"
        return self._make(epoch, seed)

    def deal(self, order: SampleOrder, world_size: int) -> ElasticEpoch:
        """An epoch in this order, to be dealt to so many ranks."""
        return ElasticEpoch(len(order), world_size, self.batch_size, pad=self.pad, drop_last=self.drop_last)

    def iterate(self, batches: Iterable[Sequence[int]] | None = None, *, keep_rng: bool = False) -> BatchIterator:
        """Batches of these samples, as the loader makes them, or those of an opaque loader.

        `batches` are taken only as far ahead as the loader's workers prefetch. Making the iterator draws the workers'
        seed from torch's generator, as `iter(loader)` does; with `keep_rng` all generators are left as they were.
        """
        loader = self.loader
        if not self.opaque:
            assert batches is not None, "which batches?"
            loader, self._dealt.batches = self._dataloader(), batches
        generator = getattr(loader, "generator", None)
        rng = rng_state(generators={"loader": generator} if isinstance(generator, torch.Generator) else None)
        before = rng.state_dict() if keep_rng else None
        try:
            iterator = iter(loader)
        finally:
            if before is not None:
                rng.load_state_dict(before)
            self._dealt.batches = ()
        return BatchIterator(iterator, keep_workers=self.opaque or loader.persistent_workers)

    def close(self) -> None:
        """End persistent workers. Twice is fine; the next `iterate` starts them anew."""
        inner, self._inner = self._inner, None
        _end_workers(getattr(inner, "_iterator", None))

    def _dataloader(self) -> DataLoader[Any]:
        if self._inner is None:
            loader, dealt = self.loader, self._dealt
            # What this version of torch does not know, it does not have.
            passed = {name: getattr(loader, name) for name in _PASSED_ON if hasattr(loader, name)}
            self._inner = DataLoader(loader.dataset, batch_sampler=dealt, **passed)  # type: ignore[arg-type]
        return self._inner


def _overrides(thing: object, base: type, name: str) -> bool:
    """Whether a class does otherwise than its base; torchdata's do the same, and count."""
    owner = next((cls for cls in type(thing).__mro__ if name in vars(cls)), base)
    return owner is not base and owner not in base.__mro__ and not owner.__module__.startswith("torchdata.")


def _shuffles(sampler: object) -> bool:
    """Whether this gives every sample once, in random order."""
    is_random = type(sampler) is RandomSampler or (
        type(sampler).__module__.startswith("torchdata.") and type(sampler).__name__ == "RandomSampler"
    )
    # Read from the object: torchdata's is no subclass of torch's.
    known: Any = sampler
    return is_random and not known.replacement and known.num_samples == len(known.data_source)


def _shuffled(count: int, seed: int) -> SampleOrder:
    generator = torch.Generator()
    generator.manual_seed(seed)
    return SampleOrder(torch.randperm(count, generator=generator).numpy())


def _distributed(sampler: DistributedSampler[Any]) -> Callable[[int, int], SampleOrder]:
    def make(epoch: int, seed: int) -> SampleOrder:
        count = len(sampler.dataset)  # type: ignore[arg-type]
        if not sampler.shuffle:
            return SampleOrder(np.arange(count, dtype=np.int64))
        return _shuffled(count, sampler.seed + (sampler.epoch or epoch))

    return make


def _refuse_shards(sampler: object) -> None:
    """A sampler that gives one rank's share only must not be dealt again."""
    for one in (sampler, getattr(sampler, "sampler", None)):  # a batch sampler may group what another gives
        if getattr(one, "num_replicas", 1) not in (None, 1):
            raise UsageError(
                f"job.batches: {type(one).__qualname__} gives one rank's share of the samples (num_replicas is not 1), "
                "and the job needs all to deal them again after a loss. Give it num_replicas=1 and rank=0"
            )


def _samples_of(sampler: Iterable[Any]) -> SampleOrder:
    return SampleOrder(np.fromiter((_whole(index, sampler) for index in _all_of(sampler)), np.int64))


def _batches_of(sampler: Iterable[Iterable[Any]]) -> SampleOrder:
    batches = [[_whole(index, sampler) for index in batch] for batch in _all_of(sampler)]
    ends = np.cumsum([len(batch) for batch in batches], dtype=np.int64)
    return SampleOrder(np.array([index for batch in batches for index in batch], np.int64), ends)


def _all_of(sampler: Iterable[Any]) -> list[Any]:
    """Everything that a sampler gives; `UsageError` if there is no telling whether it ends."""
    kind = type(sampler).__qualname__
    try:
        length = len(sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        raise UsageError(
            f"job.batches: {kind} has no length, and an epoch is dealt to ranks as a whole. Give it __len__"
        ) from None
    most = 2 * length + _TOO_MANY  # lengths are often estimates; no end is another matter
    found = list(islice(iter(sampler), most + 1))
    if len(found) > most:
        raise UsageError(f"job.batches: {kind} says it gives {length}, and gives more than {most}. Let it end")
    return found


def _whole(index: Any, sampler: object) -> int:
    try:
        return operator.index(index)
    except TypeError:
        raise UsageError(
            f"job.batches: {type(sampler).__qualname__} gives {type(index).__qualname__} as an index, and ranks share "
            "whole numbers only. Let it give numbers, and look up what they stand for in the dataset"
        ) from None


def _end_workers(iterator: object) -> None:
    # Torch ends them when the iterator is collected; a traceback may hold it for long.
    end = getattr(iterator, "_shutdown_workers", None)
    if end is not None:
        end()


def data_digests(dataset: Any) -> dict[str, str]:
    """Digests of the arrays and sequences that a dataset holds: of their lengths and of some of their elements.

    Different digests prove different data, such as the indices of a random split that was made without a seed. Equal
    ones prove nothing. No sample is fetched.

    >>> sorted(data_digests(torch.utils.data.Subset([4, 5, 6], [2, 0])))
    ['dataset', 'dataset.dataset', 'dataset.indices']
    """
    found: dict[str, str] = {}
    left: list[tuple[str, Any, int]] = [("dataset", dataset, 0)]
    while left and len(found) < _MOST_DIGESTS:
        name, thing, depth = left.pop(0)
        if type(thing) is tuple and not _is_plain(thing[:1]):
            left += [(f"{name}[{index}]", part, depth) for index, part in enumerate(thing[:_MOST_DIGESTS])]
        elif (sample := _sample_of(thing)) is not None:
            found[name] = xxhash.xxh3_64_hexdigest(sample)
        elif depth < _DEPTH and isinstance(parts := getattr(thing, "__dict__", None), dict):
            if isinstance(thing, Dataset):
                found[name] = xxhash.xxh3_64_hexdigest(repr((type(thing).__qualname__, _length_of(thing))).encode())
            left += [(f"{name}.{key}", part, depth + 1) for key, part in parts.items() if not key.startswith("_")]
    return found


def _sample_of(thing: Any) -> bytes | None:
    """Some of the elements of an array or of a sequence of plain values, as bytes; None for anything else."""
    if isinstance(thing, torch.Tensor | np.ndarray):
        rows = [thing] if not thing.ndim else [thing[row] for row in _spread(len(thing), _ROWS)]
        firsts = [row.reshape(-1)[:_ROWS].tolist() for row in rows]
        return repr((str(thing.dtype), tuple(thing.shape), firsts)).encode()
    if isinstance(thing, str | bytes):
        return repr((len(thing), thing[:_ITEMS], thing[-_ITEMS:])).encode()
    if isinstance(thing, list | tuple | range):
        some = [thing[index] for index in _spread(len(thing), _ITEMS)]
        return repr((len(thing), some)).encode() if _is_plain(some) else None
    return None


def _spread(length: int, most: int) -> range:
    return range(0, length, max(1, length // most))


def _is_plain(items: Sequence[Any]) -> bool:
    return all(
        isinstance(item, int | float | str | bytes | None) or (isinstance(item, list | tuple) and _is_plain(item))
        for item in items
    )


def _length_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
