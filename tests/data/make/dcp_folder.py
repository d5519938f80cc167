"""Makes tests/data/dcp and tests/data/dcp_sharded: folders that torch.distributed.checkpoint writes.

    pip install torch==2.13.0 safetensors==0.8.0
    python tests/data/make/dcp_folder.py

`dcp` is one process without a process group. `dcp_sharded` is four gloo processes with DTensors: rows, columns, a grid,
rows that do not divide (one rank holds nothing), replicated, and fully_shard with its optimizer.
"""

import os
import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from expect import DATA, write_expected
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

PLAIN, SHARDED = DATA / "dcp", DATA / "dcp_sharded"


def plain_state() -> dict[str, object]:
    torch.manual_seed(3)
    names = ("float64", "bfloat16", "float8_e4m3fn", "complex64", "int16", "bool", "uint8")
    types = {name: (torch.rand(3, 4) * 9).to(getattr(torch, name)) for name in names}
    weight = torch.randn(5, 6)
    return {
        "model": {"fc.weight": weight, "fc.bias": torch.randn(5), "tied": weight, "transposed": torch.randn(3, 4).T},
        "types": types,
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "list": [torch.arange(4), {"step": 3}],
        "note": "not a tensor",
    }


def save_sharded(rank: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT="29612")
    torch.distributed.init_process_group("gloo")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    line = init_device_mesh("cpu", (4,))
    plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(4)
    net = torch.nn.Linear(6, 10)
    fully_shard(net, mesh=line)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    torch.manual_seed(5)
    state = {
        "rows": distribute_tensor(torch.randn(8, 5), line, [Shard(0)]),
        "columns": distribute_tensor(torch.randn(3, 9), line, [Shard(1)]),
        "middle": distribute_tensor(torch.randn(2, 6, 3), line, [Shard(1)]),
        "grid": distribute_tensor(torch.randn(7, 6).bfloat16(), plane, [Shard(0), Shard(1)]),
        "uneven": distribute_tensor(torch.arange(5), line, [Shard(0)]),
        "few": distribute_tensor(torch.randn(2, 2), line, [Shard(0)]),
        "half replicated": distribute_tensor(torch.randn(4, 4), plane, [Replicate(), Shard(0)]),
        "replicated": distribute_tensor(torch.randn(4), line, [Replicate()]),
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 1,
    }
    dcp.save(state, checkpoint_id=SHARDED)
    torch.distributed.destroy_process_group()


def expect(folder: Path) -> None:
    """What dcp itself reads, by the names of its metadata."""
    read = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    names = [name for name, what in read.items() if isinstance(what, TensorStorageMetadata)]
    state = {name: torch.empty(read[name].size, dtype=read[name].properties.dtype) for name in names}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    write_expected(folder.name, iter(state.items()))
    dcp_to_torch_save(folder, whole := folder.with_suffix(".whole"))
    whole.unlink()


def main() -> None:
    for folder in (PLAIN, SHARDED):
        shutil.rmtree(folder, ignore_errors=True)
    dcp.save(plain_state(), checkpoint_id=PLAIN, no_dist=True)
    mp.spawn(save_sharded, nprocs=4)
    for folder in (PLAIN, SHARDED):
        expect(folder)


if __name__ == "__main__":
    main()
