"""Which bits of a number are meant: by number, 0 the sign, as the literature counts, or by field.

Every function speaks of one *number*: an element, or one part of a complex element.
"""

from __future__ import annotations

from typing import TypeAlias

from evergrad.dtypes import DType
from evergrad.errors import UsageError
from evergrad.wording import meant

Bitspec: TypeAlias = "int | range | str | None"
"""A bit by number, a range of them, a field, or None for all."""

FIELDS = ("sign", "exponent", "exponent-msb", "mantissa")


def width(dtype: DType) -> int:
    """Bits of one number."""
    return 8 * dtype.layout.part_bytes


def check_bits(bits: object) -> Bitspec:
    """What was given as bits, or one clear line on what it could have been. `"1-8"` is the range of bits 1 to 8.

    >>> check_bits("1-8"), check_bits(" 12 "), check_bits("exponent")
    (range(1, 9), 12, 'exponent')
    """
    asked = bits
    if isinstance(bits, str):
        text = bits.strip().lower()
        if text in FIELDS:
            return text
        first, dash, last = text.partition("-")
        numbers = [part.strip() for part in ((first, last) if dash else (first,))]
        if all(part.isascii() and part.isdigit() and len(part) <= 4 for part in numbers):
            bits = range(int(numbers[0]), int(numbers[1]) + 1) if dash else int(numbers[0])
    if bits is None or (type(bits) is int and 0 <= bits < 64):
        return bits
    if isinstance(bits, range) and bits and all(0 <= end < 64 for end in (bits[0], bits[-1])):
        return bits
    expected = f"a number from 0 (the sign) to 63, a range such as 1-8, or one of {', '.join(FIELDS)}"
    raise UsageError(f"bits {asked!r:.60}: expected {expected}.{meant(str(asked), FIELDS)}")


def places(bits: Bitspec, dtype: DType, burst: int = 1) -> list[int]:
    """Where a burst of adjacent bits may begin in a number of this type; none if the bits mean nothing there.

    A range or a field holds the whole burst; a single bit is where it begins.
    """
    total = width(dtype)
    if dtype is DType.BOOL:  # eight bits are stored, one of them means something
        return []
    if isinstance(bits, int):
        return [bits] if bits + burst <= total else []
    allowed = range(total) if bits is None else bits if isinstance(bits, range) else _field(bits, dtype)
    inside = {bit for bit in allowed if bit < total}
    if len(inside) < len(allowed):  # bits 16-31 of a 16-bit number: not what was meant
        return []
    return sorted(bit for bit in inside if all(bit + more in inside for more in range(burst)))


def field_of(bit: int, dtype: DType) -> str:
    """What a bit of this type is.

    >>> field_of(1, DType.FLOAT32), field_of(9, DType.BFLOAT16), field_of(0, DType.INT8), field_of(0, DType.UINT8)
    ('exponent msb', 'mantissa', 'sign', 'msb')
    """
    layout = dtype.layout
    if not dtype.is_float:
        return "sign" if bit == 0 and layout.kind == "int" else "msb" if bit == 0 else "integer"
    first = _first_exponent_bit(dtype)
    if bit < first:
        return "sign"
    if bit == first:
        return "exponent msb"
    return "exponent" if bit < first + layout.exponent_bits else "mantissa"


def _field(name: str, dtype: DType) -> range:
    """The bits of a field; fields mean floats."""
    if not dtype.is_float:
        return range(0)
    first = _first_exponent_bit(dtype)
    end = first + dtype.layout.exponent_bits
    ranges = {
        "sign": range(first),
        "exponent": range(first, end),
        "exponent-msb": range(first, first + 1),
        "mantissa": range(end, end + dtype.layout.mantissa_bits),
    }
    return ranges[name]


def _first_exponent_bit(dtype: DType) -> int:
    """1 behind the sign; 0 in a scale factor (e8m0), which has no sign."""
    return width(dtype) - dtype.layout.exponent_bits - dtype.layout.mantissa_bits
