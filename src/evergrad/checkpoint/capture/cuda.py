"""Copies from GPUs into an arena, most of them while training goes on.

| source                             | copied                                                                          |
|------------------------------------|---------------------------------------------------------------------------------|
| settled tensors                    | beside training, on a stream of their own; the next `optimizer.step()` waits    |
| small tensors                      | gathered on the device by the stream of training, copied from there beside it   |
| everything else                    | by the stream of training, so that whatever it starts later comes after         |

The host waits for none of this. Where the arena could not be registered with the driver, it waits for all of it.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from evergrad.checkpoint.capture.dtensor import local_tensor
from evergrad.checkpoint.shard_layout import ShardEntry
from evergrad.errors import SaveRefused
from evergrad.state.tree import MAX_DEPTH

# One GPU as a capture sees it: the stream that training uses now, one beside it, and marks on both.


class CudaDevice:
    """A CUDA device. For any thread: each one's own current device is left as it was."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side: torch.cuda.Stream | None = None

    def current(self) -> torch.cuda.Stream:
        """The stream on which whatever training starts next will run."""
        return torch.cuda.current_stream(self.device)

    def side(self) -> torch.cuda.Stream:
        """A stream that training does not use; always the same, so that copies into one arena keep their order."""
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._side

    def record_event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Where a stream is now."""
        # Who waits for it sleeps, and leaves the core to others.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait_event(self, stream: torch.cuda.Stream, mark: torch.cuda.Event) -> None:
        """What is put on the stream from here on runs after the mark; nobody waits on the host."""
        stream.wait_event(mark)

    def copy(
        self,
        stream: torch.cuda.Stream,
        places: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        *,
        wait: bool = False,
    ) -> None:
        """Put copies on a stream; with `wait`, return when they have ended."""
        if places:
            with torch.cuda.stream(stream):
                torch._foreach_copy_(list(places), list(sources), non_blocking=not wait)

    def record_stream(self, stream: torch.cuda.Stream, buffers: Sequence[torch.Tensor]) -> None:
        """The memory of these is not used for anything else before the stream has passed what is on it now."""
        for buffer in buffers:
            buffer.record_stream(stream)

    def synchronize_event(self, mark: torch.cuda.Event) -> None:
        """Return when the mark was passed; other threads run meanwhile."""
        # Without its device a new thread would set up the first one, and take memory there.
        with torch.cuda.device(self.device):
            mark.synchronize()

    def synchronize(self) -> None:
        """Return when everything that was ever put on the device has ended."""
        torch.cuda.synchronize(self.device)

    def is_recording(self) -> bool:
        """Whether the current stream is being recorded as a CUDA graph."""
        with torch.cuda.device(self.device):
            return bool(torch.cuda.is_current_stream_capturing())


def refuse_while_recording(devices: Sequence[CudaDevice]) -> None:
    """`SaveRefused` if what is put on a current stream would become a part of a CUDA graph instead of running."""
    for device in devices:
        if device.is_recording():
            raise SaveRefused(
                f"{device.device}: the current stream is being captured as a CUDA graph, and a save would become a "
                "part of it. Save before or after the capture."
            )


# Arenas that a GPU writes to by itself.
#
# Memory that the driver knows (`cudaHostRegister`) is copied to at the full speed of the bus, and without a thread
# that stands by. Making it known takes half a second a gigabyte, so it is done once for each arena, not for each
# save.

_log = logging.getLogger(__name__)
_PORTABLE = 1  # cudaHostRegisterPortable: for every GPU of this process
_told: set[str] = set()


class PinnedBuffer:
    """A mapped buffer that the driver knows, or would not take. Holds on to the buffer until `close`."""

    def __init__(self, buffer: mmap.mmap, device: torch.device) -> None:
        """Make a buffer known, by way of a device that is in use already. Never raises: see `ok`."""
        self.buffer: mmap.mmap | None = buffer
        whole = torch.frombuffer(buffer, dtype=torch.uint8)
        why = _apart(whole.data_ptr(), len(buffer), device)
        self.ok = why is None
        """Whether copies into it need not be waited for."""
        if why is not None and why not in _told:
            _told.add(why)
            _log.warning(
                "an arena of %.3f GB cannot be registered with the CUDA driver (%s): saves from the GPU work, but "
                "make training wait for the copy",
                len(buffer) / 1e9,
                why,
            )
        # The memory must not be unmapped before the driver has let go of it.
        self._release = weakref.finalize(self, _release, whole, device, os.getpid(), self.ok)
        self._release.atexit = False  # the driver itself lets go of everything

    def close(self) -> None:
        """Let go of the buffer; nothing may be on its way into it."""
        self.ok = False
        self.buffer = None
        self._release()


def _release(whole: torch.Tensor, device: torch.device, pid: int, known: bool) -> None:
    if not known or os.getpid() != pid:  # a forked child has neither the memory nor the driver
        return
    why = _guarded(lambda: _unregister(whole.data_ptr(), device))
    if why is not None:
        _log.warning("an arena cannot be taken back from the CUDA driver (%s): its memory stays in use", why)


def _apart(address: int, size: int, device: torch.device) -> str | None:
    """Register from a thread of its own; why not, or None.

    The driver notes a refusal as this thread's last error, and torch would raise it at the next kernel it launches.
    """
    found: list[str | None] = []
    thread = threading.Thread(target=lambda: found.append(_guarded(lambda: _register(address, size, device))))
    thread.start()
    thread.join()
    return found[0]


def _guarded(call: Callable[[], str | None]) -> str | None:
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _register(address: int, size: int, device: torch.device) -> str | None:
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = runtime.cudaHostRegister(address, size, _PORTABLE)
        return None if int(code) == 0 else f"{int(code)}: {runtime.cudaGetErrorString(code)}"


def _unregister(address: int, device: torch.device) -> str | None:
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = runtime.cudaHostUnregister(address)
        return None if int(code) == 0 else f"{int(code)}: {runtime.cudaGetErrorString(code)}"


# Tensors that nothing but `optimizer.step()` changes, and how a step waits until they have been copied.
#
# Such tensors, parameters and what an optimizer remembers of them, are most of a training state. They may be read
# through the forward and the backward pass that follow a save; only the next step must come after the copy.
# Everything else may be changed by the very next kernel: buffers by a forward pass, averaged weights by whoever
# averages.
#
# Only torch's own optimizers are relied on. Others change parameters outside of `step`, too: between the two passes
# of a sharpness-aware step, or when a schedule-free one goes from training to evaluation.

STEP_ONLY_MIN_BYTES = 64 << 10
"""Smaller tensors are not worth a wait: many of them are copied at once, before training goes on."""

DeviceEvent = tuple[CudaDevice, Any]
"""A device, and a mark on its side stream behind copies of settled tensors."""


class OptimizerFence:
    """What every optimizer's next step has to come after. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._installed = False
        self.held: tuple[DeviceEvent, ...] = ()
        """Replaced, never changed: a step reads it without the lock."""
        self.replayed = False
        """Whether some step became part of a CUDA graph: replayed, it passes no gate."""

    def install(self) -> None:
        """Be asked before every step of every optimizer in this process; done once."""
        with self._lock:
            if not self._installed:
                register_optimizer_step_pre_hook(_before_step)
                self._installed = True

    def add(self, device: CudaDevice, mark: Any) -> None:
        """From now on steps come after this mark."""
        with self._lock:
            self.held = (*self.held, (device, mark))

    def remove(self, marks: Sequence[Any]) -> None:
        """These marks were passed."""
        with self._lock:
            self.held = tuple(held for held in self.held if not any(held[1] is mark for mark in marks))

    def before_step(self) -> None:
        """Called before a step: the streams that it will use wait, the host does not."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # nor is it in a forked child
            return
        if torch.cuda.is_current_stream_capturing():  # where a graph begins the device has ended all else
            self.replayed = True
            return
        for device, mark in self.held:
            device.wait_event(device.current(), mark)


optimizer_fence = OptimizerFence()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    optimizer_fence.before_step()


# As torch.compiler.disable does, which would import the compiler: a compiled step calls this, and never traces it.
_before_step._torchdynamo_disable = True  # type: ignore[attr-defined]


class StepOnlyTensors:
    """Which of a plan's tensors are settled. Decided once, and again when an optimizer or a tensor is another one."""

    def __init__(self) -> None:
        optimizer_fence.install()
        self._paths: list[tuple[Any, ...]] = []
        self._seen: list[tuple[weakref.ref[torch.optim.Optimizer], list[tuple[int, bool]]]] | None = None
        self._chosen: list[int] = []
        self._addresses: list[int] = []

    def find(self, state: object, tensors: Sequence[torch.Tensor]) -> frozenset[int]:
        """The numbers of those of the tensors that only a step of an optimizer in the state will change."""
        if optimizer_fence.replayed:
            return frozenset()
        if not self._are_as_before(state) or [tensors[n].data_ptr() for n in self._chosen] != self._addresses:
            self._look(state, tensors)
        return frozenset(self._chosen)

    def _are_as_before(self, state: object) -> bool:
        if self._seen is None:
            return False
        for path, (known, groups) in zip(self._paths, self._seen, strict=True):
            found: Any = state
            try:
                for key in path:
                    found = found[key]
            except (LookupError, TypeError):
                return False
            optimizer = known()
            if optimizer is None or found is not optimizer or _groups(optimizer) != groups:
                return False
        return True

    def _look(self, state: object, tensors: Sequence[torch.Tensor]) -> None:
        found = [(path, optimizer) for path, optimizer in _optimizers(state, (), 0) if _is_relied_on(optimizer)]
        self._paths = [path for path, _ in found]
        self._seen = [(weakref.ref(optimizer), _groups(optimizer)) for _, optimizer in found]
        places = {place for _, optimizer in found for place in _places(optimizer)}
        self._chosen = [
            n
            for n, tensor in enumerate(tensors)
            if tensor.nbytes >= STEP_ONLY_MIN_BYTES
            and not (tensor.is_conj() or tensor.is_neg())
            and _place(tensor) in places
        ]
        self._addresses = [tensors[n].data_ptr() for n in self._chosen]


def _optimizers(value: object, path: tuple[Any, ...], depth: int) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every optimizer in the containers of a state, with the keys that lead to it."""
    if isinstance(value, torch.optim.Optimizer):
        yield path, value
    elif depth < MAX_DEPTH and isinstance(value, Mapping):
        for key, child in value.items():
            yield from _optimizers(child, (*path, key), depth + 1)
    elif depth < MAX_DEPTH and isinstance(value, (list, tuple)):
        for index, child in enumerate(value):
            yield from _optimizers(child, (*path, index), depth + 1)


def _is_relied_on(optimizer: torch.optim.Optimizer) -> bool:
    kind = type(optimizer)
    ours = kind.__module__.startswith("torch.optim.") and getattr(kind.step, "hooked", False)
    # A step that may be captured in a CUDA graph is replayed without any hook.
    return ours and not any(capturable for _, capturable in _groups(optimizer))


def _groups(optimizer: torch.optim.Optimizer) -> list[tuple[int, bool]]:
    return [(len(group["params"]), bool(group.get("capturable"))) for group in optimizer.param_groups]


def _places(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, ...]]:
    """Where an optimizer's parameters lie, and what it remembers of them. Not its options: schedulers change these."""
    for group in optimizer.param_groups:
        yield from (_place(parameter) for parameter in group["params"])
    for memory in list(optimizer.state.values()):
        if isinstance(memory, dict):
            yield from (_place(value) for value in memory.values() if isinstance(value, torch.Tensor))


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor lies and how: who lies exactly there is the same tensor. Of one that is cut, the piece here."""
    try:
        local = local_tensor(tensor)
        return local.device, local.data_ptr(), local.dtype, tuple(local.shape), local.stride()
    except (RuntimeError, ValueError):  # sparse, made of others, not made yet: nothing in a shard lies there
        return (id(tensor),)


_RUN_BYTES = 32 << 20  # gathered at once: a device that is nearly full still has such a block
_PIECE_BYTES = 64 << 20  # a loss that is read meanwhile waits for one piece, not for a whole embedding
# Types that not every kernel takes go as numbers of the same width.
_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_USUAL = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex128, torch.complex64,
}  # fmt: skip

_devices: dict[torch.device, CudaDevice] = {}


def device_of(device: torch.device) -> CudaDevice:
    """The one `CudaDevice` of a device, with its stream."""
    if device not in _devices:
        _devices[device] = CudaDevice(device)
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

    device: CudaDevice
    runs: list[_Run] = field(default_factory=list)
    large: list[tuple[int, list[torch.Tensor], torch.Tensor]] = field(default_factory=list)
    """Number, its place in flat pieces, its place in its own shape."""


class DeviceCopyInFlight:
    """Copies on their way. `wait` may be called by several threads, and again."""

    def __init__(self) -> None:
        self._ends: list[tuple[CudaDevice, Any]] = []
        self._kept: list[Any] = []

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Their memory stays theirs until all has ended."""
        self._kept.append(tensors)

    def ends(self, device: CudaDevice, mark: Any) -> None:
        """A device's last copy is before this mark."""
        self._ends.append((device, mark))

    def wait(self) -> None:
        """Return when all bytes are in the arena; raises what CUDA says if they never will be."""
        try:
            for device, mark in self._ends:
                device.synchronize_event(mark)
        except Exception:
            self._let_go()
            raise
        self._let_go()

    def _let_go(self) -> None:
        optimizer_fence.remove([mark for _, mark in self._ends])
        self._kept = []


class DeviceCopies:
    """The entries of a shard whose tensors are on GPUs."""

    def __init__(
        self, whole: torch.Tensor, entries: Sequence[tuple[int, ShardEntry, torch.device]], *, pinned: bool
    ) -> None:
        """Entries, each with its number and device, in the bytes of an arena; `pinned` if the driver knows these."""
        self._pinned = pinned
        self._shares: list[_Share] = []
        by_device: dict[torch.device, list[tuple[int, ShardEntry]]] = defaultdict(list)
        for n, entry, device in entries:
            if entry.nbytes:
                by_device[device].append((n, entry))
        for device, members in by_device.items():
            self._shares.append(_share(whole, device_of(device), members))

    def start(self, tensors: Sequence[torch.Tensor], step_only: frozenset[int]) -> DeviceCopyInFlight | None:
        """Begin to copy, out of the tensors of all entries; None if all has ended already."""
        flight = DeviceCopyInFlight()
        try:
            for share in self._shares:
                if self._pinned:
                    _begin(share, tensors, step_only, flight)
                else:
                    _copy(share, tensors)
        except BaseException:
            # Nothing may write to the arena once nobody knows of it.
            for share in self._shares:
                with suppress(Exception):
                    share.device.synchronize()
            flight._let_go()
            raise
        return flight if self._pinned and self._shares else None


def _share(whole: torch.Tensor, device: CudaDevice, members: Sequence[tuple[int, ShardEntry]]) -> _Share:
    share = _Share(device)
    run: list[tuple[int, ShardEntry]] = []

    def end_run() -> None:
        if run:
            first, last = run[0][1], run[-1][1]
            place = whole[first.offset : last.offset + last.nbytes].view(_moved_as(first.dtype.torch))
            share.runs.append(_Run([n for n, _ in run], place))
            run.clear()

    for n, entry in members:
        if entry.nbytes < STEP_ONLY_MIN_BYTES:
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


def _begin(
    share: _Share, tensors: Sequence[torch.Tensor], step_only: frozenset[int], flight: DeviceCopyInFlight
) -> None:
    """Put the copies of one device on its streams."""
    device = share.device
    now, beside = device.current(), device.side()
    direct, later, staged = _Pairs([], []), _Pairs([], []), _Pairs([], [])
    _stage(share, tensors, staged, direct)
    for n, pieces, place in share.large:
        _add(later if n in step_only else direct, tensors[n], pieces, place)
    flight.keep([*direct.sources, *later.sources, *staged.sources])
    device.copy(now, *direct)
    end = device.record_event(now)
    if staged.places or later.places:
        device.wait_event(beside, end)
        device.record_stream(beside, staged.sources)
        device.copy(beside, *staged)
        device.copy(beside, *later)
        end = device.record_event(beside)
    flight.ends(device, end)
    if later.places:
        optimizer_fence.add(device, end)


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
