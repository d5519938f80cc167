"""The transport over gloo: one process group a generation, CPU and CUDA tensors."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from evergrad.recovery.addresses import LOOPBACK, address_towards, is_loopback
from evergrad.recovery.sockets import Sockets
from evergrad.recovery.transport import Group, GroupBroken, Op, Ticket

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

    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum") -> Ticket:
        """Begin to combine a tensor of all ranks."""
        options = dist.AllreduceOptions()
        options.reduceOp = OPS[op]
        self.num_begun += 1
        return self._begin(lambda group: group.allreduce([tensor], options))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Ticket:
        """Begin to give one rank's tensor to all."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        self.num_begun += 1
        return self._begin(lambda group: group.broadcast([tensor], options))

    def send(self, tensor: torch.Tensor, to: int) -> Ticket:
        """Begin to send a tensor to one rank."""
        return self._begin(lambda group: group.send([tensor], to, 0), in_slices=False)

    def receive(self, tensor: torch.Tensor, sender: int) -> Ticket:
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

    def _begin(self, start: Callable[[Any], Any], *, in_slices: bool = True) -> Ticket:
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

        return Ticket(wait, lambda: not held or held[0].is_completed())


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
    own = LOOPBACK if is_loopback(host) else address_towards(host)
    options._devices = [gloo.create_device(hostname=own) if own else gloo.create_default_device()]
    return gloo(store, rank, size, options)


def _short(text: str) -> str:
    """Gloo's message without the path of its source, and without advice on what may have happened."""
    return text.removeprefix(text.partition("] ")[0] + "] ").partition(". This is typically")[0].strip()[:160]
