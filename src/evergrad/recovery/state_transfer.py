"""A state that goes from one rank to another: JSON and raw tensors, never pickle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch

from evergrad.recovery.process_group import Group
from evergrad.state import Skeleton, flatten, unflatten

_LARGE_BYTES = 256 << 10
_LOAD_BYTES = 4 << 20


def send_state(group: Group, state: object, to: int) -> int:
    """Send whatever `flatten` takes to one rank; the number of bytes."""
    head, tensors = _split(state)
    sizes = [tensor.nbytes for tensor in tensors]
    group.send(torch.tensor([head.numel()]), to).wait()
    tickets = [group.send(head, to)]
    for first, stop in _loads(sizes):
        raw = [_raw(tensor) for tensor in tensors[first:stop]]
        tickets.append(group.send(raw[0] if len(raw) == 1 else torch.cat(raw), to))
        if len(tickets) > 2:  # a load or two under way are enough to keep the wire busy
            tickets.pop(0).wait()
    for ticket in tickets:
        ticket.wait()
    return head.numel() + sum(sizes)


def receive_state(group: Group, sender: int) -> Any:
    """The state that a rank sends."""
    length = torch.zeros(1, dtype=torch.int64)
    group.receive(length, sender).wait()
    head = torch.empty(int(length), dtype=torch.uint8)
    group.receive(head, sender).wait()
    skeleton, tensors = _empty(head)
    made = list(tensors.values())
    sizes = [tensor.nbytes for tensor in made]
    for first, stop in _loads(sizes):
        if stop - first == 1:
            group.receive(made[first].reshape(-1).view(torch.uint8), sender).wait()
            continue
        load = torch.empty(sum(sizes[first:stop]), dtype=torch.uint8)
        group.receive(load, sender).wait()
        _unload(load, made[first:stop])
    return unflatten(tensors, skeleton)


def pack(state: object) -> torch.Tensor:
    """A small state as one tensor of bytes."""
    head, tensors = _split(state)
    return torch.cat([torch.tensor([head.numel()]).view(torch.uint8), head, *map(_raw, tensors)])


def unpack(packed: torch.Tensor) -> Any:
    """The state that was packed."""
    length = int(packed[:8].clone().view(torch.int64))
    skeleton, tensors = _empty(packed[8 : 8 + length])
    _unload(packed[8 + length :], list(tensors.values()))
    return unflatten(tensors, skeleton)


def _split(state: object) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What tells everything but the tensors' content, and the tensors."""
    flat = flatten(state)
    listed = [[path, str(tensor.dtype), list(tensor.shape)] for path, tensor in flat.tensors.items()]
    head = json.dumps({"skeleton": flat.skeleton.dumps(), "tensors": listed}).encode()
    return torch.frombuffer(bytearray(head), dtype=torch.uint8), list(flat.tensors.values())


def _empty(head: torch.Tensor) -> tuple[Skeleton, dict[str, torch.Tensor]]:
    found = json.loads(head.numpy().tobytes())
    tensors = {
        path: torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        for path, dtype, shape in found["tensors"]
    }
    return Skeleton.loads(found["skeleton"]), tensors


def _loads(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Which tensors go together: of small ones a message each costs more than a copy, of large ones less."""
    first = total = 0
    for number, size in enumerate(sizes):
        if size >= _LARGE_BYTES or total + size >= _LOAD_BYTES:
            if total:
                yield first, number
            first, total = number, 0
        total += size
        if size >= _LARGE_BYTES:
            yield number, number + 1
            first, total = number + 1, 0
    if total:
        yield first, len(sizes)


def _unload(load: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    parts = torch.split(load, [tensor.nbytes for tensor in tensors]) if tensors else ()
    for part, tensor in zip(parts, tensors, strict=True):
        tensor.reshape(-1).view(torch.uint8).copy_(part)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8)
