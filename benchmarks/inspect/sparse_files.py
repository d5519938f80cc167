"""Checkpoints of any size that take no room on the disk: `python sparse_files.py FILE TENSORS ROWS COLUMNS`.

Run as a program of its own, so that torch stays out of the process that starts the measurements: a child's
`ru_maxrss` begins at what its parent held.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

__all__ = ["make"]


def make(path: Path, tensors: int, shape: tuple[int, int]) -> dict[str, int]:
    """Write float32 zeros as the ending of the path says; returns the file's size and what it takes on the disk."""
    names = [f"layers.{number}.weight" for number in range(tensors)]
    if path.suffix == ".pt":
        _torch_zip(path, names, shape)
    else:
        _safetensors(path, names, shape)
    if _disk_bytes(path) > path.stat().st_size // 10 and shape[0] * shape[1] * 4 >= 1 << 20:
        # Records of a few KB lie between headers and cannot all be holes; for large ones this should not happen.
        subprocess.run(["fallocate", "--dig-holes", str(path)], check=True)
    return {"size": path.stat().st_size, "disk": _disk_bytes(path)}


def _torch_zip(path: Path, names: list[str], shape: tuple[int, int]) -> None:
    import torch

    # Memory that is never touched is never committed, and skip_data leaves holes where it would be written.
    state = {name: torch.empty(shape, dtype=torch.float32) for name in names}
    with torch.serialization.skip_data():
        torch.save(state, path)


def _safetensors(path: Path, names: list[str], shape: tuple[int, int]) -> None:
    length = shape[0] * shape[1] * 4
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for number, name in enumerate(names):
        place = [number * length, (number + 1) * length]
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + len(names) * length)


def _disk_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


if __name__ == "__main__":
    target, tensors, rows, columns = sys.argv[1:]
    print(json.dumps(make(Path(target), int(tensors), (int(rows), int(columns)))))
