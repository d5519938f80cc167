"""Everything of a state that is not a tensor, as JSON: never pickle.

A node is a JSON scalar for None, bool, int, float and str, or an object with one telling key:

| node                                       | stands for                                             |
|--------------------------------------------|--------------------------------------------------------|
| `{"tensor": path}`, `{"ndarray": path}`    | a tensor, or a NumPy array kept as a tensor             |
| `{"dict": [[key, node], …]}`, `{"odict": …}` | a dict, with each key's type; `"metadata"` as torch keeps it |
| `{"list": […]}`, `{"tuple": […]}`, `{"set": […]}`, `{"frozenset": […]}` | the container               |
| `{"float": hex}`, `{"int": hex}`           | NaN and infinities to the bit, integers beyond 64 bits  |
| `{"complex": […]}`, `{"bytes": base64}`, `{"bytearray": base64}` | the value                        |
| `{"array": [dtype, shape, base64]}`, `{"numpy": [dtype, base64]}` | a small NumPy array or scalar, inline |
| `{"torch.Size": […]}`, `{"torch.dtype": name}`, `{"torch.device": name}` | the torch value             |
| `{"object": class, "parts": [[key, node], …]}` | an object of a class known by name only: can be listed, not rebuilt |
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from evergrad.dtypes import DType
from evergrad.errors import StateError
from evergrad.records import Json, Role
from evergrad.state.paths import ROOT, unescape
from evergrad.state.sharing import Sharing

__all__ = ["Skeleton", "array_node", "decode", "encode_scalar", "numpy_scalar_node"]

SCHEMA_VERSION = 1
_NUMPY_DTYPE = re.compile(r"[<>|=]?[fiubc]\d{1,2}|[<>|=]?[SU]\d{1,9}")


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The shape of a state, the values that are no tensors, and which tensors share memory.

    `roles` holds only what is known for certain (from a live module or optimizer); other tensors go by their path.
    """

    root: Json
    sharing: Sharing = field(default_factory=Sharing)
    roles: Mapping[str, Role] = field(default_factory=dict)

    def dumps(self) -> str:
        """The skeleton as one line of JSON."""
        data: dict[str, Json] = {"schema_version": SCHEMA_VERSION, "root": self.root}
        if self.sharing.views:
            data["sharing"] = self.sharing.to_json()
        if self.roles:
            data["roles"] = {path: role.value for path, role in self.roles.items()}
        return json.dumps(data, separators=(",", ":"), allow_nan=False)

    @classmethod
    def loads(cls, text: str) -> Skeleton:
        """Read back what `dumps` wrote."""
        try:
            data = json.loads(text)
            version = data["schema_version"]
            if version != SCHEMA_VERSION:
                raise StateError(f"skeleton of schema {version!r}: this version of Evergrad reads {SCHEMA_VERSION}")
            sharing = Sharing.from_json(data["sharing"]) if "sharing" in data else Sharing()
            roles = {str(path): Role(role) for path, role in data.get("roles", {}).items()}
            return cls(data["root"], sharing, roles)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StateError(f"not a skeleton: {type(error).__name__}: {error}") from None

    @classmethod
    def of_names(cls, names: Iterable[str]) -> Skeleton:
        """Nested dicts for a format that stores names only: `a/b` is the key `b` in the dict `a`."""
        names = list(names)
        tree: dict[str, Any] = {}
        for name in names:
            *parents, last = name.split("/")
            level = tree
            for parent in parents:
                level = level.setdefault(parent, {})
                if not isinstance(level, dict):
                    break
            if not isinstance(level, dict) or last in level:
                # `a` is a tensor and `a/b` too: no nesting can hold both, so keep one flat dict.
                return cls({"dict": [[n, {"tensor": n}] for n in names]})
            level[last] = name
        if not _distinct_keys(tree):  # `x%` and `x%25` would both be the key `x%`
            return cls({"dict": [[n, {"tensor": n}] for n in names]})
        return cls({"tensor": ROOT} if names == [ROOT] else _nest(tree))

    def below(self, segment: str) -> Skeleton:
        """This skeleton as it is seen from a folder in which the file is called `segment`."""
        sharing = Sharing(self.sharing.sizes, {f"{segment}/{path}": view for path, view in self.sharing.views.items()})
        roles = {f"{segment}/{path}": role for path, role in self.roles.items()}
        return Skeleton(_rename(self.root, f"{segment}/"), sharing, roles)

    def tensor_names(self) -> set[str]:
        """The paths of all tensors that it names."""
        found: set[str] = set()
        _find_tensors(self.root, found)
        return found

    def values(self) -> dict[str, Json]:
        """Everything that is neither a tensor nor a container: position → node."""
        found: dict[str, Json] = {}
        _find_values(self.root, "", found)
        return found

    def objects(self) -> list[tuple[str, str]]:
        """The places that cannot be rebuilt: (path-like position, class name)."""
        found: list[tuple[str, str]] = []
        _find_objects(self.root, "", found)
        return found


def encode_scalar(value: object) -> Json:
    """A value without parts as a node; TypeError if it is none of the known kinds."""
    if isinstance(value, Enum):  # its value alone would not be it
        raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and not isinstance(value, np.generic):
        return str.__str__(value)
    if isinstance(value, np.generic):
        return numpy_scalar_node(value)
    if isinstance(value, int):
        number = int.__index__(value)
        return number if -(1 << 63) <= number < 1 << 63 else {"int": hex(number)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if isinstance(value, (bytes, bytearray)):
        kind = "bytearray" if isinstance(value, bytearray) else "bytes"
        return {kind: base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"complex": [encode_scalar(value.real), encode_scalar(value.imag)]}
    module, name = type(value).__module__, type(value).__name__
    if module == "torch" and name in ("dtype", "device"):
        return {f"torch.{name}": str(value).removeprefix("torch.")}
    raise TypeError(f"{module}.{name}")


def numpy_scalar_node(value: np.generic) -> Json:
    """A NumPy scalar, to the bit."""
    if value.dtype.kind not in "fiubcSU":
        raise TypeError(f"numpy.{value.dtype}")
    return {"numpy": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}


def array_node(value: np.ndarray) -> Json:
    """A NumPy array, inline."""
    if value.dtype.kind not in "fiubcSU":
        raise TypeError(f"numpy.ndarray of {value.dtype}")
    return {"array": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}


def decode(node: Any, tensor: Callable[[str], Any]) -> Any:
    """The value that a node stands for; `tensor` gives the tensor at a path."""
    if not isinstance(node, dict):
        if isinstance(node, list):
            raise ValueError("a list where a node belongs")
        return node
    for kind, build in _DECODERS.items():
        if kind in node:
            return build(node, tensor)
    raise ValueError(f"unknown node {list(node)!r}")


def _items(node: Any, key: str) -> list[Any]:
    items = node[key]
    if not isinstance(items, list):
        raise ValueError(f"{key} is not a list")
    return items


def _text(node: Any, key: str) -> str:
    text = node[key]
    if not isinstance(text, str):
        raise ValueError(f"{key} is not a string")
    return text


def _decode_dict(node: Any, tensor: Callable[[str], Any]) -> dict[Any, Any]:
    return {decode(k, tensor): decode(v, tensor) for k, v in _items(node, "dict")}


def _decode_odict(node: Any, tensor: Callable[[str], Any]) -> OrderedDict[Any, Any]:
    out = OrderedDict((decode(k, tensor), decode(v, tensor)) for k, v in _items(node, "odict"))
    if "metadata" in node:
        setattr(out, "_metadata", decode(node["metadata"], tensor))
    return out


def _decode_array(node: Any, _: Callable[[str], Any]) -> np.ndarray:
    dtype, shape, data = _items(node, "array")
    return np.frombuffer(_unbase64(data), _numpy_dtype(dtype)).reshape([int(n) for n in shape]).copy()


def _decode_numpy(node: Any, _: Callable[[str], Any]) -> np.generic:
    dtype, data = _items(node, "numpy")
    value = np.frombuffer(_unbase64(data), _numpy_dtype(dtype))[0]
    assert isinstance(value, np.generic)
    return value


def _decode_torch(node: Any, _: Callable[[str], Any]) -> Any:
    import torch

    if "torch.Size" in node:
        return torch.Size([int(n) for n in _items(node, "torch.Size")])
    if "torch.device" in node:
        if not re.fullmatch(r"[a-z]{1,16}(:\d{1,4})?", _text(node, "torch.device")):
            raise ValueError("not a torch device")
        return torch.device(_text(node, "torch.device"))
    dtype = DType.named(_text(node, "torch.dtype"))  # never an attribute that a file names
    if dtype is None:
        raise ValueError("not a dense torch dtype")
    return dtype.torch


def _decode_object(node: Any, _: Callable[[str], Any]) -> Any:
    raise StateError(f"an object of class {_text(node, 'object')} cannot be rebuilt: nothing from a file is executed")


_DECODERS: dict[str, Callable[[Any, Callable[[str], Any]], Any]] = {
    "tensor": lambda node, tensor: tensor(_text(node, "tensor")),
    "ndarray": lambda node, tensor: tensor(_text(node, "ndarray")).numpy(),
    "dict": _decode_dict,
    "odict": _decode_odict,
    "list": lambda node, tensor: [decode(item, tensor) for item in _items(node, "list")],
    "tuple": lambda node, tensor: tuple(decode(item, tensor) for item in _items(node, "tuple")),
    "set": lambda node, tensor: {decode(item, tensor) for item in _items(node, "set")},
    "frozenset": lambda node, tensor: frozenset(decode(item, tensor) for item in _items(node, "frozenset")),
    "float": lambda node, _: struct.unpack(">d", bytes.fromhex(_text(node, "float")))[0],
    "int": lambda node, _: int(_text(node, "int"), 16),
    "complex": lambda node, tensor: complex(*(decode(part, tensor) for part in _items(node, "complex"))),
    "bytes": lambda node, _: _unbase64(_text(node, "bytes")),
    "bytearray": lambda node, _: bytearray(_unbase64(_text(node, "bytearray"))),
    "array": _decode_array,
    "numpy": _decode_numpy,
    "torch.Size": _decode_torch,
    "torch.device": _decode_torch,
    "torch.dtype": _decode_torch,
    "object": _decode_object,
}


def _distinct_keys(tree: dict[str, Any]) -> bool:
    keys = {unescape(segment) for segment in tree}
    return len(keys) == len(tree) and all(_distinct_keys(child) for child in tree.values() if isinstance(child, dict))


def _nest(tree: dict[str, Any]) -> Json:
    return {
        "dict": [[unescape(k), _nest(v) if isinstance(v, dict) else {"tensor": v}] for k, v in tree.items()],
    }


def _rename(node: Json, prefix: str) -> Json:
    """The node with every tensor's path behind a prefix."""
    if isinstance(node, list):
        return [_rename(item, prefix) for item in node]
    if not isinstance(node, dict):
        return node
    for kind in ("tensor", "ndarray"):
        if kind in node:
            return {kind: prefix + _text(node, kind)}
    if node.keys() & _LEAVES:
        return node
    return {key: _rename(child, prefix) for key, child in node.items()}


_LEAVES = {"float", "int", "bytes", "bytearray", "array", "numpy", "torch.Size", "torch.dtype", "torch.device"}


def _unbase64(text: object) -> bytes:
    if not isinstance(text, str):
        raise ValueError("base64 is not a string")
    return base64.b64decode(text, validate=True)


def _numpy_dtype(text: object) -> np.dtype[Any]:
    if not isinstance(text, str) or not _NUMPY_DTYPE.fullmatch(text):
        raise ValueError(f"{text!r} is not a plain NumPy dtype")
    return np.dtype(text)


def _find_objects(node: Any, position: str, found: list[tuple[str, str]]) -> None:
    if not isinstance(node, dict):
        return
    if "object" in node:
        found.append((position or ROOT, _text(node, "object")))
    for kind in ("dict", "odict", "parts"):
        for key, child in _items(node, kind) if kind in node else ():
            _find_objects(child, f"{position}/{key}" if position else str(key), found)
    if "metadata" in node:
        _find_objects(node["metadata"], f"{position}/_metadata" if position else "_metadata", found)
    for kind in ("list", "tuple", "set", "frozenset"):
        for index, child in enumerate(_items(node, kind) if kind in node else ()):
            _find_objects(child, f"{position}/{index}" if position else str(index), found)


def _find_tensors(node: Json, found: set[str]) -> None:
    if isinstance(node, list):
        for item in node:
            _find_tensors(item, found)
    elif isinstance(node, dict):
        for kind, child in node.items():
            if kind in ("tensor", "ndarray"):
                found.add(_text(node, kind))
            elif kind not in _LEAVES:
                _find_tensors(child, found)


def _find_values(node: Json, position: str, found: dict[str, Json]) -> None:
    if not isinstance(node, dict) or node.keys() & (_LEAVES | {"complex", "object"}):
        found[position or ROOT] = node
        return
    for kind in ("dict", "odict"):
        for key, child in _items(node, kind) if kind in node else ():
            name = key if isinstance(key, str) else json.dumps(key)
            _find_values(child, f"{position}/{name}" if position else name, found)
    for kind in ("list", "tuple", "set", "frozenset"):
        for index, child in enumerate(_items(node, kind) if kind in node else ()):
            _find_values(child, f"{position}/{index}" if position else str(index), found)


def supports(dtype: np.dtype[Any]) -> bool:
    """Whether a NumPy array of this type can be kept as a tensor."""
    return DType.of_numpy(dtype) is not None
