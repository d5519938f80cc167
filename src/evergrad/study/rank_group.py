"""A group of ranks as its worker sees it: warm processes that are joined in one torch.distributed group.

    with RankGroup(4) as group:
        answers = group.call("module:function", folder, work)      # on every rank, at the same time

`call` returns every rank's answer. A rank that dies, or whose function raises, spoils the group: what the others wait
for will not come, so all are ended, and the error says which rank it was and how it ended. A new group starts in a
blink, from the same forkserver.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

from evergrad._forkserver import ONE_THREAD, START_S, Forkserver, ForkserverChild, ForkserverLost, describe_exit
from evergrad.errors import StudyError
from evergrad.records import Json

_NEEDED = ("evergrad.study.rank_process", "evergrad.study.tasks", "evergrad.study.checkpoint_cost")
"""What ranks import, once for all of them."""
_SERVE_RANK = "evergrad.study.rank_process:serve_rank"
_WITH_SERVER = "ended with its forkserver"
_NEWS_S = 1.0
"""How long the news of a death may take: an error of another rank, whose connection broke, may be heard of first."""
_READ = 1 << 16


class GroupRankLost(Exception):
    """A rank has died, or the group did not answer in time."""

    def __init__(self, rank: int, how: str) -> None:
        super().__init__(f"rank {rank} {how}")
        self.rank, self.how = rank, how


_servers: list[Forkserver] = []


def _forkserver() -> Forkserver:
    """This process's forkserver, started with the first group; or a new one, if that has ended."""
    if not (_servers and _servers[0].is_there):
        path = os.pathsep.join(part for part in sys.path if part)
        try:
            _servers[:] = [Forkserver(*_NEEDED, environment={**os.environ, **ONE_THREAD, "PYTHONPATH": path})]
        except ForkserverLost:
            raise StudyError("the process that ranks are forked from cannot start: see what it printed") from None
    return _servers[0]


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

        `GroupRankLost` if one dies before all are there; `StudyError` if one cannot join.
        """
        self.ranks = ranks
        self.device = device
        self.is_over = False
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.TemporaryDirectory(prefix="evergrad-ranks-", dir=folder, ignore_cleanup_errors=True)
        self._links: list[socket.socket] = []
        self._buffers = [bytearray() for _ in range(ranks)]
        self._processes: list[ForkserverChild] = []
        self._server = _forkserver()
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
        for rank in range(self.ranks):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            self._links.append(ours)
            with theirs:  # closed here, or nobody would hear that the rank has closed its own
                try:
                    child = self._server.fork(_SERVE_RANK, {}, [theirs.fileno()])
                except ForkserverLost:
                    raise GroupRankLost(rank, _WITH_SERVER) from None
            self._processes.append(child)

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

        `GroupRankLost` if a rank dies or the limit passes; `StudyError` if the function raises an error of its own.
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
        return [process.pid for process in self._processes]

    def check_alive(self, wait_s: float) -> None:
        """`GroupRankLost` if a rank has died, or does within that time."""
        try:
            found = self._server.first_ended(self._processes, wait_s)
        except ForkserverLost:
            raise GroupRankLost(0, _WITH_SERVER) from None
        if found is not None:
            rank = self._processes.index(found)
            raise GroupRankLost(rank, self._how(rank))

    def end(self) -> None:
        """End all ranks, whatever they are at; may be called twice."""
        if self.is_over:
            return
        self.is_over = True
        for process in self._processes:
            process.kill()
        with suppress(ForkserverLost):
            for process in self._processes:
                process.wait()
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
                    raise GroupRankLost(answers.index(None), f"did not answer within {limit_s:g} s")
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

    def _how(self, rank: int) -> str:
        try:
            return f"ended with {describe_exit(self._processes[rank].wait())}"
        except ForkserverLost:
            return _WITH_SERVER

    def _line(self, rank: int) -> bytes | None:
        """The next line of a rank, if it is whole; `GroupRankLost` if none will come."""
        heard = self._buffers[rank]
        with suppress(BlockingIOError):
            try:
                part = self._links[rank].recv(_READ)
            except ConnectionResetError:
                part = b""
            if not part:
                raise GroupRankLost(rank, self._how(rank))
            heard += part
        line, end, rest = heard.partition(b"\n")
        if not end:
            return None
        self._buffers[rank] = rest
        return bytes(line)


def _send(link: socket.socket, told: Mapping[str, Json]) -> None:
    link.setblocking(True)
    with suppress(BrokenPipeError, ConnectionResetError):  # who has died is heard of when it does not answer
        link.sendall(json.dumps(told).encode() + b"\n")
    link.setblocking(False)


# The group of ranks that a worker keeps warm between trials; one at a time, since idle ranks hold memory.

_cached_groups: dict[tuple[int, str, bool], RankGroup] = {}


def cached_group(ranks: int, device: str, *, pinned: bool = False, folder: Path | None = None) -> RankGroup:
    """The group of that kind: the one that is there, or a new one in its place."""
    key = ranks, device, pinned
    found = _cached_groups.get(key)
    if found is None or found.is_over:
        end_cached_groups()
        found = _cached_groups[key] = RankGroup(ranks, device=device, pinned=pinned, folder=folder)
    return found


def end_cached_groups() -> None:
    """End all ranks that this process keeps warm."""
    for group in _cached_groups.values():
        group.end()
    _cached_groups.clear()
