"""One trial as it is done today: a process of its own that injects into a file, resumes from it, trains, writes files.

`python fresh.py STUDY_FOLDER TRIAL_JSON OUT_FOLDER`: prints what it saw as JSON.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import torch

import evergrad as eg
from evergrad.injection.faults import fault_of
from evergrad.study.golden import golden_folder, read_golden
from evergrad.study.trials import Observation, Trial, TrialEnd
from evergrad.training.mechanisms.session import TrainingSnapshot
from evergrad.training.mechanisms.single import SingleSession
from evergrad.training.settings import Training
from evergrad.training.workloads.registry import make_workload


def main(study: Path, trial: Trial, out: Path) -> Observation:
    """Inject, resume, train, save."""
    torch.set_num_threads(1)
    training = trial.training
    assert isinstance(training, Training)
    golden = read_golden(study, training.key)
    assert golden is not None
    altered = out / f"{trial.id}.pt"
    clean = golden_folder(study, golden.key) / golden.checkpoint
    eg.inject(clean, fault_of(trial.fault), count=trial.flips, where=trial.where, seed=trial.seed, out=altered)
    state = torch.load(altered, weights_only=True)
    session = SingleSession(training, make_workload(training))
    tensors = {f"model/{name}": tensor for name, tensor in state["model"].items()}
    for index, slots in state["optimizer"]["state"].items():
        tensors |= {f"optimizer/state/{index}/{name}": tensor for name, tensor in slots.items()}
    session.restore(TrainingSnapshot(state["epoch"], tensors))
    seen = _train(session, training.epochs, trial.rules.extreme)
    torch.save({"model": {name: one for name, one in session.state().items() if name.startswith("model/")}}, altered)
    return seen


def _train(session: SingleSession, epochs: int, extreme: float) -> Observation:
    """Until it is over or not finite, with the same looks at it as a study has, but for the distances."""
    start = session.evaluate()
    metrics, numbers = [start.metric], [start.magnitude, float(session.magnitude())]
    step = 0
    for _ in range(epochs):
        if not all(map(math.isfinite, numbers)):
            break
        for number in range(session.steps_per_epoch):
            step += 1
            numbers += [float(session.step(number)), float(session.magnitude())]
            if not (math.isfinite(numbers[-1]) and math.isfinite(numbers[-2])):
                break
        else:
            seen = session.evaluate()
            metrics.append(seen.metric)
            numbers.append(seen.magnitude)
    finite = all(map(math.isfinite, numbers))
    beyond = any(abs(number) > extreme for number in numbers if math.isfinite(number))
    return Observation(
        end=TrialEnd.FINISHED if finite else TrialEnd.ABANDONED,
        metrics=tuple(metrics),
        nonfinite_at=None if finite else step,
        extreme_at=0 if beyond else None,
    )


if __name__ == "__main__":
    found = main(Path(sys.argv[1]), Trial.from_json(json.loads(sys.argv[2])), Path(sys.argv[3]))
    print(json.dumps(found.to_json()))
