"""Intervals and sample sizes against reference values, and against what they promise."""

from __future__ import annotations

import math
import sys

import pytest

from evergrad.errors import UsageError
from evergrad.study import statistics

Z95 = 1.959963984540054


@pytest.mark.parametrize(
    ("interval", "k", "n", "low", "high"),
    [
        # Newcombe 1998, Statistics in Medicine 17:857, table I, and standard tables.
        (statistics.wilson, 81, 263, 0.2553, 0.3662),
        (statistics.wilson, 15, 148, 0.0624, 0.1605),
        (statistics.wilson, 0, 20, 0.0, 0.1611),
        (statistics.wilson, 1, 29, 0.0061, 0.1718),
        (statistics.wilson, 10, 100, 0.0552, 0.1744),
        (statistics.wilson, 0, 250, 0.0, 0.0151),
        (statistics.clopper_pearson, 81, 263, 0.2527, 0.3676),
        (statistics.clopper_pearson, 15, 148, 0.0578, 0.1617),
        (statistics.clopper_pearson, 0, 20, 0.0, 0.1684),
        (statistics.clopper_pearson, 1, 29, 0.0009, 0.1776),
        (statistics.clopper_pearson, 10, 100, 0.0490, 0.1762),
    ],
)
def test_intervals_of_rates_have_their_published_values(interval, k: int, n: int, low: float, high: float) -> None:
    assert interval(k, n) == pytest.approx((low, high), abs=6e-5)
    # The same from the other side.
    assert interval(n - k, n) == pytest.approx((1 - high, 1 - low), abs=6e-5)


def test_none_of_none_may_be_anything_and_ends_are_exact() -> None:
    for method in statistics.INTERVALS:
        assert statistics.proportion_interval(0, 0, 0.95, method) == (0.0, 1.0)
        assert statistics.proportion_interval(0, 7, 0.95, method)[0] == 0.0
        assert statistics.proportion_interval(7, 7, 0.95, method)[1] == 1.0


@pytest.mark.parametrize("method", statistics.INTERVALS)
def test_a_higher_confidence_is_a_wider_interval_around_the_rate(method: str) -> None:
    for k, n in ((0, 5), (3, 5), (5, 5), (40, 250)):
        inner, outer = (statistics.proportion_interval(k, n, confidence, method) for confidence in (0.9, 0.99))
        assert outer[0] <= inner[0] <= k / n <= inner[1] <= outer[1]


def _coverage(method: str, n: int, rate: float) -> float:
    """How often the interval holds the rate: summed over every count there can be."""
    covered = 0.0
    for k in range(n + 1):
        low, high = statistics.proportion_interval(k, n, 0.95, method)
        if low <= rate <= high:
            covered += math.comb(n, k) * rate**k * (1 - rate) ** (n - k)
    return covered


def test_wilson_covers_as_often_as_it_says_on_average_and_the_exact_one_always() -> None:
    rates = [place / 40 for place in range(1, 40)]
    wilson = [_coverage("wilson", 30, rate) for rate in rates]
    assert sum(wilson) / len(wilson) == pytest.approx(0.95, abs=0.01)
    assert min(wilson) > 0.90
    assert min(wilson) < 0.95, "on average only: this is what the exact one is there for"
    assert min(_coverage("clopper-pearson", 30, rate) for rate in rates) >= 0.95


def test_sample_sizes_are_those_of_the_formula_rounded_up() -> None:
    assert statistics.sample_size(0.05) == 385  # 384.15
    assert statistics.sample_size(0.01, 0.99) == 16588  # 16587.2
    assert statistics.sample_size(0.05, population=10_000) == 370
    assert statistics.sample_size(0.05, population=1) == 1
    assert statistics.sample_size(0.4, population=2) <= 2
    # The formula solved for the error: n reaches it, n - 1 does not.
    for population in (500, 10_000, 10**9):
        size = statistics.sample_size(0.03, population=population)

        def error(n: int, whole: int = population) -> float:
            return Z95 * math.sqrt(0.25 / n * (whole - n) / (whole - 1))

        assert error(size) <= 0.03 < error(size - 1)


def test_strata_are_sized_one_by_one() -> None:
    populations = {"sign": 100, "exponent": 800, "mantissa": 2300}
    assert statistics.strata_sizes(populations, 0.05) == {
        name: statistics.sample_size(0.05, population=population) for name, population in populations.items()
    }
    with pytest.raises(UsageError, match=r"population of 'sign': expected a whole number, 1 or more, found 0"):
        statistics.strata_sizes({"sign": 0}, 0.05)


def test_the_sample_size_gives_the_width_it_was_asked_for() -> None:
    for half_width in (0.02, 0.05, 0.1):
        assert statistics.expected_half_width(statistics.sample_size(half_width)) <= half_width
    assert statistics.expected_half_width(0) == 0.5
    assert statistics.expected_half_width(250, rate=0.0) == pytest.approx(0.0151 / 2, abs=5e-5)
    assert statistics.expected_half_width(100, method="anytime") > statistics.expected_half_width(100, method="wilson")


def test_a_bootstrap_is_near_the_textbook_interval_and_the_same_each_time() -> None:
    import numpy as np

    values = [float(value) for value in np.random.default_rng(5).normal(-0.02, 0.1, 200)]
    low, high = statistics.paired_interval(values, 0.95, seed=1)
    reach = Z95 * statistics.standard_deviation(values) / math.sqrt(len(values))  # type: ignore[operator]
    middle = statistics.mean(values)
    assert (low, high) == pytest.approx((middle - reach, middle + reach), abs=0.1 * reach)  # type: ignore[operator]
    assert statistics.paired_interval(values, 0.95, seed=1) == (low, high)
    assert statistics.paired_interval(values, 0.95, seed=2) != (low, high)
    assert statistics.paired_interval(values, 0.99, seed=1)[0] < low


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0], [0.0, 1e-300], [1.0, 1.0 + 2**-52], [0.0] * 30 + [-1.0]])
def test_degenerate_differences_still_have_an_interval(values: list[float]) -> None:
    low, high = statistics.paired_interval(values)
    assert min(values) <= low <= high <= max(values)


def test_spread_of_equal_numbers_is_none_at_all() -> None:
    assert statistics.standard_deviation([0.1] * 9) == 0.0
    assert statistics.coefficient_of_variation([2.0, 4.0]) == pytest.approx(math.sqrt(2) / 3)
    assert statistics.coefficient_of_variation([-1.0, 1.0]) is None
    assert (statistics.mean([]), statistics.standard_deviation([1.0])) == (None, None)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: statistics.wilson(5, 4), "count: expected at most as many as there are trainings, 4, found 5"),
        (lambda: statistics.wilson(-1, 4), "count: expected a whole number, 0 or more, found -1"),
        (lambda: statistics.clopper_pearson(1.5, 4), "count: expected a whole number, 0 or more, found 1.5"),
        (lambda: statistics.wilson(1, 4, 1), "confidence: expected a number above 0 and below 1, found 1"),
        (lambda: statistics.wilson(1, 4, 95), "confidence: expected a number above 0 and below 1, found 95"),
        (lambda: statistics.wilson(1, 4, "95%"), "confidence: expected a finite number, found '95%'"),
        (lambda: statistics.proportion_interval(1, 4, 0.95, "wald"), "interval: expected wilson, clopper-pearson or "),
        (lambda: statistics.sample_size(0), "half width: expected a number above 0 and below 1, found 0"),
        (lambda: statistics.sample_size(0.05, population=0), "population: expected a whole number, 1 or more, found 0"),
        (lambda: statistics.expected_half_width(9, rate=1.1), "rate: expected a number from 0 to 1, found 1.1"),
        (lambda: statistics.paired_interval([0.1]), "differences: expected two or more, found 1"),
        (lambda: statistics.paired_interval([0.1, math.nan]), "difference: expected a finite number, found nan"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(call, line: str) -> None:
    with pytest.raises(UsageError) as raised:
        call()
    assert str(raised.value).startswith(line)


def test_without_scipy_the_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    with pytest.raises(UsageError, match=r"need scipy. pip install .*\[studies\]"):
        statistics.wilson(1, 4)
