"""A fault does to a number's bits what it says, in every type, and nothing else."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import evergrad as eg
from evergrad.dtypes import DType
from evergrad.formats.bitcast import encode, values
from evergrad.injection import Fault
from evergrad.injection.faults import field_of, width
from evergrad.injection.rng import Draws
from states import some_bits

Bits = npt.NDArray[np.unsignedinteger]

NUMBERS = [dtype for dtype in DType if dtype is not DType.BOOL]
FLOATS = [dtype for dtype in NUMBERS if dtype.is_float]
INTEGERS = [dtype for dtype in NUMBERS if not dtype.is_float]
SIGNED = [dtype for dtype in NUMBERS if dtype.layout.kind != "uint" and dtype is not DType.FLOAT8_E8M0FNU]

# First and last bit of exponent and mantissa, as the standards draw them; bit 0 is leftmost.
FIELDS: dict[str, tuple[range, range]] = {
    "float64": (range(1, 12), range(12, 64)),
    "float32": (range(1, 9), range(9, 32)),
    "float16": (range(1, 6), range(6, 16)),
    "bfloat16": (range(1, 9), range(9, 16)),
    "float8_e4m3fn": (range(1, 5), range(5, 8)),
    "float8_e4m3fnuz": (range(1, 5), range(5, 8)),
    "float8_e5m2": (range(1, 6), range(6, 8)),
    "float8_e5m2fnuz": (range(1, 6), range(6, 8)),
    "float8_e8m0fnu": (range(8), range(0)),
    "complex128": (range(1, 12), range(12, 64)),
    "complex64": (range(1, 9), range(9, 32)),
    "complex32": (range(1, 6), range(6, 16)),
}


def patterns(dtype: DType, count: int = 64, seed: int = 0) -> Bits:
    """Bits of random numbers, as faults are given them: one part after the other."""
    return some_bits(dtype, count, seed).view(torch.uint8).numpy().view(dtype.bits).copy()


def aimed(fault: Fault, dtype: DType, count: int = 2_000) -> set[int]:
    """Every pattern that is drawn in many tries."""
    return set(fault.draw(dtype, count, Draws(1)).tolist())


def one_bit(bit: int, dtype: DType) -> int:
    return 1 << (width(dtype) - 1 - bit)


@pytest.mark.parametrize("dtype", FLOATS)
def test_fields_are_where_the_type_has_them(dtype: DType) -> None:
    exponent, mantissa = FIELDS[dtype]
    sign = range(exponent.start)
    expected = {"sign": sign, "exponent": exponent, "exponent-msb": exponent[:1], "mantissa": mantissa}
    for name, bits in expected.items():
        fault = eg.BitFlip(name)
        assert fault.fits(dtype) == (len(bits) > 0)
        if len(bits):
            assert aimed(fault, dtype) == {one_bit(bit, dtype) for bit in bits}
    told = [field_of(bit, dtype) for bit in range(width(dtype))]
    rest = ["exponent"] * (len(exponent) - 1)
    assert told == ["sign"] * len(sign) + ["exponent msb"] + rest + ["mantissa"] * len(mantissa)


@pytest.mark.parametrize("dtype", SIGNED)
def test_bit_0_is_the_sign(dtype: DType) -> None:
    aim = eg.BitFlip(0).draw(dtype, 1, Draws(0))
    flipped = values(eg.BitFlip(0).alter(encode(np.array([3.0]), dtype), aim, dtype), dtype)
    assert flipped[0] == (-3 if dtype.is_float else 3 + np.iinfo(dtype.value).min)


def test_a_scale_factor_has_no_sign_and_bit_0_is_the_first_of_its_exponent() -> None:
    dtype = DType.FLOAT8_E8M0FNU
    aim = eg.BitFlip(0).draw(dtype, 1, Draws(0))
    flipped = values(eg.BitFlip(0).alter(encode(np.array([2.0**-100]), dtype), aim, dtype), dtype)
    assert flipped[0] == 2.0**28


@pytest.mark.parametrize("field", ["sign", "exponent", "exponent-msb", "mantissa"])
def test_fields_mean_floats(field: str) -> None:
    for dtype in (*INTEGERS, DType.BOOL):
        assert not eg.BitFlip(field).fits(dtype), dtype
        assert not eg.StuckAt(1, field).fits(dtype), dtype


@pytest.mark.parametrize("fault", [eg.BitFlip(), eg.BitMask("1"), eg.Scale(2), eg.StuckAt(1), eg.SetValue(1)])
def test_truth_values_are_left_alone(fault: Fault) -> None:
    assert not fault.fits(DType.BOOL)


def test_any_bit_of_a_number_may_be_hit() -> None:
    for dtype in NUMBERS:
        assert aimed(eg.BitFlip(), dtype) == {1 << bit for bit in range(width(dtype))}, dtype
        for fault in (eg.BitFlip(width(dtype) - 1), eg.BitFlip(range(width(dtype)))):
            assert fault.fits(dtype), (dtype, fault)
        beyond = width(dtype)
        if beyond < 64:
            assert not eg.BitFlip(beyond).fits(dtype), dtype
            assert not eg.BitFlip(range(beyond - 1, beyond + 1)).fits(dtype), dtype


@pytest.mark.parametrize("kind", [eg.BitFlip, lambda **settings: eg.StuckAt(1, **settings)])
@pytest.mark.parametrize("dtype", NUMBERS)
def test_a_burst_stays_together_and_in_its_place(dtype: DType, kind: type[eg.BitFlip]) -> None:
    total = width(dtype)

    def burst(begin: int) -> int:
        return sum(one_bit(begin + more, dtype) for more in range(3))

    assert aimed(kind(burst=3), dtype) == {burst(begin) for begin in range(total - 2)}
    assert aimed(kind(bits=range(2, 7), burst=3), dtype) == {burst(begin) for begin in range(2, 5)}
    assert aimed(kind(bits=4, burst=3), dtype) == {burst(4)}  # a single bit is where it begins
    assert not kind(bits=total - 2, burst=3).fits(dtype)
    assert not kind(bits=range(0, 8, 2), burst=2).fits(dtype)  # no two of these are neighbours
    if dtype.is_float:
        exponent, mantissa = FIELDS[dtype]
        assert aimed(kind(bits="exponent", burst=3), dtype) == {burst(begin) for begin in exponent[:-2]}
        assert not kind(bits="exponent", burst=len(exponent) + 1).fits(dtype)
        assert kind(bits="mantissa", burst=3).fits(dtype) == (len(mantissa) >= 3)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(NUMBERS), st.integers(0, 2**32), st.data())
def test_exactly_the_aimed_bits_differ_and_flipping_twice_changes_nothing(
    dtype: DType, seed: int, data: st.DataObject
) -> None:
    burst = data.draw(st.integers(1, width(dtype)))
    first = data.draw(st.none() | st.integers(0, width(dtype) - burst))
    mask = data.draw(st.text("01", min_size=1, max_size=width(dtype)).filter(lambda text: "1" in text))
    old = patterns(dtype, 16, seed % 1000)
    before = old.copy()
    for fault in (eg.BitFlip(first, burst), eg.BitMask(mask)):
        aim = fault.draw(dtype, len(old), Draws(seed))
        ones = burst if isinstance(fault, eg.BitFlip) else mask.count("1")
        assert all(int(pattern).bit_count() == ones for pattern in aim)
        new = fault.alter(old, aim, dtype)
        assert new.dtype == dtype.bits
        assert np.array_equal(new ^ old, aim)
        assert np.array_equal(fault.alter(new, aim, dtype), old)
        assert np.array_equal(old, before)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(NUMBERS), st.integers(0, 1), st.integers(0, 2**32))
def test_a_stuck_bit_is_what_it_is_stuck_at(dtype: DType, stuck: int, seed: int) -> None:
    fault, old = eg.StuckAt(stuck, burst=2), patterns(dtype, 16, seed % 1000)
    aim = fault.draw(dtype, len(old), Draws(seed))
    new = fault.alter(old, aim, dtype)
    assert np.array_equal(new & aim, aim if stuck else np.zeros_like(aim))
    assert np.array_equal(new & ~aim, old & ~aim)
    assert np.array_equal(fault.alter(new, aim, dtype), new)


def test_a_bit_that_is_stuck_where_it_was_is_injected_and_not_changed(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(10), "y": torch.full((10,), -1, dtype=torch.int32)}, tmp_path / "a.pt")
    log = eg.inject(tmp_path / "a.pt", eg.StuckAt(0), count=20, out=tmp_path / "b.pt")
    changed = [hit for hit in log.faults() if hit.changed]
    assert (log.attempts, log.injected, log.changed) == (20, 20, 10)
    assert {hit.tensor for hit in changed} == {"y"}
    assert "(unchanged)" in str(next(log.faults()))
    found = torch.load(tmp_path / "b.pt")
    assert torch.equal(found["x"], torch.zeros(10))
    assert all(int(number).bit_count() == 31 for number in found["y"].numpy().view(np.uint32))


@pytest.mark.parametrize("mask", ["1", "101", "0110", "11111111"])
def test_every_alignment_of_a_mask_is_reached(mask: str) -> None:
    for dtype in NUMBERS:
        expected = {int(mask, 2) << shift for shift in range(width(dtype) - len(mask) + 1)}
        assert aimed(eg.BitMask(mask), dtype) == expected, dtype


def test_a_mask_fits_no_narrower_number() -> None:
    for dtype in NUMBERS:
        assert eg.BitMask("1" * width(dtype)).fits(dtype), dtype
        if width(dtype) < 64:
            assert not eg.BitMask("0" * width(dtype) + "1").fits(dtype), dtype  # zeros around it are part of it


@pytest.mark.parametrize("dtype", [dtype for dtype in FLOATS if dtype.parts == 1])
@pytest.mark.parametrize("factor", [2.0, -0.75, 0.5, 1.125, 0.0])
def test_a_scaled_float_is_the_rounded_product(dtype: DType, factor: float) -> None:
    old = patterns(dtype, 3_000)
    numbers = some_bits(dtype, 3_000)
    wide = numbers.to(torch.float64 if dtype is DType.FLOAT64 else torch.float32)
    product = (wide * factor).to(dtype.torch)
    known = torch.ones(len(old), dtype=torch.bool)
    if dtype is DType.FLOAT8_E4M3FN:  # beyond its largest number, versions of torch differ
        known = ~((wide * factor).abs() > 448)
    if dtype is DType.FLOAT8_E8M0FNU:  # between its two smallest numbers torch always takes the larger
        known = ~((wide * factor).abs() > 2.0**-127) | ~((wide * factor).abs() < 1.5 * 2.0**-127)
    expected = product[known].view(torch.uint8).numpy().view(dtype.bits)
    found = eg.Scale(factor).alter(old, old, dtype)[known.numpy()]
    same = (found == expected) | (np.isnan(values(found, dtype)) & np.isnan(values(expected, dtype)))
    assert known.sum() > 1_000
    assert same.all()


@pytest.mark.parametrize("dtype", INTEGERS)
def test_a_scaled_integer_is_exact_and_stays_in_its_range(dtype: DType) -> None:
    info = np.iinfo(dtype.value)
    numbers = np.array([info.min, info.max, 0, 1, 3, info.max // 2, info.max // 2 + 1, info.max - 1], info.dtype)
    old = numbers.view(dtype.bits)
    for factor in (2, -1, 1, 4500.0, 0):
        expected = [min(max(int(number) * int(factor), info.min), info.max) for number in numbers]
        assert values(eg.Scale(factor).alter(old, old, dtype), dtype).tolist() == expected
    halves = values(eg.Scale(0.5).alter(old[3:5], old[3:5], dtype), dtype)
    assert halves.tolist() == [0, 2]
    assert values(eg.Scale(math.inf).alter(old[1:2], old[1:2], dtype), dtype).tolist() == [info.max]


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
@settings(max_examples=200, deadline=None)
@given(st.floats(0.01, 40), st.floats(0.01, 1000))
def test_a_scaled_float_is_rounded_once(dtype: DType, number: float, factor: float) -> None:
    old = encode(np.array([number]), dtype)
    number = float(values(old, dtype)[0])
    exact = Fraction(number) * Fraction(factor)
    new = int(eg.Scale(factor).alter(old, old, dtype)[0])
    near = values(np.array([new - 1, new, new + 1], dtype.bits), dtype).astype(np.float64)
    distances = [abs(Fraction(float(value)) - exact) for value in near]
    assert distances[1] == min(distances)


def test_a_product_that_looks_like_a_tie_and_is_none() -> None:
    three = np.array([3.0], np.float32).view(np.uint32)
    scaled = eg.Scale((1 + 2**-24) / 3).alter(three, three, DType.FLOAT32).view(np.float32)
    assert Fraction((1 + 2**-24) / 3) * 3 > Fraction(1) + Fraction(1, 2**24)
    assert scaled[0] == np.float32(1 + 2**-23)


def test_large_integers_are_scaled_exactly() -> None:
    old = np.array([2**62 + 300, -(2**62) - 300], np.int64).view(np.uint64)
    new = eg.Scale(0.5).alter(old, old, DType.INT64).view(np.int64)
    assert new.tolist() == [2**61 + 150, -(2**61) - 150]
