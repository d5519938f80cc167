"""One worker process as its runner sees it: how it is started, spoken to and ended, and the log of what it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from evergrad._forkserver import describe_exit, ended, kill_group
from evergrad._wire import Garbled
from evergrad.errors import FileAccessError
from evergrad.study.executors.base import Task
from evergrad.study.executors.worker import LONGEST_ANSWER

# Not -m: the module may have been imported with its packages, and would be run a second time.
_SERVE = "import sys; from evergrad.study.executors.worker import serve; serve(*map(int, sys.argv[1:]))"
_LARGEST_LOG = 1 << 20
_READ = 1 << 16


class WorkerLog:
    """What a worker and those after it in its place print: the latest of it, so that it never fills a disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Appending: after a cut, what comes next is written at the new end.
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise FileAccessError(path, f"cannot be written: {error.strerror}") from error

    def trim(self) -> None:
        """Keep the later half, once it is too long."""
        size = os.fstat(self.descriptor).st_size
        if size > _LARGEST_LOG:
            kept = os.pread(self.descriptor, _LARGEST_LOG // 2, size - _LARGEST_LOG // 2)
            os.ftruncate(self.descriptor, 0)
            os.write(self.descriptor, b"[...]" + kept)

    def last_lines(self, count: int = 3) -> str:
        """The last lines with something in them, as one."""
        size = os.fstat(self.descriptor).st_size
        text = os.pread(self.descriptor, 2_000, max(0, size - 2_000)).decode(errors="replace")
        return " | ".join([line.strip() for line in text.splitlines() if line.strip()][-count:])

    def close(self) -> None:
        """Close the file; it stays."""
        os.close(self.descriptor)


class WorkerProcess:
    """Starts with its making; `end` must be called."""

    def __init__(
        self, number: int, folder: Path, perform: str, log: WorkerLog, environment: Mapping[str, str], until: float
    ) -> None:
        self.number = number
        self.log = log
        self.is_ready = False
        self.task: Task | None = None
        self.until = until
        """When its task, or its start, is over its limit."""
        self._incoming = bytearray()
        hello = {"folder": str(folder), "perform": perform, "path": sys.path}
        self._outgoing = bytearray(json.dumps(hello).encode() + b"\n")
        theirs_in, self.tasks = os.pipe()
        self.answers, theirs_out = os.pipe()
        lifeline, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                # -P: the folder in which a study is started is not where we find our own modules.
                [sys.executable, "-P", "-c", _SERVE, str(theirs_in), str(theirs_out), str(lifeline)],
                stdin=subprocess.DEVNULL,
                stdout=log.descriptor,
                stderr=log.descriptor,
                pass_fds=(theirs_in, theirs_out, lifeline),  # and no others: not the lock of the folder
                env=dict(environment),
                start_new_session=True,  # Ctrl-C is for the runner, and what the work starts is in this group
            )
        except BaseException:
            self._close()
            raise
        finally:
            for descriptor in (theirs_in, theirs_out, lifeline):
                os.close(descriptor)
        os.set_blocking(self.tasks, False)
        os.set_blocking(self.answers, False)

    @property
    def is_over(self) -> bool:
        """Whether the process has ended; it is not reaped yet, so that its group keeps its number."""
        return ended(self._process.pid) is not None

    def send(self, line: bytes = b"") -> bool:
        """Send a line, or what could not be sent before; whether all of it is on its way."""
        self._outgoing += line
        with suppress(BlockingIOError):
            while self._outgoing:
                del self._outgoing[: os.write(self.tasks, self._outgoing)]
        return not self._outgoing

    def receive(self) -> list[bytes] | None:
        """The lines that have come; None after the last."""
        read, is_open = bytearray(), True
        with suppress(BlockingIOError):
            while is_open and len(read) <= LONGEST_ANSWER:
                part = os.read(self.answers, _READ)
                read += part
                is_open = bool(part)
        if not read and not is_open:
            return None
        self._incoming += read
        *lines, self._incoming = self._incoming.split(b"\n") if b"\n" in read else [self._incoming]
        if len(self._incoming) > LONGEST_ANSWER:
            raise Garbled(f"sent more than {LONGEST_ANSWER} bytes without an end")
        return [bytes(line) for line in lines]

    def end(self) -> str:
        """Kill it and all that its work has started; how it ended, if it had before."""
        # One that has closed its descriptors is past the point where a signal could change how it ends.
        kill_group(self._process.pid)
        code = self._process.wait()
        self._close()
        return f"ended with {describe_exit(code)}"

    def _close(self) -> None:
        for descriptor in (self.tasks, self.answers, self._lifeline):
            os.close(descriptor)
