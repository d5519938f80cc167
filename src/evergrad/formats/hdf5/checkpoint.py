"""HDF5 files: Keras', Chainer's, our own, and any other (needs h5py)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from evergrad._files import file_errors, open_file
from evergrad.dtypes import DType
from evergrad.errors import DamagedFile, LimitExceeded, StateError, UnsupportedContent
from evergrad.formats.byte_source import closed_on_error
from evergrad.formats.checkpoint import (
    Bits,
    Checkpoint,
    Format,
    Probe,
    aliases_of,
    block_ranges,
    losses_of,
    refuse_losses,
)
from evergrad.formats.hdf5.file import DataSetEntry, FileListing, Hdf5File, hdf5_errors, import_h5py, list_file
from evergrad.formats.hdf5.storage import DataSet, hyperslabs
from evergrad.formats.offset_checkpoint import describe
from evergrad.records import Check, Role, TensorInfo
from evergrad.state import Placement, Skeleton, find_sharing, role_of
from evergrad.state.sharing import contiguous_strides

# The attributes of an HDF5 file by name: what a conversion would leave behind.
#
# Only names are read. Values of varying length (Keras' `model_config`) lie in a global heap, and a damaged one makes
# the HDF5 library (2.0.0) loop for ever.

MAX_NAMED = 1_000


class UnkeptAttributes(Mapping[str, str]):
    """`group/data set@attribute` → what it is, but for those in `kept`; listed when first looked at.

    `objects` are groups and data sets by name, with the path that leads to each. The first thousand are named, and the
    rest counted.
    """

    def __init__(
        self, file: Hdf5File, objects: Mapping[str, bytes], kept: Set[str], beside: Mapping[str, str] | None = None
    ) -> None:
        self._file, self._objects, self._kept, self._beside = file, objects, kept, beside or {}

    def __getitem__(self, name: str) -> str:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    @cached_property
    def _found(self) -> dict[str, str]:
        file, h5a = self._file, import_h5py(self._file.path).h5a
        found, more = dict(self._beside), 0
        with hdf5_errors(file.path, "attributes are damaged"):
            for name, where in self._objects.items():
                opened = import_h5py(file.path).h5o.open(file.root.id, where)
                if not h5a.get_num_attrs(opened):
                    continue
                for attribute in self._names(h5a, opened):
                    key = f"{name}@{attribute.decode('utf-8', 'backslashreplace')[:200]}"
                    if key in self._kept:
                        continue
                    if len(found) < MAX_NAMED + len(self._beside):
                        found[key] = "an HDF5 attribute"
                    else:
                        more += 1
        if more:
            found["…"] = f"{more} further HDF5 attributes"
        return found

    def _names(self, h5a: Any, opened: Any) -> list[bytes]:
        names: list[bytes] = []
        h5a.iterate(opened, names.append)
        return names


# What a state's HDF5 file says about itself: which path each data set stands for, and the skeleton.
#
# Tensors are data sets in groups by module: `model/layer1.0.weight` is `/model/layer1/0/weight`. The way back is in
# `/__evergrad__/index`, a table from state paths to data sets, because two paths can ask for the same place. Types
# that HDF5 viewers lack (bfloat16, fp8, complex32) are unsigned integers of the same bits, with the true type in the
# attribute `dtype`.

STATE_INDEX = "__evergrad__"
SCHEMA_VERSION = 1
MAX_TEXT_BYTES = 1 << 29


@dataclass(frozen=True, slots=True)
class StateIndex:
    """The index of our own files: state path → (HDF5 path, element type)."""

    tensors: Mapping[str, tuple[str, DType]]
    metadata: Mapping[str, str]
    skeleton: Skeleton


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor to be written: its bits come in blocks."""

    shape: tuple[int, ...]
    dtype: DType
    blocks: Callable[[], Iterator[tuple[int, int, Bits]]]


def hdf5_paths(names: Iterable[str]) -> dict[str, str]:
    """A place of its own for every path, by module where it can be.

    >>> hdf5_paths(["model/layer1.0.weight", "step"])
    {'model/layer1.0.weight': 'model/layer1/0/weight', 'step': 'step'}
    """
    groups: set[str] = {STATE_INDEX}
    taken: set[str] = {STATE_INDEX}  # data sets, and names that are not to be used
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
    tensors: Mapping[str, TensorSource],
    aliases: Mapping[str, str],
    skeleton: Skeleton,
    metadata: Mapping[str, str],
) -> None:
    """Write tensors, one block in memory at a time, and the notes; tied tensors are one data set with two names."""
    h5py = import_h5py(path)
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
        notes = file.create_group(STATE_INDEX)
        for key, text in (("index", json.dumps(index, separators=(",", ":"))), ("skeleton", skeleton.dumps())):
            # A fixed-length string is plain bytes in the file; an attribute could hold 64 KB only.
            notes.create_dataset(key, data=text.encode(), dtype=h5py.string_dtype("utf-8", len(text.encode())))


def read_state_index(file: Hdf5File) -> StateIndex:
    """The index and the skeleton of a file that `write_hdf5` made."""
    texts: dict[str, str] = {}
    for key in ("index", "skeleton"):
        with hdf5_errors(file.path, f"{STATE_INDEX}/{key}"):
            data = file.dataset(f"{STATE_INDEX}/{key}".encode())
            kind = data.get_type()
            length = kind.get_size()
            if kind.get_class() != 3 or kind.is_variable_str() or data.get_space().get_simple_extent_npoints() != 1:
                raise ValueError("is not one string of fixed length")
            if length > min(MAX_TEXT_BYTES, file.size):
                raise LimitExceeded(file.path, f"{STATE_INDEX}/{key}: {length} bytes in a file of {file.size}")
            raw = np.empty(length, np.uint8)
            h5py = import_h5py(file.path)
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
        return StateIndex(tensors, metadata, skeleton)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, StateError) as error:
        raise DamagedFile(file.path, f"notes in {STATE_INDEX} are damaged: {error}") from None


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

    def write(self, path: str, source: TensorSource) -> None:
        """Create one data set and write its blocks."""
        kind, shape = self._type(source.dtype), source.shape
        space = self._h5.h5s.create_simple(shape) if shape else self._h5.h5s.create(self._h5.h5s.SCALAR)
        data = self._h5.h5d.create(self._file.id, None, kind, space, self._creation)
        self._h5.h5o.link(data, self._file.id, path.encode(), lcpl=self._links)
        if source.dtype.numpy is None:
            self._h5.Dataset(data).attrs["dtype"] = source.dtype.value
        for start, stop, bits in source.blocks():
            raw = np.ascontiguousarray(bits).reshape(-1).view(np.uint8)
            for corner, lengths in hyperslabs(shape, start, stop):
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


_MAX_AXES = 32  # HDF5's own limit
MAGIC = b"\x89HDF\r\n\x1a\n"
MAX_ATTRIBUTE_BYTES = 1 << 20

_CHAINER_LEAVES = {"W", "b", "gamma", "beta", "avg_mean", "avg_var", "N"}
_CHAINER_SLOTS = {"m", "v", "t", "vhat", "msd", "msdx", "ms", "mg", "delta", "h", "g", "prev_g"}


class Hdf5(Format):
    """Any HDF5 file; `ck.format` tells whose it is where that can be seen."""

    name = "hdf5"
    suffixes = (".h5", ".hdf5")

    def recognises(self, probe: Probe) -> bool:
        """The magic bytes at the start, or after a user block of 512, 1024, 2048, … bytes."""
        if probe.is_folder:
            return False
        if probe.head.startswith(MAGIC):
            return True
        with file_errors(probe.path), open_file(probe.path) as file:
            place, size = 512, probe.path.stat().st_size
            while place + len(MAGIC) <= size:
                file.seek(place)
                if file.read(len(MAGIC)) == MAGIC:
                    return True
                place *= 2
        return False

    def open(self, path: Path) -> Checkpoint:
        """Walk the links; no data set is read."""
        with closed_on_error(Hdf5File(path)) as file:
            return Hdf5Checkpoint(path, file)

    def losses(self, source: Checkpoint) -> list[str]:
        """Objects that cannot be rebuilt, and what the source leaves aside; anything else has a place in the file."""
        return losses_of(source, notes_kept=True)

    def check_write(self, target: Path) -> None:
        """Look for h5py before a temporary file is made."""
        import_h5py(target, "cannot be written as HDF5: h5py is not installed")

    def write(self, source: Checkpoint, path: Path, *, tensors_only: bool = False) -> None:
        """Write tensor by tensor, as `save_hdf5` does, with one block in memory at a time."""
        if not tensors_only:
            refuse_losses(source, self, self.losses(source))
        deep = [info for info in source.tensors.values() if len(info.shape) > _MAX_AXES]
        if deep:
            found = f"{deep[0].name} with {len(deep[0].shape)}"
            raise UnsupportedContent(
                source.path, "has too many axes for HDF5", expected=f"at most {_MAX_AXES}", found=found
            )
        tied = {} if tensors_only else aliases_of(source.skeleton, source.tensors)
        tensors = {name: _source(source, info) for name, info in source.tensors.items() if name not in tied}
        skeleton = Skeleton.of_names(source.tensors) if tensors_only else source.skeleton
        write_hdf5(path, tensors, tied, skeleton, source.metadata)


class Hdf5Checkpoint(Checkpoint):
    """The data sets of an HDF5 file by path; in our own files, by the path they had in the state."""

    supports_dry_run = True

    def __init__(
        self,
        path: Path,
        file: Hdf5File,
        *,
        format: str | None = None,
        close: Callable[[], None] | None = None,
        unkept: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self._file = file
        self._close = close
        self._sets: dict[int, DataSet] = {}
        listing = list_file(file)
        self.format, self.metadata = _flavour(file, listing)
        notes = None
        if self.format == "pytorch-h5":
            notes = read_state_index(file)
            listing = _by_state_path(path, listing, notes)
            self.metadata = notes.metadata
        self._entries = listing.entries
        self.others = listing.others
        empty = _empty_groups(listing) if notes is None else {}
        kept = _kept(self.metadata, listing, notes)
        self.unkept = UnkeptAttributes(file, _objects(listing), kept, {**(unkept or {}), **empty})
        placements = [
            Placement(name, e.address, 0, e.shape, contiguous_strides(e.shape), e.dtype.itemsize)
            for name, e in listing.entries.items()
        ]
        types = [entry.dtype for entry in listing.entries.values()]
        roles = notes.skeleton.roles if notes is not None else _roles(self.format, listing)
        self.tensors: Mapping[str, TensorInfo] = describe(zip(placements, types, strict=True), roles)
        if notes is not None:
            self.skeleton = notes.skeleton
        else:
            self.skeleton = Skeleton(Skeleton.of_names(self.tensors).root, find_sharing(placements))
        self.format = format or self.format

    def _read_bits(self, name: str, start: int, stop: int) -> Bits:
        return self._set(name).read(start, stop)

    def _bits_at(self, name: str, indices: npt.NDArray[np.int64]) -> Bits:
        return self._set(name).at(indices)

    def _xor_bits(self, name: str, indices: npt.NDArray[np.int64], patterns: Bits) -> Bits:
        return self._set(name).xor(indices, patterns)

    def checksum(self, name: str) -> Check:
        """Whether the data set passes its filters' checksums (fletcher32, gzip's own), or its archive's CRC."""
        self._info(name)
        return self._set(name).check()

    def doubt(self, name: str) -> str:
        """Return what the filters' checksums do not vouch for: chunks that are not in the file, or skip a filter."""
        self._info(name)
        return self._set(name).doubt()

    def close(self) -> None:
        """Make changes durable and let go of the file; twice is fine."""
        self._sets.clear()
        self._file.close()
        if self._close is not None:
            self._close()

    def _set(self, name: str) -> DataSet:
        entry = self._entries[name]
        found = self._sets.get(entry.address)
        if found is None:
            found = self._sets[entry.address] = DataSet(self._file, name, entry)
        _ = self._file.root  # refuses where the file is closed
        return found


def _objects(listing: FileListing) -> dict[str, bytes]:
    """Everything that may have attributes, under one name each."""
    sets = {entry.address: (name, entry.where) for name, entry in reversed(listing.entries.items())}
    return {"/": b"/", **listing.groups, **dict(reversed(sets.values()))}


def _empty_groups(listing: FileListing) -> dict[str, str]:
    """The groups of another library's file with nothing in them, which the names of tensors do not tell of."""
    above = {name.rpartition("/")[0] for name in (*listing.entries, *listing.others, *listing.groups)}
    empty = [name for name in listing.groups if name not in above]
    found = dict.fromkeys(empty[:MAX_NAMED], "an empty HDF5 group")
    if len(empty) > MAX_NAMED:
        found["… groups"] = f"{len(empty) - MAX_NAMED} further empty HDF5 groups"
    return found


def _kept(metadata: Mapping[str, str], listing: FileListing, notes: StateIndex | None) -> set[str]:
    """The attributes that are served: texts of the root are metadata, and our own `dtype` is the element's type."""
    if notes is None:
        return {f"/@{key}" for key in metadata}
    return {f"{name}@dtype" for name, entry in listing.entries.items() if entry.dtype.numpy is None}


def _source(source: Checkpoint, info: TensorInfo) -> TensorSource:
    def pieces() -> Iterator[tuple[int, int, Bits]]:
        for start, stop in block_ranges(info):
            yield start, stop, source.read_bits(info.name, start, stop)

    return TensorSource(info.shape, info.dtype, pieces)


def _flavour(file: Hdf5File, listing: FileListing) -> tuple[str, dict[str, str]]:
    """Whose file it is, and the texts of fixed length among its root attributes."""
    notes: dict[str, str] = {}
    with hdf5_errors(file.path, "root attributes are damaged"):
        attributes = file.root.attrs
        names = set(attributes)
        for name in sorted(names):
            kind = attributes.get_id(name)
            # Texts of varying length (Keras' model_config) are left alone: they lie in a global heap, and a damaged one
            # makes the HDF5 library (2.0.0) loop for ever.
            fixed = kind.get_type().get_class() == 3 and not kind.get_type().is_variable_str()
            if fixed and kind.shape == () and kind.get_storage_size() < MAX_ATTRIBUTE_BYTES:
                value = attributes[name]
                notes[name] = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
    if STATE_INDEX in listing.groups and f"{STATE_INDEX}/index" in listing.others:
        return "pytorch-h5", notes
    if names & {"keras_version", "model_config"} or "model_weights" in listing.groups:
        return "keras-h5", notes
    if any(name == "vars" or name.endswith("/vars") for name in listing.groups) and "layers" in listing.groups:
        return "keras-weights-h5", notes
    if not names and listing.entries and _is_chainer(listing.entries):
        return "chainer-h5", notes
    return "hdf5", notes


def _is_chainer(entries: Mapping[str, DataSetEntry]) -> bool:
    """Links by attribute name with parameters W, b, gamma, beta; of an optimizer, the slots below each of them."""
    telling = False
    for name in entries:
        parents, leaf = name.split("/")[:-1], name.split("/")[-1]
        if parents and leaf in _CHAINER_LEAVES:
            telling = telling or leaf in ("W", "gamma")
        elif len(parents) > 1 and parents[-1] in _CHAINER_LEAVES and leaf in _CHAINER_SLOTS:
            telling = telling or parents[-1] in ("W", "gamma")
        elif parents or leaf not in ("t", "epoch"):
            return False
    return telling


def _roles(format: str, listing: FileListing) -> dict[str, Role]:
    """What the names of Keras and Chainer say, and PyTorch's conventions do not know."""
    roles: dict[str, Role] = {}
    for name in listing.entries:
        first, leaf = name.split("/")[0], name.rsplit("/", 1)[-1]
        if format in ("keras-h5", "keras-weights-h5"):
            if first in ("optimizer", "optimizer_weights"):
                roles[name] = Role.OPTIMIZER
            elif role_of(name) is not Role.BUFFER:
                roles[name] = Role.MODEL
        elif format == "chainer-h5":
            slot = leaf in _CHAINER_SLOTS and leaf not in _CHAINER_LEAVES
            if slot or name == "epoch":
                roles[name] = Role.OPTIMIZER
            elif leaf in ("avg_mean", "avg_var", "N"):
                roles[name] = Role.BUFFER
            else:
                roles[name] = Role.MODEL
    return roles


def _by_state_path(path: Path, listing: FileListing, notes: StateIndex) -> FileListing:
    """The listing of one of our own files, under the paths and with the types of the state."""
    entries: dict[str, DataSetEntry] = {}
    for name, (place, dtype) in notes.tensors.items():
        found = listing.entries.get(place)
        if found is None:
            raise DamagedFile(path, f"{STATE_INDEX}/index names a data set {place[:200]!r}, which is not there")
        if found.dtype is not dtype:
            if found.dtype.itemsize != dtype.itemsize or found.dtype.layout.kind != "uint" or dtype.numpy is not None:
                raise DamagedFile(path, f"{place}: wrong type", expected=dtype, found=found.dtype)
            found = DataSetEntry(found.address, found.where, found.shape, DType(dtype), found.big_endian, found.offset)
        entries[name] = found
    places = {place for place, _ in notes.tensors.values()}
    ours = {f"{STATE_INDEX}/index", f"{STATE_INDEX}/skeleton"}
    others = {name: what for name, what in listing.others.items() if name not in ours}
    others.update((name, "a data set that the index does not name") for name in listing.entries if name not in places)
    return FileListing(entries, others, listing.groups)
