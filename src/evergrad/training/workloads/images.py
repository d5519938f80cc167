"""Grey images as tensors: normalised by the mean and spread of the training set."""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from evergrad.training.workloads.contract import Dataset

CLASSES = 10
"""Of digits, MNIST and Fashion-MNIST alike."""

Bytes: TypeAlias = npt.NDArray[np.uint8]
Labelled: TypeAlias = tuple[Bytes, Bytes]
"""Images, N×H×W, and their labels."""


def image_dataset(name: str, train: Labelled, test: Labelled, source: str) -> Dataset:
    """Floats of N×1×H×W; every pixel of the training set counts alike for mean and spread, however many are used."""
    counts = np.bincount(train[0].ravel(), minlength=256).astype(np.float64)
    values = np.arange(256)
    # From counts, not pixels: sums of whole numbers are exact, so the order of summing does not show.
    mean = float(counts @ values / counts.sum())
    spread = float(np.sqrt(counts @ (values - mean) ** 2 / counts.sum())) or 1.0
    table = ((values - mean) / spread).astype(np.float32)
    high, wide = train[0].shape[1:]
    digest = hashlib.blake2b(digest_size=4)
    for array in (*train, *test):
        digest.update(array.tobytes())
    return Dataset(
        name=name,
        train_x=_floats(table, train[0]),
        train_y=torch.from_numpy(train[1].astype(np.int64)),
        test_x=_floats(table, test[0]),
        test_y=torch.from_numpy(test[1].astype(np.int64)),
        chance=1 / CLASSES,
        facts={"samples": f"{high}×{wide} pixels", "source": f"{source}, digest {digest.hexdigest()}"},
    )


def _floats(table: npt.NDArray[np.float32], images: Bytes) -> Tensor:
    return torch.from_numpy(table[images]).unsqueeze(1)
