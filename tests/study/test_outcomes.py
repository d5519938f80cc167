"""Outcomes follow the metric's direction: a loss that rises is worse, an accuracy that rises is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evergrad.errors import DamagedFile, UsageError
from evergrad.study.golden import GoldenRun, golden_folder, make_empty_folder, read_golden, write_golden
from evergrad.study.plan import Plan
from evergrad.study.plan_files import parse
from evergrad.study.trials import Command, Observation, Outcome, Thresholds, Trial, TrialEnd, judge
from evergrad.training.settings import Direction, direction_by_name

LOWER, HIGHER = Direction.LOWER, Direction.HIGHER
COMMAND = 'study = "c"\n[command]\ncommand = "python a {checkpoint}"\nprepare = "python x {checkpoint}"\n'


def finished(*metrics: float) -> Observation:
    return Observation(end=TrialEnd.FINISHED, metrics=metrics)


@pytest.mark.parametrize(
    ("direction", "final", "expected"),
    [
        (LOWER, 28.5, Outcome.DEGRADED),
        (LOWER, 4.03, Outcome.DEGRADED),
        (LOWER, 4.01, Outcome.CHANGED),
        (LOWER, 4.0, Outcome.IDENTICAL),
        (LOWER, 0.5, Outcome.CHANGED),
        (HIGHER, 28.5, Outcome.CHANGED),
        (HIGHER, 3.9, Outcome.DEGRADED),
    ],
)
def test_degraded_is_a_metric_that_is_worse_in_its_direction(
    direction: Direction, final: float, expected: Outcome
) -> None:
    assert judge(finished(4.5, final), finished(4.5, 4.0), direction=direction) is expected


@pytest.mark.parametrize(
    ("direction", "golden", "final", "expected"),
    [
        (LOWER, 1.0, 2.28, Outcome.FAILED),
        (LOWER, 1.0, 9.0, Outcome.FAILED),
        (LOWER, 1.0, 2.2, Outcome.DEGRADED),
        (LOWER, 2.29, 2.3, Outcome.CHANGED),
        (HIGHER, 9.0, 2.32, Outcome.FAILED),
        (HIGHER, 9.0, 2.4, Outcome.DEGRADED),
    ],
)
def test_chance_level_is_reached_from_the_better_side(
    direction: Direction, golden: float, final: float, expected: Outcome
) -> None:
    assert judge(finished(final), finished(golden), Thresholds(), chance=2.3, direction=direction) is expected


METRICS: list[tuple[str, Direction]] = [
    *((name, LOWER) for name in ("loss", "val_loss", "valLoss", "testloss", "eval/loss", "error", "top1_err")),
    *((name, LOWER) for name in ("error_rate", "perplexity", "PPL", "MSE", "cross_entropy", "crossEntropy")),
    *((name, LOWER) for name in ("accuracy_loss", "negative_log_likelihood", "nll", "best val loss")),
    *((name, HIGHER) for name in ("accuracy", "top-1", "bleu", "psnr", "neg_mean_squared_error", "", "lossless")),
    *((name, LOWER) for name in ("cost", "my_cost", "valCost", "costs", r"pattern:cost=(\S+)")),
    *((name, HIGHER) for name in ("accost", "neg_cost", "cost_accuracy")),
    *((name, HIGHER) for name in ("glossary", "policy_entropy", "log_likelihood", "score", "m")),
    (r"pattern:loss (\S+)", LOWER),
    (r"pattern:loss \S+ acc (\S+)", HIGHER),
    (r"pattern:acc \S+ loss=(\S+)", LOWER),
    (r"pattern:top-1 (\d+) %, loss", HIGHER),
    (r"pattern:^(\S+) ppl", LOWER),
    (r"pattern:(?:val|test) error (\S+)", LOWER),
    (r"pattern:[(]loss[)]: (\S+)", LOWER),
    (r"pattern:\(loss\) (\S+)", LOWER),
    (r"pattern:(?P<loss>\S+)", LOWER),
    (r"pattern:\baccuracy (\S+)", HIGHER),
]


def test_a_name_that_says_loss_error_or_perplexity_is_better_lower() -> None:
    for metric, expected in METRICS:
        assert direction_by_name(metric) is expected, metric


def test_a_plan_states_the_direction_and_otherwise_the_metrics_name_does() -> None:
    def direction(more: str) -> Direction:
        training = Plan.of(parse(COMMAND + more, "mine.toml")).cells[0].training
        assert isinstance(training, Command)
        return training.judged_by

    assert direction("") is HIGHER
    assert direction('metric = "val_loss"\n') is LOWER
    assert direction('metric = "m"\ndirection = "lower_is_better"\n') is LOWER
    assert direction('metric = "loss"\ndirection = "higher_is_better"\n') is HIGHER


@pytest.mark.parametrize("wrong", ['"lower_is_beter"', '"lower"', "3", '""'])
def test_a_wrong_direction_names_its_line_and_the_choices(wrong: str) -> None:
    with pytest.raises(
        UsageError, match=r"line 5: direction: expected .*higher_is_better.*lower_is_better.*found"
    ) as e:
        Plan.of(parse(f"{COMMAND}direction = {wrong}\n", "mine.toml"))
    assert "\n" not in str(e.value)
    assert wrong in ("3", '""') or "Did you mean 'lower_is_better'?" in str(e.value)


def test_the_direction_makes_no_other_trial_so_old_journals_and_golden_runs_still_count() -> None:
    old = Plan.of(parse(f'{COMMAND}metric = "m"\n', "mine.toml")).cells[0]
    new = Plan.of(parse(f'{COMMAND}metric = "m"\ndirection = "lower_is_better"\n', "mine.toml")).cells[0]
    # Written down: the key and the first trial of this plan before there was a direction.
    assert (old.training.key, old.trial(0).id) == ("d1b7c091bea8b841", "746c21c41353fe4f")
    assert (new.training.key, new.trial(0).id) == (old.training.key, old.trial(0).id)
    told = old.trial(0).to_json()
    training = told["training"]
    assert isinstance(training, dict)
    del training["direction"]
    assert Trial.from_json(told) == old.trial(0), "a task without the key is read"


def test_a_golden_run_without_a_direction_is_read_and_a_wrong_one_is_damage(tmp_path: Path) -> None:
    made = GoldenRun(key="k", settings={}, observation=finished(1.0), checkpoint="c", digest="d", direction=LOWER)
    make_empty_folder(tmp_path, "k")
    write_golden(tmp_path, made)
    assert read_golden(tmp_path, "k") == made
    record = golden_folder(tmp_path, "k") / "golden.json"
    told = json.loads(record.read_text())
    del told["direction"], told["check"]  # as before both were there
    record.write_text(json.dumps(told))
    old = read_golden(tmp_path, "k")
    assert old is not None
    assert (old.direction, old.run_id) == (HIGHER, made.run_id)
    record.write_text(json.dumps(told | {"direction": "sideways"}))
    with pytest.raises(DamagedFile, match="direction"):
        read_golden(tmp_path, "k")
