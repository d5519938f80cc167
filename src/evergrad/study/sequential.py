"""Looking while a study runs: intervals of a rate that hold at every look, and when to stop.

An interval for a fixed number of trainings misses more often than it says if one looks again and again and stops when
it pleases. This one may be looked at after every training: with the stated confidence the truth is inside at *all*
looks, whatever rule stops the study. The price is three to four times as many trainings to the same width.

It is Robbins' mixture: the likelihood of what was seen, mixed over all rates by Jeffreys' Beta(½, ½), against the
likelihood at one rate. At the true rate that ratio is a martingale that starts at 1, so it ever exceeds 1/α with
probability α at most; rates whose ratio does are excluded.

The promise is for each cell by itself, as that of a table's other intervals is. A rule over all cells, as `enough` is,
does not weaken it: it only chooses the look.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from evergrad.errors import UsageError
from evergrad.study.statistics import checked_confidence, checked_counts, checked_part, scipy_part
from evergrad.wording import shown

_PRIOR = 0.5
_FARTHEST = 700.0  # of log-odds: as near to 0 and 1 as floats go
_MOST_TRIALS = 1 << 50


def anytime_interval(k: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """The interval of a rate of k in n, valid at every n at once; k/n is always inside.

    >>> [round(bound, 3) for bound in anytime_interval(10, 100)]
    [0.029, 0.228]
    """
    k, n = checked_counts(k, n)
    return _bounds(k, n, checked_confidence(confidence))


def enough(cells: Iterable[tuple[int, int]], half_width: float, confidence: float = 0.95) -> bool:
    """Whether every cell, (N-EV, trainings), is known to ± `half_width` by its anytime interval: the study may stop."""
    checked_part("half width", half_width)
    for k, n in cells:
        low, high = anytime_interval(k, n, confidence)
        if (high - low) / 2 > half_width:
            return False
    return True


def stopping_time(rate: float, half_width: float, confidence: float = 0.95) -> int:
    """After how many trainings a cell of this rate is to be expected narrow enough; one half takes longest."""
    checked_part("half width", half_width)
    checked_confidence(confidence)
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate <= 1:
        raise UsageError(f"rate: expected a number from 0 to 1, found {shown(rate)}")

    def narrow(n: int) -> bool:
        low, high = _bounds(rate * n, n, confidence)
        return (high - low) / 2 <= half_width

    last = 1
    while not narrow(last):
        last *= 2
        if last > _MOST_TRIALS:
            raise UsageError(f"half width: expected one that trainings can reach, found {shown(half_width)}")
    first = last // 2
    while last - first > 1:
        middle = (first + last) // 2
        first, last = (first, middle) if narrow(middle) else (middle, last)
    return last


def _bounds(k: float, n: int, confidence: float) -> tuple[float, float]:
    """Where the ratio crosses 1/α, on either side of k/n; k need not be whole where a rate is only supposed."""
    if n == 0:
        return 0.0, 1.0
    special, optimize = scipy_part("special"), scipy_part("optimize")
    mixed = float(special.betaln(k + _PRIOR, n - k + _PRIOR) - special.betaln(_PRIOR, _PRIOR))
    limit = -math.log1p(-confidence)

    def excess(odds: float) -> float:
        # In log-odds: bounds near 0 and 1 keep their digits.
        seen = k * _log_part(odds) + (n - k) * _log_part(-odds)
        return mixed - seen - limit

    # The ratio is least at k/n, where it is below 1, and grows without end towards 0 and towards 1.
    # Of a supposed k, far below one, it may not have grown enough where floats end: then that end is the bound.
    middle = math.log(k / (n - k)) if 0 < k < n else math.copysign(_FARTHEST, k - n / 2)
    low, high, rate = 0.0, 1.0, k / n
    if k > 0 and excess(-_FARTHEST) > 0:
        low = min(rate, _part(float(optimize.brentq(excess, -_FARTHEST, middle, xtol=1e-10))))
    if k < n and excess(_FARTHEST) > 0:
        high = max(rate, _part(float(optimize.brentq(excess, middle, _FARTHEST, xtol=1e-10))))
    return low, high


def _log_part(odds: float) -> float:
    """The logarithm of the rate that has these log-odds."""
    return -math.log1p(math.exp(-odds)) if odds > 0 else odds - math.log1p(math.exp(odds))


def _part(odds: float) -> float:
    return math.exp(_log_part(odds))
