"""State that the script keeps to itself begins anew with a process, and no such run is said to be exact."""

from __future__ import annotations

import functools
import random
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forkserver import FOLDER, JobRunner, Ran
from test_joiners import ends, summary_of
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, ReduceLROnPlateau, SequentialLR, StepLR

from evergrad.recovery.untracked_state import (
    UntrackedState,
    _script_code,
    find_generators,
    find_schedulers,
    sets_hyper_parameters,
)

Launch = Callable[..., Ran]
HYPER = FOLDER / "hyper_trainer.py"
RESTART: Sequence[object] = ("-n", 2, "--min-ranks", 2, "--fail", "kill rank=1 step=7 phase=forward")


@pytest.fixture(scope="session")
def plain(job_runner: JobRunner, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ran]:
    """The same script on two ranks without failures; each kind is run once."""
    known: dict[tuple[str, ...], Ran] = {}

    def run(*arguments: str) -> Ran:
        if arguments not in known:
            folder = tmp_path_factory.mktemp("plain")
            known[arguments] = job_runner.run(folder, "-n", 2, script=HYPER, arguments=arguments)
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


@pytest.mark.parametrize(
    "how",
    [
        ["--spares", 1, "--fail", "kill rank=0 step=3 phase=backward"],
        ["--spares", 1, "--fail", "leave rank=1 step=5 phase=forward"],
        ["--min-ranks", 2, "--fail", "kill rank=1 step=7 phase=forward", "--checkpoints"],
    ],
    ids=["kill", "leave", "restart"],
)
def test_gradients_that_a_script_keeps_from_step_to_step_leave_a_doubt(
    launch: Launch, plain: Callable[..., Ran], tmp_path: Path, how: list[object]
) -> None:
    kept = ["--zero-grad", "never"]
    versions = ["--checkpoints", str(tmp_path / "versions")] if how[-1] == "--checkpoints" else []
    options = how[:-1] if versions else how
    ran = launch("-n", 2, *options, script=HYPER, arguments=[*kept, *versions])
    assert ran.code == 0, ran.said
    assert ends(ran) != ends(plain(*kept)), "the script has trained something else, as it should here"
    assert summary_of(ran)["exact"] is None, ran.said
    assert "keeps gradients from step to step (no zero_grad)" in summary_of(ran)["unverified"], ran.said


@pytest.mark.parametrize("zero_grad", ["zeros", "after"])
def test_gradients_that_are_zeros_or_gone_before_a_step_leave_none(
    launch: Launch, plain: Callable[..., Ran], zero_grad: str
) -> None:
    arguments = ["--zero-grad", zero_grad]
    ran = launch(
        "-n", 2, "--spares", 1, "--fail", "kill rank=0 step=3 phase=backward", script=HYPER, arguments=arguments
    )
    assert ran.code == 0, ran.said
    assert ends(ran) == ends(plain(*arguments)), ran.said
    assert summary_of(ran)["exact"] is True, ran.said


@pytest.mark.parametrize("fail", ["kill rank=0 step=5 phase=backward", "leave rank=0 step=3 phase=forward"])
def test_the_order_of_a_sampler_that_draws_is_that_of_rank_0_whoever_has_its_place(
    launch: Launch, plain: Callable[..., Ran], fail: str
) -> None:
    """Each rank of this script has a seed of its own, and so would draw an order of its own."""
    ran = launch("-n", 2, "--spares", 1, "--fail", fail, script=HYPER, arguments=["--own-sampler"])
    assert ran.code == 0, ran.said
    assert ends(ran) == ends(plain("--own-sampler")), ran.said
    assert summary_of(ran)["exact"] is True, ran.said


def trained() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)


def train(
    untracked: UntrackedState,
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

    opening = train(UntrackedState(said.append), optimizer, range(10), set_rate)
    assert len(opening) == 4
    for offset, expected in ((10, "step 10, after the job went on from step 10, has the hyper-parameters"), (0, "")):
        said.clear()
        set_rate(9)
        untracked = UntrackedState(said.append)
        untracked.restored(10, optimizer.param_groups)

        def code(step: int, untracked: UntrackedState = untracked, offset: int = offset) -> None:
            untracked.has_read_step = True
            set_rate(step - offset)

        train(untracked, optimizer, range(10, 20), code, opening)
        assert "".join(said).startswith(expected) if expected else not said


@pytest.mark.parametrize(
    ("rate", "from_step"),
    [
        (lambda counter: 0.01 if counter < 7 else 0.002, 4),  # no change before the restart, and one much later
        (lambda counter: 0.01 if counter < 7 else 0.002, 10),
        (lambda counter: 0.1 if counter == 7 else None, 4),
        (lambda counter: 0.1 if counter == 7 else None, 10),
        (lambda counter: 0.1 if counter == 2 else None, 10),  # multiplied once, in the opening too
        (lambda counter: 0.1 if counter == 2 else None, 1),
        (lambda counter: 1 / (1 + counter), 10),
        (lambda counter: 1 / (1 + counter), 2),
    ],
)
def test_a_counter_that_begins_anew_leaves_a_doubt_although_the_script_logs_where_the_job_is(
    rate: Callable[[int], float | None], from_step: int
) -> None:
    """A number below 0.1 or above replaces the rate; 0.1 multiplies it, once."""
    said: list[str] = []
    optimizer = trained()

    def set_rate(counter: int) -> None:
        found = rate(counter)
        group = optimizer.param_groups[0]
        if found is not None:
            group["lr"] = group["lr"] * found if found == 0.1 else found

    opening = train(UntrackedState(said.append), optimizer, range(from_step), set_rate)
    untracked = UntrackedState(said.append)
    untracked.restored(from_step, optimizer.param_groups)

    def code(step: int) -> None:
        untracked.has_read_step = True  # to print it
        set_rate(step - from_step)

    train(untracked, optimizer, range(from_step, from_step + 12), code, opening)
    assert len(said) == 1, said


def test_rates_that_a_script_sets_and_that_do_not_change_leave_a_doubt_at_the_end() -> None:
    said: list[str] = []
    optimizer = trained()
    for by_script, began, expected in ((True, 4, 1), (False, 4, 0), (True, 0, 0)):
        said.clear()
        opening = train(UntrackedState(said.append), optimizer, range(began))
        untracked = UntrackedState(said.append)
        untracked.restored(began, optimizer.param_groups)
        train(untracked, optimizer, range(began, began + 2), opening=opening)
        untracked._may_set = by_script
        untracked.end()
        assert len(said) == expected, (by_script, began, said)


@pytest.mark.parametrize(
    ("text", "sets"),
    [
        ('for group in optimizer.param_groups: group["lr"] = rate(step)', True),
        ('optimizer.param_groups[0]["weight_decay"] /= 2', True),
        ('def change():\n    for group in groups:\n        group["momentum"] = 0.5', True),
        ('class Trainer:\n    def step(self):\n        self.groups[0]["betas"] = (0.5, 0.9)', True),
        ('print(optimizer.param_groups[0]["lr"])', False),
        ('settings = {"lr": 0.1}; rate = settings["lr"] * 2', False),
        ('log["loss"] = loss', False),
    ],
)
def test_code_that_sets_hyper_parameters_is_recognised(text: str, sets: bool) -> None:
    assert sets_hyper_parameters([compile(text, "script.py", "exec")]) is sets


@pytest.mark.parametrize(
    ("file", "is_of_script"),
    [
        ("/home/me/train/model.py", True),
        ("/opt/other/lib/python3.11/site-packages/layers/model.py", False),
        ("/usr/lib/python3/dist-packages/layers/model.py", False),
        (str(Path(torch.__file__).with_name("distributed") / "model.py"), False),
        (str(Path(sys.prefix) / "train" / "model.py"), True),
    ],
)
def test_code_of_libraries_is_none_of_the_scripts_wherever_they_are_installed(
    monkeypatch: pytest.MonkeyPatch, file: str, is_of_script: bool
) -> None:
    module: Any = types.ModuleType("layers_of_somebody")
    module.__file__ = file
    exec('def set_rate(group): group["lr"] = 0.1', vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert (module.set_rate.__code__ in set(_script_code())) is is_of_script


def test_the_search_of_the_scripts_code_asks_no_object_for_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trap:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"asked for {name}")

    class Method:
        @classmethod
        def change(cls, group: dict[str, float]) -> None:
            group["lr"] = 0.5

    namespace = torch.classes.of_no_library  # as pickle makes it, which looks for a name in all modules
    with pytest.raises(RuntimeError):
        assert namespace.__func__
    module = types.ModuleType("folder.of_the_user")
    vars(module).update(__file__="/home/user/of_the_user.py", trap=Trap(), namespace=namespace, method=Method.change)
    monkeypatch.setitem(sys.modules, "folder.of_the_user", module)
    monkeypatch.setitem(sys.modules, "folder", types.ModuleType("folder"))
    monkeypatch.setitem(sys.modules, "lazy", Trap())  # type: ignore[arg-type]
    found = [*_script_code()]
    assert Method.change.__func__.__code__ in found  # type: ignore[attr-defined]
    assert not [code for code in found if code.co_filename == torch._classes.__file__]


@pytest.mark.parametrize(
    "change",
    [
        lambda group, step: group.update(lr=1 / (1 + step)),
        lambda group, step: group.update(lr=0.1 * min(1.0, (step + 1) / 8)),  # a warm-up
        lambda group, step: group.update(lr=group["lr"] * 0.9),  # no counter at all
        lambda group, step: group.update(lr=0.5),  # never
    ],
)
def test_hyper_parameters_that_no_new_counter_would_give_leave_no_doubt(
    change: Callable[[dict[str, Any], int], None],
) -> None:
    said: list[str] = []
    optimizer = trained()
    opening = train(
        UntrackedState(said.append), optimizer, range(5), lambda step: change(optimizer.param_groups[0], step)
    )
    untracked = UntrackedState(said.append)
    untracked.restored(5, optimizer.param_groups)

    def code(step: int) -> None:
        untracked.has_read_step = True
        change(optimizer.param_groups[0], step)

    train(untracked, optimizer, range(5, 20), code, opening)
    assert not said


def test_an_average_of_weights_that_is_tracked_is_no_source_of_hyper_parameters() -> None:
    said: list[str] = []
    optimizer = trained()
    untracked = UntrackedState(said.append)
    untracked.restored(3, optimizer.param_groups)
    average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1))

    def code(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 1 / (1 + step)

    train(untracked, optimizer, range(3, 9), code, tracked={"ema": average})
    assert len(said) == 1


@pytest.mark.parametrize("is_tracked", [False, True])
def test_hyper_parameters_from_nowhere_leave_a_doubt(is_tracked: bool) -> None:
    said: list[str] = []
    optimizer = trained()
    untracked = UntrackedState(said.append)
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
    untracked = UntrackedState(said.append)
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


class Slotted:
    """An object without a dict."""

    __slots__ = ("empty", "rng")

    def __init__(self, rng: Any) -> None:
        self.rng = rng


def holders(one: Any) -> dict[str, Any]:
    """Variables of a script that hold a generator in the ways that scripts do."""

    class Holder:
        def __init__(self, **given: Any) -> None:
            self.__dict__.update(given)

    class OfClass:
        shared = one

    def closure() -> Any:
        return one

    def default(rng: Any = one) -> Any:
        return rng

    def batches() -> Any:
        while True:
            yield one

    running = batches()
    next(running)
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    net[1].gen = one
    return {
        "attribute": (Holder(rng=one), "attribute.rng"),
        "transform": (Holder(transform=Holder(rng=one)), "transform.transform.rng"),
        "net": (net, "net.1.gen"),
        "closure": (closure, "closure.one"),
        "default": (default, "default()"),
        "partial": (functools.partial(default, one), "partial()"),
        "table": ({"noise": [1, one]}, "table['noise'][1]"),
        "slots": (Slotted(one), "slots.rng"),
        "kind": (OfClass(), "kind.shared"),
        "method": (one.random if hasattr(one, "random") else one.get_state, "method"),
        "running": (running, "running.one"),
    }


@pytest.mark.parametrize("kind", ["torch", "numpy", "python"])
def test_generators_are_found_wherever_a_script_keeps_them(kind: str) -> None:
    makers = {"torch": torch.Generator, "numpy": np.random.default_rng, "python": random.Random}
    one: Any = makers[kind]()
    for name, (thing, expected) in holders(one).items():
        assert find_generators([{name: thing}], {}, []) == [(expected, one)], name


def test_the_search_for_generators_ends_and_calls_nothing_of_the_scripts() -> None:
    class Trap:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise ValueError("asked")

    ring: list[Any] = []
    ring.append(ring)
    one = random.Random(1)
    dead = weakref.proxy(random.Random(2))
    names = {"trap": Trap(), "ring": ring, "dead": dead, "rows": [object() for _ in range(100_000)], "rng": one}
    assert find_generators([names], {}, []) == [("rng", one)]


def test_generators_of_loaders_that_are_not_the_jobs_are_left_out_and_those_of_their_data_are_not() -> None:
    class Data(list[int]):
        noise = None

    data = Data(range(3))
    data.noise = mine = np.random.default_rng(1)  # type: ignore[assignment]
    loader = torch.utils.data.DataLoader(data, generator=torch.Generator(), shuffle=True)  # type: ignore[var-annotated]
    assert find_generators([{"validation": loader}], {}, []) == [("validation.dataset.noise", mine)]
