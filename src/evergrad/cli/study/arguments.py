"""What the verbs of `evergrad study` have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evergrad.cli.completion import one_of, studies
from evergrad.cli.mistakes import given_path

Name = Annotated[
    str,
    typer.Argument(metavar="NAME-OR-FILE", help="A study of the gallery, or a plan in TOML.", autocompletion=studies),
]
Scale = Annotated[
    str | None,
    typer.Option(
        help="tiny, small or paper, some also gpu; the first that there is.",
        autocompletion=one_of("tiny", "small", "gpu", "paper"),
    ),
]
StudyDir = Annotated[
    Path, typer.Argument(metavar="DIR", parser=given_path, help="The folder that the study was run with (--out).")
]


def duration(seconds: float) -> str:
    """In a person's units.

    >>> duration(42.3), duration(150), duration(9000), duration(400_000)
    ('42 s', '2.5 min', '2.5 h', '4.6 days')
    """
    for limit, unit, name in ((90, 1, "s"), (5400, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}" if unit == 1 else f"{seconds / unit:.1f} {name}"
    return f"{seconds / 86400:.1f} days"
