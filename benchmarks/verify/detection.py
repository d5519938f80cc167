"""Which flipped bits do the values alone betray? Single flips in memory, judged as `verify` judges them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from evergrad import open_checkpoint
from evergrad.formats.verify import examine
from evergrad.records import Check, TensorInfo

__all__ = ["Detection", "Rate", "detect", "kind", "scaled"]

BY_KIND, BY_ELEMENT = "a kind of tensor first", "any element"
WRONG = (Check.FAILED, Check.DEGRADED)


@dataclass
class Rate:
    """How many of how many were found."""

    found: int = 0
    trials: int = 0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's interval at 95 %."""
        if not self.trials:
            return 0.0, 1.0
        z, n, p = 1.959964, self.trials, self.found / self.trials
        middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))

    def to_json(self) -> dict[str, Any]:
        """Counts, share and interval."""
        return {
            "found": self.found,
            "trials": self.trials,
            "rate": self.found / self.trials if self.trials else None,
            "wilson95": list(self.interval),
        }

    def __str__(self) -> str:
        low, high = (100 * end for end in self.interval)
        share = f"{100 * self.found / self.trials:.1f} %" if self.trials else "–"
        return f"{share} ({low:.1f}–{high:.1f}) of {self.trials:,}"


@dataclass
class Detection:
    """The counts, by what a reader may ask."""

    by_bit: dict[tuple[str, int], Rate] = field(default_factory=lambda: defaultdict(Rate))
    top_by_kind: dict[tuple[str, str], Rate] = field(default_factory=lambda: defaultdict(Rate))
    top_zeros: dict[str, Rate] = field(default_factory=lambda: defaultdict(Rate))
    top_others: dict[str, Rate] = field(default_factory=lambda: defaultdict(Rate))
    every: dict[str, Rate] = field(default_factory=lambda: defaultdict(Rate))
    top_drawn: dict[tuple[str, str], Rate] = field(default_factory=lambda: defaultdict(Rate))
    """Flips of the top exponent bit alone, by dtype and by how the element was drawn."""
    counters: dict[str, Rate] = field(default_factory=lambda: defaultdict(Rate))
    """Flips of any bit of an optimizer's `step`: a rule of its own, kept out of the others."""


def kind(info: TensorInfo) -> str:
    """What a tensor is, in the words of the tables."""
    last = info.name.rpartition("/")[2].rpartition(".")[2]
    if last == "weight":
        return "norm weight" if len(info.shape) == 1 else "weight"
    return "weight" if last == "in_proj_weight" else "bias" if last == "in_proj_bias" else last


def detect(paths: Sequence[Path], trials: int, top_trials: int, seed: int, into: Detection) -> None:
    """Flip one bit at a time and count the alarms.

    `trials` times a file bit, kind of tensor and element are drawn at random. Then, `top_trials` times in either way,
    the top exponent bit of an element is flipped: of a kind of tensor drawn first, and of any element of the file.
    """
    for number, path in enumerate(paths):
        random = np.random.default_rng([seed, number])
        with open_checkpoint(path) as ck:
            kinds: dict[str, list[TensorInfo]] = {}
            for info in ck.tensors.values():
                if info.dtype.is_float and info.numel and kind(info) != "attn_mask":
                    kinds.setdefault(kind(info), []).append(info)
            bits = {info.name: ck.read_bits(info.name) for group in kinds.values() for info in group}
        names = sorted(kinds)
        for _ in range(trials):
            info = _drawn(kinds[names[random.integers(len(names))]], random)
            _trial(info, bits[info.name], random, into)
        names = [name for name in names if name != "step"]
        every = [info for name in names for info in kinds[name]]
        for _ in range(top_trials):
            info = _drawn(kinds[names[random.integers(len(names))]], random)
            _top_trial(info, bits[info.name], random, into.top_drawn[info.dtype.value, BY_KIND])
            info = _drawn(every, random)
            _top_trial(info, bits[info.name], random, into.top_drawn[info.dtype.value, BY_ELEMENT])


def scaled(paths: Sequence[Path], exponents: Sequence[int]) -> dict[int, Rate]:
    """False alarms on clean float32 tensors of two and more values whose largest is brought to a power of two.

    A loss in other units scales every moment, inputs in other units scale weights and statistics; no bit is wrong.
    """
    rates = {exponent: Rate() for exponent in exponents}
    for path in paths:
        with open_checkpoint(path) as ck:
            for info in ck.tensors.values():
                if info.dtype.value != "float32" or info.numel < 2 or kind(info) in ("attn_mask", "step"):
                    continue
                values = ck.read_bits(info.name).view(np.float32).astype(np.float64)
                top = np.abs(values).max()
                for exponent, rate in rates.items() if top else ():
                    bits = (values / top * 2.0**exponent).astype(np.float32).view(np.uint32)
                    rate.found += examine(info, lambda start, stop, bits=bits: bits[start:stop]).check in WRONG  # type: ignore[misc]
                    rate.trials += 1
    return rates


def _drawn(group: Sequence[TensorInfo], random: np.random.Generator) -> TensorInfo:
    """A tensor, as often as it has elements."""
    sizes = np.cumsum([info.numel for info in group])
    return group[int(np.searchsorted(sizes, int(random.integers(sizes[-1])), side="right"))]


def _top_trial(info: TensorInfo, bits: np.ndarray[Any, Any], random: np.random.Generator, rate: Rate) -> None:
    index = int(random.integers(info.numel))
    pattern = bits.dtype.type(1 << info.dtype.layout.mantissa_bits + info.dtype.layout.exponent_bits - 1)
    bits[index] ^= pattern
    rate.found += examine(info, lambda start, stop: bits[start:stop]).check in WRONG
    rate.trials += 1
    bits[index] ^= pattern


def _trial(info: TensorInfo, bits: np.ndarray[Any, Any], random: np.random.Generator, into: Detection) -> None:
    index = int(random.integers(info.numel))
    bit = int(random.integers(8 * info.dtype.itemsize))
    before = bits[index]
    bits[index] ^= bits.dtype.type(1 << bit)
    found = examine(info, lambda start, stop: bits[start:stop]).check in WRONG
    bits[index] = before
    layout, dtype = info.dtype.layout, info.dtype.value
    rates = [into.by_bit[dtype, bit], into.every[dtype]]
    if kind(info) == "step":
        rates = [into.counters[dtype]]
    elif bit == layout.mantissa_bits + layout.exponent_bits - 1:
        zero = not int(before) & (1 << layout.mantissa_bits + layout.exponent_bits) - 1
        rates += [into.top_by_kind[dtype, kind(info)], (into.top_zeros if zero else into.top_others)[dtype]]
    for rate in rates:
        rate.found += found
        rate.trials += 1
