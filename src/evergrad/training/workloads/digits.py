"""The handwritten digits that come with scikit-learn: 1797 images of 8×8 pixels."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

from evergrad.errors import UsageError
from evergrad.injection.rng import Draws
from evergrad.training.workloads.contract import Dataset
from evergrad.training.workloads.images import image_dataset
from evergrad.wording import install_hint

TRAIN, TEST = 1437, 360

_SEED = 1797
_SIDE = 8


def read_digits() -> Dataset:
    """Shuffled once and for all, then split: writers follow one another in the file."""
    table = _table()
    order = np.argsort(Draws(_SEED).raw(len(table)), kind="stable")
    shuffled = table[order].astype(np.uint8)
    images, labels = shuffled[:, :-1].reshape(-1, _SIDE, _SIDE), shuffled[:, -1]
    train, test = (images[:TRAIN], labels[:TRAIN]), (images[TRAIN:], labels[TRAIN:])
    return image_dataset("digits", train, test, "scikit-learn's digits in a fixed shuffle")


def _table() -> npt.NDArray[np.float64]:
    """A row for each image: 64 pixels from 0 to 16, and the label."""
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise UsageError(f"data digits: scikit-learn is not installed. Get it with: {install_hint('studies')}")
    # Every worker of a study reads this: importing scikit-learn would take fifty times as long as its file.
    path = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if path.exists():
        return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    data = load_digits()
    return np.column_stack([data.data, data.target])
