"""With `allow_nonfinite=False` nothing becomes NaN or infinite, and what cannot be done is said."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import evergrad as eg
from evergrad.dtypes import DType
from evergrad.errors import UsageError
from evergrad.formats.bitcast import finite, values
from evergrad.injection import Fault
from states import some_bits

FLOATS = [dtype for dtype in DType if dtype.is_float]
MSB = eg.BitFlip("exponent-msb")  # which makes NaN or infinity of everything from 1 to 2


def saved(folder: Path, **tensors: torch.Tensor) -> Path:
    torch.save(tensors, folder / "a.pt")
    return folder / "a.pt"


def calm(path: Path, fault: Fault, **settings: object) -> eg.InjectionLog:
    return eg.inject(path, fault, allow_nonfinite=False, dry_run=True, **settings)


def some_numbers(dtype: DType, count: int) -> torch.Tensor:
    """Random bits that are finite numbers."""
    drawn = some_bits(dtype, 4 * count)
    bits = drawn.view(torch.uint8).numpy().view(dtype.bits).reshape((-1, 2) if dtype.parts == 2 else (-1,))
    return drawn[torch.from_numpy(finite(values(bits, dtype)))][:count].clone()


@pytest.mark.parametrize("sampling", ["element", "tensor"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_nothing_becomes_infinite_or_nan(dtype: DType, sampling: str, tmp_path: Path) -> None:
    path = saved(tmp_path, x=some_numbers(dtype, 300), y=some_numbers(dtype, 100))
    for seed in range(3):
        log = calm(path, eg.BitFlip(burst=2), count=350, sampling=sampling, seed=seed)
        assert log.injected == 350
        assert log.nonfinite == 0
        assert all(math.isfinite(hit.new_value) for hit in log.faults())
        assert all(len(hit.bits) == 2 for hit in log.faults())


def test_what_is_allowed_to_become_nan_is_counted(tmp_path: Path) -> None:
    path = saved(tmp_path, x=torch.full((40,), 1.5), y=torch.full((60,), 0.5))
    log = eg.inject(path, MSB, fraction=1.0, dry_run=True)
    assert (log.injected, log.nonfinite) == (100, 40)


def test_the_file_holds_what_was_promised(tmp_path: Path) -> None:
    path = saved(tmp_path, x=some_numbers(DType.FLOAT16, 1_000))
    eg.inject(path, eg.BitFlip(), count=700, allow_nonfinite=False, out=tmp_path / "b.pt")
    after = torch.load(tmp_path / "b.pt")["x"]
    assert torch.isfinite(after).all()
    assert (after.view(torch.int16) != torch.load(path)["x"].view(torch.int16)).sum() == 700
    eg.inject(path, eg.BitFlip(), count=700, out=tmp_path / "c.pt")
    assert not torch.isfinite(torch.load(tmp_path / "c.pt")["x"]).all()


@pytest.mark.parametrize("sampling", ["element", "tensor"])
def test_where_a_site_leaves_no_choice_another_is_taken(sampling: str, tmp_path: Path) -> None:
    numbers = torch.full((1_000,), 0.01)
    numbers[::4] = 1.5
    path = saved(tmp_path, x=numbers, y=torch.full((30,), 1.25), z=torch.full((100,), 0.02))
    log = calm(path, MSB, count=500, sampling=sampling, seed=1)
    hits = list(log.faults())
    assert (log.attempts, log.injected, log.changed, len(hits)) == (500, 500, 500, 500)
    assert {hit.tensor for hit in hits} == {"x", "z"}
    assert all(hit.bits == (1,) for hit in hits)
    assert all(hit.index % 4 for hit in hits if hit.tensor == "x")
    if sampling == "element":
        sites = [(hit.tensor, hit.number) for hit in hits]
        assert sites == sorted(set(sites))  # still all different, in the order of the file


def test_faults_that_can_stay_where_they_are_stay(tmp_path: Path) -> None:
    numbers = torch.full((1_000,), 0.01)
    numbers[::4] = 1.5
    path = saved(tmp_path, x=numbers)
    free = eg.inject(path, MSB, count=300, seed=2, dry_run=True)
    kept = {hit.index for hit in free.faults() if hit.index % 4}
    assert kept <= {hit.index for hit in calm(path, MSB, count=300, seed=2).faults()}


def test_other_bits_are_tried_before_another_site(tmp_path: Path) -> None:
    path = saved(tmp_path, x=torch.full((1_000,), 1.5))
    fault = eg.BitFlip(range(1, 3))  # the first of the two makes NaN of 1.5, the second does not
    before = {hit.index for hit in eg.inject(path, fault, count=500, seed=2, dry_run=True).faults()}
    hits = list(calm(path, fault, count=500, seed=2).faults())
    assert all(hit.bits == (2,) for hit in hits)
    assert before == {hit.index for hit in hits}


def test_a_site_with_a_choice_is_never_given_up(tmp_path: Path) -> None:
    path = saved(tmp_path, x=torch.tensor([1.5]))
    for seed in range(40):
        assert [hit.bits for hit in calm(path, eg.BitFlip(range(1, 3)), count=1, seed=seed).faults()] == [(2,)]


def test_the_error_names_a_place_that_leaves_no_choice(tmp_path: Path) -> None:
    path = saved(tmp_path, a=torch.full((60,), 0.5), b=torch.full((100_000,), 1.5))
    with pytest.raises(UsageError, match=r"the last: b, element \d+ = 1\.5\)"):
        calm(path, MSB, count=3_000, seed=0)


def test_faults_move_within_their_type(tmp_path: Path) -> None:
    wide, half = torch.full((200,), 0.01), torch.full((200,), 0.01, dtype=torch.float16)
    wide[:100], half[:100] = 1.5, 1.5
    path = saved(tmp_path, wide=wide, half=half, steps=torch.arange(200))
    free = {column.tensor: len(column) for column in eg.inject(path, MSB, count=120, seed=3, dry_run=True).columns}
    assert {column.tensor: len(column) for column in calm(path, MSB, count=120, seed=3).columns} == free


def test_of_a_complex_number_the_part_that_can_is_hit(tmp_path: Path) -> None:
    wave = torch.complex(torch.full((200,), 1.5), torch.full((200,), 0.01))
    log = calm(saved(tmp_path, wave=wave), MSB, count=150, seed=4)
    assert log.injected == 150
    assert {hit.part for hit in log.faults()} == {"imag"}
    assert len({hit.index for hit in log.faults()}) == 150


def test_a_product_that_would_be_infinite_is_not_made(tmp_path: Path) -> None:
    numbers = torch.ones(100)
    numbers[::2] = 1e30
    log = calm(saved(tmp_path, x=numbers), eg.Scale(1e20), count=50)
    assert [hit.index for hit in log.faults()] == list(range(1, 100, 2))


def test_what_is_not_finite_already_is_left_unless_a_fault_makes_it_so(tmp_path: Path) -> None:
    numbers = torch.ones(60)
    numbers[:20], numbers[20:40] = math.nan, math.inf
    path = saved(tmp_path, x=numbers)
    assert all(hit.index >= 40 for hit in calm(path, eg.BitFlip("mantissa"), count=20).faults())
    cured = calm(path, eg.SetValue(0.0), fraction=1.0)
    assert [hit.index for hit in cured.faults()] == list(range(60))
    assert cured.nonfinite == 0


def test_every_number_of_a_run_stays_finite(tmp_path: Path) -> None:
    numbers = torch.full((400,), 0.01)
    numbers[::10] = 1.5
    log = calm(saved(tmp_path, x=numbers), eg.BitFlip("exponent-msb", elements=4), count=10, seed=5)
    starts = np.array([hit.index for hit in log.faults()])[::4]
    assert len(starts) == log.injected == 10
    assert all(start % 10 in range(1, 7) for start in starts)


def test_integers_are_always_finite(tmp_path: Path) -> None:
    path = saved(tmp_path, x=torch.arange(100), y=torch.arange(50, dtype=torch.uint8))
    log, free = (eg.inject(path, eg.BitFlip(), fraction=1.0, allow_nonfinite=on, dry_run=True) for on in (False, True))
    assert [str(hit) for hit in log.faults()] == [str(hit) for hit in free.faults()]


@pytest.mark.parametrize("sampling", ["element", "tensor"])
@pytest.mark.parametrize("count", [1, 50, 1_000])
def test_where_nothing_is_possible_that_is_said_and_nothing_written(count: int, sampling: str, tmp_path: Path) -> None:
    path = saved(tmp_path, x=torch.full((1_000,), 1.5))
    with pytest.raises(UsageError, match=r"leave a finite value \(the last.*: x, element \d+ = 1\.5\)") as error:
        eg.inject(path, MSB, count=count, sampling=sampling, allow_nonfinite=False, out=tmp_path / "b.pt")
    assert "\n" not in str(error.value)
    assert "Allow non-finite values, or choose other bits" in str(error.value)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("numbers", "fault"),
    [
        (torch.full((100,), 1.5 + 1.25j, dtype=torch.complex64), MSB),
        (torch.ones(100), eg.SetValue(math.nan)),
        (torch.full((100,), 1.5, dtype=torch.bfloat16), MSB),
        (torch.full((100,), 448.0).to(torch.float8_e4m3fn), eg.BitFlip(7)),
        (torch.full((100,), 1e38), eg.Scale(-1e10)),
    ],
    ids=["complex", "value", "half", "eighth", "scale"],
)
def test_the_impossible_ends_soon_in_every_type(numbers: torch.Tensor, fault: Fault, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leave a finite value"):
        calm(saved(tmp_path, x=numbers), fault, count=60)


def test_more_faults_than_places_that_are_possible_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, x=torch.tensor([1.5] * 6 + [0.01] * 4))
    assert {hit.index for hit in calm(path, MSB, count=4).faults()} == {6, 7, 8, 9}
    with pytest.raises(UsageError, match="no place is left where the bits that are allowed leave a finite value"):
        calm(path, MSB, count=5)


def test_the_same_seed_moves_to_the_same_places(tmp_path: Path) -> None:
    path = saved(tmp_path, x=some_numbers(DType.FLOAT16, 500), y=torch.tensor([1.5, 0.25] * 100))
    first, second = ([str(hit) for hit in calm(path, eg.BitFlip("exponent"), count=400, seed=7).faults()] for _ in "ab")
    assert first == second
