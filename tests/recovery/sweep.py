"""Every rank lost at every place of a step, by both strategies that go on within it, with and without a spare.

`make sweep` runs all of it and writes benchmarks/results/recovery_sweep.txt; the tests run a part of it.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forkserver import JobRunner, Ran

from evergrad import testing
from evergrad.recovery.failures.schedule import Failure

RANKS = 4
STEPS = (3, 0, 7, 1, 5, 6, 11)
"""At which steps: the first two, in which bucket layouts are agreed; both ends of both epochs; and between."""
SITES = (
    "phase=data",
    "phase=forward",
    "phase=backward",
    *(f"bucket={bucket} at={at}" for bucket in (0, 1) for at in ("before", "during", "after")),
    "phase=optimizer",
    "phase=checkpoint",
)
_EVERY = 2


@dataclass(frozen=True)
class Case:
    """One job that loses one rank."""

    strategy: str
    spares: int
    rank: int
    step: int
    site: str

    @property
    def failure(self) -> str:
        """As `--fail` takes it."""
        return f"kill rank={self.rank} step={self.step} {self.site}"

    def __str__(self) -> str:
        return f"{self.strategy}, {self.spares} spare, {self.failure}"

    def run(self, job_runner: JobRunner, folder: Path) -> Ran:
        """Run the job."""
        options = ("-n", RANKS, "--strategy", self.strategy, "--spares", self.spares, "--fail", self.failure)
        arguments = _saving(folder) if "checkpoint" in self.site else []
        if self.spares:
            arguments += ["--await-spare", RANKS]
        return job_runner.run(folder, *options, arguments=arguments)

    def wrong(self, ran: Ran, undisturbed: Ran) -> str | None:
        """What is not as promised; None if all is."""
        assert ran.job is not None
        assert undisturbed.job is not None
        promised = testing.Case(testing.Script("trainer.py"), self.strategy, self.spares, Failure.parse(self.failure))
        try:
            promised.judge(ran.job, undisturbed.job)
        except AssertionError as error:
            return str(error)
        alive = RANKS - 1 + self.spares
        if len(ran.job.weights) != alive or len(ran.results) != alive:
            return f"expected {alive} ranks in the end, found {sorted(ran.job.weights)}\n{ran.said}"
        if used_twice(ran):
            return f"samples were used twice: {used_twice(ran)}"
        # The job's own claim to be exact is held against the undisturbed run above. Of a rank that dies between two
        # steps it can claim nothing, but this script does nothing there.
        if self.strategy == "rollback" and self.spares:
            summary = ran.job.summary
            if not summary["exact"] and "between two steps" not in summary["unverified"]:
                return f"expected exactly the undisturbed state, found {summary['inexact'] or summary['unverified']}"
            try:
                ran.job.assert_same_result(undisturbed.job, state=True)
            except AssertionError as error:
                return str(error)
        return None


def cases() -> Iterator[Case]:
    """All of them; every site and rank meets another step."""
    steps = itertools.cycle(STEPS)
    for strategy, spares in itertools.product(("rollback", "forward"), (0, 1)):
        for site, rank in itertools.product(SITES, range(RANKS)):
            step = next(steps)
            # There is a save before the step that follows an even number of them; after the last one there is no step.
            step = max(_EVERY, step - step % _EVERY) if "checkpoint" in site else step
            # Buckets are two from the second step on; before that there is one.
            step = max(step, 1) if "bucket=1" in site else step
            yield Case(strategy, spares, rank, step, site)


def _saving(folder: Path) -> list[object]:
    return ["--checkpoints", folder / "checkpoints", "--every", _EVERY]


def used_twice(ran: Ran) -> list[int]:
    """Samples that survivors used in two steps of the same epoch."""
    ends = [epoch["step"] for epoch in ran.events("epoch")]
    found: list[int] = []
    for first, stop in zip([0, *ends], ends, strict=False):
        used = [
            sample
            for result in ran.results.values()
            for step, samples in result["used"].items()
            if first <= int(step) < stop
            for sample in samples
        ]
        found += [sample for sample in set(used) if used.count(sample) > 1]
    return found


def main() -> int:
    """Run all cases; one line each."""
    chosen = list(cases())
    job_runner, failed, begun = JobRunner(), 0, time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        undisturbed = job_runner.run(folder / "undisturbed", "-n", RANKS)
        for number, case in enumerate(chosen):
            ran = case.run(job_runner, folder / str(number))
            wrong = case.wrong(ran, undisturbed)
            failed += wrong is not None
            print(f"{'ok    ' if wrong is None else 'FAILED'} {case}" + (f"\n{wrong}" if wrong else ""), flush=True)
    job_runner.close()
    print(f"{len(chosen)} cases, {failed} failed, {time.monotonic() - begun:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
