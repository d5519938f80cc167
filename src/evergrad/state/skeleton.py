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
| `{"object": class, "parts": [[key, node], …]}` | an object of a class known by name only: listed, not rebuilt. |
| `{"object": …, "parts": …, "unread": true}` | the same; the parts are not all of it           |
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from evergrad.dtypes import DType
from evergrad.errors import StateError
from evergrad.records import Json, Role
from evergrad.state.paths import ROOT, escape, segment_beside, unescape
from evergrad.state.sharing import Sharing

# Values as nodes of a skeleton, and back: the table in `skeleton.py` says which node stands for what.
#
# Nothing that a node says is executed: kinds are looked up in a table, types by name among those that are known.

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


def is_tensor_dtype(dtype: np.dtype[Any]) -> bool:
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


SCHEMA_VERSION = 1
_LEAVES = {"float", "int", "bytes", "bytearray", "array", "numpy", "torch.Size", "torch.dtype", "torch.device"}
_SEQUENCES = ("list", "tuple", "set", "frozenset")


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

    def values(self, *, within_objects: bool = False) -> dict[str, Json]:
        """Everything that is neither a tensor nor a container with something in it: path → node.

        An object is one value; `within_objects` lists its parts as well, and of the object itself its class alone.
        """
        found: dict[str, Json] = {}
        _find_values(self.root, "", found, within_objects)
        return found

    def unusual_containers(self) -> dict[str, str]:
        """Containers, and arrays as opposed to tensors, that the names of tensors do not tell of: path → what it is."""
        found: dict[str, str] = {}
        waiting: list[tuple[str, Json]] = [("", self.root)]
        while waiting:
            position, node = waiting.pop()
            kind, children = _children_of(node)
            if kind == "dict":
                if any(not isinstance(key, str) for _, key, _ in children):
                    found[position or ROOT] = "a dict with keys that are no texts"
                elif isinstance(node, dict) and "odict" in node:
                    found[position or ROOT] = "an OrderedDict"
            elif kind in _SEQUENCES:
                found[position or ROOT] = f"a {kind}"
            elif isinstance(node, dict) and "ndarray" in node:
                found[position or ROOT] = "an array of NumPy, not a tensor"
            if kind != "object":
                waiting += reversed([(_below(position, name), child) for name, _, child in children])
        return found

    def other_containers(self, other: Skeleton) -> Iterator[tuple[str, str, str]]:
        """Containers of another kind, and keys of another type, than `other` has there: path, what here, what there.

        Only what both have is looked at. A dict and an OrderedDict count as one kind, and order does not count; where
        one of two containers is empty, `values` tells.
        """
        waiting: list[tuple[str, Json, Json]] = [("", self.root, other.root)]
        while waiting:
            position, here, there = waiting.pop()
            (kind, children), (other_kind, others) = _children_of(here), _children_of(there)
            if kind != other_kind:
                both = bool(children and others) or not position
                if both and {kind, other_kind} <= {"dict", *_SEQUENCES}:
                    yield position or ROOT, f"a {kind}", f"a {other_kind}"
                if not {kind, other_kind} <= {*_SEQUENCES}:
                    continue
            mates = {name: (key, child) for name, key, child in others}
            deeper = []
            for name, key, child in children:
                if name not in mates:
                    continue
                other_key, mate = mates[name]
                path = _below(position, name)
                if json.dumps(key) != json.dumps(other_key):
                    yield path, f"the key {json.dumps(key)}", f"the key {json.dumps(other_key)}"
                deeper.append((path, child, mate))
            waiting += reversed(deeper)

    def containers(self) -> list[str]:
        """The paths of all containers with something in them."""
        found: list[str] = []
        waiting: list[tuple[str, Json]] = [("", self.root)]
        while waiting:
            position, node = waiting.pop()
            kind, children = _children_of(node)
            if kind and children:
                found.append(position or ROOT)
            waiting += reversed([(_below(position, name), child) for name, _, child in children])
        return found

    def check(self) -> None:
        """Raise `ValueError` or `TypeError` where a node of a file is not what the table above allows."""
        self.values()
        self.objects()

    def described_values(self) -> dict[str, str]:
        """As `values`, each described in few words, arrays first; without the objects that `objects` lists."""
        values = {name: node for name, node in self.values().items() if not _is_a(node, "object")}
        arrays = [name for name, node in values.items() if _is_a(node, "array")]
        return {name: describe(values[name]) for name in dict.fromkeys((*arrays, *values))}

    def arrays(self) -> dict[str, str]:
        """The arrays that are kept as values and not as tensors (of text, of another byte order), each described."""
        return {name: describe(node) for name, node in self.values().items() if _is_a(node, "array")}

    def objects(self, *, unread: bool = False) -> list[tuple[str, str]]:
        """The places that cannot be rebuilt: (path-like position, class name); or only those not read whole."""
        found: list[tuple[str, str]] = []
        _find_objects(self.root, "", found, unread)
        return found


@dataclass(frozen=True, slots=True)
class JoinedStates:
    """One state made of several, each called by a name."""

    root: Json
    tensors: Mapping[str, str]
    """The path of each tensor, with the state that it is from."""
    lost: list[tuple[str, str]]
    """(state, path) of what has no place, because another state holds something else there."""


@dataclass(slots=True)
class _Entry:
    """A key of a state that is being joined: its node, and whose it is, or the level made of several dicts."""

    key: Json
    node: Json
    whose: str
    level: dict[str, _Entry] | None = None


def join_states(roots: Mapping[str, Json], owners: Mapping[str, str]) -> JoinedStates | None:
    """Dicts as one dict, level by level; None where they cannot be joined.

    Where two states hold something else at one path, the one in `owners` is taken, else the first.
    """
    top: dict[str, _Entry] = {}
    lost: list[tuple[str, str]] = []
    for whose, root in roots.items():
        if _children_of(root)[0] != "dict" or not _join(top, root, whose, "", owners, lost):
            return None
    gone = {(whose, path) for whose, path in lost}
    if gone and any((whose, above) in gone for path, whose in owners.items() for above in _prefixes(path)):
        return None
    tensors: dict[str, str] = {}
    root = _joined_node(top, tensors)
    return None if root is None else JoinedStates(root, tensors, lost)


def _join(
    level: dict[str, _Entry],
    node: Json,
    whose: str,
    position: str,
    owners: Mapping[str, str],
    lost: list[tuple[str, str]],
) -> bool:
    for segment, key, child in _children_of(node)[1]:
        path, there = _below(position, segment), level.get(segment)
        if there is None:
            level[segment] = _Entry(key, child, whose)
        elif _children_of(there.node)[0] == "dict" == _children_of(child)[0] and key == there.key:
            if there.level is None:
                there.level = {}
                _join(there.level, there.node, there.whose, path, owners, lost)
            if not _join(there.level, child, whose, path, owners, lost):
                return False
        elif json.dumps([key, child]) != json.dumps([there.key, there.node]) or _holds_tensors(child):
            if owners.get(path) != whose:
                lost.append((whose, path))
            elif there.level is not None:
                return False
            else:
                lost.append((there.whose, path))
                level[segment] = _Entry(key, child, whose)
    return True


def _joined_node(level: dict[str, _Entry], tensors: dict[str, str]) -> Json:
    """The dict of a level, with its tensors noted; None if it would have one key twice."""
    pairs: list[Json] = []
    odd = [json.dumps(entry.key) for entry in level.values() if not isinstance(entry.key, str)]
    if len(set(odd)) != len(odd):
        return None
    for entry in level.values():
        node = entry.node
        if entry.level is not None:
            node = _joined_node(entry.level, tensors)
            if node is None:
                return None
        else:
            found: set[str] = set()
            _find_tensors(node, found)
            tensors.update(dict.fromkeys(sorted(found), entry.whose))
        pairs.append([entry.key, node])
    return {"dict": pairs}


def _prefixes(path: str) -> Iterator[str]:
    """The path, and those of everything that it lies in."""
    while path:
        yield path
        path = path.rpartition("/")[0]


def _holds_tensors(node: Json) -> bool:
    found: set[str] = set()
    _find_tensors(node, found)
    return bool(found)


def _children_of(node: Json) -> tuple[str, list[tuple[str, Json, Json]]]:
    """The kind of a container (a dict, whether ordered or not; an object; a list …; or "") and what is in it.

    Each child has its segment of a path, its key as a node (None where it has only a place) and its node.
    """
    if isinstance(node, dict):
        for kind in ("dict", "odict"):
            if kind in node:
                return "dict", list(_named(items_of(node, kind)))
        if "object" in node:
            return "object", list(_named(items_of(node, "parts") if "parts" in node else []))
        for kind in _SEQUENCES:
            if kind in node:
                return kind, [(str(index), None, child) for index, child in enumerate(items_of(node, kind))]
    return "", []


def _named(pairs: list[Any]) -> Iterator[tuple[str, Json, Json]]:
    """The entries of one dict, under the segments that tensors have there."""
    taken = {escape(key) for key, _ in pairs if isinstance(key, str)}
    for key, child in pairs:
        if isinstance(key, str):
            yield escape(key), key, child
            continue
        yield segment_beside(taken, _key_of(key)), key, child


def _key_of(node: Json) -> object:
    """The key of a dict that a node stands for; of other kinds than numbers, bytes and tuples of them, a text."""
    with suppress(StateError, ValueError, TypeError, LookupError, struct.error):
        parts = items_of(node, "tuple") if isinstance(node, dict) and "tuple" in node else [node]
        if all(not isinstance(part, dict) or part.keys() <= {"int", "float", "bytes"} for part in parts):
            return decode_value(node)
    return repr(node)[:80]


def _below(position: str, segment: str) -> str:
    """The path of a segment below a position; "" is the root."""
    return f"{position}/{segment}" if position else segment


def _is_a(node: Json, kind: str) -> bool:
    return isinstance(node, dict) and kind in node


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
            return {kind: prefix + text_of(node, kind)}
    if node.keys() & _LEAVES:
        return node
    return {key: _rename(child, prefix) for key, child in node.items()}


def _find_objects(node: Any, position: str, found: list[tuple[str, str]], unread: bool) -> None:
    if not isinstance(node, dict):
        return
    if "object" in node and (not unread or "unread" in node):
        found.append((position or ROOT, text_of(node, "object")))
    for segment, _, child in _children_of(node)[1]:
        _find_objects(child, _below(position, segment), found, unread)
    if "metadata" in node:
        _find_objects(node["metadata"], _below(position, "_metadata"), found, unread)


def _find_tensors(node: Json, found: set[str]) -> None:
    if isinstance(node, list):
        for item in node:
            _find_tensors(item, found)
    elif isinstance(node, dict):
        for kind, child in node.items():
            if kind in ("tensor", "ndarray"):
                found.add(text_of(node, kind))
            elif kind not in _LEAVES:
                _find_tensors(child, found)


def _find_values(node: Json, position: str, found: dict[str, Json], within_objects: bool) -> None:
    kind, children = _children_of(node)
    if kind == "object":
        assert isinstance(node, dict)
        if not within_objects:
            children = []
        else:
            node = {key: part for key, part in node.items() if key != "parts"}
    elif children:
        node = None
    elif kind:
        if not position:  # a state without anything in it
            return
        node = {kind: []}
    elif _is_a(node, "tensor") or _is_a(node, "ndarray"):
        return
    if not children or kind == "object":
        name = position or ROOT
        while name in found:  # "a/b" beside "a" with "b" in it, in names that a file gave
            name += "'"
        found[name] = node
    for segment, _, child in children:
        _find_values(child, _below(position, segment), found, within_objects)
