"""The demo's chapter of recovery: ranks that are killed, stopped or struck by a soft error, and training goes on."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rich.markup import escape

from evergrad.cli.output import printable
from evergrad.errors import UsageError

if TYPE_CHECKING:
    from evergrad.records import Json

PROCESSES = 4
"""The launchers: undisturbed, with a rank less, with a spare, and in trouble."""

_RANKS = 4
_KILL = "kill rank=1 step=13"
_STOP = "stop rank=1 step=13"
_FLIP = "flip rank=2 step=19 phase=optimizer where=model/4.weight bits=exponent"


@dataclass(frozen=True, slots=True)
class _Run:
    """What came of a job."""

    steps: int
    weights: str
    seconds: float
    """From SIGKILL to the first step after it that a survivor has applied; 0 if nobody was killed."""


def tell(folder: Path, say: Callable[[str], None], run: Callable[..., None]) -> dict[str, Json]:
    """Parts 12 and 13."""
    facts: dict[str, Json] = {}
    say("[bold]12. Kill a rank in the middle of training: the others go on; a spare takes its place[/bold]")
    facts.update(_lose_a_rank(folder, say))
    run("timeline", str(folder / "job-spare"))

    say("\n[bold]13. Stop a rank, and flip a bit in another one's weights: both are noticed, neither is felt[/bold]")
    facts.update(_trouble_ranks(folder, say))
    return facts


def _lose_a_rank(folder: Path, say: Callable[[str], None]) -> dict[str, Json]:
    """Run a job undisturbed, with a rank killed, and with a rank killed and a spare."""
    clean = _run(folder / "job", (), lambda _: None)
    say(f"{_RANKS} ranks and nothing fails: {clean.steps} steps, final weights {clean.weights}")
    fewer = _run(folder / "job-fewer", ("--fail", _KILL), say)
    same = _run(folder / "job-spare", ("--spares", "1", "--fail", _KILL), say)
    is_exact = same.weights == clean.weights
    say(
        f"from SIGKILL to the next applied step: {fewer.seconds * 1000:.0f} ms on {_RANKS - 1} ranks, "
        f"{same.seconds * 1000:.0f} ms with a spare;\nwith the spare the very weights of the undisturbed run: "
        f"{'yes' if is_exact else 'no'}"
    )
    return {"rank_lost_seconds": fewer.seconds, "spare_seconds": same.seconds, "spare_exact": is_exact}


def _trouble_ranks(folder: Path, say: Callable[[str], None]) -> dict[str, Json]:
    """The same job with a rank that is stopped, and with a bit that flips in one rank's weights; after the first."""
    from evergrad.timeline import read

    clean = next(
        event.fields["weights"] for event in read(folder / "job" / "timeline.jsonl") if event.event == "weights"
    )
    options = ("--spares", "1", "--fail", _STOP, "--fail", _FLIP)
    troubled = _run(folder / "job-trouble", options, say)
    events = list(read(folder / "job-trouble" / "timeline.jsonl"))
    is_exact = {event.fields["weights"] for event in events if event.event == "weights"} == {clean}
    found = [event.fields for event in events if event.event == "corrupted"]
    say(
        f"{troubled.steps} steps; the stopped rank was replaced, and what the flip changed ("
        + ", ".join(f"{each['path']} on rank {each['rank']}" for each in found)
        + f") was found and healed.\nThe very weights of the undisturbed run: {'yes' if is_exact else 'no'}"
    )
    return {"corruptions_healed": sum(bool(each["healed"]) for each in found), "trouble_exact": is_exact}


def _run(run: Path, options: tuple[str, ...], say: Callable[[str], None]) -> _Run:
    from evergrad.cli.demo_forks import start
    from evergrad.timeline import read

    command = ["run", "-n", str(_RANKS), *options]
    say(f"\n[bold]$ evergrad {shlex.join(command)} demo_job.py[/bold]")
    script = Path(__file__).with_name("demo_job.py")
    environment = {"EVERGRAD_RECORD_WEIGHTS": "1", "EVERGRAD_AWAITED": str(_RANKS) if "--spares" in options else ""}
    job = start(_launch, [*command, "--fork", "--out", str(run), str(script)], environment, is_heard=True)
    lines = []
    with job.output, open(job.output.fileno(), encoding="utf-8", errors="replace", closefd=False) as output:
        for line in output:
            lines.append(line.rstrip())
            if "logs and timeline in" not in line:
                say(escape(printable(line.rstrip())))
    job.process.join()
    if job.process.exitcode != 0:
        raise UsageError(f"the demo's job ended with exit code {job.process.exitcode}: {lines[-1] if lines else ''}")
    weights = next(line.split()[-1] for line in lines if "final weights" in line)
    events = list(read(run / "timeline.jsonl"))
    steps = max(int(str(event.fields["step"])) for event in events if event.event == "epoch")
    killed = [event.mono for event in events if event.event == "killing"]
    applied = [event.mono for event in events if event.event == "going on"]
    return _Run(steps, weights, min(applied) - killed[0] if killed else 0.0)


def _launch(words: list[str], environment: dict[str, str]) -> NoReturn:
    """`evergrad run`, in a process that is there already."""
    from evergrad.cli import main

    os.environ.update(environment)
    sys.exit(main(words))
