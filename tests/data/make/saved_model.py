"""Makes tests/data/saved_model: a TensorFlow SavedModel with two variables and a graph.

pip install tensorflow-cpu==2.21.0
python tests/data/make/saved_model.py
"""

import shutil
from pathlib import Path

import tensorflow as tf

DATA = Path(__file__).resolve().parent.parent


class Linear(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = tf.Variable(tf.reshape(tf.range(6, dtype=tf.float32), (2, 3)), name="w")
        self.b = tf.Variable([1.0, 2.0, 3.0], name="b")

    @tf.function(input_signature=[tf.TensorSpec((None, 2))])
    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return x @ self.w + self.b


def main() -> None:
    shutil.rmtree(DATA / "saved_model", ignore_errors=True)
    tf.saved_model.save(Linear(), str(DATA / "saved_model"))


if __name__ == "__main__":
    main()
