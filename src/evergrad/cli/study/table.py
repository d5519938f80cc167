"""`evergrad study table`: what a study has found, with intervals."""

from __future__ import annotations

from typing import Annotated

import typer

from evergrad.cli.completion import one_of
from evergrad.cli.output import JsonOption, console, print_json
from evergrad.cli.study.arguments import StudyDir
from evergrad.wording import checked_choice

EPILOG = (
    "Examples:\n\n  evergrad study table runs/nev\n\n"
    "  evergrad study table runs/nev --kind published --format latex\n\n"
    "  evergrad study table runs/nev --json\n\nExit codes: 0 shown · 2 usage, or no study there."
)

_KINDS = ("summary", "published", "comparisons", "trends", "costs", "spread", "guards")
_FORMS = ("rich", "csv", "markdown", "latex")


def table(
    folder: StudyDir,
    kind: Annotated[
        str | None,
        typer.Option(
            help="summary (a row a cell), published, comparisons, trends; or costs, spread, guards of a study that "
            "asks for these, which is then shown first.",
            autocompletion=one_of(*_KINDS),
        ),
    ] = None,
    form: Annotated[
        str, typer.Option("--format", help="rich, csv, markdown or latex.", autocompletion=one_of(*_FORMS))
    ] = "rich",
    as_json: JsonOption = False,
) -> int:
    """Show the cells of a study: outcomes, rates with intervals, accuracies; or tests between cells."""
    if kind is not None:
        checked_choice("--kind", kind, _KINDS)
    checked_choice("--format", form, _FORMS)
    from evergrad.study import tables
    from evergrad.study.rendering import written
    from evergrad.study.tally import results_of
    from evergrad.study.watched_tables import WATCHED, watched_kind, watched_table

    results = results_of(folder)
    if as_json:
        print_json(tables.results_to_json(results))
        return 0
    kind = kind or watched_kind(results) or "summary"
    if kind in WATCHED:
        made = watched_table(results, kind)
    else:
        axis = (results.rows,) if kind == "trends" else ()
        made = getattr(tables, f"{kind}_table")(results, *axis)
    if form == "rich":
        console().print(made)
    else:
        print(written(made, form), end="")
    return 0
