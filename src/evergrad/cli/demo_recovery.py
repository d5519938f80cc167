"""The part of the demo in which a rank is lost, and training goes on."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from evergrad.cli.output import printable
from evergrad.errors import UsageError
from evergrad.timeline import read

if TYPE_CHECKING:
    from evergrad.records import Json

__all__ = ["lose_a_rank"]

_FAILURE = "kill rank=1 step=13"


@dataclass(frozen=True, slots=True)
class _Run:
    """What came of a job."""

    steps: int
    weights: str
    seconds: float
    """From SIGKILL to the first step after it that a survivor has applied; 0 if nobody was killed."""


def lose_a_rank(folder: Path, say: Callable[[str], None]) -> dict[str, Json]:
    """Run a job undisturbed, with a rank killed, and with a rank killed and a spare."""
    clean = _run(folder / "job", (), lambda _: None)
    say(f"three ranks and nothing fails: {clean.steps} steps, final weights {clean.weights}")
    fewer = _run(folder / "job-fewer", ("--fail", _FAILURE), say)
    same = _run(folder / "job-spare", ("--spares", "1", "--fail", _FAILURE), say)
    is_exact = same.weights == clean.weights
    say(
        f"from SIGKILL to the next applied step: {fewer.seconds * 1000:.0f} ms on two ranks, "
        f"{same.seconds * 1000:.0f} ms with a spare;\nwith the spare the very weights of the undisturbed run: "
        f"{'yes' if is_exact else 'no'}"
    )
    return {"rank_lost_seconds": fewer.seconds, "spare_seconds": same.seconds, "spare_exact": is_exact}


def _run(run: Path, options: tuple[str, ...], say: Callable[[str], None]) -> _Run:
    command = ["run", "-n", "3", *options]
    say(f"\n[bold]$ evergrad {shlex.join(command)} demo_job.py[/bold]")
    script = Path(__file__).with_name("demo_job.py")
    lines = []
    process = subprocess.Popen(
        [sys.executable, "-m", "evergrad", *command, "--fork", "--out", str(run), str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.append(line.rstrip())
            if "OMP_NUM_THREADS" not in line:
                say(escape(printable(line.rstrip())))
    if process.wait() != 0:
        raise UsageError(f"the demo's job ended with exit code {process.returncode}: {lines[-1] if lines else ''}")
    weights = next(line.split()[-1] for line in lines if "final weights" in line)
    events = list(read(run / "timeline.jsonl"))
    steps = max(int(str(event.fields["step"])) for event in events if event.event == "epoch")
    killed = [event.mono for event in events if event.event == "killing"]
    applied = [event.mono for event in events if event.event == "going on"]
    return _Run(steps, weights, min(applied) - killed[0] if killed else 0.0)
