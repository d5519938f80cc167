"""Where scheduled failures come true: the job says where it is, and what is due there happens.

A *site* is a place in a step: a phase, or one side of a bucket's all-reduce. When a rank reaches one, it acts on the
first failure of the schedule that fits: its step and site, or its time, with this rank among its targets, and not used
up. What is due at a time and names no phase comes at any site that the main thread reaches.

Each time that a failure happens belongs to one generation. The first targeted rank that gets there claims it; whoever
else is targeted and gets there in the same generation takes part in it; in a later generation it has already happened,
so that a step which is rolled back and done again passes. Claims lie where all ranks see them, under
`fired/<index>/<time>`, and outlive whoever made them.

Signals (kill, stop, leave) hit all targeted ranks together, sent by the first one; everything else comes on each of
them when it gets to the site.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from evergrad.recovery.failures.acts import Acts, LiveActs
from evergrad.recovery.failures.failure import Failure
from evergrad.recovery.failures.schedule import Failures
from evergrad.recovery.failures.words import At, Phase
from evergrad.recovery.membership import Keys

_log = logging.getLogger(__name__)

_DOING = {"kill": "ending", "stop": "stopping", "leave": "asking to leave"}

Claim = Callable[[str, str], str]
"""Puts a value under a key unless the key has one, atomically for all ranks; returns the value that is there then.

Of a store: `lambda key, value: store.compare_set(key, "", value).decode()`; in memory: `{}.setdefault`.
"""


class InjectedFailure(RuntimeError):
    """The exception of a scheduled failure. To the job it is an error in the training script like any other."""


class Trigger:
    """The failures that one rank can meet; for one thread at a time."""

    def __init__(
        self, failures: Failures, *, claim: Claim, acts: Acts | None = None, clock: Callable[[], float] | None = None
    ) -> None:
        """`acts` lets failures happen; without it a rank can act on itself alone, and has no state for soft errors.

        `clock` gives the seconds since the job began.
        """
        self._failures, self._claim = failures, claim
        self._acts: Acts = acts if acts is not None else LiveActs(lambda *_, **__: None)
        self._clock = clock if clock is not None else since_begun()
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
        at: At | None = None,
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
            holder = self._claim(f"{Keys.fired(index)}/{self._next[index]}", mine)
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


def since_begun() -> Callable[[], float]:
    """A clock of the seconds since the job began, as its launcher says, or else since this process did."""
    begun: float | None = None
    with suppress(KeyError, ValueError):
        begun = float(os.environ["EVERGRAD_BEGUN"])
    if begun is None or not math.isfinite(begun):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
        begun = time.monotonic() - age
    since = begun
    return lambda: time.monotonic() - since


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
