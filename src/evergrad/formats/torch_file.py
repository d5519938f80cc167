"""What `torch.save` writes: a zip of one pickle and a stored record a storage (`.pt .pth .bin .ckpt`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evergrad.errors import DamagedFile, LimitExceeded, StateError, UnsupportedContent
from evergrad.formats.byte_source import ByteSource, DataFile, closed_on_error
from evergrad.formats.checkpoint import Checkpoint, Format, Probe, TensorAttributes, losses_of, refuse_losses
from evergrad.formats.gc_pause import gc_paused
from evergrad.formats.offset_checkpoint import AddressedCheckpoint, describe
from evergrad.formats.pickle_reader import PickleError, read_pickle
from evergrad.formats.region import Region
from evergrad.formats.torch_objects import READ_ONLY, PickledArray, PickledTensors, StorageRef, TensorRef, TorchBuilder
from evergrad.formats.zip_archive import Archive, first_name
from evergrad.records import Check
from evergrad.state import Skeleton, unflatten
from evergrad.state.sharing import byte_extent

MAX_ZIP_PICKLE_BYTES = 1 << 29
MAX_COMPRESSED_PICKLE_BYTES = 1 << 22


class TorchZip(Format):
    """PyTorch's own format since 1.6; Lightning's checkpoints and Transformers' `.bin` are the same."""

    name = "torch-zip"
    suffixes = (".pt", ".pth", ".bin", ".ckpt")

    def recognises(self, probe: Probe) -> bool:
        """A zip whose first member is `<archive>/data.pkl` (or which has one at all)."""
        if not probe.head.startswith(b"PK\x03\x04"):
            return False
        # torch writes the pickle first; only a zip that begins otherwise has to be searched.
        first = first_name(probe.head)
        return first.endswith("/data.pkl") or (not first.endswith(".npy") and _pickle_name(probe.path) is not None)

    def open(self, path: Path) -> Checkpoint:
        """Read the directory and the pickle, run nothing, read no record."""
        with closed_on_error(Archive.open(path)) as archive:
            return open_archive(path, archive)

    def losses(self, source: Checkpoint) -> list[str]:
        """Objects that cannot be rebuilt, and notes of other containers."""
        return losses_of(source)

    def write(self, source: Checkpoint, path: Path, *, tensors_only: bool = False) -> None:
        """Write through `torch.save` itself, straight from the source's pages where that can be."""
        import torch

        if tensors_only:
            tensors = {name: source.borrow(name) for name in source.tensors}
            state: object = unflatten(tensors, Skeleton.of_names(tensors))  # nested, so that the names stay the same
        else:
            refuse_losses(source, self, self.losses(source))
            state = source.borrowed_state()
        try:
            with (
                gc_paused(),
                path.open("wb") as out,
            ):  # by its path, torch would write the temporary name into the archive
                torch.save(state, out)
        except RuntimeError as error:  # how torch reports a write that failed
            raise OSError(f"torch.save: {error}") from error


def open_archive(path: Path, archive: Archive) -> AddressedCheckpoint:
    """The tensors of an archive, which may be a part of a larger file."""
    names = [name for name in archive.members if name == "data.pkl" or name.endswith("/data.pkl")]
    if not names:
        raise DamagedFile(path, "no data.pkl in the archive")
    prefix = names[0].removesuffix("data.pkl")
    if f"{prefix}constants.pkl" in archive.members:
        raise UnsupportedContent(
            path, "is a TorchScript program, not a checkpoint", hint="Save its state_dict() with torch.save."
        )
    order = archive.members.get(f"{prefix}byteorder")
    big_endian = order is not None and archive.read(order, 64) == b"big"
    try:
        program = archive.members[names[0]]
        # torch never compresses; a few kilobytes must not become a program of gigabytes.
        data = archive.read(program, MAX_COMPRESSED_PICKLE_BYTES if program.method else MAX_ZIP_PICKLE_BYTES)
        value, _, opcodes = read_pickle(data, TorchBuilder())
        pickled = PickledTensors(value, opcodes, len(data))
    except (PickleError, StateError) as error:
        raise DamagedFile(path, f"{names[0]}: {error}") from None

    def record(ref: TensorRef) -> str:
        return f"{prefix}data/{ref.storage.key}"

    def locate(name: str) -> Region:
        if array := pickled.arrays.get(name):
            archive.file.read(0, 1)  # refuses where the file is closed
            held = PickledArray(path, array)
            return Region(
                held, 0, array.shape, array.dtype, array.stride, stored_checksum=archive.stored_checksum(program)
            )
        ref = pickled.refs[name]
        member = archive.members[record(ref)]
        source: ByteSource = archive.inflate(member) if member.method else archive.file
        start = 0 if member.method else archive.data_offset(member)
        seal = archive.stored_checksum(member)
        return Region(source, start + ref.offset, ref.shape, ref.dtype, ref.stride, big_endian, seal)

    def check_container() -> Mapping[str, Check]:
        used = {record(ref) for ref in pickled.refs.values()}
        return archive.check(member for name, member in archive.members.items() if name not in used)

    def check_other(name: str) -> Check:
        held = archive.check([program])[program.name]
        # The pickle's checksum covers attributes that are plain values. Tensors in them are read by nobody.
        plain = type(pickled.others[name]) is TensorAttributes
        return Check.UNKNOWN if held is Check.OK and not plain else held

    for name, ref in pickled.refs.items():
        _check_record(path, archive, name, ref, record(ref))
    tensors = describe(pickled.placements, read_only=dict.fromkeys(pickled.arrays, READ_ONLY))
    return AddressedCheckpoint(
        TorchZip.name,
        path,
        tensors,
        locate,
        archive,
        skeleton=pickled.skeleton,
        others=pickled.others,
        check_container=check_container,
        fingerprint=pickled.fingerprint,
        check_other=check_other,
    )


def _check_record(path: Path, archive: Archive, name: str, ref: TensorRef, record: str) -> None:
    """The record that a tensor lies in is there, and long enough."""
    member = archive.members.get(record)
    if member is None:
        found = f"{len(archive.members)} others"
        raise DamagedFile(path, f"{name}: its record is missing", expected=record, found=found)
    whole = ref.storage.numel * ref.storage.itemsize
    end = max(whole, ref.offset + byte_extent(ref.shape, ref.stride, ref.dtype.itemsize))
    if end > member.size:
        expected = f"at least {end} bytes"
        raise DamagedFile(path, f"{name}: record {record} is too short", expected=expected, found=member.size)


def _pickle_name(path: Path) -> str | None:
    try:
        archive = Archive.open(path)
    except (DamagedFile, UnsupportedContent):
        return None
    archive.close()
    return next((name for name in archive.members if name == "data.pkl" or name.endswith("/data.pkl")), None)


# What `torch.save` wrote before 1.6: pickles one after another, then raw storages in the order of a key list.

_MAGIC = 0x1950A86A20F9469CFC6C
# The magic number as the first value of a pickle; from protocol 4 on, a frame may come before it.
_HEAD = re.compile(rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\x0a" + re.escape(_MAGIC.to_bytes(10, "little")), re.DOTALL)
_FIRST_READ = 1 << 20
MAX_LEGACY_PICKLE_BYTES = 1 << 29


class TorchLegacy(Format):
    """PyTorch's non-zip format (`_use_new_zipfile_serialization=False`)."""

    name = "torch-legacy"

    def recognises(self, probe: Probe) -> bool:
        """A pickle of torch's magic number."""
        return _HEAD.match(probe.head) is not None

    def open(self, path: Path) -> Checkpoint:
        """Read the pickles, then step from storage to storage by their lengths."""
        with closed_on_error(DataFile(path)) as file:
            return open_legacy(path, file)


class _StorageCollector(TorchBuilder):
    """Also remembers every storage, since the file tells their sizes only there."""

    def __init__(self) -> None:
        self.storages: dict[str, StorageRef] = {}

    def persistent(self, identifier: Any) -> Any:
        value = super().persistent(identifier)
        if isinstance(value, StorageRef):
            self.storages[value.key] = value
        return value


def open_legacy(path: Path, file: ByteSource) -> AddressedCheckpoint:
    """The tensors in bytes of this format, which may be a part of a larger file."""
    try:
        builder, values, end = _read_pickles(path, file)
        system, (value, opcodes), (keys, _) = values[2][0], values[3], values[4]
        pickled = PickledTensors(value, opcodes, end)
    except (PickleError, StateError) as error:
        raise DamagedFile(path, str(error)) from None
    if type(keys) is not list or not all(type(key) in (str, int) for key in keys):
        raise DamagedFile(path, "no list of storages after the pickle")
    big_endian = type(system) is dict and system.get("little_endian") is False
    places = _places(path, file, [str(key) for key in keys], builder.storages, end, big_endian)
    for name, ref in pickled.refs.items():
        if ref.storage.key not in places:
            raise DamagedFile(path, f"{name}: its storage {ref.storage.key!r} is not in the file")

    def locate(name: str) -> Region:
        if array := pickled.arrays.get(name):
            file.read(0, 1)  # refuses where the file is closed
            return Region(PickledArray(path, array), 0, array.shape, array.dtype, array.stride)
        ref = pickled.refs[name]
        start = places[ref.storage.key]
        return Region(file, start + ref.offset, ref.shape, ref.dtype, ref.stride, big_endian)

    for name in pickled.refs:
        locate(name).check(name)
    tensors = describe(pickled.placements, read_only=dict.fromkeys(pickled.arrays, READ_ONLY))
    return AddressedCheckpoint(
        TorchLegacy.name,
        path,
        tensors,
        locate,
        file,
        skeleton=pickled.skeleton,
        others=pickled.others,
        fingerprint=pickled.fingerprint,
    )


def _read_pickles(path: Path, file: ByteSource) -> tuple[_StorageCollector, list[tuple[Any, int]], int]:
    """The five pickles at the start; the file does not say how long they are, so read more until they end."""
    length = min(file.size, _FIRST_READ)
    while True:
        data = file.read(0, length)
        builder = _StorageCollector()
        values: list[tuple[Any, int]] = []
        position = 0
        try:
            for _ in range(5):
                value, position, opcodes = read_pickle(data, builder, position)
                values.append((value, opcodes))
            return builder, values, position
        except PickleError as error:
            if length == file.size or not error.cut_short:
                raise
        if length >= MAX_LEGACY_PICKLE_BYTES:
            raise LimitExceeded(path, f"pickles of more than {MAX_LEGACY_PICKLE_BYTES} bytes")
        length = min(file.size, 8 * length)


def _places(
    path: Path, file: ByteSource, keys: list[str], storages: dict[str, StorageRef], start: int, big_endian: bool
) -> dict[str, int]:
    """Where each storage's bytes begin."""
    places: dict[str, int] = {}
    for key in keys:
        storage = storages.get(key)
        if storage is None:
            raise DamagedFile(path, f"storage {key[:40]!r} has data but no tensor")
        count = int.from_bytes(file.read(start, 8), "big" if big_endian else "little", signed=True)
        item = storage.itemsize
        if count < 0 or start + 8 + count * item > file.size:
            expected = f"{count * item} bytes"
            raise DamagedFile(
                path, f"truncated in storage {key[:40]!r}", expected=expected, found=file.size - start - 8
            )
        places[key] = start + 8
        start += 8 + count * item
    return places
