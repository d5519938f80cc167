"""What only one rank has, between a point and the next step: two witnesses that agree are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from guarded import Net, flip, gloo, together, trained

from evergrad.records import Check
from evergrad.recovery.guard.local_state_guard import LocalStateGuard
from evergrad.recovery.guard.replicas import GuardResult
from evergrad.recovery.local_state import LocalState, NeighbourState
from evergrad.recovery.process_group import Group, SingleRankGroup

SIZE, POINT = 3, 7
MEAN = "model/norm.running_mean"


class Loader:
    """A loader that alone knows where it is."""

    def __init__(self, place: int) -> None:
        self.place = place

    def state_dict(self) -> dict[str, Any]:
        return {"place": "x" * self.place}


class Owners:
    """Ranks that have passed a point, each with buffers of its own."""

    def __init__(self, groups: list[Group], *, keeps: bool = True, loaders: bool = False) -> None:
        self.groups = groups
        self.nets = [trained()[0] for _ in groups]
        self.told: list[dict[str, Any]] = []
        self.guards: list[LocalStateGuard] = []
        self.keepings = [NeighbourState() for _ in groups]
        for rank, net in enumerate(self.nets):
            net.norm.running_mean.add_(rank)  # type: ignore[union-attr]
            buffers = {f"model/{name}": buffer for name, buffer in net.named_buffers()}
            self.guards.append(
                LocalStateGuard(buffers, lambda event, **fields: self.told.append({"event": event} | fields))
            )
        self.owns = [LocalState(list(net.buffers())) for net in self.nets]
        for rank, own in enumerate(self.owns):
            own.loader = Loader(10 * rank + 1) if loaders else None

        def pass_point(rank: int) -> None:
            taken = self.owns[rank].capture()
            self.guards[rank].note(POINT, taken)
            if keeps and len(groups) > 1:
                self.keepings[rank].exchange(groups[rank], POINT, taken, (rank - 1) % len(groups), sizes_vary=loaders)

        self._all(pass_point)

    def check(self) -> GuardResult:
        """What all ranks found; it must be the same."""

        def act(rank: int) -> GuardResult:
            before = (rank - 1) % len(self.groups)
            return self.guards[rank].check(self.groups[rank], self.keepings[rank], before, step=50)

        found: list[GuardResult] = self._all(act)
        assert all(each == found[0] for each in found)
        return found[0]

    def kept(self, rank: int) -> torch.Tensor:
        """What the next rank holds of this one's."""
        found = self.keepings[(rank + 1) % len(self.groups)].find(rank, POINT)
        assert found is not None
        return found

    def taken(self, rank: int) -> torch.Tensor:
        noted = self.guards[rank]._noted
        assert noted is not None
        return noted.taken

    def place(self, rank: int) -> int:
        """Where the first buffer lies in what is taken."""
        return self.guards[rank]._spans(self.taken(rank).numel())[MEAN][0]

    def _all(self, act: Callable[[int], Any]) -> list[Any]:
        return together(*(lambda rank=rank: act(rank) for rank in range(len(self.groups))))  # type: ignore[misc]


def mean(net: Net) -> torch.Tensor:
    found = net.norm.running_mean
    assert found is not None
    return found


@pytest.mark.parametrize("loaders", [False, True])
def test_buffers_that_differ_between_ranks_are_ok(loaders: bool) -> None:
    with gloo(SIZE) as groups:
        owners = Owners(groups, loaders=loaders)
        assert owners.check() == GuardResult(Check.OK, 50)
        assert all(guard.is_sound() for guard in owners.guards)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_bit_flipped_in_a_buffer_is_named_and_healed(keeps: bool) -> None:
    with gloo(SIZE) as groups:
        owners = Owners(groups, keeps=keeps)
        right = mean(owners.nets[1]).clone()
        flip(mean(owners.nets[1]), 2, 23)
        assert [guard.is_sound() for guard in owners.guards] == [True, False, True]
        checked = owners.check()
        assert checked.status is Check.DEGRADED
        assert [(each.rank, each.path) for each in checked.differences] == [(1, MEAN)]
        change = checked.differences[0].change
        assert change is not None
        assert (change.count, change.first, change.bits) == (1, 2, 1 << 23)
        assert torch.equal(mean(owners.nets[1]), right)
        assert [each["event"] for each in owners.told] == ["corruption_found"]
        assert owners.check().status is Check.OK, "it can be judged again"


@pytest.mark.parametrize("loaders", [False, True])
def test_a_neighbours_copy_that_went_bad_is_renewed(loaders: bool) -> None:
    with gloo(SIZE) as groups:
        owners = Owners(groups, loaders=loaders)
        for place in (0, owners.place(2), -1):  # generators, a buffer, and what comes last
            flip(owners.kept(2), place % owners.kept(2).numel(), 0)
        checked = owners.check()
        assert checked.status is Check.DEGRADED
        assert {each.rank for each in checked.differences} == {0}, "rank 0 holds what the last one has"
        assert "held for rank 2" in checked.differences[0].what
        assert torch.equal(owners.kept(2), owners.taken(2))
        assert owners.check().status is Check.OK


def test_a_buffer_is_healed_by_the_neighbour_if_the_copy_here_went_bad_as_well() -> None:
    with gloo(SIZE) as groups:
        owners = Owners(groups)
        right = mean(owners.nets[0]).clone()
        flip(mean(owners.nets[0]), 0, 30)
        flip(owners.taken(0), owners.place(0), 3)
        checked = owners.check()
        assert checked.status is Check.DEGRADED
        assert {(each.rank, each.path) for each in checked.differences} == {(0, MEAN)}
        assert torch.equal(mean(owners.nets[0]), right)
        assert owners.check().status is Check.OK


def test_a_digest_that_went_bad_is_outvoted() -> None:
    with gloo(SIZE) as groups:
        owners = Owners(groups)
        noted = owners.guards[2]._noted
        assert noted is not None
        noted.digests[1] = bytes(16)
        before = mean(owners.nets[2]).clone()
        assert owners.check().status is Check.DEGRADED
        assert torch.equal(mean(owners.nets[2]), before)
        assert owners.check().status is Check.OK


def test_what_the_script_itself_has_changed_is_left_alone() -> None:
    with gloo(SIZE) as groups:
        owners = Owners(groups)
        mean(owners.nets[1]).mul_(0.5)
        changed = mean(owners.nets[1]).clone()
        assert owners.guards[1].is_sound()
        assert owners.check().status is Check.OK
        assert torch.equal(mean(owners.nets[1]), changed)


def test_without_two_that_agree_it_is_said_and_nothing_is_changed() -> None:
    with gloo(SIZE) as groups:
        owners = Owners(groups)
        place = owners.place(1)
        flip(mean(owners.nets[1]), 0, 1)
        flip(owners.taken(1), place, 2)
        flip(owners.kept(1), place, 3)
        before = mean(owners.nets[1]).clone()
        noted = owners.guards[1]._noted
        assert noted is not None
        checked = owners.check()
        assert checked.status is Check.FAILED
        assert checked.differences[0].what == "no two of its copies agree"
        assert torch.equal(mean(owners.nets[1]), before)


def test_ranks_that_noted_different_points_judge_nothing() -> None:
    with gloo(SIZE) as groups:
        owners = Owners(groups)
        owners.guards[1].forget()
        flip(mean(owners.nets[2]), 0, 1)
        assert owners.check().status is Check.UNKNOWN


def test_a_rank_that_is_alone_heals_from_its_own_copy() -> None:
    owners = Owners([SingleRankGroup()])
    right = mean(owners.nets[0]).clone()
    flip(mean(owners.nets[0]), 1, 12)
    assert owners.check().status is Check.DEGRADED
    assert torch.equal(mean(owners.nets[0]), right)
