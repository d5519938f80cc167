"""`evergrad study replay`: one trial again, alone, to look at or to prove that it gives the same bits."""

from __future__ import annotations

from typing import Annotated

import typer

from evergrad.cli.output import JsonOption, print_json, printable
from evergrad.cli.study.arguments import StudyDir

EPILOG = (
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
    from evergrad.study.replaying import replay_trial

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
