"""What does `verify` find, what does it cost, and does it cry wolf? `python benchmarks/verify/main.py [--quick]`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import safetensors.torch
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.harness import RESULTS, Column, Report, Sample, interleave, say, seconds
from benchmarks.verify.checkpoints import FIXED_ON, HELD_OUT, WIDER, Training, make
from benchmarks.verify.detection import Detection, Rate, detect, scaled

from evergrad import convert, verify

TRIALS, QUICK_TRIALS = 2000, 200
TOP_TRIALS, QUICK_TOP_TRIALS = 300, 30
SCALES = (20, 40, 64, 80, 100)
REPETITIONS, QUICK_REPETITIONS = 7, 3
TENSORS, SIDE, QUICK_SIDE = 100, 1581, 500  # 100 × 1581² × 4 B = 1.0 GB
SEED = 20
Json = dict[str, Any]


def alarms(paths: Sequence[Path]) -> list[Json]:
    """What `verify` says of clean files, as they are and as safetensors, which has no checksum."""
    rows = []
    for path in paths:
        other = path.with_suffix(".safetensors")
        convert(path, other, overwrite=True)
        reports = [verify(path), verify(other)]
        rows.append(
            {
                "file": path.name,
                "tensors": len(reports[0].tensors),
                "false_alarms": sum(len(report.wrong) for report in reports),
                "verdicts": [report.verdict.value for report in reports],
                "wrong": [f"{row.name} {row.reason}" for report in reports for row in report.wrong],
            }
        )
        other.unlink()
    return rows


def evidence(
    folder: Path, trainings: Sequence[Training], trials: tuple[int, int], into: Detection
) -> tuple[list[Json], dict[int, Rate]]:
    """Make the checkpoints, verify them clean, then flip bits in them."""
    rows: list[Json] = []
    for training in trainings:
        learnt = make(training, folder)
        clean = alarms([folder / row["file"] for row in learnt])
        rows += [one | two for one, two in zip(learnt, clean, strict=True)]
        for row in rows[-2:]:
            say(f"{row['file']}: {row['measure']} {row['value']:.3f}, chance {row['chance']:.3f}; {row['wrong']}")
    files = [folder / row["file"] for row in rows]
    detect(files, *trials, SEED, into)
    return rows, scaled(files, SCALES)


def read_once(path: Path) -> None:
    """The floor: every byte into one buffer, nothing done with it."""
    descriptor, buffer, place = os.open(path, os.O_RDONLY), np.empty(1 << 20, np.uint8), 0
    try:
        while count := os.preadv(descriptor, [buffer.data], place):
            place += count
    finally:
        os.close(descriptor)


def test_zip(path: Path) -> None:
    """The checksums alone, by the standard library."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def look(path: Path) -> None:
    """`verify`, which must find nothing."""
    assert not verify(path).wrong


def speed(folder: Path, report: Report, side: int, repetitions: int) -> None:
    """A large file of each kind, read in turns by all contenders, from the page cache."""
    generator = torch.Generator().manual_seed(SEED)
    state = {f"layers.{n}.weight": torch.randn(side, side, generator=generator) for n in range(TENSORS)}
    # float16 with values above 2 is the slow case: each tensor's exponents have to be counted.
    for dtype, scale in ((torch.float32, 0.02), (torch.bfloat16, 0.02), (torch.float16, 1.0)):
        tensors = {name: (scale * tensor).to(dtype) for name, tensor in state.items()}
        for suffix in (".pt", ".safetensors"):
            path = folder / f"large{suffix}"
            if suffix == ".pt":
                torch.save(tensors, path)
            else:
                safetensors.torch.save_file(tensors, path)
            contenders: dict[str, Callable[[Path], object]] = {"read once": read_once, "evergrad verify": look}
            if suffix == ".pt":
                contenders |= {"zipfile.testzip": test_zip, "torch.load": torch.load}
            else:
                contenders["load_file, clone"] = _load_all
            runs = {name: _timed(run, path) for name, run in contenders.items()}
            label = f"{suffix} {str(dtype).removeprefix('torch.')}, σ = {scale:g}, {path.stat().st_size / 1e9:.2f} GB"
            report.add(label, interleave(runs, dict.fromkeys(runs, repetitions), warm_ups=["read once"]))
            say(f"{label}: " + ", ".join(f"{n} {seconds(report.median(label, n, 'time_s') or 0)}" for n in runs))
            path.unlink()


def _load_all(path: Path) -> None:
    # load_file maps the file and reads nothing: a sum would be arithmetic, a copy is reading.
    for tensor in safetensors.torch.load_file(path).values():
        tensor.clone()


def _timed(run: Callable[[Path], object], path: Path) -> Callable[[], Sample]:
    def sample() -> Sample:
        start = perf_counter()
        run(path)
        took = perf_counter() - start
        return {"time_s": took, "gb_s": path.stat().st_size / 1e9 / took}

    return sample


def sections(
    rows: dict[str, list[Json]], detections: dict[str, Detection], sizes: dict[str, dict[int, Rate]]
) -> list[str]:
    """What is no measure of time, as Markdown."""
    lines = ["", "## False alarms on clean checkpoints", ""]
    lines += [
        "| set | file | learnt | chance | tensors | false alarms (.pt + .safetensors) |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for title, files in rows.items():
        lines += [
            f"| {title} | {row['file']} | {row['measure']} {row['value']:.3f} | {row['chance']:.3f} | {row['tensors']} "
            f"| {row['false_alarms']} |"
            for row in files
        ]
    lines += ["", "## False alarms on clean float32 tensors in other units", ""]
    lines += ["Every tensor is scaled until its largest value is the power of two above the column.", ""]
    lines += [f"| set | {' | '.join(f'2^{size}' for size in SCALES)} |", f"|---|{'---:|' * len(SCALES)}"]
    lines += [f"| {title} | {' | '.join(str(rate) for rate in rates.values())} |" for title, rates in sizes.items()]
    lines += ["", "## The top exponent bit, found by value alone", ""]
    lines += ["| set | dtype | element drawn by | found |", "|---|---|---|---:|"]
    for title, detection in detections.items():
        for (dtype, way), rate in sorted(detection.top_drawn.items(), reverse=True):
            lines.append(f"| {title} | {dtype} | {way} | {rate} |")
    for (dtype, way), rate in sorted(_together(detections).items(), reverse=True):
        lines.append(f"| all sets | {dtype} | {way} | {rate} |")
    for title, detection in detections.items():
        lines += [
            "",
            f"## Found without a checksum: {title}",
            "",
            "One flipped bit; share found (95 % Wilson) of trials.",
            "",
        ]
        dtypes = sorted({dtype for dtype, _ in detection.by_bit}, reverse=True)
        lines += [f"| bit | {' | '.join(dtypes)} |", f"|---|{'---:|' * len(dtypes)}"]
        for label in _labels(detection):
            cells = [_cell(detection, dtype, label) for dtype in dtypes]
            lines.append(f"| {label} | {' | '.join(cells)} |")
        lines += [f"| any | {' | '.join(str(detection.every[dtype]) for dtype in dtypes)} |", ""]
        counters = "; ".join(f"{dtype}: {rate}" for dtype, rate in detection.counters.items())
        lines += [f"Optimizers' `step`, any bit, not counted above: {counters or 'none'}.", ""]
        lines += ["| top exponent bit of | found |", "|---|---:|"]
        for dtype in dtypes:
            lines.append(f"| {dtype}, values that were not 0 | {detection.top_others[dtype]} |")
            lines.append(f"| {dtype}, zeros (become 2.0) | {detection.top_zeros[dtype]} |")
        lines += [f"| {dtype}, {name} | {rate} |" for (dtype, name), rate in sorted(detection.top_by_kind.items())]
    return lines


def _together(detections: dict[str, Detection]) -> dict[tuple[str, str], Rate]:
    """The top exponent bit over all sets."""
    rates: dict[tuple[str, str], Rate] = {}
    for detection in detections.values():
        for key, rate in detection.top_drawn.items():
            total = rates.setdefault(key, Rate())
            total.found, total.trials = total.found + rate.found, total.trials + rate.trials
    return rates


_FIELDS = {"float32": (8, 23), "float16": (5, 10), "bfloat16": (8, 7)}


def _labels(detection: Detection) -> list[str]:
    return ["sign", "exponent, top bit", *(f"exponent, top − {n}" for n in range(1, 8)), "mantissa"]


def _cell(detection: Detection, dtype: str, label: str) -> str:
    exponent, mantissa = _FIELDS[dtype]
    if label == "mantissa":
        rates = [rate for (name, bit), rate in detection.by_bit.items() if name == dtype and bit < mantissa]
        total = type(detection.every[dtype])(sum(r.found for r in rates), sum(r.trials for r in rates))
        return str(total)
    below = 0 if label == "exponent, top bit" else -1 if label == "sign" else int(label.rpartition(" ")[2])
    if below >= exponent:
        return "–"
    return str(detection.by_bit[dtype, mantissa + exponent - 1 - below])


def write(
    report: Report,
    rows: dict[str, list[Json]],
    detections: dict[str, Detection],
    sizes: dict[str, dict[int, Rate]],
) -> list[Path]:
    """The harness's files, with the evidence added."""
    as_json, as_text = report.write()
    data = json.loads(as_json.read_text(encoding="utf-8"))
    data["clean"] = rows
    data["detection"] = {
        title: {
            name: [
                {"of": list(key) if isinstance(key, tuple) else [key], **rate.to_json()}
                for key, rate in sorted(getattr(found, name).items())
            ]
            for name in ("by_bit", "top_by_kind", "top_zeros", "top_others", "every", "top_drawn", "counters")
        }
        for title, found in detections.items()
    }
    data["scaled"] = {
        title: {f"2^{size}": rate.to_json() for size, rate in rates.items()} for title, rates in sizes.items()
    }
    as_json.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    text = as_text.read_text(encoding="utf-8") + "\n".join(sections(rows, detections, sizes)) + "\n"
    as_text.write_text(text, encoding="utf-8")
    return [as_json, as_text]


def main() -> None:
    """Train, verify, flip, time; print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two trainings, few flips, 0.1 GB; results are not kept")
    quick = parser.parse_args().quick
    columns = [
        Column("time_s", "time", seconds, spread=True),
        Column("gb_s", "speed", lambda value: f"{value:.2f} GB/s"),
    ]
    title = "Verifying a checkpoint: speed, false alarms, and what it finds"
    report = Report(
        "verify", title, columns, "read once", "time_s", packages=("torch", "numpy", "safetensors", "scikit-learn")
    )
    sets = {
        name: trainings[: 1 if quick else None]
        for name, trainings in (("thresholds fixed on", FIXED_ON), ("held out", HELD_OUT), ("wider", WIDER))
    }
    rows: dict[str, list[Json]] = {}
    detections: dict[str, Detection] = {}
    sizes: dict[str, dict[int, Rate]] = {}
    with tempfile.TemporaryDirectory(prefix="evergrad-verify-") as folder:
        for name, trainings in sets.items():
            detections[name] = Detection()
            trials = (QUICK_TRIALS, QUICK_TOP_TRIALS) if quick else (TRIALS, TOP_TRIALS)
            rows[name], sizes[name] = evidence(Path(folder), trainings, trials, detections[name])
        torch.set_num_threads(2)
        speed(Path(folder), report, QUICK_SIDE if quick else SIDE, QUICK_REPETITIONS if quick else REPETITIONS)
    false = ", ".join(f"{sum(row['false_alarms'] for row in files)} ({name})" for name, files in rows.items())
    report.notes += [
        "All from the page cache. `verify` reads a torch zip's bytes twice (checksum, then values), safetensors once.",
        f"False alarms: {false}.",
    ]
    report.print()
    print("\n".join(sections(rows, detections, sizes)))
    if quick:
        say("quick: results are not written")
    else:
        say(
            "written: "
            + ", ".join(str(path.relative_to(RESULTS.parent.parent)) for path in write(report, rows, detections, sizes))
        )


if __name__ == "__main__":
    main()
