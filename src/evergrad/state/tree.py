"""Nested state ⇄ `{path: tensor}` plus a skeleton."""

from __future__ import annotations

import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from evergrad.dtypes import DType
from evergrad.errors import StateError
from evergrad.records import Json, Role
from evergrad.state.paths import MAX_PATH_CHARS, ROOT, join, segments
from evergrad.state.sharing import Placement, find_sharing
from evergrad.state.skeleton import Skeleton, array_node, decode, encode_scalar, is_tensor_dtype

if TYPE_CHECKING:
    import torch

MAX_DEPTH = 128

# What decoding a damaged skeleton can run into.
_DAMAGE = (
    ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError,
    RecursionError, RuntimeError, MemoryError, struct.error,
)  # fmt: skip


EXTRA = "_evergrad_extra"
"""Marks an OrderedDict from a file that had attributes besides torch's metadata."""


@dataclass(slots=True)
class Opaque:
    """A thing whose class is known by name only; what it holds can still be walked.

    `complete` tells that the parts are all that the file says of it, so that two of them can be compared. `value`, if
    there is one, is what the thing turned out to be, and is walked in its place.
    """

    type_name: str
    parts: dict[Any, Any] = field(default_factory=dict)
    complete: bool = True
    value: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class InlineArray:
    """A NumPy array whose bytes stand in the middle of a pickle: a leaf like a tensor. Strides are in elements."""

    data: bytes
    dtype: DType
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(slots=True, eq=False)
class EncodedNode:
    """A value that already is a skeleton node."""

    node: Json

    def __str__(self) -> str:
        return repr(self.node)[:80]


@dataclass(frozen=True, slots=True)
class Outline:
    """A walked tree: its skeleton's root, and every leaf that the walker took for a tensor."""

    root: Json
    leaves: dict[str, Any]
    roles: dict[str, Role]


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state as named tensors and a skeleton; `unflatten(flat.tensors, flat.skeleton)` is the way back."""

    tensors: dict[str, torch.Tensor]
    skeleton: Skeleton


def flatten(state: object, *, local: Callable[[torch.Tensor], torch.Tensor] | None = None) -> FlatState:
    """A nested state as named tensors.

    Takes dicts, lists, tuples, sets, numbers, strings, bytes, None, tensors, NumPy arrays, and anything
    with a `state_dict()`. Tensors are not copied. Subclasses of the containers (named tuples, default dicts) come
    back as the plain container, and a container that is referred to twice as two. Raises `StateError`, naming the
    path, for anything else. `local` gives, of a tensor that is spread over ranks, the piece to take.
    """
    walked = outline(state, _is_tensor)
    leaves = walked.leaves if local is None else {path: local(leaf) for path, leaf in walked.leaves.items()}
    tensors = {path: _checked(path, leaf) for path, leaf in leaves.items()}
    sharing = find_sharing(Placement.of(path, tensor) for path, tensor in tensors.items())
    return FlatState(tensors, Skeleton(walked.root, sharing, walked.roles))


def unflatten(tensors: Mapping[str, torch.Tensor], skeleton: Skeleton) -> Any:
    """The nested state again: same containers, same key types, same sharing."""
    shared = skeleton.sharing.restore(tensors)

    def tensor(path: str) -> torch.Tensor:
        if path not in shared:
            raise StateError(f"{path}: the skeleton names this tensor, and it is not among the {len(shared)} given")
        return shared[path]

    try:
        return decode(skeleton.root, tensor)
    except _DAMAGE as error:
        raise StateError(f"the skeleton is damaged: {type(error).__name__}: {error}") from None


def outline(
    tree: object,
    is_tensor: Callable[[object], bool],
    *,
    max_nodes: int | None = None,
    max_chars: int | None = None,
    live: bool = True,
) -> Outline:
    """Walk any tree of containers; `live` also asks `state_dict()` and takes NumPy arrays as tensors.

    `max_nodes` and `max_chars` (of all paths together) bound the walk for trees from files: containers that refer
    to each other can describe exponentially many places in a few bytes.
    """
    walker = _Walker(is_tensor, max_nodes, max_chars, live)
    root = walker.node(tree, None, 0)
    return Outline(root, walker.leaves, walker.roles)


def is_stateful(value: object) -> bool:
    """Whether a value is an object that describes itself by `state_dict()`."""
    return not isinstance(value, type) and callable(getattr(value, "state_dict", None))


def is_tensor_like(array: np.ndarray) -> bool:
    """Whether a NumPy array is kept as a tensor; others are values."""
    return is_tensor_dtype(array.dtype) and array.dtype.isnative


def array_as_tensor(array: np.ndarray) -> torch.Tensor:
    """A NumPy array as a tensor: as it lies if torch can, else as a copy."""
    import torch

    plain = array.flags.writeable and array.flags.aligned
    plain = plain and all(step >= 0 and step % array.itemsize == 0 for step in array.strides)
    return torch.from_numpy(array if plain else array.copy())


class _Walker:
    def __init__(
        self, is_tensor: Callable[[object], bool], max_nodes: int | None, max_chars: int | None, live: bool
    ) -> None:
        self.is_tensor = is_tensor
        self.live = live
        self.chars_left = max_chars if max_chars is not None else sys.maxsize
        self.above: set[int] = set()
        self.leaves: dict[str, Any] = {}
        self.roles: dict[str, Role] = {}
        self.left = max_nodes if max_nodes is not None else sys.maxsize

    def node(self, value: Any, path: str | None, depth: int) -> Json:
        self.left -= 1
        self.chars_left -= len(path or "")
        if (
            self.left < 0
            or self.chars_left < 0
            or depth > MAX_DEPTH
            or (path is not None and len(path) > MAX_PATH_CHARS)
        ):
            where = (path or ROOT)[:80]
            raise StateError(f"{where}…: nested more than {MAX_DEPTH} deep, or containing itself")
        if self.is_tensor(value):
            return self._leaf("tensor", value, path)
        kind = type(value)
        if kind is dict:
            return {"dict": self._dict(value, path, depth)}
        if kind is OrderedDict:
            node: dict[str, Json] = {"odict": self._dict(value, path, depth)}
            if getattr(value, EXTRA, None):  # attributes of its own, which no skeleton keeps
                return {"object": "collections.OrderedDict with attributes", "parts": node["odict"], "unread": True}
            metadata = getattr(value, "_metadata", None)
            if metadata is not None:
                node["metadata"] = self.node(metadata, join(path, "_metadata"), depth + 1)
            return node
        if kind is list or kind is tuple:
            return {kind.__name__: self._sequence(value, path, depth)}
        if isinstance(value, EncodedNode):
            return value.node
        if isinstance(value, InlineArray):
            return self._leaf("ndarray", value, path)
        if isinstance(value, Opaque):
            return self._opaque(value, path, depth)
        if self.live and isinstance(value, np.ndarray):
            return self._array(value, path)
        if isinstance(value, (set, frozenset)):
            name = "frozenset" if isinstance(value, frozenset) else "set"
            return {name: self._sequence(sorted(value, key=repr), path, depth)}
        if self.live and is_stateful(value):
            return self._stateful(value, path, depth)
        try:
            return encode_scalar(value)
        except TypeError:
            return self._unknown_object(value, path, depth)

    def _opaque(self, value: Opaque, path: str | None, depth: int) -> Json:
        if value.value is not None:
            return self.node(value.value, path, depth)
        if id(value) in self.above:  # an object that a part of it refers back to
            return {"object": value.type_name, "parts": []}
        self.above.add(id(value))
        try:
            node: dict[str, Json] = {"object": value.type_name, "parts": self._dict(value.parts, path, depth)}
            return node if value.complete else {**node, "unread": True}
        finally:
            self.above.discard(id(value))

    def _leaf(self, kind: str, value: object, path: str | None) -> Json:
        name = ROOT if path is None else path
        if name in self.leaves:
            raise StateError(f"{name}: two tensors have this path")
        self.leaves[name] = value
        return {kind: name}

    def _dict(self, value: Mapping[Any, Any], path: str | None, depth: int) -> list[Json]:
        names = segments(value)
        out: list[Json] = []
        for key, child in value.items():
            try:
                encoded = _encode_key(key)
            except TypeError:
                if self.live:
                    raise StateError(
                        f"{join(path, names[key])}: a key of type {type(key).__name__} "
                        "(expected str, int, float, bool, bytes, None or a tuple of these)"
                    ) from None
                encoded = {"object": f"a key of type {type(key).__name__}", "parts": []}
            out.append([encoded, self.node(child, join(path, names[key]), depth + 1)])
        return out

    def _sequence(self, value: Any, path: str | None, depth: int) -> list[Json]:
        return [self.node(child, join(path, str(index)), depth + 1) for index, child in enumerate(value)]

    def _array(self, value: np.ndarray, path: str | None) -> Json:
        if isinstance(value, np.ma.MaskedArray):
            raise StateError(f"{path or ROOT}: a masked array has no form that can be stored: split data and mask")
        if not is_tensor_like(value):
            try:
                return array_node(value)
            except TypeError as error:
                raise StateError(f"{path or ROOT}: {error} has no form that can be stored") from None
        return self._leaf("ndarray", array_as_tensor(value), path)

    def _stateful(self, value: Any, path: str | None, depth: int) -> Json:
        before = len(self.leaves)
        node = self.node(value.state_dict(), path, depth + 1)
        mine = list(self.leaves)[before:]
        if callable(getattr(value, "named_buffers", None)):
            prefix = "" if path is None else f"{path}/"
            buffers = {prefix + name for name, _ in value.named_buffers(remove_duplicate=False)}
            self.roles.update((name, Role.BUFFER if name in buffers else Role.MODEL) for name in mine)
        elif hasattr(value, "param_groups"):
            self.roles.update((name, Role.OPTIMIZER) for name in mine)
        return node

    def _unknown_object(self, value: Any, path: str | None, depth: int) -> Json:
        kind = type(value)
        if not self.live and (opaque := getattr(value, "opaque", None)) is not None:
            return self._opaque(opaque, path, depth)
        if not self.live:
            return {"object": getattr(value, "inert_name", f"{kind.__module__}.{kind.__qualname__}"), "parts": []}
        if kind.__module__ == "torch" and kind.__name__ == "Size":
            return {"torch.Size": [int(n) for n in value]}
        # Subclasses of the plain containers come back as the plain container.
        if isinstance(value, Mapping):
            return {"dict": self._dict(value, path, depth)}
        if isinstance(value, (list, tuple)):
            return {"tuple" if isinstance(value, tuple) else "list": self._sequence(value, path, depth)}
        raise StateError(
            f"{path or ROOT}: a {kind.__module__}.{kind.__qualname__} has no form that can be stored "
            "(expected tensors, numbers, strings, containers of these, or an object with state_dict())"
        )


def _encode_key(key: object) -> Json:
    if isinstance(key, EncodedNode):
        return key.node
    if type(key) is tuple:
        return {"tuple": [encode_scalar(part) for part in key]}
    return encode_scalar(key)


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # without torch loaded there can be no tensor
    return torch is not None and isinstance(value, torch.Tensor)


def _checked(path: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as plain dense memory, or a refusal by name."""
    import torch
    from torch.nn.parameter import is_lazy
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    refusal = ""
    wrapper: bool = is_traceable_wrapper_subclass(tensor)
    if is_lazy(tensor):
        raise StateError(f"{path}: a parameter that has no shape yet cannot be stored (run the module once)")
    if tensor.is_nested:
        refusal = "nested tensor"
    elif tensor.layout != torch.strided:
        refusal = f"sparse tensor ({tensor.layout})"
    elif tensor.is_quantized:
        refusal = f"quantised tensor ({tensor.dtype})"
    elif DType.of_torch(tensor.dtype) is None:
        refusal = f"tensor of {tensor.dtype}"
    elif tensor.device.type == "meta":
        refusal = "tensor on the meta device, which has no data"
    elif tensor.numel() and not tensor.untyped_storage().nbytes():
        refusal = "tensor whose storage was freed"
    elif wrapper:
        refusal = f"{type(tensor).__module__}.{type(tensor).__qualname__} tensor"
    if refusal:
        dtypes = "float, bfloat16, fp8, int, uint, bool or complex elements"
        raise StateError(f"{path}: a {refusal} cannot be stored (expected a dense tensor of {dtypes})")
    return tensor.detach().resolve_conj().resolve_neg()
