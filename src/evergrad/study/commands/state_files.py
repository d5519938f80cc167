"""A training's state as files: copied, and looked through for numbers that no training should end with."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import xxhash

from evergrad.errors import UsageError
from evergrad.formats import open_checkpoint
from evergrad.formats.bitcast import values
from evergrad.formats.checkpoint import Bits, blocks
from evergrad.formats.data_file import file_errors
from evergrad.injection import InjectionLog
from evergrad.records import TensorInfo

_SUFFIX = re.compile(r"(?:\.[A-Za-z]\w*)+$")


@dataclass(frozen=True, slots=True)
class FileState:
    """What a file's tensors hold: a digest of all, and where numbers are odd."""

    digest: str
    nonfinite: Mapping[str, int]
    """Tensor → how many NaN and infinities, where there are some."""
    extreme: Mapping[str, int]

    def gained(self, before: FileState) -> tuple[bool, bool]:
        """Whether a tensor has more numbers that are none, and more extreme ones, than in another state.

        Masks hold infinities, and a best loss begins as one: only what came with the fault counts.
        """
        nonfinite = any(count > before.nonfinite.get(name, 0) for name, count in self.nonfinite.items())
        return nonfinite, any(count > before.extreme.get(name, 0) for name, count in self.extreme.items())


def suffix_of(path: Path) -> str:
    """What a file's name ends with: libraries go by it.

    >>> suffix_of(Path("run-0.5.weights.h5"))
    '.weights.h5'
    """
    found = _SUFFIX.search(path.name)
    return found[0] if found else ""


def copy_state(path: Path, folder: Path, stem: str) -> Path:
    """Copy a checkpoint into a folder under another name; one of several files keeps theirs, which name each other."""
    with open_checkpoint(path) as ck:
        files = list(dict.fromkeys(file for file in ck.files() if file.is_file()))
    with file_errors(folder, "cannot be written"):
        if path.is_dir():
            return Path(shutil.copytree(path, folder / f"{stem}{suffix_of(path)}"))
        if path.is_file() and len(files) == 1:
            return Path(shutil.copyfile(path, folder / f"{stem}{suffix_of(path)}"))
        for file in files:
            name = os.path.relpath(file, path.parent)
            if name.startswith(os.pardir):
                raise UsageError(f"{path}: {name} lies outside of its folder. Name the folder that holds both.")
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / name)
        return folder / path.name


def read_state(path: Path, extreme: float) -> FileState:
    """Look through every number of a file, a block at a time."""
    digest = xxhash.xxh3_128()
    nonfinite: dict[str, int] = {}
    beyond: dict[str, int] = {}
    with open_checkpoint(path) as ck:
        for name, info in ck.tensors.items():
            digest.update(f"{name}\0{info.dtype}\0{info.shape}\0".encode("utf-8", "surrogateescape"))
            for start, stop in blocks(info):
                bits = ck.read_bits(name, start, stop)
                digest.update(np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data)
                none, far = _odd(bits, info, extreme)
                nonfinite[name] = nonfinite.get(name, 0) + none
                beyond[name] = beyond.get(name, 0) + far
    return FileState(digest.hexdigest(), _some(nonfinite), _some(beyond))


def known_state(path: Path, extreme: float) -> FileState:
    """The same of a file that stays as it is: read once."""
    with file_errors(path):
        there = os.stat(path if path.exists() else path.parent)
    return _known(path, extreme, (there.st_ino, there.st_mtime_ns))


def hit_state(log: InjectionLog, extreme: float) -> tuple[bool, bool]:
    """Whether faults made numbers that are none, and extreme ones, out of sound ones."""
    nonfinite = far = False
    for column in log.columns:
        if column.dtype.is_float:
            ends = column.ends()
            with np.errstate(invalid="ignore"):  # a flip may well make a signalling NaN
                old, new = (np.abs(values(bits, ends.dtype).astype(np.float64)) for bits in (ends.old, ends.new))
                nonfinite |= bool(np.any(np.isfinite(old) & ~np.isfinite(new)))
                far |= bool(np.any((old <= extreme) & (new > extreme) & np.isfinite(new)))
    return nonfinite, far


@lru_cache(maxsize=8)
def _known(path: Path, extreme: float, version: tuple[int, int]) -> FileState:
    return read_state(path, extreme)


def _odd(bits: Bits, info: TensorInfo, extreme: float) -> tuple[int, int]:
    """How many numbers are none, and how many are finite and too large."""
    if not info.dtype.is_float:
        return 0, 0
    numbers = values(bits, info.dtype).reshape(-1)
    finite = np.isfinite(numbers)
    none = numbers.size - int(np.count_nonzero(finite))
    sizes = np.abs(numbers[finite] if none else numbers)
    if float(sizes.max(initial=0)) <= extreme:
        return none, 0
    return none, int(np.count_nonzero(sizes.astype(np.float64) > extreme))


def _some(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}
