"""What the head takes of what is said in other nodes' names: in order, once, in time, and only with the right seal."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from evergrad._wire import Secret
from evergrad.recovery.heartbeat import LivenessTimeouts, ProcessHealth
from evergrad.recovery.launch.node_protocol import Inbox, NodeHeartbeat, NodeKeys, Outbox, StartOrder, lease_s
from evergrad.recovery.launch.processes import ProcessExit
from evergrad.recovery.launch.remote_nodes import NodeArrival, NodeDeparture, RemoteNodes
from evergrad.recovery.launch.settings import LaunchSettings, ProcessPlacement
from evergrad.recovery.membership import StoreKeys
from evergrad.recovery.store import SignedStore

PLACES = [ProcessPlacement(2, 1, 0, 2), ProcessPlacement(3, 1, 1, 3)]


def until(is_so: Callable[[], Any]) -> None:
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


class Other:
    """The head's view of one node, and that node's voice."""

    def __init__(self, folder: Path, silent_s: float) -> None:
        (folder / "train.py").touch()
        patience = LivenessTimeouts(heartbeat_timeout_s=silent_s)
        settings = LaunchSettings(
            script=str(folder / "train.py"), num_ranks=4, num_nodes=2, node_rank=0, out=folder, patience=patience
        )
        self.raw = HashStore()
        self.store = SignedStore(self.raw, Secret.make(folder / "secret"))
        self.nodes = RemoteNodes(settings, self.store, self.store, lambda: None)
        self.news: list[Any] = []
        self.nodes.listen()

    def say_hello(self, attempt: int) -> None:
        self.store.set(NodeKeys.hello(1, attempt), json.dumps({"machine": f"m{attempt}", "pid": 1}))

    def beat(self, number: int, attempt: int = 0, vitals: tuple[ProcessHealth, ...] = ()) -> None:
        self.store.set(NodeKeys.beat(1, attempt), NodeHeartbeat(number, vitals).to_json())

    def hear(self, kind: type) -> Any:
        """The next news of a kind."""

        def look() -> bool:
            self.news += self.nodes.take_events()
            return any(isinstance(one, kind) for one in self.news)

        until(look)
        index = next(index for index, one in enumerate(self.news) if isinstance(one, kind))
        return self.news.pop(index)

    def come(self, attempt: int = 0) -> NodeArrival:
        self.say_hello(attempt)
        arrival = self.hear(NodeArrival)
        assert isinstance(arrival, NodeArrival)
        self.nodes.accept(arrival, PLACES, [0, 0, 1, 1], 1.5)
        return arrival


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Other]:
    found = Other(tmp_path, 0.1)
    yield found
    found.nodes.close()


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Other]:
    found = Other(tmp_path, 30.0)
    yield found
    found.nodes.close()


def test_a_node_that_comes_is_told_what_to_start(patient: Other) -> None:
    assert patient.nodes.missing() == ["n1"]
    assert patient.come() == NodeArrival(1, 0, "m0", True)
    assert patient.nodes.missing() == []
    answer = json.loads(patient.store.get(NodeKeys.answer(1, 0)))
    assert [StartOrder.from_json(one).place for one in answer["starts"]] == PLACES
    assert (answer["nodes"], answer["running_s"]) == ([0, 0, 1, 1], 1.5)
    assert [child.label for child in patient.nodes.living] == ["rank 2", "rank 3"]


def test_an_exit_is_heard_once_and_orders_arrive_in_order(patient: Other) -> None:
    patient.come()
    words = Outbox(patient.store, NodeKeys.words(1, 0))
    words.send(what="started", uid=2, pid=41)
    words.send(what="exit", uid=2, code=-9)
    words.send(what="exit", uid=2, code=-9)
    words.send(what="exit", uid=7, code=0)
    words.send(what="exit", uid=3, code=0)
    first, second = patient.hear(ProcessExit), patient.hear(ProcessExit)
    assert (first.child.uid, first.child.pid, first.code) == (2, 41, -9)
    assert (second.child.uid, second.code) == (3, 0)
    patient.nodes.start(ProcessPlacement(9, 1, 0, None), 4, [0, 0, 1, 1])
    patient.nodes.send(15, {9, 1})
    patient.nodes.send(9)
    start, term, kill = Inbox(patient.store, NodeKeys.orders(1, 0)).take()
    assert StartOrder.from_json(start["start"]) == StartOrder(ProcessPlacement(9, 1, 0, None), 4)
    assert (term["number"], term["uids"], term["for_all"]) == (15, [9], False)
    assert (kill["number"], kill["uids"], kill["for_all"]) == (9, [9], True)


def test_what_a_beat_shows_of_processes_is_known_at_the_head(patient: Other) -> None:
    patient.come()
    vital = ProcessHealth(2, 5, 0.1, False, 0.0, 0, 0.5, 1.0, 3, stack="in a loop")
    patient.beat(0, vitals=(vital, ProcessHealth(99, 1, 0.0, False, 0.0, 0, 0.0, 0.0, 0)))
    until(patient.nodes.health)
    assert patient.nodes.health() == {2: vital}
    assert patient.nodes.stack(2) == "in a loop"
    assert patient.nodes.stack(99) == ""


def test_a_beat_that_is_brought_back_is_no_sign_of_life(other: Other) -> None:
    other.come()
    other.beat(0)
    other.beat(1)
    begun = time.monotonic()
    while not any(isinstance(one, NodeDeparture) for one in other.news):
        assert time.monotonic() < begun + 20
        other.beat(0)  # again and again
        other.news += other.nodes.take_events()
        time.sleep(0.005)
    gone = other.hear(NodeDeparture)
    assert (gone.node, gone.uids) == (1, (2, 3))
    assert "is on node n1 (m0), which cannot be heard for" in gone.why


def test_nothing_of_an_attempt_that_is_over_is_taken(other: Other) -> None:
    other.come()
    other.beat(0)
    other.hear(NodeDeparture)
    assert other.nodes.living == []
    other.beat(1)
    Outbox(other.store, NodeKeys.words(1, 0)).send(what="exit", uid=2, code=0)
    assert other.come(1) == NodeArrival(1, 1, "m1", False)
    other.beat(1)
    assert not [one for one in other.news if isinstance(one, ProcessExit)]
    Outbox(other.store, NodeKeys.words(1, 1)).send(what="leaves")
    assert other.hear(NodeDeparture) == NodeDeparture(1, "", (2, 3))
    assert not [one for one in other.news if isinstance(one, ProcessExit)]


def test_a_second_launcher_waits_until_it_is_certain_that_the_first_one_lives(patient: Other) -> None:
    patient.come()
    patient.beat(0)
    patient.say_hello(1)
    answer = NodeKeys.answer(1, 1)
    number = 0

    def is_answered() -> bool:
        nonlocal number
        number += 1
        patient.beat(number)
        return patient.raw.check([answer])

    until(is_answered)
    assert "node n1 has a launcher already, on m0" in json.loads(patient.store.get(answer))["refused"]
    assert patient.nodes.is_here(1)


def test_a_value_with_a_wrong_seal_ends_the_job(patient: Other) -> None:
    patient.come()
    patient.raw.set(f"{NodeKeys.words(1, 0)}/0", '{"what": "exit", "uid": 2, "code": 0}')
    until(lambda: patient.raw.check([StoreKeys.fatal]))
    assert "was not written by this job" in patient.store.get(StoreKeys.fatal)


def test_a_node_may_be_silent_for_longer_than_a_process() -> None:
    assert lease_s(LivenessTimeouts(heartbeat_timeout_s=3.0)) == 6.0
