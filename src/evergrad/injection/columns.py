"""What was done to one tensor, in columns; and to one number, in a person's words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evergrad.dtypes import DType
from evergrad.formats.bitcast import values
from evergrad.formats.checkpoint import Bits
from evergrad.injection.fields import field_of, width
from evergrad.records import Json


@dataclass(frozen=True, slots=True)
class Hit:
    """One fault in one number.

    >>> print(Hit("fc.weight", DType.FLOAT32, (4, 3), 7, 1 << 30, 0x3CAE7D56, 0x7CAE7D56))
    fc.weight[2,1] bit 1 (exponent msb): 0.0213 → 7.248e+36
    """

    tensor: str
    dtype: DType
    shape: tuple[int, ...]
    number: int
    """Its index in C order; in complex tensors parts are counted, the real one of each element first."""
    aim: int
    """The bits that were aimed at."""
    old: int
    new: int

    @property
    def index(self) -> int:
        """Which element, in C order."""
        return self.number // self.dtype.parts

    @property
    def position(self) -> tuple[int, ...]:
        """Which element, along each axis."""
        return tuple(int(n) for n in np.unravel_index(self.index, self.shape))

    @property
    def part(self) -> str:
        """`real` or `imag` of a complex element; nothing otherwise."""
        return ("real", "imag")[self.number % 2] if self.dtype.parts == 2 else ""

    @property
    def bits(self) -> tuple[int, ...]:
        """The bits that were aimed at, by number: 0 is the sign."""
        total = width(self.dtype)
        return tuple(bit for bit in range(total) if self.aim >> (total - 1 - bit) & 1)

    @property
    def changed(self) -> bool:
        """Whether a bit is another than before."""
        return self.old != self.new

    @property
    def old_value(self) -> float | int:
        """The number before."""
        return _value(self.old, self.dtype)

    @property
    def new_value(self) -> float | int:
        """The number after."""
        return _value(self.new, self.dtype)

    @property
    def where(self) -> str:
        """The number's address: `fc.weight[2,1]`."""
        place = f"[{','.join(str(n) for n in self.position)}]" if self.shape else ""
        return f"{self.tensor}{place}{f'.{self.part}' if self.part else ''}"

    def __str__(self) -> str:
        bits = self.bits
        if len(bits) == width(self.dtype):
            what = "all bits"
        elif len(bits) == 1:
            what = f"bit {bits[0]} ({field_of(bits[0], self.dtype)})"
        elif bits == tuple(range(bits[0], bits[-1] + 1)):
            what = f"bits {bits[0]}–{bits[-1]}"
        else:
            what = f"bits {', '.join(str(bit) for bit in bits)}"
        before, after = (f"{value:.4g}" if self.dtype.is_float else str(value) for value in self._values)
        if before == after and self.changed:
            before, after = (repr(value) for value in self._values)
        return f"{self.where} {what}: {before} → {after}" + ("" if self.changed else " (unchanged)")

    @property
    def _values(self) -> tuple[float | int, float | int]:
        return self.old_value, self.new_value

    def to_json(self) -> dict[str, Json]:
        """The address, and the bits by number and as hexadecimal patterns."""
        digits = width(self.dtype) // 4
        return {
            "tensor": self.tensor,
            "index": self.index,
            "position": list(self.position),
            **({"part": self.part} if self.part else {}),
            "bits": list(self.bits),
            "old": f"{self.old:0{digits}x}",
            "new": f"{self.new:0{digits}x}",
            "old_value": _plain(self.old_value),
            "new_value": _plain(self.new_value),
        }


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """What was done to one tensor: numbers, the bits aimed at, old and new bits, in the order of the faults."""

    tensor: str
    dtype: DType
    shape: tuple[int, ...]
    numbers: npt.NDArray[np.int64]
    aim: Bits
    old: Bits
    new: Bits

    def __len__(self) -> int:
        return len(self.numbers)

    def hits(self) -> Iterator[Hit]:
        """One by one."""
        rows = zip(self.numbers.tolist(), self.aim.tolist(), self.old.tolist(), self.new.tolist(), strict=True)
        for number, aim, old, new in rows:
            yield Hit(self.tensor, self.dtype, self.shape, number, aim, old, new)

    def ends(self) -> Column:
        """Each number once: with its bits before the first fault and after the last."""
        if len(self.numbers) < 2 or bool(np.all(np.diff(self.numbers) > 0)):
            return self
        order = np.argsort(self.numbers, kind="stable")
        ordered = self.numbers[order]
        first = np.flatnonzero(np.diff(ordered, prepend=-1))
        last = np.append(first[1:], len(ordered)) - 1
        aim = np.bitwise_or.reduceat(self.aim[order], first)
        old, new = self.old[order[first]], self.new[order[last]]
        return Column(self.tensor, self.dtype, self.shape, ordered[first], aim, old, new)

    def elements(self, patterns: Bits) -> tuple[npt.NDArray[np.int64], Bits]:
        """Patterns of distinct numbers as `Checkpoint.xor` takes them: of elements, complex ones as rows of two."""
        parts = self.dtype.parts
        if parts == 1:
            return self.numbers, patterns
        elements, rows = np.unique(self.numbers // parts, return_inverse=True)
        whole = np.zeros((len(elements), parts), self.dtype.bits)
        whole[rows, self.numbers % parts] = patterns
        return elements, whole


def _plain(value: float | int) -> Json:
    return value if math.isfinite(value) else str(value)  # JSON has neither NaN nor infinities


def _value(bits: int, dtype: DType) -> float | int:
    found: float | int = values(np.array([bits], dtype.bits), dtype)[0].item()
    return found
