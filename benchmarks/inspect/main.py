"""Does listing a checkpoint cost O(tensors), and not O(bytes)? `python benchmarks/inspect/main.py [--quick]`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.harness import Column, Report, Sample, interleave, say, seconds
from benchmarks.inspect.listing import CONTENDERS

HERE = Path(__file__).resolve().parent
COMMAND = Path(sys.executable).with_name("evergrad")
COMMAND_LINE = "evergrad inspect"
COMMANDS = {COMMAND_LINE: ["--json"], "evergrad inspect, table": [], "evergrad inspect, tree": ["--tree"]}
READS_EVERYTHING = "torch.load"
MAPS_DATA = "load_file"
REPETITIONS, QUICK_REPETITIONS, LARGE_REPETITIONS = 5, 3, 3
LARGE = 5_000_000_000
CLAIM = "Listing a checkpoint costs O(tensors), not O(bytes)"
FORMATS = {".pt": "torch zip", ".safetensors": "safetensors"}


@dataclass(frozen=True)
class Case:
    """A file to list: so many float32 tensors of one shape."""

    label: str
    tensors: int
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return self.tensors * self.shape[0] * self.shape[1] * 4


BY_BYTES = [
    Case("0.1 GB in 100 tensors", 100, (500, 500)),
    Case("1 GB in 100 tensors", 100, (500, 5_000)),
    Case("10 GB in 100 tensors", 100, (500, 50_000)),
]
BY_TENSORS = [
    Case("100 tensors of 4 KiB", 100, (32, 32)),
    Case("2,000 tensors of 4 KiB", 2_000, (32, 32)),
    Case("20,000 tensors of 4 KiB", 20_000, (32, 32)),
]
QUICK = [BY_BYTES[0], BY_TENSORS[1]]
MANY = [Case("60,000 tensors of 64 B", 60_000, (4, 4)), Case("300,000 tensors of 64 B", 300_000, (4, 4))]
LEFT_OUT_OF_MANY = MAPS_DATA


class Runner:
    """Starts the measuring processes for one file, and checks that all contenders list the same."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: dict[str, subprocess.Popen[str]] = {}
        self._seen: tuple[int, str] | None = None

    def prepare(self, names: Sequence[str]) -> None:
        """Start a fresh process for each, and wait until all have imported their library: none may disturb another."""
        for name in names:
            if name not in COMMANDS:
                command = [sys.executable, str(HERE / "listing.py"), name, str(self.path)]
                self._waiting[name] = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
        for name, process in self._waiting.items():
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"{name}: failed before it listed anything")

    def contender(self, name: str) -> Callable[[], Sample]:
        """What `interleave` calls."""
        return (lambda: self._command_line(name)) if name in COMMANDS else lambda: self._listing(name)

    def close(self) -> None:
        """End what still waits, after an error."""
        for process in self._waiting.values():
            process.kill()
            process.wait()

    def _listing(self, name: str) -> Sample:
        process = self._waiting.pop(name)
        out, _ = process.communicate("go\n")
        if process.returncode:
            raise RuntimeError(f"{name} on {self.path.name}: exit status {process.returncode}")
        answer = json.loads(out)
        found = (answer["tensors"], answer["digest"])
        if self._seen is None:
            self._seen = found
        elif self._seen != found:
            raise RuntimeError(f"{name} on {self.path.name}: lists {found}, others {self._seen}")
        measures: dict[str, float] = answer["measures"]
        return measures

    def _command_line(self, name: str) -> Sample:
        start = perf_counter()
        # A pipe that is emptied, as a pager would: what goes to /dev/null may cost less.
        command = f"{COMMAND} inspect {self.path} {' '.join(COMMANDS[name])}"
        process = subprocess.Popen(["sh", "-c", f"{command} | cat > /dev/null"])
        _, status, usage = os.wait4(process.pid, 0)
        took = perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{name} {self.path.name}: exit status {process.returncode}")
        cpu = usage.ru_utime + usage.ru_stime
        return {"command_s": took, "process_cpu_s": cpu, "peak_mib": usage.ru_maxrss / 1024}


def measure(
    case: Case,
    suffix: str,
    folder: Path,
    report: Report,
    *,
    repetitions: int,
    commands: Sequence[str],
    many: bool = False,
) -> None:
    """Make the file, list it with every contender, and delete it."""
    path = folder / f"checkpoint{suffix}"
    label = f"{FORMATS[suffix]}, {case.label}"
    command = [sys.executable, str(HERE / "sparse_files.py"), str(path), str(case.tensors), *map(str, case.shape)]
    made = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    say(f"{label}: {made['size'] / 1e6:,.1f} MB, {made['disk'] / 1e6:,.2f} MB of it on the disk")
    names = [name for name in CONTENDERS[suffix] if not (many and name == LEFT_OUT_OF_MANY)] + list(commands)
    if READS_EVERYTHING in names and case.nbytes * 1.15 > _available_bytes():
        names.remove(READS_EVERYTHING)
        report.notes.append(f"{label}: {READS_EVERYTHING} left out, it would not fit into memory.")
    counts = {
        name: min(repetitions, LARGE_REPETITIONS) if name == READS_EVERYTHING and case.nbytes > LARGE else repetitions
        for name in names
    }
    warm_ups = _warm(path, names)
    runner = Runner(path)
    try:
        contenders = {name: runner.contender(name) for name in names}
        samples = interleave(contenders, counts, warm_ups=warm_ups, prepare=runner.prepare)
    finally:
        runner.close()
        path.unlink()
    report.add(label, samples)
    medians = {name: report.median(label, name, "listing_s") for name in names}
    say("  " + ", ".join(f"{name} {seconds(value)}" for name, value in medians.items() if value is not None))


def growth(report: Report, cases: Sequence[Case], what: str) -> list[str]:
    """How each contender's time grows from the first case to the last, in words."""
    lines = []
    for suffix, title in FORMATS.items():
        parts = []
        for name in CONTENDERS[suffix]:
            ends = [report.median(f"{title}, {case.label}", name, "listing_s") for case in (cases[0], cases[-1])]
            if ends[0] is not None and ends[1] is not None:
                parts.append(f"{name} × {ends[1] / ends[0]:,.3g}")
        lines.append(f"{title}: {what} take {', '.join(parts)} the time.")
    return lines


def command_line_note(report: Report, name: str = COMMAND_LINE) -> str:
    """How long the whole command took, case by case."""
    rows = [row for row in report.rows if row.contender == name]
    times = "; ".join(f"{row.case}: {seconds(row.measures['command_s'].median)}" for row in rows)
    return f"`{' '.join(['evergrad inspect FILE', *COMMANDS[name]])}`, from start to end: {times}."


def rate_notes(report: Report) -> list[str]:
    """Tensors a second, by the clock and by the time on a core."""
    lines = []
    for case in MANY:
        label = f"{FORMATS['.safetensors']}, {case.label}"
        rates = []
        for name in ("evergrad", "safe_open"):
            took, busy = report.median(label, name, "listing_s"), report.median(label, name, "listing_cpu_s")
            if took is not None and busy is not None:
                rates.append(f"{name} {case.tensors / took:,.0f} (on a core {case.tensors / busy:,.0f})")
        for name in COMMANDS:
            took = report.median(label, name, "command_s")
            if took is not None:
                rates.append(f"`{name}` {case.tensors / took:,.0f}, start and all")
        lines.append(f"{label}, tensors a second: {'; '.join(rates)}.")
    return lines


def has_inspect() -> bool:
    """Whether the installed command line knows `inspect`."""
    try:
        return subprocess.run([str(COMMAND), "inspect", "--help"], check=False, capture_output=True).returncode == 0
    except OSError:
        return False


def _warm(path: Path, names: Sequence[str]) -> list[str]:
    """Bring a file into the page cache; returns the contenders that have to run once for that.

    Reading a large one takes as long as `torch.load` does: its first run is timed as it is, and the median of three
    leaves it out.
    """
    if path.stat().st_size > LARGE:
        return [name for name in names if name == MAPS_DATA]
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 22):
            pass
    return []


def _available_bytes() -> int:
    """Memory that can be had without swapping; plenty where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 1 << 62
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def main() -> None:
    """Measure, print the table, write the results."""
    parser = argparse.ArgumentParser(description=CLAIM)
    parser.add_argument("--quick", action="store_true", help="two small files and 3 repetitions; results are not kept")
    parser.add_argument("--many", action="store_true", help="60,000 and 300,000 tensors, as JSON, table and tree")
    options = parser.parse_args()
    quick, many = options.quick, options.many
    start = perf_counter()
    columns = [
        Column("listing_s", "listing", seconds, spread=True),
        Column("growth_mib", "memory growth", lambda mib: f"{mib:,.1f} MiB"),
        Column("peak_mib", "peak memory", lambda mib: f"{mib:,.0f} MiB"),
        Column("process_cpu_s", "process CPU", seconds),
    ]
    if many:
        columns[1:1] = [
            Column("listing_cpu_s", "listing, on a core", seconds),
            Column("command_s", "whole command", seconds, spread=True),
        ]
    packages = ("torch", "numpy", "safetensors")
    report = Report(
        "inspect_many" if many else "inspect",
        CLAIM,
        columns,
        baseline="evergrad",
        ratio_of="listing_s",
        packages=packages,
    )
    with_command = has_inspect()
    if not with_command:
        say("evergrad inspect: not there, left out")
    with tempfile.TemporaryDirectory(prefix="evergrad-inspect-") as folder:
        repetitions = QUICK_REPETITIONS if quick or many else REPETITIONS
        for case in MANY[: 1 if quick else None] if many else ():
            commands = list(COMMANDS) if with_command else []
            measure(case, ".safetensors", Path(folder), report, repetitions=repetitions, commands=commands, many=True)
        for case in () if many else QUICK if quick else [*BY_BYTES, *BY_TENSORS]:
            for suffix in FORMATS:
                commands = [COMMAND_LINE] if with_command else []
                measure(case, suffix, Path(folder), report, repetitions=repetitions, commands=commands)
    if many:
        report.notes += rate_notes(report)
    elif not quick:
        report.notes += growth(report, BY_BYTES, "100 times the bytes")
        report.notes += growth(report, BY_TENSORS, "200 times the tensors")
    if with_command:
        report.notes += [command_line_note(report, name) for name in (COMMANDS if many else [COMMAND_LINE])]
    report.print()
    say(f"{perf_counter() - start:.0f} s")
    if quick:
        say("quick: results are not written")
    else:
        say("written: " + ", ".join(str(path) for path in report.write()))


if __name__ == "__main__":
    main()
