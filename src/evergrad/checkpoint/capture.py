"""Copying a state into an arena: the only thing that a save makes the trainer wait for.

A `Plan` is made once for a state's form. It knows where every tensor goes in the shard and has the header's text
ready. Each save then gathers today's tensors (`Plan.gather`), copies them (`Target.copy`) and writes today's values
into the header (`Plan.header`). A plan that no longer fits says so by None, and the next one is made.

Nothing here is shared between threads.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from evergrad.checkpoint.layout import Entry, Header, Layout, Spec, uncollected
from evergrad.checkpoint.sources import Sources
from evergrad.checkpoint.template import Template
from evergrad.checkpoint.values import Values
from evergrad.dtypes import DType
from evergrad.errors import StateError
from evergrad.records import Json
from evergrad.state import Skeleton, flatten
from evergrad.state.sharing import contiguous_strides

__all__ = ["Gathered", "Plan", "Target"]

_SMALL_BYTES = 64 * 1024  # up to here, one call for many tensors beats one each
_MANY = 4
_MARK = "the root goes here"


@dataclass(frozen=True, slots=True)
class Gathered:
    """One state as it is now: its tensors in the order of the layout, its values as text."""

    tensors: list[torch.Tensor]
    values: list[bytes]


class Plan:
    """How states of one form are saved."""

    def __init__(self, template: Template, values: Values, sources: Sources, header: Header) -> None:
        self.layout: Layout = header.layout
        self._template = template
        self._values = values
        self._sources = sources
        self._header = header
        positions = {path: n for n, path in enumerate(template.paths)}
        self._stored = [positions[entry.path] for entry in self.layout.entries]

    @classmethod
    def of(cls, state: object, shard: Mapping[str, Json] | None = None) -> Plan:
        """Walk a state and plan its shard; `StateError`, naming the path, for what cannot be stored.

        The header gets room for a shard record as long as the given one, and some to spare. Objects with
        `state_dict()` are asked twice, and must give the same form both times.
        """
        with uncollected():
            flat = flatten(state)
            skeleton = flat.skeleton
            if unknown := skeleton.objects():
                raise StateError("{}: an object of class {} cannot be stored".format(*unknown[0]))
            template = Template(state, skeleton.root)
            values = Values(len(template.slots))
            leaves = template.read(state)
            texts = None if leaves is None else values.texts(template.slots, leaves.values)
            if texts is None:
                raise StateError("the state changed while it was read: state_dict() gives something else each time")
            specs = _specs(flat.tensors)
            aliases = _aliases(skeleton, specs)
            stored = [spec for path, spec in specs.items() if path not in aliases]
            header = Header(stored, aliases, _around(skeleton, template.text), texts, shard or {})
            tensors = {path: flat.tensors[path] for path in template.paths}
            return cls(template, values, Sources(tensors, skeleton.sharing.views), header)

    def gather(self, state: object) -> Gathered | None:
        """Today's tensors and values; None when the state is no longer of the form that was planned."""
        leaves = self._template.read(state)
        if leaves is None:
            return None
        values = self._values.texts(self._template.slots, leaves.values)
        if values is None:
            return None
        with torch.no_grad():
            tensors = self._sources.match(leaves.tensors)
        if tensors is None:
            return None
        return Gathered([tensors[n] for n in self._stored], values)

    def header(self, gathered: Gathered, shard: Mapping[str, Json]) -> bytes | None:
        """Everything before the tensors, exactly `layout.data_start` bytes; None if it no longer fits there."""
        return self._header.render(gathered.values, shard)

    def runs(self) -> list[tuple[int, int]]:
        """Entries (first, past the last) that are small and alike, so that one call can copy them all."""
        found = []
        alike = [
            (entry.dtype, entry.shape) if self._sources.plain[n] and 0 < entry.nbytes <= _SMALL_BYTES else None
            for n, entry in zip(self._stored, self.layout.entries, strict=True)
        ]
        start = 0
        for form, members in groupby(alike):
            stop = start + len(list(members))
            if form is not None and stop - start >= _MANY:
                found.append((start, stop))
            start = stop
        return found


class Target:
    """A mapped arena as places to copy into. It holds on to the buffer: drop it before the buffer is closed."""

    def __init__(self, plan: Plan, buffer: mmap.mmap | memoryview | bytearray) -> None:
        """See the tensors of a plan in a buffer of at least `plan.layout.size` bytes."""
        whole = torch.frombuffer(buffer, dtype=torch.uint8)
        entries = plan.layout.entries
        # One view a dtype, and each tensor as a part of that: a single call for each of tens of thousands.
        typed = {
            dtype: whole[: whole.numel() // dtype.itemsize * dtype.itemsize].view(dtype.torch)
            for dtype in {entry.dtype for entry in entries}
        }

        def place(first: Entry, shape: tuple[int, ...]) -> torch.Tensor:
            return typed[first.dtype].as_strided(shape, contiguous_strides(shape), first.offset // first.dtype.itemsize)

        self._runs: list[tuple[slice, torch.Tensor]] = []
        self._singles: list[slice] = []
        self._places: list[torch.Tensor] = []
        past = 0
        for start, stop in [*plan.runs(), (len(entries), len(entries))]:
            self._singles.append(slice(past, start))
            self._places += (place(entry, entry.shape) for entry in entries[past:start])
            if stop > start:
                first = entries[start]
                self._runs.append((slice(start, stop), place(first, (stop - start, *first.shape))))
            past = stop

    def copy(self, gathered: Gathered) -> None:
        """Copy the bytes of every tensor to its place."""
        with torch.no_grad():
            singles = [tensor for part in self._singles for tensor in gathered.tensors[part]]
            if singles:
                torch._foreach_copy_(self._places, singles)
            for part, place in self._runs:
                torch.stack(gathered.tensors[part], out=place)


def _around(skeleton: Skeleton, root: Sequence[str]) -> list[str]:
    """The skeleton's text, cut where its root is cut."""
    # Of all that follows the schema version the root is first, so the first mark is it.
    before, _, after = Skeleton(_MARK, skeleton.sharing, skeleton.roles).dumps().partition(f'"{_MARK}"')
    pieces = list(root)
    pieces[0] = before + pieces[0]
    pieces[-1] += after
    return pieces


def _aliases(skeleton: Skeleton, specs: Mapping[str, Spec]) -> dict[str, str]:
    """Tensors that are another one under a second name: path → path of the one that is stored."""
    first: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    for path, view in skeleton.sharing.views.items():
        original = first.setdefault((view, *specs[path][1:]), path)
        if original != path:
            aliases[path] = original
    return aliases


def _specs(tensors: Mapping[str, torch.Tensor]) -> dict[str, Spec]:
    dtypes = {dtype: DType.of_torch(dtype) for dtype in {tensor.dtype for tensor in tensors.values()}}
    specs = {}
    for path, tensor in tensors.items():
        dtype = dtypes[tensor.dtype]
        assert dtype is not None, "flatten refuses other types"
        specs[path] = Spec(path, dtype, tuple(tensor.shape), tensor.nbytes)
    return specs
