"""`evergrad demo`: what there is, with real files and real output, in chapters; all of them in about a minute."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evergrad.cli.demo import chapters
from evergrad.cli.output import JsonOption, console, print_json
from evergrad.errors import FileAccessError, UsageError, nearest, reason

if TYPE_CHECKING:
    from evergrad.records import Json

__all__ = ["demo"]


@dataclass(frozen=True, slots=True)
class Chapter:
    """Some parts of the demo that can be seen without the others."""

    name: str
    title: str
    show: Callable[[Path, Callable[[str], None], Callable[..., None]], dict[str, Json]]
    """Does it in a folder, says what is to be seen, and runs verbs of the command line; gives the facts back."""
    num_processes: int = 0
    """How many processes of its own it starts: see `processes`."""


CHAPTERS = (
    Chapter("files", "flip bits of a checkpoint, find and undo them", chapters.show_files),
    Chapter(
        "checkpoints",
        "kill and preempt trainers, and go on",
        chapters.show_checkpoints,
        chapters.PROCESSES_CHECKPOINTS,
    ),
    Chapter(
        "recovery",
        "lose ranks in the middle of training",
        chapters.show_recovery,
        chapters.PROCESSES_RECOVERY,
    ),
    Chapter("study", "what flipped bits do to training, with intervals", chapters.show_studies),
)

EPILOG = (
    "Chapters:\n\n"
    + "".join(f"  {chapter.name} — {chapter.title}\n\n" for chapter in CHAPTERS)
    + "Examples:\n\n  evergrad demo\n\n  evergrad demo files\n\n  evergrad demo --keep /tmp/evergrad-demo\n\n"
    "Exit codes: 0 everything worked · 2 usage."
)


def demo(
    chapters: Annotated[
        list[str] | None, typer.Argument(metavar="CHAPTER", help="Only these chapters; all by default.")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep the files in this folder: a new or an empty one.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train, flip bits of a checkpoint and see what that does; kill trainers, preempt jobs, lose ranks, and go on."""
    from evergrad.cli.demo.processes import prepare

    chosen = _chosen(chapters or [])
    if keep is not None:
        _make_folder(keep)
    prepare(sum(chapter.num_processes for chapter in chosen))
    if keep is not None:
        _tell(chosen, keep, as_json)
        pages = [page for page in _pages(keep) if not as_json]
    else:
        with tempfile.TemporaryDirectory(prefix="evergrad-demo-") as folder:
            _tell(chosen, Path(folder), as_json)
            pages = [] if as_json else _left(_pages(Path(folder)))
        if not as_json:
            console().print(f"\n{folder} is removed again; 'evergrad demo --keep FOLDER' leaves everything in FOLDER.")
    if pages:
        console().print("To look at, in a browser: " + ", ".join(map(str, pages)), soft_wrap=True)


def _chosen(names: list[str]) -> list[Chapter]:
    """The chapters of these names, each once and in their order; all of them if none is named."""
    known = [chapter.name for chapter in CHAPTERS]
    for name in names:
        if name not in known:
            close = nearest(name[:100].lower(), known, count=1)
            found = f"found {name[:100]!r}." + (f" Did you mean '{close[0]}'?" if close else "")
            raise UsageError(f"chapter: expected {', '.join(known[:-1])} or {known[-1]}, {found}")
    return [chapter for chapter in CHAPTERS if chapter.name in names or not names]


def _make_folder(folder: Path) -> None:
    """A new or empty folder: what someone keeps there already is not the demo's to replace."""
    try:
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder}: is no folder. Choose a new or an empty one.")
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"{folder}: is not empty. Choose a new or an empty folder.")
    except OSError as error:
        what = f"cannot be made: {reason(error)}"
        raise FileAccessError(folder, what) from error


def _pages(folder: Path) -> list[Path]:
    """The reports that the chapters have written."""
    return sorted(folder.glob("*/*.html"))


def _left(pages: list[Path]) -> list[Path]:
    """These, in a folder that stays."""
    if not pages:
        return []
    folder = Path(tempfile.mkdtemp(prefix="evergrad-demo-pages-"))
    return [Path(shutil.copy(page, folder / f"{page.parent.name}-{page.name}")) for page in pages]


def _tell(chapters: list[Chapter], folder: Path, as_json: bool) -> None:
    from evergrad.cli import main

    say: Callable[[str], None] = (lambda _: None) if as_json else console().print
    facts: dict[str, Json] = {}

    def run(*arguments: str) -> None:
        shown = (str(Path(a).relative_to(folder)) if a.startswith(f"{folder}/") else a for a in arguments)
        say(f"\n[bold]$ evergrad {' '.join(shown)}[/bold]")
        with redirect_stdout(StringIO()) if as_json else nullcontext():
            code = main(arguments)
        if code > 1:
            raise typer.Exit(code)

    for place, chapter in enumerate(chapters):
        if place:
            say("")
        facts.update(chapter.show(folder, say, run))
    if as_json:
        print_json(facts)
