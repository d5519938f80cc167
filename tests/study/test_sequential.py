"""Intervals that hold at every look: by simulation, beside one that does not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from evergrad.errors import UsageError
from evergrad.study.statistics import anytime_interval, is_precise_enough, sample_size, stopping_time, wilson

LOOKS = 300
SEQUENCES = 400


def _accepted(interval, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """After each number of trainings, the least and the largest count whose interval holds the rate."""
    least, most = [], []
    low = high = 0
    for n in range(1, LOOKS + 1):
        # With one training more, either end moves up by one or stays.
        while low < n and interval(low, n)[1] < rate:
            low += 1
        high = max(high, low)
        while high < n and interval(high + 1, n)[0] <= rate:
            high += 1
        least.append(low)
        most.append(high)
    return np.array(least), np.array(most)


def _ever_wrong(interval, rate: float) -> float:
    """The part of sequences in which some look excludes the truth."""
    draws = np.random.default_rng(11).random((SEQUENCES, LOOKS)) < rate
    counts = draws.cumsum(axis=1)
    least, most = _accepted(interval, rate)
    return float(((counts < least) | (counts > most)).any(axis=1).mean())


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.5])
def test_the_truth_stays_inside_at_every_look_and_a_fixed_interval_loses_it(rate: float) -> None:
    assert _ever_wrong(anytime_interval, rate) <= 0.05
    assert _ever_wrong(wilson, rate) > 0.10, "this check can fail: looking again and again breaks Wilson's"


def test_the_rate_seen_is_always_inside_and_bounds_are_where_the_ratio_crosses() -> None:
    for n in (1, 2, 7, 50):
        for k in range(n + 1):
            low, high = anytime_interval(k, n, 0.9)
            assert low <= k / n <= high
            for bound in {low, high} - {0.0, 1.0}:
                # The ratio by its definition, with gammas in place of the library's beta function.
                mixed = math.gamma(k + 0.5) * math.gamma(n - k + 0.5) / math.gamma(n + 1) / math.pi
                assert mixed / (bound**k * (1 - bound) ** (n - k)) == pytest.approx(10, rel=1e-6)


def test_extreme_counts_have_bounds_too() -> None:
    assert anytime_interval(0, 0) == (0.0, 1.0)
    low, high = anytime_interval(1, 10**9)
    assert 0 < low < 1e-9 < high < 1e-7
    low, high = anytime_interval(10**9 - 1, 10**9)
    assert 1 - 1e-7 < low < 1 - 1e-9 < high <= 1


def test_looking_costs_width() -> None:
    for k in (0, 10, 50):
        (low, high), (anytime_low, anytime_high) = wilson(k, 100), anytime_interval(k, 100)
        assert anytime_low <= low
        assert high < anytime_high


def test_a_study_knows_enough_when_its_widest_cell_does() -> None:
    time = stopping_time(0.0, 0.1)
    assert is_precise_enough([(0, time), (time, time)], 0.1)
    assert not is_precise_enough([(0, time), (0, time - 1)], 0.1)
    assert not is_precise_enough([(0, time), (time // 2, time)], 0.1), "a rate in the middle takes longer"


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
def test_the_time_to_expect_is_the_first_that_is_narrow_enough(rate: float) -> None:
    time = stopping_time(rate, 0.1)
    if rate in (0.0, 0.5, 1.0):
        even = time + time % 2
        assert is_precise_enough([(round(rate * even), even)], 0.1)
        assert not is_precise_enough([(round(rate * (even - 2)), even - 2)], 0.1)
    assert time <= stopping_time(0.5, 0.1)
    assert time < stopping_time(rate, 0.05)


def test_stopping_by_looks_takes_more_than_a_planned_size_but_not_absurdly() -> None:
    assert sample_size(0.05) < stopping_time(0.5, 0.05) < 4 * sample_size(0.05)
    assert stopping_time(1e-9, 0.05) == stopping_time(0.0, 0.05)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: anytime_interval(3, 2), "count: expected at most"),
        (lambda: anytime_interval(1, 2, 0), "confidence: expected a number above 0"),
        (lambda: is_precise_enough([(1, 2)], 0.0), "half width: expected a number above 0"),
        (lambda: stopping_time(2, 0.05), "rate: expected a number from 0 to 1, found 2"),
        (lambda: stopping_time(0.5, 1e-12), "half width: expected one that trainings can reach"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(call, line: str) -> None:
    with pytest.raises(UsageError) as raised:
        call()
    assert str(raised.value).startswith(line)
