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

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from evergrad.errors import StateError
from evergrad.records import Json, Role
from evergrad.state.encoding import describe, items_of, text_of
from evergrad.state.paths import ROOT, unescape
from evergrad.state.sharing import Sharing

__all__ = ["Skeleton"]

SCHEMA_VERSION = 1
_LEAVES = {"float", "int", "bytes", "bytearray", "array", "numpy", "torch.Size", "torch.dtype", "torch.device"}


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
    for kind in ("dict", "odict", "parts"):
        for key, child in items_of(node, kind) if kind in node else ():
            _find_objects(child, f"{position}/{key}" if position else str(key), found, unread)
    if "metadata" in node:
        _find_objects(node["metadata"], f"{position}/_metadata" if position else "_metadata", found, unread)
    for kind in ("list", "tuple", "set", "frozenset"):
        for index, child in enumerate(items_of(node, kind) if kind in node else ()):
            _find_objects(child, f"{position}/{index}" if position else str(index), found, unread)


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


def _find_values(node: Json, position: str, found: dict[str, Json]) -> None:
    if not isinstance(node, dict) or node.keys() & (_LEAVES | {"complex", "object"}):
        name = position or ROOT
        while name in found:  # the keys 1 and "1" of one dict, or "a/b" beside "a" with "b" in it
            name += "'"
        found[name] = node
        return
    for kind in ("dict", "odict"):
        for key, child in items_of(node, kind) if kind in node else ():
            name = key if isinstance(key, str) else json.dumps(key)
            _find_values(child, f"{position}/{name}" if position else name, found)
    for kind in ("list", "tuple", "set", "frozenset"):
        for index, child in enumerate(items_of(node, kind) if kind in node else ()):
            _find_values(child, f"{position}/{index}" if position else str(index), found)
