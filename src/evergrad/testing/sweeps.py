"""One failure at every place of a step, of every rank: each a job of its own, held against the undisturbed one.

>>> places = sweep("train.py", ranks=4, steps=(0, 3), buckets=(0,), strategies=("rollback", "forward"), spares=(0, 1))
>>> len(places), str(places[0])
(224, 'rollback, 0 spares, kill rank=0 step=0 phase=data')
>>> for case in places.sample(3, seed=1):  # all different in as much as three can be
...     print(case)
rollback, 0 spares, kill rank=3 step=0 phase=forward
rollback, 0 spares, kill rank=2 step=3 phase=data
forward, 1 spare, kill rank=1 step=3

In a test, with the fixture of `evergrad.testing.plugin`:

>>> @pytest.mark.parametrize("case", places.sample(8), ids=str)         # doctest: +SKIP
... def test_a_failure_anywhere_is_survived(case, run_job):
...     case.check(run_job)
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import overload

from evergrad.errors import UsageError
from evergrad.recovery.failures.schedule import Failure, Failures
from evergrad.recovery.launch.settings import checked_strategy
from evergrad.testing.jobs import JobRun, RunJob, run_job

PHASES = ("data", "forward", "backward", "optimizer")
"""Those that every script has; `checkpoint` is for one that saves."""

_SIDES = ("before", "during", "after")
_LETHAL = ("kill", "exception")
_undisturbed: dict[Script, JobRun] = {}


@dataclass(frozen=True, slots=True)
class Script:
    """What every job of a sweep runs."""

    script: str
    arguments: tuple[str, ...] = ()
    ranks: int = 2
    timeout: float = 60.0
    options: tuple[str, ...] = ()

    def undisturbed(self) -> JobRun:
        """The job without spares and failures, run once for as long as Python runs."""
        if self not in _undisturbed:
            ran = run_job(self.script, *self.arguments, ranks=self.ranks, timeout=self.timeout, options=self.options)
            ran.assert_equal_weights()
            _undisturbed[self] = ran
        return _undisturbed[self]


@dataclass(frozen=True, slots=True)
class Case:
    """One job with one failure."""

    job: Script
    strategy: str
    spares: int
    failure: Failure

    def __str__(self) -> str:
        return f"{self.strategy}, {self.spares} spare{'' if self.spares == 1 else 's'}, {self.failure}"

    def run(self, run_job: RunJob = run_job) -> JobRun:
        """Run it; nothing is demanded of it yet."""
        job = self.job
        return run_job(
            job.script,
            *job.arguments,
            ranks=job.ranks,
            spares=self.spares,
            strategy=self.strategy,
            failures=Failures([self.failure]),
            timeout=job.timeout,
            options=job.options,
        )

    def check(self, run_job: RunJob = run_job) -> JobRun:
        """Run it, and demand what Evergrad promises of it; the run, for what else you demand.

        - It ends by itself, and well; the failure happened, and who died of it was survived.
        - All ranks that finished have the same weights.
        - Of as many epochs as undisturbed, no sample was used twice, and but for forward recovery none was lost.
        - If the job says that it is exact, it ended where the undisturbed one did, to the last bit, buffers too.
        """
        __tracebackhide__ = True
        undisturbed = self.job.undisturbed()
        ran = self.run(run_job)
        self.judge(ran, undisturbed)
        return ran

    def judge(self, ran: JobRun, undisturbed: JobRun) -> None:
        """Demand the same of a run that is there already."""
        __tracebackhide__ = True
        ran.assert_finished()
        ran.assert_failures_happened()
        if self.failure.kind in _LETHAL:
            ran.assert_survived(1)
        ran.assert_equal_weights()
        if undisturbed.sample_counts:  # a loader that shards itself has none
            epochs = len(undisturbed.sample_counts)
            ran.assert_no_sample_repeated(epochs=epochs)
            ran.assert_samples_accounted_for(epochs=epochs)
            if self.strategy != "forward":
                ran.assert_no_sample_lost(epochs=epochs)
        if ran.summary["exact"]:
            ran.assert_same_result(undisturbed, state=True)


class Sweep(Sequence[Case]):
    """Cases in a fixed order."""

    def __init__(self, cases: Iterable[Case]) -> None:
        self._cases = tuple(cases)

    def sample(self, count: int, *, seed: int = 0) -> Sweep:
        """So many of them, in their order: drawn by the seed, those first that have something no other has yet.

        The same ones everywhere; all, if there are not more.
        """
        if count < 1:
            raise UsageError(f"sample: expected 1 case or more, found {count!r}")
        # By hash, not by a generator whose draws may differ between versions of Python.
        left = sorted(self._cases, key=lambda case: hashlib.blake2b(f"{seed}/{case}".encode()).digest())
        chosen: list[Case] = []
        seen: set[tuple[str, object]] = set()
        while left and len(chosen) < count:
            best = max(left, key=lambda case: len(_traits(case) - seen))  # of equals the first
            left.remove(best)
            chosen.append(best)
            seen |= _traits(best)
        return Sweep(case for case in self._cases if case in set(chosen))

    @overload
    def __getitem__(self, index: int) -> Case: ...
    @overload
    def __getitem__(self, index: slice) -> Sweep: ...
    def __getitem__(self, index: int | slice) -> Case | Sweep:
        return Sweep(self._cases[index]) if isinstance(index, slice) else self._cases[index]

    def __len__(self) -> int:
        return len(self._cases)


def sweep(
    script: str | PathLike[str],
    *arguments: object,
    ranks: int = 2,
    steps: Iterable[int] = (1,),
    phases: Iterable[str] = PHASES,
    buckets: Iterable[int] = (),
    kinds: Iterable[str] = ("kill",),
    strategies: Iterable[str] = ("rollback",),
    spares: Iterable[int] = (0,),
    timeout: float = 60.0,
    options: Iterable[object] = (),
) -> Sweep:
    """Every combination of strategy, spares, kind, step, place and rank.

    - `phases`, and `buckets`: each bucket is three places more, before, during and after its all-reduce.
    - `kinds`: of failures, with further words where they take some: `"kill"`, `"stop for=2"`.
    - `arguments`, `timeout`, `options`: of every job, as `run_job` takes them.
    """
    job = Script(os.path.abspath(script), tuple(map(str, arguments)), ranks, timeout, tuple(map(str, options)))
    places = [f"phase={phase}" for phase in phases]
    places += [f"bucket={bucket} at={side}" for bucket in buckets for side in _SIDES]
    hows = [(checked_strategy(name), count) for name in strategies for count in spares]
    cases = []
    for kind, step, place, rank in itertools.product(kinds, list(steps), places, range(ranks)):
        name, _, more = kind.partition(" ")
        cases.append(Failure.parse(f"{name} rank={rank} step={step} {place} {more}"))
    if not cases or not hows:
        raise UsageError("sweep: no case at all: expected a step, a phase or a bucket, a kind and a strategy at least")
    return Sweep(Case(job, strategy, count, failure) for strategy, count in hows for failure in cases)


def _traits(case: Case) -> set[tuple[str, object]]:
    one = case.failure
    place = (one.phase, one.bucket, one.at)
    return {
        ("strategy", case.strategy),
        ("spares", case.spares),
        ("kind", one.kind),
        ("rank", one.rank),
        ("step", one.step),
        ("place", place),
    }
