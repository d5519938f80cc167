"""The arenas of a rank, and how a state gets into one of them.

Each rank has two, used in turns. A state is copied into the one that may be overwritten, and only when every byte is
there is that said on the arena's ticket: at once for memory of the host, and for a GPU when its copies have ended,
which a thread waits for while training goes on.
"""

from __future__ import annotations

import logging
import mmap
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from evergrad.checkpoint.arena import Arena, Ticket
from evergrad.checkpoint.board import Board
from evergrad.checkpoint.capture.pinned import Pinned
from evergrad.checkpoint.capture.plan import Copying, Gathered, Plan, Target
from evergrad.errors import SaveRefused, TierError, UsageError
from evergrad.formats.collector import uncollected

_log = logging.getLogger(__name__)
_ARENAS = 2
_SAY_SO_AFTER_S = 10.0


@dataclass(slots=True)
class InFlight:
    """A capture whose bytes may still be on their way."""

    arena: Arena
    ticket: Ticket
    copying: Copying | None
    announce: Callable[[Exception | None], None]
    """Called once, when the ticket says what is in the arena, or when it never will."""
    ended: threading.Event = field(default_factory=threading.Event)

    def finish(self) -> None:
        """Wait for the bytes, then say on the ticket that they are there."""
        failure: Exception | None = None
        try:
            if self.copying is not None:
                self.copying.wait()
            self.arena.captured(self.ticket)
        except Exception as error:  # a failed device, a full ticket: whoever waits for this version must hear of it
            failure = error
        try:
            self.announce(failure)
        except Exception as error:  # such as a trainer that is not served any more
            _log.exception("a capture could not be announced")
            with suppress(Exception):
                self.announce(error)
        finally:
            self.copying = None
            self.ended.set()

    def wait(self) -> None:
        """Return when the state that was captured may change."""
        copying = self.copying
        if copying is not None:
            copying.wait()


class Recorder:
    """What a trainer has of shared memory. Not for several threads at once."""

    def __init__(self, folder: Path, board: Board, when_busy: Literal["wait", "refuse"]) -> None:
        self._folder, self._board, self._when_busy = folder, board, when_busy
        self._plan: Plan | None = None
        self._arenas: list[Arena] = []
        self._targets: dict[int, tuple[Plan, Target]] = {}
        self._pinned: dict[int, Pinned] = {}
        self._in_flight: dict[int, InFlight] = {}
        self._queue: queue.SimpleQueue[InFlight | None] | None = None
        self.rank = -1

    @property
    def size(self) -> int:
        """Bytes of shared memory that the arenas take."""
        return sum(arena.size for arena in self._arenas)

    def mapped(self) -> dict[Path, mmap.mmap]:
        """The arenas as they are mapped here."""
        return {arena.files.shard: arena.buffer for arena in self._arenas if arena.buffer is not None}

    def lease(self, rank: int) -> None:
        """Two arenas of this rank: those that were left, if no living trainer holds them."""
        if rank == self.rank:
            return
        self.let_go()
        index = 0
        while len(self._arenas) < _ARENAS:
            arena = Arena.lease(self._folder, rank, index)
            if arena is not None:
                self._arenas.append(arena)
            index += 1
        self.rank = rank

    def let_go(self) -> None:
        """Give the arenas up; what is in them stays."""
        self.settle()
        if self._queue is not None:
            self._queue.put(None)
            self._queue = None
        self._targets.clear()
        for pinned in self._pinned.values():
            pinned.close()
        self._pinned.clear()
        for arena in self._arenas:
            arena.close()
        self._arenas, self.rank = [], -1

    def settle(self) -> None:
        """Wait until nothing is on its way into an arena."""
        for flight in list(self._in_flight.values()):
            flight.ended.wait()
        self._in_flight.clear()

    def reserve(self, plan: Plan, rank: int) -> None:
        """Make both arenas now. One that holds a version from before is left alone until it may be overwritten."""
        self.lease(rank)
        made: list[Arena] = []
        try:
            for arena in self._arenas:
                if not arena.ticket.captured:
                    arena.reserve(plan.layout.size)
                    made.append(arena)
        except TierError:
            for arena in made:
                arena.files.remove()
            raise
        for arena in made:
            self._target(arena, plan)
        self._plan = plan
        _log.info("rank %d: two arenas of %.3f GB in %s", rank, plan.layout.size / 1e9, self._folder)

    def capture(
        self,
        state: object,
        plan: Callable[[], Plan],
        record: Mapping[str, Any],
        ticket: Callable[[int], Ticket],
        announce: Callable[[Arena, Exception | None], None],
    ) -> InFlight:
        """Copy a state into an arena.

        `plan` makes the plan for a state of a new form, `record` goes into the header, and `ticket` says of a shard of
        so many bytes what it is. `announce` is called when the arena holds it, perhaps from another thread.
        """
        chosen, gathered, header = self._gather(state, plan, record)
        size = chosen.layout.size
        arena = self._free_arena()
        arena.begin()
        if arena.size != size:  # nothing may keep the old memory while the new is reserved
            self._targets.pop(arena.files.index, None)
            if (pinned := self._pinned.pop(arena.files.index, None)) is not None:
                pinned.close()
        arena.reserve(size)
        assert arena.buffer is not None
        copying = self._target(arena, chosen).copy(gathered)
        arena.buffer[: len(header)] = header
        flight = InFlight(arena, ticket(size), copying, lambda error: announce(arena, error))
        if copying is None:
            arena.captured(flight.ticket)
            flight.ended.set()
            announce(arena, None)
        else:
            self._in_flight[arena.files.index] = flight
            self._finish_later(flight)
        return flight

    def _gather(
        self, state: object, make: Callable[[], Plan], record: Mapping[str, Any]
    ) -> tuple[Plan, Gathered, bytes]:
        """Today's tensors and header, by the plan of the last save if it still holds."""
        if self._plan is not None:
            gathered = self._plan.gather(state)
            if gathered is not None and (header := self._plan.header(gathered, record)) is not None:
                return self._plan, gathered, header
        with uncollected():
            self._plan = plan = make()
        gathered = plan.gather(state)
        header = plan.header(gathered, record) if gathered is not None else None
        if gathered is None or header is None:
            raise UsageError("the state changed while it was read: state_dict() gives something else each time")
        return plan, gathered, header

    def _target(self, arena: Arena, plan: Plan) -> Target:
        known = self._targets.get(arena.files.index)
        if known is None or known[0] is not plan:
            assert arena.buffer is not None
            known = self._targets[arena.files.index] = (plan, Target(plan, arena.buffer, pinned=self._pin(arena, plan)))
        return known[1]

    def _pin(self, arena: Arena, plan: Plan) -> bool:
        """Whether GPUs can write to an arena by themselves; asked for once, whatever plans follow."""
        device = next((device for device in plan.cuda() if device is not None), None)
        if device is None:
            return False
        assert arena.buffer is not None
        known = self._pinned.get(arena.files.index)
        if known is None or known.buffer is not arena.buffer:
            if known is not None:
                known.close()
            known = self._pinned[arena.files.index] = Pinned(arena.buffer, device)
        return known.ok

    def _free_arena(self) -> Arena:
        """The arena to overwrite: one that holds nothing, else the one with the older version, once it may be."""
        for arena in self._arenas:
            flight = self._in_flight.get(arena.files.index)
            if not arena.ticket.captured and (flight is None or flight.ended.is_set()):
                return arena
        self._board.wait(self._board.knows_free, None)
        oldest_first = sorted(self._arenas, key=lambda arena: arena.ticket.version.age())

        def free() -> Arena | None:
            for arena in oldest_first:
                if arena.ticket.captured and self._board.is_free(arena.files.index, arena.ticket.generation):
                    return arena
            return None

        if free() is None and self._when_busy == "refuse":
            versions = " and ".join(str(arena.ticket.version) for arena in oldest_first)
            raise SaveRefused(f"both arenas are in use: {versions} are not finished. Save less often, or wait.")
        start = time.monotonic()
        while not self._board.wait(lambda: free() is not None, _SAY_SO_AFTER_S):
            waited = time.monotonic() - start
            _log.warning("rank %d: a save has waited %.0f s for an arena: storage or a rank is slow", self.rank, waited)
        found = free()
        assert found is not None
        return found

    def _finish_later(self, flight: InFlight) -> None:
        if self._queue is None:
            self._queue = queue.SimpleQueue()
            threading.Thread(target=_finish, args=(self._queue,), name="evergrad-capture", daemon=True).start()
        self._queue.put(flight)


def _finish(flights: queue.SimpleQueue[InFlight | None]) -> None:
    while (flight := flights.get()) is not None:
        flight.finish()
