"""The directory of a zip file: its members, where they lie, and what they claim, checked before it is believed."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from evergrad.errors import DamagedFile, LimitExceeded, UnsupportedContent
from evergrad.formats.data_file import Bytes

MAX_MEMBERS = 2_000_000
MAX_DIRECTORY_BYTES = 1 << 29

_STORED, _DEFLATED = 0, 8
_ENTRY = struct.Struct("<4s6H3L5H2L")  # central directory entry, 46 bytes
_LOCAL = struct.Struct("<4s5H3L2H")  # local header, 30 bytes
_END = struct.Struct("<4s4H2LH")  # end of central directory, 22 bytes
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")


@dataclass(slots=True)
class Member:
    """One file in the archive, as its directory describes it."""

    name: str
    method: int  # 0: stored as it is
    flags: int
    crc: int
    stored_size: int
    size: int
    header: int  # where its local header is
    entry: int  # where its directory entry is


def read_directory(file: Bytes) -> tuple[dict[str, Member], int]:
    """The members by name, and where the directory begins; `DamagedFile` if there is none, or if it points outside."""
    start, length, count = _find_directory(file)
    members: dict[str, Member] = {}
    for member in _entries(file, start, length, count):
        if member.name in members:  # which of the two is meant depends on who reads
            raise DamagedFile(file.path, f"two zip members are called {member.name!r}")
        members[member.name] = member
    _check_no_overlap(file, members.values())
    return members, start


def data_offset(file: Bytes, member: Member, directory: int) -> int:
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


def _find_directory(file: Bytes) -> tuple[int, int, int]:
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


def _entries(file: Bytes, start: int, length: int, count: int) -> Iterator[Member]:
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
        member = Member(name, fields[4], fields[3], fields[7], sizes[1], sizes[0], sizes[2], start + position)
        _check_member(file, member, start)
        yield member
        position = extra_end + fields[12]


def _check_member(file: Bytes, member: Member, directory: int) -> None:
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


def _check_no_overlap(file: Bytes, members: Iterable[Member]) -> None:
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
