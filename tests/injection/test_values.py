"""Bits mean the numbers that torch says they mean, and numbers become the bits that torch makes of them."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from evergrad.dtypes import DType
from evergrad.formats.bitcast import encode, finite, values

FP8 = [dtype for dtype in DType if dtype.startswith("float8")]
SMALL = [*FP8, DType.FLOAT16, DType.BFLOAT16]
WIDE = [DType.FLOAT32, DType.FLOAT64]
INTEGERS = [dtype for dtype in DType if dtype.layout.kind in ("int", "uint")]

Floats = npt.NDArray[np.float64]


def all_codes(dtype: DType) -> npt.NDArray[np.unsignedinteger]:
    return np.arange(1 << (8 * dtype.itemsize)).astype(dtype.bits)


def as_torch(bits: npt.NDArray[np.unsignedinteger], dtype: DType) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.uint8)).view(dtype.torch)


def torch_bits(numbers: npt.NDArray[np.float32], dtype: DType) -> npt.NDArray[np.unsignedinteger]:
    return torch.from_numpy(numbers).to(dtype.torch).view(torch.uint8).numpy().view(dtype.bits)


def numbers_of(dtype: DType) -> Floats:
    """The finite numbers of a type, ascending, zero once."""
    table = values(all_codes(dtype), dtype)
    return np.unique(table[np.isfinite(table)].astype(np.float64) + 0.0)


def telling(dtype: DType) -> npt.NDArray[np.float32]:
    """Numbers that tell roundings apart: the type's own, ties and their neighbours, extremes, and many at random."""
    own = numbers_of(dtype)
    ties = ((own[1:] + own[:-1]) / 2).astype(np.float32)
    step = np.float32(np.inf)
    largest = own[-1] + (own[-1] - own[-2]) * np.array([0.25, 0.5, 0.75, 1.0, 40.0])
    random = np.random.default_rng(0)
    patterns = random.integers(0, 1 << 32, 200_000, np.uint32).view(np.float32)
    spread = random.standard_normal(200_000) * np.exp(random.uniform(-20, 20, 200_000))
    with np.errstate(over="ignore"):
        found = [own, ties, np.nextafter(ties, step), np.nextafter(ties, -step), largest, -largest, patterns, spread]
        found.append(np.array([0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38]))
        together = np.concatenate([piece.astype(np.float32) for piece in found])
    return together[np.isfinite(together)]


def assert_same(
    found: npt.NDArray[np.unsignedinteger], expected: npt.NDArray[np.unsignedinteger], dtype: DType
) -> None:
    """The same bits; any NaN is as good as any other."""
    different = found != expected
    different &= ~(np.isnan(values(found, dtype)) & np.isnan(values(expected, dtype)))
    assert not different.any(), (found[different][:5], expected[different][:5])


@pytest.mark.parametrize("dtype", SMALL)
def test_every_code_means_the_number_that_torch_says(dtype: DType) -> None:
    codes = all_codes(dtype)
    found = values(codes, dtype).astype(np.float32)
    expected = as_torch(codes, dtype).to(torch.float32).numpy()
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    real = ~np.isnan(found)
    assert np.array_equal(found[real].view(np.uint32), expected[real].view(np.uint32))  # −0 is not 0
    assert np.array_equal(finite(found), np.isfinite(expected))


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype not in SMALL and dtype is not DType.BOOL])
def test_wide_types_are_read_as_they_lie_in_memory(dtype: DType) -> None:
    count = 500
    raw = np.random.default_rng(1).integers(0, 256, count * dtype.itemsize, np.uint8)
    bits = raw.view(dtype.bits).reshape((count, 2) if dtype.parts == 2 else (count,))
    tensor = torch.from_numpy(raw).view(dtype.torch)
    expected = (torch.view_as_real(tensor) if dtype.parts == 2 else tensor).numpy()
    found = values(bits, dtype)
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes()
    whole = np.isfinite(expected)
    assert np.array_equal(finite(found), whole.all(axis=1) if dtype.parts == 2 else whole)


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16, *FP8])
def test_numbers_are_rounded_as_torch_rounds_them(dtype: DType) -> None:
    numbers = telling(dtype)
    if dtype is DType.FLOAT8_E4M3FN:  # beyond its largest number, versions of torch differ
        numbers = numbers[np.abs(numbers) <= 448]
    if dtype is DType.FLOAT8_E8M0FNU:  # between its two smallest numbers torch always takes the larger
        numbers = numbers[(np.abs(numbers) <= 2.0**-127) | (np.abs(numbers) >= 1.5 * 2.0**-127)]
    assert len(numbers) > 50_000
    assert_same(encode(numbers, dtype), torch_bits(numbers, dtype), dtype)


@pytest.mark.parametrize("dtype", [dtype for dtype in SMALL if dtype is not DType.FLOAT8_E4M3FN])
def test_what_is_no_number_becomes_what_torch_makes_of_it(dtype: DType) -> None:
    numbers = np.array([np.inf, -np.inf, np.nan, 3.4e38, -3.4e38], np.float32)
    assert_same(encode(numbers, dtype), torch_bits(numbers, dtype), dtype)


@pytest.mark.parametrize("dtype", SMALL)
def test_a_number_becomes_the_nearest_one_that_the_type_has(dtype: DType) -> None:
    own = numbers_of(dtype)
    random = np.random.default_rng(2)
    place = random.integers(0, len(own) - 1, 5_000)
    low, high = own[place], own[place + 1]
    share = random.uniform(0.001, 0.999, len(place))
    share = np.where(np.abs(share - 0.5) < 1e-3, 0.1, share)  # ties have a test of their own
    found = values(encode(low + share * (high - low), dtype), dtype).astype(np.float64)
    assert np.array_equal(found, np.where(share < 0.5, low, high))


@pytest.mark.parametrize("dtype", [dtype for dtype in SMALL if dtype is not DType.FLOAT8_E8M0FNU])
def test_of_two_equally_near_numbers_the_even_one_is_taken(dtype: DType) -> None:
    own = numbers_of(dtype)
    ties = (own[1:] + own[:-1]) / 2
    assert not (encode(ties, dtype) & 1).any()


@pytest.mark.parametrize("dtype", [*SMALL, *WIDE])
def test_a_finite_number_keeps_its_bits(dtype: DType) -> None:
    if dtype in SMALL:
        codes = all_codes(dtype)
    else:
        codes = np.random.default_rng(3).integers(0, 256, 100_000 * dtype.itemsize, np.uint8).view(dtype.bits)
    numbers = values(codes, dtype)
    kept = np.isfinite(numbers)
    assert kept.sum() >= 240
    assert np.array_equal(encode(numbers[kept], dtype), codes[kept])


@pytest.mark.parametrize("dtype", INTEGERS)
def test_an_integer_keeps_its_bits(dtype: DType) -> None:
    codes = np.random.default_rng(4).integers(0, 256, 2_000 * dtype.itemsize, np.uint8).view(dtype.bits)
    assert np.array_equal(encode(values(codes, dtype), dtype), codes)


def test_the_largest_number_of_e4m3fn_stands_for_all_beyond_it() -> None:
    numbers = np.array([447.0, 464.0, 465.0, 1e30, -464.1, -1e300])
    assert values(encode(numbers, DType.FLOAT8_E4M3FN), DType.FLOAT8_E4M3FN).tolist() == [448] * 4 + [-448] * 2
    assert np.isnan(values(encode(np.array([np.inf, -np.inf]), DType.FLOAT8_E4M3FN), DType.FLOAT8_E4M3FN)).all()


def test_where_there_is_one_zero_a_sign_does_not_make_it_nan() -> None:
    for dtype in (DType.FLOAT8_E4M3FNUZ, DType.FLOAT8_E5M2FNUZ):
        assert encode(np.array([-0.0, -1e-30, 1e-30]), dtype).tolist() == [0, 0, 0]
        assert encode(np.array([np.nan, np.inf, -1e9]), dtype).tolist() == [0x80] * 3


def test_a_scale_factor_has_no_sign_and_no_zero() -> None:
    found = values(encode(np.array([-4.0, 0.0, 1.4, 1.6, 2.0**127]), DType.FLOAT8_E8M0FNU), DType.FLOAT8_E8M0FNU)
    assert found.tolist() == [4.0, 2.0**-127, 1.0, 2.0, 2.0**127]


@pytest.mark.parametrize(("dtype", "digits"), [(DType.BFLOAT16, 7), (DType.FLOAT16, 10), (DType.FLOAT32, 23)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_just_beside_a_tie_is_rounded_once(dtype: DType, digits: int, sign: int) -> None:
    tie, little = 1 + 2.0 ** -(digits + 1), 2.0**-45
    numbers = sign * np.array([tie - little, tie, tie + little])
    if digits < 23:
        assert np.float32(numbers[2]) == np.float32(sign * tie)  # which a second rounding would take down
    up = sign * (1 + 2.0**-digits)
    assert values(encode(numbers, dtype), dtype).tolist() == [sign, sign, up]


@pytest.mark.parametrize("dtype", SMALL)
def test_a_tie_is_told_from_what_lies_just_beside_it(dtype: DType) -> None:
    own = numbers_of(dtype)
    ties = (own[1:] + own[:-1]) / 2
    assert np.array_equal(values(encode(np.nextafter(ties, np.inf), dtype), dtype), own[1:])
    assert np.array_equal(values(encode(np.nextafter(ties, -np.inf), dtype), dtype), own[:-1])


@pytest.mark.parametrize("dtype", INTEGERS)
def test_an_integer_stays_within_the_range_of_its_type(dtype: DType) -> None:
    info = np.iinfo(dtype.value)
    ends = np.array([info.min, info.max], info.dtype)
    assert np.array_equal(values(encode(ends, dtype), dtype), ends)
    beyond = np.array([-np.inf, -1e30, 1e30, np.inf, np.nan])
    assert values(encode(beyond, dtype), dtype).tolist() == [info.min, info.min, info.max, info.max, 0]
    signed = np.array([np.iinfo(np.int64).min, -1, 0, 100], np.int64)
    expected = [min(max(n, info.min), info.max) for n in signed.tolist()]
    assert values(encode(signed, dtype), dtype).tolist() == expected
    assert values(encode(np.array([2**64 - 1], np.uint64), dtype), dtype).tolist() == [info.max]


def test_halves_become_the_even_integer() -> None:
    numbers = np.array([0.5, 1.5, 2.5, 2.51, -0.5, -1.5, -2.49])
    assert values(encode(numbers, DType.INT16), DType.INT16).tolist() == [0, 2, 2, 3, 0, -2, -2]


@pytest.mark.parametrize("dtype", [DType.COMPLEX32, DType.COMPLEX64, DType.COMPLEX128])
def test_a_complex_type_stands_for_one_of_its_parts(dtype: DType) -> None:
    part = np.dtype(f"f{dtype.layout.part_bytes}")
    bits = encode(np.array([1 / 3, -math.inf]), dtype)
    assert bits.dtype == dtype.bits
    assert values(bits, dtype).tolist() == [part.type(1 / 3), -math.inf]


def test_a_complex_element_is_finite_if_both_parts_are() -> None:
    parts = np.array([[1, 2], [1, np.inf], [np.nan, 2], [-np.inf, np.nan]], np.float32)
    assert finite(values(parts.view(np.uint32), DType.COMPLEX64)).tolist() == [True, False, False, False]
    assert finite(values(np.array([0, 1, 255], np.uint8), DType.BOOL)).all()
