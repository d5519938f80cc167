"""The transport over NCCL, for gradients on GPUs: experimental.

One NCCL communicator a generation, and a gloo group beside it: tensors on this rank's GPU go by NCCL, those on the CPU
by gloo. What NCCL does differently, and what is done about it:

- A collective is "complete" for torch once it is enqueued, and an aborted one ends like one that has succeeded. A
  ticket therefore asks whether the GPU is through, and afterwards whether the group was interrupted; the interruption
  is noted before the abort begins.
- An aborted kernel tells its peers that it goes on, and sends nothing: *their* collective ends well, with numbers that
  mean nothing. A point of the job, which every rank passes over gloo after its own tickets, finds that out. Where no
  point follows, all ranks confirm over gloo that they are through: after every broadcast, and with `confirms`, as
  forward recovery needs it to keep buckets, after every sum.
- Until it has ended, a kernel writes. `GroupBroken` is raised when nothing of the group runs on the GPU any more.
- Torch's watchdog would end the process. The group is made without one.
- Peers do not see an abort; they hear from the coordinator that the generation broke. Under torchrun, which ends all
  ranks with the first, nobody has to tell them.
- A rank that dies while the communicator is made leaves the thread that makes it waiting in NCCL; nobody waits for it.

Its tests take one GPU: a group of one (collectives, abort, a new group after one), and two ranks, which are refused.
With more than one GPU it was never run.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from evergrad.errors import RecoveryError, UsageError
from evergrad.recovery.process_group import OPS, CollectiveWork, GlooGroup, Group, GroupBroken, Op
from evergrad.wording import did_you_mean

_log = logging.getLogger(__name__)
_PATIENCE_S = 60.0
"""How long an abort may take before this process gives itself up."""
_ENTERING_S = 1.0
"""How long an abort waits for a call that enqueues something: NCCL must not lose its communicator inside of one."""
_ALONE = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",  # no watchdog, no monitor: whoever waits looks after errors
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_making = threading.Lock()


@dataclass(frozen=True, slots=True)
class Transport:
    """How groups are made: EVERGRAD_TRANSPORT."""

    name: Literal["gloo", "nccl"] = "gloo"
    confirms: bool = False
    """Whether a sum counts on one rank only if it is complete on all."""

    @classmethod
    def of(cls, env: Mapping[str, str], *, confirms: bool = False) -> Transport:
        """What the environment asks for; `UsageError` if that cannot be had here."""
        match env.get("EVERGRAD_TRANSPORT") or "gloo":
            case "gloo":
                return cls()
            case "nccl":
                if (missing := _missing()) is not None:
                    raise UsageError(f"EVERGRAD_TRANSPORT=nccl: {missing}. Use gloo, which carries tensors of GPUs too")
                return cls("nccl", confirms)
            case other:
                raise UsageError(
                    f"EVERGRAD_TRANSPORT={other}: expected gloo or nccl.{did_you_mean(other, ('gloo', 'nccl'))}"
                )

    def former(self) -> Callable[..., Group]:
        """What makes a group, in whatever thread; which GPU is this rank's is asked here, in the thread that calls."""
        if self.name == "gloo":
            return GlooGroup
        device = torch.device("cuda", torch.cuda.current_device())
        return partial(NcclGroup, device=device, confirms=self.confirms)


class NcclGroup(Group):
    """A raw NCCL group and a gloo group of the same ranks, neither registered with torch.distributed."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        host: str,
        timeout: timedelta,
        device: torch.device,
        confirms: bool = False,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        stuck: Callable[[], None] | None = None,
    ) -> None:
        """Meet all other ranks at the store, as a `GlooGroup` does. `UsageError` if two of them share a GPU."""
        self.rank, self.size, self._device, self._confirms = rank, size, device, confirms
        self._waiting: Callable[[], AbstractContextManager[None]] = nullcontext  # the crew says it, while this is made
        self._reason: str | None = None
        self._telling = threading.RLock()
        self._entering = threading.Lock()
        self._aborted = threading.Event()
        self._under_way: list[Any] = []
        self._store = store  # in Python: torch's group would not keep it alive
        self._nccl: Any = None
        _refuse_shared_gpus(store, rank, size, device)
        waits = lambda: self._waiting()  # noqa: E731, PLW0108 (it changes)
        self._cpu = GlooGroup(store, rank, size, host=host, timeout=timeout, waiting=waits, stuck=stuck)
        try:
            self._nccl = _make(PrefixStore("nccl", store), rank, size, device, timeout)
        except BaseException:
            self.close()
            raise
        self._waiting = waiting

    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum") -> CollectiveWork:
        """Begin to combine a tensor of all ranks."""
        self.num_begun += 1
        if tensor.device.type == "cpu":
            return self._over_gloo(lambda: self._cpu.all_reduce(tensor, op))
        options = dist.AllreduceOptions()
        options.reduceOp = OPS[op]
        return self._over_nccl(tensor, lambda nccl: nccl.allreduce([tensor], options), self._confirms)

    def broadcast(self, tensor: torch.Tensor, root: int) -> CollectiveWork:
        """Begin to give one rank's tensor to all."""
        self.num_begun += 1
        if tensor.device.type == "cpu":
            return self._over_gloo(lambda: self._cpu.broadcast(tensor, root))
        options = dist.BroadcastOptions()
        options.rootRank = root
        raw = tensor.view(-1).view(torch.uint8)  # NCCL does not know every dtype
        return self._over_nccl(tensor, lambda nccl: nccl.broadcast([raw], options), True)

    def send(self, tensor: torch.Tensor, to: int) -> CollectiveWork:
        """Begin to send a tensor (on the CPU) to one rank."""
        return self._over_gloo(lambda: self._cpu.send(tensor, to))

    def receive(self, tensor: torch.Tensor, sender: int) -> CollectiveWork:
        """Begin to receive what one rank sends, into a tensor on the CPU."""
        return self._over_gloo(lambda: self._cpu.receive(tensor, sender))

    def interrupt(self, reason: str) -> None:
        """Cut gloo's connections and abort NCCL's kernels, by a thread: nobody knows how long an abort takes."""
        with self._telling:
            is_first = self._reason is None
            self._reason = self._reason or reason or "interrupted"  # before the abort: see the ticket's `wait`
        self._cpu.interrupt(self._reason)
        if not is_first:
            return
        try:
            threading.Thread(target=self._abort, name="evergrad-abort", daemon=True).start()
        except RuntimeError:  # the interpreter is about to end, and starts no threads any more
            self._abort()

    def close(self) -> None:
        """Let go of both groups; whatever is still under way in them fails."""
        self.interrupt("closed")
        self._cpu.close()
        self._settle()
        self._nccl = None

    def _over_gloo(self, begin: Callable[[], CollectiveWork]) -> CollectiveWork:
        try:
            ticket = begin()
        except GroupBroken as error:
            raise self._broken(str(error)) from None

        def wait() -> None:
            try:
                ticket.wait()
            except GroupBroken as error:
                raise self._broken(str(error)) from None

        return CollectiveWork(wait, lambda: ticket.is_done)

    def _over_nccl(self, tensor: torch.Tensor, start: Callable[[Any], Any], confirmed: bool) -> CollectiveWork:
        if tensor.device != self._device:
            raise UsageError(
                f"rank {self.rank}: a tensor on {tensor.device}, and NCCL was set up for {self._device}: call "
                "torch.cuda.set_device with this rank's GPU before eg.join"
            )
        work, failed = None, None
        with self._entering:
            if self._reason is None:
                try:
                    work = start(self._nccl)
                except RuntimeError as error:
                    failed = _short(str(error))
        if work is None:
            raise self._broken(failed)
        self._under_way.append(work)

        def wait() -> None:
            error_text = None
            with self._waiting():
                pauses = _pauses()
                while self._reason is None and not _is_over(work):
                    time.sleep(next(pauses))
                try:
                    if self._reason is None:
                        work.wait()  # raises what NCCL found; and what this stream does next comes after the collective
                except RuntimeError as error:
                    error_text = _short(str(error))
            if error_text is not None or self._reason is not None:  # asked last: an abort, too, makes a work complete
                raise self._broken(error_text)
            self._under_way.remove(work)
            if confirmed and self.size > 1:
                self._over_gloo(lambda: self._cpu.all_reduce(torch.ones(1))).wait()

        return CollectiveWork(wait, lambda: self._reason is not None or _is_over(work))

    def _broken(self, reason: str | None) -> GroupBroken:
        """The error to raise, once nothing of this group runs any more."""
        self.interrupt(reason or "")
        self._settle()
        return GroupBroken(self._reason)

    def _settle(self) -> None:
        """After an interruption: wait until no kernel of this group can touch anybody's tensors."""
        until, pauses = time.monotonic() + _PATIENCE_S, _pauses()
        with self._waiting():
            # While it is aborted, NCCL answers no question.
            is_ended = self._aborted.wait(_PATIENCE_S)
            while is_ended and self._under_way:
                if _is_over(self._under_way[-1]):
                    self._under_way.pop()
                    continue
                is_ended = time.monotonic() < until
                time.sleep(next(pauses))
        if not is_ended:
            raise RecoveryError(
                f"rank {self.rank}: NCCL has not let go of {self._device} within {_PATIENCE_S:.0f} s of an abort "
                f"({self._reason}): this process cannot go on. Start it again"
            )

    def _abort(self) -> None:
        has_entered = self._entering.acquire(timeout=_ENTERING_S)  # past that, NCCL waits for a peer in there
        try:
            if self._nccl is not None:
                self._nccl.abort()
        except RuntimeError as error:
            _log.warning("rank %d: NCCL's abort failed: %s", self.rank, _short(str(error)))
        finally:
            if has_entered:
                self._entering.release()
            self._aborted.set()


def _missing() -> str | None:
    """What NCCL would need here, in words."""
    if not dist.is_nccl_available():
        return f"torch {torch.__version__} was built without NCCL"
    return None if torch.cuda.is_available() else "there is no CUDA device"


def _gpu(device: torch.device) -> str:
    """What tells a GPU from all others, on whichever node."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _refuse_shared_gpus(store: Store, rank: int, size: int, device: torch.device) -> None:
    """NCCL would refuse it too, by an error that every generation would meet again.

    At the store and not over gloo: whoever is refused first leaves, and would take the answer from the others.
    """
    store.set(f"gpu/{rank}", _gpu(device))
    owners: dict[bytes, list[str]] = {}
    for other in range(size):
        owners.setdefault(store.get(f"gpu/{other}"), []).append(str(other))
    for ranks in owners.values():
        if len(ranks) > 1:
            raise UsageError(
                f"EVERGRAD_TRANSPORT=nccl: ranks {', '.join(ranks)} have the same GPU, and NCCL needs one a rank: call "
                "torch.cuda.set_device with the local rank before eg.join, start fewer ranks, or use gloo"
            )


def _make(store: Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    with _making, _environment(_ALONE):
        group = nccl(store, rank, size, options)
    try:
        # Now, by a thread that may be left behind, and not in the first collective.
        group.eager_connect_single_device(device)
    except RuntimeError as error:
        with suppress(RuntimeError):
            group.abort()
        raise RuntimeError(_short(str(error))) from None
    return group


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _is_over(work: Any) -> bool:
    """Whether the GPU is through with it, for whatever reason."""
    try:
        return bool(work.is_completed())
    except RuntimeError:  # CUDA itself has failed, and will say so again to whoever waits
        return True


def _pauses() -> Iterator[float]:
    """Short at first: most waits are."""
    for _ in range(50):
        yield 0.0
    pause = 20e-6
    while True:
        yield pause
        pause = min(1.5 * pause, 1e-3)


def _short(text: str) -> str:
    """NCCL's first line without the path of torch's source."""
    line = (text.splitlines() or [""])[0]
    return (line.partition(", ")[2] if line.startswith("NCCL error in: ") else line)[:160]
