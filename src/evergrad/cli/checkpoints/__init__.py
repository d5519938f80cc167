"""`evergrad checkpoints`: the versions of a job, one file a verb."""

from __future__ import annotations

import typer

from evergrad.cli.checkpoints import export, lineage, ls, pin, report, rm, show, verify

__all__ = ["app"]

app = typer.Typer(
    name="checkpoints",
    help="The versions that a job has saved: list, check, keep, remove, export them, and see what came from what.",
    epilog="Examples:\n\n  evergrad checkpoints ls runs/r50 --json\n\n  evergrad checkpoints verify runs/r50\n\n"
    "  evergrad checkpoints export runs/r50 latest model.safetensors --where 'model/**'\n\n"
    "RUN_DIR is the job's run folder; verbs that change nothing also take the URL of a persistent tier. VERSION is a "
    "step, a name such as v0000000120-02, a tag, or 'latest'. Every verb has --json.\n\n"
    "Exit codes: 0 fine · 1 verify: something is wrong or could not be checked · 2 usage or unreadable input.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.command("ls", epilog=ls.EPILOG)(ls.ls)
app.command("show", epilog=show.EPILOG)(show.show)
app.command("verify", epilog=verify.EPILOG)(verify.verify)
app.command("pin", epilog=pin.EPILOG)(pin.pin)
app.command("rm", epilog=rm.EPILOG)(rm.rm)
app.command("export", epilog=export.EPILOG)(export.export)
app.command("lineage", epilog=lineage.EPILOG)(lineage.lineage)
app.command("report", epilog=report.EPILOG)(report.report)
