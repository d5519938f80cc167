"""What the tiers of a node hold: looked at once, noted, retired when newer versions are complete."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from evergrad._files import open_file, read_small, rewrite
from evergrad._jsonl import Appender, split_whole
from evergrad.checkpoint.arena import ArenaTicket, open_files_hint
from evergrad.checkpoint.catalogue.pins import Pins
from evergrad.checkpoint.run_folder import former_homes, moved_along
from evergrad.checkpoint.shard_manifest import Manifest
from evergrad.checkpoint.tiers import Copy, Site, Store, Tier, read_tiers, without_secrets
from evergrad.checkpoint.version import Version
from evergrad.errors import EvergradError, reason
from evergrad.formats.version_records import read_record, record_bytes

# Which versions are complete: every rank's shard is there, whatever node it was written on.
#
# Whoever finishes shards notes each in a journal of its own in the run folder, `complete/<node>.jsonl`, and reads the
# others'. The journals only carry the news from node to node; what exists is decided by the manifests in the tiers. A
# journal is made anew when its writer starts, from what it finds there. One that cannot be written, on a full disk,
# is so later: on one node nothing depends on it. Each line carries a digest of itself: a damaged one is left out.

_log = logging.getLogger(__name__)
SCHEMA_VERSION = 1
_TOO_LONG = 1 << 20


@dataclass(slots=True)
class _Shards:
    """What is known of one version in one tier."""

    world_size: int
    ranks: set[int] = field(default_factory=set)
    failures: dict[int, str] = field(default_factory=dict)
    """By rank, why its shard is not there and never will be; until it is there all the same."""


class CompletionLog:
    """The ranks whose shards are complete, for each version and tier. Not thread-safe: its owner holds a lock."""

    def __init__(self, run_dir: Path, writer: str | None) -> None:
        """Without a writer, to read only."""
        self._folder = run_dir / "complete"
        self._own = self._folder / f"{writer}.jsonl" if writer is not None else None
        self._known: dict[tuple[Version, str], _Shards] = {}
        self._newest: dict[str, Version] = {}
        """By tier: the newest version that was ever complete there, also if it was forgotten since."""
        self._read: dict[str, tuple[int, int]] = {}
        self.seen = 0
        """Grows with every line that another writer noted."""
        self._lines: dict[tuple[Version, str, int], bytes] = {}
        self._behind = self._own is not None
        """Whether the journal has to be made anew."""
        self._said = ""
        """The last reported reason why it could not be made."""
        self._unread: dict[str, bytes] = {}
        """By journal: the end of a line that was not whole when it was last looked at."""
        self._told: set[tuple[Path, str]] = set()
        """Reports about other writers' journals that were already made."""
        self._remembered: Version | None = None
        self._catch_up()

    def note(self, version: Version, tier: str, rank: int, world_size: int, failure: str | None = None) -> None:
        """A shard is complete in a tier, or never will be."""
        self._take(version, tier, rank, world_size, failure)
        if self._own is None:
            return
        line = {
            "schema_version": SCHEMA_VERSION,
            "version": version.name,
            "tier": tier,
            "rank": rank,
            "world_size": world_size,
        }
        if failure is not None:
            line["failure"] = failure
        self._lines[version, tier, rank] = text = record_bytes(line)
        if not self._behind:
            try:
                with Appender(self._own) as log:
                    log.append(text)
                    self._behind = log.size > _TOO_LONG
            except OSError as error:
                self._say_behind(error)
        self._catch_up()

    def record_committed(self, version: Version) -> None:
        """A version is committed where it survives a reboot: that it existed must not be forgotten with its shards."""
        if self._own is not None and (self._remembered is None or version.age() > self._remembered.age()):
            self._remembered = version
            path = self._own.with_suffix(".committed")
            with suppress(OSError):
                rewrite(path, f"{version.name}\n".encode(), path.with_suffix(".partial"))

    def last_committed(self) -> Version | None:
        """The newest version that any node has seen committed where it survives a reboot."""
        found = []
        with suppress(OSError):
            for path in self._folder.glob("*.committed"):
                try:
                    found.append(Version.parse(read_small(path).decode("ascii", "replace").strip()))
                except FileNotFoundError:
                    continue
                except OSError as error:
                    _log.warning("%s: %s", path, _not_read(error))
                else:
                    if found[-1] is None:
                        _log.warning("%s: names no version: left out", path)
        return max((version for version in found if version is not None), key=Version.age, default=None)

    def refresh(self) -> None:
        """Read what others have noted since."""
        self._catch_up()
        with suppress(OSError):
            for entry in os.scandir(self._folder):
                if entry.name.endswith(".jsonl") and (self._own is None or entry.name != self._own.name):
                    try:
                        self._follow(Path(entry.path))
                    except FileNotFoundError:
                        pass  # made anew at this moment, or removed
                    except OSError as error:
                        self._say_unread(Path(entry.path), _not_read(error))

    def is_complete(self, version: Version, tier: str) -> bool:
        """Whether every rank's shard is there."""
        shards = self._known.get((version, tier))
        return shards is not None and 0 < shards.world_size == len(shards.ranks)

    def has(self, version: Version, tier: str, rank: int) -> bool:
        """Whether a rank's shard is there."""
        shards = self._known.get((version, tier))
        return shards is not None and rank in shards.ranks

    def world_size(self, version: Version, tier: str) -> int:
        """How many shards a version has."""
        shards = self._known.get((version, tier))
        return 0 if shards is None else shards.world_size

    def failure(self, version: Version, tier: str) -> str | None:
        """Why a version will never be complete there, if some rank said so."""
        shards = self._known.get((version, tier))
        return None if shards is None else next(iter(shards.failures.values()), None)

    def clear_failure(self, version: Version, tier: str) -> None:
        """Forget why shards of a version failed to get there: that is tried again."""
        shards = self._known.get((version, tier))
        failures = list(shards.failures) if shards is not None else []
        for rank in failures:
            assert shards is not None
            del shards.failures[rank]
            if self._lines.pop((version, tier, rank), None) is not None and rank in shards.ranks:
                self.note(version, tier, rank, shards.world_size)

    def is_noted_here(self, version: Version, tier: str) -> bool:
        """Return True if this writer has noted a shard of the version itself, and not only read another's journal."""
        return any((version, tier, rank) in self._lines for rank in range(self.world_size(version, tier)))

    def ranks(self, version: Version, tier: str) -> set[int]:
        """The ranks whose shards are there."""
        shards = self._known.get((version, tier))
        return set() if shards is None else set(shards.ranks)

    def begun(self, tier: str) -> list[Version]:
        """The versions of a tier of which anything is known."""
        return [version for version, name in self._known if name == tier]

    def complete(self, tier: str | None = None) -> list[Version]:
        """The complete versions of a tier, or of any, oldest first."""
        found = {version for version, name in self._known if tier in (None, name) and self.is_complete(version, name)}
        return sorted(found, key=Version.age)

    def newest(self, tier: str) -> Version | None:
        """Return the newest version that was ever complete in a tier, as far as anybody has noted."""
        return self._newest.get(tier)

    def missing(self, version: Version, tier: str) -> list[int]:
        """The ranks whose shards are not there."""
        shards = self._known.get((version, tier))
        return [] if shards is None else sorted(set(range(shards.world_size)) - shards.ranks)

    def incomplete(self) -> Iterator[tuple[Version, str]]:
        """What is begun, not complete, and has not failed."""
        for (version, tier), shards in self._known.items():
            if not shards.failures and len(shards.ranks) < shards.world_size:
                yield version, tier

    def failed(self) -> Iterator[tuple[Version, str]]:
        """What will never be complete."""
        return ((version, tier) for (version, tier), shards in self._known.items() if shards.failures)

    def forget(self, version: Version, tier: str) -> None:
        """A version was removed from a tier, or has been told of and does not matter any more."""
        shards = self._known.pop((version, tier), None)
        for rank in range(shards.world_size) if shards is not None else ():
            self._lines.pop((version, tier, rank), None)

    def _take(self, version: Version, tier: str, rank: int, world_size: int, failure: str | None) -> None:
        shards = self._known.setdefault((version, tier), _Shards(world_size))
        if failure is not None:
            shards.failures[rank] = f"rank {rank}: {failure}"
        elif 0 <= rank < shards.world_size == world_size:
            shards.ranks.add(rank)
            shards.failures.pop(rank, None)  # such as one flushed from another copy than that which was damaged
            newest = self._newest.get(tier)
            if self.is_complete(version, tier) and (newest is None or version.age() > newest.age()):
                self._newest[tier] = version

    def _catch_up(self) -> None:
        """The journal with what still matters; a new file, so that readers start from its beginning."""
        if self._own is None or not self._behind:
            return
        try:
            rewrite(self._own, b"".join(self._lines.values()), self._own.with_suffix(".partial"))
            self._behind = False
            self._said = ""
        except OSError as error:
            self._say_behind(error)

    def _say_behind(self, error: OSError) -> None:
        """The journal is made anew when it can be: said once for each reason."""
        self._behind = True
        if self._said != _why(error):
            self._said = _why(error)
            _log.warning("%s: cannot be written now: %s", self._own, self._said)

    def _say_unread(self, path: Path, what: str) -> None:
        """Name a journal whose news is lost, once for each reason."""
        if (path, what) not in self._told:
            self._told.add((path, what))
            _log.warning("%s: %s", path, what)

    def _check_rest(self, path: Path, rest: bytes) -> None:
        """Say that a journal ends within a line, unless its writer may be writing that at this moment.

        Whoever only reads looks once, and says it at once; whoever looks again says it if it is the same as before.
        """
        before, self._unread[path.name] = self._unread.get(path.name), rest
        if rest and (self._own is None or before == rest or b"\0" in rest):
            self._say_unread(path, f"ends within a line, after {len(rest)} bytes of it: that line is left out")

    def _follow(self, path: Path) -> None:
        with open_file(path) as file:
            status = os.fstat(file.fileno())
            inode, offset = self._read.get(path.name, (status.st_ino, 0))
            if inode != status.st_ino or offset > status.st_size:
                offset = 0  # made anew by a writer that started again
            file.seek(offset)
            data = file.read()
        whole, rest = split_whole(data)  # a line that is being written is read next time
        damaged = 0
        for line in whole.splitlines(keepends=True):
            try:
                record = read_record(line)
                version = Version.parse(record["version"])
                rank, world_size, failure = record["rank"], record["world_size"], record.get("failure")
                if version is None or type(rank) is not int or type(world_size) is not int:
                    raise ValueError("it is about no shard")
                if record["schema_version"] == SCHEMA_VERSION:
                    failure = None if failure is None else str(failure)
                    self._take(version, str(record["tier"]), rank, world_size, failure)
                    self.seen += 1
            except (ValueError, KeyError, TypeError):
                damaged += 1
        if damaged:
            _log.warning("%s: %d damaged %s left out", path, damaged, "line is" if damaged == 1 else "lines are")
        self._check_rest(path, rest)
        self._read[path.name] = (status.st_ino, offset + len(whole))


def _why(error: OSError) -> str:
    """Return the system's reason; for too many open files, with the limit and how to raise it."""
    return open_files_hint(error) if error.errno in (errno.EMFILE, errno.ENFILE) else reason(error)


def _not_read(error: OSError) -> str:
    """Return in words that news is left out, and the system's reason."""
    why = _why(error)
    return f"left out: cannot be read: {why}" if why.endswith(".") else f"cannot be read: {why}: left out"


_said: dict[Path, str] = {}
"""By run folder: the last reported reason why nothing is retired, until that is over."""


class Inventory:
    """The stores of all tiers that were ever named, for all ranks of a node or for one. Shares its owner's lock."""

    def __init__(self, site: Site, completion: CompletionLog, lock: threading.RLock, rank: int | None) -> None:
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
        self.flush_sources: set[tuple[Version, int]] = set()
        """Version and rank of copies that a flush reads from: they stay, however old."""

    def with_moved_tiers(self, ticket: ArenaTicket) -> ArenaTicket:
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

    def scan_new_tiers(self, specs: Sequence[dict[str, Any]]) -> list[Tier]:
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
                self.scan_tier(tier)
        return later

    def scan_tier(self, tier: Tier) -> None:
        """Note every complete shard in a tier."""
        store = self.store(tier)
        try:
            for copy in store.find(None if tier.shared else self._rank):
                if self._note(store, copy) and tier.shared:
                    self.mark_committed(copy.version, tier.kind)
            for copy in store.begun():
                self._note(store, copy)
        except EvergradError as error:
            _log.warning("tier %s: %s", tier.kind, error)
        finally:
            with self._lock:
                self._unseen.discard(json.dumps(tier.to_json()))

    def is_unscanned(self, tiers: Sequence[Tier]) -> bool:
        """Whether it is not known yet what one of these holds."""
        with self._lock:
            return not self._unseen.isdisjoint(json.dumps(tier.to_json()) for tier in tiers)

    def mark_committed(self, version: Version, kind: str) -> None:
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

    def missing(self, ticket: ArenaTicket) -> list[str]:
        """The tiers that a shard should be in, and is not, as far as can be seen; retired is not missing."""
        missing = []
        for tier in read_tiers(self.with_moved_tiers(ticket).tiers):
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

    def originals(self, ticket: ArenaTicket) -> Iterator[tuple[Copy, Manifest]]:
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

    def pending_flushes(self) -> Iterator[tuple[Copy, Manifest, list[Tier]]]:
        """What was found in a near tier and has to go to slow ones that are known here; each is given once."""
        with self._lock:
            found = sorted(self._owed.items(), key=lambda item: item[0][0].age())
            tiers = {json.dumps(_place(tier.to_json())): tier for tier, _ in self._stores.values() if tier.slow}
        for (version, rank), (copy, manifest) in found:
            specs = [moved_along(spec, self._homes, self._site.run_dir) for spec in manifest.owed]
            wanted = [tier for spec in specs if (tier := tiers.get(json.dumps(_place(spec)))) is not None]
            if len(wanted) < len(manifest.owed) or self.is_unscanned(wanted):
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
            if key in self.flush_sources:
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
