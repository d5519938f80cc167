"""Super-resolution: photos are split as photos, PSNR is what it says, and the model learns to enlarge."""

from __future__ import annotations

import pytest
import torch

from evergrad.errors import UsageError
from evergrad.training import Training
from evergrad.training.mechanisms import make_session
from evergrad.training.workloads import datasets
from evergrad.training.workloads.datasets import TEST_PHOTOS, TRAIN_PHOTOS, psnr, read_photos, rounded
from evergrad.training.workloads.models import edsr
from evergrad.training.workloads.registry import check_fit, make_workload


@pytest.fixture(scope="module")
def data() -> datasets.Dataset:
    return read_photos()


def test_photos_that_judge_are_not_learnt_from(data: datasets.Dataset) -> None:
    assert not set(TRAIN_PHOTOS) & set(TEST_PHOTOS)
    assert (len(data.train_x), len(data.test_x)) == (16 * 16 + 12 * 18 + 15 * 23, 9 * 14)
    learnt = {patch.numpy().tobytes() for patch in data.train_y}
    assert not any(patch.numpy().tobytes() in learnt for patch in data.test_y)


def test_low_resolution_is_the_mean_of_four_pixels(data: datasets.Dataset) -> None:
    assert data.train_x.shape[1:] == (3, 16, 16)
    assert data.train_y.shape[1:] == (3, 32, 32)
    corner = data.train_y[7, :, 4:6, 10:12].mean((1, 2))
    assert torch.allclose(data.train_x[7, :, 2, 5], corner, atol=1e-6)
    levels = 255 * (data.train_y - data.train_y.amin((0, 2, 3), keepdim=True))
    assert torch.allclose(levels, levels.round(), atol=1e-3), "the photo itself, in 256 levels"
    assert data.train_y.mean((0, 2, 3)).abs().max() < 1e-5


def test_guessing_is_showing_every_pixel_four_times(data: datasets.Dataset) -> None:
    repeated = data.test_x.repeat_interleave(2, 2).repeat_interleave(2, 3)
    assert data.chance == pytest.approx(float(psnr(repeated, data.test_y)), abs=1e-6)
    blurred = data.test_x.mean((2, 3), keepdim=True).expand_as(data.test_y)
    assert data.chance > float(psnr(blurred, data.test_y))


def test_psnr_is_in_decibels_of_the_mean_squared_error() -> None:
    exact = torch.rand(4, 3, 8, 8)
    assert float(psnr(exact + 0.1, exact)) == pytest.approx(20, abs=1e-4)
    assert float(psnr(exact.half() + 0.01, exact.half())) == pytest.approx(40, abs=1)
    assert float(psnr(exact, exact)) == 100, "a number, where an infinity would look like a fault"
    assert psnr(exact + torch.nan, exact).isnan()
    assert float(psnr(exact + torch.inf, exact)) == -torch.inf


def test_predictions_tell_patches_apart_that_look_different() -> None:
    outputs = (torch.randint(-100, 100, (5, 3, 32, 32)) / 255).float()
    changed = outputs.clone()
    changed[1, 2, 31, 31] += 1 / 255
    changed[2] += 0.3 / 255
    changed[3, 0, 0, 0] = torch.nan
    changed[4, 0, 0, 1] = torch.inf
    assert (rounded(outputs) != rounded(changed)).tolist() == [False, True, False, True, True]


def test_a_quarter_of_the_width_is_the_papers_baseline() -> None:
    with torch.device("meta"):
        model = edsr(width=0.25)
    convolution = 64 * 64 * 9 + 64
    others = (3 * 64 * 9 + 64) + convolution + (64 * 256 * 9 + 256) + (64 * 3 * 9 + 3)
    assert sum(weight.numel() for weight in model.parameters()) == 16 * 2 * convolution + others


def test_it_learns_to_enlarge() -> None:
    training = Training(
        model="edsr", data="photos", width=0.02, samples=32, batch_size=8, optimizer="adam", learning_rate=0.005
    )
    session = make_session(training, make_workload(training))
    before = session.evaluate()
    for _ in range(5):
        losses = [float(session.step(number)) for number in range(session.steps_per_epoch)]
    after = session.evaluate()
    assert after.metric > before.metric + 4, (before.metric, after.metric, losses)
    assert after.predictions.shape == (126,)


def test_a_photo_is_no_digit() -> None:
    with pytest.raises(UsageError, match="model edsr learns from photos, found 'digits'"):
        check_fit("edsr", "digits")
    with pytest.raises(UsageError, match=r"model resnet18 learns from .*, found 'photos'"):
        check_fit("resnet18", "photos")


def test_without_scikit_image_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"scikit-image is not installed. Get it with: pip install .*\[studies\]"):
        read_photos()
