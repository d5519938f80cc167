"""The agent: the process, one a node and job, that finishes versions whatever becomes of the trainers.

It listens on a Unix socket in the folder of the arenas, which only its user can open, and asks the kernel who has
connected all the same. Trainers send one JSON line a message and get events back:

    {"op": "attach", "attempt": 2, "tiers": […], "modules": […]}      → attached, then free and committed; or refused
    {"op": "captured", "rank": 3, "index": 0, "generation": 17}         → committed or failed, and free, when it is so
    {"op": "failed", "step": 120, "attempt": 2, "rank": 3, …}           so that no other rank waits for this one
    {"op": "settle", "question": 5, "slow": […], "again": "4f…"}      → settled, when all that is captured can be found
    {"op": "settle", "question": 6, "slow": […], "commit": true}      → settled, when what is whole there is committed

What is captured is also in the arena's ticket, so that nothing depends on a message getting through. Every second it
says `alive`; a trainer that hears nothing for a while ends it (SIGKILL: it can then do no harm when it would go on) and
starts another. It imports no torch, and leaves when nothing is owed and no trainer has been connected for a while.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, SupportsFloat

from evergrad._files import Process, is_locked, open_lock, open_regular, process, read_small, removal_advice, take_lock
from evergrad.checkpoint.agent.events import AgentEvent, Alive, Attached, CapturesFinished, Refused
from evergrad.checkpoint.agent.pipeline import Pipeline, load_module
from evergrad.checkpoint.arena import open_files_hint
from evergrad.checkpoint.run_folder import (
    AGENT_LOCK,
    RunFolder,
    arena_folder,
    moved_to,
    open_run_folder,
    remove_orphans,
)
from evergrad.checkpoint.version import Version
from evergrad.errors import AgentError, EvergradError, SaveRefused, UsageError
from evergrad.formats.version_records import read_record, record_bytes

LINGER_S = 60.0
"""How long an agent stays without work and without a trainer."""
TIMEOUT_S = 30.0
"""Seconds that a trainer waits for an agent that does not answer."""
SOCKET = "agent.sock"
START_LOCK = "start.lock"

_log = logging.getLogger(__name__)
_LOCK_PATIENCE_S = 10.0
_FIRST_TRAINER_S = 10.0  # whoever started it is on the way, however short it lingers later
_MESSAGE_LIMIT = 1 << 20
_ALIVE_S = 1.0
_UNREAD_BYTES = 1 << 16  # a trainer that reads nothing, because it is stopped, is not told more
_END_PATIENCE_S = 10.0


def linger_seconds(given: float | None) -> float:
    """How long to stay: as given, else EVERGRAD_LINGER, else a minute."""
    text = os.environ.get("EVERGRAD_LINGER")
    try:
        linger = given if given is not None else float(text) if text else LINGER_S
    except ValueError:
        raise UsageError(f"EVERGRAD_LINGER={text!r}: expected seconds") from None
    if not isinstance(linger, SupportsFloat) or not linger >= 0:
        raise UsageError(f"linger_s={linger!r}: expected 0 or more seconds")
    return linger


def timeout_seconds() -> float:
    """Return the time limit of an agent's answer: EVERGRAD_AGENT_TIMEOUT, else 30 seconds."""
    text = os.environ.get("EVERGRAD_AGENT_TIMEOUT")
    try:
        seconds = float(text) if text else TIMEOUT_S
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"EVERGRAD_AGENT_TIMEOUT={text!r}: expected seconds, more than 0")
    return seconds


def agent_process(folder: Path) -> Process | None:
    """The process that serves the arenas of a folder, as it has noted itself; None if it is not seen from here."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = read_record(read_small(folder / AGENT_LOCK))
        found = process(record["pid"])
        if found is not None and found[:2] == (record["pid"], record["started"]) and not found.has_ended:
            return found
    return None


def end_agent(agent: Process) -> bool:
    """End an agent by SIGKILL, whatever it does, and wait for that; whether it has ended."""
    pid = agent[0]
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return process(pid) is None
    try:
        now = process(pid)  # the handle is of that process, or of one that was given its id since
        if now is None or now[:2] != agent[:2] or now.has_ended:
            return True
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        ended = select.poll()
        ended.register(handle, select.POLLIN)
        return bool(ended.poll(_END_PATIENCE_S * 1000))
    except OSError:
        return False
    finally:
        os.close(handle)


def run_agent(
    job: RunFolder, *, linger_s: float = LINGER_S, detach: bool = False, ready: Callable[[], None] | None = None
) -> bool:
    """Serve until there is nothing left to do; False if another agent of this job serves the node already.

    With `detach` this returns, True, when the agent serves, in a process and session of its own. `ready` is called
    when trainers can connect.
    """
    folder = arena_folder(job)
    with _in_one_line(folder / AGENT_LOCK, "cannot be locked"):
        lock = open_lock(folder / AGENT_LOCK)
    if not _acquire_agent_lock(lock, folder):
        os.close(lock)
        return False
    with _in_one_line(folder / SOCKET, "cannot be made"):
        listener = _listen(folder)
    if detach and not _daemonize(job):
        # The child has the lock and listens: whoever waited for this process can connect now.
        listener.close()
        os.close(lock)
        return True
    if ready is not None and not detach:
        ready()
    _note_process(lock)
    place = open_run_folder(job)
    for gone in remove_orphans():
        _log.info("arenas of job %s removed: its run folder is gone", gone)
    try:
        asyncio.run(_Agent(job, listener, linger_s).serve())
    finally:
        with suppress(OSError):
            os.unlink(folder / SOCKET)
        os.close(lock)
        moved_to(job, place)
        os.close(place)
        remove_orphans()  # perhaps its own: a run folder may be removed while its agent is still there
    if detach:
        os._exit(0)
    return True


def socket_address(folder: Path) -> tuple[int, str]:
    """A descriptor of the folder, to be closed, and a path for the socket through it: paths may be too long for one."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return fd, f"/proc/self/fd/{fd}/{SOCKET}"


class _Agent:
    def __init__(self, job: RunFolder, listener: socket.socket, linger_s: float) -> None:
        self._run_folder, self._listener, self._linger_s = job, listener, linger_s
        self._trainers: dict[asyncio.StreamWriter, int] = {}
        self._answers: set[asyncio.Task[None]] = set()
        self._leaving = asyncio.Event()
        self._idle_since = time.monotonic()
        self._patience_s = max(linger_s, _FIRST_TRAINER_S)
        self._start_lock: Path | None = arena_folder(job) / START_LOCK  # held by whoever starts us; None when it came
        self._recovered = asyncio.Event()

    async def serve(self) -> None:
        """Until nothing is owed and nobody has been there for a while, or someone asks it to stop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._leaving.set)
        _log.info("agent %d of job %s serves node %s", os.getpid(), self._run_folder.id, self._run_folder.node)
        # From 3.13 on asyncio would look the socket up under the name it was bound by, which was a detour.
        kept: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
        server = await asyncio.start_unix_server(self._serve_trainer, sock=self._listener, limit=_MESSAGE_LIMIT, **kept)
        alive = asyncio.create_task(self._say_alive())
        notify = lambda event: _ignore_closed(loop, self._broadcast, event)  # noqa: E731
        self._pipeline = await asyncio.to_thread(Pipeline, self._run_folder, notify)
        await asyncio.to_thread(self._pipeline.resume_unfinished)
        self._recovered.set()  # from here on whoever asks hears of what was found
        while not self._leaving.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), min(0.25, self._linger_s / 4 or 0.01))
            if self._trainers or self._pipeline.num_pending or (self._start_lock and is_locked(self._start_lock)):
                self._idle_since = time.monotonic()
            elif time.monotonic() - self._idle_since >= self._patience_s:
                self._leaving.set()
        server.close()
        await asyncio.to_thread(self._pipeline.close)
        await asyncio.to_thread(self._pipeline.reclaim_arenas)
        alive.cancel()
        for writer in self._trainers:
            writer.close()
        _log.info("agent %d leaves: nothing is owed", os.getpid())

    async def _serve_trainer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pid, user = _peer(writer.get_extra_info("socket"))
        if user != os.getuid():
            _log.warning("user %d is not served", user)
            writer.close()
            return
        self._trainers[writer] = 0
        self._patience_s, self._start_lock = self._linger_s, None
        _send_event(writer, Alive(os.getpid()))
        try:
            await self._recovered.wait()
            while line := await reader.readline():
                await self._handle_message(json.loads(line), writer)
        except ConnectionError:
            pass  # killed
        except asyncio.CancelledError:
            if not self._leaving.is_set():  # when the agent leaves, asyncio would log this as an error
                raise
        except (ValueError, KeyError) as error:
            _log.warning("trainer %d said something that is no message: %s", pid, error)
        finally:
            if not self._leaving.is_set():  # it may have died between capturing and saying so
                await asyncio.to_thread(self._pipeline.resume_unfinished)
            del self._trainers[writer]
            self._idle_since = time.monotonic()
            writer.close()

    async def _handle_message(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        try:
            if self._has_moved(message.get("run_dir")):
                _log.warning(
                    "%s was moved to %s: another agent serves it there", self._run_folder.run_dir, message["run_dir"]
                )
                self._leaving.set()
            elif message["op"] == "attach":
                self._trainers[writer] = attempt = message["attempt"]
                modules = [load_module(spec) for spec in message["modules"]]
                _send_event(writer, Attached(os.getpid()))
                await asyncio.to_thread(self._pipeline.attach, attempt, message["tiers"], modules)
                self._supersede(attempt)
            elif message["op"] == "captured":
                place = message["rank"], message["index"], message["generation"]
                await asyncio.to_thread(self._pipeline.submit, *place)
            elif message["op"] == "settle" and message.get("everywhere"):
                answer = asyncio.create_task(self._settle_everywhere(message["question"], writer))
                self._answers.add(answer)  # meanwhile what is captured next is heard
                answer.add_done_callback(self._answers.discard)
            elif message["op"] == "settle":
                slow = message.get("slow", ())
                if message.get("commit"):
                    await asyncio.to_thread(self._pipeline.commit_complete, slow)
                else:
                    await asyncio.to_thread(lambda: self._pipeline.await_finished(slow, again=message.get("again")))
                _send_event(
                    writer, CapturesFinished(message["question"], await asyncio.to_thread(self._pipeline.unfinished))
                )
            elif message["op"] == "failed":
                version = Version(message["step"], message["attempt"])
                whose = message["rank"], message["world_size"], message["tiers"], message["why"]
                await asyncio.to_thread(self._pipeline.fail, version, *whose)
        except SaveRefused as error:
            _log.warning("refused: %s", error)
            _send_event(writer, Refused(self._trainers[writer], str(error)))
        except EvergradError as error:
            _log.error("%s", error)
            _send_event(writer, Refused(self._trainers[writer], str(error)))

    async def _say_alive(self) -> None:
        """Whatever the engine does, and however long: that is in other threads."""
        while True:
            for writer in self._trainers:
                if writer.transport.get_write_buffer_size() < _UNREAD_BYTES:
                    _send_event(writer, Alive(os.getpid()))
            await asyncio.sleep(_ALIVE_S)

    async def _settle_everywhere(self, question: int, writer: asyncio.StreamWriter) -> None:
        await asyncio.to_thread(lambda: self._pipeline.await_finished(everywhere=True))
        _send_event(writer, CapturesFinished(question))

    def _has_moved(self, run_dir: str | None) -> bool:
        """True if a trainer has the run folder under another path, and the one that this agent writes to is gone."""
        if run_dir is None or run_dir == str(self._run_folder.run_dir) or self._leaving.is_set():
            return self._leaving.is_set()
        return not self._run_folder.is_there()

    def _supersede(self, attempt: int) -> None:
        for writer, theirs in self._trainers.items():
            if 0 < theirs < attempt:
                _send_event(
                    writer, Refused(theirs, f"attempt {theirs} of the job is over: attempt {attempt} runs it now")
                )

    def _broadcast(self, event: AgentEvent) -> None:
        for writer in self._trainers:
            _send_event(writer, event)


def _send_event(writer: asyncio.StreamWriter, event: AgentEvent) -> None:
    if not writer.is_closing():
        writer.write(event.to_json().encode() + b"\n")


def _ignore_closed(loop: asyncio.AbstractEventLoop, call: Any, event: AgentEvent) -> None:
    with suppress(RuntimeError):  # the loop has ended: there is nobody left to tell
        loop.call_soon_threadsafe(call, event)


@contextmanager
def _in_one_line(path: Path, what: str) -> Iterator[None]:
    """Turn what the file system refuses into one line that says how to go on."""
    try:
        yield
    except OSError as error:
        raise AgentError(f"{path}: {what}: {open_files_hint(error)}{removal_advice(path)}") from error


def _acquire_agent_lock(lock: int, folder: Path) -> bool:
    """Become the node's agent; False if there is one that answers. One that is leaving is waited for."""
    end = time.monotonic() + _LOCK_PATIENCE_S
    while True:
        try:
            take_lock(lock)
            return True
        except OSError:
            if _answers(folder):
                agent = agent_process(folder)
                if agent is not None and agent.is_stopped:
                    what = f"the agent of this node is process {agent[0]}, which is stopped"
                    raise AgentError(
                        f"{folder / AGENT_LOCK}: {what}: continue it (kill -CONT {agent[0]}), or end it"
                    ) from None
                return False
            if time.monotonic() > end:
                raise AgentError(f"{folder / AGENT_LOCK}: held by an agent that does not answer") from None
            time.sleep(0.02)


def _note_process(lock: int) -> None:
    """Say in the lock's file who holds it: the kernel names the process that took it, and that one may have forked."""
    own = process(os.getpid())
    if own is not None:
        os.ftruncate(lock, 0)
        os.pwrite(lock, record_bytes({"pid": own[0], "started": own[1]}), 0)


def _answers(folder: Path) -> bool:
    fd, address = socket_address(folder)
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(address)
            return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _listen(folder: Path) -> socket.socket:
    fd, address = socket_address(folder)
    try:
        with suppress(FileNotFoundError):
            os.unlink(folder / SOCKET)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        os.chmod(folder / SOCKET, 0o600)
        listener.listen(128)
        return listener
    finally:
        os.close(fd)


def _daemonize(job: RunFolder) -> bool:
    """Go on in a child of its own session, with nothing of the caller's open; False in the parent."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork():
        return False
    os.setsid()
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        log = open_regular(job.run_dir / "agents" / f"{job.node_folder}.log", flags, 0o644)
    except OSError:  # what it says is lost, and nothing else
        log = os.dup(null)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(null)
    return True


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Who has connected, as the kernel knows it: process and user."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", data)
    return pid, user
