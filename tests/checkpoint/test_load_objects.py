"""Objects in a state: modules, optimizers, schedulers; loaded as torch would, and training goes on to the bit."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sources import MemorySource, SharedSource, bytes_of, load, network, refusal
from torch import nn

from evergrad.checkpoint.restore.load_state import prepare
from evergrad.checkpoint.rng import rng_state
from evergrad.errors import StateError
from evergrad.state import flatten
from evergrad.testing import raw_bytes
from states import same

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2),
    "adamw amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "adam capturable lr": lambda params: torch.optim.Adam(params, lr=torch.tensor(1e-2)),
    "adam fused": lambda params: torch.optim.Adam(params, lr=1e-2, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
    "sgd momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, centered=True, momentum=0.5),
    "adafactor": torch.optim.Adafactor,
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=1e-2, max_iter=2),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.02, total_steps=50, cycle_momentum=False
    ),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "sequential": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)],
        [2],
    ),
}


class Trainer:
    """A small real training: everything in it has to come back for the losses to be the same."""

    def __init__(
        self,
        optimizer: str = "adam",
        scheduler: str = "lambda",
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.model = network(seed).to(device, dtype)
        half = list(self.model[:2].parameters()), list(self.model[2:].parameters())
        groups = [{"params": half[0]}, {"params": half[1]}] if optimizer != "lbfgs" else self.model.parameters()
        self.optimizer = OPTIMIZERS[optimizer](groups)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.device, self.dtype = device, dtype

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "rng": rng_state()}

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            x = torch.randn(4, 3, 8, 8).to(self.device, self.dtype)

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                self.optimizer.zero_grad()
                loss = self.model(x).float().pow(2).mean()
                loss.backward()
                return loss

            losses.append(self.optimizer.step(closure).item())
            plateau = isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            self.scheduler.step(losses[-1]) if plateau else self.scheduler.step()
        return losses


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_on_as_after_torch_load(optimizer: str, used: bool) -> None:
    first = Trainer(optimizer)
    first.train(3)
    saved, file = MemorySource(first.state()), io.BytesIO()
    torch.save({name: part.state_dict() for name, part in first.state().items()}, file)
    straight_on = first.train(4)

    ours, theirs = Trainer(optimizer, seed=1), Trainer(optimizer, seed=2)
    if used:
        ours.train(5), theirs.train(5)
    file.seek(0)
    parts = torch.load(file, weights_only=False)
    for name in ("model", "optimizer", "scheduler"):
        theirs.state()[name].load_state_dict(parts[name])
    load(ours.state(), saved)
    for name in ("model", "optimizer"):
        assert bytes_of(ours.state()[name]) == bytes_of(theirs.state()[name]), name
    assert ours.train(4) == straight_on
    rng_state().load_state_dict(parts["rng"])
    assert theirs.train(4) == straight_on


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_go_on(scheduler: str) -> None:
    first = Trainer("sgd momentum", scheduler)
    first.train(3)
    saved = MemorySource(first.state())
    straight_on = first.train(6)
    ours = Trainer("sgd momentum", scheduler, seed=1)
    load(ours.state(), saved)
    assert ours.train(6) == straight_on
    assert ours.scheduler.get_last_lr() == first.scheduler.get_last_lr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_state_of_other_dtypes_is_cast_as_torch_does(dtype: torch.dtype) -> None:
    first = Trainer("adam", dtype=dtype)
    first.train(2)
    for state in first.optimizer.state.values():  # what an optimizer with wider state of its own would save
        state["exp_avg"] = state["exp_avg"].float()
    saved, fresh = MemorySource(first.optimizer), Trainer("adam", dtype=dtype, seed=1)
    load(fresh.optimizer, saved)
    theirs = Trainer("adam", dtype=dtype, seed=1)
    theirs.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    assert bytes_of(fresh.optimizer) == bytes_of(theirs.optimizer)


def test_a_channels_last_model_and_its_optimizer_come_back_in_their_layout() -> None:
    first = Trainer()
    first.model.to(memory_format=torch.channels_last)
    first.train(2)
    for source in (MemorySource, SharedSource):
        saved, ours = source(first.state()), Trainer(seed=1)
        ours.model.to(memory_format=torch.channels_last)
        load(ours.state(), saved)
        assert ours.model[0].weight.is_contiguous(memory_format=torch.channels_last)
        kept = ours.optimizer.state[ours.model[0].weight]["exp_avg"]
        assert kept.is_contiguous(memory_format=torch.channels_last)
        assert not kept.is_contiguous()
        assert bytes_of(ours.model) == bytes_of(first.model)


def test_a_used_optimizer_keeps_its_memory() -> None:
    trainer = Trainer()
    trainer.train(2)
    saved = MemorySource(trainer.state())
    before = {path: tensor.data_ptr() for path, tensor in flatten(trainer.optimizer).tensors.items()}
    trainer.train(1)
    load(trainer.state(), saved)
    assert {path: tensor.data_ptr() for path, tensor in flatten(trainer.optimizer).tensors.items()} == before


def test_an_optimizer_goes_back_to_having_no_state() -> None:
    trainer = Trainer("sgd momentum")
    saved = MemorySource(trainer.state())
    trainer.train(1)
    assert trainer.optimizer.state
    load(trainer.state(), saved)
    assert not trainer.optimizer.state


def test_hooks_of_an_optimizer_run() -> None:
    trainer, calls = Trainer(), []
    trainer.train(1)
    saved = MemorySource(trainer.optimizer)
    fresh = Trainer(seed=1).optimizer
    fresh.register_load_state_dict_pre_hook(lambda _, state: calls.append(sorted(state)))
    fresh.register_load_state_dict_post_hook(lambda _: calls.append("after"))
    load(fresh, saved)
    assert calls == [["param_groups", "state"], "after"]


def test_groups_of_parameters_have_to_match() -> None:
    trainer = Trainer()
    saved = MemorySource({"optimizer": trainer.optimizer})
    other = torch.optim.Adam(trainer.model.parameters())
    expected = r"^optimizer/param_groups: expected parameter groups of \[7\], found \[4, 3\] in the checkpoint\. strict"
    found = refusal({"optimizer": other}, saved)
    assert re.search(expected, found.text)
    assert found.is_clean, found
    assert len(load({"optimizer": other}, saved, strict=False)) == 1


def test_a_gradient_scaler_comes_back() -> None:
    class Scaler:
        def __init__(self) -> None:
            self.scale, self.tracker = torch.tensor(65536.0), 0

        def state_dict(self) -> dict[str, Any]:
            return {"scale": self.scale, "tracker": self.tracker}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.scale, self.tracker = state["scale"], state["tracker"]

    mine, real = Scaler(), torch.amp.GradScaler("cpu", init_scale=4.0)
    mine.scale, mine.tracker = torch.tensor(2.0), 7
    saved = MemorySource({"mine": mine, "real": real})
    fresh = {"mine": Scaler(), "real": torch.amp.GradScaler("cpu")}
    load(fresh, saved)
    assert (float(fresh["mine"].scale), fresh["mine"].tracker) == (2.0, 7)
    assert fresh["real"].state_dict() == real.state_dict()


def test_a_module_is_filled_where_it_is() -> None:
    model = network(1)
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    saved = MemorySource(network(2))
    versions = [param._version for param in model.parameters()]
    load(model, saved)
    assert bytes_of(model) == bytes_of(network(2))
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    assert model[5].weight is model[6].weight
    assert all(param.requires_grad and param.is_leaf for param in model.parameters())
    assert all(param._version > version for param, version in zip(model.parameters(), versions, strict=True))


def test_autograd_finds_out_that_parameters_were_loaded() -> None:
    for size in (4, 512):  # copied by torch, and by us
        model = nn.Linear(size, size)
        saved = MemorySource(model)
        loss = model(model(torch.ones(2, size))).sum()
        load(model, saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class Renaming(nn.Module):
    """Has been renamed since: a load hook knows the old name."""

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Linear(3, 3)
        self._register_load_state_dict_pre_hook(self._rename)

    def _rename(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}old.")]:
            state[name.replace("old.", "new.", 1)] = state.pop(name)


class Counting(nn.Module):
    """Keeps something that is no tensor."""

    def __init__(self, count: Any = 0) -> None:
        super().__init__()
        self.weight, self.count = nn.Parameter(torch.rand(3)), count

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


class Halving(nn.Module):
    """Saves twice what it has: its state_dict is no view of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))

    def state_dict(self, *_: Any, **__: Any) -> dict[str, torch.Tensor]:
        return {"weight": self.weight.detach() * 2}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> None:
        with torch.no_grad():
            self.weight.zero_()  # whoever had filled it before would lose it here
            self.weight += state["weight"] / 2


def test_load_hooks_of_a_submodule_run() -> None:
    saved = MemorySource({"model": nn.ModuleDict({"part": nn.ModuleDict({"old": nn.Linear(3, 3)})})})
    model = nn.ModuleDict({"part": Renaming()})
    load({"model": model}, saved)
    assert raw_bytes(model["part"].new.weight) == raw_bytes(saved.tensor("model/part.old.weight"))


def test_post_hooks_run() -> None:
    model, calls = network(), []
    saved = MemorySource(model)
    model[1].register_load_state_dict_post_hook(lambda module, keys: calls.append(keys.missing_keys))
    load(model, saved)
    assert calls == [[]]


@pytest.mark.parametrize("count", [3, torch.arange(3)])
def test_extra_state_comes_back(count: Any) -> None:
    saved, model = MemorySource(first := Counting(count)), Counting()
    load(model, saved)
    assert same(model.count, count)
    assert torch.equal(model.weight, first.weight)


def test_a_module_with_its_own_loading_is_asked_to_do_it() -> None:
    saved, model = MemorySource(first := Halving()), Halving()
    load(model, saved)
    assert torch.equal(model.weight, first.weight)


def test_a_state_dict_that_is_a_copy_is_loaded_by_the_module() -> None:
    model = nn.Linear(3, 3)
    model.register_state_dict_post_hook(
        lambda module, state, prefix, _: state.update({k: v.clone() for k, v in state.items()})
    )
    saved = MemorySource(first := nn.Linear(3, 3))
    load(model, saved)
    assert torch.equal(model.weight, first.weight)


def test_a_lazy_module_takes_its_shapes_from_the_checkpoint() -> None:
    first = nn.Linear(4, 3)
    model = nn.Sequential(nn.LazyLinear(3))
    load(model, MemorySource(nn.Sequential(first)))
    assert torch.equal(model[0].weight, first.weight)


def test_parametrised_modules_come_back() -> None:
    first, second = (nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)) for _ in range(2))
    load(second, MemorySource(first))
    assert torch.equal(second.weight, first.weight)


def test_wrapped_modules_come_back() -> None:
    first, second = torch.optim.swa_utils.AveragedModel(network(1)), torch.optim.swa_utils.AveragedModel(network(2))
    load({"ema": second}, MemorySource({"ema": first}))
    assert bytes_of(first) == bytes_of(second)


def test_a_module_that_shares_what_the_checkpoint_does_not_is_refused() -> None:
    apart = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    tied = copy.deepcopy(apart)
    tied[1].weight = tied[0].weight
    saved = MemorySource({"model": apart})
    found = refusal({"model": tied}, saved)
    assert re.search(r"^model/1.weight: shares its memory with model/0.weight, and the checkpoint has diff", found.text)
    assert found.is_clean, found
    assert len(load({"model": tied}, saved, strict=False)) == 1
    load({"model": tied}, saved, where="model/1.weight")
    assert torch.equal(tied[0].weight, apart[1].weight)
    load({"model": apart}, MemorySource({"model": tied}))
    assert torch.equal(apart[0].weight, apart[1].weight)


def test_what_fits_of_a_module_that_loads_itself_is_loaded() -> None:
    class Head(Counting):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            self.head = nn.Parameter(torch.rand(size))

    first, second = Head(5), Head(4)
    skipped = load(second, MemorySource(first), strict=False)
    assert skipped == ("head: expected float32 (4,), found float32 (5,) in the checkpoint",)
    assert torch.equal(first.weight, second.weight)
    assert second.count == 5


def test_an_object_without_load_state_dict_is_refused() -> None:
    class Mute:
        def state_dict(self) -> dict[str, int]:
            return {"n": 1}

    found = refusal({"mute": Mute()}, MemorySource({"mute": Mute()}))
    assert re.search(r"^mute: a .*Mute has state_dict\(\) and no load_state_dict\(\)", found.text)
    assert found.is_clean, found


def test_an_object_that_fails_to_load_is_named_with_its_reason() -> None:
    class Touchy:
        def state_dict(self) -> dict[str, int]:
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise ValueError("not today")

    loading = prepare({"parts": [Touchy()]}, MemorySource({"parts": [Touchy()]}))
    with pytest.raises(StateError, match=r"^parts/0: .*Touchy.load_state_dict failed: ValueError: not today") as caught:
        loading.apply()
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_object_that_was_forgotten_is_found_out() -> None:
    trainer = Trainer()
    saved = MemorySource(trainer.state())
    found = refusal({"model": trainer.model, "optimizer": trainer.optimizer, "rng": rng_state()}, saved)
    assert re.search("^scheduler: in the checkpoint, and not in the state given", found.text)
    assert found.is_clean, found


def test_only_the_selected_tensors_are_loaded() -> None:
    first, ours = Trainer(), Trainer(seed=1)
    first.train(2)
    saved = MemorySource(first.state() | {"epoch": 3})
    live = ours.state() | {"epoch": 0, "only here": torch.zeros(1)}
    before = {name: bytes_of(live[name]) for name in ("optimizer", "scheduler", "epoch")}
    load(live, saved, where="model/5.*")
    assert torch.equal(ours.model[5].weight, first.model[5].weight)
    assert not torch.equal(ours.model[0].weight, first.model[0].weight)
    assert {name: bytes_of(live[name]) for name in before} == before


def test_an_object_is_loaded_whole_or_not_at_all() -> None:
    first, ours = Trainer(), Trainer(seed=1)
    first.train(2)
    first.optimizer.param_groups[0]["lr"] = 0.5
    saved = MemorySource(first.state())
    found = refusal(ours.state(), saved, where="**/exp_avg")
    assert re.search(r"^optimizer: can only be loaded whole, and 14 of its 21 tensors were not selected", found.text)
    assert found.is_clean, found
    assert not ours.optimizer.state
    load(ours.state(), saved, where="role:optimizer")
    assert bytes_of(ours.optimizer) == bytes_of(first.optimizer)
    assert ours.optimizer.param_groups[0]["lr"] == 0.5


def test_a_module_that_loads_itself_can_be_loaded_in_part() -> None:
    first, second = nn.Sequential(Counting(3), Counting(4)), nn.Sequential(Counting(), Counting())
    load({"m": second}, MemorySource({"m": first}), where="m/1.weight")
    assert torch.equal(first[1].weight, second[1].weight)
    assert not torch.equal(first[0].weight, second[0].weight)
    assert [part.count for part in second] == [0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("optimizer", ["adam", "adam fused", "sgd momentum"])
def test_training_on_a_gpu_goes_on(optimizer: str, used: bool) -> None:
    first, ours = Trainer(optimizer, device="cuda"), Trainer(optimizer, seed=1, device="cuda")
    first.train(3)
    saved = MemorySource(first.state())
    if used:
        ours.train(2)
    load(ours.state(), saved)
    for name in ("model", "optimizer"):
        assert bytes_of(ours.state()[name]) == bytes_of(first.state()[name]), name
    places = [tensor.device.type for tensor in flatten(first.optimizer).tensors.values()]
    assert [tensor.device.type for tensor in flatten(ours.optimizer).tensors.values()] == places
    random = torch.get_rng_state()
    straight_on = first.train(3)
    torch.set_rng_state(random)
    assert ours.train(3) == pytest.approx(straight_on, rel=1e-4)  # kernels of convolutions are free in their order
