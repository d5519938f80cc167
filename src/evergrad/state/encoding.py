"""Values as nodes of a skeleton, and back: the table in `skeleton.py` says which node stands for what.

Nothing that a node says is executed: kinds are looked up in a table, types by name among those that are known.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np

from evergrad.dtypes import DType
from evergrad.errors import StateError
from evergrad.records import Json

_NUMPY_DTYPE = re.compile(r"[<>|=]?[fiubc]\d{1,2}|[<>|=]?[SU]\d{1,9}")


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


def supports(dtype: np.dtype[Any]) -> bool:
    """Whether a NumPy array of this type can be kept as a tensor."""
    return DType.of_numpy(dtype) is not None


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


def decode_value(node: Any) -> Any:
    """The value of a node that holds no tensor; `StateError` if it holds one."""
    return decode(node, _no_tensor)


def describe(node: Any) -> str:
    """A value that is no tensor, in few words; of whatever a file has there.

    >>> describe(3), describe({"array": ["<U2", [2], ""]}), describe({"numpy": ["<f8", ""]})
    ('a plain value: 3', 'a text array with 2 elements', 'a NumPy value of float64')
    """
    if not isinstance(node, dict):
        text = repr(node)
        return f"a plain value: {text if len(text) <= 40 else text[:39] + '…'}"
    kind = next(iter(node), "")
    try:
        if kind == "array":
            dtype, shape, _ = node["array"]
            elements = math.prod(shape)
            what = "a text array" if _numpy_dtype(dtype).kind in "SU" else f"an array of {_numpy_dtype(dtype).str}"
            return f"{what} with {elements} element{'s' if elements != 1 else ''}"
        if kind == "numpy":
            return f"a NumPy value of {_numpy_dtype(node['numpy'][0]).name}"
        if kind in ("float", "int", "complex"):
            return describe(decode_value(node))
    except (ValueError, TypeError, LookupError, OverflowError, StateError):
        return f"a damaged {kind}"
    if kind in ("dict", "list", "tuple", "set", "frozenset"):
        return f"an empty {kind}"
    return f"an object of class {node['object']}" if kind == "object" else f"a value of type {kind}"


def items_of(node: Any, key: str) -> list[Any]:
    """What a node lists under a key; ValueError if that is no list."""
    items = node[key]
    if not isinstance(items, list):
        raise ValueError(f"{key} is not a list")
    return items


def text_of(node: Any, key: str) -> str:
    """What a node says under a key; ValueError if that is no text."""
    text = node[key]
    if not isinstance(text, str):
        raise ValueError(f"{key} is not a string")
    return text


def _decode_dict(node: Any, tensor: Callable[[str], Any]) -> dict[Any, Any]:
    return {decode(k, tensor): decode(v, tensor) for k, v in items_of(node, "dict")}


def _decode_odict(node: Any, tensor: Callable[[str], Any]) -> OrderedDict[Any, Any]:
    out = OrderedDict((decode(k, tensor), decode(v, tensor)) for k, v in items_of(node, "odict"))
    if "metadata" in node:
        setattr(out, "_metadata", decode(node["metadata"], tensor))
    return out


def _decode_array(node: Any, _: Callable[[str], Any]) -> np.ndarray:
    dtype, shape, data = items_of(node, "array")
    return np.frombuffer(_unbase64(data), _numpy_dtype(dtype)).reshape([int(n) for n in shape]).copy()


def _decode_numpy(node: Any, _: Callable[[str], Any]) -> np.generic:
    dtype, data = items_of(node, "numpy")
    value = np.frombuffer(_unbase64(data), _numpy_dtype(dtype))[0]
    assert isinstance(value, np.generic)
    return value


def _decode_torch(node: Any, _: Callable[[str], Any]) -> Any:
    import torch

    if "torch.Size" in node:
        return torch.Size([int(n) for n in items_of(node, "torch.Size")])
    if "torch.device" in node:
        if not re.fullmatch(r"[a-z]{1,16}(:\d{1,4})?", text_of(node, "torch.device")):
            raise ValueError("not a torch device")
        return torch.device(text_of(node, "torch.device"))
    dtype = DType.named(text_of(node, "torch.dtype"))  # never an attribute that a file names
    if dtype is None:
        raise ValueError("not a dense torch dtype")
    return dtype.torch


def _decode_object(node: Any, _: Callable[[str], Any]) -> Any:
    raise StateError(f"an object of class {text_of(node, 'object')} cannot be rebuilt: nothing from a file is executed")


def _no_tensor(path: str) -> Any:
    raise StateError(f"{path}: a tensor where a value belongs")


def _unbase64(text: object) -> bytes:
    if not isinstance(text, str):
        raise ValueError("base64 is not a string")
    return base64.b64decode(text, validate=True)


def _numpy_dtype(text: object) -> np.dtype[Any]:
    if not isinstance(text, str) or not _NUMPY_DTYPE.fullmatch(text):
        raise ValueError(f"{text!r} is not a plain NumPy dtype")
    return np.dtype(text)


_DECODERS: dict[str, Callable[[Any, Callable[[str], Any]], Any]] = {
    "tensor": lambda node, tensor: tensor(text_of(node, "tensor")),
    "ndarray": lambda node, tensor: tensor(text_of(node, "ndarray")).numpy(),
    "dict": _decode_dict,
    "odict": _decode_odict,
    "list": lambda node, tensor: [decode(item, tensor) for item in items_of(node, "list")],
    "tuple": lambda node, tensor: tuple(decode(item, tensor) for item in items_of(node, "tuple")),
    "set": lambda node, tensor: {decode(item, tensor) for item in items_of(node, "set")},
    "frozenset": lambda node, tensor: frozenset(decode(item, tensor) for item in items_of(node, "frozenset")),
    "float": lambda node, _: struct.unpack(">d", bytes.fromhex(text_of(node, "float")))[0],
    "int": lambda node, _: int(text_of(node, "int"), 16),
    "complex": lambda node, tensor: complex(*(decode(part, tensor) for part in items_of(node, "complex"))),
    "bytes": lambda node, _: _unbase64(text_of(node, "bytes")),
    "bytearray": lambda node, _: bytearray(_unbase64(text_of(node, "bytearray"))),
    "array": _decode_array,
    "numpy": _decode_numpy,
    "torch.Size": _decode_torch,
    "torch.device": _decode_torch,
    "torch.dtype": _decode_torch,
    "object": _decode_object,
}
