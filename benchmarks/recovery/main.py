"""What does a lost rank cost, and what does it cost to be ready for that when none is lost?

`python benchmarks/recovery/main.py [--quick] [--torchft-python PATH]`
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.harness import RESULTS, Column, Report, Sample, say, seconds
from benchmarks.recovery import figure, launches
from benchmarks.recovery.launches import RANKS, Failed, Found, Scenario, Site, Size
from benchmarks.recovery.logs import PHASES
from benchmarks.recovery.promises import bars, limits

TITLE = "What a lost rank costs, and what it costs when none is lost"
CASE = figure.CASE
FULL, QUICK = Size(512, 10, 32, 20, 300.0), Size(256, 10, 32, 12, 120.0)
PAIRS = (
    (Site(1, "bucket=0"), Site(0, "bucket=2")),
    (Site(3, "phase=forward"), Site(2, "bucket=3 at=after")),
    (Site(0, "bucket=1 at=during"), Site(1, "phase=optimizer")),
    (Site(2, "bucket=3"), Site(0, "phase=data")),
    (Site(0, "phase=forward"), Site(2, "bucket=1")),
)
"""Two kills a run, the second among the ranks that are left."""
SCENARIOS = {
    "rollback": Scenario("rollback"),
    "rollback, spare": Scenario("rollback", spares=2),
    "forward": Scenario("forward"),
    "forward, spare": Scenario("forward", spares=2),
    "restart": Scenario("restart", saves=True),
    "restart, new processes": Scenario("rollback", saves=True, min_ranks=RANKS),
}
TWINS = {
    "rollback": ("rollback", {}),
    "KEEPS=0": ("rollback", {"EVERGRAD_KEEP_NEIGHBOUR_STATE": "0"}),
    "forward": ("forward", {}),
}
TUNED = ("--join-ms=100", "--heartbeat-ms=1000")
TUNED_TIMEOUT_S = 5.0


@dataclass
class Race:
    """Those that lose ranks, in turns; each launch may give several samples."""

    folder: Path
    size: Size
    torchft_python: str | None
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    phases: dict[str, list[Sample]] = field(default_factory=dict)
    failed: dict[str, list[str]] = field(default_factory=dict)

    def contenders(self, turn: int, quick: bool) -> dict[str, Callable[[Path], Found]]:
        """Who runs in this round, and how."""
        pair, size = PAIRS[turn % len(PAIRS)], self.size
        found: dict[str, Callable[[Path], Found]] = {
            name: partial(launches.evergrad, scenario, pair, size) for name, scenario in SCENARIOS.items()
        }
        found["torchrun restart"] = partial(launches.torchrun, [site.rank for site in pair], size)
        if self.torchft_python is not None:
            start = partial(launches.torchft, self.torchft_python, pair[0].rank, size, mended=True)
            found["torchft, tuned"] = partial(start, timeout_s=TUNED_TIMEOUT_S, lighthouse=TUNED)
            found["torchft"] = partial(start, timeout_s=None, lighthouse=())
        if quick:
            for name in ("restart, new processes", "forward, spare", "torchft"):
                found.pop(name, None)
        return found

    def run(self, rounds: int, quick: bool) -> None:
        """Every round begins with another one."""
        for turn in range(rounds):
            contenders = self.contenders(turn, quick)
            names = list(contenders)
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                self._launch(name, turn, contenders[name])

    def _launch(self, name: str, turn: int, start: Callable[[Path], Found]) -> None:
        folder = self.folder / f"{turn}-{name.replace(' ', '-').replace(',', '')}"
        (folder / "logs").mkdir(parents=True)
        samples, phases = self.samples.setdefault(name, []), self.phases.setdefault(name, [])
        try:
            found = start(folder)
        except Failed as error:
            self.failed.setdefault(name, []).append(f"round {turn + 1}: {error}")
            say(f"  {name}: {error}")
            return
        samples += found.samples
        self.failed.setdefault(name, []).extend(f"round {turn + 1}: {what}" for what in found.unasked)
        phases += found.phases
        times = ", ".join(
            f"{seconds(one['time_s'])} ({one['time_s'] / one['step_s']:.1f} steps)" for one in found.samples
        )
        say(f"  {name}: {times or 'nothing measured'}")


def twins(name: str, size: Size, folder: Path, rounds: int, steps: int) -> dict[str, list[Sample]]:
    """What each twin's blocks took: the median rank of the median step, and its ratio to both DDPs of the round."""
    strategy, environment = TWINS[name]
    logs = launches.steady(strategy, size, folder, rounds, steps, environment)
    ranks = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(logs.glob("*.json"))]
    if len(ranks) != RANKS:
        raise Failed(f"{len(ranks)} of {RANKS} ranks have written what they measured")
    found: dict[str, list[Sample]] = {}
    for blocks in zip(*ranks, strict=True):
        medians = {twin: statistics.median(block[twin] for block in blocks) for twin in blocks[0]}
        plain = (medians["DDP"] + medians["DDP again"]) / 2
        for twin, median in medians.items():
            found.setdefault(twin, []).append({"step_s": median, "paired": median / plain})
    return found


def torchft_version(python: str) -> str | None:
    """Which torchft this interpreter has; None if it has none."""
    code = "import torchft; from importlib.metadata import version; print(version('torchft'))"
    done = subprocess.run([python, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    return done.stdout.strip() if done.returncode == 0 else None


def as_released(race: Race) -> str:
    """Whether torchft gets over a lost rank without our hook."""
    assert race.torchft_python is not None
    folder = race.folder / "torchft-as-released"
    (folder / "logs").mkdir(parents=True)
    try:
        found = launches.torchft(
            race.torchft_python, 1, race.size, folder, mended=False, timeout_s=TUNED_TIMEOUT_S, lighthouse=TUNED
        )
    except Failed as error:
        return f"survivors do not get over a lost rank (`{error}`); measured with a communication hook that does"
    times = ", ".join(seconds(sample["time_s"]) for sample in found.samples)
    return f"its own communication hook takes {times or 'for ever'}; the rows are with ours"


def phase_rows(samples: Sequence[Sample]) -> Mapping[str, Sequence[Sample]]:
    """A row a phase."""
    return {phase: [{"time_s": sample[phase]} for sample in samples] for phase in PHASES}


def measure(report: Report, given: argparse.Namespace, folder: Path) -> None:
    """Losses first, then nothing but training."""
    size, rounds = (QUICK, 1) if given.quick else (FULL, given.rounds)
    version = torchft_version(given.torchft_python)
    race = Race(folder, size, given.torchft_python if version else None)
    race.run(rounds, given.quick)
    report.add(CASE, race.samples)
    for name, samples in race.phases.items():
        if samples:
            report.add(f"parts: {name}", phase_rows(samples))
    told = ["torchft: not installed (--torchft-python PATH)."]
    if version:
        told = [] if given.quick else [f"torchft {version}: {as_released(race)}."]
    blocks, steps = (4, 8) if given.quick else (given.blocks, 20)
    for name in ("rollback",) if given.quick else TWINS:
        place = folder / f"twins-{name.replace(' ', '-')}"
        (place / "logs").mkdir(parents=True)
        try:
            found = twins(name, size, place, blocks, steps)
        except Failed as error:
            told.append(f"no failure: {name} fails: `{error}`.")
            continue
        report.add(f"no failure: {name}", found)
        say(f"  no failure: {name}: " + ", ".join(
            f"{twin} × {statistics.median(one['paired'] for one in each):.3f}" for twin, each in found.items()
        ))  # fmt: skip
    report.notes += [
        f"{RANKS} ranks of one thread, {size.layers} layers of width {size.width}, two a bucket, "
        f"batches of {size.batch} a rank.",
        *bars(report, race.samples),
        *limits(report),
        *told,
        *(f"{name}, {error}." for name, errors in race.failed.items() for error in errors),
    ]


def main() -> None:
    """Measure, print the tables, write the results."""
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument("--quick", action="store_true", help="a smaller model, one round; results are not kept")
    parser.add_argument("--rounds", type=int, default=5, help="launches of each that loses ranks")
    parser.add_argument("--blocks", type=int, default=16, help="blocks of each twin while nothing fails")
    parser.add_argument("--torchft-python", default=sys.executable, help="the interpreter that has torchft")
    given = parser.parse_args()
    start = perf_counter()
    columns = [
        Column("step_s", "step", seconds),
        Column("time_s", "time", seconds, spread=True),
        Column("lost_steps", "lost", lambda count: f"{count:.0f}"),
        Column("back_s", "back", seconds),
        Column("full_s", "full", seconds),
        Column("paired", "× DDP", lambda ratio: f"{ratio:.3f}", spread=True),
    ]
    report = Report("recovery", TITLE, columns, baseline="rollback", ratio_of="time_s")
    with (
        tempfile.TemporaryDirectory(prefix="evergrad-recovery-") as folder,
        tempfile.TemporaryDirectory(prefix="evergrad-bench-", dir="/dev/shm", ignore_cleanup_errors=True) as arenas,
    ):
        # Agents stay as long as they do for users: those of a restart must be there for the processes that come.
        os.environ["EVERGRAD_SHM"] = arenas
        measure(report, given, Path(folder))
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
