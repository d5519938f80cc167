"""A GPU made of memory of the host, whose side stream stands still until somebody waits for it.

Training's own stream runs at once, and what is copied beside it as late as can be: whatever a capture leaves to luck
shows up as a difference, every time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch

from evergrad.checkpoint.capture import cuda
from evergrad.checkpoint.capture.capture import SourceTensors

NOW, BESIDE = "now", "beside"
GPU = torch.device("cuda", 0)


class StandIn:
    """What `Device` does."""

    broken: ClassVar[str] = ""
    recording: ClassVar[bool] = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.queue: list[Callable[[], None]] = []
        self.done = 0
        self.eager = 0
        self._lock = threading.Lock()

    def current(self) -> str:
        return NOW

    def side(self) -> str:
        return BESIDE

    def record_event(self, stream: str) -> Any:
        return (len(self.queue) if stream == BESIDE else 0, object())

    def wait_event(self, stream: str, mark: Any) -> None:
        if stream == NOW:
            self._run(mark[0])

    def copy(
        self, stream: str, places: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, wait: bool = False
    ) -> None:
        def move() -> None:
            for place, source in zip(places, sources, strict=True):
                place.copy_(source.detach())

        if stream == BESIDE and not wait:
            self.queue.append(move)
        else:
            self.eager += sum(place.nbytes for place in places)
            move()

    def record_stream(self, stream: str, buffers: Sequence[torch.Tensor]) -> None:
        pass

    def synchronize_event(self, mark: Any) -> None:
        if StandIn.broken:
            raise RuntimeError(StandIn.broken)
        self._run(mark[0])

    def synchronize(self) -> None:
        self._run(len(self.queue))

    def is_recording(self) -> bool:
        return StandIn.recording

    def _run(self, end: int) -> None:
        with self._lock:
            while self.done < end:
                self.queue[self.done]()
                self.done += 1


class Driver:
    """Counts what is registered with it."""

    def __init__(self) -> None:
        self.refuses: str | None = None
        self.registered: list[int] = []
        self.known: set[int] = set()

    def register(self, address: int, size: int, device: torch.device) -> str | None:
        if self.refuses is not None:
            return self.refuses
        assert address not in self.known
        self.known.add(address)
        self.registered.append(size)
        return None

    def unregister(self, address: int, device: torch.device) -> str | None:
        self.known.remove(address)
        return None


def install(monkeypatch: pytest.MonkeyPatch, is_on_gpu: Callable[[torch.Tensor], bool]) -> Driver:
    """Take tensors of the host, those that are chosen, for tensors of the stand-in."""
    real = SourceTensors.__init__

    def init(self: SourceTensors, tensors: Any, views: Any) -> None:
        real(self, tensors, views)
        self.cuda = [GPU if is_on_gpu(tensor) else None for tensor in tensors.values()]
        self.plain = [plain and device is None for plain, device in zip(self.plain, self.cuda, strict=True)]

    driver = Driver()
    monkeypatch.setattr(SourceTensors, "__init__", init)
    monkeypatch.setattr(cuda, "CudaDevice", StandIn)
    monkeypatch.setattr(cuda, "_devices", {})
    monkeypatch.setattr(cuda, "_register", driver.register)
    monkeypatch.setattr(cuda, "_unregister", driver.unregister)
    monkeypatch.setattr(cuda, "_told", set())
    monkeypatch.setattr(cuda.optimizer_fence, "held", ())
    monkeypatch.setattr(cuda.optimizer_fence, "replayed", False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: StandIn.recording)
    monkeypatch.setattr(StandIn, "broken", "")
    monkeypatch.setattr(StandIn, "recording", False)
    return driver


def device() -> StandIn:
    """The one that was used."""
    found = cuda._devices[GPU]
    assert isinstance(found, StandIn)
    return found
