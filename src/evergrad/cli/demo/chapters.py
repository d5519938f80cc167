"""The chapters of the demo: files, checkpoints, recovery, studies; each with real files and real output."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.markup import escape

from evergrad.cli.output import printable
from evergrad.errors import EvergradError, UsageError

if TYPE_CHECKING:
    import torch

    from evergrad.records import Json
    from evergrad.study.folder import JournalEntry
    from evergrad.study.results import Results


_SEED = 1
_FLIP_FILES = ("--bits", "exponent-msb", "--count", "1", "--where", "model/4.weight", "--seed", str(_SEED))
_FLIPS, _TRIALS = 10, 10


def show_files(folder: Path, say: Callable[[str], None], run: Callable[..., None]) -> dict[str, Json]:
    """Parts 1 to 8."""
    import torch

    import evergrad as eg

    facts: dict[str, Json] = {}
    say("[bold]1. Train a small network and save it as everyone does[/bold]")
    model, optimizer, data = _train(torch)
    clean, flipped, twin = folder / "model.pt", folder / "flipped.pt", folder / "model.safetensors"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, clean)
    facts["accuracy"] = _accuracy(torch, clean, data)
    say(f"model.pt: accuracy {facts['accuracy']:.1%}")

    say("\n[bold]2. Its tensors, by name, without reading them and without running its pickle[/bold]")
    run("inspect", str(clean), "--where", "model")

    say("\n[bold]3. A soft error: flip the top exponent bit of one weight[/bold]")
    run("inject", str(clean), *_FLIP_FILES, "--out", str(flipped))
    log = eg.InjectionLog.load(f"{flipped}.faults.jsonl")
    hit = next(log.faults())
    facts.update(before=hit.old_value, after=hit.new_value, accuracy_after_flip=_accuracy(torch, flipped, data))
    say(f"flipped.pt: accuracy {facts['accuracy_after_flip']:.1%}; torch.load reads the file without a word")
    run("diff", str(clean), str(flipped))

    say("\n[bold]4. Without the clean file: the checksum was kept valid, but the value gives it away[/bold]")
    run("verify", str(flipped))
    facts["verify"] = eg.verify(flipped).verdict.value

    say("\n[bold]5. Undo it, byte for byte[/bold]")
    run("undo", f"{flipped}.faults.jsonl")
    facts["undone"] = flipped.read_bytes() == clean.read_bytes()
    say(f"flipped.pt is model.pt again: {'yes' if facts['undone'] else 'no'}")

    say(f"\n[bold]6. Which bits matter? {_FLIPS} flips of each kind in the weights, {_TRIALS} times[/bold]")
    fields = _by_field(folder, clean, lambda path: _accuracy(torch, path, data))
    facts["accuracy_by_field"] = {field: list(results) for field, results in fields.items()}
    for field, (mean, worst) in fields.items():
        say(f"{field:13} accuracy {'█' * round(mean * 40):40} {mean:6.1%} on average, {worst:6.1%} at worst")

    say("\n[bold]7. The same state in another format: exact, optimizer, epoch and all[/bold]")
    run("convert", str(clean), str(twin))
    run("diff", str(clean), str(twin))
    facts["conversion_exact"] = eg.compare(clean, twin).equal

    say("\n[bold]8. A file that would run a command when it is loaded is read, and runs nothing[/bold]")
    trap, mark = folder / "trap.pt", folder / "it-ran"
    try:
        torch.save({"weight": torch.ones(3), "payload": _HostilePickle(mark)}, trap)
        run("inspect", str(trap))
        with eg.open_checkpoint(trap) as ck:
            facts["trap_tensors"] = len(ck.tensors)
        facts["trap_ran"] = mark.exists()
    finally:
        trap.unlink(missing_ok=True)  # it is live: nobody should find it in a folder that was kept
    say(f"command executed: {'yes' if facts['trap_ran'] else 'no'}")
    return facts


def _by_field(folder: Path, clean: Path, accuracy: Callable[[Path], float]) -> dict[str, tuple[float, float]]:
    """Mean and worst accuracy with flips in each field of the weights."""
    import evergrad as eg

    found: dict[str, tuple[float, float]] = {}
    for field in ("mantissa", "sign", "exponent", "exponent-msb"):
        results = []
        for seed in range(_TRIALS):
            trial = folder / "trial.pt"
            log = eg.inject(clean, eg.BitFlip(field), count=_FLIPS, where="model", seed=seed, out=trial)
            results.append(accuracy(trial))
            trial.unlink()
            assert log.path is not None
            log.path.unlink()
        found[field] = sum(results) / _TRIALS, min(results)
    return found


class _HostilePickle:
    """What a hostile checkpoint looks like: unpickling it would run a command."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, (f"touch '{self._mark}'",)


def _train(torch_: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]:
    """Two spirals, three layers, a second."""
    generator = torch_.Generator().manual_seed(7)
    turn = torch_.rand(1000, generator=generator).sqrt() * 9
    label = torch_.arange(1000) % 2
    angle = turn + label * torch_.pi
    points = torch_.stack([angle.cos(), angle.sin()], 1) * turn[:, None] / 9
    with torch_.random.fork_rng():
        torch_.manual_seed(7)
        layer = torch_.nn.Linear
        model = torch_.nn.Sequential(layer(2, 64), torch_.nn.Tanh(), layer(64, 64), torch_.nn.Tanh(), layer(64, 2))
        optimizer = torch_.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(400):
            optimizer.zero_grad()
            torch_.nn.functional.cross_entropy(model(points), label).backward()
            optimizer.step()
    return model, optimizer, (points, label)


def _accuracy(torch_: Any, path: Path, data: tuple[torch.Tensor, torch.Tensor]) -> float:
    layer = torch_.nn.Linear
    model = torch_.nn.Sequential(layer(2, 64), torch_.nn.Tanh(), layer(64, 64), torch_.nn.Tanh(), layer(64, 2))
    model.load_state_dict(torch_.load(path, weights_only=True)["model"])
    with torch_.no_grad():
        return float((model(data[0]).argmax(1) == data[1]).float().mean())


# The demo's chapter of checkpoints: a killed trainer, a preempted job, and soft errors in a version.

PROCESSES_CHECKPOINTS = 2
"""The trainer that is killed, and the one that is preempted."""

_LIMIT_S = 60.0
_STEPS, _KILL_AT = 60, 40
_MORE_STEPS = 20
_FLIP_CHECKPOINTS = ("--bits", "exponent-msb", "--count", "1", "--where", "model/4.weight", "--seed", "1", "--in-place")

Say = Callable[[str], None]
Run = Callable[..., None]


def show_checkpoints(folder: Path, say: Say, run: Run) -> dict[str, Json]:
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
    from evergrad.cli.demo.processes import start
    from evergrad.cli.demo.trainer import train

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
    step, same = _resume_elsewhere(folder / "second", url)
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
    run("inject", str(newest), *_FLIP_CHECKPOINTS, "--log", str(log))
    taken = _restored(folder)
    say(f"restore takes it, without a word: step {taken[0]}, loss {taken[1]:.3g} instead of {before[1]:.3g}")
    run("undo", str(log))
    log.unlink()
    say("\nThe same bit, rotten on the disk: the digests stay as they were")
    run("inject", str(newest), *_FLIP_CHECKPOINTS, "--stale-checksum", "--log", str(log))
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
    from evergrad.cli.demo.processes import start
    from evergrad.cli.demo.trainer import train_until_asked

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


def _resume_elsewhere(run_dir: Path, url: str) -> tuple[int, bool]:
    """Restore from the URL into a new job, and train on; where it began, and whether its losses are the same."""
    import evergrad as eg
    from evergrad.cli.demo.trainer import Spirals, train

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
    from evergrad.cli.demo.trainer import Spirals

    task = Spirals()
    heard = _LogCapture()
    logger = logging.getLogger("evergrad.checkpoint")
    logger.addHandler(heard)
    try:
        with eg.Checkpointer(folder / "third", agent=False) as ck:
            step = ck.restore(task.state, source=f"file://{folder / 'bucket'}") or 0
            return step, task.loss(), "; ".join(heard.lines)
    finally:
        logger.removeHandler(heard)


class _LogCapture(logging.Handler):
    """Keeps what is said in the log, for the demo to show in its place."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


# The demo's chapter of recovery: ranks that are killed, stopped or struck by a soft error, and training goes on.

PROCESSES_RECOVERY = 4
"""The launchers: undisturbed, with a rank less, with a spare, and in trouble."""

_RANKS = 4
_KILL = "kill rank=1 step=13"
_STOP = "stop rank=1 step=13"
_FLIP_RECOVERY = "flip rank=2 step=19 phase=optimizer where=model/4.weight bits=exponent"


@dataclass(frozen=True, slots=True)
class _Run:
    """What came of a job."""

    steps: int
    weights: str
    seconds: float
    """From SIGKILL to the first step after it that a survivor has applied; 0 if nobody was killed."""


def show_recovery(folder: Path, say: Callable[[str], None], run: Callable[..., None]) -> dict[str, Json]:
    """Parts 12 and 13."""
    facts: dict[str, Json] = {}
    say("[bold]12. Kill a rank in the middle of training: the others go on; a spare takes its place[/bold]")
    facts.update(_lose_a_rank(folder, say))
    run("timeline", str(folder / "job-spare"))

    say("\n[bold]13. Stop a rank, and flip a bit in another one's weights: both are noticed, neither is felt[/bold]")
    facts.update(_trouble_ranks(folder, say))
    return facts


def _lose_a_rank(folder: Path, say: Callable[[str], None]) -> dict[str, Json]:
    """Run a job undisturbed, with a rank killed, and with a rank killed and a spare."""
    clean = _run(folder / "job", (), lambda _: None)
    say(f"{_RANKS} ranks and nothing fails: {clean.steps} steps, final weights {clean.weights}")
    fewer = _run(folder / "job-fewer", ("--fail", _KILL), say)
    same = _run(folder / "job-spare", ("--spares", "1", "--fail", _KILL), say)
    is_exact = same.weights == clean.weights
    say(
        f"from SIGKILL to the next applied step: {fewer.seconds * 1000:.0f} ms on {_RANKS - 1} ranks, "
        f"{same.seconds * 1000:.0f} ms with a spare;\nwith the spare the very weights of the undisturbed run: "
        f"{'yes' if is_exact else 'no'}"
    )
    return {"rank_lost_seconds": fewer.seconds, "spare_seconds": same.seconds, "spare_exact": is_exact}


def _trouble_ranks(folder: Path, say: Callable[[str], None]) -> dict[str, Json]:
    """The same job with a rank that is stopped, and with a bit that flips in one rank's weights; after the first."""
    from evergrad.timeline import read_events

    clean = next(
        event.fields["weights"]
        for event in read_events(folder / "job" / "timeline.jsonl")
        if event.event == "weight_digests"
    )
    options = ("--spares", "1", "--fail", _STOP, "--fail", _FLIP_RECOVERY)
    troubled = _run(folder / "job-trouble", options, say)
    events = list(read_events(folder / "job-trouble" / "timeline.jsonl"))
    is_exact = {event.fields["weights"] for event in events if event.event == "weight_digests"} == {clean}
    found = [event.fields for event in events if event.event == "corruption_found"]
    say(
        f"{troubled.steps} steps; the stopped rank was replaced, and what the flip changed ("
        + ", ".join(f"{each['path']} on rank {each['rank']}" for each in found)
        + f") was found and healed.\nThe very weights of the undisturbed run: {'yes' if is_exact else 'no'}"
    )
    return {"corruptions_healed": sum(bool(each["healed"]) for each in found), "trouble_exact": is_exact}


def _run(run: Path, options: tuple[str, ...], say: Callable[[str], None]) -> _Run:
    from evergrad.cli.demo.processes import start
    from evergrad.timeline import read_events

    command = ["run", "-n", str(_RANKS), *options]
    say(f"\n[bold]$ evergrad {shlex.join(command)} job.py[/bold]")
    script = Path(__file__).with_name("job.py")
    environment = {
        "EVERGRAD_RECORD_WEIGHTS": "1",
        "EVERGRAD_WAIT_FOR_SPARES": str(_RANKS) if "--spares" in options else "",
    }
    job = start(_launch, [*command, "--preload", "--out", str(run), str(script)], environment, is_heard=True)
    lines = []
    with job.output, open(job.output.fileno(), encoding="utf-8", errors="replace", closefd=False) as output:
        for line in output:
            lines.append(line.rstrip())
            if "logs and timeline in" not in line:
                say(escape(printable(line.rstrip())))
    job.process.join()
    if job.process.exitcode != 0:
        raise UsageError(f"the demo's job ended with exit code {job.process.exitcode}: {lines[-1] if lines else ''}")
    weights = next(line.split()[-1] for line in lines if "final weights" in line)
    events = list(read_events(run / "timeline.jsonl"))
    steps = max(int(str(event.fields["step"])) for event in events if event.event == "epoch")
    killed = [event.monotonic for event in events if event.event == "kill_injected"]
    applied = [event.monotonic for event in events if event.event == "recovered"]
    return _Run(steps, weights, min(applied) - killed[0] if killed else 0.0)


def _launch(words: list[str], environment: dict[str, str]) -> NoReturn:
    """`evergrad run`, in a process that is there already."""
    from evergrad.cli import main

    os.environ.update(environment)
    sys.exit(main(words))


# The demo's chapter of studies: bits flip in a checkpoint, training goes on, and a table says what came of it.

PLAN = """\
study = "demo"
title = "Flipped bits in a checkpoint of AlexNet"
seed = 1
rows = "flips"
columns = "model"

[axes]
flips = [1, 10, 100]
model = ["alexnet"]

[training]
width = 0.0625
samples = 640
learning_rate = 0.003
checkpoint = 6
epochs = 1

[sampling]
trainings = 8
"""

RANKS = """\
study = "demo-ranks"
title = "Flipped bits on one of two ranks, while they train"
seed = 2
rows = "flips"
columns = "target"

[axes]
flips = [1, 100]
target = ["weights", "optimizer", "activations", "gradients", "communication"]

[training]
mechanism = "ddp"
ranks = 2
model = "resnet18"
width = 0.0625
samples = 512
learning_rate = 0.02
checkpoint = 3
epochs = 1

[trial]
corrupt = 1
step = 2

[sampling]
trainings = 4
"""


def show_studies(folder: Path, say: Callable[[str], None], run: Callable[..., None]) -> dict[str, Json]:
    """Parts 14 to 16."""
    out = folder / "study"
    facts: dict[str, Json] = {}
    with _as_workers():
        say("[bold]14. A study: what do flipped bits in a checkpoint do to the training that goes on from it?[/bold]")
        facts.update(_study(out, say))

        say("\n[bold]15. One of its trials again, by itself[/bold]")
        facts.update(_replay(out, run))

        say("\n[bold]16. The same in data-parallel training: one of two ranks is hit in its third step[/bold]")
        facts.update(_ranks(folder / "study-ranks", say))
    return facts


def _study(out: Path, say: Callable[[str], None]) -> dict[str, Json]:
    """Run the plan in this process, which has torch imported, and show its table in the published shape."""
    from evergrad.study import Plan, run_study
    from evergrad.study.plan_files import parse
    from evergrad.study.trials import Outcome

    plan = Plan.of(parse(PLAN, "demo"))
    results = run_study(plan, out, executor="in-process")
    first = results.cells[0]
    say(
        f"without a fault, accuracy goes from {first.golden_start:.1%} at the checkpoint to {first.golden:.1%};\n"
        f"{results.trials} trainings went on from there, each with flips of its own. How many met a NaN, an infinity\n"
        f"or a number beyond {plan.rules.extreme:g} (N-EV), with intervals of {plan.sampling.confidence:.0%}:\n"
    )
    say(_table(results))
    say(f"'evergrad study table {out.name}' shows every column, and how it was made.")
    say(_page(out))
    found: dict[str, Json] = {str(cell.axes["flips"]): cell.counts[Outcome.NEV] for cell in results.cells}
    return {"study_trials": results.trials, "study_nev": found}


def _page(out: Path) -> str:
    """Write the report beside the study, where plotly is installed."""
    from rich.markup import escape

    from evergrad.errors import UsageError
    from evergrad.report.study_page import write_study_report

    try:
        written = write_study_report(out)
    except UsageError as error:
        return escape(str(error))
    return escape(f"{out.name}/{written.name}: the same as a page, with the answer in words and pictures.")


def _ranks(out: Path, say: Callable[[str], None]) -> dict[str, Json]:
    """Real ranks of DDP, warm from trial to trial."""
    from evergrad.study import Plan, run_study
    from evergrad.study.plan_files import parse
    from evergrad.study.rank_group import end_cached_groups

    plan = Plan.of(parse(RANKS, "demo-ranks"))
    try:
        results = run_study(plan, out, executor="in-process")
    finally:
        end_cached_groups()
    say(
        f"{results.trials} trainings of two processes, kept warm between them. Weights, optimizer state, activations,\n"
        "gradients, or the buckets that the ranks exchange; N-EV again:\n"
    )
    say(_table(results))
    return {"ranks_trials": results.trials, "ranks_known": sum(cell.known for cell in results.cells)}


def _table(results: Results) -> str:
    """The numbers alone: a table of the command line has notes that fill a screen."""
    from dataclasses import replace

    from rich.console import Console
    from rich.markup import escape

    from evergrad.study.tables import published_table

    drawn = Console(file=StringIO(), width=100)
    with drawn.capture() as captured:
        drawn.print(replace(published_table(results), notes=()))
    return escape(captured.get().rstrip("\n"))


def _replay(out: Path, run: Callable[..., None]) -> dict[str, Json]:
    """Of the trials that met a NaN, an infinity or an extreme value, one with the fewest flips."""
    from evergrad.study.folder import StudyFolder
    from evergrad.study.replay import replay_trial

    hit = [entry for entry in StudyFolder(out).journal_contents().entries.values() if _is_nev(entry)]
    if not hit:
        raise EvergradError(f"{out}: none of the demo's trials met an extreme value, which 100 flips bring about")
    trial = min(hit, key=lambda entry: (entry.trial.flips, entry.trial.repetition)).trial
    run("study", "replay", str(out), trial.id)
    return {"study_replayed": replay_trial(out, trial.id).same}


def _is_nev(entry: JournalEntry) -> bool:
    return entry.observation.nonfinite_at is not None or entry.observation.extreme_at is not None


@contextmanager
def _as_workers() -> Iterator[None]:
    """One thread, as workers of a study have: sums depend on it."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
