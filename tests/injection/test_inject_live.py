"""Live injection in one process: at its step, once, with the bits that a file of the same state gets."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import evergrad as eg
from evergrad.errors import UnknownTensor, UsageError
from evergrad.injection import Fault, LiveInjection
from evergrad.state import flatten

TARGETS = ("weights", "buffers", "optimizer", "gradients", "activations", "state")
PAGE = Path(__file__).parents[2] / "docs" / "injection.md"


class Training:
    """A small training whose batches depend on the step alone."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 2))
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        self.steps = 0

    def run(self, steps: int = 1, batch: int = 6) -> Training:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.forward(batch).square().mean().backward()
            self.optimizer.step()
            self.steps += 1
        return self

    def forward(self, batch: int = 6) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.steps)
        found: torch.Tensor = self.model(torch.randn(batch, 5, generator=generator))
        return found

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def bits(self) -> dict[str, bytes]:
        return bits_of(self.state())

    def hit(self, fault: Any = None, **settings: Any) -> LiveInjection:
        drawn = {} if isinstance(fault, eg.InjectionLog) else {"count": 2}
        return eg.inject_live(self.model, self.optimizer, fault or eg.BitFlip("mantissa"), **drawn | settings)

    def hooks(self) -> int:
        before = len(self.optimizer._optimizer_step_pre_hooks) + len(self.optimizer._optimizer_step_post_hooks)
        return before + sum(len(one._forward_pre_hooks) + len(one._forward_hooks) for one in self.model.modules())


def bits_of(state: dict[str, Any]) -> dict[str, bytes]:
    tensors = flatten(state).tensors
    return {path: bytes(one.contiguous().reshape(-1).view(torch.uint8).numpy()) for path, one in tensors.items()}


def told(log: eg.InjectionLog | None) -> list[Any]:
    assert log is not None
    return [hit.to_json() for hit in log.faults()]


# As in a file.


@pytest.mark.parametrize(
    ("target", "where", "fault", "settings"),
    [
        ("state", None, eg.BitFlip(), {"count": 40}),
        ("state", "optimizer/**", eg.BitFlip("exponent"), {"count": 9, "allow_nonfinite": False}),
        ("weights", "role:model", eg.Scale(4500.0), {"fraction": 0.2}),
        ("weights", "model/3.weight", eg.BitFlip(0), {"probability": 0.5}),
        ("buffers", "role:buffer", eg.BitFlip("sign"), {"count": 5, "sampling": "tensor"}),
        ("optimizer", "role:optimizer", eg.StuckAt(1, "exponent"), {"count": 20, "dtypes": ["float32"]}),
    ],
)
def test_a_training_is_hit_as_a_file_of_its_state_is(
    tmp_path: Path, target: str, where: str | None, fault: Fault, settings: dict[str, Any]
) -> None:
    training = Training().run(2)
    torch.save(training.state(), tmp_path / "state.pt")
    log = eg.inject(tmp_path / "state.pt", fault, where=where, seed=11, out=tmp_path / "bad.pt", **settings)
    before = training.bits()
    live = training.hit(fault, target=target, where=where, seed=11, **{"count": None} | settings)
    assert told(live.log) == told(log)
    assert training.bits() == bits_of(torch.load(tmp_path / "bad.pt")) != before
    assert live.log is not None
    assert (live.log.attempts, live.log.changed, live.log.nonfinite) == (log.attempts, log.changed, log.nonfinite)
    assert live.log.settings["seed"] == 11
    assert training.hooks() == 0


def test_a_log_happens_in_a_training_as_in_a_file_and_back(tmp_path: Path) -> None:
    training = Training().run(2)
    torch.save(training.state(), tmp_path / "state.pt")
    log = eg.inject(tmp_path / "state.pt", eg.BitFlip(), count=20, seed=4, out=tmp_path / "bad.pt")
    live = training.hit(log)
    assert told(live.log) == told(log)
    assert training.bits() == bits_of(torch.load(tmp_path / "bad.pt"))
    assert live.log is not None
    again = eg.InjectionLog.load(live.log.save(tmp_path / "live.jsonl"))
    eg.replay(again, tmp_path / "state.pt", out=tmp_path / "again.pt")
    assert (tmp_path / "again.pt").read_bytes() == (tmp_path / "bad.pt").read_bytes()
    later = Training()
    assert not later.hit(again, step=2).done
    assert later.run(5).bits() == training.run(3).bits(), "trained on from there it is the same training"


@pytest.mark.parametrize("target", TARGETS)
def test_the_same_faults_happen_again_from_their_log_later(tmp_path: Path, target: str) -> None:
    first, second, plain = Training(), Training(), Training().run(5)
    live = first.hit(target=target, step=3, seed=2)
    first.run(5)
    assert live.log is not None
    log = eg.InjectionLog.load(live.log.save(tmp_path / "log.jsonl"))
    again = second.hit(log, step=3)
    second.run(5)
    assert told(again.log) == told(log)
    assert second.bits() == first.bits() != plain.bits()
    assert again.log is not None
    assert again.log.settings["replay_of"] == log.digest


# When.


@pytest.mark.parametrize("target", TARGETS)
def test_it_happens_at_its_step_once_and_leaves_no_hook(target: str) -> None:
    training, plain = Training().run(1), Training().run(1)
    faults = training.hit(target=target, step=4, now=1, seed=5)
    training.run(3)
    assert training.bits() == plain.run(3).bits(), "until then nothing has happened"
    assert not faults.done
    assert faults.log is None
    training.run()
    assert faults.done
    assert faults.log is not None
    assert faults.log.injected == 2
    assert {key: faults.log.settings[key] for key in ("target", "step", "rank")} == {
        "target": target, "step": 4, "rank": 0,
    }  # fmt: skip
    training.run()
    assert training.bits() != plain.run(2).bits()
    assert training.hooks() == 0


def test_weights_are_hit_before_the_forward_pass_and_not_by_an_evaluation() -> None:
    training = Training()
    faults = training.hit(eg.SetValue(7.0), where="model/3.bias", step=1)
    training.run()
    training.model.eval()
    training.forward()
    assert not faults.done
    training.model.train()
    given = training.forward()
    assert faults.done
    assert training.model[3].bias.tolist() == [7.0, 7.0]
    assert given.mean() > 4, "the pass has seen it"


def test_gradients_are_hit_before_the_optimizer_sees_them() -> None:
    training = Training(torch.optim.SGD)
    faults = training.hit(eg.SetValue(100.0), target="gradients", where="gradients/3.bias")
    training.forward().square().mean().backward()
    before = training.model[3].bias.detach().clone()
    training.optimizer.step()
    assert training.model[3].bias.grad.tolist() == [100.0, 100.0]
    assert torch.allclose(training.model[3].bias, before - 0.01 * 100.0)
    assert [hit["tensor"] for hit in told(faults.log)] == ["gradients/3.bias"] * 2
    training.optimizer.step()
    training.forward()
    assert training.hooks() == 0


def test_activations_are_what_the_next_operation_and_its_backward_see() -> None:
    training = Training(torch.optim.SGD)
    faults = training.hit(eg.SetValue(2.0), target="activations", where="2", count=None, fraction=1.0, step=1)
    training.run()
    training.optimizer.zero_grad()
    given = training.forward()
    linear = training.model[3]
    assert torch.equal(given, linear(torch.full((6, 7), 2.0)))
    given.sum().backward()
    assert torch.equal(linear.weight.grad, torch.full((2, 7), 12.0)), "6 samples of 2.0 each"
    assert {hit["tensor"] for hit in told(faults.log)} == {"activations/2"}


def test_a_smaller_last_batch_and_modules_that_give_several_things_are_no_problem() -> None:
    class Several(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"one": [x * 2, None], "other": x + 1}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.several, self.linear = Several(), nn.Linear(5, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            both = self.several(x)
            return self.linear(both["one"][0] + both["other"])  # type: ignore[no-any-return]

    training = Training()
    training.model = nn.Sequential(Net())
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    faults = training.hit(target="activations", where="0.several", count=12, step=1)
    training.run(batch=6).run(batch=2)
    assert faults.log is not None
    assert {column.tensor for column in faults.log.columns} == {
        "activations/0.several/one/0",
        "activations/0.several/other",
    }
    assert {column.shape for column in faults.log.columns} == {(2, 5)}


def test_a_clock_tells_the_step_and_a_step_that_is_done_again_is_not_hit_again() -> None:
    training, at = Training(), [4]
    faults = eg.inject_live(training.model, None, eg.SetValue(5.0), count=1, step=6, clock=lambda: at[0])
    training.run(3)
    assert not faults.done
    at[0] = 6
    training.forward()
    assert faults.done
    after = training.bits()
    at[0] = 5
    training.forward()
    at[0] = 6
    training.forward()
    assert all(training.bits()[path] == after[path] for path in after if path.endswith(("weight", "bias")))
    assert training.hooks() == 0


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_removed_does_not_happen(target: str) -> None:
    training, plain = Training(), Training().run(4)
    with training.hit(target=target, step=2) as faults:
        training.run(2)
    faults.remove()
    assert training.hooks() == 0
    assert training.run(2).bits() == plain.bits()
    assert (faults.done, faults.log) == (False, None)
    assert "removed" in repr(faults)


# Faults that find no place.


def test_a_step_without_a_pass_through_the_model_is_an_error_and_nothing_stays_hooked() -> None:
    training = Training()
    training.hit(step=1)
    training.run()
    with pytest.raises(UsageError, match="step 1 has gone by without a forward pass in training mode"):
        training.optimizer.step()
    assert training.hooks() == 0
    clock = [0]
    with pytest.raises(UsageError, match="step 1 has gone by"), training.hit(step=1, clock=lambda: clock[0]):
        clock[0] = 2


def test_modules_that_do_not_run_in_the_step_are_named() -> None:
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes, self.skips = nn.Linear(5, 5), nn.Linear(5, 5), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.always(x)
            return x if self.skips else self.sometimes(x)  # type: ignore[no-any-return]

    training = Training()
    training.model = nn.Sequential(Moody())
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    faults = training.hit(target="activations", count=30, step=1)
    training.run()
    training.model[0].skips = True
    with pytest.raises(UsageError, match=r"step 1 has gone by, and faults found no place: 0.sometimes gave nothing"):
        training.run()
    assert training.hooks() == 0
    assert not faults.done
    assert {hit["tensor"] for hit in told(faults.log)} == {"activations/0.always"}, "what did happen is known"
    with pytest.raises(UsageError, match=r"0.sometimes gave nothing in the step before"):
        training.hit(target="activations", where="0.sometimes", step=1)
        training.run(2)
    assert training.hooks() == 0


def test_a_rate_that_comes_to_nothing_is_done_with_an_empty_log() -> None:
    training = Training()
    for target in ("weights", "activations", "gradients"):
        faults = training.hit(target=target, count=None, rate=1e-9, step=1)
        training.run(3)
        assert faults.done
        assert told(faults.log) == []


# Ranks.


def test_other_ranks_do_nothing_and_several_draw_for_themselves() -> None:
    training = Training().run()
    before = training.bits()
    other = training.hit(ranks=[0, 3], rank=1, bare=True)
    assert (other.done, other.log, training.bits()) == (True, None, before)
    logs = [training.hit(ranks=ranks, rank=ranks[-1], bare=True, seed=6).log for ranks in ([3], [0, 3], [0])]
    assert told(logs[0])[0]["index"] == told(logs[2])[0]["index"]
    assert [log.settings["seed"] == 6 for log in logs if log is not None] == [True, False, True]
    assert logs[1] is not None
    assert logs[1].settings["common_seed"] == 6


def test_a_rank_that_will_be_wrapped_is_not_hit_before() -> None:
    with pytest.raises(UsageError, match=r"rank 3: the model is not wrapped yet, and DDP's constructor .* erased"):
        Training().hit(ranks=[0, 3], rank=0)
    with pytest.raises(UsageError, match="rank 2: the model is not wrapped yet"):
        Training().hit(rank=2, step=5)
    assert not Training().hit(rank=2, step=5, target="gradients").done


# Wrong input.


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"target": "weigths"}, "target: expected weights, .* found 'weigths'. Did you mean 'weights'"),
        ({"where": "model/3.wieght"}, "unknown tensor 'model/3.wieght'. Did you mean 'model/3.weight'"),
        ({"where": "3.bias", "target": "gradients"}, "unknown tensor '3.bias'. Did you mean 'gradients/3.bias'"),
        ({"where": "9", "target": "activations", "step": 2}, "unknown module '9'"),
        ({"where": "model/1.running_mean"}, "unknown tensor 'model/1.running_mean'"),
        ({"step": -1}, "step: expected the number of a step"),
        ({"step": 3, "now": 4}, "step 3: has gone by, step 4 comes next"),
        ({"step": 3, "clock": lambda: 4}, "step 3: has gone by, step 4 comes next"),
        ({"clock": lambda: "four"}, "clock: expected the number of the present step, found 'four'"),
        ({"clock": 4}, "clock: expected a function"),
        ({"clock": lambda: 4, "now": 4, "step": 4}, "now and clock are two ways"),
        ({"ranks": []}, "ranks: expected a list of ranks"),
        ({"ranks": [-1]}, "ranks: expected ranks from 0 on, found -1"),
        ({"ranks": [1]}, "rank 1 is not there: this process is the only one"),
        ({"rank": "1"}, "rank: expected this process's rank"),
        ({"fault": "flip"}, "fault 'flip': expected a fault such as"),
        ({"fault": eg.BitFlip(20), "dtypes": ["float16"]}, "BitFlip fits no tensor of the selection"),
        ({"seed": -1}, "seed -1: expected a whole number"),
        ({"count": None}, "how many faults"),
        ({"count": 10**6}, "1,000,000 faults in 72 elements"),
        ({"count": 1, "rate": 2.0}, "two ways to say how many"),
        ({"sampling": "layer"}, "sampling: expected element or tensor, found 'layer'"),
        ({"optimizer": None, "target": "gradients"}, "target gradients: needs the optimizer"),
        ({"optimizer": None, "step": 2}, "steps are counted by the optimizer"),
        ({"optimizer": "Adam"}, "optimizer: expected an optimizer or None"),
        ({"model": 3}, "model: expected a module"),
        ({"target": "activations"}, "activations: how large they are is seen in the step before"),
        ({"target": "communication", "step": 3}, "communication: a Sequential sends nothing to other ranks"),
        ({"received": True}, "received: only communication is received"),
        ({"target": "optimizer", "fresh": True}, "optimizer: it has no state yet"),
    ],
)
def test_wrong_input_is_refused_in_one_line_before_anything_is_hooked(settings: dict[str, Any], says: str) -> None:
    training = Training()
    if not settings.pop("fresh", False):
        training.run()
    before = training.bits()
    given = {"model": training.model, "optimizer": training.optimizer, "fault": eg.BitFlip(), "count": 1} | settings
    with pytest.raises(UsageError, match=says) as caught:
        eg.inject_live(**given)
    assert "\n" not in str(caught.value)
    assert training.hooks() == 0
    assert training.bits() == before


def test_logs_that_do_not_fit_are_refused() -> None:
    training, other = Training(), nn.Linear(5, 7)
    log = training.hit(where="model/3.weight").log
    assert log is not None
    with pytest.raises(UsageError, match="a log says itself how many"):
        training.hit(log, count=3)
    with pytest.raises(UnknownTensor, match=r"unknown tensor 'model/3.weight'. Did you mean 'model/weight'"):
        eg.inject_live(other, None, log)
    wide = nn.Sequential(*training.model[:3], nn.Linear(8, 2))
    with pytest.raises(UsageError, match=r"model/3.weight has shape \(2, 8\)"):
        eg.inject_live(wide, None, log)


def test_the_page_s_example_does_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    section = PAGE.read_text().split("## In a running training", 1)[1].split("\n## ", 1)[0]
    code = "\n".join(re.findall(r"```python\n(.*?)```", section, re.S))
    exec(compile(code, str(PAGE), "exec"), {})
    claimed = re.findall(r"# → (.*)", code)
    assert claimed
    assert capsys.readouterr().out.splitlines() == claimed


def test_a_training_is_not_undone_by_its_log() -> None:
    log = Training().run(2).hit().log
    assert log is not None
    with pytest.raises(UsageError, match="happened in a running training, and in no file: restore a checkpoint"):
        eg.undo(log)
