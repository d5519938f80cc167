"""Which logs there are of injections into the same file, and which of them must be undone first."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from evergrad.injection.log import default_place

__all__ = ["logs_of"]

_MAGIC = b'{"evergrad": "injection log"'
_MAX_LINE = 1 << 26


def logs_of(target: Path, log: Path | None = None) -> Iterator[tuple[Path, str, tuple[str, ...]]]:
    """The logs beside a checkpoint, and beside a given log, of injections into it in place.

    Of each: its path, its digest, and the digests of those that it follows. What cannot be read is no log.
    """
    default = default_place(target)
    stem = default.name.removesuffix(".jsonl")
    named = sorted(path for path in _jsonl(default.parent) if path.name.startswith(f"{stem}."))
    others = [path for path in _jsonl(log.parent) if path not in named] if log is not None else []
    seen: set[str] = set()
    for path in [*named, *others]:
        with suppress(OSError, ValueError, KeyError, TypeError):
            header, digest = _ends(path)
            mine = path in named or Path(header["out"]).resolve() == target.resolve()
            if header["in_place"] and mine and digest not in seen:
                seen.add(digest)
                yield path, digest, tuple(header["follows"])


def _jsonl(folder: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(folder) if entry.name.endswith(".jsonl") and entry.is_file()]
    except OSError:
        return []


def _ends(path: Path) -> tuple[dict[str, Any], str]:
    """The header and the digest: the first line and the last."""
    with path.open("rb") as file:
        first = file.readline(_MAX_LINE)
        if not first.startswith(_MAGIC):
            raise ValueError("no log")
        size = file.seek(0, 2)
        file.seek(max(0, size - 200))
        last = file.read().splitlines()[-1]
    return json.loads(first), str(json.loads(last)["digest"])
