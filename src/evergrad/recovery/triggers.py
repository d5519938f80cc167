"""Where scheduled failures come true: the job says where it is, and what is due there happens.

A *site* is a place in a step: a phase, or one side of a bucket's all-reduce. When a rank reaches one, it acts on the
first failure of the schedule that fits: its step and site, with this rank among its targets, and not used up.

Each time that a failure happens belongs to one generation. The first targeted rank that gets there claims it; whoever
else is targeted and gets there in the same generation takes part in it; in a later generation it has already happened,
so that a step which is rolled back and done again passes. Claims lie where all ranks see them, under
`fired/<index>/<time>`, and outlive whoever made them.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Sequence

from evergrad.recovery.failures import At, Failure, Failures, Phase
from evergrad.recovery.membership import Keys

__all__ = ["Claim", "InjectedFailure", "Trigger"]

_log = logging.getLogger(__name__)

Claim = Callable[[str, str], str]
"""Puts a value under a key unless the key has one, atomically for all ranks; returns the value that is there then.

Of a store: `lambda key, value: store.compare_set(key, "", value).decode()`; in memory: `{}.setdefault`.
"""


class InjectedFailure(RuntimeError):
    """The exception of a scheduled failure. To the job it is an error in the training script like any other."""


class Trigger:
    """The failures that one rank can meet; for one thread at a time."""

    def __init__(
        self, failures: Failures, *, claim: Claim, kill: Callable[[Sequence[int]], None] | None = None
    ) -> None:
        """`kill` ends the processes of these ranks by SIGKILL, in this order, the caller's own last.

        Without it a rank can end only itself: then every targeted rank does so when it gets to the site.
        """
        self._failures, self._claim, self._kill = failures, claim, kill
        self._next = [0] * len(failures)
        """The first time, of each failure, that may still come for this rank."""
        self._armed: dict[int, list[int]] = {}
        """Indices by step, without those that are used up."""
        for index, failure in enumerate(failures):
            self._armed.setdefault(failure.step, []).append(index)

    def is_armed(self, step: int) -> bool:
        """Whether anything might happen in this step: if not, no site of it needs to be reached."""
        return step in self._armed

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
        for index in tuple(self._armed.get(step, ())):
            failure = self._failures[index]
            if (failure.phase, failure.bucket, failure.at) != (phase, bucket, at):
                continue
            targets = failure.targets(members, nodes, step, index=index)
            if rank not in targets:
                continue
            mine = f"{generation}/{members[rank]}"
            holder = self._holder(index, mine)
            if holder is None:
                continue
            where = f"rank {rank}, step {step}, generation {generation}"
            if failure.kind == "exception":
                raise InjectedFailure(f"injected failure '{failure}' ({where})")
            if self._kill is None:
                _log.warning("%s: injected failure '%s': ending this rank", where, failure)
                os.kill(os.getpid(), signal.SIGKILL)
            elif holder == mine:
                victims = [*(one for one in targets if one != rank), rank]
                _log.warning("%s: injected failure '%s': ending ranks %s", where, failure, victims)
                self._kill(victims)
            return  # where another rank of this generation was first, it takes this one along

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
        left = self._armed[failure.step]
        left.remove(index)
        if not left:
            del self._armed[failure.step]
