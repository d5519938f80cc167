"""A group of ranks as its worker sees it: warm processes that are joined in one torch.distributed group.

    with RankGroup(4) as group:
        answers = group.call("module:function", folder, work)      # on every rank, at the same time

`call` returns every rank's answer. A rank that dies, or whose function raises, spoils the group: what the others wait
for will not come, so all are ended, and the error says which rank it was and how it ended. A new group starts in a
blink, from the same nursery.
"""

from __future__ import annotations

import itertools
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

from evergrad.errors import StudyError
from evergrad.records import Json
from evergrad.study.executors.worker_process import ONE_THREAD
from evergrad.study.trials import how_it_ended

# The nursery as its worker sees it: forks ranks, ends them, and says what became of each.

START_S = 300.0
"""Importing torch from a slow file system takes minutes; longer than this is a start that hangs."""

# Not -m: see the workers' processes.
_TEND = "import sys; from evergrad.study.rank_process import tend; tend(int(sys.argv[1]))"
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


_NEWS_S = 1.0
"""How long the news of a death may take: an error of another rank, whose connection broke, may be heard of first."""
_NUMBERS = itertools.count()


class RankGroup:
    """So many ranks, from its making until `end`. Not for several threads."""

    def __init__(
        self,
        ranks: int,
        *,
        device: str = "cpu",
        pinned: bool = False,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        """`pinned`: each rank on one of this process's cores, in turn. `folder`: where they meet, for a while.

        `RankLost` if one dies before all are there; `StudyError` if one cannot join.
        """
        self.ranks = ranks
        self.device = device
        self.is_over = False
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.TemporaryDirectory(prefix="evergrad-ranks-", dir=folder, ignore_cleanup_errors=True)
        self._links: list[socket.socket] = []
        self._heard = [bytearray() for _ in range(ranks)]
        self._numbers = [next(_NUMBERS) for _ in range(ranks)]
        self._nursery = Nursery.present()
        try:
            self._fork()
            cores = sorted(os.sched_getaffinity(0)) if pinned else []
            for rank, link in enumerate(self._links):
                hello: dict[str, Json] = {
                    "rank": rank,
                    "ranks": ranks,
                    "store": str(Path(self._folder.name) / "store"),
                    "device": device,
                    "cores": [cores[rank % len(cores)]] if cores else [],
                    # On this machine alone: gloo would ask a name server for this machine's own name.
                    "environment": {"GLOO_SOCKET_IFNAME": "lo", **(environment or {})},
                }
                _send(link, hello)
            for rank, answer in enumerate(self._collect(START_S, None)):
                assert answer is not None
                if "broken" in answer:
                    raise StudyError(f"rank {rank} of {ranks} cannot start: {answer['broken']}")
        except BaseException:
            self.end()
            raise

    def _fork(self) -> None:
        """A process for each rank, and a link to it."""
        theirs = []
        try:
            for _ in range(self.ranks):
                ours, other = socket.socketpair()
                ours.setblocking(False)
                self._links.append(ours)
                theirs.append(other)
            self._nursery.fork(self._numbers, theirs)
        finally:
            for link in theirs:  # or nobody would hear that a rank has closed its own
                link.close()

    def call(
        self,
        function: str,
        folder: Path,
        work: Mapping[str, Json] | Callable[[int], Mapping[str, Json]],
        *,
        limit_s: float | None = None,
        is_last: Callable[[dict[str, Any]], bool] | None = None,
    ) -> list[dict[str, Any] | None]:
        """Every rank's answer. `is_last` tells of an answer that the others will not follow: then the group is ended,
        and theirs are None.

        `RankLost` if a rank dies or the limit passes; `StudyError` if the function raises an error of its own.
        """
        assert not self.is_over, "the group has ended"
        try:
            for rank, link in enumerate(self._links):
                told = work(rank) if callable(work) else work
                _send(link, {"call": function, "folder": str(folder), "work": dict(told)})
            answers = self._collect(limit_s, is_last)
        except BaseException:
            self.end()
            raise
        for answer in answers:
            if answer is not None and "broken" in answer:
                self.end()
                raise StudyError(str(answer["broken"]))
        return [None if answer is None else answer["result"] for answer in answers]

    def pids(self) -> list[int]:
        """The ranks' processes."""
        return [self._nursery.pid(number) for number in self._numbers]

    def check_alive(self, wait_s: float) -> None:
        """`RankLost` if a rank has died, or does within that time."""
        number = self._nursery.first_ended(self._numbers, wait_s)
        if number is not None:
            raise RankLost(self._numbers.index(number), self._nursery.how(number))

    def end(self) -> None:
        """End all ranks, whatever they are at; may be called twice."""
        if self.is_over:
            return
        self.is_over = True
        self._nursery.kill(self._numbers)
        for link in self._links:
            link.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.end()

    def _collect(
        self, limit_s: float | None, is_last: Callable[[dict[str, Any]], bool] | None
    ) -> list[dict[str, Any] | None]:
        """One answer of every rank; a broken one is the last."""
        answers: list[dict[str, Any] | None] = [None] * self.ranks
        until = None if limit_s is None else monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            for rank, link in enumerate(self._links):
                selector.register(link, selectors.EVENT_READ, rank)
            while any(answer is None for answer in answers):
                left = None if until is None else until - monotonic()
                if left is not None and left <= 0:
                    raise RankLost(answers.index(None), f"did not answer within {limit_s:g} s")
                for key, _ in selector.select(left):
                    rank = int(key.data)
                    line = self._line(rank)
                    if line is None:
                        continue
                    answers[rank] = answer = json.loads(line)
                    result = answer.get("result")
                    if "broken" in answer:
                        self.check_alive(_NEWS_S)
                    if "broken" in answer or (is_last is not None and result is not None and is_last(result)):
                        self.end()
                        return answers
        return answers

    def _line(self, rank: int) -> bytes | None:
        """The next line of a rank, if it is whole; `RankLost` if none will come."""
        heard = self._heard[rank]
        with suppress(BlockingIOError):
            try:
                part = self._links[rank].recv(_READ)
            except ConnectionResetError:
                part = b""
            if not part:
                raise RankLost(rank, self._nursery.how(self._numbers[rank]))
            heard += part
        line, end, rest = heard.partition(b"\n")
        if not end:
            return None
        self._heard[rank] = rest
        return bytes(line)


def _send(link: socket.socket, told: Mapping[str, Json]) -> None:
    link.setblocking(True)
    with suppress(BrokenPipeError, ConnectionResetError):  # who has died is heard of when it does not answer
        link.sendall(json.dumps(told).encode() + b"\n")
    link.setblocking(False)


# The group of ranks that a worker keeps warm between trials; one at a time, since idle ranks hold memory.

_kept: dict[tuple[int, str, bool], RankGroup] = {}


def warm_group(ranks: int, device: str, *, pinned: bool = False, folder: Path | None = None) -> RankGroup:
    """The group of that kind: the one that is there, or a new one in its place."""
    key = ranks, device, pinned
    found = _kept.get(key)
    if found is None or found.is_over:
        end_groups()
        found = _kept[key] = RankGroup(ranks, device=device, pinned=pinned, folder=folder)
    return found


def end_groups() -> None:
    """End all ranks that this process keeps warm."""
    for group in _kept.values():
        group.end()
    _kept.clear()
