"""Study folders made by hand: a plan, golden runs and a journal, without any training."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from evergrad.records import Json
from evergrad.study.folder import JournalEntry, StudyFolder, TrialJournal
from evergrad.study.golden import CHECKPOINT, GoldenRun, golden_folder, make_empty_folder, write_golden
from evergrad.study.plan import Plan
from evergrad.study.plan_files import parse, read_plan_text
from evergrad.study.trials import Observation, Series, Trial, TrialEnd

__all__ = ["GOLDEN", "See", "made_study", "seen_of"]

GOLDEN = Observation(
    end=TrialEnd.FINISHED,
    metrics=(0.8, 0.85, 0.9),
    steps=8,
    losses=Series(1, tuple(1 / (1 + step) for step in range(8))),
    distances=Series(1, (0.0,) * 8),
    predictions=100,
    mismatches=0,
    digest="golden",
)

See = Callable[[Trial], Observation]


def seen_of(trial: Trial) -> Observation:
    """More flips, more NaNs; the others end near the golden run. The seed alone decides."""
    chance = trial.seed % 100
    if "exponent-msb" in trial.fault or chance < min(97, 2 + 40 * math.log10(trial.flips)):
        losses = Series(1, (3e30, math.nan))
        return Observation(
            end=TrialEnd.ABANDONED, metrics=(0.1,), steps=2, losses=losses, distances=losses, nonfinite_at=2,
            nonfinite_in="loss", mismatches=90, predictions=100, injected=trial.flips, changed=trial.flips,
        )  # fmt: skip
    drop = 0.0 if chance > 70 else 0.001 * (chance % 5) + (0.2 if chance == 69 else 0)
    return Observation(
        end=TrialEnd.FINISHED,
        metrics=(0.8, 0.85, 0.9 - drop),
        steps=8,
        losses=Series(1, tuple((1 + drop) / (1 + step) for step in range(8))),
        distances=Series(1, tuple(1e-4 * (1 + step + chance) for step in range(8))),
        mismatches=chance % 3,
        predictions=100,
        digest="golden" if not drop else f"{chance}",
        injected=trial.flips,
        changed=trial.flips,
    )


def made_study(folder: Path, plan: str, see: See = seen_of, *, trainings: int = 6, only: int | None = None) -> Path:
    """A folder as `evergrad study run` leaves it; `plan` is a text, or the name of a study of the gallery."""
    in_gallery = "\n" not in plan
    source = read_plan_text(plan) if in_gallery else parse(plan, "toy.toml")
    overrides: dict[str, Json] = {"trainings": trainings}
    made = Plan.of(source, "tiny" if in_gallery else None, overrides)
    study = StudyFolder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    study.write_plan(made, made.study, overrides)
    golden: dict[str, GoldenRun] = {}
    for key, cells in made.by_training().items():
        make_empty_folder(folder, key)
        told = cells[0].training.to_json()
        golden[key] = GoldenRun(
            key=key, settings=told, observation=GOLDEN, checkpoint=CHECKPOINT, digest="0", chance=0.1
        )
        (golden_folder(folder, key) / CHECKPOINT).write_bytes(b"x")
        write_golden(folder, golden[key])
    with TrialJournal(study.journal) as journal:
        journal.append_run({"command": "evergrad study run", "evergrad": "0.1", "machine": "a toy"})
        trials = [cell.trial(number) for cell in made.cells for number in range(cell.trainings)]
        journal.append(JournalEntry(one, see(one), golden[one.training.key].run_id) for one in trials[:only])
    return folder
