"""HDF5's element types, and which of ours they are, bit for bit."""

from __future__ import annotations

from typing import Any

from evergrad.dtypes import DType

Element = tuple[DType, bool]
"""One of our types, and whether its bytes are in big-endian order."""

_CLASSES = {
    2: "times",
    3: "strings",
    4: "bit fields",
    5: "opaque bytes",
    6: "records",
    7: "references",
    8: "an enumeration",
    9: "lists of varying length",
    10: "arrays",
}
# Sign, exponent and mantissa of floats that are not IEEE's: (size, exponent bits, mantissa bits, bias).
_FLOATS = {
    (2, 8, 7, 127): DType.BFLOAT16,
    (1, 4, 3, 7): DType.FLOAT8_E4M3FN,
    (1, 5, 2, 15): DType.FLOAT8_E5M2,
}


class Elements:
    """Tells types apart. A type is served only if it is ours to the last bit; the rest is described."""

    def __init__(self, h5py: Any) -> None:
        self._t = t = h5py.h5t
        self._plain: dict[tuple[int, int, int], list[tuple[Any, Element]]] = {}
        for order, big in (("LE", False), ("BE", True)):
            for width in (8, 16, 32, 64):
                self._add(getattr(t, f"STD_I{width}{order}"), DType(f"int{width}"), big)
                self._add(getattr(t, f"STD_U{width}{order}"), DType(f"uint{width}"), big)
            for width in (16, 32, 64):
                self._add(getattr(t, f"IEEE_F{width}{order}"), DType(f"float{width}"), big)

    def of(self, kind: Any) -> Element | str:
        """Our type and its byte order, or a description of what it is instead."""
        number = kind.get_class()
        if number in (self._t.INTEGER, self._t.FLOAT):
            found = self._number(kind, number)
        elif number == self._t.ENUM:
            found = self._boolean(kind)
        elif number == self._t.COMPOUND or number == getattr(self._t, "COMPLEX", -1):
            found = self._complex(kind, compound=number == self._t.COMPOUND)
        else:
            found = None
        if found is not None:
            return found
        if number in (self._t.INTEGER, self._t.FLOAT):
            return (
                f"{kind.get_size()}-byte {'integers' if number == self._t.INTEGER else 'floats'} of an unusual layout"
            )
        return _CLASSES.get(number, f"elements of class {number}")

    def _add(self, kind: Any, dtype: DType, big: bool) -> None:
        key = (kind.get_class(), kind.get_size(), kind.get_order())
        self._plain.setdefault(key, []).append((kind, (dtype, big and dtype.itemsize > 1)))

    def _number(self, kind: Any, number: int) -> Element | None:
        size, order = kind.get_size(), kind.get_order()
        for known, element in self._plain.get((number, size, order), ()):
            if kind == known:
                return element
        if number != self._t.FLOAT or size > 2:
            return None
        sign, exponent_at, exponent, mantissa_at, mantissa = kind.get_fields()
        dtype = _FLOATS.get((size, exponent, mantissa, kind.get_ebias()))
        usual = (sign, exponent_at, mantissa_at) == (8 * size - 1, mantissa, 0)
        return (dtype, order == self._t.ORDER_BE and size > 1) if dtype is not None and usual else None

    def _boolean(self, kind: Any) -> Element | None:
        """h5py's enumeration of FALSE and TRUE."""
        if kind.get_size() != 1 or kind.get_nmembers() != 2:
            return None
        members = {kind.get_member_name(i): kind.get_member_value(i) for i in range(2)}
        return (DType.BOOL, False) if members == {b"FALSE": 0, b"TRUE": 1} else None

    def _complex(self, kind: Any, *, compound: bool) -> Element | None:
        """A record of two floats, `r` and `i`, without a gap; or, since HDF5 2.0, a complex number."""
        if compound:
            if kind.get_nmembers() != 2 or [kind.get_member_name(i) for i in range(2)] != [b"r", b"i"]:
                return None
            part = kind.get_member_type(0)
            other = kind.get_member_type(1)
            if part != other or kind.get_member_offset(0) != 0 or kind.get_member_offset(1) != part.get_size():
                return None
        else:
            part = kind.get_super()
        if part.get_class() != self._t.FLOAT or kind.get_size() != 2 * part.get_size():
            return None
        found = self._number(part, self._t.FLOAT)
        if found is None or found[0] not in (DType.FLOAT16, DType.FLOAT32, DType.FLOAT64):
            return None
        return DType(f"complex{2 * 8 * found[0].itemsize}"), found[1]
