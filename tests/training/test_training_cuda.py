"""On a GPU: every model repeats itself to the last bit, and a trial alone is the same as in its study."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evergrad.study.golden import read_golden
from evergrad.study.observe import digest_of
from evergrad.study.rank_group import end_cached_groups
from evergrad.study.tasks import perform
from evergrad.study.trials import Observation, Outcome, Trial, golden_work, judge, trial_work
from evergrad.training import Training
from evergrad.training.mechanisms import make_session
from evergrad.training.workloads.registry import MODELS, make_workload

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("model", MODELS)
def test_the_same_settings_give_the_same_bits_on_a_gpu(model: str, precision: str) -> None:
    if model == "edsr":
        pytest.importorskip("skimage", reason="its photographs come with scikit-image")
    data = {"gpt": "text", "edsr": "photos"}.get(model, "digits")
    training = Training(model=model, data=data, width=0.125, samples=256, precision=precision, device="cuda")
    digests = set()
    for _ in range(2):
        session = make_session(training, make_workload(training))
        for number in range(session.steps_per_epoch):
            session.step(number)
        session.evaluate()
        digests.add(digest_of(session))
    assert len(digests) == 1


def test_a_trial_on_a_gpu_replays_to_the_same_bits_and_flips_matter(tmp_path: Path) -> None:
    training = Training(model="resnet18", width=0.125, samples=512, epochs=1, learning_rate=0.01, device="cuda")
    trial = Trial(id="a", axes={"flips": 1}, repetition=0, seed=1, training=training, fault="bitflip", flips=1)
    perform(tmp_path, golden_work(trial, [trial]))
    golden = read_golden(tmp_path, training.key)
    assert golden is not None
    wild = replace(trial, fault="bitflip:bits=exponent-msb", flips=100)
    first = Observation.from_json(perform(tmp_path, trial_work(trial)))
    assert judge(Observation.from_json(perform(tmp_path, trial_work(wild))), golden.observation) is Outcome.NEV
    again = Observation.from_json(perform(tmp_path, trial_work(trial)))
    assert replace(first, seconds=0).to_json() == replace(again, seconds=0).to_json()
    assert first.digest


def test_ranks_of_ddp_on_a_gpu_repeat_their_trials_to_the_last_bit(tmp_path: Path) -> None:
    training = Training(
        model="resnet18", width=0.125, samples=256, mechanism="ddp", ranks=2, learning_rate=0.01, device="cuda"
    )
    trial = Trial(id="a", axes={"flips": 1}, repetition=0, seed=1, training=training, fault="bitflip", flips=1)
    try:
        perform(tmp_path, golden_work(trial, [trial]))
        first, again = (Observation.from_json(perform(tmp_path, trial_work(trial))) for _ in range(2))
        for target in ("activations", "gradients", "communication"):
            live = Observation.from_json(perform(tmp_path, trial_work(replace(trial, target=target, where="", step=1))))
            assert live.injected == 1, target
    finally:
        end_cached_groups()
    assert first.digest
    assert first.injected == 1
    assert replace(first, seconds=0).to_json() == replace(again, seconds=0).to_json()
