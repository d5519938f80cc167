"""How many trials an hour, against a fresh process for every trial?

`python benchmarks/study/main.py [--quick]`
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import harness
from benchmarks.harness import Column, Report, Sample, say, seconds

from evergrad.study.executors.base import Executor, Task
from evergrad.study.executors.local import LocalProcesses
from evergrad.study.golden import GoldenRun, read_golden
from evergrad.study.plan import Plan
from evergrad.study.plan_files import parse
from evergrad.study.runner import PERFORM
from evergrad.study.trials import Observation, Trial, golden_work, judge, trial_work

TITLE = "Trials an hour: warm workers against a fresh process a trial"
HERE = Path(__file__).resolve().parent
OURS, FRESH = "evergrad", "fresh process"
BARS = {1: 20.0, 10: 5.0}
WORKERS = 2
PLAN = """
study = "throughput"
seed = 9
[axes]
flips = [1, 10, 100]
[training]
model = "alexnet"
width = 0.0625
samples = 512
learning_rate = 0.003
checkpoint = 8
epochs = {epochs}
[sampling]
trainings = {trainings}
"""


class Warm:
    """A study's workers, loaded and busy."""

    def __init__(self, folder: Path, trials: Sequence[Trial]) -> None:
        self._executor: Executor = LocalProcesses(folder, PERFORM, workers=WORKERS)
        began = perf_counter()
        self._finish([Task(f"golden {number}", golden_work(trials[0], ())) for number in range(1)])
        self._finish([Task(f"warm {number}", trial_work(trials[0])) for number in range(2 * WORKERS)])
        self.start_s = perf_counter() - began

    def run(self, trials: Sequence[Trial]) -> tuple[float, dict[str, Observation]]:
        """How long they took, and what was seen."""
        began = perf_counter()
        seen = self._finish([Task(trial.id, trial_work(trial)) for trial in trials])
        return perf_counter() - began, seen

    def _finish(self, tasks: Sequence[Task]) -> dict[str, Observation]:
        for task in tasks:
            self._executor.submit(task)
        seen: dict[str, Observation] = {}
        ended = 0
        while ended < len(tasks):
            for one in self._executor.collect(1.0):
                ended += 1
                assert one.result is not None, one.reason
                if "end" in one.result:
                    seen[one.id] = Observation.from_json(one.result)
        return seen

    def close(self) -> None:
        """End the workers."""
        self._executor.close()


def fresh(folder: Path, trials: Sequence[Trial]) -> tuple[float, dict[str, Observation]]:
    """The same trials, a process each, as many at once as there are workers."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

    def one(trial: Trial) -> Observation:
        with tempfile.TemporaryDirectory(prefix="evergrad-fresh-") as out:
            command = [sys.executable, str(HERE / "fresh.py"), str(folder), json.dumps(trial.to_json()), out]
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600, env=env)
        if done.returncode:
            raise SystemExit(f"fresh process: {done.stderr[-2000:]}")
        return Observation.from_json(json.loads(done.stdout))

    began = perf_counter()
    with ThreadPoolExecutor(WORKERS) as pool:
        seen = dict(zip((trial.id for trial in trials), pool.map(one, trials), strict=True))
    return perf_counter() - began, seen


def verdicts(seen: dict[str, Observation], golden: GoldenRun) -> dict[str, str]:
    """Trial by trial."""
    return {name: judge(one, golden.observation, chance=golden.chance).value for name, one in seen.items()}


def measure(report: Report, epochs: int, each: int, few: int, rounds: int) -> None:
    """Both contenders, in turns; ours runs all trials, a fresh process the first few of every cell."""
    plan = Plan.of(parse(PLAN.format(epochs=epochs, trainings=each), "throughput"))
    trials = [cell.trial(number) for number in range(each) for cell in plan.cells]
    case = f"{epochs} epoch{'s' if epochs > 1 else ''}"
    with tempfile.TemporaryDirectory(prefix="evergrad-study-") as place:
        folder = Path(place)
        warm = Warm(folder, trials)
        try:
            golden = read_golden(folder, plan.cells[0].training.key)
            assert golden is not None
            samples: dict[str, list[Sample]] = {OURS: [], FRESH: []}
            compared = trials[: few * len(plan.cells)]
            for turn in range(rounds):
                order = (OURS, FRESH) if turn % 2 == 0 else (FRESH, OURS)
                found: dict[str, dict[str, str]] = {}
                for name in order:
                    took, seen = warm.run(trials) if name == OURS else fresh(folder, compared)
                    found[name] = verdicts(seen, golden)
                    samples[name].append({"rate": len(seen) / took * 3600, "each_s": took / len(seen)})
                same = {trial.id: found[OURS][trial.id] for trial in compared}
                assert same == found[FRESH], "the two do not agree on a verdict"
            report.add(case, samples)
        finally:
            warm.close()
    ours, theirs = (report.median(case, name, "rate") for name in (OURS, FRESH))
    assert ours is not None
    assert theirs is not None
    bar = BARS.get(epochs)
    wanted = "" if bar is None else f"; wanted ≥ {bar:g} ×: {'met' if ours / theirs >= bar else 'not met'}"
    report.notes.append(
        f"{case}: {ours / theirs:.1f} × as many trials an hour{wanted}. {len(compared)} trials a round are run by "
        f"both, with the same verdicts; start of our workers and golden run, not counted: {warm.start_s:.1f} s."
    )
    say(f"  {report.notes[-1]}")


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument("--quick", action="store_true", help="one round of few trials; results are not kept")
    given = parser.parse_args()
    columns = [
        Column("rate", "trials an hour", lambda rate: f"{rate:,.0f}", spread=True),
        Column("each_s", "a trial takes", seconds, spread=True),
    ]
    report = Report("study", TITLE, columns, FRESH, "rate", ("torch", "numpy", "scikit-learn"))
    for epochs, each in ((1, 100), (3, 60), (10, 25)):
        say(f"{epochs} epochs")
        measure(report, epochs, 5 if given.quick else each, 1 if given.quick else 4, 1 if given.quick else 3)
    report.notes.append(
        "alexnet at 1/16 of its width on the first 512 digits (8 steps an epoch), one thread a process, two processes "
        "at once; 1, 10 and 100 flips. "
        "*a trial takes*: wall time over trials, with two at once."
    )
    report.print()
    if given.quick:
        say("quick: results are not written")
    else:
        say(f"written: {', '.join(str(path.relative_to(harness.ROOT)) for path in report.write())}")


if __name__ == "__main__":
    main()
