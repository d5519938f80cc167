"""Keras 3's own `.keras`: a zip of the model's configuration and an HDF5 file with its weights."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from evergrad._files import file_errors
from evergrad.errors import DamagedFile, FileAccessError
from evergrad.formats.byte_source import closed_on_error
from evergrad.formats.checkpoint import Checkpoint, Format, Probe
from evergrad.formats.hdf5.checkpoint import Hdf5Checkpoint
from evergrad.formats.hdf5.file import EmbeddedFile, Hdf5File
from evergrad.formats.zip_archive import Archive, InflatedMember, ZipMember
from evergrad.records import Check

WEIGHTS = "model.weights.h5"
_COPY_BYTES = 1 << 22


class KerasZip(Format):
    """One `.keras` file; names are those that its `model.weights.h5` has.

    Keras stores the HDF5 file without compression, so weights are altered in place and the CRC follows. What
    only the HDF5 library can alter is altered in a copy, and the archive rewritten when it is closed.
    """

    name = "keras"

    def recognises(self, probe: Probe) -> bool:
        """A zip with `model.weights.h5` and `config.json`."""
        if not probe.head.startswith(b"PK\x03\x04"):
            return False
        archive = Archive.open(probe.path)
        archive.close()
        return {WEIGHTS, "config.json"} <= set(archive.members)

    def open(self, path: Path) -> Checkpoint:
        """Read the zip directory, then list the HDF5 file where it lies."""
        with closed_on_error(Archive.open(path)) as archive:
            return _KerasCheckpoint(path, archive)


class _KerasCheckpoint(Hdf5Checkpoint):
    """The data sets of the HDF5 file in the archive."""

    def __init__(self, path: Path, archive: Archive) -> None:
        self._archive = archive
        member = archive.members[WEIGHTS]
        copies: list[str] = []  # folders with a copy of the weights: none, or one

        def extract() -> Path:
            if not os.access(path, os.W_OK, effective_ids=True):
                raise FileAccessError(path, "cannot be altered: permission denied")
            copies.append(tempfile.mkdtemp(prefix="evergrad-"))
            target = Path(copies[0]) / WEIGHTS
            _copy(archive, member, target)
            archive.inflated[member.name] = _EditedMember(archive, member, target)
            return target

        if member.method:
            place = EmbeddedFile(
                archive.inflate(member), 0, member.size, lambda: archive.stored_checksum(member), extract
            )
        else:
            offset = archive.data_offset(member)
            place = EmbeddedFile(archive.file, offset, member.size, lambda: archive.stored_checksum(member), extract)

        def close() -> None:
            try:
                archive.close()
            except EOFError:  # a damaged member beside the weights, met when the archive is rewritten
                raise DamagedFile(path, "cannot be rewritten: a member is cut short") from None
            finally:
                for folder in copies:
                    shutil.rmtree(folder, ignore_errors=True)

        with closed_on_error(Hdf5File(path, place)) as file:
            beside = {name: "a file in the archive" for name in archive.members if name != WEIGHTS}
            super().__init__(path, file, format=KerasZip.name, close=close, unkept=beside)

    def container_checks(self) -> Mapping[str, Check]:
        """The CRCs of the configuration files beside the weights."""
        return self._archive.check(member for name, member in self._archive.members.items() if name != WEIGHTS)


class _EditedMember(InflatedMember):
    """A member that was altered in a copy; the archive takes it from there when it is rewritten."""

    def __init__(self, archive: Archive, member: ZipMember, copy: Path) -> None:
        self.path = archive.file.path
        self.size = member.size
        self.changed = True
        self._copy = copy

    def view(self) -> npt.NDArray[np.uint8]:
        """All bytes, through a map of the copy."""
        return np.memmap(self._copy, np.uint8, "r")

    def contents(self) -> npt.NDArray[np.uint8]:
        """The same, for writing it back: the copy outlives the archive."""
        return self.view()

    def forget(self) -> None:
        """Nothing is held in memory."""


def _copy(archive: Archive, member: ZipMember, target: Path) -> None:
    with file_errors(archive.file.path, "cannot be altered"), target.open("wb") as out:
        if member.method:
            out.write(archive.inflate(member).view().data)
            return
        offset = archive.data_offset(member)
        for start in range(0, member.size, _COPY_BYTES):
            out.write(archive.file.read(offset + start, min(_COPY_BYTES, member.size - start)))
