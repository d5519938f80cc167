"""NumPy's own files: `.npy`, one array; `.npz`, a zip of them, stored or deflated."""

from __future__ import annotations

import io
import math
import tokenize
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np

from evergrad.dtypes import DType
from evergrad.errors import DamagedFile, LimitExceeded
from evergrad.formats.byte_source import ByteSource, DataFile, closed_on_error
from evergrad.formats.checkpoint import (
    Checkpoint,
    Format,
    OtherTensor,
    Probe,
    block_ranges,
    digest,
    losses_of,
    read_blocks,
    refuse_losses,
)
from evergrad.formats.offset_checkpoint import AddressedCheckpoint, describe
from evergrad.formats.region import Region
from evergrad.formats.zip_archive import Archive, ZipMember, first_name
from evergrad.records import Check, TensorInfo
from evergrad.state import ROOT, Placement, Skeleton
from evergrad.state.sharing import contiguous_strides

_MAGIC = b"\x93NUMPY"
MAX_HEADER_BYTES = 1 << 14
_ANOTHER = "Take another copy of the file."


class Npy(Format):
    """One array without a name; its path is `.`."""

    name = "npy"
    suffixes = (".npy",)

    def recognises(self, probe: Probe) -> bool:
        """NumPy's magic bytes."""
        return probe.head.startswith(_MAGIC)

    def open(self, path: Path) -> Checkpoint:
        """Read the header."""
        with closed_on_error(DataFile(path)) as file:
            head = file.read(0, min(file.size, MAX_HEADER_BYTES))
            region = _region(path, ROOT, head, file, 0, file.size)
            found = {ROOT: region} if isinstance(region, Region) else {}
            others = {} if isinstance(region, Region) else {ROOT: region}
            tensors = _describe(found)
            return AddressedCheckpoint(
                self.name,
                path,
                tensors,
                found.__getitem__,
                file,
                others=others,
                fingerprint=lambda name: digest(others[name], read_blocks(file, 0, file.size)),
            )

    def losses(self, source: Checkpoint) -> list[str]:
        """Everything but a single array of a type that NumPy has."""
        losses = Npz().losses(source)
        if list(source.tensors) != [ROOT]:
            losses.append(f"the names of {len(source.tensors)} tensors: npy holds one array and no name")
        return losses

    def unwritable(self, source: Checkpoint) -> dict[str, str]:
        """Tensors whose type NumPy does not have."""
        return {name: why for name, why in _foreign(source).items() if source.tensors[name].dtype.numpy is None}

    def write(self, source: Checkpoint, path: Path, *, tensors_only: bool = False) -> None:
        """Write the one array, block by block."""
        infos = list(source.tensors.values())
        if len(infos) != 1 or not tensors_only:
            refuse_losses(source, self, self.losses(source))
        refuse_losses(source, self, _told(_foreign(source)))
        with path.open("wb") as out:
            _write_array(out, source, infos[0])


class Npz(Format):
    """Named arrays in a zip; `numpy.load` checks their CRC, so it is kept valid."""

    name = "npz"
    suffixes = (".npz",)

    def recognises(self, probe: Probe) -> bool:
        """A zip with nothing but `.npy` members."""
        if not probe.head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
            return False
        if first_name(probe.head).endswith(".npy"):
            return True
        archive = Archive.open(probe.path)
        archive.close()
        return all(name.endswith(".npy") for name in archive.members)

    def open(self, path: Path) -> Checkpoint:
        """Read the directory and every array's header."""
        with closed_on_error(Archive.open(path)) as archive:
            return _open_npz(path, archive)

    def losses(self, source: Checkpoint) -> list[str]:
        """Values that are no arrays, nesting other than by name, types that NumPy does not have."""
        losses = losses_of(source)
        if source.skeleton.root != Skeleton.of_names(source.tensors).root:
            told = source.skeleton.described_values() | source.skeleton.unusual_containers()
            losses += [f"{name} ({what})" for name, what in told.items()] or ["the nesting of its names"]
        if source.skeleton.sharing.views:
            losses.append(f"that {len(source.skeleton.sharing.views)} tensors are views or share memory")
        return losses + _told(_foreign(source))

    def unwritable(self, source: Checkpoint) -> dict[str, str]:
        """Tensors whose type NumPy does not have, or whose name a zip file cannot hold."""
        return _foreign(source)

    def write(self, source: Checkpoint, path: Path, *, tensors_only: bool = False) -> None:
        """Write array by array, as `numpy.savez` does."""
        refuse_losses(source, self, _told(_foreign(source)) if tensors_only else self.losses(source))
        with zipfile.ZipFile(path, "w") as archive:
            for info in source.tensors.values():
                with archive.open(f"{info.name}.npy", "w", force_zip64=True) as out:
                    _write_array(out, source, info)


def _open_npz(path: Path, archive: Archive) -> Checkpoint:
    regions: dict[str, Region] = {}
    members: dict[str, ZipMember] = {}
    others: dict[str, str] = {}
    for member in archive.members.values():
        if not member.name.endswith(".npy"):
            others[member.name] = "a member that is no array"
            continue
        name = member.name.removesuffix(".npy")
        source, offset, head = _member_bytes(archive, member)
        region = _region(path, name, head, source, offset, member.size)
        if isinstance(region, Region):
            regions[name], members[name] = region, member
        else:
            others[name] = region

    def locate(name: str) -> Region:
        region, seal = regions[name], archive.stored_checksum(members[name])
        return Region(region.source, region.offset, region.shape, region.dtype, region.stride, region.big_endian, seal)

    def check_container() -> Mapping[str, Check]:
        used = {member.name for member in members.values()}
        return archive.check(member for name, member in archive.members.items() if name not in used)

    def member_of(name: str) -> ZipMember:
        return archive.members.get(f"{name}.npy") or archive.members[name]

    def fingerprint(name: str) -> str:
        member = member_of(name)
        source, offset, _ = _member_bytes(archive, member)
        return digest(others[name], read_blocks(source, offset, member.size))

    def check_other(name: str) -> Check:
        member = member_of(name)
        return archive.check([member])[member.name]

    return AddressedCheckpoint(
        Npz.name,
        path,
        _describe(regions),
        locate,
        archive,
        others=others,
        check_container=check_container,
        fingerprint=fingerprint,
        check_other=check_other,
    )


def _member_bytes(archive: Archive, member: ZipMember) -> tuple[ByteSource, int, bytes]:
    """Where a member's bytes are, and the first of them."""
    length = min(member.size, MAX_HEADER_BYTES)
    if member.method:
        inflated = archive.inflate(member)
        return inflated, 0, inflated.prefix(length)
    offset = archive.data_offset(member)
    return archive.file, offset, archive.file.read(offset, min(length, 512))


def _region(path: Path, name: str, head: bytes, source: ByteSource, start: int, size: int) -> Region | str:
    """The array's place, or, if its elements cannot be served, what it is."""
    stream = io.BytesIO(head)
    try:
        if len(head) < 8:
            raise _cut_short(path, f"{name}: the npy header", "8 bytes or more", size)
        major, _ = np.lib.format.read_magic(stream)
        if major not in (1, 2, 3):
            raise ValueError(f"version {major} is unknown")
        length = int.from_bytes(head[8:10] if major == 1 else head[8:12], "little")
        data = (10 if major == 1 else 12) + length
        if data - length > len(head):
            raise _cut_short(path, f"{name}: the npy header", f"{data - length} bytes or more", size)
        if length > MAX_HEADER_BYTES:
            raise LimitExceeded(path, f"{name}: npy header", expected=f"at most {MAX_HEADER_BYTES} bytes", found=length)
        if data > size:
            raise _cut_short(path, f"{name}: the npy header", f"{data} bytes", size)
        if data > len(head):  # more than was read at first
            stream = io.BytesIO(source.read(start, data))
            np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream, max_header_size=MAX_HEADER_BYTES)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, KeyError, tokenize.TokenError) as error:
        raise DamagedFile(path, f"{name}: not an npy header: {error}", hint=_ANOTHER) from None
    known = DType.of_numpy(dtype)
    if known is None:
        what = f"an array of {dtype!s:.60}"
        return what if dtype.kind in "OSUMm" else OtherTensor(what)
    if any(type(n) is not int or not 0 <= n < 1 << 62 for n in shape):
        raise DamagedFile(path, f"{name}: impossible shape {shape!s:.80}")
    if math.prod(shape) * known.itemsize > size - data:
        expected = f"{math.prod(shape) * known.itemsize} bytes for {known} {shape!s:.80}"
        raise _cut_short(path, f"{name}: array", expected, size - data)
    stride = tuple(reversed(contiguous_strides(shape[::-1]))) if fortran else None
    return Region(source, start + data, tuple(shape), known, stride, big_endian=dtype.str.startswith(">"))


def _cut_short(path: Path, what: str, expected: str, found: int) -> DamagedFile:
    return DamagedFile(path, f"{what} is cut short", expected=expected, found=f"{found} bytes", hint=_ANOTHER)


def _describe(regions: dict[str, Region]) -> dict[str, TensorInfo]:
    return describe(
        (
            # Each array has its own bytes: a storage of its own, by its name.
            Placement(name, name, 0, r.shape, r.stride or contiguous_strides(r.shape), r.dtype.itemsize),
            r.dtype,
        )
        for name, r in regions.items()
    )


def _foreign(source: Checkpoint) -> dict[str, str]:
    """Tensors whose type NumPy does not have, or whose name a zip file cannot hold: name → why."""
    found: dict[str, str] = {}
    for name, info in source.tensors.items():
        encoded = name.encode("utf-8", "surrogatepass")
        if info.dtype.numpy is None:
            found[name] = f"NumPy has no {info.dtype}"
        elif b"\0" in encoded or len(encoded) > 60_000 or (b"\xed" in encoded and not _is_text(name)):
            found[name] = "a name that a zip file cannot hold"
    return found


def _told(foreign: dict[str, str]) -> list[str]:
    return [f"{name if name.isprintable() else ascii(name):.80}: {why}" for name, why in foreign.items()]


def _is_text(name: str) -> bool:
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False


def _write_array(out: IO[bytes], source: Checkpoint, info: TensorInfo) -> None:
    dtype = info.dtype.numpy
    assert dtype is not None
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": info.shape}
    np.lib.format.write_array_header_1_0(out, header)
    for start, stop in block_ranges(info):
        out.write(np.ascontiguousarray(source.read_bits(info.name, start, stop)).data.cast("B"))
