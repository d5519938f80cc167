"""The element types that tensors have, known without importing torch.

A `DType` is a string ("float32", torch's own name) that also knows how its bits are laid out. Bits are
always handled as unsigned integers of the element's width; a complex element is two of them, real part
first, so that every part is an ordinary float.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    import torch

Kind = Literal["float", "int", "uint", "bool", "complex"]


@dataclass(frozen=True, slots=True)
class ElementLayout:
    """How one element is laid out: `parts` numbers of `part_bytes` each."""

    kind: Kind
    part_bytes: int
    parts: int = 1
    exponent_bits: int = 0
    mantissa_bits: int = 0


class DType(StrEnum):
    """Every dense element type of torch, by torch's name.

    >>> DType("bfloat16").itemsize, DType.COMPLEX128.parts, str(DType.FLOAT32)
    (2, 2, 'float32')
    """

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E4M3FNUZ = "float8_e4m3fnuz"
    FLOAT8_E5M2 = "float8_e5m2"
    FLOAT8_E5M2FNUZ = "float8_e5m2fnuz"
    FLOAT8_E8M0FNU = "float8_e8m0fnu"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT64 = "uint64"
    UINT32 = "uint32"
    UINT16 = "uint16"
    UINT8 = "uint8"
    BOOL = "bool"
    COMPLEX128 = "complex128"
    COMPLEX64 = "complex64"
    COMPLEX32 = "complex32"

    layout: ElementLayout
    """Widths and fields of one element."""
    itemsize: int
    """Bytes of one element."""
    parts: int
    """Numbers in one element: 2 for complex types, else 1."""
    bits: np.dtype[np.unsignedinteger]
    """The unsigned NumPy type that holds one part's bits."""

    @property
    def is_float(self) -> bool:
        """Whether the parts of an element are floats."""
        return self.layout.kind in ("float", "complex")

    @property
    def numpy(self) -> np.dtype[np.generic] | None:
        """The NumPy type of the same name, or None where NumPy has none (bfloat16, fp8, complex32)."""
        return _NUMPY.get(self)

    @classmethod
    def named(cls, name: object) -> DType | None:
        """The type of that name, if there is one."""
        return _BY_NAME.get(name) if isinstance(name, str) else None

    @classmethod
    def of_torch(cls, dtype: torch.dtype) -> DType | None:
        """The type of a torch tensor; None for quantised and sub-byte ones."""
        return _BY_NAME.get(str(dtype).removeprefix("torch."))

    @classmethod
    def of_dense(cls, dtype: torch.dtype) -> DType:
        """The type of a tensor that `flatten` or a format has taken: they refuse all others."""
        found = cls.of_torch(dtype)
        assert found is not None, f"{dtype} is refused"
        return found

    @classmethod
    def of_numpy(cls, dtype: np.dtype[np.generic]) -> DType | None:
        """The type of a NumPy array, whatever its byte order; None for strings, objects, records."""
        return _BY_NAME.get(dtype.name) if dtype.kind in "fiubc" else None

    @property
    def torch(self) -> torch.dtype:
        """The torch type of the same name."""
        import torch

        found = getattr(torch, self.value)
        assert isinstance(found, torch.dtype)
        return found


_LAYOUTS: dict[str, ElementLayout] = {
    "float64": ElementLayout("float", 8, exponent_bits=11, mantissa_bits=52),
    "float32": ElementLayout("float", 4, exponent_bits=8, mantissa_bits=23),
    "float16": ElementLayout("float", 2, exponent_bits=5, mantissa_bits=10),
    "bfloat16": ElementLayout("float", 2, exponent_bits=8, mantissa_bits=7),
    "float8_e4m3fn": ElementLayout("float", 1, exponent_bits=4, mantissa_bits=3),
    "float8_e4m3fnuz": ElementLayout("float", 1, exponent_bits=4, mantissa_bits=3),
    "float8_e5m2": ElementLayout("float", 1, exponent_bits=5, mantissa_bits=2),
    "float8_e5m2fnuz": ElementLayout("float", 1, exponent_bits=5, mantissa_bits=2),
    # A scale factor: eight exponent bits, no sign, no mantissa.
    "float8_e8m0fnu": ElementLayout("float", 1, exponent_bits=8, mantissa_bits=0),
    "int64": ElementLayout("int", 8),
    "int32": ElementLayout("int", 4),
    "int16": ElementLayout("int", 2),
    "int8": ElementLayout("int", 1),
    "uint64": ElementLayout("uint", 8),
    "uint32": ElementLayout("uint", 4),
    "uint16": ElementLayout("uint", 2),
    "uint8": ElementLayout("uint", 1),
    "bool": ElementLayout("bool", 1),
    "complex128": ElementLayout("complex", 8, parts=2, exponent_bits=11, mantissa_bits=52),
    "complex64": ElementLayout("complex", 4, parts=2, exponent_bits=8, mantissa_bits=23),
    "complex32": ElementLayout("complex", 2, parts=2, exponent_bits=5, mantissa_bits=10),
}
for _member in DType:  # plain attributes: files with many tensors ask for them often
    _member.layout = _LAYOUTS[_member.value]
    _member.parts = _member.layout.parts
    _member.itemsize = _member.layout.part_bytes * _member.parts
    _member.bits = np.dtype(f"u{_member.layout.part_bytes}")

_BY_NAME: dict[str, DType] = {member.value: member for member in DType}
_NUMPY: dict[DType, np.dtype[np.generic]] = {
    member: np.dtype(member.value) for member in DType if not member.value.startswith(("bfloat", "float8", "complex32"))
}
