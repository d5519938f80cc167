"""Guards what only one rank has: its buffers, between a point and the step after it, and its neighbour's copy.

Replicas of a buffer need not be alike, so ranks cannot be compared. But nothing changes a buffer between the point at
the end of a step and the next forward pass, and at the point there are four witnesses of it:

    digest at the point · the buffer itself · the bytes that were sent to the neighbour · what the neighbour holds

Two that agree are right; whichever does not is named and healed from one that does. A buffer that the script has
changed since (torch counts that) is no witness. Of generators and of a loader's place only the copies are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from evergrad._digest import bytes_of, digest_bytes
from evergrad.records import Check, record_from_json, record_to_json
from evergrad.recovery.guard.replicas import SIZE, GuardResult, ReplicaDifference, change_between, gather_json
from evergrad.recovery.local_state import NeighbourState, RngSnapshot
from evergrad.recovery.process_group import Group, swap

_NOTHING, _ASK, _GIVE = 0, 1, 2


@dataclass(slots=True)
class _PointRecord:
    """What a rank had at a point."""

    point: int
    taken: torch.Tensor
    """The bytes that the neighbour was sent."""
    digests: list[bytes]
    versions: list[int]


@dataclass(slots=True)
class LocalStateGuard:
    """One rank's. `note` at every point that is passed; `is_sound` as often as one likes; `check` together with all."""

    buffers: Mapping[str, torch.Tensor]
    """By name, in the order in which `Own` takes them."""
    record_event: Callable[..., None] = lambda *_, **__: None
    _noted: _PointRecord | None = field(default=None, init=False)

    def note(self, point: int, taken: torch.Tensor) -> None:
        """The point is about to be passed with this, from `Own.take()`: nobody may change it from here on."""
        spans = self._spans(taken.numel())
        digests = [_digest(taken[begin:end]) for begin, end in spans.values()]
        self._noted = _PointRecord(point, taken, digests, [buffer._version for buffer in self.buffers.values()])

    def forget(self) -> None:
        """What was noted does not hold any more: the job went back, or another rank's buffers came."""
        self._noted = None

    def is_sound(self) -> bool:
        """Whether every buffer is what it was at the last point, as far as this rank alone can tell; cheap."""
        noted = self._noted
        return noted is None or not any(
            _digest(bytes_of(buffer)) != noted.digests[number + 1]
            for number, buffer in enumerate(self.buffers.values())
            if buffer._version == noted.versions[number]
        )

    def check(self, group: Group, neighbour_state: NeighbourState, before_uid: int, *, step: int) -> GuardResult:
        """Compare all witnesses, and heal. Every rank calls it; `before_uid` is whom `keeping` keeps for.

        `unknown` if nothing was noted; `GroupBroken` if the group breaks.
        """
        everyone = gather_json(group, -1 if self._noted is None else self._noted.point)
        if self._noted is None or len({*everyone}) > 1:
            return GuardResult(Check.UNKNOWN, step, why="buffers: no point that all ranks have noted")
        noted = self._noted
        kept = neighbour_state.find(before_uid, noted.point) if group.size > 1 else None
        theirs = self._swap_digests(group, kept)
        actions, mine = self._judge(group.rank, theirs)
        mine += self._mend(group, kept, actions, self._swap_actions(group, actions))
        rows = [row for rows in gather_json(group, [record_to_json(each) for each in mine]) for row in rows]
        differences = tuple(record_from_json(ReplicaDifference, row) for row in rows)
        for each in mine:
            self.record_event("corruption_found", step=step, **each.to_json())
        if not differences:
            return GuardResult(Check.OK, step)
        status = Check.DEGRADED if all(each.healed for each in differences) else Check.FAILED
        first = differences[0]
        return GuardResult(status, step, differences, why=f"{first.path} on rank {first.rank}: {first.what}")

    def _spans(self, total: int) -> dict[str, tuple[int, int]]:
        """Where each thing lies in what is taken: generators, buffers, and a loader's place if there is one."""
        sizes = {name: buffer.nbytes for name, buffer in self.buffers.items()}
        place = _size_of_generators()
        found = {"generators": (0, place)}
        for name, size in sizes.items():
            found[name] = place, place + size
            place += size
        return found | ({"loader": (place, total)} if place < total else {})

    def _judge(self, rank: int, theirs: Sequence[bytes] | None) -> tuple[list[int], list[ReplicaDifference]]:
        """For each thing what is to be done with the neighbour, and what has been found and healed without it."""
        assert self._noted is not None
        noted, found, spans = self._noted, list[ReplicaDifference](), self._spans(self._noted.taken.numel())
        actions = [_NOTHING] * len(spans)
        for number, (name, (begin, end)) in enumerate(spans.items()):
            copy, buffer = noted.taken[begin:end], self._unchanged(name, number)
            witnesses = [noted.digests[number], _digest(copy)]
            witnesses += [_digest(bytes_of(buffer))] if buffer is not None else []
            witnesses += [theirs[number]] if theirs is not None else []
            right, count = Counter(witnesses).most_common(1)[0]
            if count == len(witnesses):
                continue
            if count < 2:
                found.append(ReplicaDifference(rank, name, "no two of its copies agree"))
                continue
            if noted.digests[number] != right:
                noted.digests[number] = right
                found.append(ReplicaDifference(rank, name, "the digest at the point was wrong", healed=True))
            if _digest(copy) != right and buffer is not None and _digest(bytes_of(buffer)) == right:
                copy.copy_(bytes_of(buffer))
                found.append(ReplicaDifference(rank, name, "the copy of it here was wrong", healed=True))
            elif _digest(copy) != right:
                actions[number] = _ASK
                continue
            found += self._heal(rank, name, buffer, copy, right)
            if theirs is not None and theirs[number] != right:
                actions[number] = _GIVE
        return actions, found

    def _heal(
        self, rank: int, name: str, buffer: torch.Tensor | None, copy: torch.Tensor, right: bytes
    ) -> list[ReplicaDifference]:
        """Put a right copy into a buffer, if that is wrong."""
        if buffer is None or _digest(bytes_of(buffer)) == right:
            return []
        change = change_between(copy, bytes_of(buffer), buffer.dtype)
        # As a flipped bit came: unseen by torch's count, so that the buffer can still be judged.
        with torch.no_grad(), _unsafe_preserve_version_counter(buffer):
            buffer.copy_(copy.clone().view(buffer.dtype).view(buffer.shape))
        return [ReplicaDifference(rank, name, str(change), change, healed=_digest(bytes_of(buffer)) == right)]

    def _mend(
        self,
        group: Group,
        kept: torch.Tensor | None,
        actions: Sequence[int],
        asked: Sequence[int],
    ) -> list[ReplicaDifference]:
        """Give the neighbour what it holds wrongly, and get from it what is wrong here."""
        assert self._noted is not None
        after, before = group.after, group.before
        sent, found = [], list[ReplicaDifference]()
        # A loader's place may take more bytes on one rank than on another.
        mine = [self._noted.taken[begin:end] for begin, end in self._spans(self._noted.taken.numel()).values()]
        held = [] if kept is None else [kept[begin:end] for begin, end in self._spans(kept.numel()).values()]
        for number, (action, asks) in enumerate(zip(actions, asked, strict=True)):
            if action == _GIVE:
                sent.append(group.send(mine[number].clone(), after))
            if asks == _ASK:
                sent.append(group.send(held[number].clone(), before))
        for number, name in enumerate(self._spans(self._noted.taken.numel())):
            if asked[number] == _GIVE:
                _receive_into(group, held[number], before)
                found.append(
                    ReplicaDifference(group.rank, name, f"what is held for rank {before} was wrong", healed=True)
                )
            if actions[number] == _ASK:
                _receive_into(group, mine[number], after)
                found.append(ReplicaDifference(group.rank, name, "the copy of it here was wrong", healed=True))
                buffer = self._unchanged(name, number)
                found += self._heal(group.rank, name, buffer, mine[number], self._noted.digests[number])
        for ticket in sent:
            ticket.wait()
        return found

    def _unchanged(self, name: str, number: int) -> torch.Tensor | None:
        """The buffer of this name, unless the script has changed it since the point."""
        assert self._noted is not None
        buffer = self.buffers.get(name)
        return buffer if buffer is not None and buffer._version == self._noted.versions[number - 1] else None

    def _swap_digests(self, group: Group, kept: torch.Tensor | None) -> list[bytes] | None:
        """The digests of what the next rank holds of this one's; None if it holds nothing."""
        if group.size == 1:
            return None
        assert self._noted is not None
        count = len(self._noted.digests)
        held = b"" if kept is None else b"".join(_digest(kept[a:b]) for a, b in self._spans(kept.numel()).values())
        mine = torch.frombuffer(
            bytearray(bytes([kept is not None]) + held.ljust(count * SIZE, b"\0")), dtype=torch.uint8
        )
        theirs = torch.empty_like(mine)
        swap(group, mine, group.before, theirs, group.after)
        found = theirs.numpy().tobytes()
        return [found[1 + n * SIZE : 1 + (n + 1) * SIZE] for n in range(count)] if found[0] else None

    def _swap_actions(self, group: Group, actions: Sequence[int]) -> list[int]:
        """What the rank before asks of this one."""
        if group.size == 1:
            return [_NOTHING] * len(actions)
        mine, theirs = torch.tensor(actions, dtype=torch.uint8), torch.zeros(len(actions), dtype=torch.uint8)
        swap(group, mine, group.after, theirs, group.before)
        return theirs.tolist()


def _receive_into(group: Group, place: torch.Tensor, sender: int) -> None:
    part = torch.empty_like(place, memory_format=torch.contiguous_format)
    group.receive(part, sender).wait()
    place.copy_(part)


def _digest(data: torch.Tensor) -> bytes:
    return digest_bytes(data.cpu().contiguous().numpy().data)


def _size_of_generators() -> int:
    """How many bytes of what is taken are generators; more once CUDA has been started."""
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return _count_generators(torch.cuda.device_count() if started else 0)


@cache
def _count_generators(devices: int) -> int:
    return sum(part.numel() for part in RngSnapshot().parts())
