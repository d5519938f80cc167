"""Makes tests/data/keras_torch.*: one small model of Keras on torch, in each of Keras' three formats.

    pip install torch==2.13.0 keras==3.15.0 h5py==3.16.0 safetensors==0.8.0
    KERAS_BACKEND=torch python tests/data/make/keras_files.py

With `check FOLDER` it loads the three files from another folder instead and prints what they predict.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
from expect import DATA

ENDINGS = ("keras", "weights.h5", "h5")


def small_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            keras.layers.Conv2D(3, 3, name="conv"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Flatten(),
            keras.layers.Dense(4, name="head"),
        ]
    )
    model.compile("adam", keras.losses.MeanSquaredError())  # Keras cannot load "mse" back from its own .h5
    return model


def main() -> None:
    model = small_model()
    random = np.random.default_rng(0)
    model.fit(random.random((8, 6, 6, 1), np.float32), random.random((8, 4), np.float32), epochs=2, verbose=0)
    model.save(DATA / "keras_torch.keras")
    model.save_weights(DATA / "keras_torch.weights.h5")
    model.save(DATA / "keras_torch.h5")


def check(folder: Path) -> None:
    inputs = np.random.default_rng(1).random((2, 6, 6, 1), np.float32)
    for ending in ENDINGS:
        if ending == "weights.h5":
            model = small_model()
            model.load_weights(folder / f"keras_torch.{ending}")
        else:
            model = keras.saving.load_model(folder / f"keras_torch.{ending}")
        kernel = np.asarray(model.get_layer("head").get_weights()[0]).view(np.uint32)
        print(ending, f"{kernel[0, 0]:08x} {kernel[-1, -1]:08x}", model.predict(inputs, verbose=0)[0])


if __name__ == "__main__":
    check(Path(sys.argv[2])) if sys.argv[1:2] == ["check"] else main()
