"""The far part of finishing: shards go to slow tiers, and versions become visible there.

One thread a rank, one shard after the other, from a copy on disk where there is one. Another thread commits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from evergrad.checkpoint.arena import ArenaFiles, Ticket
from evergrad.checkpoint.finish.chain import run_chain
from evergrad.checkpoint.finish.desk import Desk, failure_text, where
from evergrad.checkpoint.finish.shares import Shares
from evergrad.checkpoint.finish.workers import Workers
from evergrad.checkpoint.manifest import Manifest
from evergrad.checkpoint.restore.shards import Shard
from evergrad.checkpoint.tiers import Copy, Gone, Tier, Work, read_tiers
from evergrad.checkpoint.version import Version
from evergrad.errors import TierError

_log = logging.getLogger(__name__)


class Flushing:
    """What is on its way to slow tiers."""

    def __init__(
        self, desk: Desk, end: Callable[[ArenaFiles, Ticket], None], forget: Callable[[Version, str], None]
    ) -> None:
        """`end` is called when an arena is not read any more, `forget` when a version was retired."""
        self._desk, self._end, self._forget = desk, end, forget
        self.workers = Workers("evergrad-flush")
        self.shares = Shares(desk.job.run_dir)
        self._flushing: set[tuple[Version, int]] = set()
        self._away: set[int] = set()
        """Ranks whose last flush failed."""
        self._committing: set[tuple[Version, str]] = set()
        self.gone: set[tuple[Version, str]] = set()
        """Versions that somebody has noted in a shared tier where nothing of them is left."""

    def later(self, ticket: Ticket, manifest: Manifest, source: Copy | None, files: ArenaFiles | None = None) -> bool:
        """Have a shard flushed from a copy, or from its arena; False if it is being flushed already."""
        key = ticket.version, ticket.rank
        with self._desk.lock:
            if key in self._flushing:
                return False
            self._flushing.add(key)
            if source is not None:
                self._desk.holdings.needed.add(key)
            arena = files or ArenaFiles(self._desk.site.arenas, ticket.rank, 0)
            return self.workers.submit(ticket.rank, self._flush, ticket, manifest, source, arena)

    def try_again(self) -> None:
        """Leave nothing out because a flush before it has failed."""
        with self._desk.lock:
            self._away.clear()

    def _flush(self, ticket: Ticket, manifest: Manifest, source: Copy | None, files: ArenaFiles) -> None:
        tiers = read_tiers(ticket.tiers)
        slow = [tier for tier in tiers if tier.slow]
        shard: Shard | None = None
        try:
            self._check_worth(ticket)
            if source is not None:
                shard = Shard(source, self._desk.job.id)
                if wrong := shard.verify():
                    raise TierError(f"{source.shard}: {wrong[0]} is not what was captured: it is not flushed")
                view, manifest = shard.view, shard.manifest  # one that was found in passing has no digests
            else:
                view = self._desk.maps.view(files, ticket.size)
            plain = replace(manifest, owed=(), generation=0)
            given_up = lambda: any(self._failure(ticket, tier.kind) for tier in slow)  # noqa: E731
            work = self.shares.divide(Work(ticket, files, view, self._desk.site, plain), given_up)
            run_chain(self._desk.chain(tiers)[1], work, lambda *ended: self._desk.report(ticket, tiers, *ended))
        except Exception as error:
            why = failure_text(error)
            _log.error("%s: not flushed: %s", where(ticket), why)
            for tier in slow:
                self._desk.note(ticket, tier.kind, why)
        finally:
            if shard is not None:
                shard.close()
            with self._desk.lock:
                failed = any(self._desk.completion.failure(ticket.version, tier.kind) for tier in slow)
                (self._away.add if failed else self._away.discard)(ticket.rank)
                self._flushing.discard((ticket.version, ticket.rank))
                self._desk.holdings.needed.discard((ticket.version, ticket.rank))
            if source is None:
                self._end(files, ticket)
            self._desk.evaluate()

    def _check_worth(self, ticket: Ticket) -> None:
        """While a service is away only the newest version waits for it: the disk must not fill with all of them."""
        with self._desk.lock:
            waiting = [version for version, rank in self._flushing if rank == ticket.rank]
            newest = max(waiting, key=Version.age, default=ticket.version)
            if ticket.rank in self._away and newest.age() > ticket.version.age():
                raise TierError(f"left out: the one before failed there, and {newest} waits for it")

    def _failure(self, ticket: Ticket, kind: str) -> str | None:
        with self._desk.lock:
            return self._desk.completion.failure(ticket.version, kind)

    @property
    def is_committing(self) -> bool:
        """True if a version is about to be made visible."""
        return bool(self._committing)

    def commit_later(self, version: Version, tier: Tier) -> None:
        """Have a version made visible that is complete in a shared tier."""
        with self._desk.lock:
            if (version, tier.kind) not in self._committing:
                self._committing.add((version, tier.kind))
                if not self.workers.submit(-1, self._commit, version, tier):
                    self._committing.discard((version, tier.kind))

    def _commit(self, version: Version, tier: Tier) -> None:
        """Make a version visible in a tier that all nodes share; every node does, and all say the same."""
        world_size = self._desk.completion.world_size(version, tier.kind)
        self.gone.discard((version, tier.kind))
        try:
            self._desk.holdings.store(tier).commit(version, world_size)
            self._desk.holdings.show(version, tier.kind)
            for old in self._desk.holdings.retain(shared=True):
                with self._desk.lock:
                    self._forget(*old)
            self.shares.tidy(version)
        except Exception as error:  # noted as failed, whatever it is: it would be tried again without end
            why = failure_text(error)
            _log.error("%s: not committed in tier %s: %s", version, tier.kind, why)
            with self._desk.lock:
                if isinstance(error, Gone):
                    self.gone.add((version, tier.kind))
                self._desk.completion.note(
                    version, tier.kind, self._desk.rank or 0, world_size, f"not committed: {why}"
                )
        finally:
            with self._desk.lock:
                self._committing.discard((version, tier.kind))
            self._desk.evaluate()
