"""Draws are the same everywhere and for ever, and every outcome is as likely as it should be."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import evergrad as eg
from evergrad.injection import Fault, rng
from evergrad.injection.rng import Draws

BIG = 2**64 + 5

_32, _64, _128 = 2**32 - 1, 2**64 - 1, 2**128 - 1


class Scripted(Draws):
    """Draws from outputs that the test has chosen."""

    def __init__(self, *outputs: int) -> None:
        self.left = list(outputs)

    def raw(self, count: int) -> npt.NDArray[np.uint64]:
        assert count <= len(self.left), "more outputs are asked for than there are"
        taken, self.left = self.left[:count], self.left[count:]
        return np.array(taken, np.uint64)


def seeded_words(seed: int, count: int) -> list[int]:
    """The 32-bit words that NumPy's SeedSequence makes of a seed: a pool of four, every word mixed with every other."""
    words = [seed >> shift & _32 for shift in range(0, max(seed.bit_length(), 1), 32)]
    multiplier = 0x43B0D7E5

    def hashed(value: int) -> int:
        nonlocal multiplier
        value ^= multiplier
        multiplier = multiplier * 0x931E8875 & _32
        value = value * multiplier & _32
        return value ^ value >> 16

    def mixed(x: int, y: int) -> int:
        value = (0xCA01F9DD * x - 0x4973F715 * y) & _32
        return value ^ value >> 16

    pool = [hashed(words[n] if n < len(words) else 0) for n in range(4)]
    for source in range(4):
        for target in range(4):
            if source != target:
                pool[target] = mixed(pool[target], hashed(pool[source]))
    for word in words[4:]:
        pool = [mixed(old, hashed(word)) for old in pool]

    found, multiplier = [], 0x8B51F9DD
    for value in islice(cycle(pool), count):
        value ^= multiplier
        multiplier = multiplier * 0x58F38DED & _32
        value = value * multiplier & _32
        found.append(value ^ value >> 16)
    return found


def pcg64(seed: int) -> Iterator[int]:
    """PCG64: a linear congruential generator of 128 bits; its halves XORed and rotated are the output."""
    words = seeded_words(seed, 8)
    start_high, start_low, step_high, step_low = (words[n] | words[n + 1] << 32 for n in range(0, 8, 2))
    increment = ((step_high << 64 | step_low) << 1 | 1) & _128

    def after(state: int) -> int:
        return (state * 0x2360ED051FC65DA44385DF649FCCF645 + increment) & _128

    state = after((after(0) + (start_high << 64 | start_low)) & _128)
    while True:
        state = after(state)
        value, turn = (state >> 64) ^ (state & _64), state >> 122
        yield (value >> turn | value << (64 - turn)) & _64


def deviation(counts: npt.ArrayLike, expected: npt.ArrayLike) -> float:
    """How far counts are from what they should be: χ² in units of its own spread around its mean."""
    counts, expected = np.asarray(counts, np.float64), np.asarray(expected, np.float64)
    freedom = counts.size - 1
    square = float(((counts - expected) ** 2 / expected).sum())
    return (square - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("seed", [0, 7, BIG, 2**32, 2**128 - 1])
def test_the_stream_is_pcg64_as_it_is_published(seed: int) -> None:
    assert Draws(seed).raw(500).tolist() == list(islice(pcg64(seed), 500))


def test_the_stream_goes_on_where_it_was_left() -> None:
    draws = Draws(7)
    assert [*draws.raw(3).tolist(), *draws.raw(0).tolist(), *draws.raw(5).tolist()] == Draws(7).raw(8).tolist()


def test_draws_below_a_bound_are_these() -> None:
    assert Draws(7).below(10, 12).tolist() == [3, 5, 6, 4, 1, 2, 8, 5, 2, 3, 6, 5]
    assert Draws(0).below(1000, 8).tolist() == [271, 617, 24, 533, 971, 894, 207, 557]
    wide = [4476252152785143628, 2601247799974500128, 3416539963871360696, 2963746235918576130]
    assert Draws(BIG).below(2**62 + 1, 4).tolist() == wide
    bounds = np.array([1, 2, 3, 100, 10**6, 2**40, 2**62])
    assert Draws(7).below(bounds).tolist() == [0, 1, 2, 14, 560901, 924642322228, 97127725791292528]


def test_subsets_are_these() -> None:
    assert Draws(0).subset(100, 8).tolist() == [7, 17, 24, 33, 57, 63, 71, 94]
    assert Draws(7).subset(12, 9).tolist() == [0, 1, 4, 6, 7, 8, 9, 10, 11]
    far = [726136506, 189639919438, 220834274975, 254345964035, 818401888033]
    assert Draws(BIG).subset(10**12, 5).tolist() == far


def test_hits_are_these() -> None:
    assert Draws(0).hits(1000, 0.01).tolist() == [44, 175, 493, 902, 923, 933, 983]
    assert Draws(7).hits(30, 0.3).tolist() == [1, 2, 3, 8, 12, 13, 28, 29]
    far = [59503896179, 247306316936, 322912007980, 500907501759, 507950586454, 543954735449, 715006457003]
    assert Draws(BIG).hits(10**12, 5e-12).tolist() == far


@pytest.mark.parametrize(
    ("seed", "expected"), [(0, [1, 2, 108, 99935]), (7, [1, 4, 96, 100222]), (BIG, [1, 6, 102, 99854])]
)
def test_poisson_counts_are_these(seed: int, expected: list[int]) -> None:
    assert [Draws(seed).poisson(mean) for mean in (0.5, 3, 100, 100_000)] == expected


def test_chances_and_others_are_these() -> None:
    assert np.flatnonzero(Draws(0).chance(0.5, 16)).tolist() == [1, 2, 3, 11, 13, 15]
    assert np.flatnonzero(Draws(7).chance(0.1, 24)).tolist() == [6, 23]
    assert Draws(0).others(10, np.array([1, 4, 5]), 4).tolist() == [7, 3, 0, 2]
    assert Draws(7).others(6, np.array([0, 2]), 4).tolist() == [3, 5, 1, 4]


def test_outputs_that_would_favour_small_numbers_are_skipped() -> None:
    # 2**64 is 6 more than a multiple of 10.
    draws = Scripted(2**64 - 1, 17, 2**64 - 6, 2**64 - 4, 2**64 - 7, 25)
    assert draws.below(10, 3).tolist() == [5, 7, 9]
    assert draws.left == []


def test_nothing_is_skipped_where_the_bound_divides_the_range() -> None:
    draws = Scripted(2**64 - 1, 2**64 - 1, 2**64 - 1)
    assert draws.below(np.array([2**62, 1, 8])).tolist() == [2**62 - 1, 0, 7]


def test_each_bound_skips_outputs_of_its_own() -> None:
    top = 2**64 - 1
    # The last output is too much for 3 and for 10, not for 16; the third last is too much for 10 alone.
    draws = Scripted(top, top, top, 4, top - 2, 25)
    assert draws.below(np.array([3, 16, 10])).tolist() == [1, 15, 5]


@pytest.mark.parametrize("bound", [2, 3, 7, 100, 1000])
def test_draws_below_a_bound_are_all_alike(bound: int) -> None:
    found = Draws(bound).below(bound, 200_000)
    assert 0 <= found.min() <= found.max() < bound
    assert abs(deviation(np.bincount(found, minlength=bound), np.full(bound, 200_000 / bound))) < 5


def test_draws_with_a_bound_each_are_all_alike() -> None:
    bounds = np.tile(np.arange(1, 21), 20_000)
    found = Draws(3).below(bounds)
    assert (found < bounds).all()
    for bound in range(2, 21):
        counts = np.bincount(found[bounds == bound], minlength=bound)
        assert abs(deviation(counts, np.full(bound, 20_000 / bound))) < 5


@pytest.mark.parametrize(
    ("population", "count"),
    [(1, 0), (1, 1), (10, 0), (10, 1), (10, 5), (10, 6), (10, 9), (10, 10), (5000, 2500), (5000, 2501), (10**15, 100)],
)
def test_a_subset_is_ascending_distinct_and_complete(population: int, count: int) -> None:
    for seed in range(20):
        found = Draws(seed).subset(population, count)
        assert found.dtype == np.int64
        assert len(found) == count
        assert (np.diff(found) > 0).all()
        assert count == 0 or (found[0] >= 0 and found[-1] < population)


@pytest.mark.parametrize(("population", "count"), [(6, 2), (6, 3), (6, 4), (5, 1)])
def test_every_subset_is_equally_likely(population: int, count: int) -> None:
    draws, trials, sets = Draws(11), 3_000, math.comb(population, count)
    seen = Counter(tuple(draws.subset(population, count).tolist()) for _ in range(trials))
    assert len(seen) == sets
    assert abs(deviation(list(seen.values()), np.full(sets, trials / sets))) < 5


def test_others_are_what_is_left_and_all_alike() -> None:
    draws, taken, seen = Draws(5), np.array([0, 3, 4, 9]), Counter[int]()
    assert sorted(draws.others(10, taken, 6).tolist()) == [1, 2, 5, 6, 7, 8]
    assert draws.others(10, taken, 0).tolist() == []
    assert sorted(draws.others(3, np.empty(0, np.int64), 3).tolist()) == [0, 1, 2]
    for _ in range(3_000):
        found = draws.others(10, taken, 2).tolist()
        assert len(set(found)) == 2
        seen.update(found[:1])
    assert sorted(seen) == [1, 2, 5, 6, 7, 8]
    assert abs(deviation(list(seen.values()), np.full(6, 500))) < 5


@pytest.mark.parametrize("mean", [0.0, 0.05, 1.0, 7.5, 300.0])
def test_poisson_counts_have_their_mean_and_their_variance(mean: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "_BATCH", 64)  # many small batches: less to draw, and the seams are tried too
    draws, trials = Draws(1), 2_000 if mean < 100 else 500
    counts = np.array([draws.poisson(mean) for _ in range(trials)])
    assert abs(counts.mean() - mean) <= 5 * math.sqrt(mean / trials)
    assert abs(counts.var() - mean) <= 5 * math.sqrt((mean + 2 * mean**2) / trials)


@pytest.mark.parametrize("probability", [1e-9, 0.001, 0.3, 0.5, 0.75, 0.99, 0.999])
def test_each_of_a_population_is_hit_with_the_probability(probability: float) -> None:
    population = int(min(1_000_000, 1000 / probability)) if probability > 1e-6 else 10**12
    found = Draws(2).hits(population, probability)
    expected = population * probability
    assert abs(len(found) - expected) < 5 * math.sqrt(expected * (1 - probability))
    assert (np.diff(found) > 0).all()
    assert found[0] >= 0
    assert found[-1] < population
    bins = np.bincount(found * 20 // population, minlength=20)
    assert deviation(bins, np.full(20, len(found) / 20)) < 5
    neighbours = int((np.diff(found) == 1).sum())  # one hit says nothing of the next
    assert abs(neighbours - expected * probability) < 5 * math.sqrt(expected * probability) + 1


def test_how_many_are_drawn_at_a_time_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    hits, count = Draws(6).hits(5_000, 0.3), Draws(6).poisson(1_000)
    monkeypatch.setattr(rng, "_BATCH", 17)
    assert Draws(6).hits(5_000, 0.3).tolist() == hits.tolist()
    assert Draws(6).poisson(1_000) == count


def test_hits_at_the_ends_of_probability_are_certain() -> None:
    assert Draws(0).hits(5, 0.0).tolist() == []
    assert Draws(0).hits(5, 1.0).tolist() == [0, 1, 2, 3, 4]
    assert Draws(0).hits(0, 0.5).tolist() == []
    assert not Draws(0).chance(0.0, 1000).any()
    assert Draws(0).chance(1.0, 1000).all()


@pytest.mark.parametrize("probability", [0.01, 0.5, 0.999])
def test_something_happens_as_often_as_its_probability_says(probability: float) -> None:
    count = 200_000
    happened = int(Draws(4).chance(probability, count).sum())
    assert abs(happened - count * probability) < 5 * math.sqrt(count * probability * (1 - probability))


def test_the_logarithm_is_the_logarithm() -> None:
    points = np.concatenate(
        [
            Draws(0)._unit(50_000),
            2.0 ** -np.arange(54.0),
            1 - 2.0 ** -np.arange(1, 54.0),
            np.linspace(0.7, 0.72, 2_001),  # about √½, where the series changes sides
        ]
    )
    expected = np.array([math.log(point) for point in points])
    found = rng._ln(points)
    assert (np.abs(found - expected) <= 1e-15 * np.abs(expected)).all()


def small_tensors() -> dict[str, npt.NDArray[np.generic]]:
    numbers = np.arange(24)
    return {
        "weight": ((numbers[:20] * 37 % 101 - 50) / 16).astype(np.float32).reshape(4, 5),
        "scale": (numbers[:6] / 8 - 0.25).astype(np.float16),
        "steps": (numbers[:3] * 1000).astype(np.int64),
    }


def as_safetensors(folder: Path) -> Path:
    header, data = {}, b""
    for (name, array), kind in zip(small_tensors().items(), ("F32", "F16", "I64"), strict=True):
        place = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": place}
        data += array.tobytes()
    text = json.dumps(header).encode()
    path = folder / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def as_npz(folder: Path) -> Path:
    np.savez(folder / "a.npz", **small_tensors())
    return folder / "a.npz"


@pytest.mark.parametrize("write", [as_safetensors, as_npz])
def test_a_seed_hits_these_bits_in_every_format(write: Callable[[Path], Path], tmp_path: Path) -> None:
    path = write(tmp_path)

    def hits(fault: Fault, **settings: object) -> list[tuple[str, int, int, int]]:
        log = eg.inject(path, fault, dry_run=True, **settings)
        return [(hit.tensor, hit.index, hit.old, hit.new) for hit in log.faults()]

    assert hits(eg.BitFlip(), count=6, seed=7) == [
        ("weight", 0, 0xC0480000, 0xC0488000),
        ("weight", 6, 0xBFF00000, 0xBFF00004),
        ("weight", 9, 0xBFA00000, 0xBFA00002),
        ("weight", 13, 0x3FD80000, 0x7FD80000),
        ("scale", 1, 0xB000, 0xB080),
        ("scale", 5, 0x3600, 0x3200),
    ]
    assert hits(eg.BitFlip("exponent", burst=2), count=5, sampling="tensor", seed=0) == [
        ("weight", 17, 0xBFD80000, 0xB3D80000),
        ("scale", 4, 0x3400, 0x5400),
        ("scale", 3, 0x3000, 0x5000),
        ("scale", 3, 0x5000, 0x5C00),
        ("scale", 1, 0xB000, 0x8000),
    ]
    assert hits(eg.StuckAt(1), probability=0.2, seed=BIG) == [
        ("weight", 1, 0xBF500000, 0xBF500020),
        ("weight", 6, 0xBFF00000, 0xBFF00020),
        ("weight", 8, 0x40300000, 0x40300040),
        ("weight", 12, 0xBF200000, 0xBF200008),
        ("weight", 13, 0x3FD80000, 0x3FD84000),
        ("weight", 14, 0xC0140000, 0xC4140000),
        ("weight", 18, 0x3F200000, 0x3F200010),
        ("steps", 2, 2000, 2000 + 2**44),
    ]
