"""Faults as people use them: values, runs, complex numbers, faults of their own, and settings that are wrong."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import evergrad as eg
from evergrad.dtypes import DType
from evergrad.errors import UsageError
from evergrad.formats.bitcast import values
from evergrad.injection import Fault
from evergrad.injection.faults import FAULTS, fault_from_json
from evergrad.injection.rng import Draws
from refusals import refusal

Bits = npt.NDArray[np.unsignedinteger]

FLOATS = [dtype for dtype in DType if dtype.is_float]
INTEGERS = [dtype for dtype in DType if dtype.layout.kind in ("int", "uint")]


def become(value: float, dtype: DType) -> float:
    """What a number of this type becomes."""
    old = np.zeros(2, dtype.bits)
    new = eg.SetValue(value).alter(old, old, dtype)
    assert new.shape == old.shape
    return values(new, dtype)[1].item()


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_float_may_be_set_to_anything(dtype: DType) -> None:
    fits = [value for value in (1.0, 0.5, 2.0, math.nan, math.inf) if eg.SetValue(value).fits(dtype)]
    assert len(fits) == 5
    assert [become(value, dtype) for value in (1.0, 0.5, 2.0)] == [1.0, 0.5, 2.0]
    assert math.isnan(become(math.nan, dtype))
    has_infinity = dtype is DType.FLOAT8_E5M2 or not dtype.startswith("float8")
    assert become(math.inf, dtype) == math.inf if has_infinity else math.isnan(become(math.inf, dtype))
    if dtype is DType.FLOAT8_E8M0FNU:
        assert not any(eg.SetValue(value).fits(dtype) for value in (0.0, -1.0, -math.inf))
    else:
        assert become(-0.5, dtype) == -0.5
        assert become(0, dtype) == 0


@pytest.mark.parametrize("dtype", INTEGERS)
def test_an_integer_is_set_to_what_it_holds_exactly(dtype: DType) -> None:
    info = np.iinfo(dtype.value)
    for value in (0, 7.0, info.min, info.max):
        assert eg.SetValue(value).fits(dtype)
        assert become(value, dtype) == value
    for value in (0.5, math.nan, math.inf, -math.inf, info.max + 1, info.min - 1, 2.0**64):
        assert not eg.SetValue(value).fits(dtype)


@pytest.mark.parametrize("dtype", ["complex32", "complex64", "complex128"])
@pytest.mark.parametrize("fault", [eg.BitFlip("exponent"), eg.Scale(-3.0), eg.SetValue(9.0), eg.StuckAt(1, 0)])
def test_of_a_complex_number_one_part_changes(dtype: str, fault: Fault, tmp_path: Path) -> None:
    before = torch.complex(torch.arange(1.0, 31), torch.arange(1.0, 31) / 8).to(DType(dtype).torch)
    torch.save({"z": before}, tmp_path / "a.pt")
    log = eg.inject(tmp_path / "a.pt", fault, count=1, seed=3, out=tmp_path / "b.pt")
    after = torch.view_as_real(torch.load(tmp_path / "b.pt")["z"])
    different = (torch.view_as_real(before) != after).nonzero().tolist()
    [hit] = log.faults()
    assert different == [[hit.index, ("real", "imag").index(hit.part)]]
    assert after[different[0][0], different[0][1]].item() == hit.new_value
    assert hit.where == f"z[{hit.index}].{hit.part}"


def test_both_parts_of_complex_numbers_are_hit(tmp_path: Path) -> None:
    torch.save({"z": torch.zeros(50, dtype=torch.complex64)}, tmp_path / "a.pt")
    log = eg.inject(tmp_path / "a.pt", eg.BitFlip(), count=60, dry_run=True)
    assert {hit.part for hit in log.faults()} == {"real", "imag"}
    assert {hit.bits[0] for hit in log.faults()} <= set(range(32))
    assert eg.inject(tmp_path / "a.pt", eg.BitFlip(), fraction=1.0, dry_run=True).injected == 100


@pytest.mark.parametrize(
    "fault",
    [
        eg.BitFlip("mantissa", burst=2, elements=4, stride=3),
        eg.BitMask("1101", elements=4, stride=3),
        eg.StuckAt(1, "mantissa", elements=4, stride=3),
        eg.Scale(2.0, elements=4, stride=3),
        eg.SetValue(0.0, elements=4, stride=3),
    ],
    ids=lambda fault: type(fault).__name__,
)
def test_a_run_alters_numbers_a_stride_apart_in_the_same_way(fault: Fault, tmp_path: Path) -> None:
    torch.save({"x": torch.arange(1.0, 101).reshape(10, 10)}, tmp_path / "a.pt")
    log = eg.inject(tmp_path / "a.pt", fault, count=1, seed=5, out=tmp_path / "b.pt")
    hits = list(log.faults())
    assert (log.injected, len(hits)) == (1, 4)
    assert np.diff([hit.index for hit in hits]).tolist() == [3, 3, 3]
    assert len({hit.aim for hit in hits}) == 1
    differs = torch.load(tmp_path / "b.pt")["x"].reshape(-1) != torch.arange(1.0, 101)
    assert differs.nonzero().reshape(-1).tolist() == [hit.index for hit in hits if hit.changed]


def test_runs_begin_wherever_they_end_within_the_tensor(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(10), "short": torch.zeros(6)}, tmp_path / "a.pt")
    log = eg.inject(tmp_path / "a.pt", eg.BitFlip(0, elements=3, stride=3), fraction=1.0, dry_run=True)
    first = [hit.index for hit in log.faults()][::3]
    assert first == [0, 1, 2, 3]
    assert log.left_out == {"fewer than the 7 elements of one fault": ("short",)}


def test_a_run_has_changed_something_if_one_number_has_changed(tmp_path: Path) -> None:
    torch.save({"x": torch.tensor([1.0, -1.0] * 10)}, tmp_path / "a.pt")
    log = eg.inject(tmp_path / "a.pt", eg.StuckAt(1, "sign", elements=2), count=1, dry_run=True)
    assert sorted(hit.changed for hit in log.faults()) == [False, True]
    assert (log.injected, log.changed) == (1, 1)


@dataclass(frozen=True)
class SwapBytes(Fault):
    """The two bytes of a number change places."""

    note: str = "mine"

    def fits(self, dtype: DType) -> bool:
        return dtype.itemsize == 2

    def draw(self, dtype: DType, count: int, draws: Draws) -> Bits:
        return np.full(count, 0xFFFF, dtype.bits)

    def alter(self, old: Bits, aim: Bits, dtype: DType) -> Bits:
        return old.byteswap()


def test_a_fault_of_ones_own_is_injected_logged_and_replayed(tmp_path: Path) -> None:
    numbers = torch.arange(40, dtype=torch.int16) * 301 + 5
    torch.save({"x": numbers, "y": torch.zeros(3)}, tmp_path / "a.pt")
    torch.save({"x": torch.full((40,), 0x0F0F, dtype=torch.int16), "y": torch.zeros(3)}, tmp_path / "other.pt")
    log = eg.inject(tmp_path / "a.pt", SwapBytes(), count=9, seed=2, out=tmp_path / "b.pt")
    assert log.left_out == {"does not fit float32 (32 bits)": ("y",)}
    assert log.fault == {"kind": f"{__name__}.SwapBytes", "elements": 1, "stride": 1, "note": "mine"}
    hit = [hit.index for hit in log.faults()]
    expected = numbers.numpy().copy()
    expected[hit] = expected[hit].byteswap()
    assert np.array_equal(torch.load(tmp_path / "b.pt")["x"].numpy(), expected)

    # The log cannot bring the class back: the bits that it flipped are flipped.
    loaded = eg.InjectionLog.load(log.path)
    assert loaded.known_fault() is None
    eg.replay(loaded, tmp_path / "other.pt", out=tmp_path / "again.pt")
    flipped = numbers.numpy() ^ expected
    assert flipped.any()
    assert np.array_equal(torch.load(tmp_path / "again.pt")["x"].numpy(), flipped ^ 0x0F0F)
    eg.replay(loaded, tmp_path / "a.pt", out=tmp_path / "same.pt")
    assert (tmp_path / "same.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


class Clumsy(SwapBytes):
    def alter(self, old: Bits, aim: Bits, dtype: DType) -> Bits:
        return old.astype(np.int64)


def test_a_fault_that_gives_back_something_else_is_told_so(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(4, dtype=torch.float16)}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match=r"Clumsy.alter gave int64 of shape \(1,\) \(expected uint16"):
        eg.inject(tmp_path / "a.pt", Clumsy(), count=1, out=tmp_path / "b.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt"]


bits = st.none() | st.integers(0, 63) | st.sampled_from(["sign", "exponent", "exponent-msb", "mantissa"])
bits |= st.builds(range, st.integers(0, 20), st.integers(21, 64), st.integers(1, 5)) | st.just(range(8, 0, -1))
run = {"elements": st.integers(1, 1 << 20), "stride": st.integers(1, 10**6)}
faults = (
    st.builds(eg.BitFlip, bits, st.integers(1, 64), **run)
    | st.builds(eg.StuckAt, st.integers(0, 1), bits, st.integers(1, 64), **run)
    | st.builds(eg.BitMask, st.text("01", min_size=1, max_size=64).filter(lambda text: "1" in text), **run)
    | st.builds(eg.Scale, st.floats(), **run)
    | st.builds(eg.SetValue, st.floats() | st.integers(-(2**64), 2**64), **run)
)


@settings(max_examples=300, deadline=None)
@given(faults)
def test_a_fault_comes_back_from_json_as_it_was(fault: Fault) -> None:
    text = json.dumps(fault.to_json(), allow_nan=False)
    again = fault_from_json(json.loads(text))
    assert type(again) is type(fault)
    assert repr(again) == repr(fault)  # NaN is not equal to itself; its text is
    assert json.dumps(again.to_json()) == text
    assert FAULTS[fault.to_json()["kind"]] is type(fault)


def test_what_is_no_fault_of_ours_is_not_made_up() -> None:
    for told in ({"kind": "swapbytes"}, {}, {"kind": None}, {"kind": ["bitflip"]}, {"kind": "BitFlip"}):
        assert fault_from_json(told) is None
    hopeless = [{"bits": "exponnt"}, {"bits": [1, 2, 0]}, {"bits": ["a"]}, {"burst": None}, {"colour": 1}, {"bits": {}}]
    for told in hopeless:
        with pytest.raises(UsageError) as error:
            fault_from_json({"kind": "bitflip", **told})
        assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match="many"):
        fault_from_json({"kind": "scale", "factor": "many"})


WRONG_SETTINGS: list[tuple[Callable[[], Fault], str]] = [
    (lambda: eg.BitFlip(bits=64), "bits 64: expected a number from 0"),
    (lambda: eg.BitFlip(bits=-1), "bits -1: expected"),
    (lambda: eg.BitFlip(bits="exponnt"), "'exponnt'.*exponent"),
    (lambda: eg.BitFlip(bits="8-1"), "expected"),
    (lambda: eg.BitFlip(bits=range(0)), "expected"),
    (lambda: eg.BitFlip(bits=range(60, 70)), "expected"),
    (lambda: eg.BitFlip(bits=True), "bits True"),
    (lambda: eg.BitFlip(bits=1.0), r"bits 1\.0"),
    (lambda: eg.BitFlip(burst=0), "burst 0: expected 1 to 64"),
    (lambda: eg.BitFlip(burst=65), "burst 65"),
    (lambda: eg.BitFlip(burst=True), "burst True"),
    (lambda: eg.BitMask("102"), "'102': expected up to 64 zeros and ones"),
    (lambda: eg.BitMask("000"), "flips nothing"),
    (lambda: eg.BitMask(""), "expected up to 64"),
    (lambda: eg.BitMask("1" * 65), "expected up to 64"),
    (lambda: eg.BitMask(101), "mask 101"),
    (lambda: eg.StuckAt(2), "stuck at 2: expected 0 or 1"),
    (lambda: eg.StuckAt(0, bits="sing"), "'sing'"),
    (lambda: eg.BitFlip(elements=0), "elements 0: expected 1 to"),
    (lambda: eg.Scale(2.0, elements=(1 << 20) + 1), "elements 1048577"),
    (lambda: eg.BitMask("1", stride=0), "stride 0: expected 1 or more"),
    (lambda: eg.SetValue(0.0, stride=1.5), r"stride 1\.5"),
    (lambda: eg.Scale(True), "factor True: expected a number"),
    (lambda: eg.Scale("2"), "factor '2'"),
    (lambda: eg.SetValue(True), "value True: expected a number"),
    (lambda: eg.SetValue(None), "value None"),
    (lambda: eg.SetValue(1j), "value 1j"),
    (lambda: eg.BitFlip("³"), "bits '³': expected"),
    (lambda: eg.BitFlip("9" * 5000), "bits '999"),
    (lambda: eg.BitFlip(range(10**30)), "bits range"),
    (lambda: eg.BitFlip("0-100000000"), "expected"),
    (lambda: eg.BitFlip(stride=2**70), "stride 1180591620717411303424"),
    (lambda: eg.Scale(10**400), "factor: expected a number that a double can hold"),
    (lambda: eg.SetValue(10**400), "value: expected a number that a double can hold"),
    (lambda: eg.StuckAt(True), "stuck at True"),
    (lambda: eg.StuckAt(np.array([0, 1])), "stuck at array"),
]


def test_settings_that_cannot_be_are_told_in_one_line() -> None:
    for make, message in WRONG_SETTINGS:
        said = refusal(make)
        assert re.search(message, said), f"expected {message!r}, found {said!r}"
        assert "\n" not in said, said


def test_bits_may_be_written_as_text() -> None:
    assert eg.BitFlip("1-8") == eg.BitFlip(range(1, 9))
    assert eg.BitFlip(" 12 ") == eg.BitFlip(12)
    assert eg.BitFlip("Exponent") == eg.BitFlip("exponent")


def test_what_is_no_fault_is_not_injected(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(4)}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match="expected a fault such as BitFlip"):
        eg.inject(tmp_path / "a.pt", "exponent", count=1, out=tmp_path / "b.pt")
