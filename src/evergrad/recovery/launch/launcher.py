"""Launches a job and stays with it: hosts the store, starts the processes, tells the coordinator who is gone.

The launcher has no part in training. It decides nothing either: the coordinator does, in this process, from what
ranks report through the store. What is the launcher's alone is to know at once who died, to start who is missing, and
to leave nothing behind.

On several machines each has a launcher. All of this is that of the first one, the head; the others do as they are told
(`node`), and `remote_nodes` is what the head sees of them.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evergrad._forkserver import preload
from evergrad._wire import Secret
from evergrad.errors import EvergradError, UsageError
from evergrad.recovery.heartbeat import LivenessFinding, LivenessRules, ProcessHealth, innermost
from evergrad.recovery.launch.local_processes import NodeProcesses
from evergrad.recovery.launch.node import run_node
from evergrad.recovery.launch.output import EventLog, JobStatus, OutputRelay
from evergrad.recovery.launch.processes import (
    LEAVE_SIGNALS,
    SAME_NOTICE_S,
    Children,
    JobProcesses,
    ProcessExit,
    ProcessSet,
    WaitResult,
)
from evergrad.recovery.launch.rendezvous import HeadAddress
from evergrad.recovery.launch.settings import LaunchSettings, ProcessPlacement, ProcessPlacements
from evergrad.recovery.launch.summary import NOBODY_JOINED, Summary, make_folder, merge_timelines, write_record
from evergrad.recovery.membership import StoreKeys
from evergrad.recovery.sockets import LOOPBACK, listening
from evergrad.timeline import Recorder
from evergrad.wording import count_of

if TYPE_CHECKING:
    from evergrad.recovery.coordinator import Coordinator, JobOutcome, SpawnRequest
    from evergrad.recovery.launch.remote_nodes import NodeMembership, RemoteNodes
    from evergrad.recovery.store import SignedStore


# A new spare for each process that is gone, where that is wanted and may help.

_DEATHS_IN_PLACE = 3


class Respawner:
    """For the main thread of the launcher."""

    def __init__(
        self,
        settings: LaunchSettings,
        places: ProcessPlacements,
        relay: OutputRelay,
        *,
        is_here: Callable[[int], bool],
        start: Callable[[ProcessPlacement], None],
    ) -> None:
        """`is_here` tells whether processes can be started on a node; `start` starts one."""
        self._settings, self._places, self._relay = settings, places, relay
        self._is_here, self._start = is_here, start
        self._replaced: set[int] = set()
        self._died_at: dict[tuple[int, int], tuple[int, int]] = {}
        """By node and device: the step at which processes there died, and how often."""

    def replace(self, uid: int, coordinator: Coordinator, store: SignedStore) -> None:
        """A process is gone, while the job goes on: start a spare, unless one was started for it already.

        Not for one that never joined, or for who dies at the same step again.
        """
        is_new = uid not in self._replaced  # one that was lost may end later
        self._replaced.add(uid)
        if not is_new or not self._settings.respawn or coordinator.outcome is not None:
            return
        before = self._places[uid]
        if not store.has(StoreKeys.joined(uid)):
            self._relay.print_line(f"{before.label} is not started again: it ended before it joined the job")
            return
        step = coordinator.step
        times = self._count(before, step)
        if times >= _DEATHS_IN_PLACE:
            self._relay.print_line(f"{before.label} is not started again: {times} died in its place at step {step}")
            return
        if not self._is_here(before.node):  # it may come back, and bring its own
            return
        place = self._places.add(before.node, before.device)
        coordinator.add_spare(place.uid)
        self._start(place)

    def _count(self, place: ProcessPlacement, step: int) -> int:
        """How many have died in this place at this step, one after the other."""
        where = place.node, place.device
        last, times = self._died_at.get(where, (-1, 0))
        times = times + 1 if last == step else 1
        self._died_at[where] = step, times
        return times


# Who lives and is not there all the same: looks at what processes show of themselves, and tells the coordinator.

_BEATS = 2
"""For so many of its own beats a process waits for an answer before the store is put to the test, and then again."""


class StoreQueries:
    """The store's part in what processes ask of it: who waits for an answer is cut off only if the store gives answers.

    The store is in the launcher's process. On a machine with too much to do it gets no processor for a while, and then
    nobody has an answer. It answers in order: once it has answered us, it has answered whatever had reached it before.
    """

    def __init__(self) -> None:
        self._tested: dict[int, tuple[int, int]] = {}
        """By uid, the beat at which a process asked, and its beat when the store was known to answer after that."""

    def unanswered(self, health: Mapping[int, ProcessHealth], test: Callable[[], None]) -> dict[int, ProcessHealth]:
        """The same, but that nobody waits for an answer that the store may owe; `test` returns when it has answered."""
        has_tested, found = False, dict(health)
        for uid, process_health in health.items():
            asked_at = process_health.beats - process_health.asks_beats
            known_at, beats = self._tested.get(uid, (-1, 0))
            if not process_health.asks_s or (known_at == asked_at and process_health.beats - beats >= _BEATS):
                continue
            found[uid] = replace(process_health, asks_s=0.0, asks_beats=0)
            if known_at != asked_at and process_health.asks_beats >= _BEATS:
                if not has_tested:
                    test()
                    has_tested = True
                self._tested[uid] = asked_at, process_health.beats
        return found


class LivenessMonitor:
    """Watches all processes of a job; in the launcher's main thread."""

    def __init__(
        self,
        settings: LaunchSettings,
        processes: ProcessSet,
        relay: OutputRelay,
        recorder: Recorder,
        *,
        label_of: Callable[[int], str],
        forsake: Callable[[int], None],
    ) -> None:
        """`forsake` is told of a process that is lost and that nobody kills."""
        self._settings, self._processes, self._relay, self._recorder = settings, processes, relay, recorder
        self._label_of, self._forsake = label_of, forsake
        self._rules, self._store_queries = LivenessRules(settings.patience), StoreQueries()
        self._next_s = 0.0
        self._last_s = time.monotonic()

    def check(self, coordinator: Coordinator | None) -> None:
        """Once a beat, while the job goes on."""
        now = time.monotonic()
        if coordinator is None or coordinator.outcome is not None or now < self._next_s:
            return
        timeouts, last_s, self._last_s = self._settings.patience, self._last_s, now
        self._next_s = now + timeouts.beat_s
        if now - last_s > max(1.0, 4 * timeouts.beat_s):
            # It is this process that was not there, and with it the store: let everyone show itself first.
            self._next_s = now + timeouts.heartbeat_timeout_s + 1.0
            self._last_s = self._next_s
            return
        generation, members = coordinator.membership
        health = {
            uid: process_health
            for uid, process_health in self._processes.health().items()
            if not coordinator.is_out(uid)
        }
        health = self._store_queries.unanswered(health, coordinator.await_store)
        for finding in self._rules.judge(health, members, generation, now):
            self._act_on(finding, coordinator)

    def _act_on(self, finding: LivenessFinding, coordinator: Coordinator) -> None:
        uid, why, label = finding.uid, finding.why, self._label_of(finding.uid)
        if finding.kind == "deadlock":
            self._recorder.record("deadlock", generation=coordinator.generation, reason=why)
            coordinator.break_generation(why)
            return
        stack = self._processes.stack(uid)
        if not finding.is_lost:
            rank = coordinator.rank_of(uid)
            who = label if rank is None else f"rank {rank}"
            generation = coordinator.generation
            event = "rank_late" if finding.kind == "late" else finding.kind
            self._recorder.record(event, uid=uid, rank=rank, reason=why, stack=stack, generation=generation)
            self._relay.print_line(f"{who} {why}; it is in\n{innermost(stack)}")
            return
        coordinator.process_lost(uid, why, stack=stack)
        if self._settings.keep_stopped:
            pid = next((child.pid for child in self._processes.living if child.uid == uid), 0)
            self._relay.print_line(f"{label} (process {pid}) is left as it is: if it goes on it ends by itself")
            self._forsake(uid)
        else:
            self._processes.send(signal.SIGKILL, {uid})


_LOOK_S = 0.5
_DECIDES_WITHIN_S = 60.0


def launch(settings: LaunchSettings, *, as_json: bool = False) -> Summary:
    """Run a job to its end, or one node of it; only in the main thread, where signals arrive.

    With `as_json` stdout stays empty, for the summary: what processes print goes to stderr.
    """
    if settings.node_rank:
        return run_node(settings, as_json=as_json)
    children = Children()
    run = make_folder(settings)
    with (
        Recorder(run / "timeline.jsonl", "launcher") as recorder,
        closing(_JobLauncher(settings, run, recorder)) as job,
    ):
        with closing(OutputRelay(run / "logs", all_to_stderr=as_json, status=job.status)) as relay, children:
            summary = job.stay(children, relay)
            relay.close("" if as_json else str(summary))
        return summary


class _JobLauncher:
    """One job, seen from the main thread; what other threads want of it, they leave in `_wishes`."""

    _children: Children
    _relay: OutputRelay
    _node_processes: NodeProcesses
    _processes: ProcessSet
    _event_log: EventLog
    _liveness_monitor: LivenessMonitor
    _respawner: Respawner

    def __init__(self, settings: LaunchSettings, run: Path, recorder: Recorder) -> None:
        self._settings, self._run, self._recorder = settings, run, recorder
        self._is_spread = settings.node_rank is not None
        self._begun_s, self._begun_mono = time.time(), time.monotonic()
        self._listener, self._host = (
            listening(settings.master_addr, settings.names) if self._is_spread else _here_only()
        )
        self._port: int = self._listener.getsockname()[1]
        self._places = ProcessPlacements(settings.places())
        self._wishes: deque[Callable[[], None]] = deque()
        self._opening = threading.Thread(target=self._open, name="evergrad-store", daemon=True)
        self._store: SignedStore | None = None
        """The server, as the coordinator and the ranks see it."""
        self._secret = Secret.make(run / "secret")
        self._nodes: RemoteNodes | None = None
        """The others, if there are any, once they can come."""
        self._node_membership: NodeMembership | None = None
        self._coordinator: Coordinator | None = None
        self._gone_early: list[ProcessExit] = []
        self._outcome: JobOutcome | None = None
        self._leave_signal: tuple[int, float] | None = None
        """The signal that asked the job to leave, and when."""
        self._due: list[tuple[float, int]] = []
        """Signals that are sent to whoever lives then."""
        self._forsaken_s: float | None = None

    def stay(self, children: Children, relay: OutputRelay) -> Summary:
        """Start everyone, and see them off."""
        self._children, self._relay = children, relay
        settings, recorder = self._settings, self._recorder
        self._node_processes = NodeProcesses(
            settings,
            children,
            relay,
            recorder,
            run=self._run,
            host=self._host,
            port=self._port,
            begun_mono=self._begun_mono,
        )
        self._processes = (
            JobProcesses(self._node_processes, lambda: self._nodes, 0) if self._is_spread else self._node_processes
        )
        self._event_log = EventLog(recorder, relay, self._places.label_of, settings.strategy)
        self._liveness_monitor = LivenessMonitor(
            settings, self._processes, relay, recorder, label_of=self._places.label_of, forsake=self._respawn_if_wanted
        )
        self._respawner = Respawner(settings, self._places, relay, is_here=self._is_here, start=self._start_late)
        command = shlex.join([os.path.basename(sys.executable), *self._settings.command[1:]])
        self._recorder.record("launcher_started", command=command, settings=self._settings.to_json(), pid=os.getpid())
        num_ranks, num_spares = self._settings.num_ranks, self._settings.num_spares
        who = count_of(num_ranks, "rank") + (f" and {count_of(num_spares, 'spare')}" if num_spares else "")
        threads = "" if "OMP_NUM_THREADS" in os.environ else "; OMP_NUM_THREADS is 1, set it to change that"
        relay.print_line(f"{who}, logs and timeline in {self._run}{threads}")
        if self._settings.preload:
            preload("evergrad.recovery.join_job")
        for place in self._places:
            if not (self._is_spread and place.node):
                self._start(place, forked=self._settings.preload)
        relay.begin()  # a thread: no forks any more
        self._opening.start()  # importing torch takes as long as it takes them, so all do it at the same time
        with closing(self._node_processes):
            while not self._is_over():
                self._handle_events(self._node_processes.wait(self._patience()))
            return self._end()

    def _handle_events(self, happened: WaitResult) -> None:
        """See to what has happened."""
        for number in happened.signals:
            self._handle_signal(number)
        for gone in happened.exits:
            self._handle_exit(gone)
            self._node_processes.record_exit(gone)
        while self._wishes:
            self._wishes.popleft()()
        if self._node_membership is not None:
            is_open = self._leave_signal is None and self._outcome is None
            for gone in self._node_membership.handle_events(is_open=is_open):
                self._handle_exit(gone)
        self._liveness_monitor.check(self._coordinator)
        self._look_for_outcome()
        self._send_due_signals()

    def status(self) -> JobStatus:
        """How the job stands; from any thread."""
        settings, coordinator = self._settings, self._coordinator
        if coordinator is None:
            return JobStatus(None, settings.num_ranks, settings.num_ranks, settings.num_spares, 0, 0)
        return JobStatus(
            coordinator.step,
            coordinator.alive,
            settings.num_ranks,
            coordinator.spares,
            coordinator.failures_survived,
            coordinator.generation,
        )

    def close(self) -> None:
        """Let go of the store. Twice is fine."""
        if self._opening.ident is not None:
            self._opening.join()
        while self._wishes:  # it may have opened just now
            self._wishes.popleft()()
        if self._nodes is not None:
            self._nodes.close()
        if self._coordinator is not None:
            self._coordinator.close()
        self._coordinator = self._store = self._nodes = self._node_membership = None
        self._listener.close()
        (self._run / "secret").unlink(missing_ok=True)

    def _open(self) -> None:
        """Host the store and let the coordinator begin; in a thread of its own, while processes start."""
        try:
            write_record(self._run, self._settings, self._begun_s)
            from torch._C._distributed_c10d import PrefixStore, TCPStore

            from evergrad.recovery.coordinator import Coordinator
            from evergrad.recovery.store import PREFIX, SignedStore

            fd = self._listener.detach()  # clients that have connected meanwhile wait there
            store = TCPStore(LOOPBACK, self._port, None, True, wait_for_workers=False, master_listen_fd=fd)
            coordinator = Coordinator(
                LOOPBACK,
                self._port,
                num_ranks=self._settings.num_ranks,
                strategy=self._settings.strategy,
                min_ranks=self._settings.min_ranks,
                max_ranks=self._settings.max_ranks,
                secret=self._secret,
                max_restarts=self._settings.max_restarts,
                tell=self._record_event,
                spawn=self._spawn,
            )
            coordinator.begin([place.uid for place in self._settings.places()])
            sealed = SignedStore(PrefixStore(PREFIX, store), self._secret)
            nodes = self._open_nodes(sealed) if self._is_spread else None
        except BaseException as error:
            self._wish(partial(_raise, error))
        else:
            self._wish(partial(self._opened, sealed, coordinator, nodes))

    def _open_nodes(self, store: SignedStore) -> RemoteNodes:
        """Let the launchers of other nodes come."""
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        from evergrad.recovery.launch.remote_nodes import RemoteNodes
        from evergrad.recovery.store import PREFIX, SignedStore

        ear = TCPStore(LOOPBACK, self._port, None, False, timedelta(seconds=60), False)
        nodes = RemoteNodes(
            self._settings, store, SignedStore(PrefixStore(PREFIX, ear), self._secret), self._children.wake
        )
        nodes.listen()
        machine, settings = socket.gethostname(), self._settings.to_json()
        HeadAddress(self._host, self._port, machine, os.getpid(), settings).write(self._run)
        return nodes

    def _opened(self, store: SignedStore, coordinator: Coordinator, nodes: RemoteNodes | None) -> None:
        self._store, self._coordinator, self._nodes = store, coordinator, nodes
        if nodes is not None:
            from evergrad.recovery.launch.remote_nodes import NodeMembership

            self._node_membership = NodeMembership(
                self._settings,
                nodes,
                self._places,
                store,
                coordinator,
                processes=self._processes,
                relay=self._relay,
                recorder=self._recorder,
                event_log=self._event_log,
                begun_mono=self._begun_mono,
            )
        gone, self._gone_early = self._gone_early, []
        for one in gone:
            self._tell_gone(one)

    def _wish(self, act: Callable[[], None]) -> None:
        self._wishes.append(act)
        self._children.wake()

    def _record_event(self, event: str, /, **fields: Any) -> None:
        """The coordinator's events: to the timeline, and what people should know to them."""
        self._event_log.record(event, **fields)
        self._children.wake()

    def _spawn(self, request: SpawnRequest) -> int:
        """Start what a relaunch lacks; called in the coordinator's thread, and done in the main one.

        The kernel ties a process to the thread that started it, and that must be one that stays.
        """
        before = self._places[request.rank if request.replaces is None else request.replaces]
        living = [child.uid for child in self._processes.living]
        place = self._places.add(*self._places.instead_of(before, self._is_here, living), request.rank)
        self._wish(partial(self._start_late, place, request.generation))
        return place.uid

    def _start(self, place: ProcessPlacement, *, forked: bool = False, generation: int | None = None) -> None:
        self._processes.start(place, generation, self._places.nodes, forked=forked)

    def _start_late(self, place: ProcessPlacement, generation: int | None = None) -> None:
        if self._leave_signal is not None or self._outcome is not None:
            return
        try:
            self._start(place, generation=generation)
        except UsageError as error:
            self._relay.print_line(str(error))
            if self._coordinator is not None:
                self._coordinator.process_exited(place.uid, 1)

    def _handle_exit(self, gone: ProcessExit) -> None:
        """Somebody is gone: the coordinator first, everything else can wait."""
        if self._leave_signal is None:
            if self._coordinator is not None:
                self._tell_gone(gone)
            else:
                self._gone_early.append(gone)

    def _tell_gone(self, gone: ProcessExit) -> None:
        assert self._coordinator is not None
        uid = gone.child.uid
        self._coordinator.process_exited(uid, gone.code)
        if gone.code != 0 or self._coordinator.has_left(uid):
            self._respawn_if_wanted(uid)

    def _respawn_if_wanted(self, uid: int) -> None:
        if self._leave_signal is None and self._coordinator is not None and self._store is not None:
            self._respawner.replace(uid, self._coordinator, self._store)

    def _is_here(self, node: int) -> bool:
        """Whether processes can be started on a node."""
        return not self._is_spread or node == 0 or (self._nodes is not None and self._nodes.is_here(node))

    def _handle_signal(self, number: int) -> None:
        """A signal that we were sent is meant for everyone."""
        name, now = signal.Signals(number).name, time.monotonic()
        self._recorder.record("signal_received", signal=name)
        if number not in LEAVE_SIGNALS:
            self._processes.send(number)
        elif self._leave_signal is None:
            self._leave_signal = number, now
            self._due = [(now + self._settings.grace_period_s, signal.SIGKILL)]
            self._processes.send(number)
            count = count_of(len(self._processes.living), "process", "processes")
            grace = f"{self._settings.grace_period_s:g} s"
            self._relay.print_line(f"{name}: passed on to {count}; those that still run in {grace} are killed")
        elif now - self._leave_signal[1] >= SAME_NOTICE_S:  # not the same notice by another way: somebody insists
            self._processes.send(signal.SIGKILL)

    def _look_for_outcome(self) -> None:
        """Once the job has ended, whoever is left shall leave too."""
        if self._outcome is not None or self._leave_signal is not None or self._coordinator is None:
            return
        self._outcome = self._coordinator.outcome
        now, grace_s = time.monotonic(), self._settings.grace_period_s
        if self._outcome is None:
            living = bool(self._processes.living)
            self._forsaken_s = None if living else self._forsaken_s or now
            if self._forsaken_s is not None and now - self._forsaken_s > _DECIDES_WITHIN_S:
                raise RuntimeError("every process has ended, and the coordinator does not say how the job did")
        elif self._outcome.kind in (
            "finished",
            "diverged",
        ):  # spares were told, and leave by themselves, but who is not yet there
            late = {child.uid for child in self._processes.living if not self._find(StoreKeys.joined(child.uid))}
            self._processes.send(signal.SIGTERM, late)
            self._due = [(now + grace_s, signal.SIGTERM), (now + 2 * grace_s, signal.SIGKILL)]
        else:
            self._due = [(now, signal.SIGTERM), (now + grace_s, signal.SIGKILL)]

    def _send_due_signals(self) -> None:
        while self._due and self._due[0][0] <= time.monotonic():
            _, number = self._due.pop(0)
            for child in self._processes.living:
                self._recorder.record(
                    "signal_sent", uid=child.uid, label=child.label, signal=signal.Signals(number).name
                )
            self._processes.send(number)

    def _patience(self) -> float:
        return min([_LOOK_S, self._settings.patience.beat_s, *(at - time.monotonic() for at, _ in self._due)])

    def _find(self, key: str) -> str:
        store = self._store
        return (store.find(key) or "") if store is not None else ""

    def _never(self) -> tuple[str, ...]:
        """Failures that were scheduled and of which nobody has claimed the first time."""
        return tuple(
            str(failure)
            for index, failure in enumerate(self._settings.schedule)
            if failure.times is not None and not self._find(f"{StoreKeys.fired(index)}/0")
        )

    def _unverified(self, outcome: JobOutcome | None, joined: bool) -> str:
        """Return the reason why it is unknown whether the result is exact; empty if it is known."""
        if outcome is None or outcome.kind not in ("finished", "diverged"):
            return "it did not finish"
        if not joined:
            return NOBODY_JOINED
        return self._find(StoreKeys.unverified) or outcome.uncompared

    def _is_over(self) -> bool:
        return (self._outcome is not None or self._leave_signal is not None) and not self._processes.living

    def _end(self) -> Summary:
        status, outcome = self.status(), self._outcome
        kind: str
        if outcome is not None:
            kind, code, message = outcome.kind, outcome.exit_code, outcome.message
        else:
            assert self._leave_signal is not None
            kind, code, message = "interrupted", 128 + self._leave_signal[0], signal.Signals(self._leave_signal[0]).name
        joined = any(self._find(StoreKeys.joined(place.uid)) for place in self._places)
        summary = Summary(
            kind,
            code,
            message,
            steps=status.step or 0,
            failures_survived=status.failures,
            generations=status.generation + 1,
            seconds=time.monotonic() - self._begun_mono,
            run=self._run,
            inexact=(message if kind == "diverged" else "") or self._find(StoreKeys.inexact) or self._event_log.inexact,
            unverified=self._unverified(outcome, joined),
            never=self._never(),
            joined=joined,
            ended_spares=tuple(self._event_log.ended_spares.values()),
        )
        hint = "is there such a step, such a bucket, a save at that step?"
        if not summary.joined:
            hint = "no rank called eg.join: failures happen at places of a job's loop, and there was none"
        for text in summary.never if kind == "finished" else ():
            self._relay.print_line(f"never happened: '{text}' ({hint})")
        self._opening.join()
        try:
            write_record(self._run, self._settings, self._begun_s, summary)
        except EvergradError as error:  # the job is over all the same
            self._relay.print_line(str(error))
        if self._nodes is not None:
            self._nodes.end(summary.to_json(), self._settings.grace_period_s)
            merge_timelines(self._run)
        self._recorder.record("launcher_ended", outcome=kind, exit_code=code, message=message, steps=summary.steps,
                              exact=summary.exact, inexact=summary.inexact, unverified=summary.unverified)  # fmt: skip
        return summary


def _here_only() -> tuple[socket.socket, str]:
    return socket.create_server((LOOPBACK, 0), backlog=1024), LOOPBACK


def _raise(error: BaseException) -> None:
    raise error
