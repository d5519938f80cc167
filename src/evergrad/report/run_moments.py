"""An event with its place in the run, and its fields as far as they are what they should be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from evergrad.records import Json
from evergrad.timeline import Event


@dataclass(frozen=True, slots=True)
class Moment:
    """An event, and when it was: seconds since the run began."""

    at_s: float
    told: Event

    @property
    def event(self) -> str:
        """What happened."""
        return self.told.event

    @property
    def who(self) -> str:
        """Who saw it."""
        return self.told.who

    @property
    def uid(self) -> int | None:
        """The process that saw it; None for a launcher."""
        name, _, rest = self.told.who.partition(" ")
        return int(rest) if name == "uid" and rest.isascii() and rest.isdigit() and len(rest) < 10 else None

    @property
    def fields(self) -> Mapping[str, Json]:
        """What else was said of it."""
        return self.told.fields


def whole(fields: Mapping[str, Json], name: str) -> int | None:
    """A whole number, or None.

    >>> whole({"step": 3, "rank": True}, "step"), whole({"rank": True}, "rank")
    (3, None)
    """
    value = fields.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(fields: Mapping[str, Json], name: str) -> float | None:
    """A finite number, or None.

    >>> number({"by": 3}, "by"), number({"by": 10**400}, "by"), number({"by": float("nan")}, "by")
    (3.0, None, None)
    """
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    with suppress(OverflowError):  # JSON's whole numbers have no end
        return float(value) if math.isfinite(value) else None
    return None


def numbers(fields: Mapping[str, Json], name: str) -> tuple[int, ...]:
    """Those whole numbers that a list holds."""
    value = fields.get(name)
    if not isinstance(value, list):
        return ()
    return tuple(each for each in value if isinstance(each, int) and not isinstance(each, bool))


def text(fields: Mapping[str, Json], name: str) -> str:
    """A text; empty if there is none."""
    value = fields.get(name)
    return value if isinstance(value, str) else ""
