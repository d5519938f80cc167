"""One rank's shard, mapped and checked: the only thing that is ever loaded from."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from evergrad._digest import digest_spans
from evergrad._files import open_regular, read_small, take_lock
from evergrad.checkpoint.arena import ArenaTicket, populate
from evergrad.checkpoint.shard_layout import ParsedHeader, ShardEntry, parse_header
from evergrad.checkpoint.shard_manifest import Manifest
from evergrad.checkpoint.tiers import Copy, Store
from evergrad.dtypes import DType
from evergrad.errors import DamagedFile, EvergradError, FileAccessError, FormatError, reason
from evergrad.state import Skeleton
from evergrad.state.sharing import contiguous_strides

if TYPE_CHECKING:
    import torch


class Shard:
    """A complete shard in a tier, mapped for reading.

    `verify` compares every digest before anything is loaded. Until `close` the tensors that `tensor` gives are
    views of the file: they must neither be written to nor outlive it.
    """

    def __init__(self, copy: Copy, job: str, mapped: mmap.mmap | None = None) -> None:
        """Map a shard whose manifest says that it belongs to the job; `FormatError` if it does not fit that.

        An arena may be `mapped` already: faulting in its pages takes longer than copying them.
        """
        self.copy = copy
        try:
            self.manifest = Manifest.read(copy.manifest)
            fd = open_regular(copy.shard)
        except OSError as error:
            raise FileAccessError(copy.shard, f"cannot be read: {reason(error)}") from error
        manifest = self.manifest
        try:
            size = os.fstat(fd).st_size
            if size != manifest.size:
                raise DamagedFile(copy.shard, "wrong length", expected=f"{manifest.size} bytes", found=size)
            if (manifest.job, manifest.version, manifest.rank) != (job, copy.version, copy.rank):
                found = f"{manifest.version}, rank {manifest.rank} of job {manifest.job}"
                expected = f"{copy.version}, rank {copy.rank} of job {job}"
                raise DamagedFile(copy.manifest, "describes another shard", expected=expected, found=found)
            _lock(fd, copy)
            self._is_own = mapped is None or len(mapped) != size
            self._map = mapped if mapped is not None and not self._is_own else _map(fd, size)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self._view = memoryview(self._map)
        self._whole: torch.Tensor | None = None
        self._typed: dict[DType, torch.Tensor] = {}

    def verify(self, paths: Iterable[str] | None = None) -> list[str]:
        """Check the header, and all tensors or some; the stored paths that are not what was captured.

        `DamagedFile` if the header is not, because then nothing in the shard can be believed.
        """
        manifest = self.manifest
        if not 8 <= manifest.data_start <= len(self._view):
            raise DamagedFile(self.copy.manifest, "data_start lies outside the shard", found=manifest.data_start)
        if self._is_own:
            try:
                populate(self._map)
            except OSError as error:
                raise DamagedFile(self.copy.shard, f"cannot be read: {reason(error)}") from error
        if digest_spans(self._view, [(0, manifest.data_start)]) != [manifest.header]:
            raise DamagedFile(self.copy.shard, "the header is not what was captured")
        entries = {entry.path: entry for entry in self.parsed.layout.entries}
        if entries.keys() != manifest.digests.keys():
            raise DamagedFile(self.copy.manifest, "has other tensors than the shard")
        aliases = self.parsed.layout.aliases
        wanted = entries if paths is None else {aliases.get(path, path): None for path in paths}
        order = sorted((entries[path] for path in wanted), key=lambda entry: entry.offset)
        found = digest_spans(self._view, [(entry.offset, entry.offset + entry.nbytes) for entry in order])
        return [
            entry.path for entry, digest in zip(order, found, strict=True) if digest != manifest.digests[entry.path]
        ]

    def complaint(self, paths: Iterable[str] | None = None) -> str:
        """What `verify` finds wrong, in a line; empty if all is as it was captured."""
        wrong = self.verify(paths)
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return f"{wrong[0]}: not what was captured{more}" if wrong else ""

    @property
    def view(self) -> memoryview:
        """The bytes of the whole shard."""
        return self._view

    def is_current(self) -> bool:
        """Whether an arena still holds what was mapped; a file is not written over while it is locked."""
        if self.copy.use is None:
            return True
        with suppress(OSError):
            ticket = ArenaTicket.from_bytes(read_small(self.copy.shard.with_suffix(".ticket")))
            return ticket is not None and ticket.captured and ticket.generation == self.copy.use
        return False

    @cached_property
    def parsed(self) -> ParsedHeader:
        """The header, read."""
        return parse_header(self._view, self.copy.shard)

    @property
    def skeleton(self) -> Skeleton:
        """The state's shape and its values."""
        return self.parsed.skeleton

    @cached_property
    def shapes(self) -> Mapping[str, tuple[DType, tuple[int, ...]]]:
        """Every tensor, tied ones included."""
        layout = self.parsed.layout
        found = {entry.path: (entry.dtype, entry.shape) for entry in layout.entries}
        return found | {alias: found[path] for alias, path in layout.aliases.items()}

    def tensor(self, path: str) -> torch.Tensor:
        """A view of the map."""
        entry = self._entries[self.parsed.layout.aliases.get(path, path)]
        # One view a type, and each tensor as a part of that: a single call for each of tens of thousands.
        typed = self._typed.get(entry.dtype)
        if typed is None:
            whole = self._bytes
            typed = whole[: whole.numel() // entry.dtype.itemsize * entry.dtype.itemsize].view(entry.dtype.torch)
            self._typed[entry.dtype] = typed
        return typed.as_strided(entry.shape, contiguous_strides(entry.shape), entry.offset // entry.dtype.itemsize)

    def close(self) -> None:
        """Unmap it. No tensor of it may be used afterwards."""
        self._whole = None
        self._typed.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._view.release()
        if self._is_own:
            with suppress(BufferError):  # someone still holds a view: the map goes with it
                self._map.close()

    def __enter__(self) -> Shard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @cached_property
    def _entries(self) -> dict[str, ShardEntry]:
        return {entry.path: entry for entry in self.parsed.layout.entries}

    @property
    def _bytes(self) -> torch.Tensor:
        """The whole map as one tensor: torch complains about memory that is read-only, and nobody writes here."""
        if self._whole is None:
            import torch

            address = np.frombuffer(self._view, np.uint8).ctypes.data
            self._whole = torch.frombuffer((ctypes.c_uint8 * len(self._view)).from_address(address), dtype=torch.uint8)
        return self._whole


def fetch_intact(
    store: Store,
    copy: Copy,
    job: str,
    folder: Path,
    *,
    mapped: Mapping[Path, mmap.mmap] | None = None,
    paths: Iterable[str] | None = None,
) -> tuple[Shard | None, str]:
    """A copy that is as it was captured, all of it or some paths; or None, and what is wrong with it.

    What is in no file system is brought into the folder first; arenas may be `mapped` already.
    """
    try:
        near = store.fetch(copy, folder)
        shard = Shard(near, job, (mapped or {}).get(near.shard))
    except (EvergradError, OSError) as error:
        return None, str(error)
    wanted = None if paths is None else set(paths)
    try:
        absent = wanted - shard.manifest.digests.keys() if wanted is not None else set()
        if absent and not absent <= shard.parsed.layout.aliases.keys():
            complaint = f"rank {copy.rank}'s shard does not hold what others left to it"
        else:
            complaint = shard.complaint(wanted) or ("" if shard.is_current() else "overwritten meanwhile")
        if not complaint:
            return shard, ""
    except FormatError as error:
        complaint = str(error)
    shard.close()
    return None, complaint


def _lock(fd: int, copy: Copy) -> None:
    """Keep a file from being written over as a spare while it is read; a file system without locks cannot."""
    if copy.use is None:
        try:
            take_lock(fd, shared=True)
        except BlockingIOError:
            raise DamagedFile(copy.shard, "is being written over: the version was retired") from None
        except OSError:
            pass


def _map(fd: int, size: int) -> mmap.mmap:
    """A file mapped for reading from its beginning to its end, so that the kernel reads far ahead on a cold disk."""
    with suppress(OSError):
        os.posix_fadvise(fd, 0, size, os.POSIX_FADV_SEQUENTIAL)
    mapped = mmap.mmap(fd, size, prot=mmap.PROT_READ)
    with suppress(OSError):
        mapped.madvise(mmap.MADV_SEQUENTIAL)
    return mapped
