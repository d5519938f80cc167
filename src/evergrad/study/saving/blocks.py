"""A rank's part of measuring what saving costs: all ranks of a pinned group do this at the same time.

A block is a trial's whole training from its checkpoint on. `measure_pair` trains one with saves and one without, from
the same state, one right after the other: whatever else slows the machine down slows both. `train_epoch` trains up to
the end of one epoch, from what was saved before, so that all ranks may be killed in between.

In the time of a block counts what training does: steps, saves, and evaluation between epochs, in both blocks alike. The
evaluations before the first step and after the last do not, and are left out where nothing is saved: there the weights
tell whether it is the same training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from torch import distributed

from evergrad.errors import StudyError
from evergrad.records import Json
from evergrad.study.golden import Golden, golden_folder, read_golden
from evergrad.study.observing import digest_of
from evergrad.study.saving.strategies import NoSaving, Strategy, make_strategy
from evergrad.study.trials import Saving, Trial
from evergrad.study.warming import read_snapshot
from evergrad.training.mechanisms import make_session
from evergrad.training.mechanisms.session import Session
from evergrad.training.settings import Training
from evergrad.training.workloads.registry import make_workload


@dataclass(slots=True)
class Block:
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
    take_up: Callable[[], None]


_loaded: list[_Loaded] = []


def measure_pair(folder: Path, work: Mapping[str, Any]) -> dict[str, Json]:
    """A block with saves and one without, in the order that the work says."""
    saving, training = _told(work)
    golden = _golden(folder, training)
    loaded = _kept(folder, training, golden)
    strategy = _strategy(loaded.session, saving, work, ready=True)
    found: dict[str, Json] = {}
    try:
        # What is made at a first save is there then: files, arenas, whatever torch.save imports.
        strategy.save(0)
        strategy.drain()
        for name in work["order"]:
            loaded.take_up()
            saves = strategy if name == "with" else NoSaving()
            found[name] = asdict(_block(loaded.session, training, saving, saves, judged=name == "with"))
    finally:
        strategy.close()
    return found


def train_epoch(folder: Path, work: Mapping[str, Any]) -> dict[str, Json]:
    """Take up the study's checkpoint, or from the second epoch on what was saved, and train to the end of that epoch.

    `ready` is the machine's clock when the first step could begin, on this rank.
    """
    saving, training = _told(work)
    number = int(work["epoch"])
    session = make_session(training, make_workload(training))
    strategy = _strategy(session, saving, work) if number == 0 else None
    block = Block()
    begun = monotonic()
    if strategy is None:
        strategy = _strategy(session, saving, work)
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


def _block(session: Session, training: Training, saving: Saving, strategy: Strategy, *, judged: bool = True) -> Block:
    block = Block(metrics=[session.evaluate().metric] if judged else [])
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
    session: Session, training: Training, saving: Saving, strategy: Strategy, block: Block, steps: range
) -> None:
    """These steps after the checkpoint, of one epoch, with the saves that are due."""
    every = saving.every or session.steps_per_epoch
    for step in steps:
        block.losses.append(float(session.step(step % session.steps_per_epoch)))
        if (step + 1) % every == 0:
            begun, waited = monotonic(), _queued()
            strategy.save(step + 1)
            block.blocked.append(monotonic() - begun)
            block.queued.append(_queued() - waited)


def _queued() -> float:
    """How long this thread has waited for its core so far, as Linux counts it; 0 where it does not."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def _kept(folder: Path, training: Training, golden: Golden) -> _Loaded:
    """The loaded training, of which a rank keeps one; it has repeated its golden run."""
    if _loaded and _loaded[0].key == training.key:
        return _loaded[0]
    _loaded.clear()
    session = make_session(training, make_workload(training))
    session.restore(read_snapshot(golden_folder(folder, training.key), golden, session))
    found = _Loaded(training.key, session, session.remember())
    again = _block(session, training, Saving(strategy="none"), NoSaving())
    seen = golden.observation
    if session.rank == 0 and (tuple(again.metrics), again.digest) != (seen.metrics, seen.digest):
        raise StudyError(
            f"these ranks do not repeat the golden run of {training.name}: they end with metric "
            f"{again.metrics[-1]:.6g} and weights {again.digest[:8]}, the golden run with {seen.metrics[-1]:.6g} and "
            f"{seen.digest[:8]}. Use one kind of machine and one version of torch for a study, or another folder."
        )
    _loaded.append(found)
    return found


def _golden(folder: Path, training: Training) -> Golden:
    golden = read_golden(folder, training.key)
    assert golden is not None, "the golden run comes first"
    return golden


def _strategy(session: Session, saving: Saving, work: Mapping[str, Any], *, ready: bool = False) -> Strategy:
    state = session.state()
    # Replicas agree in what is averaged over ranks; the statistics of norms are each rank's own until the next pass.
    shared = [name for name in state if name in session.parameters() or not name.startswith("model/")]
    return make_strategy(saving.strategy, Path(work["scratch"]), state, shared, work["cores"], ready=ready)


def _told(work: Mapping[str, Any]) -> tuple[Saving, Training]:
    trial = Trial.from_json(work["trial"])
    assert trial.saving is not None
    assert isinstance(trial.training, Training)
    return trial.saving, trial.training
