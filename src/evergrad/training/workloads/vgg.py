"""VGG-11, VGG-16 and VGG-19 (Simonyan, Zisserman, 2015): configurations A, D and E, without normalisation."""

from __future__ import annotations

from torch import nn

from evergrad.training.workloads.layers import Image, plain_network

DIFFERS = "no pooling of 1×1 maps, He's initial values but for the last layer's"

_CHANNELS = (64, 128, 256, 512, 512)

DEPTHS = {11: (1, 1, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""Convolutions in each of the five stages."""


def vgg(*, depth: int, image: Image, classes: int, width: float = 1.0) -> nn.Module:
    """Layers `conv1_1` to `conv5_4` and `fc6` to `fc8`, as the authors name them."""
    stages = [
        [(f"conv{stage}_{number}", channels) for number in range(1, count + 1)]
        for stage, (count, channels) in enumerate(zip(DEPTHS[depth], _CHANNELS, strict=True), 1)
    ]
    return plain_network(stages, image, classes, width)
