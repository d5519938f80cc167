"""The other nodes of a job, as its head sees them: their launchers come, say what happens, and do as they are told.

A thread looks for what they say, and leaves it for the main thread. Nothing is decided here but one thing: that a
launcher which has not been heard of for as long as its lease lasts is gone, and with it all that it has started. From
then on nothing that belongs to this attempt is read any more, so that a machine whose cable is plugged in again cannot
take part by what it had still to say.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from evergrad._wire import Forged
from evergrad.errors import UsageError
from evergrad.recovery.coordinator import Coordinator
from evergrad.recovery.heartbeat import ProcessHealth
from evergrad.recovery.launch.node_protocol import Inbox, NodeHeartbeat, NodeKeys, Outbox, StartOrder, lease_s
from evergrad.recovery.launch.output import EventLog, OutputRelay
from evergrad.recovery.launch.processes import Child, ProcessExit, ProcessSet
from evergrad.recovery.launch.settings import LaunchSettings, ProcessPlacement, ProcessPlacements
from evergrad.recovery.membership import StoreKeys
from evergrad.recovery.store import SignedStore
from evergrad.timeline import Recorder
from evergrad.wording import count_of

_LOOK_S = 0.01
_BEGINS_WITHIN_S = 30.0
"""From its arrival to its first beat a launcher starts its processes, and has longer than its lease for that."""


@dataclass(frozen=True, slots=True)
class NodeArrival:
    """A launcher has come for a node, and waits to be told what to start: `RemoteNodes.welcome`."""

    node: int
    attempt: int
    machine: str
    is_first: bool
    """Whether nobody was there for this node before."""


@dataclass(frozen=True, slots=True)
class NodeDeparture:
    """A node is gone."""

    node: int
    why: str
    """As in "rank 2 …"; empty if its launcher has left in good order, after all of its processes."""
    uids: tuple[int, ...]
    """What ran there last."""


@dataclass(frozen=True, slots=True)
class SignalRequest:
    """A scheduled failure on more than one machine: these are to be sent a signal."""

    number: int
    uids: tuple[int, ...]


@dataclass(slots=True)
class _Node:
    """One of the others, in one attempt; `orders` is None while nobody is there."""

    index: int
    name: str
    attempt: int = -1
    orders: Outbox | None = None
    words: Inbox | None = None
    machine: str = ""
    was_here: bool = False
    beat: int = -1
    heard_s: float = 0.0
    children: dict[int, Child] = field(default_factory=dict)
    vitals: dict[int, ProcessHealth] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)
    next_attempt: int = 0
    pending_since: int | None = None
    """The last beat of who is here, when another one came for the same node."""


class RemoteNodes(ProcessSet):
    """What runs on other nodes, from `listen` to `close`."""

    def __init__(
        self, settings: LaunchSettings, store: SignedStore, ear: SignedStore, wake: Callable[[], None]
    ) -> None:
        """Two connections: for the main thread, and for the one that listens. `wake` is called when there is news."""
        self._settings, self._store, self._ear, self._wake = settings, store, ear, wake
        self._lease_s = lease_s(settings.patience)
        self._nodes = {index: _Node(index, name) for index, name in enumerate(settings.names) if index}
        self._news: deque[NodeArrival | NodeDeparture | ProcessExit | SignalRequest] = deque()
        self._lock = threading.Lock()
        """Over the nodes."""
        self._dooms = 0
        self._next_beats_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="evergrad-nodes", daemon=True)

    def listen(self) -> None:
        """Begin."""
        self._thread.start()

    def take_events(self) -> list[NodeArrival | NodeDeparture | ProcessExit | SignalRequest]:
        """What has happened since, in order."""
        found = []
        while self._news:
            found.append(self._news.popleft())
        return found

    def missing(self) -> list[str]:
        """The nodes for which nobody has come yet."""
        with self._lock:
            return [node.name for node in self._nodes.values() if not node.was_here]

    def is_here(self, index: int) -> bool:
        """Whether processes can be started there."""
        with self._lock:
            return self._nodes[index].orders is not None

    def accept(
        self, arrival: NodeArrival, places: Sequence[ProcessPlacement], nodes: Sequence[int], running_s: float
    ) -> None:
        """Tell a launcher what to start; `running_s` is how long the job has been running."""
        starts = [StartOrder(place) for place in places]
        with self._lock:
            node = self._nodes[arrival.node]
            if node.attempt != arrival.attempt or node.orders is None:
                return
            node.children |= {place.uid: _child(place) for place in places}
        self._store.set(
            NodeKeys.answer(arrival.node, arrival.attempt),
            json.dumps(
                {"starts": [one.to_json() for one in starts], "nodes": [*nodes], "running_s": running_s},
            ),
        )

    def refuse(self, arrival: NodeArrival, why: str) -> None:
        """Send a launcher away."""
        with self._lock:
            node = self._nodes[arrival.node]
            if node.attempt == arrival.attempt:
                node.orders = node.words = None
        self._store.set(NodeKeys.answer(arrival.node, arrival.attempt), json.dumps({"refused": why}))

    @property
    def living(self) -> list[Child]:
        """Those that were ordered to start, and of whose end nobody has heard."""
        with self._lock:
            return [child for node in self._nodes.values() for child in node.children.values()]

    def start(
        self, place: ProcessPlacement, generation: int | None, nodes: Sequence[int], *, forked: bool = False
    ) -> None:
        """Order one more."""
        with self._lock:
            node = self._nodes[place.node]
            orders = node.orders
            if orders is not None:
                node.children[place.uid] = _child(place)
        if orders is None:
            raise UsageError(f"{place.label} cannot be started: node {node.name} is not there")
        orders.send(do="start", start=StartOrder(place, generation).to_json(), nodes=[*nodes])

    def send(self, number: int, uids: Collection[int] | None = None) -> None:
        """Order a signal."""
        for node in self._present():
            meant = [uid for uid in node.children if uids is None or uid in uids]
            if meant and node.orders is not None:
                node.orders.send(do="signal", number=number, uids=meant, for_all=uids is None)

    def health(self) -> dict[int, ProcessHealth]:
        """As their launchers saw them last; they come a beat late, and so does what is found in them."""
        return {uid: process_health for node in self._present() for uid, process_health in node.vitals.items()}

    def stack(self, uid: int) -> str:
        """As its launcher saw it, not long ago."""
        with self._lock:
            return next((node.stacks[uid] for node in self._nodes.values() if uid in node.stacks), "")

    def end(self, summary: dict[str, Any], timeout_s: float) -> None:
        """The job is over: let all launchers leave, and wait until they have."""
        for node in self._present():
            if node.orders is not None:
                node.orders.send(do="end", summary=summary)
        end_s = time.monotonic() + timeout_s
        while self._present() and time.monotonic() < end_s and self._thread.is_alive():
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Listen no more. Twice is fine."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _present(self) -> list[_Node]:
        with self._lock:
            return [node for node in self._nodes.values() if node.orders is not None]

    def _listen(self) -> None:
        last_s = time.monotonic()
        try:
            while not self._over.wait(_LOOK_S):
                now = time.monotonic()
                if now - last_s > self._lease_s / 2:  # who was away cannot say that others were silent
                    for node in self._nodes.values():
                        node.heard_s = now
                last_s = now
                if is_time := now >= self._next_beats_s:
                    self._next_beats_s = now + self._settings.patience.beat_s / 2
                for node in self._nodes.values():
                    self._look(node, now, is_time)
                self._look_for_doom()
        except Forged as error:
            with suppress(RuntimeError):
                self._ear.set(StoreKeys.fatal, str(error))
        except RuntimeError:
            if not self._over.is_set():
                raise

    def _look(self, node: _Node, now: float, is_time: bool) -> None:
        if node.words is not None:
            for word in node.words.take():
                self._hear(node, word)
        if node.orders is not None and is_time:
            self._check_heartbeat(node, now)
        if is_time:
            self._look_for_hello(node, now)

    def _hear(self, node: _Node, word: dict[str, Any]) -> None:
        """What a launcher says, in order."""
        kind = word["what"]
        if kind == "started":
            with self._lock:
                child = node.children.get(word["uid"])
                if child is not None:
                    node.children[child.uid] = Child(child.uid, child.label, word["pid"], -1, -1)
        elif kind == "exit":
            with self._lock:
                child = node.children.pop(word["uid"], None)
                node.vitals = {uid: process_health for uid, process_health in node.vitals.items() if uid != word["uid"]}
            if child is not None:
                self._report(ProcessExit(child, word["code"]))
        else:
            assert kind == "leaves", kind
            self._depart(node, "")

    def _check_heartbeat(self, node: _Node, now: float) -> None:
        text = self._ear.find(NodeKeys.beat(node.index, node.attempt))
        beat = NodeHeartbeat.from_json(text) if text is not None else None
        if beat is not None and beat.number > node.beat:  # an older one, brought back by somebody, is none
            node.beat, node.heard_s = beat.number, now
            with self._lock:
                here = [process_health for process_health in beat.vitals if process_health.uid in node.children]
                node.vitals = {process_health.uid: process_health for process_health in here}
                node.stacks |= {
                    process_health.uid: process_health.stack for process_health in here if process_health.stack
                }
        elif now - node.heard_s >= (self._lease_s if node.beat >= 0 else _BEGINS_WITHIN_S):
            why = f"is on node {node.name} ({node.machine}), which cannot be heard for {now - node.heard_s:.1f} s"
            self._depart(node, why)

    def _depart(self, node: _Node, why: str) -> None:
        with self._lock:
            uids, orders = tuple(node.children), node.orders
            node.orders = node.words = None
            node.children, node.vitals = {}, {}
        if why and orders is not None:  # should it hear anything at all, it hears this
            orders.send(do="leave", why=why)
        self._report(NodeDeparture(node.index, why, uids))

    def _look_for_hello(self, node: _Node, now: float) -> None:
        """Whether another launcher has come; it waits while one is here that may live."""
        text = self._ear.find(NodeKeys.hello(node.index, node.next_attempt))
        if text is None:
            return
        about = json.loads(text)
        if node.orders is not None:
            if node.pending_since is None:
                node.pending_since = node.beat
            elif node.beat > node.pending_since:
                why = f"node {node.name} has a launcher already, on {node.machine}: each needs a --node-rank of its own"
                self._ear.set(NodeKeys.answer(node.index, node.next_attempt), json.dumps({"refused": why}))
                node.next_attempt, node.pending_since = node.next_attempt + 1, None
            return
        with self._lock:
            node.attempt, node.next_attempt, node.pending_since = node.next_attempt, node.next_attempt + 1, None
            node.machine, node.beat, node.heard_s = about["machine"], -1, now
            node.orders = Outbox(self._store, NodeKeys.orders(node.index, node.attempt))
            node.words = Inbox(self._ear, NodeKeys.words(node.index, node.attempt))
            is_first, node.was_here = not node.was_here, True
        self._report(NodeArrival(node.index, node.attempt, node.machine, is_first))

    def _look_for_doom(self) -> None:
        while (text := self._ear.find(NodeKeys.signal_request(self._dooms))) is not None:
            self._dooms += 1
            asked = json.loads(text)
            self._report(SignalRequest(signal.Signals(asked["number"]), tuple(asked["uids"])))

    def _report(self, news: NodeArrival | NodeDeparture | ProcessExit | SignalRequest) -> None:
        self._news.append(news)
        self._wake()


def _child(place: ProcessPlacement) -> Child:
    """A process elsewhere: nobody here reads its output."""
    return Child(place.uid, place.label, 0, -1, -1)


# The head's answer to what other nodes do: who comes is told what to start, who is gone is out of the job.


class NodeMembership:
    """For the main thread of the head's launcher, once the store is open."""

    def __init__(
        self,
        settings: LaunchSettings,
        nodes: RemoteNodes,
        places: ProcessPlacements,
        store: SignedStore,
        coordinator: Coordinator,
        *,
        processes: ProcessSet,
        relay: OutputRelay,
        recorder: Recorder,
        event_log: EventLog,
        begun_mono: float,
    ) -> None:
        self._settings, self._nodes, self._places, self._store = settings, nodes, places, store
        self._coordinator, self._processes, self._relay, self._recorder = coordinator, processes, relay, recorder
        self._event_log, self._begun_mono = event_log, begun_mono
        self._until_s: float | None = time.monotonic() + settings.rendezvous_timeout_s
        """How long those that have not come yet are waited for; None: all have, or the job is given up."""

    def handle_events(self, *, is_open: bool) -> list[ProcessExit]:
        """See to all that has happened since, but for exits, which are returned. Is it not open, nobody may come."""
        exits = []
        for news in self._nodes.take_events():
            if isinstance(news, ProcessExit):
                exits.append(news)
            elif isinstance(news, NodeDeparture):
                self._handle_departure(news)
            elif not isinstance(news, NodeArrival):
                self._processes.send(news.number, news.uids)
            elif is_open:
                self._welcome(news)
            else:
                self._nodes.refuse(news, "the job is over")
        self._look_who_is_missing()
        return exits

    def _look_who_is_missing(self) -> None:
        if self._until_s is None:
            return
        missing, is_late = self._nodes.missing(), time.monotonic() >= self._until_s
        if missing and is_late:
            waited = f"{self._settings.rendezvous_timeout_s:g} s"
            self._store.set(
                StoreKeys.fatal,
                f"{', '.join(missing)} did not come within {waited}: see there, or give a longer --rendezvous-timeout",
            )
        if is_late or not missing:
            self._until_s = None

    def _welcome(self, arrival: NodeArrival) -> None:
        """What a node starts with; one that comes again brings spares, which the job grows by where it has shrunk."""
        local_state = [place for place in self._settings.places() if place.node == arrival.node]
        name = self._settings.names[arrival.node]
        if not arrival.is_first:
            local_state = [self._places.add(place.node, place.device) for place in local_state]
            for place in local_state:
                self._coordinator.add_spare(place.uid)
            self._relay.print_line(f"node {name} is back, on {arrival.machine}: {count_of(len(local_state), 'spare')}")
        self._recorder.record(
            "node_joined", node=name, machine=arrival.machine, uids=[place.uid for place in local_state]
        )
        self._nodes.accept(arrival, local_state, self._places.nodes, time.monotonic() - self._begun_mono)

    def _handle_departure(self, gone: NodeDeparture) -> None:
        name, count = self._settings.names[gone.node], count_of(len(gone.uids), "process", "processes")
        self._recorder.record("node_left", node=name, reason=gone.why, uids=list(gone.uids))
        why = gone.why or f"is on node {name}, which has left"
        for uid in gone.uids:
            self._event_log.expect_loss(uid, self._coordinator.rank_of(uid), why)
        for uid in gone.uids:
            self._coordinator.process_lost(uid, why)
        self._relay.print_line(f"node {name} {'is lost' if gone.why else 'has left'}, with {count}")
