"""The guard: replicas that differ are named, and healed where a majority knows what is right."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from guarded import Net, flip, gloo, together, trained
from torch.optim import Optimizer

from evergrad.errors import UsageError
from evergrad.records import Check
from evergrad.recovery.guard.norms import GradientNorms, MagnitudeHistory, gradient_norm
from evergrad.recovery.guard.replicas import GuardResult, GuardSettings, ReplicaCheck, replica_of
from evergrad.recovery.process_group import Group, GroupBroken, SingleRankGroup


class Fleet:
    """As many ranks as one likes, all trained alike; each with a guard of its own."""

    def __init__(self, size: int, **settings: Any) -> None:
        self.made = [trained() for _ in range(size)]
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.guards = [
            ReplicaCheck(GuardSettings(**settings), lambda event, **fields: self.told.append((event, fields)))
            for _ in range(size)
        ]

    def net(self, rank: int) -> Net:
        return self.made[rank][0]

    def optimizer(self, rank: int) -> Optimizer:
        return self.made[rank][1]

    def check(self, groups: list[Group], step: int = 50) -> GuardResult:
        """What all ranks found; it must be the same."""

        def act(rank: int) -> GuardResult:
            return self.guards[rank].check(groups[rank], replica_of(*self.of(rank)), step=step)

        found: list[GuardResult] = together(*(lambda rank=rank: act(rank) for rank in range(len(groups))))  # type: ignore[misc]
        for one in found[1:]:
            assert (one.status, one.differences, one.why) == (found[0].status, found[0].differences, found[0].why)
        return found[0]

    def of(self, rank: int) -> tuple[Net, list[Optimizer]]:
        return self.made[rank][0], [self.made[rank][1]]

    def digests(self, rank: int) -> dict[str, bytes]:
        return replica_of(*self.of(rank)).digests()


def names(checked: GuardResult) -> list[tuple[int, str]]:
    return [(each.rank, each.path) for each in checked.differences]


def test_replicas_that_are_alike_are_ok_and_one_small_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    with gloo(4) as groups:
        first = groups[0]
        reduce = first.all_reduce
        monkeypatch.setattr(first, "all_reduce", lambda tensor: (sent.append(tensor.nbytes), reduce(tensor))[1])
        fleet = Fleet(4)
        checked = fleet.check(groups)
    assert checked.status is Check.OK
    assert checked.is_verified
    assert sent == [4 * 16], "16 bytes of each rank"
    assert [event for event, _ in fleet.told] == ["guard_check"]


def test_a_flipped_bit_is_named_to_the_bit_and_healed() -> None:
    fleet = Fleet(3)
    right = fleet.digests(0)
    flip(fleet.net(1).conv.weight, 17, 30)
    with gloo(3) as groups:
        checked = fleet.check(groups)
        assert checked.status is Check.DEGRADED
        assert names(checked) == [(1, "model/conv.weight")]
        (one,) = checked.differences
        assert one.healed
        assert one.change is not None
        assert (one.change.count, one.change.first, one.change.bits) == (1, 17, 1 << 30)
        assert one.change.expected == str(fleet.net(0).conv.weight.flatten()[17].item())
        assert fleet.digests(1) == right
        assert ("corruption_found", 1) in [(event, fields.get("rank")) for event, fields in fleet.told]
        assert fleet.check(groups).status is Check.OK


PLACES: dict[str, Callable[[Net, Optimizer], object]] = {
    "model/scale": lambda net, opt: flip(net.scale, 0, 3),
    "model/head.weight": lambda net, opt: flip(net.head.weight, 34, 15),
    "optimizer/state/1/exp_avg": lambda net, opt: flip(opt.state[net.conv.weight]["exp_avg"], 8, 0),
    "optimizer/state/2/step": lambda net, opt: flip(opt.state[net.conv.bias]["step"], 0, 22),
    "optimizer/param_groups/0/lr": lambda net, opt: opt.param_groups[0].__setitem__("lr", 2e-3),
    "optimizer/param_groups/0/betas": lambda net, opt: opt.param_groups[0].__setitem__("betas", (0.9, 0.99)),
}


@pytest.mark.parametrize("path", PLACES)
def test_whatever_ranks_must_have_alike_is_compared_and_healed(path: str) -> None:
    fleet = Fleet(3)
    right = fleet.digests(0)
    PLACES[path](*fleet.made[2])
    with gloo(3) as groups:
        checked = fleet.check(groups)
    assert (checked.status, names(checked)) == (Check.DEGRADED, [(2, path)])
    assert fleet.digests(2) == right
    assert fleet.optimizer(2).param_groups[0]["betas"] == (0.9, 0.999)


def test_several_wrong_ranks_are_healed_from_whoever_is_right_about_each() -> None:
    fleet = Fleet(5)
    right = fleet.digests(0)
    flip(fleet.net(0).norm.weight, 0, 31)  # rank 0 is no better than any other
    flip(fleet.net(1).norm.weight, 1, 31)
    flip(fleet.net(4).head.bias, 2, 0)
    fleet.net(3).conv.weight.data.zero_()
    with gloo(5) as groups:
        checked = fleet.check(groups)
    assert checked.status is Check.DEGRADED
    assert names(checked) == [
        (3, "model/conv.weight"), (4, "model/head.bias"), (0, "model/norm.weight"), (1, "model/norm.weight"),
    ]  # fmt: skip
    assert all(fleet.digests(rank) == right for rank in range(5))


def test_a_large_tensor_is_healed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evergrad.recovery.guard.replicas._CHUNK_BYTES", 64)
    fleet = Fleet(3)
    for element in (5, 60, 130):
        flip(fleet.net(0).conv.weight, element, 7)
    with gloo(3) as groups:
        (one,) = fleet.check(groups).differences
    assert one.change is not None
    assert (one.change.count, one.change.first) == (3, 5)
    assert fleet.digests(0) == fleet.digests(1)


@pytest.mark.parametrize("size", [2, 4])
def test_without_a_majority_it_is_said_and_nothing_is_changed(size: int) -> None:
    fleet = Fleet(size)
    for rank in range(size // 2, size):
        flip(fleet.net(rank).head.weight, 3, 14)
    flip(fleet.net(0).scale, 0, 1)  # even what could be healed is left
    before = [fleet.digests(rank) for rank in range(size)]
    with gloo(size) as groups:
        checked = fleet.check(groups)
    assert checked.status is Check.FAILED
    assert not checked.is_verified
    assert checked.why.startswith("no majority of ranks agrees: model/head.weight on rank")
    assert {path for _, path in names(checked)} == {"model/head.weight", "model/scale"}
    assert not any(each.healed for each in checked.differences)
    assert [fleet.digests(rank) for rank in range(size)] == before


def test_nothing_is_healed_if_the_job_is_to_go_back_to_a_verified_version() -> None:
    fleet = Fleet(3, heal="verified")
    flip(fleet.net(1).scale, 0, 1)
    before = fleet.digests(1)
    with gloo(3) as groups:
        checked = fleet.check(groups)
    assert (checked.status, names(checked)) == (Check.FAILED, [(1, "model/scale")])
    assert fleet.digests(1) == before


def test_ranks_that_do_not_have_the_same_tensors_are_named() -> None:
    fleet = Fleet(3)
    net = fleet.net(1)
    del fleet.optimizer(1).state[net.conv.bias]["exp_avg"]
    net.register_parameter("more", torch.nn.Parameter(torch.ones(2)))
    with gloo(3) as groups:
        checked = fleet.check(groups)
    assert checked.status is Check.FAILED
    assert [(each.rank, each.path, each.what) for each in checked.differences] == [
        (1, "optimizer/state/2/exp_avg", "missing"),
        (1, "model/more", "only here"),
    ]


def test_a_tensor_of_another_shape_is_named_and_not_overwritten() -> None:
    fleet = Fleet(3)
    net = fleet.net(2)
    fleet.optimizer(2).state[net.conv.bias]["exp_avg"] = torch.zeros(9)
    with gloo(3) as groups:
        checked = fleet.check(groups)
    assert (checked.status, names(checked)) == (Check.FAILED, [(2, "optimizer/state/2/exp_avg")])
    assert not checked.differences[0].healed
    assert fleet.optimizer(2).state[net.conv.bias]["exp_avg"].shape == (9,)


def test_memory_that_does_not_hold_what_is_written_is_not_called_healed(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(3)
    weight = fleet.net(1).scale
    flip(weight, 0, 5)
    receive = __import__("evergrad.recovery.guard.replicas", fromlist=["_receive"])._receive

    def stuck(group: Group, tensor: torch.Tensor, sender: int, heals: bool) -> Any:
        change = receive(group, tensor, sender, heals)
        flip(tensor, 0, 5)
        return change

    monkeypatch.setattr("evergrad.recovery.guard.replicas._receive", stuck)
    with gloo(3) as groups:
        checked = fleet.check(groups)
    assert checked.status is Check.FAILED
    assert "still different" in checked.why
    assert not checked.differences[0].healed


def test_one_rank_has_nobody_to_compare_with() -> None:
    fleet = Fleet(1)
    checked = fleet.check([SingleRankGroup()])
    assert checked.status is Check.UNKNOWN
    assert not checked.is_verified, "unjudged is not passed"


def test_a_check_that_is_cut_off_can_be_done_again_with_those_who_are_left() -> None:
    fleet = Fleet(4)
    right = fleet.digests(0)
    flip(fleet.net(1).conv.weight, 0, 1)
    with gloo(4) as groups:

        def act(rank: int) -> str:
            if rank == 3:
                for group in reversed(groups):  # and the launcher tells the others: gloo may not notice by itself
                    group.interrupt("killed")
                return "killed"
            try:
                fleet.guards[rank].check(groups[rank], replica_of(*fleet.of(rank)), step=1)
            except GroupBroken:
                return "broken"
            return "done"

        found = together(*(lambda rank=rank: act(rank) for rank in range(4)))  # type: ignore[misc]
    assert found == ["broken"] * 3 + ["killed"]
    with gloo(3) as groups:
        assert fleet.check(groups).status is Check.DEGRADED
    assert fleet.digests(1) == right


def test_what_all_ranks_have_alike_and_out_of_range_is_suspicious_and_not_verified() -> None:
    fleet = Fleet(2)
    with gloo(2) as groups:
        assert fleet.check(groups).is_verified
        for rank in range(2):
            fleet.net(rank).scale.data.fill_(1e6)
        checked = fleet.check(groups)
        assert checked.status is Check.OK
        assert [each.path for each in checked.suspects] == ["model/scale"]
        assert not checked.is_verified
        assert fleet.check(groups).is_verified, "said once: all ranks have it"


# Norms and ranges.


def buckets(factor: float = 1.0) -> list[torch.Tensor]:
    return [torch.full((30,), factor), torch.full((6,), factor, dtype=torch.bfloat16), torch.empty(0)]


def usual(count: int = 8) -> GradientNorms:
    norms = GradientNorms()
    for _ in range(count):
        norms.applied(norms.read(buckets()))
    return norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_norm_is_that_of_all_buckets_together(dtype: torch.dtype) -> None:
    parts = [torch.randn(50).to(dtype), torch.randn(3, 7).to(dtype)]
    expected = torch.cat([part.double().flatten() for part in parts]).norm()
    assert gradient_norm(parts) == pytest.approx(float(expected), rel=1e-2)
    assert gradient_norm([torch.full((300,), 60000.0, dtype=torch.float16)]) < math.inf


def test_a_norm_is_suspicious_when_it_is_far_from_the_usual_and_only_once_that_is_known() -> None:
    assert not usual(7).read(buckets(1000.0)).is_suspicious
    norms = usual(8)
    assert not norms.read(buckets(9.9)).is_suspicious
    reading = norms.read(buckets(10.1))
    assert "10.1 times the median of the last 8" in reading.why
    norms.forget()
    assert not norms.read(buckets(1000.0)).is_suspicious


def test_what_is_not_applied_does_not_become_usual() -> None:
    norms = usual()
    for _ in range(100):
        assert norms.read(buckets(100.0)).is_suspicious
    for _ in range(64):
        norms.applied(norms.read(buckets(100.0)))
    assert not norms.read(buckets(100.0)).is_suspicious


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_suspicious_but_normal_with_a_scaler(value: float) -> None:
    norms = GradientNorms()
    bad = [*buckets(), torch.tensor([value])]
    reading = norms.read(bad)
    assert reading.is_suspicious
    assert not reading.is_finite
    assert not norms.read(bad, scale=1024.0).is_suspicious
    norms.applied(reading)
    assert not norms.read(buckets()).is_suspicious


def test_a_scaler_that_changes_its_scale_makes_no_norm_suspicious() -> None:
    norms = GradientNorms()
    for scale in (65536.0, 32768.0) * 6:
        norms.applied(norms.read(buckets(scale), scale=scale))
    assert not norms.read(buckets(1.0), scale=1.0).is_suspicious
    assert norms.read(buckets(65536.0), scale=1.0).is_suspicious


def test_ranges_know_the_largest_that_ever_was() -> None:
    ranges = MagnitudeHistory(10.0)
    tensors = {"a": torch.tensor([1.0, -3.0]), "b": torch.zeros(4), "ids": torch.arange(3)}
    assert ranges.read(tensors) == []
    tensors["a"][0], tensors["b"][1] = 30.0, 0.9
    assert ranges.read(tensors) == [], "ten times is still usual, and near 0 nothing is large"
    tensors["a"][0] = -301.0
    (one,) = ranges.read(tensors)
    assert (one.path, one.found, one.usual) == ("a", 301.0, 30.0)
    assert ranges.read(tensors), "it does not become usual by itself"
    ranges.accept([one])
    assert not ranges.read(tensors)
    tensors["a"][0] = math.nan
    assert [each.path for each in ranges.read(tensors)] == ["a"]


# Settings.


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"every": 0}, r"job.guard\(every=0\): expected a number of steps, 1 or more"),
        ({"every": True}, "every=True"),
        ({"norm_factor": 1.0}, r"norm_factor=1.0\): expected a number greater than 1"),
        ({"range_factor": math.nan}, "range_factor=nan"),
        ({"heal": "majorty"}, "Did you mean 'majority'"),
        ({"stop": 1}, "expected True or False"),
    ],
)
def test_settings_are_checked(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        GuardSettings(**wrong)


def test_checks_are_due_every_so_many_steps() -> None:
    guard = ReplicaCheck(GuardSettings(every=20))
    assert [step for step in range(61) if guard.is_due(step)] == [20, 40, 60]
    assert guard.settings.to_json()["heal"] == "majority"
