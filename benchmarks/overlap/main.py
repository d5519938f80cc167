"""What is gained by an optimizer that works while backward still runs, and what does it take?

`python benchmarks/overlap/main.py [--quick] [--ranks N]`
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.harness import RESULTS, Column, Report, Sample, say, seconds

TITLE = "Updates while backward runs: what is gained, and what it takes"
TRAIN = Path(__file__).with_name("train.py")
CASES = [(optimizer, strategy) for optimizer in ("SGD", "Adam") for strategy in ("rollback", "forward")]
OVERLAPPED = "evergrad, overlap"


def launch(optimizer: str, strategy: str, given: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """One job: what each of its ranks has measured."""
    logs = folder / "logs"
    options = [f"--width={given.width}", f"--steps={given.steps}", f"--rounds={given.blocks}"]
    command = [sys.executable, "-m", "evergrad", "run", "-n", str(given.ranks), "--out", str(folder / "run")]
    command += ["--strategy", strategy, str(TRAIN), str(logs), f"--optimizer={optimizer}", *options]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=given.limit_s
    )
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(logs.glob("*.json"))]
    if done.returncode or len(found) != given.ranks:
        raise RuntimeError(f"exit code {done.returncode}, {len(found)} of {given.ranks} ranks: {done.stderr[-600:]}")
    return found


def samples_of(ranks: list[dict[str, Any]]) -> dict[str, list[Sample]]:
    """Each block of each contender: the median rank of the median step, and its ratios within the round."""
    memory = ranks[0]["memory"]
    found: dict[str, list[Sample]] = {}
    for blocks in zip(*(rank["blocks"] for rank in ranks), strict=True):
        medians = {name: statistics.median(block[name] for block in blocks) for name in blocks[0]}
        for name, median in medians.items():
            sample = {"step_s": median, "paired": median / medians["DDP"], "gain": median / medians["evergrad"]}
            if name == OVERLAPPED:
                sample["held"] = memory["held_bytes"]
                sample["held_each"] = memory["held_bytes"] / memory["parameters"]
                sample["grown"] = statistics.median(rank["memory"]["grown_bytes"] for rank in ranks)
            found.setdefault(name, []).append(sample)
    return found


def verdict(case: str, report: Report) -> str:
    """What the ratios of one case say, in a line."""
    row = next(row for row in report.rows if (row.case, row.contender) == (case, OVERLAPPED))
    ratios = row.measures["gain"].values
    low, high = min(ratios), max(ratios)
    what = "faster" if high < 1 else "slower" if low > 1 else "no difference beyond the spread"
    return f"{case}: overlap takes {statistics.median(ratios):.3f} ({low:.3f}–{high:.3f}) of a step without: {what}."


def measure(report: Report, given: argparse.Namespace, folder: Path) -> None:
    """A job for every optimizer and strategy."""
    for optimizer, strategy in CASES:
        place = folder / f"{optimizer}-{strategy}"
        place.mkdir()
        case = f"{optimizer}, {strategy}"
        report.add(case, samples_of(launch(optimizer, strategy, given, place)))
        report.notes.append(verdict(case, report))
        say(f"  {report.notes[-1]}")
    report.notes.append(
        f"{given.ranks} ranks of one thread on {os.cpu_count()} cores, ten layers of width {given.width}, "
        f"buckets of 1.25 MB; {given.blocks} blocks of {given.steps} steps each, in turns."
    )


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument("--quick", action="store_true", help="a smaller model, few blocks; results are not kept")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--limit-s", type=float, default=900.0, help="for each job")
    given = parser.parse_args()
    if given.quick:
        given.width, given.blocks, given.steps = 256, 4, 8
    start = perf_counter()
    columns = [
        Column("step_s", "step", seconds, spread=True),
        Column("paired", "× DDP", lambda ratio: f"{ratio:.3f}", spread=True),
        Column("gain", "× no overlap", lambda ratio: f"{ratio:.3f}", spread=True),
        Column("held", "undo log", lambda size: f"{size / 1e6:.1f} MB"),
        Column("held_each", "bytes a parameter", lambda size: f"{size:.2f}"),
        Column("grown", "memory grown by", lambda size: f"{size / 1e6:.1f} MB"),
    ]
    report = Report("overlap", TITLE, columns, baseline="evergrad", ratio_of="step_s")
    with tempfile.TemporaryDirectory(prefix="evergrad-overlap-") as folder:
        measure(report, given, Path(folder))
    report.print()
    say(f"{perf_counter() - start:.0f} s")
    if given.quick:
        say("quick: results are not written")
    else:
        written = report.write()
        say(f"written: {', '.join(str(path.relative_to(RESULTS.parent.parent)) for path in written)}")


if __name__ == "__main__":
    main()
