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
from typing import IO

_REAPER = Path(__file__).with_name("reaper.py")
_LONGEST_LINE = 1 << 20
_ERRORS_KEPT = 1 << 14
_CHUNK = 1 << 16
_GRACE_S = 10.0
"""How long what was killed may take to be gone."""


@dataclass(frozen=True, slots=True)
class ProgramExit:
    """How a program ended."""

    seconds: float
    code: int | None = None
    """Its exit code; below zero, the signal that ended it; None: it was ended by us, or never began."""
    timed_out: bool = False
    stopped_early: bool = False
    """Whoever heeded its lines needed no more."""
    start_error: str = ""
    """Why it could not be started."""
    stderr_lines: tuple[str, ...] = ()
    """The last lines of its stderr, without empty ones."""


class LineSplitter:
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
) -> ProgramExit:
    """Run a program to its end, and give `heed` each line that it prints; once that says True, the program is ended.

    No shell. Whatever the program has started is gone when this returns, or when this process dies.
    """
    began = monotonic()
    with ExitStack() as stack:
        line, far_end = (stack.enter_context(end) for end in socket.socketpair())
        try:
            reaper = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_REAPER), str(far_end.fileno()), *words],
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
            return ProgramExit(
                monotonic() - began, start_error=f"{error.filename or words[0]}: {error.strerror or error}"
            )
        far_end.close()
        stack.callback(_wait, reaper)
        stack.callback(line.close)  # comes before the wait, and ends a program that is left in the middle
        assert reaper.stdout is not None
        assert reaper.stderr is not None
        out, errors = stack.enter_context(reaper.stdout), stack.enter_context(reaper.stderr)
        hearing = _ProgramMonitor(line, out, errors, heed, began + limit_s if limit_s else None)
        hearing.run()
    return hearing.program_exit(words[0], monotonic() - began)


class _ProgramMonitor:
    """What a program says until nothing of it is left, and whether we ended it."""

    def __init__(
        self,
        line: socket.socket,
        out: IO[bytes],
        errors: IO[bytes],
        heed: Callable[[str], bool],
        deadline: float | None,
    ) -> None:
        """`line` is the reaper's: how the program ended comes there, and shutting it down ends the program."""
        self._reaper_socket, self._out, self._errors, self._on_line, self._deadline = line, out, errors, heed, deadline
        self._lines, self._stderr, self._reaper_status = LineSplitter(), b"", b""
        self._enough = self._overtime = self._closing = False

    def run(self) -> None:
        """Until all has been heard, or what was killed is not gone in time."""
        with selectors.DefaultSelector() as selector:
            for stream in (self._out, self._errors, self._reaper_socket):
                selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                left = None if self._deadline is None else max(0.0, self._deadline - monotonic())
                for key, _ in selector.select(left):
                    data = _read(key.fd)
                    if not data:
                        selector.unregister(key.fileobj)
                    self._handle_data(key.fileobj, data)
                if self._deadline is not None and monotonic() >= self._deadline:
                    if self._closing:
                        break  # something cannot be killed: it is not waited for
                    self._overtime = True
                    self._end()
        if not self._ended_by_us:
            self._enough = self._on_line(self._lines.rest())

    def program_exit(self, program: str, seconds: float) -> ProgramExit:
        """How it ended, after so long."""
        word, _, rest = self._reaper_status.decode("utf-8", "replace").partition(" ")
        lines = self._stderr.decode("utf-8", "replace").splitlines()
        return ProgramExit(
            seconds=seconds,
            code=int(rest) if word == "exit" and not self._ended_by_us else None,
            timed_out=self._overtime,
            stopped_early=self._enough,
            start_error="" if word == "exit" or self._ended_by_us else f"{program}: {rest or 'its reaper is lost'}",
            stderr_lines=tuple(text.strip() for text in lines if text.strip()),
        )

    @property
    def _ended_by_us(self) -> bool:
        return self._enough or self._overtime

    def _handle_data(self, stream: object, data: bytes) -> None:
        if stream is self._reaper_socket:
            self._reaper_status += data
            self._give_grace()  # it is over, and what it left is being ended
        elif stream is self._errors:
            self._stderr = (self._stderr + data)[-_ERRORS_KEPT:]
        elif not self._ended_by_us and any(map(self._on_line, self._lines.feed(data))):
            self._enough = True
            self._end()

    def _end(self) -> None:
        """Have the program ended."""
        with suppress(OSError):
            self._reaper_socket.shutdown(socket.SHUT_WR)
        self._give_grace()

    def _give_grace(self) -> None:
        self._closing, self._deadline = True, monotonic() + _GRACE_S


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, _CHUNK)
    except ConnectionError:
        return b""


def _wait(reaper: subprocess.Popen[bytes]) -> None:
    with suppress(subprocess.TimeoutExpired):
        reaper.wait(_GRACE_S)
