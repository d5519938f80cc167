"""Checkpoints as their own libraries read them: tensors under the names that Evergrad has for them."""

from __future__ import annotations

import hashlib
import io
import json
import math
import warnings
import zipfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import evergrad as eg
from evergrad.dtypes import DType
from evergrad.state import flatten

DATA = Path(__file__).parent.parent / "data"
WEIGHTS = "model.weights.h5"
TENSORFLOW_DATA = "ckpt.data-00000-of-00001"

Tensors = Mapping[str, torch.Tensor]


def folder_of(path: Path) -> Path:
    """The folder of a checkpoint that is one, or that is named by its index or prefix."""
    return path if path.is_dir() else path.parent


def by_torch(path: Path) -> Tensors:
    return flatten(torch.load(path, weights_only=True)).tensors


def by_torch_trusted(path: Path) -> Tensors:
    return flatten(torch.load(path, weights_only=False)).tensors


def by_safetensors(path: Path) -> Tensors:
    # Copies: what the library hands out may be the file itself.
    return {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}


def by_numpy(path: Path) -> Tensors:
    found = np.load(path)
    if isinstance(found, np.ndarray):
        return {".": as_tensor(found)}
    with found:  # checks every CRC
        return {name: as_tensor(found[name]) for name in found}


def as_tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(array, array.dtype.newbyteorder("="), order="C"))


def by_h5py(path: Any) -> Tensors:
    """Every numeric data set; h5py checks fletcher32 and what gzip says."""
    found: dict[str, torch.Tensor] = {}

    def take(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset) and item.shape is not None and item.dtype.kind in "iufc":
            found[name] = as_tensor(np.asarray(item[()], item.dtype))

    with h5py.File(path, "r") as file:
        file.visititems(take)
    return found


def by_our_hdf5(path: Path) -> Tensors:
    """The data sets that `save_hdf5` wrote, under the state's names: it has none that h5py does not know."""
    return {name: tensor for name, tensor in by_h5py(path).items() if not name.startswith("__")}


def by_zip_and_h5py(path: Path) -> Tensors:
    with zipfile.ZipFile(path) as archive:
        return by_h5py(io.BytesIO(archive.read(WEIGHTS)))


def by_index(path: Path) -> Tensors:
    folder = folder_of(path)
    weight_map = json.loads(next(folder.glob("*.index.json")).read_text())["weight_map"]
    read = by_safetensors if next(iter(weight_map.values())).endswith(".safetensors") else by_torch
    shards = {file: read(folder / file) for file in set(weight_map.values())}
    return {name: shards[file][name] for name, file in weight_map.items()}


def by_file(path: Path) -> Tensors:
    """A folder of tensor files, each behind its name."""
    readers = {".safetensors": by_safetensors, ".pt": by_torch, ".pth": by_torch_trusted, ".npz": by_numpy}
    files = [file for file in sorted(path.iterdir()) if file.suffix in readers]
    return {f"{file.name}/{name}": tensor for file in files for name, tensor in readers[file.suffix](file).items()}


def by_dcp(path: Path) -> Tensors:
    folder = folder_of(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: it looks for a process group
        known = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        state = {
            name: torch.empty(what.size, dtype=what.properties.dtype)
            for name, what in known.items()
            if isinstance(what, TensorStorageMetadata)
        }
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def by_deepspeed(path: Path) -> Tensors:
    return by_file(path / (path / "latest").read_text())


@lru_cache(maxsize=1)
def tensorflow_places() -> list[tuple[str, DType, tuple[int, ...], int, int]]:
    """Where in the raw data file the bytes are that TensorFlow itself read: the only place with their digest."""
    data, places = (DATA / "tf_ckpt" / TENSORFLOW_DATA).read_bytes(), []
    for row in json.loads((DATA / "tf_ckpt.expected.json").read_text()):
        dtype = DType(row["dtype"])
        size = math.prod(row["shape"]) * dtype.itemsize
        starts = range(len(data) - size + 1)
        (start,) = [n for n in starts if hashlib.sha256(data[n : n + size]).hexdigest() == row["sha256"]]
        places.append((row["name"], dtype, tuple(row["shape"]), start, size))
    return places


def by_place(path: Path) -> Tensors:
    """TensorFlow's raw data file."""
    data = (folder_of(path) / TENSORFLOW_DATA).read_bytes()
    return {
        name: torch.frombuffer(bytearray(data[start : start + size]), dtype=dtype.torch).reshape(shape)
        for name, dtype, shape, start, size in tensorflow_places()
    }


def put_in(tensors: Tensors, log: eg.InjectionLog) -> Tensors:
    """The same tensors in memory with the faults of a log, element by element; those that share memory change too."""
    for hit in log.faults():
        tensor = tensors[hit.tensor]
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        width = 8 * real.element_size()
        bits = real.view({8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[width])
        place = (*hit.position, hit.number % 2) if tensor.is_complex() else hit.position
        assert int(bits[place]) % (1 << width) == hit.old, hit
        bits[place] = hit.new - (1 << width) if hit.new >> (width - 1) else hit.new
    return tensors
