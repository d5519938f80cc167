"""Starts each contender, lets ranks be killed, and gathers what the logs say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import Sample
from benchmarks.recovery.logs import kills_of, lines_of, phases, recoveries

from evergrad.timeline import read_events

__all__ = ["RANKS", "Failed", "Found", "Scenario", "Site", "Size", "evergrad", "steady", "torchft", "torchrun"]

HERE = Path(__file__).resolve().parent
RANKS = 4
EVERY = 10
"""Steps between two checkpoints, for those that need them."""


class Failed(Exception):
    """A contender did not come to its end."""


@dataclass(frozen=True)
class Size:
    """How much is trained."""

    width: int
    layers: int
    batch: int
    gap: int
    """Steps between two kills."""
    limit_s: float

    def options(self, steps: int) -> list[str]:
        """For the scripts; two layers a bucket."""
        bucket_mb = 1.25 * self.width**2 * 4 / 2**20
        told = {"width": self.width, "layers": self.layers, "batch": self.batch, "steps": steps, "bucket-mb": bucket_mb}
        return [f"--{name}={value}" for name, value in told.items()]


@dataclass(frozen=True)
class Site:
    """Who is killed, and where in the step."""

    rank: int
    where: str


@dataclass(frozen=True)
class Scenario:
    """One way to run `evergrad run`."""

    strategy: str
    spares: int = 0
    saves: bool = False
    min_ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Found:
    """What one launch has shown."""

    samples: list[Sample]
    unasked: list[str] = field(default_factory=list)
    """Who died without having been killed by us; the samples are counted all the same."""
    phases: list[Sample] = field(default_factory=list)


def evergrad(scenario: Scenario, sites: Sequence[Site], size: Size, folder: Path) -> Found:
    """One job, and a kill after every so many steps."""
    steps = [size.gap * (number + 1) + (EVERY // 2 if scenario.saves else 0) for number in range(len(sites))]
    command = [sys.executable, "-m", "evergrad", "run", "-n", str(RANKS), "--out", str(folder / "run")]
    command += ["--strategy", scenario.strategy, "--spares", str(scenario.spares)]
    command += ["--min-ranks", str(scenario.min_ranks)]
    for step, site in zip(steps, sites, strict=True):
        command += ["--fail", f"kill rank={site.rank} step={step} {site.where}"]
    command += [str(HERE / "train_evergrad.py"), str(folder / "logs"), *size.options(steps[-1] + size.gap)]
    if scenario.saves:
        command += [f"--checkpoints={folder / 'checkpoints'}", f"--every={EVERY}"]
    _run(command, folder, size.limit_s, scenario.environment)
    timeline = folder / "run" / "timeline.jsonl"
    lines = lines_of(folder / "logs")
    kills = kills_of(lines, timeline)
    if len(kills) != len(sites):
        raise Failed(f"{len(kills)} of {len(sites)} kills took place")
    killed = {kill.who for kill in kills}
    unasked = [
        f"process {event.fields['uid']} died of {event.fields['how']}, which nobody had asked for"
        for event in read_events(timeline)
        if event.event == "process_lost" and event.fields["uid"] not in killed
    ]
    return Found(recoveries(lines, kills), unasked, phases(lines, timeline, kills))


def torchrun(victims: Sequence[int], size: Size, folder: Path) -> Found:
    """All workers are started again after each kill."""
    first = size.gap + EVERY // 2
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    command += ["--max-restarts", str(len(victims)), "--standalone", "--local-addr", "127.0.0.1"]
    command += [str(HERE / "train_torchrun.py"), str(folder / "logs"), f"--checkpoint={folder / 'saved.pt'}"]
    command += [f"--every={EVERY}", *size.options(first + size.gap * len(victims))]
    for number, rank in enumerate(victims):
        command.append(f"--kill={first + size.gap * number}:{rank}")
    # On gloo a restart needs a store of its own: in the agent's there are addresses of processes that are gone.
    _run(command, folder, size.limit_s, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    lines = lines_of(folder / "logs")
    return Found(recoveries(lines, kills_of(lines)))


def torchft(
    python: str,
    victim: int,
    size: Size,
    folder: Path,
    *,
    timeout_s: float | None,
    lighthouse: Sequence[str],
    mended: bool,
) -> Found:
    """Replica groups of one rank; whoever is killed stays away. What is not given is torchft's default."""
    logs = folder / "logs"
    script = [python, str(HERE / "train_torchft.py")]
    quiet = {"TORCHFT_USE_OTEL": "false"}
    said = folder / "lighthouse.txt"
    with _started([*script, "lighthouse", str(logs), *lighthouse], said, quiet) as process:
        port = _awaited(logs / "lighthouse", process, said)
        options = [f"--lighthouse={port}", *size.options(2 * size.gap)]
        options += [f"--timeout-s={timeout_s}"] if timeout_s is not None else []
        options += ["--mended"] if mended else []
        commands = [[*script, "train", str(logs), f"--rank={rank}", *options] for rank in range(RANKS)]
        commands[victim].append(f"--kill={size.gap}")
        _run_together(commands, folder, size.limit_s, quiet, may_die=victim)
    lines = lines_of(logs)
    return Found(recoveries(lines, kills_of(lines), by_generation=False))


def steady(strategy: str, size: Size, folder: Path, rounds: int, steps: int, environment: Mapping[str, str]) -> Path:
    """Nothing fails: the folder of what each rank measured, block by block."""
    command = [sys.executable, "-m", "evergrad", "run", "-n", str(RANKS), "--out", str(folder / "run")]
    command += ["--strategy", strategy, str(HERE / "train_twins.py"), str(folder / "logs")]
    command += [*size.options(steps), f"--rounds={rounds}"]
    _run(command, folder, size.limit_s + rounds * steps, environment)
    return folder / "logs"


def _run(command: list[str], folder: Path, limit_s: float, environment: Mapping[str, str]) -> None:
    """Until it ends, which must be well; whatever it started ends with it."""
    said = folder / "output.txt"
    with _started(command, said, environment) as process:
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise Failed(f"not finished after {limit_s:.0f} s: {_last_words(said)}") from None
    if code:
        raise Failed(f"exit code {code}: {_last_words(said)}")


def _run_together(
    commands: list[list[str]], folder: Path, limit_s: float, environment: Mapping[str, str], may_die: int
) -> None:
    end = time.monotonic() + limit_s
    outputs = [folder / f"output-{number}.txt" for number in range(len(commands))]
    with _all_started(commands, outputs, environment) as processes:
        for number, process in enumerate(processes):
            try:
                code = process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise Failed(f"not finished after {limit_s:.0f} s: {_last_words(outputs[number])}") from None
            if code and number != may_die:
                raise Failed(f"rank {number}: exit code {code}: {_last_words(outputs[number])}")


@contextmanager
def _started(command: list[str], said: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """In a session of its own, of which nothing is left at the end."""
    told = os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment)
    with said.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=told, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def _all_started(
    commands: list[list[str]], outputs: list[Path], environment: Mapping[str, str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    if not commands:
        yield []
        return
    with (
        _started(commands[0], outputs[0], environment) as first,
        _all_started(commands[1:], outputs[1:], environment) as others,
    ):
        yield [first, *others]


def _awaited(path: Path, process: subprocess.Popen[bytes], said: Path) -> str:
    end = time.monotonic() + 120
    while not path.exists():
        if process.poll() is not None or time.monotonic() > end:
            raise Failed(f"the lighthouse does not come up: {_last_words(said)}")
        time.sleep(0.05)
    return path.read_text(encoding="utf-8")


def _last_words(said: Path) -> str:
    lines = [line for line in said.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"
