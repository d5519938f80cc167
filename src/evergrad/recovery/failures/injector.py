"""The places of a step at which failures can be scheduled, and what happens there."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from evergrad.errors import UsageError
from evergrad.recovery.failures import network
from evergrad.recovery.failures.schedule import BucketMoment, Failure, Failures, Phase
from evergrad.recovery.launch.node_protocol import NodeKeys
from evergrad.recovery.membership import StoreKeys

if TYPE_CHECKING:
    import torch
    from torch import nn

    from evergrad.recovery.store import SignedStore
    from evergrad.recovery.worker import ElasticWorker, Worker


# What a failure does to processes: signals, slowness, a cut network, soft errors.

Signalled = Literal["kill", "stop", "leave"]
FindProcesses = Callable[[Sequence[int]], Sequence[tuple[int, int | None]]]
"""The uid of each of these ranks, and its process number if it is on this machine."""
SendSignal = Callable[[int, Sequence[int], bool], None]
"""Sends processes, by uid, a signal, wherever they are; and if all of a node is meant, what else is part of it."""
LiveTensors = Callable[[], "Mapping[str, torch.Tensor]"]
"""The live state: path → tensor, the tensors themselves."""

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "leave": signal.SIGTERM}
_EVENTS = {"kill": "kill_injected", "stop": "stop_injected", "leave": "leave_injected"}


class FailureEffects(Protocol):
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


class ProcessFailureEffects:
    """Acts on real processes. Each is told before it happens, soft errors after."""

    def __init__(
        self,
        tell: Callable[..., None],
        *,
        find: FindProcesses | None = None,
        send: SendSignal | None = None,
        live: LiveTensors | None = None,
    ) -> None:
        """Without `find` a rank can signal only itself; without `live` it has no state for soft errors.

        Without `send_signal` all that is found is on this machine.
        """
        self._record_event, self._find, self._send, self.live = tell, find, send, live
        self.flipped: Callable[[str], None] = lambda _: None
        """Called with a sentence after bits were flipped."""
        self.pace: Slowdown | None = None
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
        self._record_event(_EVENTS[kind], ranks=list(ranks), uids=[uid for uid, _ in found if uid >= 0], **more)
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
        self._record_event("slowdown_injected", rank=rank, by=by, for_s=for_s)
        self.pace = Slowdown(by, for_s)

    def cut(self, rank: int, for_s: float | None) -> None:
        """All TCP connections of this process, without a word to anyone."""
        self._record_event("network_cut_injected", rank=rank, for_s=for_s)
        network.cut(for_s, healed=lambda: self._record_event("network_restored", rank=rank))

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
            self._record_event(
                "bit_flip_injected", rank=rank, path=hit.tensor, index=hit.index, bit=bit, **values, seed=seed
            )
        if hits:
            self.flipped(f"bits of {hits[0].tensor} were flipped on rank {rank} by the failure '{failure}'")


class Slowdown:
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


# Where scheduled failures come true: the job says where it is, and what is due there happens.
#
# A *site* is a place in a step: a phase, or one side of a bucket's all-reduce. When a rank reaches one, it acts on
# the first failure of the schedule that fits: its step and site, or its time, with this rank among its targets, and
# not used up. What is due at a time and names no phase comes at any site that the main thread reaches.
#
# Each time that a failure happens belongs to one generation. The first targeted rank that gets there claims it;
# whoever else is targeted and gets there in the same generation takes part in it; in a later generation it has
# already happened, so that a step which is rolled back and done again passes. Claims lie where all ranks see them,
# under `fired/<index>/<time>`, and outlive whoever made them.
#
# Signals (kill, stop, leave) hit all targeted ranks together, sent by the first one; everything else comes on each of
# them when it gets to the site.

_log = logging.getLogger(__name__)

_DOING = {"kill": "ending", "stop": "stopping", "leave": "asking to leave"}

Claim = Callable[[str, str], str]
"""Puts a value under a key unless the key has one, atomically for all ranks; returns the value that is there then.

Of a store: `lambda key, value: store.compare_set(key, "", value).decode()`; in memory: `{}.setdefault`.
"""


class InjectedFailure(RuntimeError):
    """The exception of a scheduled failure. To the job it is an error in the training script like any other."""


class FailureTrigger:
    """The failures that one rank can meet; for one thread at a time."""

    def __init__(
        self,
        failures: Failures,
        *,
        claim: Claim,
        acts: FailureEffects | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`acts` lets failures happen; without it a rank can act on itself alone, and has no state for soft errors.

        `clock` gives the seconds since the job began.
        """
        self._failures, self._claim = failures, claim
        self._acts: FailureEffects = acts if acts is not None else ProcessFailureEffects(lambda *_, **__: None)
        self._clock = clock if clock is not None else job_clock()
        self._next = [0] * len(failures)
        """The first time, of each failure, that may still come for this rank."""
        self._armed: dict[int, list[int]] = {}
        """Indices by step, without those that are used up."""
        self._timed: list[int] = []
        """Indices of those that come at a time, without those that are used up."""
        self._aside: set[int] = set()
        """Of these the ones that are due and hit other ranks: nothing more of them before the next generation."""
        self._aside_in = -1
        self._due = math.inf
        """When the first of the others is due."""
        for index, failure in enumerate(failures):
            if failure.step is None:
                self._timed.append(index)
            else:
                self._armed.setdefault(failure.step, []).append(index)
        self._look_ahead()

    def is_armed(self, step: int, generation: int | None = None) -> bool:
        """Whether anything might happen now, in this step: if not, no site needs to be reached."""
        if self._aside and generation != self._aside_in:
            self._aside.clear()
            self._look_ahead()
        return step in self._armed or (self._due < math.inf and self._clock() >= self._due)

    def reach(
        self,
        phase: Phase,
        *,
        step: int,
        generation: int,
        rank: int,
        members: Sequence[int],
        nodes: Sequence[str],
        bucket: int | None = None,
        at: BucketMoment | None = None,
    ) -> None:
        """This rank is at a site; `members` are the generation's uids and `nodes` their nodes, both by rank.

        With a bucket, `at="during"` is right after its all-reduce was started. At most one failure comes of a visit.
        """
        at = "before" if bucket is not None and at is None else at
        for index in (*self._armed.get(step, ()), *self._overdue()):
            failure = self._failures[index]
            if failure.phase is None:
                if threading.current_thread() is not threading.main_thread():
                    continue
            elif (failure.phase, failure.bucket, failure.at) != (phase, bucket, at):
                continue
            targets = failure.targets(members, nodes, index=index)
            if rank not in targets:
                self._set_aside(index, generation)
                continue
            mine = f"{generation}/{members[rank]}"
            turn = self._next[index]
            holder = self._holder(index, mine)
            if holder is None:
                continue
            where = f"rank {rank}, step {step}, generation {generation}"
            self._happen(index, rank, targets, where, f"{turn}/{generation}", is_first=holder == mine)
            return

    def _happen(self, index: int, rank: int, targets: Sequence[int], where: str, turn: str, *, is_first: bool) -> None:
        failure = self._failures[index]
        match failure.kind:
            case "exception":
                raise InjectedFailure(f"injected failure '{failure}' ({where})")
            case "kill" | "stop" | "leave" as kind:
                if self._acts.reaches_others and not is_first:
                    return  # another rank of this generation was first, and takes this one along
                victims = [*(one for one in targets if one != rank), rank] if self._acts.reaches_others else [rank]
                whom = f"ranks {victims}" if self._acts.reaches_others else "this rank"
                _log.warning("%s: injected failure '%s': %s %s", where, failure, _DOING[kind], whom)
                self._acts.signal(kind, victims, failure.for_s, whole_node=failure.node is not None)
                return
        _log.warning("%s: injected failure '%s'", where, failure)
        match failure.kind:
            case "slow":
                assert failure.by is not None
                self._acts.slow(rank, failure.by, failure.for_s)
            case "cut":
                self._acts.cut(rank, failure.for_s)
            case "flip":
                is_given = failure.seed and turn.startswith("0/") and rank == targets[0]
                seed = failure.seed if is_given else _seed(f"{failure.seed}/{index}/{turn}/{rank}")
                self._acts.flip(rank, failure, seed)

    def _overdue(self) -> list[int]:
        if self._due == math.inf or (now := self._clock()) < self._due:
            return []
        return [index for index in self._timed if index not in self._aside and self._time(index) <= now]

    def _time(self, index: int) -> float:
        found = self._failures[index].time
        assert found is not None
        return found

    def _set_aside(self, index: int, generation: int) -> None:
        if self._failures[index].step is None:
            if generation != self._aside_in:
                self._aside.clear()
            self._aside.add(index)
            self._aside_in = generation
            self._look_ahead()

    def _look_ahead(self) -> None:
        self._due = min((self._time(index) for index in self._timed if index not in self._aside), default=math.inf)

    def _holder(self, index: int, mine: str) -> str | None:
        """Who claimed the time that happens now, in this generation; None if the failure is used up."""
        failure, generation = self._failures[index], mine.partition("/")[0]
        if failure.times is None:
            return mine
        found: str | None = None
        while found is None and self._next[index] < failure.times:
            holder = self._claim(f"{StoreKeys.fired(index)}/{self._next[index]}", mine)
            self._next[index] += 1
            found = holder if holder.partition("/")[0] == generation else None
        if self._next[index] == failure.times:
            self._disarm(index, failure)
        return found

    def _disarm(self, index: int, failure: Failure) -> None:
        if failure.step is None:
            self._timed.remove(index)
            self._look_ahead()
            return
        left = self._armed[failure.step]
        left.remove(index)
        if not left:
            del self._armed[failure.step]


def job_clock() -> Callable[[], float]:
    """A clock of the seconds since the job began, as its launcher says, or else since this process did."""
    begun: float | None = None
    with suppress(KeyError, ValueError):
        begun = float(os.environ["EVERGRAD_START_TIME"])
    if begun is None or not math.isfinite(begun):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
        begun = time.monotonic() - age
    since = begun
    return lambda: time.monotonic() - since


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


# How a scheduled failure reaches processes on other machines, and a whole node with the launcher that runs there.
#
# A process number says nothing on another machine: there the head is asked, through the store, to have the signal
# sent.


def send_signal(
    client: SignedStore, number: int, uids: Sequence[int], *, env: Mapping[str, str], whole_node: bool = False
) -> None:
    """Send these processes, which have joined, a signal: in this order, those on other machines first.

    With `whole_node` they are all that has a rank on this node, and SIGKILL ends its launcher too, and so whatever else
    runs here; not where that is the head, without which there is no job. `env` is the environment of this process.
    """
    about = {uid: json.loads(client.get(StoreKeys.joined(uid))) for uid in uids}
    is_spread, node = env.get("EVERGRAD_MULTINODE") == "1", env.get("EVERGRAD_NODE")
    elsewhere = [uid for uid in uids if is_spread and about[uid]["node"] != node]
    if elsewhere:
        _ask(client, number, elsewhere)
    if whole_node and number == signal.SIGKILL and "EVERGRAD_LAUNCHER" in env:
        os.kill(int(env["EVERGRAD_LAUNCHER"]), number)
    for uid in uids:
        if uid not in elsewhere:
            os.kill(about[uid]["pid"], number)


def _ask(client: SignedStore, number: int, uids: Sequence[int]) -> None:
    """Ask the head, under the first name that is free."""
    mine = json.dumps({"number": int(number), "uids": [*uids], "token": secrets.token_hex(8)})
    turn = 0
    while client.claim(NodeKeys.signal_request(turn), mine) != mine:
        turn += 1


class FailureSites:
    """This rank's sites; without a schedule none of them costs anything."""

    def __init__(self, failures: Failures, worker: Worker, nodes: Sequence[str], tell: Callable[..., None]) -> None:
        from evergrad.recovery.worker import ElasticWorker  # it brings torch along, which triggers do without

        self._nodes = nodes
        self._trigger: FailureTrigger | None = None
        self._acts: ProcessFailureEffects | None = None
        if failures and isinstance(worker, ElasticWorker):

            def claim(key: str, text: str) -> str:
                return worker.client.claim(key, text)  # whichever connection it has by then

            self._worker = worker
            self._acts = ProcessFailureEffects(
                tell, find=lambda ranks: _find(worker, ranks), send=lambda *how: _send(worker, *how)
            )
            self._trigger = FailureTrigger(failures, claim=claim, acts=self._acts)

    def set_state(self, live: LiveTensors, flipped: Callable[[str], None]) -> None:
        """The state that soft errors hit: path → tensor, the tensors themselves, asked for when one is due.

        `flipped` is called with a sentence after each.
        """
        if self._acts is not None:
            self._acts.live, self._acts.flipped = live, flipped

    def is_armed(self, step: int) -> bool:
        """Whether anything might happen now, in this step; cheap enough to be asked at every site."""
        if self._trigger is None or self._acts is None:
            return False
        return self._acts.pace is not None or self._trigger.is_armed(step, self._worker.plan.generation)

    def reach(self, phase: Phase, step: int, bucket: int | None = None, at: BucketMoment | None = None) -> None:
        """This rank is at a site; it may not come back from there."""
        assert self._trigger is not None
        assert self._acts is not None
        worker = self._worker
        generation = worker.plan.generation
        if self._trigger.is_armed(step, generation):
            nodes = [self._node_of(worker, uid) for uid in worker.plan.members]
            self._trigger.reach(
                phase,
                step=step,
                generation=generation,
                rank=worker.rank,
                members=worker.plan.members,
                nodes=nodes,
                bucket=bucket,
                at=at,
            )
        if self._acts.pace is not None and phase is Phase.DATA:
            self._acts.pace.lap(generation)
            if self._acts.pace.is_over:
                self._acts.pace = None

    def watch(self, module: nn.Module, site: Callable[[Phase], None], is_in_step: Callable[[], bool]) -> None:
        """Reach the sites of a forward pass, and the one before a backward pass that reduces gradients.

        A pass without gradients, and one outside of a step, is an evaluation.
        """
        if self._trigger is None:
            return
        import torch

        syncs: Any = module

        def trains() -> bool:
            return module.training and torch.is_grad_enabled() and is_in_step()

        module.register_forward_pre_hook(lambda *_: site(Phase.FORWARD) if trains() else None)
        module.register_forward_hook(
            lambda *_: site(Phase.BACKWARD) if trains() and syncs.require_backward_grad_sync else None
        )

    def _node_of(self, worker: ElasticWorker, uid: int) -> str:
        if uid < len(self._nodes):
            return self._nodes[uid]
        node: str = json.loads(worker.client.get(StoreKeys.joined(uid)))[
            "node"
        ]  # it was started later than this process
        return node


def _find(worker: ElasticWorker, ranks: Sequence[int]) -> list[tuple[int, int | None]]:
    """Whose process each of these ranks is."""
    uids = [worker.plan.members[rank] for rank in ranks]
    about = {uid: json.loads(worker.client.get(StoreKeys.joined(uid))) for uid in uids}
    is_spread, node = os.environ.get("EVERGRAD_MULTINODE") == "1", os.environ.get("EVERGRAD_NODE")
    return [(uid, None if is_spread and about[uid]["node"] != node else about[uid]["pid"]) for uid in uids]


def _send(worker: ElasticWorker, number: int, uids: Sequence[int], whole_node: bool) -> None:
    send_signal(worker.client, number, uids, env=os.environ, whole_node=whole_node)
