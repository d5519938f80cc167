"""Your training script as a job in a test: launched under a schedule of failures, and what became of it.

>>> run = run_job("train.py", "--lr", "0.1", ranks=4, spares=1,         # doctest: +SKIP
...               failures=Failures().kill(rank=1, step=3))
>>> run.assert_survived(1)                                              # doctest: +SKIP

The script needs no change. It runs under `evergrad run`, in the folder and with the environment of the test.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from evergrad.errors import UsageError
from evergrad.recovery.elastic_sampler import SampleCounts
from evergrad.recovery.failures.schedule import Failures
from evergrad.recovery.fingerprints import RECORD_WEIGHTS
from evergrad.testing.forkserver import JobLauncher, Request, launch_plainly
from evergrad.testing.hang_report import ABORTED, LauncherExit, StuckProcess
from evergrad.timeline import Event, read_events

# What became of a job, and what a test can demand of it.
#
# Every `assert_…` raises AssertionError with what, expected, found, and the end of what the job printed. What cannot
# be judged, because the job recorded nothing to judge by, has not passed.

_LINES = 25


@dataclass(frozen=True, slots=True)
class FinalWeights:
    """What a rank's model was when it left the job."""

    rank: int
    uid: int
    generation: int
    steps: int
    """Steps that it had applied."""
    weights: str
    """The digest of its parameters."""
    state: str
    """The digest of its parameters and buffers."""


@dataclass(frozen=True, kw_only=True)
class JobRun:
    """A job that was run. `run_job` makes it; what is here was read when the job had ended."""

    exit_code: int
    """As of `evergrad run`; below zero, the signal that ended the launcher."""
    stdout: str = ""
    stderr: str = ""
    timeline: Sequence[Event] = ()
    """What happened, in the order in which it was written."""
    summary: Mapping[str, Any]
    """How it ended, as `run.json` has it: outcome, steps, failures_survived, exact …; else empty."""
    folder: Path
    """Where `run` (the folder of the run, with logs), `stdout` and `stderr` are."""
    timeout: float
    """Seconds that it had."""
    timed_out: bool = False
    stuck: Sequence[StuckProcess] = ()
    """Who was still there when time was up."""

    @classmethod
    def load(cls, folder: Path, ending: LauncherExit, timeout: float) -> JobRun:
        """What a job has left in its folder."""
        out, err = (_text(folder / name) for name in ("stdout", "stderr"))
        record = _text(folder / "run" / "run.json")
        timeline = folder / "run" / "timeline.jsonl"
        return cls(
            exit_code=ending.exit_code,
            stdout=out,
            stderr=err,
            timeline=tuple(read_events(timeline)) if timeline.exists() else (),
            summary=json.loads(record).get("summary", {}) if record else {},
            folder=folder,
            timeout=timeout,
            timed_out=ending.timed_out,
            stuck=ending.stuck,
        )

    def events(self, kind: str) -> list[Mapping[str, Any]]:
        """The fields of all events of one kind."""
        return [event.fields for event in self.timeline if event.event == kind]

    @property
    def sample_counts(self) -> dict[int, SampleCounts]:
        """What became of the samples, by epoch. An epoch that was done again after a restart has its last ones."""
        names = [one.name for one in fields(SampleCounts)]
        return {row["epoch"]: SampleCounts(**{name: row[name] for name in names}) for row in self.events("epoch")}

    @property
    def finished(self) -> list[int]:
        """The uids of the last generation that ended well, by rank; not who left or died before."""
        codes = {row["uid"]: row["code"] for row in self.events("process_exited")}
        plans = self.events("plan")
        return [uid for uid in plans[-1]["members"] if codes.get(uid) == 0] if plans else []

    @property
    def weights(self) -> dict[int, FinalWeights]:
        """What each rank that finished had in the end, by rank."""
        names = [one.name for one in fields(FinalWeights)]
        told: dict[int, FinalWeights] = {}
        for row in self.events(
            "weight_digests"
        ):  # the first counts: what a script does after it has left is its own affair
            told.setdefault(row["uid"], FinalWeights(**{name: row[name] for name in names}))
        return {told[uid].rank: told[uid] for uid in self.finished if uid in told}

    def assert_no_hang(self) -> None:
        """It ended by itself, in time."""
        __tracebackhide__ = True
        if not self.timed_out:
            return
        who = ", ".join(map(str, self.stuck)) or "nobody but the launcher"
        stacks = [f"--- {one.who}, where it was:\n{one.stack}" for one in self.stuck if one.stack]
        expected = f"that the job ends by itself within {self.timeout:g} s"
        self._fail("a hang", expected, f"still there: {who}", *(stacks or self._recorded_stacks()))

    def assert_finished(self) -> None:
        """It trained to its end."""
        __tracebackhide__ = True
        self.assert_no_hang()
        outcome = self.summary.get("outcome", "no summary in run.json")
        if self.exit_code != 0 or outcome != "finished":
            message = self.summary.get("message") or outcome
            self._fail("the job did not finish", "exit code 0", f"exit code {self.exit_code}: {message}")

    def assert_survived(self, count: int) -> None:
        """It finished, and exactly so many ranks had been lost until then."""
        __tracebackhide__ = True
        self.assert_finished()
        if (found := self.summary["failures_survived"]) != count:
            self._fail("losses survived", count, found, *self._failures_left_over())

    def assert_failures_happened(self) -> None:
        """Nothing of the schedule was left over: otherwise the test has tested nothing."""
        __tracebackhide__ = True
        self.assert_no_hang()
        if never := self._failures_left_over():
            self._fail("the schedule", "every failure happens", never[0])
        if "never_happened" not in self.summary:
            self._fail("the schedule", "every failure happens", "no summary in run.json: nobody knows")

    def assert_equal_weights(self) -> None:
        """All ranks that finished ended with the same weights."""
        __tracebackhide__ = True
        self.assert_finished()
        if not self._has_all_weights():
            self._fail("weights", "a digest of every rank that finished", self._shown_weights(), _ADVICE)
        if len({one.weights for one in self.weights.values()}) != 1:
            self._fail("weights", "the same on all ranks", self._shown_weights())

    def assert_no_sample_lost(self, *, epochs: int | None = None) -> None:
        """Every sample of every epoch went into a step; of so many epochs, if that is said.

        What the loader drops at the end of an epoch (`drop_last`) is not lost. What went with a rank in forward
        recovery is.
        """
        __tracebackhide__ = True
        self._balance("none lost", epochs, lambda row: row.used_once + row.dropped == row.units)

    def assert_no_sample_repeated(self, *, epochs: int | None = None) -> None:
        """No sample of any epoch went into two steps; of so many epochs, if that is said. Padding is no repetition."""
        __tracebackhide__ = True
        self._balance("none repeated", epochs, lambda row: row.twice == 0 and row.uses == row.used_once + row.padding)

    def assert_samples_accounted_for(self, *, epochs: int | None = None) -> None:
        """Every sample is accounted for: used once, lost with a rank, or dropped by the loader; none was just left."""
        __tracebackhide__ = True
        self._balance("every one accounted for", epochs, lambda row: row.is_complete)

    def assert_same_result(self, undisturbed: JobRun, *, state: bool = False) -> None:
        """It ended where the other one did, to the last bit: steps and weights; with `state` also buffers, by rank."""
        __tracebackhide__ = True
        undisturbed.assert_equal_weights()
        self.assert_equal_weights()
        (steps, weights), (other_steps, other_weights) = self._result(), undisturbed._result()
        if steps != other_steps:
            self._fail("steps", f"{other_steps}, as undisturbed", steps)
        if weights != other_weights:
            self._fail("weights", f"{other_weights}, as undisturbed", self._shown_weights(), *self._inexact())
        mine, theirs = ({rank: one.state for rank, one in run.weights.items()} for run in (self, undisturbed))
        if state and mine != theirs:
            differing = [rank for rank in sorted({*mine, *theirs}) if mine.get(rank) != theirs.get(rank)]
            expected, found = ({rank: some.get(rank) for rank in differing} for some in (theirs, mine))
            self._fail("buffers", f"{expected}, as undisturbed, by rank", found, *self._inexact())

    def _balance(self, expected: str, epochs: int | None, is_right: Callable[[SampleCounts], bool]) -> None:
        __tracebackhide__ = True
        self.assert_finished()
        books = self.sample_counts
        if not books:
            advice = "books are kept of loaders that are dealt: a map-style dataset, in job.batches, to the epoch's end"
            self._fail("samples", f"{expected}, by the books of every epoch", "no books on the timeline", advice)
        if sorted(books) != [*range(min(books), max(books) + 1)] or epochs not in (None, len(books)):
            wanted = "every epoch" if epochs is None else f"{epochs} epochs"
            self._fail("samples", f"{expected}, by the books of {wanted}", f"those of epochs {sorted(books)}")
        for epoch, row in sorted(books.items()):
            if not is_right(row):
                self._fail("samples", f"{expected} in epoch {epoch}", row)

    def _recorded_stacks(self) -> list[str]:
        """What the job itself has recorded of ranks that it found hanging."""
        told: dict[str, Any] = {}
        for event in self.timeline:
            if stack := event.fields.get("stack"):
                rank = event.fields.get("rank")
                told[event.source if rank is None else f"rank {rank}"] = stack
        return [f"--- {who}, where it was:\n{stack}" for who, stack in told.items()]

    def _result(self) -> tuple[int, str]:
        one = next(iter(self.weights.values()))
        return one.steps, one.weights

    def _has_all_weights(self) -> bool:
        return bool(self.finished) and {one.uid for one in self.weights.values()} == {*self.finished}

    def _shown_weights(self) -> str:
        ranks = {rank: f"{one.weights} after {one.steps} steps" for rank, one in sorted(self.weights.items())}
        return f"{ranks} of {len(self.finished)} ranks that finished"

    def _failures_left_over(self) -> list[str]:
        never = self.summary.get("never_happened", ())
        return [f"never happened: {', '.join(map(repr, never))}"] if never else []

    def _inexact(self) -> list[str]:
        why = self.summary.get("inexact")
        return [f"the job says: not as without failures: {why}"] if why else []

    def _fail(self, what: str, expected: object, found: object, *more: str) -> None:
        __tracebackhide__ = True
        ends = [f"--- the end of {name}:\n{_end(text)}" for name, text in self._printed() if text.strip()]
        place = f"--- all of it: {self.folder}"
        raise AssertionError("\n".join([f"{what}: expected {expected}, found {found}", *more, *ends, place]))

    def _printed(self) -> list[tuple[str, str]]:
        said, was_aborted, _ = self.stderr.partition(ABORTED)  # what comes after it are stacks, shown by themselves
        return [("stdout", self.stdout), ("stderr", said.rpartition("\n")[0] if was_aborted else said)]


_ADVICE = "each process records one when it leaves the job: does the script call eg.join and job.wrap?"


def _end(text: str) -> str:
    lines = text.rstrip().splitlines()
    return "\n".join([*(["…"] if len(lines) > _LINES else []), *lines[-_LINES:]])


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


_DEFAULTS = {
    "OMP_NUM_THREADS": "1",
    # Torch looks up the name of every address it connects to; where no server answers, that takes its time.
    "RES_OPTIONS": "timeout:1 attempts:1",
    # Whoever hangs can tell where: see hang_report.
    "PYTHONFAULTHANDLER": "1",
}
_launcher = JobLauncher()


class RunJob(Protocol):
    """What `run_job` is, the function and the fixture."""

    def __call__(
        self,
        script: str | PathLike[str],
        *arguments: object,
        ranks: int = 1,
        spares: int = 0,
        strategy: str = "rollback",
        failures: Failures | Iterable[str] | str = (),
        timeout: float = 60.0,
        options: Iterable[object] = (),
        folder: str | PathLike[str] | None = None,
        preload: bool = True,
    ) -> JobRun: ...


def run_job(
    script: str | PathLike[str],
    *arguments: object,
    ranks: int = 1,
    spares: int = 0,
    strategy: str = "rollback",
    failures: Failures | Iterable[str] | str = (),
    timeout: float = 60.0,
    options: Iterable[object] = (),
    folder: str | PathLike[str] | None = None,
    preload: bool = True,
) -> JobRun:
    """Run a script as `evergrad run` does, to its end or until `timeout` seconds have passed. Not from several threads.

    - `arguments`: the script's; `{folder}` in one of them becomes the job's folder.
    - `failures`: a schedule, or texts as `--fail` takes them.
    - `options`: further ones of `evergrad run`, word for word: `("--nnodes", 2, "--batch-policy", "constant")`.
    - `folder`: for the run and what it prints, one a job; None makes one that is gone when Python ends.
    - `preload`: all processes are forks of one that has imported torch; False starts each as a new Python process.

    What cannot be launched (no such script, a failure of rank 7 in a job of 4) ends with exit code 2, as there.
    """
    if not 0 < timeout < 1e6:
        raise UsageError(f"run_job: timeout={timeout!r}: expected seconds, above 0 and below a million")
    place = _made(folder)
    schedule = failures if isinstance(failures, Failures) else Failures.parse(failures)
    words: list[object] = ["-n", ranks, "--spares", spares, "--strategy", strategy]
    for text in schedule.texts:
        words += ["--fail", text]
    words += [*options, os.fspath(script), *(str(one).replace("{folder}", str(place)) for one in arguments)]
    env = _DEFAULTS | os.environ | {RECORD_WEIGHTS: "1"}
    request = Request([str(word) for word in words], str(place), os.getcwd(), env, timeout)
    ending = _launcher.launch(request) if preload else launch_plainly(request)
    return JobRun.load(place, ending, timeout)


def close_forkserver() -> None:
    """End the process that launches jobs; the next job starts another. Done at exit by itself; twice is fine."""
    _launcher.close()


atexit.register(close_forkserver)


def _made(folder: str | PathLike[str] | None) -> Path:
    if folder is None:
        path = Path(tempfile.mkdtemp(prefix="evergrad-job-"))
        atexit.register(shutil.rmtree, path, ignore_errors=True)
        return path
    path = Path(folder).absolute()
    path.mkdir(parents=True, exist_ok=True)
    if taken := [name for name in ("run", "stdout", "stderr") if (path / name).exists()]:
        raise UsageError(f"run_job: folder {path}: expected one that no job has used, found {taken[0]} in it")
    return path
