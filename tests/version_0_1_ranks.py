"""Two ranks that go on with what two ranks of Evergrad 0.1 saved: `python version_0_1_ranks.py SET OUT`.

torch is imported once, and the ranks are forked before there is any other thread. Rank 0 leaves OUT/<rank>.json.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import evergrad as eg


def go_on(rank: int, home: Path, out: Path) -> None:
    """Restore the newest version, save another one, and tell both."""
    distributed.init_process_group("gloo", f"file://{out}/store", rank=rank, world_size=2)
    model = DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = distribute_tensor(torch.zeros(5, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
    state = {"model": model, "optimizer": optimizer, "rows": rows, "own": torch.zeros(4)}
    tiers = [eg.Local(), eg.Persistent(f"file://{home}/ranks/shared")]
    with eg.Checkpointer(home / "ranks", tiers, agent=False) as ck:
        step = ck.restore(state)
        tensors = eg.flatten(state | {"rows": rows.full_tensor()}).tensors
        told = {path: tensor.flatten().tolist() for path, tensor in tensors.items()}
        ck.save(7, state).wait("persistent")
        names = [record.version.name for record in ck.versions()]
    told |= {"step": step, "lr": optimizer.param_groups[0]["lr"], "versions": names}
    (out / f"{rank}.json").write_text(json.dumps(told))
    distributed.destroy_process_group()


def main() -> int:
    """Fork both ranks; 0 if both have ended well."""
    home, out = map(Path, sys.argv[1:])
    children = []
    for rank in (0, 1):
        child = os.fork()
        if not child:
            try:
                go_on(rank, home, out)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return max(os.waitpid(child, 0)[1] for child in children) and 1


if __name__ == "__main__":
    sys.exit(main())
