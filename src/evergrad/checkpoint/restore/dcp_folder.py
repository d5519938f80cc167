"""Restoring what torch.distributed.checkpoint wrote: a folder of its own, into a live state as `restore` takes it.

Nothing of the folder is run: the metadata is read as a description, and so are values that torch.save stored.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from evergrad.checkpoint.capture.dtensor import piece_of, things
from evergrad.checkpoint.ranks import Ranks
from evergrad.checkpoint.restore.load_state import PreparedLoad, prepare
from evergrad.checkpoint.tensor_placement import TensorPiece
from evergrad.dtypes import DType
from evergrad.errors import DamagedFile, StateError
from evergrad.formats import Checkpoint, DataFile
from evergrad.formats.dcp import Dcp, FileSlice, read_metadata
from evergrad.formats.dcp import StoredPart as Part
from evergrad.formats.torch_file import open_archive
from evergrad.formats.zip_archive import Archive
from evergrad.records import Check, Json
from evergrad.state import ROOT, Skeleton, Where, escape, join
from evergrad.state.paths import segments
from evergrad.state.skeleton import decode_value, encode_scalar
from evergrad.state.tree import is_stateful

# Flat names, as DCP has them, laid out as a live state is nested.
#
# DCP joins keys by dots, and keys have dots themselves: only the live state knows where one ends. What no part of it
# asks for is kept under its flat name, so that comparing the two finds it.

_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


class Tree:
    """The skeleton of a folder, and which of its tensors is where in it."""

    places: dict[str, tuple[str, TensorPiece | None]]
    """Path → name in the folder, and the piece of it that this rank's DTensor wants."""

    def __init__(
        self,
        names: Sequence[str],
        tensors: Mapping[str, tuple[DType, tuple[int, ...]]],
        value: Callable[[str, str], Json],
    ) -> None:
        """`names` are all that the folder has, sorted; `value` reads one that is no tensor, given a path."""
        self.places = {}
        self._names, self._tensors, self._value = names, tensors, value
        self._known = set(names)
        self._used: set[str] = set()
        self._parameters: dict[int, str] = {}

    def root(self, live: object) -> Json:
        """The whole folder, nested as the live state is."""
        self._parameters = {
            id(parameter): _bare(name)
            for _, module in things(live, lambda thing: isinstance(thing, nn.Module))
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }
        node = self._node(live, "", None)
        return {"dict": []} if node is None else node

    def _below(self, name: str) -> list[str]:
        """What has this name and a dot before its own; all there is for the root."""
        if not name:
            return list(self._names)
        start = bisect_left(self._names, f"{name}.")
        stop = bisect_left(self._names, f"{name}/")  # the character after the dot
        return list(self._names[start:stop])

    def _leaf(self, name: str, path: str, live: object = None) -> Json:
        self._used.add(name)
        if name not in self._tensors:
            return self._value(name, path)
        place = None
        if isinstance(live, torch.Tensor) and self._tensors[name][1] == tuple(live.shape):
            place = piece_of(path, live)
        self.places[path] = name, place
        return {"tensor": path}

    def _node(self, live: Any, name: str, path: str | None) -> Json | None:
        """What the folder has for a live value; None if it has nothing."""
        if isinstance(live, (torch.Tensor, np.ndarray)):
            return self._leaf(name, path or name, live) if name in self._known else self._strays(name, path)
        if isinstance(live, nn.Module):
            return self._module(live, name, path)
        if isinstance(live, Optimizer):
            return self._optimizer(live, name, path)
        if is_stateful(live):
            live = live.state_dict()
        if name in self._known:
            return self._leaf(name, path or name)
        if isinstance(live, Mapping):
            return self._mapping(live, name, path)
        if isinstance(live, (list, tuple)) and (self._below(name) or not live):
            return self._sequence(live, name, path)
        return self._strays(name, path)

    def _mapping(self, live: Mapping[Any, Any], name: str, path: str | None) -> Json | None:
        entries: list[Json] = []
        for key, segment in segments(live).items():
            below = self._node(live[key], f"{name}.{key}" if name else str(key), join(path, segment))
            if below is not None:
                entries.append([_key(key), below])
        entries += self._extra(name, path, numbered=bool(live) and all(type(key) is int for key in live))
        # DCP has no name for an empty dict: that there is nothing means nothing.
        return {"dict": entries} if entries or not live or not name else None

    def _sequence(self, live: Sequence[Any], name: str, path: str | None) -> Json:
        items: list[Json] = []
        for index in range(len(self._names)):
            below = f"{name}.{index}"
            if below not in self._known and not self._below(below):
                break
            items.append(self._node(live[index] if index < len(live) else None, below, join(path, str(index))))
        return {"tuple" if isinstance(live, tuple) else "list": items}

    def _strays(self, name: str, path: str | None) -> Json | None:
        """Something is below a name for which the live state has no container."""
        extra = self._extra(name, path, numbered=False)
        return {"dict": extra} if extra else None

    def _extra(self, name: str, path: str | None, *, numbered: bool) -> list[Json]:
        """What is below a name and was not asked for: by its first key, and below that as it is called."""
        groups: dict[str, dict[str, str]] = {}
        for found in self._below(name):
            if found not in self._used:
                rest = found[len(name) + 1 :] if name else found
                first, _, inner = rest.partition(".")
                groups.setdefault(first, {})[inner] = found
        entries: list[Json] = []
        for first, members in groups.items():
            key: Json = int(first) if numbered and first.isdecimal() else first
            place = join(path, escape(first))
            if list(members) == [""]:
                entries.append([key, self._leaf(members[""], place)])
            else:
                inner_nodes: list[Json] = [
                    [inner, self._leaf(found, join(place, escape(inner)))] for inner, found in members.items()
                ]
                entries.append([key, {"dict": inner_nodes}])
        return entries

    def _module(self, live: nn.Module, name: str, path: str | None) -> Json | None:
        state = live.state_dict()
        known = {_bare(key): key for key in state}
        entries: list[Json] = []
        for found in self._below(name):
            rest = found[len(name) + 1 :] if name else found
            key = rest if rest in state else known.get(_bare(rest), rest)
            entries.append([key, self._leaf(found, join(path, escape(key)), state.get(key))])
        return {"odict": entries} if entries or not state else None

    def _optimizer(self, live: Optimizer, name: str, path: str | None) -> Json | None:
        below = self._below(name)
        if not below:
            return None
        params = [param for group in live.param_groups for param in group["params"]]
        start = len(name) + 1 if name else 0
        groups = self._groups([found for found in below if found[start:].startswith("param_groups.")], start, path)
        numbers = self._numbers(params, groups)
        states: dict[int, dict[str, Json]] = {}
        strays: list[Json] = []
        for found in below:
            if not found[start:].startswith("state."):
                continue
            owner, slot = _owner(found[start + len("state.") :], numbers)
            if owner is None:
                rest = found[start + len("state.") :]
                strays.append([rest, self._leaf(found, join(path, f"state/{escape(rest)}"))])
                continue
            place = join(path, f"state/{owner}/{escape(slot)}")
            states.setdefault(owner, {})[slot] = self._leaf(found, place, params[owner])
        numbered: list[Json] = [
            [owner, {"dict": [[slot, node] for slot, node in slots.items()]}] for owner, slots in sorted(states.items())
        ]
        listed = _regrouped(live, groups, numbers)
        return {"dict": [["state", {"dict": numbered + strays}], ["param_groups", {"list": listed}]]}

    def _groups(self, names: list[str], start: int, path: str | None) -> dict[str, dict[str, Json]]:
        """The settings of parameter groups: by the group's number, or by a parameter's name."""
        groups: dict[str, dict[str, Json]] = {}
        for found in names:
            rest = found[start + len("param_groups.") :]
            owner, _, setting = rest.rpartition(".")
            groups.setdefault(owner, {})[setting] = self._leaf(found, join(path, f"param_groups/{escape(rest)}"))
        return groups

    def _numbers(self, params: list[torch.Tensor], groups: Mapping[str, Mapping[str, Json]]) -> dict[str, int]:
        """How the folder calls each of the optimizer's parameters: by a number, or by a name."""
        called: list[Any] = []
        for group in sorted((g for g in groups if g.isdecimal() and "params" in groups[g]), key=int):
            called += _listed(groups[group]["params"])
        if all(type(each) is int for each in called) and called:
            return {str(each): place for place, each in enumerate(called) if place < len(params)}
        live = {name: n for n, param in enumerate(params) if (name := self._parameters.get(id(param))) is not None}
        if called and not all(_bare(str(each)) in live for each in called):  # names of another module: by their order
            return {str(each): place for place, each in enumerate(called) if place < len(params)}
        if len(live) < len(params):
            raise StateError(
                "the folder calls an optimizer's parameters by name, and the state given has no module whose they are: "
                "restore the module with its optimizer"
            )
        return live | {str(each): live[_bare(str(each))] for each in called}


def _owner(rest: str, numbers: Mapping[str, int]) -> tuple[int | None, str]:
    """The number of the parameter that `<parameter>.<slot>` is about, and the slot; the longest name counts."""
    at = rest.rfind(".")
    while at > 0:
        number = numbers.get(rest[:at], numbers.get(_bare(rest[:at])))
        if number is not None:
            return number, rest[at + 1 :]
        at = rest.rfind(".", 0, at)
    return None, rest


def _regrouped(live: Optimizer, groups: Mapping[str, Mapping[str, Json]], numbers: Mapping[str, int]) -> list[Json]:
    """The groups as the optimizer numbers them."""
    by_number = [dict(groups[key]) for key in sorted((g for g in groups if "params" in groups[g]), key=int)]
    if by_number:
        for group in by_number:
            group["params"] = {"list": [numbers.get(str(each), -1) for each in _listed(group["params"])]}
        return [{"dict": [[key, node] for key, node in group.items()]} for group in by_number]
    named: dict[int, Mapping[str, Json]] = {}
    for name, settings in groups.items():  # every parameter has the settings of its group
        number = numbers.get(name, numbers.get(_bare(name)))
        if number is not None:
            named[number] = settings
    listed: list[Json] = []
    first = 0
    for live_group in live.param_groups:
        count = len(live_group["params"])
        mine: list[Json] = [[key, node] for key, node in named.get(first, {}).items()]
        listed.append({"dict": [*mine, ["params", {"list": list(range(first, first + count))}]]})
        first += count
    return listed


def _listed(node: Json) -> list[Any]:
    value = decode_value(node)
    return list(value) if isinstance(value, (list, tuple)) else []


def _bare(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    for wrapper in _WRAPPERS:
        if name.startswith(wrapper) or f".{wrapper}" in name:
            name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
    return name


def _key(key: object) -> Json:
    if isinstance(key, tuple):
        return {"tuple": [encode_scalar(part) for part in key]}
    return encode_scalar(key)


_OBJECT = "an object saved by torch.save"


def restore_dcp(folder: Path, state: object, *, strict: bool = True, where: Where | None = None) -> tuple[str, ...]:
    """Put what a DCP folder holds into a live state, in place; what was left out, one line each.

    The state is as `Checkpointer.restore` takes it; DTensors get their piece. Optimizers are found by the number of
    each parameter or by its name, as `get_state_dict` writes it. Everything is compared, and every checksum of the
    folder, before the first tensor is touched. All ranks call it alike.
    """
    ranks = Ranks.now()
    opened: list[DcpFolder] = []

    def plan() -> PreparedLoad:
        source = DcpFolder(folder)
        opened.append(source)
        source.lay_out(Tree(source.names, source.tensors, source.value), state)
        loading = prepare(state, source, strict=strict, where=where)
        source.check(ranks)
        return loading

    try:
        loading = ranks.run_on_all(plan)
        ranks.run_on_all(loading.apply)
    finally:
        for source in opened:
            source.close()
    return loading.skipped


class DcpFolder:
    """A DCP folder as a source that can be loaded from, once it is laid out as a live state is."""

    def __init__(self, folder: Path) -> None:
        """Read the metadata; `FormatError` if it is hostile, damaged or not there."""
        self.folder = Path(folder)
        self._checkpoint: Checkpoint = Dcp().open(self.folder)
        described = read_metadata(self.folder / ".metadata" if self.folder.is_dir() else self.folder)
        objects = [name for name, what in described.others.items() if what == _OBJECT]
        self._others = described.others
        # Both lists are in the order of the metadata; one is shorter if an object lies behind a transform.
        complete = len(objects) == len(described.objects)
        self._objects: dict[str, Part] = dict(zip(objects, described.objects, strict=True)) if complete else {}
        self.tensors: dict[str, tuple[DType, tuple[int, ...]]] = {
            name: (info.dtype, info.shape) for name, info in self._checkpoint.tensors.items()
        }
        self.names = sorted({*self.tensors, *described.others})
        self.skeleton = Skeleton(None)
        self.shapes: Mapping[str, tuple[DType, tuple[int, ...]]] = {}
        self._places: Mapping[str, tuple[str, TensorPiece | None]] = {}
        self._inside: dict[str, torch.Tensor] = {}

    def value(self, name: str, path: str) -> Json:
        """What a value is, as a node; tensors inside it are called after a path.

        What would have to be run to be had is named by its class, and does not fit anything.
        """
        part = self._objects.get(name)
        if part is None:
            return {"object": self._others[name], "parts": []}
        file = DataFile(self.folder / part.file)
        try:
            window = FileSlice(file, part.offset, part.length)
            if window.read(0, min(2, part.length)) != b"PK":
                return {"object": self._others[name], "parts": []}
            stored = open_archive(window.path, Archive.over(window))
            unknown = [*stored.skeleton.objects(), *stored.others.items()]
            if unknown:
                return {"object": unknown[0][1], "parts": []}
            if Check.FAILED in stored.container_checks().values():
                raise DamagedFile(self.folder, f"{name}: the checksum does not hold")
            if not stored.tensors:
                return stored.skeleton.root
            renamed = {inner: path if inner == ROOT else join(path, inner) for inner in stored.tensors}
            self._inside |= {renamed[inner]: stored.read(inner) for inner in stored.tensors}
            if ROOT in stored.tensors:
                return {"ndarray" if stored.tensors[ROOT].read_only else "tensor": path}
            return Skeleton(stored.skeleton.root).below(path).root
        finally:
            file.close()

    def lay_out(self, tree: Tree, state: object) -> None:
        """Be nested as a live state is."""
        self.skeleton = Skeleton(tree.root(state))
        self._places = tree.places
        inside = {path: (DType.of_dense(tensor.dtype), tuple(tensor.shape)) for path, tensor in self._inside.items()}
        cut = {
            path: (self.tensors[name][0], self.tensors[name][1] if place is None else place.shape)
            for path, (name, place) in tree.places.items()
        }
        self.shapes = inside | cut

    def check(self, ranks: Ranks) -> None:
        """Compare the checksums of the tensors that were laid out; each rank a part of them."""
        for name in sorted({name for name, _ in self._places.values()})[ranks.rank :: ranks.world_size]:
            if self._checkpoint.checksum(name) is Check.FAILED:
                raise DamagedFile(self.folder, f"{name}: the checksum does not hold", hint="Nothing was touched.")

    def tensor(self, path: str) -> torch.Tensor:
        """The tensor at a path, or this rank's piece of it, as new memory."""
        if path in self._inside:
            return self._inside[path]
        name, place = self._places[path]
        dtype, shape = self.tensors[name]
        if place is None or place.shape == shape:
            return self._checkpoint.read(name)
        if place.shape[1:] == shape[1:]:  # whole rows: they follow each other
            row = math.prod(shape[1:])
            start = place.offset[0] * row
            bits = self._checkpoint.read_bits(name, start, start + place.shape[0] * row)
            if not bits.size:
                return torch.empty(place.shape, dtype=dtype.torch)
            return torch.from_numpy(bits.reshape(-1).view(np.uint8)).view(dtype.torch).reshape(place.shape)
        return self._checkpoint.read(name)[place.slices(TensorPiece.of_whole(shape))].contiguous()

    def close(self) -> None:
        """Let go of the files."""
        self._checkpoint.close()
