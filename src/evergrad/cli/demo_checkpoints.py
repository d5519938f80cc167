"""The demo's chapter of checkpoints: a killed trainer, a preempted job, and soft errors in a version."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from evergrad.errors import EvergradError

if TYPE_CHECKING:
    from evergrad.records import Json

PROCESSES = 2
"""The trainer that is killed, and the one that is preempted."""

_LIMIT_S = 60.0
_STEPS, _KILL_AT = 60, 40
_MORE_STEPS = 20
_FLIP = ("--bits", "exponent-msb", "--count", "1", "--where", "model/4.weight", "--seed", "1", "--in-place")

Say = Callable[[str], None]
Run = Callable[..., None]


def tell(folder: Path, say: Say, run: Run) -> dict[str, Json]:
    """Parts 9 to 11."""
    facts: dict[str, Json] = {}
    say(f"[bold]9. Kill a trainer right after its save of step {_KILL_AT}, and go on in another process[/bold]")
    facts.update(_survive(folder / "run", say))

    say("\n[bold]10. Preempt a job that also flushes to shared storage, and go on elsewhere[/bold]")
    facts.update(_preempt_and_move(folder, say, run))

    say("\n[bold]11. Soft errors in a version, and what a restore makes of them[/bold]")
    facts.update(_rot_and_restore(folder, say, run))
    return facts


def _survive(run_dir: Path, say: Say) -> dict[str, Json]:
    """A trainer is killed as soon as `save` has returned; what it saved is there, and training goes on the same."""
    import evergrad as eg
    from evergrad.cli.demo_forks import start
    from evergrad.cli.demo_trainer import train

    trainer = start(train, run_dir, _STEPS, _KILL_AT).process
    golden = train(None, _STEPS)[1]
    trainer.join()
    killed = trainer.exitcode == -signal.SIGKILL
    say(f"trainer killed by SIGKILL: {_yes(killed)}; only the agent was left, and it finished the save")
    begin, losses = train(run_dir, _STEPS)
    same = losses == golden[begin:]
    say(f"restored step {begin}, every digest verified, and trained on to step {_STEPS}")
    say(f"its {len(losses)} losses are those of a run that was never killed, to the last bit: {_yes(same)}")
    with eg.Checkpointer(run_dir, agent=False) as ck:
        for record in ck.versions():
            say(f"  {record.version.name}  loss {record.meta['loss']:.4f}  in {' and '.join(record.tiers)}")
        versions: list[Json] = [record.version.name for record in ck.versions()]
    return {"killed": killed, "restored_step": begin, "losses_identical": same, "versions": versions}


def _preempt_and_move(folder: Path, say: Say, run: Run) -> dict[str, Json]:
    """A job is asked to leave, saves and leaves; another one, with a run folder of its own, goes on from the URL."""
    bucket = folder / "bucket"
    url = f"file://{bucket}"
    code = _preempt(folder / "first", bucket, url)
    say(f"SIGTERM to a trainer at work: it saved once more, to every tier, and left with exit code {code}")
    run("checkpoints", "ls", str(folder / "first"))
    step, same = _go_on(folder / "second", url)
    say(f"\nanother job, which knows nothing but {url}, restored step {step} from there")
    say(f"its {_MORE_STEPS} losses are those of a run that was never interrupted, to the last bit: {_yes(same)}")
    picture = folder / "lineage.svg"
    run("checkpoints", "lineage", str(folder / "second"))
    run("checkpoints", "lineage", str(folder / "second"), "--picture", str(picture))
    return {
        "preempted_exit_code": code,
        "preempted_step": step,
        "moved_losses_identical": same,
        "lineage_picture": picture.is_file(),
    }


def _rot_and_restore(folder: Path, say: Say, run: Run) -> dict[str, Json]:
    """A flipped bit in the newest version: with its digests following, and without."""
    from rich.markup import escape

    newest = max((folder / "bucket").glob("v*-*"))
    log = folder / "version.faults.jsonl"
    before = _restored(folder)
    say("A bit that flipped in memory, before the save: the digests follow it")
    run("inject", str(newest), *_FLIP, "--log", str(log))
    taken = _restored(folder)
    say(f"restore takes it, without a word: step {taken[0]}, loss {taken[1]:.3g} instead of {before[1]:.3g}")
    run("undo", str(log))
    log.unlink()
    say("\nThe same bit, rotten on the disk: the digests stay as they were")
    run("inject", str(newest), *_FLIP, "--stale-checksum", "--log", str(log))
    passed = _restored(folder)
    say(f"restore says, in the log: {escape(passed[2])}")
    say(f"and takes the version before: step {passed[0]}, loss {passed[1]:.3g}")
    run("undo", str(log))
    return {
        "following_step": taken[0],
        "following_loss": taken[1],
        "clean_loss": before[1],
        "stale_step": passed[0],
        "stale_reason": passed[2],
    }


def _preempt(run_dir: Path, bucket: Path, url: str) -> int:
    """Have a trainer run until two versions are committed, ask it to leave, and see with which code it does."""
    from evergrad.cli.demo_forks import start
    from evergrad.cli.demo_trainer import train_until_asked

    trainer = start(train_until_asked, run_dir, url).process
    try:
        end = time.monotonic() + _LIMIT_S
        while len(list(bucket.glob("v*/COMMIT.json"))) < 2:
            if not trainer.is_alive() or time.monotonic() > end:
                raise EvergradError(f"{run_dir}: the demo's trainer did not get to its second version")
            time.sleep(0.05)
        assert trainer.pid is not None
        os.kill(trainer.pid, signal.SIGTERM)
        trainer.join(_LIMIT_S)
        if trainer.exitcode is None:
            raise EvergradError(f"{run_dir}: the demo's trainer was asked to leave, and did not")
        return trainer.exitcode
    finally:
        trainer.kill()


def _go_on(run_dir: Path, url: str) -> tuple[int, bool]:
    """Restore from the URL into a new job, and train on; where it began, and whether its losses are the same."""
    import evergrad as eg
    from evergrad.cli.demo_trainer import Spirals, train

    task = Spirals()
    with eg.Checkpointer(run_dir, agent=False) as ck:
        begin = ck.restore(task.state, source=url) or 0
        losses = []
        for step in range(begin + 1, begin + _MORE_STEPS + 1):
            losses.append(task.step())
            if (step - begin) % 10 == 0:
                ck.save(step, task.state, meta={"loss": losses[-1]})
    golden = train(None, begin + _MORE_STEPS)[1]
    return begin, losses == golden[begin:]


def _restored(folder: Path) -> tuple[int, float, str]:
    """What a new job restores from the URL: the step, the loss there, and what was passed over."""
    import evergrad as eg
    from evergrad.cli.demo_trainer import Spirals

    task = Spirals()
    heard = _Heard()
    logger = logging.getLogger("evergrad.checkpoint")
    logger.addHandler(heard)
    try:
        with eg.Checkpointer(folder / "third", agent=False) as ck:
            step = ck.restore(task.state, source=f"file://{folder / 'bucket'}") or 0
            return step, task.loss(), "; ".join(heard.lines)
    finally:
        logger.removeHandler(heard)


class _Heard(logging.Handler):
    """Keeps what is said in the log, for the demo to show in its place."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"
