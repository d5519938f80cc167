"""What is saved and restored: two states, how they are changed between two saves, and how files get onto the disk."""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import sleep

import torch

__all__ = [
    "BIG",
    "LINGER_S",
    "SMALL",
    "Kind",
    "State",
    "alter",
    "arenas",
    "copied",
    "differences",
    "evict",
    "file_system",
    "files_below",
    "make_durable",
    "read_once",
    "removed",
    "resident",
    "scramble",
    "settle",
    "size_of",
]

State = dict[str, torch.Tensor]
"""Path → tensor, as every contender gets it."""

LINGER_S = 0.5

WIDTH, LAYERS, WORDS, CLASSES, POSITIONS = 768, 10, 21_056, 1000, 1024


@dataclass(frozen=True)
class Kind:
    """A state, and what becomes of it in a quick run."""

    name: str
    make: Callable[[int], State]
    """Told by how much smaller it shall be."""
    many: bool
    """Whether it has so many tensors that some contenders take ten seconds."""


def transformer(smaller: int = 1) -> State:
    """A vision-and-text transformer with Adam's two moments: 264 tensors, 1.07 GB; few large, many of megabytes."""
    part = math.isqrt(smaller)
    width, words = WIDTH // part, WORDS // part
    shapes: dict[str, tuple[int, ...]] = {
        "words.weight": (words, width),
        "positions.weight": (POSITIONS // part, width),
        "stem.weight": (width, 3, 16, 16),
        "stem.bias": (width,),
    }
    for layer in range(LAYERS):
        shapes |= {
            f"layers.{layer}.norm1.weight": (width,),
            f"layers.{layer}.qkv.weight": (3 * width, width),
            f"layers.{layer}.qkv.bias": (3 * width,),
            f"layers.{layer}.out.weight": (width, width),
            f"layers.{layer}.norm2.weight": (width,),
            f"layers.{layer}.up.weight": (4 * width, width),
            f"layers.{layer}.up.bias": (4 * width,),
            f"layers.{layer}.down.weight": (width, 4 * width),
        }
    shapes |= {
        "norm.weight": (width,),
        "norm.bias": (width,),
        "head.weight": (CLASSES // part, width),
        "head.bias": (CLASSES // part,),
    }
    generator = torch.Generator().manual_seed(20)
    return {
        f"{part}/{path}": torch.randn(shape, generator=generator)
        for part in ("model", "exp_avg", "exp_avg_sq")
        for path, shape in shapes.items()
    }


def many(smaller: int = 1) -> State:
    """20,000 tensors of 4 KB: what a tensor costs, not what a byte costs."""
    generator = torch.Generator().manual_seed(21)
    return {f"experts.{n}.weight": torch.randn(32, 32, generator=generator) for n in range(20_000 // smaller)}


BIG = Kind("1 GB", transformer, many=False)
SMALL = Kind("20,000 × 4 KB", many, many=True)


def size_of(state: State) -> int:
    """Bytes."""
    return sum(tensor.nbytes for tensor in state.values())


def alter(state: State) -> None:
    """Another value everywhere, as a step of training leaves behind: nothing can be left out of the next save."""
    torch._foreach_add_(list(state.values()), 1.0)


def scramble(state: State) -> None:
    """What a restore has to overwrite."""
    torch._foreach_zero_(list(state.values()))
    torch._foreach_add_(list(state.values()), torch.nan)


def copied(state: State) -> State:
    """The values of now."""
    return {path: tensor.clone() for path, tensor in state.items()}


def differences(state: State, expected: State) -> list[str]:
    """The paths that are missing, too many, or not equal."""
    wrong = [path for path in expected if path not in state or not torch.equal(state[path], expected[path])]
    return wrong + [path for path in state if path not in expected]


def settle() -> None:
    """Nobody's garbage and nobody's unwritten pages when the clock starts."""
    gc.collect()
    os.sync()
    sleep(0.05)  # what deletes its old files in the background has returned by then


def files_below(path: Path) -> Iterator[Path]:
    """The file itself, or all files of a folder."""
    if path.is_dir():
        yield from (file for file in sorted(path.rglob("*")) if file.is_file())
    else:
        yield path


def make_durable(path: Path) -> None:
    """fsync of a file, or of everything in a folder, and of the folders that name them."""
    folders = [path.parent]
    if path.is_dir():
        folders += [path, *(folder for folder in path.rglob("*") if folder.is_dir())]
    for each in (*files_below(path), *folders):
        opened = os.open(each, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def evict(path: Path) -> None:
    """Out of the page cache; the file must not be mapped any more."""
    gc.collect()
    make_durable(path)
    for file in files_below(path):
        opened = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(opened)


def resident(path: Path) -> float:
    """The part of the files' pages that is in the page cache, by mincore."""
    found = pages = 0
    for file in files_below(path):
        size = file.stat().st_size
        if size == 0:
            continue
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
            count = -(-size // mmap.PAGESIZE)
            there = (ctypes.c_ubyte * count)()
            start = ctypes.c_char.from_buffer(mapped)
            result = ctypes.CDLL(None, use_errno=True).mincore(
                ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), there
            )
            del start  # a map that is pointed into cannot be closed
            if result:
                raise OSError(ctypes.get_errno(), f"mincore of {file.name}")
            found += sum(page & 1 for page in there)
            pages += count
    return found / pages if pages else 0.0


def file_system(path: Path) -> str:
    """Kind and device of the file system that holds a folder."""
    best, told = "", "unknown"
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        device, mount, kind = line.split()[:3]
        if len(mount) >= len(best) and path.resolve().is_relative_to(mount):
            best, told = mount, f"{kind} on {device}"
    return told


def read_once(path: Path) -> None:
    """Into the page cache."""
    block = bytearray(16 << 20)
    for file in files_below(path):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(block):
                pass


@contextmanager
def arenas() -> Iterator[None]:
    """A place in /dev/shm for Evergrad's arenas, which is gone afterwards; agents leave soon after their trainer."""
    with tempfile.TemporaryDirectory(prefix="evergrad-bench-", dir="/dev/shm", ignore_cleanup_errors=True) as place:
        os.environ |= {"EVERGRAD_SHM": place, "EVERGRAD_LINGER": str(LINGER_S)}
        yield
        sleep(2 * LINGER_S)


def removed(path: Path) -> None:
    """A file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
