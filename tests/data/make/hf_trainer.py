"""Makes tests/data/trainer/checkpoint-4: every file that transformers.Trainer saves at its fourth step.

    pip install torch==2.13.0 transformers==5.22.0 accelerate==1.15.0 safetensors==0.8.0
    python tests/data/make/hf_trainer.py

The embeddings are tied: model.safetensors has no lm_head.weight.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from expect import DATA, tensors_of_pickle, tensors_of_safetensors, write_expected
from tiny_gpt2 import tiny_gpt2
from transformers import Trainer, TrainingArguments

READERS = {
    ".safetensors": tensors_of_safetensors,
    ".bin": tensors_of_pickle,
    ".pt": tensors_of_pickle,
    ".pth": tensors_of_pickle,
}


def tensors_of_folder(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(folder.iterdir()):
        if file.suffix in READERS:
            for name, tensor in READERS[file.suffix](file):
                yield f"{file.name}/{name}", tensor


def main() -> None:
    model = tiny_gpt2()
    tokens = torch.randint(32, (16, 12))
    arguments = TrainingArguments(
        output_dir="out",
        disable_tqdm=True,
        logging_steps=2,
        max_steps=4,
        per_device_train_batch_size=4,
        report_to="none",
        save_steps=4,
        seed=0,
        use_cpu=True,
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens]).train()
        shutil.rmtree(DATA / "trainer", ignore_errors=True)
        shutil.copytree("out", DATA / "trainer")
    write_expected("trainer", tensors_of_folder(DATA / "trainer" / "checkpoint-4"))


if __name__ == "__main__":
    main()
