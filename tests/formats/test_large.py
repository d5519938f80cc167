"""Many tensors, and files beyond four gigabytes: the cost is the tensors', never the bytes'."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import evergrad as eg

LIST_AND_TOUCH = """
import time
import evergrad as eg
import numpy as np
with eg.open_checkpoint(sys.argv[1]) as ck:
    names = list(ck.tensors)
    first, last = names[0], names[-1]
    count = ck.tensors[last].numel
    old = [int(ck.xor(name, [ck.tensors[name].numel - 1], [0x3F800000])[0]) for name in (first, last)]
    again = [int(ck.read_bits(name, ck.tensors[name].numel - 1)[0]) for name in (first, last)]
print(len(names), sum(info.nbytes for info in ck.tensors.values()), old, [hex(n) for n in again])
"""


def many() -> dict[str, torch.Tensor]:
    return {f"layers.{i}.weight": torch.full((2, 2), float(i)) for i in range(20_000)}


@pytest.mark.parametrize(
    "kind",
    ["torch-zip", "safetensors", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("torch-legacy", "npz"))],
)
def test_twenty_thousand_tensors(kind: str, tmp_path: Path) -> None:
    path, tensors = tmp_path / "many", many()
    if kind == "safetensors":
        safetensors.torch.save_file(tensors, path)
    elif kind == "npz":
        with path.open("wb") as file:
            np.savez(file, **{name: tensor.numpy() for name, tensor in tensors.items()})
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=kind == "torch-zip")
    with eg.open_checkpoint(path) as ck:
        assert ck.format == kind
        assert set(ck.tensors) == set(tensors)
        assert ck.tensors["layers.19999.weight"].shape == (2, 2)
        for index in (0, 9_999, 19_999):
            assert ck.read(f"layers.{index}.weight").tolist() == [[index, index], [index, index]]
        ck.xor("layers.19999.weight", [3], [1 << 31])
    with eg.open_checkpoint(path) as ck:
        assert ck.read("layers.19999.weight").tolist() == [[19_999, 19_999], [19_999, -19_999]]


def sparse_torch_zip(path: Path) -> None:
    """Five tensors of 1 GiB: memory that is never touched, written as holes."""
    with torch.serialization.skip_data():
        torch.save({f"w{i}": torch.empty(1 << 28) for i in range(5)}, path)


def sparse_safetensors(path: Path) -> None:
    """A header for five tensors of 1 GiB, then nothing."""
    entries = (
        f'"w{i}":{{"dtype":"F32","shape":[{1 << 28}],"data_offsets":[{i << 30},{(i + 1) << 30}]}}' for i in range(5)
    )
    header = ("{" + ",".join(entries) + "}").encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (5 << 30))


def sparse_npy(path: Path) -> None:
    """One array of 5 GiB."""
    np.lib.format.open_memmap(path, "w+", np.float32, (5 << 28,)).flush()


@pytest.mark.parametrize(
    "make", [sparse_torch_zip, sparse_safetensors, sparse_npy], ids=["torch-zip", "safetensors", "npy"]
)
def test_a_file_over_four_gigabytes_is_listed_and_altered_in_little_memory(
    make: Callable[[Path], None], tmp_path: Path, limited: Callable[..., str]
) -> None:
    path = tmp_path / "big"
    make(path)
    assert path.stat().st_size > 5 << 30
    assert path.stat().st_blocks * 512 < 64 << 20, "the file is not sparse: this test would fill the disk"
    # Address space for one map of the file, and a hundred megabytes to work with.
    said = limited(LIST_AND_TOUCH, path, memory=(5 << 30) + (700 << 20))
    count = 1 if make is sparse_npy else 5
    assert said.split()[:2] == [str(count), str(5 << 30)]
    assert said.rstrip().endswith(
        "[0, 0] ['0x3f800000', '0x3f800000']" if count == 5 else "[0, 1065353216] ['0x0', '0x0']"
    )
    assert path.stat().st_blocks * 512 < 64 << 20, "altering one element must not fill the holes"
    if make is sparse_torch_zip:
        loaded = torch.load(path, mmap=True)
        assert loaded["w4"][-1] == 1
        assert zipfile.is_zipfile(path)
