"""Where arenas are: a folder a job and node in shared memory, closed to others, and given back when its job is gone."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

import xxhash

from evergrad.checkpoint import storage
from evergrad.checkpoint.arena import ArenaFiles, open_files_hint
from evergrad.checkpoint.job import Job, read_identity, say_once
from evergrad.checkpoint.locks import is_locked
from evergrad.errors import CheckpointError, reason
from evergrad.formats.data_file import NoFile, read_small
from evergrad.formats.version_records import shard_rank

LOCK = "agent.lock"
"""Held by the agent of a node while it lives."""


def arenas_root() -> Path:
    """Where this user's arenas are: below EVERGRAD_SHM, or /dev/shm."""
    return Path(os.environ.get("EVERGRAD_SHM") or "/dev/shm") / f"evergrad-{os.getuid()}"


def arena_folder(job: Job) -> Path:
    """The folder of a job's arenas on this node, made if need be, and refused if others could look into it."""
    root = arenas_root()
    folder = root / job.id / job.node_folder
    try:
        for path in (root, root / job.id, folder):
            storage.make_folder(path, 0o700)
            status = os.lstat(path)
            if status.st_uid != os.getuid() or status.st_mode & 0o077 or not path.is_dir() or path.is_symlink():
                raise CheckpointError(
                    f"{path}: is not a folder that only user {os.getuid()} can open. Remove it, or set EVERGRAD_SHM "
                    "to a tmpfs of your own."
                )
        _note_home(root / job.id / "run", _home_bytes(job.run_dir))
    except OSError as error:
        hint = "" if error.errno in (errno.EMFILE, errno.ENFILE) else " Set EVERGRAD_SHM to a tmpfs."
        raise CheckpointError(f"{folder}: no place for arenas: {open_files_hint(error)}{hint}") from error
    return folder


def _note_home(home: Path, place: bytes) -> None:
    """Note where the run folder of arenas is, made or moved since. Without the note they are never removed."""
    try:
        if read_small(home) == place:
            return
    except (FileNotFoundError, PermissionError, NoFile):
        pass  # replaced, if that may be
    except IsADirectoryError as error:
        what = f"cannot be read: {reason(error)}. Arenas of this job are not removed when its run folder is gone."
        say_once(f"{home}: {what}")
        return
    except OSError as error:
        if error.errno != errno.ELOOP:  # links that lead to each other are replaced
            raise
    storage.publish(home, place)


def open_run_folder(job: Job) -> int:
    """A descriptor of the run folder, to be closed, by which `moved_to` finds it again."""
    try:
        return os.open(job.run_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{job.run_dir}: cannot be opened: {open_files_hint(error)}") from error


def moved_to(job: Job, fd: int) -> Path | None:
    """The path that a run folder was moved to since it was opened; None if it was not, or is gone.

    The arenas then note the new path: those of a run folder that is gone are removed.
    """
    with suppress(OSError, CheckpointError):
        now = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if now != job.run_dir and os.path.samestat(os.stat(now), os.fstat(fd)) and read_identity(now) == job.id:
            home = arenas_root() / job.id / "run"
            if read_small(home) != _home_bytes(now):
                storage.publish(home, _home_bytes(now))
            return now
    return None


def find_arenas(folder: Path, rank: int | None = None, *, rests: bool = False) -> list[ArenaFiles]:
    """The arenas that there are, of all ranks or of one; with `rests` also those that have lost their ticket."""
    found: dict[ArenaFiles, None] = {}
    endings = ("ticket", "safetensors") if rests else ("ticket",)
    with suppress(OSError):
        for entry in sorted(os.listdir(folder)):
            stem, _, ending = entry.rpartition(".")
            name, _, index = stem.rpartition(".")
            number = shard_rank(name)
            if ending in endings and number is not None and index.isdigit() and rank in (None, number):
                found[ArenaFiles(folder, number, int(index))] = None
    return list(found)


def remove_orphans(root: Path | None = None) -> list[str]:
    """Give back the memory of jobs whose run folder is gone and which nobody uses; the names of those jobs."""
    removed = []
    root = arenas_root() if root is None else root
    with suppress(OSError):
        for job in sorted(entry for entry in os.listdir(root)):
            home = root / job / "run"
            with suppress(OSError, CheckpointError):
                run_dir = _run_dir(read_small(home))
                if run_dir is not None and read_identity(run_dir) != job and _remove_job(root / job):
                    removed.append(job)
    return removed


def _home_bytes(run_dir: Path) -> bytes:
    """The path of a run folder as a job's arenas note it: with a digest, because removing arenas depends on it."""
    path = os.fsencode(run_dir)
    return path + b"\n" + xxhash.xxh3_128_hexdigest(path).encode() + b"\n"


def _run_dir(data: bytes) -> Path | None:
    """The way back; None if it is not as it was written."""
    path = data.rstrip(b"\n").rpartition(b"\n")[0]
    return Path(os.fsdecode(path)) if path and data == _home_bytes(Path(os.fsdecode(path))) else None


def _remove_job(folder: Path) -> bool:
    nodes = [path for path in folder.iterdir() if path.is_dir()]
    locks = [node / LOCK for node in nodes if (node / LOCK).exists()]
    if any(files.is_locked() for node in nodes for files in find_arenas(node)) or any(map(is_locked, locks)):
        return False
    for node in nodes:
        for files in find_arenas(node):
            files.remove()
        for name in os.listdir(node):
            storage.remove(node / name)
        storage.remove_folder(node)
    for name in sorted(os.listdir(folder)):  # hidden leftovers first, "run" last
        storage.remove(folder / name)
    storage.remove_folder(folder)
    return True
