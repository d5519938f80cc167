"""A version as one plain file: the whole model, for any reader of that format.

Nothing is written before every digest has been checked, and the file appears whole or not at all.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations, pairwise
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from evergrad._files import check_replaceable, file_errors, fsync_path, replace_folder, temporary_name
from evergrad.checkpoint.catalogue.catalogue import CatalogueEntry
from evergrad.checkpoint.catalogue.survey import Survey
from evergrad.checkpoint.catalogue.verify import open_intact
from evergrad.checkpoint.shard_manifest import Manifest
from evergrad.checkpoint.tensor_placement import Placements, TensorPiece
from evergrad.dtypes import DType
from evergrad.errors import DamagedFile, FileAccessError, RestoreError, UsageError
from evergrad.formats import Checkpoint, convert
from evergrad.formats.checkpoint import Bits
from evergrad.records import Json, Role, TensorInfo
from evergrad.state import FlatState, Placement, Skeleton, Where, find_sharing, select, unflatten
from evergrad.state.selection import tensor_info
from evergrad.wording import did_you_mean

if TYPE_CHECKING:
    import torch

    from evergrad.checkpoint.restore.shards import Shard


# All ranks' shards of a version as one state: what a single process would have saved.
#
# Sharded tensors are put together from the pieces of all ranks, which have to cover the whole exactly. Everything
# else comes from one rank's shard, or from the one that holds its bytes. Tensors that were tied are tied again.


def needed_ranks(manifest: Manifest) -> set[int]:
    """The ranks whose shards are needed for a whole state, by the manifest of the one that the rest is taken from."""
    if manifest.placements.get("sharded"):
        return set(range(manifest.world_size))
    return {manifest.rank, *(rank for rank, _ in manifest.elsewhere.values())}


def gather_whole(shards: Mapping[int, Shard], *, rank: int = 0, where: Where = None) -> FlatState:
    """One state out of the shards of a version, by rank, whose digests have been verified.

    What is not sharded comes from `rank`. `where` takes some tensors only, with the containers that they are in. The
    tensors are memory of their own: the shards may be closed. `RestoreError` or `DamagedFile` if something is missing.
    """
    from evergrad.checkpoint.restore.copy_in import fresh

    source = _Source(shards, rank)
    chosen = set(select(source.infos(), where)) if where is not None else source.names
    places = {each: _sharded(shard) for each, shard in shards.items()}
    sharded = places[rank]
    if sharded and (missing := set(range(source.base.manifest.world_size)) - shards.keys()):
        raise RestoreError(f"{min(sharded)}: is sharded, and there is no shard of rank {_ranks(missing)}")
    whole = [path for path in source.shapes if path in chosen and path not in sharded]
    tensors = fresh(source, whole)
    views = source.skeleton.sharing.views
    tied: dict[Any, torch.Tensor] = {}
    for path in sharded:
        if path in chosen:
            # Two names of one tensor are two names of the same whole.
            key = (views[path], sharded[path]) if path in views else path
            if key not in tied:
                tied[key] = _assemble(path, shards, places, rank)
            tensors[path] = tied[key]
    root = source.skeleton.root
    if chosen != source.names:
        root = _pruned(root, frozenset(chosen)) or {"dict": []}
    roles = {path: role for path, role in source.skeleton.roles.items() if path in tensors}
    ordered = {path: tensors[path] for path in source.shapes if path in tensors}
    return FlatState(ordered, Skeleton(root, find_sharing(Placement.of(*item) for item in ordered.items()), roles))


class _Source:
    """One rank's tensors, wherever their bytes are: what `fresh` copies from."""

    def __init__(self, shards: Mapping[int, Shard], rank: int) -> None:
        if rank not in shards:
            raise RestoreError(f"there is no shard of rank {rank}. There are those of {_ranks(shards)}.")
        self.base = shards[rank]
        self.skeleton = self.base.skeleton
        self.names = self.skeleton.tensor_names()
        self._shards = shards
        self._homes = self._find()
        self.shapes: dict[str, tuple[DType, tuple[int, ...]]] = {
            path: shard.shapes[name] for path, (shard, name) in self._homes.items()
        }

    def infos(self) -> dict[str, TensorInfo]:
        """What `select` chooses from."""
        roles = self.skeleton.roles
        return {path: tensor_info(path, shape, dtype, roles) for path, (dtype, shape) in self.shapes.items()}

    def tensor(self, path: str) -> torch.Tensor:
        """A view of the map that holds it."""
        shard, name = self._homes[path]
        return shard.tensor(name)

    def _find(self) -> dict[str, tuple[Shard, str]]:
        """The shard that holds the bytes of each tensor, and its name there."""
        base, views = self.base, self.skeleton.sharing.views
        held = _held(base)
        elsewhere = base.manifest.elsewhere
        found: dict[str, tuple[Shard, str]] = {path: (base, path) for path in held}
        found |= {path: (self._elsewhere(path), path) for path in elsewhere if path not in held}
        by_view = {views[path]: place for path, place in found.items() if path in views}
        for path in sorted(self.names - found.keys()):  # tied to one that another rank holds
            place = by_view.get(views[path]) if path in views else None
            if place is None:
                raise DamagedFile(base.copy.shard, f"{path}: the state has it, and no shard holds it")
            found[path] = place
        return {path: place for path, place in found.items() if path in self.names}

    def _elsewhere(self, path: str) -> Shard:
        rank, digest = self.base.manifest.elsewhere[path]
        holder = self._shards.get(rank)
        if holder is None:
            raise RestoreError(f"{path}: its bytes are in the shard of rank {rank}, which is not there")
        stored = holder.parsed.layout.aliases.get(path, path)
        found = holder.manifest.digests.get(stored)
        if found != digest:
            raise DamagedFile(
                holder.copy.shard,
                f"{path}: not what rank {self.base.manifest.rank} saved",
                expected=digest,
                found=found,
            )
        return holder


def _held(shard: Shard) -> set[str]:
    """The tensors whose bytes are in a shard, under all their names."""
    layout = shard.parsed.layout
    return {*(entry.path for entry in layout.entries), *layout.aliases}


def _sharded(shard: Shard) -> Mapping[str, TensorPiece]:
    return Placements.from_json(shard.manifest.placements, str(shard.copy.manifest)).sharded


def _assemble(
    path: str, shards: Mapping[int, Shard], places: Mapping[int, Mapping[str, TensorPiece]], rank: int
) -> Any:
    """A sharded tensor, whole."""
    import torch

    dtype = shards[rank].shapes[path][0] if path in _held(shards[rank]) else None
    pieces = _pieces(path, shards, places, places[rank][path].whole, rank)
    for holder in pieces:
        found = shards[holder].shapes[path][0]
        dtype = dtype or found
        if found != dtype:
            what = f"{path}: is of another type than rank {rank}'s"
            raise DamagedFile(shards[holder].copy.shard, what, expected=dtype, found=found)
    if dtype is None:
        raise DamagedFile(shards[rank].copy.shard, f"{path}: no shard holds a piece of it")
    whole = torch.empty(places[rank][path].whole, dtype=dtype.torch)
    for holder, piece in pieces.items():
        whole[piece.slices(TensorPiece.of_whole(piece.whole))] = shards[holder].tensor(path)
    return whole


def _pieces(
    path: str,
    shards: Mapping[int, Shard],
    places: Mapping[int, Mapping[str, TensorPiece]],
    whole: tuple[int, ...],
    rank: int,
) -> dict[int, TensorPiece]:
    """The ranks whose pieces cover the whole exactly, each part once, with their pieces."""
    holders: dict[TensorPiece, int] = {}
    for holder, shard in sorted(shards.items()):
        piece = places[holder].get(path)
        if piece is None or path not in _held(shard):
            continue
        if piece.whole != whole or shard.shapes[path][1] != piece.shape:
            raise DamagedFile(
                shard.copy.manifest,
                f"{path}: not a piece of the same tensor as rank {rank}'s",
                expected=f"{list(piece.shape)} of {list(whole)}",
                found=f"{list(shard.shapes[path][1])} of {list(piece.whole)}",
            )
        if piece.numel:
            twin = holders.setdefault(piece, holder)
            if _digest(shards[twin], path) != _digest(shard, path):
                what = f"{path}: ranks {twin} and {holder} hold the same piece with different values"
                raise DamagedFile(shard.copy.shard, what)
    covered, total = sum(piece.numel for piece in holders), math.prod(whole)
    clash = _overlap(list(holders))
    if covered != total or clash is not None:
        found = f"{covered} of {total} elements"
        if clash is not None:
            found = f"ranks {holders[clash[0]]} and {holders[clash[1]]} overlap"
        what = f"{path}: the pieces do not make up the whole"
        raise DamagedFile(shards[rank].copy.manifest, what, expected=list(whole), found=found)
    return {holder: piece for piece, holder in holders.items()}


def _overlap(pieces: Sequence[TensorPiece]) -> tuple[TensorPiece, TensorPiece] | None:
    """Two pieces that overlap, or None."""
    axes = [
        axis
        for axis in range(len(pieces[0].shape) if pieces else 0)
        if len({(piece.offset[axis], piece.shape[axis]) for piece in pieces}) > 1
    ]
    if len(axes) != 1:
        return next((pair for pair in combinations(pieces, 2) if pair[0].overlap(pair[1])), None)
    axis = axes[0]  # as nearly always: cut along one axis
    order = sorted(pieces, key=lambda piece: piece.offset[axis])
    return next((pair for pair in pairwise(order) if pair[0].overlap(pair[1])), None)


def _digest(shard: Shard, path: str) -> str | None:
    return shard.manifest.digests.get(shard.parsed.layout.aliases.get(path, path))


def _pruned(node: Json, chosen: frozenset[str]) -> Json:
    """A skeleton's node with only the chosen tensors; what holds none of them goes, values too."""
    own = Skeleton(node).tensor_names()
    if not own & chosen:
        return None
    if own <= chosen or not isinstance(node, dict):
        return node
    out = dict(node)
    for kind in ("dict", "odict"):
        if isinstance(rows := node.get(kind), list):
            out[kind] = _kept(rows, lambda row: [row[0], kept] if (kept := _pruned(row[1], chosen)) else None)
    for kind in ("list", "tuple", "set", "frozenset"):
        if isinstance(rows := node.get(kind), list):
            out[kind] = _kept(rows, lambda row: _pruned(row, chosen))
    return out


def _kept(rows: list[Any], change: Callable[[Any], Json]) -> list[Json]:
    return [changed for row in rows if (changed := change(row)) is not None]


def _ranks(ranks: Any) -> str:
    return ", ".join(map(str, sorted(ranks))) or "none"


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
            raise UsageError(
                f"unknown format {format!r}: expected {', '.join(FORMATS)}.{did_you_mean(str(format), FORMATS)}"
            )
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
                fsync_path(path)
            replace_folder(temporary, target)
    except CheckpointException as error:
        raise FileAccessError(target, f"cannot be written: {error}") from error
    finally:
        with suppress(OSError):
            shutil.rmtree(temporary)


def _info(name: str, tensor: torch.Tensor, roles: Mapping[str, Role]) -> TensorInfo:
    return tensor_info(name, tuple(tensor.shape), DType.of_dense(tensor.dtype), roles)
