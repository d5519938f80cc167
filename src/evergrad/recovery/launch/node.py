"""The launcher of a node that is not the head: it starts what the head wants, says what becomes of it, and obeys.

It lives by a lease: while the head's store answers its beats it goes on. When there is no answer for as long as the
head waits for a silent node, it kills its processes and ends, with exit code 5: by then the others go on without this
node, or there is nobody left to go on with. A store that is closed, because the head has died, is answer enough.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evergrad._forkserver import preload
from evergrad._wire import Forged, Secret
from evergrad.errors import RecoveryError, UsageError
from evergrad.recovery.heartbeat import ProcessHealth
from evergrad.recovery.launch.local_processes import NodeProcesses
from evergrad.recovery.launch.output import OutputRelay
from evergrad.recovery.launch.processes import LEAVE_SIGNALS, SAME_NOTICE_S, Children
from evergrad.recovery.launch.rendezvous import HeadAddress, await_head
from evergrad.recovery.launch.settings import OPTION_OF, LaunchSettings
from evergrad.recovery.launch.summary import Summary
from evergrad.recovery.membership import StoreKeys
from evergrad.timeline import Recorder
from evergrad.wording import count_of, first_line

if TYPE_CHECKING:
    from evergrad.recovery.store import StoreClient

EXIT_CUT_OFF = 5
"""The exit code of a launcher that has lost the head."""
_ANSWERS_WITHIN_S = 60.0
_CONNECTS_WITHIN_S = 20.0
_STACKS_EVERY = 4


class _Interrupted(Exception):
    """A signal asked this launcher to leave before it had anything to do."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def run_node(settings: LaunchSettings, *, as_json: bool = False) -> Summary:
    """Be one node of a job until that ends; only in the main thread, where signals arrive."""
    begun_s = time.monotonic()
    assert settings.out is not None
    run, name = settings.out.absolute(), f"n{settings.node_rank}"
    children = Children()
    with children:
        try:
            if settings.preload:
                preload("evergrad.recovery.join_job")
            head = await_head(run, settings.rendezvous_timeout_s, _pausing(children))
            head.check(settings.to_json(), OPTION_OF)
            settings = replace(settings, node_names=tuple(str(one) for one in _listed(head.settings, "node_names")))
            name = settings.names[settings.node_rank or 0]
            client = _connected(head, run, children)
            attempt, answer = _register_node(client, settings, children)
        except _Interrupted as error:
            return _summary("interrupted", 128 + error.number, str(error), begun_s, run)
        with Recorder(run / f"timeline-{name}.jsonl", f"launcher {name}") as recorder:
            relay = OutputRelay(
                run / "logs", all_to_stderr=as_json, status=lambda: f"node {name} of the job at {head.host}"
            )
            with closing(relay):
                node_processes = NodeProcesses(
                    settings,
                    children,
                    relay,
                    recorder,
                    run=run,
                    host=head.host,
                    port=head.port,
                    begun_mono=time.monotonic() - answer["running_s"],
                )
                with closing(node_processes):
                    ended = partial(_summary, begun_s=begun_s, run=run)
                    post = _NodeLauncher(settings, head, name, client, attempt, node_processes, relay, recorder, ended)
                    summary = post.stay(answer, children.wake)
                relay.close("" if as_json else f"{name}: {post.last or summary.outcome}")
        post.leave()
        return summary


class _NodeLauncher:
    """One node while it takes part, seen from the main thread."""

    def __init__(
        self,
        settings: LaunchSettings,
        head: HeadAddress,
        name: str,
        client: StoreClient,
        attempt: int,
        node_processes: NodeProcesses,
        relay: OutputRelay,
        recorder: Recorder,
        ended: Callable[[str, int, str], Summary],
    ) -> None:
        """`ended` makes the summary of this node, from outcome, exit code and message."""
        from evergrad.recovery.launch.node_protocol import NodeKeys, Outbox, lease_s

        assert settings.node_rank is not None
        self._settings, self._head, self._name, self._client = settings, head, name, client
        self._node, self._attempt = settings.node_rank, attempt
        self._node_processes, self._relay, self._recorder, self._ended = node_processes, relay, recorder, ended
        self._words = Outbox(client, NodeKeys.words(self._node, attempt))
        self._lease_s = lease_s(settings.patience)
        self._orders: deque[dict[str, Any]] = deque()
        self._vitals: tuple[ProcessHealth, ...] = ()
        self._turn = 0
        self._answered_s = time.monotonic()
        """When the last beat that was answered was sent."""
        self._gone = ""
        """Why there is no head any more, once that is known."""
        self._clients: list[StoreClient] = []
        """Those in which threads may wait."""
        self._over = threading.Event()
        self._asked: tuple[int, float] | None = None
        self._sent: dict[int, float] = {}
        """When our processes were last sent a signal that was meant for everyone."""
        self._summary: Summary | None = None
        self.last = ""
        """What there is to be said in the end."""

    def stay(self, answer: dict[str, Any], poke: Callable[[], None]) -> Summary:
        """Until the head says that it is over, or cannot say anything any more."""
        from evergrad.recovery.launch.node_protocol import StartOrder

        starts = [StartOrder.from_json(one) for one in answer["starts"]]
        count = count_of(len(starts), "process", "processes")
        self._relay.print_line(
            f"{self._name}: {count} on {socket.gethostname()}, head at {self._head.host}:{self._head.port}"
        )
        for start in starts:
            self._start(start, answer["nodes"], forked=self._settings.preload)
        self._relay.begin()  # threads: no forks any more
        threads = self._listen(poke)
        try:
            while self._summary is None:
                left_s = self._answered_s + self._lease_s - time.monotonic()
                happened = self._node_processes.wait(min(self._settings.patience.beat_s, left_s))
                for number in happened.signals:
                    self._handle_signal(number)
                for gone in happened.exits:
                    self._send_message(what="exit", uid=gone.child.uid, code=gone.code)
                    self._node_processes.record_exit(gone)
                self._look_at_vitals()
                while self._orders and self._summary is None:
                    self._obey(self._orders.popleft())
                if self._summary is None:
                    self._look_at_lease()
                if self._summary is None and self._asked is not None:
                    self._leave_if_all_have()
        finally:
            self._over.set()
            self._node_processes.send(signal.SIGKILL)
            for client in self._clients:
                client.cut()
            for thread in threads:
                thread.join()
        self._recorder.record("launcher_ended", outcome=self._summary.outcome, message=self._summary.message)
        return self._summary

    def leave(self) -> None:
        """The last word, when all is written; the head may wait for it."""
        if self._summary is not None and self._summary.outcome != "cut-off":
            self._send_message(what="leaves")
            with suppress(RuntimeError, Forged):
                self._client.has(StoreKeys.fatal)  # an answer: what was said before has arrived

    def _listen(self, poke: Callable[[], None]) -> list[threading.Thread]:
        self._answered_s = time.monotonic()
        try:
            for_orders, for_beats = self._client.reconnect(), self._client.reconnect()
        except RuntimeError as error:
            self._gone = first_line(error)
            return []
        self._clients = [for_orders, for_beats]
        threads = [
            threading.Thread(target=self._await_orders, args=(for_orders, poke), name="evergrad-orders", daemon=True),
            threading.Thread(target=self._beat, args=(for_beats, poke), name="evergrad-beat", daemon=True),
        ]
        for thread in threads:
            thread.start()
        return threads

    def _await_orders(self, client: StoreClient, poke: Callable[[], None]) -> None:
        from evergrad.recovery.launch.node_protocol import Inbox, NodeKeys

        orders = Inbox(client, NodeKeys.orders(self._node, self._attempt))
        try:
            while not self._over.is_set():
                client.wait(orders.awaited)
                self._orders += orders.take()
                poke()
        except Forged as error:
            with suppress(RuntimeError):
                client.set(StoreKeys.fatal, str(error))
        except RuntimeError:  # cut, by us; or the store is gone, which the beats find out too
            pass

    def _beat(self, client: StoreClient, poke: Callable[[], None]) -> None:
        from evergrad.recovery.launch.node_protocol import NodeHeartbeat, NodeKeys

        key, number = NodeKeys.beat(self._node, self._attempt), 0
        try:
            while not self._over.is_set():
                sent_s = time.monotonic()
                client.set(key, NodeHeartbeat(number, self._vitals).to_json())
                client.has(key)  # an answer
                self._answered_s, number = sent_s, number + 1
                self._over.wait(max(0.0, sent_s + self._settings.patience.beat_s - time.monotonic()))
        except (RuntimeError, Forged) as error:
            if not self._over.is_set():
                self._gone = first_line(error)
                poke()

    def _look_at_vitals(self) -> None:
        """For the next beat; with stacks now and then."""
        self._turn += 1
        health = self._node_processes.health()
        if self._turn % _STACKS_EVERY == 0:
            health = {
                uid: replace(process_health, stack=self._node_processes.stack(uid))
                for uid, process_health in health.items()
            }
        self._vitals = tuple(health.values())

    def _look_at_lease(self) -> None:
        silent_s = time.monotonic() - self._answered_s
        if not self._gone and silent_s < self._lease_s:
            return
        where = f"the head at {self._head.host}:{self._head.port}"
        what = f"{where} is gone" if self._gone else f"{where} does not answer for {silent_s:.1f} s"
        self._summary = self._ended("cut-off", EXIT_CUT_OFF, what)
        count = count_of(len(self._node_processes.living), "process", "processes")
        self.last = f"{what}: {count} killed. Where the head still runs, this node may be started again"

    def _obey(self, order: dict[str, Any]) -> None:
        from evergrad.recovery.launch.node_protocol import StartOrder

        what = order["do"]
        if what == "start":
            self._start(StartOrder.from_json(order["start"]), order["nodes"])
        elif what == "signal":
            if not order["for_all"] or self._is_news(order["number"]):
                self._node_processes.send(order["number"], order["uids"])
        elif what == "leave":
            self._summary = self._ended("cut-off", EXIT_CUT_OFF, f"the head takes this node for lost: {order['why']}")
            self.last = self._summary.message
        else:
            assert what == "end", what
            told = order["summary"]
            self._summary = self._ended(told["outcome"], told["exit_code"], told["message"])

    def _start(self, start: Any, nodes: list[int], *, forked: bool = False) -> None:
        place = start.place
        try:
            self._node_processes.start(place, start.generation, nodes, forked=forked)
        except UsageError as error:
            self._relay.print_line(f"{self._name}: {error}")
            self._send_message(what="exit", uid=place.uid, code=1)
            return
        pid = next(child.pid for child in self._node_processes.living if child.uid == place.uid)
        self._send_message(what="started", uid=place.uid, pid=pid)

    def _send_message(self, **word: Any) -> None:
        with suppress(RuntimeError):  # no head: that is seen by the beats
            self._words.send(**word)

    def _is_news(self, number: int) -> bool:
        """Whether a signal for all has not just come by the other way: srun sends it to every launcher, as the head."""
        now, before = time.monotonic(), self._sent.get(number)
        self._sent[number] = now
        return number == signal.SIGKILL or before is None or now - before >= SAME_NOTICE_S

    def _handle_signal(self, number: int) -> None:
        """A signal that this launcher was sent is meant for its node."""
        name, now = signal.Signals(number).name, time.monotonic()
        self._recorder.record("signal_received", signal=name)
        if number in LEAVE_SIGNALS and self._asked is not None and now - self._asked[1] >= SAME_NOTICE_S:
            self._node_processes.send(signal.SIGKILL)  # somebody insists
            return
        if number in LEAVE_SIGNALS and self._asked is None:
            self._asked = number, now
            grace = f"{self._settings.grace_period_s:g} s"
            count = count_of(len(self._node_processes.living), "process", "processes")
            self._relay.print_line(
                f"{self._name}: {name}: passed on to {count}; those that still run in {grace} are killed"
            )
        if self._is_news(number):
            self._node_processes.send(number)

    def _leave_if_all_have(self) -> None:
        assert self._asked is not None
        number, at_s = self._asked
        if time.monotonic() >= at_s + self._settings.grace_period_s:
            self._node_processes.send(signal.SIGKILL)
        if not self._node_processes.living:
            self._summary = self._ended("interrupted", 128 + number, signal.Signals(number).name)


def _summary(outcome: str, code: int, message: str, begun_s: float, run: Path) -> Summary:
    """Of this node; how the job did is in the head's."""
    return Summary(
        outcome, code, message, steps=0, failures_survived=0, generations=0, seconds=time.monotonic() - begun_s, run=run
    )


def _pausing(children: Children) -> Callable[[float], None]:
    """A pause that a signal ends."""

    def pause(seconds: float) -> None:
        for number in children.wait(seconds).signals:
            if number in LEAVE_SIGNALS:
                raise _Interrupted(number)

    return pause


def _connected(head: HeadAddress, run: Path, children: Children) -> StoreClient:
    """A connection to the head's store. What cannot be reached at all is found out before torch tries for minutes."""
    pause, end_s, why = _pausing(children), time.monotonic() + _CONNECTS_WITHIN_S, ""
    while time.monotonic() < end_s:
        try:
            with socket.create_connection((head.host, head.port), timeout=5.0):
                from evergrad.recovery.store import StoreClient

                return StoreClient(head.host, head.port, secret=Secret.read(run / "secret"))
        except (OSError, RuntimeError) as error:
            why = getattr(error, "strerror", None) or first_line(error)
            if isinstance(error, ConnectionRefusedError):  # it listened before it wrote where
                break
        pause(0.2)
    raise UsageError(
        f"the head's store at {head.host}:{head.port} (process {head.pid} on {head.machine}) cannot be reached: {why}. "
        "Has it ended? If it has another address here, start it with --master-addr"
    )


def _register_node(client: StoreClient, settings: LaunchSettings, children: Children) -> tuple[int, dict[str, Any]]:
    """Say that this node is there; the number of this attempt, and what the head wants it to start."""
    from evergrad.recovery.launch.node_protocol import NodeKeys

    node, attempt, pause = settings.node_rank or 0, 0, _pausing(children)
    about = {"machine": socket.gethostname(), "pid": os.getpid(), "token": secrets.token_hex(8)}
    mine = json.dumps(about)
    try:
        while client.claim(NodeKeys.hello(node, attempt), mine) != mine:
            attempt += 1
        end_s = time.monotonic() + _ANSWERS_WITHIN_S
        while (text := client.find(NodeKeys.answer(node, attempt))) is None:
            if time.monotonic() >= end_s:
                raise RecoveryError(
                    f"the head does not answer node {settings.names[node]}: its job is ending, or stuck"
                )
            pause(0.01)
    except RuntimeError as error:
        raise RecoveryError(f"the head is gone: {first_line(error)}") from None
    answer: dict[str, Any] = json.loads(text)
    if "refused" in answer:
        raise UsageError(f"the head does not want this node: {answer['refused']}")
    return attempt, answer


def _listed(settings: dict[str, Any], name: str) -> list[Any]:
    found = settings.get(name)
    return found if isinstance(found, list) else []
