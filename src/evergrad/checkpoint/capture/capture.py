"""The arenas of a rank, and how a state gets into one of them.

Each rank has two, used in turns. A state is copied into the one that may be overwritten, and only when every byte is
there is that said on the arena's ticket: at once for memory of the host, and for a GPU when its copies have ended,
which a thread waits for while training goes on.
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
import mmap
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from evergrad.checkpoint.arena import Arena, ArenaTicket
from evergrad.checkpoint.capture.cuda import (
    DeviceCopies,
    PinnedBuffer,
    StepOnlyTensors,
    device_of,
    refuse_while_recording,
)
from evergrad.checkpoint.capture.dtensor import declared, known, local_tensor, sharding_spec
from evergrad.checkpoint.capture.structure_cache import StateStructure
from evergrad.checkpoint.pending import SaveTracker
from evergrad.checkpoint.shard_layout import HeaderRenderer, Layout, ShardEntry, TensorSpec, escaped
from evergrad.dtypes import DType
from evergrad.errors import SaveRefused, StateError, TierError, UsageError
from evergrad.formats.gc_pause import gc_paused
from evergrad.records import Json
from evergrad.state import Skeleton, Where, flatten, outline
from evergrad.state.sharing import View, contiguous_strides
from evergrad.state.tree import MAX_DEPTH

# What a plan knows of the tensors it was made for, and whether today's are like them.


class SourceTensors:
    """Shapes, types, devices, and who shares memory with whom.

    The same tensor objects are never expected: `module.state_dict()` makes new ones each time. What has to be the
    same is what a skeleton and a layout say of them.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], views: Mapping[str, View]) -> None:
        """Remember tensors as `flatten` gives them, with the sharing it found."""
        given = list(tensors.values())
        self._shapes = [tensor.shape for tensor in given]
        self._dtypes = [tensor.dtype for tensor in given]
        self._devices = [tensor.device for tensor in given]
        self._contiguous = [tensor.is_contiguous() for tensor in given]
        self.plain = [tensor.is_cpu and tensor.is_contiguous() for tensor in given]
        """For each tensor, whether it lies in host memory as it will in the file."""
        self.cuda = [tensor.device if tensor.is_cuda else None for tensor in given]
        """For each tensor, the CUDA device that it is on."""
        self._itemsizes = [tensor.element_size() for tensor in given]
        # Those with a record of how they lie: where in their storage, and with which strides.
        self._strides = {n: views[path].stride for n, path in enumerate(tensors) if path in views}
        self._places = {n: given[n].storage_offset() for n in self._strides}
        # Every tensor is in the group of its storage, which may be its own; an empty one lies nowhere.
        self._groups: dict[int, int | str] = {
            n: views[path].storage if path in views else path
            for n, (path, tensor) in enumerate(tensors.items())
            if tensor.numel()
        }
        self._addresses: list[int] = []
        self._offsets: list[int] = []

    def match(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        """Today's tensors as dense memory; None if they are not like those that were remembered."""
        try:
            if self._are_alike(tensors):
                return tensors
            # A conjugated or negated view is stored as what it shows, which lies elsewhere.
            if not any(tensor.is_conj() or tensor.is_neg() for tensor in tensors):
                return None
            resolved = [tensor.resolve_conj().resolve_neg() for tensor in tensors]
            return resolved if self._are_alike(resolved) else None
        except RuntimeError:  # sparse, nested, opaque: such tensors have no shape, no strides or no address
            return None

    def _are_alike(self, tensors: Sequence[torch.Tensor]) -> bool:
        addresses: list[int] = []
        offsets: list[Any] = []  # ints: symbolic ones, which torch's types allow for, exist in traced code only
        # One plain loop: with tens of thousands of tensors every further pass fetches all of them into the cache again.
        for tensor, shape, dtype, device, contiguous in zip(
            tensors, self._shapes, self._dtypes, self._devices, self._contiguous, strict=True
        ):
            if (
                tensor.shape != shape
                or tensor.dtype is not dtype
                or tensor.device != device
                or tensor.is_contiguous() is not contiguous
            ):
                return False
            addresses.append(tensor.data_ptr())
            offsets.append(tensor.storage_offset())
        for n, stride in self._strides.items():
            if tensors[n].stride() != stride or tensors[n].is_conj() or tensors[n].is_neg():
                return False
        if addresses != self._addresses or offsets != self._offsets:
            if not self._share_as_before(addresses, offsets):
                return False
            # While nothing moves, nothing is tied or untied either.
            self._addresses, self._offsets = addresses, offsets
        return True

    def _share_as_before(self, addresses: list[int], offsets: list[int]) -> bool:
        """Whether just those tensors share a storage that did, at the same places in it."""
        homes: dict[tuple[torch.device, int], int | str] = {}
        for n, group in self._groups.items():
            if not addresses[n]:  # a storage that was freed
                return False
            start = addresses[n] - offsets[n] * self._itemsizes[n]
            if homes.setdefault((self._devices[n], start), group) != group:
                return False
        return len(homes) == len(set(self._groups.values())) and all(offsets[n] == at for n, at in self._places.items())


# Everything of a state that is no tensor, as text for the header; written anew only where it changed.

# Of these, equal values of the same type have the same text, and none can change in place.
_SETTLED = {int, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size}
_KEYS = {str, int, bool, bytes, type(None)}


class ValueTexts:
    """The texts of a template's holes as they were last seen."""

    def __init__(self, count: int) -> None:
        self._seen: list[object] = [None] * count
        self._texts: list[bytes] = [b""] * count

    def texts(self, slots: Sequence[int], values: Sequence[Any]) -> list[bytes] | None:
        """Today's values as escaped JSON, each in its slot; None if one now holds a tensor or cannot be stored."""
        for slot, value in zip(slots, values, strict=True):
            kind = type(value)
            seen = (kind, value) if kind in _SETTLED else _trace(value)
            if seen is None or seen != self._seen[slot]:
                text = _text(value)
                if text is None:
                    return None
                self._texts[slot], self._seen[slot] = text, seen
        return list(self._texts)


def _text(value: object) -> bytes | None:
    try:
        walked = outline(value, lambda thing: isinstance(thing, torch.Tensor))
    except StateError:  # the full walk will say so, and at which path
        return None
    if walked.leaves:
        return None
    return escaped(json.dumps(walked.root, separators=(",", ":"), allow_nan=False))


def _trace(value: object) -> list[object] | None:
    """What the text of a value depends on, to be compared with the trace of another day; None if nobody can tell.

    Level by level, as a template reads. Only things that cannot change in place are kept, never a container.
    """
    trace: list[object] = []
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        kinds = [*map(type, level)]
        trace.append(kinds)
        below: list[Any] = []
        different = dict.fromkeys(kinds)
        for kind in different:
            group: list[Any] = level if len(different) == 1 else [thing for thing in level if type(thing) is kind]
            if kind in _SETTLED:
                trace.append(group)
            elif kind is float:  # 0.0 equals -0.0; a NaN equals nothing and is written again
                trace += (group, [*map(math.copysign, repeat(1.0), group)])
            elif kind is list or kind is tuple:
                trace.append([*map(len, group)])
                below.extend(chain.from_iterable(group))
            elif kind is dict or (kind is OrderedDict and not any(map(vars, group))):  # nor torch's metadata
                keys = [*chain.from_iterable(group)]
                key_kinds = [*map(type, keys)]
                if not {*key_kinds} <= _KEYS:
                    return None
                trace += ([*map(len, group)], keys, key_kinds)
                below.extend(chain.from_iterable(thing.values() for thing in group))
            else:
                return None
        if not below:
            return trace
        level = below
    return None


# Copying large tensors: plain moves of memory, shared by a few threads.
#
# torch would start and join its threads for each tensor. When other processes keep the cores busy, as data loaders
# do, every join waits for a thread that is not running: a gigabyte then takes several times as long as in one piece.

_PIECE_BYTES = 8 << 20  # a tensor larger than this is shared by threads, too
_WORTH_A_THREAD = 16 << 20
_MOST_THREADS = 8  # a memory bus is full by then


class HostMemcpy:
    """Entries whose sources lie in host memory exactly as they will in the file."""

    def __init__(self, address: int, entries: Iterable[tuple[int, ShardEntry]]) -> None:
        """Entries of a shard at this address, each with its number."""
        pieces: list[tuple[int, int, int, int]] = []
        self._numbers: list[int] = []
        for n, entry in entries:
            for start in range(0, entry.nbytes, _PIECE_BYTES):
                nbytes = min(_PIECE_BYTES, entry.nbytes - start)
                pieces.append((len(self._numbers), start, address + entry.offset + start, nbytes))
            self._numbers.append(n)
        total = sum(nbytes for *_, nbytes in pieces)
        # As many as torch itself would take: one, where a launcher gave each of many ranks one.
        count = max(1, min(torch.get_num_threads(), _MOST_THREADS, total // _WORTH_A_THREAD))
        self._shares: list[list[tuple[int, int, int, int]]] = [[] for _ in range(count)]
        done = 0
        for piece in pieces:
            self._shares[done * count // total].append(piece)
            done += piece[-1]

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the entries' tensors, picked out of those of all entries, to their places."""
        # What a conjugated or negated view shows is not what lies in memory.
        sources = [tensors[n].resolve_conj().resolve_neg() for n in self._numbers]
        addresses = [source.data_ptr() for source in sources]
        helpers = [threading.Thread(target=_move, args=(share, addresses)) for share in self._shares[1:]]
        for helper in helpers:
            helper.start()
        _move(self._shares[0], addresses)
        for helper in helpers:
            helper.join()


def _move(pieces: Iterable[tuple[int, int, int, int]], addresses: list[int]) -> None:
    for n, start, target, nbytes in pieces:
        ctypes.memmove(target, addresses[n] + start, nbytes)  # lets other threads run meanwhile


# Copying a state into an arena: the only thing that a save makes the trainer wait for.
#
# A `CapturePlan` is made once for a state's form. It knows where every tensor goes in the shard and has the header's
# text
# ready. Each save then gathers today's tensors (`CapturePlan.gather`), copies them (`ArenaWriter.copy`) and writes
# today's values
# into the header (`CapturePlan.header`). A plan that no longer fits says so by None, and the next one is made.
#
# Nothing here is shared between threads.

_LARGE_BYTES = 32 * 1024  # from here on, torch would share the copy of a single tensor among its threads
_MANY = 4
_MARK = "the root goes here"


@dataclass(frozen=True, slots=True)
class GatheredState:
    """One state as it is now: its tensors in the order of the layout, its values as text."""

    tensors: list[torch.Tensor]
    values: list[bytes]
    step_only: frozenset[int] = frozenset()
    """The tensors, by number, on a GPU that nothing but `optimizer.step()` changes."""


class AsyncCopy(Protocol):
    """Copies that were begun, on a device, and have not ended yet."""

    def wait(self) -> None:
        """Return when all bytes are in the arena."""
        ...


class CapturePlan:
    """How states of one form are saved."""

    def __init__(
        self,
        structure: StateStructure,
        values: ValueTexts,
        sources: SourceTensors,
        header: HeaderRenderer,
        spread: Mapping[int, object],
    ) -> None:
        self.layout: Layout = header.layout
        self._template = structure
        self._values = values
        self._sources = sources
        self._header = header
        self._spread = spread
        positions = {path: n for n, path in enumerate(structure.paths)}
        self._stored = [positions[entry.path] for entry in self.layout.entries]
        self._devices = [device_of(device) for device in dict.fromkeys(sources.cuda) if device is not None]
        self._settled = StepOnlyTensors() if self._devices else None

    @classmethod
    def of(
        cls, state: object, shard: Mapping[str, Json] | None = None, *, replicated: Where | bool = False
    ) -> CapturePlan:
        """Walk a state and plan its shard; `StateError`, naming the path, for what cannot be stored.

        The header gets room for a shard record as long as the given one, and some to spare. Objects with
        `state_dict()` are asked twice, and must give the same form both times. `replicated` is what the user says is
        the same on all ranks.
        """
        with gc_paused():
            flat = flatten(state, local=local_tensor)
            skeleton = flat.skeleton
            if unknown := skeleton.objects():
                raise StateError("{}: an object of class {} cannot be stored".format(*unknown[0]))
            structure = StateStructure(state, skeleton.root)
            values = ValueTexts(len(structure.slots))
            leaves = structure.read(state)
            texts = None if leaves is None else values.texts(structure.slots, leaves.values)
            if texts is None:
                raise StateError("the state changed while it was read: state_dict() gives something else each time")
            specs = _specs(flat.tensors)
            aliases = skeleton.sharing.aliases({path: spec[1:] for path, spec in specs.items()})
            stored = [spec for path, spec in specs.items() if path not in aliases]
            assert leaves is not None
            raw = dict(zip(structure.paths, leaves.tensors, strict=True))
            placements = declared(replicated, flat.tensors, skeleton).merged(known(state, raw))
            header = HeaderRenderer(
                stored, aliases, _around(skeleton, structure.text), texts, shard or {}, placements.to_json()
            )
            tensors = {path: flat.tensors[path] for path in structure.paths}
            spread = {n: spec for n, leaf in enumerate(leaves.tensors) if (spec := sharding_spec(leaf)) is not None}
            return cls(structure, values, SourceTensors(tensors, skeleton.sharing.views), header, spread)

    def gather(self, state: object) -> GatheredState | None:
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
        step_only = self._settled.find(state, stored) if self._settled is not None else frozenset()
        return GatheredState(stored, values, step_only)

    def _pieces(self, leaves: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """Today's tensors with this rank's pieces of those that are cut; None if one is cut in another way."""
        if not self._spread:
            return leaves
        pieces = list(leaves)
        for n, spec in self._spread.items():
            if sharding_spec(leaves[n]) != spec:
                return None
            pieces[n] = local_tensor(leaves[n])
        return pieces

    def header(self, gathered: GatheredState, shard: Mapping[str, Json]) -> bytes | None:
        """Everything before the tensors, exactly `layout.data_start` bytes; None if it no longer fits there."""
        return self._header.render(gathered.values, shard)

    def plain(self) -> list[bool]:
        """For each entry of the layout, whether its source lies in host memory as it will in the file."""
        return [self._sources.plain[n] for n in self._stored]

    def cuda(self) -> list[torch.device | None]:
        """For each entry of the layout, the CUDA device that its source is on."""
        return [self._sources.cuda[n] for n in self._stored]


class ArenaWriter:
    """A mapped arena as places to copy into. It holds on to the buffer: drop it before the buffer is closed."""

    def __init__(self, plan: CapturePlan, buffer: mmap.mmap | memoryview | bytearray, *, pinned: bool = False) -> None:
        """See the tensors of a plan in a buffer of at least `plan.layout.size` bytes.

        `pinned`: the CUDA driver knows the buffer, so that copies from a GPU need not be waited for.
        """
        self._whole = torch.frombuffer(buffer, dtype=torch.uint8)
        self._typed: dict[DType, torch.Tensor] = {}
        self._runs: list[tuple[slice, torch.Tensor]] = []
        self._singles: list[int] = []
        self._places: list[torch.Tensor] = []
        large: list[tuple[int, ShardEntry]] = []
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
        self._bulk = HostMemcpy(self._whole.data_ptr(), large)
        on_devices = [
            (n, entry, device) for (n, entry), device in zip(entries, cuda, strict=True) if device is not None
        ]
        self._device_copies = DeviceCopies(self._whole, on_devices, pinned=pinned) if on_devices else None

    def copy(self, gathered: GatheredState) -> AsyncCopy | None:
        """Copy the bytes of every tensor to its place; None if they are there when this returns."""
        tensors = gathered.tensors
        with torch.no_grad():
            # First what goes on by itself.
            copying = self._device_copies.start(tensors, gathered.step_only) if self._device_copies else None
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

    def _place(self, first: ShardEntry, shape: tuple[int, ...]) -> torch.Tensor:
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


def _specs(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    dtypes = {dtype: DType.of_dense(dtype) for dtype in {tensor.dtype for tensor in tensors.values()}}
    specs = {}
    for path, tensor in tensors.items():
        specs[path] = TensorSpec(path, dtypes[tensor.dtype], tuple(tensor.shape), tensor.nbytes)
    return specs


_log = logging.getLogger(__name__)
_ARENAS = 2
_SAY_SO_AFTER_S = 10.0


@dataclass(slots=True)
class CaptureInFlight:
    """A capture whose bytes may still be on their way."""

    arena: Arena
    ticket: ArenaTicket
    copying: AsyncCopy | None
    announce: Callable[[Exception | None], None]
    """Called once, when the ticket says what is in the arena, or when it never will."""
    ended: threading.Event = field(default_factory=threading.Event)

    def finish(self) -> None:
        """Wait for the bytes, then say on the ticket that they are there."""
        failure: Exception | None = None
        try:
            if self.copying is not None:
                self.copying.wait()
            self.arena.mark_captured(self.ticket)
        except Exception as error:  # a failed device, a full ticket: whoever waits for this version must hear of it
            failure = error
        try:
            self.announce(failure)
        except Exception as error:  # such as a trainer that is not served any more
            _log.exception("a capture could not be announced")
            with suppress(Exception):
                self.announce(error)
        finally:
            self.copying = None
            self.ended.set()

    def wait(self) -> None:
        """Return when the state that was captured may change."""
        copying = self.copying
        if copying is not None:
            copying.wait()


class StateCapture:
    """What a trainer has of shared memory. Not for several threads at once."""

    def __init__(self, folder: Path, tracker: SaveTracker, when_busy: Literal["wait", "refuse"]) -> None:
        self._folder, self._tracker, self._when_busy = folder, tracker, when_busy
        self._plan: CapturePlan | None = None
        self._arenas: list[Arena] = []
        self._targets: dict[int, tuple[CapturePlan, ArenaWriter]] = {}
        self._pinned: dict[int, PinnedBuffer] = {}
        self._in_flight: dict[int, CaptureInFlight] = {}
        self._queue: queue.SimpleQueue[CaptureInFlight | None] | None = None
        self.rank = -1

    @property
    def size(self) -> int:
        """Bytes of shared memory that the arenas take."""
        return sum(arena.size for arena in self._arenas)

    def mapped(self) -> dict[Path, mmap.mmap]:
        """The arenas as they are mapped here."""
        return {arena.files.shard: arena.buffer for arena in self._arenas if arena.buffer is not None}

    def lease(self, rank: int) -> None:
        """Two arenas of this rank: those that were left, if no living trainer holds them."""
        if rank == self.rank:
            return
        self.release_arenas()
        index = 0
        while len(self._arenas) < _ARENAS:
            arena = Arena.lease(self._folder, rank, index)
            if arena is not None:
                self._arenas.append(arena)
            index += 1
        self.rank = rank

    def release_arenas(self) -> None:
        """Give the arenas up; what is in them stays."""
        self.await_copies()
        if self._queue is not None:
            self._queue.put(None)
            self._queue = None
        self._targets.clear()
        for pinned in self._pinned.values():
            pinned.close()
        self._pinned.clear()
        for arena in self._arenas:
            arena.close()
        self._arenas, self.rank = [], -1

    def await_copies(self) -> None:
        """Wait until nothing is on its way into an arena."""
        for flight in list(self._in_flight.values()):
            flight.ended.wait()
        self._in_flight.clear()

    def reserve(self, plan: CapturePlan, rank: int) -> None:
        """Make both arenas now. One that holds a version from before is left alone until it may be overwritten."""
        self.lease(rank)
        made: list[Arena] = []
        try:
            for arena in self._arenas:
                if not arena.ticket.captured:
                    arena.reserve(plan.layout.size)
                    made.append(arena)
        except TierError:
            for arena in made:
                arena.files.remove()
            raise
        for arena in made:
            self._target(arena, plan)
        self._plan = plan
        _log.info("rank %d: two arenas of %.3f GB in %s", rank, plan.layout.size / 1e9, self._folder)

    def capture(
        self,
        state: object,
        plan: Callable[[], CapturePlan],
        record: Mapping[str, Any],
        ticket: Callable[[int], ArenaTicket],
        announce: Callable[[Arena, Exception | None], None],
    ) -> CaptureInFlight:
        """Copy a state into an arena.

        `plan` makes the plan for a state of a new form, `record` goes into the header, and `ticket` says of a shard of
        so many bytes what it is. `announce` is called when the arena holds it, perhaps from another thread.
        """
        chosen, gathered, header = self._gather(state, plan, record)
        size = chosen.layout.size
        arena = self._free_arena()
        arena.mark_empty()
        if arena.size != size:  # nothing may keep the old memory while the new is reserved
            self._targets.pop(arena.files.index, None)
            if (pinned := self._pinned.pop(arena.files.index, None)) is not None:
                pinned.close()
        arena.reserve(size)
        assert arena.buffer is not None
        copying = self._target(arena, chosen).copy(gathered)
        arena.buffer[: len(header)] = header
        flight = CaptureInFlight(arena, ticket(size), copying, lambda error: announce(arena, error))
        if copying is None:
            arena.mark_captured(flight.ticket)
            flight.ended.set()
            announce(arena, None)
        else:
            self._in_flight[arena.files.index] = flight
            self._finish_later(flight)
        return flight

    def _gather(
        self, state: object, make: Callable[[], CapturePlan], record: Mapping[str, Any]
    ) -> tuple[CapturePlan, GatheredState, bytes]:
        """Today's tensors and header, by the plan of the last save if it still holds."""
        if self._plan is not None:
            gathered = self._plan.gather(state)
            if gathered is not None and (header := self._plan.header(gathered, record)) is not None:
                return self._plan, gathered, header
        with gc_paused():
            self._plan = plan = make()
        gathered = plan.gather(state)
        header = plan.header(gathered, record) if gathered is not None else None
        if gathered is None or header is None:
            raise UsageError("the state changed while it was read: state_dict() gives something else each time")
        return plan, gathered, header

    def _target(self, arena: Arena, plan: CapturePlan) -> ArenaWriter:
        known = self._targets.get(arena.files.index)
        if known is None or known[0] is not plan:
            assert arena.buffer is not None
            known = self._targets[arena.files.index] = (
                plan,
                ArenaWriter(plan, arena.buffer, pinned=self._pin(arena, plan)),
            )
        return known[1]

    def _pin(self, arena: Arena, plan: CapturePlan) -> bool:
        """Whether GPUs can write to an arena by themselves; asked for once, whatever plans follow."""
        device = next((device for device in plan.cuda() if device is not None), None)
        if device is None:
            return False
        assert arena.buffer is not None
        known = self._pinned.get(arena.files.index)
        if known is None or known.buffer is not arena.buffer:
            if known is not None:
                known.close()
            known = self._pinned[arena.files.index] = PinnedBuffer(arena.buffer, device)
        return known.ok

    def _free_arena(self) -> Arena:
        """The arena to overwrite: one that holds nothing, else the one with the older version, once it may be."""
        for arena in self._arenas:
            flight = self._in_flight.get(arena.files.index)
            if not arena.ticket.captured and (flight is None or flight.ended.is_set()):
                return arena
        self._tracker.wait(self._tracker.knows_free, None)
        oldest_first = sorted(self._arenas, key=lambda arena: arena.ticket.version.age())

        def free() -> Arena | None:
            for arena in oldest_first:
                if arena.ticket.captured and self._tracker.is_free(arena.files.index, arena.ticket.generation):
                    return arena
            return None

        if free() is None and self._when_busy == "refuse":
            versions = " and ".join(str(arena.ticket.version) for arena in oldest_first)
            raise SaveRefused(f"both arenas are in use: {versions} are not finished. Save less often, or wait.")
        start = time.monotonic()
        while not self._tracker.wait(lambda: free() is not None, _SAY_SO_AFTER_S):
            waited = time.monotonic() - start
            _log.warning("rank %d: a save has waited %.0f s for an arena: storage or a rank is slow", self.rank, waited)
        found = free()
        assert found is not None
        return found

    def _finish_later(self, flight: CaptureInFlight) -> None:
        if self._queue is None:
            self._queue = queue.SimpleQueue()
            threading.Thread(target=_finish, args=(self._queue,), name="evergrad-capture", daemon=True).start()
        self._queue.put(flight)


def _finish(flights: queue.SimpleQueue[CaptureInFlight | None]) -> None:
    while (flight := flights.get()) is not None:
        flight.finish()
