"""Photos that come with scikit-image, to be enlarged: patches of 32×32 pixels, and what is left of them at 16×16.

Photos are split, not patches: those that judge come from a photo that nothing was learnt from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from evergrad.errors import FileAccessError, UsageError, reason
from evergrad.injection.rng import Draws
from evergrad.training.workloads.contract import Dataset
from evergrad.training.workloads.edsr import TIMES
from evergrad.wording import install_hint

# PNG alone: it has one decoding. Of the stereo pair, one photo: the other shows the same. They lie in the wheel.
TRAIN_PHOTOS = ("astronaut.png", "coffee.png", "motorcycle_left.png")
TEST_PHOTOS = ("chelsea.png",)

_SIDE = 32
_SEED = 512
_LEVELS = 255
_BEST_DB = 100.0


def read_photos() -> Dataset:
    """Low resolution as x, the photo itself as y, both less the mean colour of the training photos; 1 is white's
    distance from black. The training patches are shuffled once and for all."""
    folder = _folder()
    train, test = (_patches(folder, names) for names in (TRAIN_PHOTOS, TEST_PHOTOS))
    order = np.argsort(Draws(_SEED).raw(len(train)), kind="stable")
    train = train[torch.from_numpy(order)]
    # Whole numbers, whose sum is exact in any order.
    mean = train.long().sum((0, 2, 3)).double() / (len(train) * _SIDE**2)
    digest = hashlib.blake2b(train.numpy().tobytes() + test.numpy().tobytes(), digest_size=4).hexdigest()
    train_y, test_y = (((part.double() - mean.view(1, 3, 1, 1)) / _LEVELS).float() for part in (train, test))
    train_x, test_x = (nn.functional.avg_pool2d(part, TIMES) for part in (train_y, test_y))
    nearest = nn.functional.interpolate(test_x.double(), scale_factor=TIMES, mode="nearest")
    small = _SIDE // TIMES
    return Dataset(
        name="photos",
        train_x=train_x,
        train_y=train_y,
        test_x=test_x,
        test_y=test_y,
        chance=float(psnr(nearest, test_y)),
        facts={
            "samples": f"{small}×{small} pixels (means of {TIMES}×{TIMES}), to become {_SIDE}×{_SIDE}",
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


def _folder() -> Path:
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
        rows, columns = pixels.shape[0] // _SIDE, pixels.shape[1] // _SIDE
        whole = pixels[: rows * _SIDE, : columns * _SIDE].view(rows, _SIDE, columns, _SIDE, 3)
        found.append(whole.permute(0, 2, 4, 1, 3).reshape(rows * columns, 3, _SIDE, _SIDE))
    return torch.cat(found)


def _named(names: Sequence[str]) -> str:
    return ", ".join(name.removesuffix(".png").replace("_", " ") for name in names)
