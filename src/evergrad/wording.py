"""What lines for people are made of: what was found, what there is, how many, and what may have been meant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from evergrad.errors import UsageError, nearest

__all__ = ["checked_choice", "counted", "first_line", "listed", "meant", "shown"]


def checked_choice(name: str, value: Any, known: Sequence[str], near: Sequence[str] = ()) -> str:
    """One of those that are known; a wrong one may be near to others too."""
    if not isinstance(value, str) or value not in known:
        found = shown(value) if value != "" else "nothing"
        raise UsageError(f"{name}: expected {listed(known)}, found {found}.{meant(str(value), [*known, *near])}")
    return value


def counted(number: int, one: str, many: str = "") -> str:
    """A number of things in words.

    >>> counted(1, "rank"), counted(0, "rank"), counted(2000, "process", "processes")
    ('1 rank', '0 ranks', '2,000 processes')
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def first_line(error: BaseException, longest: int = 100) -> str:
    """What a library says of an error, without the rest; never empty.

    >>> first_line(RuntimeError("no room\\nin frame 3")), first_line(KeyboardInterrupt())
    ('no room', 'KeyboardInterrupt')
    """
    return next(iter(str(error).splitlines()), "")[:longest] or type(error).__name__


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
