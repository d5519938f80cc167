"""Where a trial's faults aim: what `where` selects, within a layer.

A layer is named as the model names it (`features.0`, `layer1.0.conv1`), or by its place: `first`, `middle`, `last` of
the layers that have weights of two dimensions or more. Its optimizer state belongs to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from evergrad.errors import UnknownTensor, UsageError
from evergrad.records import Role, TensorInfo
from evergrad.state import select

LAYER_POSITIONS = ("first", "middle", "last")

_LAST = re.compile(r"[./][^./]+$")


def layers(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """The layers that have weights, in the model's order."""
    weights = (_inside(name) for name, info in tensors.items() if info.role is Role.MODEL and len(info.shape) > 1)
    return list(dict.fromkeys(_LAST.sub("", name) or name for name in weights))


def select_targets(
    tensors: Mapping[str, TensorInfo], where: str, layer: str = "", numbers: Mapping[str, int] | None = None
) -> list[str]:
    """The names that faults may hit; `UsageError` if there are none. `numbers` are the optimizer's, by parameter."""
    chosen = select(tensors, where or None)
    if not layer:
        return chosen
    known = layers(tensors)
    if not known:
        raise UsageError(f"layer {layer!r}: the model has no layers with weights")
    if layer in LAYER_POSITIONS:
        layer = {"first": known[0], "middle": known[len(known) // 2], "last": known[-1]}[layer]
    parameters = [_inside(name) for name, info in tensors.items() if info.role is Role.MODEL]
    if not any(_belongs(name, layer) for name in parameters):
        raise UnknownTensor(layer, known, what="layer")
    mine = {str(number) for name, number in (numbers or {}).items() if _belongs(_inside(name), layer)}
    found = [name for name in chosen if _belongs(_inside(name), layer) or _number(name) in mine]
    if not found:
        raise UsageError(f"layer {layer!r}: {where!r} selects nothing of it")
    return found


def _inside(name: str) -> str:
    return name.removeprefix("model/")


def _belongs(name: str, layer: str) -> bool:
    return name == layer or name.startswith((f"{layer}.", f"{layer}/"))


def _number(name: str) -> str:
    """Of the parameter that this is the optimizer's state of."""
    return name.split("/")[2] if name.startswith("optimizer/state/") else ""
