"""What does a guard against silent corruption cost, and which flipped bits does it find?

`python benchmarks/guard/main.py [--quick] [--only cost|speed|detection] [--cuda]`; with --cuda the GPU's speed alone is
measured, and results go to $OUT if that is set.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from benchmarks import harness
from benchmarks.guard.detection import PLACES, Cell, bit_classes, detect
from benchmarks.guard.digesting import EVERY, digest_cases, step_share
from benchmarks.harness import Column, Report, Sample, say, seconds

from evergrad.timeline import read_events

TITLE = "What a guard against silent corruption costs, and what it finds"
HERE = Path(__file__).resolve().parent
RANKS = 4
MOST_COST = 0.01
COST = f"4 ranks, a check every {EVERY} steps"
VARIANTS = {"no guard": (), "no guard, again": (), "guard": ("--guard",)}
DTYPES = (torch.float32, torch.bfloat16)
SEED = 11
Json = dict[str, Any]


def launch(name: str, folder: Path, width: int, blocks: int) -> list[Sample]:
    """One launch of the job: what a step took in each block, by its median rank, and what checks took."""
    (folder / "logs").mkdir(parents=True)
    command = [sys.executable, "-m", "evergrad", "run", "-n", str(RANKS), "--out", str(folder / "run")]
    command += [str(HERE / "train_guarded.py"), str(folder / "logs"), f"--width={width}", f"--blocks={blocks}"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1"}
    done = subprocess.run(
        [*command, *VARIANTS[name]], check=False, capture_output=True, text=True, timeout=1200, env=env
    )
    if done.returncode:
        raise SystemExit(f"{name}: exit code {done.returncode}: {done.stderr[-2000:]}")
    ranks = [json.loads(path.read_text(encoding="utf-8")) for path in sorted((folder / "logs").glob("*.json"))]
    assert len(ranks) == RANKS, f"{len(ranks)} of {RANKS} ranks have written what they measured"
    samples: list[Sample] = [{"time_s": statistics.median(block)} for block in zip(*ranks, strict=True)]
    checks = [event for event in read_events(folder / "run" / "timeline.jsonl") if event.event == "guard_check"]
    if VARIANTS[name]:
        wrong = [event for event in checks if event.fields["status"] != "ok"]
        assert checks, "the guard has checked nothing"
        assert not wrong, f"nothing was flipped, and the guard says {wrong[0].fields}"
        took = statistics.median(float(str(event.fields["seconds"])) for event in checks)
        samples = [{**sample, "check_s": took, "share": took / EVERY / sample["time_s"]} for sample in samples]
    return samples


def cost(report: Report, folder: Path, rounds: int, width: int, blocks: int) -> None:
    """Launches in turns, every round beginning with another one."""
    names = list(VARIANTS)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            samples[name] += launch(name, folder / f"{turn}-{names.index(name)}", width, blocks)
            say(f"  {name}: {seconds(statistics.median(one['time_s'] for one in samples[name]))} a step")
    report.add(COST, samples)
    plain, again, guarded = (report.median(COST, name, "time_s") or 0.0 for name in names)
    noise, ratio = abs(again / plain - 1), guarded / ((plain + again) / 2) - 1
    share = report.median(COST, "guard", "share") or 0.0
    judged = "not judged" if noise > MOST_COST else "met" if ratio <= MOST_COST else "not met"
    report.notes += [
        f"Bar: the guard costs ≤ 1 % of a step's time: {100 * ratio:+.2f} % against both without: {judged} "
        f"(the two without differ by {100 * noise:.2f} %).",
        f"The checks by themselves, from the job's timeline: {100 * share:.2f} % of the time.",
    ]


def speed(report: Report, device: str, repetitions: int, quick: bool) -> None:
    """Digests, magnitudes and norms, and what they are of a step."""
    for case, samples in digest_cases(device, repetitions, quick=quick):
        report.add(case, samples)
        say(f"  {case}: " + ", ".join(f"{n} {report.median(case, n, 'gb_s') or 0:.1f} GB/s" for n in samples))
    shapes = (
        ((256, 4),) if quick else ((1024, 8), (2048, 16), (4096, 32)) if device == "cuda" else ((256, 8), (512, 10))
    )
    for width, layers in shapes:
        case = f"{device}, one training step, {layers} layers of width {width}, AdamW"
        report.add(case, step_share(device, width, layers, repetitions))
        share = report.median(case, "guard", "share") or 0.0
        say(f"  {case}: {100 * share:.2f} % at every={EVERY}")
        met = "met" if share <= MOST_COST else "not met"
        report.notes.append(
            f"{case}, batches of {4 * width}: digests, magnitudes and norms are {100 * share:.2f} % of the time at "
            f"every={EVERY} (bar 1 %): {met}."
        )


def detection(trials: int) -> dict[str, dict[tuple[str, str], Cell]]:
    """The counts, by type."""
    found = {}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        start = perf_counter()
        found[name] = detect(dtype, trials, SEED)
        say(f"  detection, {name}: {perf_counter() - start:.0f} s")
    return found


def table(found: Mapping[str, Mapping[tuple[str, str], Cell]]) -> list[str]:
    """Markdown, a table a type: of each place's flips those that were found, by whom, and healed."""
    lines = ["", "## Which flipped bits are found", ""]
    lines += [
        "One bit in one of four ranks. *digest*: named by path and rank; *healed*: the bytes are the others' again; "
        "*range*, *norm*: what the cheap guards would have found without digests, in this step or the next."
    ]
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        cells = found[name]
        trials = next(iter(cells.values())).trials
        lines += ["", f"### {name}, {trials} flips a cell", ""]
        head = [f"{place}: {what}" for place in PLACES for what in ("digest", "healed", "range", "norm")]
        lines += [f"| bit | {' | '.join(head)} |", f"|---|{'---:|' * len(head)}"]
        for bits in bit_classes(dtype):
            row = [cells[place, bits] for place in PLACES]
            counts = [count for cell in row for count in (cell.digest, cell.healed, cell.range, cell.norm)]
            lines.append(f"| {bits} | {' | '.join(str(count) if count else '·' for count in counts)} |")
    return lines


def write(report: Report, found: Mapping[str, Mapping[tuple[str, str], Cell]] | None) -> list[Path]:
    """The harness's files, with the table added."""
    as_json, as_text = report.write()
    if found is not None:
        data: Json = json.loads(as_json.read_text(encoding="utf-8"))
        data["detection"] = {
            name: [{"place": place, "bits": bits, **asdict(cell)} for (place, bits), cell in cells.items()]
            for name, cells in found.items()
        }
        as_json.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        with as_text.open("a", encoding="utf-8") as file:
            file.write("\n".join(table(found)) + "\n")
    return [as_json, as_text]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument("--quick", action="store_true", help="little of everything; results are not kept")
    parser.add_argument("--only", choices=("cost", "speed", "detection"), help="one part; results are not kept")
    parser.add_argument("--cuda", action="store_true", help="the speed on a GPU, kept as guard_cuda")
    parser.add_argument("--rounds", type=int, default=4, help="launches of each job")
    parser.add_argument("--trials", type=int, default=10, help="flips in each cell of the table")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.cuda and os.environ.get("OUT"):
        harness.RESULTS = Path(os.environ["OUT"])
    columns = [
        Column("time_s", "time", seconds, spread=True),
        Column("gb_s", "speed", lambda value: f"{value:.1f} GB/s"),
        Column("check_s", "one check", seconds),
        Column("norm_s", "norm", seconds),
        Column("share", "share", lambda value: f"{100 * value:.2f} %"),
    ]
    question = "guard_cuda" if given.cuda else "guard"
    report = Report(question, TITLE, columns, baseline="copy", ratio_of="time_s", packages=("torch", "xxhash"))
    found = None
    repetitions = 3 if given.quick else 15
    if given.cuda:
        report.notes.append(f"GPU: {torch.cuda.get_device_name()}.")
        speed(report, "cuda", repetitions, given.quick)
    else:
        if given.only in (None, "cost"):
            with tempfile.TemporaryDirectory(prefix="evergrad-guard-") as folder:
                cost(report, Path(folder), 1 if given.quick else given.rounds, 256 if given.quick else 512,
                     2 if given.quick else 4)  # fmt: skip
        if given.only in (None, "speed"):
            speed(report, "cpu", repetitions, given.quick)
        if given.only in (None, "detection"):
            found = detection(2 if given.quick else given.trials)
    report.print()
    if found is not None:
        print("\n".join(table(found)))
    if given.quick or given.only:
        say("results are not written")
    else:
        say("written: " + ", ".join(map(str, write(report, found))))


if __name__ == "__main__":
    main()
