"""What error lines are made of: what was found, what there is, and what may have been meant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from evergrad.errors import UsageError, nearest

__all__ = ["checked_choice", "listed", "meant", "shown"]


def checked_choice(name: str, value: Any, known: Sequence[str], near: Sequence[str] = ()) -> str:
    """One of those that are known; a wrong one may be near to others too."""
    if not isinstance(value, str) or value not in known:
        found = shown(value) if value != "" else "nothing"
        raise UsageError(f"{name}: expected {listed(known)}, found {found}.{meant(str(value), [*known, *near])}")
    return value


def listed(names: Sequence[str]) -> str:
    """`a, b or c`; of no names, `none`."""
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else "".join(names) or "none"


def meant(asked: str, known: Iterable[str], more: str = "") -> str:
    """A question after what was meant, if anything is near."""
    close = nearest(asked[:100].lower(), known, count=1)
    return f" Did you mean '{close[0]}{more}'?" if close else ""


def shown(value: object) -> str:
    """What was found, short enough to leave room for the rest of the line."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:118]}…{text[-1]}"
