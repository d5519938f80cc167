"""How each library brings a checkpoint back into live tensors; every one opens its files anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from benchmarks.states import State

__all__ = ["Load", "dcp_load", "safetensors_load", "torch_load", "torch_load_mmap", "torchsnapshot_restore"]

Load = Callable[[Path, State], None]


def torch_load(path: Path, state: State) -> None:
    """Everything read into new tensors, then copied into the live ones."""
    _copy(state, torch.load(path, weights_only=True))


def torch_load_mmap(path: Path, state: State) -> None:
    """Mapped, and copied from the map."""
    _copy(state, torch.load(path, weights_only=True, mmap=True))


def safetensors_load(path: Path, state: State) -> None:
    """Tensor by tensor from the map of the file."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as opened:
        _copy(state, {key: opened.get_tensor(key) for key in opened.keys()})  # noqa: SIM118 - no mapping


def dcp_load(path: Path, state: State) -> None:
    """In place by itself."""
    from torch.distributed.checkpoint.state_dict_loader import load

    load(state, checkpoint_id=path, no_dist=True)


def torchsnapshot_restore(path: Path, state: State) -> None:
    """In place by itself."""
    from torchsnapshot import Snapshot, StateDict

    Snapshot(str(path)).restore({"state": StateDict(**state)})


def _copy(state: State, loaded: State) -> None:
    """Into the live tensors, all at once, the fastest way there is."""
    torch._foreach_copy_(list(state.values()), [loaded[path] for path in state])
