"""Read the shards of an index as one state: tensors with and without an entry in the index, and values.

A shard may hold more than the index says. Everything in it is listed: under its own name where no other shard has
that name, else behind the name of its file, as content that is compared by its bytes and that no conversion keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from evergrad.errors import DamagedFile
from evergrad.formats.contract import Checkpoint, OtherTensor
from evergrad.records import Json
from evergrad.state import Sharing, Skeleton, escape
from evergrad.state.sharing import View
from evergrad.state.skeleton import Joined, join_states

Place: TypeAlias = tuple[Checkpoint, str]
"""A shard, and a name in it."""
_TENSOR = OtherTensor("another tensor of that name")


@dataclass(slots=True)
class Merged:
    """The content of several shards, by name."""

    names: dict[str, Place] = field(default_factory=dict)
    """Tensors."""
    others: dict[str, str] = field(default_factory=dict)
    """Content that is no dense tensor: name → what it is."""
    other_names: dict[str, Place] = field(default_factory=dict)
    """The place of each of `others`."""
    unindexed: tuple[str, ...] = ()
    """The tensors that the index does not name."""
    skeleton: Skeleton = field(default_factory=lambda: Skeleton({"dict": []}))


def merge(index: Path, shards: Mapping[str, Checkpoint], weight_map: Mapping[str, str]) -> Merged:
    """All content of the shards; `DamagedFile` if one does not hold what the index says."""
    values = {file: part.skeleton.described_values() for file, part in shards.items()}
    owners = dict(_held(index, shards, values, weight_map))
    if any(values.values()) or any(part.skeleton.objects() for part in shards.values()):
        roots = {file: part.skeleton.root for file, part in shards.items()}
        joined = join_states(roots, owners)
        if joined is not None:
            return _by_tree(shards, values, owners, joined)
    return _by_name(shards, values, owners)


def _held(
    index: Path,
    shards: Mapping[str, Checkpoint],
    values: Mapping[str, Mapping[str, str]],
    weight_map: Mapping[str, str],
) -> Iterator[tuple[str, str]]:
    """The path in its shard, and the shard, of everything that the index names."""
    for name, file in weight_map.items():
        part = shards[file]
        # A torch shard escapes what a path may not hold; a safetensors shard lists names as they are.
        path = name if name in part.tensors else escape(name)
        if path not in part.tensors:
            path = name if name in part.others or name in values[file] else path
            if path not in part.others and path not in values[file]:
                raise DamagedFile(index, f"names tensor {name!r} in {file!r}, which does not hold it")
        yield path, file


def _by_name(
    shards: Mapping[str, Checkpoint], values: Mapping[str, Mapping[str, str]], owners: Mapping[str, str]
) -> Merged:
    """The content of shards that hold nothing but names and tensors; values, if any, are named."""
    found = Merged()
    for path, file in owners.items():
        if path in shards[file].tensors:
            found.names[path] = (shards[file], path)
    taken: dict[str, str] = {path: owners[path] for path in found.names}
    unindexed = []
    for file, part in shards.items():
        for path in part.tensors:
            if taken.setdefault(path, file) != file:
                _add_second(found, file, part, path, _TENSOR)
            elif path not in found.names:
                found.names[path] = (part, path)
                unindexed.append(path)
    taken = dict(owners)
    for file, part in shards.items():
        for path, what in {**values[file], **part.others}.items():
            if taken.setdefault(path, file) != file:
                _add_second(found, file, part, path, what)
            else:
                found.others[path], found.other_names[path] = what, (part, path)
    found.unindexed = tuple(unindexed)
    found.skeleton = _with_views(shards.values(), found.names, Skeleton.of_names(found.names).root)
    return found


def _by_tree(
    shards: Mapping[str, Checkpoint],
    values: Mapping[str, Mapping[str, str]],
    owners: Mapping[str, str],
    joined: Joined,
) -> Merged:
    """The content of shards of which some hold values or objects: one state, made of theirs."""
    found = Merged()
    tensors = {path: (shards[file], path) for path, file in joined.tensors.items()}
    found.names = {path: tensors[path] for path in owners if path in tensors} | tensors
    lost: dict[str, set[str]] = {}
    for file, position in joined.lost:
        lost.setdefault(file, set()).add(position)
    for file, part in shards.items():
        is_lost = _below_any(lost.get(file, set()))
        for path in part.tensors:
            if joined.tensors.get(path) != file:
                _add_second(found, file, part, path, _TENSOR)
        for path, what in part.others.items():
            if is_lost(path):
                _add_second(found, file, part, path, what)
            else:
                found.others[path], found.other_names[path] = what, (part, path)
        for path, what in values[file].items():
            if is_lost(path):
                _add_second(found, file, part, path, what)
    indexed = _below_any(set(owners))
    found.unindexed = tuple(path for path in found.names if not indexed(path))
    found.skeleton = _with_views(shards.values(), found.names, joined.root)
    return found


def _add_second(found: Merged, file: str, part: Checkpoint, path: str, what: str) -> None:
    """Name what a shard holds under the name of something that another shard holds."""
    name = f"{escape(file)}/{path}"
    while name in found.others or name in found.names:
        name += "'"
    told = f"not the {path} of the index: {what}"
    found.others[name] = OtherTensor(told) if isinstance(what, OtherTensor) else told
    found.other_names[name] = (part, path)


def _below_any(positions: set[str]) -> Callable[[str], bool]:
    """Return a predicate that is true for these positions and for their parts and attributes."""

    def is_below(path: str) -> bool:
        if not positions:
            return False
        path = path.removesuffix("@attributes")
        while path not in positions:
            path, slash, _ = path.rpartition("/")
            if not slash:
                return False
        return True

    return is_below


def _with_views(parts: Iterable[Checkpoint], names: Mapping[str, Place], root: Json) -> Skeleton:
    """The skeleton with that root; sharing within one shard is kept."""
    sizes: list[int] = []
    views: dict[str, View] = {}
    for part in parts:
        sharing = part.skeleton.sharing
        for name, view in sharing.views.items():
            if name in names and names[name][0] is part:
                views[name] = View(view.storage + len(sizes), view.offset, view.stride)
        sizes.extend(sharing.sizes)
    return Skeleton(root, Sharing(tuple(sizes) if views else (), views))
