"""What the near and the far part of finishing share: the books, the tiers, the lock, and what is said of a shard."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from evergrad.checkpoint.arena import Ticket, open_files_hint
from evergrad.checkpoint.finish.chain import Digest, Module, Put, arrange, divided
from evergrad.checkpoint.finish.completion import Completion
from evergrad.checkpoint.finish.holdings import Holdings
from evergrad.checkpoint.finish.maps import ArenaMaps
from evergrad.checkpoint.run_folder import Job
from evergrad.checkpoint.tiers import Site, Tier
from evergrad.errors import EvergradError, reason

_log = logging.getLogger(__name__)


class Desk:
    """One for an engine and all its workers."""

    def __init__(self, job: Job, site: Site, writer: str, rank: int | None, evaluate: Callable[[], None]) -> None:
        """For all ranks of a node, or for one; `evaluate` is called when something may have become complete."""
        self.job, self.site, self.rank, self.evaluate = job, site, rank, evaluate
        self.lock = threading.RLock()
        self.completion = Completion(job.run_dir, writer)
        self.holdings = Holdings(site, self.completion, self.lock, rank)
        self.maps = ArenaMaps(site.arenas)
        self.modules: Sequence[Module] = ()
        """The user's, as the last trainer has sent them."""

    def chain(self, tiers: Sequence[Tier]) -> tuple[list[Module], list[Module]]:
        """What a shard goes through, near and far."""
        stores = {tier.kind: self.holdings.store(tier) for tier in tiers}
        # A shard that does not go to some tier does not go through what follows it either.
        there, modules = {"digest", *stores}, list[Module]()
        for module in self.modules:
            if getattr(module, "after", None) in (None, *there):
                modules.append(module)
                there.add(module.name)
        return divided(arrange(stores, modules), {tier.kind for tier in tiers if tier.slow})

    def report(self, ticket: Ticket, tiers: Sequence[Tier], module: Module, error: Exception | None) -> None:
        """How a module ended."""
        why = None
        if error is not None:
            why = failure_text(error) if isinstance(error, OSError | EvergradError) else str(error)
            _log.error("%s: %s: %s", where(ticket), module.name, why)
        if isinstance(module, Put):
            self.note(ticket, module.name, why)
        elif error is not None:
            # Without digests nothing is stored; any other module is reported for itself.
            for kind in [tier.kind for tier in tiers] if isinstance(module, Digest) else [module.name]:
                self.note(ticket, kind, f"{module.name}: {why}")
        self.evaluate()

    def note(self, ticket: Ticket, tier: str, failure: str | None) -> None:
        """A shard is in a tier, or never will be, and why."""
        with self.lock:
            self.completion.note(ticket.version, tier, ticket.rank, ticket.world_size, failure)


def where(ticket: Ticket) -> str:
    """Which shard a message is about."""
    return f"{ticket.version}, rank {ticket.rank} of {ticket.world_size}"


def failure_text(error: Exception) -> str:
    """Return the reason of a failure for one line; too many open files are said with the limit."""
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{open_files_hint(error)}"
    if not isinstance(error, EvergradError):
        return f"{type(error).__name__}: {error}"
    cause, text = error.__cause__, str(error)
    if isinstance(cause, OSError) and text.endswith(what := reason(cause)):
        return f"{text.removesuffix(what)}{open_files_hint(cause)}"
    return text
