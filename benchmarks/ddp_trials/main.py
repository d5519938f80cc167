"""How many trials of a data-parallel training an hour, against a fresh launch of all ranks for every trial?

`python benchmarks/ddp_trials/main.py [--quick]`
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import harness
from benchmarks.harness import Column, Report, Sample, say, seconds

from evergrad.study.golden import GoldenRun, read_golden
from evergrad.study.plan import Plan
from evergrad.study.plan_files import parse
from evergrad.study.rank_group import end_cached_groups
from evergrad.study.tasks import perform
from evergrad.study.trials import Observation, Trial, golden_work, judge, trial_work

TITLE = "Trials of data-parallel trainings an hour: warm ranks against a fresh launch a trial"
HERE = Path(__file__).resolve().parent
OURS, FRESH = "evergrad", "fresh launch"
BAR = 5.0
PLAN = """
study = "throughput"
seed = 9
[axes]
where = ["role:model", "role:optimizer"]
flips = [1, 10]
[training]
model = "resnet18"
mechanism = "ddp"
ranks = {ranks}
width = 0.0625
samples = 512
learning_rate = 0.02
checkpoint = 4
epochs = 1
[sampling]
trainings = {trainings}
"""


def warm(folder: Path, trials: Sequence[Trial]) -> tuple[float, dict[str, Observation]]:
    """How long they took in the group that is there, and what was seen."""
    began = perf_counter()
    seen = {trial.id: Observation.from_json(perform(folder, trial_work(trial))) for trial in trials}
    return perf_counter() - began, seen


def fresh(folder: Path, trials: Sequence[Trial], ranks: int) -> tuple[float, dict[str, Observation]]:
    """The same trials, each with its own launch of all ranks."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    seen: dict[str, Observation] = {}
    began = perf_counter()
    for trial in trials:
        with tempfile.TemporaryDirectory(prefix="evergrad-fresh-") as place:
            out = Path(place) / "seen.json"
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            command = [*launch, str(HERE / "fresh.py"), str(folder), json.dumps(trial.to_json()), str(out)]
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600, env=env)
            if done.returncode:
                raise SystemExit(f"fresh launch: {done.stderr[-2000:]}")
            seen[trial.id] = Observation.from_json(json.loads(out.read_text()))
    return perf_counter() - began, seen


def verdicts(seen: dict[str, Observation], golden: GoldenRun) -> dict[str, str]:
    """Trial by trial."""
    return {name: judge(one, golden.observation, chance=golden.chance).value for name, one in seen.items()}


def measure(report: Report, ranks: int, each: int, few: int, rounds: int) -> None:
    """Both contenders, in turns; ours runs all trials, the other the first few of every cell."""
    plan = Plan.of(parse(PLAN.format(ranks=ranks, trainings=each), "throughput"))
    trials = [cell.trial(number) for number in range(each) for cell in plan.cells]
    case = f"{ranks} ranks"
    with tempfile.TemporaryDirectory(prefix="evergrad-ddp-") as place:
        folder = Path(place)
        began = perf_counter()
        perform(folder, golden_work(trials[0], [trials[0]]))
        start_s = perf_counter() - began
        golden = read_golden(folder, plan.cells[0].training.key)
        assert golden is not None
        samples: dict[str, list[Sample]] = {OURS: [], FRESH: []}
        compared = trials[: few * len(plan.cells)]
        for turn in range(rounds):
            found: dict[str, dict[str, str]] = {}
            for name in (OURS, FRESH) if turn % 2 == 0 else (FRESH, OURS):
                took, seen = warm(folder, trials) if name == OURS else fresh(folder, compared, ranks)
                found[name] = verdicts(seen, golden)
                samples[name].append({"rate": len(seen) / took * 3600, "each_s": took / len(seen)})
            same = {trial.id: found[OURS][trial.id] for trial in compared}
            assert same == found[FRESH], "the two do not agree on a verdict"
        report.add(case, samples)
        end_cached_groups()
    ours, theirs = (report.median(case, name, "rate") for name in (OURS, FRESH))
    assert ours is not None
    assert theirs is not None
    report.notes.append(
        f"{case}: {ours / theirs:.1f} × as many trials an hour; wanted ≥ {BAR:g} ×: "
        f"{'met' if ours / theirs >= BAR else 'not met'}. {len(compared)} trials a round are run by both, with the "
        f"same verdicts; start of our ranks and golden run, not counted: {start_s:.1f} s."
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
    report = Report("ddp_trials", TITLE, columns, FRESH, "rate", ("torch", "numpy"))
    for ranks in (2, 4, 8):
        say(f"{ranks} ranks")
        measure(report, ranks, 2 if given.quick else 8, 1, 1 if given.quick else 3)
    report.notes.append(
        "ResNet-18 at 1/16 of its width on the first 512 digits: 8 steps, batch 64 shared by the ranks, gloo; 1 and 10 "
        "flips in the model or the optimizer state of one rank. One trial at a time."
    )
    report.print()
    if given.quick:
        say("quick: results are not written")
    else:
        say(f"written: {', '.join(str(path.relative_to(harness.ROOT)) for path in report.write())}")


if __name__ == "__main__":
    main()
