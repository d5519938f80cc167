"""Makes tests/data/tf_types: a TensorFlow V2 checkpoint of many element types, over several shards, with slices.

    pip install tensorflow-cpu==2.21.0
    python tests/data/make/tf_checkpoint.py

Writes the expectations beside it, and those of `tests/data/tf_ckpt` (a Keras model with its optimizer, saved once by
tf.train.Checkpoint), as TensorFlow itself reads them back. No torch here: the two do not have to be installed together.
"""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import tensorflow as tf

DATA = Path(__file__).resolve().parent.parent
NAMES = {"half": "float16"}
TYPES = [
    tf.float32, tf.float64, tf.half, tf.bfloat16, tf.complex64, tf.complex128, tf.bool, tf.int8, tf.int16, tf.int32,
    tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64, tf.dtypes.experimental.float8_e5m2,
    tf.dtypes.experimental.float8_e4m3fn,
]  # fmt: skip


def values() -> dict[str, tf.Tensor]:
    random = np.random.default_rng(7)
    out = {}
    for dtype in TYPES:
        raw = random.integers(0, 2 if dtype == tf.bool else 256, 24 * dtype.size, np.uint8)
        out[f"types/{dtype.name}"] = tf.constant(raw.view(dtype.as_numpy_dtype).reshape(2, 3, 4))
    out["scalar"] = tf.constant(3.5)
    out["empty"] = tf.zeros((0, 3))
    out["text"] = tf.constant(["left", "alone"])
    return out


def main() -> None:
    folder = DATA / "tf_types"
    shutil.rmtree(folder, ignore_errors=True)
    tensors = values()
    # One shard for every part, joined under one index by MergeV2Checkpoints, as multi-device savers do.
    parts = [f"{folder}/part-{number}" for number in range(3)]
    names = list(tensors)
    for number, part in enumerate(parts):
        mine = names[number::3]
        tf.raw_ops.SaveV2(
            prefix=part, tensor_names=mine, shape_and_slices=[""] * len(mine), tensors=[tensors[n] for n in mine]
        )
    table = tf.reshape(tf.range(40, dtype=tf.float32), (8, 5))
    tf.raw_ops.SaveV2(
        prefix=f"{folder}/part-3",
        tensor_names=["sliced", "sliced"],
        shape_and_slices=["8 5 0,4:-", "8 5 4,4:-"],
        tensors=[table[:4], table[4:]],
    )
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=[*parts, f"{folder}/part-3"], destination_prefix=f"{folder}/model", delete_old_dirs=False
    )
    expect("tf_types", "model")
    expect("tf_ckpt", "ckpt")


def expect(folder: str, prefix: str) -> None:
    """What TensorFlow reads from a checkpoint, beside it; strings are left out."""
    reader = tf.train.load_checkpoint(f"{DATA / folder}/{prefix}")
    rows = []
    for name, dtype in sorted(reader.get_variable_to_dtype_map().items()):
        if dtype != tf.string:
            array = reader.get_tensor(name)
            digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
            kind = NAMES.get(dtype.name, dtype.name)
            rows.append({"name": name, "shape": list(np.shape(array)), "dtype": kind, "sha256": digest})
    (DATA / f"{folder}.expected.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
