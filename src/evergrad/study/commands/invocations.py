"""A command as a plan says it, checked, and with its places filled in.

No shell reads it: words are split as a shell would, and a place stays one word whatever its path holds. What follows a
place as a suffix belongs to the file's name: with `{checkpoint}.npz`, the file is called so, once.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from evergrad.errors import EvergradError, UsageError
from evergrad.formats import open_checkpoint
from evergrad.study.commands.readings import Source
from evergrad.study.trials import Command
from evergrad.wording import meant, shown

SEED = 0
"""`{seed}`: the same in every run, so that the fault is all in which a trial differs from the golden run."""

_PLACE = re.compile(r"\{([A-Za-z_]\w*)\}((?:\.\w+)*)")
_PLACES = {"command": ("checkpoint", "output", "seed", "python"), "prepare": ("checkpoint", "seed", "python")}


def check_command(command: Command) -> None:
    """Refuse what cannot work, before anything runs; `UsageError` names the setting and what it may be."""
    for name in ("command", "checkpoint", "prepare", "metric", "loss", "folder"):
        if not isinstance(getattr(command, name), str):
            raise UsageError(f"{name}: expected a text, found {shown(getattr(command, name))}")
    if type(command.timeout_s) not in (int, float) or not 0 <= command.timeout_s < math.inf:
        raise UsageError(f"timeout_s: expected seconds, 0 or more, found {shown(command.timeout_s)}")
    chance = command.chance
    if chance is not None and (type(chance) not in (int, float) or not math.isfinite(chance)):
        raise UsageError(f"chance: expected the metric of one who guesses, a number, found {shown(chance)}")
    if not command.metric:
        raise UsageError("metric: expected a key of JSON lines, or 'pattern:' and a regular expression, found nothing")
    Source("metric", command.metric)
    Source("loss", command.loss)
    if not Path(command.base, command.folder).is_dir():
        raise UsageError(f"folder: expected a folder that exists, found {shown(command.folder)}")
    if bool(command.checkpoint) == bool(command.prepare):
        found = "both" if command.checkpoint else "neither"
        raise UsageError(
            "checkpoint: expected either this, a checkpoint that exists, or prepare, a command that writes one to "
            f"{{checkpoint}}, found {found}"
        )
    for setting in ("command", "prepare") if command.prepare else ("command",):
        _check_program(setting, words_of(command, setting), Path(command.base, command.folder))
    if command.checkpoint:
        try:
            open_checkpoint(clean_checkpoint(command)).close()
        except EvergradError as error:
            raise UsageError(f"checkpoint: {error}") from None


def clean_checkpoint(command: Command) -> Path:
    """The checkpoint that exists; a relative path begins where the command is started."""
    return Path(command.base, command.folder) / Path(command.checkpoint).expanduser()


def words_of(command: Command, setting: str) -> list[str]:
    """The words of `command` or `prepare`, with places still open."""
    text: str = getattr(command, setting)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{setting}: {str(error).lower()} in {shown(text)}") from None
    allowed = _PLACES[setting]
    for name, _ in (place for word in words for place in _PLACE.findall(word)):
        if name not in allowed:
            known = ", ".join(f"{{{one}}}" for one in allowed)
            raise UsageError(f"{setting}: expected places out of {known}, found {{{name}}}.{meant(name, allowed)}")
    if not asks_for(words, "checkpoint"):
        what = "goes on from" if setting == "command" else "writes the clean checkpoint to"
        raise UsageError(f"{setting}: expected the place {{checkpoint}}, which it {what}, found {shown(text)}")
    return words


def asks_for(words: Sequence[str], name: str) -> bool:
    """Whether there is such a place."""
    return any(f"{{{name}}}" in word for word in words)


def tail_of(words: Sequence[str], name: str) -> str:
    """The suffix that follows a place."""
    return next((tail for word in words for found, tail in _PLACE.findall(word) if found == name and tail), "")


def filled(words: Sequence[str], places: Mapping[str, Path]) -> list[str]:
    """The words to run: paths in their places, and the Python that runs this one for `python`."""
    values = {name: str(path) for name, path in places.items()} | {"seed": str(SEED), "python": sys.executable}

    def fill(place: re.Match[str]) -> str:
        value, tail = values[place[1]], place[2]
        return value if value.endswith(tail) else value + tail

    first = sys.executable if words[0] == "python" else words[0]
    return [_PLACE.sub(fill, word) for word in (first, *words[1:])]


def _check_program(setting: str, words: Sequence[str], folder: Path) -> None:
    program = words[0]
    if program in ("python", "{python}"):
        script = folder / words[1]  # there is one: a place for the checkpoint at least
        if script.suffix == ".py" and not _PLACE.search(words[1]) and not script.is_file():
            raise UsageError(f"{setting}: there is no {shown(words[1])} in folder {shown(str(folder))}")
        return
    found = (
        os.path.isfile(folder / program) and os.access(folder / program, os.X_OK)
        if os.sep in program
        else shutil.which(program) is not None
    )
    if not found:
        where = f"in folder {shown(str(folder))}" if os.sep in program else "on PATH"
        raise UsageError(f"{setting}: expected a program that can be run, found no {shown(program)} {where}")
