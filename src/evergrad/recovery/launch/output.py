"""What people see of a job: every line of every process, whose it is, and on a terminal how it stands.

All of it happens in a thread of its own. A terminal that is stopped, or a pager that does not read on, then holds the
printing processes up, as it does without a launcher, but never the launcher: a death is still noticed at once.

What processes print is also kept, unchanged, in one file for each. Who does not want to read any more (`| head`) ends
nothing; the files go on.
"""

from __future__ import annotations

import os
import select
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from evergrad.recovery.heartbeat import innermost
from evergrad.recovery.launch.processes import Child
from evergrad.timeline import Recorder
from evergrad.wording import count_of

if TYPE_CHECKING:
    from rich.live import Live


_LONGEST_LINE = 1 << 16
_CHUNK = 1 << 16
_REFRESH_S = 0.2
_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")


@dataclass(frozen=True, slots=True)
class JobStatus:
    """How a job stands."""

    step: int | None
    ranks: int
    num_ranks: int
    spares: int
    failures: int
    generation: int

    def __str__(self) -> str:
        step = "starting" if self.step is None else f"step {self.step}"
        ranks = f"{self.ranks} of {self.num_ranks} ranks"
        spares = f"{count_of(self.spares, 'spare')} waiting"
        failures = f"{count_of(self.failures, 'failure')} survived"
        return " · ".join((step, ranks, spares, failures, f"generation {self.generation}"))


@dataclass(slots=True)
class _Pipe:
    """One stream of one process, and what has come of a line that is not complete."""

    label: str
    uid: int
    is_error: bool
    log: int
    begun: bytearray = field(default_factory=bytearray)

    def lines(self, data: bytes) -> list[bytes]:
        """The lines that are complete now, without their ends; one that is too long comes in pieces."""
        self.begun += data
        *whole, rest = self.begun.split(b"\n")
        pieces = [piece for line in whole for piece in _pieces(line)]
        while len(rest) >= _LONGEST_LINE:
            pieces.append(bytes(rest[:_LONGEST_LINE]))
            del rest[:_LONGEST_LINE]
        self.begun = rest
        return pieces

    def last(self) -> list[bytes]:
        """A last line that has no end."""
        rest, self.begun = bytes(self.begun), bytearray()
        return [rest] if rest else []


class OutputRelay:
    """Passes on what processes print, from `begin` to `close`."""

    def __init__(self, logs: Path, *, all_to_stderr: bool = False, status: Callable[[], object]) -> None:
        """`status` is shown as text, on a terminal: a `JobStatus`, or whatever says how things stand."""
        self._logs, self._status = logs, status
        self._out = _Stream(sys.stderr if all_to_stderr else sys.stdout)
        self._error = _Stream(sys.stderr)
        self._selector = selectors.DefaultSelector()
        self._said: deque[str] = deque()
        self._new: deque[tuple[int, _Pipe]] = deque()
        self._here, self._there = socket.socketpair()
        self._here.setblocking(False)
        self._there.setblocking(False)
        self._selector.register(self._here, selectors.EVENT_READ)
        self._closing, self._last = False, ""
        self._live: Live | None = None
        self._thread = threading.Thread(target=self._run, name="evergrad-output", daemon=True)

    def begin(self) -> None:
        """Start to pass on, in a thread of its own; what was said before waits for this. Twice is fine."""
        if self._thread.ident is None:
            self._thread.start()

    def add(self, child: Child) -> None:
        """From now on this process too."""
        path = self._logs / f"{child.uid}.log"
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        for fd, is_error, local_state in ((child.stdout, False, log), (child.stderr, True, os.dup(log))):
            os.set_blocking(fd, False)
            self._new.append((fd, _Pipe(child.label, child.uid, is_error, local_state)))
        self._wake()

    def print_line(self, text: str) -> None:
        """A line of the launcher's own, on stderr; never waits."""
        self._said.append(text)
        self._wake()

    def close(self, last: str = "") -> None:
        """Pass on all that is left, whoever still holds a pipe open, then a last line. Twice is fine."""
        self.begin()
        if self._thread.is_alive():
            self._last, self._closing = last, True
            self._wake()
            self._thread.join()
            self._here.close()
            self._there.close()

    def _wake(self) -> None:
        with suppress(OSError):
            self._there.send(b"\0")

    def _run(self) -> None:
        if self._error.is_terminal:
            self._live = _live_line()
        try:
            while True:
                is_last = self._closing  # asked before looking: what came until then is read below
                ready = self._selector.select(0 if is_last else _REFRESH_S if self._live is not None else None)
                with suppress(BlockingIOError):
                    self._here.recv(4096)
                while self._new:
                    fd, pipe = self._new.popleft()
                    self._selector.register(fd, selectors.EVENT_READ, pipe)
                for key, _ in ready:
                    if key.data is not None:
                        self._read(key.fd, key.data)
                if is_last:
                    for key in list(self._selector.get_map().values()):
                        if key.data is not None:
                            self._drain(key.fd, key.data)
                while self._said:
                    self._print(self._error, "evergrad: ", -1, [self._said.popleft().encode()])
                if is_last:
                    if self._last:
                        self._print(self._error, "evergrad: ", -1, [self._last.encode()])
                    return
                self._refresh()
        finally:
            if self._live is not None:
                with self._terminal_may_go():
                    self._live.stop()
            self._selector.close()

    def _read(self, fd: int, pipe: _Pipe) -> bool:
        """Pass on what is there now; whether there was something."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        if data:
            self._keep(pipe, data)
        lines = pipe.lines(data) if data else pipe.last()
        if lines:
            self._print(self._error if pipe.is_error else self._out, f"[{pipe.label}] ", pipe.uid, lines)
        if not data:
            self._forget(fd, pipe)
        return bool(data)

    def _drain(self, fd: int, pipe: _Pipe) -> None:
        # What a process has written before its end is in the pipe by now. Others may hold the pipe open for long.
        limit = time.monotonic() + 1.0
        while self._read(fd, pipe) and time.monotonic() < limit:
            pass
        if fd in self._selector.get_map():
            if rest := pipe.last():
                self._print(self._error if pipe.is_error else self._out, f"[{pipe.label}] ", pipe.uid, rest)
            self._forget(fd, pipe)

    def _forget(self, fd: int, pipe: _Pipe) -> None:
        self._selector.unregister(fd)
        os.close(fd)
        if pipe.log >= 0:
            os.close(pipe.log)

    def _keep(self, pipe: _Pipe, data: bytes) -> None:
        try:
            while data and pipe.log >= 0:
                data = data[os.write(pipe.log, data) :]
        except OSError as error:
            os.close(pipe.log)
            pipe.log = -1
            self._said.append(f"the log of {pipe.label} ends here: {error.strerror}")

    def _print(self, stream: _Stream, prefix: str, uid: int, lines: list[bytes]) -> None:
        if self._live is not None and stream.is_terminal:
            from rich.text import Text

            text = Text()
            for line in lines:
                text.append(prefix, "bold" if uid < 0 else _COLOURS[uid % len(_COLOURS)])
                text.append_text(Text.from_ansi(line.decode(errors="replace"))).append("\n")
            with self._terminal_may_go():
                self._live.console.print(text, end="", soft_wrap=True, highlight=False)
            return
        head = prefix.encode()
        if complaint := stream.write(b"".join(head + line + b"\n" for line in lines)):
            self._said.append(complaint)

    def _refresh(self) -> None:
        if self._live is not None:
            from rich.text import Text

            line = Text(str(self._status()), "dim", no_wrap=True, overflow="ellipsis")
            with self._terminal_may_go():
                self._live.update(line, refresh=True)

    @contextmanager
    def _terminal_may_go(self) -> Iterator[None]:
        try:
            yield
        except OSError:  # the connection is lost, or the window closed
            self._live = None
            for stream in (self._out, self._error):
                if stream.is_terminal:
                    stream.drop()


class _Stream:
    """Standard output or error: whole lines, until nobody takes them any more."""

    def __init__(self, stream: IO[str]) -> None:
        stream.flush()
        self._name = stream.name
        self._fd: int | None = stream.fileno()
        self.is_terminal = stream.isatty()

    def drop(self) -> None:
        """Write nothing any more."""
        self._fd = None

    def write(self, data: bytes) -> str:
        """Write all of it; if this was the last that could be written, why, once."""
        while data and self._fd is not None:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # whoever has started us wants it so
                _await_writable(self._fd)
            except BrokenPipeError:
                self._fd = None
            except OSError as error:
                self._fd = None
                return f"{self._name} cannot be written any more: {error.strerror}. The logs go on."
        return ""


def _await_writable(fd: int) -> None:
    poll = select.poll()  # not select: that knows no number beyond 1023
    poll.register(fd, select.POLLOUT)
    poll.poll()


def _live_line() -> Live:
    from rich.console import Console
    from rich.live import Live

    live = Live(console=Console(stderr=True), auto_refresh=False, transient=True, redirect_stdout=False)
    live.start()
    return live


def _pieces(line: bytes | bytearray) -> list[bytes]:
    if len(line) <= _LONGEST_LINE:
        return [bytes(line)]
    return [bytes(line[start : start + _LONGEST_LINE]) for start in range(0, len(line), _LONGEST_LINE)]


# What the coordinator decides, on the timeline, and for people in a line each.

_TOGETHER = "is on node "


class EventLog:
    """Takes the coordinator's events; from any thread."""

    def __init__(self, recorder: Recorder, relay: OutputRelay, label_of: Callable[[int], str], strategy: str) -> None:
        """`label_of` is what people call a process, by its uid."""
        self._recorder, self._relay, self._label_of, self._strategy = recorder, relay, label_of, strategy
        self._deaths: dict[int, tuple[str, str]] = {}
        self.inexact = ""
        """Why the job is not what it would have been without failures, as far as its plans tell."""
        self.ended_spares: dict[int, str] = {}
        """Spares that ended while the job went on, and how, as in "spare 2 …"."""

    def expect_loss(self, uid: int, rank: int | None, how: str) -> None:
        """This process is about to be lost: where many are at once, a plan may come before the last of their deaths."""
        self._deaths[uid] = self._label_of(uid) if rank is None else f"rank {rank}", how

    def record(self, event: str, /, **fields: Any) -> None:
        """Something has happened."""
        self._recorder.record(event, **fields)
        if event == "process_lost":
            self._note_death(fields)
        elif event == "spare_ended":
            self._note_spare(fields, "ended its script")
        elif event == "plan":
            self._announce(fields)

    def _note_death(self, fields: dict[str, Any]) -> None:
        who = self._label_of(fields["uid"]) if fields["rank"] is None else f"rank {fields['rank']}"
        how = fields["how"] if "stack" in fields else f"died ({fields['how']})"
        self._deaths[fields["uid"]] = who, how
        if fields["rank"] is None:
            self._note_spare(fields, how, is_said=not fields.get("stack"))
        if fields.get("stack"):
            self._relay.print_line(f"{who} {fields['how']}; it was last seen in\n{innermost(fields['stack'])}")

    def _note_spare(self, fields: dict[str, Any], how: str, *, is_said: bool = True) -> None:
        """A process without a rank is gone, and takes nobody's place any more."""
        uid, when = fields["uid"], "before it called eg.join"
        if fields["joined"]:
            when = "while it waited" if fields["waited"] else "before its first job.batches"
        self.ended_spares[uid] = f"{self._label_of(uid)} {how} {when}"
        if is_said:
            self._relay.print_line(f"{self.ended_spares[uid]}: it takes no rank's place. See logs/{uid}.log")

    def _announce(self, fields: dict[str, Any]) -> None:
        generation, ranks = fields["generation"], count_of(len(fields["members"]), "rank")
        joined = [f"{self._label_of(uid)} joins" for uid in fields["joiners"]]
        if fields["dead"] or fields["left"] or fields["ended"]:
            left = [f"{self._label_of(uid)} has left" for uid in fields["left"]]
            left += [f"{self._label_of(uid)} has ended its script before the others" for uid in fields["ended"]]
            how = "from the newest checkpoint" if fields["restart"] else self._strategy
            what = ", ".join(self._deaths_of(fields["dead"]) + left + joined)
            self._relay.print_line(f"{what}: generation {generation} goes on with {ranks} ({how})")
        elif joined:
            self._relay.print_line(f"{', '.join(joined)}: generation {generation} goes on with {ranks}")
        if not fields["exact"] and not self.inexact:
            self.inexact = f"generation {generation} went on with {ranks}, by {self._strategy}"
            if fields["ended"]:
                ended = ", ".join(map(self._label_of, fields["ended"]))
                self.inexact += f": {ended} had ended the script before the others"

    def _deaths_of(self, uids: list[int]) -> list[str]:
        """One text for each way to be lost: a node that is gone has many ranks."""
        found: dict[tuple[str, int], list[str]] = {}
        for uid in uids:
            who, how = self._deaths.get(uid, (f"process {uid}", "died"))
            found.setdefault((how, -1 if how.startswith(_TOGETHER) else uid), []).append(who)
        return [
            f"{', '.join(whos)} {how if len(whos) == 1 else how.replace('is', 'are', 1)}"
            for (how, _), whos in found.items()
        ]
