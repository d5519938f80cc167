"""Schedules that are drawn, and schedules that happened elsewhere: distributions and traces."""

from __future__ import annotations

import statistics
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from evergrad.errors import EvergradError, UsageError
from evergrad.recovery.failures.schedule import Failure, Failures, Phase

# Distributions

PINNED = [
    "kill random=1 step=57 seed=3",
    "stop random=1 step=111 for=2 seed=3",
    "kill random=1 step=114 seed=3",
    "stop random=1 step=126 for=2 seed=3",
    "stop random=1 step=148 for=2 seed=3",
]


def gaps(schedule: Failures) -> list[float]:
    times = [0.0, *(one.time for one in schedule if one.time is not None)]
    assert times == sorted(times)
    return [later - sooner for sooner, later in pairwise(times)]


@pytest.mark.parametrize(
    ("drawn", "spread"),
    [
        ({"mean": 20}, 1.0),
        ({"mean": 20, "shape": 1}, 1.0),
        ({"mean": 20, "shape": 0.7}, 1.4624),
        ({"mean": 20, "shape": 3}, 0.3634),
        ({"scale": 20 / 0.8929795, "shape": 3}, 0.3634),
    ],
)
def test_waits_have_the_mean_and_the_spread_that_were_asked_for(drawn: dict[str, Any], spread: float) -> None:
    make = Failures.weibull if "shape" in drawn else Failures.exponential
    waits = gaps(make(until=25_000, unit="seconds", seed=2, **drawn))
    assert statistics.fmean(waits) == pytest.approx(20, rel=4 * spread / len(waits) ** 0.5)
    assert statistics.stdev(waits) / statistics.fmean(waits) == pytest.approx(spread, rel=0.1)


def test_a_weibull_of_shape_one_is_exponential() -> None:
    assert Failures.weibull(mean=7, shape=1, until=500, seed=4) == Failures.exponential(mean=7, until=500, seed=4)


def test_the_same_seed_draws_the_same_everywhere() -> None:
    line = "weibull mean=20 shape=0.7 until=300 kinds=kill,stop,slow seed=3"
    assert Failures.parse([line]).texts == PINNED
    assert Failures.parse([line]) == Failures.parse([line])
    assert Failures.parse([line.replace("seed=3", "seed=4")]).texts != PINNED


def test_every_kind_comes_as_often_as_its_weight_says() -> None:
    schedule = Failures.exponential(mean=1, until=1000, kinds={"kill": 3, "stop": 1}, ranks=4, seed=1)
    kinds = Counter(one.kind for one in schedule)
    assert kinds["kill"] / len(schedule) == pytest.approx(0.75, abs=0.05)
    ranks = Counter(one.rank for one in schedule)
    assert sorted(ranks) == [0, 1, 2, 3]
    assert all(count / len(schedule) == pytest.approx(0.25, abs=0.05) for count in ranks.values())


def test_what_fails_does_not_change_when_it_fails() -> None:
    schedules = [
        Failures.exponential(mean=5, until=100, seed=8, **more)
        for more in ({}, {"kinds": "kill,flip:2"}, {"ranks": 9}, {"nodes": ["a", "b"]})
    ]
    assert len({tuple(one.step for one in schedule) for schedule in schedules}) == 1
    assert len(set(schedules)) == len(schedules)


def test_drawn_failures_have_the_words_of_their_kind() -> None:
    def words(line: str) -> set[str]:
        whole = Failures.parse([f"exponential mean=1 until=60 ranks=1 seed=1 {line}"])
        return {" ".join(word for word in text.split() if "step" not in word) for text in whole.texts}

    assert words("kinds=stop,slow,cut") == {"stop rank=0 for=2", "slow rank=0 by=3 for=1", "cut rank=0 for=2"}
    assert words("kinds=stop,slow for=5 slow.for=0.5 slow.by=4") == {"stop rank=0 for=5", "slow rank=0 by=4 for=0.5"}
    assert words("kinds=stop stop.for=none") == {"stop rank=0"}
    assert words("kinds=kill,leave phase=forward kill.times=2") == {
        "kill rank=0 phase=forward times=2",
        "leave rank=0 phase=forward",
    }
    flips = Failures.parse(["exponential mean=1 until=60 seed=1 kinds=flip where=model/** flip.bits=3 count=2"])
    assert {(one.where, one.bits, one.count, one.random) for one in flips} == {("model/**", "3", 2, 1)}
    assert len({one.seed for one in flips}) == len(flips), "each hits a place of its own"


def test_a_line_stands_among_others_and_in_files(tmp_path: Path) -> None:
    line = "exponential mean=20 until=70 ranks=4 seed=5"
    drawn = list(Failures.exponential(mean=20, until=70, ranks=4, seed=5))
    one = Failure.parse("kill rank=1 step=7")
    assert list(Failures.parse([line, "kill rank=1 step=7"])) == [*drawn, one]
    (tmp_path / "failures.toml").write_text(f'failures = ["{line}", "kill rank=1 step=7"]\n')
    assert list(Failures.load(tmp_path / "failures.toml")) == [*drawn, one]
    assert Failures.from_json(Failures(drawn).to_json()) == Failures(drawn)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("exponential mean=20", "until=END is missing"),
        ("exponential until=20", "mean=M is missing"),
        ("exponential mean=0 until=9", "mean: expected a number above 0, found 0"),
        ("exponential mean=x until=9", "mean: expected a number, found 'x'"),
        ("exponential mean=nan until=9", "mean: expected a number above 0, found nan"),
        ("exponential mean=3 shape=2 until=9", "shape: expected weibull with it, found exponential"),
        ("weibull mean=3 until=9", "shape: expected a number from 0.1 to 100, found none"),
        ("weibull mean=3 shape=0.01 until=9", "shape: expected a number from 0.1 to 100, found 0.01"),
        ("weibull shape=2 until=9", "expected exactly one of mean=M and scale=L, found none"),
        ("weibull mean=2 scale=2 shape=2 until=9", "mean=M and scale=L, found both"),
        ("exponential mean=2 until=9 unit=days", "unit: expected steps or seconds, found 'days'"),
        ("exponential mean=2 until=9 kinds=kil", "found 'kil'. Did you mean 'kill'?"),
        ("exponential mean=2 until=9 kinds=kill,kill", "kinds: kill is given twice"),
        ("exponential mean=2 until=9 kinds=kill:0", "the weight of kill: expected a number above 0, found 0"),
        ("exponential mean=2 until=9 ranks=0", "ranks: expected a whole number, 1 or more, found 0"),
        ("exponential mean=2 until=9 ranks=2 nodes=2", "expected at most one of ranks and nodes, found both"),
        ("exponential mean=2 until=9 nodes=a,b/c", "node: expected an index such as 1 or a name"),
        ("exponential mean=2 until=9 seed=-1", "seed: expected a whole number, 0 or more, found -1"),
        ("exponential mean=2 until=9 rank=1", "unknown word 'rank': expected one of mean,"),
        ("exponential mean=2 until=9 untill=1", "Did you mean 'until'?"),
        ("exponential mean=2 until=9 slow.by=2", "KIND.word of a kind that is drawn"),
        ("exponential mean=2 until=9 by=2", "by: expected slow among kinds with it"),
        ("exponential mean=2 until=90 kinds=slow by=0.5", "by: expected a number above 1, found 0.5"),
        ("exponential mean=0.001 until=9000", "more than 10,000 failures before until=9000: expected a longer mean"),
    ],
)
def test_a_wrong_line_is_named_in_one_line(line: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        Failures.parse([line])
    message = str(caught.value)
    assert says in message
    assert message.startswith(f"failure {line!r}: ")
    assert Failures.parse([message.rpartition("Example: ")[2]])


def test_wrong_arguments_are_one_line_too() -> None:
    with pytest.raises(UsageError, match=r"exponential: mean: expected a number above 0, found '3'"):
        Failures.exponential(mean="3", until=9)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"weibull: kinds: expected one or more, found none"):
        Failures.weibull(mean=3, shape=1, until=9, kinds=())


# Traces


def trace(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_a_trace_is_what_happened_elsewhere(tmp_path: Path) -> None:
    path = trace(tmp_path, "time,node,kind,for,phase\n12.5,0,kill,,\n80,gpu7,stop,6,forward\n\n80,n1,cut,3,\n")
    expected = Failures.parse(["kill node=0 time=12.5", "stop node=gpu7 time=80 for=6 phase=forward"])
    expected = expected.cut(node=1, time=80, for_s=3)
    assert Failures.trace(path) == expected
    assert Failures.load(path) == expected, "known by its ending"
    faster = Failures.trace(path, speed=4)
    assert [one.time for one in faster] == [3.125, 20, 20]
    assert [one.for_s for one in faster] == [None, 1.5, 0.75]
    assert faster[1].phase is Phase.FORWARD


def test_further_columns_are_further_words(tmp_path: Path) -> None:
    path = trace(tmp_path, "Time, kind ,rank,bits,by\n1,flip,2,exponent,\n2,slow,0,,3\n")
    assert Failures.trace(path) == Failures.parse(["flip rank=2 time=1 bits=exponent", "slow rank=0 time=2 by=3"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected the header time,node,kind, found nothing"),
        ("1,n0,kill\n", "row 1: unknown column '1': expected time,node,kind and more words."),
        ("time,nod,kind\n", "row 1: unknown column 'nod'"),
        ("time,kind\n1,kill\n", "row 1: expected the header time,node,kind, found 'time,kind'"),
        ("time,node,kind,time\n", "row 1: column time is there twice"),
        ("time,node,kind\n1,n0,kill\n2,n0\n", "row 3: expected 3 cells, found 2"),
        ("time,node,kind\n1,n0,kill\nx,n0,kill\n", "row 3: time: expected a number of seconds, 0 or more, found 'x'"),
        ("time,node,kind\n,n0,kill\n", "row 2: time is missing"),
        ("time,node,kind\n1,,kill\n", "row 2: expected exactly one of rank=R, node=N and random=K, found none"),
        ("time,node,kind\n1,n0,kil\n", "row 2: kind: expected kill, exception, stop, slow, cut, leave or flip, found"),
        ("time,node,kind\n1,n0,slow\n", "row 2: slow: expected by=F"),
        ("time,node,kind,for\n1,n0,kill,3\n", "row 2: for=3: expected stop or slow or cut with it, found kill"),
        ('time,node,kind\n1,"n0,kill\n', "is no CSV"),
    ],
)
def test_a_wrong_trace_is_named_by_its_row(tmp_path: Path, text: str, says: str) -> None:
    path = trace(tmp_path, text)
    with pytest.raises(EvergradError) as caught:
        Failures.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert says in str(caught.value)


def test_a_wrong_speed_and_a_missing_trace_are_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="speed: expected a number above 0, found 0"):
        Failures.trace(trace(tmp_path, "time,node,kind\n"), speed=0)
    with pytest.raises(EvergradError, match=r"none\.csv: cannot be read: no such file"):
        Failures.trace(tmp_path / "none.csv")
