"""The nursery as its worker sees it: forks ranks, ends them, and says what became of each."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import wait
from time import monotonic
from typing import Any

from evergrad.errors import StudyError
from evergrad.study.endings import how_it_ended
from evergrad.study.executors.process import ONE_THREAD

START_S = 300.0
"""Importing torch from a slow file system takes minutes; longer than this is a start that hangs."""

# Not -m: see the workers' processes.
_TEND = "import sys; from evergrad.study.ranks.nursery import tend; tend(int(sys.argv[1]))"
_READ = 1 << 16


class RankLost(Exception):
    """A rank has died, or the group did not answer in time."""

    def __init__(self, rank: int, how: str) -> None:
        super().__init__(f"rank {rank} {how}")
        self.rank, self.how = rank, how


class Nursery:
    """This process's nursery; started with the first group. Ranks are known by numbers that are used once."""

    _one: Nursery | None = None

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # a message at a time
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _TEND, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        self._owner = os.getpid()
        self._is_gone = False
        self._heard = bytearray()
        self._pids: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        self._link.settimeout(START_S)
        try:
            self._read()
        except RankLost:
            raise StudyError("the process that ranks are forked from cannot start: see what it printed") from None

    @classmethod
    def present(cls) -> Nursery:
        """The one that is there, or a new one."""
        one = cls._one
        if one is None or one._is_gone or one._owner != os.getpid() or one._process.poll() is not None:
            cls._one = one = cls()
        return one

    def fork(self, numbers: list[int], links: list[socket.socket]) -> None:
        """Fork a rank for each of these."""
        text = json.dumps({"fork": numbers}).encode()
        try:
            socket.send_fds(self._link, [text], [link.fileno() for link in links])
        except OSError:
            raise self._gone() from None
        while not all(number in self._pids or number in self._ended for number in numbers):
            self._note(self._read())

    def kill(self, numbers: list[int]) -> None:
        """End these ranks, and wait until they have."""
        with suppress(RankLost, OSError):
            left = [number for number in numbers if number in self._pids and number not in self._ended]
            if left:
                self._link.sendall(json.dumps({"kill": left}).encode())
            while any(number not in self._ended for number in left):
                self._note(self._read())

    def pid(self, number: int) -> int:
        """Of a rank."""
        return self._pids[number]

    def first_ended(self, numbers: list[int], wait_s: float) -> int | None:
        """One of these that has ended, or does within that time."""
        until = monotonic() + wait_s
        while not any(number in self._ended for number in numbers):
            left = until - monotonic()
            if left <= 0 or not (b"\n" in self._heard or wait([self._link], left)):
                return None
            self._note(self._read())
        return next(number for number in numbers if number in self._ended)

    def how(self, number: int) -> str:
        """How a rank has ended."""
        try:
            while number not in self._ended:
                self._note(self._read())
        except RankLost:
            return "died with its nursery"
        return how_it_ended(self._ended[number])

    def _gone(self) -> RankLost:
        self._is_gone = True
        return RankLost(0, "died with its nursery")

    def _note(self, told: dict[str, Any]) -> None:
        if "born" in told:
            self._pids[told["born"]] = told["pid"]
        if "ended" in told:
            self._ended[told["ended"]] = told["status"]

    def _read(self) -> dict[str, Any]:
        while b"\n" not in self._heard:
            try:
                part = self._link.recv(_READ)
            except OSError:
                part = b""
            if not part:
                raise self._gone()
            self._heard += part
        line, _, self._heard = self._heard.partition(b"\n")
        found: dict[str, Any] = json.loads(bytes(line))
        return found
