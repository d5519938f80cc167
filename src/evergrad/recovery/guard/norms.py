"""Cheap guards that need no other rank: how long the gradient is, and how large parameters are.

Both only raise a suspicion, and only of what is large: a flipped top bit of an exponent, a second moment that became
negative, which makes the next step NaN. Almost every other bit is for the digests to find.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

_REMEMBERED = 64
_LEAST = 8
_FLOOR = 0.1
_JUDGED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class NormReading:
    """The norm of a step's gradient, and why it is suspicious; empty if it is not."""

    norm: float
    why: str = ""

    @property
    def is_suspicious(self) -> bool:
        """Whether the mini-batch should be done again."""
        return bool(self.why)

    @property
    def is_finite(self) -> bool:
        """Whether the norm is a number."""
        return math.isfinite(self.norm)


class GradientNorms:
    """The norms of the last applied steps. Reduced gradients are the same on all ranks, and so is what this says."""

    def __init__(self, factor: float = 10.0) -> None:
        self._factor = factor
        self._last: deque[float] = deque(maxlen=_REMEMBERED)

    def read(self, buckets: Iterable[torch.Tensor], scale: float | None = None) -> NormReading:
        """Judge a step's reduced gradients. `scale` is that of an AMP scaler, for which infinite ones are normal."""
        norm = gradient_norm(buckets) / (1.0 if scale is None else scale)
        if not math.isfinite(norm):
            return NormReading(norm, "" if scale is not None else f"the gradient's norm is {norm}")
        if len(self._last) < _LEAST:
            return NormReading(norm)
        usual = median(self._last)
        if norm <= self._factor * usual or usual == 0:
            return NormReading(norm)
        why = f"the gradient's norm is {norm:.3g}, {norm / usual:.3g} times the median of the last {len(self._last)}"
        return NormReading(norm, f"{why} (expected at most {self._factor:g} times)")

    def applied(self, reading: NormReading) -> None:
        """The step was applied: its norm counts from here on."""
        if reading.is_finite:
            self._last.append(reading.norm)

    def forget(self) -> None:
        """The job has gone back, or has another state: what was usual says nothing any more."""
        self._last.clear()


@dataclass(frozen=True, slots=True)
class SuspiciousMagnitude:
    """A tensor whose largest element is suspicious."""

    path: str
    found: float
    usual: float
    """The largest that there ever was at a check."""

    def __str__(self) -> str:
        return f"{self.path}: largest magnitude {self.found:.3g}, and never more than {self.usual:.3g} before"


class MagnitudeHistory:
    """The largest magnitude that each tensor had at any check."""

    def __init__(self, factor: float = 10.0) -> None:
        self._factor = factor
        self._largest: dict[str, float] = {}

    def read(self, tensors: Mapping[str, torch.Tensor]) -> list[SuspiciousMagnitude]:
        """The tensors that are not finite, or larger than they should be; of all others the magnitude is noted.

        What was never seen is judged by whether it is finite. Below 0.1 nothing is large: biases begin at 0.
        """
        found = []
        for path, largest in magnitudes(tensors).items():
            usual = self._largest.get(path)
            if not math.isfinite(largest):
                found.append(SuspiciousMagnitude(path, largest, 0.0 if usual is None else usual))
            elif usual is not None and largest > self._factor * max(usual, _FLOOR):
                found.append(SuspiciousMagnitude(path, largest, usual))
            else:
                self._largest[path] = max(largest, usual or 0.0)
        return found

    def accept(self, suspicious: Iterable[SuspiciousMagnitude]) -> None:
        """These turned out to be real: from here on they are usual."""
        self._largest |= {each.path: each.found for each in suspicious if math.isfinite(each.found)}


def gradient_norm(buckets: Iterable[torch.Tensor]) -> float:
    """The norm of all of them together. A device is waited for once, however many there are."""
    devices: dict[torch.device, list[torch.Tensor]] = {}
    for bucket in buckets:
        if bucket.numel():
            plain = bucket.detach()
            devices.setdefault(bucket.device, []).append(torch.view_as_real(plain) if plain.is_complex() else plain)
    return math.sqrt(sum(float(_square(device, some)) for device, some in devices.items()))


def _square(device: torch.device, buckets: Sequence[torch.Tensor]) -> torch.Tensor:
    if device.type == "cpu":
        return torch.stack([_square_on_cpu(bucket) for bucket in buckets]).sum()
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for bucket in buckets:
        kinds.setdefault(bucket.dtype, []).append(bucket)
    norms: list[torch.Tensor] = []
    for dtype, some in kinds.items():
        norms += torch._foreach_norm(some, 2, torch.float64 if dtype == torch.float64 else torch.float32)
    return torch.stack([norm.double() for norm in norms] if len(kinds) > 1 else norms).double().square().sum()


def _square_on_cpu(bucket: torch.Tensor) -> torch.Tensor:
    # A dot product is the quickest way through memory; in float16 it would overflow.
    if bucket.dtype in (torch.float32, torch.float64, torch.bfloat16):
        flat = bucket.reshape(-1)
        return torch.dot(flat, flat).double()
    norm: torch.Tensor = torch.linalg.vector_norm(bucket, dtype=torch.float32)
    return norm.double().square()


def magnitudes(tensors: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The largest magnitude of each tensor of floats, NaN if it has one; a device is waited for once."""
    found: dict[str, float] = {}
    devices: dict[torch.device, dict[str, torch.Tensor]] = {}
    for path, tensor in tensors.items():
        if tensor.dtype in _JUDGED and tensor.numel():
            devices.setdefault(tensor.device, {})[path] = tensor.detach()
    for device, some in devices.items():
        if device.type == "cpu":
            ends = [torch.stack(torch.aminmax(tensor)).abs().max() for tensor in some.values()]
        else:
            ends = list(torch._foreach_norm(list(some.values()), ord=math.inf))
        found |= zip(some, torch.stack([end.double() for end in ends]).tolist(), strict=True)
    return {path: found[path] for path in tensors if path in found}
