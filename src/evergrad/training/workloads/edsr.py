"""EDSR (Lim, Son, Kim, Nah, Lee, 2017): twice the resolution, by residual blocks without norms.

A convolution into features, residual blocks of two convolutions each, one more convolution, all of it beside a
shortcut; then a convolution to four times the features, whose pixels are shuffled into a map of twice the sides, and
one back to colours. What a block adds is scaled by 0.1, as in the paper's large model, so that wide ones train.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from torch import Tensor, nn

from evergrad.training.workloads.layers import Convolution, as_he_, draw_, scaled

BLOCKS = 16
TIMES = 2
"""How much larger each side becomes."""

DIFFERS = (
    f"{BLOCKS} blocks, as in its baseline (the large model has 32), of 256 channels at width 1 (64 in the baseline), "
    "which scale what they add by 0.1; photos cut into patches that are not turned or mirrored, instead of DIV2K"
)

_COLOURS = 3
_CHANNELS = 256
_SCALING = 0.1


class Block(nn.Module):
    """Two convolutions, and nothing after what they add."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = Convolution(channels, channels, 3)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = Convolution(channels, channels, 3)
        as_he_(self.conv1, 9 * channels)
        _linear_(self.conv2)

    def forward(self, maps: Tensor) -> Tensor:
        added: Tensor = self.conv2(self.relu(self.conv1(maps)))
        return maps + _SCALING * added


class EDSR(nn.Module):
    """Colours in, colours out, both around 0."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.head = Convolution(_COLOURS, channels, 3)
        blocks = OrderedDict[str, nn.Module]((f"block{number}", Block(channels)) for number in range(1, BLOCKS + 1))
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
    return EDSR(scaled(_CHANNELS, width))


def _linear_(layer: nn.Conv2d) -> None:
    """Start a layer that no ReLU follows: with half of He's variance the signal keeps its size."""
    draw_(layer.weight, math.sqrt(1 / (9 * layer.in_channels)))
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
