"""What the tiers of a node hold: looked at once, noted, retired when newer versions are complete."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from evergrad.checkpoint.arena import Ticket
from evergrad.checkpoint.catalogue.pins import Pins
from evergrad.checkpoint.finish.completion import Completion
from evergrad.checkpoint.manifest import Manifest
from evergrad.checkpoint.run_folder import former_homes, moved_along
from evergrad.checkpoint.tiers import Copy, Site, Store, Tier, read_tiers, without_secrets
from evergrad.checkpoint.version import Version
from evergrad.errors import EvergradError

_log = logging.getLogger(__name__)
_said: dict[Path, str] = {}
"""By run folder: the last reported reason why nothing is retired, until that is over."""


class Holdings:
    """The stores of all tiers that were ever named, for all ranks of a node or for one. Shares its owner's lock."""

    def __init__(self, site: Site, completion: Completion, lock: threading.RLock, rank: int | None) -> None:
        self._site, self._completion, self._lock, self._rank = site, completion, lock, rank
        self._pins = Pins(site.run_dir)
        self._stores: dict[str, tuple[Tier, Store]] = {}
        """By settings; of each kind, the last that was used is the one that retires old versions."""
        self._unseen: set[str] = set()
        """Settings of slow tiers that are still to be looked at."""
        self._visible: set[tuple[Version, str]] = set()
        """What is committed in shared tiers."""
        self._owed: dict[tuple[Version, int], tuple[Copy, Manifest]] = {}
        """Shards that were found in a tier and are still to be flushed to a slow one."""
        self.needed: set[tuple[Version, int]] = set()
        """Version and rank of copies that a flush reads from: they stay, however old."""

    def here(self, ticket: Ticket) -> Ticket:
        """A ticket with its tiers where they are now: what lay in the run folder was moved with it."""
        if all(spec.get("path") is None and not str(spec.get("url")).startswith("file:") for spec in ticket.tiers):
            return ticket
        return replace(ticket, tiers=[moved_along(spec, self._homes, self._site.run_dir) for spec in ticket.tiers])

    @cached_property
    def _homes(self) -> list[Path]:
        return former_homes(self._site.run_dir, self._site.job)

    def store(self, tier: Tier) -> Store:
        """The store of a tier."""
        key = json.dumps(tier.to_json())
        with self._lock:
            found = self._stores.pop(key, None) or (tier, tier.store(self._site))
            self._stores[key] = found
            return found[1]

    def tiers(self) -> list[Tier]:
        """The tiers that there are, one of each kind."""
        with self._lock:
            return list({tier.kind: tier for tier, _ in self._stores.values()}.values())

    def survey(self, specs: Sequence[dict[str, Any]]) -> list[Tier]:
        """Note every complete shard in tiers that were not looked at yet; gives the slow ones, to `look` at later."""
        later = []
        for tier in read_tiers(specs):
            key = json.dumps(tier.to_json())
            with self._lock:
                new = key not in self._stores
                self.store(tier)
                if new and tier.slow:
                    self._unseen.add(key)
                    later.append(tier)
            if new and not tier.slow:
                self.look(tier)
        return later

    def look(self, tier: Tier) -> None:
        """Note every complete shard in a tier."""
        store = self.store(tier)
        try:
            for copy in store.find(None if tier.shared else self._rank):
                if self._note(store, copy) and tier.shared:
                    self.show(copy.version, tier.kind)
            for copy in store.begun():
                self._note(store, copy)
        except EvergradError as error:
            _log.warning("tier %s: %s", tier.kind, error)
        finally:
            with self._lock:
                self._unseen.discard(json.dumps(tier.to_json()))

    def is_unseen(self, tiers: Sequence[Tier]) -> bool:
        """Whether it is not known yet what one of these holds."""
        with self._lock:
            return not self._unseen.isdisjoint(json.dumps(tier.to_json()) for tier in tiers)

    def show(self, version: Version, kind: str) -> None:
        """A version was committed in a shared tier."""
        with self._lock:
            self._visible.add((version, kind))

    def complete(self, kind: str | None = None) -> list[Version]:
        """The versions that can be restored from a tier, or from any, oldest first."""
        with self._lock:
            found = set()
            for tier in self.tiers():
                if kind in (None, tier.kind):
                    whole = self._completion.complete(tier.kind)
                    found |= {v for v in whole if not tier.shared or (v, tier.kind) in self._visible}
            return sorted(found, key=Version.age)

    def uncommitted(self) -> list[tuple[Version, Tier]]:
        """Return the versions that are complete in a shared tier, and not visible there yet."""
        with self._lock:
            return [
                (version, tier)
                for tier in self.tiers()
                if tier.shared
                for version in self._completion.complete(tier.kind)
                if (version, tier.kind) not in self._visible and not self.is_retired(version, tier.kind)
            ]

    def is_retired(self, version: Version, kind: str) -> bool:
        """Return True if only other writers' journals tell of a version in a shared tier that has a newer one.

        A journal keeps its lines until its writer starts again, also those of versions that were retired since. A
        version that is there was found by this process, or put there by it.
        """
        with self._lock:
            if (version, kind) in self._visible or self._completion.is_noted_here(version, kind):
                return False
            newest = self._completion.newest(kind)
            return newest is not None and newest.age() > version.age()

    def missing(self, ticket: Ticket) -> list[str]:
        """The tiers that a shard should be in, and is not, as far as can be seen; retired is not missing."""
        missing = []
        for tier in read_tiers(self.here(ticket).tiers):
            there = False
            if tier.shared:  # everything that is there was noted: no need to ask a slow service again
                with self._lock:
                    there = self._completion.has(ticket.version, tier.kind, ticket.rank)
            else:
                with suppress(EvergradError):  # trying to put it there will tell
                    there = any(copy.version == ticket.version for copy in self.store(tier).find(ticket.rank))
            complete = self.complete(tier.kind)
            retired = bool(complete) and ticket.version.age() < complete[-1].age()
            if not retired and not there:
                missing.append(tier.kind)
        return missing

    def originals(self, ticket: Ticket) -> Iterator[tuple[Copy, Manifest]]:
        """The manifests of a shard's copies in its tiers, with the digests that were taken when it was captured."""
        for tier in read_tiers(ticket.tiers):
            with self._lock:
                if tier.shared and not self._completion.has(ticket.version, tier.kind, ticket.rank):
                    continue  # a slow service is not asked for what is not there
            store = self.store(tier)
            try:
                for copy in (*store.find(ticket.rank), *store.begun(ticket.rank)):
                    if copy.version == ticket.version:
                        manifest = store.read_manifest(copy)
                        is_this = (manifest.job, manifest.version, manifest.rank) == (
                            self._site.job, ticket.version, ticket.rank,
                        )  # fmt: skip
                        if is_this and not manifest.unverified:
                            yield copy, manifest
            except (EvergradError, OSError) as error:
                _log.warning("tier %s: %s", tier.kind, error)

    def lasting(self, version: Version, rank: int) -> Copy | None:
        """A copy that outlives its arena, and is near."""
        with self._lock:
            stores = [(tier, store) for tier, store in self._stores.values() if tier.survives_reboot and not tier.slow]
        for _, store in stores:
            try:
                for copy in store.find(rank):
                    if copy.version == version:
                        return copy
            except EvergradError as error:
                _log.warning("%s", error)
        return None

    def owed(self) -> Iterator[tuple[Copy, Manifest, list[Tier]]]:
        """What was found in a near tier and has to go to slow ones that are known here; each is given once."""
        with self._lock:
            found = sorted(self._owed.items(), key=lambda item: item[0][0].age())
            tiers = {json.dumps(_place(tier.to_json())): tier for tier, _ in self._stores.values() if tier.slow}
        for (version, rank), (copy, manifest) in found:
            specs = [moved_along(spec, self._homes, self._site.run_dir) for spec in manifest.owed]
            wanted = [tier for spec in specs if (tier := tiers.get(json.dumps(_place(spec)))) is not None]
            if len(wanted) < len(manifest.owed) or self.is_unseen(wanted):
                continue  # its settings come with the next trainer; or it may be there
            with self._lock:
                self._owed.pop((version, rank), None)
            missing = []
            for tier in wanted:
                complete = self.complete(tier.kind)
                overtaken = bool(complete) and version.age() < complete[-1].age()
                with self._lock:
                    if not overtaken and not self._completion.has(version, tier.kind, rank):
                        missing.append(tier)
            if missing:
                yield copy, manifest, missing

    def retain(self, *, shared: bool) -> list[tuple[Version, str]]:
        """Drop what is older than the versions that a tier keeps; gives what need not be remembered any more.

        What was begun before the newest complete version and never completed goes, too. Pinned versions stay.
        """
        with self._lock:
            stores = {tier.kind: (tier, store) for tier, store in self._stores.values() if tier.shared == shared}
        forgotten: list[tuple[Version, str]] = []
        try:
            pinned = self._pins.pinned()
        except EvergradError as error:
            if _said.get(self._site.run_dir) != str(error):
                _said[self._site.run_dir] = str(error)
                _log.warning("nothing is retired, because what is pinned is not known: %s", error)
            return forgotten
        _said.pop(self._site.run_dir, None)
        for tier, store in stores.values():
            complete = self.complete(tier.kind)
            if not complete:
                continue
            kept = {*complete[-tier.keep :], *pinned}
            try:
                # Arenas are overwritten by themselves.
                copies = store.find(None if shared else self._rank) if tier.kind != "memory" else []
            except EvergradError as error:
                _log.warning("tier %s: old versions could not be looked for: %s", tier.kind, error)
                continue
            self._drop_old(tier, store, copies, kept, complete)
            forgotten += ((version, tier.kind) for version in complete if version not in kept)
        with self._lock:
            newest_of_all = self._completion.complete()[-1:]
            for version, kind in list(self._completion.failed()):
                if newest_of_all and version.age() < newest_of_all[0].age():
                    forgotten.append((version, kind))
            self._visible -= set(forgotten)
        return forgotten

    def _drop_old(
        self, tier: Tier, store: Store, copies: Sequence[Copy], kept: set[Version], complete: Sequence[Version]
    ) -> None:
        """Remove what is older than the newest complete version, and not kept; what a flush reads from stays."""
        for copy in copies:
            if copy.version in kept or copy.version.age() >= complete[-1].age():
                continue
            # What was in a shared tier before it was adopted is not ours.
            if copy.version in complete if tier.shared else not self._is_awaited(copy):
                try:
                    store.drop(copy)
                except EvergradError as error:
                    _log.warning("tier %s: an old version could not be removed: %s", tier.kind, error)

    def _is_awaited(self, copy: Copy) -> bool:
        """Whether a flush reads from a copy, or will."""
        key = copy.version, copy.rank
        with self._lock:
            if key in self.needed:
                return True
            if key not in self._owed:
                return False
        kinds = {str(spec.get("kind")) for spec in self._owed[key][1].owed}
        newest = [self.complete(kind)[-1:] for kind in kinds]
        return not all(found and found[0].age() > copy.version.age() for found in newest)

    def _note(self, store: Store, copy: Copy) -> bool:
        try:
            manifest = store.read_manifest(copy, digests=False)
        except (EvergradError, FileNotFoundError) as error:
            _log.warning("tier %s: %s", copy.tier, error)
            return False
        if manifest.job != self._site.job or manifest.version != copy.version:
            return False
        with self._lock:
            self._completion.note(copy.version, copy.tier, copy.rank, manifest.world_size)
            if manifest.owed:
                self._owed[copy.version, copy.rank] = copy, manifest
        return True


def _place(spec: dict[str, Any]) -> dict[str, Any]:
    """What tells one slow tier from another, among those of a kind."""
    return {name: value for name, value in without_secrets(spec).items() if name in ("kind", "url")}
