"""What saving costs: the training stays the same to the last bit, and its times are those of the slowest rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evergrad.errors import StudyError, UsageError
from evergrad.study import checkpoint_cost
from evergrad.study.checkpoint_cost import perform_saving
from evergrad.study.folder import SCRATCH
from evergrad.study.golden import GoldenRun, read_golden
from evergrad.study.plan import Plan
from evergrad.study.plan_files import read_plan_text
from evergrad.study.probe_tables import cost_table, median_interval
from evergrad.study.rank_group import end_cached_groups
from evergrad.study.results import Cell, Results
from evergrad.study.table_formats import Quantity
from evergrad.study.tasks import perform
from evergrad.study.trials import (
    OUTCOMES_WORST_FIRST,
    Observation,
    Outcome,
    Saving,
    Thresholds,
    Trial,
    TrialEnd,
    golden_work,
    judge,
)
from evergrad.training.settings import Training

TOYS = Path(__file__).parent / "toys.py"
STEPS = 4  # of an epoch: 128 samples in batches of 32


def saved(strategy: str, repetition: int = 0, *, every: int = 2, restarts: bool = False, **given: Any) -> Trial:
    """A trial of a toy that is saved on two ranks."""
    settings = {"mechanism": "ddp", "ranks": 2, "batch_size": 32, "learning_rate": 0.05, "epochs": 2} | given
    return Trial(
        id=f"{strategy}-{repetition}",
        axes={"ranks": 2},
        repetition=repetition,
        seed=1,
        training=Training(workload=f"{TOYS}:small", **settings),
        fault="bitflip",
        flips=0,
        saving=Saving(strategy=strategy, every=every, restarts=restarts),
    )


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, GoldenRun]]:
    """A study's folder with its golden run; the ranks are ended behind it."""
    folder = tmp_path_factory.mktemp("study")
    trial = saved("root")
    perform(folder, golden_work(trial, []))
    end_cached_groups()
    golden = read_golden(folder, trial.training.key)
    assert golden is not None
    yield folder, golden
    end_cached_groups()


def check_same(seen: Observation, golden: GoldenRun) -> None:
    assert seen.end is TrialEnd.FINISHED
    assert seen.metrics == golden.observation.metrics
    assert seen.losses.to_json() == golden.observation.losses.to_json()
    assert judge(seen, golden.observation, Thresholds(result="weights")) is Outcome.IDENTICAL


def test_a_training_that_is_saved_is_the_same_training(study: tuple[Path, GoldenRun]) -> None:
    folder, golden = study
    for number, strategy in enumerate(("none", "root", "evergrad")):
        seen = perform_saving(folder, saved(strategy, number), golden)
        check_same(seen, golden)
        assert {name: len(times) for name, times in seen.costs.items()} == {
            "blocked_s": 2 * STEPS // 2,
            "own_s": 2 * STEPS // 2,
            "with_s": 1,
            "without_s": 1,
            "drained_s": 1,
        }
        assert all(time > 0 for name, times in seen.costs.items() for time in times if name != "own_s")
        assert all(own <= whole for own, whole in zip(seen.costs["own_s"], seen.costs["blocked_s"], strict=True))
        assert not list((folder / SCRATCH).iterdir()), "what was saved is gone"


@pytest.mark.parametrize("strategy", ["root", "evergrad"])
def test_a_training_that_is_killed_after_every_epoch_is_the_same_training(
    study: tuple[Path, GoldenRun], strategy: str
) -> None:
    folder, golden = study
    # Every third of four steps: what came after it is lost, and done again.
    seen = perform_saving(folder, saved(strategy, every=3, restarts=True), golden)
    check_same(seen, golden)
    assert seen.steps == 2 * STEPS
    assert {name: len(times) for name, times in seen.costs.items()} == {"first_s": 2, "restore_s": 1, "restart_s": 1}
    assert seen.costs["restart_s"][0] > seen.costs["restore_s"][0] > 0


def test_saving_that_changes_a_training_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_cost, "cached_group", lambda *_, **__: _Answers({"with": "aa", "without": "bb"}))
    with pytest.raises(StudyError, match=r"saving by root changes the training of .*: with saves its weights are aa"):
        perform_saving(tmp_path, saved("root"), _nobody())


def test_the_slowest_rank_counts_for_each_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_cost, "cached_group", lambda *_, **__: _Answers({"with": "aa", "without": "aa"}))
    costs = perform_saving(tmp_path, saved("root"), _nobody()).costs
    assert costs["blocked_s"] == (3.0, 4.0)
    assert costs["own_s"] == (2.5, 3.0)
    assert (costs["with_s"], costs["without_s"]) == ((11.0,), (11.0,))


def test_which_block_comes_first_takes_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = _Answers({"with": "aa", "without": "aa"})
    monkeypatch.setattr(checkpoint_cost, "cached_group", lambda *_, **__: group)
    for repetition in (0, 1):
        perform_saving(tmp_path, saved("root", repetition), _nobody())
    assert group.orders == [["without", "with"], ["with", "without"]]


def test_what_cannot_be_measured_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'none' has nothing to restart from"):
        perform_saving(tmp_path, saved("none", restarts=True), _nobody())
    with pytest.raises(UsageError, match="expected mechanism 'ddp', of one rank or more, found 'single'"):
        perform_saving(tmp_path, saved("root", mechanism="single", ranks=1), _nobody())


@pytest.mark.parametrize(("name", "restarts"), [("overhead", False), ("restart", True)])
def test_the_gallery_saves_at_one_to_eight_ranks_and_compares_weights(name: str, restarts: bool) -> None:
    for scale in ("tiny", "small", "paper"):
        plan = Plan.of(read_plan_text(name), scale)
        assert plan.thresholds.result == "weights"
        found = {(cell.axes["ranks"], cell.saving and cell.saving.strategy) for cell in plan.cells}
        assert found == {(ranks, strategy) for ranks in (1, 2, 4, 8) for strategy in ("root", "evergrad")}
        assert all(cell.saving is not None and cell.saving.restarts is restarts for cell in plan.cells)


def test_the_interval_of_a_median_is_as_sure_as_it_says() -> None:
    assert median_interval([1.0, 2.0, 3.0], 0.95) == (2.0, 1.0, 3.0, 0.75)
    assert median_interval([float(n) for n in range(1, 7)], 0.95) == (3.5, 1.0, 6.0, 0.96875)
    # Of ten, between the second and the ninth: 1 - 2 · (1 + 10) / 1024.
    assert median_interval([float(n) for n in range(1, 11)], 0.95) == (5.5, 2.0, 9.0, 1 - 22 / 1024)
    assert median_interval([7.0], 0.95) == (7.0, 7.0, 7.0, 0.0)


def test_the_table_has_a_row_a_cell_and_the_number_of_cores_under_it() -> None:
    costs = [
        {"blocked_s": (0.01, 0.02, 0.03), "own_s": (0.01, 0.01), "with_s": (1.1 + n / 10,), "without_s": (1.0,)}
        for n in range(3)
    ]
    table = cost_table(_results([Observation(end=TrialEnd.FINISHED, costs=one) for one in costs]))
    assert table.headers[:5] == ("ranks", "trainings", "identical", "blocked ms", "own ms")
    row = dict(zip(table.headers, table.rows[0], strict=True))
    assert str(row["blocked ms"]) == "20.0 [10.0, 30.0]"
    assert str(row["overhead %"]) == "20.0 [10.0, 30.0]"
    assert "drained ms" not in row, "nothing was measured"
    assert any("2 cores" in note for note in table.notes)
    assert any("here, of so few, 75 %" in note for note in table.notes)
    assert not any(note.startswith("N-EV") for note in table.notes)
    assert isinstance(row["overhead %"], Quantity)


class _Answers:
    """A group of two ranks whose answers are known."""

    def __init__(self, digests: dict[str, str]) -> None:
        self.digests, self.orders = digests, list[Any]()

    def call(self, function: str, folder: Path, told: dict[str, Any]) -> list[dict[str, Any]]:
        self.orders.append(told["order"])
        return [{name: _block(digest, rank) for name, digest in self.digests.items()} for rank in range(2)]


def _block(digest: str, rank: int) -> dict[str, Any]:
    blocked, queued = ([1.0, 4.0], [0.5, 1.0]) if rank == 0 else ([3.0, 2.0], [0.5, 0.0])
    times = {"seconds": 10.0 + rank, "drained": 0.5, "blocked": blocked, "queued": queued}
    return {**times, "metrics": [0.5, 0.6], "losses": [1.0], "digest": digest}


def _nobody() -> GoldenRun:
    return GoldenRun(key="", settings={}, observation=Observation(end=TrialEnd.FINISHED), checkpoint="", digest="")


def _results(seen: list[Observation]) -> Results:
    counts = dict.fromkeys(OUTCOMES_WORST_FIRST, 0) | {Outcome.IDENTICAL: len(seen)}
    cell = Cell(axes={"ranks": 2}, due=3, counts=counts, golden=0.9, golden_start=0.8, seen=tuple(seen))
    facts = {"N-EV": "NaN", "machine": "x86_64, 2 cores"}
    return Results(
        study="overhead", title="", source="", scale="tiny", trials=3, cells=(cell,), axes=("ranks",), facts=facts
    )
