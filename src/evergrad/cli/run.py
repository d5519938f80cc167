"""`evergrad run`, `timeline`: launch a job on several ranks, and show what happened in it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evergrad.cli.output import JsonOption, complete_words, console, given_path, print_json, printable, relative_path
from evergrad.errors import UsageError

if TYPE_CHECKING:
    from evergrad.report.page_model import ReportPage
    from evergrad.report.run_model import Interruption, RunAnalysis, RunFiles


CONTEXT = {"allow_interspersed_args": False}
"""Everything after the script is the script's, options too."""

EPILOG = (
    "Examples:\n\n  evergrad run -n 4 train.py --lr 0.1\n\n"
    "  evergrad run -n 4 --spares 1 --fail 'kill rank=1 step=10 bucket=2' train.py\n\n"
    "  evergrad run -n 2 -m package.train\n\n"
    "  srun -N4 --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0 evergrad run --multinode -n 8 --out DIR train.py\n\n"
    "  evergrad run --multinode --nnodes 4 --node-rank 2 -n 8 --out DIR train.py\n\n"
    "A script that calls eg.join() survives failures; any other one runs as under torchrun, until one rank fails. "
    "Ctrl-C and SIGTERM are passed on to every process.\n\n"
    "Exit codes: 0 finished, also after losses · 1 the script failed · 2 usage · 4 too few ranks left and nothing to "
    "restart from · 5 this node has lost the head · 6 the ranks' final states differ · "
    "75 all ranks were asked to leave · 130, 143 interrupted by SIGINT, SIGTERM."
)


def run(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="The Python script to run; with -m the name of a module.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Arguments that are passed to the script.")
    ] = None,
    num_ranks: Annotated[int, typer.Option("-n", "--ranks", help="The number of ranks, on all nodes together.")] = 1,
    nnodes: Annotated[
        int | None,
        typer.Option(
            help="The number of nodes (1). Without --multinode they are simulated: ranks in blocks, named n0, n1 …"
        ),
    ] = None,
    multinode: Annotated[
        bool,
        typer.Option("--multinode", help="Run on several machines: one launcher runs on each, and all share --out."),
    ] = False,
    node_rank: Annotated[
        int | None,
        typer.Option(
            help="The number of this node; node 0 is the head. Without it EVERGRAD_NODE_RANK or srun gives the number."
        ),
    ] = None,
    master_addr: Annotated[
        str | None, typer.Option(help="The address of the head for the other nodes, if it cannot be found.")
    ] = None,
    rendezvous_timeout: Annotated[
        float, typer.Option(help="Seconds to wait for the head, and for the other nodes.")
    ] = 60.0,
    spares: Annotated[
        int, typer.Option(help="The number of spares: processes that wait to take a dead rank's place.")
    ] = 0,
    strategy: Annotated[
        str,
        typer.Option(
            help="What survivors do: rollback (the mini-batch again), forward or restart.",
            autocompletion=complete_words("rollback", "forward", "restart"),
        ),
    ] = "rollback",
    min_ranks: Annotated[
        int,
        typer.Option(
            help="The least number of ranks to continue with. With fewer the job restarts from its newest version."
        ),
    ] = 1,
    max_restarts: Annotated[
        int, typer.Option(help="The number of times that the job may restart from its newest version.")
    ] = 3,
    max_ranks: Annotated[
        int | None,
        typer.Option(help="The largest number of ranks to grow to while spares wait; by default the number of -n."),
    ] = None,
    heartbeat_timeout: Annotated[
        float, typer.Option(help="Seconds after which a process that is stopped or cut off counts as dead.")
    ] = 1.0,
    warn_after: Annotated[
        float, typer.Option(help="Seconds after which a rank that others wait for is reported, with its stack.")
    ] = 30.0,
    hang_timeout: Annotated[
        float, typer.Option(help="Seconds after which a rank that others wait for counts as dead; 0: never.")
    ] = 600.0,
    straggler_factor: Annotated[
        float, typer.Option(help="A rank that takes so many times as long as the others is reported; 0: none is.")
    ] = 3.0,
    replace_stragglers: Annotated[
        bool, typer.Option("--replace-stragglers", help="A straggler counts as dead, instead of being reported only.")
    ] = False,
    keep_stopped: Annotated[
        bool, typer.Option("--keep-stopped", help="Do not kill a process that counts as dead and still exists.")
    ] = False,
    respawn: Annotated[
        bool, typer.Option("--respawn", help="Start a new spare for each process that died or left.")
    ] = False,
    transport: Annotated[
        str | None,
        typer.Option(
            help="How ranks exchange tensors: gloo, or nccl (experimental).",
            autocompletion=complete_words("gloo", "nccl"),
        ),
    ] = None,
    fail: Annotated[
        list[str] | None, typer.Option(help="A failure to inject: 'kill rank=1 step=10 bucket=2'. Repeatable.")
    ] = None,
    failures: Annotated[
        Path | None, typer.Option(help="A file of failures to inject: TOML, or a trace as CSV (time, node, kind).")
    ] = None,
    batch_policy: Annotated[
        str | None,
        typer.Option(
            help="Batch size and learning rate with fewer ranks: shrink, constant or scale_lr.",
            autocompletion=complete_words("shrink", "constant", "scale_lr"),
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="The seed of random failures that have no seed of their own.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder of the run, new or empty; by default runs/<script>-<time>.")
    ] = None,
    grace_period: Annotated[
        float, typer.Option(help="Seconds between asking processes to leave and killing them.")
    ] = 10.0,
    preload: Annotated[
        bool, typer.Option("--preload", help="Import torch once in the launcher and fork the ranks: they start sooner.")
    ] = False,
    is_module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Run a training script on several ranks, of this machine or of several; who survives a failure goes on."""
    from evergrad.errors import UsageError
    from evergrad.recovery.failures.schedule import Failures
    from evergrad.recovery.heartbeat import LivenessTimeouts
    from evergrad.recovery.launch.launcher import launch
    from evergrad.recovery.launch.rendezvous import node_identity
    from evergrad.recovery.launch.settings import LaunchSettings, checked_strategy

    if not multinode and (node_rank is not None or master_addr is not None):
        option = "--node-rank" if node_rank is not None else "--master-addr"
        raise UsageError(f"{option}: expected --multinode with it, found none")
    here = node_identity(nnodes, node_rank, os.environ) if multinode else None
    schedule = [*(Failures.load(failures) if failures is not None else ()), *Failures.parse(fail or ())]
    settings = LaunchSettings(
        script=script,
        arguments=tuple(arguments or ()),
        is_module=is_module,
        num_ranks=num_ranks,
        num_nodes=(1 if nnodes is None else nnodes) if here is None else len(here.names),
        num_spares=spares,
        strategy=checked_strategy(strategy),
        min_ranks=min_ranks,
        max_restarts=max_restarts,
        max_ranks=max_ranks,
        patience=LivenessTimeouts(heartbeat_timeout, warn_after, hang_timeout, straggler_factor, replace_stragglers),
        keep_stopped=keep_stopped,
        respawn=respawn,
        transport=transport,
        failures=Failures(schedule),
        batch_policy=batch_policy,
        seed=seed,
        out=out,
        grace_period_s=grace_period,
        preload=preload,
        node_rank=None if here is None else here.rank,
        node_names=() if here is None else here.names,
        master_addr=master_addr,
        rendezvous_timeout_s=rendezvous_timeout,
    )
    summary = launch(settings, as_json=as_json)
    if as_json:
        print_json(summary.to_json())
    return summary.exit_code


# `evergrad timeline`: what happened in a run, as a table and as a page.

EPILOG_TIMELINE = (
    "Examples:\n\n  evergrad timeline runs/kill\n\n  evergrad timeline runs/kill --out kill.html\n\n"
    "  evergrad timeline runs/kill --json --no-page\n\n"
    "seen: from the failure until another process knew · agreed: until the plan for the next generation · going on: "
    "until the first rank had applied a step again. Where nobody noted when it failed, seen is a question mark and in "
    "all counts from there. A run that goes on is shown as it stands.\n\n"
    "Without plotly the table is printed, no page is written, and a line says how to get it.\n\n"
    "Exit codes: 0 told · 2 usage, no timeline that can be read, or no page where --out asks for one."
)
_SHOWN = 40


def timeline(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", parser=given_path, help="The folder of the run: evergrad run --out.")
    ],
    out: Annotated[Path | None, typer.Option(help="The page; RUN/timeline.html by default.")] = None,
    no_page: Annotated[bool, typer.Option("--no-page", help="Print only: write no page.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Tell what happened in a run: each failure from its moment to the next step, as a table and as a page."""
    from evergrad.report.html import checked_target, missing_dependency, write_page
    from evergrad.report.run_analysis import analyse
    from evergrad.report.run_model import read_run

    if out is not None and no_page:
        raise UsageError("--out and --no-page: expected one of them, found both")
    if out is not None and not out.absolute().parent.is_dir():
        raise UsageError(f"{out}: there is no folder {str(out.parent)!r}")
    target = None if no_page else checked_target(out if out is not None else run / "timeline.html")
    folder = read_run(run)
    story = analyse(folder.events, folder.notes)
    if not as_json:
        _print(story)
    page, missing = None, ""
    if target is not None:
        page = _page(story, folder)
        missing = missing_dependency(page)
    written = write_page(page, target) if page is not None and target is not None and not missing else None
    if as_json:
        print_json({"run": str(run), "page": None if written is None else str(written), **story.to_json()})
    elif written is not None:
        print(printable(f"{relative_path(written)}: the same as a page, with pictures"))
    if missing:
        print(printable(f"evergrad: no page is written: {missing}"), file=sys.stderr)
    # A page that was asked for by its name is a result; the one beside the table is an addition to it.
    return 2 if missing and out is not None else 0


def _page(story: RunAnalysis, folder: RunFiles) -> ReportPage:
    from evergrad import __version__
    from evergrad.report.run_page import run_page

    made = f"evergrad timeline {__version__}, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}"
    return run_page(story, folder, made)


def _print(story: RunAnalysis) -> None:
    from evergrad.report.run_figures import caveats, summary
    from evergrad.wording import count_of

    if story.failures:
        _print_failures(story.failures[:_SHOWN])
        more = len(story.failures) - _SHOWN
        print(f"… and {count_of(more, 'more failure')}: --json has them all\n" if more > 0 else "")
    for note in story.notes:
        print(printable(note))
    print(printable(summary(story)))
    if story.inexact:
        print(printable(f"not as without failures: {story.inexact}"))
    elif story.failures and story.unverified and story.outcome == "finished":
        print(printable(f"not verified to be as without failures: {story.unverified}"))
    for line in caveats(story):
        print(line)


def _print_failures(failures: tuple[Interruption, ...]) -> None:
    from rich.table import Table
    from rich.text import Text

    from evergrad.report.run_figures import duration, verdict_text

    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for name in ("failure", "step", "seen", "agreed", "going on", "in all", "then"):
        is_number = name not in ("failure", "then")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for each in failures:
        took = {phase.name: duration(phase.seconds) for phase in each.phases}
        cells = (
            each.what, "?" if each.step is None else each.step, took.get("unseen", "?"), took.get("agreeing", "?"),
            took.get("recovering", "?"), duration(each.seconds), verdict_text(each),
        )  # fmt: skip
        table.add_row(*(Text(printable(cell)) for cell in cells))
    out = console()
    out.width = min(out.width, 80)  # one row a failure: what is long is folded
    out.print(table)
