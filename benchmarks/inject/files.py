"""Checkpoints to inject into: shapes of real networks, any width, real bytes on the disk.

The numbers of every tensor come from one file of random ones, mapped: 10 GB are written without holding them.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
import torch

__all__ = [
    "RESNET_50",
    "RESNET_152",
    "Shapes",
    "alexnet",
    "checksum",
    "copied",
    "random_numbers",
    "read_anew",
    "resnet",
    "restore",
    "write",
]

Shapes = Mapping[str, tuple[int, ...]]

RESNET_50, RESNET_152 = (3, 4, 6, 3), (3, 8, 36, 3)
_PIECE_BYTES = 1 << 22


def resnet(blocks: tuple[int, int, int, int], width: int = 64, *, statistics: bool = False) -> Shapes:
    """A ResNet of bottleneck blocks; 64 channels wide is the usual one. `statistics` are BatchNorm's means and such."""
    found: dict[str, tuple[int, ...]] = {}

    def convolution(name: str, norm: str, outward: int, inward: int, size: int) -> None:
        found[f"{name}.weight"] = (outward, inward, size, size)
        for part in ("weight", "bias", *(("running_mean", "running_var") if statistics else ())):
            found[f"{norm}.{part}"] = (outward,)

    convolution("conv1", "bn1", width, 3, 7)
    inward = width
    for stage, count in enumerate(blocks):
        middle = width << stage
        for block in range(count):
            prefix = f"layer{stage + 1}.{block}"
            convolution(f"{prefix}.conv1", f"{prefix}.bn1", middle, inward, 1)
            convolution(f"{prefix}.conv2", f"{prefix}.bn2", middle, middle, 3)
            convolution(f"{prefix}.conv3", f"{prefix}.bn3", 4 * middle, middle, 1)
            if block == 0:
                convolution(f"{prefix}.downsample.0", f"{prefix}.downsample.1", 4 * middle, inward, 1)
            inward = 4 * middle
    return found | {"fc.weight": (1000, inward), "fc.bias": (1000,)}


def alexnet() -> Shapes:
    """AlexNet: 61.1 million parameters in 16 tensors, 244 MB."""
    weights = [
        *[("features.0", (64, 3, 11, 11)), ("features.3", (192, 64, 5, 5)), ("features.6", (384, 192, 3, 3))],
        *[("features.8", (256, 384, 3, 3)), ("features.10", (256, 256, 3, 3)), ("classifier.1", (4096, 9216))],
        *[("classifier.4", (4096, 4096)), ("classifier.6", (1000, 4096))],
    ]
    return {
        f"{name}.{part}": shape if part == "weight" else shape[:1]
        for name, shape in weights
        for part in ("weight", "bias")
    }


def random_numbers(path: Path, shapes: Shapes) -> None:
    """Let the file hold random float32 numbers, as many as the largest tensor; a block of them, repeated."""
    wanted = max(math.prod(shape) for shape in shapes.values())
    block = np.random.default_rng(0).standard_normal(min(wanted, 1 << 24), dtype=np.float32) * np.float32(0.02)
    with path.open("wb") as file:
        for start in range(0, wanted, len(block)):
            block[: wanted - start].tofile(file)


def write(path: Path, shapes: Shapes, numbers: Path) -> int:
    """Write a checkpoint as the ending of the path says, durably; returns its size in bytes."""
    if path.suffix == ".h5":
        with h5py.File(path, "w") as h5:
            for name, shape in shapes.items():
                h5.create_dataset(name.replace(".", "/"), data=_array(numbers, shape))  # contiguous
    elif path.suffix == ".pt":
        torch.save({name: torch.from_numpy(_array(numbers, shape)) for name, shape in shapes.items()}, path)
    else:
        _safetensors(path, shapes, numbers)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path.stat().st_size


def read_anew(path: Path) -> int:
    """Let the page cache forget a file, and read it: its pages are then as reading leaves them, whoever wrote it."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return checksum(path)


def checksum(path: Path) -> int:
    """CRC-32 of a whole file."""
    found = 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            found = zlib.crc32(piece, found)
    return found


def restore(path: Path, clean: Path) -> None:
    """Put back, in place and durably, what differs from a clean copy."""
    with path.open("r+b", buffering=0) as file, clean.open("rb", buffering=0) as good:
        start = 0
        while piece := good.read(_PIECE_BYTES):
            if file.read(len(piece)) != piece:
                file.seek(start)
                file.write(piece)
            start += len(piece)
        os.fsync(file.fileno())


def copied(path: Path, to: Path) -> Path:
    """A durable copy."""
    shutil.copyfile(path, to)
    with to.open("rb") as file:
        os.fsync(file.fileno())
    return to


def _array(numbers: Path, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    # Copy-on-write, and a map each: torch wants writable memory, and saves what shares memory once.
    return np.memmap(numbers, np.float32, "c", shape=shape)


def _safetensors(path: Path, shapes: Shapes, numbers: Path) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, shape in shapes.items():
        end = place + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            _array(numbers, shape).tofile(file)
