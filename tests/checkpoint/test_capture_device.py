"""What is copied beside training is what was there when `save` was called: on a stand-in that copies late."""

from __future__ import annotations

import logging
import mmap
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_in_gpu import Driver, StandIn, device, install
from torch import nn

import evergrad as eg
from evergrad.checkpoint.capture import cuda
from evergrad.checkpoint.capture.capture import ArenaWriter, AsyncCopy, CapturePlan
from evergrad.dtypes import DType
from evergrad.errors import SaveRefused, TierError
from evergrad.state import flatten
from states import some_bits

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="a stand-in is for where there is no GPU: test_capture_cuda.py has the real one"
)

WIDE = 160  # a square of it is more than SETTLED_BYTES


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return install(monkeypatch, lambda tensor: True)


def bits(tensor: torch.Tensor) -> bytes:
    return (
        tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    )


def contents(state: object) -> dict[str, bytes]:
    return {path: bits(tensor) for path, tensor in flatten(state).tensors.items()}


class Shot:
    """A capture into a buffer of its own."""

    def __init__(self, state: object, plan: CapturePlan | None = None, pinned: bool = True) -> None:
        self.plan = plan or CapturePlan.of(state)
        gathered = self.plan.gather(state)
        assert gathered is not None
        self.settled = {self.plan.layout.entries[n].path for n in gathered.step_only}
        self.buffer = mmap.mmap(-1, self.plan.layout.size)
        self.copying: AsyncCopy | None = ArenaWriter(self.plan, self.buffer, pinned=pinned).copy(gathered)

    def contents(self) -> dict[str, bytes]:
        found = {e.path: self.buffer[e.offset : e.offset + e.nbytes] for e in self.plan.layout.entries}
        return found | {alias: found[path] for alias, path in self.plan.layout.aliases.items()}

    def ended(self) -> dict[str, bytes]:
        assert self.copying is not None
        self.copying.wait()
        return self.contents()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(WIDE, WIDE), nn.BatchNorm1d(WIDE), nn.Linear(WIDE, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(self.norm(self.a(x)))
        return out


def training(kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = kind(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, WIDE)).square().sum().backward()
    optimizer.step()


def test_the_next_step_comes_after_the_copies_and_nothing_else_waits(gpu: Driver) -> None:
    model, optimizer = training()
    state = {"model": model, "optimizer": optimizer}
    before = contents(state)
    shot = Shot(state)
    assert shot.settled == {"model/a.weight", "optimizer/state/0/exp_avg", "optimizer/state/0/exp_avg_sq"}
    model(torch.randn(8, WIDE)).sum().backward()
    assert shot.contents()["model/a.weight"] != before["model/a.weight"], (
        "the stand-in copied too early to show anything"
    )
    optimizer.step()
    assert shot.contents()["model/a.weight"] == before["model/a.weight"]
    assert shot.ended() == before != contents(state)
    assert cuda.optimizer_fence.held == ()


def test_what_changes_without_a_step_is_taken_before_save_returns(gpu: Driver) -> None:
    model, optimizer = training()
    averaged = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = {"model": model, "optimizer": optimizer, "ema": averaged, "history": torch.rand(WIDE, WIDE)}
    before = contents(state)
    shot = Shot(state)
    with torch.no_grad():
        for tensor in (*averaged.values(), *model.buffers(), state["history"], model.b.weight, model.a.bias):
            tensor.add_(1)
    assert shot.ended() == before


def test_a_state_of_plain_dicts_is_taken_before_save_returns(gpu: Driver) -> None:
    model, optimizer = training()
    state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
    before = contents(state)
    shot = Shot(state)
    assert shot.settled == set()
    with torch.no_grad():
        for tensor in flatten(state).tensors.values():
            tensor.add_(1)
    assert shot.ended() == before


def test_optimizers_are_found_wherever_they_are(gpu: Driver) -> None:
    model, optimizer = training(torch.optim.SGD)
    assert "all/1/m/a.weight" in Shot({"all": [3, {"o": (optimizer,), "m": model}]}).settled


class Perturbing(torch.optim.SGD):
    """Changes parameters outside of `step`, as sharpness-aware ones do."""


def test_optimizers_that_may_do_more_than_step_are_not_relied_on(gpu: Driver) -> None:
    model, optimizer = training(Perturbing)
    assert Shot({"model": model, "optimizer": optimizer}).settled == set()
    model, optimizer = training()
    optimizer.param_groups[0]["capturable"] = True
    assert Shot({"model": model, "optimizer": optimizer}).settled == set()


def test_a_step_in_a_graph_ends_all_reliance_on_steps(gpu: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = training(torch.optim.SGD)
    state = {"model": model, "optimizer": optimizer}
    first = Shot(state)
    assert first.settled
    first.ended()
    monkeypatch.setattr(StandIn, "recording", True)
    optimizer.step()
    monkeypatch.setattr(StandIn, "recording", False)
    assert Shot(state, first.plan).settled == set()


def test_another_optimizer_is_looked_at_again(gpu: Driver) -> None:
    model, optimizer = training(torch.optim.SGD)
    state = {"model": model, "optimizer": optimizer}
    shot = Shot(state)
    assert shot.settled == {"model/a.weight"}
    shot.ended()
    state["optimizer"] = torch.optim.SGD(model.b.parameters(), lr=0.1)
    assert Shot(state, shot.plan).settled == set()
    state["optimizer"] = optimizer
    assert Shot(state, shot.plan).settled == {"model/a.weight"}
    model.a.weight.data = model.a.weight.data.clone()  # the optimizer follows
    assert Shot(state, shot.plan).settled == {"model/a.weight"}
    model.a.weight = nn.Parameter(model.a.weight.data.clone())  # here it does not
    assert Shot(state, shot.plan).settled == set()


@pytest.mark.parametrize("pinned", [True, False])
def test_every_kind_of_tensor_comes_out_right(gpu: Driver, pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evergrad.checkpoint.capture.cuda._PIECE_BYTES", 100_000)
    state: dict[str, Any] = {}
    for dtype in DType:
        state |= {f"{dtype}.{n}": some_bits(dtype, size, n) for n, size in enumerate((1, 8, 8, 3, 70_000))}
        state[f"{dtype}.empty"] = some_bits(dtype, 1, 0)[:0]
        state[f"{dtype}.scalar"] = some_bits(dtype, 1, 9).reshape(())
        state[f"{dtype}.transposed"] = some_bits(dtype, 12, 10).reshape(3, 4).t()
        state[f"{dtype}.large transposed"] = some_bits(dtype, 90_000, 10).reshape(300, 300).t()
    for size in (9, 20_000):
        state[f"conjugate {size}"] = torch.randn(size, dtype=torch.complex64).conj()
        state[f"negative {size}"] = torch._neg_view(torch.randn(size))
    shot = Shot(state, pinned=pinned)
    assert (shot.ended() if pinned else shot.contents()) == contents(state)
    assert pinned or shot.copying is None


def test_tensors_of_the_host_and_of_a_gpu_may_be_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = iter([True, False, False] * 30)
    install(monkeypatch, lambda tensor: next(chosen))
    state = {f"{n}": torch.full((size,), float(n)) for n in range(60) for size in ((4, 20_000)[n % 2],)}
    assert Shot(state).ended() == contents(state)


def test_without_memory_to_gather_in_tensors_go_one_by_one(gpu: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(torch._C._nn, "flatten_dense_tensors", full)
    state = {f"{n}": torch.randn(3, n) for n in range(9)}
    before = contents(state)
    shot = Shot(state)
    for tensor in state.values():
        tensor.zero_()
    assert shot.ended() == before


def test_a_capture_that_fails_leaves_nothing_on_its_way(gpu: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = training()
    state = {"model": model, "optimizer": optimizer}
    Shot(state).ended()

    def fail(*_: object) -> None:
        raise RuntimeError("out of streams")

    monkeypatch.setattr("evergrad.checkpoint.capture.cuda.DeviceCopyInFlight.ends", fail)
    with pytest.raises(RuntimeError, match="out of streams"):
        Shot(state)
    assert device().done == len(device().queue)
    assert cuda.optimizer_fence.held == ()


def test_nothing_is_saved_into_a_graph(gpu: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with eg.Checkpointer(tmp_path, agent=False) as ck:
        monkeypatch.setattr(StandIn, "recording", True)
        with pytest.raises(SaveRefused, match="CUDA graph"):
            ck.save(1, {"x": torch.ones(3)})
        monkeypatch.setattr(StandIn, "recording", False)
        ck.save(2, {"x": torch.ones(3)}).wait()


def test_arenas_are_registered_once_and_let_go(gpu: Driver, tmp_path: Path) -> None:
    model, optimizer = training()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "n": 0}
    with eg.Checkpointer(tmp_path, agent=False) as ck:
        for number in range(6):
            step(model, optimizer)
            pending = ck.save(number, state)
            pending.captured()
        assert len(gpu.registered) == 2
        state["extra"] = torch.ones(WIDE, WIDE)
        for number in range(6, 9):
            ck.save(number, state).wait()
        assert len(gpu.registered) == 4
        assert len(gpu.known) == 2
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        expected = contents(optimizer)
        assert ck.restore(state) == 8
        assert contents(optimizer) == expected
        assert model.a.weight.any()
    assert gpu.known == set()


def test_every_version_is_the_state_of_its_step(gpu: Driver, tmp_path: Path) -> None:
    model, optimizer = training()
    state = {"model": model, "optimizer": optimizer}
    expected = {}
    with eg.Checkpointer(tmp_path, [eg.Local(keep=8)], agent=False) as ck:
        for number in range(6):
            ck.save(number, state)
            expected[number] = contents(state)
            step(model, optimizer)
        for number in range(6):
            ck.restore(state, version=number)
            assert contents(state) == expected[number]


def test_an_arena_that_cannot_be_registered_is_copied_to_all_the_same(
    gpu: Driver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.refuses = "2: out of memory"
    model, optimizer = training()
    state = {"model": model, "optimizer": optimizer}
    with caplog.at_level(logging.WARNING), eg.Checkpointer(tmp_path, [eg.Local(keep=8)], agent=False) as ck:
        for number in range(3):
            expected = contents(state)
            ck.save(number, state)
            step(model, optimizer)
        ck.restore(state)
        assert contents(state) == expected
    assert [record.message for record in caplog.records if "out of memory" in record.message] == [
        record.message for record in caplog.records if "cannot be registered" in record.message
    ]
    assert caplog.text.count("cannot be registered") == 1


def test_a_device_that_fails_meanwhile_is_heard_of(
    gpu: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = training()
    with eg.Checkpointer(tmp_path, agent=False) as ck:
        monkeypatch.setattr(StandIn, "broken", "CUDA error: an illegal memory access was encountered")
        pending = ck.save(1, {"model": model, "optimizer": optimizer})
        with pytest.raises(TierError, match="illegal memory access"):
            pending.wait(timeout=20)
        assert cuda.optimizer_fence.held == ()


def test_neither_cuda_nor_optimizers_are_touched_for_a_state_of_the_host(tmp_path: Path) -> None:
    code = (
        "import sys, torch, evergrad as eg\n"
        "from torch.optim import optimizer\n"
        "torch.set_num_threads(1)\n"
        "model = torch.nn.Linear(2, 2)\n"
        "with eg.Checkpointer(sys.argv[1], agent=False) as ck:\n"
        "    ck.save(1, {'model': model, 'o': torch.optim.SGD(model.parameters())}).wait()\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not optimizer._global_optimizer_pre_hooks\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
