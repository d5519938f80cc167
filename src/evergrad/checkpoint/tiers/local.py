"""The local tier: a disk of the node's own.

    <path>/<job>/<node>/v0000000120-02/rank-00003.safetensors     the shard: an ordinary safetensors file
                                       rank-00003.json            its manifest, last
                        .spare-rank-00003                         a retired shard, to be written over

Bytes go straight from the arena to the disk (O_DIRECT) where the file system can do that: no second copy in the page
cache, and nothing left to flush. Writing over blocks that are already allocated is nearly twice as fast as writing
new ones, so the last retired shard is kept as a spare.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from evergrad import _files
from evergrad._files import is_locked, take_lock
from evergrad.checkpoint.arena import open_files_hint
from evergrad.checkpoint.tiers.base import Copy, EnclosingRunFolder, Site, Store, Tier, Torn, Work
from evergrad.checkpoint.version import Version
from evergrad.errors import TierError, UsageError
from evergrad.formats.version_records import shard_name, shard_rank

_log = logging.getLogger(__name__)
_CHUNK = 16 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Local(Tier):
    """Keep versions on a disk of the node; without a path, in the run folder.

    >>> Local("/scratch", keep=3).to_json()
    {'kind': 'local', 'path': '/scratch', 'keep': 3}
    """

    kind: ClassVar[str] = "local"
    survives_reboot: ClassVar[bool] = True
    path: str | None = None
    keep: int = 2

    def __post_init__(self) -> None:
        if self.path is not None:
            object.__setattr__(self, "path", os.path.abspath(os.fspath(self.path)))
        if not isinstance(self.keep, int) or self.keep < 1:
            raise UsageError(f"Local(keep={self.keep!r}): expected 1 or more versions")

    def root(self, run_dir: Path) -> Path:
        """The folder that those of jobs are in."""
        return Path(self.path) if self.path is not None else run_dir / "local"

    def store(self, site: Site) -> Store:
        """The folder of a job and node below the path."""
        root = self.root(site.run_dir)
        return _LocalStore(root, root / site.job / site.node, EnclosingRunFolder.of(root, site.run_dir))


class _LocalStore(Store):
    def __init__(self, root: Path, folder: Path, home: EnclosingRunFolder) -> None:
        self._root, self._folder, self._home = root, folder, home
        self._direct = True

    def check(self) -> None:
        try:
            _files.make_folders(self._folder)
            if os.statvfs(self._folder).f_flag & os.ST_RDONLY:
                raise OSError(errno.EROFS, "read-only file system")
            if not os.access(self._folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "permission denied")
        except OSError as error:
            raise _tier_error(self._folder, error) from error

    def put(self, work: Work) -> None:
        try:
            try:
                self._put(work)
            except OSError as error:
                if error.errno == errno.EINVAL and self._direct:
                    self._direct = False  # a file system that opens for O_DIRECT and then cannot
                elif error.errno not in _FULL:
                    raise
                self._clear(work)  # what a spare or a torn shard took up may be what is missing
                self._put(work)
        except OSError as error:
            with suppress(OSError):
                self._clear(work)
            raise _tier_error(self._folder, error) from error

    def find(self, rank: int | None = None) -> list[Copy]:
        found = []
        for name in _names(self._folder):
            version = Version.parse(name)
            if version is None:
                continue
            folder = self._folder / name
            try:
                entries = _names(folder) if rank is None else [f"{shard_name(rank)}.json"]
            except TierError as error:  # one version that cannot be read must not hide the others
                _log.warning("%s", error)
                continue
            for entry in entries:
                stem, _, ending = entry.rpartition(".")
                number = shard_rank(stem)
                if ending == "json" and number is not None:
                    shard, manifest = folder / f"{stem}.safetensors", folder / entry
                    if rank is None or _is_there(manifest):
                        found.append(Copy("local", version, number, shard, manifest))
        return found

    def torn(self, rank: int) -> dict[Version, Torn]:
        found = {}
        for name in _names(self._folder):
            version, manifest = Version.parse(name), self._folder / name / f"{shard_name(rank)}.json"
            if version is not None and not _is_there(manifest):
                found[version] = Torn(f"{manifest}: no manifest")
        return found

    def drop(self, copy: Copy) -> None:
        try:
            _files.remove(copy.manifest)
            _files.fsync_folder(copy.manifest.parent)
            spare = self._spare(copy.rank)
            if spare.exists() or is_locked(copy.shard, shared=True):  # locked: someone reads it
                _files.remove(copy.shard)
            else:
                with suppress(FileNotFoundError):
                    _files.rename(copy.shard, spare)
            self._remove(copy.manifest.parent, copy.rank)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise _tier_error(self._folder, error) from error

    def _put(self, work: Work) -> None:
        self._home.check("local")
        _files.make_folders(self._folder)
        folder = self._folder / work.version.name
        if _files.make_folder(folder):
            _files.fsync_folder(self._folder)
        stem = shard_name(work.rank)
        partial, shard, manifest = (
            folder / name for name in (f".{stem}.partial", f"{stem}.safetensors", f"{stem}.json")
        )
        if manifest.exists():  # taken up again after a crash: a step and an attempt are captured once only
            _files.fsync_folder(folder)
            return
        if not partial.exists():
            with suppress(FileNotFoundError):
                _files.rename(self._spare(work.rank), partial)
        fd = self._open(partial)
        try:
            _files.allocate(fd, len(work.shard))
            self._write(fd, work.shard)
            _files.fsync(fd)
        finally:
            os.close(fd)
        _files.rename(partial, shard)
        # The manifest last: a torn save must look like no save.
        _files.publish(manifest, work.manifest.to_bytes())
        with suppress(OSError, TierError):
            self._tidy(work)

    def _tidy(self, work: Work) -> None:
        """Remove what crashes have left of this rank's shards of versions before this one."""
        for version in self.torn(work.rank):
            if version.age() < work.version.age():
                folder = self._folder / version.name
                _files.remove(folder / f"{shard_name(work.rank)}.safetensors")
                self._remove(folder, work.rank)

    def _remove(self, folder: Path, rank: int) -> None:
        """Remove a folder whose shard of a rank is gone, with what was begun there; others' shards stay."""
        for name in _names(folder):
            if name.startswith(f".{shard_name(rank)}."):
                _files.remove(folder / name)
        _files.remove_folder(folder)

    def _open(self, partial: Path) -> int:
        """The file to write to, locked; a spare that someone still reads is left to them."""
        fd = _files.create(partial, direct=self._direct)
        try:
            take_lock(fd)
        except BlockingIOError:
            os.close(fd)
            _files.remove(partial)
            fd = _files.create(partial, direct=self._direct)
        except OSError:
            pass  # a file system without locks
        return fd

    @staticmethod
    def _write(fd: int, data: memoryview) -> None:
        """All bytes in whole blocks; the tail, rounded up to a page of the map, is cut off again."""
        size = len(data)
        whole = size - size % mmap.PAGESIZE
        for begin in range(0, whole, _CHUNK):
            _files.write(fd, data[begin : min(begin + _CHUNK, whole)], begin)
        if size > whole:
            page = mmap.mmap(-1, mmap.PAGESIZE)  # O_DIRECT wants aligned memory
            page[: size - whole] = data[whole:]
            _files.write(fd, memoryview(page), whole)
            _files.resize(fd, size)

    def _clear(self, work: Work) -> None:
        """Remove what a failed attempt left, and the spare: the disk may be full."""
        folder, stem = self._folder / work.version.name, shard_name(work.rank)
        _files.remove(folder / f".{stem}.partial")
        if not (folder / f"{stem}.json").exists():
            _files.remove(folder / f"{stem}.safetensors")
        _files.remove(self._spare(work.rank))
        _files.remove_folder(folder)

    def _spare(self, rank: int) -> Path:
        return self._folder / f".spare-{shard_name(rank)}"


def _is_there(path: Path) -> bool:
    """Whether there is a file, for all that can be seen: if its folder is closed to us, reading it will tell."""
    try:
        return path.exists()
    except OSError:
        return True


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _tier_error(folder, error) from error


def _tier_error(folder: Path, error: OSError) -> TierError:
    hint = " Free some space, or choose another path." if error.errno in _FULL else ""
    return TierError(f"{error.filename or folder}: tier local: {open_files_hint(error)}{hint}")
