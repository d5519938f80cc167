"""AlexNet (Krizhevsky, Sutskever, Hinton, 2012) for small images.

Five convolutions of 96, 256, 384, 384 and 256 channels, two layers of 4096 with dropout, and the classes. For small
images every kernel is 3×3 with stride 1 (11×11 with stride 4, 5×5 and 3×3 in the paper) and pooling is 2×2 without
overlap. One column, not two for two GPUs; no local response normalisation.
"""

from __future__ import annotations

from torch import nn

from evergrad.training.workloads.layers import Image, plain_network

DIFFERS = (
    "kernels 3×3 with stride 1, pooling 2×2, one column, no response normalisation, "
    "He's initial values but for the last layer's"
)

_STAGES = ((("conv1", 96),), (("conv2", 256),), (("conv3", 384), ("conv4", 384), ("conv5", 256)))


def alexnet(*, image: Image, classes: int, width: float = 1.0) -> nn.Module:
    """Layers `conv1` to `conv5` and `fc6` to `fc8`."""
    return plain_network(_STAGES, image, classes, width)
