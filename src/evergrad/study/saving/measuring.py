"""A worker's part of measuring what saving costs: groups of pinned ranks, and from their times to an observation.

| cost, in seconds | of |
|---|---|
| `blocked_s` | each save: from its call to its return, on the rank where that took longest |
| `own_s` | the same, less the time in which a rank could have run and its core was at something else |
| `with_s`, `without_s` | the trial's steps with the saves, and the same steps without, from the same state |
| `drained_s` | from the end of the steps until all that was saved was durable: what was left to the background |
| `first_s` | the save after each epoch of a training that is restarted: the first of its processes, and so slower |
| `restore_s` | each restart: from a loaded model to its restored state, on all ranks |
| `restart_s` | the same: from the kill of all ranks until all new ones could begin their first step |

One trial at a time: on a machine that does something else, times mean nothing.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

from evergrad.errors import StudyError, UsageError
from evergrad.records import Json
from evergrad.study.folder import SCRATCH
from evergrad.study.golden import Golden
from evergrad.study.ranks.group import RankGroup
from evergrad.study.ranks.keeping import end_groups, warm_group
from evergrad.study.ranks.tending import RankLost
from evergrad.study.trials import End, Observation, Series, Trial
from evergrad.training.settings import Training

_PAIR = "evergrad.study.saving.blocks:measure_pair"
_EPOCH = "evergrad.study.saving.blocks:train_epoch"


def perform_saving(folder: Path, trial: Trial, golden: Golden) -> Observation:
    """One trial: a training that is saved on its way, or killed and restarted, and what that cost."""
    began = perf_counter()
    training, saving = trial.training, trial.saving
    assert saving is not None
    if not isinstance(training, Training):
        raise UsageError("saving: expected a [training]: what a program of one's own saves is its own matter")
    if saving.strategy == "none" and saving.restarts:
        raise UsageError("saving: 'none' has nothing to restart from. Choose root or evergrad, or restarts = false.")
    if training.mechanism != "ddp":
        raise UsageError(f"saving: expected mechanism 'ddp', of one rank or more, found {training.mechanism!r}")
    try:
        with _scratch(folder) as scratch:
            work: dict[str, Json] = {
                "trial": trial.to_json(),
                "scratch": str(scratch),
                "cores": [*sorted(os.sched_getaffinity(0))],
            }
            seen = (_restarted if saving.restarts else _paired)(folder, trial, training, work)
    except RankLost as lost:
        return Observation(end=End.LOST, reason=f"{lost}, of {training.ranks}", seconds=perf_counter() - began)
    return Observation(
        end=End.FINISHED,
        steps=len(seen["losses"]),
        metrics=tuple(seen["metrics"]),
        losses=Series.of(seen["losses"]),
        digest=seen["digest"],
        costs=seen["costs"],
        seconds=perf_counter() - began,
    )


def _paired(folder: Path, trial: Trial, training: Training, work: Mapping[str, Json]) -> dict[str, Any]:
    """Both blocks; which comes first takes turns."""
    order: list[Json] = ["without", "with"] if trial.repetition % 2 == 0 else ["with", "without"]
    group = warm_group(training.ranks, training.device, pinned=True)  # each on a core of its own where there are enough
    answers = _whole(group.call(_PAIR, folder, {**work, "order": order}))
    saved, bare = ([answer[name] for answer in answers] for name in ("with", "without"))
    if bare[0]["digest"] != saved[0]["digest"]:
        raise StudyError(
            f"saving by {trial.saving and trial.saving.strategy} changes the training of {training.name}: with saves "
            f"its weights are {saved[0]['digest'][:8]}, without {bare[0]['digest'][:8]}"
        )
    costs = {
        **_blocked(saved),
        "with_s": (max(answer["seconds"] for answer in saved),),
        "without_s": (max(answer["seconds"] for answer in bare),),
        "drained_s": (max(answer["drained"] for answer in saved),),
    }
    return {**saved[0], "costs": costs}


def _restarted(folder: Path, trial: Trial, training: Training, work: Mapping[str, Json]) -> dict[str, Any]:
    """An epoch a group of ranks; each group is killed after its own."""
    metrics: list[float] = []
    losses: dict[int, float] = {}
    saves: list[float] = []
    restores: list[float] = []
    restarts: list[float] = []
    digest = ""
    killed = 0.0
    end_groups()  # nobody else is on the cores whose time is taken
    for epoch in range(training.epochs):
        with RankGroup(training.ranks, device=training.device, pinned=True) as group:
            answers = _whole(group.call(_EPOCH, folder, {**work, "epoch": epoch}))
            killed, before = monotonic(), killed
        first = answers[0]
        metrics += first["metrics"]
        losses |= dict(enumerate(first["losses"], first["from"]))
        saves += _blocked(answers)["blocked_s"]
        digest = first["digest"]
        if epoch:
            restores.append(max(answer["restored"] for answer in answers))
            restarts.append(max(answer["ready"] for answer in answers) - before)
    costs = {"first_s": tuple(saves), "restore_s": tuple(restores), "restart_s": tuple(restarts)}
    return {"metrics": metrics, "losses": list(losses.values()), "digest": digest, "costs": costs}


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A place for what is saved, on the study's own disk; nothing of it stays, neither there nor in shared memory."""
    from evergrad.checkpoint.arena_folder import remove_orphans

    (folder / SCRATCH).mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder / SCRATCH, prefix="saving-")).absolute()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        remove_orphans()  # an agent that is still there does it when it leaves


def _blocked(answers: Sequence[dict[str, Any]]) -> dict[str, tuple[float, ...]]:
    """Of each save, the times of the rank that it kept longest."""
    blocked = [answer["blocked"] for answer in answers]
    own = [
        [whole - queued for whole, queued in zip(answer["blocked"], answer["queued"], strict=True)]
        for answer in answers
    ]
    found = {"blocked_s": blocked, "own_s": own}
    return {name: tuple(max(save) for save in zip(*times, strict=True)) for name, times in found.items()}


def _whole(answers: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
    found = [answer for answer in answers if answer is not None]
    assert len(found) == len(answers), "no answer ends a group early here"
    return found
