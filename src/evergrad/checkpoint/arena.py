"""Arenas: blocks of shared memory, laid out as the shard file will be, that outlive the trainer.

Each rank has two, used in turns. An arena is a few files in a folder that only its user can open:

    rank-00003.0.safetensors   the shard itself, exactly as long as it has to be
    rank-00003.0.ticket        what is in it: a generation counter, *copying* or *captured*, the version, its tiers
    rank-00003.0.json          its manifest, once digested: the arena then is the checkpoint of the memory tier
    rank-00003.0.digests       the same where memory is no tier: digests that a restart need not take again

The trainer alone writes the shard and the ticket; whoever finishes the version alone writes the manifest. A ticket
is one small write with a digest of its own: torn, it counts as *copying*. A manifest holds for one generation only,
so that a reused arena never passes for what was in it before. The trainer holds a lock on the ticket while it lives.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import resource
import time
import weakref
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from evergrad import _files
from evergrad._files import is_locked, locked, open_lock, read_small, removal_advice, take_lock
from evergrad.checkpoint.version import Version
from evergrad.errors import CheckpointError, TierError, reason
from evergrad.formats.version_records import shard_name

_MAGIC = b"EGTICKET"
_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14
_LOOK_S = 0.1
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)
_SPARE_FILES = 16


@dataclass(frozen=True, slots=True)
class ArenaTicket:
    """What a trainer says of an arena."""

    generation: int
    captured: bool
    step: int = 0
    attempt: int = 0
    rank: int = 0
    world_size: int = 1
    size: int = 0
    time: str = ""
    parent: str | None = None
    tiers: list[dict[str, Any]] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def version(self) -> Version:
        """The version that the arena holds a shard of."""
        return Version(self.step, self.attempt)

    def to_bytes(self) -> bytes:
        """Magic, length, digest, JSON."""
        text = json.dumps(asdict(self)).encode()
        return _MAGIC + len(text).to_bytes(8, "little") + xxhash.xxh3_128_digest(text) + text

    @classmethod
    def from_bytes(cls, data: bytes) -> ArenaTicket | None:
        """None for a torn or foreign ticket."""
        size = int.from_bytes(data[8:16], "little")
        text = data[32 : 32 + size]
        if data[:8] != _MAGIC or len(text) != size or data[16:32] != xxhash.xxh3_128_digest(text):
            return None
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class ArenaFiles:
    """The files of one arena."""

    folder: Path
    rank: int
    index: int

    @property
    def shard(self) -> Path:
        """The shard."""
        return self.folder / f"{shard_name(self.rank)}.{self.index}.safetensors"

    @property
    def ticket(self) -> Path:
        """What the trainer says of it."""
        return self.folder / f"{shard_name(self.rank)}.{self.index}.ticket"

    @property
    def manifest(self) -> Path:
        """Its digests, as a copy in the memory tier."""
        return self.folder / f"{shard_name(self.rank)}.{self.index}.json"

    @property
    def digests(self) -> Path:
        """Its digests, where memory is no tier."""
        return self.folder / f"{shard_name(self.rank)}.{self.index}.digests"

    def read_ticket(self, *, strict: bool = False) -> ArenaTicket | None:
        """Return the arena's ticket; None if it cannot be read, or, if strict, `OSError` if it cannot be opened."""
        try:
            return ArenaTicket.from_bytes(read_small(self.ticket))
        except OSError as error:
            if strict and not isinstance(error, FileNotFoundError):
                raise
        return None

    def is_locked(self) -> bool:
        """Whether a living trainer holds it."""
        return is_locked(self.ticket)

    def remove(self) -> None:
        """Give its memory back: the manifest first, so that nothing half removed passes for a checkpoint."""
        for path in (self.manifest, self.digests, self.shard, self.ticket):
            _files.remove(path)

    def remove_if_free(self) -> bool:
        """Remove it unless a living trainer holds it; whoever wants to lease it meanwhile gets a new one."""
        try:
            fd = os.open(self.ticket, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            take_lock(fd)
            self.remove()
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    def finishing_lock(self) -> AbstractContextManager[None]:
        """Be the only one who finishes what is in it; a second process waits here."""
        return locked(self.ticket.with_suffix(".work"))


class Arena:
    """An arena as its trainer holds it: mapped for writing, locked until `close`."""

    def __init__(self, files: ArenaFiles, fd: int) -> None:
        self.files = files
        self._fd = fd
        _leased.add(self)
        self.buffer: mmap.mmap | None = None
        # Counting starts where none has been: whoever remembers an arena of this name must not mistake this for it.
        self.ticket = files.read_ticket() or ArenaTicket(generation=time.time_ns(), captured=False)

    @classmethod
    def lease(cls, folder: Path, rank: int, index: int) -> Arena | None:
        """Lock an arena, made if need be; None if another trainer holds it."""
        files = ArenaFiles(folder, rank, index)
        end = time.monotonic() + _LOOK_S
        while True:
            try:
                fd = open_lock(files.ticket)
            except OSError as error:
                raise _not_made(files.ticket, 0, error) from error
            try:
                take_lock(fd)
                if os.path.samestat(os.fstat(fd), os.stat(files.ticket)):
                    return cls(files, fd)
            except FileNotFoundError:
                pass  # cleaned away between opening and locking
            except OSError as error:
                os.close(fd)
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                if time.monotonic() > end:
                    return None
                time.sleep(0.01)  # perhaps someone only looked whether it is locked
                continue
            os.close(fd)

    @property
    def size(self) -> int:
        """Bytes that are reserved and mapped."""
        return len(self.buffer) if self.buffer is not None else 0

    def reserve(self, size: int) -> None:
        """Make the arena exactly so long: pages reserved, faulted in, mapped. Costs nothing if it is already."""
        if self.size == size:
            return
        self.buffer = None
        if self.ticket.captured:
            self.mark_empty()
        try:
            as_it_is = self.files.shard.stat().st_size == size
        except OSError:
            as_it_is = False
        if not as_it_is:
            _check_memory(self.files.folder, size)
            # A new file, never the old one cut or stretched: whoever still reads that one must not fall off its end.
            try:
                _files.remove(self.files.shard)
            except OSError as error:
                raise _not_made(self.files.shard, size, error) from error
        try:
            fd = os.open(self.files.shard, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _not_made(self.files.shard, size, error) from error
        try:
            os.ftruncate(fd, size)
            # A hole in /dev/shm that cannot be filled later would end the trainer with SIGBUS: fill it now.
            os.posix_fallocate(fd, 0, size)
            self.buffer = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            self.buffer.madvise(mmap.MADV_DONTFORK)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(fd, 0)
            raise _not_made(self.files.shard, size, error) from error
        finally:
            os.close(fd)

    def mark_empty(self) -> None:
        """From here on the arena holds nothing, until `captured`.

        The digests of its last content go with that: a manifest beside an arena is that of what it holds, or damaged.
        """
        self._say(ArenaTicket(generation=self.ticket.generation + 1, captured=False))
        for path in (self.files.manifest, self.files.digests):
            with suppress(OSError):  # a folder in its place: whoever writes the next one says so
                _files.remove(path)

    def mark_captured(self, ticket: ArenaTicket) -> None:
        """All bytes are there: what they are."""
        self._say(replace(ticket, generation=self.ticket.generation, captured=True))

    def close(self) -> None:
        """Let go of it; what is in it stays."""
        self.buffer = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def drop(self) -> None:
        """In a forked child: the lock is the parent's, and must not outlive it."""
        if self._fd >= 0:
            with suppress(OSError):
                os.close(self._fd)
            self._fd = -1

    def _say(self, ticket: ArenaTicket) -> None:
        _files.write(self._fd, ticket.to_bytes(), 0)
        self.ticket = ticket


_leased: weakref.WeakSet[Arena] = weakref.WeakSet()


def _drop_in_child() -> None:
    for arena in list(_leased):
        arena.drop()


os.register_at_fork(after_in_child=_drop_in_child)


def populate(buffer: mmap.mmap) -> None:
    """Map the pages of a file that are in memory now, all at once instead of one fault each."""
    try:
        buffer.madvise(_POPULATE_READ)
    except ValueError:
        pass
    except OSError as error:
        if error.errno != errno.EINVAL:  # an older kernel cannot; others mean that reading would end in SIGBUS
            raise


def _check_memory(folder: Path, size: int) -> None:
    """/dev/shm may be as large as all memory: reserving what is not there would end processes, not fail."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024
        if size > available:
            raise _too_small(folder, size, OSError(errno.ENOMEM, f"{available / 1e9:.3f} GB of memory are available"))


def check_open_files() -> None:
    """`CheckpointError` if this process cannot open files any more: whatever is read next would seem to be missing."""
    opened: list[int] = []
    try:
        while len(opened) < _SPARE_FILES:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise CheckpointError(f"nothing can be read: {open_files_hint(error)}") from error
    finally:
        for fd in opened:
            os.close(fd)


def open_files_hint(error: OSError) -> str:
    """Return the system's reason; for too many open files, add the limit and how to raise it."""
    what = reason(error)
    if error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"{what} in this process: its limit is {limit}. Raise it (ulimit -n), or close some."
    return f"{what} on this machine: raise fs.file-max, or close some." if error.errno == errno.ENFILE else f"{what}."


def _not_made(path: Path, size: int, error: OSError) -> TierError:
    """An arena could not be made: for want of memory, or for another reason."""
    if error.errno in _NO_ROOM:
        return _too_small(path.parent, size, error)
    return TierError(f"{path}: no arena: {open_files_hint(error)}{removal_advice(path)}")


def _too_small(folder: Path, size: int, error: OSError) -> TierError:
    status = os.statvfs(folder)
    free, whole = (blocks * status.f_frsize / 1e9 for blocks in (status.f_bavail, status.f_blocks))
    what = reason(error)
    return TierError(
        f"{folder.parents[2]}: an arena of {size / 1e9:.3f} GB does not fit ({what}): {free:.3f} GB of {whole:.3f} "
        "GB are free, and each rank needs two. Enlarge it (mount -o remount,size=…; docker run --shm-size=…), or set "
        "EVERGRAD_SHM to a larger tmpfs."
    )
