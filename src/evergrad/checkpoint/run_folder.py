"""A job: its run folder, its identity, the node this process is on, and its attempts."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from evergrad import _files
from evergrad._files import NoFile, appearing, is_locked, read_small, replacing
from evergrad.checkpoint.arena import ArenaFiles, open_files_hint
from evergrad.errors import CheckpointError, FileAccessError, FormatError, reason, said
from evergrad.formats.version_records import read_record, record_bytes, shard_rank

SCHEMA_VERSION = 1
_log = logging.getLogger(__name__)
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_REBUILT = "rebuilt"
_said: set[str] = set()


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One training job, known by its run folder.

    The identity is made once: the folder's name and eight hex digits of its path and of chance. A run folder that
    was removed and made anew is therefore another job, and never finds the shards of the first. One that was moved
    keeps its identity; a copy gets one of its own. A damaged `job.json` is written again from the attempts' records.
    """

    run_dir: Path
    id: str
    node: str

    @classmethod
    def open(cls, run_dir: str | os.PathLike[str], node: str | None = None) -> RunFolder:
        """The job of a run folder, which is made if need be."""
        folder = Path(run_dir).absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            folder = folder.resolve()
            for name in ("attempts", "complete", "agents"):
                (folder / name).mkdir(exist_ok=True)
        except OSError as error:
            raise FileAccessError(folder, f"cannot be a run folder: {reason(error)}") from error
        return cls(folder, _identity(folder), node_name(node))

    @property
    def node_folder(self) -> str:
        """This node's name as that of a folder."""
        return safe_name(self.node)

    def is_there(self) -> bool:
        """True if the run folder is still where it was: neither moved, nor removed, nor another job's by now."""
        try:
            return read_identity(self.run_dir) == self.id
        except CheckpointError:
            return (self.run_dir / "job.json").exists()  # damaged, or not to be read now

    def begin_attempt(self, **notes: Any) -> int:
        """A number that no other attempt of this job has; what is known of it is noted in the run folder."""
        folder = self.run_dir / "attempts"
        while True:
            try:
                number = self.latest_attempt() + 1
            except OSError as error:
                raise CheckpointError(f"{folder}: cannot be read: {open_files_hint(error)}") from error
            record = {
                "schema_version": SCHEMA_VERSION,
                "attempt": number,
                "time": time_now(),
                "host": socket.gethostname(),
            }
            record |= {"job": self.id, "path": str(self.run_dir)}  # a second copy of what job.json says
            try:
                with appearing(folder / f"{number:05d}.json") as temporary:
                    temporary.write_bytes(record_bytes(record | notes))
            except FileExistsError:
                continue  # another attempt began at the same moment
            except FileAccessError as error:
                if not isinstance(error.__cause__, OSError):
                    raise
                raise FileAccessError(
                    folder / f"{number:05d}.json", f"a new attempt cannot be noted: {_not_noted(error.__cause__)}"
                ) from error
            return number

    def latest_attempt(self) -> int:
        """The highest attempt there has been, 0 before the first."""
        numbers = [int(path.stem) for path in (self.run_dir / "attempts").glob("*.json") if path.stem.isdigit()]
        return max(numbers, default=0)

    def sees_attempt(self, number: int, patience_s: float = 5.0) -> bool:
        """Whether this node sees an attempt that another one began: a network file system may take a moment."""
        end = time.monotonic() + patience_s
        path = self.run_dir / "attempts" / f"{number:05d}.json"
        while not path.exists():
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
            with suppress(OSError):
                os.listdir(path.parent)  # makes NFS look again
        return True


def node_name(given: str | None = None) -> str:
    """The node's name: as given, else EVERGRAD_NODE, else the host's."""
    name = given or os.environ.get("EVERGRAD_NODE") or socket.gethostname()
    return name.strip() or "node"


def safe_name(text: str, limit: int = 40) -> str:
    """A text as the name of a file; two texts never give the same name.

    >>> safe_name("node-1"), safe_name("a/b").startswith("a-b.")
    ('node-1', True)
    """
    plain = _UNSAFE.sub("-", text).strip(".")[:limit]
    if plain == text:
        return plain
    return f"{plain}.{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


def time_now() -> str:
    """The time as records carry it."""
    return time_text(time.time())


def time_text(seconds: float) -> str:
    """Return a time, given in seconds since 1970, as records carry it; later ones compare as greater.

    >>> time_text(0)
    '1970-01-01T00:00:00Z'
    """
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + "Z"


def warn_once(line: str) -> None:
    """Warn of something that stays as it is, such as a record that cannot be read, once in this process."""
    if line not in _said:
        _said.add(line)
        _log.warning("%s", line)


def read_identity(folder: Path) -> str | None:
    """The identity that a run folder has, or None."""
    found = _read(folder / "job.json")
    return found["id"] if found is not None else None


def former_homes(folder: Path, job: str) -> list[Path]:
    """The paths that a run folder was moved away from, by its records; those that still lead to it are none."""
    found: dict[Path, None] = {}
    for path in (folder / "job.json", *sorted((folder / "attempts").glob("*.json"))):
        with suppress(OSError, ValueError):
            record = read_record(read_small(path))
            if job in (record.get("id"), record.get("job")) and isinstance(record.get("path"), str):
                found[Path(record["path"])] = None
    return [home for home in found if home.is_absolute() and not _leads_to(home, folder)]


def moved_along(spec: Mapping[str, Any], homes: Sequence[Path], folder: Path) -> dict[str, Any]:
    """The settings of a tier, with a place within a run folder as it is since that folder was moved."""
    moved = dict(spec)
    for name, scheme in (("path", ""), ("url", "file://")):
        place = moved.get(name)
        if isinstance(place, str) and place.startswith(scheme) and homes:
            real = Path(os.path.realpath(place.removeprefix(scheme)))
            home = next((home for home in homes if real.is_relative_to(home)), None)
            if home is not None and not real.is_relative_to(folder):
                moved[name] = f"{scheme}{folder / real.relative_to(home)}"
    return moved


def _leads_to(path: Path, folder: Path) -> bool:
    try:
        return path == folder or path.samefile(folder)
    except OSError:
        return False


def _identity(folder: Path) -> str:
    path = folder / "job.json"
    found = _read(path)
    if found is not None and not _is_copy(folder, found):
        if found.pop(_REBUILT, False):
            with suppress(OSError, FormatError), replacing(path) as temporary:
                temporary.write_bytes(record_bytes(found))
        return str(found["id"])
    # A copy's is derived: all ranks find out at once, and have to come to the same.
    chance = secrets.token_hex(8) if found is None else f"{found['id']} {folder.stat().st_ino}"
    digest = hashlib.blake2b(f"{folder}\0{chance}".encode(), digest_size=4).hexdigest()
    record = {
        "schema_version": SCHEMA_VERSION,
        "id": f"{safe_name(folder.name, 32)}-{digest}",
        "path": str(folder),
        "made": time_now(),
    }
    text = record_bytes(record)
    if found is not None:  # a copy of another job's folder
        with replacing(path) as temporary:
            temporary.write_bytes(text)
        return str(record["id"])
    try:
        with appearing(path) as temporary:
            temporary.write_bytes(text)
    except FileExistsError:  # another rank was first
        found = _read(path)
        if found is None:
            raise CheckpointError(f"{path}: was removed as soon as it was made. Start the job again.") from None
        return str(found["id"])
    except FormatError as error:
        raise CheckpointError(f"{folder}: cannot be a run folder: {error}") from error
    return str(record["id"])


def _is_copy(folder: Path, record: dict[str, Any]) -> bool:
    """Whether the folder that the record was made for is still elsewhere."""
    home = Path(str(record.get("path", folder)))
    if home == folder:
        return False
    with suppress(OSError):
        if home.exists() and home.samefile(folder):  # the same folder under another name
            return False
    other = _read(home / "job.json")
    return other is not None and other["id"] == record["id"]


def _read(path: Path) -> dict[str, Any] | None:
    """The record of a run folder's job, which other records replace if it is damaged; None if there is none."""
    try:
        record = _read_here(path)
        if record is None:
            return None
        if not _is_identity(record.get("id")):
            raise ValueError("it names no job")
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise CheckpointError(f"{path}: cannot be read: {open_files_hint(error)}") from error
        rebuilt = _rebuilt(path.parent)
        if rebuilt is None:
            raise CheckpointError(f"{path}: cannot be read: {reason(error)}. {_advice(error)}") from error
        del rebuilt[_REBUILT]  # it may be sound: it is left as it is
        warn_once(f"{path}: cannot be read ({reason(error)}): by the other records this is job {rebuilt['id']}")
        return rebuilt
    except ValueError as error:
        rebuilt = _rebuilt(path.parent)
        if rebuilt is None:
            remove = "Remove the link, or choose" if isinstance(error, _Dangling) else "Choose"
            raise CheckpointError(
                f"{path}: is no record of a job: {said(error)}. {remove} another run folder."
            ) from error
        _log.warning("%s: is damaged (%s): by the other records this is job %s", path, said(error), rebuilt["id"])
        return rebuilt
    if record.get("schema_version") != SCHEMA_VERSION:
        version = record.get("schema_version")
        raise CheckpointError(f"{path}: is of schema {version!r}, this Evergrad reads {SCHEMA_VERSION}")
    return record


class _Dangling(ValueError):
    """A symbolic link that leads nowhere is in the place of a record."""


def _read_here(path: Path) -> dict[str, Any] | None:
    """Return the record in a file; None if there is no file."""
    try:
        return read_record(read_small(path))
    except FileNotFoundError:
        with suppress(OSError):
            raise _Dangling(
                f"expected a file, found a symbolic link to {os.readlink(path)}, which is missing"
            ) from None
        return None


def _advice(error: OSError) -> str:
    """Say how to go on without a record that cannot be read and that nothing else tells."""
    if isinstance(error, PermissionError):
        return "Let this user read it."
    if isinstance(error, IsADirectoryError):
        return "Move that folder away and put the record back, or choose another run folder."
    return "Choose another run folder."


def _not_noted(error: OSError) -> str:
    """Return the reason why the run folder cannot be written, and how to go on."""
    why = open_files_hint(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{why} Free room on that disk: the run folder needs a few KB."
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"{why} Make the run folder writable."
    return why


def _is_identity(value: object) -> bool:
    return isinstance(value, str) and bool(value) and not _UNSAFE.search(value)


def _rebuilt(folder: Path) -> dict[str, Any] | None:
    """Rebuild `job.json` from the newest attempt that names the job, else from the folder of its local tier."""
    made = {"schema_version": SCHEMA_VERSION, "made": time_now(), _REBUILT: True}
    disks = [folder / "local"]
    for path in sorted((folder / "attempts").glob("*.json"), reverse=True):
        with suppress(OSError, ValueError):
            record = read_record(read_small(path))
            if _is_identity(record.get("job")):
                return made | {"id": record["job"], "path": str(record.get("path", folder))}
            tiers = record.get("tiers")
            for tier in tiers if isinstance(tiers, list) else ():  # an attempt of an earlier Evergrad
                if isinstance(tier, dict) and tier.get("kind") == "local" and isinstance(tier.get("path"), str):
                    disks.append(Path(tier["path"]))
    name = re.compile(re.escape(safe_name(folder.name, 32)) + "-[0-9a-f]{8}")
    found = set()
    for disk in disks:
        with suppress(OSError, ValueError):
            found |= {entry for entry in os.listdir(disk) if name.fullmatch(entry)}
    return made | {"id": found.pop(), "path": str(folder)} if len(found) == 1 else None


# Where arenas are: a folder a job and node in shared memory, closed to others, and given back when its job is gone.

AGENT_LOCK = "agent.lock"
"""Held by the agent of a node while it lives."""


def arenas_root() -> Path:
    """Where this user's arenas are: below EVERGRAD_SHM, or /dev/shm."""
    return Path(os.environ.get("EVERGRAD_SHM") or "/dev/shm") / f"evergrad-{os.getuid()}"


def arena_folder(job: RunFolder) -> Path:
    """The folder of a job's arenas on this node, made if need be, and refused if others could look into it."""
    root = arenas_root()
    folder = root / job.id / job.node_folder
    try:
        for path in (root, root / job.id, folder):
            _files.make_folder(path, 0o700)
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
        warn_once(f"{home}: {what}")
        return
    except OSError as error:
        if error.errno != errno.ELOOP:  # links that lead to each other are replaced
            raise
    _files.publish(home, place)


def open_run_folder(job: RunFolder) -> int:
    """A descriptor of the run folder, to be closed, by which `moved_to` finds it again."""
    try:
        return os.open(job.run_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{job.run_dir}: cannot be opened: {open_files_hint(error)}") from error


def moved_to(job: RunFolder, fd: int) -> Path | None:
    """The path that a run folder was moved to since it was opened; None if it was not, or is gone.

    The arenas then note the new path: those of a run folder that is gone are removed.
    """
    with suppress(OSError, CheckpointError):
        now = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if now != job.run_dir and os.path.samestat(os.stat(now), os.fstat(fd)) and read_identity(now) == job.id:
            home = arenas_root() / job.id / "run"
            if read_small(home) != _home_bytes(now):
                _files.publish(home, _home_bytes(now))
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
    locks = [node / AGENT_LOCK for node in nodes if (node / AGENT_LOCK).exists()]
    if any(files.is_locked() for node in nodes for files in find_arenas(node)) or any(map(is_locked, locks)):
        return False
    for node in nodes:
        for files in find_arenas(node):
            files.remove()
        for name in os.listdir(node):
            _files.remove(node / name)
        _files.remove_folder(node)
    for name in sorted(os.listdir(folder)):  # hidden leftovers first, "run" last
        _files.remove(folder / name)
    _files.remove_folder(folder)
    return True
