"""Any training at all: a program that goes on from a checkpoint file, with a fault in that file.

    command = "python train.py --resume {checkpoint} --epochs 2 --save {output}"
    prepare = "python train.py --epochs 1 --save {checkpoint}"

The program prints what it measures, as JSON lines or in any way that a pattern finds. Nothing is evaluated at the
restart unless the program does so: its first metric counts as the first. The plan states the metric's
`direction`, or its name does: a loss is better lower. The program has to be deterministic: the golden run is made
twice, and a program that does not repeat it is refused. It should write to `{output}` alone: trials run side by side,
in the same folder, and would meet in any other file. `{seed}` is the same in every run;
EVERGRAD_TRIAL_SEED, which differs, only says which trial this is.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from evergrad.checkpoint.preemption import signal_name
from evergrad.errors import EvergradError, UsageError
from evergrad.formats import open_checkpoint
from evergrad.injection import inject
from evergrad.injection.faults import fault_of
from evergrad.injection.sampling import population
from evergrad.study.aiming import aimed_at
from evergrad.study.commands.invocations import asks_for, check_command, clean_checkpoint, filled, tail_of, words_of
from evergrad.study.commands.programs import Ending, run_program
from evergrad.study.commands.readings import Readings, Source
from evergrad.study.commands.state_files import (
    FileState,
    copy_state,
    hit_state,
    known_state,
    read_state,
    suffix_of,
)
from evergrad.study.trials import Command, End, Observation, Rules, Trial

_CHECKPOINT = "checkpoint"
_FINAL = "final"
_MORE_TIME = 10
_MORE_SECONDS = 60.0
# Beside what the golden run itself does, nothing is extreme.
_GOLDEN_RULES = Rules(extreme=math.inf, abandon=("non-finite",))


def make_golden(command: Command, folder: Path) -> tuple[Observation, Path]:
    """The clean checkpoint, in this empty folder, and what the program does with it; `UsageError` if it will not do.

    The final state of the run, if the program writes one, stays in the folder too, to judge the trials' by.
    """
    check_command(command)
    folder = folder.resolve()
    checkpoint = _prepared(command, folder) if command.prepare else _copied(command, folder)
    with open_checkpoint(checkpoint) as ck:
        if not ck.tensors:
            setting = "prepare" if command.prepare else "checkpoint"
            raise UsageError(f"{setting}: expected a checkpoint with tensors, found none in this one ({ck.format})")
    (folder / _FINAL).mkdir()
    seen = _golden_run(command, checkpoint, folder, folder / _FINAL, seed=0)
    with TemporaryDirectory(prefix="again-", dir=folder) as place:
        # Another number, so that a program that takes its seed from there is found out.
        again = _golden_run(command, checkpoint, folder, Path(place), seed=1, limit_s=_limit(command, seen))
    _check_repeated(command, seen, again)
    return seen, checkpoint


def check_golden(command: Command, checkpoint: Path, golden: Observation) -> None:
    """Run the program without a fault once more; `UsageError` if it is not the one that the golden run is of."""
    check_command(command)
    with TemporaryDirectory(prefix="again-", dir=checkpoint.parent) as place:
        again = _golden_run(
            command, checkpoint, checkpoint.parent, Path(place), seed=1, limit_s=_limit(command, golden)
        )
    try:
        _check_repeated(command, golden, again)
    except UsageError as error:
        raise UsageError(f"{error} If the program has changed since, choose another folder.") from None


def run_trial(command: Command, checkpoint: Path, golden: Observation, trial: Trial, scratch: Path) -> Observation:
    """Put the trial's faults into a copy of the checkpoint, let the program go on from it, and say what was seen.

    `checkpoint` is where `make_golden` put it. What is written goes below `scratch`, and is gone afterwards.
    """
    largest = max(map(abs, (*golden.metrics, *golden.losses.values)), default=0.0)
    if largest > trial.rules.extreme:
        raise UsageError(
            f"extreme: expected more than the golden run's own numbers, which reach {largest:g}, "
            f"found {trial.rules.extreme:g}"
        )
    fault = fault_of(trial.fault)
    with TemporaryDirectory(prefix="trial-", dir=scratch, ignore_cleanup_errors=True) as name:
        place = Path(name).resolve()
        with open_checkpoint(checkpoint) as ck:
            names = aimed_at(ck.tensors, trial.where, trial.layer)
            places = population(ck, fault, names).bits
        out = place / f"{_CHECKPOINT}{suffix_of(checkpoint)}"
        log = inject(checkpoint, fault, count=trial.flips, where=names, seed=trial.seed, out=out)
        if out.is_dir() and not checkpoint.is_dir():  # several files, named by one of them
            out /= checkpoint.name
        readings = Readings(command.metric, command.loss, trial.rules)
        _judge_state(readings, hit_state(log, trial.rules.extreme), step=0)
        if readings.reason:
            run = _Run(Ending(0.0, enough=True), readings)
        else:
            run = _run(command, out, place, readings, trial.seed, _limit(command, golden))
        digest, reason = "", run.reason
        if run.end is End.FINISHED and run.output is not None:
            before = _golden_final(command, checkpoint, trial.rules.extreme)
            try:
                state = read_state(run.output, trial.rules.extreme)
                _judge_state(readings, state.gained(before), step=readings.steps)
                digest = state.digest
            except EvergradError as error:  # the program's doing: whether it finished is told by its metric
                reason = f"its final state cannot be read: {error}"[:300]
    return _observation(run, reason, digest, log.injected, log.changed, places)


@dataclass(frozen=True, slots=True)
class _Run:
    """A program's run, and what was read of it."""

    ending: Ending
    readings: Readings
    output: Path | None = None

    @property
    def end(self) -> End:
        if self.ending.enough:
            return End.ABANDONED
        if self.ending.overtime:
            return End.OVERTIME
        if self.ending.refusal:
            return End.LOST  # the golden run could be started: this is not the fault's doing
        return End.CRASHED if self.ending.code else End.FINISHED

    @property
    def reason(self) -> str:
        """One line."""
        if self.end is End.ABANDONED:
            return self.readings.reason
        if self.end is End.OVERTIME:
            return f"ended after {self.ending.seconds:.0f} s"
        if self.end is End.CRASHED:
            return f"{_exit_words(self.ending.code or 0)}: {_last_lines(self.ending, 1)}"[:300]
        return self.ending.refusal or ("" if self.readings.metrics.count else "it printed no metric")


def _run(command: Command, checkpoint: Path, place: Path, readings: Readings, seed: int, limit_s: float | None) -> _Run:
    """Let the program go on from this file; what it writes goes to a file in `place`."""
    words = words_of(command, "command")
    places, output = {"checkpoint": checkpoint}, None
    if asks_for(words, "output"):
        output = places["output"] = place / _output_name(command, checkpoint)
    ending = run_program(
        filled(words, places),
        readings.heed,
        folder=Path(command.base, command.folder).resolve(),
        environment=_environment(seed),
        limit_s=limit_s,
    )
    return _Run(ending, readings, output)


def _golden_run(
    command: Command, checkpoint: Path, folder: Path, place: Path, seed: int, limit_s: float | None = None
) -> Observation:
    with TemporaryDirectory(prefix="golden-", dir=folder, ignore_cleanup_errors=True) as copies:
        # A program that saves where it has read from must not alter what all trials begin with.
        copy = copy_state(checkpoint, Path(copies), _CHECKPOINT)
        readings = Readings(command.metric, command.loss, _GOLDEN_RULES)
        run = _run(command, copy, place, readings, seed, limit_s or command.timeout_s or None)
    if run.end is not End.FINISHED:
        raise UsageError(f"command: the golden run, without any fault, did not finish: {_failure(run)}")
    if not readings.metrics.count:
        said = f" Its last error line: {_last_lines(run.ending, 1)}" if run.ending.errors else ""
        raise UsageError(
            f"metric: expected a number on stdout by the {Source('metric', command.metric)}, found none in the golden "
            f"run.{said}"
        )
    digest = ""
    if run.output is not None:
        try:
            digest = read_state(run.output, math.inf).digest
        except EvergradError as error:
            raise UsageError(f"command: the golden run left no state in {{output}}: {error}") from None
    return _observation(run, "", digest)


def _check_repeated(command: Command, first: Observation, second: Observation) -> None:
    """Refuse a program whose results change by themselves: what a fault changes could not be told from that."""
    metric, loss = Source("metric", command.metric), Source("loss", command.loss)
    differing = ""
    for name, one, other in (
        (metric, first.metrics, second.metrics),
        (loss, first.losses.values, second.losses.values),
    ):
        if len(one) != len(other):
            differing = f"numbers by the {name}: {len(one)} and {len(other)}"
        elif one != other:
            at = next(index for index, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
            differing = f"number {at + 1} by the {name}: {one[at]!r} and {other[at]!r}"
        if differing:
            break
    if not differing and first.digest != second.digest:
        differing = f"tensors in {{output}}: {first.digest[:8]} and {second.digest[:8]}"
    if differing:
        raise UsageError(
            f"command: the golden run, made twice, differs ({differing}). Make the program deterministic: seed it, "
            "or what a fault changes cannot be told from noise."
        )


def _prepared(command: Command, folder: Path) -> Path:
    """Have the program write the clean checkpoint."""
    words = words_of(command, "prepare")
    path = folder / f"{_CHECKPOINT}{tail_of(words, 'checkpoint')}"
    ending = run_program(
        filled(words, {"checkpoint": path}),
        lambda _: False,
        folder=Path(command.base, command.folder).resolve(),
        environment=_environment(0),
    )
    if ending.code != 0:
        raise UsageError(f"prepare: did not finish: {_failure(_Run(ending, Readings('', '', _GOLDEN_RULES)))}")
    try:
        open_checkpoint(path).close()
    except EvergradError as error:
        raise UsageError(f"prepare: expected a checkpoint in {{checkpoint}}: {error}") from None
    return path


def _copied(command: Command, folder: Path) -> Path:
    try:
        return copy_state(clean_checkpoint(command), folder, _CHECKPOINT)
    except EvergradError as error:
        raise UsageError(f"checkpoint: {error}") from None


def _output_name(command: Command, checkpoint: Path) -> str:
    """With the suffix that the command asks for, or the checkpoint's."""
    return f"{_FINAL}{tail_of(words_of(command, 'command'), 'output') or suffix_of(checkpoint)}"


def _golden_final(command: Command, checkpoint: Path, extreme: float) -> FileState:
    return known_state(checkpoint.parent.resolve() / _FINAL / _output_name(command, checkpoint), extreme)


def _limit(command: Command, golden: Observation) -> float:
    return command.timeout_s or _MORE_TIME * golden.seconds + _MORE_SECONDS


def _environment(seed: int) -> dict[str, str]:
    # Unbuffered: a loss that is NaN should be seen when it is printed, not when the program ends.
    return {"PYTHONUNBUFFERED": "1", **os.environ, "EVERGRAD_TRIAL_SEED": str(seed)}


def _judge_state(readings: Readings, found: tuple[bool, bool], step: int) -> None:
    nonfinite, extreme = found
    if nonfinite:
        readings.note("non-finite", "state", step)
    if extreme:
        readings.note("extreme", "state", step)


def _observation(
    run: _Run, reason: str, digest: str, injected: int = 0, changed: int = 0, places: int = 0
) -> Observation:
    readings = run.readings
    return Observation(
        end=run.end,
        reason=reason,
        steps=readings.steps,
        metrics=readings.metrics.ends(),
        losses=readings.losses.series(),
        nonfinite_at=readings.nonfinite[0],
        nonfinite_in=readings.nonfinite[1],
        extreme_at=readings.extreme[0],
        extreme_in=readings.extreme[1],
        digest=digest,
        injected=injected,
        changed=changed,
        places=places,
        seconds=run.ending.seconds,
    )


def _failure(run: _Run) -> str:
    """Why a run without a fault did not do, with the last that the program said."""
    if run.end is not End.CRASHED:
        return run.reason
    return f"{_exit_words(run.ending.code or 0)}: {_last_lines(run.ending, 3)}"


def _exit_words(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"ended by {signal_name(-code)}"


def _last_lines(ending: Ending, count: int) -> str:
    text = " / ".join(ending.errors[-count:]) or "no error was printed"
    return text if len(text) <= 300 else f"…{text[-299:]}"
