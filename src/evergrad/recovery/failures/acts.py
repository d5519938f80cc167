"""What a failure does to processes: signals, slowness, a cut network, soft errors."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from evergrad.errors import UsageError
from evergrad.recovery.failures import network
from evergrad.recovery.failures.failure import Failure

if TYPE_CHECKING:
    import torch

Signalled = Literal["kill", "stop", "leave"]
Find = Callable[[Sequence[int]], Sequence[tuple[int, int | None]]]
"""The uid of each of these ranks, and its process number if it is on this machine."""
Send = Callable[[int, Sequence[int], bool], None]
"""Sends processes, by uid, a signal, wherever they are; and if all of a node is meant, what else is part of it."""
Live = Callable[[], "Mapping[str, torch.Tensor]"]
"""The live state: path → tensor, the tensors themselves."""

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGTERM}
_EVENTS = {"kill": "killing", "stop": "stopping", "leave": "asked to leave"}


class Acts(Protocol):
    """What a trigger can let happen. Every call may be the last thing that this process does."""

    @property
    def reaches_others(self) -> bool:
        """Whether `signal` reaches other ranks than the caller's own."""

    def signal(self, kind: Signalled, ranks: Sequence[int], for_s: float | None, *, whole_node: bool = False) -> None:
        """Send these ranks a signal, in this order, the caller's own last; those that stop go on after `for_s`.

        With `whole_node` they are all ranks of a node, and whatever else there is of it is meant too.
        """

    def slow(self, rank: int, by: float, for_s: float | None) -> None:
        """Let this rank take so many times as long."""

    def cut(self, rank: int, for_s: float | None) -> None:
        """Take this rank's network away."""

    def flip(self, rank: int, failure: Failure, seed: int) -> None:
        """Put soft errors into this rank's state."""


class LiveActs:
    """Acts on real processes. Each is told before it happens, soft errors after."""

    def __init__(
        self,
        tell: Callable[..., None],
        *,
        find: Find | None = None,
        send: Send | None = None,
        live: Live | None = None,
    ) -> None:
        """Without `find` a rank can signal only itself; without `live` it has no state for soft errors.

        Without `send` all that is found is on this machine.
        """
        self._tell, self._find, self._send, self.live = tell, find, send, live
        self.flipped: Callable[[str], None] = lambda _: None
        """Called with a sentence after bits were flipped."""
        self.pace: Pace | None = None
        """How slow this rank is, if it is."""

    @property
    def reaches_others(self) -> bool:
        """Whether other ranks' processes can be found."""
        return self._find is not None

    def signal(self, kind: Signalled, ranks: Sequence[int], for_s: float | None, *, whole_node: bool = False) -> None:
        """All of them together; on another machine a stopped one is not woken."""
        found = self._find(ranks) if self._find is not None else [(-1, os.getpid())]
        pids = [pid for _, pid in found if pid is not None]
        more: dict[str, Any] = {} if for_s is None else {"for_s": for_s}
        self._tell(_EVENTS[kind], ranks=list(ranks), uids=[uid for uid, _ in found if uid >= 0], **more)
        waker = _waker(pids, for_s) if kind == "stop" and for_s is not None else None
        try:
            if self._send is not None:
                self._send(_SIGNALS[kind], [uid for uid, _ in found], whole_node)
            else:
                for pid in pids:
                    os.kill(pid, _SIGNALS[kind])
        except BaseException:
            if waker is not None:
                waker.kill()  # it would wait for processes that nobody stops
                waker.wait()
            raise
        if waker is not None:
            waker.wait()  # by now it has woken this process up too

    def slow(self, rank: int, by: float, for_s: float | None) -> None:
        """From now on, at every batch."""
        self._tell("slowed", rank=rank, by=by, for_s=for_s)
        self.pace = Pace(by, for_s)

    def cut(self, rank: int, for_s: float | None) -> None:
        """All TCP connections of this process, without a word to anyone."""
        self._tell("cut", rank=rank, for_s=for_s)
        network.cut(for_s, healed=lambda: self._tell("healed", rank=rank))

    def flip(self, rank: int, failure: Failure, seed: int) -> None:
        """What the injector does to a file, in memory."""
        from evergrad.injection.faults import fault_of
        from evergrad.injection.live_faults import flip

        if self.live is None:
            raise UsageError(f"failure '{failure}': this job has no state yet. Expected a model: job.wrap(model)")
        fault = fault_of(failure.fault, failure.bits)
        hits = flip(self.live(), fault, count=failure.count or 1, where=failure.where, seed=seed)
        for hit in hits:
            told = hit.to_json()
            bit = hit.bits[0] if len(hit.bits) == 1 else list(hit.bits)
            values = {"before": told["old_value"], "after": told["new_value"]}
            self._tell("flipped", rank=rank, path=hit.tensor, index=hit.index, bit=bit, **values, seed=seed)
        if hits:
            self.flipped(f"bits of {hits[0].tensor} were flipped on rank {rank} by the failure '{failure}'")


class Pace:
    """How slow a rank is. At each batch it sleeps `by` − 1 times what the last one took, from fetching it on.

    Waiting for other ranks counts as taking time; a recovery does not: after one the measure begins anew.
    """

    def __init__(
        self,
        by: float,
        for_s: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._by, self._clock, self._sleep = by, clock, sleep
        self._last = clock()
        self._until = None if for_s is None else self._last + for_s
        self._generation: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether the rank is as fast as it was."""
        return self._until is not None and self._clock() >= self._until

    def lap(self, generation: int) -> None:
        """Another batch is about to be fetched."""
        is_same = self._generation in (None, generation)
        self._generation = generation
        if is_same and not self.is_over:
            lag = (self._by - 1) * (self._clock() - self._last)
            self._sleep(lag if self._until is None else max(0.0, min(lag, self._until - self._clock())))
        self._last = self._clock()


# Its time begins when all are stopped, or have ended: a signal that came before a late stop would wake nobody.
_WAKE = """
for pid; do
    while [ -e "/proc/$pid" ] && ! grep -qs "^State:[[:space:]]*[TXZ]" "/proc/$pid/status"; do sleep 0.01; done
done
sleep "$0"
kill -CONT "$@"
"""


def _waker(pids: Sequence[int], after_s: float) -> subprocess.Popen[bytes]:
    """A process that lets these go on once they have been stopped for so long, whatever becomes of this one."""
    return subprocess.Popen(
        ["/bin/sh", "-c", _WAKE, f"{after_s:f}", *map(str, pids)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
