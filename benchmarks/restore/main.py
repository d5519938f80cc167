"""How long does it take until the values are back in the live tensors?

`python benchmarks/restore/main.py [--quick]`
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.harness import RESULTS, Column, Report, Sample, interleave, say, seconds
from benchmarks.restore import figure
from benchmarks.restore.contenders import Contender, Files, contenders
from benchmarks.states import (
    BIG,
    SMALL,
    Kind,
    State,
    arenas,
    copied,
    differences,
    evict,
    file_system,
    read_once,
    resident,
    scramble,
    settle,
    size_of,
)

TITLE = "What a restore costs"
EVERGRAD, MEMORY = "evergrad", "evergrad, memory"
SLOW = "DCP"
"""Who takes ten seconds and more where there are many tensors."""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    smaller: int
    warm: int
    cold: int
    slow: int
    """Repetitions of what takes more than ten seconds."""


FULL = Size(1, 7, 7, 2)
QUICK = Size(16, 3, 3, 3)


class Case:
    """One state, written by all, and those who restore it."""

    def __init__(self, kind: Kind, state: State, size: Size) -> None:
        self.kind, self.state, self.size = kind, state, size
        self.running: dict[str, Contender] = {}
        self.failed: dict[str, str] = {}

    def check(self, files: Files, stack: ExitStack) -> None:
        """Open all, restore once with each, uncounted, and compare; who fails is not measured."""
        expected = copied(self.state)
        stack.callback(files.close)
        for name, make in contenders().items():
            start = perf_counter()
            try:
                contender = make(files)
                stack.callback(contender.close)
                self._timed(contender)
                wrong = differences(self.state, expected)
                if wrong:
                    raise RuntimeError(f"{len(wrong)} tensors are not what was saved, the first {wrong[0]}")
            except Exception as error:
                self.failed[name] = f"{type(error).__name__}: {error}"
                say(f"  {name}: {self.failed[name]}")
                continue
            finally:
                for path, tensor in self.state.items():
                    tensor.copy_(expected[path])
            self.running[name] = contender
            say(f"  {name}: everything comes back ({seconds(perf_counter() - start)})")

    def race(self, cold: bool) -> dict[str, list[Sample]]:
        """In turns, from the page cache or without it; who failed has no samples."""
        running = {name: each for name, each in self.running.items() if each.path is not None or not cold}
        for each in running.values():
            if each.path is not None:
                read_once(each.path)
        runs: dict[str, Callable[[], Sample]] = {name: self._run(each, cold) for name, each in running.items()}
        usual = self.size.cold if cold else self.size.warm
        slow = self.size.slow if self.kind.many else usual
        samples = interleave(runs, {name: slow if name.startswith(SLOW) else usual for name in runs})
        return samples | {name: [] for name in self.failed}

    def _run(self, contender: Contender, cold: bool) -> Callable[[], Sample]:
        return lambda: self._timed(contender, cold)

    def _timed(self, contender: Contender, cold: bool = False) -> Sample:
        contender.ready()
        scramble(self.state)
        settle()
        found: dict[str, float] = {}
        if cold:
            assert contender.path is not None
            evict(contender.path)
            found["resident"] = resident(contender.path)
        start = perf_counter()
        contender.restore(self.state)
        return found | {"time_s": perf_counter() - start}


def bars(report: Report, kind: Kind) -> list[str]:
    """What was promised, against what was measured; none where Evergrad was not measured."""
    found = []
    for case, name in (
        (f"{kind.name}, warm", MEMORY),
        (f"{kind.name}, warm", EVERGRAD),
        (f"{kind.name}, cold", EVERGRAD),
    ):
        ours = report.median(case, name, "time_s")
        theirs = {
            row.contender: row.measures["time_s"].median
            for row in report.rows
            if row.case == case and not row.contender.startswith(EVERGRAD) and "time_s" in row.measures
        }
        if ours is None or not theirs:
            continue
        best = min(theirs, key=lambda rival: theirs[rival])
        met = "met" if all(ours < took for took in theirs.values()) else "not met"
        ratios = ", ".join(f"{rival} × {took / ours:.3g}" for rival, took in theirs.items())
        found.append(
            f"Bar, {case}: {name} faster than each rival: {seconds(ours)}, the best of them, {best}, "
            f"{seconds(theirs[best])}: {met}. {ratios}."
        )
    return found


def coldness(report: Report, kind: Kind) -> list[str]:
    """What was left in the page cache when the clock started."""
    left = [
        value
        for row in report.rows
        if row.case == f"{kind.name}, cold" and "resident" in row.measures
        for value in row.measures["resident"].values
    ]
    return [f"{kind.name}, cold: at most {max(left):.2%} of the pages were still in memory (mincore)."] if left else []


def measure(size: Size, report: Report, folder: Path) -> None:
    """Both states, one after the other."""
    report.notes.append(f"Files on {file_system(folder)}.")
    told: list[str] = []
    for kind in (BIG, SMALL):
        state = kind.make(size.smaller)
        say(f"{kind.name}: {len(state):,} tensors, {size_of(state) / 1e6:,.0f} MB")
        with ExitStack() as stack:
            below = folder / ("many" if kind.many else "big")
            below.mkdir()
            case = Case(kind, state, size)
            case.check(Files(state, below), stack)
            _add(report, f"{kind.name}, warm", case.race(cold=False))
            _add(report, f"{kind.name}, cold", case.race(cold=True))
            told += [f"{kind.name}: {name} fails: `{error}`." for name, error in case.failed.items()]
        report.notes += bars(report, kind)
        told += coldness(report, kind)
    report.notes += told


def _add(report: Report, case: str, samples: Mapping[str, Sequence[Sample]]) -> None:
    report.add(case, samples)
    for row in report.rows:
        if row.case == case:
            took = row.measures.get("time_s")
            say(f"  {case}, {row.contender}: {'failed' if took is None else seconds(took.median)}")


def main() -> None:
    """Measure, print the tables, write the results."""
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument("--quick", action="store_true", help="states a sixteenth as large; results are not kept")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # DCP; one process is meant
    start = perf_counter()
    columns = [Column("time_s", "time", seconds, spread=True)]
    packages = ("torch", "numpy", "safetensors", "torchsnapshot")
    report = Report("restore", TITLE, columns, baseline=EVERGRAD, ratio_of="time_s", packages=packages)
    with tempfile.TemporaryDirectory(prefix="evergrad-restore-") as folder, arenas():
        measure(QUICK if given.quick else FULL, report, Path(folder))
    report.print()
    say(f"{perf_counter() - start:.0f} s")
    if given.quick:
        say("quick: results are not written")
    else:
        written = report.write()
        written.append(figure.draw(json.loads(written[0].read_text(encoding="utf-8"))))
        say(f"written: {', '.join(str(path.relative_to(RESULTS.parent.parent)) for path in written)}")


if __name__ == "__main__":
    main()
