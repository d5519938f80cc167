"""States that live on a GPU are saved, listed, altered and brought back like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import evergrad as eg
from evergrad.state import Skeleton
from states import same

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: torch.cuda.is_available() is False")


def gpu_state() -> dict[str, object]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    base = torch.arange(12.0, device="cuda").reshape(3, 4)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "base": base,
        "t": base.t(),
        "row": base[1],
    }


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_saved_from_a_gpu_is_read_without_one(zipped: bool, tmp_path: Path) -> None:
    state = gpu_state()
    torch.save(state, path := tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    flat = eg.flatten(state)
    with eg.open_checkpoint(path) as ck:
        assert set(ck.tensors) == set(flat.tensors)
        for name, tensor in flat.tensors.items():
            assert same(ck.read(name), tensor.cpu().contiguous()), name
        ck.xor("base", [5], [1 << 31])
    loaded = torch.load(path)
    assert loaded["base"].is_cuda
    assert loaded["row"][1] == -5


def test_sharing_comes_back_on_the_gpu() -> None:
    state = gpu_state()
    flat = eg.flatten(state)
    copies = {name: tensor.clone() for name, tensor in flat.tensors.items()}
    back = eg.unflatten(copies, Skeleton.loads(flat.skeleton.dumps()))
    assert back["t"].is_cuda
    back["base"][1, 2] = -1
    assert back["t"][2, 1] == back["row"][2] == -1
