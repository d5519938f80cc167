"""One rank's own part of the newest version that has it, taken by another process: without the other ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress

from evergrad.checkpoint.manifest import Manifest
from evergrad.checkpoint.restore.loading import prepare
from evergrad.checkpoint.restore.shard import Shard
from evergrad.checkpoint.tiers import Copy, Store
from evergrad.checkpoint.version import Version
from evergrad.errors import EvergradError
from evergrad.state import Where

_log = logging.getLogger(__name__)


def restore_rank(job: str, stores: Mapping[str, Store], rank: int, state: object, where: Where) -> Version | None:
    """Put what a rank had saved into a state, from the newest intact shard of it that lies at hand; its version.

    Only what `where` chooses is loaded, and only what fits. The version need not be complete: of the others nothing
    is taken.
    """
    copies = [copy for store in stores.values() for copy in store.find(rank) if not copy.url]
    copies.sort(key=lambda copy: (copy.version.step, copy.version.attempt, not _is_unverified(copy)), reverse=True)
    for copy in copies:
        try:
            with Shard(copy, job) as shard:
                if broken := shard.verify():
                    _log.warning("%s of rank %d in tier %s: %s is damaged", copy.version, rank, copy.tier, broken[0])
                    continue
                if shard.manifest.unverified:
                    _log.warning("%s of rank %d in tier %s is unverified", copy.version, rank, copy.tier)
                prepare(state, shard, strict=False, where=where).apply()
                return copy.version
        except (EvergradError, OSError) as error:
            _log.warning("%s of rank %d in tier %s cannot be read: %s", copy.version, rank, copy.tier, error)
    return None


def _is_unverified(copy: Copy) -> bool:
    """True if its digests were taken again after a restart: another copy comes first."""
    with suppress(EvergradError, OSError):
        return Manifest.read(copy.manifest, digests=False).unverified
    return False
