"""Zip archives as the checkpoint formats use them: members at known offsets, with checksums that follow.

The standard library reads zip files, but does not say where a member's bytes and its checksums lie, which is
what altering in place needs; so the directory is read by `zip_directory.py`. Rewriting an archive is the standard
library's.
"""

from __future__ import annotations

import copy
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from evergrad.errors import DamagedFile, FileAccessError, LimitExceeded, UnsupportedContent
from evergrad.formats.crc import CRC32
from evergrad.formats.data_file import Bytes, DataFile, closed_on_error, file_errors, xor_rows
from evergrad.formats.durable import replacing
from evergrad.formats.region import Seal, check_seal
from evergrad.formats.zip_directory import Member, data_offset, read_directory
from evergrad.records import Check

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

    file: Bytes
    members: Mapping[str, Member]
    directory: int
    inflated: dict[str, Inflated] = field(default_factory=dict)
    verified: dict[str, bool] = field(default_factory=dict)
    closed: bool = False

    @classmethod
    def open(cls, path: Path) -> Archive:
        """Read the directory; `DamagedFile` if there is none, or if it points outside."""
        with closed_on_error(DataFile(path)) as file:
            return cls.over(file)

    @classmethod
    def over(cls, file: Bytes) -> Archive:
        """The archive that these bytes are; they may be a part of a larger file."""
        return cls(file, *read_directory(file))

    def data_offset(self, member: Member) -> int:
        """Where a stored member's bytes begin in the file."""
        return data_offset(self.file, member, self.directory)

    def read(self, member: Member, limit: int) -> bytes:
        """A whole member, decompressed; `LimitExceeded` if it is larger than `limit` bytes."""
        if member.size > limit:
            raise LimitExceeded(
                self.file.path, f"{member.name!r} is too large", expected=f"at most {limit} bytes", found=member.size
            )
        if not member.method:
            return self.file.read(self.data_offset(member), member.size)
        return bytes(self.inflate(member).view())

    def inflate(self, member: Member) -> Inflated:
        """A compressed member in memory; one object a member, so that changes add up."""
        if member.name not in self.inflated:
            self.inflated[member.name] = Inflated(self, member)
        return self.inflated[member.name]

    def forget_unchanged(self) -> None:
        """Let at most one unaltered member stay in memory."""
        for data in self.inflated.values():
            if not data.changed:
                data.forget()

    def seal(self, member: Member) -> Seal | None:
        """The checksums to keep right when a member is altered.

        None where the writer left them out: torch can be told to, and then writes 0.
        """
        if not member.crc:
            return None
        return InflatedSeal(self, member) if member.method else ZipSeal(self, member, self.data_offset(member))

    def check(self, members: Iterable[Member]) -> dict[str, Check]:
        """Whether these members have the checksum that the directory says; `unknown` where it says none."""
        return {member.name: check_seal(self.seal(member) if member.size else None) for member in members}

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


class ZipSeal:
    """The CRC of a stored member, in the directory and in its local header or data descriptor."""

    def __init__(self, archive: Archive, member: Member, data_offset: int) -> None:
        self._archive, self._member, self._data = archive, member, data_offset

    def follow(self, addresses: npt.NDArray[np.int64], deltas: npt.NDArray[np.uint8]) -> None:
        """Put every copy of the checksum right."""
        member = self._member
        self._archive.verified.pop(member.name, None)
        file = self._archive.file
        # Onto what the file says now: somebody else may have altered it too.
        member.crc = int.from_bytes(file.now(member.entry + 16, 4), "little")
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


class InflatedSeal:
    """The CRC of a compressed member: over what it decompresses to, and written anew with it."""

    def __init__(self, archive: Archive, member: Member) -> None:
        self._archive, self._member = archive, member

    def follow(self, addresses: npt.NDArray[np.int64], deltas: npt.NDArray[np.uint8]) -> None:
        """Nothing to do: the archive is rewritten."""

    def holds(self) -> bool:
        """Whether it decompresses to what was compressed."""
        return crc32(self._archive.inflate(self._member).view().data) == self._member.crc


class Inflated:
    """A compressed member; in memory while it is the last one used or has been altered.

    Changes are written back when the archive is closed.
    """

    in_place = False

    def __init__(self, archive: Archive, member: Member) -> None:
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

    def now(self, offset: int, length: int) -> bytes:
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


def _rewrite(path: Path, changed: Mapping[str, Inflated]) -> None:
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
