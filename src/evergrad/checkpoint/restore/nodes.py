"""Skeletons by path: where two differ, what is at a path, and the same with something replaced or left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from evergrad.records import Json
from evergrad.state import ROOT, escape, join
from evergrad.state.skeleton import decode_value


def differences(a: Json, b: Json, path: str | None = None) -> Iterator[str]:
    """Where two skeletons have different values; where their form differs, the container."""
    if a == b:
        return
    below_a, below_b = _below(a), _below(b)
    if below_a is None or below_b is None or below_a.keys() != below_b.keys():
        yield path or ROOT
        return
    for segment, child in below_a.items():
        yield from differences(child, below_b[segment], join(path, segment))


def value_at(root: Json, path: str) -> Any:
    """What a skeleton has at a path that it has, and that holds no tensor."""
    node = root
    for segment in () if path == ROOT else path.split("/"):
        below = _below(node)
        assert below is not None, "the path was found in it"
        node = below[segment]
    return decode_value(node)


def replaced(root: Json, path: str, new: Json) -> Json:
    """A skeleton with another node at a path."""
    return _changed(root, None, lambda at, node: [new] if (at or ROOT) == path else None, frozenset({path}))[0]


def without(root: Json, paths: frozenset[str], at: str | None = None) -> Json:
    """A skeleton that lacks what is at some paths; a list or a tuple, where a place cannot be empty, goes whole."""
    left = _changed(root, at, lambda here, node: [] if here in paths else None, paths)
    return left[0] if left else {"dict": []}


def _changed(
    node: Json, at: str | None, change: Callable[[str | None, Json], list[Json] | None], paths: frozenset[str]
) -> list[Json]:
    """The node as it is to be: one, or none."""
    changed = change(at, node)
    if changed is not None:
        return changed
    below = _below(node)
    if below is None or not any(_is_on_the_way(at, path) for path in paths):
        return [node]
    assert isinstance(node, dict)
    kind = next(iter(node))
    made: list[Json] = []
    entries: Any = node[kind]
    for (segment, child), entry in zip(below.items(), entries, strict=True):
        found = _changed(child, join(at, segment), change, paths)
        if kind in ("dict", "odict"):
            made += ([entry[0], inner] for inner in found)
        elif not found:  # a place in a list cannot be empty: all of it goes
            return []
        else:
            made += found
    return [{**node, kind: made}]


def _is_on_the_way(at: str | None, path: str) -> bool:
    return at is None or path.startswith(f"{at}/")


def _below(node: Json) -> dict[str, Json] | None:
    """A container's children by the segment of their path; None if it is no container."""
    if isinstance(node, dict):
        kind = next(iter(node), None)
        children: Any = node.get(kind) if kind is not None else None
        if kind in ("dict", "odict"):
            return {_segment(key): child for key, child in children}
        if kind in ("list", "tuple"):
            return {str(index): child for index, child in enumerate(children)}
    return None


def _segment(key: Json) -> str:
    return escape(str(key if isinstance(key, str) else decode_value(key)))
