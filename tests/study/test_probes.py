"""Watchers: what is seen of a fault in every step, by eyes that alter nothing; and what tables make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evergrad.errors import UsageError
from evergrad.study.golden import read_golden
from evergrad.study.loaded_trainings import load_training
from evergrad.study.observe import GoldenTrajectory, observe
from evergrad.study.plan import Plan
from evergrad.study.plan_files import parse
from evergrad.study.probe_base import GUARDS
from evergrad.study.probe_tables import guard_table, probe_tables_to_json, spread_table
from evergrad.study.probes import GuardProbe, make_probes
from evergrad.study.rank_group import end_cached_groups
from evergrad.study.results import Cell, Results
from evergrad.study.table_formats import Quantity, Table
from evergrad.study.tasks import perform
from evergrad.study.trials import Observation, Outcome, Rules, Series, Trial, TrialEnd, golden_work, trial_work
from evergrad.training.mechanisms import make_session
from evergrad.training.mechanisms.session import Session
from evergrad.training.settings import Training
from evergrad.training.workloads.registry import make_workload

MakeTrial = Callable[..., Trial]

BOTH = Rules(watch=("spread", "guards"), abandon=())


def run(folder: Path, trial: Trial) -> Observation:
    """The golden run, if it is not there, and the trial."""
    perform(folder, golden_work(trial, [trial]))
    return Observation.from_json(perform(folder, trial_work(trial)))


def values(seen: Observation, name: str) -> tuple[float, ...]:
    return seen.spread[name].values


def session_of(trial: Trial) -> tuple[Session, Training]:
    assert isinstance(trial.training, Training)
    return make_session(trial.training, make_workload(trial.training)), trial.training


def test_a_training_that_is_watched_ends_with_the_bits_of_one_that_is_not(
    tmp_path: Path, first_trial: MakeTrial
) -> None:
    trial = first_trial(fault="bitflip:bits=9", epochs=3)
    plain, watched = run(tmp_path, trial), run(tmp_path, replace(trial, rules=BOTH))
    assert watched.digest == plain.digest != ""
    assert (watched.losses, watched.metrics) == (plain.losses, plain.metrics)
    assert plain.spread == plain.alarms == plain.costs == {}
    session = load_training(tmp_path, trial.training, trial.rules).session  # type: ignore[arg-type]
    assert not session.module._forward_pre_hooks
    assert not session.optimizer._optimizer_step_pre_hooks
    assert not session.optimizer._optimizer_step_post_hooks


def test_without_a_fault_nothing_spreads_and_no_guard_speaks_up(tmp_path: Path, first_trial: MakeTrial) -> None:
    trial = replace(first_trial(epochs=3), ranks=0, rules=BOTH)
    seen = run(tmp_path, trial)
    golden = read_golden(tmp_path, trial.training.key)
    assert golden is not None
    assert (seen.digest, seen.injected) == (golden.observation.digest, 0)
    assert {*values(seen, "elements"), *values(seen, "layers"), *values(seen, "ranks")} == {0.0}
    assert values(seen, "after") == tuple(range(13))
    assert seen.alarms == dict.fromkeys(["norm", "range", "non-finite", "checkpoint range"]), "one rank: no replicas"
    assert {"step", "guard norm", "guard range"} <= set(seen.costs)
    assert all(seconds >= 0 for (seconds,) in seen.costs.values())
    assert seen.costs["step"][0] > 0


def test_a_flipped_weight_is_one_element_of_one_layer_until_the_first_step(
    tmp_path: Path, first_trial: MakeTrial
) -> None:
    # Which element is hit depends on the folder of the toys: hit one that has an effect. The bias of the first layer
    # has none, because batch normalisation subtracts it.
    trial = first_trial(fault="bitflip:bits=sign", where="model/*.weight")
    seen = run(tmp_path, replace(trial, rules=Rules(watch=("spread",))))
    assert values(seen, "elements")[0] == pytest.approx(1 / 74, rel=1e-5)
    assert values(seen, "layers")[0] == pytest.approx(1 / 3, rel=1e-5), "of two linear ones and batch normalisation"
    assert values(seen, "ranks") == (1.0,) * 5
    assert values(seen, "elements")[4] > 0.5
    assert values(seen, "layers")[4] == 1.0


def test_a_long_course_is_compared_where_the_golden_run_was_kept(first_trial: MakeTrial) -> None:
    session, _ = session_of(first_trial())
    take_up, course = session.make_reset(), GoldenTrajectory(every=3)
    observe(session, 2, Rules(), course, golden=True)
    take_up()
    session.state()["model/0.bias"][0] = 7.0
    seen = observe(session, 2, Rules(watch=("spread",)), course)
    assert values(seen, "after") == (0, 1, 4, 7)
    assert len(values(seen, "elements")) == 4


def test_many_steps_are_thinned_and_the_first_ones_are_not(first_trial: MakeTrial) -> None:
    session, _ = session_of(first_trial())
    course = GoldenTrajectory(every=2, weights=[session.weights()] * 1500, start_weights=session.weights())
    with make_probes(session, Rules(watch=("spread",)), course, 3000) as watchers:
        watchers.start()
        for step in range(1, 3001):
            watchers.after_step(step, torch.zeros(()))
        after = watchers.readings().spread["after"].values
    assert after[:6] == (0, 1, 3, 5, 7, 9)
    assert after[-1] == 2999
    assert 150 < len(after) <= 210


def _guarded(
    session: Session, course: GoldenTrajectory, alter: Callable[[], object], at: int, steps: int = 20
) -> dict[str, Any]:
    """Which guards speak up, of a training that something happens to after so many steps."""
    with make_probes(session, Rules(watch=("guards",)), course, steps) as watchers:
        if at == 0:
            alter()
        watchers.start()
        for step in range(1, steps + 1):
            watchers.after_step(step, session.step((step - 1) % session.steps_per_epoch))
            if step == at:
                alter()
        return dict(watchers.readings().alarms)


def test_each_guard_speaks_up_where_it_looks(first_trial: MakeTrial) -> None:
    session, _ = session_of(first_trial())
    take_up, course = session.make_reset(), GoldenTrajectory.empty(session, 5)
    observe(session, 5, Rules(), course, golden=True)

    def meet(name: str, alter: Callable[[torch.Tensor], object], at: int) -> dict[str, Any]:
        take_up()
        return _guarded(session, course, lambda: alter(session.state()[name]), at)

    silent = dict.fromkeys(["norm", "range", "non-finite", "checkpoint range"])
    last = "model/4.weight"
    assert meet(last, lambda weight: None, 12) == silent
    # The last layer's weights: what comes back through them is as large.
    assert meet(last, lambda weight: weight.mul_(1e4), 12) == {**silent, "norm": 13, "range": 20}
    # In the checkpoint: who begins with the restart has nothing to compare with, but the numbers saved beside it.
    loaded = meet(last, lambda weight: weight.mul_(1e4), 0)
    assert (loaded["checkpoint range"], loaded["range"], loaded["non-finite"]) == (0, None, None)
    assert loaded["norm"] is None or loaded["norm"] > 8
    # It reaches the weights in step 15, and so gradients and loss in the next.
    spoilt = meet("optimizer/state/0/momentum_buffer", lambda momentum: momentum.fill_(torch.nan), 14)
    assert spoilt == {**silent, "norm": 16, "non-finite": 16, "range": 20}
    # A mantissa's bits are nobody's concern.
    assert meet(last, lambda weight: weight.mul_(1.001), 12) == silent


def test_ranks_learn_what_one_of_them_has(tmp_path: Path, first_trial: MakeTrial) -> None:
    # Not a flip: which element is hit depends on where the toys are, and the sign of a zero changes nothing.
    base = first_trial(fault="setvalue:value=2", where="role:optimizer", epochs=5)
    assert isinstance(base.training, Training)
    training = replace(base.training, mechanism="ddp", ranks=3, batch_size=48)
    trial = replace(base, training=training, rules=BOTH, flips=1)
    try:
        moment = run(tmp_path, trial)
        weight = run(tmp_path, replace(trial, where="role:model"))
        clean = run(tmp_path, replace(trial, ranks=0))
    finally:
        end_cached_groups()
    # A flipped momentum is one rank's until its weights have made other gradients, which all ranks get.
    assert values(moment, "ranks")[:3] == pytest.approx((0, 1 / 3, 1), rel=1e-5)
    assert values(moment, "elements")[:2] == pytest.approx((0, 1 / 74 / 3), rel=1e-5)
    assert values(weight, "ranks")[:2] == pytest.approx((1 / 3, 1), rel=1e-5)
    assert values(weight, "elements")[0] == pytest.approx(1 / 74 / 3, rel=1e-5)
    assert {*values(clean, "ranks")} == {0.0}
    # Digests see any bit, at the first check.
    assert (moment.alarms["replicas"], weight.alarms["replicas"], clean.alarms["replicas"]) == (10, 10, None)
    assert set(clean.alarms) == set(GUARDS)
    assert moment.injected == weight.injected == 1


def test_a_training_without_a_fault_is_one_cell_with_one_run(toy_toml: Callable[..., str]) -> None:
    text = toy_toml().replace("flips = [1, 4]", "flips = [1, 4]\nseed = [5, 6]\ncorrupt = [1, 0]")
    plan = Plan.of(parse(text, "toy.toml"))
    found = [(cell.axes["flips"], cell.axes["seed"], cell.corrupt, cell.trainings) for cell in plan.cells]
    assert [one for one in found if one[2] == 0] == [(1, 5, 0, 1), (1, 6, 0, 1)]
    assert [one for one in found if one[2]] == [(1, 5, 1, 3), (1, 6, 1, 3), (4, 5, 1, 3), (4, 6, 1, 3)]
    with pytest.raises(UsageError, match="corrupt: expected a whole number, 0 or more, found -1"):
        Plan.of(parse(text.replace("[1, 0]", "[-1]"), "toy.toml"))
    with pytest.raises(UsageError, match="corrupt: expected 1, since a command has one process, found 0"):
        command = '[command]\ncommand = "true {checkpoint}"\nprepare = "touch {checkpoint}"\n[trial]\ncorrupt = 0\n'
        Plan.of(parse(f'study = "s"\n{command}', "c.toml"))


# Tables.


def _results(*cells: Cell, axes: tuple[str, ...]) -> Results:
    due = sum(cell.due for cell in cells)
    facts = {"seed": "7"}
    return Results(study="s", title="T", source="", scale="tiny", trials=due, cells=cells, axes=axes, facts=facts)


def _cell(*seen: Observation, **axes: Any) -> Cell:
    counts = dict.fromkeys(Outcome, 0) | {Outcome.CHANGED: len(seen)}
    return Cell(axes=axes, due=len(seen), counts=counts, golden=0.9, golden_start=0.8, seen=seen)


def _spread(after: tuple[int, ...], elements: tuple[float, ...]) -> Observation:
    parts = {"after": after, "elements": elements, "layers": elements, "ranks": tuple(map(float, map(bool, elements)))}
    return Observation(end=TrialEnd.FINISHED, spread={name: Series(1, part) for name, part in parts.items()})


def _alarms(final: float = 0.9, *, nev: bool = False, digest: str = "", **alarms: int | None) -> Observation:
    costs = {"step": (0.01,), "guard norm": (0.0002,), "guard replicas": (0.001,)}
    return Observation(
        end=TrialEnd.FINISHED, metrics=(0.8, final), nonfinite_at=3 if nev else None, alarms=alarms, costs=costs,
        digest=digest, steps=20,
    )  # fmt: skip


def _rows(table: Table) -> list[dict[str, object]]:
    return [dict(zip(table.headers, row, strict=True)) for row in table.rows]


def test_the_table_of_spread_says_over_how_many_trainings_it_is() -> None:
    went_on = _spread((0, 1, 2, 3, 4, 5, 6, 7), (0.01, 0.5, 1, 1, 1, 1, 1, 1))
    given_up = _spread((0, 1), (0.03, 0.7))
    table = spread_table(_results(_cell(went_on, given_up, where="model"), axes=("where",)))
    rows = _rows(table)
    assert [(row["steps"], row["trainings"]) for row in rows] == [(0, 2), (1, 2), (2, 1), (3, 1), (5, 1), (7, 1)]
    assert str(rows[0]["elements %"]).startswith("2.0000 [1.0000, 3.0000]")
    assert rows[1]["ranks %"] == Quantity(100.0, 1), "of equal numbers there is no interval"
    told = probe_tables_to_json(_results(_cell(went_on, given_up, where="model"), axes=("where",)))
    (first, *_), kinds = told["spread"], list(told)
    assert kinds == ["spread"]
    assert (first["steps"], first["elements %"]["value"], first["ranks %"]["low"]) == (0, 2.0, rows[0]["ranks %"].low)
    assert rows[2]["layers %"] == Quantity(100.0, 1)
    assert any(note.startswith("ranks %: ") for note in table.notes)
    assert "seed: 7" in table.notes


def test_the_table_of_guards_counts_alarms_after_the_fault_and_runs_without_one() -> None:
    hit = [
        _alarms(0.8, norm=14, replicas=20),
        _alarms(0.9, norm=None, replicas=20),
        _alarms(nev=True, norm=13, replicas=20),
        _alarms(0.7, norm=12, replicas=20),  # before the fault: a false alarm
    ]
    clean = [_alarms(norm=5, replicas=None, digest="a")] * 3 + [_alarms(norm=None, replicas=None, digest="b")]
    cells = [
        _cell(*hit[:2], seed=0, step=12, corrupt=1),
        _cell(*clean[:3], seed=0, step=12, corrupt=0),
        _cell(*hit[2:], seed=1, step=12, corrupt=1),
        _cell(*clean[3:], seed=1, step=12, corrupt=0),
    ]
    table = guard_table(_results(*cells, axes=("seed", "step", "corrupt")))
    assert table.headers[:2] == ("step", "guard"), "seeds are repetitions"
    norm, replicas = _rows(table)
    assert (norm["guard"], norm["trainings"], norm["RWC"], norm["N-EV"]) == ("norm", 4, 3, 1)
    assert str(norm["RWC seen %"]).startswith("66.7 [")
    assert str(norm["N-EV seen %"]).startswith("100.0 [")
    assert str(norm["all seen %"]).startswith("50.0 [")
    assert norm["latency"] == Quantity(1.5, 1, 1.25, 1.75)
    assert norm["false"] == "1 of 2 (40 steps)", "the same run three times is one"
    assert norm["cost %"] == Quantity(pytest.approx(2.0), 2)
    assert (str(replicas["all seen %"])[:5], str(replicas["latency"])) == ("100.0", "8.0 [8.0, 8.0]")
    assert (replicas["false"], str(replicas["cost %"])) == ("0 of 2 (40 steps)", "10.00")


def test_an_alarm_at_the_load_is_a_detection_of_what_was_in_the_checkpoint() -> None:
    seen = _alarms(0.5, **{"checkpoint range": 0, "norm": None})
    seen = replace(seen, costs={**seen.costs, "guard checkpoint range": (0.0,)})
    alone, found = _rows(guard_table(_results(_cell(seen, step=0), axes=("step",))))
    assert (found["guard"], str(found["RWC seen %"])[:5], found["latency"]) == (
        "checkpoint range",
        "100.0",
        Quantity(0.0),
    )
    assert (alone["latency"], alone["false %"], alone["false"]) == (None, None, None)


def test_guards_take_their_hooks_off_when_the_training_fails(first_trial: MakeTrial) -> None:
    session, _ = session_of(first_trial())
    with (
        pytest.raises(ValueError, match="an error of the training's own"),
        make_probes(session, Rules(watch=("guards",)), GoldenTrajectory(), 4) as watchers,
    ):
        watchers.start()
        assert session.optimizer._optimizer_step_pre_hooks
        raise ValueError("an error of the training's own")
    assert not session.optimizer._optimizer_step_pre_hooks
    GuardProbe(session, GoldenTrajectory()).remove_hooks()
