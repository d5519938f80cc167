"""Makes tests/data/orbax and tests/data/orbax_zarr: folders that Orbax writes, with OCDBT and with plain zarr.

pip install jax==0.10.2 orbax-checkpoint==0.12.8
python tests/data/make/orbax_folder.py
"""

import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

DATA = Path(__file__).resolve().parent.parent


def main() -> None:
    state = {
        "params": {"dense": {"kernel": jnp.arange(12.0).reshape(3, 4), "bias": jnp.ones(4, jnp.bfloat16)}},
        "opt": [jnp.zeros((2, 2)), jnp.int32(3)],
        "counts": np.arange(5),
        "step": 7,
    }
    for name in ("orbax", "orbax_zarr"):
        shutil.rmtree(DATA / name, ignore_errors=True)
    with ocp.CheckpointManager(DATA / "orbax") as manager:  # the default: OCDBT, an item in a step in a folder
        manager.save(3, args=ocp.args.StandardSave(state))
    plain = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False))
    plain.save(DATA / "orbax_zarr", {**state, "note": "text"})


if __name__ == "__main__":
    main()
