"""The colours of reports: told apart by the colour-blind, and visible on light and on dark pages.

They are Okabe and Ito's, with those that are too pale for white darkened: each has a contrast of at least 3 to
both backgrounds. A colour is never all that tells two things apart: lines differ in dash, bars in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_BLUE, _VERMILION, _GREEN = "#2b7fb8", "#d55e00", "#009e73"
_ORANGE, _PURPLE, _GREY = "#c78500", "#c2689b", "#808890"

PALETTE: Mapping[str, str] = MappingProxyType(
    {
        # studies
        "golden": _ORANGE,
        "faulty": _BLUE,
        "published": _PURPLE,
        "sign": _VERMILION,
        "exponent": _BLUE,
        "mantissa": _GREEN,
        # verdicts
        "ok": _GREEN,
        "bad": _VERMILION,
        "warn": _ORANGE,
        "muted": _GREY,
        # what a rank is doing
        "starting": _ORANGE,
        "training": _GREEN,
        "waiting": _PURPLE,
        "recovering": _PURPLE,
        "dead": _VERMILION,
        "spare": _GREY,
    }
)

# Ranks, models, tiers: whatever comes in a row.
SERIES: tuple[str, ...] = (_BLUE, _VERMILION, _GREEN, _PURPLE, _ORANGE, "#5b7fd6", "#8a7a3b", _GREY)


def series_colour(index: int) -> str:
    """The colour of a rank, or of anything else that is counted; they repeat after eight.

    >>> series_colour(0) == series_colour(8)
    True
    """
    return SERIES[index % len(SERIES)]
