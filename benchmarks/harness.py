"""What every benchmark shares: rivals in turns, medians with their spread, ratios, and where it was measured."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["Column", "Report", "Sample", "Spread", "interleave", "machine", "say", "seconds"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SCHEMA_VERSION = 1

Sample = Mapping[str, float]
"""What one run of one contender measured: name of the measure → value. A measure may be missing."""


def say(text: str) -> None:
    """One line of progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def interleave(
    contenders: Mapping[str, Callable[[], Sample]],
    repetitions: Mapping[str, int],
    *,
    warm_ups: Sequence[str] = (),
    prepare: Callable[[Sequence[str]], None] | None = None,
) -> dict[str, list[Sample]]:
    """Run the contenders in turns, each `repetitions` times, and return their samples.

    Every round starts with another contender: a slow drift of the machine, or what a neighbour leaves behind,
    then hits all of them alike. Those in `warm_ups` run once before, uncounted. `prepare` is told who comes in a
    round before the first one runs.
    """
    names = list(contenders)
    rounds = [[name] for name in warm_ups]
    for turn in range(max(repetitions[name] for name in names)):
        first = turn % len(names)
        rounds.append([name for name in names[first:] + names[:first] if turn < repetitions[name]])
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for number, order in enumerate(rounds):
        if prepare is not None:
            prepare(order)
        for name in order:
            sample = contenders[name]()
            if number >= len(warm_ups):
                samples[name].append(sample)
    return samples


@dataclass(frozen=True)
class Spread:
    """The values of one measure: their median, and how far they lie apart."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    def to_json(self) -> dict[str, Any]:
        """Median, extremes and every value."""
        return {
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            "runs": len(self.values),
            "values": list(self.values),
        }


@dataclass(frozen=True)
class Column:
    """A measure as the tables show it."""

    measure: str
    title: str
    show: Callable[[float], str]
    spread: bool = False
    """Whether minimum and maximum stand beside the median."""

    def cell(self, spread: Spread | None) -> str:
        """The median, with its extremes where asked for; a dash where nothing was measured."""
        if spread is None:
            return "–"
        text = self.show(spread.median)
        if self.spread:
            text += f" ({self.show(min(spread.values))}–{self.show(max(spread.values))})"
        return text


@dataclass(frozen=True)
class Row:
    """One contender in one case."""

    case: str
    contender: str
    measures: Mapping[str, Spread]
    ratios: Mapping[str, float]


@dataclass
class Report:
    """The answer to one question: rows of medians, ratios against a baseline, and where they were measured."""

    question: str
    """The name of the benchmark's folder and of its results."""
    title: str
    columns: Sequence[Column]
    baseline: str
    ratio_of: str
    """The measure whose ratio against the baseline the tables show; the JSON file has the others too."""
    packages: Sequence[str] = ("torch", "numpy")
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Taken at the start: a long run must not be put down to a commit that was made meanwhile.
        self._at_start = (_commit(), f"{os.getloadavg()[0]:.2f}")

    def add(self, case: str, samples: Mapping[str, Sequence[Sample]]) -> None:
        """Take in what `interleave` returned for a case."""
        spreads = {name: _spreads(runs) for name, runs in samples.items()}
        base = spreads.get(self.baseline, {})
        for name, measures in spreads.items():
            ratios = {
                key: spread.median / base[key].median
                for key, spread in measures.items()
                if key in base and base[key].median > 0
            }
            self.rows.append(Row(case, name, measures, ratios))

    def median(self, case: str, contender: str, measure: str) -> float | None:
        """A median by name; None if it was not measured."""
        for row in self.rows:
            if (row.case, row.contender) == (case, contender) and measure in row.measures:
                return row.measures[measure].median
        return None

    def print(self) -> None:
        """The table and the notes, on stdout."""
        # A file or a pipe has no width of its own: rather too wide than cut.
        console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
        head, *body = self._cells()
        table = Table(title=self.title)
        for title in head:
            table.add_column(title, justify="left" if title in ("case", "contender") else "right", no_wrap=True)
        last = body[0][0] if body else ""
        for cells in body:
            if cells[0] != last:
                table.add_section()
            last = cells[0]
            table.add_row(*cells)
        console.print(table)
        for note in self.notes:
            console.print(f"- {note}")

    def write(self) -> list[Path]:
        """Write `results/<question>.json` and `.md`, and return their paths."""
        RESULTS.mkdir(exist_ok=True)
        commit, load = self._at_start
        where: dict[str, Any] = {
            "command": " ".join(["python", _relative(sys.argv[0]), *sys.argv[1:]]),
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "commit": commit if commit == _commit() else f"{commit}, sources altered during the run",
            "machine": machine(self.packages) | {"load before": load, "load after": f"{os.getloadavg()[0]:.2f}"},
        }
        data = {
            "schema_version": SCHEMA_VERSION,
            "question": self.question,
            "title": self.title,
            **where,
            "baseline": self.baseline,
            "rows": [
                {
                    "case": row.case,
                    "contender": row.contender,
                    "measures": {key: spread.to_json() for key, spread in row.measures.items()},
                    "ratios": dict(row.ratios),
                }
                for row in self.rows
            ],
            "notes": self.notes,
        }
        as_json, as_text = RESULTS / f"{self.question}.json", RESULTS / f"{self.question}.md"
        as_json.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        as_text.write_text(self._markdown(where), encoding="utf-8")
        return [as_json, as_text]

    def _cells(self) -> list[list[str]]:
        """The table: a head, then a line a row."""
        titles = [column.title for column in self.columns]
        lines = [["case", "contender", *titles, f"× {self.baseline}", "runs"]]
        for row in self.rows:
            ratio = row.ratios.get(self.ratio_of)
            runs = max((len(spread.values) for spread in row.measures.values()), default=0)
            cells = [column.cell(row.measures.get(column.measure)) for column in self.columns]
            shown = "–" if ratio is None else f"{ratio:.3g}" if ratio < 1000 else f"{ratio:,.0f}"
            lines.append([row.case, row.contender, *cells, shown, str(runs)])
        return lines

    def _markdown(self, where: Mapping[str, Any]) -> str:
        head, *body = self._cells()
        lines = [f"# {self.title}", ""]
        lines += [f"- {key}: `{value}`" for key, value in where.items() if key != "machine"]
        lines += [f"- {key}: {value}" for key, value in where["machine"].items()]
        lines += ["", "Medians (minimum–maximum).", ""]
        lines += [f"| {' | '.join(head)} |", f"|{'---|' * 2}{'---:|' * (len(head) - 2)}"]
        lines += [f"| {' | '.join(cells)} |" for cells in body]
        lines += ["", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines).rstrip() + "\n"


def seconds(value: float) -> str:
    """A time with three digits, in the unit that suits it."""
    unit, factor = next((pair for pair in (("s", 1.0), ("ms", 1e3)) if value * pair[1] >= 1), ("µs", 1e6))
    return f"{value * factor:.3g} {unit}"


def machine(packages: Sequence[str]) -> dict[str, str]:
    """Where this runs: processor, memory, system, versions."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {
        "processor": f"{_processor()}, {cores} cores",
        "memory": f"{memory / 2**30:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _spreads(runs: Sequence[Sample]) -> dict[str, Spread]:
    measures = dict.fromkeys(key for run in runs for key in run)
    return {key: Spread(tuple(run[key] for run in runs if key in run)) for key in measures}


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str:
    """The commit that was measured; marked if the sources differ from it."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return f"{commit} with local changes in src" if _git("status", "--porcelain", "--", "src") else commit
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _relative(path: str) -> str:
    resolved = Path(path).resolve()
    return str(resolved.relative_to(ROOT)) if resolved.is_relative_to(ROOT) else path
