"""Trials of data-parallel trainings: real ranks of DDP, some of them hit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evergrad.errors import EvergradError
from evergrad.study.golden import golden_folder, read_golden
from evergrad.study.rank_group import cached_group, end_cached_groups
from evergrad.study.tasks import draw_faulty_ranks, perform, rank_seed
from evergrad.study.trials import Observation, Outcome, Trial, TrialEnd, golden_work, judge, replay_work, trial_work
from evergrad.training.settings import Training

MakeTrial = Callable[..., Trial]


@pytest.fixture
def ranked(first_trial: MakeTrial) -> Iterator[MakeTrial]:
    """Trials of a toy on three ranks; the group is ended behind them."""

    def make(name: str = "small", repetition: int = 0, *, corrupt: int = 1, flips: int = 1, **given: Any) -> Trial:
        trial = first_trial(name, repetition, **given)
        assert isinstance(trial.training, Training)
        training = replace(trial.training, mechanism="ddp", ranks=3, batch_size=48)
        return replace(trial, training=training, ranks=corrupt, flips=flips)

    yield make
    end_cached_groups()


def run(folder: Path, trial: Trial) -> Observation:
    return Observation.from_json(perform(folder, trial_work(trial)))


def make_golden(folder: Path, trial: Trial) -> Observation:
    perform(folder, golden_work(trial, [trial]))
    golden = read_golden(folder, trial.training.key)
    assert golden is not None
    return golden.observation


def test_trials_of_ranks_repeat_to_the_last_bit_in_this_group_and_in_another(ranked: MakeTrial, tmp_path: Path) -> None:
    trial = ranked(fault="bitflip:bits=mantissa")
    golden = make_golden(tmp_path, trial)
    first, second = run(tmp_path, trial), run(tmp_path, trial)
    group = cached_group(3, "cpu")
    group.end()
    third = run(tmp_path, trial)
    assert {one.digest for one in (first, second, third)} == {first.digest}
    assert first.end is TrialEnd.FINISHED
    assert (first.injected, first.steps) == (1, 2)
    assert judge(first, golden) in (Outcome.CHANGED, Outcome.IDENTICAL, Outcome.DEGRADED)
    assert sorted(path.name for path in golden_folder(tmp_path, trial.training.key).iterdir()) == [
        "checkpoint.pt",
        "golden.json",
    ]


def test_as_many_ranks_are_hit_as_the_plan_says_each_with_faults_of_its_own(ranked: MakeTrial, tmp_path: Path) -> None:
    trial = ranked(corrupt=2, flips=3, fault="bitflip:bits=0")
    make_golden(tmp_path, trial)
    told = perform(tmp_path, replay_work(trial))
    hits: Any = told["hits"]
    by_rank = {rank: [(hit["tensor"], hit["index"]) for hit in hits if hit["rank"] == rank] for rank in range(3)}
    chosen = draw_faulty_ranks(trial.seed, 2, 3)
    assert [rank for rank in range(3) if by_rank[rank]] == chosen
    assert by_rank[chosen[0]] != by_rank[chosen[1]]
    assert told["injected"] == 6 == told["changed"]


def test_which_ranks_are_hit_is_drawn_evenly() -> None:
    counts = [0] * 8
    for seed in range(2000):
        for rank in draw_faulty_ranks(seed, 2, 8):
            counts[rank] += 1
    assert sum(counts) == 4000
    assert all(400 < count < 600 for count in counts), counts
    assert draw_faulty_ranks(5, 8, 8) == list(range(8))
    assert rank_seed(11, 3, 1) == 11
    assert len({rank_seed(11, rank, 2) for rank in range(8)} | {11}) == 9


def test_a_rank_whose_training_fails_ends_its_trial_and_not_the_next(ranked: MakeTrial, tmp_path: Path) -> None:
    bad = ranked("picky", fault="bitflip:bits=sign", flips=8)
    golden = make_golden(tmp_path, bad)
    seen = run(tmp_path, bad)
    assert seen.end is TrialEnd.CRASHED
    assert seen.reason.endswith("ValueError: negative weight")
    assert seen.reason.startswith("rank ")
    assert judge(seen, golden) is Outcome.FAILED
    good = run(tmp_path, replace(bad, fault="bitflip:bits=31", flips=1))
    assert good.end is TrialEnd.FINISHED


def test_numbers_that_are_not_finite_end_the_trial_on_all_ranks(ranked: MakeTrial, tmp_path: Path) -> None:
    trial = ranked("sensitive", fault="bitflip:bits=exponent-msb")
    make_golden(tmp_path, trial)
    seen = run(tmp_path, trial)
    assert seen.end is TrialEnd.ABANDONED
    assert (seen.nonfinite_at, seen.nonfinite_in) == (0, "state") or seen.nonfinite_in == "output"
    group = cached_group(3, "cpu")
    assert not group.is_over, "it is as warm as before"


def test_a_rank_that_is_killed_from_outside_costs_its_trial_a_second_try(ranked: MakeTrial, tmp_path: Path) -> None:
    trial = ranked(fault="bitflip:bits=mantissa")
    make_golden(tmp_path, trial)
    before = run(tmp_path, trial)
    group = cached_group(3, "cpu")
    os.kill(group.pids()[1], signal.SIGKILL)
    again = run(tmp_path, trial)
    assert group.is_over
    assert again.digest == before.digest


def test_what_would_be_erased_on_another_rank_is_an_impossible_cell(ranked: MakeTrial, tmp_path: Path) -> None:
    trial = ranked(where="role:buffer")
    with pytest.raises(EvergradError, match=r"impossible cell .*DDP broadcasts rank 0's before every forward pass"):
        make_golden(tmp_path, trial)


@pytest.mark.parametrize("target", ["gradients", "activations", "communication"])
def test_a_live_target_is_hit_on_one_rank_and_in_its_step(ranked: MakeTrial, tmp_path: Path, target: str) -> None:
    trial = replace(ranked(fault="bitflip:bits=exponent-msb", flips=4), target=target, where="", step=1)
    golden = make_golden(tmp_path, trial)
    told = perform(tmp_path, replay_work(trial))
    hits: Any = told["hits"]
    assert {hit["rank"] for hit in hits} == set(draw_faulty_ranks(trial.seed, 1, 3))
    assert all(hit["tensor"].startswith(f"{target}/") for hit in hits)
    assert told["injected"] == 4
    seen = Observation.from_json({name: value for name, value in told.items() if name != "hits"})
    assert seen.losses.values[0] == golden.losses.values[0], "the first step is as it was"
    assert run(tmp_path, trial).digest == seen.digest


def test_faults_that_find_no_place_end_the_study_and_are_no_verdict(ranked: MakeTrial, tmp_path: Path) -> None:
    trial = replace(ranked(flips=10**6), target="activations", where="", step=1)
    make_golden(tmp_path, replace(trial, flips=1))
    with pytest.raises(EvergradError, match="faults"):
        run(tmp_path, trial)


def test_a_target_is_hit_even_where_the_plan_selects_more(ranked: MakeTrial, tmp_path: Path) -> None:
    trial = replace(ranked(flips=5, where="**.weight"), target="weights")
    make_golden(tmp_path, trial)
    hits: Any = perform(tmp_path, replay_work(trial))["hits"]
    assert {hit["tensor"].partition("/")[0] for hit in hits} == {"model"}
    with pytest.raises(EvergradError, match="selects nothing of the target, optimizer"):
        run(tmp_path, replace(trial, target="optimizer"))
