"""What the models are made of: convolutions for small maps, scaled widths, initial values, plain stacks with a head."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
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


class GlobalMeanPool(nn.Module):
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


def init_he_(layer: nn.Conv2d | nn.Linear, inputs: float) -> None:
    """Start a layer as He et al. (2015) do: weights normal with variance 2 / inputs, biases 0."""
    init_normal_(layer.weight, math.sqrt(2 / inputs))
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def init_normal_(weight: Tensor, spread: float) -> None:
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
            init_he_(convolution, inputs * _seen(high) * _seen(wide))
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
        init_he_(linear, inputs)
        layers[name.replace("fc", "relu")] = nn.ReLU(inplace=True)
        layers[name.replace("fc", "drop")] = nn.Dropout(_DROPPED)
        inputs = outputs
    layers["fc8"] = last = Dense(inputs, classes)
    # As both papers start it. With He's rule, the first gradients are so large that ReLUs die in many trainings.
    init_normal_(last.weight, 0.01)
    nn.init.zeros_(last.bias)
    return nn.Sequential(layers)


def _seen(side: int) -> float:
    """Of three pixels in a row, how many are on the map, on average over the places of a kernel."""
    return 3 - 2 / side


# AlexNet (Krizhevsky, Sutskever, Hinton, 2012) for small images.
#
# Five convolutions of 96, 256, 384, 384 and 256 channels, two layers of 4096 with dropout, and the classes. For small
# images every kernel is 3×3 with stride 1 (11×11 with stride 4, 5×5 and 3×3 in the paper) and pooling is 2×2 without
# overlap. One column, not two for two GPUs; no local response normalisation.

ALEXNET_DIFFERS = (
    "kernels 3×3 with stride 1, pooling 2×2, one column, no response normalisation, "
    "He's initial values but for the last layer's"
)

_STAGES = ((("conv1", 96),), (("conv2", 256),), (("conv3", 384), ("conv4", 384), ("conv5", 256)))


def alexnet(*, image: Image, classes: int, width: float = 1.0) -> nn.Module:
    """Layers `conv1` to `conv5` and `fc6` to `fc8`."""
    return plain_network(_STAGES, image, classes, width)


# ResNet-18, ResNet-50 and ResNet-101 (He, Zhang, Ren, Sun, 2016) with a stem for small images.
#
# The stem is one 3×3 convolution with stride 1 and no pooling (7×7 with stride 2 and pooling in the paper). Stages
# are named as in the paper's table, `conv2` to `conv5`; the first block of a stage halves the map in its first
# convolution, and where shapes differ the shortcut is a projection. The running statistics of the norms are part of
# the state.

RESNET_DIFFERS = "stem of one 3×3 convolution with stride 1 and no pooling"

RESNET_DEPTHS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
"""Blocks in each of the four stages."""

_CHANNELS_RESNET = (64, 128, 256, 512)
_EXPANSION = 4


class Residual(nn.Module):
    """Convolutions (kernel, channels), each with its norm, beside a shortcut."""

    def __init__(self, inputs: int, convolutions: Sequence[tuple[int, int]], stride: int) -> None:
        super().__init__()
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        before, step = inputs, stride
        for number, (kernel, outputs) in enumerate(convolutions, 1):
            if number > 1:
                layers[f"relu{number - 1}"] = nn.ReLU(inplace=True)
            layers[f"conv{number}"] = _convolution(before, outputs, kernel, step)
            layers[f"norm{number}"] = nn.BatchNorm2d(outputs)
            before, step = outputs, 1
        self.residual = nn.Sequential(layers)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != before:
            project = OrderedDict(conv=_convolution(inputs, before, 1, stride), norm=nn.BatchNorm2d(before))
            self.shortcut = nn.Sequential(project)

    def forward(self, maps: Tensor) -> Tensor:
        # In place: the last norm's gradient needs its input, not its output.
        total: Tensor = self.residual(maps).add_(self.shortcut(maps))
        return total.relu_()


def resnet(*, depth: int, image: Image, classes: int, width: float = 1.0) -> nn.Module:
    """A block of ResNet-18 is two 3×3 convolutions; of a deeper one, 1×1, 3×3, and 1×1 with four times the channels."""
    inputs = scaled(_CHANNELS_RESNET[0], width)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["conv1"] = _convolution(image[0], inputs, 3, 1)
    layers["norm1"] = nn.BatchNorm2d(inputs)
    layers["relu1"] = nn.ReLU(inplace=True)
    for stage, (count, channels) in enumerate(zip(RESNET_DEPTHS[depth], _CHANNELS_RESNET, strict=True), 2):
        inner = scaled(channels, width)
        bottleneck = ((1, inner), (3, inner), (1, _EXPANSION * inner))
        convolutions = ((3, inner), (3, inner)) if depth < 50 else bottleneck
        blocks = []
        for number in range(count):
            blocks.append(Residual(inputs, convolutions, stride=2 if stage > 2 and number == 0 else 1))
            inputs = convolutions[-1][1]
        layers[f"conv{stage}"] = nn.Sequential(*blocks)
    layers["mean"] = GlobalMeanPool()
    layers["fc"] = last = Dense(inputs, classes)
    init_he_(last, inputs)
    return nn.Sequential(layers)


def _convolution(inputs: int, outputs: int, kernel: int, stride: int) -> Convolution:
    # No bias: the norm that follows has one.
    convolution = Convolution(inputs, outputs, kernel, stride=stride, bias=False)
    init_he_(convolution, inputs * kernel**2)
    return convolution


# VGG-11, VGG-16 and VGG-19 (Simonyan, Zisserman, 2015): configurations A, D and E, without normalisation.

VGG_DIFFERS = "no pooling of 1×1 maps, He's initial values but for the last layer's"

_CHANNELS_VGG = (64, 128, 256, 512, 512)

VGG_DEPTHS = {11: (1, 1, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""Convolutions in each of the five stages."""


def vgg(*, depth: int, image: Image, classes: int, width: float = 1.0) -> nn.Module:
    """Layers `conv1_1` to `conv5_4` and `fc6` to `fc8`, as the authors name them."""
    stages = [
        [(f"conv{stage}_{number}", channels) for number in range(1, count + 1)]
        for stage, (count, channels) in enumerate(zip(VGG_DEPTHS[depth], _CHANNELS_VGG, strict=True), 1)
    ]
    return plain_network(stages, image, classes, width)


# EDSR (Lim, Son, Kim, Nah, Lee, 2017): twice the resolution, by residual blocks without norms.
#
# A convolution into features, residual blocks of two convolutions each, one more convolution, all of it beside a
# shortcut; then a convolution to four times the features, whose pixels are shuffled into a map of twice the sides,
# and one back to colours. What a block adds is scaled by 0.1, as in the paper's large model, so that wide ones train.

BLOCKS = 16
TIMES = 2
"""How much larger each side becomes."""

EDSR_DIFFERS = (
    f"{BLOCKS} blocks, as in its baseline (the large model has 32), of 256 channels at width 1 (64 in the baseline), "
    "which scale what they add by 0.1; photos cut into patches that are not turned or mirrored, instead of DIV2K"
)

_COLOURS = 3
_CHANNELS_EDSR = 256
_SCALING = 0.1


class EdsrBlock(nn.Module):
    """Two convolutions, and nothing after what they add."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = Convolution(channels, channels, 3)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = Convolution(channels, channels, 3)
        init_he_(self.conv1, 9 * channels)
        _linear_(self.conv2)

    def forward(self, maps: Tensor) -> Tensor:
        added: Tensor = self.conv2(self.relu(self.conv1(maps)))
        return maps + _SCALING * added


class EDSR(nn.Module):
    """Colours in, colours out, both around 0."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.head = Convolution(_COLOURS, channels, 3)
        blocks = OrderedDict[str, nn.Module]((f"block{number}", EdsrBlock(channels)) for number in range(1, BLOCKS + 1))
        self.body = nn.Sequential(blocks)
        self.joint = Convolution(channels, channels, 3)
        self.enlarge = Convolution(channels, TIMES**2 * channels, 3)
        self.shuffle = nn.PixelShuffle(TIMES)
        self.tail = Convolution(channels, _COLOURS, 3)
        for layer in (self.head, self.joint, self.enlarge, self.tail):
            _linear_(layer)

    def forward(self, colours: Tensor) -> Tensor:
        features = self.head(colours)
        features = features + self.joint(self.body(features))
        enlarged: Tensor = self.tail(self.shuffle(self.enlarge(features)))
        return enlarged


def edsr(*, width: float = 1.0) -> EDSR:
    """As many blocks at any width."""
    return EDSR(scaled(_CHANNELS_EDSR, width))


def _linear_(layer: nn.Conv2d) -> None:
    """Start a layer that no ReLU follows: with half of He's variance the signal keeps its size."""
    init_normal_(layer.weight, math.sqrt(1 / (9 * layer.in_channels)))
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)


# A small decoder-only transformer over characters, of the blocks of GPT-2 (Radford et al., 2019).
#
# At width 1: four blocks of 256 features in four heads, and 64 characters of context. Norms come first in a block,
# positions are learnt, the activation is GELU. Attention is written out, since the fused kernels' gradients are not
# the same bits on every run; the last layer is not the token table again, so that each weight has one name.

CONTEXT = 64
GPT_DIFFERS = (
    "characters instead of byte pairs; 4 blocks of 256 features in 4 heads (GPT-2's smallest: 12 of 768 in 12), "
    "64 places of context, no dropout, last layer not tied"
)

_BLOCKS = 4
_HEADS = 4
_HEAD_FEATURES = 64
_SPREAD = 0.02


class Attention(nn.Module):
    """Each place attends to itself and to those before it."""

    future: Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.qkv = Dense(features, 3 * features)
        self.out = Dense(features, features)
        self.register_buffer("future", torch.from_numpy(~np.tri(CONTEXT, dtype=bool)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        count, places, features = x.shape
        heads = self.qkv(x).view(count, places, 3, _HEADS, features // _HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        scores = product(torch.matmul, query / math.sqrt(query.shape[-1]), key.transpose(-2, -1))
        chances = scores.masked_fill(self.future[:places, :places], -math.inf).softmax(-1)
        seen = product(torch.matmul, chances, value)
        mixed: Tensor = self.out(seen.transpose(1, 2).reshape(count, places, features))
        return mixed


class GptBlock(nn.Module):
    """Attention, then two layers at each place; both are added to what came in."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(features)
        self.attention = Attention(features)
        self.norm2 = nn.LayerNorm(features)
        self.mlp = nn.Sequential(
            OrderedDict(up=Dense(features, 4 * features), gelu=nn.GELU(), down=Dense(4 * features, features))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class GPT(nn.Module):
    """Scores of the next token at every place."""

    def __init__(self, tokens: int, features: int) -> None:
        super().__init__()
        self.token = nn.Embedding(tokens, features, _weight=torch.empty(tokens, features))
        self.position = nn.Embedding(CONTEXT, features, _weight=torch.empty(CONTEXT, features))
        self.blocks = nn.Sequential(*(GptBlock(features) for _ in range(_BLOCKS)))
        self.norm = nn.LayerNorm(features)
        self.head = Dense(features, tokens, bias=False)
        for name, weight in self.named_parameters():
            # As GPT-2: what is added to the residual path is smaller by the number of additions.
            added = name.endswith(("attention.out.weight", "mlp.down.weight"))
            if weight.dim() > 1:
                init_normal_(weight, _SPREAD / math.sqrt(2 * _BLOCKS) if added else _SPREAD)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[-1]]
        scores: Tensor = self.head(self.norm(self.blocks(x)))
        return scores


def gpt(*, tokens: int, width: float = 1.0) -> GPT:
    """At any width there are four heads, of four features or more."""
    return GPT(tokens, _HEADS * max(4, round(_HEAD_FEATURES * width)))
