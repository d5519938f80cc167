"""A process among others that do not come, or that come again: nobody waits for ever, and no news is old news."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from evergrad.recovery.membership import MembershipPlan, PointKind, StoreKeys, SurvivorReport
from evergrad.recovery.process_group import GroupBroken
from evergrad.recovery.sockets import Sockets
from evergrad.recovery.worker import ElasticWorker, SingleWorker

SOON_S = 20.0
"""Far more than is needed; who is not there by then waits for ever."""


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


@pytest.fixture
def crew(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], ElasticWorker]]:
    """Processes of a job of two, by uid. What a process leaves open until it ends is closed here."""
    opened: list[Sockets] = []
    make_sockets = Sockets.__init__

    def noted(sockets: Sockets, port: int | None = None, **more: bool) -> None:
        make_sockets(sockets, port, **more)
        opened.append(sockets)

    monkeypatch.setattr(Sockets, "__init__", noted)
    keys = PrefixStore("evergrad", store)
    keys.set(StoreKeys.plan(0), MembershipPlan(0, (0, 1)).to_json())
    made: list[ElasticWorker] = []

    def make(uid: int) -> ElasticWorker:
        made.append(ElasticWorker("127.0.0.1", store.port, uid, secret=None, tell=lambda *_, **__: None))
        return made[-1]

    yield make
    for one in made:
        one.close()
    for thread in threading.enumerate():
        if thread.name.startswith("evergrad-form"):
            thread.join(SOON_S)
    for sockets in opened:
        sockets.release()


class Waiting(threading.Thread):
    """Asks for the group, and is left behind if nothing comes of it."""

    def __init__(self, crew: ElasticWorker) -> None:
        super().__init__(daemon=True)
        self.crew, self.said = crew, "nothing"
        self.start()

    def run(self) -> None:
        try:
            self.said = f"a group of {self.crew.group().size}"
        except GroupBroken as error:
            self.said = f"broken: {error}"


def await_rendezvous(store: TCPStore, before: int, waiting: Waiting) -> None:
    """Until it looks for the others, or has given up."""
    while waiting.is_alive() and store.num_keys() == before:
        waiting.join(0.001)


def break_generation(store: TCPStore, uid: int) -> None:
    """As the coordinator does when the other one dies."""
    keys = PrefixStore("evergrad", store)
    keys.set(StoreKeys.news(uid, 0), json.dumps({"uid": 1, "reason": "rank 1 ended with SIGKILL"}))


def test_two_that_meet_are_a_group(crew: Callable[[int], ElasticWorker]) -> None:
    both = crew(0), crew(1)
    for one in both:
        one.enter_generation(0)
    waiting = [Waiting(one) for one in both]
    for one in waiting:
        one.join(SOON_S)
    assert [one.said for one in waiting] == ["a group of 2"] * 2
    assert [one.rank for one in both] == [0, 1]


def test_a_group_of_one_breaks_never() -> None:
    solo = SingleWorker()
    assert (solo.rank, solo.world_size, solo.group().size) == (0, 1, 1)
    with pytest.raises(AssertionError):
        solo.next_plan(SurvivorReport(0, 0, 0, 0, PointKind.STEP, 0))


def test_who_begins_again_does_not_hear_that_it_left(store: TCPStore, crew: Callable[[int], ElasticWorker]) -> None:
    """A relaunch: the same process, a new program, the same generation."""
    before = crew(0)
    before.enter_generation(0)
    before.leave_group()
    again = crew(0)
    again.enter_generation(0)
    number = store.num_keys()
    waiting = Waiting(again)
    await_rendezvous(store, number, waiting)
    break_generation(store, 0)
    waiting.join(SOON_S)
    assert waiting.said == "broken: rank 1 ended with SIGKILL"


def test_who_waits_for_a_group_hears_that_the_other_one_died(
    store: TCPStore, crew: Callable[[int], ElasticWorker]
) -> None:
    mine = crew(0)
    mine.enter_generation(0)
    number = store.num_keys()
    waiting = Waiting(mine)
    await_rendezvous(store, number, waiting)
    break_generation(store, 0)
    waiting.join(SOON_S)
    assert waiting.said == "broken: rank 1 ended with SIGKILL"
    assert mine.client.has(StoreKeys.plan(0)), "and talks to the store as before"
