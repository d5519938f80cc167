"""Checkpoints that are folders: shards under an index, and what Transformers' Trainer leaves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from evergrad._files import file_errors, open_file
from evergrad.errors import DamagedFile, LimitExceeded, UnknownFormat, said
from evergrad.formats.byte_source import DataFile, close_all, indexed_file_size
from evergrad.formats.checkpoint import Bits, Checkpoint, Format, OtherTensor, Probe, block_ranges, digest, read_blocks
from evergrad.formats.unsupported_files import TENSOR_FILES, Beside, unread_file
from evergrad.records import Check, Json, Neighbour, TensorInfo
from evergrad.state import Sharing, Skeleton, escape, role_of
from evergrad.state.sharing import View
from evergrad.state.skeleton import JoinedStates, join_states

if TYPE_CHECKING:
    import torch


# Read the shards of an index as one state: tensors with and without an entry in the index, and values.
#
# A shard may hold more than the index says. Everything in it is listed: under its own name where no other shard has
# that name, else behind the name of its file, as content that is compared by its bytes and that no conversion keeps.

PartTensor: TypeAlias = tuple[Checkpoint, str]
"""A shard, and a name in it."""
_TENSOR = OtherTensor("another tensor of that name")


@dataclass(slots=True)
class MergedShards:
    """The content of several shards, by name."""

    names: dict[str, PartTensor] = field(default_factory=dict)
    """Tensors."""
    others: dict[str, str] = field(default_factory=dict)
    """Content that is no dense tensor: name → what it is."""
    other_names: dict[str, PartTensor] = field(default_factory=dict)
    """The place of each of `others`."""
    unindexed: tuple[str, ...] = ()
    """The tensors that the index does not name."""
    skeleton: Skeleton = field(default_factory=lambda: Skeleton({"dict": []}))


def merge(index: Path, shards: Mapping[str, Checkpoint], weight_map: Mapping[str, str]) -> MergedShards:
    """All content of the shards; `DamagedFile` if one does not hold what the index says."""
    values = {file: part.skeleton.described_values() for file, part in shards.items()}
    owners = dict(_held(index, shards, values, weight_map))
    if any(values.values()) or any(part.skeleton.objects() for part in shards.values()):
        roots = {file: part.skeleton.root for file, part in shards.items()}
        joined = join_states(roots, owners)
        if joined is not None:
            return _by_tree(shards, values, owners, joined)
    return _by_name(shards, values, owners)


def _held(
    index: Path,
    shards: Mapping[str, Checkpoint],
    values: Mapping[str, Mapping[str, str]],
    weight_map: Mapping[str, str],
) -> Iterator[tuple[str, str]]:
    """The path in its shard, and the shard, of everything that the index names."""
    for name, file in weight_map.items():
        part = shards[file]
        # A torch shard escapes what a path may not hold; a safetensors shard lists names as they are.
        path = name if name in part.tensors else escape(name)
        if path not in part.tensors:
            path = name if name in part.others or name in values[file] else path
            if path not in part.others and path not in values[file]:
                raise DamagedFile(index, f"names tensor {name!r} in {file!r}, which does not hold it")
        yield path, file


def _by_name(
    shards: Mapping[str, Checkpoint], values: Mapping[str, Mapping[str, str]], owners: Mapping[str, str]
) -> MergedShards:
    """The content of shards that hold nothing but names and tensors; values, if any, are named."""
    found = MergedShards()
    for path, file in owners.items():
        if path in shards[file].tensors:
            found.names[path] = (shards[file], path)
    taken: dict[str, str] = {path: owners[path] for path in found.names}
    unindexed = []
    for file, part in shards.items():
        for path in part.tensors:
            if taken.setdefault(path, file) != file:
                _add_second(found, file, part, path, _TENSOR)
            elif path not in found.names:
                found.names[path] = (part, path)
                unindexed.append(path)
    taken = dict(owners)
    for file, part in shards.items():
        for path, what in {**values[file], **part.others}.items():
            if taken.setdefault(path, file) != file:
                _add_second(found, file, part, path, what)
            else:
                found.others[path], found.other_names[path] = what, (part, path)
    found.unindexed = tuple(unindexed)
    found.skeleton = _with_views(shards.values(), found.names, Skeleton.of_names(found.names).root)
    return found


def _by_tree(
    shards: Mapping[str, Checkpoint],
    values: Mapping[str, Mapping[str, str]],
    owners: Mapping[str, str],
    joined: JoinedStates,
) -> MergedShards:
    """The content of shards of which some hold values or objects: one state, made of theirs."""
    found = MergedShards()
    tensors = {path: (shards[file], path) for path, file in joined.tensors.items()}
    found.names = {path: tensors[path] for path in owners if path in tensors} | tensors
    lost: dict[str, set[str]] = {}
    for file, position in joined.lost:
        lost.setdefault(file, set()).add(position)
    for file, part in shards.items():
        is_lost = _below_any(lost.get(file, set()))
        for path in part.tensors:
            if joined.tensors.get(path) != file:
                _add_second(found, file, part, path, _TENSOR)
        for path, what in part.others.items():
            if is_lost(path):
                _add_second(found, file, part, path, what)
            else:
                found.others[path], found.other_names[path] = what, (part, path)
        for path, what in values[file].items():
            if is_lost(path):
                _add_second(found, file, part, path, what)
    indexed = _below_any(set(owners))
    found.unindexed = tuple(path for path in found.names if not indexed(path))
    found.skeleton = _with_views(shards.values(), found.names, joined.root)
    return found


def _add_second(found: MergedShards, file: str, part: Checkpoint, path: str, what: str) -> None:
    """Name what a shard holds under the name of something that another shard holds."""
    name = f"{escape(file)}/{path}"
    while name in found.others or name in found.names:
        name += "'"
    told = f"not the {path} of the index: {what}"
    found.others[name] = OtherTensor(told) if isinstance(what, OtherTensor) else told
    found.other_names[name] = (part, path)


def _below_any(positions: set[str]) -> Callable[[str], bool]:
    """Return a predicate that is true for these positions and for their parts and attributes."""

    def is_below(path: str) -> bool:
        if not positions:
            return False
        path = path.removesuffix("@attributes")
        while path not in positions:
            path, slash, _ = path.rpartition("/")
            if not slash:
                return False
        return True

    return is_below


def _with_views(parts: Iterable[Checkpoint], names: Mapping[str, PartTensor], root: Json) -> Skeleton:
    """The skeleton with that root; sharing within one shard is kept."""
    sizes: list[int] = []
    views: dict[str, View] = {}
    for part in parts:
        sharing = part.skeleton.sharing
        for name, view in sharing.views.items():
            if name in names and names[name][0] is part:
                views[name] = View(view.storage + len(sizes), view.offset, view.stride)
        sizes.extend(sharing.sizes)
    return Skeleton(root, Sharing(tuple(sizes) if views else (), views))


INDEX_SUFFIX = ".index.json"
MAX_INDEX_BYTES = 1 << 28

OpenCheckpoint = Callable[[Path], Checkpoint]


class CompositeCheckpoint(Checkpoint):
    """Several checkpoints as one: each name leads to a part and the name in it."""

    supports_dry_run = True

    def __init__(
        self,
        format: str,
        path: Path,
        parts: list[Checkpoint],
        names: Mapping[str, tuple[Checkpoint, str]],
        *,
        skeleton: Skeleton | None = None,
        others: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        other_names: Mapping[str, tuple[Checkpoint, str]] | None = None,
        other_files: Mapping[str, Path] | None = None,
        unindexed: Sequence[str] = (),
    ) -> None:
        self.format = format
        self.path = path
        chains: dict[int, dict[str, Neighbour]] = {}
        self.tensors = {name: _renamed(name, part.tensors[inner], chains) for name, (part, inner) in names.items()}
        self.others = others or {}
        self.metadata = metadata or {}
        self.unkept = {k: what for part in parts for k, what in part.unkept.items()}
        self.skeleton = Skeleton.of_names(names) if skeleton is None else skeleton
        self._parts = parts
        self._names = names
        self._other_names = other_names or {}
        self._other_files = other_files or {}
        self.unindexed = unindexed

    def _read_bits(self, name: str, start: int, stop: int) -> Bits:
        part, inner = self._names[name]
        return part.read_bits(inner, start, stop)

    def _bits_at(self, name: str, indices: npt.NDArray[np.int64]) -> Bits:
        part, inner = self._names[name]
        return part.bits_at(inner, indices)

    def _xor_bits(self, name: str, indices: npt.NDArray[np.int64], patterns: Bits) -> Bits:
        part, inner = self._names[name]
        return part.xor(inner, indices, patterns)

    @property
    def parts(self) -> list[Checkpoint]:
        """The checkpoints that this one is made of."""
        return self._parts

    def files(self) -> list[Path]:
        """Those of every part, and the index or folder itself."""
        return [self.path, *(file for part in self._parts for file in part.files())]

    def borrow(self, name: str) -> torch.Tensor:
        """As the part that holds the tensor says."""
        self._info(name)
        part, inner = self._names[name]
        return part.borrow(inner)

    def addresses(self, name: str, start: int = 0, stop: int | None = None) -> npt.NDArray[np.int64] | None:
        """As the part that holds the tensor says."""
        self._info(name)
        part, inner = self._names[name]
        return part.addresses(inner, start, stop)

    def checksum(self, name: str) -> Check:
        """As the part that holds the tensor says."""
        self._info(name)
        part, inner = self._names[name]
        return part.checksum(inner)

    def doubt(self, name: str) -> str:
        """As the part that holds the tensor says."""
        self._info(name)
        part, inner = self._names[name]
        return part.doubt(inner)

    @property
    def doubts(self) -> Mapping[str, str]:
        """The doubts of all parts."""
        return {name: why for part in self._parts for name, why in part.doubts.items()}

    def fingerprint(self, name: str) -> str | None:
        """As the part that holds it says; of a file that is no part, over all of its bytes."""
        if name in self._other_names:
            part, inner = self._other_names[name]
            if inner in part.others or inner not in part.tensors:
                return part.fingerprint(inner)
            info = part.tensors[inner]
            bits = (part.read_bits(inner, start, stop).tobytes() for start, stop in block_ranges(info))
            return digest((info.shape, info.dtype.value), bits)
        path = self._other_files.get(name)
        if path is None or not path.is_file():
            return None
        file = DataFile(path)
        try:
            return digest(self.others[name], read_blocks(file, 0, file.size))
        finally:
            file.close()

    def check_other(self, name: str) -> Check:
        """As the part that holds it says."""
        if name not in self._other_names:
            return Check.UNKNOWN
        part, inner = self._other_names[name]
        if inner in part.others or inner not in part.tensors:
            return part.check_other(inner)
        # A checksum alone does not make a tensor sound whose values nobody looks at.
        return Check.FAILED if part.checksum(inner) is Check.FAILED else Check.UNKNOWN

    def container_checks(self) -> Mapping[str, Check]:
        """Those of every part, behind its file name."""
        return {f"{p.path.name}/{what}": check for p in self._parts for what, check in p.container_checks().items()}

    def close(self) -> None:
        """Close every part, and only then raise the first error."""
        close_all(self._parts)


class Sharded(Format):
    """Logical tensors over several files, by a `*.index.json` (safetensors or torch shards).

    Opened by the index file or by its folder: then other tensor files in it are listed behind their names. A folder
    with a single tensor file and no index is that file.
    """

    name = "sharded"

    def __init__(self, opener: OpenCheckpoint) -> None:
        self._open_file = opener

    def recognises(self, probe: Probe) -> bool:
        """An index file, a folder with one, or a folder with a single tensor file."""
        if probe.is_folder:
            return len(_indices(probe.path)) == 1 or len(_tensor_files(probe.path)) == 1
        return probe.head.lstrip()[:1] == b"{" and b'"weight_map"' in probe.head + _tail(probe.path)

    def open(self, path: Path) -> Checkpoint:
        """Read the index, then the header of every shard it names."""
        if not path.is_dir():
            return self.open_index(path)[0]
        indices = _indices(path)
        if not indices:
            (file,) = _tensor_files(path)[:1]
            return self._with_rest(self._open_file(file), path, {file})
        main, shards = self.open_index(indices[0])
        return self._with_rest(main, path, {indices[0], *shards})

    def open_index(self, index: Path) -> tuple[CompositeCheckpoint, set[Path]]:
        """The logical tensors that an index names, and what else its shards hold; and the paths of the shards."""
        weight_map = _read_index(index)
        parts: dict[str, Checkpoint] = {}
        try:
            for file in weight_map.values():
                if file not in parts:
                    parts[file] = self._open_file(_beside(index, file))
            merged = merge(index, parts, weight_map)
            kind = f"{next(iter(parts.values())).format}-sharded" if parts else "sharded"
            sharded = CompositeCheckpoint(
                kind,
                index,
                list(parts.values()),
                merged.names,
                skeleton=merged.skeleton,
                others=merged.others,
                metadata={key: text for part in parts.values() for key, text in part.metadata.items()},
                other_names=merged.other_names,
                unindexed=merged.unindexed,
            )
            return sharded, {index.parent / file for file in parts}
        except BaseException:
            close_all(parts.values())
            raise

    def _with_rest(self, main: Checkpoint, folder: Path, taken: set[Path]) -> Checkpoint:
        """The checkpoint with all else that lies in its folder: tensor files are opened, other files named."""
        opened: dict[str, Checkpoint] = {}
        try:
            beside = Beside()
            _open_all(self._open_file, [file for file in _tensor_files(folder) if file not in taken], opened, beside)
            beside.add_rest(folder, taken | {folder / name for name in opened})
            if not opened and not beside.others:
                main.unkept = {**main.unkept, **beside.unkept}
                return main
            return _joined(main, folder, opened, beside)
        except BaseException:
            close_all([main, *opened.values()])
            raise


class PlainFolder(Format):
    """A folder with several tensor files and no index that covers them: each behind its file's name.

    A sharded model is listed under the name its index is for, as if it were one file.
    """

    name = "folder"

    def __init__(self, opener: OpenCheckpoint) -> None:
        self._open_file = opener

    def recognises(self, probe: Probe) -> bool:
        """Two tensor files or more."""
        return probe.is_folder and len(_tensor_files(probe.path)) > 1

    def open(self, path: Path) -> Checkpoint:
        """Open every tensor file of the folder; other files are named and left alone."""
        opened: dict[str, Checkpoint] = {}
        try:
            taken: set[Path] = set()
            for index in _indices(path):
                sharded, shards = Sharded(self._open_file).open_index(index)
                opened[index.name.removesuffix(INDEX_SUFFIX)] = sharded
                taken |= {index, *shards}
            beside = Beside()
            files = [file for file in _tensor_files(path) if file not in taken and file.name not in opened]
            _open_all(self._open_file, files, opened, beside)
            beside.add_rest(path, taken | {path / name for name in opened})
            return by_file(self.name, path, opened, beside)
        except BaseException:
            close_all(opened.values())
            raise


class TrainerFolder(PlainFolder):
    """A `checkpoint-N` folder of Transformers' Trainer: model, optimizer, scheduler and RNG files."""

    name = "transformers-trainer"

    def recognises(self, probe: Probe) -> bool:
        """A folder with `trainer_state.json`."""
        return "trainer_state.json" in probe.names


def by_file(format: str, path: Path, opened: Mapping[str, Checkpoint], beside: Beside) -> CompositeCheckpoint:
    """Every part's tensors, behind the name of its file."""
    return _combined(format, path, None, opened, beside)


def _joined(main: Checkpoint, folder: Path, opened: Mapping[str, Checkpoint], beside: Beside) -> CompositeCheckpoint:
    """A checkpoint under its own names, and the tensors of other files behind the names of these."""
    root = main.skeleton.root
    taken = {name.partition("/")[0] for name in (*main.tensors, *main.others, *main.skeleton.values())}
    fits = isinstance(root, dict) and "dict" in root
    if opened and (not fits or not taken.isdisjoint(map(escape, opened))):
        logical = main.path.name.removesuffix(INDEX_SUFFIX)
        return by_file(PlainFolder.name, folder, {logical: main, **opened}, beside)
    return _combined(main.format, main.path, main, opened, beside)


def _combined(
    format: str, path: Path, main: Checkpoint | None, opened: Mapping[str, Checkpoint], beside: Beside
) -> CompositeCheckpoint:
    """`main`, if there is one, as it is, and the content of every other part behind the name of its file."""
    names: dict[str, tuple[Checkpoint, str]] = {}
    others: dict[str, str] = {}
    other_names: dict[str, tuple[Checkpoint, str]] = {}
    unindexed: list[str] = []
    roots: list[Json] = []
    sizes: list[int] = []
    views: dict[str, View] = {}
    parts = list(opened.values())
    if main is not None:
        parts = [*(main.parts if isinstance(main, CompositeCheckpoint) else [main]), *parts]
        names.update((name, (main, name)) for name in main.tensors)
        others.update(main.others)
        other_names.update((name, (main, name)) for name in main.others)
        unindexed += main.unindexed
        sizes += main.skeleton.sharing.sizes
        views.update(main.skeleton.sharing.views)
    for file, part in sorted(opened.items()):
        prefix = escape(file)
        names.update((f"{prefix}/{name}", (part, name)) for name in part.tensors)
        others.update((f"{prefix}/{name}", what) for name, what in part.others.items())
        other_names.update((f"{prefix}/{name}", (part, name)) for name in part.others)
        unindexed += [f"{prefix}/{name}" for name in part.unindexed]
        below = part.skeleton.below(prefix)
        roots.append([file, below.root])
        for name, view in below.sharing.views.items():
            views[name] = View(view.storage + len(sizes), view.offset, view.stride)
        sizes.extend(below.sharing.sizes)
    root: Json = {"dict": roots}
    if main is not None:
        root = main.skeleton.root
        if roots and isinstance(root, dict) and isinstance(pairs := root["dict"], list):
            root = {**root, "dict": [*pairs, *roots]}
    combined = CompositeCheckpoint(
        format,
        path,
        parts,
        names,
        skeleton=Skeleton(root, Sharing(tuple(sizes), views)),
        others={**others, **beside.others},
        metadata=main.metadata if main is not None else {},
        other_names=other_names,
        other_files=beside.files,
        unindexed=unindexed,
    )
    combined.unkept = {**combined.unkept, **beside.unkept}
    return combined


def _open_all(opener: OpenCheckpoint, files: Iterable[Path], opened: dict[str, Checkpoint], beside: Beside) -> None:
    """Open tensor files; those that turn out to be of a format that is not read are named."""
    for file in files:
        try:
            opened[file.name] = opener(file)
        except UnknownFormat:
            beside.add(file, unread_file(file))


def _renamed(name: str, info: TensorInfo, chains: dict[int, dict[str, Neighbour]]) -> TensorInfo:
    """The tensor under the name that it has in the folder; a chain of neighbours is renamed once for all of it."""
    if name == info.name:
        return info
    prefix = name.removesuffix(info.name)
    role = role_of(name, is_float=info.dtype.is_float, rank=len(info.shape))
    if info.place is None:
        return TensorInfo(name, info.shape, info.dtype, role, info.nbytes, read_only=info.read_only)
    chain = chains.get(id(info.neighbours))
    if chain is None:
        chain = {n.name: Neighbour(prefix + n.name, n.start, n.stop) for n in info.neighbours}
        chains[id(info.neighbours)] = chain
    chained = tuple(chain.values())
    return TensorInfo(name, info.shape, info.dtype, role, info.nbytes, chained, chain[info.place.name], info.read_only)


def _read_index(index: Path) -> dict[str, str]:
    """Which file holds which tensor."""
    with file_errors(index), open_file(index) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_INDEX_BYTES:
            raise LimitExceeded(index, "index", expected=f"at most {MAX_INDEX_BYTES} bytes", found=size)
        text = file.read()
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(index, f"is not JSON: {said(error)}") from None
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise DamagedFile(index, "no weight_map", expected="a table of tensor names and file names")
    return weight_map


def _beside(index: Path, file: str) -> Path:
    """A shard's path; an index may only name files in its own folder."""
    path = index.parent / file
    if "/" in file or "\\" in file or "\0" in file or file in ("", ".", "..") or file.endswith(INDEX_SUFFIX):
        raise DamagedFile(
            index, "names a file outside its folder", expected="a plain file name", found=repr(file[:200])
        )
    indexed_file_size(index, path)
    return path


def _indices(folder: Path) -> list[Path]:
    with file_errors(folder):
        return sorted(child for child in folder.iterdir() if child.name.endswith(INDEX_SUFFIX) and child.is_file())


def _tensor_files(folder: Path) -> list[Path]:
    with file_errors(folder):
        return sorted(child for child in folder.iterdir() if child.suffix in TENSOR_FILES and child.is_file())


def _tail(path: Path) -> bytes:
    with file_errors(path), open_file(path) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 4096))
        return file.read(4096) if size <= MAX_INDEX_BYTES else b""
