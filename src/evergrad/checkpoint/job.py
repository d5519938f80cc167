"""A job: its run folder, its identity, the node this process is on, and its attempts."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evergrad.errors import CheckpointError, FileAccessError, FormatError, reason
from evergrad.formats.durable import appearing, replacing

__all__ = ["SCHEMA_VERSION", "Job", "node_name", "now", "read_identity", "safe_name"]

SCHEMA_VERSION = 1
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Job:
    """One training job, known by its run folder.

    The identity is made once: the folder's name and eight hex digits of its path and of chance. A run folder that
    was removed and made anew is therefore another job, and never finds the shards of the first. One that was moved
    keeps its identity; a copy gets one of its own.
    """

    run_dir: Path
    id: str
    node: str

    @classmethod
    def open(cls, run_dir: str | os.PathLike[str], node: str | None = None) -> Job:
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

    def begin_attempt(self, **notes: Any) -> int:
        """A number that no other attempt of this job has; what is known of it is noted in the run folder."""
        folder = self.run_dir / "attempts"
        while True:
            number = self.latest_attempt() + 1
            record = {"schema_version": SCHEMA_VERSION, "attempt": number, "time": now(), "host": socket.gethostname()}
            try:
                with appearing(folder / f"{number:05d}.json") as temporary:
                    temporary.write_text(json.dumps(record | notes) + "\n")
            except FileExistsError:
                continue  # another attempt began at the same moment
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


def now() -> str:
    """The time as records carry it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + "Z"


def read_identity(folder: Path) -> str | None:
    """The identity that a run folder has, or None."""
    found = _read(folder / "job.json")
    return found["id"] if found is not None else None


def _identity(folder: Path) -> str:
    path = folder / "job.json"
    found = _read(path)
    if found is not None and not _is_copy(folder, found):
        return str(found["id"])
    # A copy's is derived: all ranks find out at once, and have to come to the same.
    chance = secrets.token_hex(8) if found is None else f"{found['id']} {folder.stat().st_ino}"
    digest = hashlib.blake2b(f"{folder}\0{chance}".encode(), digest_size=4).hexdigest()
    record = {
        "schema_version": SCHEMA_VERSION,
        "id": f"{safe_name(folder.name, 32)}-{digest}",
        "path": str(folder),
        "made": now(),
    }
    text = json.dumps(record) + "\n"
    if found is not None:  # a copy of another job's folder
        with replacing(path) as temporary:
            temporary.write_text(text)
        return str(record["id"])
    try:
        with appearing(path) as temporary:
            temporary.write_text(text)
    except FileExistsError:  # another rank was first
        found = _read(path)
        assert found is not None
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
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: is no record of a job: {error}. Choose another run folder.") from error
    if not isinstance(record, dict) or not isinstance(record.get("id"), str) or _UNSAFE.search(record["id"]):
        raise CheckpointError(f"{path}: is no record of a job. Choose another run folder.")
    if record.get("schema_version") != SCHEMA_VERSION:
        version = record.get("schema_version")
        raise CheckpointError(f"{path}: is of schema {version!r}, this Evergrad reads {SCHEMA_VERSION}")
    return record
