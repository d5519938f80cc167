"""The NCCL transport where there is no GPU: what is refused, and what goes where, with a stand-in for NCCL.

The gloo side is real. The stand-in says of every collective what a test tells it to; tensors of "its GPU" are on
torch's meta device. Real NCCL is in test_nccl_cuda.py.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from forkserver import Ran
from guarded import together
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from evergrad.errors import RecoveryError, UsageError
from evergrad.recovery import nccl_group
from evergrad.recovery.membership import MembershipPlan, StoreKeys
from evergrad.recovery.nccl_group import NcclGroup, Transport
from evergrad.recovery.process_group import GlooGroup, Group, GroupBroken
from evergrad.recovery.store import PREFIX, StoreClient
from evergrad.recovery.worker import ElasticWorker

GPU = torch.device("meta")
LIMIT_S = 30.0


class StandInWork:
    """A collective that is complete when a test says so, or by an abort: as NCCL's, one looks like the other."""

    def __init__(self) -> None:
        self.completed = threading.Event()
        self.asked = threading.Event()
        self.error = ""

    def is_completed(self) -> bool:
        self.asked.set()
        return self.completed.is_set()

    def wait(self) -> None:
        assert self.completed.is_set(), "asked for its error before it was complete"
        if self.error:
            raise RuntimeError(self.error)


class StandInNccl:
    """Notes what it is asked to do."""

    def __init__(self) -> None:
        self.works: list[StandInWork] = []
        self.tensors: list[torch.Tensor] = []
        self.aborts = 0
        self.may_abort = threading.Event()
        self.may_abort.set()
        self.ends_kernels = True

    def allreduce(self, tensors: list[torch.Tensor], _: Any) -> StandInWork:
        return self._begin(tensors)

    def broadcast(self, tensors: list[torch.Tensor], _: Any) -> StandInWork:
        return self._begin(tensors)

    def abort(self) -> None:
        self.may_abort.wait(LIMIT_S)
        self.aborts += 1
        if self.ends_kernels:
            self.complete()

    def complete(self) -> None:
        for work in self.works:
            work.completed.set()

    def _begin(self, tensors: list[torch.Tensor]) -> StandInWork:
        self.tensors += tensors
        self.works.append(StandInWork())
        return self.works[-1]


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> dict[int, StandInNccl]:
    """By rank; every rank has a GPU of its own."""
    made: dict[int, StandInNccl] = {}

    def make(_: Store, rank: int, *__: Any) -> StandInNccl:
        made[rank] = StandInNccl()
        return made[rank]

    monkeypatch.setattr(nccl_group, "_make", make)
    monkeypatch.setattr(nccl_group, "_gpu", lambda _: f"GPU of {threading.get_ident()}")
    return made


@contextmanager
def groups_of(size: int, **more: Any) -> Iterator[list[NcclGroup]]:
    store, limit = HashStore(), timedelta(seconds=LIMIT_S)

    def make(rank: int) -> NcclGroup:
        return NcclGroup(store, rank, size, host="127.0.0.1", timeout=limit, device=GPU, **more)

    groups = together(*(lambda rank=rank: make(rank) for rank in range(size)))  # type: ignore[misc]
    try:
        yield groups
    finally:
        together(*(group.close for group in groups))


class Waiting(threading.Thread):
    """Waits for a ticket, and notes how that ended."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.wait, self.ended = wait, ""
        self.start()

    def run(self) -> None:
        try:
            self.wait()
            self.ended = "done"
        except GroupBroken as error:
            self.ended = f"broken: {error}"
        except RecoveryError as error:
            self.ended = f"given up: {error}"

    def ending(self) -> str:
        self.join(LIMIT_S)
        return self.ended


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("ncll", "EVERGRAD_TRANSPORT=ncll: expected gloo or nccl. Did you mean 'nccl'?"),
        ("NCCL", "expected gloo or nccl"),
    ],
)
def test_an_unknown_transport_is_refused(value: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Transport.of({"EVERGRAD_TRANSPORT": value})


@pytest.mark.parametrize("env", [{}, {"EVERGRAD_TRANSPORT": ""}, {"EVERGRAD_TRANSPORT": "gloo"}])
def test_gloo_is_the_default(env: dict[str, str]) -> None:
    assert Transport.of(env) == Transport("gloo")
    assert Transport.of(env).former() is GlooGroup


def test_nccl_is_refused_where_torch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(UsageError, match=r"EVERGRAD_TRANSPORT=nccl: torch .* was built without NCCL\. Use gloo"):
        Transport.of({"EVERGRAD_TRANSPORT": "nccl"})


def test_nccl_is_refused_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="EVERGRAD_TRANSPORT=nccl: there is no CUDA device"):
        Transport.of({"EVERGRAD_TRANSPORT": "nccl"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_job_that_asks_for_nccl_in_vain_ends_with_one_line(
    launch: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERGRAD_TRANSPORT", "nccl")
    ran = launch("-n", 2)
    assert ran.code == 2, ran.said
    assert "\nevergrad: fatal: EVERGRAD_TRANSPORT=nccl: " in ran.stderr, ran.said
    assert not ran.results


def test_two_ranks_on_one_gpu_are_refused_by_all(
    stand_ins: dict[int, StandInNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_group, "_gpu", lambda _: "GPU-1")
    with pytest.raises(UsageError, match="ranks 0, 1, 2 have the same GPU, and NCCL needs one a rank"), groups_of(3):
        pass
    assert not stand_ins, "NCCL is not even made"


def test_a_shared_gpu_ends_a_launched_job_for_good(
    stand_ins: dict[int, StandInNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the next generation it would be the same GPU again."""
    monkeypatch.setattr(nccl_group, "_gpu", lambda _: "GPU-1")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = StoreClient("127.0.0.1", store.port, secret=None, prefix=PREFIX)
    client.set(StoreKeys.plan(0), MembershipPlan(0, (0, 1)).to_json())
    crews = [
        ElasticWorker(
            "127.0.0.1", store.port, uid, secret=None, tell=lambda *_, **__: None, transport=Transport("nccl")
        )
        for uid in range(2)
    ]

    def form(crew: ElasticWorker) -> str:
        crew.enter_generation(0)
        with pytest.raises(UsageError) as caught:
            crew.group()
        return str(caught.value)

    said = together(*(lambda crew=crew: form(crew) for crew in crews))  # type: ignore[misc]
    assert client.find(StoreKeys.fatal) in said
    assert "ranks 0, 1 have the same GPU" in said[0]
    for crew in crews:
        crew.close()


def test_tensors_go_by_where_they_are(stand_ins: dict[int, StandInNccl]) -> None:
    with groups_of(2) as groups:

        def act(group: Group) -> tuple[float, float, float]:
            ours = torch.tensor([1.0 + group.rank])
            group.all_reduce(ours).wait()
            theirs = torch.tensor([float(group.rank)])
            group.broadcast(theirs, 1).wait()
            sent, got = group.send(torch.tensor([7.0 + group.rank]), 1 - group.rank), torch.zeros(1)
            group.receive(got, 1 - group.rank).wait()
            sent.wait()
            return ours.item(), theirs.item(), got.item()

        found = together(*(lambda group=group: act(group) for group in groups))  # type: ignore[misc]
        assert found == [(3.0, 1.0, 8.0), (3.0, 1.0, 7.0)]
        assert not stand_ins[0].tensors
        on_gpu = torch.zeros(3, device=GPU)
        groups[0].all_reduce(on_gpu)
        groups[0].broadcast(torch.zeros(2, 2, dtype=torch.int16, device=GPU), 0)
    assert stand_ins[0].tensors[0] is on_gpu
    assert (stand_ins[0].tensors[1].dtype, stand_ins[0].tensors[1].shape) == (torch.uint8, (8,))


def test_a_tensor_of_another_gpu_is_refused(stand_ins: dict[int, StandInNccl]) -> None:
    with groups_of(1) as (group,):
        group._device = torch.device("cuda", 3)
        with pytest.raises(UsageError, match=r"a tensor on meta, and NCCL was set up for cuda:3: call torch\.cuda"):
            group.all_reduce(torch.zeros(1, device=GPU))


def test_a_ticket_waits_for_the_gpu(stand_ins: dict[int, StandInNccl]) -> None:
    with groups_of(1) as (group,):
        ticket = group.all_reduce(torch.zeros(1, device=GPU))
        work = stand_ins[0].works[0]
        waiting = Waiting(ticket.wait)
        assert work.asked.wait(LIMIT_S)
        assert waiting.is_alive()
        work.completed.set()
        assert waiting.ending() == "done"


def test_a_ticket_knows_whether_it_is_done(stand_ins: dict[int, StandInNccl]) -> None:
    with groups_of(1) as (group,):
        first, second = (group.all_reduce(torch.zeros(1, device=GPU)) for _ in range(2))
        assert (first.is_done, second.is_done) == (False, False)
        stand_ins[0].works[0].completed.set()
        assert (first.is_done, second.is_done) == (True, False)
        group.interrupt("told so")
        assert second.is_done


def test_what_an_abort_has_ended_is_not_done(stand_ins: dict[int, StandInNccl]) -> None:
    with groups_of(1) as (group,):
        tickets = [group.all_reduce(torch.zeros(1, device=GPU)) for _ in range(3)]
        stand_ins[0].works[0].completed.set()
        tickets[0].wait()
        waiting = Waiting(tickets[1].wait)
        assert stand_ins[0].works[1].asked.wait(LIMIT_S)
        group.interrupt("rank 1 is gone")
        assert waiting.ending() == "broken: rank 1 is gone"
        assert all(work.completed.is_set() for work in stand_ins[0].works), "it looks like success"
        with pytest.raises(GroupBroken, match="rank 1 is gone"):
            tickets[2].wait()
        with pytest.raises(GroupBroken, match="rank 1 is gone"):
            group.all_reduce(torch.zeros(1, device=GPU))
        with pytest.raises(GroupBroken, match="rank 1 is gone"):
            group.all_reduce(torch.zeros(1))
        group.interrupt("again")
    assert stand_ins[0].aborts == 1


def test_nobody_hears_of_an_end_before_the_gpu_has_let_go(stand_ins: dict[int, StandInNccl]) -> None:
    with groups_of(1) as (group,):
        stand_ins[0].ends_kernels = False
        first, _ = (group.all_reduce(torch.zeros(1, device=GPU)) for _ in range(2))
        waiting = Waiting(first.wait)
        group.interrupt("rank 1 is gone")
        one, two = stand_ins[0].works
        two.asked.clear()
        one.completed.set()
        assert two.asked.wait(LIMIT_S), "the other collective's buffer, too, is written until it has ended"
        assert waiting.is_alive()
        two.completed.set()
        assert waiting.ending() == "broken: rank 1 is gone"


def test_an_error_of_nccl_breaks_both_sides(stand_ins: dict[int, StandInNccl]) -> None:
    with groups_of(2) as groups:
        ticket = groups[0].all_reduce(torch.zeros(1, device=GPU))
        work = stand_ins[0].works[0]
        work.error = "NCCL error in: /torch/NCCLUtils.cpp:94, remote process exited, NCCL version 2.28\nLast error:\n"
        work.completed.set()
        with pytest.raises(GroupBroken, match=r"^remote process exited, NCCL version 2\.28$"):
            ticket.wait()
        assert stand_ins[0].aborts == 1
        with pytest.raises(GroupBroken, match="remote process exited"):
            groups[0].send(torch.zeros(1), 1)


def test_an_error_of_gloo_breaks_both_sides(stand_ins: dict[int, StandInNccl]) -> None:
    with groups_of(1) as (group,):
        ticket = group.all_reduce(torch.zeros(1, device=GPU))
        group._cpu.interrupt("Connection closed by peer")
        with pytest.raises(GroupBroken, match="Connection closed by peer"):
            group.all_reduce(torch.zeros(1)).wait()
        assert stand_ins[0].aborts == 1
        with pytest.raises(GroupBroken, match="Connection closed by peer"):
            ticket.wait()


def test_an_abort_that_never_ends_ends_the_process(
    stand_ins: dict[int, StandInNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    with groups_of(1) as (group,):
        ticket = group.all_reduce(torch.zeros(1, device=GPU))
        stand_ins[0].may_abort.clear()
        with monkeypatch.context() as short:
            short.setattr(nccl_group, "_PATIENCE_S", 0.01)
            group.interrupt("rank 1 is gone")
            with pytest.raises(RecoveryError, match="NCCL has not let go of meta within 0 s of an abort") as caught:
                ticket.wait()
        assert not isinstance(caught.value, GroupBroken), "or the job would go on with a buffer that is being written"
        stand_ins[0].may_abort.set()


@pytest.mark.parametrize("confirms", [True, False])
def test_a_broadcast_counts_when_all_ranks_have_it(stand_ins: dict[int, StandInNccl], confirms: bool) -> None:
    """An aborted kernel makes those of its peers end well: only its own rank can tell."""
    with groups_of(2, confirms=confirms) as groups:
        for begin in ("broadcast", "all_reduce"):
            tickets = [
                group.broadcast(torch.zeros(1, device=GPU), 0)
                if begin == "broadcast"
                else group.all_reduce(torch.zeros(1, device=GPU))
                for group in groups
            ]
            stand_ins[0].complete()
            waiting = [Waiting(tickets[0].wait)]
            if begin == "all_reduce" and not confirms:
                assert waiting[0].ending() == "done"
            waiting += [Waiting(tickets[1].wait)]
            assert stand_ins[1].works[-1].asked.wait(LIMIT_S)
            assert waiting[0].is_alive() == (begin == "broadcast" or confirms)
            if begin == "broadcast":
                stand_ins[1].complete()
                assert [one.ending() for one in waiting] == ["done", "done"]
            else:
                for group in reversed(groups):  # all are told
                    group.interrupt("rank 2 is gone")
                assert waiting[1].ending() == "broken: rank 2 is gone"
                assert waiting[0].ending().startswith("broken" if confirms else "done")


def test_settings_of_torch_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "mine")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    with nccl_group._environment(nccl_group._ALONE):
        assert {name: os.environ[name] for name in nccl_group._ALONE} == nccl_group._ALONE
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "mine"
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ


def test_a_group_waits_only_while_it_is_used(stand_ins: dict[int, StandInNccl]) -> None:
    """While it is made, the crew says so: two at once would be taken for an end of waiting."""
    waits: list[str] = []

    @contextmanager
    def waiting() -> Iterator[None]:
        waits.append("begins")
        yield
        waits.append("ends")

    with groups_of(1, waiting=waiting) as (group,):
        assert not waits
        group.all_reduce(torch.zeros(1)).wait()
        assert waits == ["begins", "ends"]
        ticket = group.all_reduce(torch.zeros(1, device=GPU))
        stand_ins[0].complete()
        ticket.wait()
        assert waits == ["begins", "ends"] * 2
