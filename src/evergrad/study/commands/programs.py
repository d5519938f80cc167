"""Running a program that knows nothing of us: its lines as they come, a time limit, and nothing of it afterwards.

What a program prints is data. Lines are cut at a megabyte, bytes that are no text are replaced, of its errors the last
few kilobytes are kept; however much it prints, memory stays bounded.
"""

from __future__ import annotations

import os
import re
import selectors
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

__all__ = ["Ending", "Lines", "run_program"]

_KEEPER = Path(__file__).with_name("keeper.py")
_LONGEST_LINE = 1 << 20
_ERRORS_KEPT = 1 << 14
_CHUNK = 1 << 16
_GRACE_S = 10.0
"""How long what was killed may take to be gone."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a program ended."""

    seconds: float
    code: int | None = None
    """Its exit code; below zero, the signal that ended it; None: it was ended by us, or never began."""
    overtime: bool = False
    enough: bool = False
    """Whoever heeded its lines needed no more."""
    refusal: str = ""
    """Why it could not be started."""
    errors: tuple[str, ...] = ()
    """The last lines of its stderr, without empty ones."""


class Lines:
    """Bytes in pieces become lines of text; a carriage return ends one too, as progress bars use it."""

    def __init__(self) -> None:
        self._part = bytearray()

    def feed(self, data: bytes) -> Iterator[str]:
        """The lines that are complete by now."""
        *whole, rest = re.split(rb"[\r\n]", data)
        for piece in whole:
            self._keep(piece)
            yield self.rest()
        self._keep(rest)

    def rest(self) -> str:
        """What has come since the last line's end."""
        text = self._part.decode("utf-8", "replace")
        self._part.clear()
        return text

    def _keep(self, piece: bytes) -> None:
        self._part += piece[: max(0, _LONGEST_LINE - len(self._part))]


def run_program(
    words: Sequence[str],
    heed: Callable[[str], bool],
    *,
    folder: Path,
    environment: Mapping[str, str],
    limit_s: float | None = None,
) -> Ending:
    """Run a program to its end, and give `heed` each line that it prints; once that says True, the program is ended.

    No shell. Whatever the program has started is gone when this returns, or when this process dies.
    """
    began = monotonic()
    deadline = began + limit_s if limit_s else None
    lines, errors, told = Lines(), b"", b""
    enough = overtime = closing = False
    with ExitStack() as stack:
        line, far_end = (stack.enter_context(end) for end in socket.socketpair())
        try:
            keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_KEEPER), str(far_end.fileno()), *words],
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                pass_fds=[far_end.fileno()],
            )
        except OSError as error:
            return Ending(monotonic() - began, refusal=f"{error.filename or words[0]}: {error.strerror or error}")
        far_end.close()
        stack.callback(_wait, keeper)
        stack.callback(line.close)  # comes before the wait, and ends a program that is left in the middle
        assert keeper.stdout is not None
        assert keeper.stderr is not None
        selector = stack.enter_context(selectors.DefaultSelector())
        for stream in (keeper.stdout, keeper.stderr, line):
            stack.enter_context(stream)
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select(None if deadline is None else max(0.0, deadline - monotonic())):
                data = _read(key.fd)
                if not data:
                    selector.unregister(key.fileobj)
                if key.fileobj is line:
                    told += data
                    closing, deadline = True, monotonic() + _GRACE_S  # it is over, and what it left is being ended
                elif key.fileobj is keeper.stderr:
                    errors = (errors + data)[-_ERRORS_KEPT:]
                elif not (enough or overtime):
                    enough = any(map(heed, lines.feed(data)))
                    if enough:
                        closing, deadline = True, _end(line)
            if deadline is not None and monotonic() >= deadline:
                if closing:
                    break  # something cannot be killed: it is not waited for
                overtime = closing = True
                deadline = _end(line)
        if not (enough or overtime):
            enough = heed(lines.rest())
    word, _, rest = told.decode("utf-8", "replace").partition(" ")
    by_us = enough or overtime
    return Ending(
        seconds=monotonic() - began,
        code=int(rest) if word == "exit" and not by_us else None,
        overtime=overtime,
        enough=enough,
        refusal="" if word == "exit" or by_us else f"{words[0]}: {rest or 'whoever kept it is lost'}",
        errors=tuple(text.strip() for text in errors.decode("utf-8", "replace").splitlines() if text.strip()),
    )


def _end(line: socket.socket) -> float:
    """Have the program ended; until when that may take."""
    with suppress(OSError):
        line.shutdown(socket.SHUT_WR)
    return monotonic() + _GRACE_S


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, _CHUNK)
    except ConnectionError:
        return b""


def _wait(keeper: subprocess.Popen[bytes]) -> None:
    with suppress(subprocess.TimeoutExpired):
        keeper.wait(_GRACE_S)
