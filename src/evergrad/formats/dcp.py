"""Folders of torch.distributed.checkpoint: tensors in parts, each a small torch file inside a `.distcp` file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from evergrad.dtypes import DType
from evergrad.errors import DamagedFile, FileAccessError, LimitExceeded, UnsupportedContent
from evergrad.formats.byte_source import ByteSource, DataFile, close_all, indexed_file_size
from evergrad.formats.checkpoint import Checkpoint, Format, OtherTensor, Probe, digest, read_blocks
from evergrad.formats.offset_checkpoint import AddressedCheckpoint
from evergrad.formats.pickle_reader import GlobalName, PickleError, read_pickle
from evergrad.formats.region import Region
from evergrad.formats.tiled import TensorBox, TiledCheckpoint, TiledTensor, check_tiling
from evergrad.formats.torch_file import open_archive, open_legacy
from evergrad.formats.torch_objects import TorchBuilder
from evergrad.formats.zip_archive import Archive, InflatedMember
from evergrad.records import MAX_AXES, Check
from evergrad.state import ROOT
from evergrad.state.selection import tensor_info

# The `.metadata` of torch.distributed.checkpoint: a pickle of its dataclasses, read and never run.

MAX_METADATA_BYTES = 1 << 29


class StoredPart(NamedTuple):
    """Where a part is stored: bytes of a file beside the metadata."""

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


class StoredTensor(NamedTuple):
    """A tensor and its parts, those that hold nothing left out."""

    shape: tuple[int, ...]
    dtype: DType
    parts: list[tuple[TensorBox, StoredPart]]


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """What the metadata says of the whole folder."""

    tensors: dict[str, StoredTensor]
    others: dict[str, str]
    objects: list[StoredPart]
    object_places: dict[str, StoredPart]
    """The places of objects in the file as they were saved."""


def read_metadata(path: Path) -> DcpMetadata:
    """Read the metadata file; `DamagedFile` if it contradicts itself."""
    file = DataFile(path)
    try:
        if file.size > MAX_METADATA_BYTES:
            raise LimitExceeded(path, "metadata", expected=f"at most {MAX_METADATA_BYTES} bytes", found=file.size)
        value, _, opcodes = read_pickle(file.read(0, file.size), _MetadataBuilder())
        return _folder(value, opcodes)
    except (PickleError, ValueError) as error:
        raise DamagedFile(path, f"is damaged: {error}") from None
    finally:
        file.close()


@dataclass(eq=False, slots=True)
class _Record:
    """One of the dataclasses, as its fields."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)


class _MetadataBuilder(TorchBuilder):
    """Also makes records of DCP's dataclasses, by their names alone."""

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        if type(function) is GlobalName:
            if (function.module, function.name) == ("torch", "Size"):
                return _sizes(tuple(arguments[0]) if arguments else ())
            if function.module.startswith("copy") and arguments and type(arguments[0]) is GlobalName:
                function = arguments[0]  # how protocols before 2 make objects
            if function.module.startswith("torch.distributed.") and function.name in _KINDS:
                return _Record(function.name)
        return super().call(function, arguments)

    def name(self, name: GlobalName) -> Any:
        return name

    def set_state(self, target: Any, state: Any) -> Any:
        if type(target) is not _Record:
            return super().set_state(target, state)
        if target.kind == "TensorProperties" and type(state) is tuple and state:
            target.fields["dtype"] = state[0]
        for part in state if type(state) is tuple else (state,):
            if type(part) is dict:
                target.fields.update((key, value) for key, value in part.items() if type(key) is str)
        return target


_KINDS = {
    "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
    "MetadataIndex", "_StorageInfo", "StorageMeta",
}  # fmt: skip


def _folder(value: Any, opcodes: int) -> DcpMetadata:
    metadata = _fields(value, "Metadata")
    listed, stored = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if type(listed) is not dict or type(stored) is not dict:
        raise ValueError("no tables of tensors and of their places")
    places = {_key(index): _place(info) for index, info in stored.items()}
    tensors: dict[str, StoredTensor] = {}
    others: dict[str, str] = {}
    object_places: dict[str, StoredPart] = {}
    count = 0
    for name, what in listed.items():
        if type(name) is not str or type(what) is not _Record:
            raise ValueError(f"an entry that is no tensor and no object: {str(name)[:80]!r}")
        if what.kind == "BytesStorageMetadata":
            others[name] = "an object saved by torch.save"
            if (place := places.get((name, None))) and not place.transforms:
                object_places[name] = place
            continue
        fields = _fields(what, "TensorStorageMetadata")
        chunks = fields.get("chunks")
        if type(chunks) is not list:
            raise ValueError(f"{name[:80]!r} has no list of parts")
        # One list may be named by every tensor: what that costs is bounded by what the file cost to read.
        count += len(chunks)
        if count > opcodes:
            raise ValueError("more parts than the file can name")
        kind = _fields(fields.get("properties"), "TensorProperties").get("dtype")
        dtype = DType.named(kind.name) if type(kind) is GlobalName and kind.module == "torch" else None
        if dtype is None:
            others[name] = OtherTensor(f"a tensor of {kind if type(kind) is GlobalName else 'unknown type'}")
            continue
        tensor = _tensor(name, _sizes(fields.get("size")), dtype, chunks, places)
        through = sorted({transform for _, place in tensor.parts for transform in place.transforms})
        if through:
            others[name] = OtherTensor(f"a tensor stored through {', '.join(through)}")
        else:
            tensors[name] = tensor
    return DcpMetadata(tensors, others, list(object_places.values()), object_places)


def _tensor(
    name: str,
    shape: tuple[int, ...],
    dtype: DType,
    chunks: list[Any],
    places: dict[tuple[str, tuple[int, ...] | None], StoredPart],
) -> StoredTensor:
    boxes = []
    for chunk in chunks:
        fields = _fields(chunk, "ChunkStorageMetadata")
        boxes.append(TensorBox(_sizes(fields.get("offsets")), _sizes(fields.get("sizes"))))
    try:
        kept = check_tiling(shape, boxes)
    except ValueError as error:
        raise ValueError(f"{name[:80]}: {error}") from None
    parts = []
    for box in (boxes[number] for number in kept):
        place = places.get((name, box.offsets)) or places.get((name, None))
        if place is None:
            raise ValueError(f"{name[:80]}: no place for its part at {box.offsets}")
        parts.append((box, place))
    return StoredTensor(shape, dtype, parts)


def _fields(value: Any, kind: str) -> dict[str, Any]:
    if type(value) is not _Record or value.kind != kind:
        raise ValueError(f"no {kind} where one should be")
    return value.fields


def _key(index: Any) -> tuple[str, tuple[int, ...] | None]:
    fields = _fields(index, "MetadataIndex")
    name, offset = fields.get("fqn"), fields.get("offset")
    if type(name) is not str:
        raise ValueError("a place without a name")
    return name, None if offset is None else _sizes(offset)


def _place(info: Any) -> StoredPart:
    fields = _fields(info, "_StorageInfo")
    file, offset, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
    if type(file) is not str or type(offset) is not int or type(length) is not int or min(offset, length) < 0:
        raise ValueError("a place without file, offset and length")
    if "/" in file or "\\" in file or "\0" in file or file in ("", ".", ".."):
        raise ValueError(f"names a file outside its folder: {file[:200]!r}")
    transforms = fields.get("transform_descriptors") or ()
    if type(transforms) not in (list, tuple) or not all(type(each) is str for each in transforms):
        raise ValueError("a place with transforms that are no names")
    return StoredPart(file, offset, length, tuple(transforms))


def _sizes(value: Any) -> tuple[int, ...]:
    if type(value) is tuple and len(value) > MAX_AXES:
        raise ValueError(f"a tensor of {len(value)} axes (expected at most {MAX_AXES})")
    if type(value) is tuple and all(type(n) is int and 0 <= n < 1 << 62 for n in value):
        return value
    raise ValueError("an impossible shape or offset")


METADATA = ".metadata"
MAX_OPEN_PARTS = 1024


class Dcp(Format):
    """What `torch.distributed.checkpoint.save` writes; opened by the folder or by its `.metadata`.

    Names are those of the metadata: DCP joins the keys of nested dicts by dots.
    """

    name = "dcp"

    def recognises(self, probe: Probe) -> bool:
        """A folder with `.metadata`, or that file."""
        if probe.is_folder:
            return METADATA in probe.names or {"__0.metadata", "__0_0.distcp"} <= probe.names
        return b"torch.distributed.checkpoint.metadata" in probe.head[:256]

    def open(self, path: Path) -> Checkpoint:
        """Read the metadata, and the size of every file that it names; no part is opened before it is used."""
        folder = path if path.is_dir() else path.parent
        metadata = folder / METADATA if path.is_dir() else path
        if not metadata.exists():
            what = "was saved without collectives: each rank has metadata of its own"
            raise UnsupportedContent(folder, what, hint="Load it with torch and save it again.")
        return _open(folder, metadata)


class FileSlice:
    """A part of a file, as if it were one; the file is closed by its owner."""

    in_place = True

    def __init__(self, file: DataFile, start: int, size: int) -> None:
        self.path = file.path
        self.size = size
        self._file, self._start = file, start
        if start < 0 or size < 0 or start + size > file.size:
            expected = f"at least {start + size} bytes"
            raise DamagedFile(file.path, "a part lies beyond the end", expected=expected, found=file.size)

    def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes, or `DamagedFile`."""
        self._check(offset, length)
        return self._file.read(self._start + offset, length)

    def read_into(self, offset: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Fill the buffer from here on, or raise `DamagedFile`."""
        self._check(offset, len(buffer))
        self._file.read_into(self._start + offset, buffer)

    def view(self) -> npt.NDArray[np.uint8]:
        """All bytes of the part, to look at."""
        return self._file.view()[self._start : self._start + self.size]

    def read_current(self, offset: int, length: int) -> bytes:
        """A few bytes as they are, or, in a rehearsal, as they would be by now."""
        self._check(offset, length)
        return self._file.read_current(self._start + offset, length)

    def xor(self, addresses: npt.NDArray[np.int64], rows: npt.NDArray[np.uint8], word: int) -> npt.NDArray[np.uint8]:
        """XOR a row of bytes onto each address and return what was there."""
        return self._file.xor(addresses + self._start, rows, word)

    def put(self, offset: int, data: bytes) -> None:
        """Replace a few bytes."""
        self._check(offset, len(data))
        self._file.put(self._start + offset, data)

    def check_writable(self) -> None:
        """Raise what altering would raise."""
        self._file.check_writable()

    def close(self) -> None:
        """Nothing to let go: the file is the owner's."""

    def _check(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.size:
            what = f"the part at byte {self._start} is cut short"
            raise DamagedFile(self.path, what, expected=f"at least {offset + length} bytes", found=self.size)


class _Files:
    """The `.distcp` files and the parts in them, opened when first needed; durable and closed together."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, DataFile] = {}
        self._parts: dict[StoredPart, AddressedCheckpoint] = {}
        self._closed = False

    def window(self, place: StoredPart) -> FileSlice:
        if self._closed:
            raise FileAccessError(self._folder, "is closed")
        if place.file not in self._files:
            self._files[place.file] = DataFile(self._folder / place.file)
        return FileSlice(self._files[place.file], place.offset, place.length)

    def part(self, place: StoredPart) -> AddressedCheckpoint:
        """The torch file at a place; one object while it is in use, so that its checksums add up."""
        window = self.window(place)
        if place not in self._parts:
            if len(self._parts) >= MAX_OPEN_PARTS:
                self._parts.clear()
            self._parts[place] = _part(window, place)
        return self._parts[place]

    def close(self) -> None:
        self._closed = True
        self._parts.clear()
        close_all(self._files.values())


def _part(window: ByteSource, place: StoredPart) -> AddressedCheckpoint:
    head = window.read(0, min(2, place.length))
    if head == b"PK":
        return open_archive(window.path, Archive.over(window))
    if head[:1] == b"\x80":
        return open_legacy(window.path, window)
    what = f"the part at byte {place.offset} is no torch file"
    raise UnsupportedContent(window.path, what, expected="504b or 80", found=head.hex() or "nothing")


def _region(files: _Files, box: TensorBox, place: StoredPart, dtype: DType) -> Region:
    part = files.part(place)
    info = part.tensors.get(ROOT)
    if info is None or info.shape != box.sizes or info.dtype != dtype:
        path, found = part.path, f"{info.dtype} {info.shape}" if info else f"{len(part.tensors)} tensors"
        raise DamagedFile(
            path, f"the part at byte {place.offset} is another", expected=f"{dtype} {box.sizes}", found=found
        )
    region = part.region(ROOT)
    if isinstance(region.source, InflatedMember):  # it would be rewritten, and all that lies behind it would move
        raise UnsupportedContent(part.path, f"the part at byte {place.offset} is compressed")
    return region


def _open(folder: Path, metadata: Path) -> Checkpoint:
    found = read_metadata(metadata)
    _check_places(folder, metadata, [place for t in found.tensors.values() for _, place in t.parts] + found.objects)
    files = _Files(folder)
    tensors = {}
    for name, (shape, dtype, parts) in found.tensors.items():
        info = tensor_info(name, shape, dtype)
        stored = sum(place.length for _, place in parts)
        if info.nbytes > max(64 * stored, 1 << 26):  # expanded tensors are larger than their bytes, within reason
            raise LimitExceeded(metadata, f"{name}: absurd shape {shape} over {stored} bytes")
        tensors[name] = info

    def locate(name: str) -> TiledTensor:
        shape, dtype, parts = found.tensors[name]
        return TiledTensor(name, shape, dtype, [box for box, _ in parts], lambda n: _region(files, *parts[n], dtype))

    def check_container() -> Mapping[str, Check]:
        checks: dict[str, list[Check]] = {}
        for tensor in found.tensors.values():
            for _, place in tensor.parts:
                checks.setdefault(place.file, []).extend(files.part(place).container_checks().values())
        for place in found.objects:
            window = files.window(place)
            if window.read(0, min(2, place.length)) == b"PK":
                archive = Archive.over(window)
                checks.setdefault(place.file, []).extend(archive.check(archive.members.values()).values())
        return {file: _together(results) for file, results in checks.items()}

    def fingerprint(name: str) -> str | None:
        place = found.object_places.get(name)
        return digest(found.others[name], read_blocks(files.window(place), 0, place.length)) if place else None

    def check_other(name: str) -> Check:
        place = found.object_places.get(name)
        window = files.window(place) if place else None
        if window is None or window.read(0, min(2, window.size)) != b"PK":
            return Check.UNKNOWN
        archive = Archive.over(window)
        return _together(list(archive.check(archive.members.values()).values()))

    places = [place for t in found.tensors.values() for _, place in t.parts] + found.objects
    beside = [metadata, *(folder / name for name in sorted({place.file for place in places}))]
    return TiledCheckpoint(
        Dcp.name,
        folder,
        tensors,
        locate,
        files,
        others=found.others,
        check_container=check_container,
        fingerprint=fingerprint,
        check_other=check_other,
        beside=beside,
    )


def _together(checks: list[Check]) -> Check:
    return next((check for check in (Check.FAILED, Check.OK) if check in checks), Check.UNKNOWN)


def _check_places(folder: Path, metadata: Path, places: Iterable[StoredPart]) -> None:
    """Every part lies in its file, and no two in the same bytes."""
    sizes: dict[str, int] = {}
    last = StoredPart("", 0, 0)
    for place in sorted(places):
        if place.file not in sizes:
            sizes[place.file] = indexed_file_size(metadata, folder / place.file)
        if place.offset + place.length > sizes[place.file]:
            expected = f"at least {place.offset + place.length} bytes"
            what = f"a part lies beyond the end of {place.file!r}"
            raise DamagedFile(metadata, what, expected=expected, found=sizes[place.file])
        if place.file == last.file and place.offset < last.offset + last.length:
            raise DamagedFile(metadata, f"two parts overlap at byte {place.offset} of {place.file!r}")
        last = place
