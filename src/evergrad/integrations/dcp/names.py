"""Which name DCP has for what a shard holds.

A shard stores the nested state as it was. DCP speaks of flat names: keys joined by dots, with a list taken apart only
if there are tensors or dicts in it, and a tuple never. The names follow from the skeleton, so they are not stored; a
version that `Checkpointer.save` wrote has them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from evergrad.errors import StateError
from evergrad.records import Json
from evergrad.state.skeleton import decode_value

Keys = tuple[str | int, ...]
"""How DCP gets to a leaf: the key of each dict as text, the index in each list."""


class Leaf(NamedTuple):
    """Something that DCP has one name for."""

    keys: Keys
    node: Json

    @property
    def tensor(self) -> str | None:
        """The path of the tensor that this is; None for a value."""
        return str(self.node["tensor"]) if isinstance(self.node, dict) and "tensor" in self.node else None


def leaves(root: Json) -> dict[str, Leaf]:
    """Every leaf of a state by DCP's name for it; `StateError` if DCP could not tell two apart.

    >>> model = {"odict": [["fc.weight", {"tensor": "model/fc.weight"}]]}
    >>> {name: leaf.keys for name, leaf in leaves({"dict": [["model", model], ["betas", {"list": [1]}]]}).items()}
    {'model.fc.weight': ('model', 'fc.weight'), 'betas': ('betas',)}
    """
    if _entries(root) is None:
        raise StateError("the state is no dict, and DCP names things by the keys of dicts")
    found: dict[str, Leaf] = {}
    for leaf in _walk((), root):
        name = ".".join(map(str, leaf.keys))
        if name in found:
            raise StateError(f"{name}: two leaves have this name in DCP: {found[name].keys} and {leaf.keys}")
        found[name] = leaf
    return found


def _walk(keys: Keys, node: Json) -> Iterator[Leaf]:
    entries = _entries(node)
    if entries is not None:
        for key, child in entries:
            yield from _walk((*keys, str(decode_value(key))), child)
    elif _is_taken_apart(node):
        for index, child in enumerate(_items(node)):
            yield from _walk((*keys, index), child)
    else:
        yield Leaf(keys, node)


def _is_taken_apart(node: Json) -> bool:
    """Whether DCP goes into a list: there is a tensor or a dict in it, or a list of that kind."""
    return any(
        isinstance(item, dict) and ("tensor" in item or _entries(item) is not None or _is_taken_apart(item))
        for item in _items(node)
    )


def _entries(node: Json) -> list[Any] | None:
    if isinstance(node, dict):
        for kind in ("dict", "odict"):
            if isinstance(found := node.get(kind), list):
                return found
    return None


def _items(node: Json) -> list[Json]:
    items = node.get("list") if isinstance(node, dict) else None
    return items if isinstance(items, list) else []
