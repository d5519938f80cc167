"""State that the script keeps to itself begins anew with a process, and no such run is said to be exact."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nursery import FOLDER, Nursery, Ran
from test_joiners import ends, summary_of
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, ReduceLROnPlateau, SequentialLR, StepLR

from evergrad.recovery.untracked import Untracked, find_generators, find_schedulers

Launch = Callable[..., Ran]
HYPER = FOLDER / "hyper_trainer.py"
RESTART: Sequence[object] = ("-n", 2, "--min-ranks", 2, "--fail", "kill rank=1 step=7 phase=forward")


@pytest.fixture(scope="session")
def plain(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ran]:
    """The same script on two ranks without failures; each kind is run once."""
    known: dict[tuple[str, ...], Ran] = {}

    def run(*arguments: str) -> Ran:
        if arguments not in known:
            folder = tmp_path_factory.mktemp("plain")
            known[arguments] = nursery.run(folder, "-n", 2, script=HYPER, arguments=arguments)
            assert summary_of(known[arguments])["exact"] is True, known[arguments].said
        return known[arguments]

    return run


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--lr", "own-counter"], "job.applied"),
        (["--lr", "one-cycle"], "OneCycleLR"),
        (["--lr", "lambda"], "LambdaLR"),
        (["--lr", "set", "--generator", "numpy"], "'numbers'"),
    ],
)
def test_a_whole_job_that_begins_again_is_not_said_to_be_exact_if_untracked_state_began_anew(
    launch: Launch, plain: Callable[..., Ran], tmp_path: Path, arguments: list[str], reason: str
) -> None:
    ran = launch(*RESTART, script=HYPER, arguments=[*arguments, "--checkpoints", str(tmp_path / "versions")])
    assert ran.code == 0, ran.said
    assert [event["step"] for event in ran.events("restored") if event["step"]], ran.said
    assert ends(ran) != ends(plain(*arguments)), "the script has trained something else, as it should here"
    summary = summary_of(ran)
    assert summary["exact"] is None, ran.said
    assert reason in summary["unverified"], ran.said


@pytest.mark.parametrize(
    "arguments",
    [
        ["--lr", "set"],
        ["--lr", "scheduler"],
        ["--lr", "multiplied"],
        ["--lr", "set", "--generator", "torch", "--generator-unused"],
        ["--lr", "set", "--untracked-epoch-scheduler"],
    ],
)
def test_a_whole_job_that_begins_again_is_exact_if_nothing_began_anew(
    launch: Launch, plain: Callable[..., Ran], tmp_path: Path, arguments: list[str]
) -> None:
    ran = launch(*RESTART, script=HYPER, arguments=[*arguments, "--checkpoints", str(tmp_path / "versions")])
    assert ran.code == 0, ran.said
    assert [event["step"] for event in ran.events("restored") if event["step"]], ran.said
    assert ends(ran) == ends(plain(*arguments)), ran.said
    assert summary_of(ran)["exact"] is True, ran.said


@pytest.mark.parametrize("own", ["torch", "numpy", "python"])
def test_numbers_from_a_generator_of_the_scripts_own_leave_a_doubt_after_a_join(launch: Launch, own: str) -> None:
    ran = launch("-n", 2, "--spares", 1, "--fail", "kill rank=1 step=5", script=HYPER, arguments=["--generator", own])
    assert ran.code == 0, ran.said
    name = {"torch": "noise.generator", "numpy": "numbers", "python": "drawn_by"}[own]
    assert summary_of(ran)["exact"] is None, ran.said
    assert f"its own generator {name!r}" in summary_of(ran)["unverified"], ran.said


def trained() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)


def train(
    untracked: Untracked,
    optimizer: Any,
    steps: range,
    each: Callable[[int], None] = lambda _: None,
    opening: list[str] | None = None,
    tracked: dict[str, Any] | None = None,
    epoch_steps: int = 100,
) -> list[str]:
    """Steps as a job makes them; `each` is the script's code before each."""
    opening = [] if opening is None else opening
    for step in steps:
        each(step)
        untracked.before_step(step, step // epoch_steps, opening, [optimizer], tracked or {})
        untracked.after_step([optimizer])
    return opening


def test_hyper_parameters_that_begin_anew_are_recognised_although_the_script_reads_where_the_job_is() -> None:
    said: list[str] = []
    optimizer = trained()

    def set_rate(counter: int) -> None:
        optimizer.param_groups[0]["lr"] = 1 / (1 + counter)

    opening = train(Untracked(said.append), optimizer, range(10), set_rate)
    assert len(opening) == 4
    for offset, expected in ((10, "step 10, after the job went on from step 10, has the hyper-parameters"), (0, "")):
        said.clear()
        set_rate(9)
        untracked = Untracked(said.append)
        untracked.restored(10, optimizer.param_groups)

        def code(step: int, untracked: Untracked = untracked, offset: int = offset) -> None:
            untracked.has_read_step = True
            set_rate(step - offset)

        train(untracked, optimizer, range(10, 20), code, opening)
        assert "".join(said).startswith(expected) if expected else not said


@pytest.mark.parametrize("is_tracked", [False, True])
def test_hyper_parameters_from_nowhere_leave_a_doubt(is_tracked: bool) -> None:
    said: list[str] = []
    optimizer = trained()
    untracked = Untracked(said.append)
    untracked.restored(3, optimizer.param_groups)

    def code(step: int) -> None:
        if step == 6:
            optimizer.param_groups[0]["lr"] = 0.125

    train(untracked, optimizer, range(3, 9), code, tracked={"counter": object()} if is_tracked else {})
    assert [line.partition(",")[0] for line in said] == (
        [] if is_tracked else ["the script has set hyper-parameters for step 6"]
    )


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize(
    ("make", "began_at", "every", "is_doubtful"),
    [
        (lambda one: StepLR(one, 2), 0, 1, True),
        (lambda one: StepLR(one, 2), 7, 1, False),  # the script has brought it there by itself
        (lambda one: StepLR(one, 2), 1, 5, False),  # once an epoch, also for the epoch that was over
        (lambda one: StepLR(one, 2), 0, 5, True),
        (lambda one: StepLR(one, 2), 0, 100, False),  # never
        (ReduceLROnPlateau, 1, 5, True),  # as often, but by other figures
    ],
)
def test_an_untracked_scheduler_leaves_a_doubt_if_it_is_stepped_and_not_where_the_job_is(
    make: Callable[[Any], Any], began_at: int, every: int, is_doubtful: bool
) -> None:
    said: list[str] = []
    optimizer = trained()
    optimizer.step()
    scheduler = make(optimizer)
    scheduler.last_epoch = began_at
    untracked = Untracked(said.append)
    untracked.restored(7, optimizer.param_groups)

    def code(step: int) -> None:
        if step > 7 and step % every == 0:
            scheduler.step(1.0) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()

    train(untracked, optimizer, range(7, 20), code, epoch_steps=5)
    assert bool(said) == is_doubtful, said


def test_schedulers_that_are_tracked_or_parts_of_tracked_ones_are_left_out() -> None:
    optimizer, other = trained(), trained()
    parts: list[Any] = [ExponentialLR(optimizer, 0.5), StepLR(optimizer, 2)]
    whole = SequentialLR(optimizer, parts, milestones=[3])
    untracked = LambdaLR(optimizer, lambda _: 1.0)
    elsewhere = StepLR(other, 2)
    assert find_schedulers([optimizer], {"scheduler": whole}) == [untracked]
    assert elsewhere in find_schedulers([other], {})


def test_generators_of_loaders_and_of_tracked_things_are_left_out() -> None:
    class Kept:
        def __init__(self) -> None:
            self.generator = np.random.default_rng(1)

    kept, loader_generator, mine = Kept(), torch.Generator(), random.Random(1)
    loader = torch.utils.data.DataLoader(list(range(3)), generator=loader_generator)  # type: ignore[arg-type,var-annotated]
    names = {"kept": kept.generator, "g": loader_generator, "mine": mine, "system": random.SystemRandom(), "x": 3}
    assert find_generators([names], {"kept": kept}, [loader]) == [("mine", mine)]
