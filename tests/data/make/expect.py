"""What a checkpoint file holds according to the framework that wrote it: shared by the scripts beside this one."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

DATA = Path(__file__).resolve().parent.parent
"""Where the files go: tests/data."""


def tensors_of_pickle(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a torch.save file, by path; the classes it names must be importable."""
    return walk(torch.load(path, map_location="cpu", weights_only=False))


def tensors_of_safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            yield name, file.get_tensor(name)


def walk(value: object, path: tuple[str, ...] = (), above: frozenset[int] = frozenset()) -> Iterator:
    """Tensors and NumPy arrays in mappings, sequences and attributes; `above` stops an object that holds itself."""
    if isinstance(value, torch.Tensor):
        yield "/".join(path), value
        return
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiubc":
        yield "/".join(path), torch.from_numpy(np.ascontiguousarray(value))
        return
    if id(value) in above or isinstance(value, type):
        return
    children: list[tuple[object, object]] = []
    if isinstance(value, Mapping):
        children += value.items()
    elif isinstance(value, list | tuple):
        children += enumerate(value)
    children += getattr(value, "__dict__", {}).items()
    for key, child in children:
        segment = str(key).replace("%", "%25").replace("/", "%2F")
        yield from walk(child, (*path, segment), above | {id(value)})


def write_expected(name: str, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write tests/data/<name>.expected.json: name, shape, dtype and the SHA-256 of the contiguous bytes."""
    rows = [
        {
            "name": path,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "sha256": hashlib.sha256(raw_bytes(tensor)).hexdigest(),
        }
        for path, tensor in tensors
    ]
    (DATA / f"{name}.expected.json").write_text(json.dumps(rows, indent=1) + "\n")


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
