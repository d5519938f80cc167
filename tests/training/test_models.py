"""The models: published shapes, the same bits from the same seed, and state that trains in every precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from evergrad.training.workloads.models import CONTEXT, Convolution, alexnet, gpt, resnet, vgg
from evergrad.training.workloads.workload import cross_entropy

Make = Callable[..., nn.Module]

DIGITS = (1, 8, 8)
CIFAR = (3, 32, 32)
IMAGENET = (3, 224, 224)
TINY = 0.04

NETWORKS: dict[str, Make] = {
    "alexnet": alexnet,
    "vgg11": partial(vgg, depth=11),
    "vgg16": partial(vgg, depth=16),
    "vgg19": partial(vgg, depth=19),
    "resnet18": partial(resnet, depth=18),
    "resnet50": partial(resnet, depth=50),
    "resnet101": partial(resnet, depth=101),
}
MADE: dict[str, Make] = {
    name: partial(make, image=DIGITS, classes=10, width=TINY) for name, make in NETWORKS.items()
} | {"gpt": partial(gpt, tokens=20, width=TINY)}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def _samples(name: str, count: int = 8) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(5)
    if name == "gpt":
        tokens = torch.randint(0, 20, (count, CONTEXT + 1), generator=source)
        return tokens[:, :-1], tokens[:, 1:]
    return torch.randn(count, *DIGITS, generator=source), torch.arange(count) % 10


def _count(make: Make, **options: object) -> int:
    with torch.device("meta"):
        return sum(weight.numel() for weight in make(**options).parameters())


# The published networks for ImageNet, of which everything but the stem of ResNet is ours.
@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("vgg11", 132_863_336),
        ("vgg16", 138_357_544),
        ("vgg19", 143_667_240),
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
    ],
)
def test_width_1_has_the_parameters_of_the_published_network(name: str, published: int) -> None:
    stem = 3 * 64 * (7 * 7 - 3 * 3) if name.startswith("resnet") else 0
    assert _count(NETWORKS[name], image=IMAGENET, classes=1000) == published - stem


@pytest.mark.parametrize(
    ("name", "convolutions", "features"),
    [
        ("vgg16", 14_714_688, 512),
        ("vgg19", 20_024_384, 512),
        ("resnet18", 11_168_832, 512),  # 11.17 million with ten classes
        ("resnet50", 23_500_352, 2048),
    ],
)
def test_the_parameters_for_small_images_are_those_of_convolutions_and_head(
    name: str, convolutions: int, features: int
) -> None:
    head = features * 10 + 10
    if name.startswith("vgg"):
        head = (features + 1) * 4096 + 4097 * 4096 + 4097 * 10
    assert _count(NETWORKS[name], image=CIFAR, classes=10) == convolutions + head


def test_alexnet_has_five_convolutions_and_three_layers_of_the_published_widths() -> None:
    channels = (1, 96, 256, 384, 384, 256)
    convolutions = sum((9 * before + 1) * after for before, after in pairwise(channels))
    head = (256 * 3 * 3 + 1) * 4096 + 4097 * 4096 + 4097 * 10  # 28 → 14 → 7 → 3 pixels
    assert _count(alexnet, image=(1, 28, 28), classes=10) == convolutions + head


def test_gpt_has_twelve_times_the_square_of_its_features_in_each_block() -> None:
    tokens, features, blocks = 100, 256, 4
    block = 12 * features**2 + 13 * features
    ends = (2 * tokens + CONTEXT) * features + 2 * features
    assert _count(gpt, tokens=tokens) == blocks * block + ends


@pytest.mark.parametrize("side", [1, 2, 7, 28])
def test_every_size_of_image_will_do(side: int) -> None:
    images = torch.zeros(2, 3, side, side)
    for make in (alexnet, NETWORKS["vgg19"], NETWORKS["resnet18"]):
        assert make(image=images.shape[1:], classes=7, width=TINY).eval()(images).shape == (2, 7)


def test_width_scales_every_layer_and_keeps_four_channels() -> None:
    with torch.device("meta"):
        narrow, wide = (
            [weight.shape[0] for weight in vgg(depth=16, image=DIGITS, classes=10, width=width).parameters()]
            for width in (0.25, 1.0)
        )
        least = {weight.shape[0] for weight in vgg(depth=16, image=DIGITS, classes=10, width=1e-6).parameters()}
    assert narrow == [count // 4 for count in wide[:-2]] + [10, 10]
    assert least == {4, 10}


def test_layers_are_named_as_in_the_papers_in_the_order_of_use() -> None:
    with torch.device("meta"):
        names = [list(MADE[name]().state_dict()) for name in ("alexnet", "vgg11", "resnet50", "gpt")]
    layers = [list(dict.fromkeys(name.rpartition(".")[0] for name in some)) for some in names]
    assert layers[0] == ["conv1", "conv2", "conv3", "conv4", "conv5", "fc6", "fc7", "fc8"]
    assert layers[1][:4] == ["conv1_1", "conv2_1", "conv3_1", "conv3_2"]
    block = [f"conv2.0.residual.{kind}{number}" for number in (1, 2, 3) for kind in ("conv", "norm")]
    assert layers[2][:10] == ["conv1", "norm1", *block, "conv2.0.shortcut.conv", "conv2.0.shortcut.norm"]
    assert layers[2][-1] == "fc"
    assert layers[3][0] == "token"
    assert layers[3][-1] == "head"


def test_running_statistics_are_part_of_the_state() -> None:
    model = MADE["resnet18"]()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if "running" in name}
    model(_samples("resnet18")[0])
    state = model.state_dict()
    assert len(before) == 2 * 20
    assert not any(torch.equal(tensor, state[name]) for name, tensor in before.items())


@pytest.mark.parametrize("name", ["vgg16", "resnet50", "gpt"])
def test_the_same_seed_gives_the_same_bits(name: str) -> None:
    losses, states = [], []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        model = MADE[name]()
        x, y = _samples(name)
        loss = cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.item())
        states.append([tensor.grad for tensor in model.parameters()])
    assert losses[0] == losses[1] != losses[2]
    assert all(torch.equal(one, two) for one, two in zip(states[0], states[1], strict=True))


def _trained(name: str, steps: int, dtype: torch.dtype) -> list[float]:
    """Losses on the same few samples, step by step, without dropout's noise."""
    torch.manual_seed(1)
    model = MADE[name]().to(dtype)
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    x, y = _samples(name)
    x = x.to(dtype) if x.is_floating_point() else x
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    assert all(tensor.grad is not None and tensor.grad.any() for tensor in model.parameters() if tensor.dim() > 1)
    return losses


@pytest.mark.parametrize("name", list(MADE))
def test_a_step_of_training_lowers_the_loss(name: str) -> None:
    before, after = _trained(name, 2, torch.float32)
    assert after < before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["alexnet", "vgg11", "resnet18", "gpt"])
def test_every_precision_trains_on_the_cpu_as_float32_does(name: str, dtype: torch.dtype) -> None:
    expected = _trained(name, 2, torch.float32)
    assert _trained(name, 2, dtype) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("kernel", "stride", "side"), [(3, 1, 1), (1, 1, 4), (1, 2, 5), (3, 2, 4), (1, 2, 1)])
def test_a_convolution_in_short_is_the_convolution_in_full(kernel: int, stride: int, side: int) -> None:
    torch.manual_seed(2)
    ours = Convolution(6, 5, kernel, stride=stride).double()
    full = nn.Conv2d(6, 5, kernel, stride=stride, padding=kernel // 2).double()
    full.load_state_dict(ours.state_dict())
    maps = torch.randn(3, 6, side, side, dtype=torch.float64)
    assert torch.allclose(ours(maps), full(maps), rtol=1e-12)
    for model in (ours, full):
        model(maps).square().sum().backward()
    for mine, theirs in zip(ours.parameters(), full.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-12)


def test_no_place_of_gpt_sees_what_comes_after_it() -> None:
    model = MADE["gpt"]()
    tokens = _samples("gpt", 1)[0]
    other = tokens.clone()
    other[:, 40:] = (other[:, 40:] + 1) % 20
    one, two = model(tokens), model(other)
    assert torch.equal(one[:, :40], two[:, :40])
    assert not torch.equal(one[:, 40:], two[:, 40:])
