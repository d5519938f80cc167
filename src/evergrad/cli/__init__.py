"""The command line: one file a verb, in the order of the workflow, thin over the library.

Exit codes: 0 fine, 1 found something or could not judge it (`diff`, `verify`, `doctor`, `convert`), 2 usage or
unreadable input, 3 a bug of ours. A user's mistake is one line on stderr. Nothing heavy is imported before a verb runs,
so that `--help` answers at once.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated

import typer
from typer.core import TyperGroup
from typer.main import get_command

from evergrad import __version__
from evergrad.cli import checkpoints, demo, files, inject, machine, run, study
from evergrad.cli.output import check_shell, parser_line, printable, safe_streams
from evergrad.errors import EvergradError, reason

__all__ = ["app", "main"]

_VERBS = (
    *("demo", "inspect", "verify", "diff", "convert", "inject", "undo", "replay"),
    *("checkpoints", "run", "study", "timeline", "doctor", "agent"),
)


class _Interrupted(Exception):
    """Ctrl-C, under a name that the parser does not take for the end of the command."""


class _Workflow(TyperGroup):
    """Names the verbs in the order of the workflow; else those that have verbs of their own would come last."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _Interrupted from None

    def list_commands(self, ctx: object) -> list[str]:
        return list(_VERBS)


app = typer.Typer(
    name="evergrad",
    cls=_Workflow,
    help="Keep distributed PyTorch training alive through crashes and silent data corruption, "
    "and measure what both cost.",
    epilog="Exit codes: 0 fine · 1 found something (diff: they differ; doctor, verify: something is wrong; "
    "convert: something was left out, or would be) or could not judge all of it (diff, verify) · "
    "2 usage or unreadable input · 3 internal error, a bug of ours.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command("demo", epilog=demo.EPILOG)(demo.demo)
app.command("inspect", epilog=files.EPILOG_INSPECT)(files.inspect)
app.command("verify", epilog=files.EPILOG_VERIFY)(files.verify)
app.command("diff", epilog=files.EPILOG_DIFF)(files.diff)
app.command("convert", epilog=files.EPILOG_CONVERT)(files.convert)
app.command("inject", epilog=inject.EPILOG)(inject.inject)
app.command("undo", epilog=inject.EPILOG_UNDO)(inject.undo)
app.command("replay", epilog=inject.EPILOG_REPLAY)(inject.replay)
app.command("run", epilog=run.EPILOG, context_settings=run.CONTEXT)(run.run)
app.command("timeline", epilog=run.EPILOG_TIMELINE)(run.timeline)
app.command("doctor", epilog=machine.EPILOG_DOCTOR)(machine.doctor)
app.command("agent", epilog=machine.EPILOG_AGENT)(machine.agent)
app.add_typer(checkpoints.app)
app.add_typer(study.app)


def _version(asked: bool) -> None:
    if asked:
        print(f"evergrad {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Nothing happens before a verb is chosen."""


@cache
def _command() -> Callable[..., object]:
    """The parser, made once: tests and notebooks call `main` more than once."""
    return get_command(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    safe_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        check_shell(words)
        result = _command()(args=words, prog_name="evergrad", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except EvergradError as error:
        return _fail(str(error))
    except typer.Exit as exit_:
        return exit_.exit_code
    except typer.Abort:
        return _fail("stopped")
    except (_Interrupted, KeyboardInterrupt):
        return _fail("interrupted", 130)
    except BrokenPipeError:
        # Whoever read our output has enough. Python would complain again when it flushes at exit.
        _drop_output()
        return 0
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):  # the parser makes a 1 of it, which is a finding's
            raise
        _drop_output()
        return 0
    except MemoryError:
        return _fail("out of memory")
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
            return _fail(f"{'the output cannot be written: ' if _output_is_full() else ''}no space left on device")
        if isinstance(error, OSError) and error.filename is not None:  # the file system refuses: no bug of ours
            return _fail(f"{os.fsdecode(error.filename)}: {reason(error)}")
        if not hasattr(error, "format_message"):  # not a usage error of the parser's
            return _report()
        line = parser_line(error, words)
        return _fail(line) if line else 2  # no verb at all: the help has been shown


def _fail(message: str, code: int = 2) -> int:
    print(f"evergrad: {printable(message)}", file=sys.stderr)
    return code


def _report() -> int:
    """A bug of ours: everything that helps to find it, and a code that no finding has."""
    for line in traceback.format_exc().splitlines():
        print(printable(line), file=sys.stderr)
    return _fail("internal error, please report", 3)


def _output_is_full() -> bool:
    """Whether it was stdout that had no room: a file on a full disk, or /dev/full; never a terminal or a pipe."""
    try:
        there = os.fstat(sys.stdout.fileno())
        full = os.fstatvfs(sys.stdout.fileno()).f_bavail == 0 if stat.S_ISREG(there.st_mode) else False
    except (OSError, ValueError):
        return False
    if full or (stat.S_ISCHR(there.st_mode) and there.st_rdev == os.makedev(1, 7)):
        _drop_output()
        return True
    return False


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
