"""What the head of a job and the launchers of its other nodes tell each other, and the letterboxes for it.

All of it is sealed values in the store, under names that are used once. Each time that a launcher comes for a node it
makes an *attempt*, numbered from 0; whatever is said belongs to one attempt, and of an attempt that is over nothing is
taken any more, however late it arrives:

    hello/<node>/<attempt>        a launcher: here I am (claimed, so that two cannot be the same attempt)
    answer/<node>/<attempt>       the head: be welcome, and start these; or why not
    order/<node>/<attempt>/<n>    the head: start one more, send a signal, end
    word/<node>/<attempt>/<n>     the launcher: this one was started, that one has exited; I leave
    beat/<node>/<attempt>         the launcher, again and again: a number that only grows, and how its processes are

Words and orders are numbered and each is taken once, in order; a beat counts if its number is higher than the last.

A beat is also a lease. A launcher whose last answered beat began longer than `lease_s` ago ends its processes and
itself. The head waits for as long from when it saw that beat, which is later: who it takes for lost has ended by then.
Only a launcher that is itself stopped has not: its ranks are in no further plan, and end when they read the next one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evergrad.records import record_from_json, record_to_json
from evergrad.recovery.heartbeat import LivenessTimeouts, ProcessHealth
from evergrad.recovery.launch.settings import ProcessPlacement

if TYPE_CHECKING:
    from evergrad.recovery.store import SignedStore

_LEASE = 2.0


class NodeKeys:
    """The names in the store of what nodes and head tell each other."""

    @staticmethod
    def hello(node: int, attempt: int) -> str:
        """A launcher has come: JSON of its machine and process."""
        return f"hello/{node}/{attempt}"

    @staticmethod
    def answer(node: int, attempt: int) -> str:
        """What the head says to that: JSON of `starts`, or of why it is refused."""
        return f"answer/{node}/{attempt}"

    @staticmethod
    def orders(node: int, attempt: int) -> str:
        """Under this, `/<n>`: what the launcher is to do."""
        return f"order/{node}/{attempt}"

    @staticmethod
    def words(node: int, attempt: int) -> str:
        """Under this, `/<n>`: what the launcher has to say."""
        return f"word/{node}/{attempt}"

    @staticmethod
    def beat(node: int, attempt: int) -> str:
        """The launcher lives."""
        return f"beat/{node}/{attempt}"

    @staticmethod
    def signal_request(number: int) -> str:
        """A scheduled failure: JSON of a signal and of the uids, on whichever nodes, that are to be sent it."""
        return f"doom/{number}"


@dataclass(frozen=True, slots=True)
class StartOrder:
    """A process that a launcher is to start."""

    place: ProcessPlacement
    generation: int | None = None
    """Which one it is a member of from the beginning; None: the first, or as a spare."""

    def to_json(self) -> dict[str, Any]:
        """As part of an answer or an order."""
        return record_to_json(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> StartOrder:
        """Back from JSON."""
        return record_from_json(cls, values)


@dataclass(frozen=True, slots=True)
class NodeHeartbeat:
    """A launcher's sign of life."""

    number: int
    vitals: tuple[ProcessHealth, ...] = ()

    def to_json(self) -> str:
        """As text for the store."""
        return json.dumps(record_to_json(self))

    @classmethod
    def from_json(cls, text: str) -> NodeHeartbeat:
        """Back from text."""
        return record_from_json(cls, json.loads(text))


class Outbox:
    """Messages to one reader, in order; from any thread, over one connection."""

    def __init__(self, store: SignedStore, name: str) -> None:
        self._store, self._name = store, name
        self._next = 0
        self._lock = threading.Lock()

    def send(self, **message: Any) -> None:
        """One more."""
        with self._lock:
            self._store.set(f"{self._name}/{self._next}", json.dumps(message))
            self._next += 1


class Inbox:
    """Messages of one writer, in order; for one thread."""

    def __init__(self, store: SignedStore, name: str) -> None:
        self._store, self._name = store, name
        self._next = 0

    @property
    def awaited(self) -> str:
        """The name of the next one."""
        return f"{self._name}/{self._next}"

    def take(self) -> list[dict[str, Any]]:
        """Those that have come since; never waits for more."""
        found = []
        while (text := self._store.find(self.awaited)) is not None:
            self._next += 1
            found.append(json.loads(text))
        return found


def lease_s(timeouts: LivenessTimeouts) -> float:
    """For how long a node may be silent.

    Twice what a process may: of a process the kernel says whether it is stopped, of a node nobody does, and to lose one
    costs many ranks. With beats four times in `heartbeat_timeout_s`, and 1 s of that, two packets in a row can be lost
    (0.2 and 0.4 s until they are sent again), and a machine as busy as training makes it may be late by a second on
    top.
    """
    return _LEASE * timeouts.heartbeat_timeout_s
