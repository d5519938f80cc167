"""The tasks that a study gives to workers, as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from evergrad.records import Json
from evergrad.study.trials import Trial


def golden_work(trial: Trial, aims: Sequence[Trial]) -> dict[str, Json]:
    """Make the golden run of a trial's training, and try where these trials aim."""
    return {"kind": "golden", "trial": trial.to_json(), "aims": [one.to_json() for one in aims]}


def replay_work(trial: Trial) -> dict[str, Json]:
    """Run one trial, and tell every fault of it."""
    return {"kind": "replay", "trial": trial.to_json()}


def trial_work(trial: Trial) -> dict[str, Json]:
    """Run one trial."""
    return {"kind": "trial", "trial": trial.to_json()}
