"""`evergrad run`: launch a script on several ranks, and keep it going when some of them die."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evergrad.cli.output import JsonOption, print_json

__all__ = ["CONTEXT", "EPILOG", "run"]

CONTEXT = {"allow_interspersed_args": False}
"""Everything after the script is the script's, options too."""

EPILOG = (
    "Examples:\n\n  evergrad run -n 4 train.py --lr 0.1\n\n"
    "  evergrad run -n 4 --spares 1 --fail 'kill rank=1 step=10 bucket=2' train.py\n\n"
    "  evergrad run -n 2 -m package.train\n\n"
    "A script that calls eg.join() survives failures; any other one runs as under torchrun, until one rank fails. "
    "Ctrl-C and SIGTERM are passed on to every process.\n\n"
    "Exit codes: 0 finished, also after losses · 1 the script failed · 2 usage · 4 too few ranks left and nothing to "
    "restart from · 130, 143 interrupted by SIGINT, SIGTERM."
)


def run(
    script: Annotated[str, typer.Argument(help="A Python script; with -m a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Everything after it is passed on to it.")] = None,
    num_ranks: Annotated[int, typer.Option("-n", "--ranks", help="How many ranks.")] = 1,
    nodes: Annotated[int, typer.Option(help="Simulate this many nodes: ranks in blocks, named n0, n1 …")] = 1,
    spares: Annotated[int, typer.Option(help="Processes that wait to take a dead rank's place.")] = 0,
    strategy: Annotated[
        str, typer.Option(help="What survivors do: rollback (the mini-batch again), forward or restart.")
    ] = "rollback",
    min_ranks: Annotated[int, typer.Option(help="With fewer the job goes back to its newest checkpoint, or ends.")] = 1,
    max_restarts: Annotated[int, typer.Option(help="How often it may go back so.")] = 3,
    respawn: Annotated[bool, typer.Option("--respawn", help="Start a new spare for each process that died.")] = False,
    fail: Annotated[
        list[str] | None, typer.Option(help="A failure to inject: 'kill rank=1 step=10 bucket=2'. Repeatable.")
    ] = None,
    failures: Annotated[Path | None, typer.Option(help="A TOML file of failures to inject.")] = None,
    after_loss: Annotated[
        str | None, typer.Option(help="Batch and learning rate with fewer ranks: shrink, constant or scale_lr.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of random failures that name none.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder of the run, new or empty; runs/<script>-<time> by default.")
    ] = None,
    grace: Annotated[float, typer.Option(help="Seconds that processes have to leave when asked to.")] = 10.0,
    fork: Annotated[
        bool, typer.Option("--fork", help="Import torch once and start ranks as forks of that: quick to begin.")
    ] = False,
    is_module: Annotated[bool, typer.Option("-m", "--module", help="The script is the name of a module.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Run a training script on several ranks of this machine; who survives a failure goes on."""
    from evergrad.recovery.failures import Failures
    from evergrad.recovery.launcher import launch
    from evergrad.recovery.settings import LaunchSettings, checked_strategy

    schedule = [*(Failures.load(failures) if failures is not None else ()), *Failures.parse(fail or ())]
    settings = LaunchSettings(
        script=script,
        arguments=tuple(arguments or ()),
        is_module=is_module,
        num_ranks=num_ranks,
        num_nodes=nodes,
        num_spares=spares,
        strategy=checked_strategy(strategy),
        min_ranks=min_ranks,
        max_restarts=max_restarts,
        respawn=respawn,
        failures=Failures(schedule),
        after_loss=after_loss,
        seed=seed,
        out=out,
        grace_s=grace,
        fork=fork,
    )
    summary = launch(settings, as_json=as_json)
    if as_json:
        print_json(summary.to_json())
    return summary.exit_code
