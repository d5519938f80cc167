"""Tensors that nothing but `optimizer.step()` changes, and how a step waits until they have been copied.

Such tensors, parameters and what an optimizer remembers of them, are most of a training state. They may be read
through the forward and the backward pass that follow a save; only the next step must come after the copy. Everything
else may be changed by the very next kernel: buffers by a forward pass, averaged weights by whoever averages.

Only torch's own optimizers are relied on. Others change parameters outside of `step`, too: between the two passes of
a sharpness-aware step, or when a schedule-free one goes from training to evaluation.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from evergrad.checkpoint.capture.device import Device
from evergrad.checkpoint.capture.spread import local_of
from evergrad.state.tree import MAX_DEPTH

SETTLED_BYTES = 64 << 10
"""Smaller tensors are not worth a wait: many of them are copied at once, before training goes on."""

Held = tuple[Device, Any]
"""A device, and a mark on its side stream behind copies of settled tensors."""


class Gate:
    """What every optimizer's next step has to come after. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._installed = False
        self.held: tuple[Held, ...] = ()
        """Replaced, never changed: a step reads it without the lock."""
        self.replayed = False
        """Whether some step became part of a CUDA graph: replayed, it passes no gate."""

    def install(self) -> None:
        """Be asked before every step of every optimizer in this process; done once."""
        with self._lock:
            if not self._installed:
                register_optimizer_step_pre_hook(_before_step)
                self._installed = True

    def hold(self, device: Device, mark: Any) -> None:
        """From now on steps come after this mark."""
        with self._lock:
            self.held = (*self.held, (device, mark))

    def release(self, marks: Sequence[Any]) -> None:
        """These marks were passed."""
        with self._lock:
            self.held = tuple(held for held in self.held if not any(held[1] is mark for mark in marks))

    def pass_through(self) -> None:
        """Called before a step: the streams that it will use wait, the host does not."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # nor is it in a forked child
            return
        if torch.cuda.is_current_stream_capturing():  # where a graph begins the device has ended all else
            self.replayed = True
            return
        for device, mark in self.held:
            device.follow(device.current(), mark)


gate = Gate()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    gate.pass_through()


# As torch.compiler.disable does, which would import the compiler: a compiled step calls this, and never traces it.
_before_step._torchdynamo_disable = True  # type: ignore[attr-defined]


class Settled:
    """Which of a plan's tensors are settled. Decided once, and again when an optimizer or a tensor is another one."""

    def __init__(self) -> None:
        gate.install()
        self._paths: list[tuple[Any, ...]] = []
        self._seen: list[tuple[weakref.ref[torch.optim.Optimizer], list[tuple[int, bool]]]] | None = None
        self._chosen: list[int] = []
        self._addresses: list[int] = []

    def choose(self, state: object, tensors: Sequence[torch.Tensor]) -> frozenset[int]:
        """The numbers of those of the tensors that only a step of an optimizer in the state will change."""
        if gate.replayed:
            return frozenset()
        if not self._are_as_before(state) or [tensors[n].data_ptr() for n in self._chosen] != self._addresses:
            self._look(state, tensors)
        return frozenset(self._chosen)

    def _are_as_before(self, state: object) -> bool:
        if self._seen is None:
            return False
        for path, (known, groups) in zip(self._paths, self._seen, strict=True):
            found: Any = state
            try:
                for key in path:
                    found = found[key]
            except (LookupError, TypeError):
                return False
            optimizer = known()
            if optimizer is None or found is not optimizer or _groups(optimizer) != groups:
                return False
        return True

    def _look(self, state: object, tensors: Sequence[torch.Tensor]) -> None:
        found = [(path, optimizer) for path, optimizer in _optimizers(state, (), 0) if _is_relied_on(optimizer)]
        self._paths = [path for path, _ in found]
        self._seen = [(weakref.ref(optimizer), _groups(optimizer)) for _, optimizer in found]
        places = {place for _, optimizer in found for place in _places(optimizer)}
        self._chosen = [
            n
            for n, tensor in enumerate(tensors)
            if tensor.nbytes >= SETTLED_BYTES and not (tensor.is_conj() or tensor.is_neg()) and _place(tensor) in places
        ]
        self._addresses = [tensors[n].data_ptr() for n in self._chosen]


def _optimizers(value: object, path: tuple[Any, ...], depth: int) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every optimizer in the containers of a state, with the keys that lead to it."""
    if isinstance(value, torch.optim.Optimizer):
        yield path, value
    elif depth < MAX_DEPTH and isinstance(value, Mapping):
        for key, child in value.items():
            yield from _optimizers(child, (*path, key), depth + 1)
    elif depth < MAX_DEPTH and isinstance(value, (list, tuple)):
        for index, child in enumerate(value):
            yield from _optimizers(child, (*path, index), depth + 1)


def _is_relied_on(optimizer: torch.optim.Optimizer) -> bool:
    kind = type(optimizer)
    ours = kind.__module__.startswith("torch.optim.") and getattr(kind.step, "hooked", False)
    # A step that may be captured in a CUDA graph is replayed without any hook.
    return ours and not any(capturable for _, capturable in _groups(optimizer))


def _groups(optimizer: torch.optim.Optimizer) -> list[tuple[int, bool]]:
    return [(len(group["params"]), bool(group.get("capturable"))) for group in optimizer.param_groups]


def _places(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, ...]]:
    """Where an optimizer's parameters lie, and what it remembers of them. Not its options: schedulers change these."""
    for group in optimizer.param_groups:
        yield from (_place(parameter) for parameter in group["params"])
    for memory in list(optimizer.state.values()):
        if isinstance(memory, dict):
            yield from (_place(value) for value in memory.values() if isinstance(value, torch.Tensor))


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor lies and how: who lies exactly there is the same tensor. Of one that is cut, the piece here."""
    try:
        local = local_of(tensor)
        return local.device, local.data_ptr(), local.dtype, tuple(local.shape), local.stride()
    except (RuntimeError, ValueError):  # sparse, made of others, not made yet: nothing in a shard lies there
        return (id(tensor),)
