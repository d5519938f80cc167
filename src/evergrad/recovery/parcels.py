"""A state that goes from one rank to another: JSON and raw tensors, never pickle."""

from __future__ import annotations

import json
from typing import Any

import torch

from evergrad.recovery.transport import Group
from evergrad.state import Skeleton, flatten, unflatten

__all__ = ["pack", "receive_state", "send_state", "unpack"]


def send_state(group: Group, state: object, to: int) -> int:
    """Send whatever `flatten` takes to one rank; the number of bytes."""
    flat = flatten(state)
    listed = [[path, str(tensor.dtype), list(tensor.shape)] for path, tensor in flat.tensors.items()]
    head = json.dumps({"skeleton": flat.skeleton.dumps(), "tensors": listed}).encode()
    header = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    group.send(torch.tensor([len(header)]), to).wait()
    tickets = [group.send(header, to)]
    total = len(header)
    for tensor in flat.tensors.values():
        if tensor.numel():
            tickets.append(group.send(_raw(tensor), to))
            total += tensor.nbytes
    for ticket in tickets:
        ticket.wait()
    return total


def receive_state(group: Group, sender: int) -> Any:
    """The state that a rank sends."""
    length = torch.zeros(1, dtype=torch.int64)
    group.receive(length, sender).wait()
    header = torch.empty(int(length), dtype=torch.uint8)
    group.receive(header, sender).wait()
    head = json.loads(header.numpy().tobytes())
    tensors = {}
    for path, dtype, shape in head["tensors"]:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        if tensor.numel():
            group.receive(tensor.reshape(-1).view(torch.uint8), sender).wait()
        tensors[path] = tensor
    return unflatten(tensors, Skeleton.loads(head["skeleton"]))


def pack(state: object) -> torch.Tensor:
    """A small state as one tensor of bytes."""
    flat = flatten(state)
    listed = [[path, str(tensor.dtype), list(tensor.shape)] for path, tensor in flat.tensors.items()]
    head = json.dumps({"skeleton": flat.skeleton.dumps(), "tensors": listed}).encode()
    length = torch.tensor([len(head)]).view(torch.uint8)
    header = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    return torch.cat([length, header, *(_raw(tensor) for tensor in flat.tensors.values())])


def unpack(packed: torch.Tensor) -> Any:
    """The state that was packed."""
    length = int(packed[:8].clone().view(torch.int64))
    head = json.loads(packed[8 : 8 + length].numpy().tobytes())
    begin, tensors = 8 + length, {}
    for path, dtype, shape in head["tensors"]:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        tensor.reshape(-1).view(torch.uint8).copy_(packed[begin : begin + tensor.nbytes])
        begin += tensor.nbytes
        tensors[path] = tensor
    return unflatten(tensors, Skeleton.loads(head["skeleton"]))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8)
