"""ResNet-18, ResNet-50 and ResNet-101 (He, Zhang, Ren, Sun, 2016) with a stem for small images.

The stem is one 3×3 convolution with stride 1 and no pooling (7×7 with stride 2 and pooling in the paper). Stages are
named as in the paper's table, `conv2` to `conv5`; the first block of a stage halves the map in its first convolution,
and where shapes differ the shortcut is a projection. The running statistics of the norms are part of the state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from evergrad.training.workloads.layers import Convolution, Dense, Image, Mean, as_he_, scaled

DIFFERS = "stem of one 3×3 convolution with stride 1 and no pooling"

DEPTHS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
"""Blocks in each of the four stages."""

_CHANNELS = (64, 128, 256, 512)
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
    inputs = scaled(_CHANNELS[0], width)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["conv1"] = _convolution(image[0], inputs, 3, 1)
    layers["norm1"] = nn.BatchNorm2d(inputs)
    layers["relu1"] = nn.ReLU(inplace=True)
    for stage, (count, channels) in enumerate(zip(DEPTHS[depth], _CHANNELS, strict=True), 2):
        inner = scaled(channels, width)
        bottleneck = ((1, inner), (3, inner), (1, _EXPANSION * inner))
        convolutions = ((3, inner), (3, inner)) if depth < 50 else bottleneck
        blocks = []
        for number in range(count):
            blocks.append(Residual(inputs, convolutions, stride=2 if stage > 2 and number == 0 else 1))
            inputs = convolutions[-1][1]
        layers[f"conv{stage}"] = nn.Sequential(*blocks)
    layers["mean"] = Mean()
    layers["fc"] = last = Dense(inputs, classes)
    as_he_(last, inputs)
    return nn.Sequential(layers)


def _convolution(inputs: int, outputs: int, kernel: int, stride: int) -> Convolution:
    # No bias: the norm that follows has one.
    convolution = Convolution(inputs, outputs, kernel, stride=stride, bias=False)
    as_he_(convolution, inputs * kernel**2)
    return convolution
