"""What a worker does: make golden runs, and trials. It keeps models, data and groups of ranks between them.

A training of one process runs in the worker itself. One that is spread over ranks runs in a warm group of processes,
which all do here what the worker would have done. A rank that dies, or whose training raises an error, ends its trial
and its group, and the next trial has a new one.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from evergrad.errors import EvergradError, StudyError, UsageError
from evergrad.injection import InjectionLog
from evergrad.injection.faults import fault_of
from evergrad.injection.injection_plan import InjectionPlan
from evergrad.records import Json
from evergrad.study.folder import SCRATCH
from evergrad.study.golden import golden_folder, read_golden
from evergrad.study.loaded_trainings import LoadedTraining, ensure_golden, load_training
from evergrad.study.observe import TrainingFailed, observe
from evergrad.study.rank_group import GroupRankLost, RankGroup, cached_group
from evergrad.study.trials import TARGETS, TRANSIENT_TARGETS, Command, Observation, Trial, TrialEnd, crashed_by_itself
from evergrad.training.settings import Training

if TYPE_CHECKING:
    from evergrad.injection import LiveInjection


# How a trial's faults get into its training: which ranks they hit, with which draws, and when.
#
# Faults in the state at the restart are the same as in a checkpoint file: the same seed hits the same elements and
# bits. Faults that happen later, or to what is never in a checkpoint, are scheduled by `inject_live`.

STATE_TARGETS = tuple(target for target in TARGETS if target not in TRANSIENT_TARGETS)
"""What is in a checkpoint."""


def draw_faulty_ranks(seed: int, count: int, ranks: int) -> list[int]:
    """Which ranks are hit: drawn, since rank 0 is not like the others.

    >>> draw_faulty_ranks(7, 2, 8)
    [2, 6]
    """
    return sorted(sorted(range(ranks), key=lambda rank: _derived_seed(seed, rank, "hit"))[:count])


def rank_seed(seed: int, rank: int, count: int) -> int:
    """What a rank's faults are drawn from: each has its own, and a single one has the trial's."""
    return seed if count == 1 else _derived_seed(seed, rank, "draws")


@dataclass(slots=True)
class TrialInjection:
    """What a trial's faults have come to on this rank."""

    rank: int = 0
    places: int = 0
    """Bits that they could have hit, where that is known."""
    restart_plan: InjectionPlan | None = None
    live: LiveInjection | None = None

    @property
    def injected(self) -> int:
        """Faults that have happened so far."""
        found = self._injected
        return 0 if found is None else found.injected

    @property
    def changed(self) -> int:
        """Of those, the ones that changed a bit."""
        found = self._injected
        return 0 if found is None else found.changed

    def hits(self) -> list[Json]:
        """Each of them, in words and as data."""
        found = self._injected
        columns = () if found is None else found.columns
        return [{"rank": self.rank, "words": str(hit), **hit.to_json()} for column in columns for hit in column.hits()]

    def check_happened(self) -> None:
        """`StudyError` if the training has ended, and its faults have not happened."""
        if self.live is not None and not self.live.done:
            raise StudyError("the training has ended before its faults happened: choose an earlier step")

    def remove_hooks(self) -> None:
        """Nothing more is scheduled."""
        if self.live is not None:
            self.live.remove()

    @property
    def _injected(self) -> InjectionPlan | InjectionLog | None:
        return self.restart_plan if self.live is None else self.live.log


def inject_trial_faults(
    loaded: LoadedTraining, trial: Trial, injection: TrialInjection, *, rehearsal: bool = False
) -> None:
    """Let a trial's faults happen on this rank, now or when their step comes; a rehearsal only tries where they aim."""
    session = loaded.session
    injection.rank = session.rank
    mine = session.rank in draw_faulty_ranks(trial.seed, trial.ranks, session.ranks)
    seed = rank_seed(trial.seed, session.rank, trial.ranks)
    if trial.target in STATE_TARGETS and trial.step == 0:
        aim = loaded.prepared_fault(trial)
        injection.places = aim.population.bits
        numbers = int(aim.population.sizes.sum())
        if trial.flips > numbers:
            raise UsageError(f"flips: expected at most {numbers:,}, the numbers that there are, found {trial.flips:,}")
        if mine and not rehearsal:
            injection.restart_plan = aim.inject(trial.flips, seed)
    elif mine or rehearsal:
        from evergrad.injection import inject_live

        injection.live = inject_live(
            session.module,
            session.optimizer,
            fault_of(trial.fault),
            target=trial.target,
            where=loaded.target_names(trial) if trial.target in STATE_TARGETS else trial.where or None,
            step=trial.step,
            count=trial.flips,
            seed=seed,
        )
        if rehearsal:
            injection.remove_hooks()


def _derived_seed(seed: int, rank: int, what: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {rank} {what}".encode(), digest_size=7).digest(), "big")


_HERE = "evergrad.study.tasks:perform_here"
_ATTEMPTS = 3
_CUT_OFF = re.compile(r"gloo|nccl|connection (closed|reset)|DistBackendError|DistNetworkError", re.IGNORECASE)
_DEATHS_S = 5.0


def perform(folder: Path, work: Mapping[str, Any]) -> dict[str, Json]:
    """Do one task in a study's folder; gives a `Golden` or an `Observation` as JSON."""
    trial = Trial.from_json(work["trial"])
    if work["kind"] != "golden" and trial.saving is not None:
        return _run_cost_trial(folder, trial).to_json()
    if isinstance(trial.training, Training) and trial.training.mechanism != "single":
        return _perform_on_ranks(folder, work, trial.training)
    return perform_here(folder, work)


def perform_here(folder: Path, work: Mapping[str, Any]) -> dict[str, Json]:
    """Do it in this process; where it is a rank, all others of its group do the same at the same time."""
    trial = Trial.from_json(work["trial"])
    if work["kind"] == "golden":
        golden = ensure_golden(folder, trial)
        for one in work["aims"]:
            _check_targets(folder, Trial.from_json(one))
        return golden.to_json()
    if isinstance(trial.training, Command):
        return _run_program_trial(folder, trial, trial.training).to_json()
    injection = TrialInjection()
    seen = _run_trial(folder, trial, trial.training, injection).to_json()
    return {**seen, "hits": injection.hits()} if work["kind"] == "replay" else seen


def _run_cost_trial(folder: Path, trial: Trial) -> Observation:
    from evergrad.study.checkpoint_cost import perform_saving

    golden = read_golden(folder, trial.training.key)
    assert golden is not None, "the golden run comes first"
    return perform_saving(folder, trial, golden)


def _perform_on_ranks(folder: Path, work: Mapping[str, Any], training: Training) -> dict[str, Json]:
    """By all ranks of a warm group; rank 0's answer, with the faults of all."""
    reasons: list[str] = []
    for _ in range(_ATTEMPTS):
        try:
            group = cached_group(training.ranks, training.device, folder=folder / SCRATCH)
            answers = group.call(_HERE, folder, work, is_last=partial(_ends_trial, group))
        except GroupRankLost as lost:
            reasons.append(str(lost))
            if sum(map(crashed_by_itself, reasons)) > 1:
                break
            continue
        return _merge_rank_answers(answers, Trial.from_json(work["trial"]))
    reason = f"{reasons[-1]}, of {training.ranks}; so did {len(reasons) - 1} before it"
    if work["kind"] == "golden":
        raise StudyError(f"the golden run of {training.name} has lost a rank: {reason}")
    end = TrialEnd.CRASHED if crashed_by_itself(reasons[-1]) else TrialEnd.LOST
    return Observation(end=end, reason=reason).to_json()


def _ends_trial(group: RankGroup, answer: Mapping[str, Any]) -> bool:
    """Whether an answer ends the trial. An error of communication is no training's own: somebody has died."""
    if _is_last(answer) and _CUT_OFF.search(str(answer["reason"])):
        group.check_alive(_DEATHS_S)
    return _is_last(answer)


def _is_last(answer: Mapping[str, Any]) -> bool:
    """Whether the other ranks now wait for what will not come."""
    return answer.get("end") in (TrialEnd.CRASHED, TrialEnd.LOST)


def _merge_rank_answers(answers: list[dict[str, Any] | None], trial: Trial) -> dict[str, Json]:
    for rank, answer in enumerate(answers):
        if answer is not None and _is_last(answer):
            crashed: dict[str, Json] = {**answer, "reason": f"rank {rank}: {answer['reason']}"}
            if trial.step == 0 and trial.target in STATE_TARGETS:  # then all were hit before anything could fail
                crashed["injected"] = trial.flips * trial.ranks
            return crashed
    whole = [answer for answer in answers if answer is not None]
    found: dict[str, Json] = dict(whole[0])
    for count in ("injected", "changed"):
        if count in found:
            found[count] = sum(int(answer[count]) for answer in whole)
    if "hits" in found:
        found["hits"] = [hit for answer in whole for hit in answer["hits"]]
    return found


def _check_targets(folder: Path, trial: Trial) -> None:
    """Whether the faults of a cell have enough places: a cell that cannot be is better known before it begins."""
    if isinstance(trial.training, Command) or trial.saving is not None:
        return  # the injector says so at the first trial
    loaded = load_training(folder, trial.training, trial.rules)
    try:
        loaded.reset()
        steps = trial.training.epochs * loaded.session.steps_per_epoch
        if trial.step >= steps and (trial.step or trial.target not in STATE_TARGETS):
            raise UsageError(f"step: expected less than the {steps} steps after the checkpoint, found {trial.step}")
        inject_trial_faults(loaded, trial, TrialInjection(), rehearsal=True)
    except EvergradError as error:
        cell = ", ".join(f"{name} {value}" for name, value in trial.axes.items())
        raise UsageError(f"impossible cell ({cell}): {error}") from None


def _run_program_trial(folder: Path, trial: Trial, command: Command) -> Observation:
    from evergrad.study.external_training import run_trial

    began = perf_counter()
    golden = read_golden(folder, command.key)
    assert golden is not None, "the golden run comes first"
    (folder / SCRATCH).mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder / SCRATCH))
    try:
        checkpoint = golden_folder(folder, golden.key) / golden.checkpoint
        seen = run_trial(command, checkpoint, golden.observation, trial, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return replace(seen, seconds=perf_counter() - began)


def _run_trial(folder: Path, trial: Trial, training: Training, injection: TrialInjection) -> Observation:
    began = perf_counter()
    loaded = load_training(folder, training, trial.rules)
    loaded.reset()
    inject_trial_faults(loaded, trial, injection)
    try:
        seen = _observe_trial(loaded, trial, training, injection)
    finally:
        injection.remove_hooks()
    return replace(
        seen,
        injected=injection.injected,
        changed=injection.changed,
        places=injection.places,
        seconds=perf_counter() - began,
    )


def _observe_trial(loaded: LoadedTraining, trial: Trial, training: Training, injection: TrialInjection) -> Observation:
    try:
        seen = observe(loaded.session, training.epochs, trial.rules, loaded.trajectory)
    except MemoryError as error:
        return Observation(end=TrialEnd.LOST, reason=f"out of memory: {error}"[:300])
    except EvergradError:
        raise  # of a fault that finds no place, say: it is the plan's, and not the training's
    except TrainingFailed as cut:
        assert cut.__cause__ is not None
        ended = _crashed(cut.__cause__, training)
        return replace(cut.observation, end=ended.end, reason=ended.reason)
    except Exception as error:
        return _crashed(error, training)
    if seen.end is TrialEnd.FINISHED:
        injection.check_happened()
    return seen


def _crashed(error: BaseException, training: Training) -> Observation:
    """The training's own error: an index out of a corrupted number, a check of the model's."""
    if isinstance(error, torch.OutOfMemoryError):
        return Observation(end=TrialEnd.LOST, reason=f"out of memory: {error}"[:300])
    if training.device != "cpu":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            # Nothing works on that device any more in this process. A second worker dies of it, and it is the trial's.
            os.abort()
    lines = str(error).splitlines()
    return Observation(end=TrialEnd.CRASHED, reason=f"{type(error).__name__}: {lines[0] if lines else ''}"[:300])
