"""Launches a job and stays with it: hosts the store, starts the processes, tells the coordinator who is gone.

The launcher has no part in training. It decides nothing either: the coordinator does, in this process, from what
ranks report through the store. What is the launcher's alone is to know at once who died, to start who is missing, and
to leave nothing behind.
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
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evergrad.errors import EvergradError, UsageError
from evergrad.recovery.forking import preload
from evergrad.recovery.membership import Keys
from evergrad.recovery.processes import Children, Exit
from evergrad.recovery.settings import LaunchSettings, Place, environment_of
from evergrad.recovery.status import Relay, Status, counted
from evergrad.recovery.summary import Summary, make_folder, write_record
from evergrad.timeline import Recorder

if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore

    from evergrad.recovery.coordinator import Coordinator, Outcome, SpawnRequest

__all__ = ["launch"]

_SAME_NOTICE_S = 1.0
_LOOK_S = 0.5
_DECIDES_WITHIN_S = 60.0
_DEATHS_IN_PLACE = 3
_LEAVING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(settings: LaunchSettings, *, as_json: bool = False) -> Summary:
    """Run a job to its end; only in the main thread, where signals arrive.

    With `as_json` stdout stays empty, for the summary: what processes print goes to stderr.
    """
    children = Children()
    run = make_folder(settings)
    with Recorder(run / "timeline.jsonl", "launcher") as recorder, closing(_Launch(settings, run, recorder)) as job:
        with closing(Relay(run / "logs", all_to_stderr=as_json, status=job.status)) as relay, children:
            summary = job.stay(children, relay)
            relay.close("" if as_json else str(summary))
        return summary


class _Launch:
    """One job, seen from the main thread; what other threads want of it, they leave in `_wishes`."""

    _children: Children
    _relay: Relay

    def __init__(self, settings: LaunchSettings, run: Path, recorder: Recorder) -> None:
        self._settings, self._run, self._recorder = settings, run, recorder
        self._begun_s, self._begun_mono = time.time(), time.monotonic()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._port: int = self._listener.getsockname()[1]
        self._places: list[Place] = settings.places()
        self._lock = threading.Lock()
        """Over the places: uids are given to spares here, and to those that the coordinator asks for in its thread."""
        self._wishes: deque[Callable[[], None]] = deque()
        self._opening = threading.Thread(target=self._open, name="evergrad-store", daemon=True)
        self._store: PrefixStore | None = None
        """The server, as the coordinator and the ranks see it."""
        self._coordinator: Coordinator | None = None
        self._gone_early: list[Exit] = []
        self._outcome: Outcome | None = None
        self._asked: tuple[int, float] | None = None
        """The signal that asked the job to leave, and when."""
        self._due: list[tuple[float, int]] = []
        """Signals that are sent to whoever lives then."""
        self._forsaken_s: float | None = None
        self._inexact = ""
        self._deaths: dict[int, str] = {}
        self._died_at: dict[int, tuple[int, int]] = {}
        """By device: the step at which processes there died, and how often."""

    def stay(self, children: Children, relay: Relay) -> Summary:
        """Start everyone, and see them off."""
        self._children, self._relay = children, relay
        command = shlex.join([os.path.basename(sys.executable), *self._settings.command[1:]])
        self._recorder.record("begin", command=command, settings=self._settings.to_json(), pid=os.getpid())
        num_ranks, num_spares = self._settings.num_ranks, self._settings.num_spares
        who = counted(num_ranks, "rank") + (f" and {counted(num_spares, 'spare')}" if num_spares else "")
        threads = "" if "OMP_NUM_THREADS" in os.environ else "; OMP_NUM_THREADS is 1, set it to change that"
        relay.say(f"{who}, logs and timeline in {self._run}{threads}")
        if self._settings.fork:
            preload()
        for place in list(self._places):
            self._start(place, forked=self._settings.fork)
        relay.begin()  # a thread: no forks any more
        self._opening.start()  # importing torch takes as long as it takes them, so all do it at the same time
        while not self._is_over():
            happened = children.wait(self._patience())
            for number in happened.signals:
                self._heed(number)
            for gone in happened.exits:
                self._miss(gone)
            while self._wishes:
                self._wishes.popleft()()
            self._look_for_outcome()
            self._press()
        return self._end()

    def status(self) -> Status:
        """How the job stands; from any thread."""
        settings, coordinator = self._settings, self._coordinator
        if coordinator is None:
            return Status(None, settings.num_ranks, settings.num_ranks, settings.num_spares, 0, 0)
        return Status(
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
        if self._coordinator is not None:
            self._coordinator.close()
        self._coordinator = self._store = None
        self._listener.close()

    def _open(self) -> None:
        """Host the store and let the coordinator begin; in a thread of its own, while processes start."""
        try:
            write_record(self._run, self._settings, self._begun_s)
            from torch._C._distributed_c10d import PrefixStore, TCPStore

            from evergrad.recovery.coordinator import Coordinator

            fd = self._listener.detach()  # clients that have connected meanwhile wait there
            store = TCPStore("127.0.0.1", self._port, None, True, wait_for_workers=False, master_listen_fd=fd)
            coordinator = Coordinator(
                "127.0.0.1",
                self._port,
                num_ranks=self._settings.num_ranks,
                strategy=self._settings.strategy,
                min_ranks=self._settings.min_ranks,
                max_restarts=self._settings.max_restarts,
                tell=self._tell,
                spawn=self._spawn,
            )
            coordinator.begin([place.uid for place in self._settings.places()])
        except BaseException as error:
            self._wish(partial(_raise, error))
        else:
            self._wish(partial(self._opened, PrefixStore("evergrad", store), coordinator))

    def _opened(self, store: PrefixStore, coordinator: Coordinator) -> None:
        self._store, self._coordinator = store, coordinator
        gone, self._gone_early = self._gone_early, []
        for one in gone:
            self._tell_gone(one)

    def _wish(self, act: Callable[[], None]) -> None:
        self._wishes.append(act)
        self._children.poke()

    def _tell(self, event: str, /, **fields: Any) -> None:
        """The coordinator's events: to the timeline, and what people should know to them."""
        self._recorder.record(event, **fields)
        if event == "death":
            who = self._places[fields["uid"]].label if fields["rank"] is None else f"rank {fields['rank']}"
            self._deaths[fields["uid"]] = f"{who} died ({fields['how']})"
        elif event == "plan" and fields["dead"]:
            deaths = ", ".join(self._deaths.get(uid, f"process {uid} died") for uid in fields["dead"])
            joined = "".join(f", {self._places[uid].label} joins" for uid in fields["joiners"])
            how = "from the newest checkpoint" if fields["restart"] else self._settings.strategy
            goes_on = (
                f"generation {fields['generation']} goes on with {counted(len(fields['members']), 'rank')} ({how})"
            )
            self._relay.say(f"{deaths}{joined}: {goes_on}")
        elif event == "plan" and fields["joiners"]:
            joined = ", ".join(f"{self._places[uid].label} joins" for uid in fields["joiners"])
            ranks = counted(len(fields["members"]), "rank")
            self._relay.say(f"{joined}: generation {fields['generation']} goes on with {ranks}")
        if event == "plan" and not fields["exact"] and not self._inexact:
            ranks = counted(len(fields["members"]), "rank")
            self._inexact = f"generation {fields['generation']} went on with {ranks}, by {self._settings.strategy}"
        self._children.poke()

    def _spawn(self, request: SpawnRequest) -> int:
        """Start what a relaunch lacks; called in the coordinator's thread, and done in the main one.

        The kernel ties a process to the thread that started it, and that must be one that stays.
        """
        with self._lock:
            before = self._places[request.rank if request.replaces is None else request.replaces]
            place = Place(len(self._places), before.node, before.device, request.rank)
            self._places.append(place)
        self._wish(partial(self._start_late, place, request.generation))
        return place.uid

    def _start(self, place: Place, *, forked: bool = False, generation: int | None = None) -> None:
        nodes = [one.node for one in self._places]
        environment = environment_of(
            place, self._settings, nodes=nodes, port=self._port, run=self._run, inherited=os.environ
        )
        if generation is not None:
            environment["EVERGRAD_GENERATION"] = str(generation)
        try:
            child = self._children.start(place.uid, place.label, self._settings.command, environment, forked=forked)
        except OSError as error:
            raise UsageError(f"{place.label} cannot be started: {error.strerror}") from None
        self._relay.add(child)
        self._recorder.record("start", uid=place.uid, label=place.label, pid=child.pid, node=f"n{place.node}")

    def _start_late(self, place: Place, generation: int | None = None) -> None:
        if self._asked is not None or self._outcome is not None:
            return
        try:
            self._start(place, generation=generation)
        except UsageError as error:
            self._relay.say(str(error))
            if self._coordinator is not None:
                self._coordinator.exited(place.uid, 1)

    def _miss(self, gone: Exit) -> None:
        """Somebody has left: the coordinator first, everything else can wait."""
        if self._asked is None:
            if self._coordinator is not None:
                self._tell_gone(gone)
            else:
                self._gone_early.append(gone)
        self._recorder.record("exit", uid=gone.child.uid, label=gone.child.label, code=gone.code)

    def _tell_gone(self, gone: Exit) -> None:
        assert self._coordinator is not None
        self._coordinator.exited(gone.child.uid, gone.code)
        if self._settings.respawn and gone.code != 0 and self._coordinator.outcome is None:
            self._respawn(self._places[gone.child.uid])

    def _respawn(self, before: Place) -> None:
        """A new spare for one that died; not for one that never joined, or for who dies at the same step again."""
        assert self._coordinator is not None
        assert self._store is not None
        if not self._store.check([Keys.joined(before.uid)]):
            self._relay.say(f"{before.label} is not started again: it ended before it joined the job")
            return
        step, times = self._coordinator.step, 1
        if self._died_at.get(before.device, (-1, 0))[0] == step:
            times += self._died_at[before.device][1]
        self._died_at[before.device] = step, times
        if times >= _DEATHS_IN_PLACE:
            self._relay.say(f"{before.label} is not started again: {times} died in its place at step {step}")
            return
        with self._lock:
            place = replace(before, uid=len(self._places), rank=None)
            self._places.append(place)
        self._coordinator.started(place.uid)
        self._start_late(place)

    def _heed(self, number: int) -> None:
        """A signal that we were sent is meant for everyone."""
        name, now = signal.Signals(number).name, time.monotonic()
        self._recorder.record("signal", signal=name)
        if number not in _LEAVING:
            self._children.send(number)
        elif self._asked is None:
            self._asked = number, now
            self._due = [(now + self._settings.grace_s, signal.SIGKILL)]
            self._children.send(number)
            count = counted(len(self._children.living), "process", "processes")
            grace = f"{self._settings.grace_s:g} s"
            self._relay.say(f"{name}: passed on to {count}; those that still run in {grace} are killed")
        elif now - self._asked[1] >= _SAME_NOTICE_S:  # not the same notice by another way: somebody insists
            self._children.send(signal.SIGKILL)

    def _look_for_outcome(self) -> None:
        """Once the job has ended, whoever is left shall leave too."""
        if self._outcome is not None or self._asked is not None or self._coordinator is None:
            return
        self._outcome = self._coordinator.outcome
        now, grace_s = time.monotonic(), self._settings.grace_s
        if self._outcome is None:
            living = bool(self._children.living)
            self._forsaken_s = None if living else self._forsaken_s or now
            if self._forsaken_s is not None and now - self._forsaken_s > _DECIDES_WITHIN_S:
                raise RuntimeError("every process has ended, and the coordinator does not say how the job did")
        elif self._outcome.kind == "finished":  # spares were told, and leave by themselves, but who is not yet there
            late = {child.uid for child in self._children.living if not self._find(Keys.joined(child.uid))}
            self._children.send(signal.SIGTERM, late)
            self._due = [(now + grace_s, signal.SIGTERM), (now + 2 * grace_s, signal.SIGKILL)]
        else:
            self._due = [(now, signal.SIGTERM), (now + grace_s, signal.SIGKILL)]

    def _press(self) -> None:
        while self._due and self._due[0][0] <= time.monotonic():
            _, number = self._due.pop(0)
            for child in self._children.living:
                self._recorder.record("stop", uid=child.uid, label=child.label, signal=signal.Signals(number).name)
            self._children.send(number)

    def _patience(self) -> float:
        return min([_LOOK_S, *(at - time.monotonic() for at, _ in self._due)])

    def _find(self, key: str) -> str:
        store = self._store
        return store.get(key).decode() if store is not None and store.check([key]) else ""

    def _never(self) -> tuple[str, ...]:
        """Failures that were scheduled and of which nobody has claimed the first time."""
        return tuple(
            str(failure)
            for index, failure in enumerate(self._settings.schedule)
            if failure.times is not None and not self._find(f"{Keys.fired(index)}/0")
        )

    def _is_over(self) -> bool:
        return (self._outcome is not None or self._asked is not None) and not self._children.living

    def _end(self) -> Summary:
        status, outcome = self.status(), self._outcome
        kind: str
        if outcome is not None:
            kind, code, message = outcome.kind, outcome.exit_code, outcome.message
        else:
            assert self._asked is not None
            kind, code, message = "interrupted", 128 + self._asked[0], signal.Signals(self._asked[0]).name
        summary = Summary(
            kind,
            code,
            message,
            steps=status.step or 0,
            failures_survived=status.failures,
            generations=status.generation + 1,
            seconds=time.monotonic() - self._begun_mono,
            run=self._run,
            inexact=self._find(Keys.inexact) or self._inexact,
            never=self._never(),
        )
        for text in summary.never if kind == "finished" else ():
            self._relay.say(f"never happened: '{text}' (is there such a step, such a bucket, a save at that step?)")
        self._opening.join()
        try:
            write_record(self._run, self._settings, self._begun_s, summary)
        except EvergradError as error:  # the job is over all the same
            self._relay.say(str(error))
        self._recorder.record("end", outcome=kind, exit_code=code, message=message, steps=summary.steps)
        return summary


def _raise(error: BaseException) -> None:
    raise error
