"""Bits as numbers, and numbers as bits; needs no torch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from evergrad.dtypes import DType
from evergrad.formats.checkpoint import Bits

# Exponent bias, and the patterns that are NaN; those of e5m2 follow IEEE and have infinities.
_FP8: dict[DType, tuple[int, tuple[int, ...]]] = {
    DType.FLOAT8_E4M3FN: (7, (0x7F, 0xFF)),
    DType.FLOAT8_E4M3FNUZ: (8, (0x80,)),
    DType.FLOAT8_E5M2: (15, (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF)),
    DType.FLOAT8_E5M2FNUZ: (16, (0x80,)),
    DType.FLOAT8_E8M0FNU: (127, (0xFF,)),
}


def values(bits: Bits, dtype: DType) -> npt.NDArray[Any]:
    """The elements as a NumPy array that holds each of them exactly; complex ones as rows of two parts.

    bfloat16 becomes float32, fp8 and complex32 become float32 and float16 parts.
    """
    kind = dtype.layout.kind
    if dtype is DType.BFLOAT16:
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype in _FP8:
        return _fp8_table(dtype)[bits]
    if kind == "bool":
        return bits
    letter = {"float": "f", "complex": "f", "int": "i", "uint": "u"}[kind]
    return np.ascontiguousarray(bits).view(f"{letter}{dtype.layout.part_bytes}")


def encode(numbers: npt.NDArray[Any], dtype: DType) -> Bits:
    """The bits of the nearest numbers that the type has, as torch rounds; what is too large becomes infinite or NaN.

    Integers are rounded and kept within their type's range. A complex type stands for one of its parts. (Below
    1.5 · 2**-127 torch gives e8m0 the larger of its two smallest numbers; this gives the nearest.)
    """
    layout = dtype.layout
    if layout.kind in ("int", "uint", "bool"):
        return _encode_integers(numbers, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        wide = np.asarray(numbers, np.float64)
        if dtype in _FP8:
            return _encode_fp8(wide, dtype)
        if dtype is DType.BFLOAT16:
            return _encode_bfloat16(wide)
        return wide.astype(f"f{layout.part_bytes}").view(dtype.bits)


def finite(numbers: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which elements are neither NaN nor infinite; a complex one needs both parts."""
    if numbers.dtype.kind != "f":
        return np.ones(len(numbers), bool)
    found: npt.NDArray[np.bool_] = np.isfinite(numbers)
    return np.logical_and(found[:, 0], found[:, 1]) if found.ndim == 2 else found


def _encode_integers(numbers: npt.NDArray[Any], dtype: DType) -> Bits:
    signed = dtype.layout.kind == "int"
    info = np.iinfo(f"{'i' if signed else 'u'}{dtype.layout.part_bytes}")
    if np.asarray(numbers).dtype.kind in "iu":
        whole = [min(max(int(n), info.min), info.max) for n in np.asarray(numbers).tolist()]
    else:
        rounded = np.nan_to_num(np.rint(np.asarray(numbers, np.float64)), nan=0.0, posinf=1e300, neginf=-1e300)
        whole = [min(max(int(n), info.min), info.max) for n in rounded.tolist()]
    return np.array(whole, info.dtype).view(dtype.bits)


def _encode_bfloat16(wide: npt.NDArray[np.float64]) -> Bits:
    """Rounded once: to odd at first, so that the second rounding cannot meet a tie that was none."""
    single = wide.astype(np.float32)
    bits = single.view(np.uint32).copy()
    back = single.astype(np.float64)
    inexact = np.isfinite(single) & (back != wide)
    # The float32 next to the value on the side of zero, with its last bit set: a tie can then be told from a near one.
    away = inexact & (np.abs(back) > np.abs(wide))
    bits[away] -= np.uint32(1)
    bits[inexact] |= np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = np.isnan(single)
    rounded[nan] = (bits[nan] >> np.uint32(16)) | np.uint32(0x40)
    return rounded.astype(np.uint16)


def _encode_fp8(wide: npt.NDArray[np.float64], dtype: DType) -> Bits:
    """The nearest of the 256 numbers; beyond the largest, what the type has for that: infinity or NaN."""
    table = _fp8_table(dtype).astype(np.float64)
    signless = dtype is DType.FLOAT8_E8M0FNU
    nan = np.uint8(_FP8[dtype][1][0])
    positive = np.flatnonzero(np.isfinite(table[: 256 if signless else 128]))
    numbers = table[positive]
    size = np.abs(wide)
    above = np.clip(np.searchsorted(numbers, size), 1, len(numbers) - 1)
    low, high = numbers[above - 1], numbers[above]
    middle = (low + high) / 2
    up = (size > middle) | ((size == middle) & (signless | (positive[above] % 2 == 0)))
    found = positive[np.where(up, above, above - 1)].astype(np.uint8)
    largest = numbers[-1]
    step = largest - numbers[-2]
    beyond = size >= largest * 1.5 if signless else size > largest + step / 2
    # On the tie itself the even one of the two counts: the one beyond, if the largest number is odd.
    if not signless and positive[-1] % 2:
        beyond |= size == largest + step / 2
    if dtype is DType.FLOAT8_E4M3FN:  # saturates, as in torch; only an infinity becomes NaN
        beyond &= np.isinf(size)
    found[beyond] = np.uint8(0x7C) if dtype is DType.FLOAT8_E5M2 else nan
    if not signless:
        negative = np.signbit(wide) & (found != 0x80)
        if dtype in (DType.FLOAT8_E4M3FNUZ, DType.FLOAT8_E5M2FNUZ):
            negative &= found != 0  # there is one zero: with a sign it would be NaN
        found[negative] |= np.uint8(0x80)
    found[np.isnan(wide)] = nan
    return found


@lru_cache
def _fp8_table(dtype: DType) -> npt.NDArray[np.float32]:
    """All 256 numbers of an fp8 type."""
    bias, nans = _FP8[dtype]
    mantissa_bits = dtype.layout.mantissa_bits
    codes = np.arange(256)
    if dtype is DType.FLOAT8_E8M0FNU:
        table = np.ldexp(1.0, codes - bias)
    else:
        exponent, mantissa = (codes & 0x7F) >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
        normal = np.ldexp(1 + mantissa / (1 << mantissa_bits), exponent - bias)
        small = np.ldexp(mantissa / (1 << mantissa_bits), 1 - bias)
        table = np.where(exponent > 0, normal, small) * np.where(codes & 0x80, -1.0, 1.0)
        if dtype is DType.FLOAT8_E5M2:
            table[[0x7C, 0xFC]] = np.inf, -np.inf
    table[list(nans)] = np.nan
    return table.astype(np.float32)
