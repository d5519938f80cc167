"""The injection log: what was done to which bits, enough to repeat it and to undo it.

JSON lines. The first is the header: settings, what they came to, and for every file that changes its size, digests
and checksums before and after. Then a line a tensor, in columns (bits as fixed-width hexadecimal, one number after
the other); then, for files that had to be rewritten, the bytes that were there; last a digest over all of it, so
that a torn log is known for one. A log is written whole, durably, before the first byte of a file changes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from evergrad import _files
from evergrad._files import appearing, file_errors, open_file
from evergrad.dtypes import DType
from evergrad.errors import DamagedFile, FileAccessError, UsageError
from evergrad.formats.checkpoint import Bits
from evergrad.injection.faults import Fault, fault_from_json
from evergrad.injection.injection_plan import Column, Hit
from evergrad.records import Json

SCHEMA_VERSION = 1
KIND = "injection log"
MAGIC = b'{"evergrad": "injection log"'
MARK = b'{"undone": true}\n'
"""Stands behind the last line of a log that is undone."""
END = b'\n{"end": '
"""How the last line begins, behind the end of the one before."""

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """Bytes of a rewritten file as they were before."""

    offset: int
    old: bytes


@dataclass(frozen=True, slots=True)
class FileChange:
    """One file that changes: its name in the checkpoint, its size, and digests before and after.

    The digests are over the blocks that the faults touch and a few others (see `patches`); over the whole file where
    it was rewritten.
    """

    name: str
    size: int
    before: str
    after: str
    seals: tuple[tuple[int, bytes, bytes], ...] = ()
    """Checksums of the container: offset, before, after."""
    rewritten: bool = False
    size_after: int | None = None
    images: tuple[SavedBytes, ...] = ()
    full_before: str = ""
    full_after: str = ""

    def to_json(self) -> dict[str, Json]:
        """The header's entry; images have lines of their own."""
        told: dict[str, Json] = {"name": self.name, "size": self.size, "before": self.before, "after": self.after}
        if self.seals:
            told["seals"] = [[offset, old.hex(), new.hex()] for offset, old, new in self.seals]
        if self.rewritten:
            told.update(rewritten=True, size_after=self.size_after)
        if self.full_before:
            told.update(sha256_before=self.full_before, sha256_after=self.full_after)
        return told


@dataclass(frozen=True, eq=False)
class InjectionLog:
    """What one injection did. `path` is where the log is kept, if it is on disk."""

    file: str
    out: str
    in_place: bool
    format: str
    fault: Mapping[str, Json]
    settings: Mapping[str, Json]
    attempts: int
    injected: int
    changed: int
    nonfinite: int
    columns: tuple[Column, ...] = field(repr=False)
    files: tuple[FileChange, ...] = field(repr=False)
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)
    follows: tuple[str, ...] = ()
    """Digests of the logs of injections into the same file that were in effect when this one happened."""
    path: Path | None = None
    digest: str = ""

    def faults(self) -> Iterator[Hit]:
        """What happened, number by number, in the order of the file."""
        for column in self.columns:
            yield from column.hits()

    def known_fault(self) -> Fault | None:
        """The fault; None if it is a user's own."""
        return fault_from_json(dict(self.fault))

    def summary(self) -> dict[str, Json]:
        """What `evergrad inject --json` prints; `left_out` only where there is something to say."""
        told: dict[str, Json] = {
            "attempts": self.attempts,
            "injected": self.injected,
            "changed": self.changed,
            "nonfinite": self.nonfinite,
            "log": str(self.path) if self.path is not None else None,
            "out": self.out or None,
        }
        if self.left_out:
            told["left_out"] = {reason: list(names) for reason, names in self.left_out.items()}
        return told

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the log, whole and durably; an existing file is never written over."""
        return self.save_at(Path(path), numbered=False).path or Path(path)

    def save_at(self, path: Path, *, numbered: bool) -> InjectionLog:
        """The same log, saved there; if that is taken and `numbered`, at the first of `….2.jsonl` … that is free."""
        text, digest = self._lines()
        for place in _numbered(path) if numbered else (path,):
            try:
                with appearing(place) as temporary:
                    temporary.write_bytes(text)
                return replace(self, path=place, digest=digest)
            except FileExistsError:
                continue
        raise log_exists_error(path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> InjectionLog:
        """Read a log back; `DamagedFile` if it is torn or no log."""
        where = Path(path)
        with file_errors(where), open_file(where) as file:
            text = file.read()
        try:
            return _parse(where, text)
        except (KeyError, TypeError, ValueError, IndexError, OverflowError, RecursionError, AttributeError) as error:
            raise DamagedFile(where, f"is no injection log: {type(error).__name__}: {error}") from None

    def _lines(self) -> tuple[bytes, str]:
        header: dict[str, Json] = {
            "evergrad": KIND,
            "schema_version": SCHEMA_VERSION,
            "file": self.file,
            "out": self.out,
            "in_place": self.in_place,
            "format": self.format,
            "fault": dict(self.fault),
            "settings": dict(self.settings),
            "attempts": self.attempts,
            "injected": self.injected,
            "changed": self.changed,
            "nonfinite": self.nonfinite,
            "left_out": {reason: list(names) for reason, names in self.left_out.items()},
            "follows": list(self.follows),
            "files": [file.to_json() for file in self.files],
        }
        lines = [json.dumps(header)]
        for column in self.columns:
            told = {"tensor": column.tensor, "dtype": column.dtype.value, "shape": list(column.shape)}
            # A list of integers prints as JSON does, in half the time.
            bits = (f'"{key}": "{_hex(getattr(column, name))}"' for key, name in _BITS)
            lines.append(f'{json.dumps(told)[:-1]}, "index": {column.numbers.tolist()}, {", ".join(bits)}}}')
        for number, file in enumerate(self.files):
            for image in file.images:
                for start in range(0, len(image.old), _CHUNK):
                    piece = base64.b64encode(image.old[start : start + _CHUNK]).decode()
                    lines.append(json.dumps({"image": number, "offset": image.offset + start, "old": piece}))
        body = ("\n".join(lines) + "\n").encode()
        digest = hashlib.sha256(body).hexdigest()
        return body + json.dumps({"end": len(lines), "digest": digest}).encode() + b"\n", digest


_BITS = (("bits", "aim"), ("old", "old"), ("new", "new"))


def default_log_path(target: str | PathLike[str]) -> Path:
    """Where the log of an injection into this file or folder is kept: `<target>.faults.jsonl`."""
    path = Path(os.path.abspath(target)) if Path(target).name in ("", "..") else Path(os.path.normpath(target))
    return path.with_name(f"{path.name}.faults.jsonl")


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    number = 2
    while True:
        yield path.with_name(f"{path.name.removesuffix('.jsonl')}.{number}.jsonl")
        number += 1


def _hex(bits: Bits) -> str:
    return bits.astype(bits.dtype.newbyteorder(">")).tobytes().hex()


def _parse(path: Path, text: bytes) -> InjectionLog:
    if not text.startswith(MAGIC):
        beside = default_log_path(path)
        hint = f"Did you mean {str(beside)!r}?" if beside.exists() else "evergrad inject writes one: OUT.faults.jsonl."
        raise DamagedFile(path, "is no injection log", expected=f"a first line that begins {MAGIC.decode()}", hint=hint)
    place = text.rfind(END)
    if place < 0:
        raise DamagedFile(path, "is torn: its last line is missing")
    head = text[:place]
    last = json.loads(text[place + 1 :].partition(b"\n")[0])  # what stands behind it may be torn: a mark, at most
    digest = hashlib.sha256(head + b"\n").hexdigest()
    if last["digest"] != digest:
        raise DamagedFile(path, "is torn or was altered: its digest does not hold")
    lines = [json.loads(line) for line in head.split(b"\n")]
    if last.get("end") != len(lines):
        raise DamagedFile(path, "is cut", expected=f"{last.get('end')} lines", found=len(lines))
    header = lines[0]
    if header["schema_version"] != SCHEMA_VERSION:
        what = f"is of schema version {header['schema_version']!r}"
        raise UsageError(f"{path}: {what} (expected {SCHEMA_VERSION}): written by a newer Evergrad?")
    images: dict[int, list[SavedBytes]] = {}
    for line in lines[1:]:
        if "image" in line:
            images.setdefault(int(line["image"]), []).append(
                SavedBytes(int(line["offset"]), base64.b64decode(line["old"], validate=True))
            )
    return InjectionLog(
        file=str(header["file"]),
        out=str(header["out"]),
        in_place=bool(header["in_place"]),
        format=str(header["format"]),
        fault=dict(header["fault"]),
        settings=dict(header["settings"]),
        attempts=int(header["attempts"]),
        injected=int(header["injected"]),
        changed=int(header["changed"]),
        nonfinite=int(header["nonfinite"]),
        columns=tuple(_column(line) for line in lines[1:] if "tensor" in line),
        files=tuple(_file(told, tuple(images.get(n, ()))) for n, told in enumerate(header["files"])),
        left_out={str(reason): tuple(map(str, names)) for reason, names in dict(header["left_out"]).items()},
        follows=tuple(map(str, header["follows"])),
        path=path,
        digest=digest,
    )


def _column(line: dict[str, Any]) -> Column:
    dtype = DType(line["dtype"])
    shape = tuple(int(n) for n in line["shape"])
    numbers = np.array(line["index"], np.int64)
    patterns = []
    for key, _ in _BITS:
        raw = np.frombuffer(bytes.fromhex(line[key]), dtype.bits.newbyteorder(">"))
        if raw.shape != numbers.shape:
            raise ValueError(f"{line['tensor']}: {len(raw)} {key} patterns for {len(numbers)} numbers")
        patterns.append(raw.astype(dtype.bits))
    room = int(np.prod(np.array(shape, object), initial=1)) * dtype.parts
    if len(numbers) and not (int(numbers.min()) >= 0 and int(numbers.max()) < room):
        raise ValueError(f"{line['tensor']}: an index beyond the {room} numbers of shape {shape}")
    return Column(str(line["tensor"]), dtype, shape, numbers, *patterns)


def _file(told: dict[str, Any], images: tuple[SavedBytes, ...]) -> FileChange:
    name = str(told["name"])
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"a file {name!r} outside the checkpoint")
    seals = tuple((int(place), bytes.fromhex(old), bytes.fromhex(new)) for place, old, new in told.get("seals", ()))
    if any(len(old) != len(new) for _, old, new in seals):
        raise ValueError(f"{name}: a checksum that changes its length")
    return FileChange(
        name=name,
        size=int(told["size"]),
        before=str(told["before"]),
        after=str(told["after"]),
        seals=seals,
        rewritten=bool(told.get("rewritten", False)),
        size_after=int(told["size_after"]) if "size_after" in told else None,
        images=images,
        full_before=str(told.get("sha256_before", "")),
        full_after=str(told.get("sha256_after", "")),
    )


def log_exists_error(path: Path) -> FileAccessError:
    """What to say of a log that is already there."""
    return FileAccessError(path, "exists already, and a log is never written over", hint="Choose another name.")


# Which logs there are of injections into the same file: they are undone newest first.
#
# A log names those that were there before it (`follows`), and gets a mark behind its last line once it is undone.

_MAX_LINE = 1 << 26
_TAIL = 4096


@dataclass(frozen=True, slots=True)
class LogSummary:
    """A log as its first and last lines tell it."""

    path: Path
    digest: str
    follows: tuple[str, ...]
    undone: bool


def logs_of(target: Path, log: Path | None = None) -> list[LogSummary]:
    """The logs beside a checkpoint, and beside a given log, of injections whose result it is; each once.

    What cannot be read is no log.
    """
    default = default_log_path(target)
    stem = default.name.removesuffix(".jsonl")
    named = sorted(path for path in _jsonl(default.parent) if path.name.startswith(f"{stem}."))
    others = [path for path in _jsonl(log.parent) if path not in named] if log is not None else []
    found: dict[str, LogSummary] = {}
    for path in [*named, *others]:
        with suppress(OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
            header, digest, undone = _ends(path)
            if path in named or Path(header["out"]).resolve() == target.resolve():
                before = found.get(digest)
                undone = undone or (before is not None and before.undone)
                found[digest] = LogSummary(before.path if before else path, digest, tuple(header["follows"]), undone)
    return list(found.values())


def mark_undone(path: Path) -> None:
    """Note behind a log's last line that it is undone. Where that cannot be written, the file's bytes have to tell."""
    with suppress(OSError, ValueError), path.open("r+b") as file:
        file.seek(-min(file.seek(0, 2), len(MARK)), 2)
        if file.read() != MARK:
            file.write(MARK)
            file.flush()
            _files.fsync(file.fileno())


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
