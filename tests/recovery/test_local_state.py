"""What only one rank has, and how it travels: generators, buffers, parcels, snapshots; and sockets that are cut."""

from __future__ import annotations

import queue
import random
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from evergrad.recovery.local_state import DrawCounts, LocalState, NeighbourState, RngSnapshot, Snapshot, is_scaler
from evergrad.recovery.process_group import CollectiveWork, Group, Op
from evergrad.recovery.sockets import Sockets
from evergrad.recovery.state_transfer import pack, receive_state, send_state, unpack


def drawn() -> list[object]:
    """A little of every generator."""
    return [
        *torch.rand(3).tolist(), *torch.randn(3).tolist(), *np.random.rand(3).tolist(), np.random.randn(),
        np.random.randint(1 << 30), random.random(), random.gauss(0, 1), random.getrandbits(40),
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def seeds() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)


# Generators.


def test_generators_go_back_to_where_they_were() -> None:
    drawn()
    then = RngSnapshot()
    first = drawn()
    drawn()
    then.restore()
    assert drawn() == first


@pytest.mark.parametrize("is_odd", [False, True])
def test_generators_travel_as_bytes_with_half_used_pairs_of_normal_numbers(is_odd: bool) -> None:
    for _ in range(1 + is_odd):  # NumPy and Python draw normal numbers in pairs, and remember the second
        np.random.randn()
        random.gauss(0, 1)
    parts = RngSnapshot().parts()
    first = drawn()
    again = RngSnapshot.of_parts([part.clone() for part in parts])
    drawn()
    again.restore()
    assert drawn() == first


@pytest.mark.parametrize(
    ("draw", "place"),
    [(lambda: torch.rand(5), 0), (lambda: np.random.rand(5), 1), (lambda: [random.random() for _ in range(5)], 2)],
)
def test_positions_tell_how_many_numbers_a_generator_has_given(draw: Callable[[], object], place: int) -> None:
    draw()  # a generator that was just seeded is at the end of its words
    before = RngSnapshot().positions()
    for _ in range(200):
        draw()
    moved = [(now - then) % 624 for now, then in zip(RngSnapshot().positions(), before, strict=True)]
    per_number = 2 if place else 1  # of 64 bits, and torch's of 32
    assert moved == [200 * 5 * per_number % 624 if each == place else 0 for each in range(3)]


class Place:
    """The draws of the processes that have one rank, as they are posted: each step draws 3, some more."""

    def __init__(self, draws: DrawCounts, step: int = 0, position: int = 0) -> None:
        self.draws, self.step, self.position = draws, step, position
        self.posted: dict[str, Any] = {"point": -1}

    def train(self, steps: int, extra: Callable[[int], int], per_epoch: int = 1000) -> None:
        for _ in range(steps):
            note = self.draws.note(self.step // per_epoch, [self.position % 624])
            self.posted = {"point": self.step, **note}
            self.position += 3 + extra(self.step)
            self.step += 1


def fifth(step: int) -> int:
    """Drawn in every fifth step, as by an evaluation."""
    return 7 if step % 5 == 0 else 0


def nothing(step: int) -> int:
    return 0


@pytest.mark.parametrize(
    ("lost_draws", "other_draws", "heir_draws", "lost_at", "ends_at", "is_in_doubt"),
    [
        (fifth, nothing, nothing, 9, 24, True),
        (fifth, nothing, fifth, 9, 24, False),
        (fifth, nothing, nothing, 22, 24, False),  # the next would have been in step 25
        (fifth, nothing, nothing, 3, 4, True),  # who knows when the next would have been
        (nothing, fifth, nothing, 9, 24, False),
        (fifth, fifth, fifth, 9, 24, False),
        (lambda step: step * step % 50, lambda step: step * step % 47, nothing, 30, 60, False),
    ],
)
def test_a_process_that_draws_as_others_do_and_not_as_the_lost_rank_did_leaves_a_doubt(
    lost_draws: Any, other_draws: Any, heir_draws: Any, lost_at: int, ends_at: int, is_in_doubt: bool
) -> None:
    lost, other = Place(DrawCounts()), Place(DrawCounts(), position=100)
    for place, extra in ((lost, lost_draws), (other, other_draws)):
        place.train(lost_at, extra)
    heir = Place(DrawCounts(), lost_at - 1, (lost.posted["drawn"][0] + lost.posted["first"][0]) % 624)
    heir.draws.inherit(lost.posted, {1: other.posted})
    heir.train(ends_at - lost_at + 1, heir_draws)
    other.train(ends_at - lost_at, other_draws)
    assert heir.draws.is_like_others(heir.posted, {1: other.posted}) is is_in_doubt


@pytest.mark.parametrize(("ends_at", "is_in_doubt"), [(24, True), (20, False)])
def test_draws_between_epochs_leave_a_doubt_only_if_an_epoch_has_ended_since(ends_at: int, is_in_doubt: bool) -> None:
    lost, other = Place(DrawCounts()), Place(DrawCounts())
    lost.train(18, lambda step: 11 if step % 10 == 9 else 0, per_epoch=10)
    other.train(18, lambda step: 2 if step % 10 == 9 else 0, per_epoch=10)
    heir = Place(DrawCounts(), 17, lost.posted["drawn"][0])
    heir.draws.inherit(lost.posted, {1: other.posted})
    heir.train(ends_at - 17, lambda step: 2 if step % 10 == 9 else 0, per_epoch=10)
    other.train(ends_at - 18, lambda step: 2 if step % 10 == 9 else 0, per_epoch=10)
    assert heir.draws.is_like_others(heir.posted, {1: other.posted}) is is_in_doubt


def test_reading_generators_advances_none() -> None:
    then = RngSnapshot()
    first = drawn()
    then.restore()
    RngSnapshot().parts()
    assert drawn() == first


def test_the_bytes_of_generators_are_always_as_many() -> None:
    sizes = [part.numel() for part in RngSnapshot().parts()]
    drawn()
    assert [part.numel() for part in RngSnapshot().parts()] == sizes


# What one rank alone has.


class Loader:
    """A loader that alone knows where it is."""

    def __init__(self, place: int = 0) -> None:
        self.place = place

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "seen": torch.arange(self.place)}


def buffers(fill: float = 0.0) -> list[torch.Tensor]:
    return [
        torch.full((3, 2), fill), torch.tensor(int(fill)), torch.full((2,), fill, dtype=torch.float64),
        torch.full((3,), bool(fill)), torch.empty(0),
        torch.full((4, 3, 2, 2), fill).to(memory_format=torch.channels_last),
    ]  # fmt: skip


@pytest.mark.parametrize("loader", [None, Loader(7)])
def test_another_process_becomes_what_this_one_was(loader: Loader | None) -> None:
    mine, theirs = buffers(3.0), buffers()
    mine[5].copy_(torch.randn(4, 3, 2, 2))
    own, other = LocalState(mine), LocalState(theirs)
    own.loader = loader
    taken = own.capture()
    first = drawn()
    found = other.restore(taken)
    assert drawn() == first
    assert all(torch.equal(one, two) for one, two in zip(mine, theirs, strict=True))
    if loader is None:
        assert found is None
    else:
        assert found["place"] == 7
        assert found["seen"].tolist() == list(range(7))


# What a neighbour keeps.


class Ring(Group):
    """Ranks in one process, one thread each, that only send and receive."""

    def __init__(self, rank: int, size: int, wires: dict[tuple[int, int], queue.Queue[torch.Tensor]]) -> None:
        self.rank, self.size, self._wires = rank, size, wires

    def send(self, tensor: torch.Tensor, to: int) -> CollectiveWork:
        self._wires[self.rank, to].put(tensor.clone())
        return CollectiveWork()

    def receive(self, tensor: torch.Tensor, sender: int) -> CollectiveWork:
        def wait() -> None:
            found = self._wires[sender, self.rank].get(timeout=10)
            assert found.numel() == tensor.numel(), "sizes differ"
            tensor.copy_(found.view(tensor.dtype).view(tensor.shape))

        return CollectiveWork(wait)

    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum") -> CollectiveWork:
        raise NotImplementedError

    def broadcast(self, tensor: torch.Tensor, root: int) -> CollectiveWork:
        raise NotImplementedError

    def interrupt(self, reason: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def ring(size: int) -> list[Ring]:
    wires: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {
        (one, two): queue.Queue() for one in range(size) for two in range(size)
    }
    return [Ring(rank, size, wires) for rank in range(size)]


def together(*acts: Callable[[], object]) -> list[Any]:
    """Do all at once, one thread each."""
    found: list[Any] = [None] * len(acts)

    def act(number: int) -> None:
        found[number] = acts[number]()

    threads = [threading.Thread(target=act, args=[number]) for number in range(len(acts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def exchanged(points: range, sizes: Callable[[int], int], *, vary: bool = False) -> list[NeighbourState]:
    """Three ranks of uids 10, 11, 12 that passed these points; each had its uid and the point, again and again."""
    uids, groups, kept = (10, 11, 12), ring(3), [NeighbourState() for _ in range(3)]

    def run(rank: int) -> None:
        for point in points:
            own = torch.tensor([uids[rank], point], dtype=torch.uint8).repeat(sizes(rank))
            kept[rank].exchange(groups[rank], point, own, uids[rank - 1], sizes_vary=vary)

    together(*(lambda rank=rank: run(rank) for rank in range(3)))  # type: ignore[misc]
    return kept


def test_the_next_rank_keeps_what_one_had_at_the_last_two_points() -> None:
    kept = exchanged(range(4), lambda rank: 3)
    for point in (2, 3):
        found = kept[1].find(10, point)
        assert found is not None
        assert found.tolist() == [10, point] * 3
    assert kept[1].find(10, 1) is None
    assert kept[1].find(11, 3) is None, "of itself it keeps nothing"
    assert kept[0].find(12, 3) is not None, "the first keeps for the last"


def test_what_is_kept_may_have_another_size_on_each_rank() -> None:
    kept = exchanged(range(3), lambda rank: rank + 1, vary=True)
    sizes = [keeping.find(uid, 2) for keeping, uid in zip(kept, (12, 10, 11), strict=True)]
    assert [one.numel() for one in sizes if one is not None] == [6, 2, 4]


def test_what_is_kept_belongs_to_whoever_takes_the_place() -> None:
    keeping = exchanged(range(3), lambda rank: 1)[1]
    keeping.reassign(10, 13)
    assert keeping.find(10, 2) is None
    assert keeping.find(13, 2) is not None
    assert keeping.find(13, 1) is not None


# States on their way.


STATES: list[Any] = [
    {},
    {"a": None, "b": True, "c": 1.5, "d": "text", "e": [1, 2, {"f": (3, 4)}]},
    {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(3, 4)}, "0": torch.arange(3)},
    {"scalar": torch.tensor(7), "empty": torch.empty(0, 3), "half": torch.randn(3).half()},
    {"bf": torch.ones(5).bfloat16(), "complex": torch.randn(2, dtype=torch.complex64), "byte": torch.ones(3).byte()},
    {"bool": torch.tensor([True, False])},
    {"turned": torch.randn(3, 4).T, "last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)},
    {"layout": ((1, 2), (0,)), "array": np.arange(5, dtype=np.int64)},
]  # fmt: skip


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, np.asarray(two)))
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    return bool(one == two) and type(one) is type(two)


@pytest.mark.parametrize("state", STATES)
def test_a_parcel_holds_what_was_put_in(state: Any) -> None:
    assert same(state, unpack(pack(state)))


def test_a_state_arrives_as_it_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evergrad.recovery.state_transfer._LOAD_BYTES", 40)  # several loads
    first, second = ring(2)
    for state in STATES:
        sent, found = together(lambda state=state: send_state(first, state, 1), lambda: receive_state(second, 0))  # type: ignore[misc]
        assert sent is not None
        assert same(state, found)


# Snapshots.


def test_a_snapshot_puts_buffers_generators_and_tracked_things_back() -> None:
    net = nn.BatchNorm1d(3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    snapshot, tracked = Snapshot(list(net.buffers())), {"scheduler": scheduler}
    for _ in range(2):  # into the same memory
        snapshot.capture(tracked)
        before = {name: buffer.clone() for name, buffer in net.named_buffers()}, scheduler.state_dict()
        first = drawn()
        net(torch.randn(4, 3))
        optimizer.step()
        scheduler.step()
        snapshot.restore(tracked)
        assert all(torch.equal(before[0][name], buffer) for name, buffer in net.named_buffers())
        assert scheduler.state_dict() == before[1]
        assert drawn() == first


def test_a_scaler_forgets_a_step_that_is_done_again() -> None:
    net = nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    assert is_scaler(scaler)
    assert not is_scaler(optimizer)
    snapshot = Snapshot([])
    snapshot.capture({"scaler": scaler})
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(net(torch.ones(1, 2)).sum()).backward()
        scaler.unscale_(optimizer)  # a second time for the same step it would be refused
        assert net.weight.grad is not None
        assert net.weight.grad.tolist() == [[1.0, 1.0]]
        snapshot.restore({"scaler": scaler})
    assert scaler.get_scale() == 4.0


# Sockets.


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_cutting_wakes_who_reads_here_and_at_the_other_end(listener: socket.socket) -> None:
    sockets = Sockets()
    with sockets.opening():
        mine = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    with mine, theirs:
        is_reading = threading.Barrier(3)

        def read(end: socket.socket) -> bytes:
            is_reading.wait(10)
            return end.recv(1)

        def cut() -> bytes:
            is_reading.wait(10)
            sockets.cut()
            return b"cut"

        assert together(lambda: read(mine), lambda: read(theirs), cut) == [b"", b"", b"cut"]
        sockets.cut()


def test_what_was_open_before_is_not_cut_nor_what_listens(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()) as before:
        sockets = Sockets()
        with sockets.opening(), socket.create_server(("127.0.0.1", 0)) as inside:
            pass
        with sockets.opening():
            inside = socket.create_server(("127.0.0.1", 0))
        sockets.cut()
        end, _ = listener.accept()
        with end, inside, socket.create_connection(inside.getsockname()):
            before.sendall(b"x")
            assert end.recv(1) == b"x"


def test_what_is_opened_after_the_cut_is_cut_at_once(listener: socket.socket) -> None:
    sockets = Sockets()
    sockets.cut()
    with sockets.opening():
        mine = socket.create_connection(listener.getsockname())
    with mine:
        assert mine.recv(1) == b""


def test_connections_that_are_released_live_on(listener: socket.socket) -> None:
    sockets = Sockets()
    with sockets.opening():
        mine = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    sockets.release()
    sockets.cut()
    with mine, theirs:
        mine.sendall(b"x")
        assert theirs.recv(1) == b"x"
