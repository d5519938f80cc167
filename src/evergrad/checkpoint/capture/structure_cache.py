"""A state's form, remembered: finds today's tensors and values without walking every path again.

`flatten` names and checks everything, which takes a good part of a second for 20,000 tensors. Between two saves the
form of a state hardly ever changes, so it is compared level by level, whole lists at a time: the types of all dicts
of a level, all their keys, all their lengths. Only a form that is the same in every respect is read by a template.

Parts of a state without tensors are *holes*: they may change in any way, and are written anew where they did.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from json.encoder import encode_basestring_ascii as quote
from operator import itemgetter, methodcaller
from typing import Any

import torch

from evergrad.errors import StateError
from evergrad.records import Json
from evergrad.state.tree import array_as_tensor, is_stateful, is_tensor_like

_PLAIN_KEYS = {str, int, bool, bytes, type(None)}  # equal and of the same type: the same key
_PLAIN_TENSORS = {torch.Tensor, torch.nn.Parameter}
_LARGE = 64  # nodes; a hole that is larger is opened if that leaves few holes
_FEW_KEYS = 64
_FEW_ITEMS = 8

_values = methodcaller("values")


@dataclass(slots=True)
class StateLeaves:
    """Today's tensors, in the order of a template's `paths`, and today's values, in the order of its `slots`."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class _Part:
    """The things of one kind on one level, where they stand in it, and what must be the same about them."""

    kind: str
    pick: Callable[[Sequence[Any]], Sequence[Any]]
    types: list[type]
    lengths: list[int]
    keys: list[Any]
    key_types: list[type]
    odd_keys: list[str] | None
    with_metadata: list[bool]


@dataclass(slots=True)
class _Place:
    """One node of the state while a template is made."""

    kind: str
    value: Any
    below: list[_Place] = field(default_factory=list)
    metadata: _Place | None = None
    name: str = ""
    slot: int = 0


class StateStructure:
    """The form of one state."""

    def __init__(self, state: object, root: Json) -> None:
        """Remember the form of a state whose skeleton is `root`."""
        self.paths: list[str] = []
        """Of the tensors, in the order in which `read` gives them."""
        self.slots: list[int] = []
        """For each value that `read` gives: the gap in the text that it belongs into."""
        maker = _StructureBuilder()
        top = maker.place(state, root)
        self.text: list[str] = maker.text
        """The skeleton's root as JSON, cut at every hole."""
        self._levels: list[list[_Part]] = []
        level = [top]
        while level:
            level = self._add(level)

    def read(self, state: object) -> StateLeaves | None:
        """Today's tensors and values; None if the state no longer has this form."""
        leaves = StateLeaves()
        level: Sequence[Any] = [state]
        for parts in self._levels:
            below: list[Any] = []
            for part in parts:
                found = part.pick(level)
                if part.kind == "value":
                    leaves.values.extend(found)
                elif part.kind == "tensor":
                    if [*map(type, found)] != part.types and not _as_good(found, part.types):
                        return None
                    leaves.tensors.extend(found)
                elif [*map(type, found)] != part.types:
                    return None
                elif part.kind == "stateful":
                    below.extend(thing.state_dict() for thing in found)
                elif part.kind == "ndarray":
                    if not all(map(is_tensor_like, found)):
                        return None
                    leaves.tensors.extend(map(array_as_tensor, found))
                elif [*map(len, found)] != part.lengths:
                    return None
                elif part.kind == "sequence":
                    below.extend(chain.from_iterable(found))
                elif part.kind == "set":
                    below.extend(chain.from_iterable(sorted(items, key=repr) for items in found))
                else:
                    keys = [*chain.from_iterable(found)]
                    if keys != part.keys or [*map(type, keys)] != part.key_types:
                        return None
                    if part.odd_keys is not None and [*map(repr, keys)] != part.odd_keys:  # 0.0 and -0.0 are equal
                        return None
                    below.extend(chain.from_iterable(map(_values, found)))
                    if part.kind == "ordered":
                        notes = [getattr(thing, "_metadata", None) for thing in found]
                        if [note is not None for note in notes] != part.with_metadata:
                            return None
                        below.extend(note for note in notes if note is not None)
            level = below
        return leaves

    def _add(self, level: list[_Place]) -> list[_Place]:
        """Remember one level; gives the next, in the order in which `read` will meet it."""
        parts: list[_Part] = []
        below: list[_Place] = []
        for kind in dict.fromkeys(place.kind for place in level):
            positions = [n for n, place in enumerate(level) if place.kind == kind]
            places = [level[n] for n in positions]
            if kind == "value":
                self.slots += (place.slot for place in places)
            elif kind in ("tensor", "ndarray"):
                self.paths += (place.name for place in places)
            things = [place.value for place in places]
            keys = [*chain.from_iterable(things)] if kind in ("mapping", "ordered") else []
            parts.append(
                _Part(
                    kind,
                    _picker(positions),
                    [type(thing) for thing in things],
                    [len(place.below) for place in places],
                    keys,
                    [type(key) for key in keys],
                    None if {*map(type, keys)} <= _PLAIN_KEYS else [*map(repr, keys)],
                    [place.metadata is not None for place in places],
                )
            )
            below += chain.from_iterable(place.below for place in places)
            below += (place.metadata for place in places if place.metadata is not None)
        self._levels.append(parts)
        return below


class _StructureBuilder:
    """Walks a state beside its skeleton, and cuts the skeleton's text at every hole."""

    def __init__(self) -> None:
        self.text = [""]
        self._facts: dict[int, tuple[bool, int]] = {}
        self._pending: list[str] = []

    def place(self, state: object, root: Json) -> _Place:
        """The state as places; leaves the text complete."""
        top = self._place(state, root)
        self._cut()
        self.text.pop()
        return top

    def _cut(self) -> None:
        self.text[-1] = "".join(self._pending)
        self.text.append("")
        self._pending.clear()

    def _place(self, value: Any, node: Any) -> _Place:
        say = self._pending.append
        for kind in ("tensor", "ndarray"):
            if isinstance(node, dict) and kind in node:
                say(f'{{"{kind}":{quote(node[kind])}}}')
                return _Place(kind, value, name=node[kind])
        if not self._is_opened(node):
            self._cut()
            return _Place("value", None, slot=len(self.text) - 2)
        if _is_stateful(value):
            return _Place("stateful", value, [self._place(value.state_dict(), node)])
        kind, children = next(iter(node.items()))
        if len(value) != len(children):
            raise StateError("the state changed while it was read: state_dict() gives something else each time")
        if kind in ("dict", "odict"):
            place = _Place("mapping" if kind == "dict" else "ordered", value)
            say(f'{{"{kind}":[')
            for number, ((key, child), inner) in enumerate(zip(children, value.values(), strict=True)):
                say(f"{',' if number else ''}[{quote(key) if type(key) is str else _compact(key)},")
                place.below.append(self._place(inner, child))
                say("]")
            say("]")
            if "metadata" in node:
                say(',"metadata":')
                place.metadata = self._place(value._metadata, node["metadata"])
            say("}")
            return place
        is_set = kind in ("set", "frozenset")
        place = _Place("set" if is_set else "sequence", value)
        say(f'{{"{kind}":[')
        for number, (child, inner) in enumerate(
            zip(children, sorted(value, key=repr) if is_set else value, strict=True)
        ):
            say("," if number else "")
            place.below.append(self._place(inner, child))
        say("]}")
        return place

    def _is_opened(self, node: Any) -> bool:
        """Whether a node is remembered part by part.

        What holds tensors must be. Of what does not, only the large with few parts: so a new learning rate does not
        cause a long list of parameters beside it to be written again.
        """
        with_tensors, size = self._look(node)
        if with_tensors or size <= _LARGE:
            return with_tensors
        kind, children = next(iter(node.items()))
        return len(children) <= {"dict": _FEW_KEYS, "odict": _FEW_KEYS, "list": _FEW_ITEMS, "tuple": _FEW_ITEMS}.get(
            kind, 0
        )

    def _look(self, node: Any) -> tuple[bool, int]:
        """Whether there are tensors below a node, and how many nodes."""
        if not isinstance(node, dict):
            return False, 1
        known = self._facts.get(id(node))
        if known is None:
            kind, children = next(iter(node.items()))
            if kind in ("tensor", "ndarray"):
                known = True, 1
            elif kind in ("dict", "odict"):
                looks = [self._look(child) for _, child in children]
                if "metadata" in node:
                    looks.append(self._look(node["metadata"]))
                known = any(look[0] for look in looks), 1 + sum(look[1] for look in looks)
            elif kind in ("list", "tuple", "set", "frozenset"):
                looks = [self._look(child) for child in children]
                known = any(look[0] for look in looks), 1 + sum(look[1] for look in looks)
            else:
                known = False, 1
            self._facts[id(node)] = known
        return known


def _compact(node: Json) -> str:
    return json.dumps(node, separators=(",", ":"), allow_nan=False)


def _picker(positions: list[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Takes the items at these positions out of a list."""
    first, count = positions[0], len(positions)
    if positions == list(range(first, first + count)):
        return itemgetter(slice(first, first + count))
    return itemgetter(*positions)


def _is_stateful(value: object) -> bool:
    """Whether `flatten` asks this for its `state_dict()`."""
    if type(value) in (dict, OrderedDict, list, tuple) or isinstance(value, (set, frozenset)):
        return False
    return is_stateful(value)


def _as_good(tensors: Sequence[Any], types: list[type]) -> bool:
    """Whether types differ only between a tensor and a parameter; any other class may hide what it is made of."""
    return all(
        type(tensor) is kind or type(tensor) in _PLAIN_TENSORS for tensor, kind in zip(tensors, types, strict=True)
    )
