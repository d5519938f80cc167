"""On a real GPU: what is saved while training goes on is, bit for bit, what was there when `save` was called.

Copies beside training are held back by a busy side stream, so that training overtakes them whenever it may. What is
expected is cloned on the device, in the order of training's own stream, so that nothing here waits for the copies.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import evergrad as eg
from evergrad.checkpoint.capture import cuda
from evergrad.checkpoint.capture.capture import ArenaWriter, AsyncCopy, CapturePlan
from evergrad.checkpoint.capture.cuda import PinnedBuffer, device_of
from evergrad.dtypes import DType
from evergrad.errors import SaveRefused
from evergrad.state import flatten
from states import some_bits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SLEEP_CYCLES = 60_000_000  # some 30 ms
WIDE, BATCH = 4096, 32


@pytest.fixture(autouse=True)
def open_gate() -> Iterator[None]:
    cuda.optimizer_fence.replayed = False
    yield
    torch.cuda.synchronize()
    cuda.optimizer_fence.replayed = False


class Net(nn.Module):
    """Two wide layers, and what changes by itself: statistics, dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.2)
        self.b, self.out = nn.Linear(width, width), nn.Linear(width, 10)
        self.register_buffer("history", torch.zeros(64, width))  # large enough to be no small tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(torch.relu(self.norm(self.a(x))))
        with torch.no_grad():
            self.history.copy_(self.history.roll(1, 0))
            self.history[0] = hidden.abs().amax(0)
        out: torch.Tensor = self.out(torch.relu(self.b(hidden)))
        return out


class Training:
    """A model, its optimizer, an average of its weights and a loss scale."""

    def __init__(self, width: int = 256, device: str = "cuda", **options: Any) -> None:
        torch.manual_seed(3)
        self.device = device
        self.model = Net(width).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, **options)
        self.ema = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.scale = torch.tensor(65536.0, device=device)
        self.generator = torch.Generator(device).manual_seed(5)
        self.losses: list[torch.Tensor] = []
        self.width = width
        self.step()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "ema": self.ema,
            "scaler": {"scale": self.scale, "growth": len(self.losses)},
        }

    def forward(self) -> torch.Tensor:
        x = torch.randn(BATCH, self.width, device=self.device, generator=self.generator)
        return self.model(x).square().mean() * self.scale

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(self.ema.values()), list(self.model.parameters()), 0.1)
            self.scale.mul_(1.0001)
        self.losses.append(loss.detach())


def on_device(state: object) -> dict[str, torch.Tensor]:
    """Clones, in the order of the current stream; nothing waits."""
    return {path: tensor.detach().clone() for path, tensor in flatten(state).tensors.items()}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)


def late(device: int = 0) -> None:
    """Whatever is copied beside training comes after this."""
    side = device_of(torch.device("cuda", device)).side()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)


class Shot:
    """A capture into memory of its own."""

    def __init__(self, state: object, plan: CapturePlan | None = None, *, pin: bool = True) -> None:
        self.plan = plan or CapturePlan.of(state)
        self.buffer = mmap.mmap(-1, self.plan.layout.size)
        self.pinned = PinnedBuffer(self.buffer, torch.device("cuda", 0)) if pin else None
        assert self.pinned is None or self.pinned.ok, "this machine registers no memory with the driver"
        target = ArenaWriter(self.plan, self.buffer, pinned=pin)
        self.expected = on_device(state)
        late()
        gathered = self.plan.gather(state)
        assert gathered is not None
        self.settled = {self.plan.layout.entries[n].path for n in gathered.step_only}
        self.copying: AsyncCopy | None = target.copy(gathered)

    def wrong(self) -> list[str]:
        """The paths that are not as they were."""
        assert (self.copying is not None) == (self.pinned is not None)
        if self.copying is not None:
            self.copying.wait()
        whole = torch.frombuffer(self.buffer, dtype=torch.uint8)
        entries = {entry.path: entry for entry in self.plan.layout.entries}
        found = []
        for path, tensor in self.expected.items():
            entry = entries[self.plan.layout.aliases.get(path, path)]
            if not torch.equal(whole[entry.offset : entry.offset + entry.nbytes], as_bytes(tensor)):
                found.append(path)
        if self.pinned is not None:
            self.pinned.close()
        return found


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_every_step_is_captured_as_it_was(options: dict[str, bool]) -> None:
    training = Training(WIDE, **options)
    plan = CapturePlan.of(training.state())
    shots = []
    for _ in range(4):
        shots.append(Shot(training.state(), plan))
        training.step()
    assert len(shots[0].settled) == 9, "three layers and their two moments are copied beside training"
    assert plan.layout.size > 400e6
    for number, shot in enumerate(shots):
        assert shot.wrong() == [], f"step {number}"
    assert cuda.optimizer_fence.held == ()


def test_without_the_gate_these_tests_would_see_a_tear(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(1024)
    monkeypatch.setattr(cuda.optimizer_fence, "add", lambda *_: None)
    shot = Shot(training.state())
    training.step()
    assert "model/a.weight" in shot.wrong()


def test_what_the_forward_pass_changes_is_captured_as_before_it() -> None:
    training = Training(1024)
    shot = Shot(training.state())
    for _ in range(3):
        training.forward()
    with torch.no_grad():
        for tensor in (*training.ema.values(), *training.model.buffers(), training.scale):
            tensor.add_(1)
    assert shot.wrong() == []


def test_once_captured_anything_may_change() -> None:
    training = Training(1024)
    shot = Shot(training.state())
    assert shot.copying is not None
    shot.copying.wait()
    with torch.no_grad():
        for tensor in flatten(training.state()).tensors.values():
            tensor.zero_()
    assert shot.wrong() == []


def test_a_second_optimizer_on_another_stream_waits_too() -> None:
    training = Training(1024)
    other = torch.optim.SGD(training.model.parameters(), lr=1.0)
    training.forward().backward()
    stream = torch.cuda.Stream()
    shot = Shot(training.state())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other.step()
    torch.cuda.current_stream().wait_stream(stream)
    training.optimizer.step()
    assert shot.wrong() == []


def test_a_save_from_another_stream_follows_that_stream() -> None:
    training = Training(1024)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.cuda._sleep(SLEEP_CYCLES // 4)
            training.step()
            shot = Shot(training.state())
            training.step()
            assert shot.wrong() == []


def test_a_state_of_plain_dicts_is_captured_too() -> None:
    training = Training(1024)
    state = {"model": dict(training.model.state_dict()), "optimizer": training.optimizer.state_dict()}
    shot = Shot(state)
    assert shot.settled == set()
    with torch.no_grad():
        for tensor in flatten(state).tensors.values():
            tensor.add_(1)
    assert shot.wrong() == []


@pytest.mark.parametrize("pin", [True, False])
def test_every_kind_of_tensor_comes_out_right(pin: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evergrad.checkpoint.capture.cuda._PIECE_BYTES", 100_000)
    state: dict[str, Any] = {}
    for dtype in DType:
        for n, size in enumerate((1, 8, 8, 3, 70_000)):
            state[f"{dtype}.{n}"] = some_bits(dtype, size, n).cuda()
        state[f"{dtype}.host"] = some_bits(dtype, 9, 8)
        state[f"{dtype}.empty"] = some_bits(dtype, 1, 8)[:0].cuda()
        state[f"{dtype}.scalar"] = some_bits(dtype, 1, 9).reshape(()).cuda()
        state[f"{dtype}.transposed"] = some_bits(dtype, 12, 10).cuda().reshape(3, 4).t()
        state[f"{dtype}.large transposed"] = some_bits(dtype, 90_000, 10).cuda().reshape(300, 300).t()
    for size in (9, 20_000):
        state[f"conjugate {size}"] = torch.randn(size, dtype=torch.complex64, device="cuda").conj()
        state[f"negative {size}"] = torch._neg_view(torch.randn(size, device="cuda"))
    assert Shot(state, pin=pin).wrong() == []


def test_a_channels_last_model_is_captured_in_the_order_of_its_shape() -> None:
    model = nn.Conv2d(256, 256, 3).to("cuda", memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    x = torch.randn(2, 256, 8, 8, device="cuda").to(memory_format=torch.channels_last)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
    shot = Shot({"model": model, "optimizer": optimizer})
    assert "model/weight" in shot.settled
    optimizer.step()
    assert shot.wrong() == []


def test_many_small_tensors_are_captured() -> None:
    state = {f"{n}": torch.randn(32, 1 + n % 3, device="cuda") for n in range(3000)}
    shot = Shot(state)
    torch._foreach_add_(list(state.values()), 1.0)
    assert shot.wrong() == []


def test_a_refusal_of_the_driver_stays_where_it_is(caplog: pytest.LogCaptureFixture) -> None:
    torch.zeros(1, device="cuda")
    cuda._told.clear()
    buffer = mmap.mmap(-1, 1 << 20)
    first = PinnedBuffer(buffer, torch.device("cuda", 0))
    with caplog.at_level(logging.WARNING):
        again, once_more = (PinnedBuffer(buffer, torch.device("cuda", 0)) for _ in range(2))
    assert (first.ok, again.ok, once_more.ok) == (True, False, False)
    assert caplog.text.count("cannot be registered") == 1
    assert torch.full((3,), 2.0, device="cuda").add(1).tolist() == [3.0] * 3, "no kernel is blamed for it"
    again.close()
    first.close()
    last = PinnedBuffer(buffer, torch.device("cuda", 0))
    assert last.ok, "it was let go before"
    last.close()


def test_versions_losses_and_registrations_of_a_whole_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[int] = []
    real = cuda._register

    def register(address: int, size: int, device: torch.device) -> str | None:
        registered.append(size)
        return real(address, size, device)

    monkeypatch.setattr(cuda, "_register", register)
    alone = Training(512, fused=True)
    for _ in range(6):
        alone.step()
    training = Training(512, fused=True)  # seeds anew: the same weights, batches and dropout
    expected = {}
    with eg.Checkpointer(tmp_path, [eg.Memory(), eg.Local(keep=8)], agent=False) as ck:
        for number in range(6):
            late()
            expected[number] = on_device(training.state())
            pending = ck.save(number, training.state())
            training.step()
        pending.wait()
        assert len(registered) == 2
        assert torch.equal(as_bytes(torch.stack(training.losses)), as_bytes(torch.stack(alone.losses)))
        for number, tensors in expected.items():
            assert ck.restore(training.state(), version=number) == number
            found = flatten(training.state()).tensors
            assert all(torch.equal(as_bytes(found[path]), as_bytes(tensor)) for path, tensor in tensors.items())


def test_training_goes_on_where_arenas_cannot_be_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_register", lambda *_: "2: out of memory")
    training = Training(512)
    with eg.Checkpointer(tmp_path, [eg.Memory(), eg.Local(keep=8)], agent=False) as ck:
        for number in range(3):
            expected = on_device(training.state())
            ck.save(number, training.state())
            training.step()
        ck.restore(training.state())
        found = flatten(training.state()).tensors
        assert all(torch.equal(as_bytes(found[path]), as_bytes(tensor)) for path, tensor in expected.items())


def test_a_save_while_a_graph_is_captured_is_refused(tmp_path: Path) -> None:
    x = torch.ones(3, device="cuda")
    with eg.Checkpointer(tmp_path, agent=False) as ck:
        ck.save(1, {"x": x}).wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.add_(1)
            with pytest.raises(SaveRefused, match="CUDA graph"):
                ck.save(2, {"x": x})
        graph.replay()
        ck.save(3, {"x": x}).wait()


def test_a_step_that_is_replayed_from_a_graph_does_not_tear_a_capture() -> None:
    model = nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(8, 1024, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    state = {"model": model, "optimizer": optimizer}
    assert Shot(state).wrong() == []  # from here on steps are watched
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        model(x).square().mean().backward()
        optimizer.step()
    graph.replay()
    shot = Shot(state)
    assert shot.settled == set()
    graph.replay()
    assert shot.wrong() == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_state_on_two_devices_is_captured() -> None:
    parts = [Training(1024, device=f"cuda:{n}") for n in range(2)]
    late(1)
    shot = Shot([part.state() for part in parts])
    for part in parts:
        part.step()
    assert shot.wrong() == []
