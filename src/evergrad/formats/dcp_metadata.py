"""The `.metadata` of torch.distributed.checkpoint: a pickle of its dataclasses, read and never run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from evergrad.dtypes import DType
from evergrad.errors import DamagedFile, LimitExceeded
from evergrad.formats.contract import OtherTensor
from evergrad.formats.data_file import DataFile
from evergrad.formats.opcodes import Global, PickleError, read_pickle
from evergrad.formats.pieces import Box, fill
from evergrad.formats.torch_objects import TorchBuilder
from evergrad.records import MAX_AXES

MAX_METADATA_BYTES = 1 << 29


class Place(NamedTuple):
    """Where a part is stored: bytes of a file beside the metadata."""

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...] = ()


class StoredTensor(NamedTuple):
    """A tensor and its parts, those that hold nothing left out."""

    shape: tuple[int, ...]
    dtype: DType
    parts: list[tuple[Box, Place]]


@dataclass(frozen=True, slots=True)
class Folder:
    """What the metadata says of the whole folder."""

    tensors: dict[str, StoredTensor]
    others: dict[str, str]
    objects: list[Place]
    object_places: dict[str, Place]
    """The places of objects in the file as they were saved."""


def read_metadata(path: Path) -> Folder:
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
        if type(function) is Global:
            if (function.module, function.name) == ("torch", "Size"):
                return _sizes(tuple(arguments[0]) if arguments else ())
            if function.module.startswith("copy") and arguments and type(arguments[0]) is Global:
                function = arguments[0]  # how protocols before 2 make objects
            if function.module.startswith("torch.distributed.") and function.name in _KINDS:
                return _Record(function.name)
        return super().call(function, arguments)

    def name(self, name: Global) -> Any:
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


def _folder(value: Any, opcodes: int) -> Folder:
    metadata = _fields(value, "Metadata")
    listed, stored = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if type(listed) is not dict or type(stored) is not dict:
        raise ValueError("no tables of tensors and of their places")
    places = {_key(index): _place(info) for index, info in stored.items()}
    tensors: dict[str, StoredTensor] = {}
    others: dict[str, str] = {}
    object_places: dict[str, Place] = {}
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
        dtype = DType.named(kind.name) if type(kind) is Global and kind.module == "torch" else None
        if dtype is None:
            others[name] = OtherTensor(f"a tensor of {kind if type(kind) is Global else 'unknown type'}")
            continue
        tensor = _tensor(name, _sizes(fields.get("size")), dtype, chunks, places)
        through = sorted({transform for _, place in tensor.parts for transform in place.transforms})
        if through:
            others[name] = OtherTensor(f"a tensor stored through {', '.join(through)}")
        else:
            tensors[name] = tensor
    return Folder(tensors, others, list(object_places.values()), object_places)


def _tensor(
    name: str,
    shape: tuple[int, ...],
    dtype: DType,
    chunks: list[Any],
    places: dict[tuple[str, tuple[int, ...] | None], Place],
) -> StoredTensor:
    boxes = []
    for chunk in chunks:
        fields = _fields(chunk, "ChunkStorageMetadata")
        boxes.append(Box(_sizes(fields.get("offsets")), _sizes(fields.get("sizes"))))
    try:
        kept = fill(shape, boxes)
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


def _place(info: Any) -> Place:
    fields = _fields(info, "_StorageInfo")
    file, offset, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
    if type(file) is not str or type(offset) is not int or type(length) is not int or min(offset, length) < 0:
        raise ValueError("a place without file, offset and length")
    if "/" in file or "\\" in file or "\0" in file or file in ("", ".", ".."):
        raise ValueError(f"names a file outside its folder: {file[:200]!r}")
    transforms = fields.get("transform_descriptors") or ()
    if type(transforms) not in (list, tuple) or not all(type(each) is str for each in transforms):
        raise ValueError("a place with transforms that are no names")
    return Place(file, offset, length, tuple(transforms))


def _sizes(value: Any) -> tuple[int, ...]:
    if type(value) is tuple and len(value) > MAX_AXES:
        raise ValueError(f"a tensor of {len(value)} axes (expected at most {MAX_AXES})")
    if type(value) is tuple and all(type(n) is int and 0 <= n < 1 << 62 for n in value):
        return value
    raise ValueError("an impossible shape or offset")
