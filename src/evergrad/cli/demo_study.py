"""The demo's chapter of studies: bits flip in a checkpoint, training goes on, and a table says what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from evergrad.errors import EvergradError

if TYPE_CHECKING:
    from evergrad.records import Json
    from evergrad.study.journal import Entry
    from evergrad.study.results import Results

PLAN = """\
study = "demo"
title = "Flipped bits in a checkpoint of AlexNet"
seed = 1
rows = "flips"
columns = "model"

[axes]
flips = [1, 10, 100]
model = ["alexnet"]

[training]
width = 0.0625
samples = 640
learning_rate = 0.003
checkpoint = 6
epochs = 1

[sampling]
trainings = 8
"""

RANKS = """\
study = "demo-ranks"
title = "Flipped bits on one of two ranks, while they train"
seed = 2
rows = "flips"
columns = "target"

[axes]
flips = [1, 100]
target = ["weights", "optimizer", "activations", "gradients", "communication"]

[training]
mechanism = "ddp"
ranks = 2
model = "resnet18"
width = 0.0625
samples = 512
learning_rate = 0.02
checkpoint = 3
epochs = 1

[trial]
corrupt = 1
step = 2

[sampling]
trainings = 4
"""


def tell(folder: Path, say: Callable[[str], None], run: Callable[..., None]) -> dict[str, Json]:
    """Parts 14 to 16."""
    out = folder / "study"
    facts: dict[str, Json] = {}
    with _as_workers():
        say("[bold]14. A study: what do flipped bits in a checkpoint do to the training that goes on from it?[/bold]")
        facts.update(_study(out, say))

        say("\n[bold]15. One of its trials again, by itself[/bold]")
        facts.update(_replay(out, run))

        say("\n[bold]16. The same in data-parallel training: one of two ranks is hit in its third step[/bold]")
        facts.update(_ranks(folder / "study-ranks", say))
    return facts


def _study(out: Path, say: Callable[[str], None]) -> dict[str, Json]:
    """Run the plan in this process, which has torch imported, and show its table in the published shape."""
    from evergrad.study import Plan, run_study
    from evergrad.study.executors.inline import InProcess
    from evergrad.study.outcomes import Outcome
    from evergrad.study.plan_files import parse
    from evergrad.study.runner import PERFORM

    plan = Plan.of(parse(PLAN, "demo"))
    results = run_study(plan, out, lambda place: InProcess(place, PERFORM))
    first = results.cells[0]
    say(
        f"without a fault, accuracy goes from {first.golden_start:.1%} at the checkpoint to {first.golden:.1%};\n"
        f"{results.trials} trainings went on from there, each with flips of its own. How many met a NaN, an infinity\n"
        f"or a number beyond {plan.rules.extreme:g} (N-EV), with intervals of {plan.sampling.confidence:.0%}:\n"
    )
    say(_table(results))
    say(f"'evergrad study table {out.name}' shows every column, and how it was made.")
    say(_page(out))
    found: dict[str, Json] = {str(cell.axes["flips"]): cell.counts[Outcome.NEV] for cell in results.cells}
    return {"study_trials": results.trials, "study_nev": found}


def _page(out: Path) -> str:
    """Write the report beside the study, where plotly is installed."""
    from rich.markup import escape

    from evergrad.errors import UsageError
    from evergrad.report.study_page import write_study_report

    try:
        written = write_study_report(out)
    except UsageError as error:
        return escape(str(error))
    return escape(f"{out.name}/{written.name}: the same as a page, with the answer in words and pictures.")


def _ranks(out: Path, say: Callable[[str], None]) -> dict[str, Json]:
    """Real ranks of DDP, warm from trial to trial."""
    from evergrad.study import Plan, run_study
    from evergrad.study.executors.inline import InProcess
    from evergrad.study.plan_files import parse
    from evergrad.study.ranks.keeping import end_groups
    from evergrad.study.runner import PERFORM

    plan = Plan.of(parse(RANKS, "demo-ranks"))
    try:
        results = run_study(plan, out, lambda place: InProcess(place, PERFORM))
    finally:
        end_groups()
    say(
        f"{results.trials} trainings of two processes, kept warm between them. Weights, optimizer state, activations,\n"
        "gradients, or the buckets that the ranks exchange; N-EV again:\n"
    )
    say(_table(results))
    return {"ranks_trials": results.trials, "ranks_known": sum(cell.known for cell in results.cells)}


def _table(results: Results) -> str:
    """The numbers alone: a table of the command line has notes that fill a screen."""
    from dataclasses import replace

    from rich.console import Console
    from rich.markup import escape

    from evergrad.study.tables import published_table

    drawn = Console(file=StringIO(), width=100)
    with drawn.capture() as captured:
        drawn.print(replace(published_table(results), notes=()))
    return escape(captured.get().rstrip("\n"))


def _replay(out: Path, run: Callable[..., None]) -> dict[str, Json]:
    """Of the trials that met a NaN, an infinity or an extreme value, one with the fewest flips."""
    from evergrad.study.folder import StudyFolder
    from evergrad.study.replaying import replay_trial

    hit = [entry for entry in StudyFolder(out).kept().entries.values() if _is_nev(entry)]
    if not hit:
        raise EvergradError(f"{out}: none of the demo's trials met an extreme value, which 100 flips bring about")
    trial = min(hit, key=lambda entry: (entry.trial.flips, entry.trial.repetition)).trial
    run("study", "replay", str(out), trial.id)
    return {"study_replayed": replay_trial(out, trial.id).same}


def _is_nev(entry: Entry) -> bool:
    return entry.observation.nonfinite_at is not None or entry.observation.extreme_at is not None


@contextmanager
def _as_workers() -> Iterator[None]:
    """One thread, as workers of a study have: sums depend on it."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
