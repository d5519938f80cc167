"""A job of one process, as `python train.py` starts it: its loop is the plain one, and goes on where it was saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import evergrad as eg
from evergrad.errors import StateError, UsageError
from evergrad.recovery import join_job
from evergrad.recovery.job import Job

Join = Callable[..., Job]
SAMPLES = 22
BATCHES = 6
"""Of four samples, the last one of two."""


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Iterator[Join]:
    """`eg.join` of a process that nobody has launched; each call is one of a new process."""
    for name in ("EVERGRAD_STORE", "EVERGRAD_BATCH_POLICY", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(join_job.atexit, "register", lambda function: function)
    jobs: list[Job] = []

    def join_anew(*arguments: Any, **settings: Any) -> Job:
        monkeypatch.setattr(join_job, "_joined", None)
        jobs.append(eg.join(*arguments, **settings))
        return jobs[-1]

    yield join_anew
    for job in jobs:
        job.close()


@pytest.fixture
def job(join: Join) -> Job:
    return join()


def data() -> TensorDataset:
    features = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(7))
    return TensorDataset(features, torch.arange(SAMPLES))


class Count:
    """Something that is tracked: a number of the script's own."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Training:
    """A script: batch norm, dropout, momentum, a scheduler, validation between epochs."""

    def __init__(self, job: Job, *, optimizers: int = 1, draws: bool = False) -> None:
        torch.manual_seed(3)
        self.draws = draws
        """Whether validation draws random numbers."""
        self.net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.job, self.model = job, job.wrap(self.net)
        parts = [self.net[0].parameters(), self.net[1:].parameters()] if optimizers == 2 else [self.net.parameters()]
        self.optimizers = [torch.optim.AdamW(part, lr=0.01) for part in parts]
        self.schedulers = [torch.optim.lr_scheduler.StepLR(one, 3, 0.5) for one in self.optimizers]
        self.count = Count()
        job.track(count=self.count, **{f"scheduler{n}": one for n, one in enumerate(self.schedulers)})
        self.loader = DataLoader(data(), batch_size=4, shuffle=True)
        self.losses: dict[int, float] = {}
        self.epochs: list[int] = []
        """How many batches each epoch had."""
        self.validated: list[int] = []

    def run(self, epochs: int = 2, *, until: int = -1) -> Training:
        """Train, but no longer than until so many steps are applied: there it ends as if it were killed."""
        for epoch in range(epochs):
            self.epochs.append(0)
            for x, _ in self.job.batches(self.loader):
                self.epochs[-1] += 1
                for optimizer in self.optimizers:
                    optimizer.zero_grad()
                loss = self.model(x).square().mean()
                loss.backward()
                step = self.job.applied
                assert self.job.step(*self.optimizers)
                self.losses[step] = loss.item()
                self.count.count += 1
                for scheduler in self.schedulers:
                    scheduler.step()
                if self.job.applied == until:
                    return self
            if not self.job.joining:
                self.validated.append(epoch)
                torch.rand(int(self.draws))
        return self


def same(mine: nn.Module, other: nn.Module) -> bool:
    pairs = zip(mine.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(one, two) for one, two in pairs)


# Without a launcher.


def test_a_process_that_nobody_launched_is_the_only_rank(job: Job) -> None:
    assert (job.rank, job.world_size, job.generation, job.applied, job.joining) == (0, 1, 0, 0, False)


def test_the_model_inside_is_the_one_that_was_given(job: Job) -> None:
    net = nn.Linear(3, 2)
    model = job.wrap(net)
    x = torch.ones(1, 3)
    assert model.module is net
    assert torch.equal(model(x), net(x))
    assert [name for name, _ in model.named_parameters()] == ["module.weight", "module.bias"]
    with model.no_sync():
        model(x).sum().backward()
    assert net.weight.grad is not None


def test_batches_come_as_a_distributed_sampler_gives_them(join: Join) -> None:
    job = join(seed=5)
    loader = DataLoader(data(), batch_size=4, shuffle=True)
    sampler = DistributedSampler(loader.dataset, num_replicas=1, rank=0, seed=5)
    plain = DataLoader(data(), batch_size=4, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        mine, theirs = ([numbers.tolist() for _, numbers in batches] for batches in (job.batches(loader), plain))
        assert mine == theirs
        assert len(mine) == BATCHES


def test_the_last_batch_of_an_epoch_says_so(job: Job) -> None:
    loader = DataLoader(data(), batch_size=4)
    assert [job.is_last_batch for _ in job.batches(loader)] == [False] * (BATCHES - 1) + [True]
    assert not job.idle


def test_a_step_is_the_plain_one(job: Job) -> None:
    training = Training(job).run()
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    sampler = DistributedSampler(data(), num_replicas=1, rank=0)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, _ in DataLoader(data(), batch_size=4, sampler=sampler):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    assert list(training.losses.values()) == losses
    assert same(training.net, net)


def test_breaking_out_of_an_epoch_leaves_the_next_one_whole(job: Job) -> None:
    loader = DataLoader(data(), batch_size=4)
    for _ in job.batches(loader):
        break
    batches = [numbers.tolist() for _, numbers in job.batches(loader)]
    assert (len(batches), batches[0]) == (BATCHES, [0, 1, 2, 3])


# With a checkpointer.


@pytest.mark.parametrize("until", [5, BATCHES, BATCHES + 1, 2 * BATCHES])
def test_a_run_that_ended_goes_on_exactly(join: Join, tmp_path: Path, shm: Path, until: int) -> None:
    """In the middle of an epoch, at the end of one, in the next, and when all is done."""
    golden = Training(join()).run()
    with eg.Checkpointer(tmp_path, agent=False) as ck:
        Training(join(ck, every=1)).run(until=until)
    with eg.Checkpointer(tmp_path, agent=False) as ck:
        job = join(ck, every=1)
        assert job.joining
        again = Training(job).run()
    saved = until - 1  # the version of a step is made before the next one begins
    assert again.losses == {step: loss for step, loss in golden.losses.items() if step >= saved}
    assert same(again.net, golden.net)
    assert again.count.count == golden.count.count
    assert again.optimizers[0].param_groups[0]["lr"] == golden.optimizers[0].param_groups[0]["lr"]
    assert job.applied == 2 * BATCHES


def test_epochs_that_are_over_yield_nothing_and_the_first_is_not_validated_again(
    join: Join, tmp_path: Path, shm: Path
) -> None:
    golden = Training(join()).run(3)
    with eg.Checkpointer(tmp_path, agent=False) as ck:
        Training(join(ck, every=BATCHES)).run(2)
    with eg.Checkpointer(tmp_path, agent=False) as ck:
        again = Training(join(ck, every=BATCHES)).run(3)
    assert again.epochs == [0, 0, BATCHES]
    assert again.validated[-1] == 2
    assert 0 not in again.validated
    assert again.losses == {step: loss for step, loss in golden.losses.items() if step >= 2 * BATCHES}


def test_saving_changes_nothing(join: Join, tmp_path: Path, shm: Path) -> None:
    golden = Training(join()).run()
    with eg.Checkpointer(tmp_path, agent=False) as ck:
        saved = Training(join(ck, every=2)).run()
    assert saved.losses == golden.losses
    with eg.Checkpointer(tmp_path, agent=False) as ck:
        assert [version.step for version in ck.versions()][:2] == [12, 10]


def test_the_data_must_be_the_same_when_the_job_goes_on(join: Join, tmp_path: Path, shm: Path) -> None:
    with eg.Checkpointer(tmp_path, agent=False) as ck:
        Training(join(ck, every=1)).run(until=3)
    with eg.Checkpointer(tmp_path, agent=False) as ck:
        again = Training(join(ck, every=1))
        again.loader = DataLoader(TensorDataset(torch.randn(8, 5), torch.arange(8)), batch_size=4)
        with pytest.raises(StateError, match="epoch 0: the loader has 8 samples or batches, and 22 when"):
            again.run()


# Two optimizers.


def test_two_optimizers_step_together(job: Job) -> None:
    both = Training(job, optimizers=2).run(1)
    assert len(both.losses) == BATCHES
    assert all(one.state for one in both.optimizers)


def test_two_optimizers_go_on_where_they_were_saved(join: Join, tmp_path: Path, shm: Path) -> None:
    golden = Training(join(), optimizers=2).run()
    with eg.Checkpointer(tmp_path, agent=False) as ck:
        Training(join(ck, every=1), optimizers=2).run(until=5)
    with eg.Checkpointer(tmp_path, agent=False) as ck:
        again = Training(join(ck, every=1), optimizers=2).run()
    assert again.losses == {step: loss for step, loss in golden.losses.items() if step >= 4}
    assert same(again.net, golden.net)


# What is refused.


def test_joining_twice_is_refused(job: Job) -> None:
    with pytest.raises(UsageError, match="joined already"):
        eg.join()


@pytest.mark.parametrize("every", [0, -1, 2.5, True, "3"])
def test_a_number_of_steps_that_is_none_is_refused(join: Join, tmp_path: Path, shm: Path, every: Any) -> None:
    with eg.Checkpointer(tmp_path, agent=False) as ck, pytest.raises(UsageError, match="1 or more"):
        join(ck, every=every)


def test_saving_without_a_checkpointer_is_refused(join: Join) -> None:
    with pytest.raises(UsageError, match=r"every=3\): there is no checkpointer"):
        join(every=3)


def test_an_unknown_batch_mode_is_refused(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="batch_policy='grow': expected one of shrink, constant, scale_lr"):
        join(batch_policy="grow")
    monkeypatch.setenv("EVERGRAD_BATCH_POLICY", "grow")
    with pytest.raises(UsageError, match="EVERGRAD_BATCH_POLICY='grow'"):
        join()
    monkeypatch.setenv("EVERGRAD_BATCH_POLICY", "shrnik")
    with pytest.raises(UsageError, match=r"EVERGRAD_BATCH_POLICY='shrnik': .* Did you mean 'shrink'\?"):
        join()
    assert join(batch_policy="constant").world_size == 1, "an argument counts for more than the environment"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("runs/x", r"found 'runs/x'\. Make one of a folder: eg\.join\(eg\.Checkpointer\('runs/x'\), every=100\)"),
        (Path("x"), r"found PosixPath\('x'\)\. Make one of a folder: eg\.join\(eg\.Checkpointer\('x'\)"),
        (eg.Checkpointer, "found the class Checkpointer"),
        (nn.Linear(1, 1), "found Linear"),
        (5, "found 5"),
    ],
)
def test_what_is_no_checkpointer_is_refused_where_the_job_is_joined(join: Join, given: Any, found: str) -> None:
    with pytest.raises(UsageError, match=f"eg.join: expected a Checkpointer, {found}"):
        join(given)


def test_a_seed_that_is_no_whole_number_is_refused(join: Join) -> None:
    with pytest.raises(UsageError, match=r"eg\.join\(seed=…\): expected a whole number, found 'a'"):
        join(seed="a")
    assert join(seed=np.int64(3)).world_size == 1


def test_torchrun_without_a_checkpointer_is_refused(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="under torchrun a lost rank ends all of them"):
        join()


def test_a_second_model_is_refused(job: Job) -> None:
    job.wrap(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="Put several into one module whose forward runs them"):
        job.wrap(nn.Linear(2, 2))


@pytest.mark.parametrize(
    "option",
    ["process_group", "static_graph", "gradient_as_bucket_view", "delay_all_reduce_named_params", "device_mesh"],
)
def test_options_that_are_not_ddps_to_choose_are_refused(job: Job, option: str) -> None:
    with pytest.raises(UsageError, match=rf"job\.wrap\({option}=…\)"):
        job.wrap(nn.Linear(2, 2), **{option: True})
    job.wrap(nn.Linear(2, 2))  # a refused model is not the job's


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"foo": 1}, r"job\.wrap\(foo=…\): expected .*hooks.*, or an option of DistributedDataParallel"),
        ({"bucket_cap_md": 1}, r"Did you mean 'bucket_cap_mb'\?"),
        ({"find_unused_parameter": True}, r"Did you mean 'find_unused_parameters'\?"),
        ({"module": 1}, r"job\.wrap\(module=…\)"),
        ({"hooks": "x"}, r"job\.wrap\(hooks=…\): expected a list of wrappers .*, found 'x'"),
        ({"hooks": len}, "found builtin_function_or_method"),
        ({"hooks": [1]}, "found list"),
    ],
)
def test_options_that_neither_the_job_nor_ddp_has_are_refused(job: Job, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        job.wrap(nn.Linear(2, 2), **options)
    job.wrap(nn.Linear(2, 2), bucket_cap_mb=1, hooks=[lambda hook: hook])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda job: job.track(nn.Linear(1, 1)),
            r"job.track: too many positional arguments. Expected job.track\(sched",
        ),
        (
            lambda job: job.guard(evry=1),
            r"job.guard: got an unexpected keyword argument 'evry'. Did you mean 'every'\?",
        ),
        (lambda job: job.wrap(), r"job.wrap: missing a required .*'model'. Expected job.wrap\(model, \*, hooks=\(\), "),
        (lambda job: job.batches(), r"missing a required argument: 'loader'. Expected job.batches\(loader\)"),
        (
            lambda job: job.step(optimizer=1),
            r"job.step: got an unexpected keyword argument 'optimizer'. Expected job.s",
        ),
    ],
)
def test_arguments_that_a_call_does_not_take_are_refused_with_those_that_it_does(
    job: Job, call: Callable[[Any], object], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        call(job)


@pytest.mark.parametrize("wrong", ["evry", "strategy"])
def test_a_keyword_that_join_does_not_have_is_refused(join: Join, wrong: str) -> None:
    with pytest.raises(
        UsageError, match=rf"eg\.join: .*'{wrong}'.* Expected eg\.join\(checkpointer=None, every=None, "
    ):
        join(**{wrong: 10})


def test_a_type_error_from_within_a_call_is_left_as_it_is(job: Job) -> None:
    class Odd(Count):
        def state_dict(self) -> dict[str, Any]:
            raise TypeError("of the script's own")

    with pytest.raises(TypeError, match="of the script's own"):
        job.track(odd=Odd())


class Mine:
    """An optimizer that is none of torch's, and has no parameter groups."""

    def step(self) -> None:
        raise AssertionError("it must not be called")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda one: [one], r"found list. Give it all of them, and no list: job.step\(\*optimizers\)"),
        (lambda one: torch.optim.lr_scheduler.StepLR(one, 3), "found StepLR. A scheduler goes into job.track"),
        (lambda one: torch.amp.GradScaler("cpu"), "found GradScaler. A gradient scaler goes into job.track"),
        (lambda one: None, "found None. Give it what updates"),
        (lambda one: "x", "found 'x'"),
        (lambda one: nn.Linear(1, 1), "found Linear. Give it the optimizer of that model's parameters"),
        (lambda one: torch.ones(()), r"found Tensor. Call loss.backward\(\) before it"),
        (type, "found the class SGD"),
        (lambda one: Mine(), "found Mine. One of your own is a subclass of torch.optim.Optimizer"),
    ],
)
def test_what_is_no_optimizer_is_refused(job: Job, wrong: Callable[[Any], Any], said: str) -> None:
    net = nn.Linear(5, 1)
    model, optimizer = job.wrap(net), torch.optim.SGD(net.parameters(), lr=0.1)
    for x, _ in job.batches(DataLoader(data(), batch_size=4)):
        model(x).sum().backward()
        with pytest.raises(UsageError, match=f"job.step: expected a torch.optim.Optimizer, {said}"):
            job.step(wrong(optimizer))
        break
    assert job.applied == 0


def test_an_optimizer_and_a_closure_are_refused(job: Job) -> None:
    net = nn.Linear(5, 1)
    model, optimizer = job.wrap(net), torch.optim.SGD(net.parameters(), lr=0.1)
    for x, _ in job.batches(DataLoader(data(), batch_size=4)):
        model(x).sum().backward()
        with pytest.raises(UsageError, match=r"found function\. It takes no closure"):
            job.step(optimizer, lambda: 1.0)  # type: ignore[arg-type]
        break


def test_a_step_without_any_gradient_is_refused_also_without_other_ranks(job: Job) -> None:
    net = nn.Linear(5, 1)
    model, optimizer = job.wrap(net), torch.optim.SGD(net.parameters(), lr=0.1)
    net.bias.requires_grad_(False)
    for index, (x, _) in enumerate(job.batches(DataLoader(data(), batch_size=4))):
        optimizer.zero_grad()
        loss = model(x).sum()
        if index == 2:
            with pytest.raises(UsageError, match=r"no parameter of the optimizer has a gradient.* Call loss\.backward"):
                job.step(optimizer)
            break
        loss.backward()
        assert job.step(optimizer), "a frozen parameter is no reason"
    assert job.applied == 2


def test_of_several_optimizers_one_may_have_no_gradient(job: Job) -> None:
    net = nn.Linear(5, 1)
    job.wrap(net)
    first, second = (torch.optim.SGD([one], lr=0.1) for one in net.parameters())
    for _ in job.batches(DataLoader(data(), batch_size=4)):
        net.weight.sum().backward()
        assert job.step(first, second)


def test_an_optimizer_that_is_given_twice_is_refused(job: Job) -> None:
    net = nn.Linear(5, 1)
    model, optimizer = job.wrap(net), torch.optim.SGD(net.parameters(), lr=0.1)
    for x, _ in job.batches(DataLoader(data(), batch_size=4)):
        model(x).sum().backward()
        with pytest.raises(UsageError, match="expected each optimizer once, found SGD, SGD, one of them twice"):
            job.step(optimizer, optimizer)
        assert job.step(optimizer)


def test_what_has_no_state_cannot_be_tracked(job: Job) -> None:
    with pytest.raises(UsageError, match=r"job\.track\(names=…\): a list has no state_dict"):
        job.track(names=[1, 2])
    job.track(count=Count())
    with pytest.raises(UsageError, match=r"job\.track\(count=…\): this name is taken"):
        job.track(count=Count())


def test_a_state_that_cannot_be_sent_cannot_be_tracked(job: Job) -> None:
    class Odd(Count):
        def state_dict(self) -> dict[str, Any]:
            return {"what": object()}

    with pytest.raises(UsageError, match=r"job\.track\(odd=…\): its state cannot be given to a joiner"):
        job.track(odd=Odd())


def test_steps_are_taken_once_a_batch_and_inside_of_the_loop(job: Job) -> None:
    net = nn.Linear(5, 1)
    model, optimizer = job.wrap(net), torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="no batch since the last step"):
        job.step(optimizer)
    for x, _ in job.batches(DataLoader(data(), batch_size=4)):
        model(x).sum().backward()
        assert job.step(optimizer)
        with pytest.raises(UsageError, match="no batch since the last step"):
            job.step(optimizer)
        break
    with pytest.raises(UsageError, match="no batch since the last step"):
        job.step(optimizer)
    assert job.applied == 1


def test_a_step_wants_all_optimizers_each_time(job: Job) -> None:
    net = nn.Linear(5, 1)
    model = job.wrap(net)
    first, second = (torch.optim.SGD([one], lr=0.1) for one in net.parameters())
    batches = job.batches(DataLoader(data(), batch_size=4))
    x, _ = next(batches)
    model(x).sum().backward()
    with pytest.raises(UsageError, match="expected the optimizer, or all of them"):
        job.step()
    assert job.step(first, second)
    next(batches)
    with pytest.raises(UsageError, match="other optimizers than before"):
        job.step(first)


def test_an_epoch_inside_of_an_epoch_is_refused(job: Job) -> None:
    loader = DataLoader(data(), batch_size=4)
    outer = job.batches(loader)
    next(outer)
    with pytest.raises(UsageError, match="an epoch is under way"):
        next(job.batches(loader))
    assert len(list(outer)) == BATCHES - 1


def test_the_batches_of_one_call_are_one_epoch_and_a_second_loop_over_them_is_refused(job: Job) -> None:
    batches = job.batches(DataLoader(data(), batch_size=4))
    assert iter(iter(batches)) is batches
    assert len(list(batches)) == BATCHES
    assert next(batches, None) is None
    with pytest.raises(UsageError, match=r"Call job\.batches\(loader\) anew for each epoch"):
        list(batches)
    with pytest.raises(TypeError):
        len(batches)  # its length is not known before the epoch begins, and differs after a loss


def test_batches_that_are_taken_in_parts_may_be_asked_once_too_often(job: Job) -> None:
    batches = job.batches(DataLoader(data(), batch_size=4))
    parts = []
    while part := list(islice(batches, 4)):
        parts.append(len(part))
    assert parts == [4, BATCHES - 4]
    batches = job.batches(DataLoader(data(), batch_size=4))
    next(batches)
    assert len(list(batches)) == BATCHES - 1


def test_a_call_whose_batches_are_never_taken_is_an_epoch_too(job: Job) -> None:
    loader = DataLoader(data(), batch_size=4, shuffle=True)
    job.batches(loader)
    mine = [numbers.tolist() for _, numbers in job.batches(loader)]
    sampler = DistributedSampler(loader.dataset, num_replicas=1, rank=0)
    sampler.set_epoch(1)
    assert mine == [numbers.tolist() for _, numbers in DataLoader(data(), batch_size=4, sampler=sampler)]


# Gradient scalers.


def test_a_tracked_scaler_is_used_and_an_overflow_is_a_step_that_was_not_applied(job: Job) -> None:
    net = nn.Linear(5, 1)
    model, optimizer = job.wrap(net), torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    job.track(scaler=scaler)
    seen = []
    for index, (x, _) in enumerate(job.batches(DataLoader(data(), batch_size=4))):
        optimizer.zero_grad()
        before = net.weight.detach().clone()
        scaler.scale(model(x).sum() * (float("inf") if index == 2 else 1.0)).backward()
        applied = job.step(optimizer)
        assert applied != torch.equal(before, net.weight)
        seen.append((applied, scaler.get_scale()))
    assert seen == [(True, 8), (True, 16), (False, 8), (True, 8), (True, 16), (True, 16)]
    assert job.applied == BATCHES, "an overflow is consumed, not done again"


def test_a_scaler_that_is_switched_off_does_nothing(job: Job) -> None:
    net = nn.Linear(5, 1)
    model, optimizer = job.wrap(net), torch.optim.SGD(net.parameters(), lr=0.1)
    job.track(scaler=torch.amp.GradScaler("cpu", enabled=False))
    for x, _ in job.batches(DataLoader(data(), batch_size=4)):
        model(x).sum().backward()
        assert job.step(optimizer)


# What is open.


def test_what_comes_after_the_epoch_that_was_saved_at_its_end_is_not_left_out(
    join: Join, tmp_path: Path, shm: Path
) -> None:
    """The version was made before validation, so nobody knows whether it was done; and what it drew is missing."""
    golden = Training(join(), draws=True).run()
    with eg.Checkpointer(tmp_path, agent=False) as ck:
        Training(join(ck, every=BATCHES), draws=True).run(until=BATCHES + 2)
    with eg.Checkpointer(tmp_path, agent=False) as ck:
        again = Training(join(ck, every=BATCHES), draws=True).run()
    assert again.validated == [0, 1]
    assert again.losses == {step: loss for step, loss in golden.losses.items() if step >= BATCHES}


def test_a_misspelled_strategy_of_the_environment_is_answered_by_the_one_that_was_meant(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("STORE", "127.0.0.1:1"), ("UID", "0"), ("STRATEGY", "rolback")):
        monkeypatch.setenv(f"EVERGRAD_{name}", value)
    with pytest.raises(UsageError, match=r"EVERGRAD_STRATEGY=rolback: .* Did you mean 'rollback'\?"):
        join()
