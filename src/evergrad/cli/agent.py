"""`evergrad agent`: finish the versions of a job on this node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evergrad.cli.mistakes import given_path
from evergrad.cli.output import JsonOption, print_json, printable

EPILOG = (
    "Example: evergrad agent runs/r50 --node n1\n\nA Checkpointer starts one by itself; run it yourself where a daemon "
    "would be killed, as a child of your launcher.\n\nExit codes: 0 it served, or another one does · 2 usage, or it "
    "cannot serve."
)


def agent(
    run_dir: Annotated[
        Path,
        typer.Argument(metavar="RUN_DIR", parser=given_path, help="The job's run folder, as given to Checkpointer."),
    ],
    node: Annotated[str | None, typer.Option(help="This node's name; EVERGRAD_NODE, or the host's.")] = None,
    linger: Annotated[
        float | None, typer.Option(min=0, help="Seconds to stay without work and trainers; EVERGRAD_LINGER, or 60.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return when it serves, in a session of its own.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Digest, write and retire what trainers on this node capture, until nothing is owed and nobody is there."""
    import logging
    import os
    import sys

    from evergrad.checkpoint.finish.agent import linger_seconds, run_agent
    from evergrad.checkpoint.job import Job

    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(message)s"
    )
    if not run_dir.is_dir():
        from evergrad.errors import FileAccessError

        raise FileAccessError(run_dir, "is no run folder: a Checkpointer makes one")
    job = Job.open(run_dir, node)

    def ready() -> None:
        if as_json:
            print_json({"job": job.id, "node": job.node, "pid": os.getpid(), "run_dir": str(job.run_dir)})
        elif not detach:
            print(f"{printable(job.id)}: agent {os.getpid()} serves node {printable(job.node)}", flush=True)
        sys.stdout.flush()

    if not run_agent(job, linger_s=linger_seconds(linger), detach=detach, ready=ready) and not as_json:
        print(f"{printable(job.id)}: another agent serves node {printable(job.node)}")
