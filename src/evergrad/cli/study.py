"""`evergrad study`: the effect of soft errors on training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from evergrad.cli.output import (
    JsonOption,
    complete_studies,
    complete_words,
    console,
    given_path,
    labelled_line,
    print_json,
    printable,
    relative_path,
)
from evergrad.errors import UsageError
from evergrad.wording import checked_choice, short_repr

if TYPE_CHECKING:
    from evergrad.records import Json
    from evergrad.study.plan import Plan
    from evergrad.study.runner import StudyRunStatus

__all__ = ["app"]

# What the verbs of `evergrad study` have in common.

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME-OR-FILE", help="A study of the gallery, or a plan in TOML.", autocompletion=complete_studies
    ),
]
Scale = Annotated[
    str | None,
    typer.Option(
        help="The scale: tiny, small or paper, some also gpu; by default the first that there is.",
        autocompletion=complete_words("tiny", "small", "gpu", "paper"),
    ),
]
StudyDir = Annotated[
    Path, typer.Argument(metavar="DIR", parser=given_path, help="The folder that the study was run with (--out).")
]


# `evergrad study export`: a study's tables and trials as files.

EPILOG_EXPORT = (
    "Example:\n\n  evergrad study export runs/nev --to tables\n\n"
    "Exit codes: 0 written · 2 usage, no study there, or a folder that cannot be written."
)


def export(
    folder: StudyDir,
    to: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The folder of the exported files; DIR/export by default.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Write every table as CSV, Markdown and LaTeX, the trials as CSV, the results as JSON, and the plan."""
    from evergrad.study.tables import export_study

    written = export_study(folder, to or folder / "export")
    if as_json:
        print_json({"files": [str(path) for path in written]})
        return 0
    for path in written:
        print(printable(relative_path(path)))
    return 0


# `evergrad study list`: the gallery.

EPILOG_LIST = "Example:\n\n  evergrad study list --json\n\nExit codes: 0 listed · 2 usage."
_WIDE = 110  # columns of a terminal, from which on there is room for the axes


def list_(as_json: JsonOption = False) -> int:
    """List the studies that come with Evergrad, and how many trials each has at each scale."""
    from evergrad.study.plan import SCALES, Plan
    from evergrad.study.plan_files import gallery, read_plan_text

    plans = {name: {scale: Plan.of(read_plan_text(name), scale) for scale in SCALES} for name in gallery()}
    if as_json:
        print_json(
            {
                "studies": [
                    {
                        "study": name,
                        "title": scales["tiny"].title,
                        "question": scales["tiny"].question,
                        "source": scales["tiny"].source,
                        "axes": list(scales["tiny"].axes),
                        "trials": {scale: plan.trials for scale, plan in scales.items()},
                    }
                    for name, scales in plans.items()
                ]
            }
        )
        return 0
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    out = console()
    columns = ("study", "question", "axes") if out.width >= _WIDE else ("study", "question")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "study")
    for scale in SCALES:
        table.add_column(scale, justify="right")
    for name, scales in plans.items():
        plan = scales["tiny"]
        words = (name, plan.question, ", ".join(plan.axes))[: len(columns)]
        cells = (*words, *(f"{scales[scale].trials:,}" for scale in SCALES))
        table.add_row(*(Text(printable(cell)) for cell in cells))
    out.print(table)
    print("\nNumbers are trials. 'evergrad study show NAME' tells more, 'study run NAME' runs it.")
    print("A plan of your own is a file like those: evergrad study show NAME --plan > mine.toml")
    return 0


# `evergrad study replay`: one trial again, alone, to look at or to prove that it gives the same bits.

EPILOG_REPLAY = (
    "Examples:\n\n  evergrad study replay runs/nev 3f2a9c1b77d0e465\n\n"
    "TRIAL is an id from 'evergrad study export' (trials.csv), or its first letters.\n\n"
    "Exit codes: 0 the same bits as in the study · 1 other bits · 2 usage, or no such trial."
)

_SHOWN = 10


def replay(
    folder: StudyDir,
    trial: Annotated[str, typer.Argument(metavar="TRIAL", help="The trial's id, or its first letters.")],
    as_json: JsonOption = False,
) -> int:
    """Run one trial of a study again, by itself: what was hit, what was seen, and whether it is the same."""
    from evergrad.study.replay import replay_trial

    found = replay_trial(folder, trial)
    if as_json:
        print_json(found.to_json())
        return 0 if found.same else 1
    print(printable(f"trial {found.trial.id}: {', '.join(f'{k} {v}' for k, v in found.trial.axes.items())}"))
    print(printable(f"seed {found.trial.seed}, {found.trial.fault}, {found.trial.flips:,} in {found.trial.where}"))
    many = getattr(found.trial.training, "ranks", 1) > 1
    for hit in found.hits[:_SHOWN]:
        rank = f"rank {hit['rank']}: " if many else ""
        print(printable(f"  {rank}{hit['words']}"))
    if len(found.hits) > _SHOWN:
        print(f"  … and {len(found.hits) - _SHOWN:,} more")
    for name, before, now in found.rows():
        print(printable(f"{name:10} {before}  →  {now}" if before != now else f"{name:10} {before}"))
    print(f"the same bits as in the study: {'yes' if found.same else 'no'}")
    return 0 if found.same else 1


# `evergrad study report`: a study as one page that opens anywhere.

EPILOG_REPORT = (
    "Examples:\n\n  evergrad study report runs/nev\n\n  evergrad study report runs/nev --out nev.html --open\n\n"
    "Without plotly the answer is printed and no page is written.\n\n"
    "Exit codes: 0 written · 2 usage, no study there, or a file that cannot be written."
)


def report(
    folder: StudyDir,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The page; DIR/report.html by default.")] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Write a study as one HTML file that needs no network: the answer in words, tables, figures, the worst trials."""
    from evergrad.report.html import checked_target, missing_dependency, plain_text, write_page
    from evergrad.report.study_page import REPORT, study_page

    path = checked_target(out or folder / REPORT)
    page = study_page(folder)
    answer = [plain_text(line) for line in page.answer]
    missing = missing_dependency(page)
    if not missing:
        write_page(page, path)
    if as_json:
        sections = [one.title for one in page.sections]
        print_json({"file": None if missing else str(path), "answer": [*answer], "sections": [*sections]})
    else:
        for line in answer:
            print(printable(line))
    if missing:
        print(printable(f"evergrad: no page is written: {missing}"), file=sys.stderr)
        return 2
    if not as_json:
        print(printable(relative_path(path)))
    if open_it:
        typer.launch(path.absolute().as_uri())
    return 0


# `evergrad study run`: every trial of a study that is missing.

EPILOG_RUN = (
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


def run(
    name: Name,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder of the study; a study that is there is continued.")
    ] = None,
    scale: Scale = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="The number of trials at once; by default as many as keep the cores busy, or 4 Slurm jobs."
        ),
    ] = None,
    executor: Annotated[
        str, typer.Option(help="Where trials run: local, dask or slurm.", autocompletion=complete_words(*_EXECUTORS))
    ] = "local",
    scheduler: Annotated[
        str | None, typer.Option(help="The address of a Dask scheduler; without it, a cluster on this machine.")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="The Slurm partition; without it, Slurm's default.")] = None,
    minutes: Annotated[
        int | None,
        typer.Option(
            min=2, help="The time limit of each Slurm job (60). A job that has reached it is replaced by the next."
        ),
    ] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Another option of sbatch, such as account=physics.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="The address by which Slurm jobs reach this machine; without it, its name.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="The device to train on: cpu, cuda, cuda:1.")] = None,
    trials_per_cell: Annotated[
        int | None, typer.Option(min=1, help="The number of trials in every cell, instead of the plan's.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The seed of the study, instead of the plan's.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be run and how long it takes, and run nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Run a study: golden runs, then every trial that is missing; the same command again goes on."""
    from evergrad.study.plan import Plan
    from evergrad.study.runner import ExecutorSettings, run_study
    from evergrad.study.tables import results_to_json, study_table

    checked_choice("--executor", executor, _EXECUTORS)
    options = _sbatch_options(sbatch or [])
    where = ExecutorSettings(executor, scheduler, partition, minutes, options, host)
    if dry_run:
        plan = Plan.read(name, scale=scale, trials_per_cell=trials_per_cell, seed=seed, device=device)
        return _dry_run(plan, workers, as_json)
    if out is None:
        raise UsageError("--out: expected --out DIR, the folder that the study goes to (or --dry-run)")
    try:
        with _progress_reporter() as progress:
            results = run_study(
                name,
                out,
                scale=scale,
                trials_per_cell=trials_per_cell,
                seed=seed,
                device=device,
                workers=workers,
                executor=where,
                progress=progress,
            )
    except KeyboardInterrupt:
        print(
            printable(f"evergrad: interrupted. What has ended is in {out}; the same command goes on."), file=sys.stderr
        )
        return 130
    code = 1 if any(cell.known < cell.due for cell in results.cells) else 0
    if as_json:
        print_json(results_to_json(results))
        return code
    console().print(study_table(results, default="paper"))
    print()
    print(printable(f"{results.trials:,} trials in {out}: 'evergrad study table {out}' shows every column."))
    for note in results.notes:
        print(printable(f"note: {note}"))
    return code


def _sbatch_options(words: list[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for word in words:
        name, is_given, value = word.removeprefix("--").partition("=")
        if not name or not is_given:
            raise UsageError(f"--sbatch: expected NAME=VALUE, as in account=physics, found {short_repr(word)}")
        options[name] = value
    return options


def _dry_run(plan: Plan, workers: int | None, as_json: bool) -> int:
    from evergrad.study.run_estimate import duration, estimate

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
def _progress_reporter() -> Iterator[Callable[[StudyRunStatus], None]]:
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

        def report(at: StudyRunStatus) -> None:
            bar.update(task, description=at.what, completed=at.done, total=at.due, left=at.outlook)

        yield report


def _lines() -> Callable[[StudyRunStatus], None]:
    said = [-_SAY_EVERY_S]

    def report(at: StudyRunStatus) -> None:
        now = monotonic()
        if now - said[0] < _SAY_EVERY_S:
            return
        said[0] = now
        print(at, file=sys.stderr, flush=True)

    return report


# `evergrad study show`: what a study asks, how, and what differs from the paper.

EPILOG_SHOW = (
    "Examples:\n\n  evergrad study show bitflip-nev --scale paper\n\n"
    "  evergrad study show bitflip-nev --plan > mine.toml\n\n"
    "Exit codes: 0 shown · 2 usage, or a wrong plan."
)


def show(
    name: Name,
    scale: Scale = None,
    plan_text: Annotated[bool, typer.Option("--plan", help="Print the plan itself, as TOML.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Show a study's question, cells, training, thresholds, and what differs from the published one."""
    from evergrad.study.plan import Plan
    from evergrad.study.plan_files import read_plan_text
    from evergrad.study.provenance import facts_of

    source = read_plan_text(name)
    plan = Plan.of(source, scale)
    if plan_text:
        print(source.text, end="")
        return 0
    facts = {key: text for key, text in facts_of(plan, (), ()).items() if text}
    if as_json:
        print_json(_json(plan, facts))
        return 0
    print(printable(f"{plan.study}: {plan.title}"))
    if plan.question:
        print(labelled_line("", plan.question))
    print()
    for axis, values in plan.axes.items():
        print(labelled_line(f"  {axis:10} ", ", ".join(map(str, values)), indent=13))
    each = plan.cells[0].trainings
    most = "at most " if plan.sampling.stop else ""
    print(printable(f"  {'trials':10} {len(plan.cells)} cells × {most}{each:,} trainings = {plan.trials:,}"))
    print()
    for key, text in facts.items():
        print(labelled_line(f"  {key:12} ", text, indent=15))
    return 0


def _json(plan: Plan, facts: dict[str, str]) -> Json:
    return {
        "study": plan.study,
        "title": plan.title,
        "question": plan.question,
        "source": plan.source,
        "differs": plan.differs,
        "scale": plan.scale,
        "seed": plan.seed,
        "axes": {axis: list(values) for axis, values in plan.axes.items()},
        "cells": len(plan.cells),
        "trainings": plan.cells[0].trainings,
        "trials": plan.trials,
        "facts": dict(facts),
    }


# `evergrad study status`: how far a study is, while it runs or afterwards.

EPILOG_STATUS = "Example:\n\n  evergrad study status runs/nev\n\nExit codes: 0 told · 2 usage, or no study there."


def status(folder: StudyDir, as_json: JsonOption = False) -> int:
    """Say how many trials are done, whether somebody runs the study now, and what could not be read."""
    from evergrad.study.folder import StudyFolder
    from evergrad.study.results import results_of
    from evergrad.study.trials import OUTCOMES_WORST_FIRST

    results = results_of(folder)
    running = StudyFolder(folder).is_running()
    counts = {outcome.value: sum(cell.counts[outcome] for cell in results.cells) for outcome in OUTCOMES_WORST_FIRST}
    done = sum(counts.values()) - counts["unknown"]
    complete = sum(cell.known >= cell.due for cell in results.cells)
    if as_json:
        print_json(
            {
                "study": results.study,
                "scale": results.scale,
                "running": running,
                "trials": results.trials,
                "done": done,
                "cells": len(results.cells),
                "complete_cells": complete,
                "outcomes": dict(counts),
                "notes": list(results.notes),
            }
        )
        return 0
    state = "running" if running else "complete" if done == results.trials else "not running"
    print(printable(f"{results.study}{f' ({results.scale})' if results.scale else ''}: {state}"))
    print(f"trials    {done:,} of {results.trials:,}")
    print(f"cells     {complete} of {len(results.cells)} complete")
    print(f"outcomes  {', '.join(f'{count:,} {name}' for name, count in counts.items() if count) or 'none yet'}")
    for note in results.notes:
        print(printable(f"note: {note}"))
    if state == "not running":
        print("The command that began it goes on with what is missing.")
    return 0


# `evergrad study table`: what a study has found, with intervals.

EPILOG_TABLE = (
    "Examples:\n\n  evergrad study table runs/nev\n\n"
    "  evergrad study table runs/nev --layout paper --format latex\n\n"
    "  evergrad study table runs/nev --json\n\nExit codes: 0 shown · 2 usage, or no study there."
)

_LAYOUTS = ("summary", "paper", "comparisons", "trends", "costs", "spread", "guards")
_FORMS = ("rich", "csv", "markdown", "latex")


def table(
    folder: StudyDir,
    layout: Annotated[
        str | None,
        typer.Option(
            help="The table to show: summary (one row per cell), paper (as in the publication), comparisons, trends; "
            "or costs, spread or guards of a study that measures these, which is then the default.",
            autocompletion=complete_words(*_LAYOUTS),
        ),
    ] = None,
    form: Annotated[
        str, typer.Option("--format", help="rich, csv, markdown or latex.", autocompletion=complete_words(*_FORMS))
    ] = "rich",
    as_json: JsonOption = False,
) -> int:
    """Show the cells of a study: outcomes, rates with intervals, accuracies; or tests between cells."""
    if layout is not None:
        checked_choice("--layout", layout, _LAYOUTS)
    checked_choice("--format", form, _FORMS)
    from evergrad.study.results import results_of
    from evergrad.study.table_formats import format_table
    from evergrad.study.tables import results_to_json, study_table

    results = results_of(folder)
    if as_json:
        print_json(results_to_json(results))
        return 0
    made = study_table(results, layout)
    if form == "rich":
        console().print(made)
    else:
        print(format_table(made, form), end="")
    return 0


app = typer.Typer(
    name="study",
    help="What does a flipped bit do to training? Studies from a gallery or from your own plan: run, watch, tabulate.",
    epilog="Examples:\n\n  evergrad study list\n\n  evergrad study run bitflip-nev --scale tiny --out runs/nev\n\n"
    "  evergrad study table runs/nev --json\n\n"
    "NAME is a study of the gallery, FILE a plan in TOML, DIR the folder of a study. Every verb has --json. A plan "
    "that names a command or a file of Python runs it: read a stranger's plan first; list and show run nothing.\n\n"
    "Exit codes: 0 fine · 1 replay: other bits than in the study; run: workers were lost for good · "
    "2 usage, or the study could not go on · 130 interrupted: the same command goes on.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.command("list", epilog=EPILOG_LIST)(list_)
app.command("show", epilog=EPILOG_SHOW)(show)
app.command("run", epilog=EPILOG_RUN)(run)
app.command("status", epilog=EPILOG_STATUS)(status)
app.command("table", epilog=EPILOG_TABLE)(table)
app.command("report", epilog=EPILOG_REPORT)(report)
app.command("export", epilog=EPILOG_EXPORT)(export)
app.command("replay", epilog=EPILOG_REPLAY)(replay)
