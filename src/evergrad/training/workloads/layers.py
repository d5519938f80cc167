"""What the models are made of: convolutions for small maps, scaled widths, initial values, plain stacks with a head."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

Image: TypeAlias = tuple[int, int, int]
"""Channels, height and width of what a model looks at."""

_FEWEST = 4  # channels: with fewer, a ReLU that dies takes the layer with it
_HALVES = (torch.float16, torch.bfloat16)
_HEAD = (("fc6", 4096), ("fc7", 4096))
_DROPPED = 0.5


class Convolution(nn.Conv2d):
    """A convolution that keeps the size of the map, or halves it with stride 2.

    Channels lie innermost in memory, so that a 1×1 kernel is one matrix product, several times as fast where maps are
    small. So is any kernel on a map of one pixel: all of it but the middle meets padding alone, and is left out.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, *, stride: int = 1, bias: bool = True) -> None:
        super().__init__(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=bias)

    def forward(self, maps: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        if kernel > 1 and maps.shape[2:] != (1, 1):
            maps = maps.contiguous(memory_format=torch.channels_last)
            return product(self._conv_forward, maps, self.weight, self.bias)
        if stride > 1:
            maps = maps[:, :, ::stride, ::stride]
        middle = self.weight.flatten(1) if kernel == 1 else self.weight[:, :, kernel // 2, kernel // 2]
        return product(nn.functional.linear, maps.permute(0, 2, 3, 1), middle, self.bias).permute(0, 3, 1, 2)


class Dense(nn.Linear):
    """A linear layer whose product is `product`."""

    def forward(self, features: Tensor) -> Tensor:
        return product(nn.functional.linear, features, self.weight, self.bias)


class Mean(nn.Module):
    """The mean of every map: unlike an adaptive pool, its gradient is the same bits on every run, on CUDA too."""

    def forward(self, maps: Tensor) -> Tensor:
        return maps.mean((2, 3))


def product(function: Callable[..., Tensor], *operands: Tensor | None) -> Tensor:
    """A function of tensors that multiplies matrices.

    On the CPU, products of 16-bit numbers are made in float32 and rounded once, as GPUs do it: torch's own, for
    processors that know no such numbers, take many times as long.
    """
    first = operands[0]
    assert first is not None
    if first.device.type != "cpu" or first.dtype not in _HALVES:
        return function(*operands)
    return function(*(one if one is None else one.float() for one in operands)).to(first.dtype)


def scaled(channels: int, width: float) -> int:
    """So many channels at this width, 1 being the published one.

    >>> scaled(512, 0.125), scaled(64, 0.01)
    (64, 4)
    """
    return max(_FEWEST, round(channels * width))


def as_he_(layer: nn.Conv2d | nn.Linear, inputs: float) -> None:
    """Start a layer as He et al. (2015) do: weights normal with variance 2 / inputs, biases 0."""
    draw_(layer.weight, math.sqrt(2 / inputs))
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def draw_(weight: Tensor, spread: float) -> None:
    """Normal numbers, in float32 from torch's default generator: one seed starts every precision alike."""
    if not weight.is_meta:  # where only shapes are asked for, torch would load its compiler to draw none
        nn.init.normal_(weight, std=spread)


def plain_network(stages: Sequence[Sequence[tuple[str, int]]], image: Image, classes: int, width: float) -> nn.Module:
    """Stages of 3×3 convolutions, each ended by 2×2 pooling, then two layers of 4096 with dropout, then the classes.

    A pooling is left out where the map is already 1×1.
    """
    inputs, high, wide = image
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for stage in stages:
        for name, channels in stage:
            outputs = scaled(channels, width)
            layers[name] = convolution = Convolution(inputs, outputs, 3)
            # Padding is no input: on small maps, counting it would let the signal fade, layer by layer.
            as_he_(convolution, inputs * _seen(high) * _seen(wide))
            layers[name.replace("conv", "relu")] = nn.ReLU(inplace=True)
            inputs = outputs
        if min(high, wide) > 1:
            layers[name.replace("conv", "pool").split("_", maxsplit=1)[0]] = nn.MaxPool2d(2)
            high, wide = high // 2, wide // 2
    layers["flat"] = nn.Flatten()
    inputs *= high * wide
    for name, features in _HEAD:
        outputs = scaled(features, width)
        layers[name] = linear = Dense(inputs, outputs)
        as_he_(linear, inputs)
        layers[name.replace("fc", "relu")] = nn.ReLU(inplace=True)
        layers[name.replace("fc", "drop")] = nn.Dropout(_DROPPED)
        inputs = outputs
    layers["fc8"] = last = Dense(inputs, classes)
    # As both papers start it. With He's rule, the first gradients are so large that ReLUs die in many trainings.
    draw_(last.weight, 0.01)
    nn.init.zeros_(last.bias)
    return nn.Sequential(layers)


def _seen(side: int) -> float:
    """Of three pixels in a row, how many are on the map, on average over the places of a kernel."""
    return 3 - 2 / side
