"""What does the DCP user's own call cost, with its storage and with ours?

`python benchmarks/dcp/main.py [--quick]`
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.dcp.contenders import OURS, RIVALS, contenders
from benchmarks.harness import RESULTS, Column, Report, Sample, interleave, say, seconds
from benchmarks.save.contenders import KEEP, Contender
from benchmarks.states import (
    BIG,
    SMALL,
    Kind,
    State,
    alter,
    arenas,
    copied,
    differences,
    file_system,
    scramble,
    settle,
    size_of,
)

TITLE = "What dcp.async_save costs, with DCP's storage and with Evergrad's"
MEASURES = {"blocks_s": "blocks", "durable_s": "durable"}


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    smaller: int
    repetitions: int
    slow: int
    """Repetitions of DCP where it takes ten seconds."""


FULL, QUICK = Size(1, 7, 3), Size(16, 3, 3)


class Case:
    """One state, and those who save it."""

    def __init__(self, kind: Kind, size: Size, folder: Path, stack: ExitStack) -> None:
        self.kind, self.size = kind, size
        self.state: State = kind.make(size.smaller)
        self._steps = 0
        self.running: dict[str, Contender] = {}
        say(f"{kind.name}: {len(self.state):,} tensors, {size_of(self.state) / 1e6:,.0f} MB")
        for name, make in contenders().items():
            contender = make(self.state, folder / name.replace(" ", "-"))
            stack.callback(contender.close)
            self._run(contender)
            self._compare(name, contender)
            self.running[name] = contender

    def race(self) -> dict[str, list[Sample]]:
        """In turns."""
        runs = {name: self._sample(contender) for name, contender in self.running.items()}
        counts = {name: self.size.slow if self.kind.many and name in RIVALS else self.size.repetitions for name in runs}
        # Two arenas, the versions that are kept, and a retired file to write over: then it is as it always will be.
        return interleave(runs, counts, warm_ups=[OURS] * (KEEP + 1))

    def _sample(self, contender: Contender) -> Callable[[], Sample]:
        return lambda: self._run(contender)

    def _run(self, contender: Contender) -> Sample:
        self._steps += 1
        alter(self.state)
        contender.ready()
        settle()
        start = perf_counter()
        wait = contender.save(self._steps)
        blocks = perf_counter() - start
        wait()
        durable = perf_counter() - start
        contender.tidy()
        return {"blocks_s": blocks, "durable_s": durable}

    def _compare(self, name: str, contender: Contender) -> None:
        """The first save, uncounted, has to come back from the disk bit by bit."""
        expected = copied(self.state)
        scramble(self.state)
        contender.load(self.state)
        wrong = differences(self.state, expected)
        if wrong:
            raise SystemExit(f"{len(wrong)} tensors of {name} do not come back, the first {wrong[0]}")
        say(f"  {name}: what was written comes back equal")


def bars(report: Report, kind: Kind) -> list[str]:
    """What was promised, against what was measured: blocks less, durable no later than the best of DCP's."""
    notes = []
    for measure, verb in MEASURES.items():
        ours = report.median(kind.name, OURS, measure)
        theirs = {name: found for name in RIVALS if (found := report.median(kind.name, name, measure)) is not None}
        if ours is None or not theirs:
            continue
        best = min(theirs, key=lambda name: theirs[name])
        met = ours < theirs[best] if measure == "blocks_s" else ours <= theirs[best]
        wanted = "less than" if measure == "blocks_s" else "no later than"
        notes.append(
            f"Bar, {kind.name}: {verb} {wanted} {best} ({seconds(theirs[best])}): {seconds(ours)}, "
            f"× {ours / theirs[best]:.3g}: {'MET' if met else 'NOT MET'}."
        )
    return notes


def measure(size: Size, report: Report, folder: Path) -> None:
    """Both states, one after the other."""
    report.notes.append(f"Files on {file_system(folder)}.")
    for kind in (BIG, SMALL):
        with ExitStack() as stack:
            place = folder / ("many" if kind.many else "big")
            place.mkdir()
            report.add(kind.name, Case(kind, size, place, stack).race())
        report.notes += bars(report, kind)


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument("--quick", action="store_true", help="states a sixteenth as large; results are not kept")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
    start = perf_counter()
    columns = [
        Column("blocks_s", "blocks", seconds, spread=True),
        Column("durable_s", "on the disk", seconds, spread=True),
    ]
    report = Report("dcp", TITLE, columns, baseline=OURS, ratio_of="blocks_s")
    with tempfile.TemporaryDirectory(prefix="evergrad-dcp-") as folder, arenas():
        measure(QUICK if given.quick else FULL, report, Path(folder))
    report.print()
    say(f"{perf_counter() - start:.0f} s")
    if given.quick:
        say("quick: results are not written")
    else:
        say(f"written: {', '.join(str(path.relative_to(RESULTS.parent.parent)) for path in report.write())}")


if __name__ == "__main__":
    main()
