"""Makes tests/data/deepspeed: what DeepSpeed's ZeRO-2 leaves, with two ranks on the CPU.

    pip install torch==2.13.0 deepspeed==0.19.8 safetensors==0.8.0
    python tests/data/make/deepspeed_folder.py

Names in the expectations are those of each file, behind the file's name.
"""

import os
import shutil

import torch
import torch.multiprocessing as mp
from expect import DATA, tensors_of_pickle, write_expected

FOLDER = DATA / "deepspeed"


def train(rank: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29611",
        DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1",
    )  # fmt: skip
    import deepspeed

    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
    }
    deepspeed.init_distributed(dist_backend="gloo")
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for step in range(2):
        engine.backward(engine(torch.full((4, 6), 0.5 + rank + step, dtype=torch.bfloat16)).float().square().mean())
        engine.step()
    engine.save_checkpoint(str(FOLDER))
    torch.distributed.destroy_process_group()


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    mp.spawn(train, nprocs=2)
    for script in FOLDER.glob("*.py"):  # DeepSpeed's own converters
        script.unlink()
    step = FOLDER / (FOLDER / "latest").read_text()
    rows = [(f"{f.name}/{name}", tensor) for f in sorted(step.glob("*.pt")) for name, tensor in tensors_of_pickle(f)]
    write_expected("deepspeed", iter(rows))


if __name__ == "__main__":
    main()
