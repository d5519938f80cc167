"""`evergrad study`: what a soft error does to training, one file a verb."""

from __future__ import annotations

import typer

from evergrad.cli.study import export, list_, replay, report, run, show, status, table

__all__ = ["app"]

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
app.command("list", epilog=list_.EPILOG)(list_.list_)
app.command("show", epilog=show.EPILOG)(show.show)
app.command("run", epilog=run.EPILOG)(run.run)
app.command("status", epilog=status.EPILOG)(status.status)
app.command("table", epilog=table.EPILOG)(table.table)
app.command("report", epilog=report.EPILOG)(report.report)
app.command("export", epilog=export.EPILOG)(export.export)
app.command("replay", epilog=replay.EPILOG)(replay.replay)
