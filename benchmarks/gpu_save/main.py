"""What does a save cost a training on a GPU, and when is it on the disk?

`python benchmarks/gpu_save/main.py [--quick]`; results go to benchmarks/results, or to $OUT if that is set.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from benchmarks import harness
from benchmarks.gpu_save.contenders import BEST_DCP, CONTENDERS
from benchmarks.gpu_save.trainings import CASES
from benchmarks.gpu_save.worker import BARE, work
from benchmarks.harness import Column, Report, Sample, say, seconds
from benchmarks.states import arenas, file_system

TITLE = "What a save costs a training on a GPU"
EVERGRAD = "evergrad"
SAVES = {"DCP": 3, "DCP, pinned and shared": 2, "torch.save": 3}
"""Where each takes ten seconds; five elsewhere."""
LEAST_S = 25.0  # with less time left nobody is started


def run(case: str, name: str, given: argparse.Namespace, folder: Path, log: Path, left: float) -> dict[str, Any]:
    """One contender, in a process of its own with a time limit; what it found, with `error` if it failed."""
    out, place = folder / "found.json", folder / "saves"
    out.unlink(missing_ok=True)
    limit = min(75.0, left)
    saves = 2 if given.quick else SAVES.get(name, 5) if case == "transformer" else 5
    command = [sys.executable, __file__, "--worker", case, name, str(place), str(out), "--device", given.device]
    command += ["--saves", str(saves), "--seconds", str(limit - 15), *(["--quick"] if given.quick else [])]
    said = ""
    start = perf_counter()
    try:
        with arenas():  # here, so that nothing of a worker that was ended stays in memory
            done = subprocess.run(
                command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit
            )
        if done.returncode:
            said = f"exit code {done.returncode}"
        output = done.stdout
    except subprocess.TimeoutExpired as error:
        said = f"not finished after {limit:.0f} s"
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else str(error.stdout or "")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"=== {case}, {name} ({perf_counter() - start:.1f} s){': ' + said if said else ''}\n{output}\n")
    found: dict[str, Any] = {"samples": [], "notes": [], "error": "", "state_bytes": 0}
    if out.exists():
        found |= json.loads(out.read_text(encoding="utf-8"))
    lines = [line for line in output.splitlines() if line.strip()]
    found["error"] = found["error"] or (f"{said}: {lines[-1][:160] if lines else 'no output'}" if said else "")
    return found


def measure(report: Report, given: argparse.Namespace, folder: Path, log: Path) -> None:
    """All contenders of all cases, one after the other, while there is time."""
    end = perf_counter() + given.budget
    told: list[str] = []
    known = earlier(given.earlier)
    for case in CASES:
        samples: dict[str, list[Sample]] = {}
        size = 0
        for name in (BARE, *CONTENDERS):
            left = end - perf_counter()
            if known.get((case, name)):
                samples[name] = known[case, name]
                continue
            if left < LEAST_S:
                told.append(f"{case}: {name} was left out: the {given.budget:.0f} s for all were over.")
                samples[name] = []
                continue
            found = run(case, name, given, folder, log, left)
            samples[name] = found["samples"]
            size = size or found["state_bytes"]
            told += [f"{case}, {name}: {note}." for note in found["notes"]]
            if found["error"]:
                told.append(f"{case}: {name} fails: `{found['error']}` ({len(samples[name])} saves counted).")
            medians = {
                key: harness.Spread(tuple(run[key] for run in samples[name])).median for key in _keys(samples[name])
            }
            say(f"{case}, {name}: " + (", ".join(f"{k} {v:.4g}" for k, v in medians.items()) or found["error"]))
        report.add(case, samples)
        report.notes += [f"{case}: a state of {size / 1e9:.2f} GB.", *bars(report, case)]
    report.notes += told


def earlier(path: Path | None) -> dict[tuple[str, str], list[Sample]]:
    """What a run before this one has measured, by case and contender: a machine may be lent for minutes only."""
    found: dict[tuple[str, str], list[Sample]] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if path is not None else ():
        values = {key: measure["values"] for key, measure in row["measures"].items()}
        runs = zip(*values.values(), strict=True)
        found[row["case"], row["contender"]] = [dict(zip(values, run, strict=True)) for run in runs]
    return found


def _keys(samples: list[Sample]) -> list[str]:
    return list(samples[0]) if samples else []


def bars(report: Report, case: str) -> list[str]:
    """What was promised, against what was measured."""
    notes = []
    bare = report.median(case, BARE, "returns_s")
    for measure, what in (("added_s", "until the next save"), ("near_s", "in the saving step and the four after it")):
        added = report.median(case, EVERGRAD, measure)
        if bare and added is not None:
            met = "met" if added <= 0.1 * bare else "not met"
            notes.append(
                f"Bar, {case}: added to training {what} ≤ 10 % of the bare copy ({seconds(bare)}): "
                f"{_signed(added)}, {added / bare:.1%}: {met}."
            )
    ours = report.median(case, EVERGRAD, "durable_s")
    rivals = {
        row.contender: row.measures["durable_s"].median
        for row in report.rows
        if row.case == case and row.contender.startswith("DCP") and "durable_s" in row.measures
    }
    if ours and rivals:
        best = min(rivals, key=lambda name: rivals[name])
        ratio = rivals[best] / ours
        met = "met" if ratio >= 2 else "not met"
        notes.append(f"Bar, {case}: on the disk ≥ 2 × sooner than {best} ({seconds(rivals[best])}): {seconds(ours)}, "
                     f"{ratio:.2f} × sooner: {met}.")  # fmt: skip
    theirs, added = report.median(case, BEST_DCP, "added_s"), report.median(case, EVERGRAD, "added_s")
    if theirs is not None and added is not None:
        notes.append(f"{case}: {BEST_DCP} adds {_signed(theirs)} to training a save, {EVERGRAD} {_signed(added)}.")
    return notes


def _signed(value: float) -> str:
    return f"−{seconds(-value)}" if value < 0 else seconds(value)


def main() -> None:
    """Measure, print the tables, write the results."""
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument("--quick", action="store_true", help="small models, two saves; results are marked as quick")
    parser.add_argument("--device", default="cuda", help="cpu: only to try the script out")
    parser.add_argument("--budget", type=float, default=340.0, help="seconds for everything")
    parser.add_argument("--earlier", type=Path, default=None, help="gpu_save.json of a run to go on from")
    parser.add_argument("--folder", default=None, help="where saves go; a folder on the disk to be measured")
    parser.add_argument("--worker", nargs=4, metavar=("CASE", "NAME", "FOLDER", "OUT"), help=argparse.SUPPRESS)
    parser.add_argument("--saves", type=int, default=5, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=60.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        case, name, folder, out = given.worker
        work(case, name, Path(folder), Path(out), given.device, given.saves, given.seconds, given.quick)
        return
    if given.device == "cuda" and not torch.cuda.is_available():
        say("no CUDA device here: nothing to measure (--device cpu --quick tries the script out)")
        return
    start = perf_counter()
    if "OUT" in os.environ:
        harness.RESULTS = Path(os.environ["OUT"])
    elif given.quick:
        harness.RESULTS = Path(tempfile.gettempdir())
    columns = [
        Column("base_s", "step", seconds),
        Column("returns_s", "returns", seconds),
        Column("first_s", "+ saving step", _signed),
        Column("near_s", "+ 5 steps", _signed),
        Column("added_s", "+ until next", _signed, spread=True),
        Column("durable_s", "on disk", seconds, spread=True),
    ]
    report = Report("gpu_save", TITLE, columns, baseline=EVERGRAD, ratio_of="durable_s")
    device = torch.cuda.get_device_name() if given.device == "cuda" else "none: tried out on the processor"
    with tempfile.TemporaryDirectory(prefix="evergrad-gpu-save-", dir=given.folder) as folder:
        report.notes.append(
            f"GPU: {device}. Files on {file_system(Path(folder))}.{' A quick run.' if given.quick else ''}"
        )
        log = harness.RESULTS / "gpu_save.log"
        log.write_text("", encoding="utf-8")
        measure(report, given, Path(folder), log)
    report.print()
    say(f"{perf_counter() - start:.0f} s; written: {', '.join(str(path) for path in [*report.write(), log])}")


if __name__ == "__main__":
    main()
