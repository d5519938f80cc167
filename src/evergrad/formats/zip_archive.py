"""Zip archives as the checkpoint formats use them: members at known offsets, with checksums that follow.

The standard library reads zip files, but does not say where a member's bytes and its checksums lie, which is
what altering in place needs; so the directory is read by `zip_archive.py`. Rewriting an archive is the standard
library's.
"""

from __future__ import annotations

import copy
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from evergrad._files import file_errors, replacing
from evergrad.errors import DamagedFile, FileAccessError, LimitExceeded, UnsupportedContent
from evergrad.formats.byte_source import ByteSource, DataFile, closed_on_error, xor_rows
from evergrad.formats.crc import CRC32
from evergrad.formats.region import StoredChecksum, check_stored_checksum
from evergrad.records import Check

# The directory of a zip file: its members, where they lie, and what they claim, checked before it is believed.

MAX_MEMBERS = 2_000_000
MAX_DIRECTORY_BYTES = 1 << 29

_STORED, _DEFLATED = 0, 8
_ENTRY = struct.Struct("<4s6H3L5H2L")  # central directory entry, 46 bytes
_LOCAL = struct.Struct("<4s5H3L2H")  # local header, 30 bytes
_END = struct.Struct("<4s4H2LH")  # end of central directory, 22 bytes
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")


@dataclass(slots=True)
class ZipMember:
    """One file in the archive, as its directory describes it."""

    name: str
    method: int  # 0: stored as it is
    flags: int
    crc: int
    stored_size: int
    size: int
    header: int  # where its local header is
    entry: int  # where its directory entry is


def read_directory(file: ByteSource) -> tuple[dict[str, ZipMember], int]:
    """The members by name, and where the directory begins; `DamagedFile` if there is none, or if it points outside."""
    start, length, count = _find_directory(file)
    members: dict[str, ZipMember] = {}
    for member in _entries(file, start, length, count):
        if member.name in members:  # which of the two is meant depends on who reads
            raise DamagedFile(file.path, f"two zip members are called {member.name!r}")
        members[member.name] = member
    _check_no_overlap(file, members.values())
    return members, start


def data_offset(file: ByteSource, member: ZipMember, directory: int) -> int:
    """Where a member's bytes begin, which end before the directory."""
    header = _LOCAL.unpack(file.read(member.header, _LOCAL.size))
    if header[0] != b"PK\x03\x04":
        found = header[0].hex()
        raise DamagedFile(
            file.path,
            f"no local header for {member.name!r} at {member.header}",
            expected="504b0304",
            found=found,
        )
    offset: int = member.header + _LOCAL.size + header[9] + header[10]
    if offset + member.stored_size > directory:
        raise DamagedFile(file.path, f"{member.name!r} runs into the zip directory")
    return offset


def first_name(head: bytes) -> str:
    """The name of the member that a zip file begins with."""
    if len(head) < _LOCAL.size or not head.startswith(b"PK\x03\x04"):
        return ""
    length = _LOCAL.unpack_from(head)[9]
    return head[_LOCAL.size : _LOCAL.size + length].decode("utf-8", "replace")


def _find_directory(file: ByteSource) -> tuple[int, int, int]:
    """Start, length and number of entries of the central directory."""
    tail_size = min(file.size, 65535 + _END.size)
    tail = file.read(file.size - tail_size, tail_size)
    place = tail.rfind(b"PK\x05\x06")
    if place < 0 or len(tail) - place < _END.size:
        raise DamagedFile(file.path, "no zip directory at the end", expected="504b0506", found="a truncated archive")
    at = file.size - tail_size + place
    _, _, _, _, count, length, start, _ = _END.unpack_from(tail, place)
    if at >= _END64_LOCATOR.size:
        magic, _, where, _ = _END64_LOCATOR.unpack(file.read(at - _END64_LOCATOR.size, _END64_LOCATOR.size))
        if magic == b"PK\x06\x07":
            end64 = _END64.unpack(file.read(where, _END64.size))
            if end64[0] != b"PK\x06\x06":
                raise DamagedFile(file.path, "no zip64 directory end where its locator points")
            count, length, start = end64[7], end64[8], end64[9]
            at = where
    if start + length > at:
        raise DamagedFile(file.path, "zip directory lies outside", expected=f"an end before {at}", found=start + length)
    if length > MAX_DIRECTORY_BYTES or count > MAX_MEMBERS:
        raise LimitExceeded(file.path, f"zip directory of {count} members", expected=f"at most {MAX_MEMBERS}")
    return start, length, count


def _entries(file: ByteSource, start: int, length: int, count: int) -> Iterator[ZipMember]:
    directory = file.read(start, length)
    position = 0
    for number in range(count):
        if position + _ENTRY.size > length:
            raise DamagedFile(file.path, "zip directory cut short", expected=f"{count} members", found=number)
        fields = _ENTRY.unpack_from(directory, position)
        name_end = position + _ENTRY.size + fields[10]
        extra_end = name_end + fields[11]
        if fields[0] != b"PK\x01\x02" or extra_end > length:
            raise DamagedFile(file.path, f"zip directory entry {number} is damaged")
        raw_name = directory[position + _ENTRY.size : name_end]
        try:
            # Without the flag a name is in cp437, which is ASCII for all that anyone writes.
            name = raw_name.decode("utf-8" if fields[3] & 0x800 or raw_name.isascii() else "cp437")
        except UnicodeDecodeError:
            raise DamagedFile(file.path, f"zip directory entry {number} has a name that is not text") from None
        sizes = _zip64(directory[name_end:extra_end], size=fields[9], stored=fields[8], header=fields[16])
        member = ZipMember(name, fields[4], fields[3], fields[7], sizes[1], sizes[0], sizes[2], start + position)
        _check_member(file, member, start)
        yield member
        position = extra_end + fields[12]


def _check_member(file: ByteSource, member: ZipMember, directory: int) -> None:
    if member.flags & 0x01:
        raise UnsupportedContent(file.path, f"{member.name!r} is encrypted")
    if member.method not in (_STORED, _DEFLATED):
        raise UnsupportedContent(file.path, f"{member.name!r} is compressed by method {member.method}")
    if member.header + _LOCAL.size + member.stored_size > directory:
        raise DamagedFile(
            file.path,
            f"zip member {member.name!r} lies outside",
            expected=f"an end before {directory}",
            found=member.header + _LOCAL.size + member.stored_size,
        )
    if member.method == _STORED and member.size != member.stored_size:
        raise DamagedFile(
            file.path, f"{member.name!r} is stored, yet has two sizes: {member.size}, {member.stored_size}"
        )


def _check_no_overlap(file: ByteSource, members: Iterable[ZipMember]) -> None:
    """Members that lie in each other let a small file stand for a huge one."""
    reach, before = 0, ""
    for start, end, name in sorted((m.header, m.header + _LOCAL.size + m.stored_size, m.name) for m in members):
        if start < reach:
            raise DamagedFile(file.path, f"zip members {before!r} and {name!r} overlap")
        reach, before = end, name


def _zip64(extra: bytes, *, size: int, stored: int, header: int) -> tuple[int, int, int]:
    """Sizes and offset, from the zip64 field where the 32-bit ones are full."""
    if 0xFFFFFFFF not in (size, stored, header):
        return size, stored, header
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        if kind == 1:
            values = list(struct.unpack_from(f"<{min(length, len(extra) - position - 4) // 8}Q", extra, position + 4))
            if size == 0xFFFFFFFF and values:
                size = values.pop(0)
            if stored == 0xFFFFFFFF and values:
                stored = values.pop(0)
            if header == 0xFFFFFFFF and values:
                header = values.pop(0)
        position += 4 + length
    return size, stored, header


try:  # faster, where it is installed
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

# Deflate reaches 1032:1 at most; a member that claims more was made to mislead.
MAX_INFLATION = 1100

_BLOCK = 1 << 22


@dataclass(slots=True)
class Archive:
    """A zip file's directory; nothing is decompressed or read before it is asked for."""

    file: ByteSource
    members: Mapping[str, ZipMember]
    directory: int
    inflated: dict[str, InflatedMember] = field(default_factory=dict)
    verified: dict[str, bool] = field(default_factory=dict)
    closed: bool = False

    @classmethod
    def open(cls, path: Path) -> Archive:
        """Read the directory; `DamagedFile` if there is none, or if it points outside."""
        with closed_on_error(DataFile(path)) as file:
            return cls.over(file)

    @classmethod
    def over(cls, file: ByteSource) -> Archive:
        """The archive that these bytes are; they may be a part of a larger file."""
        return cls(file, *read_directory(file))

    def data_offset(self, member: ZipMember) -> int:
        """Where a stored member's bytes begin in the file."""
        return data_offset(self.file, member, self.directory)

    def read(self, member: ZipMember, limit: int) -> bytes:
        """A whole member, decompressed; `LimitExceeded` if it is larger than `limit` bytes."""
        if member.size > limit:
            raise LimitExceeded(
                self.file.path, f"{member.name!r} is too large", expected=f"at most {limit} bytes", found=member.size
            )
        if not member.method:
            return self.file.read(self.data_offset(member), member.size)
        return bytes(self.inflate(member).view())

    def inflate(self, member: ZipMember) -> InflatedMember:
        """A compressed member in memory; one object a member, so that changes add up."""
        if member.name not in self.inflated:
            self.inflated[member.name] = InflatedMember(self, member)
        return self.inflated[member.name]

    def forget_unchanged(self) -> None:
        """Let at most one unaltered member stay in memory."""
        for data in self.inflated.values():
            if not data.changed:
                data.forget()

    def stored_checksum(self, member: ZipMember) -> StoredChecksum | None:
        """The checksums to keep right when a member is altered.

        None where the writer left them out: torch can be told to, and then writes 0.
        """
        if not member.crc:
            return None
        return InflatedChecksum(self, member) if member.method else ZipChecksum(self, member, self.data_offset(member))

    def check(self, members: Iterable[ZipMember]) -> dict[str, Check]:
        """Whether these members have the checksum that the directory says; `unknown` where it says none."""
        return {
            member.name: check_stored_checksum(self.stored_checksum(member) if member.size else None)
            for member in members
        }

    def close(self) -> None:
        """Make changes durable: rewrite the archive if compressed members were altered, and close."""
        if self.closed:
            return
        self.closed = True
        changed = {name: data for name, data in self.inflated.items() if data.changed}
        self.inflated.clear()
        replaced = bool(changed) and isinstance(self.file, DataFile) and self.file.replaced()
        self.file.close()
        if replaced:
            raise FileAccessError(self.file.path, "was replaced since it was opened: nothing was changed")
        if changed:
            _rewrite(self.file.path, changed)


class ZipChecksum:
    """The CRC of a stored member, in the directory and in its local header or data descriptor."""

    def __init__(self, archive: Archive, member: ZipMember, data_offset: int) -> None:
        self._archive, self._member, self._data = archive, member, data_offset

    def update(self, addresses: npt.NDArray[np.int64], deltas: npt.NDArray[np.uint8]) -> None:
        """Put every copy of the checksum right."""
        member = self._member
        self._archive.verified.pop(member.name, None)
        file = self._archive.file
        # Onto what the file says now: somebody else may have altered it too.
        member.crc = int.from_bytes(file.read_current(member.entry + 16, 4), "little")
        member.crc ^= CRC32.change(addresses - self._data, deltas, member.size)
        value = struct.pack("<L", member.crc)
        file.put(member.entry + 16, value)
        if member.flags & 0x08:
            place = self._data + member.stored_size
            if file.read(place, 4) == b"PK\x07\x08":
                place += 4
        else:
            place = member.header + 14
        file.put(place, value)

    def holds(self) -> bool:
        """Whether the member's bytes have the checksum that the directory says."""
        if self._member.name not in self._archive.verified:
            crc, buffer = 0, np.empty(min(self._member.size, _BLOCK), np.uint8)
            for start in range(0, self._member.size, _BLOCK):
                block = buffer[: min(_BLOCK, self._member.size - start)]
                self._archive.file.read_into(self._data + start, block)
                crc = crc32(block.data, crc)
            self._archive.verified[self._member.name] = crc == self._member.crc
        return self._archive.verified[self._member.name]


class InflatedChecksum:
    """The CRC of a compressed member: over what it decompresses to, and written anew with it."""

    def __init__(self, archive: Archive, member: ZipMember) -> None:
        self._archive, self._member = archive, member

    def update(self, addresses: npt.NDArray[np.int64], deltas: npt.NDArray[np.uint8]) -> None:
        """Nothing to do: the archive is rewritten."""

    def holds(self) -> bool:
        """Whether it decompresses to what was compressed."""
        return crc32(self._archive.inflate(self._member).view().data) == self._member.crc


class InflatedMember:
    """A compressed member; in memory while it is the last one used or has been altered.

    Changes are written back when the archive is closed.
    """

    in_place = False

    def __init__(self, archive: Archive, member: ZipMember) -> None:
        self.path = archive.file.path
        self.size = member.size
        self.changed = False
        self._archive, self._member = archive, member
        self._data: npt.NDArray[np.uint8] | None = None
        if member.size > MAX_INFLATION * member.stored_size + 64:
            raise LimitExceeded(self.path, f"{member.name!r} claims {member.size} bytes from {member.stored_size}")

    def prefix(self, length: int) -> bytes:
        """The first bytes, without decompressing the rest."""
        return self._decompress(min(self._member.stored_size, length + 1024), length)

    def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes, or `DamagedFile`."""
        buffer = np.empty(length, np.uint8)
        self.read_into(offset, buffer)
        return buffer.tobytes()

    def read_into(self, offset: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Fill the buffer from here on, or raise `DamagedFile`."""
        piece = self.view()[offset : offset + len(buffer)]
        if len(piece) != len(buffer):
            raise DamagedFile(self.path, f"truncated at byte {offset} of {self._member.name!r}")
        buffer[:] = piece

    def view(self) -> npt.NDArray[np.uint8]:
        """All bytes, to look at."""
        if self._archive.closed:
            raise FileAccessError(self.path, "is closed")
        if self._data is None:
            self._archive.forget_unchanged()
            data = self._decompress(self._member.stored_size, self.size)
            if len(data) != self.size:
                found, expected = len(data), f"{self.size} bytes"
                raise DamagedFile(
                    self.path, f"{self._member.name!r} decompresses short", expected=expected, found=found
                )
            self._data = np.frombuffer(bytearray(data), np.uint8)
        return self._data

    def read_current(self, offset: int, length: int) -> bytes:
        """A few bytes as they are."""
        return self.read(offset, length)

    def xor(self, addresses: npt.NDArray[np.int64], rows: npt.NDArray[np.uint8], word: int) -> npt.NDArray[np.uint8]:
        """XOR a row of bytes onto each address; the archive is rewritten when it is closed."""
        return xor_rows(self._writable(), addresses, rows, word)

    def put(self, offset: int, data: bytes) -> None:
        """Replace a few bytes; the archive is rewritten when it is closed."""
        self._writable()[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def check_writable(self) -> None:
        """Raise what altering would raise."""
        file = self._archive.file
        if not isinstance(file, DataFile):
            raise UnsupportedContent(self.path, f"{self._member.name!r} is compressed within a part of a file")
        if not os.access(self.path, os.W_OK, effective_ids=True):
            raise FileAccessError(self.path, "cannot be altered: permission denied")
        if file.replaced():
            raise FileAccessError(self.path, "was replaced since it was opened", hint="Open it again.")

    def _writable(self) -> npt.NDArray[np.uint8]:
        self.check_writable()
        self.changed = True
        return self.view()

    def contents(self) -> npt.NDArray[np.uint8]:
        """What was altered, for writing it back: also after the archive was closed."""
        assert self._data is not None, "only an altered member is written back"
        return self._data

    def forget(self) -> None:
        """Free the memory; what was read can be read again."""
        self._data = None

    def close(self) -> None:
        """Nothing to let go: the archive writes changes back."""

    def _decompress(self, compressed: int, length: int) -> bytes:
        try:
            raw = self._archive.file.read(self._archive.data_offset(self._member), compressed)
            return zlib.decompressobj(-15).decompress(raw, length) if length else b""
        except zlib.error as error:
            raise DamagedFile(self.path, f"{self._member.name!r} does not decompress: {error}") from None


def _rewrite(path: Path, changed: Mapping[str, InflatedMember]) -> None:
    """Write the archive anew, members in the same order, with the altered ones compressed again."""
    with replacing(path) as temporary, file_errors(path, "cannot be rewritten"):
        try:
            with zipfile.ZipFile(path) as old, zipfile.ZipFile(temporary, "w") as new:
                for info in old.infolist():
                    target = copy.copy(info)
                    target.extra = b""
                    with new.open(target, "w", force_zip64=info.file_size >= 1 << 31) as out:
                        if info.filename in changed:
                            out.write(changed[info.filename].contents().data)
                            continue
                        with old.open(info) as source:
                            while block := source.read(1 << 20):
                                out.write(block)
        except (zipfile.BadZipFile, zlib.error, NotImplementedError, ValueError, EOFError) as error:
            raise DamagedFile(path, f"cannot be rewritten: {error}") from None
