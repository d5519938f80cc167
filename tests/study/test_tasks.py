"""What a worker does: trials give the same bits wherever and whenever they run, and never touch each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import evergrad as eg
from evergrad.errors import EvergradError, StudyError, UsageError
from evergrad.injection.faults import fault_of
from evergrad.study import loaded_trainings
from evergrad.study.golden import golden_folder, read_golden
from evergrad.study.loaded_trainings import load_training
from evergrad.study.observe import observe
from evergrad.study.tasks import perform
from evergrad.study.trials import Observation, Outcome, Trial, TrialEnd, golden_work, judge, trial_work
from evergrad.training.mechanisms.session import TrainingSnapshot
from evergrad.training.settings import Direction

MakeTrial = Callable[..., Trial]


def cold() -> None:
    """Forget what is loaded, as a fresh worker would not know it."""
    loaded_trainings._loaded_trainings.clear()


def run(folder: Path, trial: Trial) -> Observation:
    """The golden run, if it is not there, and the trial."""
    perform(folder, golden_work(trial, [trial]))
    return Observation.from_json(perform(folder, trial_work(trial)))


def _answers(folder: Path, trial: Trial, flips: int = 0) -> list[int]:
    """What the restored model says of every test sample, after so many faults."""
    loaded = load_training(folder, trial.training, trial.rules)
    loaded.reset()
    if flips:
        loaded.prepared_fault(trial).inject(flips, trial.seed)
    answers: list[int] = loaded.session.evaluate().predictions.tolist()
    return answers


def same(one: Observation, other: Observation) -> bool:
    """Everything but how long it took."""
    return replace(one, seconds=0).to_json() == replace(other, seconds=0).to_json()


@pytest.mark.parametrize("where", ["role:model", "role:optimizer", "role:buffer"])
def test_a_trial_alone_in_a_fresh_worker_gives_the_same_bits(
    tmp_path: Path, first_trial: MakeTrial, where: str
) -> None:
    trials = [first_trial(where=where, repetition=number, cell=1, epochs=2) for number in range(4)]
    together = [run(tmp_path, trial) for trial in trials]
    cold()
    assert same(run(tmp_path, trials[2]), together[2])
    again = [run(tmp_path, trial) for trial in reversed(trials)]
    assert all(same(one, other) for one, other in zip(again, reversed(together), strict=True))
    assert all(seen.injected == 4 for seen in together)


def test_trials_share_nothing_that_one_could_spoil(tmp_path: Path, first_trial: MakeTrial) -> None:
    trial = first_trial(epochs=2)
    clean = run(tmp_path, trial)
    place = golden_folder(tmp_path, trial.training.key)
    before = (place / "checkpoint.pt").read_bytes()
    wild = replace(first_trial(cell=1, repetition=1), fault="setvalue:value=nan", where="**", training=trial.training)
    spoilt = run(tmp_path, wild)
    assert spoilt.nonfinite_at == 0
    assert same(run(tmp_path, trial), clean)
    loaded = load_training(tmp_path, trial.training, trial.rules)
    loaded.reset()
    with eg.open_checkpoint(place / "checkpoint.pt") as ck:
        for name, tensor in loaded.session.state().items():
            assert torch.equal(ck.read(name), tensor), name
    assert (place / "checkpoint.pt").read_bytes() == before


def test_a_trial_hits_the_very_bits_that_the_injector_hits_in_the_checkpoint_file(
    tmp_path: Path, first_trial: MakeTrial
) -> None:
    trial = first_trial(cell=1, fault="bitflip:bits=exponent")
    run(tmp_path, trial)
    loaded = load_training(tmp_path, trial.training, trial.rules)
    loaded.reset()
    live = [
        hit for column in loaded.prepared_fault(trial).inject(trial.flips, trial.seed).columns for hit in column.hits()
    ]
    file = golden_folder(tmp_path, trial.training.key) / "checkpoint.pt"
    log = eg.inject(
        file, fault_of(trial.fault), count=trial.flips, where=trial.where, seed=trial.seed, out=tmp_path / "bad.pt"
    )
    assert [hit.to_json() for hit in log.faults()] == [hit.to_json() for hit in live]


def test_a_fault_in_the_file_and_its_log_in_the_running_training_give_the_same_trial_bit_for_bit(
    tmp_path: Path, first_trial: MakeTrial
) -> None:
    trial = first_trial(cell=1, fault="bitflip:bits=mantissa", where="**.weight")
    seen = run(tmp_path, trial)
    loaded = load_training(tmp_path, trial.training, trial.rules)
    clean = golden_folder(tmp_path, trial.training.key) / "checkpoint.pt"
    log = eg.inject(
        clean, fault_of(trial.fault), count=trial.flips, where=trial.where, seed=trial.seed, out=tmp_path / "bad.pt"
    )
    session, epochs = loaded.session, trial.training.epochs
    with eg.open_checkpoint(tmp_path / "bad.pt") as bad:
        session.restore(TrainingSnapshot(trial.training.checkpoint, {name: bad.read(name) for name in session.state()}))
    from_file = observe(session, epochs, trial.rules, loaded.trajectory)
    loaded.reset()
    faults = eg.inject_live(session.module, session.optimizer, log)
    assert faults.done
    from_log = observe(session, epochs, trial.rules, loaded.trajectory)
    assert seen.changed == trial.flips
    assert seen.digest != loaded.golden.observation.digest
    assert same(from_file, from_log)
    assert same(replace(seen, injected=0, changed=0, places=0), from_log)


@pytest.mark.parametrize(
    ("name", "fault", "expected"),
    [
        ("immune", "bitflip:bits=mantissa", Outcome.IDENTICAL),
        ("sensitive", "bitflip:bits=exponent-msb", Outcome.NEV),
        ("picky", "bitflip:bits=sign", Outcome.FAILED),
    ],
)
def test_toys_that_must_and_must_not_suffer_are_judged_so(
    tmp_path: Path, first_trial: MakeTrial, name: str, fault: str, expected: Outcome
) -> None:
    trials = [first_trial(name, fault=fault, repetition=number) for number in range(5)]
    seen = [run(tmp_path, trial) for trial in trials]
    golden = read_golden(tmp_path, trials[0].training.key)
    assert golden is not None
    verdicts = {judge(one, golden.observation, chance=golden.chance) for one in seen}
    assert verdicts == {expected}
    assert {one.changed for one in seen} == {1}
    if name == "picky":
        assert {(one.end, one.reason) for one in seen} == {(TrialEnd.CRASHED, "ValueError: negative weight")}


def test_a_non_finite_training_is_given_up_and_says_where(tmp_path: Path, first_trial: MakeTrial) -> None:
    seen = run(tmp_path, first_trial("sensitive", fault="bitflip:bits=exponent-msb", epochs=3))
    assert (seen.end, seen.steps, seen.nonfinite_at, seen.nonfinite_in) == (TrialEnd.ABANDONED, 0, 0, "output")
    plenty = first_trial(fault="scale:factor=1e30", cell=1)
    seen = run(tmp_path, replace(plenty, flips=30))
    assert seen.extreme_at == 0


def test_without_training_the_answers_are_compared_one_by_one(tmp_path: Path, first_trial: MakeTrial) -> None:
    trial = first_trial(fault="bitflip:bits=sign", where="model/4.weight", epochs=0)
    seen = run(tmp_path, replace(trial, flips=16))
    assert (seen.steps, len(seen.metrics), seen.predictions) == (0, 1, 32)
    golden = read_golden(tmp_path, trial.training.key)
    assert golden is not None
    assert seen.mismatches == sum(
        one != other for one, other in zip(_answers(tmp_path, trial), _answers(tmp_path, trial, 16), strict=True)
    )
    assert seen.mismatches
    assert judge(seen, golden.observation, chance=None) in (Outcome.CHANGED, Outcome.DEGRADED)


def test_distances_are_from_the_golden_run_at_the_same_step(tmp_path: Path, first_trial: MakeTrial) -> None:
    trial = replace(first_trial(fault="scale:factor=1.0", epochs=2), flips=5)  # changes nothing
    seen = run(tmp_path, trial)
    assert seen.changed == 0
    assert len(seen.distances.values) == len(seen.losses.values) == 8
    assert set(seen.distances.values) == {0.0}
    other = run(tmp_path, replace(trial, fault="scale:factor=3.0"))
    assert all(distance > 0 for distance in other.distances.values)


def test_a_worker_that_does_not_repeat_the_golden_run_refuses(tmp_path: Path, first_trial: MakeTrial) -> None:
    trial = first_trial()
    run(tmp_path, trial)
    record = golden_folder(tmp_path, trial.training.key) / "golden.json"
    told: dict[str, Any] = json.loads(record.read_text())
    told["observation"]["digest"] = "0" * 32
    del told["check"]
    record.write_text(json.dumps(told))
    cold()
    with pytest.raises(StudyError, match=r"does not repeat the golden run .* the golden run with .* and 00000000"):
        perform(tmp_path, trial_work(trial))


def test_a_checkpoint_that_was_altered_since_is_refused(tmp_path: Path, first_trial: MakeTrial) -> None:
    trial = first_trial()
    run(tmp_path, trial)
    file = golden_folder(tmp_path, trial.training.key) / "checkpoint.pt"
    eg.inject(file, eg.BitFlip(), count=1, in_place=True)
    cold()
    with pytest.raises(StudyError, match="is not the checkpoint of its golden run any more"):
        perform(tmp_path, trial_work(trial))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"where": "model/none"}, r"impossible cell \(flips 1\): unknown tensor 'model/none'"),
        ({"where": "role:other"}, "no tensor has the role 'other'"),
        ({"fault": "bitflip:bits=40"}, "fits no tensor"),
    ],
)
def test_a_cell_that_cannot_be_is_told_before_its_first_trial(
    tmp_path: Path, first_trial: MakeTrial, given: dict[str, str], words: str
) -> None:
    trial = first_trial(**given)
    with pytest.raises(UsageError, match=words):
        perform(tmp_path, golden_work(trial, [trial]))


def test_more_flips_than_numbers_and_unknown_layers_are_told(tmp_path: Path, first_trial: MakeTrial) -> None:
    trial = first_trial()
    with pytest.raises(UsageError, match=r"flips: expected at most 74, the numbers that there are, found 1,000"):
        perform(tmp_path, golden_work(trial, [replace(trial, flips=1000)]))
    with pytest.raises(EvergradError, match="unknown layer '7'"):
        perform(tmp_path, golden_work(trial, [replace(trial, layer="7")]))


def test_a_layer_is_its_weights_and_their_optimizer_state(tmp_path: Path, first_trial: MakeTrial) -> None:
    trial = first_trial()
    perform(tmp_path, golden_work(trial, [trial]))
    loaded = load_training(tmp_path, trial.training, trial.rules)

    def names(**given: str) -> list[str]:
        return [info.name for info in loaded.prepared_fault(replace(trial, **given)).population.tensors]  # type: ignore[arg-type]

    assert names(layer="first") == ["model/0.weight", "model/0.bias"]
    assert names(layer="last") == ["model/4.weight", "model/4.bias"]
    assert names(layer="4", where="role:optimizer") == [
        "optimizer/state/4/momentum_buffer",
        "optimizer/state/5/momentum_buffer",
    ]


def test_a_golden_run_that_is_not_sound_says_what_to_change(tmp_path: Path, first_trial: MakeTrial) -> None:
    trial = first_trial()
    with pytest.raises(UsageError, match=r"golden run .* is not sound: .* Choose a smaller learning_rate \(now 0.05\)"):
        perform(tmp_path, golden_work(replace(trial, rules=replace(trial.rules, extreme=1e-6)), []))


def test_what_outlives_a_training_is_found_before_the_first_trial(tmp_path: Path, first_trial: MakeTrial) -> None:
    with pytest.raises(StudyError, match=r"does not repeat the golden run .* outlives a training|one kind of machine"):
        run(tmp_path, first_trial("leaky"))
    trials = [first_trial("counting", repetition=number) for number in range(4)]
    together = [run(tmp_path, trial) for trial in trials]
    cold()
    assert same(run(tmp_path, trials[3]), together[3])


def test_layers_with_one_weight_have_one_optimizer_state_and_buffers_none(
    tmp_path: Path, first_trial: MakeTrial
) -> None:
    trial = first_trial("tied")
    perform(tmp_path, golden_work(trial, [trial]))
    loaded = load_training(tmp_path, trial.training, trial.rules)

    def names(layer: str, where: str) -> list[str]:
        aim = loaded.prepared_fault(replace(trial, layer=layer, where=where))
        return [info.name.rsplit("/", 1)[0] for info in aim.population.tensors]

    numbers = loaded.session.parameters()
    assert numbers["model/first.weight"] == numbers["model/second.weight"]
    first, second = (
        sorted({f"optimizer/state/{numbers[f'model/{layer}.{part}']}" for part in ("weight", "bias")})
        for layer in ("first", "second")
    )
    assert sorted(names("first", "role:optimizer")) == first
    assert sorted(names("second", "role:optimizer")) == second
    everything = loaded.prepared_fault(replace(trial, where="role:model")).population.tensors
    assert "model/aaa_scale" not in {info.name for info in everything}


def test_a_models_own_check_is_the_trainings_end_and_not_the_studys(tmp_path: Path, first_trial: MakeTrial) -> None:
    seen = run(tmp_path, first_trial("asserting", fault="bitflip:bits=sign"))
    assert (seen.end, seen.reason) == (TrialEnd.CRASHED, "AssertionError: negative")


def test_an_extreme_number_is_seen_wherever_in_the_state_it_is(tmp_path: Path, first_trial: MakeTrial) -> None:
    trial = first_trial("small", fault="setvalue:value=1e20", where="optimizer/state/0/step")
    trial = replace(trial, training=replace(trial.training, optimizer="adam"))  # type: ignore[arg-type]
    seen = run(tmp_path, trial)
    assert (seen.extreme_at, seen.extreme_in) == (0, "state")


def test_a_golden_run_is_held_to_the_rules_of_today(tmp_path: Path, first_trial: MakeTrial) -> None:
    trial = first_trial()
    run(tmp_path, trial)
    cold()
    with pytest.raises(UsageError, match="is not sound"):
        perform(tmp_path, trial_work(replace(trial, rules=replace(trial.rules, extreme=1e-6))))


def test_a_record_without_its_checkpoint_is_made_again(tmp_path: Path, first_trial: MakeTrial) -> None:
    trial = first_trial()
    before = run(tmp_path, trial)
    (golden_folder(tmp_path, trial.training.key) / "checkpoint.pt").unlink()
    cold()
    assert same(run(tmp_path, trial), before)


@pytest.mark.parametrize("device", ["cuda", "tpu", "cuda:99"])
def test_a_device_that_is_not_there_is_said(tmp_path: Path, first_trial: MakeTrial, device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one here")
    trial = first_trial()
    trial = replace(trial, training=replace(trial.training, device=device))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^device"):
        perform(tmp_path, golden_work(trial, []))


def test_a_workload_that_is_judged_by_its_loss_is_degraded_when_the_loss_rises(
    tmp_path: Path, first_trial: MakeTrial
) -> None:
    trial = replace(first_trial("lossy", epochs=0), fault="scale:factor=0.0001", flips=8)
    seen = run(tmp_path, trial)
    golden = read_golden(tmp_path, trial.training.key)
    assert golden is not None
    assert golden.direction is Direction.LOWER
    assert seen.metrics[-1] > golden.observation.metrics[-1] + 0.02
    verdict = judge(seen, golden.observation, direction=golden.direction, chance=None)
    assert verdict is Outcome.DEGRADED
    cold()
    record = golden_folder(tmp_path, trial.training.key) / "golden.json"
    told = json.loads(record.read_text())
    record.write_text(
        json.dumps({name: value for name, value in told.items() if name != "check"} | {"direction": "higher_is_better"})
    )
    with pytest.raises(StudyError, match=r"metric is lower_is_better, the golden run was recorded as higher.* Remove "):
        run(tmp_path, trial)
