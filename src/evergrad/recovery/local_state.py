"""What only one rank has: its random numbers, its buffers; taken, put back, and kept by the neighbour.

A joiner that takes a dead rank's place goes on exactly as that rank would have, because the next rank holds what it had
at the last point that all have passed. The exchange is part of passing a point, so whoever has passed one knows that
everyone's is held. It is one message of a few kilobytes, and the buffers.
"""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from evergrad.errors import StateError, UsageError
from evergrad.recovery.process_group import Group, swap
from evergrad.recovery.state_transfer import pack, unpack
from evergrad.state import flatten

_NUMPY = "MT19937"
_WORDS = 624
_MANY_KINDS = 64
_TORCH_NEXT = 16
"""Index of the position within torch's CPU generator state."""


class RngSnapshot:
    """The generators of this process at one moment: Python's, NumPy's, torch's, and CUDA's where it was started."""

    def __init__(self) -> None:
        """Read them all; that advances none."""
        self.torch = torch.get_rng_state()
        self.numpy: Any = np.random.get_state()
        self.python = random.getstate()
        started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self.cuda = torch.cuda.get_rng_state_all() if started else []

    def restore(self) -> None:
        """Set them all to what they were."""
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.python)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)

    def equals(self, other: RngSnapshot) -> bool:
        """True if all generators are in the same states."""
        (_, words, *rest), (_, others, *other_rest) = self.numpy, other.numpy
        return (
            torch.equal(self.torch, other.torch)
            and self.python == other.python
            and rest == other_rest
            and np.array_equal(words, others)
            and len(self.cuda) == len(other.cuda)
            and all(torch.equal(one, two) for one, two in zip(self.cuda, other.cuda, strict=True))
        )

    def positions(self) -> list[int]:
        """Return the number of draws from each generator; for a Mersenne Twister, modulo the length of its state."""
        found = [int(self.torch[_TORCH_NEXT : _TORCH_NEXT + 8].view(torch.int64)) % _WORDS]
        found += [int(self.numpy[2]) % _WORDS, int(self.python[1][-1]) % _WORDS]
        return found + [int(state[-8:].view(torch.int64)) for state in self.cuda]

    def parts(self) -> list[torch.Tensor]:
        """As tensors of bytes, whose sizes never change."""
        _, words, position, has_gauss, gauss = self.numpy
        version, state, next_gauss = self.python
        numpy_ = np.concatenate([words.astype("<u8"), np.array([position, has_gauss], "<u8")]).tobytes()
        python = np.array([version, *state, next_gauss is not None], "<u8").tobytes()
        floats = np.array([gauss, next_gauss or 0.0], "<f8").tobytes()
        return [self.torch, *self.cuda, torch.frombuffer(bytearray(numpy_ + python + floats), dtype=torch.uint8)]

    @classmethod
    def of_parts(cls, parts: list[torch.Tensor]) -> RngSnapshot:
        """Back from tensors of bytes."""
        made = cls.__new__(cls)
        made.torch, *made.cuda, rest = (part.clone() for part in parts)
        raw = rest.numpy().tobytes()
        words = np.frombuffer(raw[: 8 * (2 * _WORDS + 5)], "<u8")
        gauss, next_gauss = (float(value) for value in np.frombuffer(raw[8 * (2 * _WORDS + 5) :], "<f8"))
        head, position, has_gauss = words[:_WORDS].astype(np.uint32), int(words[_WORDS]), int(words[_WORDS + 1])
        made.numpy = (_NUMPY, head, position, has_gauss, gauss)
        version, *state, has_next = (int(word) for word in words[_WORDS + 2 :])
        made.python = (version, tuple(state), next_gauss if has_next else None)
        return made


class LocalState:
    """What this rank alone has: its generators, the buffers of what it trains, a loader that only it knows."""

    def __init__(self, buffers: Iterable[torch.Tensor] = ()) -> None:
        self._buffers = list(buffers)
        self.loader: Any = None
        """A stateful loader whose place in the data no other rank knows."""
        self._has_run = False
        """True if a module with buffers has run in training mode since the last `take`."""
        self._taken: tuple[torch.Tensor, RngSnapshot] | None = None
        self._seen: RngSnapshot | None = None

    def watch(self, model: nn.Module) -> None:
        """Notice when the buffers of a model may have changed: torch does not count all changes of them."""
        for module in model.modules():
            if next(module.buffers(recurse=False), None) is not None:
                module.register_forward_pre_hook(self._note_run)

    def _note_run(self, module: nn.Module, _: object) -> None:
        self._has_run |= module.training

    def changed_since(self, taken: torch.Tensor) -> torch.Tensor | None:
        """All of it as one tensor, if it is not what was taken then; else None."""
        is_last = self._taken is not None and self._taken[0] is taken and not self._has_run
        # Without looking at every buffer in every step.
        self._seen = RngSnapshot()
        if is_last and self._taken is not None and self._taken[1].equals(self._seen):
            return None
        now = self.capture()
        return None if torch.equal(now, taken) else now

    def capture(self) -> torch.Tensor:
        """All of it as one tensor of bytes, on the CPU."""
        self._has_run, self._seen = False, RngSnapshot()
        random_ = self._seen
        parts = random_.parts()
        parts += _together([_bytes(buffer) for buffer in self._buffers])
        if self.loader is not None:
            parts.append(pack(self.loader.state_dict()))
        taken = torch.cat(parts)
        self._taken = taken, random_
        return taken

    def positions(self) -> list[int]:
        """Return the number of draws from each generator at the last look."""
        return (self._seen or RngSnapshot()).positions()

    def restore(self, taken: torch.Tensor) -> Any:
        """Make this process what another one was when it took this; the state of its loader, if it had one."""
        like = RngSnapshot().parts()
        sizes = [part.numel() for part in like] + [buffer.nbytes for buffer in self._buffers]
        rest = taken.numel() - sum(sizes)
        assert rest >= 0, f"{taken.numel()} bytes of another rank's, and {sum(sizes)} are expected"
        *parts, loader = torch.split(taken, [*sizes, rest])
        RngSnapshot.of_parts(parts[: len(like)]).restore()
        with torch.no_grad():
            for buffer, part in zip(self._buffers, parts[len(like) :], strict=True):
                if buffer.numel():
                    buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))
        return unpack(loader) if rest else None


class DrawCounts:
    """Counts of random numbers that this rank draws in each step, to find draws that only some ranks make.

    An evaluation on rank 0 alone is such a thing. A spare that takes rank 0's place does it if the script asks
    `job.rank`, and not if it has kept a rank from its beginning. Numbers are told modulo the length of a generator's
    state, so this finds no difference of that many; and none where ranks draw differently in every step.
    """

    def __init__(self) -> None:
        self._first: list[int] | None = None
        self._last: tuple[int, list[int]] | None = None
        """The epoch and the positions of the generators before the last step."""
        self._kinds: dict[tuple[int, ...], _DrawPattern] = {}
        """Numbers of steps, by the number of draws in them."""
        self._num_steps = self._num_epochs = 0
        self._between = 0
        """Number of times that anything was drawn between two epochs."""
        self._inherited = 0
        self._lost: Mapping[str, Any] = {}
        """The last posted counts of the lost rank whose place this process has."""
        self._then: dict[int, list[int]] = {}
        """The counts of old members that had drawn other numbers by then, and not more often."""

    def note(self, epoch: int, positions: list[int]) -> dict[str, Any]:
        """Note the positions of the generators before a step of this epoch; what is posted of them."""
        self._first = self._first or positions
        if self._last is not None:
            last_epoch, last = self._last
            drawn = tuple(_difference(positions, last))
            if epoch != last_epoch:
                self._num_epochs, self._between = self._num_epochs + 1, self._between + any(drawn)
            else:
                self._num_steps += 1
                if len(self._kinds) < _MANY_KINDS:
                    self._kinds.setdefault(drawn, _DrawPattern()).note(self._num_steps)
        self._last = epoch, positions
        unusual = sorted(self._kinds.values(), key=lambda kind: kind.count)[:-1]
        next_one = min((kind.last + kind.gap if kind.gap else 0 for kind in unusual), default=None)
        return {
            "first": self._first,
            "drawn": _difference(positions, self._first),
            "unusual": self._inherited + self._between + sum(kind.count for kind in unusual),
            "between": self._between > 0,
            "due_in": None if next_one is None else max(0, next_one - self._num_steps),
        }

    def inherit(self, lost: Mapping[str, Any], others: Mapping[int, Mapping[str, Any]]) -> None:
        """This process takes a lost one's place; compare what that one and the old members have posted."""
        if "drawn" not in lost:
            return
        self._first, self._inherited, self._lost = lost["first"], lost["unusual"], lost
        self._then = {
            uid: other["drawn"]
            for uid, other in others.items()
            if other["point"] == lost["point"]
            and other["drawn"] != lost["drawn"]
            and other["unusual"] <= lost["unusual"]
        }

    def is_like_others(self, mine: Mapping[str, Any], others: Mapping[int, Mapping[str, Any]]) -> bool:
        """Return True if this process has since drawn as many as an old member that differed from the lost rank before.

        Not if the lost rank would not have drawn anything unusual either.
        """
        if not self._then or "drawn" not in mine:
            return False
        due_in = self._lost["due_in"]
        is_due = due_in is not None and self._num_steps >= due_in
        if not is_due and not (self._lost["between"] and self._num_epochs):
            return False
        since = _difference(mine["drawn"], self._lost["drawn"])
        return any(
            _difference(others[uid]["drawn"], then) == since
            for uid, then in self._then.items()
            if uid in others and others[uid]["point"] == mine["point"]
        )


@dataclass(slots=True)
class _DrawPattern:
    """Steps that draw equally many random numbers."""

    count: int = 0
    last: int = 0
    gap: int = 0
    """The fewest steps from one to the next; 0: not known."""

    def note(self, number: int) -> None:
        if self.count:
            self.gap = min(self.gap or number, number - self.last)
        self.count, self.last = self.count + 1, number


def _difference(one: list[int], other: list[int]) -> list[int]:
    return [(a - b) % _WORDS for a, b in zip(one, other, strict=False)]


class NeighbourState:
    """What the rank before this one had: at the point before the step under way, which all have passed, and since."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[int, torch.Tensor]] = {}

    def exchange(
        self,
        group: Group,
        point: int,
        local_state: torch.Tensor,
        before_uid: int,
        *,
        since: int | None = None,
        sizes_vary: bool,
    ) -> None:
        """Send what this rank has to the next one, and keep what the one before sends. `GroupBroken` if that fails.

        What was kept at points before `since`, the one before this by default, is never asked for again.
        """
        size = local_state.numel()
        if sizes_vary:
            length = torch.zeros(1, dtype=torch.int64)
            swap(group, torch.tensor([size]), group.after, length, group.before)
            size = int(length)
        kept = torch.empty(0)
        for old in [old for old in self._kept if old < (point - 1 if since is None else since)]:
            kept = self._kept.pop(old)[1]
        if kept.numel() != size or kept.dtype != torch.uint8:
            kept = torch.empty(size, dtype=torch.uint8)
        swap(group, local_state, group.after, kept, group.before)
        self._kept[point] = before_uid, kept

    def find(self, uid: int, point: int) -> torch.Tensor | None:
        """What this process had when this point was passed; None if that is not here."""
        owner, kept = self._kept.get(point, (None, None))
        return kept if owner == uid else None

    def reassign(self, uid: int, heir: int) -> None:
        """Another process has taken the place of one, with what is kept here: it is that one's now."""
        for point, (owner, kept) in self._kept.items():
            if owner == uid:
                self._kept[point] = heir, kept


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _together(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """On the CPU; from a device in one piece, since every copy waits for it."""
    devices = {part.device for part in parts}
    if len(devices) == 1 and devices != {torch.device("cpu")}:
        return [torch.cat(parts).cpu()]
    return [part.cpu() for part in parts]


# What a step can change before it is applied, as it was at the step's beginning, to be put back if it is redone.
#
# Parameters and optimizer state are not here: nothing but an applied step changes them.


class Snapshot:
    """Buffers, generators and tracked things at one moment; taken again and again into the same memory."""

    def __init__(self, buffers: Sequence[torch.Tensor], *, device: str | None = None) -> None:
        """Copies are on this device, or else beside what is copied."""
        self._buffers = list(buffers)
        self._copies = [torch.empty_like(buffer, device=device) for buffer in self._buffers]
        self._randomness: RngSnapshot | None = None
        self._tracked: dict[str, Any] = {}

    def capture(self, tracked: Mapping[str, Any]) -> None:
        """Note how things are."""
        with torch.no_grad():
            for kept, buffer in zip(self._copies, self._buffers, strict=True):
                kept.copy_(buffer)
        self._tracked = {name: copy.deepcopy(thing.state_dict()) for name, thing in tracked.items()}
        self._randomness = RngSnapshot()

    def restore(self, tracked: Mapping[str, Any], *, randomness: bool = True) -> None:
        """Make things as they were; without `randomness` the generators are left alone."""
        assert self._randomness is not None, "nothing was taken"
        with torch.no_grad():
            for kept, buffer in zip(self._copies, self._buffers, strict=True):
                buffer.copy_(kept)
        for name, thing in tracked.items():
            if name in self._tracked:
                thing.load_state_dict(copy.deepcopy(self._tracked[name]))
            if is_scaler(thing):
                reset_scaler(thing)
        if randomness:
            self._randomness.restore()


def checked_tracked(things: Mapping[str, Any]) -> dict[str, Any]:
    """Things that can be tracked: with `state_dict` and `load_state_dict`, and a state that can be sent."""
    for name, thing in things.items():
        if not all(callable(getattr(thing, method, None)) for method in ("state_dict", "load_state_dict")):
            raise UsageError(
                f"job.track({name}=…): a {type(thing).__qualname__} has no state_dict and load_state_dict, so it can "
                "be neither rolled back nor given to a joiner"
            )
        try:
            flatten(thing.state_dict())
        except StateError as error:
            raise UsageError(f"job.track({name}=…): its state cannot be given to a joiner: {error}") from None
    return dict(things)


def is_scaler(thing: object) -> bool:
    """Whether this is a gradient scaler of AMP, or works like one."""
    return all(callable(getattr(thing, method, None)) for method in ("scale", "unscale_", "step", "update"))


def reset_scaler(scaler: Any) -> None:
    """Let a scaler forget that it has unscaled this step's gradients: they will come again."""
    if hasattr(scaler, "_per_optimizer_states"):
        from torch.amp.grad_scaler import _refresh_per_optimizer_state

        scaler._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
