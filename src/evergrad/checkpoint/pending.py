"""What a trainer knows of its versions: filled by events, waited on by `Pending`."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from evergrad.checkpoint.agent.events import (
    AgentEvent,
    ArenasFree,
    CapturesFinished,
    Committed,
    Failed,
    Refused,
    UnfinishedVersion,
)
from evergrad.checkpoint.version import Version
from evergrad.errors import CheckpointError, SaveRefused, TierError, UsageError
from evergrad.wording import did_you_mean

_log = logging.getLogger(__name__)
_UNTOLD = 32
_EARLY = 64


class Capture(Protocol):
    """A capture that may still be under way."""

    def wait(self) -> None:
        """Return when the state may change."""
        ...


class TierResults(dict[str, str | None]):
    """What became of a version, by tier: None if it is committed there, else why it never will be."""

    __slots__ = ("__weakref__",)


class SaveTracker:
    """Verdicts on versions, free arenas, and failures that nobody has been told yet. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._results: weakref.WeakValueDictionary[Version, TierResults] = weakref.WeakValueDictionary()
        """Of the versions that someone may still ask for."""
        self._early: dict[tuple[Version, str], str | None] = {}
        """Verdicts that nobody has asked for, the last few."""
        self._newest: dict[str, Version] = {}
        """The newest that is known to be committed, by tier."""
        self._free: dict[int, int] = {}
        self._knows_free = False
        self._settled = 0
        self._unfinished: list[UnfinishedVersion] = []
        self._rank = self._attempt = -1
        self._disowned: Version | None = None
        self._refused: str | None = None
        self._broken: str | None = None
        self._errors: list[str] = []

    def start_attempt(self, rank: int, attempt: int) -> None:
        """The rank whose arenas, and the attempt whose failures, are of interest; starts with no arena free."""
        with self._changed:
            self._attempt = attempt
            self._rank, self._free, self._knows_free, self._refused = rank, {}, False, None

    def handle_event(self, event: AgentEvent) -> None:
        """An event arrived."""
        with self._changed:
            if isinstance(event, Committed):
                self._newest[event.tier] = max(
                    self._newest.get(event.tier, event.version), event.version, key=Version.age
                )
                self._decide(event.version, event.tier, None)
            elif isinstance(event, Failed):
                self._decide(event.version, event.tier, event.why)
                if event.attempt == self._attempt and event.version != self._disowned:  # else not saved here
                    self._note(f"{event.version} is not in tier {event.tier}: {event.why}")
            elif isinstance(event, ArenasFree) and event.rank == self._rank:
                self._free.update((int(index), generation) for index, generation in event.arenas.items())
                self._knows_free = True
            elif isinstance(event, CapturesFinished):
                if event.question >= self._settled:
                    self._settled, self._unfinished = event.question, event.unfinished
            elif isinstance(event, Refused) and event.attempt >= self._attempt:
                self._refused = event.why
            self._changed.notify_all()

    def expect(self, version: Version) -> TierResults:
        """What becomes of a version that is about to be handed over, for as long as someone holds on to it."""
        with self._changed:
            fate = self._results.setdefault(version, TierResults())
            for early, tier in list(self._early):  # another rank may have failed before this one began
                if early == version:
                    fate.setdefault(tier, self._early.pop((early, tier)))
            return fate

    def ignore_failure_of(self, version: Version) -> None:
        """This save has failed, and whoever called it knows."""
        with self._changed:
            self._disowned = version

    def fail_retired_versions(self, tiers: Sequence[str]) -> None:
        """A new agent has told all that it knows: what is older than that and still undecided is gone."""
        with self._changed:
            for version, fate in list(self._results.items()):
                for tier in tiers:
                    newest = self._newest.get(tier)
                    if newest is not None and newest.age() > version.age() and tier not in fate:
                        fate[tier] = f"{newest} is, and an agent died since: it was retired, or lost"
            self._changed.notify_all()

    def _decide(self, version: Version, tier: str, why: str | None) -> None:
        fate = self._results.get(version)
        if fate is not None:
            fate.setdefault(tier, why)  # the first verdict stays
            return
        self._early[version, tier] = why
        while len(self._early) > _EARLY:
            del self._early[next(iter(self._early))]

    def report(self, message: str) -> None:
        """Something went wrong in the background; the next save says so."""
        _log.warning("%s", message)
        with self._changed:
            self._note(message)

    def _note(self, message: str) -> None:
        if message not in self._errors[-_UNTOLD:]:
            self._errors.append(message)
            del self._errors[:-_UNTOLD]

    def set_unavailable(self, message: str | None) -> None:
        """Nobody finishes versions at the moment, and why; None: someone does again."""
        with self._changed:
            self._broken = message
            self._changed.notify_all()

    def errors(self) -> list[str]:
        """What went wrong since this was last asked."""
        with self._changed:
            errors, self._errors = self._errors, []
            return errors

    def refusal(self) -> str | None:
        """Why this trainer is not served any more, if it is not."""
        with self._changed:
            return self._refused

    def knows_free(self) -> bool:
        """Whether it is known which arenas are free."""
        with self._changed:
            return self._knows_free

    def is_answered(self, question: int) -> bool:
        """Whether that question was answered."""
        with self._changed:
            return self._settled >= question

    def unfinished(self) -> list[UnfinishedVersion]:
        """Return the unfinished versions of the agent's last answer."""
        with self._changed:
            return self._unfinished

    def is_free(self, index: int, generation: int) -> bool:
        """Whether an arena may be overwritten, holding that generation."""
        with self._changed:
            return self._free.get(index) == generation

    def wait(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until something is so, whoever changes it; False after the timeout, an error if it cannot be."""
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not ready():
                if self._refused is not None:
                    raise SaveRefused(self._refused)
                if self._broken is not None:
                    raise CheckpointError(self._broken)
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
        return True


class Pending:
    """A version on its way: captured, and being made durable by someone else."""

    def __init__(self, version: Version, tiers: Sequence[str], tier: str, tracker: SaveTracker) -> None:
        self.version = version
        self._tiers, self._tier, self._tracker = tuple(tiers), tier, tracker
        self._results = tracker.expect(version)
        self._capture: Capture | None = None

    @property
    def step(self) -> int:
        """The step that was saved."""
        return self.version.step

    def set_capture(self, flight: Capture) -> None:
        """The capture that this is about."""
        self._capture = flight

    def captured(self) -> None:
        """Return when the state may change again: on a CPU that was so when `save` returned.

        Of what is on a GPU only `optimizer.step()` waits by itself; whatever else changes parameters calls this first.
        """
        if self._capture is not None:
            self._capture.wait()
            self._capture = None

    def done(self, tier: str | None = None) -> bool:
        """Whether it is decided what becomes of it: committed, or failed."""
        return self._named(tier) in self._results

    def wait(self, tier: str | None = None, timeout: float | None = None) -> Version:
        """Wait until every rank's shard is complete in a tier: by default the first that survives a reboot.

        Raises `TierError` if it never will be, and `TimeoutError` after `timeout` seconds.
        """
        name = self._named(tier)
        if not self._tracker.wait(lambda: name in self._results, timeout):
            raise TimeoutError(f"{self.version} is not in tier {name} after {timeout} s")
        why = self._results[name]
        if why is not None:
            raise TierError(f"{self.version} is not in tier {name}: {why}")
        return self.version

    def result(self, timeout: float | None = None) -> Version:
        """As `wait`: the version, once it is durable."""
        return self.wait(timeout=timeout)

    def exception(self, timeout: float | None = None) -> CheckpointError | None:
        """Why it failed, or None, once that is decided."""
        try:
            self.wait(timeout=timeout)
        except CheckpointError as error:
            return error
        return None

    def __repr__(self) -> str:
        known, why = self._tier in self._results, self._results.get(self._tier)
        return f"<Pending {self.version}: {'in flight' if not known else why or f'in tier {self._tier}'}>"

    def _named(self, tier: str | None) -> str:
        if tier is None:
            return self._tier
        if tier not in self._tiers:
            there = f"This version goes to {', '.join(self._tiers)}."
            raise UsageError(f"unknown tier {tier!r}.{did_you_mean(str(tier), self._tiers)} {there}")
        return tier
