"""How a trainer reaches whoever finishes its versions: the node's agent, or a thread of its own."""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from evergrad._files import is_locked, locked, removal_advice
from evergrad.checkpoint.agent.agent import START_LOCK, agent_process, end_agent, socket_address, timeout_seconds
from evergrad.checkpoint.agent.events import Alive, Attached, CapturesFinished, Refused, UnfinishedVersion, read_event
from evergrad.checkpoint.agent.pipeline import ChainModule, Pipeline, describe_module
from evergrad.checkpoint.arena import ArenaTicket, open_files_hint
from evergrad.checkpoint.pending import SaveTracker
from evergrad.checkpoint.run_folder import AGENT_LOCK, RunFolder, arena_folder, remove_orphans
from evergrad.checkpoint.version import Version
from evergrad.errors import AgentError, CheckpointError

_log = logging.getLogger(__name__)
_START_PATIENCE_S = 60.0
_ASK_AGAIN_S = 2.0
_SAY_SO_AFTER_S = 10.0
_TOO_MANY = 5
_TOO_SHORT_S = 0.2  # an agent that lives no longer than this is not replaced in a hurry


class PipelineClient(ABC):
    """The trainer's side of finishing versions. What comes of them goes to the board."""

    @abstractmethod
    def attach(self, rank: int, attempt: int, tiers: Sequence[dict[str, Any]]) -> None:
        """Begin an attempt as a rank."""

    @abstractmethod
    def submit(self, rank: int, index: int, ticket: ArenaTicket) -> None:
        """An arena was captured, with that ticket. Returns at once."""

    @abstractmethod
    def report_failed_capture(
        self, version: Version, rank: int, world_size: int, tiers: Sequence[str], why: str
    ) -> None:
        """This rank could not capture a version: no other one shall wait for it. Returns at once."""

    @abstractmethod
    def await_finished(
        self, rank: int, slow: Sequence[dict[str, Any]] = (), *, commit: bool = False, again: str | None = None
    ) -> Sequence[UnfinishedVersion]:
        """Wait until all that was captured on this node can be found in a tier, or could not be put there.

        `slow` tiers are looked at first. With `commit`, when all nodes have settled, instead until every version that
        is whole in them is committed. Each new value of `again` has what failed before tried once more. Returns what
        is known here of captured versions, and why they could not be finished.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go; what is captured is finished all the same."""

    @abstractmethod
    def reclaim_arenas(self) -> None:
        """After the arenas were let go of: give back what nobody needs, if nobody else does."""


class ThreadClient(PipelineClient):
    """The same chain in a thread of the trainer: no other process, and nothing goes on when this one dies."""

    def __init__(self, job: RunFolder, tracker: SaveTracker, modules: Sequence[ChainModule]) -> None:
        self._run_folder, self._tracker, self._modules = job, tracker, modules
        self._pipeline: Pipeline | None = None
        self._rank = -1

    def attach(self, rank: int, attempt: int, tiers: Sequence[dict[str, Any]]) -> None:
        self._pipeline_of(rank).attach(attempt, tiers, self._modules)

    def submit(self, rank: int, index: int, ticket: ArenaTicket) -> None:
        assert self._pipeline is not None, "attach comes first"
        self._pipeline.submit(rank, index, ticket.generation, ticket)

    def report_failed_capture(
        self, version: Version, rank: int, world_size: int, tiers: Sequence[str], why: str
    ) -> None:
        if self._pipeline is not None:
            self._pipeline.fail(version, rank, world_size, tiers, why)

    def await_finished(
        self, rank: int, slow: Sequence[dict[str, Any]] = (), *, commit: bool = False, again: str | None = None
    ) -> Sequence[UnfinishedVersion]:
        is_new = self._pipeline is None or rank != self._rank  # it tries everything when it is made
        engine = self._pipeline_of(rank)
        if commit:
            engine.commit_complete(slow)
        else:
            engine.await_finished(slow, again=None if is_new else again)
        return engine.unfinished()

    def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()

    def reclaim_arenas(self) -> None:
        if self._pipeline is not None:
            self._pipeline.reclaim_arenas()
            remove_orphans()

    def _pipeline_of(self, rank: int) -> Pipeline:
        if self._pipeline is None or rank != self._rank:
            self.close()
            _kill_stopped_agent(arena_folder(self._run_folder))
            self._rank, self._pipeline = rank, Pipeline(self._run_folder, self._tracker.handle_event, rank=rank)
            self._pipeline.resume_unfinished()
        return self._pipeline


def _kill_stopped_agent(folder: Path) -> None:
    """End an agent that stays stopped: it would go on one day with arenas that have been overwritten."""
    timeout_s, waited_s, pause = timeout_seconds(), 0.0, 0.05
    while (agent := agent_process(folder)) is not None and agent.is_stopped and is_locked(folder / AGENT_LOCK):
        if waited_s >= timeout_s:
            if not end_agent(agent):
                raise AgentError(f"the agent (process {agent[0]}) is stopped, and cannot be ended: end it by hand")
            _log.warning("the agent (process %d) stays stopped. It was ended: this process does its work", agent[0])
            return
        time.sleep(pause)
        waited_s += pause


class AgentClient(PipelineClient):
    """A connection to the node's agent, which is started if there is none, and again if it dies."""

    def __init__(self, job: RunFolder, tracker: SaveTracker, modules: Sequence[ChainModule], linger_s: float) -> None:
        self._run_folder, self._tracker, self._linger_s = job, tracker, linger_s
        self._modules = [describe_module(module) for module in modules]
        self._folder = arena_folder(job)
        self._lock = threading.Condition()
        self._attach: dict[str, Any] | None = None
        self._captured: dict[int, dict[str, Any]] = {}
        """The last message on each arena."""
        self._closed = threading.Event()
        self._timeout_s = timeout_seconds()
        self._heard = 0
        """Lines that agents have said."""
        self._answered = threading.Event()
        """Set when an agent has answered `attach`."""
        self._ended: int | None = None
        """The process of an agent that this link has ended."""
        self._question = self._again = 0
        self._socket: socket.socket | None = self._connect()
        _links.add(self)
        threading.Thread(target=self._listen, name="evergrad-agent-link", daemon=True).start()
        threading.Thread(target=self._watch, name="evergrad-agent-watch", daemon=True).start()

    pid: int | None = None
    """The agent's process, once it has answered."""
    _unheard = False
    """True if the agent says nothing, and cannot be ended."""

    def attach(self, rank: int, attempt: int, tiers: Sequence[dict[str, Any]]) -> None:
        self._attach = {
            "op": "attach", "attempt": attempt, "tiers": list(tiers), "modules": self._modules,
            "run_dir": str(self._run_folder.run_dir),
        }  # fmt: skip
        self._answered.clear()
        self._send(self._attach)
        # An agent that has just been started takes all it finds for shards of an earlier process: unverified, and
        # finished without modules. Capture nothing before it knows of this process; one that is stuck is not awaited.
        self._answered.wait(self._timeout_s)

    def submit(self, rank: int, index: int, ticket: ArenaTicket) -> None:
        # Never waits: a trainer must not stand still because an agent died. The next one is told, and finds it anyway.
        with self._lock:
            self._captured[index] = {"op": "captured", "rank": rank, "index": index, "generation": ticket.generation}
            if self._socket is not None:
                with suppress(OSError):
                    self._socket.sendall(_line(self._captured[index]))

    def report_failed_capture(
        self, version: Version, rank: int, world_size: int, tiers: Sequence[str], why: str
    ) -> None:
        place = {"step": version.step, "attempt": version.attempt, "rank": rank, "world_size": world_size}
        with self._lock, suppress(OSError):
            if self._socket is not None:
                self._socket.sendall(_line({"op": "failed", **place, "tiers": list(tiers), "why": why}))

    def await_finished(
        self, rank: int, slow: Sequence[dict[str, Any]] = (), *, commit: bool = False, again: str | None = None
    ) -> Sequence[UnfinishedVersion]:
        self._question += 1
        question = self._question
        asked = {"op": "settle", "question": question, "slow": list(slow), "commit": commit, "again": again}
        asked["run_dir"] = str(self._run_folder.run_dir)
        self._send(asked)
        waited_s, said_s = 0.0, _SAY_SO_AFTER_S
        while not self._tracker.wait(lambda: self._tracker.is_answered(question), _ASK_AGAIN_S):
            self._send(asked)  # the agent that was asked may be gone
            waited_s += _ASK_AGAIN_S
            if waited_s >= said_s:
                said_s *= 2
                what = "commits what is whole" if commit else "finishes what was captured"
                _log.warning("rank %d: waiting for %.0f s while agent %s %s", rank, waited_s, self.pid or "", what)
        return self._tracker.unfinished()

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            self._answered.set()
            self._hang_up()
            self._lock.notify_all()

    def reclaim_arenas(self) -> None:
        """The agent does, when it leaves."""

    def drop(self) -> None:
        """In a forked child: the connection is the parent's."""
        if self._socket is not None:
            with suppress(OSError):
                os.close(self._socket.detach())
        self._closed.set()

    def _hang_up(self) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._socket = None

    def _send(self, message: dict[str, Any]) -> None:
        """Send, if need be after the agent was started again.

        A message that reached an agent which then dies is not lost either: the next one finds the arena's ticket.
        """
        with self._lock:
            while not self._closed.is_set():
                if self._socket is not None:
                    try:
                        self._socket.sendall(_line(message))
                        return
                    except OSError:
                        self._hang_up()  # the listener notices too, and starts another agent
                if not self._lock.wait(_START_PATIENCE_S):
                    raise AgentError(
                        f"the agent of job {self._run_folder.id} does not come back: see {self._log_path()}"
                    )
            if self._closed.is_set():
                raise CheckpointError("this Checkpointer is closed")

    def _listen(self) -> None:
        """Pass on what the agent says; when it is gone, start another."""
        silent = 0
        while not self._closed.is_set():
            since = time.monotonic()
            with self._lock:
                connection = self._socket
            if connection is not None:
                with suppress(OSError, ValueError), connection.makefile("rb") as lines:
                    for line in lines:
                        self._heard += 1
                        if silent >= _TOO_MANY or self._unheard:
                            self._tracker.set_unavailable(None)
                        silent, self._unheard = 0, False
                        event = read_event(line)
                        if isinstance(event, Attached | Refused):
                            self._answered.set()
                        if isinstance(event, Attached | Alive):
                            self.pid = event.pid
                            continue
                        self._tracker.handle_event(event)
                        if (
                            isinstance(event, CapturesFinished)
                            and event.question == self._again
                            and self._attach is not None
                        ):
                            self._tracker.fail_retired_versions([tier["kind"] for tier in self._attach["tiers"]])
            if self._closed.is_set():
                return
            silent += 1
            if self.pid is not None and self.pid != self._ended:
                self._tracker.report(f"the agent (process {self.pid}) is gone: starting another")
            elif (
                self.pid is None and silent >= _TOO_MANY
            ):  # one that never answered was leaving when we came; several cannot all have been
                why = (
                    f"agents of job {self._run_folder.id} start and end again without an answer: see {self._log_path()}"
                )
                self._tracker.report(why)
                self._tracker.set_unavailable(why)
            if time.monotonic() - since < _TOO_SHORT_S and self._closed.wait(_TOO_SHORT_S):
                return
            self._restart()

    def _watch(self) -> None:
        """End an agent that says nothing for too long: it is stopped, or hangs. The listener then starts another.

        Pauses are counted, and not the clock read: after this process was stopped itself, the agent gets its time.
        """
        pause = min(1.0, self._timeout_s / 4)
        heard, connection, silent_s = -1, None, 0.0
        while not self._closed.wait(pause):
            now = self._heard, self._socket
            silent_s = silent_s + pause if now == (heard, connection) and connection is not None else 0.0
            heard, connection = now
            if silent_s >= self._timeout_s and connection is not None:
                silent_s = 0.0
                try:
                    self._end_silent(connection)
                except (CheckpointError, OSError) as error:
                    self._tracker.report(str(error))

    def _end_silent(self, connection: socket.socket) -> None:
        """End the agent behind a connection, unless that has ended meanwhile."""
        with self._starting():  # all ranks of a node notice at once: the first ends it
            if self._socket is not connection or _has_hung_up(connection):
                return
            agent = agent_process(self._folder)
            silent = f"has said nothing for {self._timeout_s:.0f} s"
            self._ended = None if agent is None else agent[0]  # before it ends: the listener need not say so again
            if agent is None or not end_agent(agent):
                who = "the agent" if agent is None else f"the agent (process {agent[0]})"
                why = f"{who} {silent}, and cannot be ended from here: end it by hand. See {self._log_path()}"
                self._unheard, self._ended = True, None
                self._tracker.report(why)
                self._tracker.set_unavailable(why)
                return
            stopped = ": it is stopped" if agent.is_stopped else ""
            self._tracker.report(f"the agent (process {agent[0]}) {silent}{stopped}. It was ended: starting another")

    def _restart(self) -> None:
        """Connect again, however long it takes; whoever waits for a version is told meanwhile why nothing comes."""
        with self._lock:
            self._hang_up()
        self.pid, pause, said = None, 0.5, ""
        while True:
            try:
                connection = self._connect()
                break
            except (CheckpointError, OSError) as error:
                if str(error) != said:
                    said = str(error)
                    self._tracker.report(said)
                    self._tracker.set_unavailable(said)
                if self._closed.wait(pause):
                    return
                pause = min(2 * pause, 30.0)
        with self._lock:
            if self._closed.is_set():
                connection.close()
                return
            self._socket = connection
            if self._attach is not None:
                with suppress(OSError):
                    self._question += 1
                    self._again = self._question
                    settle = {"op": "settle", "question": self._again, "everywhere": True}
                    for message in (self._attach, *self._captured.values(), settle):
                        connection.sendall(_line(message))
            self._lock.notify_all()
        if not said:
            return
        self._tracker.set_unavailable(None)

    def _connect(self) -> socket.socket:
        """A connection to a living agent; one is started if none answers."""
        end, starts = time.monotonic() + _START_PATIENCE_S, 0
        while True:
            try:
                fd, address = socket_address(self._folder)
                connection = socket.socket(socket.AF_UNIX)
            except OSError as error:
                raise AgentError(f"the agent cannot be reached: {open_files_hint(error)}") from error
            try:
                connection.settimeout(1.0)  # an agent that accepts nobody would let us wait here
                connection.connect(address)
                connection.settimeout(None)
                return connection
            except OSError as error:
                connection.close()
                if time.monotonic() > end:
                    agent = agent_process(self._folder)
                    who = "the agent" if agent is None else f"the agent (process {agent[0]})"
                    raise AgentError(f"{who} does not answer: {error}. See {self._log_path()}") from error
            finally:
                os.close(fd)
            # One at a time: all ranks of a node come at once, and one agent is enough.
            with self._starting():
                if not is_locked(self._folder / AGENT_LOCK):
                    self._start()
                    starts += 1
                    if starts < _TOO_MANY:  # starting may take long where much else runs: the patience is for silence
                        end = time.monotonic() + _START_PATIENCE_S
                else:
                    time.sleep(0.02)  # one is about to serve, or about to leave

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """Be the only process of the node that starts or ends an agent; `AgentError` if the lock cannot be opened."""
        path = self._folder / START_LOCK
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(path))
            except OSError as error:
                raise AgentError(f"{path}: cannot be locked: {open_files_hint(error)}{removal_advice(path)}") from error
            yield

    def _start(self) -> None:
        """Start an agent in a session of its own; returns when it serves. It inherits no descriptor of ours."""
        command = [
            sys.executable,
            "-m",
            "evergrad",
            "agent",
            str(self._run_folder.run_dir),
            "--node",
            self._run_folder.node,
        ]
        command += ["--linger", str(self._linger_s), "--detach"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        try:
            done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        except OSError as error:
            raise AgentError(f"the agent cannot be started: {open_files_hint(error)}") from error
        if done.returncode:
            why = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise AgentError(f"the agent cannot be started: {why or f'exit code {done.returncode}'}")

    def _log_path(self) -> str:
        return str(self._run_folder.run_dir / "agents" / f"{self._run_folder.node_folder}.log")


def _has_hung_up(connection: socket.socket) -> bool:
    """True if the other side of a connection is gone."""
    look = select.poll()
    try:
        look.register(connection, select.POLLIN)
        return any(event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in look.poll(0))
    except (OSError, ValueError):  # closed on this side
        return True


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


_links: weakref.WeakSet[AgentClient] = weakref.WeakSet()


def _drop_in_child() -> None:
    for link in list(_links):
        link.drop()


# A worker process that was forked must not keep a connection open that its parent's death should end.
os.register_at_fork(after_in_child=_drop_in_child)
