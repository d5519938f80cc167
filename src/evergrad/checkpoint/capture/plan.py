"""Copying a state into an arena: the only thing that a save makes the trainer wait for.

A `Plan` is made once for a state's form. It knows where every tensor goes in the shard and has the header's text
ready. Each save then gathers today's tensors (`Plan.gather`), copies them (`Target.copy`) and writes today's values
into the header (`Plan.header`). A plan that no longer fits says so by None, and the next one is made.

Nothing here is shared between threads.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch

from evergrad.checkpoint.capture.bulk import Bulk
from evergrad.checkpoint.capture.cuda import DeviceCopies, device_of
from evergrad.checkpoint.capture.device import refuse_while_recording
from evergrad.checkpoint.capture.settled import Settled
from evergrad.checkpoint.capture.sources import Sources
from evergrad.checkpoint.capture.spread import declared, known, local_of, spec_of
from evergrad.checkpoint.capture.template import Template
from evergrad.checkpoint.capture.values import Values
from evergrad.checkpoint.layout import Entry, Header, Layout, Spec
from evergrad.dtypes import DType
from evergrad.errors import StateError
from evergrad.formats.collector import uncollected
from evergrad.records import Json
from evergrad.state import Skeleton, Where, flatten
from evergrad.state.sharing import contiguous_strides

_LARGE_BYTES = 32 * 1024  # from here on, torch would share the copy of a single tensor among its threads
_MANY = 4
_MARK = "the root goes here"


@dataclass(frozen=True, slots=True)
class Gathered:
    """One state as it is now: its tensors in the order of the layout, its values as text."""

    tensors: list[torch.Tensor]
    values: list[bytes]
    settled: frozenset[int] = frozenset()
    """The tensors, by number, on a GPU that nothing but `optimizer.step()` changes."""


class Copying(Protocol):
    """Copies that were begun, on a device, and have not ended yet."""

    def wait(self) -> None:
        """Return when all bytes are in the arena."""
        ...


class Plan:
    """How states of one form are saved."""

    def __init__(
        self, template: Template, values: Values, sources: Sources, header: Header, spread: Mapping[int, object]
    ) -> None:
        self.layout: Layout = header.layout
        self._template = template
        self._values = values
        self._sources = sources
        self._header = header
        self._spread = spread
        positions = {path: n for n, path in enumerate(template.paths)}
        self._stored = [positions[entry.path] for entry in self.layout.entries]
        self._devices = [device_of(device) for device in dict.fromkeys(sources.cuda) if device is not None]
        self._settled = Settled() if self._devices else None

    @classmethod
    def of(cls, state: object, shard: Mapping[str, Json] | None = None, *, replicated: Where | bool = False) -> Plan:
        """Walk a state and plan its shard; `StateError`, naming the path, for what cannot be stored.

        The header gets room for a shard record as long as the given one, and some to spare. Objects with
        `state_dict()` are asked twice, and must give the same form both times. `replicated` is what the user says is
        the same on all ranks.
        """
        with uncollected():
            flat = flatten(state, local=local_of)
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
            aliases = skeleton.sharing.aliases({path: spec[1:] for path, spec in specs.items()})
            stored = [spec for path, spec in specs.items() if path not in aliases]
            assert leaves is not None
            raw = dict(zip(template.paths, leaves.tensors, strict=True))
            placements = declared(replicated, flat.tensors, skeleton).merged(known(state, raw))
            header = Header(stored, aliases, _around(skeleton, template.text), texts, shard or {}, placements.to_json())
            tensors = {path: flat.tensors[path] for path in template.paths}
            spread = {n: spec for n, leaf in enumerate(leaves.tensors) if (spec := spec_of(leaf)) is not None}
            return cls(template, values, Sources(tensors, skeleton.sharing.views), header, spread)

    def gather(self, state: object) -> Gathered | None:
        """Today's tensors and values; None when the state is no longer of the form that was planned."""
        refuse_while_recording(self._devices)
        leaves = self._template.read(state)
        if leaves is None:
            return None
        values = self._values.texts(self._template.slots, leaves.values)
        if values is None:
            return None
        with torch.no_grad():
            pieces = self._pieces(leaves.tensors)
            tensors = None if pieces is None else self._sources.match(pieces)
        if tensors is None:
            return None
        stored = [tensors[n] for n in self._stored]
        settled = self._settled.choose(state, stored) if self._settled is not None else frozenset()
        return Gathered(stored, values, settled)

    def _pieces(self, leaves: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """Today's tensors with this rank's pieces of those that are cut; None if one is cut in another way."""
        if not self._spread:
            return leaves
        pieces = list(leaves)
        for n, spec in self._spread.items():
            if spec_of(leaves[n]) != spec:
                return None
            pieces[n] = local_of(leaves[n])
        return pieces

    def header(self, gathered: Gathered, shard: Mapping[str, Json]) -> bytes | None:
        """Everything before the tensors, exactly `layout.data_start` bytes; None if it no longer fits there."""
        return self._header.render(gathered.values, shard)

    def plain(self) -> list[bool]:
        """For each entry of the layout, whether its source lies in host memory as it will in the file."""
        return [self._sources.plain[n] for n in self._stored]

    def cuda(self) -> list[torch.device | None]:
        """For each entry of the layout, the CUDA device that its source is on."""
        return [self._sources.cuda[n] for n in self._stored]


class Target:
    """A mapped arena as places to copy into. It holds on to the buffer: drop it before the buffer is closed."""

    def __init__(self, plan: Plan, buffer: mmap.mmap | memoryview | bytearray, *, pinned: bool = False) -> None:
        """See the tensors of a plan in a buffer of at least `plan.layout.size` bytes.

        `pinned`: the CUDA driver knows the buffer, so that copies from a GPU need not be waited for.
        """
        self._whole = torch.frombuffer(buffer, dtype=torch.uint8)
        self._typed: dict[DType, torch.Tensor] = {}
        self._runs: list[tuple[slice, torch.Tensor]] = []
        self._singles: list[int] = []
        self._places: list[torch.Tensor] = []
        large: list[tuple[int, Entry]] = []
        entries = list(enumerate(plan.layout.entries))
        plain, cuda = plan.plain(), plan.cuda()
        for _, members in groupby(entries, lambda item: (item[1].dtype, item[1].shape, plain[item[0]], cuda[item[0]])):
            alike = list(members)
            first, entry = alike[0]
            if cuda[first] is not None:
                continue
            if plain[first] and entry.nbytes >= _LARGE_BYTES:
                large += alike
            elif plain[first] and entry.nbytes and len(alike) >= _MANY:
                # They lie side by side: one call copies them all.
                self._runs.append((slice(first, first + len(alike)), self._place(entry, (len(alike), *entry.shape))))
            else:
                self._singles += (n for n, _ in alike)
                self._places += (self._place(entry, entry.shape) for _, entry in alike)
        self._bulk = Bulk(self._whole.data_ptr(), large)
        on_devices = [
            (n, entry, device) for (n, entry), device in zip(entries, cuda, strict=True) if device is not None
        ]
        self._device_copies = DeviceCopies(self._whole, on_devices, pinned=pinned) if on_devices else None

    def copy(self, gathered: Gathered) -> Copying | None:
        """Copy the bytes of every tensor to its place; None if they are there when this returns."""
        tensors = gathered.tensors
        with torch.no_grad():
            # First what goes on by itself.
            copying = self._device_copies.start(tensors, gathered.settled) if self._device_copies else None
            try:
                self._bulk.copy(tensors)
                for part, place in self._runs:
                    torch.stack(tensors[part], out=place)
                if self._places:
                    torch._foreach_copy_(self._places, [tensors[n] for n in self._singles])
            except BaseException:
                if copying is not None:  # nothing may write to the arena once nobody knows of it
                    with suppress(Exception):
                        copying.wait()
                raise
        return copying

    def _place(self, first: Entry, shape: tuple[int, ...]) -> torch.Tensor:
        """The place of an entry, or of it and those behind it, as a tensor of its own type."""
        dtype, size = first.dtype, first.dtype.itemsize
        if dtype not in self._typed:
            self._typed[dtype] = self._whole[: self._whole.numel() // size * size].view(dtype.torch)
        return self._typed[dtype].as_strided(shape, contiguous_strides(shape), first.offset // size)


def _around(skeleton: Skeleton, root: Sequence[str]) -> list[str]:
    """The skeleton's text, cut where its root is cut."""
    # Of all that follows the schema version the root is first, so the first mark is it.
    before, _, after = Skeleton(_MARK, skeleton.sharing, skeleton.roles).dumps().partition(f'"{_MARK}"')
    pieces = list(root)
    pieces[0] = before + pieces[0]
    pieces[-1] += after
    return pieces


def _specs(tensors: Mapping[str, torch.Tensor]) -> dict[str, Spec]:
    dtypes = {dtype: DType.of_dense(dtype) for dtype in {tensor.dtype for tensor in tensors.values()}}
    specs = {}
    for path, tensor in tensors.items():
        specs[path] = Spec(path, dtypes[tensor.dtype], tuple(tensor.shape), tensor.nbytes)
    return specs
