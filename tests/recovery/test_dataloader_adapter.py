"""What a user's loader is, and that its batches are those that it would have made itself."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from evergrad.errors import StateError, UsageError
from evergrad.recovery.dataloader_adapter import BatchIterator, BatchSource, SampleOrder, data_digests


class Noisy(Dataset[tuple[int, float]]):
    """Samples that are their number and something drawn: an augmentation."""

    def __init__(self, count: int = 23) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, float]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return index, torch.rand(()).item()


class Processes(Noisy):
    """Samples that say which process made them."""

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(os.getpid())


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


class Endless:
    """Says that it has an end."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


class Buckets:
    """A batch sampler of the user's own: batches of different sizes."""

    batches: Sequence[list[int]] = ([3, 4], [0], [9, 8, 7], [1], [2, 5])

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


class Tape:
    """A loader that knows where it is, and nothing else about it is known."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 4:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class StatefulLoader(DataLoader[Any]):
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


class Repeating(DataLoader[Any]):
    def __iter__(self) -> Any:
        yield from super().__iter__()
        yield from super().__iter__()


def loaded(source: BatchSource, rank: int = 0, world_size: int = 1, epoch: int = 0, **how: Any) -> BatchIterator:
    """The batches of a rank, as a job asks for them."""
    order = source.order(epoch)
    deal = source.deal(order, world_size)
    return source.iterate((order[deal.share(rank, i).positions] for i in range(deal.num_batches)), **how)


def as_lists(batches: Any) -> list[Any]:
    return [[part.tolist() for part in batch] for batch in batches]


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 40),
    world_size=st.integers(1, 6),
    batch_size=st.integers(1, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    drop_tail=st.booleans(),
    epoch=st.integers(0, 3),
    seed=st.integers(0, 3),
)
def test_batches_and_random_numbers_are_those_of_a_plain_script(
    count: int,
    world_size: int,
    batch_size: int,
    shuffle: bool,
    drop_last: bool,
    drop_tail: bool,
    epoch: int,
    seed: int,
) -> None:
    dataset = Noisy(count)
    for rank in {0, world_size - 1}:
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, world_size, rank, shuffle=shuffle, seed=seed, drop_last=drop_tail
        )
        sampler.set_epoch(epoch)
        plain: DataLoader[Any] = DataLoader(dataset, batch_size, sampler=sampler, drop_last=drop_last)
        torch.manual_seed(7)
        expected, state = as_lists(plain), torch.get_rng_state()
        # The user's loader belongs to a job: its sampler has the rank and the size of another world.
        theirs: DistributedSampler[Any] = DistributedSampler(dataset, 3, 1, shuffle, seed, drop_tail)
        source = BatchSource.of(DataLoader(dataset, batch_size, sampler=theirs, drop_last=drop_last))
        assert not source.must_share
        torch.manual_seed(7)
        assert as_lists(loaded(source, rank, world_size, epoch)) == expected
        assert torch.equal(torch.get_rng_state(), state)


def test_shuffle_is_that_of_a_distributed_sampler() -> None:
    dataset = Noisy()
    source = BatchSource.of(DataLoader(dataset, 4, shuffle=True))
    for epoch in range(3):
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, 1, 0, seed=5)
        sampler.set_epoch(epoch)
        assert source.order(epoch, seed=5).indices.tolist() == list(sampler)
    assert not source.must_share


def test_an_epoch_that_the_user_set_goes_before_the_number_of_the_call() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(Noisy(), 1, 0)
    source = BatchSource.of(DataLoader(Noisy(), sampler=sampler))
    second = source.order(1).indices.tolist()
    sampler.set_epoch(1)
    assert source.order(6).indices.tolist() == second


def test_after_the_first_batch_the_generator_is_where_the_plain_loader_leaves_it() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(Noisy(), 2, 0)
    plain = DataLoader(Noisy(), 4, sampler=sampler)
    torch.manual_seed(3)
    first = next(iter(plain))
    expected = torch.get_rng_state()
    torch.manual_seed(3)
    found = next(loaded(BatchSource.of(plain), 0, 2))
    assert torch.equal(torch.get_rng_state(), expected)
    assert as_lists([found]) == as_lists([first])


@pytest.mark.parametrize("own", [False, True])
def test_generators_can_be_left_as_they_were(own: bool) -> None:
    generator = torch.Generator().manual_seed(1) if own else torch.default_generator
    source = BatchSource.of(DataLoader(Noisy(), 4, generator=generator if own else None))
    before = generator.get_state()
    loaded(source, keep_rng=True)
    assert torch.equal(generator.get_state(), before)
    loaded(source)
    assert not torch.equal(generator.get_state(), before), "or there was nothing to keep"


def test_workers_make_what_the_plain_loaders_workers_make_and_end_when_closed() -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(Noisy(), 2, 1)
    plain = DataLoader(Noisy(), 2, sampler=sampler, num_workers=2, prefetch_factor=1)
    torch.manual_seed(3)
    expected, state = as_lists(plain), torch.get_rng_state()
    source = BatchSource.of(plain)
    torch.manual_seed(3)
    assert as_lists(loaded(source, 1, 2)) == expected
    assert torch.equal(torch.get_rng_state(), state)
    source = BatchSource.of(DataLoader(Processes(), 1, num_workers=2, prefetch_factor=1))
    taken: list[int] = []
    with source.iterate(taken.append(index) or [index] for index in range(23)) as batches:  # type: ignore[func-returns-value]
        held = batches._iterator  # as a traceback does
        pids = {int(next(batches)[1]) for _ in range(4)}
        assert len(taken) <= 4 + 2, "two workers prefetch one each"
    assert held is not None
    assert os.getpid() not in pids
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(StopIteration):
        next(batches)
    batches.close()


def test_persistent_workers_outlive_an_epoch_and_a_re_deal() -> None:
    source = BatchSource.of(DataLoader(Processes(), 1, num_workers=1, persistent_workers=True))
    with source.iterate([[index] for index in range(9)]) as batches:
        first = next(batches)
    with source.iterate([[20], [21]], keep_rng=True) as batches:
        held, again = batches._iterator, as_lists(batches)
    assert held is not None
    assert [numbers for numbers, _ in again] == [[20], [21]], "nothing of the iteration before is left"
    pid = int(first[1])
    assert {int(pids[0]) for _, pids in again} == {pid}
    source.close()
    source.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_without_workers_nothing_is_taken_ahead() -> None:
    taken: list[int] = []
    source = BatchSource.of(DataLoader(Noisy(), 4))
    batches = source.iterate(taken.append(index) or [index] for index in range(9))  # type: ignore[func-returns-value]
    assert taken == []
    next(batches)
    assert taken == [0]


def test_samples_are_collated_as_the_loader_does() -> None:
    loader = DataLoader(Noisy(), 3, collate_fn=lambda rows: tuple(row[0] for row in rows))
    assert list(loaded(BatchSource.of(loader), 1, 2))[:2] == [(1, 3, 5), (7, 9, 11)]


@pytest.mark.parametrize(
    ("sampler", "count"),
    [
        (WeightedRandomSampler([0.1] * 23, 11), 11),
        (SubsetRandomSampler([4, 5, 6]), 3),
        (RandomSampler(Noisy(), replacement=True), 23),
        (RandomSampler(Noisy(), num_samples=7), 7),
        ([5, 1, 1, 2], 4),
        ([np.int32(5), torch.tensor(1)], 2),
    ],
)
def test_another_samplers_order_is_made_once_and_shared(sampler: Any, count: int) -> None:
    source = BatchSource.of(DataLoader(Noisy(), 2, sampler=sampler))
    assert source.must_share
    torch.manual_seed(0)
    order = source.order(0)
    torch.manual_seed(0)
    assert order.indices.tolist() == [int(index) for index in sampler]
    assert len(order) == count


def test_the_units_of_a_batch_sampler_are_its_batches() -> None:
    source = BatchSource.of(DataLoader(Noisy(), batch_sampler=Buckets()))  # type: ignore[arg-type]
    assert source.must_share
    found = [[numbers for numbers, _ in as_lists(loaded(source, rank, 2))] for rank in range(2)]
    assert found == [[[3, 4], [9, 8, 7], [2, 5]], [[0], [1], [3, 4]]]
    order = source.order(0)
    assert order[np.array([1, 4])] == [0, 2, 5], "two batches in one where a step keeps its size"


def test_a_plain_batch_sampler_is_looked_through() -> None:
    by = BatchSampler(SequentialSampler(Noisy()), 5, drop_last=True)
    source = BatchSource.of(DataLoader(Noisy(), batch_sampler=by))
    assert (source.batch_size, source.drop_last, source.must_share) == (5, True, False)
    assert len(list(loaded(source))) == 4


@pytest.mark.parametrize(
    "order", [SampleOrder(np.array([2, 0, 1])), SampleOrder(np.array([2, 0, 1]), np.array([1, 3]))]
)
def test_an_order_survives_its_state(order: SampleOrder) -> None:
    found = SampleOrder.from_state(order.state_dict())
    assert len(found) == len(order)
    assert found[np.array([1, 0])] == order[np.array([1, 0])]


@pytest.mark.parametrize(
    "state", [{}, {"indices": "?", "ends": None}, {"indices": [1], "ends": [2]}, {"indices": [1, 2], "ends": [2, 1, 2]}]
)
def test_what_is_not_an_order_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(StateError, match="order of an epoch"):
        SampleOrder.from_state(state)


def test_a_stateful_loader_over_a_map_style_dataset_is_a_dataloader() -> None:
    source = BatchSource.of(StatefulLoader(Noisy(), 4))
    assert not source.opaque
    assert len(list(loaded(source))) == 6


def test_torchdatas_samplers_do_what_torchs_do() -> None:
    def of_torchdata(base: type, **members: Any) -> Any:
        return type(base.__name__, (base,), {"__module__": "torchdata.stateful_dataloader.sampler", **members})

    random = of_torchdata(RandomSampler, __iter__=lambda self: iter(()))(Noisy())
    grouping = of_torchdata(BatchSampler, __iter__=lambda self: iter(()))(random, 4, False)
    source = BatchSource.of(DataLoader(Noisy(), batch_sampler=grouping))
    assert (source.must_share, source.batch_size) == (False, 4)
    assert sorted(source.order(0).indices.tolist()) == [*range(23)]


@pytest.mark.parametrize("loader", [Tape(), StatefulLoader(Stream())])
def test_what_only_knows_its_state_is_iterated_as_it_is(loader: Any) -> None:
    source = BatchSource.of(loader)
    assert source.opaque
    with source.iterate() as batches:
        assert len([int(batch) for batch in batches]) in (4, 9)


def test_an_opaque_loader_goes_on_where_its_state_says() -> None:
    first, second = Tape(), Tape()
    batches = BatchSource.of(first).iterate()
    assert [next(batches), next(batches)] == [1, 2]
    second.load_state_dict(first.state_dict())
    assert list(BatchSource.of(second).iterate()) == [3, 4]


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        ([1, 2, 3], "a list cannot be dealt"),
        ((batch for batch in range(3)), "a generator cannot be dealt"),
        (Noisy(), "a Noisy cannot be dealt"),
        (None, "a NoneType cannot be dealt"),
        (DataLoader(Stream()), r"has an IterableDataset \(Stream\).*Pass a DataLoader"),
        (DataLoader(Noisy(), batch_size=None), "batch_size=None"),
        (Repeating(Noisy()), "Repeating changes __iter__"),
        (
            DataLoader(Noisy(), batch_sampler=type("Own", (Buckets,), {"num_replicas": 4})()),  # type: ignore[arg-type]
            "one rank's share",
        ),
        (DataLoader(Noisy(), sampler=type("Own", (Endless,), {"num_replicas": 4})()), "one rank's share"),
    ],
)
def test_what_cannot_be_dealt_again_is_refused(loader: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        BatchSource.of(loader)


@pytest.mark.parametrize(
    ("sampler", "why"),
    [
        (Endless(), "says it gives 5, and gives more than 1010"),
        (iter([1, 2]), "has no length"),
        (["a.png", "b.png"], "gives str as an index"),
    ],
)
def test_an_order_that_ranks_cannot_share_is_refused(sampler: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        BatchSource.of(DataLoader(Noisy(), sampler=sampler)).order(0)


class Images(Dataset[Any]):
    """A dataset of the user's own, from which no sample may be fetched."""

    def __init__(self, pixels: Any, files: list[str]) -> None:
        self.pixels, self.files, self._cache = pixels, files, {"seen": 3}

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError(index)


def split(seed: int) -> Dataset[Any]:
    images = Images(np.arange(600.0).reshape(100, 6), [f"{index}.png" for index in range(100)])
    return torch.utils.data.random_split(images, [80, 20], torch.Generator().manual_seed(seed))[0]


def test_datasets_are_told_apart_by_what_they_hold_without_fetching_a_sample() -> None:
    first, again, other = map(data_digests, (split(1), split(1), split(2)))
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {"dataset.indices"}
    assert set(first) == {"dataset", "dataset.indices", "dataset.dataset", "dataset.dataset.pixels",
                          "dataset.dataset.files"}  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.arange(50_000), torch.arange(50_000).flip(0)),
        (torch.zeros(()), torch.ones(())),
        (np.zeros((9, 2), np.float32), np.zeros((9, 2))),
        (list(range(5000)), list(range(1, 5001))),
        ("a text", "a test"),
        ([("a.png", 0)], [("a.png", 1)]),
        (torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
    ],
)
def test_contents_of_every_kind_are_compared(one: Any, other: Any) -> None:
    make = lambda part: data_digests(Images(part, []))  # noqa: E731
    assert make(one) == make(one)
    assert make(one) != make(other)


def test_a_dataset_that_nothing_is_known_of_has_no_digests_but_its_length() -> None:
    class Odd(Dataset[int]):
        __slots__ = ()

        def __len__(self) -> int:
            raise NotImplementedError

    assert list(data_digests(Odd())) == ["dataset"]
    assert data_digests(object()) == {}
    assert BatchSource.of(Tape()).data == {}
