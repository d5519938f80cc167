"""What happens to bits.

A fault has a random half and a fixed half. `draw` says which bits of a number are aimed at; `alter` says what
becomes of a number when those bits are aimed at. The log keeps what was aimed at, so a replay repeats the fixed half
with the same aim, on whatever the numbers are there.

To add a fault of your own, subclass `Fault`, preferably as a frozen dataclass:

    @dataclass(frozen=True)
    class SwapBytes(Fault):
        def fits(self, dtype): return dtype.itemsize == 2
        def draw(self, dtype, count, draws): return np.full(count, 0xFFFF, dtype.bits)
        def alter(self, old, aim, dtype): return old.byteswap()
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from evergrad.dtypes import DType
from evergrad.errors import UsageError
from evergrad.formats.bitcast import encode, values
from evergrad.formats.checkpoint import Bits
from evergrad.injection.rng import Draws
from evergrad.records import Json
from evergrad.wording import checked_choice, did_you_mean, short_repr

# Which bits of a number are meant: by number, 0 the sign, as the literature counts, or by field.
#
# Every function speaks of one *number*: an element, or one part of a complex element.

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
    raise UsageError(f"bits {asked!r:.60}: expected {expected}.{did_you_mean(str(asked), FIELDS)}")


def burst_positions(bits: Bitspec, dtype: DType, burst: int = 1) -> list[int]:
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


_MAX_ELEMENTS = 1 << 20
_MAX_STRIDE = 1 << 40


class Fault(ABC):
    """What happens to numbers: an element each, or one part of a complex element.

    Bits are unsigned integers of the number's width. Implementations hold no state: the same arguments and the same
    draws give the same bits.
    """

    elements: int = 1
    """Numbers that one fault alters: neighbours, or `stride` apart."""
    stride: int = 1

    @abstractmethod
    def fits(self, dtype: DType) -> bool:
        """Whether the fault means something for numbers of this type; others are left out."""

    @abstractmethod
    def draw(self, dtype: DType, count: int, draws: Draws) -> Bits:
        """Which bits are aimed at, a pattern for each of `count` numbers; randomness from `draws` alone."""

    @abstractmethod
    def alter(self, old: Bits, aim: Bits, dtype: DType) -> Bits:
        """What becomes of numbers when these bits are aimed at."""

    def to_json(self) -> dict[str, Json]:
        """Kind and settings, as the log keeps them."""
        name = type(self).__name__.lower()
        ours = FAULTS.get(name) is type(self)
        told: dict[str, Json] = {"kind": "", "elements": self.elements, "stride": self.stride}
        if hasattr(self, "__dataclass_fields__"):
            for field in fields(self):  # type: ignore[arg-type]  # a subclass may be a dataclass, and need not be
                told[field.name] = _plain(getattr(self, field.name))
        told["kind"] = name if ours else f"{type(self).__module__}.{type(self).__qualname__}"
        return told


class _Pattern(Fault):
    """A pattern of adjacent bits, at a random place among those where it may begin."""

    @abstractmethod
    def _pattern(self) -> tuple[int, int, Bitspec]:
        """The pattern, how many bits it has, and which bits of a number it has to lie in."""

    def fits(self, dtype: DType) -> bool:
        """Where the bits exist, and room for the pattern; fields mean floats."""
        _, size, bits = self._pattern()
        return bool(burst_positions(bits, dtype, size))

    def draw(self, dtype: DType, count: int, draws: Draws) -> Bits:
        """One of the places where the pattern may begin, all alike; one place takes no draw."""
        pattern, size, bits = self._pattern()
        starts = burst_positions(bits, dtype, size)
        shifted = np.array([pattern << (width(dtype) - size - start) for start in starts], dtype.bits)
        return shifted[draws.below(len(starts), count)] if len(starts) > 1 else np.full(count, shifted[0])


class _WholeNumber(Fault):
    """All bits of a number."""

    def draw(self, dtype: DType, count: int, draws: Draws) -> Bits:
        """Nothing is left to chance."""
        return np.full(count, (1 << width(dtype)) - 1, dtype.bits)


@dataclass(frozen=True)
class BitFlip(_Pattern):
    """Flip bits: one, or a `burst` of adjacent ones, anywhere in `bits` (None: anywhere in the number).

    `bits` is a number (0 the sign), a range, or `sign`, `exponent`, `exponent-msb`, `mantissa`. With `elements`, the
    same bits flip in a run of numbers, `stride` apart.

    >>> BitFlip(bits="exponent").to_json()["bits"]
    'exponent'
    """

    bits: Bitspec = None
    burst: int = 1
    elements: int = 1
    stride: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", check_bits(self.bits))
        _check_shape(self, self.burst)

    def _pattern(self) -> tuple[int, int, Bitspec]:
        return (1 << self.burst) - 1, self.burst, self.bits

    def alter(self, old: Bits, aim: Bits, dtype: DType) -> Bits:
        """Flip what is aimed at."""
        return old ^ aim


@dataclass(frozen=True)
class BitMask(_Pattern):
    """XOR a mask, written as bits (`"101101"`), at a random alignment; zeros around it."""

    mask: str
    elements: int = 1
    stride: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.mask, str) or not 0 < len(self.mask) <= 64 or set(self.mask) - set("01"):
            raise UsageError(f"mask {self.mask!r}: expected up to 64 zeros and ones, such as '101101'")
        if "1" not in self.mask:
            raise UsageError(f"mask {self.mask!r} flips nothing: expected at least one 1")
        _check_shape(self)

    def _pattern(self) -> tuple[int, int, Bitspec]:
        return int(self.mask, 2), len(self.mask), None

    def alter(self, old: Bits, aim: Bits, dtype: DType) -> Bits:
        """Flip what is aimed at."""
        return old ^ aim


@dataclass(frozen=True)
class StuckAt(_Pattern):
    """Bits that are stuck at 0 or 1: set, whatever they were; where they were so, nothing changes."""

    value: int
    bits: Bitspec = None
    burst: int = 1
    elements: int = 1
    stride: int = 1

    def __post_init__(self) -> None:
        if type(self.value) is not int or self.value not in (0, 1):
            raise UsageError(f"stuck at {self.value!r:.60}: expected 0 or 1")
        object.__setattr__(self, "bits", check_bits(self.bits))
        _check_shape(self, self.burst)

    def _pattern(self) -> tuple[int, int, Bitspec]:
        return (1 << self.burst) - 1, self.burst, self.bits

    def alter(self, old: Bits, aim: Bits, dtype: DType) -> Bits:
        """Set or clear what is aimed at."""
        return old | aim if self.value else old & ~aim


@dataclass(frozen=True)
class Scale(_WholeNumber):
    """Multiply numbers; the nearest number that the type has. Integers are rounded and stay within their range."""

    factor: float
    elements: int = 1
    stride: int = 1

    def __post_init__(self) -> None:
        _check_number("factor", self.factor)
        object.__setattr__(self, "factor", float(self.factor))
        _check_shape(self)

    def fits(self, dtype: DType) -> bool:
        """Numbers of every kind."""
        return dtype is not DType.BOOL

    def alter(self, old: Bits, aim: Bits, dtype: DType) -> Bits:
        """The product, rounded once."""
        numbers = values(old, dtype)
        if numbers.dtype.kind in "iu" and math.isfinite(self.factor):  # exact, also beyond 2**53
            exact = Fraction(self.factor)
            return encode(_clipped([round(n * exact) for n in numbers.tolist()], dtype), dtype)
        return encode(_product(numbers, self.factor, exact=dtype.layout.part_bytes == 8), dtype)


@dataclass(frozen=True)
class SetValue(_WholeNumber):
    """Replace numbers by one value; NaN and infinities too. The nearest number that the type has."""

    value: float
    elements: int = 1
    stride: int = 1

    def __post_init__(self) -> None:
        _check_number("value", self.value)
        _check_shape(self)

    def fits(self, dtype: DType) -> bool:
        """Floats that have a number for it (NaN stands for what is missing), and integers that hold it exactly."""
        if dtype is DType.BOOL:
            return False
        if dtype.is_float:
            return dtype is not DType.FLOAT8_E8M0FNU or not self.value <= 0
        info = np.iinfo(f"{'i' if dtype.layout.kind == 'int' else 'u'}{dtype.layout.part_bytes}")
        return math.isfinite(self.value) and self.value == int(self.value) and info.min <= self.value <= info.max

    def alter(self, old: Bits, aim: Bits, dtype: DType) -> Bits:
        """The value, whatever was there."""
        kind = np.float64 if dtype.is_float else None
        value = self.value if dtype.is_float else int(self.value)
        one = np.array([value], kind if kind is not None else np.uint64 if value > np.iinfo(np.int64).max else np.int64)
        return np.full(len(old), encode(one, dtype)[0], dtype.bits)


FAULTS: dict[str, type[Fault]] = {
    "bitflip": BitFlip,
    "bitmask": BitMask,
    "scale": Scale,
    "setvalue": SetValue,
    "stuckat": StuckAt,
}
"""Evergrad's own faults, by the name that the log and the command line have for them."""


def fault_from_json(told: dict[str, Json]) -> Fault | None:
    """The fault that `to_json` told; None if it is not one of ours. Nothing is imported, whatever the text says."""
    kind = FAULTS.get(str(told.get("kind")))
    if kind is None:
        return None
    settings: dict[str, Any] = {key: value for key, value in told.items() if key != "kind"}
    try:
        if isinstance(settings.get("bits"), list):
            settings["bits"] = range(*settings["bits"])
        for key in ("factor", "value"):
            if isinstance(settings.get(key), str):  # NaN and infinities, which JSON does not have
                settings[key] = float(settings[key])
        return kind(**settings)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"fault {told!r:.200}: {error}") from None


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise UsageError(f"{name} {value!r:.60}: expected a number")
    try:
        float(value)
    except OverflowError:
        raise UsageError(f"{name}: expected a number that a double can hold") from None


def _product(numbers: npt.NDArray[Any], factor: float, *, exact: bool) -> npt.NDArray[np.float64]:
    """The product as a double; unless that is what is wanted, rounded to odd, so that rounding it again is right.

    What a double product loses is found by Dekker's splitting, with operations that are the same everywhere.
    """
    with np.errstate(all="ignore"):
        wide = numbers.astype(np.float64)
        product = wide * factor
        product[np.isnan(product)] = np.nan  # which NaN comes of 0 · ∞ depends on the processor
        if exact:
            return product
        a, b = _halves(wide), _halves(np.array([factor]))
        lost = ((a[0] * b[0] - product) + a[0] * b[1] + a[1] * b[0]) + a[1] * b[1]
        inexact = np.isfinite(product) & np.isfinite(lost) & (lost != 0)
        toward_zero = np.where(np.signbit(lost) == np.signbit(product), product, np.nextafter(product, 0.0))
        odd = (toward_zero.view(np.uint64) | np.uint64(1)).view(np.float64)
        return np.where(inexact, odd, product)


def _halves(numbers: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Each double as the sum of two of half its precision."""
    shifted = numbers * 134217729.0  # 2**27 + 1
    high = shifted - (shifted - numbers)
    return high, numbers - high


def _clipped(numbers: list[int], dtype: DType) -> npt.NDArray[Any]:
    info = np.iinfo(f"{'i' if dtype.layout.kind == 'int' else 'u'}{dtype.layout.part_bytes}")
    return np.array([min(max(n, info.min), info.max) for n in numbers], info.dtype)


def _check_shape(fault: Fault, burst: int = 1) -> None:
    if type(burst) is not int or not 1 <= burst <= 64:
        raise UsageError(f"burst {burst!r:.60}: expected 1 to 64 adjacent bits")
    if type(fault.elements) is not int or not 1 <= fault.elements <= _MAX_ELEMENTS:
        raise UsageError(f"elements {fault.elements!r:.60}: expected 1 to {_MAX_ELEMENTS:,}")
    if type(fault.stride) is not int or not 1 <= fault.stride <= _MAX_STRIDE:
        raise UsageError(f"stride {fault.stride!r:.60}: expected 1 or more, and no more than a tensor has")


def _plain(value: object) -> Json:
    if isinstance(value, range):
        return [value.start, value.stop, value.step]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)


# Faults written as words: `bitflip:bits=exponent`, `scale:factor=4500`; for schedules, plans and command lines.

_NEEDS = {"bitmask": "mask=101", "scale": "factor=4500", "stuckat": "value=1", "setvalue": "value=nan"}
_WHOLE = ("burst", "elements", "stride")
_REAL = ("factor", "value")


def fault_of(text: str | None, bits: str | int | range | None = None) -> Fault:
    """A fault from its words, `name:setting=value,…`; without any, bits flip.

    >>> fault_of("stuckat:value=1,bits=exponent")
    StuckAt(value=1, bits='exponent', burst=1, elements=1, stride=1)
    """
    if text is None:
        return FAULTS["bitflip"](bits=check_bits(bits))  # type: ignore[call-arg]
    if not isinstance(text, str) or not text.isprintable() or " " in text:
        raise UsageError(f"fault: expected words such as scale:factor=4500, found {short_repr(text)}")
    if bits is not None:
        raise UsageError(f"bits={bits}: expected within the fault, as in fault=stuckat:value=1,bits=exponent")
    name, colon, rest = text.partition(":")
    kind: Any = FAULTS[checked_choice("fault", name, list(FAULTS))]
    takes = [field.name for field in fields(kind)]
    settings: dict[str, Any] = {}
    for word in rest.split(",") if colon else ():
        key, equals, value = word.partition("=")
        if key not in takes or not equals or key in settings:
            expected = ", ".join(f"{one}=…" for one in takes)
            raise UsageError(
                f"fault={name}: expected {expected}, each once, found {short_repr(word)}.{did_you_mean(key, takes)}"
            )
        settings[key] = _read(name, key, value)
    if name in _NEEDS and (needed := _NEEDS[name]).partition("=")[0] not in settings:
        raise UsageError(f"fault={text}: expected a setting as in fault={name}:{needed}, found none")
    found = fault_from_json({"kind": name, **settings})
    assert found is not None
    return found


def bits_text(bits: str | int | range | None) -> str | None:
    """Which bits, as one word."""
    checked = check_bits(bits)
    if isinstance(checked, range):
        if checked.step != 1:
            raise UsageError(f"bits {bits!r}: expected bits that follow each other, such as 1-8")
        return f"{checked[0]}-{checked[-1]}"
    return None if checked is None else str(checked)


def _read(name: str, key: str, value: str) -> Any:
    """A setting's value; what is no number where one is expected is named."""
    try:
        if key in _WHOLE or (name == "stuckat" and key == "value"):
            return int(value)
        return float(value) if key in _REAL else value
    except ValueError:
        what = "a whole number" if key in _WHOLE or name == "stuckat" else "a number"
        raise UsageError(f"fault={name}: {key}: expected {what}, found {short_repr(value)}") from None
