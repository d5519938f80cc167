"""Real NCCL: a group of one on one GPU, its end and its successor; and two ranks that share a GPU.

Collectives are held back by a busy stream, so that they are surely under way when they are to be.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from forkserver import Ran
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from evergrad._wire import Secret
from evergrad.recovery.nccl_group import _ALONE, NcclGroup, Transport
from evergrad.recovery.process_group import GroupBroken
from evergrad.recovery.store import SignedTorchStore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a CUDA device and NCCL"
    ),
]
NCCL = {"EVERGRAD_TRANSPORT": "nccl"}
SLEEP_CYCLES = 500_000_000  # some 0.3 s


def make(store: Store | None = None) -> NcclGroup:
    group = Transport.of(NCCL).former()(
        HashStore() if store is None else store, 0, 1, host="127.0.0.1", timeout=timedelta(seconds=60)
    )
    assert isinstance(group, NcclGroup)
    return group


@pytest.fixture
def group() -> Iterator[NcclGroup]:
    found = make()
    yield found
    found.close()
    torch.cuda.synchronize()


def busy() -> torch.cuda.Event:
    """Keep the GPU busy; the event is over when it is not any more."""
    torch.cuda._sleep(SLEEP_CYCLES)
    over = torch.cuda.Event()
    over.record()
    return over


def threads() -> set[str]:
    """The names of this process's threads, torch's own too."""
    return {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}


def test_sums_and_maxima_arrive(group: NcclGroup) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8):
        tensor = torch.arange(1000, device="cuda").remainder(100).to(dtype)
        expected = tensor.clone()
        group.all_reduce(tensor).wait()
        group.all_reduce(tensor, "max").wait()
        assert torch.equal(tensor, expected)


def test_a_broadcast_takes_whatever_torch_has(group: NcclGroup) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn):
        for shape in ((7, 3), (), (0,)):
            tensor = torch.ones(shape, device="cuda").to(dtype)
            group.broadcast(tensor, 0).wait()
            found = tensor.real if dtype.is_complex else tensor.float()
            assert torch.equal(found, torch.ones(shape, device="cuda"))


def test_tensors_of_the_cpu_go_beside_it(group: NcclGroup) -> None:
    tensor = torch.arange(5)
    group.all_reduce(tensor).wait()
    group.broadcast(tensor, 0).wait()
    assert tensor.tolist() == [0, 1, 2, 3, 4]


def test_a_ticket_is_done_when_the_gpu_is(group: NcclGroup) -> None:
    tensor = torch.ones(1 << 20, device="cuda")
    torch.cuda.synchronize()
    over = busy()
    ticket = group.all_reduce(tensor)
    assert not ticket.is_done
    assert not over.query(), "otherwise this test tells nothing"
    ticket.wait()
    assert over.query(), "torch's own wait would only have put streams in order"
    assert ticket.is_done


def test_an_idle_group_can_be_interrupted_and_has_a_successor(group: NcclGroup) -> None:
    tensor = torch.ones(10, device="cuda")
    group.all_reduce(tensor).wait()
    group.interrupt("rank 1 is gone")
    group.interrupt("again")
    for _ in range(2):
        with pytest.raises(GroupBroken, match="rank 1 is gone"):
            group.all_reduce(tensor)
    group.close()
    group.close()
    for _ in range(3):
        successor = make()
        successor.all_reduce(tensor).wait()
        successor.broadcast(tensor, 0).wait()
        successor.close()
    assert torch.equal(tensor, torch.ones_like(tensor))


def test_a_group_that_was_never_used_ends_too() -> None:
    make().close()


def test_what_is_under_way_at_an_interruption_is_over_and_not_done(group: NcclGroup) -> None:
    tensors = [torch.ones(1 << 20, device="cuda") for _ in range(3)]
    torch.cuda.synchronize()
    over = busy()
    tickets = [group.all_reduce(tensor) for tensor in tensors]
    telling = threading.Thread(target=group.interrupt, args=["rank 1 is gone"])
    telling.start()
    with pytest.raises(GroupBroken, match="rank 1 is gone"):
        tickets[0].wait()
    assert over.query(), "nothing of it may be running when its end is told"
    for ticket in tickets[1:]:
        with pytest.raises(GroupBroken, match="rank 1 is gone"):
            ticket.wait()
    telling.join()
    for tensor in tensors:  # they are free to be used again
        tensor.fill_(2.0)
    successor = make()
    successor.all_reduce(tensors[0]).wait()
    successor.close()
    assert tensors[0].eq(2.0).all()


def test_no_thread_of_torch_watches_the_group() -> None:
    before = {name: os.environ.get(name) for name in _ALONE}
    group = make()
    group.all_reduce(torch.ones(1, device="cuda")).wait()
    assert not {name for name in threads() if name.startswith(("pt_nccl_watchd", "pt_nccl_heartb"))}
    group.close()
    assert {name: os.environ.get(name) for name in _ALONE} == before


def test_nccl_meets_at_a_sealed_store() -> None:
    plain = HashStore()
    group = make(SignedTorchStore(plain, "group/0", Secret(b"s" * 32)))
    gc.collect()
    tensor = torch.ones(3, device="cuda")
    group.all_reduce(tensor).wait()
    group.close()
    assert tensor.tolist() == [1.0, 1.0, 1.0]
    assert plain.check(["nccl/0"]), "NCCL's own address went through it"


def test_the_gpu_is_that_of_the_thread_that_asked() -> None:
    form = Transport.of(NCCL).former()
    made: list[NcclGroup] = []

    def meet() -> None:
        made.append(form(HashStore(), 0, 1, host="127.0.0.1", timeout=timedelta(seconds=60)))  # type: ignore[arg-type]

    thread = threading.Thread(target=meet)
    thread.start()
    thread.join()
    tensor = torch.ones(3, device="cuda")
    made[0].all_reduce(tensor).wait()
    made[0].close()
    assert tensor.tolist() == [1.0, 1.0, 1.0]


def test_two_ranks_on_one_gpu_end_with_one_line(launch: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERGRAD_TRANSPORT", "nccl")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])
    ran = launch("-n", 2, arguments=["--device", "cuda"])
    assert ran.code == 2, ran.said
    assert "\nevergrad: fatal: EVERGRAD_TRANSPORT=nccl: ranks 0, 1 have the same GPU" in ran.stderr, ran.said
    assert not ran.results
