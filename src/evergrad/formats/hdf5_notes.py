"""What a state's HDF5 file says about itself: which path each data set stands for, and the skeleton.

Tensors are data sets in groups by module: `model/layer1.0.weight` is `/model/layer1/0/weight`. The way back is
in `/__evergrad__/index`, a table from state paths to data sets, because two paths can ask for the same place.
Types that HDF5 viewers lack (bfloat16, fp8, complex32) are unsigned integers of the same bits, with the true type in
the attribute `dtype`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evergrad.dtypes import DType
from evergrad.errors import DamagedFile, LimitExceeded, StateError
from evergrad.formats.contract import Bits
from evergrad.formats.hdf5_chunks import boxes
from evergrad.formats.hdf5_file import Hdf5File, hdf5_errors, library
from evergrad.state import Skeleton

NOTES = "__evergrad__"
SCHEMA_VERSION = 1
MAX_TEXT_BYTES = 1 << 29


@dataclass(frozen=True, slots=True)
class Notes:
    """The index of our own files: state path → (HDF5 path, element type)."""

    tensors: Mapping[str, tuple[str, DType]]
    metadata: Mapping[str, str]
    skeleton: Skeleton


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor to be written: its bits come in blocks."""

    shape: tuple[int, ...]
    dtype: DType
    blocks: Callable[[], Iterator[tuple[int, int, Bits]]]


def hdf5_paths(names: Iterable[str]) -> dict[str, str]:
    """A place of its own for every path, by module where it can be.

    >>> hdf5_paths(["model/layer1.0.weight", "step"])
    {'model/layer1.0.weight': 'model/layer1/0/weight', 'step': 'step'}
    """
    groups: set[str] = {NOTES}
    taken: set[str] = {NOTES}  # data sets, and names that are not to be used
    found: dict[str, str] = {}
    for name in names:
        parts = [_component(part) for part in name.replace(".", "/").split("/")]
        path = ""
        for level, part in enumerate(parts):
            last = level == len(parts) - 1
            path, tries, parent = f"{path}{part}", 1, path
            while path in taken or (last and path in groups):
                tries += 1
                path = f"{parent}{part}~{tries}"
            if last:
                taken.add(path)
            else:
                groups.add(path)
                path += "/"
        found[name] = path
    return found


def write_hdf5(
    path: Path,
    tensors: Mapping[str, Source],
    aliases: Mapping[str, str],
    skeleton: Skeleton,
    metadata: Mapping[str, str],
) -> None:
    """Write tensors, one block in memory at a time, and the notes; tied tensors are one data set with two names."""
    h5py = library(path)
    paths = hdf5_paths([*tensors, *aliases])
    types = {name: source.dtype for name, source in tensors.items()}
    types.update((alias, types[name]) for alias, name in aliases.items())
    order = {name: [paths[name], types[name].value] for name in types}
    index = {"schema_version": SCHEMA_VERSION, "tensors": order, "metadata": dict(metadata)}
    with hdf5_errors(path, "cannot be written"), h5py.File(path, "w", locking=False) as file:
        writer = _Writer(h5py, file)
        for name, source in tensors.items():
            writer.write(paths[name], source)
        for alias, name in aliases.items():
            writer.tie(paths[alias], paths[name])
        notes = file.create_group(NOTES)
        for key, text in (("index", json.dumps(index, separators=(",", ":"))), ("skeleton", skeleton.dumps())):
            # A fixed-length string is plain bytes in the file; an attribute could hold 64 KB only.
            notes.create_dataset(key, data=text.encode(), dtype=h5py.string_dtype("utf-8", len(text.encode())))


def read_notes(file: Hdf5File) -> Notes:
    """The index and the skeleton of a file that `write_hdf5` made."""
    texts: dict[str, str] = {}
    for key in ("index", "skeleton"):
        with hdf5_errors(file.path, f"{NOTES}/{key}"):
            data = file.dataset(f"{NOTES}/{key}".encode())
            kind = data.get_type()
            length = kind.get_size()
            if kind.get_class() != 3 or kind.is_variable_str() or data.get_space().get_simple_extent_npoints() != 1:
                raise ValueError("is not one string of fixed length")
            if length > min(MAX_TEXT_BYTES, file.size):
                raise LimitExceeded(file.path, f"{NOTES}/{key}: {length} bytes in a file of {file.size}")
            raw = np.empty(length, np.uint8)
            h5py = library(file.path)
            data.read(h5py.h5s.create(h5py.h5s.SCALAR), data.get_space(), raw, kind)
            texts[key] = raw.tobytes().rstrip(b"\0").decode()
    try:
        index = json.loads(texts["index"])
        if index["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema {index['schema_version']}: this version of Evergrad reads {SCHEMA_VERSION}")
        tensors = {str(name): (str(place), DType(dtype)) for name, (place, dtype) in index["tensors"].items()}
        metadata = {str(key): str(value) for key, value in index["metadata"].items()}
        skeleton = Skeleton.loads(texts["skeleton"])
        skeleton.check()
        if wrong := skeleton.tensor_names() ^ tensors.keys():
            raise ValueError(f"index and skeleton disagree on {min(wrong)!r}")
        return Notes(tensors, metadata, skeleton)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, StateError) as error:
        raise DamagedFile(file.path, f"notes in {NOTES} are damaged: {error}") from None


class _Writer:
    """Makes data sets through the low-level library, which is several times as fast for small ones."""

    def __init__(self, h5py: Any, file: Any) -> None:
        self._h5, self._file = h5py, file
        self._links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
        self._links.set_create_intermediate_group(True)
        self._links.set_char_encoding(h5py.h5t.CSET_UTF8)
        self._creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        self._creation.set_obj_track_times(False)  # the same state gives the same file
        self._types: dict[DType, Any] = {}

    def write(self, path: str, source: Source) -> None:
        """Create one data set and write its blocks."""
        kind, shape = self._type(source.dtype), source.shape
        space = self._h5.h5s.create_simple(shape) if shape else self._h5.h5s.create(self._h5.h5s.SCALAR)
        data = self._h5.h5d.create(self._file.id, None, kind, space, self._creation)
        self._h5.h5o.link(data, self._file.id, path.encode(), lcpl=self._links)
        if source.dtype.numpy is None:
            self._h5.Dataset(data).attrs["dtype"] = source.dtype.value
        for start, stop, bits in source.blocks():
            raw = np.ascontiguousarray(bits).reshape(-1).view(np.uint8)
            for corner, lengths in boxes(shape, start, stop):
                count = math.prod(lengths)
                piece, raw = raw[: count * source.dtype.itemsize], raw[count * source.dtype.itemsize :]
                if shape:
                    space.select_hyperslab(corner, lengths)
                memory = self._h5.h5s.create_simple(lengths) if shape else space
                data.write(memory, space, piece, kind)

    def tie(self, path: str, to: str) -> None:
        """A second name for a data set."""
        same = self._h5.h5o.open(self._file.id, to.encode())
        self._h5.h5o.link(same, self._file.id, path.encode(), lcpl=self._links)

    def _type(self, dtype: DType) -> Any:
        if dtype not in self._types:
            stored = dtype.numpy if dtype.numpy is not None else np.dtype(f"u{dtype.itemsize}")
            self._types[dtype] = self._h5.h5t.py_create(stored, logical=True)
        return self._types[dtype]


def _component(part: str) -> str:
    """A part of a path as HDF5 can have it: not empty, no NUL, valid text."""
    part = part.replace("\0", "%00").encode("utf-8", "backslashreplace").decode()
    return part or "_"
