"""Any state as an HDF5 file that every viewer opens, and back."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evergrad._files import replacing
from evergrad.dtypes import DType
from evergrad.formats.checkpoint import Bits, aliases_of, block_ranges
from evergrad.formats.hdf5.checkpoint import TensorSource, write_hdf5
from evergrad.formats.hdf5.file import import_h5py
from evergrad.formats.registry import open_checkpoint
from evergrad.records import TensorInfo
from evergrad.state import flatten
from evergrad.state.selection import tensor_info

if TYPE_CHECKING:
    import torch


def save_hdf5(state: object, path: str | PathLike[str]) -> Path:
    """Write a state (a model, an optimizer, any nesting of dicts, lists, tensors and numbers) as HDF5.

    Tensors are data sets in groups by module, so that any HDF5 viewer shows `model/layer1/0/conv1/weight`; tied
    tensors are one data set with two names. The file appears whole or not at all. Needs h5py.

    >>> save_hdf5({"model": model, "optimizer": optimizer}, "state.h5")     # doctest: +SKIP
    """
    target = Path(path)
    import_h5py(target, "cannot be written as HDF5: h5py is not installed")
    flat = flatten(state)
    infos = {name: _info(name, tensor) for name, tensor in flat.tensors.items()}
    tied = aliases_of(flat.skeleton, infos)
    sources = {name: _source(infos[name], flat.tensors[name]) for name in infos if name not in tied}
    with replacing(target) as temporary:
        write_hdf5(temporary, sources, tied, flat.skeleton, {})
    return target


def load_hdf5(path: str | PathLike[str]) -> Any:
    """The state that `save_hdf5` wrote: same containers, same key types, same sharing, every bit.

    Of any other HDF5 file, nested dicts of its data sets. Nothing in the file is run.
    """
    with open_checkpoint(path) as ck:
        return ck.state()


def _info(name: str, tensor: torch.Tensor) -> TensorInfo:
    return tensor_info(name, tuple(tensor.shape), DType.of_dense(tensor.dtype))


def _source(info: TensorInfo, tensor: torch.Tensor) -> TensorSource:
    def pieces() -> Iterator[tuple[int, int, Bits]]:
        import torch

        if not info.numel:
            return
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        for start, stop in block_ranges(info):
            yield start, stop, raw[start * info.dtype.itemsize : stop * info.dtype.itemsize].view(np.uint8)

    return TensorSource(info.shape, info.dtype, pieces)
