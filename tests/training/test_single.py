"""One process: the same settings give the same bits, and what is restored is copied."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evergrad.errors import UsageError
from evergrad.training import Dataset, Training, Workload
from evergrad.training.mechanisms import make_session
from evergrad.training.mechanisms.session import TrainingSnapshot
from evergrad.training.mechanisms.single import SingleSession
from evergrad.training.settings import PRECISIONS
from evergrad.training.workloads.workload import load_user_workload

TOYS = Path(__file__).parents[1] / "study" / "toys.py"


def session(**given: object) -> SingleSession:
    """A small network with batch statistics and dropout."""
    settings = {"workload": f"{TOYS}:small", "batch_size": 32, "learning_rate": 0.05} | given
    training = Training(**settings)  # type: ignore[arg-type]
    return make_session(training, load_user_workload(training))


def train(one: SingleSession, epochs: int = 1) -> None:
    """So many epochs."""
    for _ in range(epochs):
        for number in range(one.steps_per_epoch):
            one.step(number)


def bits(one: SingleSession) -> dict[str, bytes]:
    """All of the state."""
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in one.state().items()}


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_same_seed_gives_the_same_bits_and_another_one_others(optimizer: str, precision: str) -> None:
    first, second, other = (session(optimizer=optimizer, precision=precision, seed=seed) for seed in (1, 1, 2))
    for one in (first, second, other):
        train(one, 2)
    assert bits(first) == bits(second)
    assert bits(first)["model/0.weight"] != bits(other)["model/0.weight"]
    assert {one.dtype for name, one in first.state().items() if name.endswith("weight")} == {getattr(torch, precision)}


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_going_on_from_a_snapshot_is_going_on(optimizer: str) -> None:
    straight = session(optimizer=optimizer)
    train(straight)
    kept = straight.snapshot()
    take_up = straight.make_reset()
    train(straight, 2)
    after = bits(straight)
    resumed = session(optimizer=optimizer)
    resumed.restore(kept)
    train(resumed, 2)
    assert bits(resumed) == after
    take_up()
    assert (straight.epoch, bits(straight)) == (1, {k: _bytes(v) for k, v in kept.tensors.items()})
    train(straight, 2)
    assert bits(straight) == after


def test_a_snapshot_is_nobodys_memory_but_its_own() -> None:
    one = session(optimizer="adam")
    train(one)
    kept = one.snapshot()
    before = {name: _bytes(tensor) for name, tensor in kept.tensors.items()}
    one.restore(kept)
    train(one)
    for tensor in one.state().values():
        tensor.fill_(7)
    assert {name: _bytes(tensor) for name, tensor in kept.tensors.items()} == before


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_training_in_16_bits_moves_weights_as_plain_sgd_does(precision: str) -> None:
    dtype = getattr(torch, precision)
    one = session(precision=precision)
    start = one.weights().clone()
    plain = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([plain], lr=0.05, momentum=0.9, fused=False, foreach=False)
    for number in range(3):
        gradient = torch.full_like(start, 0.01 * (number + 1))
        plain.grad = gradient.clone()
        optimizer.step()
        at = 0
        for parameter in one._model.parameters():
            parameter.grad = gradient[at : at + parameter.numel()].view(parameter.shape).clone()
            at += parameter.numel()
        one._optimizer.step()
    assert one.weights().dtype == dtype
    assert not torch.equal(one.weights(), start)
    assert torch.equal(one.weights(), plain.data)


def test_what_a_fault_alters_in_the_state_the_model_meets() -> None:
    one = session()
    before = one.evaluate().metric, float(one.magnitude())
    one.state()["model/4.bias"].copy_(torch.tensor([1e9, -1e9]))
    seen = one.evaluate()
    assert seen.predictions.unique().tolist() == [0]
    assert float(one.magnitude()) == 1e9 == seen.magnitude
    assert before != (seen.metric, 1e9)
    one.state()["optimizer/state/0/momentum_buffer"][0, 0] = float("nan")
    assert torch.isnan(one.magnitude())


def test_evaluating_alters_nothing() -> None:
    one = session()
    train(one)
    before = bits(one)
    first, second = one.evaluate(), one.evaluate()
    assert bits(one) == before
    assert first.metric == second.metric
    assert torch.equal(first.predictions, second.predictions)


def test_names_are_those_of_the_file_and_the_epoch_is_restored() -> None:
    one = session(optimizer="adam")
    names = list(one.state())
    assert names[:3] == ["model/0.weight", "model/0.bias", "model/1.weight"]
    assert "model/1.running_mean" in names
    assert "optimizer/state/0/exp_avg_sq" in names
    one.restore(TrainingSnapshot(5, one.snapshot().tensors))
    assert one.epoch == 5


def test_an_optimizer_that_hides_its_state_is_refused() -> None:
    class Hiding(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            super().step()
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["count"] = 1

    data = Dataset("d", torch.zeros(8, 2), torch.zeros(8).long(), torch.zeros(8, 2), torch.zeros(8).long())
    workload = Workload(model=lambda: torch.nn.Linear(2, 2), data=data, optimizer=lambda p: Hiding(p, lr=0.1))
    with pytest.raises(UsageError, match="optimizer Hiding: keeps 'count' as int, expected a tensor"):
        make_session(Training(batch_size=4), workload)


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
