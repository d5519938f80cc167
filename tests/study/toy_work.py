"""Work that takes no time and needs no torch, for tests of what runs it: verdicts depend on the trial's seed alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evergrad.study.golden import GoldenRun, make_empty_folder, read_golden, write_golden
from evergrad.study.trials import Observation, Trial, TrialEnd

CLEAN = Observation(end=TrialEnd.FINISHED, metrics=(0.8, 0.9), seconds=0.01)


def perform(folder: Path, work: Mapping[str, Any]) -> dict[str, Any]:
    """As `evergrad.study.tasks.perform`; notes each trial that it runs in `ran/`, and obeys files in `orders/`."""
    trial = Trial.from_json(work["trial"])
    if work["kind"] == "golden":
        key = trial.training.key
        if read_golden(folder, key) is None:
            make_empty_folder(folder, key)
            write_golden(
                folder,
                GoldenRun(
                    key=key, settings={"model": "toy"}, observation=CLEAN, checkpoint="x", digest="0", chance=0.1
                ),
            )
        return {}
    (folder / "ran").mkdir(exist_ok=True)
    fd = os.open(folder / "ran" / trial.id, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, b"x")
    os.close(fd)
    _obey(folder, trial)
    bad = trial.seed % 100 < min(90, 8 * trial.flips)
    if bad:
        return Observation(end=TrialEnd.ABANDONED, metrics=(0.1,), nonfinite_at=1, nonfinite_in="loss").to_json()
    return Observation(end=TrialEnd.FINISHED, metrics=(0.8, 0.9 - 0.001 * (trial.seed % 3))).to_json()


def _obey(folder: Path, trial: Trial) -> None:
    orders = folder / "orders"
    if (orders / "slow").exists():
        time.sleep(0.02)
    if (orders / f"die-{trial.id}").exists():
        os.kill(os.getpid(), int(getattr(signal, (orders / f"die-{trial.id}").read_text())))
    if (orders / f"die-once-{trial.id}").exists():
        (orders / f"die-once-{trial.id}").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
