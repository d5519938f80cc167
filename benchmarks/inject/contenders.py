"""What is timed, on one file: injections, the rivals, and what is done with a log; each leaves the file as it was."""

from __future__ import annotations

import os
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Literal

from benchmarks.harness import Sample, Spread
from benchmarks.inject import files, memory
from benchmarks.inject import rivals as other
from benchmarks.inject.phases import PHASES, Stopwatch

from evergrad import BitFlip, InjectionLog, inject, replay, undo

__all__ = ["Bench", "Rival", "operations", "rivals"]

SEED = 20

Sampling = Literal["element", "tensor"]
Injector = Callable[[Path, int, int], None]


@dataclass(frozen=True)
class Rival:
    """Another way to flip bits in an HDF5 file."""

    run: Injector
    slow: bool = False


def rivals(checkout: Path | None) -> dict[str, Rival]:
    """By name, in the order of the tables."""
    found = {
        "h5py loop": Rival(other.loop, slow=True),
        "h5py loop, in file order": Rival(other.loop_in_file_order, slow=True),
        "h5py, whole data sets": Rival(other.whole_data_sets),
        "map, no log": Rival(other.mapped),
    }
    return found if checkout is None else found | {"hdf5_corrupter": Rival(other.corrupter(checkout), slow=True)}


class Bench:
    """A file in the page cache. Everything that alters it puts it right again, outside of what is timed."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, path.stat().st_size
        self._checksum = files.read_anew(path)
        self._clean: Path | None = None

    @classmethod
    def made(cls, path: Path, shapes: files.Shapes, numbers: Path) -> Bench:
        """Write it first."""
        files.write(path, shapes, numbers)
        return cls(path)

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Make sure that it is as it was, and delete it."""
        if kind is None and files.checksum(self.path) != self._checksum:
            raise RuntimeError(f"{self.path.name} is not what it was before the measurements")
        self.path.unlink()
        if self._clean is not None:
            self._clean.unlink()

    @property
    def clean(self) -> Path:
        """A copy to restore from, made when it is first wanted."""
        if self._clean is None:
            self._clean = files.copied(self.path, self.path.with_name(f"clean{self.path.suffix}"))
        return self._clean

    def inject(self, count: int, sampling: Sampling = "element") -> InjectionLog:
        """The injection that is measured."""
        return inject(self.path, BitFlip(), count=count, seed=SEED, sampling=sampling, in_place=True)

    def undone(self, log: InjectionLog) -> None:
        """Put the file right, and remove the log."""
        undo(log)
        assert log.path is not None
        log.path.unlink()

    def injection(self, count: int, sampling: Sampling = "element") -> Callable[[], Sample]:
        """In place: open, draw, read, write the log, alter, both durably."""

        def sample() -> Sample:
            start = perf_counter()
            log = self.inject(count, sampling)
            took = perf_counter() - start
            assert log.path is not None
            log_bytes = log.path.stat().st_size
            self.undone(log)
            return {"time_s": took, "per_fault_s": took / count, "log_bytes": log_bytes}

        return sample

    def rival(self, run: Injector, count: int) -> Callable[[], Sample]:
        """Another injector; time until it returns, and until the file is durable."""

        def sample() -> Sample:
            clean = self.clean
            start = perf_counter()
            run(self.path, count, SEED)
            took = perf_counter() - start
            _fsync(self.path)
            durable = perf_counter() - start
            files.restore(self.path, clean)
            return {"time_s": took, "durable_s": durable, "per_fault_s": took / count}

        return sample

    def memory(self, count: int) -> Callable[[], Sample]:
        """What an injection takes of memory."""

        def sample() -> Sample:
            found, log = memory.measure(self.path, count, SEED)
            self.undone(InjectionLog.load(log))
            return found

        return sample

    def phases(self, count: int, repetitions: int) -> dict[str, Spread]:
        """Time by phase; `all` is their sum."""
        found: dict[str, list[float]] = defaultdict(list)
        for _ in range(repetitions):
            watch = Stopwatch()
            with watch.running():
                log = self.inject(count)
            self.undone(log)
            for phase in PHASES:
                found[phase].append(watch.spent.get(phase, 0.0))
            found["all"].append(sum(watch.spent.values()))
        return {phase: Spread(tuple(values)) for phase, values in found.items()}


def operations(bench: Bench, count: int) -> dict[str, Callable[[], Sample]]:
    """Undo, replay, an injection into a copy, and copying alone."""
    path, out = bench.path, bench.path.with_name(f"copy{bench.path.suffix}")
    kept = bench.path.with_name("kept.jsonl.old")  # not taken for the log of an injection that is in effect
    log = bench.inject(count)
    assert log.path is not None
    shutil.copyfile(log.path, kept)
    bench.undone(log)

    def undoing() -> Sample:
        log = bench.inject(count)
        assert log.path is not None
        start = perf_counter()
        undo(log.path)
        took = perf_counter() - start
        log.path.unlink()
        return {"time_s": took, "per_fault_s": took / count}

    def replaying() -> Sample:
        start = perf_counter()
        log = replay(kept, path, in_place=True)
        took = perf_counter() - start
        bench.undone(log)
        return {"time_s": took, "per_fault_s": took / count}

    def into_copy() -> Sample:
        start = perf_counter()
        log = inject(path, BitFlip(), count=count, seed=SEED, out=out)
        took = perf_counter() - start
        assert log.path is not None
        log.path.unlink()
        out.unlink()
        return {"time_s": took, "per_fault_s": took / count}

    def copying() -> Sample:
        start = perf_counter()
        shutil.copyfile(path, out)
        took = perf_counter() - start
        _fsync(out)
        durable = perf_counter() - start
        out.unlink()
        return {"time_s": took, "durable_s": durable}

    return {
        "evergrad": bench.injection(count),
        "evergrad undo": undoing,
        "evergrad replay": replaying,
        "evergrad, into a copy": into_copy,
        "shutil.copyfile": copying,
    }


def _fsync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
