"""A version as one plain file: the whole model, for any reader of that format.

Nothing is written before every digest has been checked, and the file appears whole or not at all.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from evergrad.checkpoint.catalogue.checking import open_intact
from evergrad.checkpoint.catalogue.gathering import gather_whole, needed_ranks
from evergrad.checkpoint.catalogue.records import CatalogueEntry
from evergrad.checkpoint.catalogue.survey import Survey
from evergrad.dtypes import DType
from evergrad.errors import FileAccessError, UsageError
from evergrad.formats import Checkpoint, convert
from evergrad.formats.checkpoint import Bits
from evergrad.formats.data_file import file_errors
from evergrad.formats.durable import check_replaceable, fsync, temporary_name
from evergrad.records import Role, TensorInfo
from evergrad.state import FlatState, Where, unflatten
from evergrad.state.selection import tensor_info
from evergrad.wording import meant

if TYPE_CHECKING:
    import torch

FORMATS = {"safetensors": "safetensors", "pt": "torch-zip", "h5": "hdf5", "npz": "npz", "dcp": "dcp"}
"""What `format=` may be, and what that format is called elsewhere."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    path: Path
    format: str
    tensors: int
    size_bytes: int


class FlatCheckpoint(Checkpoint):
    """A state in memory, offered as a checkpoint file is, so that every format can be written from it."""

    format = "state"

    def __init__(self, flat: FlatState, path: Path, files: list[Path] | None = None) -> None:
        """`path` and `files` say where it came from: for messages, and so that it is not written over itself."""
        self.path, self._files, self._flat = path, files or [], flat
        self.others: Mapping[str, str] = {}
        self.metadata: Mapping[str, str] = {}
        self.skeleton = flat.skeleton
        self.tensors = {name: _info(name, tensor, flat.skeleton.roles) for name, tensor in flat.tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        """The tensor itself, not a copy."""
        self._info(name)
        return self._flat.tensors[name]

    def files(self) -> list[Path]:
        """What it was read from."""
        return self._files

    def close(self) -> None:
        """There is nothing to let go of."""

    def _read_bits(self, name: str, start: int, stop: int) -> Bits:
        import torch

        info = self.tensors[name]
        flat = self._flat.tensors[name].contiguous().reshape(-1)
        raw = flat[start:stop].view(torch.uint8).numpy().view(info.dtype.bits)
        return raw if info.dtype.parts == 1 else raw.reshape(-1, info.dtype.parts)

    def _xor_bits(self, name: str, indices: npt.NDArray[np.int64], patterns: Bits) -> Bits:
        raise UsageError(f"{self.path}: a version is exported, not altered")


def export_version(
    entry: CatalogueEntry,
    seen: Survey,
    out: str | PathLike[str],
    *,
    format: str | None = None,
    rank: int = 0,
    where: Where = None,
    overwrite: bool = False,
) -> Exported:
    """Write a version as one file, in the format that the ending names (or `format` does); a folder is DCP.

    Sharded tensors are put together from all ranks; everything else is the given rank's.
    """
    target = Path(out)
    format = _target_format(target, str(out), format)
    if not 0 <= rank < entry.world_size:
        raise UsageError(f"{entry.version.name}: there is no rank {rank}: {entry.world_size} saved it, from 0 on")
    _check_free(target, format, overwrite)
    with (
        tempfile.TemporaryDirectory(prefix="evergrad-") as folder,
        open_intact(entry, seen, [rank], Path(folder)) as base,
        open_intact(entry, seen, sorted(needed_ranks(base[rank].manifest) - {rank}), Path(folder)) as rest,
    ):
        shards = {**base, **rest}
        files = [shard.copy.shard for shard in shards.values()]
        flat = gather_whole(shards, rank=rank, where=where)
    # The shards were found to be current still: what was gathered is what was verified.
    if format == "dcp":
        _write_dcp(flat, target)
    else:
        source = FlatCheckpoint(flat, Path(entry.version.name), files)
        convert(source, target, to=FORMATS[format], overwrite=overwrite)
    total = sum(tensor.nbytes for tensor in flat.tensors.values())
    return Exported(target, format, len(flat.tensors), total)


def _target_format(target: Path, said: str, format: str | None) -> str:
    if format is not None:
        if format not in FORMATS:
            raise UsageError(f"unknown format {format!r}: expected {', '.join(FORMATS)}.{meant(str(format), FORMATS)}")
        return format
    endings = {".safetensors": "safetensors", ".pt": "pt", ".pth": "pt", ".bin": "pt", ".ckpt": "pt"}
    endings |= {".h5": "h5", ".hdf5": "h5", ".npz": "npz"}
    if target.suffix in endings and not said.endswith("/"):
        return endings[target.suffix]
    if said.endswith("/") or not target.suffix or target.is_dir():
        return "dcp"
    raise UsageError(
        f"{target}: no format is written with the ending {target.suffix!r} (expected .safetensors, .pt, .h5, .npz, "
        "or a folder, which becomes a DCP checkpoint). Or name it: --format."
    )


def _check_free(target: Path, format: str, overwrite: bool) -> None:
    """Say what is in the way before anything is read."""
    if not target.absolute().parent.is_dir():
        raise UsageError(f"{target}: there is no folder {str(target.parent)!r}")
    if not os.path.lexists(target):
        return
    if format != "dcp" and not target.is_dir():
        check_replaceable(target)
    is_empty = format == "dcp" and target.is_dir() and not any(target.iterdir())
    if not overwrite and not is_empty:
        raise UsageError(f"{target}: exists already. Choose another name, or replace it: --overwrite.")
    if format == "dcp" and not is_empty and not (target / ".metadata").is_file():
        raise UsageError(f"{target}: is no DCP checkpoint, and is not replaced by one. Choose another name.")
    if format != "dcp" and target.is_dir():
        raise UsageError(f"{target}: is a folder. Choose another name.")


def _write_dcp(flat: FlatState, target: Path) -> None:
    """A DCP folder that appears under its name once it is whole, and durable."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    state: Any = unflatten(flat.tensors, flat.skeleton)
    if not isinstance(state, dict):
        raise UsageError(f"{target}: a DCP checkpoint holds a dict, and this state is a {type(state).__name__}")
    target = target.absolute()
    temporary = temporary_name(target)
    try:
        with file_errors(target, "cannot be written"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
            save(state, checkpoint_id=temporary, no_dist=True)
            for path in (*temporary.rglob("*"), temporary):
                fsync(path)
            old = temporary_name(target) if target.exists() else None
            if old is not None:
                os.rename(target, old)
            try:
                os.rename(temporary, target)
            except OSError:
                if old is not None:
                    os.rename(old, target)
                raise
            fsync(target.parent)
            if old is not None:
                shutil.rmtree(old, ignore_errors=True)
    except CheckpointException as error:
        raise FileAccessError(target, f"cannot be written: {error}") from error
    finally:
        with suppress(OSError):
            shutil.rmtree(temporary)


def _info(name: str, tensor: torch.Tensor, roles: Mapping[str, Role]) -> TensorInfo:
    return tensor_info(name, tuple(tensor.shape), DType.of_dense(tensor.dtype), roles)
