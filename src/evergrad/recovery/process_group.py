"""How ranks of one generation talk: the contract, and the group of one.

A group is made for one generation and never mended. Whatever goes wrong in it, and whatever is asked of it after
`interrupt`, ends in `GroupBroken`, on every rank, soon: a rank that sees an error interrupts its group, which its peers
see in turn. Calls start in the same order on all ranks, from one thread; only `interrupt` may come from another.
"""

from __future__ import annotations

import ctypes
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from evergrad.errors import RecoveryError
from evergrad.recovery.sockets import LOOPBACK, Sockets, address_towards, is_loopback

Op: TypeAlias = Literal["sum", "max"]


class GroupBroken(RecoveryError):
    """A generation has ended: a rank is gone, or someone said so. The job gets over it; users do not meet it."""

    def __init__(self, message: str | None) -> None:
        super().__init__(message or "the group is gone")


class CollectiveWork:
    """A collective under way. `wait` returns when it is done here, and raises `GroupBroken` if it never will be."""

    def __init__(self, wait: Callable[[], None] | None = None, is_done: Callable[[], bool] | None = None) -> None:
        """Without `is_done` nobody knows before they have waited."""
        self._wait, self._is_done = wait, is_done

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, without waiting; False where that is not known."""
        return self._wait is None or (self._is_done is not None and self._is_done())

    def wait(self) -> None:
        """Wait, once; waiting again for what is over returns at once."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()


class Group(ABC):
    """The ranks of one generation. Tensors are contiguous and changed in place; they may be on the CPU or on CUDA."""

    rank: int
    size: int
    num_begun: int = 0
    """The number of collectives that this rank has begun, in the same order as all ranks. Sends do not count."""

    @property
    def before(self) -> int:
        """The neighbour before this rank; before the first, the last."""
        return (self.rank - 1) % self.size

    @property
    def after(self) -> int:
        """The neighbour after this rank; after the last, the first."""
        return (self.rank + 1) % self.size

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum") -> CollectiveWork:
        """Begin to combine a tensor of all ranks; each then has the result."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int) -> CollectiveWork:
        """Begin to give one rank's tensor to all."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, to: int) -> CollectiveWork:
        """Begin to send a tensor (on the CPU) to one rank."""

    @abstractmethod
    def receive(self, tensor: torch.Tensor, sender: int) -> CollectiveWork:
        """Begin to receive what one rank sends, into a tensor (on the CPU) of the same size."""

    @abstractmethod
    def interrupt(self, reason: str) -> None:
        """Break the group, for this rank and so for its peers. From any thread; twice is fine."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. Twice is fine."""


class SingleRankGroup(Group):
    """A group of one: nothing to do, nothing that can break."""

    rank, size = 0, 1

    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum") -> CollectiveWork:
        return CollectiveWork()

    def broadcast(self, tensor: torch.Tensor, root: int) -> CollectiveWork:
        return CollectiveWork()

    def send(self, tensor: torch.Tensor, to: int) -> CollectiveWork:
        raise AssertionError("there is nobody to send to")

    def receive(self, tensor: torch.Tensor, sender: int) -> CollectiveWork:
        raise AssertionError("there is nobody to receive from")

    def interrupt(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass


def swap(group: Group, mine: torch.Tensor, to: int, theirs: torch.Tensor, sender: int) -> None:
    """Send a tensor to one rank while receiving one from another, or from the same; `GroupBroken` if that fails."""
    sent = group.send(mine, to)
    group.receive(theirs, sender).wait()
    sent.wait()


# The transport over gloo: one process group a generation, CPU and CUDA tensors.

OPS: dict[Op, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
"""What torch calls them."""
_SLICE = timedelta(seconds=0.5)
_STUCK_S = 5.0


class GlooGroup(Group):
    """A raw gloo group of its own: not registered with torch.distributed, so no error of it reaches anyone else.

    Only the destructor of torch's group closes its connections, and it waits for what is under way. So they are cut
    first, whereupon everything under way fails at once.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        host: str,
        timeout: timedelta,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        stuck: Callable[[], None] | None = None,
    ) -> None:
        """Meet all other ranks at the store, under keys that no other generation uses. Blocks until all are there.

        Whenever this rank waits for others, it does so inside of `waiting()`. If it still does long after the group was
        interrupted, gloo will never let go of it: `stuck` is called, by another thread.
        """
        self.rank, self.size, self._waiting, self._stuck = rank, size, waiting, stuck
        self._since: float | None = None
        """Since when this rank waits for one other."""
        self._reason: str | None = None
        self._sockets = Sockets(is_local=is_loopback(host))
        with self._sockets.opening():
            self._group: Any = _make(store, rank, size, host, timeout)

    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum") -> CollectiveWork:
        """Begin to combine a tensor of all ranks."""
        options = dist.AllreduceOptions()
        options.reduceOp = OPS[op]
        self.num_begun += 1
        return self._begin(lambda group: group.allreduce([tensor], options))

    def broadcast(self, tensor: torch.Tensor, root: int) -> CollectiveWork:
        """Begin to give one rank's tensor to all."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        self.num_begun += 1
        return self._begin(lambda group: group.broadcast([tensor], options))

    def send(self, tensor: torch.Tensor, to: int) -> CollectiveWork:
        """Begin to send a tensor to one rank."""
        return self._begin(lambda group: group.send([tensor], to, 0), in_slices=False)

    def receive(self, tensor: torch.Tensor, sender: int) -> CollectiveWork:
        """Begin to receive what one rank sends."""
        return self._begin(lambda group: group.recv([tensor], sender, 0), in_slices=False)

    def interrupt(self, reason: str) -> None:
        """Cut every connection: whoever waits, here or at the other end, gets an error."""
        is_first, self._reason = self._reason is None, self._reason or reason
        self._sockets.cut()
        if is_first and self._since is not None:
            self._watch_out()

    def close(self) -> None:
        """Let go of the group; whatever is still under way in it fails."""
        self.interrupt("closed")
        self._group = None

    def _await(self, work: Any, in_slices: bool) -> str | None:
        """Wait for what is under way; why it failed, if it has."""
        if not in_slices:
            self._since = time.monotonic()
            if self._reason is not None:
                self._watch_out()
            try:
                work.wait()
            except RuntimeError as error:
                return str(error)
            finally:
                self._since = None
            return None
        while True:
            try:
                work.wait(_SLICE if self._reason is None else _SLICE / 10)
            except RuntimeError:
                if work.is_completed():
                    # It may have ended just after the slice of time: only its own result counts.
                    return _failure_of(work)
                if self._reason is not None:
                    # Gloo can wait for ever for a connection that is gone. Its destructor would wait for it, too.
                    for stuck in (work, self._group):
                        ctypes.pythonapi.Py_IncRef(ctypes.py_object(stuck))
                    return self._reason
            else:
                return None

    def _watch_out(self) -> None:
        """After an interruption: whoever still waits for one rank in a while does so for ever."""
        if self._stuck is not None:
            watchdog = threading.Timer(_STUCK_S, self._look_again, [self._since])
            watchdog.daemon = True
            watchdog.start()

    def _look_again(self, since: float | None) -> None:
        if since is not None and self._since == since and self._stuck is not None:
            self._stuck()

    def _begin(self, start: Callable[[Any], Any], *, in_slices: bool = True) -> CollectiveWork:
        group, failed = self._group, self._reason
        if failed is not None or group is None:
            raise GroupBroken(failed or "closed")
        work = None
        try:
            work = start(group)
        except RuntimeError as error:
            failed = str(error)
        del group
        if work is None:
            self.interrupt(failed or "no work")
            raise GroupBroken(self._reason)
        held = [work]
        del work, start

        def wait() -> None:
            # Nothing may keep the work alive after an error: no frame, no traceback, no closure.
            with self._waiting():
                error_text = self._await(held.pop(), in_slices)
            if error_text is not None:
                self.interrupt(_short(error_text))
                raise GroupBroken(self._reason)

        return CollectiveWork(wait, lambda: not held or held[0].is_completed())


def _failure_of(work: Any) -> str | None:
    """Return why a completed operation failed; None if it did not."""
    try:
        work.wait()
    except RuntimeError as error:
        return str(error)
    return None


def solitary() -> dist.ProcessGroup:
    """A process group of one, for a DDP that is to believe it is alone; no error can come from it."""
    store = HashStore()
    backend = dist.ProcessGroupGloo(store, 0, 1, timedelta(minutes=30))
    group = dist.ProcessGroup(store, 0, 1)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), kind, backend)
    return group


def _make(store: Store, rank: int, size: int, host: str, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    # The interface by which the store is reached: on one machine the loopback, and never a name to be looked up.
    local_state = LOOPBACK if is_loopback(host) else address_towards(host)
    options._devices = [gloo.create_device(hostname=local_state) if local_state else gloo.create_default_device()]
    return gloo(store, rank, size, options)


def _short(text: str) -> str:
    """Gloo's message without the path of its source, and without advice on what may have happened."""
    return text.removeprefix(text.partition("] ")[0] + "] ").partition(". This is typically")[0].strip()[:160]
