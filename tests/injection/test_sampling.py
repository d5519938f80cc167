"""How many faults there are, and where: as many as was said, and every place as likely as it should be."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

import evergrad as eg
from evergrad.errors import UnknownTensor, UsageError
from evergrad.injection import Fault, rng
from evergrad.records import Role

SIZES = {"model/small.weight": 500, "model/large.weight": 3_500, "optimizer/state/0/exp_avg": 6_000}
TOTAL = sum(SIZES.values())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three float32 tensors of very different sizes."""
    small, large, average = (torch.linspace(-1, 1, size) for size in SIZES.values())
    state = {
        "model": {"small.weight": small, "large.weight": large.reshape(50, 70)},
        "optimizer": {"state": {0: {"exp_avg": average}}},
    }
    file = tmp_path_factory.mktemp("sampling") / "a.pt"
    torch.save(state, file)
    return file


def drawn(path: Path, fault: Fault | None = None, **settings: object) -> eg.InjectionLog:
    return eg.inject(path, fault or eg.BitFlip(), dry_run=True, **settings)


def sites(log: eg.InjectionLog) -> list[tuple[str, int]]:
    return [(hit.tensor, hit.number) for hit in log.faults()]


def deviation(counts: npt.ArrayLike, expected: npt.ArrayLike) -> float:
    """How far counts are from what they should be: χ² in units of its own spread around its mean."""
    counts, expected = np.asarray(counts, np.float64), np.asarray(expected, np.float64)
    freedom = counts.size - 1
    return float(((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


def test_every_element_is_as_likely_as_any_other(path: Path) -> None:
    seen: Counter[str] = Counter()
    inside: dict[str, list[int]] = {name: [] for name in SIZES}
    for seed in range(60):
        found = sites(drawn(path, count=500, seed=seed))
        assert len(set(found)) == 500  # without replacement
        for tensor, number in found:
            seen[tensor] += 1
            inside[tensor].append(number)
    share = [60 * 500 * size / TOTAL for size in SIZES.values()]
    assert deviation([seen[name] for name in SIZES], share) < 5
    for name, size in SIZES.items():
        bins = np.bincount(np.array(inside[name]) * 50 // size, minlength=50)
        assert abs(deviation(bins, np.full(50, len(inside[name]) / 50))) < 5


def test_by_tensor_every_tensor_is_as_likely_as_any_other(path: Path) -> None:
    log = drawn(path, count=30_000, sampling="tensor", seed=1)
    assert log.injected == 30_000
    seen = {column.tensor: column.numbers for column in log.columns}
    assert deviation([len(seen[name]) for name in SIZES], np.full(3, 10_000)) < 5
    for name, size in SIZES.items():
        assert len(np.unique(seen[name])) < len(seen[name])  # with replacement
        bins = np.bincount(seen[name] * 50 // size, minlength=50)
        assert abs(deviation(bins, np.full(50, len(seen[name]) / 50))) < 5


def test_every_bit_is_as_likely_as_any_other(path: Path) -> None:
    log = drawn(path, fraction=1.0, seed=2)
    bits = np.concatenate([np.log2(column.aim.astype(np.float64)).astype(int) for column in log.columns])
    assert abs(deviation(np.bincount(bits, minlength=32), np.full(32, TOTAL / 32))) < 5


@pytest.mark.parametrize("fault", [eg.BitFlip(), eg.StuckAt(1), eg.Scale(1.5), eg.BitFlip(elements=3)])
def test_a_later_fault_meets_what_an_earlier_one_left(fault: Fault, tmp_path: Path) -> None:
    torch.save({"x": torch.linspace(1, 2, 12), "y": torch.arange(1, 8)}, tmp_path / "a.pt")
    before = {name: tensor.numpy() for name, tensor in torch.load(tmp_path / "a.pt").items()}
    log = eg.inject(tmp_path / "a.pt", fault, count=200, sampling="tensor", seed=3, out=tmp_path / "b.pt")
    now = {name: array.view(f"u{array.itemsize}").tolist() for name, array in before.items()}
    met = Counter()
    for hit in log.faults():
        assert hit.old == now[hit.tensor][hit.number]
        met[hit.tensor, hit.number] += 1
        now[hit.tensor][hit.number] = hit.new
    assert max(met.values()) > 5
    after = torch.load(tmp_path / "b.pt")
    assert {name: tensor.numpy().view(f"u{tensor.itemsize}").tolist() for name, tensor in after.items()} == now


@pytest.mark.parametrize("sampling", ["element", "tensor"])
def test_count_is_how_many(path: Path, sampling: str) -> None:
    for count in (0, 1, 499):
        log = drawn(path, count=count, sampling=sampling)
        assert (log.attempts, log.injected, len(sites(log))) == (count, count, count)
    assert drawn(path, count=TOTAL).injected == TOTAL


@pytest.mark.parametrize(
    ("fraction", "expected"), [(0.0, 0), (0.0001, 1), (0.25, 2_500), (0.12346, 1_235), (1.0, TOTAL)]
)
def test_fraction_is_of_the_selected_elements(path: Path, fraction: float, expected: int) -> None:
    assert drawn(path, fraction=fraction).injected == expected
    assert drawn(path, fraction=fraction, sampling="tensor").injected == expected


def test_a_rate_is_fit_per_megabit_over_hours(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "_BATCH", 128)  # less to draw for counts as small as these
    expected = 1e9 * (TOTAL * 32 / 2**20) * 100 / 1e9
    counts = np.array([drawn(path, rate=1e9, hours=100, seed=seed).attempts for seed in range(150)])
    assert abs(counts.mean() - expected) < 5 * math.sqrt(expected / len(counts))
    assert abs(counts.var() - expected) < 5 * math.sqrt((expected + 2 * expected**2) / len(counts))
    assert drawn(path, rate=0.0).injected == 0
    assert drawn(path, rate=1e9, hours=0).injected == 0
    only = "model/small.weight"  # a twentieth of the bits
    few = [drawn(path, rate=1e9, hours=100, where=only, seed=seed).attempts for seed in range(100)]
    assert abs(np.mean(few) - expected / 20) < 5 * math.sqrt(expected / 20 / len(few))


def test_a_probability_alone_attempts_every_element(path: Path) -> None:
    log = drawn(path, probability=0.3, seed=4)
    assert log.attempts == TOTAL
    assert abs(log.injected - 0.3 * TOTAL) < 5 * math.sqrt(0.21 * TOTAL)
    assert len(set(sites(log))) == log.injected
    assert drawn(path, probability=1.0).injected == TOTAL
    assert drawn(path, probability=0.0).injected == 0
    by_tensor = drawn(path, probability=0.3, sampling="tensor", seed=4)
    assert by_tensor.attempts == TOTAL
    assert abs(by_tensor.injected - 0.3 * TOTAL) < 5 * math.sqrt(0.21 * TOTAL)


@pytest.mark.parametrize("sampling", ["element", "tensor"])
def test_attempts_come_about_with_the_probability(path: Path, sampling: str) -> None:
    log = drawn(path, count=5_000, probability=0.5, sampling=sampling, seed=5)
    assert log.attempts == 5_000
    assert abs(log.injected - 2_500) < 5 * math.sqrt(1_250)
    assert len(sites(log)) == log.injected
    stuck = drawn(path, eg.StuckAt(0), count=5_000, probability=0.5, sampling=sampling, seed=5)
    assert stuck.changed < stuck.injected < stuck.attempts
    assert stuck.changed == sum(hit.changed for hit in stuck.faults())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": TOTAL + 1}, r"10,001 faults in 10,000 elements.*sample by tensor"),
        ({"fraction": 0.00004}, r"fraction 4e-05 of 10,000 elements is less than half a fault"),
        ({"count": 1, "fraction": 0.1}, "count and fraction are two ways"),
        ({"count": 1, "rate": 1.0}, "count and rate are two ways"),
        ({}, "how many faults. Give count, fraction, rate or probability"),
        ({"count": -1}, "count -1: expected a whole number"),
        ({"count": 1.0}, r"count 1\.0"),
        ({"count": True}, "count True"),
        ({"count": 10**9}, "200,000,000 faults: expected at most"),
        ({"fraction": 1.5}, r"fraction 1\.5: expected a number from 0 to 1"),
        ({"fraction": math.nan}, "fraction nan"),
        ({"probability": -0.1}, r"probability -0\.1"),
        ({"rate": -1.0}, r"rate -1\.0"),
        ({"rate": math.inf}, "rate inf"),
        ({"rate": 1.0, "hours": -2}, "hours -2"),
        ({"count": 1, "seed": -1}, "seed -1: expected a whole number"),
        ({"count": 1, "seed": 2**128}, "seed 340282"),
        ({"count": 1, "seed": 1.0}, r"seed 1\.0"),
        ({"count": 1, "seed": True}, "seed True"),
        ({"count": 1, "seed": None}, "seed None"),
        ({"count": 1, "sampling": "layer"}, "sampling: expected element or tensor, found 'layer'"),
        ({"count": 1, "dtypes": []}, r"dtypes \[\]: expected one or more"),
        ({"count": 1, "where": 5}, "where 5: expected a name"),
        ({"rate": 1.0, "hours": None}, "hours None: expected a number"),
        ({"rate": True}, "rate True: expected a number"),
        ({"count": 10**400}, "more than 200,000,000 faults"),
        ({"count": 1, "dtypes": ["float33"]}, r"dtypes \['float33'\]: expected one or more of float64"),
        ({"count": 1, "dtypes": ["int64"]}, "BitFlip fits no tensor of the selection.*float32 is not int64"),
        ({"count": 1, "where": "model/fc"}, "unknown tensor 'model/fc'"),
        ({"count": 1, "where": []}, "an empty list selects no tensor"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    path: Path, tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as error:
        eg.inject(path, eg.BitFlip(), out=tmp_path / "b.pt", **settings)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("model/**", {"model/small.weight", "model/large.weight"}),
        ("model", {"model/small.weight", "model/large.weight"}),
        ("**/exp_avg", {"optimizer/state/0/exp_avg"}),
        ("role:optimizer", {"optimizer/state/0/exp_avg"}),
        (Role.MODEL, {"model/small.weight", "model/large.weight"}),
        (["model/small.weight", "optimizer/**"], {"model/small.weight", "optimizer/state/0/exp_avg"}),
        ("re:l+.w", {"model/small.weight"}),
        (re.compile("large|exp"), {"model/large.weight", "optimizer/state/0/exp_avg"}),
        (None, set(SIZES)),
    ],
)
def test_only_the_selection_is_hit_and_all_of_it(path: Path, where: object, expected: set[str]) -> None:
    log = drawn(path, fraction=1.0, where=where)
    assert {column.tensor for column in log.columns} == expected
    assert log.injected == sum(SIZES[name] for name in expected)
    told = log.settings["where"]
    assert drawn(path, count=50, where=told, seed=9).columns[0].tensor in expected
    assert sites(drawn(path, count=50, where=told, seed=9)) == sites(drawn(path, count=50, where=where, seed=9))


def test_a_misspelt_name_is_answered_with_the_right_one(path: Path) -> None:
    with pytest.raises(UnknownTensor, match=r"Did you mean 'model/small\.weight'"):
        drawn(path, count=1, where="model/smal.weight")


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A tensor of many kinds of types each."""
    state = {
        "wide": torch.ones(10),
        "half": torch.ones(10, dtype=torch.bfloat16),
        "steps": torch.ones(10, dtype=torch.int64),
        "mask": torch.ones(10, dtype=torch.bool),
        "none": torch.ones(0, 3),
        "wave": torch.ones(10, dtype=torch.complex64),
    }
    torch.save(state, tmp_path / "mixed.pt")
    return tmp_path / "mixed.pt"


@pytest.mark.parametrize(
    ("fault", "settings", "hit", "reasons"),
    [
        (eg.BitFlip(), {}, {"wide", "half", "steps", "wave"}, {"empty", "does not fit bool (8 bits)"}),
        (
            eg.BitFlip("exponent"),
            {},
            {"wide", "half", "wave"},
            {"empty", "'exponent' means floats, not int64", "'exponent' means floats, not bool"},
        ),
        (
            eg.BitFlip(20),
            {},
            {"wide", "steps", "wave"},
            {"empty", "does not fit bfloat16 (16 bits)", "does not fit bool (8 bits)"},
        ),
        (
            eg.BitFlip(),
            {"dtypes": ["float32", "int64"]},
            {"wide", "steps"},
            {"empty", *(f"{kind} is not float32 or int64" for kind in ("bfloat16", "bool", "complex64"))},
        ),
        (eg.SetValue(0.5), {"where": ["steps", "half"]}, {"half"}, {"does not fit int64 (64 bits)"}),
    ],
    ids=["any", "field", "bit", "dtypes", "value"],
)
def test_what_a_fault_does_not_fit_is_left_out_and_said_so(
    mixed: Path, fault: Fault, settings: dict[str, object], hit: set[str], reasons: set[str]
) -> None:
    log = drawn(mixed, fault, fraction=1.0, **settings)
    assert {column.tensor for column in log.columns} == hit
    assert set(log.left_out) == reasons
    names = [name for names in log.left_out.values() for name in names]
    assert not hit & set(names)
    assert len(names) + len(hit) == (2 if "where" in settings else 6)
    assert log.summary()["left_out"] == {reason: list(names) for reason, names in log.left_out.items()}


def test_a_fault_that_fits_nothing_is_refused_with_the_reasons(mixed: Path) -> None:
    before = sorted(mixed.parent.iterdir())
    with pytest.raises(UsageError, match=r"BitFlip fits no tensor.*means floats, not int64: 'steps'.*empty: 'none'"):
        eg.inject(mixed, eg.BitFlip("mantissa"), count=1, where=["steps", "none"], in_place=True)
    assert sorted(mixed.parent.iterdir()) == before


@pytest.mark.parametrize("sampling", ["element", "tensor"])
def test_a_seed_says_it_all(path: Path, sampling: str) -> None:
    def run(seed: int) -> list[str]:
        return [str(hit) for hit in drawn(path, count=100, sampling=sampling, seed=seed).faults()]

    assert run(0) == run(0)
    assert run(2**128 - 1) == run(2**128 - 1)
    assert len({tuple(run(seed)) for seed in (0, 1, 2, 2**32, 2**64, 2**128 - 1)}) == 6


def test_a_dry_run_writes_nothing(path: Path) -> None:
    before = path.read_bytes()
    log = drawn(path, count=10)
    assert log.path is None
    assert path.read_bytes() == before
    assert [child.name for child in path.parent.iterdir()] == ["a.pt"]
