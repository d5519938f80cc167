"""The models and data that plans can name, and the workload that a training asks for.

Names are known without torch; making a workload imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from evergrad.errors import UsageError
from evergrad.training.settings import Training
from evergrad.wording import checked_choice, join_with_or, short_repr

if TYPE_CHECKING:
    from torch import nn

    from evergrad.training.workloads.workload import Dataset, Workload

_IMAGES = ("digits", "fashion-mnist", "mnist")
_TEXTS = ("text",)
_PHOTOS = ("photos",)
_OF_IMAGES = ("alexnet", "vgg11", "vgg16", "vgg19", "resnet18", "resnet50", "resnet101")
_OF_TEXTS = ("gpt",)
_OF_PHOTOS = ("edsr",)

DATA = _IMAGES + _TEXTS + _PHOTOS
MODELS = _OF_IMAGES + _OF_TEXTS + _OF_PHOTOS


def compatible_data(model: str) -> tuple[str, ...]:
    """The data that a model can learn from.

    >>> compatible_data("gpt")
    ('text',)
    """
    return _TEXTS if model in _OF_TEXTS else _PHOTOS if model in _OF_PHOTOS else _IMAGES


def check_fit(model: str, data: str) -> None:
    """`UsageError` unless both are known and fit each other; without torch, so that plans can ask."""
    checked_choice("model", model, MODELS)
    checked_choice("data", data, DATA)
    fits = compatible_data(model)
    if data not in fits:
        wanted = join_with_or(fits) if len(fits) > 1 else fits[0]
        raise UsageError(f"data: model {model} learns from {wanted}, found {short_repr(data)}")


def make_workload(training: Training) -> Workload:
    """The workload of a training: by model and data, or the user's own."""
    if training.workload:
        from evergrad.training.workloads.workload import load_user_workload

        workload = load_user_workload(training)
    else:
        workload = _built_in(training)
    data, sizes = _first(workload.data, training.samples)
    return replace(workload, data=data, facts={**workload.facts, "data": sizes})


def _built_in(training: Training) -> Workload:
    check_fit(training.model, training.data)
    from evergrad.training.workloads.workload import Workload

    data, classes = _read(training.data)
    model, differs = _model(training, data, classes)
    width = "" if training.width == 1 else f"; {training.width:g} of the published width"
    facts = {
        "model": training.model,
        "width": f"{training.width:g}",
        "parameters": f"{_parameters(model):,}",
        "differs": differs + width,
    }
    workload = Workload(model=model, data=data, facts=facts)
    if training.data == "photos":
        from evergrad.training.workloads.datasets import absolute_error, psnr, rounded

        workload = replace(workload, loss=absolute_error, metric=psnr, predict=rounded)
    return workload


def _read(name: str) -> tuple[Dataset, int]:
    """The data of that name, and how many classes they have; photos have none."""
    if name == "photos":
        from evergrad.training.workloads.datasets import read_photos

        return read_photos(), 0
    if name == "text":
        from evergrad.training.workloads.datasets import read_text

        return read_text()
    from evergrad.training.workloads.datasets import CLASSES

    if name == "digits":
        from evergrad.training.workloads.datasets import read_digits

        return read_digits(), CLASSES
    from evergrad.training.workloads.datasets import read_mnist

    return read_mnist(name), CLASSES


def _model(training: Training, data: Dataset, classes: int) -> tuple[Callable[[], nn.Module], str]:
    """What makes the model, and how it differs from the published one."""
    from evergrad.training.workloads import models as alexnet
    from evergrad.training.workloads import models as edsr
    from evergrad.training.workloads import models as gpt
    from evergrad.training.workloads import models as resnet
    from evergrad.training.workloads import models as vgg

    name, width = training.model, training.width
    if name == "edsr":
        return partial(edsr.edsr, width=width), edsr.EDSR_DIFFERS
    if name == "gpt":
        return partial(gpt.gpt, tokens=classes, width=width), gpt.GPT_DIFFERS
    channels, high, wide = data.train_x.shape[1:]
    image = (channels, high, wide)
    small = f"{data.name} of {high}×{wide} pixels instead of ImageNet; "
    if name == "alexnet":
        return partial(alexnet.alexnet, image=image, classes=classes, width=width), small + alexnet.ALEXNET_DIFFERS
    if name.startswith("vgg"):
        depth = int(name.removeprefix("vgg"))
        return partial(vgg.vgg, depth=depth, image=image, classes=classes, width=width), small + vgg.VGG_DIFFERS
    depth = int(name.removeprefix("resnet"))
    return partial(resnet.resnet, depth=depth, image=image, classes=classes, width=width), small + resnet.RESNET_DIFFERS


def _parameters(model: Callable[[], nn.Module]) -> int:
    import torch

    with torch.device("meta"):  # shapes alone: neither memory nor random numbers
        return sum(weight.numel() for weight in model().parameters())


def _first(data: Dataset, samples: int) -> tuple[Dataset, str]:
    """The first so many training samples (0: all), and the sizes in words."""
    there = len(data.train_x)
    if samples > there:
        raise UsageError(f"samples: {data.name} has {there} training samples, found {samples}. 0 takes all.")
    part = f"the first {samples} of {there}" if 0 < samples < there else f"{there}"
    kind = data.facts.get("samples")
    source = data.facts.get("source")
    sizes = f"{data.name}: {part} training and {len(data.test_x)} test samples"
    sizes += (f" of {kind}" if kind else "") + (f"; {source}" if source else "")
    if not samples:
        return data, sizes
    return replace(data, train_x=data.train_x[:samples], train_y=data.train_y[:samples]), sizes
