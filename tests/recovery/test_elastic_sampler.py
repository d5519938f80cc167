"""Which units go to which rank: as DistributedSampler while nothing fails, and each once whatever fails."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from evergrad.errors import StateError
from evergrad.recovery.elastic_sampler import ElasticEpoch, SampleAccounting, SampleCounts

epochs = st.builds(
    ElasticEpoch,
    st.integers(0, 200),
    st.integers(1, 8),
    st.integers(1, 7),
    pad=st.booleans(),
    drop_last=st.booleans(),
)


def dealt(epoch: ElasticEpoch, rank: int, first: int = 0) -> list[list[int]]:
    """What a rank gets from a batch on, as long as the epoch lasts."""
    return [epoch.share(rank, index).positions.tolist() for index in range(first, epoch.num_batches)]


def real_uses(epoch: ElasticEpoch, index: int) -> list[int]:
    """The units of a batch that are neither repeats nor idle."""
    shares = [epoch.share(rank, index) for rank in range(len(epoch.counts(index)))]
    return [int(unit) for share in shares if not share.idle for unit in share.positions[: share.count - share.padding]]


@settings(max_examples=100, deadline=None)
@given(
    units=st.integers(0, 60),
    world_size=st.integers(1, 9),
    batch_size=st.integers(1, 7),
    pad=st.booleans(),
    drop_last=st.booleans(),
)
def test_an_undisturbed_epoch_is_what_distributed_sampler_deals(
    units: int, world_size: int, batch_size: int, pad: bool, drop_last: bool
) -> None:
    epoch = ElasticEpoch(units, world_size, batch_size, pad=pad, drop_last=drop_last)
    for rank in range(world_size):
        sampler: DistributedSampler[Any] = DistributedSampler(
            range(units),  # type: ignore[arg-type]
            world_size,
            rank,
            shuffle=False,
            drop_last=not pad,
        )
        loader = DataLoader(range(units), batch_size, sampler=sampler, drop_last=drop_last)  # type: ignore[arg-type,var-annotated]
        assert dealt(epoch, rank) == [batch.tolist() for batch in loader]
    for index in range(epoch.num_batches):
        assert {epoch.weight(rank, [index]) for rank in range(world_size)} == {1 / world_size}
    used = Counter(unit for rank in range(world_size) for batch in dealt(epoch, rank) for unit in batch)
    epoch.use(0, epoch.num_batches)
    balance = epoch.accounting.summary()
    assert balance.is_complete
    assert (balance.used_once, balance.uses) == (len(used), used.total())
    assert balance.dropped == units - len(used)


@settings(max_examples=150, deadline=None)
@given(
    epoch=epochs,
    batch=st.sampled_from(["shrink", "constant", "scale_lr"]),
    changes=st.lists(st.tuples(st.integers(0, 12), st.integers(-1, 4)), max_size=9),
)
def test_whatever_is_lost_and_when_every_unit_is_used_once_but_for_booked_padding(
    epoch: ElasticEpoch, batch: Any, changes: list[tuple[int, int]]
) -> None:
    undisturbed = {unit for index in range(epoch.num_batches) for unit in real_uses(epoch, index)}
    applied: Counter[int] = Counter()
    padding = idle = index = 0
    for steps, lost in [*changes, (epoch.units, 0)]:
        stop = min(index + steps, epoch.num_batches)
        for now in range(index, stop):
            shares = [epoch.share(rank, now) for rank in range(epoch.world_size)]
            assert [share.count for share in shares] == epoch.counts(now).tolist()
            assert sum(epoch.weight(rank, [now]) for rank in range(epoch.world_size)) == pytest.approx(1)
            assert all(len(share.positions) >= 1 for share in shares)
            applied.update(real_uses(epoch, now))
            padding += sum(share.padding for share in shares)
            idle += sum(share.idle for share in shares)
        epoch.use(index, stop)
        index = stop
        # The next step is rolled back: it is dealt again, to fewer ranks, or to one more that has joined.
        epoch.redeal(index, max(1, epoch.world_size - lost), batch=batch)
    assert applied == dict.fromkeys(undisturbed, 1)
    balance = epoch.accounting.summary()
    assert balance.is_complete
    assert (balance.used_once, balance.lost, balance.twice) == (len(undisturbed), 0, 0)
    assert (balance.padding, balance.idle) == (padding, idle)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), epoch=epochs)
def test_forward_recovery_books_what_a_dead_rank_had(data: st.DataObject, epoch: ElasticEpoch) -> None:
    index, lost, used = 0, set[int](), set[int]()
    while index < epoch.num_batches:
        dead = data.draw(st.sets(st.integers(0, epoch.world_size - 1), max_size=epoch.world_size - 1))
        for rank in range(epoch.world_size):
            share = epoch.share(rank, index)
            if not share.idle:
                (lost if rank in dead else used).update(share.positions.tolist())
        epoch.lose(index, index + 1, dead)
        index += 1
        epoch.redeal(index, epoch.world_size - len(dead))
    balance = epoch.accounting.summary()
    assert balance.is_complete
    assert balance.used_once == len(used)
    assert balance.lost == len(lost - used)  # padding may bring back what was lost


@settings(max_examples=100, deadline=None)
@given(data=st.data(), epoch=epochs, batch=st.sampled_from(["shrink", "constant"]))
def test_a_saved_epoch_goes_on_as_the_one_that_was_saved(data: st.DataObject, epoch: ElasticEpoch, batch: Any) -> None:
    index = data.draw(st.integers(0, epoch.num_batches))
    epoch.use(0, index)
    epoch.redeal(index, data.draw(st.integers(1, 8)), batch=batch)
    state = epoch.state_dict()
    found = ElasticEpoch.from_state(state)
    for one in (epoch, found):
        one.redeal(min(index + 1, one.num_batches), 3, batch=batch)
    assert found.num_batches == epoch.num_batches
    for rank in range(found.world_size):
        assert dealt(found, rank, index + 1) == dealt(epoch, rank, index + 1)
    found.use(index, found.num_batches)
    epoch.use(index, epoch.num_batches)
    assert found.accounting.summary() == epoch.accounting.summary()
    assert epoch.accounting.summary().is_complete


def test_what_is_used_later_is_not_in_a_state_that_was_taken_before() -> None:
    epoch = ElasticEpoch(40, 4, 2)
    state = epoch.state_dict()
    epoch.use(0, 3)
    epoch.redeal(3, 2)
    assert ElasticEpoch.from_state(state).accounting.summary() == ElasticEpoch(40, 4, 2).accounting.summary()
    assert ElasticEpoch.from_state(state).world_size == 4


def test_a_saved_epoch_is_arrays_and_plain_values() -> None:
    def plain(value: object) -> bool:
        if isinstance(value, dict):
            return all(plain(one) for one in value.values())
        return isinstance(value, (bool, int, np.ndarray))

    state = ElasticEpoch(10, 2, 3).state_dict()
    assert plain(state)
    books: Any = state["books"]
    assert books["marks"].nbytes == 10


def test_constant_batches_keep_the_samples_of_a_step() -> None:
    epoch = ElasticEpoch(64, world_size=4, batch_size=4)
    epoch.use(0, 1)
    epoch.redeal(1, 3, batch="constant")
    assert epoch.num_batches == 4
    assert epoch.counts(1).tolist() == [6, 5, 5]
    assert [epoch.weight(rank, [1, 2]) for rank in range(3)] == [12 / 32, 10 / 32, 10 / 32]


def test_shrinking_batches_keep_the_samples_of_a_rank() -> None:
    epoch = ElasticEpoch(64, world_size=4, batch_size=4)
    epoch.use(0, 1)
    epoch.redeal(1, 3)
    assert epoch.num_batches == 5
    assert [epoch.counts(index).tolist() for index in range(1, 5)] == [[4, 4, 4]] * 4
    assert epoch.weight(2, range(1, 5)) == 1 / 3


def test_a_rank_without_samples_runs_one_that_weighs_nothing() -> None:
    epoch = ElasticEpoch(9, world_size=4, batch_size=1)
    epoch.use(0, 1)
    epoch.redeal(1, 3)
    share = epoch.share(2, 2)
    assert (share.idle, share.count, share.positions.tolist()) == (True, 0, [7])
    assert [epoch.weight(rank, [2]) for rank in range(3)] == [0.5, 0.5, 0.0]
    assert epoch.weight(2, [1, 2]) == 1 / 5
    epoch.use(1, 3)
    assert epoch.accounting.summary() == SampleCounts(9, 9, 9, 0, 1, 0, 0, 0, 0)


def test_survivors_share_the_weight_of_a_dead_rank() -> None:
    epoch = ElasticEpoch(9, world_size=4, batch_size=1)
    assert epoch.weight(2, [0], among=(0, 2, 3)) == 1 / 3
    epoch.redeal(0, 4, batch="constant")
    epoch.use(0, 1)
    epoch.redeal(1, 3)
    assert epoch.weight(2, [2], among=(2,)) == 0.0, "nobody who is left has a sample"


def test_dropping_the_last_batch_drops_none_that_the_undisturbed_epoch_uses() -> None:
    epoch = ElasticEpoch(100, world_size=4, batch_size=8, drop_last=True)
    epoch.use(0, 1)
    epoch.redeal(1, 3)
    assert sorted(unit for index in range(1, epoch.num_batches) for unit in real_uses(epoch, index)) == [*range(32, 96)]
    assert epoch.counts(epoch.num_batches - 1).tolist() == [6, 5, 5]
    epoch.use(1, epoch.num_batches)
    assert epoch.accounting.summary().dropped == 4


def test_a_spare_in_a_dead_ranks_place_changes_nothing() -> None:
    epoch, undisturbed = ElasticEpoch(50, 4, 3), ElasticEpoch(50, 4, 3)
    epoch.use(0, 2)
    epoch.redeal(2, 3)
    epoch.redeal(2, 4)
    assert [dealt(epoch, rank, 2) for rank in range(4)] == [dealt(undisturbed, rank, 2) for rank in range(4)]


def test_a_loss_in_the_last_batch_leaves_nothing_to_deal() -> None:
    epoch = ElasticEpoch(10, 4, 2)
    epoch.use(0, epoch.num_batches)
    ended = epoch.num_batches
    epoch.redeal(ended, 3)
    assert epoch.num_batches == ended
    assert epoch.accounting.summary().padding == 2


def test_a_second_loss_in_the_same_step_goes_back_behind_the_first_re_deal() -> None:
    epoch = ElasticEpoch(40, 4, 1)
    epoch.use(0, 2)
    epoch.redeal(3, 3)  # in the second backward pass of a step that began with batch 2
    epoch.redeal(2, 2)
    assert epoch.share(0, 2).positions.tolist() == [8]
    epoch.use(2, epoch.num_batches)
    assert epoch.accounting.summary().is_complete


def test_batches_of_the_past_stay_as_they_were_dealt() -> None:
    epoch = ElasticEpoch(40, 4, 2)
    before = [epoch.share(rank, 1).positions.tolist() for rank in range(4)]
    epoch.use(0, 2)
    epoch.redeal(2, 3)
    assert [epoch.share(rank, 1).positions.tolist() for rank in range(4)] == before


@pytest.mark.parametrize(
    "act",
    [
        lambda epoch: epoch.use(0, 1),
        lambda epoch: epoch.lose(1, 2, [0]),
        lambda epoch: epoch.use(2, 99),
        lambda epoch: epoch.lose(2, 3, [4]),
        lambda epoch: epoch.redeal(1, 3),
        lambda epoch: epoch.redeal(99, 3),
        lambda epoch: epoch.share(4, 2),
        lambda epoch: epoch.share(0, 99),
        lambda epoch: epoch.weight(0, []),
    ],
)
def test_no_batch_is_booked_twice_and_no_unknown_one_is_dealt(act: Any) -> None:
    epoch = ElasticEpoch(40, 4, 2)
    epoch.use(0, 2)
    with pytest.raises(AssertionError):
        act(epoch)
    assert epoch.accounting.summary().uses == 16


def test_the_books_contradict_a_deal_that_gives_a_unit_twice() -> None:
    books = SampleAccounting(10)
    books.record_used(0, 4)
    books.record_used(3, 6)
    balance = books.summary()
    assert (balance.twice, balance.used_once, balance.unused) == (1, 6, 4)
    assert not balance.is_balanced


def test_the_books_contradict_a_use_of_what_was_lost_or_dropped() -> None:
    books = SampleAccounting(6, dropped_from=5)
    books.record_used(0, 4, lost=np.array([True, False, True, False]))
    assert books.summary().lost == 2
    books.record_used(2, 3)
    books.record_used(5, 6)
    assert books.summary().twice == 2


def test_a_unit_that_was_used_cannot_be_lost() -> None:
    books = SampleAccounting(4)
    books.record_used(0, 2)
    books.record_used(0, 4, lost=np.array([True, False, True, False]))
    balance = books.summary()
    assert (balance.used_once, balance.lost, balance.twice) == (3, 1, 1)


def test_the_repeat_of_a_lost_unit_is_its_one_use() -> None:
    epoch = ElasticEpoch(3, world_size=4, batch_size=1)
    epoch.lose(0, 1, [0])
    assert epoch.accounting.summary() == SampleCounts(3, 3, 3, 0, 0, 0, 0, 0, 0)


def test_an_epoch_that_is_left_early_is_balanced_and_not_complete() -> None:
    epoch = ElasticEpoch(40, 4, 2)
    epoch.use(0, 2)
    balance = epoch.accounting.summary()
    assert balance.is_balanced
    assert not balance.is_complete
    assert balance.unused == 24


def test_a_balance_survives_json() -> None:
    epoch = ElasticEpoch(41, 4, 2)
    epoch.use(0, 3)
    balance = epoch.accounting.summary()
    assert SampleCounts.from_json(json.dumps(balance.to_json())) == balance
    with pytest.raises(StateError, match="schema_version"):
        SampleCounts.from_json({**balance.to_json(), "schema_version": 99})


@pytest.mark.parametrize("broken", [{}, {"units": 3}, {"deals": []}, {"books": {}}, {"world_size": 0}])
def test_what_is_not_an_epoch_is_refused_and_changes_nothing(broken: dict[str, Any]) -> None:
    epoch = ElasticEpoch(40, 4, 2)
    state = {**epoch.state_dict(), **broken} if broken else {}
    with pytest.raises(StateError):
        epoch.load_state_dict(state)
    assert (epoch.units, epoch.world_size, epoch.num_batches) == (40, 4, 5)
