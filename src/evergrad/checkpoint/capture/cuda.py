"""Copies from GPUs into an arena, most of them while training goes on.

| source                             | copied                                                                          |
|------------------------------------|---------------------------------------------------------------------------------|
| settled tensors                    | beside training, on a stream of their own; the next `optimizer.step()` waits    |
| small tensors                      | gathered on the device by the stream of training, copied from there beside it   |
| everything else                    | by the stream of training, so that whatever it starts later comes after         |

The host waits for none of this. Where the arena could not be registered with the driver, it waits for all of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from evergrad.checkpoint.capture.device import Device
from evergrad.checkpoint.capture.settled import SETTLED_BYTES, gate
from evergrad.checkpoint.layout import Entry

_RUN_BYTES = 32 << 20  # gathered at once: a device that is nearly full still has such a block
_PIECE_BYTES = 64 << 20  # a loss that is read meanwhile waits for one piece, not for a whole embedding
# Types that not every kernel takes go as numbers of the same width.
_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_USUAL = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex128, torch.complex64,
}  # fmt: skip

_devices: dict[torch.device, Device] = {}


def device_of(device: torch.device) -> Device:
    """The one `Device` of a device, with its stream."""
    if device not in _devices:
        _devices[device] = Device(device)
    return _devices[device]


class _Pairs(NamedTuple):
    """Where to, and where from."""

    places: list[torch.Tensor]
    sources: list[torch.Tensor]

    def add(self, places: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
        self.places.extend(places)
        self.sources.extend(sources)


@dataclass(slots=True)
class _Run:
    """Small tensors that lie side by side in the arena."""

    numbers: list[int]
    place: torch.Tensor
    """All of them, one after the other."""


@dataclass(slots=True)
class _Share:
    """What one device contributes to a shard."""

    device: Device
    runs: list[_Run] = field(default_factory=list)
    large: list[tuple[int, list[torch.Tensor], torch.Tensor]] = field(default_factory=list)
    """Number, its place in flat pieces, its place in its own shape."""


class Flight:
    """Copies on their way. `wait` may be called by several threads, and again."""

    def __init__(self) -> None:
        self._ends: list[tuple[Device, Any]] = []
        self._kept: list[Any] = []

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Their memory stays theirs until all has ended."""
        self._kept.append(tensors)

    def ends(self, device: Device, mark: Any) -> None:
        """A device's last copy is before this mark."""
        self._ends.append((device, mark))

    def wait(self) -> None:
        """Return when all bytes are in the arena; raises what CUDA says if they never will be."""
        try:
            for device, mark in self._ends:
                device.wait(mark)
        except Exception:
            self._let_go()
            raise
        self._let_go()

    def _let_go(self) -> None:
        gate.release([mark for _, mark in self._ends])
        self._kept = []


class DeviceCopies:
    """The entries of a shard whose tensors are on GPUs."""

    def __init__(
        self, whole: torch.Tensor, entries: Sequence[tuple[int, Entry, torch.device]], *, pinned: bool
    ) -> None:
        """Entries, each with its number and device, in the bytes of an arena; `pinned` if the driver knows these."""
        self._pinned = pinned
        self._shares: list[_Share] = []
        by_device: dict[torch.device, list[tuple[int, Entry]]] = defaultdict(list)
        for n, entry, device in entries:
            if entry.nbytes:
                by_device[device].append((n, entry))
        for device, members in by_device.items():
            self._shares.append(_share(whole, device_of(device), members))

    def start(self, tensors: Sequence[torch.Tensor], settled: frozenset[int]) -> Flight | None:
        """Begin to copy, out of the tensors of all entries; None if all has ended already."""
        flight = Flight()
        try:
            for share in self._shares:
                if self._pinned:
                    _begin(share, tensors, settled, flight)
                else:
                    _copy(share, tensors)
        except BaseException:
            # Nothing may write to the arena once nobody knows of it.
            for share in self._shares:
                with suppress(Exception):
                    share.device.drain()
            flight._let_go()
            raise
        return flight if self._pinned and self._shares else None


def _share(whole: torch.Tensor, device: Device, members: Sequence[tuple[int, Entry]]) -> _Share:
    share = _Share(device)
    run: list[tuple[int, Entry]] = []

    def end_run() -> None:
        if run:
            first, last = run[0][1], run[-1][1]
            place = whole[first.offset : last.offset + last.nbytes].view(_moved_as(first.dtype.torch))
            share.runs.append(_Run([n for n, _ in run], place))
            run.clear()

    for n, entry in members:
        if entry.nbytes < SETTLED_BYTES:
            if run:
                first, last = run[0][1], run[-1][1]
                size = entry.offset + entry.nbytes - first.offset
                if last.offset + last.nbytes != entry.offset or last.dtype != entry.dtype or size > _RUN_BYTES:
                    end_run()
            run.append((n, entry))
        else:
            flat = whole[entry.offset : entry.offset + entry.nbytes].view(_moved_as(entry.dtype.torch))
            share.large.append((n, [*torch.split(flat, _PIECE_BYTES // entry.dtype.itemsize)], flat.view(entry.shape)))
    end_run()
    return share


def _moved_as(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in _USUAL else _WIDTHS[dtype.itemsize]


def _begin(share: _Share, tensors: Sequence[torch.Tensor], settled: frozenset[int], flight: Flight) -> None:
    """Put the copies of one device on its streams."""
    device = share.device
    now, beside = device.current(), device.side()
    direct, later, staged = _Pairs([], []), _Pairs([], []), _Pairs([], [])
    _stage(share, tensors, staged, direct)
    for n, pieces, place in share.large:
        _add(later if n in settled else direct, tensors[n], pieces, place)
    flight.keep([*direct.sources, *later.sources, *staged.sources])
    device.copy(now, *direct)
    end = device.mark(now)
    if staged.places or later.places:
        device.follow(beside, end)
        device.keep_for(beside, staged.sources)
        device.copy(beside, *staged)
        device.copy(beside, *later)
        end = device.mark(beside)
    flight.ends(device, end)
    if later.places:
        gate.hold(device, end)


def _copy(share: _Share, tensors: Sequence[torch.Tensor]) -> None:
    """Copy what one device has, and wait for it."""
    pairs = _Pairs([], [])
    _stage(share, tensors, pairs, pairs)
    for n, pieces, place in share.large:
        _add(pairs, tensors[n], pieces, place)
    share.device.copy(share.device.current(), *pairs, wait=True)


def _stage(share: _Share, tensors: Sequence[torch.Tensor], staged: _Pairs, direct: _Pairs) -> None:
    """Gather small tensors on the device, by the stream of training; one by one where it has no memory for that."""
    for run in share.runs:
        members = [_shown(tensors[n]) for n in run.numbers]
        try:
            # A single tensor would come back as itself, and be changed before it is copied.
            alone = len(members) == 1
            gathered = members[0].reshape(-1).clone() if alone else torch._C._nn.flatten_dense_tensors(members)
        except torch.OutOfMemoryError:
            parts = torch.split(run.place, [member.numel() for member in members])
            direct.add((part.view(member.shape) for part, member in zip(parts, members, strict=True)), members)
        else:
            staged.add([run.place], [gathered])


def _add(pairs: _Pairs, tensor: torch.Tensor, pieces: list[torch.Tensor], place: torch.Tensor) -> None:
    source = _shown(tensor)
    if source.is_contiguous():
        flat = source.view(-1)
        pairs.add(pieces, torch.split(flat, pieces[0].numel()) if len(pieces) > 1 else [flat])
    else:
        pairs.add([place], [source])


def _shown(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory holds what it shows, of a type that every kernel takes."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.dtype in _USUAL else tensor.view(_WIDTHS[tensor.element_size()])
