"""What the verbs print: JSON, tables that fit a terminal, progress for what takes long.

Names in a file are whatever its writer chose. A terminal obeys some characters, so everything that is shown
to a person goes through `printable`.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from evergrad.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from evergrad.records import Json


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

Row = TypeVar("Row")

_SHOWN_ROWS = 1000  # about what a terminal keeps to scroll back to
_MANY_ROWS = 1000  # formatted at a time
_WIDEST_COLUMN = 100  # longer names stick out, so that one of them does not widen every row
_SLOW_BYTES = 1 << 28  # under a quarter of a gigabyte there is nothing to wait for


def print_json(data: Json) -> None:
    """One JSON document on stdout, in ASCII; NaN and infinities, which JSON does not have, as strings."""
    try:
        text = json.dumps(data, ensure_ascii=True, allow_nan=False)
    except ValueError:
        text = json.dumps(_plain(data), ensure_ascii=True, allow_nan=False)
    print(text)


def print_rows(
    columns: Sequence[str], rows: Sequence[Row], cells: Callable[[Row], Sequence[str]], *, right: Sequence[str] = ()
) -> None:
    """A table with one line a row; `right` names the columns that are aligned to the right.

    A terminal gets a table that fits it, of the first thousand rows. Elsewhere all rows are written one after the
    other, however many there are.
    """
    if not sys.stdout.isatty():
        for line in _lines(columns, rows, cells, right):
            sys.stdout.write(line)
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in islice(rows, _SHOWN_ROWS):
        table.add_row(*(Text(printable(cell)) for cell in cells(row)))
    console().print(table)
    _print_rest(len(rows) - _SHOWN_ROWS)


def print_some(lines: Iterable[str], count: int) -> None:
    """Lines that are ready to be shown, `count` of them: the first thousand on a terminal, elsewhere all."""
    if not sys.stdout.isatty():
        for line in lines:
            sys.stdout.write(f"{line}\n")
        return
    for line in islice(lines, _SHOWN_ROWS):
        print(line)
    _print_rest(count - _SHOWN_ROWS)


def _print_rest(left_out: int) -> None:
    if left_out > 0:
        print(f"… and {left_out:,} more: select some with --where, or see all of them: add | less")


def _lines(
    columns: Sequence[str], rows: Sequence[Row], cells: Callable[[Row], Sequence[str]], right: Sequence[str]
) -> Iterator[str]:
    """The rows as text, many at a time, with two passes over them: the first finds how wide the columns are."""
    widths = [len(column) for column in columns]
    for start in range(0, len(rows), _MANY_ROWS):
        parts = zip(*map(cells, rows[start : start + _MANY_ROWS]), strict=True)
        widths = [max(width, *map(len, part)) for width, part in zip(widths, parts, strict=True)]
    form = "  ".join(
        f"{{:{'>' if column in right else '<'}{min(width, _WIDEST_COLUMN)}}}"
        for column, width in zip(columns, widths, strict=True)
    )
    yield f"{form.format(*columns).rstrip()}\n"
    for start in range(0, len(rows), _MANY_ROWS):
        lines = [form.format(*cells(row)).rstrip() for row in rows[start : start + _MANY_ROWS]]
        yield "".join([f"{printable(line)}\n" for line in lines])


def printable(text: object) -> str:
    r"""A text on one line that no terminal obeys: escapes, line ends and lone surrogates are spelt out.

    >>> print(printable("fc\x1b[2J\nbias µ"))
    fc\x1b[2J\nbias µ
    """
    line = str(text)
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def relative_path(path: Path) -> Path:
    """A path as a person here would write it: from the current folder on, if it lies below."""
    with suppress(ValueError, OSError):
        return path.absolute().relative_to(Path.cwd())
    return path


def safe_streams() -> None:
    """Let stdout and stderr spell out what their encoding lacks, rather than fail; closed ones swallow all."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def console() -> Console:
    """Where tables go; wide enough for long names when the output is not a terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)


def labelled_line(label: str, text: object, *, indent: int = 0) -> str:
    """A line `label  text` that a person reads, folded at words where a terminal would fold it anywhere."""
    line = printable(f"{label}{text}")
    if not sys.stdout.isatty():
        return line
    from textwrap import fill

    width = max(40, console().width)
    return fill(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr for long work, fed with (bytes done, bytes in all); nothing where no one watches."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=False),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(printable(what), total=None, visible=False)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=total > _SLOW_BYTES)

        yield advance


@lru_cache(_MANY_ROWS)
def size(count: float) -> str:
    """Bytes in a person's units.

    >>> size(0), size(1536), size(244_000_000)
    ('0 B', '1.5 kB', '244.0 MB')
    """
    if count < 1000:
        return f"{count:.0f} B"
    power = min(int(math.log10(count) // 3), 5)
    return f"{count / 1000**power:.1f} {' kMGTP'[power]}B"


@lru_cache(_MANY_ROWS)
def shape(lengths: tuple[int, ...]) -> str:
    """A shape in a person's words.

    >>> shape((64, 3, 7, 7)), shape(())
    ('64×3×7×7', 'scalar')
    """
    return "×".join(str(length) for length in lengths) or "scalar"


def _plain(data: Json) -> Json:
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_plain(value) for value in data]
    return data


# A mistake that the parser finds, in the words of the others: what, expected, found, and where help is.

_EXPECTED = (
    (r"Input should be a valid integer.*", "a whole number"),
    (r"Input should be a valid number.*", "a number"),
    (r"Input should be greater than or equal to (\S+?)\.?", r"\1 or more"),
    (r"Input should be less than or equal to (\S+?)\.?", r"\1 or less"),
)


def given_path(text: str) -> Path:
    """The path that was given; an empty one, which would be the current folder, is a variable that was never set."""
    if not text:
        raise UsageError("an empty path names no file or folder: is a variable of the shell not set? For here: '.'.")
    return Path(text)


given_path.__name__ = "path"  # the type that the help shows


def parser_line(error: Exception, words: Sequence[str]) -> str:
    """One line, and the command whose help says more; empty if the help itself has been shown.

    The parser's own words are kept where there is nothing to add.
    """
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    command = context.command_path if context is not None else "evergrad"
    message = " ".join(str(error.format_message()).split())  # type: ignore[attr-defined]
    if not message:
        return ""
    options = [*getattr(parameter, "opts", ())]
    for pattern, expected in _EXPECTED:
        told = re.fullmatch(rf"Invalid value for (.*?): {pattern}", message)
        if told and options:
            wanted = re.sub(rf".*?{pattern}", expected, message.partition(": ")[2])
            message = f"{'/'.join(options)}: expected {wanted}, found {_found(options, words)}"
    if message.startswith("Missing argument '"):  # by the name that the help has for it
        message = re.sub(r"'(\w+)'", lambda name: name.group().upper(), message)
    if message.endswith("?"):
        return f"{message} See '{command} --help'."
    return f"{message.rstrip('.')}. See '{command} --help'."


def _found(options: Sequence[str], words: Sequence[str]) -> str:
    """What was given for an option, as it was typed."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word in options:
            return repr(after)
        name, is_given, value = word.partition("=")
        if is_given and name in options:
            return repr(value)
        if re.match(r"-\w.", word) and word[:2] in options:  # -nX
            return repr(word[2:])
    return "something else"


# What the shell offers after Tab where a word is one of a few: cheap, without a library of ours that is heavy.
#
# `evergrad --install-completion` puts it into bash, zsh or fish; files and folders are the shell's own.

_OPTIONS = ("--install-completion", "--show-completion")
_SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")


def check_shell(words: Sequence[str]) -> None:
    """`UsageError` if completion is asked for in a shell that it is not made for; the parser has no next step then."""
    if not words or words[0] not in _OPTIONS:
        return
    import shellingham  # type: ignore[import-untyped]

    try:
        shell = str(shellingham.detect_shell()[0])
    except shellingham.ShellDetectionFailure:
        shell = ""
    if shell not in _SHELLS:
        found = shell or "none"
        raise UsageError(f"{words[0]}: expected to be started by bash, zsh or fish, found {found}. Start one of them.")


def complete_words(*words: str) -> Callable[[str], list[str]]:
    """Offers those of some words that begin as typed.

    >>> complete_words("rollback", "forward", "restart")("r")
    ['rollback', 'restart']
    """

    def offer(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return offer


def complete_studies(incomplete: str) -> list[str]:
    """Offers the studies of the gallery; a plan in a file is the shell's to offer."""
    names = [entry.name for entry in resources.files("evergrad").joinpath("study", "gallery").iterdir()]
    return sorted(name[:-5] for name in names if name.endswith(".toml") and name.startswith(incomplete))
