"""The optimizer within backward: the same result to the last bit, and nothing of a step that is taken back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forkserver import JobRunner, Ran
from surroundings import Around
from sweep import RANKS, Case
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_wrapper

import evergrad as eg
from evergrad.errors import UsageError
from evergrad.recovery.gradients import GradientReducer
from evergrad.recovery.optimizer_overlap import PER_PARAMETER, OptimizerOverlap, refuse_overlap
from evergrad.recovery.process_group import CollectiveWork, GroupBroken, Op, SingleRankGroup
from evergrad.recovery.rank_state import Optimizers

SMALL_MB = 0.0001
MANY = ["--bucket-mb", "0.0005"]
"""Almost every parameter is a bucket of its own: some are applied when a rank is lost."""


class Doubling(SingleRankGroup):
    """Two ranks with the same gradients. A reduction is done as soon as `delay` others have begun after it."""

    size = 2

    def __init__(self, delay: int = 1) -> None:
        self.delay, self.begun = delay, 0
        self.breaks_at: int | None = None

    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum") -> CollectiveWork:
        number, self.begun = self.begun, self.begun + 1

        def end() -> None:
            if self.breaks_at is not None and number >= self.breaks_at:
                raise GroupBroken("rank 1 is gone")
            tensor.mul_(2)

        return CollectiveWork(end, lambda: self.begun > number + self.delay)


class Lab:
    """One module, its optimizer and its reduction, overlapped or not."""

    def __init__(self, make: Callable[[Any], optim.Optimizer], *, overlap: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
        self.x, self.around = torch.randn(3, 6), Around(Doubling(), 0.5, shares_buffers=False)
        self.gradients = GradientReducer(self.net, self.around, keep=True, bucket_cap_mb=SMALL_MB, **options)
        weights = [parameter for parameter in self.net.parameters() if parameter.dim() > 1]
        biases = [parameter for parameter in self.net.parameters() if parameter.dim() == 1]
        self.optimizer = make([{"params": weights}, {"params": biases, "lr": 0.003, "weight_decay": 0.1}])
        self.scheduler = optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.7)
        if overlap:
            self.gradients.overlap = OptimizerOverlap(self.optimizer, self.gradients.parameters, undoable=True)
        self.around.at_end = self._settle
        self.broke: str | None = None

    @property
    def overlap(self) -> OptimizerOverlap:
        assert self.gradients.overlap is not None
        return self.gradients.overlap

    def _settle(self) -> None:
        try:
            self.gradients.finish_reduction()
            self.around.count += 1
        except GroupBroken as error:
            self.broke = str(error)

    def backward(self) -> None:
        """A pass, with another batch each time."""
        self.optimizer.zero_grad()
        self.around.now.begun = 0
        self.gradients.module(self.x + self.around.count).square().mean().backward()

    def step(self, times: int = 1) -> Lab:
        """Whole steps."""
        for _ in range(times):
            self.backward()
            if self.gradients.overlap is None:
                self.optimizer.step()
            else:
                self.overlap.finish()
            self.scheduler.step()
        return self

    def state(self) -> dict[str, Any]:
        """All that a step changes, as it is now."""
        return copy.deepcopy({"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()})


def adam(groups: Any) -> optim.Optimizer:
    return optim.Adam(groups, lr=0.01)


def same(one: Any, two: Any) -> bool:
    """Equal to the last bit, with the same keys in the same order."""
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return type(one) is type(two) and bool(one == two)


# The same result.

VARIANTS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    *((kind, {}) for kind in PER_PARAMETER),
    *((kind, {"foreach": True}) for kind in PER_PARAMETER),
    *((kind, {"fused": True}) for kind in (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)),
    (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (optim.SGD, {"momentum": 0.9, "foreach": True}),
    (optim.SGD, {"momentum": 0.9, "fused": True}),
    (optim.Adam, {"amsgrad": True, "lr": torch.tensor(0.01)}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
]


def named(variant: tuple[type[optim.Optimizer], dict[str, Any]]) -> str:
    return " ".join([variant[0].__name__, *variant[1]])


def maker(kind: Any, settings: dict[str, Any]) -> Callable[[Any], optim.Optimizer]:
    def make(groups: Any) -> optim.Optimizer:
        given = {"lr": 0.01, "weight_decay": 0.02} | copy.deepcopy(settings)
        if kind is optim.Rprop:  # it has no weight decay
            del given["weight_decay"]
            groups = [{name: value for name, value in group.items() if name != "weight_decay"} for group in groups]
        made: optim.Optimizer = kind(groups, **given)
        return made

    return make


@pytest.mark.parametrize("variant", VARIANTS, ids=named)
def test_an_overlapped_run_equals_its_twin_to_the_last_bit(variant: tuple[Any, dict[str, Any]]) -> None:
    """Two groups with their own rates and weight decay, under a scheduler; in every step, the first ones too."""
    lab, twin = Lab(maker(*variant)), Lab(maker(*variant), overlap=False)
    begun = lab.state()
    for _ in range(6):
        assert same(lab.step().state(), twin.step().state())
    assert not same(lab.state()["model"], begun["model"])


def test_all_of_torchs_optimizers_are_taken_or_refused_on_purpose() -> None:
    kinds = {kind for kind in vars(optim).values() if isinstance(kind, type) and issubclass(kind, optim.Optimizer)}
    refused = {kind.__name__ for kind in kinds - {optim.Optimizer} - set(PER_PARAMETER)}
    assert refused == {"Adafactor", "LBFGS", "Muon", "SparseAdam"}


def test_gradients_that_are_accumulated_are_applied_once() -> None:
    lab, twin = Lab(adam).step(3), Lab(adam, overlap=False).step(3)
    for one in (lab, twin):
        one.optimizer.zero_grad()
        before = one.state()
        with one.gradients.module.no_sync():
            one.gradients.module(one.x).square().mean().backward()
        assert same(one.state(), before)
        one.gradients.module(one.x).square().mean().backward()
    lab.overlap.finish()
    twin.optimizer.step()
    assert same(lab.state(), twin.state())


def test_compression_and_another_ranks_layout_change_nothing() -> None:
    layout = ((7, 1), (0, 2, 4), (6, 5, 3))
    labs = [Lab(adam, overlap=overlap, hooks=[bf16_compress_wrapper]) for overlap in (True, False)]
    for lab in labs:
        lab.around.count, lab.around.layout = 2, layout
    for _ in range(4):
        one, two = (lab.step().state() for lab in labs)
        assert same(one, two)


# When.


def applied_at(lab: Lab) -> list[tuple[int, str]]:
    """One whole step: how buckets were begun, reduced and applied."""
    apply, lab.around.sites = lab.overlap.apply, []

    def noted(bucket: int, numbers: tuple[int, ...]) -> None:
        apply(bucket, numbers)
        lab.around.sites.append((bucket, "applied"))

    lab.overlap.apply = noted  # type: ignore[method-assign]
    lab.step()
    lab.overlap.apply = apply  # type: ignore[method-assign]
    return lab.around.sites


def test_what_is_reduced_is_applied_while_backward_goes_on() -> None:
    lab = Lab(adam).step(3)
    log = applied_at(lab)
    last = lab.gradients.num_buckets - 1
    assert last >= 2
    for bucket in range(last):
        assert log.index((bucket, "applied")) < log.index((bucket + 1, "during")) + 3, "as soon as the next was begun"
        assert log.index((bucket, "applied")) > log.index((bucket + 1, "before")), "which goes first"
    assert [bucket for bucket, what in log if what == "applied"] == list(range(last + 1))
    assert log.index((0, "applied")) < log.index((last, "before")), "before the pass has ended"


def test_what_is_not_reduced_yet_is_not_waited_for_before_the_pass_ends() -> None:
    lab = Lab(adam).step(3)
    lab.around.now.delay = 99
    log = applied_at(lab)
    last = lab.gradients.num_buckets - 1
    assert log.index((0, "applied")) > log.index((last, "during"))
    assert log.index((0, "applied")) < log.index((1, "after")), "while the next one is on its way"


# Taking back.


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("variant", VARIANTS, ids=named)
def test_a_step_that_is_taken_back_leaves_no_trace(variant: tuple[Any, dict[str, Any]], steps: int) -> None:
    """Also in the first one, before which optimizers have no state."""
    lab, twin = Lab(maker(*variant)).step(steps), Lab(maker(*variant), overlap=False).step(steps)
    before = lab.state()
    lab.backward()
    assert not same(lab.state(), before)
    lab.gradients.discard()
    lab.around.count -= 1
    assert same(lab.state(), before)
    assert not lab.overlap.applied
    assert all(same(lab.step().state(), twin.step().state()) for _ in range(3)), "and it goes on as if nothing had been"


@pytest.mark.parametrize("reduced", [0, 1, 2])
def test_a_pass_that_breaks_is_taken_back_however_far_it_came(reduced: int) -> None:
    lab, twin = Lab(adam).step(3), Lab(adam, overlap=False).step(3)
    before = lab.state()
    lab.around.now.breaks_at = reduced
    lab.backward()
    assert lab.broke is not None
    assert same(before, lab.state()) == (reduced == 0), "nothing is applied that was not reduced"
    lab.gradients.discard()
    assert same(lab.state(), before)
    lab.around.now = Doubling()
    assert same(lab.step().state(), twin.step().state())


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_repair_keeps_what_everyone_has_and_applies_the_rest_anew(kept: int) -> None:
    """Two buckets were reduced, and applied, here; of those so many everywhere. The others count double since."""
    lab, twin = Lab(adam).step(3), Lab(adam, overlap=False).step(3)
    lab.around.now.breaks_at = 2
    lab.backward()
    assert set(lab.overlap.applied) <= {0, 1} <= lab.gradients.done
    assert 0 in lab.overlap.applied
    lab.around.now, lab.around.share = Doubling(), 1.0
    lab.gradients.failed = None
    lab.gradients.reopen(range(kept, lab.gradients.num_buckets))
    assert set(lab.overlap.applied) <= set(range(kept))
    lab._settle()
    lab.overlap.finish()
    twin.backward()
    for bucket, numbers in enumerate(twin.gradients.layout):
        for number in numbers if bucket >= kept else ():
            grad = twin.gradients.parameters[number].grad
            assert grad is not None
            grad.mul_(2)
    twin.optimizer.step()
    assert same(lab.state(), twin.state())


@pytest.mark.parametrize("passes", [0, 1])
def test_in_the_first_two_passes_a_repair_applies_everything_anew(passes: int) -> None:
    """Everything was reduced and applied here, and then the point could not be passed."""
    lab, twin = Lab(adam).step(passes), Lab(adam, overlap=False).step(passes)
    lab.backward()
    lab.around.count -= 1
    assert lab.overlap.applied
    lab.gradients.reopen(())
    assert not lab.overlap.applied
    lab._settle()
    lab.overlap.finish()
    lab.scheduler.step()
    assert same(lab.state(), twin.step().state())
    assert same(lab.step(2).state(), twin.step(2).state())


def test_the_undo_log_holds_parameters_and_state_and_is_used_again() -> None:
    """In float32 Adam: the parameter, two moments, and a counter for each tensor."""
    lab = Lab(adam).step(3)
    count = sum(parameter.numel() for parameter in lab.net.parameters())
    assert lab.overlap.held_bytes == 12 * count + 4 * 8
    places = {copy.data_ptr() for copy in lab.overlap._log._memory.values()}  # type: ignore[union-attr]
    lab.step(2)
    assert {copy.data_ptr() for copy in lab.overlap._log._memory.values()} == places  # type: ignore[union-attr]
    assert OptimizerOverlap(lab.optimizer, lab.gradients.parameters, undoable=False).held_bytes == 0


def test_an_update_that_fails_comes_out_of_backward_and_ddp_is_not_wedged() -> None:
    lab = Lab(adam).step(3)
    before, step = lab.state(), lab.optimizer.step

    def fails() -> None:
        step()
        raise RuntimeError("no memory")

    lab.optimizer.step = fails  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="no memory"):
        lab.backward()
    lab.optimizer.step = step  # type: ignore[method-assign]
    lab.gradients.discard()
    assert same(lab.state(), before)
    twin = Lab(adam, overlap=False).step(3)
    assert same(lab.step().state(), twin.step().state())


# What cannot be.


def test_a_second_pass_before_the_step_is_refused() -> None:
    lab = Lab(adam).step(3)
    lab.backward()
    with pytest.raises(UsageError, match=r"run all but the last under model\.no_sync\(\)"):
        lab.backward()


class _Scaler:
    """As AMP's."""

    def __init__(self, is_enabled: bool) -> None:
        self.is_enabled = lambda: is_enabled

    scale = unscale_ = step = update = lambda self: None


class _Own(optim.SGD):
    """Who knows what it does."""


@pytest.mark.parametrize(
    ("make", "more", "says"),
    [
        (None, {}, r"expected the optimizer too"),
        (optim.LBFGS, {}, r"LBFGS is not known to update each parameter by itself. Use one of torch.optim's ASGD, Ada"),
        (_Own, {}, r"_Own is not known"),
        (optim.SGD, {"find_unused_parameters": True}, "too late what was used"),
        (optim.SGD, {"batch_policy": "scale_lr"}, "Use 'shrink' or 'constant'"),
        (optim.SGD, {"tracked": {"amp": _Scaler(True)}}, "the scaler that is tracked as 'amp'"),
        (lambda given: optim.SGD(given, differentiable=True), {}, "differentiable=False"),
    ],
)
def test_what_cannot_be_overlapped_is_refused_in_a_line(make: Any, more: dict[str, Any], says: str) -> None:
    optimizer = make([torch.zeros(2, requires_grad=True)]) if make is not None else None
    with pytest.raises(UsageError, match=says) as found:
        refuse_overlap(optimizer, **more)
    assert "\n" not in str(found.value)
    refuse_overlap(optim.SGD([torch.zeros(2)]), tracked={"off": _Scaler(False)})


def test_a_parameter_of_another_model_is_refused_even_if_it_comes_later() -> None:
    lab = Lab(adam).step(1)
    lab.optimizer.add_param_group({"params": [torch.zeros(2, 5)]})
    lab.step(1)  # it has no gradient, ever
    lab.optimizer.add_param_group({"params": [torch.zeros(2, 5, requires_grad=True)]})
    with pytest.raises(UsageError, match=r"shape \(2, 5\) in group 3 of the optimizer is not the wrapped model's"):
        lab.step()


def test_step_hooks_are_refused() -> None:
    lab = Lab(adam)
    lab.optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(UsageError, match="once a bucket"):
        OptimizerOverlap(lab.optimizer, lab.gradients.parameters, undoable=True)


def test_several_optimizers_and_a_scaler_are_refused_at_the_step() -> None:
    lab, optimizers = Lab(adam), Optimizers()
    optimizers.adopt((lab.optimizer,))
    optimizers.overlap = lab.overlap
    with pytest.raises(UsageError, match=r"there is one optimizer, that of .*; found 2"):
        optimizers.adopt((lab.optimizer, lab.optimizer))
    with pytest.raises(UsageError, match="the scaler that is tracked as 'amp'"):
        optimizers.apply({"amp": _Scaler(True)}, 1.0)


def test_a_joiners_optimizer_gets_its_state_before_its_first_pass() -> None:
    lab, other, optimizers = Lab(adam).step(3), Lab(adam), Optimizers()
    optimizers.adopt((other.optimizer,))
    optimizers.load_states([lab.optimizer.state_dict()])
    assert same(other.optimizer.state_dict(), lab.optimizer.state_dict())
    assert same(optimizers.states(), [lab.optimizer.state_dict()])


def test_alone_there_is_nothing_to_overlap_and_the_same_is_refused() -> None:
    net = nn.Linear(2, 1)
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    job = eg.join()
    with pytest.raises(UsageError, match="expected the optimizer too"):
        job.wrap(net, overlap=True)
    with pytest.raises(UsageError, match="that is for overlap=True"):
        job.wrap(net, optimizer=optimizer)
    model, before = job.wrap(net, optimizer=optimizer, overlap=True), net.weight.detach().clone()
    for x in job.batches(torch.utils.data.DataLoader(torch.ones(2, 2), batch_size=2)):
        model(x).sum().backward()
        assert torch.equal(net.weight, before)
        assert job.step(optimizer)
    assert torch.allclose(net.weight, before - 0.2)
    job.close()


# Whole jobs.


@pytest.fixture(scope="session")
def overlapped(job_runner: JobRunner, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Nothing fails."""
    ran = job_runner.run(tmp_path_factory.mktemp("overlapped"), "-n", 4, arguments=["--overlap", *MANY])
    assert ran.code == 0, ran.said
    return ran


def test_an_overlapped_job_equals_the_one_that_is_not(launch: Callable[..., Ran], overlapped: Ran) -> None:
    ran = launch("-n", 4, arguments=["--unclipped", *MANY])
    assert ran.code == 0, ran.said
    assert overlapped.results == ran.results
    assert len(ran.results) == 4


SITES = [f"bucket={bucket} at={at}" for bucket in (1, 4) for at in ("before", "during", "after")]
CASES = [
    Case(strategy, spares, rank=(number + spares) % 4, step=(3, 1, 2, 7, 5, 11)[(number + 2 * spares) % 6], site=site)
    for strategy in ("rollback", "forward")
    for spares in (0, 1)
    for number, site in enumerate(SITES)
]


def _case(number: int, case: Case) -> Any:
    is_quick = number % 6 in {0: (1,), 1: (0, 3, 5), 2: (2, 4), 3: (3,)}[number // 6]
    return pytest.param(case, id=str(case), marks=[] if is_quick else pytest.mark.slow)


@pytest.mark.parametrize("case", [_case(number, case) for number, case in enumerate(CASES)])
def test_a_rank_lost_in_the_middle_of_updates_is_survived(
    case: Case, job_runner: JobRunner, overlapped: Ran, shm: Path, tmp_path: Path
) -> None:
    options = ("-n", RANKS, "--strategy", case.strategy, "--spares", case.spares, "--fail", case.failure)
    awaiting = ["--await-spare", RANKS] if case.spares else []
    ran = job_runner.run(tmp_path, *options, arguments=["--overlap", *MANY, *awaiting])
    assert case.wrong(ran, overlapped) is None


@pytest.mark.slow
def test_a_restart_gives_the_optimizer_its_state_before_the_first_pass(
    launch: Callable[..., Ran], overlapped: Ran, tmp_path: Path
) -> None:
    ran = launch(
        "-n", RANKS, "--spares", 1, "--strategy", "restart", "--fail", "kill rank=1 step=10 bucket=2 at=after",
        arguments=["--overlap", *MANY, "--checkpoints", tmp_path / "versions", "--every", 2, "--await-spare", RANKS],
    )  # fmt: skip
    assert ran.code == 0, ran.said
    mine, theirs = ({one["rank"]: one["state"] for one in some.results.values()} for some in (ran, overlapped))
    assert mine == theirs
