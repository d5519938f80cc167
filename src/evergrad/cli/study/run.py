"""`evergrad study run`: every trial of a study that is missing."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evergrad.cli.completion import one_of
from evergrad.cli.output import JsonOption, console, print_json, printable
from evergrad.cli.study.arguments import Name, Scale, duration
from evergrad.errors import UsageError
from evergrad.wording import checked_choice, shown

if TYPE_CHECKING:
    from evergrad.records import Json
    from evergrad.study.executors.contract import Executor
    from evergrad.study.plan import Plan
    from evergrad.study.runner import Progress

EPILOG = (
    "Examples:\n\n  evergrad study run bitflip-nev --scale tiny --out runs/nev\n\n"
    "  evergrad study run mine.toml --dry-run\n\n"
    "  evergrad study run precision --scale paper --executor dask --scheduler tcp://head:8786 --out /shared/p\n\n"
    "  evergrad study run mine.toml --executor slurm --workers 16 --partition short --out /shared/mine\n\n"
    "Killed or interrupted, at whatever time: the same command runs what is missing.\n\n"
    "Exit codes: 0 complete · 1 but for trials whose workers were lost · 2 usage, a wrong plan, or the study "
    "could not go on · 130 interrupted."
)

_EXECUTORS = ("local", "dask", "slurm")
_SAY_EVERY_S = 5.0
_SLURM_JOBS = 4


def run(
    name: Name,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The study's folder: new, or to go on in.")] = None,
    scale: Scale = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Trials at once; as many as keep the cores busy, or 4 Slurm jobs.")
    ] = None,
    executor: Annotated[
        str, typer.Option(help="Where trials run: local, dask or slurm.", autocompletion=one_of(*_EXECUTORS))
    ] = "local",
    scheduler: Annotated[
        str | None, typer.Option(help="A Dask scheduler; without it, a cluster on this machine.")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Of Slurm; without it, Slurm's default.")] = None,
    minutes: Annotated[
        int | None, typer.Option(min=2, help="Of each Slurm job: 60. The next takes the place of one that is over.")
    ] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Another option of sbatch's: account=physics.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="By which Slurm jobs reach this machine; without it, by its name.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where to train: cpu, cuda, cuda:1.")] = None,
    trainings: Annotated[int | None, typer.Option(min=1, help="In every cell, instead of the plan's.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Instead of the plan's.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be run, and how long that takes.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Run a study: golden runs, then every trial that is missing; the same command again goes on."""
    from evergrad.study.plan import Plan
    from evergrad.study.plan_files import read_plan_text

    checked_choice("--executor", executor, _EXECUTORS)
    if scheduler is not None and executor != "dask":
        raise UsageError("--scheduler: goes with --executor dask")
    of_slurm = {"partition": partition, "minutes": minutes, "sbatch": sbatch, "host": host}
    for option, found in of_slurm.items():
        if found and executor != "slurm":
            raise UsageError(f"--{option}: goes with --executor slurm")
    if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise UsageError(f"--device: expected cpu, cuda or cuda:1, found {shown(device)}")
    jobs = _jobs(partition, minutes, sbatch or [], host)
    given: dict[str, Json] = {"device": device, "trainings": trainings, "seed": seed}
    overrides: dict[str, Json] = {key: value for key, value in given.items() if value is not None}
    source = read_plan_text(name)
    plan = Plan.of(source, scale, overrides)
    if dry_run:
        return _dry_run(plan, workers, as_json)
    if out is None:
        raise UsageError("--out: expected --out DIR, the folder that the study goes to (or --dry-run)")
    from evergrad.study.runner import run_study

    folder = out
    try:
        with _told(as_json) as report:
            results = run_study(
                plan,
                folder,
                lambda place: _executor(plan, place, executor, scheduler, workers, jobs),
                name=source.name,
                overrides=overrides,
                command=_command(name, plan, overrides),
                report=report,
            )
    except KeyboardInterrupt:
        print(
            printable(f"evergrad: interrupted. What has ended is in {out}; the same command goes on."), file=sys.stderr
        )
        return 130
    from evergrad.study.tables import published_table, results_to_json
    from evergrad.study.watched_tables import watched_kind, watched_table

    code = 1 if any(cell.known < cell.due for cell in results.cells) else 0
    if as_json:
        print_json(results_to_json(results))
        return code
    kind = watched_kind(results)
    console().print(watched_table(results, kind) if kind else published_table(results))
    print()
    print(printable(f"{results.trials:,} trials in {out}: 'evergrad study table {out}' shows every column."))
    for note in results.notes:
        print(printable(f"note: {note}"))
    return code


def _command(name: str, plan: Plan, overrides: dict[str, Json]) -> tuple[str, ...]:
    """What makes these results again; a study does not depend on how many workers there were."""
    words = ["evergrad", "study", "run", name]
    if plan.scale:
        words += ["--scale", plan.scale]
    for key, value in overrides.items():
        words += [f"--{key}", str(value)]
    return tuple(words)


def _jobs(partition: str | None, minutes: int | None, sbatch: list[str], host: str | None) -> dict[str, Any]:
    """What each Slurm job is to be like."""
    options: dict[str, str] = {}
    for word in sbatch:
        name, is_given, value = word.removeprefix("--").partition("=")
        if not name or not is_given:
            raise UsageError(f"--sbatch: expected NAME=VALUE, as in account=physics, found {shown(word)}")
        options[name] = value
    return {"partition": partition, "minutes": minutes or 60, "options": options, "host": host}


def _executor(
    plan: Plan, folder: Path, kind: str, scheduler: str | None, workers: int | None, jobs: dict[str, Any]
) -> Executor:
    from evergrad.study.estimates import default_workers
    from evergrad.study.executors.dask import DaskCluster
    from evergrad.study.executors.local import LocalProcesses
    from evergrad.study.executors.slurm import SlurmCluster
    from evergrad.study.runner import PERFORM

    if kind == "slurm":
        # The ranks of a training are processes of one job; where time is measured, there is no other job beside it.
        cpus = max(getattr(cell.training, "ranks", 1) for cell in plan.cells)
        most = 1 if any(cell.saving is not None for cell in plan.cells) else _SLURM_JOBS
        return SlurmCluster(folder, PERFORM, jobs=workers or most, cpus=cpus, **jobs)
    if kind == "dask" and scheduler is not None:  # workers is how many to wait for
        return DaskCluster(folder, PERFORM, scheduler=scheduler, workers=workers)
    if kind == "dask":
        return DaskCluster(folder, PERFORM, workers=workers or default_workers(plan))
    return LocalProcesses(folder, PERFORM, workers=workers or default_workers(plan))


def _dry_run(plan: Plan, workers: int | None, as_json: bool) -> int:
    from evergrad.study.estimates import estimate

    found = estimate(plan, workers, tell=lambda what: print(printable(f"{what} …"), file=sys.stderr, flush=True))
    if as_json:
        print_json(found.to_json())
        return 0
    counts = [one.trainings for one in plan.cells]
    most = max(counts)
    cell = "at most " if plan.sampling.stop or min(counts) < most else ""
    print(printable(f"{plan.study}: {len(plan.cells)} cells × {cell}{most:,} trainings"))
    print(f"trials          {found.trials:,}")
    if found.seconds is None:
        print("estimated time  not known: a program of your own has to run once first")
    else:
        longest = duration(found.longest_s)
        print(f"estimated time  {duration(found.seconds)} with {found.workers} workers, at most {longest}")
    low, high = found.half_widths
    print(f"interval        ± {high:.1%} of a rate of 50 %, ± {low:.1%} of one of 5 % ({found.confidence:.0%})")
    return 0


@contextmanager
def _told(as_json: bool) -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal, plain lines elsewhere; on stderr, so that JSON stays alone."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, TextColumn("{task.fields[left]}"), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("golden runs", total=None, left="")

        def report(at: Progress) -> None:
            what = "golden runs" if at.phase == "golden" else "trials"
            left = f"{duration(at.left_s)} to go" if at.left_s is not None else ""
            lost = f", {at.lost} workers lost" if at.lost else ""
            bar.update(task, description=what, completed=at.done, total=at.due, left=left + lost)

        yield report


def _lines() -> Callable[[Progress], None]:
    said = [-_SAY_EVERY_S]

    def report(at: Progress) -> None:
        now = monotonic()
        if now - said[0] < _SAY_EVERY_S:
            return
        said[0] = now
        what = "golden runs" if at.phase == "golden" else "trials"
        left = f", {duration(at.left_s)} to go" if at.left_s is not None else ""
        lost = f", {at.lost} workers lost" if at.lost else ""
        print(f"{what}: {at.done:,} of {at.due:,}{left}{lost}", file=sys.stderr, flush=True)

    return report
