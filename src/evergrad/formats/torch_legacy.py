"""What `torch.save` wrote before 1.6: pickles one after another, then raw storages in the order of a key list."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from evergrad.errors import DamagedFile, LimitExceeded, StateError
from evergrad.formats.addressed import AddressedCheckpoint, describe
from evergrad.formats.contract import Checkpoint, Format, Probe
from evergrad.formats.data_file import Bytes, DataFile, closed_on_error
from evergrad.formats.opcodes import PickleError, read_pickle
from evergrad.formats.region import Region
from evergrad.formats.torch_objects import READ_ONLY, PickledArray, PickledTensors, StorageRef, TorchBuilder

_MAGIC = 0x1950A86A20F9469CFC6C
# The magic number as the first value of a pickle; from protocol 4 on, a frame may come before it.
_HEAD = re.compile(rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\x0a" + re.escape(_MAGIC.to_bytes(10, "little")), re.DOTALL)
_FIRST_READ = 1 << 20
MAX_PICKLE_BYTES = 1 << 29


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


class _Recording(TorchBuilder):
    """Also remembers every storage, since the file tells their sizes only there."""

    def __init__(self) -> None:
        self.storages: dict[str, StorageRef] = {}

    def persistent(self, identifier: Any) -> Any:
        value = super().persistent(identifier)
        if isinstance(value, StorageRef):
            self.storages[value.key] = value
        return value


def open_legacy(path: Path, file: Bytes) -> AddressedCheckpoint:
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


def _read_pickles(path: Path, file: Bytes) -> tuple[_Recording, list[tuple[Any, int]], int]:
    """The five pickles at the start; the file does not say how long they are, so read more until they end."""
    length = min(file.size, _FIRST_READ)
    while True:
        data = file.read(0, length)
        builder = _Recording()
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
        if length >= MAX_PICKLE_BYTES:
            raise LimitExceeded(path, f"pickles of more than {MAX_PICKLE_BYTES} bytes")
        length = min(file.size, 8 * length)


def _places(
    path: Path, file: Bytes, keys: list[str], storages: dict[str, StorageRef], start: int, big_endian: bool
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
