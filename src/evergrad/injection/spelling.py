"""Faults written as words: `bitflip:bits=exponent`, `scale:factor=4500`; for schedules, plans and command lines."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from evergrad.errors import UsageError
from evergrad.injection.faults import FAULTS, Fault, fault_from_json
from evergrad.injection.fields import check_bits
from evergrad.wording import checked_choice, meant, shown

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
        raise UsageError(f"fault: expected words such as scale:factor=4500, found {shown(text)}")
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
            raise UsageError(f"fault={name}: expected {expected}, each once, found {shown(word)}.{meant(key, takes)}")
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
        raise UsageError(f"fault={name}: {key}: expected {what}, found {shown(value)}") from None
