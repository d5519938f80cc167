"""Restoring what torch.distributed.checkpoint wrote: a folder of its own, into a live state as `restore` takes it.

Nothing of the folder is run: the metadata is read as a description, and so are values that torch.save stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from evergrad.checkpoint.placement import Place
from evergrad.checkpoint.ranks import Ranks
from evergrad.checkpoint.restore.foreign_tree import Tree
from evergrad.checkpoint.restore.loading import Loading, prepare
from evergrad.dtypes import DType
from evergrad.errors import DamagedFile
from evergrad.formats import Checkpoint, DataFile
from evergrad.formats.dcp import Dcp, Window, read_metadata
from evergrad.formats.dcp import Place as Part
from evergrad.formats.torch_file import open_archive
from evergrad.formats.zip_archive import Archive
from evergrad.records import Check, Json
from evergrad.state import ROOT, Skeleton, Where, join

_OBJECT = "an object saved by torch.save"


def restore_dcp(folder: Path, state: object, *, strict: bool = True, where: Where | None = None) -> tuple[str, ...]:
    """Put what a DCP folder holds into a live state, in place; what was left out, one line each.

    The state is as `Checkpointer.restore` takes it; DTensors get their piece. Optimizers are found by the number of
    each parameter or by its name, as `get_state_dict` writes it. Everything is compared, and every checksum of the
    folder, before the first tensor is touched. All ranks call it alike.
    """
    ranks = Ranks.now()
    opened: list[DcpFolder] = []

    def plan() -> Loading:
        source = DcpFolder(folder)
        opened.append(source)
        source.lay_out(Tree(source.names, source.tensors, source.value), state)
        loading = prepare(state, source, strict=strict, where=where)
        source.check(ranks)
        return loading

    try:
        loading = ranks.together(plan)
        ranks.together(loading.apply)
    finally:
        for source in opened:
            source.close()
    return loading.skipped


class DcpFolder:
    """A DCP folder as a source that can be loaded from, once it is laid out as a live state is."""

    def __init__(self, folder: Path) -> None:
        """Read the metadata; `FormatError` if it is hostile, damaged or not there."""
        self.folder = Path(folder)
        self._checkpoint: Checkpoint = Dcp().open(self.folder)
        described = read_metadata(self.folder / ".metadata" if self.folder.is_dir() else self.folder)
        objects = [name for name, what in described.others.items() if what == _OBJECT]
        self._others = described.others
        # Both lists are in the order of the metadata; one is shorter if an object lies behind a transform.
        complete = len(objects) == len(described.objects)
        self._objects: dict[str, Part] = dict(zip(objects, described.objects, strict=True)) if complete else {}
        self.tensors: dict[str, tuple[DType, tuple[int, ...]]] = {
            name: (info.dtype, info.shape) for name, info in self._checkpoint.tensors.items()
        }
        self.names = sorted({*self.tensors, *described.others})
        self.skeleton = Skeleton(None)
        self.shapes: Mapping[str, tuple[DType, tuple[int, ...]]] = {}
        self._places: Mapping[str, tuple[str, Place | None]] = {}
        self._inside: dict[str, torch.Tensor] = {}

    def value(self, name: str, path: str) -> Json:
        """What a value is, as a node; tensors inside it are called after a path.

        What would have to be run to be had is named by its class, and does not fit anything.
        """
        part = self._objects.get(name)
        if part is None:
            return {"object": self._others[name], "parts": []}
        file = DataFile(self.folder / part.file)
        try:
            window = Window(file, part.offset, part.length)
            if window.read(0, min(2, part.length)) != b"PK":
                return {"object": self._others[name], "parts": []}
            stored = open_archive(window.path, Archive.over(window))
            unknown = [*stored.skeleton.objects(), *stored.others.items()]
            if unknown:
                return {"object": unknown[0][1], "parts": []}
            if Check.FAILED in stored.container_checks().values():
                raise DamagedFile(self.folder, f"{name}: the checksum does not hold")
            if not stored.tensors:
                return stored.skeleton.root
            renamed = {inner: path if inner == ROOT else join(path, inner) for inner in stored.tensors}
            self._inside |= {renamed[inner]: stored.read(inner) for inner in stored.tensors}
            if ROOT in stored.tensors:
                return {"ndarray" if stored.tensors[ROOT].read_only else "tensor": path}
            return Skeleton(stored.skeleton.root).below(path).root
        finally:
            file.close()

    def lay_out(self, tree: Tree, state: object) -> None:
        """Be nested as a live state is."""
        self.skeleton = Skeleton(tree.root(state))
        self._places = tree.places
        inside = {path: (DType.of_dense(tensor.dtype), tuple(tensor.shape)) for path, tensor in self._inside.items()}
        cut = {
            path: (self.tensors[name][0], self.tensors[name][1] if place is None else place.shape)
            for path, (name, place) in tree.places.items()
        }
        self.shapes = inside | cut

    def check(self, ranks: Ranks) -> None:
        """Compare the checksums of the tensors that were laid out; each rank a part of them."""
        for name in sorted({name for name, _ in self._places.values()})[ranks.rank :: ranks.world_size]:
            if self._checkpoint.checksum(name) is Check.FAILED:
                raise DamagedFile(self.folder, f"{name}: the checksum does not hold", hint="Nothing was touched.")

    def tensor(self, path: str) -> torch.Tensor:
        """The tensor at a path, or this rank's piece of it, as new memory."""
        if path in self._inside:
            return self._inside[path]
        name, place = self._places[path]
        dtype, shape = self.tensors[name]
        if place is None or place.shape == shape:
            return self._checkpoint.read(name)
        if place.shape[1:] == shape[1:]:  # whole rows: they follow each other
            row = math.prod(shape[1:])
            start = place.offset[0] * row
            bits = self._checkpoint.read_bits(name, start, start + place.shape[0] * row)
            if not bits.size:
                return torch.empty(place.shape, dtype=dtype.torch)
            return torch.from_numpy(bits.reshape(-1).view(np.uint8)).view(dtype.torch).reshape(place.shape)
        return self._checkpoint.read(name)[place.slices(Place.of_whole(shape))].contiguous()

    def close(self) -> None:
        """Let go of the files."""
        self._checkpoint.close()
