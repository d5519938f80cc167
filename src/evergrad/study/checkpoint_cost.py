"""The cost of checkpointing: trials that save, paired with the same steps without saves; and restarts.

A rank's part measures pairs of steps with and without saves, and resumes from what was saved. A worker's part starts
groups of ranks on cores of their own and turns their times into an observation.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from evergrad import _files
from evergrad.checkpoint.checkpointer import Checkpointer
from evergrad.checkpoint.tiers import Local, Memory, Persistent
from evergrad.errors import StudyError, UsageError
from evergrad.records import Json
from evergrad.state.paths import split
from evergrad.study.folder import SCRATCH
from evergrad.study.golden import GoldenRun, golden_folder, read_golden
from evergrad.study.loaded_trainings import read_snapshot
from evergrad.study.observe import digest_of
from evergrad.study.rank_group import GroupRankLost, RankGroup, cached_group, end_cached_groups
from evergrad.study.trials import SAVING_STRATEGIES, Observation, Saving, Series, Trial, TrialEnd
from evergrad.training.mechanisms import make_session
from evergrad.training.mechanisms.session import Session
from evergrad.training.settings import Training
from evergrad.training.workloads.registry import make_workload
from evergrad.wording import checked_choice

if TYPE_CHECKING:
    from evergrad.checkpoint import Pending

__all__ = ["perform_saving"]


def __getattr__(name: str) -> object:
    # Ranks come through this package and need no groups of ranks themselves.
    if name not in __all__:
        raise AttributeError(f"module 'evergrad.study.checkpoint_cost' has no attribute {name!r}")
    value = getattr(import_module("evergrad.study.checkpoint_cost"), name)
    globals()[name] = value
    return value


# How a training is saved on its way: not at all, by rank 0 alone, or by Evergrad.
#
# | | save | restore | |---|---|---| | `none` | nothing | – | | `root` | rank 0 writes a file by `torch.save`, and
# fsync; all wait at a barrier until it has | rank 0 reads the file, and broadcasts tensor by tensor | | `evergrad` |
# each rank copies its state into shared memory; the node's agent brings it to the local disk, and every tenth to the
# shared one | each rank from the nearest tier that has it |
#
# Every rank has one of these, and all call the same methods in the same order. A save is of the live tensors of a
# session; restoring puts what was saved back into them. What a save costs its training is the time that `save` takes;
# what is left to do then goes on beside the training, until `drain`.

FLUSH_EVERY = 10
"""Of Evergrad's saves, every so-manyth goes to the shared file system."""

_FILE = "root.pt"
_LINGER_S = 15.0
"""How long an agent stays without trainers: longer than a group of ranks takes to start."""


class Saver(ABC):
    """One rank's part of saving a training."""

    @abstractmethod
    def save(self, step: int) -> None:
        """Save the state after that many steps; returns when the training may go on."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until everything that was saved is durable."""

    @abstractmethod
    def restore(self) -> int:
        """Take up the newest state that was saved; after how many steps it was."""

    @abstractmethod
    def close(self) -> None:
        """Let go of whatever it holds; may be called twice."""


def make_saver(
    name: str, folder: Path, state: Mapping[str, Tensor], shared: Sequence[str], cores: Sequence[int], *, ready: bool
) -> Saver:
    """A strategy by its name. `shared` names the tensors that are equal on all ranks; `cores` are this machine's.

    `ready`: what saves need is made now, and not at the first ones.
    """
    checked_choice("saving", name, SAVING_STRATEGIES)
    if name == "root":
        return RankZeroSaver(folder, state)
    return EvergradSaver(folder, state, shared, cores, ready=ready) if name == "evergrad" else NoSaver()


class NoSaver(Saver):
    """The training as it is."""

    def save(self, step: int) -> None:
        """Nothing."""

    def drain(self) -> None:
        """Nothing is under way."""

    def restore(self) -> int:
        """There is nothing to restore."""
        raise UsageError("saving: 'none' has nothing to restart from. Choose root or evergrad, or restarts = false.")

    def close(self) -> None:
        """Nothing is held."""


class RankZeroSaver(Saver):
    """Rank 0 writes, all wait; rank 0 reads, all are told."""

    def __init__(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        self._path, self._state = folder / _FILE, state

    def save(self, step: int) -> None:
        """As training scripts do it; the file is whole or not there."""
        if distributed.get_rank() == 0:
            beside = self._path.with_suffix(".new")
            torch.save({"step": step, "state": dict(self._state)}, beside)
            _files.fsync_path(beside)
            _files.rename(beside, self._path)
            _files.fsync_folder(self._path.parent)
        distributed.barrier()

    def drain(self) -> None:
        """A save is durable when it returns."""

    def restore(self) -> int:
        """Into the live tensors, rank 0's first."""
        step = torch.zeros(1, dtype=torch.int64)
        if distributed.get_rank() == 0:
            found = torch.load(self._path, map_location="cpu", weights_only=True)
            step[0] = found["step"]
            with torch.no_grad():
                for name, tensor in self._state.items():
                    tensor.copy_(found["state"][name])
        under_way = [distributed.broadcast(tensor, 0, async_op=True) for tensor in (step, *self._state.values())]
        for one in under_way:
            assert one is not None
            one.wait()
        return int(step)

    def close(self) -> None:
        """No file is open."""


class EvergradSaver(Saver):
    """Memory and the node's own disk at every save, a shared file system at every tenth."""

    def __init__(
        self,
        folder: Path,
        state: Mapping[str, Tensor],
        shared: Sequence[str],
        cores: Sequence[int],
        *,
        ready: bool,
    ) -> None:
        self._state = _nested(state)
        self._pending: list[tuple[Pending, str]] = []
        self._saves = 0
        tiers = [Memory(), Local(), Persistent(str(folder / "shared"), every=FLUSH_EVERY)]
        # The first rank to come starts the agent, which works beside all of them: not on that rank's core alone.
        with _on_cores(cores):
            self._checkpointer = Checkpointer(
                folder / "run",
                tiers,
                replicated=list(shared),
                reserve=self._state if ready else None,
                linger_s=_LINGER_S,
            )

    def save(self, step: int) -> None:
        """Returns after the copy."""
        pending = self._checkpointer.save(step, self._state)
        is_flushed = self._saves % FLUSH_EVERY == 0  # the first of an attempt, and every tenth after it
        self._pending.append((pending, "persistent" if is_flushed else "local"))
        self._saves += 1

    def drain(self) -> None:
        """Every version in the furthest tier that it goes to; those of the local disk make place for later ones."""
        for place, (pending, tier) in enumerate(self._pending, 1):
            if tier == "persistent" or place == len(self._pending):
                pending.wait(tier)
                if tier == "persistent":
                    pending.wait("local")
        self._pending.clear()

    def restore(self) -> int:
        """From the nearest tier, each digest checked."""
        step = self._checkpointer.restore(self._state)
        if step is None:
            raise StudyError("nothing was saved that could be restored")
        self._saves = 0
        return step

    def close(self) -> None:
        """The agent finishes what is under way, and leaves."""
        self._checkpointer.close()


def _nested(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """`model/conv1.weight` as `{"model": {"conv1.weight": …}}`; what has more parts keeps them."""
    found: dict[str, Any] = {}
    for name, tensor in state.items():
        *folders, last = split(name)
        place = found
        for one in folders:
            place = place.setdefault(one, {})
        place[last] = tensor
    return found


@contextmanager
def _on_cores(cores: Sequence[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# A rank's part of measuring what saving costs: all ranks of a pinned group do this at the same time.
#
# A block is a trial's whole training from its checkpoint on. `measure_pair` trains one with saves and one without,
# from the same state, one right after the other: whatever else slows the machine down slows both. `train_epoch`
# trains up to the end of one epoch, from what was saved before, so that all ranks may be killed in between.
#
# In the time of a block counts what training does: steps, saves, and evaluation between epochs, in both blocks alike.
# The evaluations before the first step and after the last do not, and are left out where nothing is saved: there the
# weights tell whether it is the same training.


@dataclass(slots=True)
class TimedSteps:
    """What a rank saw of one block; times in seconds."""

    seconds: float = 0.0
    drained: float = 0.0
    """From the block's end until all that was saved in it was durable."""
    blocked: list[float] = field(default_factory=list)
    """Of each save: from its call to its return."""
    queued: list[float] = field(default_factory=list)
    """Of that, how long this rank could have run, and its core was at something else: another rank, the agent."""
    metrics: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    digest: str = ""


@dataclass(slots=True)
class _Loaded:
    key: str
    session: Session
    reset: Callable[[], None]


_loaded: list[_Loaded] = []


def measure_pair(folder: Path, work: Mapping[str, Any]) -> dict[str, Json]:
    """A block with saves and one without, in the order that the work says."""
    saving, training = _saving_and_training(work)
    golden = _golden(folder, training)
    loaded = _load_training(folder, training, golden)
    strategy = _saver_of(loaded.session, saving, work, ready=True)
    found: dict[str, Json] = {}
    try:
        # What is made at a first save is there then: files, arenas, whatever torch.save imports.
        strategy.save(0)
        strategy.drain()
        for name in work["order"]:
            loaded.reset()
            saves = strategy if name == "with" else NoSaver()
            found[name] = asdict(_block(loaded.session, training, saving, saves, judged=name == "with"))
    finally:
        strategy.close()
    return found


def train_epoch(folder: Path, work: Mapping[str, Any]) -> dict[str, Json]:
    """Take up the study's checkpoint, or from the second epoch on what was saved, and train to the end of that epoch.

    `ready` is the machine's clock when the first step could begin, on this rank.
    """
    saving, training = _saving_and_training(work)
    number = int(work["epoch"])
    session = make_session(training, make_workload(training))
    strategy = _saver_of(session, saving, work) if number == 0 else None
    block = TimedSteps()
    begun = monotonic()
    if strategy is None:
        strategy = _saver_of(session, saving, work)
        step = strategy.restore()
        session.epoch = training.checkpoint + step // session.steps_per_epoch
    else:
        golden = _golden(folder, training)
        session.restore(read_snapshot(golden_folder(folder, training.key), golden, session))
        step = 0
    distributed.barrier()
    ready = monotonic()
    if number == 0:
        block.metrics.append(session.evaluate().metric)
    is_last = number + 1 == training.epochs
    _train(session, training, saving, strategy, block, range(step, (number + 1) * session.steps_per_epoch))
    block.metrics.append(session.evaluate().metric)
    block.digest = digest_of(session)
    if is_last:
        strategy.drain()
        strategy.close()
    # Otherwise this process is killed as it is, with everything open.
    distributed.barrier()
    return {"restored": ready - begun, "ready": ready, "from": step, **asdict(block)}


def _block(session: Session, training: Training, saving: Saving, strategy: Saver, *, judged: bool = True) -> TimedSteps:
    block = TimedSteps(metrics=[session.evaluate().metric] if judged else [])
    per_epoch = session.steps_per_epoch
    distributed.barrier()
    begun = monotonic()
    for epoch in range(training.epochs):
        if epoch:
            block.metrics.append(session.evaluate().metric)
        _train(session, training, saving, strategy, block, range(epoch * per_epoch, (epoch + 1) * per_epoch))
    distributed.barrier()
    ended = monotonic()
    strategy.drain()
    distributed.barrier()
    block.seconds, block.drained = ended - begun, monotonic() - ended
    if judged:
        block.metrics.append(session.evaluate().metric)
    block.digest = digest_of(session)
    return block


def _train(
    session: Session, training: Training, saving: Saving, strategy: Saver, block: TimedSteps, steps: range
) -> None:
    """These steps after the checkpoint, of one epoch, with the saves that are due."""
    every = saving.every or session.steps_per_epoch
    for step in steps:
        block.losses.append(float(session.step(step % session.steps_per_epoch)))
        if (step + 1) % every == 0:
            begun, waited = monotonic(), _run_queue_wait_s()
            strategy.save(step + 1)
            block.blocked.append(monotonic() - begun)
            block.queued.append(_run_queue_wait_s() - waited)


def _run_queue_wait_s() -> float:
    """How long this thread has waited for its core so far, as Linux counts it; 0 where it does not."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def _load_training(folder: Path, training: Training, golden: GoldenRun) -> _Loaded:
    """The loaded training, of which a rank keeps one; it has repeated its golden run."""
    if _loaded and _loaded[0].key == training.key:
        return _loaded[0]
    _loaded.clear()
    session = make_session(training, make_workload(training))
    session.restore(read_snapshot(golden_folder(folder, training.key), golden, session))
    found = _Loaded(training.key, session, session.make_reset())
    again = _block(session, training, Saving(strategy="none"), NoSaver())
    seen = golden.observation
    if session.rank == 0 and (tuple(again.metrics), again.digest) != (seen.metrics, seen.digest):
        raise StudyError(
            f"these ranks do not repeat the golden run of {training.name}: they end with metric "
            f"{again.metrics[-1]:.6g} and weights {again.digest[:8]}, the golden run with {seen.metrics[-1]:.6g} and "
            f"{seen.digest[:8]}. Use one kind of machine and one version of torch for a study, or another folder."
        )
    _loaded.append(found)
    return found


def _golden(folder: Path, training: Training) -> GoldenRun:
    golden = read_golden(folder, training.key)
    assert golden is not None, "the golden run comes first"
    return golden


def _saver_of(session: Session, saving: Saving, work: Mapping[str, Any], *, ready: bool = False) -> Saver:
    state = session.state()
    # Replicas agree in what is averaged over ranks; the statistics of norms are each rank's own until the next pass.
    shared = [name for name in state if name in session.parameters() or not name.startswith("model/")]
    return make_saver(saving.strategy, Path(work["scratch"]), state, shared, work["cores"], ready=ready)


def _saving_and_training(work: Mapping[str, Any]) -> tuple[Saving, Training]:
    trial = Trial.from_json(work["trial"])
    assert trial.saving is not None
    assert isinstance(trial.training, Training)
    return trial.saving, trial.training


# A worker's part of measuring what saving costs: groups of pinned ranks, and from their times to an observation.
#
# | cost, in seconds | of | |---|---| | `blocked_s` | each save: from its call to its return, on the rank where that
# took longest | | `own_s` | the same, less the time in which a rank could have run and its core was at something else
# | | `with_s`, `without_s` | the trial's steps with the saves, and the same steps without, from the same state | |
# `drained_s` | from the end of the steps until all that was saved was durable: what was left to the background | |
# `first_s` | the save after each epoch of a training that is restarted: the first of its processes, and so slower | |
# `restore_s` | each restart: from a loaded model to its restored state, on all ranks | | `restart_s` | the same: from
# the kill of all ranks until all new ones could begin their first step |
#
# One trial at a time: on a machine that does something else, times mean nothing.

_PAIR = "evergrad.study.checkpoint_cost:measure_pair"
_EPOCH = "evergrad.study.checkpoint_cost:train_epoch"


def perform_saving(folder: Path, trial: Trial, golden: GoldenRun) -> Observation:
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
    except GroupRankLost as lost:
        return Observation(end=TrialEnd.LOST, reason=f"{lost}, of {training.ranks}", seconds=perf_counter() - began)
    return Observation(
        end=TrialEnd.FINISHED,
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
    group = cached_group(
        training.ranks, training.device, pinned=True
    )  # each on a core of its own where there are enough
    answers = _all_answers(group.call(_PAIR, folder, {**work, "order": order}))
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
    end_cached_groups()  # nobody else is on the cores whose time is taken
    for epoch in range(training.epochs):
        with RankGroup(training.ranks, device=training.device, pinned=True) as group:
            answers = _all_answers(group.call(_EPOCH, folder, {**work, "epoch": epoch}))
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
    from evergrad.checkpoint.run_folder import remove_orphans

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


def _all_answers(answers: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
    found = [answer for answer in answers if answer is not None]
    assert len(found) == len(answers), "no answer ends a group early here"
    return found
