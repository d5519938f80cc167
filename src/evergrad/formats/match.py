"""Which tensor is which across frameworks: PyTorch's `conv1.weight`, Keras' `conv2d/kernel`, Chainer's `conv1/W`.

Tensors are gathered into layers; a layer's signature is what it holds (matrix, shift, scale, statistics) and the
shapes, brought to PyTorch's layout. Layers are paired by their names, by a signature that only one layer on
each side has, or by their order where both sides have one. Anything else is ambiguous, and is refused.

What is matched is the tensor, with its axes. A dense layer after a flattened image also orders its inputs
differently (channels first or last); that is not undone.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from evergrad.errors import AmbiguousMatch
from evergrad.formats.checkpoint import Checkpoint
from evergrad.formats.registry import open_checkpoint
from evergrad.records import Json, Role, TensorInfo

_WRAPPERS = re.compile(r"(?:(?<=[/.])|^)(?:module|_orig_mod)\.")
_ATTRIBUTES = "/.ATTRIBUTES/VARIABLE_VALUE"  # how TensorFlow ends the names of variables
_KINDS = {
    "weight": "matrix", "kernel": "matrix", "W": "matrix", "embeddings": "matrix",
    "bias": "shift", "b": "shift", "beta": "shift",
    "gamma": "scale",
    "running_mean": "mean", "moving_mean": "mean", "avg_mean": "mean",
    "running_var": "variance", "moving_variance": "variance", "avg_var": "variance",
}  # fmt: skip
# Keras 3 numbers a layer's variables in the order in which the layer makes them.
_NUMBERED = {True: ("matrix", "shift"), False: ("scale", "shift", "mean", "variance")}


@dataclass(frozen=True, slots=True)
class Match:
    """Two tensors that are the same one: `b` is `a` with its axes in the order `axes` (None: as they are)."""

    a: str
    b: str
    axes: tuple[int, ...] | None = None

    def to_json(self) -> dict[str, Json]:
        """Names and axes."""
        return {"a": self.a, "b": self.b, "axes": list(self.axes) if self.axes else None}


@dataclass(frozen=True, slots=True)
class Matching:
    """Which tensor of one checkpoint is which of another, and which have no partner."""

    pairs: tuple[Match, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    def __getitem__(self, name: str) -> Match:
        for pair in self.pairs:
            if pair.a == name:
                return pair
        raise KeyError(name)

    def __str__(self) -> str:
        width = max((len(name) for name in (*(pair.a for pair in self.pairs), *self.only_a)), default=0)
        lines = [f"{p.a:{width}}  {p.b}{f'  axes {p.axes}' if p.axes else ''}" for p in self.pairs]
        lines += [f"{name:{width}}  –" for name in self.only_a]
        lines += [f"{'–':{width}}  {name}" for name in self.only_b]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Json]:
        """Pairs and the names without a partner."""
        pairs: list[Json] = [pair.to_json() for pair in self.pairs]
        return {"pairs": pairs, "only_a": list(self.only_a), "only_b": list(self.only_b)}


@dataclass(slots=True)
class _Layer:
    """The tensors of one layer by kind, with the axes that bring each to PyTorch's layout."""

    name: str
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    channels_last: bool = False
    place: int | None = None
    """Its place in the order of construction, where the file keeps that order."""

    @property
    def signature(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        found = []
        for kind, info in self.tensors.items():
            axes = self.to_torch(kind)
            found.append((kind, tuple(info.shape[axis] for axis in axes) if axes else info.shape))
        return tuple(sorted(found))

    def to_torch(self, kind: str) -> tuple[int, ...] | None:
        """The order of this tensor's axes that PyTorch has: (H, W, in, out) → (out, in, H, W)."""
        rank = len(self.tensors[kind].shape)
        if kind != "matrix" or not self.channels_last or rank < 2 or self.is_embedding:
            return None
        return (rank - 1, rank - 2, *range(rank - 2))

    @property
    def is_embedding(self) -> bool:
        """A table of rows, (number, width) everywhere."""
        return "embed" in self.name.lower()


def match(a: str | PathLike[str] | Checkpoint, b: str | PathLike[str] | Checkpoint) -> Matching:
    """Which tensor of `a` is which of `b`, for two checkpoints of the same architecture.

    Parameters and buffers are matched; optimizer state is left without a partner. Raises `AmbiguousMatch`, naming
    the layers, where shapes, names and order leave more than one possibility.

    >>> print(match("model.pt", "model.weights.h5"))                   # doctest: +SKIP
    conv1.weight  layers/conv2d/vars/0  axes (2, 3, 1, 0)
    """
    with ExitStack() as stack:
        first = a if isinstance(a, Checkpoint) else stack.enter_context(open_checkpoint(a))
        second = b if isinstance(b, Checkpoint) else stack.enter_context(open_checkpoint(b))
        left, right = _layers(first), _layers(second)
        pairs = [
            Match(x.tensors[kind].name, y.tensors[kind].name, _axes(x, y, kind))
            for x, y in _pair(left, right, f"{first.path} and {second.path}")
            for kind in x.tensors
        ]
        met_a, met_b = {pair.a for pair in pairs}, {pair.b for pair in pairs}
        return Matching(
            tuple(pairs),
            tuple(name for name in first.tensors if name not in met_a),
            tuple(name for name in second.tensors if name not in met_b),
        )


def strip_wrapper_prefixes(name: str) -> str:
    """A name without what DDP and `torch.compile` put before it, at any depth.

    >>> strip_wrapper_prefixes("model/module._orig_mod.fc.weight")
    'model/fc.weight'
    """
    return _WRAPPERS.sub("", name)


def _pair(left: list[_Layer], right: list[_Layer], where: str) -> list[tuple[_Layer, _Layer]]:
    """Layers that are the same one: by name first, then by signature and order."""
    found: list[tuple[_Layer, _Layer]] = []
    groups: dict[Any, tuple[list[_Layer], list[_Layer]]] = {}
    for side, layers in enumerate((left, right)):
        for layer in layers:
            groups.setdefault(layer.signature, ([], []))[side].append(layer)
    for xs, ys in groups.values():
        found += _by_name(xs, ys)
        if not xs or not ys:
            continue
        if len(xs) != len(ys) or (len(xs) > 1 and not (_ordered(xs) and _ordered(ys))):
            names = f"{_few(xs)} could each be {_few(ys)}"
            raise AmbiguousMatch(
                f"{where}: {names}: same shapes, and neither names nor order tell. Name them yourself."
            )
        found += zip(sorted(xs, key=_order), sorted(ys, key=_order), strict=True)
    return found


def _by_name(xs: list[_Layer], ys: list[_Layer]) -> list[tuple[_Layer, _Layer]]:
    """Take out the layers that one name, and no other layer of that name, has on both sides."""
    names = [Counter(_bare(layer.name) for layer in layers) for layers in (xs, ys)]
    both = {name for name in names[0] if names[0][name] == names[1][name] == 1}
    twins = {_bare(layer.name): layer for layer in ys}
    pairs = [(layer, twins[_bare(layer.name)]) for layer in xs if _bare(layer.name) in both]
    for layers in (xs, ys):
        layers[:] = [layer for layer in layers if _bare(layer.name) not in both]
    return pairs


def _layers(ck: Checkpoint) -> list[_Layer]:
    """The layers of a checkpoint, in file order."""
    keras = ck.format.startswith(("keras", "tensorflow"))
    layers: dict[str, _Layer] = {}
    numbered: dict[str, list[TensorInfo]] = {}
    for info in ck.tensors.values():
        if info.role not in (Role.MODEL, Role.BUFFER):
            continue
        name = strip_wrapper_prefixes(info.name.removesuffix(_ATTRIBUTES))
        parent, _, leaf = name.rpartition("/")
        if leaf.isdigit() and parent.endswith("/vars"):
            numbered.setdefault(parent.removesuffix("/vars"), []).append(info)
            continue
        if "." in leaf:
            inner, _, leaf = leaf.rpartition(".")
            parent = f"{parent}/{inner}" if parent else inner
        kind = _KINDS.get(leaf.removesuffix(":0"))
        if kind is None:
            continue
        if kind == "matrix" and len(info.shape) == 1:
            kind = "scale"  # the weight of a normalisation
        layer = layers.setdefault(parent, _Layer(parent, channels_last=keras or leaf.startswith("kernel")))
        layer.tensors[kind] = info
    for parent, infos in numbered.items():
        infos.sort(key=lambda info: int(info.name.rpartition("/")[2]))
        kinds = _NUMBERED[len(infos[0].shape) > 1]
        if len(infos) <= len(kinds):
            layers[parent] = _Layer(parent, dict(zip(kinds, infos, strict=False)), channels_last=True)
    if ck.format.startswith("torch-"):  # a state_dict keeps the order in which modules were made
        for place, layer in enumerate(layers.values()):
            layer.place = place
    return list(layers.values())


def _axes(x: _Layer, y: _Layer, kind: str) -> tuple[int, ...] | None:
    """The axes of x's tensor in the order that y's has them."""
    to_torch_x, to_torch_y = x.to_torch(kind), y.to_torch(kind)
    if to_torch_x == to_torch_y:
        return None
    rank = len(x.tensors[kind].shape)
    forward = to_torch_x or tuple(range(rank))
    back = to_torch_y or tuple(range(rank))
    inverse = tuple(back.index(axis) for axis in range(rank))
    return tuple(forward[axis] for axis in inverse)


def _bare(name: str) -> str:
    """The part of a layer's name that people choose: its last segment."""
    return name.rpartition("/")[2].lower()


def _ordered(layers: list[_Layer]) -> bool:
    """Whether the file keeps their order, or their names count them: conv2d, conv2d_1 …"""
    if all(layer.place is not None for layer in layers):
        return True
    stems = {re.sub(r"\d+", "#", re.sub(r"_?\d+$", "", _bare(layer.name))) for layer in layers}
    numbers = [_order(layer) for layer in layers]
    return len(stems) == 1 and len(set(numbers)) == len(numbers)


def _order(layer: _Layer) -> tuple[int, ...]:
    if layer.place is not None:
        return (layer.place,)
    return tuple(int(number) for number in re.findall(r"\d+", re.sub(r"[123]d(?![a-z0-9])", "", layer.name)))


def _few(layers: list[_Layer]) -> str:
    return ", ".join(repr(layer.name) for layer in layers[:3]) + (" …" if len(layers) > 3 else "")
