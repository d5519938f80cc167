"""Gradients reduced under a DDP that never hears of it: breaks, repairs, hooks and layouts, without processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from surroundings import Around
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_wrapper, fp16_compress_wrapper
from torch.futures import Future

from evergrad.errors import UsageError
from evergrad.recovery.gradients import GradientBucket, GradientReducer, flattened, shaped
from evergrad.recovery.process_group import CollectiveWork, Group, GroupBroken, Op

SMALL_MB = 0.0001


class Alike(Group):
    """Ranks that all have the same gradients; it breaks when it is told to."""

    rank = 0

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self.breaks_at: int | None = None
        """How many collectives are well before one is not."""
        self.used = torch.empty(0)
        """What the others have used."""
        self.log: list[str] = []

    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum") -> CollectiveWork:
        self._check()
        if op == "max":
            return CollectiveWork(lambda: self._end(lambda: torch.maximum(tensor, self.used.to(tensor), out=tensor)))
        return CollectiveWork(lambda: self._end(lambda: tensor.mul_(self.size)))

    def broadcast(self, tensor: torch.Tensor, root: int) -> CollectiveWork:
        self._check()
        return CollectiveWork()

    def send(self, tensor: torch.Tensor, to: int) -> CollectiveWork:
        raise NotImplementedError

    def receive(self, tensor: torch.Tensor, sender: int) -> CollectiveWork:
        raise NotImplementedError

    def interrupt(self, reason: str) -> None:
        self.breaks_at = 0

    def close(self) -> None:
        pass

    def _check(self) -> None:
        if self.breaks_at == 0:
            raise GroupBroken("rank 1 is gone")

    def _end(self, act: Callable[[], object]) -> None:
        self._check()
        if self.breaks_at is not None:
            self.breaks_at -= 1
        act()


class Failing(Around[Alike]):
    """A job whose group can break, and where an exception may come at a site."""

    def __init__(self) -> None:
        super().__init__(Alike(), 0.5, shares_buffers=True)
        self.raises: tuple[int, str] | None = None

    def group(self) -> Alike:
        self.now._check()
        return self.now

    def reach_site(self, bucket: int, at: str) -> None:
        super().reach_site(bucket, at)
        if self.raises == (bucket, at):
            raise RuntimeError("injected here")


class Lab:
    """One module and the reduction of its gradients."""

    def __init__(self, net: nn.Module | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = net or nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
        self.around = Failing()
        settings = {"keep": True, "bucket_cap_mb": SMALL_MB} | options
        self.gradients = GradientReducer(self.net, self.around, **settings)
        self.x = torch.randn(3, 6)
        self.around.at_end = self._settle
        self.broke: str | None = None

    def _settle(self) -> None:
        try:
            self.gradients.finish_reduction()
            self.around.count += 1
        except GroupBroken as error:
            self.broke = str(error)

    def run(self, times: int = 1) -> Lab:
        """Forward and backward, from no gradients."""
        for _ in range(times):
            self.net.zero_grad()
            self.gradients.module(self.x).square().mean().backward()
        return self

    def break_after(self, collectives: int) -> None:
        self.broke, self.around.now.breaks_at = None, collectives

    def mend(self) -> None:
        """A new generation's group."""
        self.around.now = Alike()
        self.gradients.failed = None

    def expected(self) -> list[torch.Tensor]:
        grads = torch.autograd.grad(self.net(self.x).square().mean(), list(self.net.parameters()))
        return list(grads)

    def is_right(self) -> bool:
        found = [parameter.grad for parameter in self.net.parameters()]
        return all(torch.equal(one, two) for one, two in zip(found, self.expected(), strict=True))  # type: ignore[arg-type]


def test_gradients_are_the_mean_of_all_ranks_in_every_pass() -> None:
    lab = Lab()
    for _ in range(4):
        assert lab.run().is_right()
    assert lab.gradients.num_buckets > 1


def test_the_layout_is_agreed_in_two_passes_and_stays() -> None:
    lab = Lab().run(1)
    assert lab.gradients.num_buckets == 0, "not agreed for good"
    lab.run(1)
    agreed = lab.around.layout
    assert agreed is not None
    assert sorted(number for bucket in agreed for number in bucket) == list(range(8))
    lab.run(2)
    assert lab.around.layout == agreed == lab.gradients.layout


def test_another_ranks_layout_is_taken_and_gradients_are_the_same() -> None:
    """As in a joiner, whose own DDP is in its first pass while the others have long agreed."""
    lab = Lab()
    lab.around.count, lab.around.layout = 2, ((7, 1), (0, 2, 4), (6, 5, 3))
    for _ in range(3):
        assert lab.run().is_right()
    assert lab.gradients.num_buckets == 3


@pytest.mark.parametrize("collectives", [0, 1, 2])
def test_what_was_reduced_stays_and_the_rest_is_reduced_again(collectives: int) -> None:
    lab = Lab().run(3)
    lab.break_after(collectives)
    lab.run()
    assert lab.broke == "rank 1 is gone"
    assert lab.gradients.reduced_buckets == tuple(range(collectives))
    lab.mend()
    lab.around.sites.clear()
    lab.gradients.reopen(range(collectives, lab.gradients.num_buckets))
    lab.gradients.finish_reduction()
    assert lab.is_right()
    assert {bucket for bucket, _ in lab.around.sites} == set(range(collectives, lab.gradients.num_buckets))
    assert lab.run().is_right(), "and the next pass"


def test_a_bucket_that_was_reduced_here_but_not_everywhere_is_taken_back() -> None:
    lab = Lab().run(3)
    lab.break_after(2)
    lab.run()
    lab.mend()
    lab.gradients.reopen(range(1, lab.gradients.num_buckets))
    assert lab.gradients.done == {0}
    lab.gradients.finish_reduction()
    assert lab.is_right()


@pytest.mark.parametrize(("passes", "collectives"), [(0, 0), (1, 0), (1, 1)])  # the first pass has one bucket
def test_in_the_first_two_passes_everything_is_reduced_again(passes: int, collectives: int) -> None:
    lab = Lab().run(passes)
    lab.break_after(collectives)
    lab.run()
    assert lab.broke is not None
    assert (lab.gradients.reduced_buckets, lab.gradients.num_buckets) == ((), 0)
    lab.mend()
    lab.gradients.reopen(())
    lab.gradients.finish_reduction()
    assert lab.is_right()
    lab.around.count += 1
    for _ in range(3):
        assert lab.run().is_right()


def test_after_the_first_error_nothing_more_is_begun() -> None:
    lab = Lab().run(3)
    lab.break_after(1)
    lab.around.sites.clear()
    lab.run()
    assert lab.around.sites.count((0, "after")) == 1
    assert not [site for site in lab.around.sites if site[1] == "after" and site[0] > 0]


def test_a_pass_that_is_discarded_leaves_no_gradient() -> None:
    lab = Lab(keep=False).run(3)
    lab.break_after(1)
    lab.run()
    lab.mend()
    lab.gradients.discard()
    assert all(parameter.grad is None for parameter in lab.net.parameters())
    assert lab.run().is_right()


def test_what_counts_for_nothing_does_no_harm_even_if_it_is_infinite() -> None:
    lab = Lab().run(3)
    lab.around.share, lab.x = 0.0, torch.full((3, 6), float("inf"))
    lab.run()
    assert all(torch.equal(one.grad, torch.zeros_like(one)) for one in lab.net.parameters())  # type: ignore[arg-type]


def test_gradients_that_are_accumulated_are_reduced_once() -> None:
    lab = Lab().run(3)
    lab.net.zero_grad()
    with lab.gradients.module.no_sync():
        lab.gradients.module(lab.x).square().mean().backward()
    lab.around.sites.clear()
    lab.gradients.module(lab.x).square().mean().backward()
    twice = [2 * grad for grad in lab.expected()]
    assert all(torch.equal(one.grad, two) for one, two in zip(lab.net.parameters(), twice, strict=True))  # type: ignore[arg-type]
    assert lab.around.sites.count((0, "before")) == 1


def test_every_bucket_is_visited_before_during_and_after_its_reduction() -> None:
    lab = Lab().run(3)
    lab.around.sites.clear()
    lab.run()
    for bucket in range(lab.gradients.num_buckets):
        assert [at for number, at in lab.around.sites if number == bucket] == ["before", "during", "after"]


@pytest.mark.parametrize("at", ["before", "during", "after"])
def test_an_error_at_a_site_comes_out_of_backward_and_ddp_is_not_wedged(at: str) -> None:
    lab = Lab().run(3)
    lab.around.raises = (1, at)
    with pytest.raises(RuntimeError, match="injected here"):
        lab.run()
    lab.around.raises, lab.gradients.failed = None, None
    assert lab.run().is_right()


# Hooks.


class Counting:
    """A wrapper around a hook that counts what passes through it."""

    def __init__(self) -> None:
        self.buckets: list[int] = []

    def __call__(self, hook: Any) -> Any:
        def counted(state: Any, bucket: Any) -> Future[torch.Tensor]:
            self.buckets.append(bucket.index())
            assert len(bucket.gradients()) == len(bucket.parameters())
            found: Future[torch.Tensor] = hook(state, bucket)
            return found

        return counted


@pytest.mark.parametrize("wrapper", [fp16_compress_wrapper, bf16_compress_wrapper])
def test_torchs_compression_is_taken_as_it_is(wrapper: Any) -> None:
    lab, dtype = Lab(hooks=[wrapper]), torch.float16 if wrapper is fp16_compress_wrapper else torch.bfloat16
    for _ in range(4):
        lab.run()
        for parameter, grad in zip(lab.net.parameters(), lab.expected(), strict=True):
            assert torch.equal(parameter.grad, grad.to(dtype).mul(0.5).mul(2).to(grad.dtype))  # type: ignore[arg-type]


def test_a_repair_goes_through_the_hooks() -> None:
    counting = Counting()
    lab = Lab(hooks=[fp16_compress_wrapper, counting]).run(3)
    lab.break_after(1)
    lab.run()
    lab.mend()
    counting.buckets.clear()
    todo = list(range(1, lab.gradients.num_buckets))
    lab.gradients.reopen(todo)
    lab.gradients.finish_reduction()
    assert counting.buckets == todo
    for parameter, grad in zip(lab.net.parameters(), lab.expected(), strict=True):
        assert torch.equal(parameter.grad, grad.half().mul(0.5).mul(2).float())  # type: ignore[arg-type]


def test_the_first_hook_is_the_innermost() -> None:
    order: list[str] = []

    def named(name: str) -> Callable[[Any], Any]:
        def wrap(hook: Any) -> Any:
            def called(state: Any, bucket: Any) -> Any:
                order.append(name)
                return hook(state, bucket)

            return called

        return wrap

    lab = Lab(hooks=[named("inner"), named("outer")]).run(3)
    order.clear()
    lab.run()
    assert order == ["outer", "inner"] * lab.gradients.num_buckets


# Parameters that are not used.


class Branches(nn.Module):
    """A second branch that is used only if somebody says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.uses_second = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.first(x)
        return out + self.second(x) if self.uses_second else out


def test_a_branch_that_nobody_used_keeps_no_gradient() -> None:
    net = Branches()
    lab = Lab(net, find_unused_parameters=True)
    for _ in range(4):
        lab.around.now.used = torch.zeros(4)
        lab.run()
        lab.gradients.finish()
        assert net.first.weight.grad is not None
        assert net.second.weight.grad is None


def test_a_branch_that_another_rank_used_has_a_gradient_here_too() -> None:
    net = Branches()
    lab = Lab(net, find_unused_parameters=True)
    for _ in range(4):
        lab.around.now.used = torch.tensor([1, 1, 1, 1])
        lab.run()
        lab.gradients.finish()
        assert torch.equal(net.second.weight.grad, torch.zeros(6, 6))  # type: ignore[arg-type]


def test_a_branch_that_is_used_now_and_then_has_its_gradient_then() -> None:
    net = Branches()
    lab = Lab(net, find_unused_parameters=True)
    for number in range(6):
        net.uses_second = bool(number % 2)
        lab.around.now.used = torch.zeros(4)
        lab.run()
        lab.gradients.finish()
        assert (net.second.weight.grad is not None) == net.uses_second
        if net.uses_second:
            assert lab.is_right()


def test_a_sparse_gradient_is_refused() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 6, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.table(torch.zeros(3, dtype=torch.int64))
            return out

    with pytest.raises(UsageError, match="sparse=False"):
        Lab(Table()).run()


# Memory formats.


@pytest.mark.parametrize("shape", [(4, 3, 2, 2), (1, 3, 2, 2), (4, 1, 3, 3)])
def test_a_gradient_lies_in_its_bucket_as_its_parameter_lies_in_memory(shape: tuple[int, ...]) -> None:
    parameter = torch.empty(shape).to(memory_format=torch.channels_last)
    gradient = torch.randn(shape)
    flat = flattened(gradient, parameter)
    assert flat.shape == (gradient.numel(),)
    assert torch.equal(shaped(flat, parameter), gradient)
    if not parameter.is_contiguous():
        assert torch.equal(flat, gradient.permute(0, 2, 3, 1).reshape(-1))


def test_a_bucket_shows_gradients_as_views_of_it() -> None:
    parameters = [torch.empty(2, 3), torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last), torch.empty(5)]
    bucket = GradientBucket(1, torch.arange(59.0), parameters, True)
    shown = bucket.gradients()
    assert [one.shape for one in shown] == [one.shape for one in parameters]
    assert shown[1].stride() == parameters[1].stride()
    shown[2].zero_()
    assert bucket.buffer()[-5:].tolist() == [0.0] * 5
    assert (bucket.index(), bucket.is_last()) == (1, True)


def test_channels_last_and_transposed_parameters_are_reduced_as_others() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.turned = nn.Parameter(torch.randn(3, 6).T)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.conv((x @ self.turned).reshape(-1, 1, 3, 3).repeat(1, 2, 1, 1))
            return out

    for layout in (None, ((2, 0), (1,))):
        lab = Lab(Mixed())
        if layout is not None:
            lab.around.count, lab.around.layout = 2, layout
        for _ in range(4):
            assert lab.run().is_right()
