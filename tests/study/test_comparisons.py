"""Tests between cells: reference values, families, neighbours."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest

from evergrad.errors import UsageError
from evergrad.study.comparisons import (
    DIFFERS,
    NOT_TOLD_APART,
    benjamini_hochberg,
    cochran_armitage,
    compare_cells,
    fisher,
    holm,
    newcombe,
    trend,
)
from evergrad.study.results import Cell, Results
from evergrad.study.trials import Outcome


def _cell(nev: int, changed: int = 0, *, n: int = 50, unknown: int = 0, **axes: str | int) -> Cell:
    counts = dict.fromkeys(Outcome, 0)
    counts |= {Outcome.NEV: nev, Outcome.CHANGED: changed, Outcome.IDENTICAL: n - nev - changed}
    counts[Outcome.UNKNOWN] = unknown
    return Cell(axes=axes, due=n + unknown, counts=counts, golden=0.9, golden_start=0.8)


def _results(*cells: Cell, axes: tuple[str, ...]) -> Results:
    return Results(study="toy", title="Toy", source="", scale="tiny", trials=99, cells=cells, axes=axes)


def test_corrections_have_their_textbook_values() -> None:
    # Benjamini and Hochberg 1995, their own example of fifteen; Holm's by its definition.
    ps = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262, 0.5719, 0.6528]
    ps += [0.7590, 1.0]
    by_bh, by_holm = benjamini_hochberg(ps), holm(ps)
    assert sum(p <= 0.05 for p in by_bh) == 4
    assert sum(p <= 0.05 for p in by_holm) == 3
    assert by_bh[:4] == pytest.approx([0.0015, 0.0030, 0.0095, 0.035625])
    assert by_holm[:4] == pytest.approx([0.0015, 0.0056, 0.0247, 0.1140])
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert (holm([]), benjamini_hochberg([])) == ([], [])


def test_corrections_keep_the_order_of_the_question() -> None:
    ps = [0.2, 0.001, 0.04, 0.04]
    for order in itertools.permutations(range(4)):
        assert holm([ps[at] for at in order]) == [holm(ps)[at] for at in order]


def test_newcombe_has_his_published_values() -> None:
    # Newcombe 1998, Statistics in Medicine 17:873, table II, method 10.
    assert newcombe((48, 80), (56, 70)) == pytest.approx((0.0524, 0.3339), abs=6e-5)
    assert newcombe((3, 10), (9, 10)) == pytest.approx((0.1705, 0.8090), abs=6e-5)
    assert newcombe((0, 20), (0, 10)) == pytest.approx((-0.1611, 0.2775), abs=6e-5)
    assert newcombe((0, 10), (10, 10)) == pytest.approx((0.6075, 1.0), abs=6e-5)
    assert newcombe((0, 0), (1, 2)) == (-1.0, 1.0)


def test_fisher_sums_the_tables_that_are_no_likelier() -> None:
    first, second = (2, 12), (9, 13)
    hits, total = 11, 25

    def chance(k: int) -> float:
        return math.comb(12, k) * math.comb(13, hits - k) / math.comb(total, hits)

    ways = [chance(k) for k in range(12)]
    assert fisher(first, second) == pytest.approx(sum(way for way in ways if way <= ways[2] * (1 + 1e-9)))
    assert fisher((0, 40), (0, 40)) == 1.0


def test_a_trend_has_its_reference_values_and_a_direction() -> None:
    # Fleiss 1981, p. 139; R's prop.trend.test says X-squared = 8.2249, p = 0.004132.
    smokers = [(83, 86), (90, 93), (129, 136), (70, 82)]
    z, p = cochran_armitage(smokers)
    assert z < 0
    assert (z * z, p) == (pytest.approx(8.2249, abs=5e-5), pytest.approx(0.004132, abs=5e-7))
    assert cochran_armitage(smokers[::-1])[0] == pytest.approx(-z)
    # With the same total in each, it is the correlation of places and outcomes: N r² = z².
    counts = [(2, 20), (5, 20), (11, 20)]
    places = np.repeat([0, 1, 2], 20)
    outcomes = np.concatenate([np.arange(20) < k for k, _ in counts])
    r = np.corrcoef(places, outcomes)[0, 1]
    assert cochran_armitage(counts)[0] ** 2 == pytest.approx(60 * r * r)


@pytest.mark.parametrize("counts", [[(0, 9), (0, 9)], [(9, 9), (9, 9)], [(1, 9)], [(1, 9), (0, 0)], []])
def test_where_nothing_varies_there_is_no_trend(counts: list[tuple[int, int]]) -> None:
    assert cochran_armitage(counts) == (0.0, 1.0)


def test_only_neighbours_that_are_alike_in_all_else_are_compared() -> None:
    grid = [_cell(0, model=model, flips=flips) for model in ("a", "b", "c") for flips in (100, 1, 10)]
    found = compare_cells(_results(*grid, axes=("model", "flips")), measures=("nev",))
    along = [(one.first, one.second, one.others) for one in found if one.axis == "flips"]
    assert along == [pair for model in "abc" for pair in ((100, 1, {"model": model}), (1, 10, {"model": model}))]
    assert [one.axis for one in found].count("model") == 6
    only = compare_cells(_results(*grid, axes=("model", "flips")), axis="model")
    assert {(one.first, one.second) for one in only} == {("a", "b"), ("b", "c")}
    assert [one.measure for one in only].count("rwc") == 6


def test_a_cell_of_which_nothing_is_known_is_passed_over() -> None:
    cells = [_cell(0, flips=1), _cell(0, n=0, unknown=4, flips=10), _cell(50, flips=100)]
    (one,) = compare_cells(_results(*cells, axes=("flips",)), measures=("nev",))
    assert (one.first, one.second, one.rates, one.difference) == (1, 100, (0.0, 1.0), 1.0)


def test_sensitive_and_immune_cells_are_told_apart_and_like_ones_are_not() -> None:
    cells = [_cell(1, flips=1), _cell(2, flips=10), _cell(48, flips=100)]
    first, second = compare_cells(_results(*cells, axes=("flips",)), measures=("nev",))
    assert (first.verdict, second.verdict) == (NOT_TOLD_APART, DIFFERS)
    assert first.interval[0] < 0 < first.interval[1]
    assert 0.7 < second.interval[0] < second.difference == pytest.approx(0.92)
    assert second.p_holm == pytest.approx(2 * second.p)
    # Any change counts as a result with change.
    cells = [_cell(0, 3, flips=1), _cell(0, 40, flips=10)]
    by_measure = {one.measure: one for one in compare_cells(_results(*cells, axes=("flips",)))}
    assert by_measure["rwc"].verdict == DIFFERS
    assert by_measure["rwc"].second_counts == (40, 50)
    assert by_measure["nev"].verdict == NOT_TOLD_APART


def test_many_tests_of_nothing_rarely_find_something() -> None:
    # Tables of twenty cells of one rate. Of many more, Holm marks some cell in 2.4 %, and without him 40 % have one.
    tested = functools.cache(lambda k, other: fisher((k, 50), (other, 50)))
    generator = np.random.default_rng(3)
    tables, marked, uncorrected = 600, 0, 0
    for counts in generator.binomial(50, 0.3, (tables, 20)).tolist():
        ps = [tested(*sorted(pair)) for pair in itertools.pairwise(counts)]
        marked += min(holm(ps)) <= 0.05
        uncorrected += min(ps) <= 0.05
    assert marked / tables <= 0.05
    assert uncorrected / tables > 0.25, "this check can fail: without a correction it does"


def test_a_trend_along_an_axis_is_told_for_each_of_the_others() -> None:
    cells = [_cell(nev, model="a", flips=flips) for flips, nev in ((1, 0), (10, 9), (100, 30))]
    cells += [_cell(nev, model="b", flips=flips) for flips, nev in ((1, 5), (10, 4), (100, 6))]
    rising, flat = trend(_results(*cells, axes=("model", "flips")), "flips")
    assert (rising.verdict, rising.never_falls, rising.others) == ("rises", True, {"model": "a"})
    assert (flat.verdict, flat.never_falls) == ("no trend told", False)
    falls = [_cell(nev, flips=flips) for flips, nev in ((1, 30), (10, 9), (100, 0))]
    (falling,) = trend(_results(*falls, axes=("flips",)), "flips")
    assert falling.verdict == "falls"


def test_a_trend_goes_by_the_numbers_of_an_axis_and_not_by_the_plans_order() -> None:
    cells = [_cell(nev, flips=flips) for flips, nev in ((1000, 45), (1, 0), (100, 30), (10, 9))]
    (found,) = trend(_results(*cells, axes=("flips",)), "flips")
    assert (found.places, found.verdict, found.never_falls) == ((1, 10, 100, 1000), "rises", True)
    named = [_cell(nev, layer=layer) for layer, nev in (("last", 0), ("first", 9), ("middle", 30))]
    (by_plan,) = trend(_results(*named, axes=("layer",)), "layer")
    assert (by_plan.places, by_plan.verdict) == (("last", "first", "middle"), "rises")


def test_an_unknown_axis_or_measure_names_the_known() -> None:
    results = _results(_cell(0, flips=1), axes=("flips",))
    with pytest.raises(UsageError, match="axis: expected one of the study's, flips, found 'flip'"):
        trend(results, "flip")
    with pytest.raises(UsageError, match="measure: expected nev or rwc, found 'acc'"):
        compare_cells(_results(_cell(0, flips=1), _cell(0, flips=2), axes=("flips",)), measures=("acc",))
