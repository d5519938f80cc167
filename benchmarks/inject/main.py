"""What does injecting faults cost, and does it grow with the faults or with the file?

`python benchmarks/inject/main.py [--quick] [--rival CHECKOUT]`
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.harness import RESULTS, Column, Report, Sample, Spread, interleave, say, seconds
from benchmarks.inject import figure, files
from benchmarks.inject.contenders import Bench, Rival, operations, rivals
from benchmarks.inject.phases import PHASES

SUFFIXES = {".h5": "HDF5", ".pt": "torch zip", ".safetensors": "safetensors"}
TITLE = "What injecting faults costs, and what it grows with"
FEW, SOME = 1, 10_000
Phases = dict[str, dict[str, Spread]]


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    widths: tuple[int, ...]
    """ResNet-50s so many channels wide; the first is the file of most measurements."""
    counts: tuple[int, ...]
    flips: int
    """What rivals, phases, undo, replay and copies are measured at."""
    repetitions: int
    loops: int
    """Repetitions of what takes minutes."""
    fresh: int
    """Repetitions in fresh processes, for their memory."""


FULL = Size((100, 206, 328, 658), (1, 100, 10_000, 100_000, 1_000_000), 100_000, 7, 3, 2)
QUICK = Size((32, 64), (1, 100, 10_000), 1_000, 3, 2, 1)


def label(suffix: str, size: int, count: int, network: str = "") -> str:
    """The name of a case, from which the figure reads what it needs."""
    return f"{SUFFIXES[suffix]}, {network}{size / 1e9:.2g} GB, {count:,} fault{'s' if count > 1 else ''}"


class Run:
    """One run of the benchmark: files made one after the other, and what was measured."""

    def __init__(self, size: Size, folder: Path, report: Report, rival: Path | None) -> None:
        self.size, self.folder, self.report, self.rival = size, folder, report, rival
        self.phases: Phases = {}
        self.medians: dict[tuple[str, int, int], float] = {}
        """Evergrad's, by format, size of the file, and faults."""

    def everything(self) -> None:
        """The question's parts, one after the other."""
        first, *larger = self.size.widths
        for suffix in SUFFIXES:
            self._most(suffix, files.resnet(files.RESNET_50, first))
        for width in larger:
            for suffix in SUFFIXES:
                self._size(suffix, files.resnet(files.RESNET_50, width), last=width == larger[-1])
        if self.size is FULL:
            self._network("AlexNet, ", files.alexnet())
            self._network("ResNet-152, ", files.resnet(files.RESNET_152, statistics=True))

    def _most(self, suffix: str, shapes: files.Shapes) -> None:
        """Growth with the faults, the rivals, the phases, undo, replay and copies: the first size."""
        with self._file(suffix, shapes) as bench:
            for count in sorted({*self.size.counts, self.size.flips}):
                against = rivals(self.rival if count == self.size.flips else None) if suffix == ".h5" else {}
                if count != self.size.flips:
                    against = {name: rival for name, rival in against.items() if name == "h5py loop"}
                self._compare(bench, suffix, count, against if count <= self.size.flips else {})
            for count in (1, self.size.flips):
                self.phases[label(suffix, bench.size, count)] = bench.phases(count, self.size.repetitions)
            case = f"{label(suffix, bench.size, self.size.flips)}: undo, replay, copy"
            runs = operations(bench, self.size.flips)
            self._add(case, interleave(runs, dict.fromkeys(runs, self.size.repetitions), warm_ups=list(runs)))
            self._memory(bench, suffix, (1, self.size.counts[-1]))

    def _size(self, suffix: str, shapes: files.Shapes, last: bool) -> None:
        """Growth with the file."""
        with self._file(suffix, shapes) as bench:
            for count in (FEW, SOME):
                self._compare(bench, suffix, count, {})
            if last:
                self._memory(bench, suffix, (FEW, SOME, self.size.counts[-1]))

    def _network(self, network: str, shapes: files.Shapes) -> None:
        """As many numbers in other tensors; the loop where it is the file that injectors were measured with."""
        with self._file(".h5", shapes) as bench:
            self._compare(bench, ".h5", FEW, {}, network)
            self._compare(bench, ".h5", self.size.flips, {"h5py loop": rivals(None)["h5py loop"]}, network)
            self.phases[label(".h5", bench.size, FEW, network)] = bench.phases(FEW, self.size.repetitions)

    def _file(self, suffix: str, shapes: files.Shapes) -> Bench:
        numbers = self.folder / "numbers"
        files.random_numbers(numbers, shapes)
        bench = Bench.made(self.folder / f"checkpoint{suffix}", shapes, numbers)
        numbers.unlink()
        parameters = sum(math.prod(shape) for shape in shapes.values())
        say(f"{SUFFIXES[suffix]}: {bench.size / 1e6:,.0f} MB, {parameters / 1e6:,.1f} M numbers, {len(shapes)} tensors")
        return bench

    def _compare(self, bench: Bench, suffix: str, count: int, against: Mapping[str, Rival], network: str = "") -> None:
        contenders = {"evergrad": bench.injection(count)}
        if len(against) > 1:
            contenders["evergrad, by tensor"] = bench.injection(count, sampling="tensor")
        repetitions = dict.fromkeys(contenders, self.size.repetitions)
        for name, rival in against.items():
            contenders[name] = bench.rival(rival.run, count)
            repetitions[name] = self.size.loops if rival.slow and count > SOME else self.size.repetitions
        case = label(suffix, bench.size, count, network)
        self._add(case, interleave(contenders, repetitions, warm_ups=["evergrad"]))
        if not network:
            self.medians[suffix, bench.size, count] = self.report.median(case, "evergrad", "time_s") or math.nan

    def _memory(self, bench: Bench, suffix: str, counts: Sequence[int]) -> None:
        for count in dict.fromkeys(counts):
            case = label(suffix, bench.size, count) + ", memory"
            runs = {"evergrad": bench.memory(count)}
            self._add(case, interleave(runs, {"evergrad": self.size.fresh}))

    def _add(self, case: str, samples: Mapping[str, Sequence[Sample]]) -> None:
        self.report.add(case, samples)
        rows = [row for row in self.report.rows if row.case == case]
        told = [f"{row.contender} {seconds(row.measures['time_s'].median)}" for row in rows if "time_s" in row.measures]
        told += [f"own {row.measures['own_mib'].median:.1f} MiB" for row in rows if "own_mib" in row.measures]
        say(f"  {case}: {', '.join(told)}")

    def notes(self) -> list[str]:
        """The answer in a few lines."""
        first = min(size for _, size, _ in self.medians)
        headline = label(".h5", first, self.size.flips)
        rows = {row.contender: row for row in self.report.rows if row.case == headline}
        parts = [f"{name} × {row.ratios['time_s']:,.3g}" for name, row in rows.items() if name != "evergrad"]
        found = [f"{headline}, against Evergrad with log and fsync: {', '.join(parts)}."]
        log_bytes = rows["evergrad"].measures["log_bytes"].median
        found.append(
            f"{headline}: the log has {log_bytes / 1e6:,.3g} MB, {log_bytes / self.size.flips:.0f} bytes a fault."
        )
        for suffix, title in SUFFIXES.items():
            of = {(size, count): took for (kind, size, count), took in self.medians.items() if kind == suffix}
            small, large = min(size for size, _ in of), max(size for size, _ in of)
            parts = [
                f"{count:,} from {seconds(of[small, count])} to {seconds(of[large, count])} "
                f"(× {of[large, count] / of[small, count]:.2g})"
                for count in (FEW, SOME)
            ]
            found.append(f"{title}, faults in a file {large / small:.0f} times as large: {'; '.join(parts)}.")
        return found


def phases_table(phases: Phases) -> list[str]:
    """Medians by phase, as Markdown."""
    lines = ["", "## Where the time goes", "", "Medians by phase, each moment counted once.", ""]
    lines += [f"| phase | {' | '.join(phases)} |", f"|---|{'---:|' * len(phases)}"]
    for phase in (*PHASES, "all"):
        lines.append(f"| {phase} | {' | '.join(seconds(case[phase].median) for case in phases.values())} |")
    return lines


def write(report: Report, phases: Phases) -> list[Path]:
    """The harness's files, with the phases added, and the figure."""
    as_json, as_text = report.write()
    data = json.loads(as_json.read_text(encoding="utf-8"))
    data["phases"] = {case: {phase: s.to_json() for phase, s in found.items()} for case, found in phases.items()}
    as_json.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    as_text.write_text(as_text.read_text(encoding="utf-8") + "\n".join(phases_table(phases)) + "\n", encoding="utf-8")
    return [as_json, as_text, figure.draw(data)]


def main() -> None:
    """Measure, print the tables, write the results."""
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument("--quick", action="store_true", help="small files, fewer faults; results are not kept")
    parser.add_argument("--rival", type=Path, help="a checkout of hdf5_corrupter, to run its loop too")
    given = parser.parse_args()
    start = perf_counter()
    columns = [
        Column("time_s", "time", seconds, spread=True),
        Column("durable_s", "with fsync", seconds),
        Column("own_mib", "own memory", lambda mib: f"{mib:,.1f} MiB"),
        Column("growth_mib", "with maps", lambda mib: f"{mib:,.1f} MiB"),
    ]
    packages = ("numpy", "h5py", "torch")
    report = Report("inject", TITLE, columns, baseline="evergrad", ratio_of="time_s", packages=packages)
    with tempfile.TemporaryDirectory(prefix="evergrad-inject-") as folder:
        run = Run(QUICK if given.quick else FULL, Path(folder), report, given.rival)
        run.everything()
    report.notes += run.notes()
    report.print()
    print("\n".join(phases_table(run.phases)))
    say(f"{perf_counter() - start:.0f} s")
    if given.quick:
        say("quick: results are not written")
    else:
        written = ", ".join(str(path.relative_to(RESULTS.parent.parent)) for path in write(report, run.phases))
        say(f"written: {written}")


if __name__ == "__main__":
    main()
