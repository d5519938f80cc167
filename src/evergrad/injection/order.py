"""Which logs there are of injections into the same file: they are undone newest first.

A log names those that were there before it (`follows`), and gets a mark behind its last line once it is undone.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evergrad.injection.log import END, MAGIC, MARK, default_place

_MAX_LINE = 1 << 26
_TAIL = 4096


@dataclass(frozen=True, slots=True)
class Known:
    """A log as its first and last lines tell it."""

    path: Path
    digest: str
    follows: tuple[str, ...]
    undone: bool


def logs_of(target: Path, log: Path | None = None) -> list[Known]:
    """The logs beside a checkpoint, and beside a given log, of injections whose result it is; each once.

    What cannot be read is no log.
    """
    default = default_place(target)
    stem = default.name.removesuffix(".jsonl")
    named = sorted(path for path in _jsonl(default.parent) if path.name.startswith(f"{stem}."))
    others = [path for path in _jsonl(log.parent) if path not in named] if log is not None else []
    found: dict[str, Known] = {}
    for path in [*named, *others]:
        with suppress(OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
            header, digest, undone = _ends(path)
            if path in named or Path(header["out"]).resolve() == target.resolve():
                before = found.get(digest)
                undone = undone or (before is not None and before.undone)
                found[digest] = Known(before.path if before else path, digest, tuple(header["follows"]), undone)
    return list(found.values())


def mark_undone(path: Path) -> None:
    """Note behind a log's last line that it is undone. Where that cannot be written, the file's bytes have to tell."""
    with suppress(OSError, ValueError), path.open("r+b") as file:
        file.seek(-min(file.seek(0, 2), len(MARK)), 2)
        if file.read() != MARK:
            file.write(MARK)
            file.flush()
            os.fsync(file.fileno())


def _jsonl(folder: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(folder) if entry.name.endswith(".jsonl") and entry.is_file()]
    except OSError:
        return []


def _ends(path: Path) -> tuple[dict[str, Any], str, bool]:
    """The header, the digest, and whether the log is marked as undone: the first line and the last ones."""
    with path.open("rb") as file:
        first = file.readline(_MAX_LINE)
        if not first.startswith(MAGIC):
            raise ValueError("no log")
        file.seek(max(0, file.seek(0, 2) - _TAIL))
        tail = file.read()
    last, _, behind = tail[tail.rindex(END) + 1 :].partition(b"\n")
    return json.loads(first), str(json.loads(last)["digest"]), behind.endswith(MARK)
