"""How long does a save block training, when is it on the disk, and what does a busy Python thread change?

`python benchmarks/save/main.py [--quick]`
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.harness import RESULTS, Column, Report, Sample, interleave, say, seconds
from benchmarks.save import figure
from benchmarks.save.contenders import KEEP, Contender, contenders
from benchmarks.save.resources import Watch
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

TITLE = "What a save costs"
EVERGRAD = "evergrad"
SLOW = "DCP"
"""Who takes ten seconds where there are many tensors."""
NOT_BUSY = ("DCP async_save", "DCP async_save, shared")
"""DCP is represented by its best thread and by its process."""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    smaller: int
    repetitions: int
    slow: int
    """Repetitions of what takes ten seconds."""
    busy: int
    busy_slow: int


FULL = Size(1, 7, 2, 3, 1)
QUICK = Size(16, 3, 3, 2, 2)


@dataclass
class Case:
    """One state, those who save it, and what went wrong."""

    kind: Kind
    state: State
    size: Size
    folder: Path
    running: dict[str, Contender] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    resources: dict[str, Sample] = field(default_factory=dict)
    steps: int = 0

    def check(self, stack: ExitStack) -> None:
        """Open all, save once with each, uncounted, and compare what comes back; who fails is not measured."""
        for name, make in contenders(self.kind.many).items():
            start = perf_counter()
            contender: Contender | None = None
            try:
                folder = self.folder / name.replace(" ", "-")
                with Watch(folder) as watch:
                    contender = make(self.state, folder)
                    self._run(contender)
                self.resources[name] = watch.sample()
                self._compare(name, contender)
            except Exception as error:
                self.failed[name] = f"{type(error).__name__}: {error}"
                say(f"  {name}: {self.failed[name]}")
                if contender is not None:
                    contender.close()
                continue
            stack.callback(contender.close)
            self.running[name] = contender
            say(f"  {name}: what was written comes back equal ({seconds(perf_counter() - start)})")

    def race(self) -> dict[str, list[Sample]]:
        """In turns; who failed has no samples."""
        runs = {name: self._sample(contender) for name, contender in self.running.items()}
        counts = {name: self._count(name, self.size.repetitions, self.size.slow) for name in runs}
        # Two arenas, the versions that are kept, and a retired file to write over: then it is as it always will be.
        first = [name for name in runs if name.startswith(EVERGRAD) for _ in range(KEEP + 1)]
        samples = interleave(runs, counts, warm_ups=first)
        found: dict[str, list[Sample]] = {}
        for name in contenders(self.kind.many):
            found[name] = [*samples.get(name, []), *([self.resources[name]] if name in self.running else [])]
        return found

    def busy(self) -> dict[str, list[Sample]]:
        """The same while the training thread computes in Python; only those who have something left to do."""
        left = {name: each for name, each in self.running.items() if each.background and name not in NOT_BUSY}
        runs = {name: self._busy(each) for name, each in left.items()}
        if not runs:
            return {}
        return interleave(runs, {name: self._count(name, self.size.busy, self.size.busy_slow) for name in runs})

    def _count(self, name: str, usual: int, slow: int) -> int:
        return slow if self.kind.many and name.startswith(SLOW) else usual

    def _run(self, contender: Contender, busy: bool = False) -> Sample:
        self.steps += 1
        alter(self.state)
        contender.ready()
        settle()
        try:
            start = perf_counter()
            wait = contender.save(self.steps)
            blocks = perf_counter() - start
            if busy:
                turns, spun = _spin_until(wait)
                return {"durable_s": perf_counter() - start, "turns_per_s": turns / spun}
            wait()
            durable = perf_counter() - start
        finally:
            contender.tidy()
        return {"blocks_s": blocks} if contender.only_copies else {"blocks_s": blocks, "durable_s": durable}

    def _sample(self, contender: Contender) -> Callable[[], Sample]:
        return lambda: self._run(contender)

    def _busy(self, contender: Contender) -> Callable[[], Sample]:
        return lambda: self._run(contender, busy=True)

    def _compare(self, name: str, contender: Contender) -> None:
        expected = copied(self.state)
        scramble(self.state)
        contender.load(self.state)
        wrong = differences(self.state, expected)
        for path, tensor in self.state.items():
            tensor.copy_(expected[path])
        if wrong:
            raise RuntimeError(f"{len(wrong)} tensors of {name} do not come back, the first {wrong[0]}")


def _spin_until(wait: Callable[[], None]) -> tuple[int, float]:
    """Compute in pure Python until another thread has seen the end of `wait`; turns of the loop, and seconds."""
    errors: list[BaseException] = []

    def waiting() -> None:
        try:
            wait()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=waiting)
    start = perf_counter()
    thread.start()
    turns = 0
    while thread.is_alive():
        turns += _turn()
    if errors:
        raise errors[0]
    return turns, perf_counter() - start


def _turn() -> int:
    total = 0
    for number in range(1000):
        total += number & 1
    return 1


def alone() -> float:
    """Turns of the loop a second while nothing is saved."""
    start, turns = perf_counter(), 0
    while perf_counter() - start < 0.3:
        turns += _turn()
    return turns / (perf_counter() - start)


class Bars:
    """What was promised, against what was measured."""

    def __init__(self, report: Report, kinds: Sequence[Kind]) -> None:
        self.report, self.kinds = report, kinds

    def notes(self) -> list[str]:
        """A line a promise; none where Evergrad was not measured."""
        found = []
        for kind in self.kinds:
            dcp = [row for row in self._names(kind) if row.startswith("DCP")]
            rivals = [row for row in self._names(kind) if not row.startswith((EVERGRAD, "bare"))]
            found += [
                *(
                    self._at_most(kind, "blocks_s", "blocks", [name], 1.3)
                    for name in self._names(kind)
                    if "bare" in name
                ),
                self._at_most(kind, "blocks_s", "blocks", dcp, 1 / 1.4),
                self._at_most(kind, "blocks_s", "blocks", ["torch.save"], 1 / (15 if kind.many else 8)),
                self._at_most(kind, "durable_s", "durable", rivals, 1.0),
            ]
        return [note for note in found if note]

    def _names(self, kind: Kind) -> list[str]:
        return [row.contender for row in self.report.rows if row.case == kind.name]

    def _at_most(self, kind: Kind, measure: str, verb: str, others: Sequence[str], factor: float) -> str:
        ours = self.report.median(kind.name, EVERGRAD, measure)
        theirs = {name: self.report.median(kind.name, name, measure) or math.inf for name in others}
        best = min(theirs, key=lambda name: theirs[name], default="")
        if ours is None or not best or math.isinf(theirs[best]):
            return ""
        ratio = ours / theirs[best]
        wanted = f"≤ {factor:.3g} ×" if factor >= 1 else f"≥ {1 / factor:.3g} × less than"
        found = f"× {ratio:.3g}" if factor >= 1 else f"{1 / ratio:.3g} × less"
        met = "met" if ratio <= factor else "not met"
        return f"Bar, {kind.name}: {verb} {wanted} {best} ({seconds(theirs[best])}): {seconds(ours)}, {found}: {met}."


def busy_notes(report: Report, kind: Kind, speed: float) -> list[str]:
    """How much later it is on the disk, and what is left to the training thread."""
    parts = []
    for row in report.rows:
        idle = report.median(kind.name, row.contender, "durable_s")
        if row.case != f"{kind.name}, busy" or idle is None:
            continue
        durable, turns = row.measures["durable_s"].median, row.measures["turns_per_s"].median
        parts.append(
            f"{row.contender} × {durable / idle:.2f} ({seconds(idle)} → {seconds(durable)}; "
            f"training runs at {turns / speed:.0%})"
        )
    return [f"{kind.name}, training thread busy in Python, until on the disk: {', '.join(parts)}."] if parts else []


def resource_notes(case: Case) -> list[str]:
    """Where Evergrad's memory is, and who failed."""
    found = []
    for name in (EVERGRAD, "evergrad, agent=False"):
        if name in case.running:
            of = case.resources[name]
            found.append(
                f"{case.kind.name}, memory of {name}: {of['shared_mib']:,.0f} MiB in /dev/shm, "
                f"{of['own_mib']:,.0f} MiB of the trainer's own, {of['others_mib']:,.0f} MiB of the agent's own "
                f"for a state of {size_of(case.state) / 2**20:,.0f} MiB."
            )
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    for name, error in case.failed.items():
        where = f" (limit: {limit:,} file descriptors)" if "open files" in error else ""
        found.append(f"{case.kind.name}: {name} fails: `{error}`{where}.")
    return found


def measure(size: Size, report: Report, folder: Path) -> None:
    """Both states, one after the other."""
    report.notes.append(f"Files on {file_system(folder)}.")
    told: list[str] = []
    for kind in (BIG, SMALL):
        state = kind.make(size.smaller)
        say(f"{kind.name}: {len(state):,} tensors, {size_of(state) / 1e6:,.0f} MB")
        with ExitStack() as stack:
            case = Case(kind, state, size, folder / ("many" if kind.many else "big"))
            case.folder.mkdir()
            case.check(stack)
            _add(report, kind.name, case.race())
            speed = alone()
            _add(report, f"{kind.name}, busy", case.busy())
            told += [*resource_notes(case), *busy_notes(report, kind, speed)]
    report.notes += [*Bars(report, (BIG, SMALL)).notes(), *told]


def _add(report: Report, case: str, samples: Mapping[str, Sequence[Sample]]) -> None:
    report.add(case, samples)
    for row in report.rows:
        if row.case == case:
            times = [f"{key[:-2]} {seconds(row.measures[key].median)}" for key in MEASURES if key in row.measures]
            say(f"  {case}, {row.contender}: {', '.join(times) or 'failed'}")


MEASURES = ("blocks_s", "durable_s")


def main() -> None:
    """Measure, print the tables, write the results."""
    parser = argparse.ArgumentParser(description=TITLE)
    parser.add_argument("--quick", action="store_true", help="states a sixteenth as large; results are not kept")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # DCP; one process is meant
    start = perf_counter()
    columns = [
        Column("blocks_s", "blocks", seconds, spread=True),
        Column("durable_s", "on the disk", seconds, spread=True),
        Column("added_mib", "memory", lambda mib: f"{mib:,.0f} MiB"),
        Column("descriptors", "fds", lambda count: f"{count:,.0f}"),
    ]
    packages = ("torch", "numpy", "safetensors", "torchsnapshot")
    report = Report("save", TITLE, columns, baseline=EVERGRAD, ratio_of="blocks_s", packages=packages)
    with tempfile.TemporaryDirectory(prefix="evergrad-save-") as folder, arenas():
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
