"""What does an exact conversion cost over the libraries' own way? `python benchmarks/convert/main.py [--quick]`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import safetensors.torch
import torch
from benchmarks.harness import RESULTS, Column, Report, Sample, interleave, say, seconds

import evergrad as eg

TITLE = "Converting a checkpoint: Evergrad against the libraries' own way"
REPETITIONS, QUICK_REPETITIONS = 5, 2
SIZES = {"0.2 GB in 50 tensors": (50, 1024), "16 MB in 4,000 tensors": (4000, 32)}
QUICK_SIZES = {"16 MB in 4,000 tensors": (4000, 32)}
NATIVE, DURABLE, OURS = "native", "native, fsync", "evergrad"
SUFFIXES = {"safetensors → torch zip": (".safetensors", ".pt"), "torch zip → safetensors": (".pt", ".safetensors")}


def load(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor, as the format's library reads it."""
    if path.suffix == ".pt":
        state: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
        return state
    return safetensors.torch.load_file(path)


def save(state: dict[str, torch.Tensor], path: Path) -> None:
    """Every tensor, as the format's library writes it."""
    if path.suffix == ".pt":
        torch.save(state, path)
    else:
        safetensors.torch.save_file(state, path)


def native(source: Path, target: Path) -> None:
    """Load with one library and save with the other."""
    save(load(source), target)


def durable(source: Path, target: Path) -> None:
    """The same, with the file on the disk at the end, as Evergrad leaves it."""
    native(source, target)
    descriptor = os.open(target, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


CONTENDERS: dict[str, Callable[[Path, Path], object]] = {NATIVE: native, DURABLE: durable, OURS: eg.convert}


def contender(name: str, source: Path, target: Path) -> Callable[[], Sample]:
    """One conversion to a place where nothing is, which is then checked and removed."""

    def run() -> Sample:
        start, busy = perf_counter(), process_time()
        CONTENDERS[name](source, target)
        sample = {"time_s": perf_counter() - start, "core_s": process_time() - busy}
        for key, tensor in load(target).items():
            if not torch.equal(tensor, torch.full_like(tensor, float(key.rpartition(".")[2]))):
                raise RuntimeError(f"{name}: {key} is not as it was")
        target.unlink()
        return sample

    return run


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small files, few runs; results are not written")
    quick = parser.parse_args().quick
    columns = [
        Column("time_s", "time", seconds, spread=True),
        Column("core_s", "on a core", seconds, spread=True),
    ]
    report = Report("convert", TITLE, columns, NATIVE, "time_s", packages=("torch", "numpy", "safetensors"))
    repetitions = QUICK_REPETITIONS if quick else REPETITIONS
    with tempfile.TemporaryDirectory(prefix="evergrad-convert-") as folder:
        for size, (tensors, side) in (QUICK_SIZES if quick else SIZES).items():
            state = {f"layers.{n}": torch.full((side, side), float(n)) for n in range(tensors)}
            for way, (from_, to) in SUFFIXES.items():
                source, target = Path(folder) / f"source{from_}", Path(folder) / f"target{to}"
                save(state, source)
                runs = {name: contender(name, source, target) for name in CONTENDERS}
                label = f"{way}, {size}"
                report.add(label, interleave(runs, dict.fromkeys(runs, repetitions), warm_ups=[OURS]))
                source.unlink()
                core = {name: report.median(label, name, "core_s") or 0.0 for name in runs}
                clock = {name: report.median(label, name, "time_s") or 0.0 for name in runs}
                note = (
                    f"{label}: evergrad takes {clock[OURS] / clock[NATIVE]:.2f} × the native time, "
                    f"{clock[OURS] / clock[DURABLE]:.2f} × with fsync; {core[OURS] / core[NATIVE]:.2f} × on a core."
                )
                report.notes.append(note)
                say(note)
    report.notes.append("Medians of runs in turns; sources in the page cache; targets new each time.")
    report.print()
    if quick:
        say("quick: results are not written")
    else:
        say("written: " + ", ".join(str(path.relative_to(RESULTS.parent.parent)) for path in report.write()))


if __name__ == "__main__":
    main()
