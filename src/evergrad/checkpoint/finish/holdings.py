"""What the tiers of a node hold: looked at once, noted, retired when newer versions are complete."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from evergrad.checkpoint.arena import Ticket
from evergrad.checkpoint.finish.completion import Completion
from evergrad.checkpoint.manifest import Manifest
from evergrad.checkpoint.tiers import Copy, Site, Store, Tier, read_tiers
from evergrad.checkpoint.version import Version
from evergrad.errors import EvergradError, FormatError

__all__ = ["Holdings"]

_log = logging.getLogger(__name__)


class Holdings:
    """The stores of all tiers that were ever named, for all ranks of a node or for one. Shares its owner's lock."""

    def __init__(self, site: Site, completion: Completion, lock: threading.RLock, rank: int | None) -> None:
        self._site, self._completion, self._lock, self._rank = site, completion, lock, rank
        self._stores: dict[str, tuple[Tier, Store]] = {}
        """By settings; of each kind, the last that was used is the one that retires old versions."""

    def store(self, tier: Tier) -> Store:
        """The store of a tier."""
        key = json.dumps(tier.to_json())
        with self._lock:
            found = self._stores.pop(key, None) or (tier, tier.store(self._site))
            self._stores[key] = found
            return found[1]

    def tiers(self) -> list[Tier]:
        """The tiers that there are, one of each kind."""
        return list({tier.kind: tier for tier, _ in self._stores.values()}.values())

    def survey(self, specs: Sequence[dict[str, Any]]) -> None:
        """Note every complete shard in tiers that were not looked at yet."""
        for tier in read_tiers(specs):
            new = json.dumps(tier.to_json()) not in self._stores
            store = self.store(tier)
            if not new:
                continue
            try:
                for copy in store.find(self._rank):
                    self._note(copy)
            except EvergradError as error:
                _log.warning("tier %s: %s", tier.kind, error)

    def missing(self, ticket: Ticket) -> list[str]:
        """The tiers that a shard should be in, and is not, as far as can be seen; retired is not missing."""
        missing = []
        for tier in read_tiers(ticket.tiers):
            try:
                copies = self.store(tier).find(ticket.rank)
            except EvergradError:  # trying to put it there will tell
                copies = []
            with self._lock:
                complete = self._completion.complete(tier.kind)
            retired = bool(complete) and ticket.version.age() < complete[-1].age()
            if not retired and not any(copy.version == ticket.version for copy in copies):
                missing.append(tier.kind)
        return missing

    def retain(self) -> Iterator[tuple[Version, str]]:
        """Drop what is older than the versions that a tier keeps; gives what need not be remembered any more.

        What was begun before the newest complete version and never completed goes, too.
        """
        for tier, store in {tier.kind: (tier, store) for tier, store in self._stores.values()}.values():
            complete = self._completion.complete(tier.kind)
            if not complete:
                continue
            kept, newest = complete[-tier.keep :], complete[-1]
            try:
                copies = store.find(self._rank) if tier.kind != "memory" else []  # arenas are overwritten
            except EvergradError as error:
                _log.warning("tier %s: old versions could not be looked for: %s", tier.kind, error)
                continue
            for copy in copies:
                if copy.version not in kept and copy.version.age() < newest.age():
                    try:
                        store.drop(copy)
                    except EvergradError as error:
                        _log.warning("tier %s: an old version could not be removed: %s", tier.kind, error)
            yield from ((version, tier.kind) for version in complete if version not in kept)
        newest_of_all = self._completion.complete()[-1:]
        for version, kind in list(self._completion.failed()):
            if newest_of_all and version.age() < newest_of_all[0].age():
                yield version, kind

    def _note(self, copy: Copy) -> None:
        try:
            manifest = Manifest.read(copy.manifest, digests=False)
        except (FormatError, FileNotFoundError) as error:
            _log.warning("tier %s: %s", copy.tier, error)
            return
        if manifest.job == self._site.job and manifest.version == copy.version:
            with self._lock:
                self._completion.note(copy.version, copy.tier, copy.rank, manifest.world_size)
