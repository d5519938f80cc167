"""How sure a rate or a mean is: intervals, and how many trainings they take."""

from __future__ import annotations

import importlib
import inspect
import math
import operator
import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from evergrad.errors import UsageError
from evergrad.wording import checked_choice, install_hint, short_repr

INTERVALS = ("wilson", "clopper-pearson", "anytime")

_RESAMPLES = 2_000
_AT_ONCE = 1_000


def wilson(k: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a rate: right on average, and never empty or outside 0 and 1.

    >>> [round(bound, 4) for bound in wilson(10, 100)]
    [0.0552, 0.1744]
    """
    k, n = checked_counts(k, n)
    z = normal_quantile(confidence)
    if n == 0:
        return 0.0, 1.0
    rate, share = k / n, z * z / n
    middle = (rate + share / 2) / (1 + share)
    reach = z / (1 + share) * math.sqrt(rate * (1 - rate) / n + share / (4 * n))
    # At the ends the formula gives 0 and 1 but for rounding.
    return (max(0.0, middle - reach) if k else 0.0), (min(1.0, middle + reach) if k < n else 1.0)


def clopper_pearson(k: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact interval of a rate: it covers at least as often as it says, and is wider for it.

    >>> [round(bound, 4) for bound in clopper_pearson(10, 100)]
    [0.049, 0.1762]
    """
    k, n = checked_counts(k, n)
    tail = (1 - checked_confidence(confidence)) / 2
    special = scipy_part("special")
    low = float(special.betaincinv(k, n - k + 1, tail)) if k else 0.0
    high = float(special.betaincinv(k + 1, n - k, 1 - tail)) if k < n else 1.0
    return low, high


def proportion_interval(k: int, n: int, confidence: float = 0.95, method: str = "wilson") -> tuple[float, float]:
    """The interval of a rate of k in n by one of `INTERVALS`; none in none may be anything."""
    checked_choice("interval", method, INTERVALS)
    if method == "wilson":
        return wilson(k, n, confidence)
    if method == "clopper-pearson":
        return clopper_pearson(k, n, confidence)

    return anytime_interval(k, n, confidence)


def sample_size(half_width: float, confidence: float = 0.95, population: int | None = None, rate: float = 0.5) -> int:
    """How many trainings tell a rate to within ± `half_width`: n = N / (1 + e²(N-1) / (t²p(1-p))) of Leveugle et al.

    Without a population it is taken for endless, as that of several flips at once is. Rounded up: ±5 % at 95 % takes
    384.1 and so 385, since the 384 that is often quoted falls short by a hair. A rate of one half is the worst case;
    the formula rests on the normal distribution and promises too much for rates near 0 or 1.

    >>> sample_size(0.05), sample_size(0.05, population=1000)
    (385, 278)
    """
    checked_part("half width", half_width)
    checked_part("rate", rate)
    endless = (normal_quantile(confidence) / half_width) ** 2 * rate * (1 - rate)
    if population is None:
        return max(1, _rounded_up(endless))
    size = _checked_count("population", population, least=1)
    return min(size, max(1, _rounded_up(size / (1 + (size - 1) / endless))))


def strata_sizes(
    populations: Mapping[str, int], half_width: float, confidence: float = 0.95, rate: float = 0.5
) -> dict[str, int]:
    """How many trainings each stratum takes, a layer or a field of bits, for a rate of its own to ± `half_width`.

    >>> strata_sizes({"sign": 100, "exponent": 800, "mantissa": 2300}, 0.05)
    {'sign': 80, 'exponent': 260, 'mantissa': 330}
    """
    sizes = {}
    for name, population in populations.items():
        _checked_count(f"population of {short_repr(name)}", population, least=1)
        sizes[name] = sample_size(half_width, confidence, population, rate)
    return sizes


def expected_half_width(n: int, confidence: float = 0.95, rate: float = 0.5, method: str = "wilson") -> float:
    """Half of the interval to expect of n trainings, if the rate is this; the worst case if not told."""
    n = _checked_count("trainings", n)
    if not 0 <= _checked_number("rate", rate) <= 1:
        raise UsageError(f"rate: expected a number from 0 to 1, found {short_repr(rate)}")
    low, high = proportion_interval(round(n * rate), n, confidence, method)
    return (high - low) / 2


def paired_interval(differences: Sequence[float], confidence: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """The interval of the mean of paired differences, by bootstrap: each training's metric less its fault-free twin's.

    Bias-corrected and accelerated; by plain percentiles where the data do not allow for the correction. The same
    differences and seed give the same interval. Differences that are all equal leave nothing to resample, and their
    interval is that one number.
    """
    checked_confidence(confidence)
    values = [_checked_number("difference", value) for value in differences]
    if len(values) < 2:
        raise UsageError(f"differences: expected two or more, found {len(values)}")
    if min(values) == max(values):
        return values[0], values[0]
    import numpy as np

    bootstrap = scipy_part("stats").bootstrap
    # Since scipy 1.15 the generator goes by another name.
    generator = "rng" if "rng" in inspect.signature(bootstrap).parameters else "random_state"
    # In one go where that is little: of n values all resamples, and the n × n that the correction looks at.
    batch = None if len(values) <= _AT_ONCE else max(1, _AT_ONCE * _RESAMPLES // len(values))
    for method in ("BCa", "percentile"):
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # of degenerate data: the next method is the answer to it
            found = bootstrap(
                (np.array(values),),
                np.mean,
                n_resamples=_RESAMPLES,
                confidence_level=confidence,
                method=method,
                batch=batch,
                **{generator: np.random.default_rng(seed)},
            ).confidence_interval
        low, high = float(found.low), float(found.high)
        if math.isfinite(low) and math.isfinite(high):
            break
    return low, high


def mean(values: Sequence[float]) -> float | None:
    """The mean; nothing of nothing."""
    return statistics.fmean(values) if values else None


def standard_deviation(values: Sequence[float]) -> float | None:
    """Of the sample, by n - 1; nothing of fewer than two. Equal numbers have exactly none."""
    return statistics.stdev(values) if len(values) > 1 else None


def coefficient_of_variation(values: Sequence[float]) -> float | None:
    """The standard deviation in parts of the mean; nothing where either is missing or the mean is 0."""
    middle, spread = mean(values), standard_deviation(values)
    return None if not middle or spread is None else spread / abs(middle)


def normal_quantile(confidence: float) -> float:
    """How many standard deviations either side hold this part of a normal distribution: 1.96 for 95 %."""
    return float(scipy_part("special").ndtri((1 + checked_confidence(confidence)) / 2))


def scipy_part(name: str) -> Any:
    """A module of scipy, imported when it is needed: some take half a second."""
    try:
        return importlib.import_module(f"scipy.{name}")
    except ImportError:
        raise UsageError(f"statistics of studies need scipy. {install_hint('studies')}") from None


def checked_confidence(confidence: float) -> float:
    """A number between 0 and 1."""
    return checked_part("confidence", confidence)


def checked_part(name: str, value: float) -> float:
    """A number above 0 and below 1."""
    if not 0 < _checked_number(name, value) < 1:
        raise UsageError(f"{name}: expected a number above 0 and below 1, found {short_repr(value)}")
    return float(value)


def checked_counts(k: int, n: int) -> tuple[int, int]:
    """How many of how many, as they can be."""
    k, n = _checked_count("count", k), _checked_count("trainings", n)
    if k > n:
        raise UsageError(f"count: expected at most as many as there are trainings, {n}, found {k}")
    return k, n


def _checked_count(name: str, value: int, least: int = 0) -> int:
    try:
        whole = operator.index(value)
    except TypeError:
        whole = -1
    if whole < least or isinstance(value, bool):
        raise UsageError(f"{name}: expected a whole number, {least} or more, found {short_repr(value)}")
    return whole


def _checked_number(name: str, value: float) -> float:
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{name}: expected a finite number, found {short_repr(value)}")
    return number


def _rounded_up(number: float) -> int:
    return math.ceil(number * (1 - 1e-12))  # a whole number may come out of the formula a little above itself


# Looking while a study runs: intervals of a rate that hold at every look, and when to stop.
#
# An interval for a fixed number of trainings misses more often than it says if one looks again and again and stops
# when it pleases. This one may be looked at after every training: with the stated confidence the truth is inside at
# *all* looks, whatever rule stops the study. The price is three to four times as many trainings to the same width.
#
# It is Robbins' mixture: the likelihood of what was seen, mixed over all rates by Jeffreys' Beta(½, ½), against the
# likelihood at one rate. At the true rate that ratio is a martingale that starts at 1, so it ever exceeds 1/α with
# probability α at most; rates whose ratio does are excluded.
#
# The promise is for each cell by itself, as that of a table's other intervals is. A rule over all cells, as
# `is_precise_enough`
# is, does not weaken it: it only chooses the look.

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


def is_precise_enough(cells: Iterable[tuple[int, int]], half_width: float, confidence: float = 0.95) -> bool:
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
        raise UsageError(f"rate: expected a number from 0 to 1, found {short_repr(rate)}")

    def narrow(n: int) -> bool:
        low, high = _bounds(rate * n, n, confidence)
        return (high - low) / 2 <= half_width

    last = 1
    while not narrow(last):
        last *= 2
        if last > _MOST_TRIALS:
            raise UsageError(f"half width: expected one that trainings can reach, found {short_repr(half_width)}")
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
