"""Which arenas are done with: their trainer may write over them, or nobody needs their memory any more."""

from __future__ import annotations

from evergrad.checkpoint.arena import ArenaFiles, Ticket
from evergrad.checkpoint.finish.desk import Desk
from evergrad.checkpoint.run_folder import find_arenas
from evergrad.checkpoint.tiers import read_tiers
from evergrad.checkpoint.tiers.memory import Held, held_by
from evergrad.checkpoint.version import Version


class Freeing:
    """The arenas of a node, or of one rank, as whoever finishes what is in them knows them. Thread-safe."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._ended: dict[tuple[int, int], Ticket] = {}
        """(rank, index) → the ticket of the arena whose chain has ended."""

    def end(self, files: ArenaFiles, ticket: Ticket) -> None:
        """Nobody reads the arena any more."""
        with self._desk.lock:
            self._ended[files.rank, files.index] = ticket

    def resume(self, files: ArenaFiles) -> None:
        """The arena is read again."""
        with self._desk.lock:
            self._ended.pop((files.rank, files.index), None)

    def has_ended(self, files: ArenaFiles, ticket: Ticket) -> bool:
        """Whether that was said of what is in it now."""
        ended = self._ended.get((files.rank, files.index))
        return ended is not None and ended.generation == ticket.generation

    def free(self, rank: int, attempt: int) -> dict[str, int]:
        """The arenas of a rank that may be overwritten: what they held is finished, and is not all that there is.

        The newest complete version stays, if memory is the only place that has it; so does one that other ranks are
        still completing in memory.
        """
        free: dict[str, int] = {}
        with self._desk.lock:
            complete = self._desk.holdings.complete()
            folder = self._desk.site.arenas
            known = [ArenaFiles(folder, *key) for key in self._ended if key[0] == rank]
            for files in dict.fromkeys((*find_arenas(folder, rank), *known)):
                # Without a free descriptor no ticket can be read. A generation is used once: an old one does no harm.
                ticket = files.read_ticket() or self._ended.get((files.rank, files.index))
                if ticket is None or not ticket.captured:
                    continue  # its trainer knows best
                if self.has_ended(files, ticket) and not self._is_needed(ticket, complete, attempt):
                    free[str(files.index)] = ticket.generation
        return free

    def clean(self) -> None:
        """Give back the memory of arenas that nobody needs: unlocked, finished, and not a rank's newest version."""
        with self._desk.lock:
            self._desk.completion.refresh()
            complete = self._desk.completion.complete("memory")
            newest: dict[int, Version] = {}
            tickets = [(files, files.read_ticket()) for files in find_arenas(self._desk.site.arenas, self._desk.rank)]
            for files, ticket in tickets:
                if ticket is not None and ticket.captured and any(tier["kind"] == "memory" for tier in ticket.tiers):
                    newest[files.rank] = max(ticket.version, newest.get(files.rank, ticket.version), key=Version.age)
            for files, ticket in tickets:
                if ticket is not None and ticket.captured:
                    kept = {newest.get(files.rank), complete[-1] if complete else None}
                    flushed = any(tier.survives_reboot for tier in read_tiers(ticket.tiers))
                    if ticket.version in kept or not flushed or self._desk.holdings.missing(ticket):
                        continue
                elif ticket is None and self.lost(files) is not None:
                    continue  # a rest: without it the next restore would find nothing, and begin anew
                files.remove_if_free()

    def lost(self, files: ArenaFiles) -> Held | None:
        """Return the newest version's remains in an arena without a sound ticket; None if a newer one is complete."""
        held = held_by(files, self._desk.job.id)
        complete = self._desk.holdings.complete()  # itself, too, if another process once noted it
        is_newest = held is not None and not any(each.age() > held.version.age() for each in complete)
        return held if is_newest else None

    def _is_needed(self, ticket: Ticket, complete: list[Version], attempt: int) -> bool:
        version = ticket.version
        kinds = [tier["kind"] for tier in ticket.tiers]
        if "memory" not in kinds:
            return False
        elsewhere = any(version in self._desk.holdings.complete(kind) for kind in kinds if kind != "memory")
        if self._desk.completion.is_complete(version, "memory"):
            return bool(complete) and version == complete[-1] and not elsewhere
        overtaken = bool(complete) and complete[-1].age() > version.age()
        failed = self._desk.completion.failure(version, "memory") is not None
        return not (overtaken or failed or version.attempt < attempt)
