"""Finishes captured shards: runs the chain, sees versions become complete, retires old ones, frees arenas.

Near tiers come first, one shard of a rank after the other. What goes to slow ones is then flushed by workers of their
own, from a copy on disk where there is one, so that an arena is free again long before an upload ends.

The agent runs one for all ranks of a node; with `agent=False` each trainer runs one for its own rank. It needs no
torch. It keeps no state of its own that matters: whatever it is told, it could also find in the arenas and the tiers,
and that is what `recover` does after a crash.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from evergrad import _files
from evergrad._digest import digest_spans
from evergrad._files import open_regular
from evergrad.checkpoint.agent.events import AgentEvent, ArenasFree, Committed, Failed, UnfinishedVersion
from evergrad.checkpoint.agent.inventory import CompletionLog, Inventory
from evergrad.checkpoint.agent.upload_dedup import UploadDeduplication
from evergrad.checkpoint.arena import ArenaFiles, ArenaTicket, open_files_hint, populate
from evergrad.checkpoint.catalogue.history import CatalogueJournal, shard_digest
from evergrad.checkpoint.restore.shards import Shard
from evergrad.checkpoint.run_folder import RunFolder, arena_folder, find_arenas
from evergrad.checkpoint.shard_layout import parse_header
from evergrad.checkpoint.shard_manifest import Manifest
from evergrad.checkpoint.tiers import Copy, Gone, Site, Tier, Work, read_tiers, without_secrets
from evergrad.checkpoint.tiers.base import Store
from evergrad.checkpoint.tiers.base import Work as base_Work
from evergrad.checkpoint.tiers.memory import ArenaContent, read_arena_content
from evergrad.checkpoint.version import Version
from evergrad.errors import DamagedFile, EvergradError, FormatError, SaveRefused, TierError, UsageError, reason
from evergrad.formats.version_records import shard_name
from evergrad.wording import did_you_mean

# The chain of small modules that a captured shard goes through.
#
#     digest → [yours] → memory → local → … → [yours]
#
# Each module gets the same `Work` and may raise: the failure is reported under its name, and the chain goes on with
# the next one, so that a full disk does not keep a shard from the tier behind it. Only without digests nothing goes
# on.


@runtime_checkable
class ChainModule(Protocol):
    """One thing that is done with a captured shard, in the agent.

    Yours may have an attribute `after` with the name of the module it follows ("digest", or a tier's); without, it
    comes last. `work.shard` is the arena: read it, never write to it, and keep no reference to it.
    """

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    def run(self, work: base_Work) -> None:
        """Do it; raise to report a failure."""
        ...


class DamagedCapture(TierError):
    """The header of a captured shard cannot be read: nothing brings back what was in it."""


@dataclass(frozen=True)
class DigestModule:
    """Takes the digest of every tensor, before anything else reads the arena."""

    name: str = "digest"

    def run(self, work: base_Work) -> None:
        """Set the manifest's digests; those that were taken before a crash are kept."""
        if work.manifest.digests or work.manifest.header:
            return
        try:
            parsed = parse_header(work.shard, work.files.shard)
        except DamagedFile:
            raise DamagedCapture(f"{work.files.shard}: the header of what was captured is damaged") from None
        layout = parsed.layout
        spans = [(0, layout.data_start), *((e.offset, e.offset + e.nbytes) for e in layout.entries)]
        header, *digests = digest_spans(work.shard, spans)
        paths = (entry.path for entry in layout.entries)
        work.manifest = replace(
            work.manifest,
            data_start=layout.data_start,
            header=header,
            digests=dict(zip(paths, digests, strict=True)),
            values=parsed.values,
            placements=parsed.placements,
        )


@dataclass(frozen=True)
class StoreModule:
    """Puts the shard into a tier."""

    name: str
    store: Store

    def run(self, work: base_Work) -> None:
        """Store it, manifest last."""
        self.store.put(work)


def build_chain(stores: dict[str, Store], extra: Sequence[ChainModule]) -> list[ChainModule]:
    """The whole chain: digest, the tiers nearest first, and the extra modules where they want to be."""
    chain: list[ChainModule] = [DigestModule(), *(StoreModule(name, store) for name, store in stores.items())]
    for module in extra:
        after = getattr(module, "after", None)
        names = [each.name for each in chain]
        if after is None:
            chain.append(module)
        elif after in names:
            chain.insert(names.index(after) + 1, module)
        else:
            hint = f"{did_you_mean(str(after), names)} There are {', '.join(names)}."
            raise UsageError(f"module {module.name!r} wants to follow {after!r}.{hint}")
    return chain


def split_chain(chain: Sequence[ChainModule], slow: Container[str]) -> tuple[list[ChainModule], list[ChainModule]]:
    """The chain up to the first slow tier, and from there on."""
    at = next(
        (n for n, module in enumerate(chain) if isinstance(module, StoreModule) and module.name in slow), len(chain)
    )
    return list(chain[:at]), list(chain[at:])


def run_chain(
    chain: Sequence[ChainModule], work: base_Work, report: Callable[[ChainModule, Exception | None], None]
) -> None:
    """Run every module, and report how each ended."""
    for module in chain:
        try:
            module.run(work)
        except Exception as error:  # whatever a module of the user's raises must not end the agent
            report(module, error)
            if isinstance(module, DigestModule):
                return
        else:
            report(module, None)


def describe_module(module: ChainModule) -> dict[str, Any]:
    """A module of the user's as the agent can make it again: where it is imported from, and its settings."""
    kind = type(module)
    if not isinstance(module, ChainModule):
        raise UsageError(f"{kind.__qualname__} is no module: expected an attribute `name` and a method `run(work)`")
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise UsageError(
            f"module {module.name!r}: the agent cannot import {kind.__module__}.{kind.__qualname__}. Define it at the "
            "top of a file that can be imported, or use agent=False."
        )
    settings: dict[str, Any] = asdict(module) if is_dataclass(module) else {}
    return {"import": f"{kind.__module__}:{kind.__qualname__}", "settings": settings}


def load_module(spec: dict[str, Any]) -> ChainModule:
    """Import and make a module that `describe_module` described; only for what the user's own trainer sent."""
    place, _, name = str(spec["import"]).partition(":")
    try:
        made = getattr(import_module(place), name)(**spec["settings"])
    except Exception as error:
        raise UsageError(f"module {spec['import']}: cannot be made in the agent: {error}") from error
    if not isinstance(made, ChainModule):
        raise UsageError(f"module {spec['import']}: expected an attribute `name` and a method `run(work)`")
    return made


# Threads that do a rank's work one thing after the other, and other ranks' at the same time.


class RankThreads:
    """One thread a rank, made when it is first needed. What they are given must not raise."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._threads: dict[int, ThreadPoolExecutor] = {}
        self._closing = False
        self.owed = 0
        """What was submitted and has not ended."""

    def submit(self, rank: int, act: Callable[..., None], *arguments: Any) -> bool:
        """Have something done; False if no more is taken."""
        with self._lock:
            if self._closing:
                return False
            worker = self._threads.get(rank)
            if worker is None:
                worker = self._threads[rank] = ThreadPoolExecutor(1, thread_name_prefix=f"{self._name}-{rank}")
            self.owed += 1
            worker.submit(self._do, act, *arguments)
            return True

    def drain(self, *, closing: bool = False) -> None:
        """Wait until everything is done. What that itself submits is done, too."""
        while True:
            with self._lock:
                workers = list(self._threads.values())
                if not self.owed:
                    self._closing = closing
                    return
            for worker in workers:
                worker.submit(_nothing).result()

    def close(self) -> None:
        """The same, and take no more."""
        self.drain(closing=True)
        for worker in self._threads.values():
            worker.shutdown(wait=True)

    def _do(self, act: Callable[..., None], *arguments: Any) -> None:
        try:
            act(*arguments)
        finally:
            with self._lock:
                self.owed -= 1


def _nothing() -> None:
    """Comes after what was submitted before it."""


# Arenas as the agent sees them: mapped for reading, and kept mapped.


class ArenaMaps:
    """The maps of a node's arenas. Faulting one in costs as much as hashing it, so it is kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[str, tuple[int, mmap.mmap]] = {}

    def view(self, files: ArenaFiles, size: int) -> memoryview:
        """The bytes of an arena of that size."""
        fd = open_regular(files.shard)
        try:
            status = os.fstat(fd)
            if status.st_size != size:
                raise TierError(f"{files.shard}: has {status.st_size} bytes, {size} were announced")
            inode, kept = self._maps.get(files.shard.name, (0, None))
            if kept is None or inode != status.st_ino or len(kept) != size:
                kept = mmap.mmap(fd, size, prot=mmap.PROT_READ)
                populate(kept)
                self._maps[files.shard.name] = (status.st_ino, kept)
            return memoryview(kept)
        finally:
            os.close(fd)

    def drop_replaced(self) -> None:
        """Let go of arenas that were replaced or removed: a map would keep their memory."""
        for name, (inode, _) in list(self._maps.items()):
            path = self._folder / name
            if not path.exists() or path.stat().st_ino != inode:
                del self._maps[name]


# What the near and the far part of finishing share: the books, the tiers, the lock, and what is said of a shard.

_log = logging.getLogger(__name__)


class PipelineContext:
    """One for an engine and all its workers."""

    def __init__(self, job: RunFolder, site: Site, writer: str, rank: int | None, evaluate: Callable[[], None]) -> None:
        """For all ranks of a node, or for one; `evaluate` is called when something may have become complete."""
        self.run_folder, self.site, self.rank, self.evaluate = job, site, rank, evaluate
        self.lock = threading.RLock()
        self.completion = CompletionLog(job.run_dir, writer)
        self.inventory = Inventory(site, self.completion, self.lock, rank)
        self.maps = ArenaMaps(site.arenas)
        self.modules: Sequence[ChainModule] = ()
        """The user's, as the last trainer has sent them."""

    def chain(self, tiers: Sequence[Tier]) -> tuple[list[ChainModule], list[ChainModule]]:
        """What a shard goes through, near and far."""
        stores = {tier.kind: self.inventory.store(tier) for tier in tiers}
        # A shard that does not go to some tier does not go through what follows it either.
        there, modules = {"digest", *stores}, list[ChainModule]()
        for module in self.modules:
            if getattr(module, "after", None) in (None, *there):
                modules.append(module)
                there.add(module.name)
        return split_chain(build_chain(stores, modules), {tier.kind for tier in tiers if tier.slow})

    def record_result(
        self, ticket: ArenaTicket, tiers: Sequence[Tier], module: ChainModule, error: Exception | None
    ) -> None:
        """How a module ended."""
        why = None
        if error is not None:
            why = failure_text(error) if isinstance(error, OSError | EvergradError) else str(error)
            _log.error("%s: %s: %s", shard_label(ticket), module.name, why)
        if isinstance(module, StoreModule):
            self.note(ticket, module.name, why)
        elif error is not None:
            # Without digests nothing is stored; any other module is reported for itself.
            for kind in [tier.kind for tier in tiers] if isinstance(module, DigestModule) else [module.name]:
                self.note(ticket, kind, f"{module.name}: {why}")
        self.evaluate()

    def note(self, ticket: ArenaTicket, tier: str, failure: str | None) -> None:
        """A shard is in a tier, or never will be, and why."""
        with self.lock:
            self.completion.note(ticket.version, tier, ticket.rank, ticket.world_size, failure)


def shard_label(ticket: ArenaTicket) -> str:
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


# Which arenas are done with: their trainer may write over them, or nobody needs their memory any more.


class ArenaReclaimer:
    """The arenas of a node, or of one rank, as whoever finishes what is in them knows them. Thread-safe."""

    def __init__(self, context: PipelineContext) -> None:
        self._context = context
        self._ended: dict[tuple[int, int], ArenaTicket] = {}
        """(rank, index) → the ticket of the arena whose chain has ended."""

    def mark_finished(self, files: ArenaFiles, ticket: ArenaTicket) -> None:
        """Nobody reads the arena any more."""
        with self._context.lock:
            self._ended[files.rank, files.index] = ticket

    def mark_in_use(self, files: ArenaFiles) -> None:
        """The arena is read again."""
        with self._context.lock:
            self._ended.pop((files.rank, files.index), None)

    def is_finished(self, files: ArenaFiles, ticket: ArenaTicket) -> bool:
        """Whether that was said of what is in it now."""
        ended = self._ended.get((files.rank, files.index))
        return ended is not None and ended.generation == ticket.generation

    def free(self, rank: int, attempt: int) -> dict[str, int]:
        """The arenas of a rank that may be overwritten: what they held is finished, and is not all that there is.

        The newest complete version stays, if memory is the only place that has it; so does one that other ranks are
        still completing in memory.
        """
        free: dict[str, int] = {}
        with self._context.lock:
            complete = self._context.inventory.complete()
            folder = self._context.site.arenas
            known = [ArenaFiles(folder, *key) for key in self._ended if key[0] == rank]
            for files in dict.fromkeys((*find_arenas(folder, rank), *known)):
                # Without a free descriptor no ticket can be read. A generation is used once: an old one does no harm.
                ticket = files.read_ticket() or self._ended.get((files.rank, files.index))
                if ticket is None or not ticket.captured:
                    continue  # its trainer knows best
                if self.is_finished(files, ticket) and not self._is_needed(ticket, complete, attempt):
                    free[str(files.index)] = ticket.generation
        return free

    def reclaim(self) -> None:
        """Give back the memory of arenas that nobody needs: unlocked, finished, and not a rank's newest version."""
        with self._context.lock:
            self._context.completion.refresh()
            complete = self._context.completion.complete("memory")
            newest: dict[int, Version] = {}
            tickets = [
                (files, files.read_ticket()) for files in find_arenas(self._context.site.arenas, self._context.rank)
            ]
            for files, ticket in tickets:
                if ticket is not None and ticket.captured and any(tier["kind"] == "memory" for tier in ticket.tiers):
                    newest[files.rank] = max(ticket.version, newest.get(files.rank, ticket.version), key=Version.age)
            for files, ticket in tickets:
                if ticket is not None and ticket.captured:
                    kept = {newest.get(files.rank), complete[-1] if complete else None}
                    flushed = any(tier.survives_reboot for tier in read_tiers(ticket.tiers))
                    if ticket.version in kept or not flushed or self._context.inventory.missing(ticket):
                        continue
                elif ticket is None and self.lost(files) is not None:
                    continue  # a rest: without it the next restore would find nothing, and begin anew
                files.remove_if_free()

    def lost(self, files: ArenaFiles) -> ArenaContent | None:
        """Return the newest version's remains in an arena without a sound ticket; None if a newer one is complete."""
        held = read_arena_content(files, self._context.run_folder.id)
        complete = self._context.inventory.complete()  # itself, too, if another process once noted it
        is_newest = held is not None and not any(each.age() > held.version.age() for each in complete)
        return held if is_newest else None

    def _is_needed(self, ticket: ArenaTicket, complete: list[Version], attempt: int) -> bool:
        version = ticket.version
        kinds = [tier["kind"] for tier in ticket.tiers]
        if "memory" not in kinds:
            return False
        elsewhere = any(version in self._context.inventory.complete(kind) for kind in kinds if kind != "memory")
        if self._context.completion.is_complete(version, "memory"):
            return bool(complete) and version == complete[-1] and not elsewhere
        overtaken = bool(complete) and complete[-1].age() > version.age()
        failed = self._context.completion.failure(version, "memory") is not None
        return not (overtaken or failed or version.attempt < attempt)


# The far part of finishing: shards go to slow tiers, and versions become visible there.
#
# One thread a rank, one shard after the other, from a copy on disk where there is one. Another thread commits.


class Flusher:
    """What is on its way to slow tiers."""

    def __init__(
        self,
        context: PipelineContext,
        end: Callable[[ArenaFiles, ArenaTicket], None],
        forget: Callable[[Version, str], None],
    ) -> None:
        """`end` is called when an arena is not read any more, `forget` when a version was retired."""
        self._context, self._end, self._forget = context, end, forget
        self.workers = RankThreads("evergrad-flush")
        self.shares = UploadDeduplication(context.run_folder.run_dir)
        self._flushing: set[tuple[Version, int]] = set()
        self._away: set[int] = set()
        """Ranks whose last flush failed."""
        self._committing: set[tuple[Version, str]] = set()
        self.gone: set[tuple[Version, str]] = set()
        """Versions that somebody has noted in a shared tier where nothing of them is left."""

    def submit(
        self, ticket: ArenaTicket, manifest: Manifest, source: Copy | None, files: ArenaFiles | None = None
    ) -> bool:
        """Have a shard flushed from a copy, or from its arena; False if it is being flushed already."""
        key = ticket.version, ticket.rank
        with self._context.lock:
            if key in self._flushing:
                return False
            self._flushing.add(key)
            if source is not None:
                self._context.inventory.flush_sources.add(key)
            arena = files or ArenaFiles(self._context.site.arenas, ticket.rank, 0)
            return self.workers.submit(ticket.rank, self._flush, ticket, manifest, source, arena)

    def clear_failures(self) -> None:
        """Leave nothing out because a flush before it has failed."""
        with self._context.lock:
            self._away.clear()

    def _flush(self, ticket: ArenaTicket, manifest: Manifest, source: Copy | None, files: ArenaFiles) -> None:
        tiers = read_tiers(ticket.tiers)
        slow = [tier for tier in tiers if tier.slow]
        shard: Shard | None = None
        try:
            self._check_worth(ticket)
            if source is not None:
                shard = Shard(source, self._context.run_folder.id)
                if wrong := shard.verify():
                    raise TierError(f"{source.shard}: {wrong[0]} is not what was captured: it is not flushed")
                view, manifest = shard.view, shard.manifest  # one that was found in passing has no digests
            else:
                view = self._context.maps.view(files, ticket.size)
            plain = replace(manifest, owed=(), generation=0)
            given_up = lambda: any(self._failure(ticket, tier.kind) for tier in slow)  # noqa: E731
            work = self.shares.without_duplicates(Work(ticket, files, view, self._context.site, plain), given_up)
            run_chain(
                self._context.chain(tiers)[1], work, lambda *ended: self._context.record_result(ticket, tiers, *ended)
            )
        except Exception as error:
            why = failure_text(error)
            _log.error("%s: not flushed: %s", shard_label(ticket), why)
            for tier in slow:
                self._context.note(ticket, tier.kind, why)
        finally:
            if shard is not None:
                shard.close()
            with self._context.lock:
                failed = any(self._context.completion.failure(ticket.version, tier.kind) for tier in slow)
                (self._away.add if failed else self._away.discard)(ticket.rank)
                self._flushing.discard((ticket.version, ticket.rank))
                self._context.inventory.flush_sources.discard((ticket.version, ticket.rank))
            if source is None:
                self._end(files, ticket)
            self._context.evaluate()

    def _check_worth(self, ticket: ArenaTicket) -> None:
        """While a service is away only the newest version waits for it: the disk must not fill with all of them."""
        with self._context.lock:
            waiting = [version for version, rank in self._flushing if rank == ticket.rank]
            newest = max(waiting, key=Version.age, default=ticket.version)
            if ticket.rank in self._away and newest.age() > ticket.version.age():
                raise TierError(f"left out: the one before failed there, and {newest} waits for it")

    def _failure(self, ticket: ArenaTicket, kind: str) -> str | None:
        with self._context.lock:
            return self._context.completion.failure(ticket.version, kind)

    @property
    def is_committing(self) -> bool:
        """True if a version is about to be made visible."""
        return bool(self._committing)

    def submit_commit(self, version: Version, tier: Tier) -> None:
        """Have a version made visible that is complete in a shared tier."""
        with self._context.lock:
            if (version, tier.kind) not in self._committing:
                self._committing.add((version, tier.kind))
                if not self.workers.submit(-1, self._commit, version, tier):
                    self._committing.discard((version, tier.kind))

    def _commit(self, version: Version, tier: Tier) -> None:
        """Make a version visible in a tier that all nodes share; every node does, and all say the same."""
        world_size = self._context.completion.world_size(version, tier.kind)
        self.gone.discard((version, tier.kind))
        try:
            self._context.inventory.store(tier).commit(version, world_size)
            self._context.inventory.mark_committed(version, tier.kind)
            for old in self._context.inventory.retain(shared=True):
                with self._context.lock:
                    self._forget(*old)
            self.shares.tidy(version)
        except Exception as error:  # noted as failed, whatever it is: it would be tried again without end
            why = failure_text(error)
            _log.error("%s: not committed in tier %s: %s", version, tier.kind, why)
            with self._context.lock:
                if isinstance(error, Gone):
                    self.gone.add((version, tier.kind))
                self._context.completion.note(
                    version, tier.kind, self._context.rank or 0, world_size, f"not committed: {why}"
                )
        finally:
            with self._context.lock:
                self._committing.discard((version, tier.kind))
            self._context.evaluate()


_QUICK_S, _SLOW_S = 0.02, 1.0


class Pipeline:
    """Everything that happens to a version after it was captured. Methods may be called from any thread."""

    def __init__(self, job: RunFolder, notify: Callable[[AgentEvent], None], *, rank: int | None = None) -> None:
        self._run_folder, self._notify, self._rank = job, notify, rank
        self._site = Site(job.id, job.node_folder, arena_folder(job), job.run_dir)
        writer = job.node_folder if rank is None else f"{job.node_folder}.{shard_name(rank)}"
        self._context = PipelineContext(job, self._site, writer, rank, self._evaluate)
        self._lock, self._completion, self._inventory = (
            self._context.lock,
            self._context.completion,
            self._context.inventory,
        )
        self._near = RankThreads("evergrad")
        self._reclaimer = ArenaReclaimer(self._context)
        self._flusher = Flusher(self._context, self._end, self._forget)
        self._journal, self._writer = CatalogueJournal(job.run_dir), writer
        self._noted: set[tuple[Version, int]] = set()
        """Version and rank of shards that the catalogue knows of."""
        self._unsettled: set[tuple[int, int, int]] = set()
        """(rank, index, generation) of what is captured, in no tier yet, and may still get into one."""
        self._unread: set[tuple[int, int, int]] = set()
        """(rank, index, generation) of arenas that were taken up once more: settled when nobody reads them any more."""
        self._altered: set[tuple[int, int, int]] = set()
        """(rank, index, generation) of arenas that do not hold what was captured."""
        self._unreadable: set[tuple[int, int, int]] = set()
        """(rank, index, generation) of arenas whose header is damaged."""
        self._left: dict[tuple[int, int, int], str] = {}
        """(rank, index, generation) → why what was captured there is not taken up."""
        self._again: set[str] = set()
        """Reports that were already made about requests to try again."""
        self._looking = 0
        """Slow tiers that are being looked at."""
        self._changed = threading.Condition(self._lock)
        self._taken: dict[tuple[int, int], int] = {}
        """(rank, index) → the generation of the arena that was last taken up."""
        self._before = {
            (files.rank, files.index): ticket.generation
            for files in find_arenas(self._site.arenas, rank)
            if (ticket := files.read_ticket()) is not None and ticket.captured
        }
        """(rank, index) → the generation of what was captured before there was this engine."""
        self._attempt = 0
        self._told: set[tuple[type[AgentEvent], Version, str]] = set()
        self._news = threading.Event()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="evergrad-watch", daemon=True).start()

    @property
    def num_pending(self) -> int:
        """Captured shards whose chain has not ended."""
        return self._near.owed + self._flusher.workers.owed

    def resume_unfinished(self) -> None:
        """Take up what was captured and not finished: after a crash of the trainer, of an agent, or of both."""
        tickets = [(files, files.read_ticket()) for files in find_arenas(self._site.arenas, self._rank)]
        captured = [
            (files, self._inventory.with_moved_tiers(ticket))
            for files, ticket in tickets
            if ticket is not None and ticket.captured
        ]
        # Oldest first: what comes after a newer version is there has been overtaken.
        for files, ticket in sorted(captured, key=lambda found: found[1].version.age()):
            if self._is_taken(files, ticket):
                continue
            try:
                self._survey(ticket.tiers)
                missing = self._inventory.missing(ticket)
            except EvergradError as error:  # such as a tier that this Evergrad does not know
                _log.error("%s: found in memory, and left there: %s", shard_label(ticket), error)
                self._left[_arena_use(files, ticket)] = f"rank {ticket.rank}: {error}"
                continue
            slow = [tier for tier in read_tiers(ticket.tiers) if tier.slow]
            if missing and {tier.kind for tier in slow}.issuperset(missing):
                if self._inventory.lasting(ticket.version, ticket.rank):
                    missing = []  # flushed from there, below
                elif self._inventory.is_unscanned(slow):
                    continue  # until it has been looked whether it is there
            if missing and files.shard.exists():  # if not, the arena was being removed
                if self._queue(files, ticket):
                    _log.info("%s: found in memory, going on", shard_label(ticket))
            else:
                with self._lock:
                    self._taken[files.rank, files.index] = ticket.generation
                    self._reclaimer.mark_finished(files, ticket)
        for copy, manifest, tiers in self._inventory.pending_flushes():
            _log.info("%s, rank %d: not in tier %s yet, going on", copy.version, copy.rank, tiers[0].kind)
            self._flusher.submit(_ticket(manifest, tiers), replace(manifest, owed=()), copy)
        self._evaluate()

    def attach(self, attempt: int, tiers: Sequence[dict[str, Any]], modules: Sequence[ChainModule] = ()) -> None:
        """A trainer begins; refused if a later attempt of the job is known."""
        with self._lock:
            self._check_attempt(attempt)
            self._attempt = attempt
            self._context.modules = tuple(modules)
            build_chain(
                {tier.kind: tier.store(self._site) for tier in read_tiers(tiers)}, modules
            )  # says what is wrong now
        self._survey(tiers)
        with self._lock:
            self._completion.refresh()
            self._told.clear()  # the newcomer has been told nothing
            self._context.maps.drop_replaced()
        self.resume_unfinished()  # what the trainer before it captured, and was killed before it could say so

    def submit(self, rank: int, index: int, generation: int, known: ArenaTicket | None = None) -> None:
        """An arena was captured; its ticket is `known` to a trainer of this process, whether it can be read or not."""
        files = ArenaFiles(self._site.arenas, rank, index)
        ticket = files.read_ticket() or known
        if ticket is not None and (ticket.generation > generation or self._is_taken(files, ticket)):
            return  # old news, told again to an agent that was started again: found by itself, or done with
        if ticket is None or not ticket.captured or ticket.generation != generation:
            _log.error("arena %d of rank %d does not hold what was announced", index, rank)
            return
        try:
            self._check_attempt(ticket.attempt)
        except OSError as error:
            self._give_up(files, ticket, error)
            self._end(files, ticket)
            self._evaluate()
            return
        self._queue(files, self._inventory.with_moved_tiers(ticket))

    def fail(self, version: Version, rank: int, world_size: int, tiers: Sequence[str], why: str) -> None:
        """A rank could not capture a version: it will not be complete in any tier, and nobody shall wait for it."""
        with self._lock:
            for kind in tiers:
                self._completion.note(version, kind, rank, world_size, f"not captured: {why}")
        self._evaluate()

    def _survey(self, specs: Sequence[dict[str, Any]]) -> None:
        """Look at near tiers now, at slow ones in the background: no save shall wait for a service that is away."""
        for tier in self._inventory.scan_new_tiers(specs):
            with self._lock:
                self._looking += self._flusher.workers.submit(-1, self._look, tier)

    def _look(self, tier: Tier) -> None:
        try:
            self._inventory.scan_tier(tier)
            self.resume_unfinished()
        except Exception:
            _log.exception("tier %s: what it holds is not known", tier.kind)
        finally:
            with self._changed:
                self._looking -= 1
                self._changed.notify_all()

    def _check_attempt(self, attempt: int) -> None:
        # The run folder knows of attempts on other nodes, and of those before this process began.
        latest = max(self._attempt, self._run_folder.latest_attempt())
        if attempt < latest:
            raise SaveRefused(f"attempt {attempt} of the job is over: attempt {latest} runs it now")

    def await_finished(
        self, slow: Sequence[dict[str, Any]] = (), *, everywhere: bool = False, again: str | None = None
    ) -> None:
        """Wait until all that has been captured is in a tier, or has failed.

        With `everywhere`, or with `slow` tiers to look at, also until it is known what slow tiers hold. What failed
        before is tried once more for each new value of `again`, which all ranks of a restore have in common.
        """
        self._survey(slow)
        if again is not None:
            self._retry(again)
        self.resume_unfinished()
        with self._changed:
            self._changed.wait_for(lambda: not self._unsettled and not ((everywhere or slow) and self._looking))

    def commit_complete(self, slow: Sequence[dict[str, Any]]) -> None:
        """Commit what is whole in tiers that all nodes share, once every node has settled; wait until it is done."""
        shared = [tier for tier in read_tiers(slow) if tier.shared]
        with self._lock:
            self._completion.refresh()
            begun = {kind for _, kind in self._completion.incomplete()}
        for tier in shared:
            if tier.kind in begun:  # another node may have put a shard there whose news did not get here
                self._inventory.scan_tier(tier)
        self._evaluate()
        with self._changed:
            self._changed.wait_for(lambda: not self._flusher.is_committing)

    def unfinished(self) -> list[UnfinishedVersion]:
        """Return the versions in arenas, or begun in a tier shared by all nodes, each with its failures.

        Whether a version can be restored all the same is for the ranks to see: what other nodes once noted as complete
        may have been lost since.
        """
        tickets = [(files, files.read_ticket()) for files in find_arenas(self._site.arenas, self._rank)]
        found: dict[Version, UnfinishedVersion] = {}
        with self._lock:
            tiers = self._inventory.tiers()
            shared = [tier.kind for tier in tiers if tier.shared]
            for files, ticket in tickets:
                if ticket is None or not ticket.captured:
                    continue
                version = ticket.version
                known = found.setdefault(version, UnfinishedVersion(*_place(version), ticket.world_size, [], [], ""))
                (known.damaged if _arena_use(files, ticket) in self._altered else known.ranks).append(ticket.rank)
                if _arena_use(files, ticket) in self._unreadable:
                    known.unreadable.append(ticket.rank)
            for kind in shared:
                visible = {*self._inventory.complete(kind)}
                for version in self._completion.begun(kind):
                    if version not in visible and not self._inventory.is_retired(version, kind):
                        size = self._completion.world_size(version, kind)
                        known = found.setdefault(version, UnfinishedVersion(*_place(version), size, [], [], ""))
                        is_gone = (version, kind) in self._flusher.gone
                        (known.damaged if is_gone else known.ranks).extend(self._completion.ranks(version, kind))
            left = {
                ticket.version: self._left[_arena_use(files, ticket)]
                for files, ticket in tickets
                if ticket is not None and _arena_use(files, ticket) in self._left
            }
            # The memory tier tells of its own arenas, and whether a version in them was ever complete.
            if all(tier.kind != "memory" for tier in tiers):
                for files, held in self._without_ticket():
                    known = found.setdefault(
                        held.version, UnfinishedVersion(*_place(held.version), held.world_size, [], [], "")
                    )
                    known.damaged.append(files.rank)
                    left[held.version] = f"rank {files.rank}: {files.ticket}: is not as it was written"
            whys = {
                version: [why for tier in tiers if (why := self._completion.failure(version, tier.kind)) is not None]
                for version in found
            }
        return [
            replace(each, why="; ".join(dict.fromkeys(whys[version])) or left.get(version, ""))
            for version, each in found.items()
        ]

    def _without_ticket(self) -> Iterator[tuple[ArenaFiles, ArenaContent]]:
        """Yield arenas whose ticket is damaged or gone and that hold a version newer than all complete ones."""
        for files in find_arenas(self._site.arenas, self._rank, rests=True):
            with suppress(OSError):  # a ticket that cannot be opened may be sound
                if files.read_ticket(strict=True) is None and (held := self._reclaimer.lost(files)) is not None:
                    yield files, held

    def close(self) -> None:
        """Finish what is owed, and stop."""
        self._near.close()
        self._flusher.workers.drain()
        with self._lock:
            self._completion.refresh()
        self._evaluate()  # the last one to come finds everybody else's shards, and commits
        self._flusher.workers.close()
        self._closed.set()
        self._news.set()

    def free_arenas(self, rank: int) -> dict[str, int]:
        """The arenas of a rank that may be overwritten, each with the generation that is done with."""
        return self._reclaimer.free(rank, self._attempt)

    def reclaim_arenas(self) -> None:
        """Give back the memory of arenas that nobody needs."""
        self._reclaimer.reclaim()

    def _retry(self, again: str) -> None:
        """Take up again what was captured and got into no tier, and what could not be committed; once a value."""
        with self._lock:
            if again in self._again:
                return
            self._again.add(again)
            for version, tier in self._inventory.uncommitted():
                self._forgive(version, tier.kind)
        self._flusher.clear_failures()
        for files in find_arenas(self._site.arenas, self._rank):
            ticket = files.read_ticket()
            if ticket is None or not ticket.captured or not self._is_taken(files, ticket):
                continue
            if not self._reclaimer.is_finished(files, ticket):
                continue  # it is on its way
            try:
                missing = self._inventory.missing(ticket)
            except EvergradError:
                continue
            # What lies in a tier can be restored from there: its arena may be free, and is left alone.
            if {*missing} == {tier["kind"] for tier in ticket.tiers}:
                with self._lock:
                    for kind in missing:
                        self._forgive(ticket.version, kind)
                    self._altered.discard(_arena_use(files, ticket))
                    self._unreadable.discard(_arena_use(files, ticket))
                    self._unread.add(_arena_use(files, ticket))
                    self._taken.pop((files.rank, files.index), None)
                    self._reclaimer.mark_in_use(files)

    def _forgive(self, version: Version, tier: str) -> None:
        self._completion.clear_failure(version, tier)
        self._told.discard((Failed, version, tier))

    def _is_taken(self, files: ArenaFiles, ticket: ArenaTicket) -> bool:
        with self._lock:
            return self._taken.get((files.rank, files.index)) == ticket.generation

    def _queue(self, files: ArenaFiles, ticket: ArenaTicket) -> bool:
        """Have the chain run on a shard; False if that was said before."""
        with self._lock:
            if self._is_taken(files, ticket):
                return False
            self._taken[files.rank, files.index] = ticket.generation
            self._unsettled.add(_arena_use(files, ticket))
            if not self._near.submit(files.rank, self._finish, files, ticket):
                self._mark_stored(files, ticket)
                return False
            return True

    def _finish(self, files: ArenaFiles, ticket: ArenaTicket) -> None:
        """Run the near part of the chain on one shard; what goes further is flushed afterwards."""
        flushed_from_here = False
        try:
            # What was captured later is announced later; an arena is never reused before its chain has ended.
            if not self._reclaimer.is_finished(files, ticket):
                with files.finishing_lock():  # another process may have found it too
                    now = files.read_ticket(strict=True)
                    if now is not None and now.generation == ticket.generation:
                        flushed_from_here = self._run(files, ticket)
        except EvergradError as error:
            if isinstance(error, _Altered):
                self._altered.add(_arena_use(files, ticket))
            if isinstance(error, DamagedCapture):
                self._unreadable.add(_arena_use(files, ticket))
            _log.error("%s: not finished: %s", shard_label(ticket), error)
            self._fail(ticket, str(error))
        except OSError as error:
            self._give_up(files, ticket, error)
        except Exception as error:
            _log.exception("%s: not finished", shard_label(ticket))
            self._fail(ticket, f"{type(error).__name__}: {error}")
        finally:
            if not flushed_from_here:
                self._end(files, ticket)
            self._evaluate()

    def _give_up(self, files: ArenaFiles, ticket: ArenaTicket, error: OSError) -> None:
        """The system refuses what it takes to finish a shard."""
        why = f"{error.filename or files.shard}: {open_files_hint(error)}"
        _log.error("%s: not finished: %s", shard_label(ticket), why)
        self._fail(ticket, why)

    def _end(self, files: ArenaFiles, ticket: ArenaTicket) -> None:
        """The arena is not read any more: its shard is in tiers, or will not get there."""
        self._reclaimer.mark_finished(files, ticket)
        self._unread.discard(_arena_use(files, ticket))
        self._mark_stored(files, ticket)

    def _mark_stored(self, files: ArenaFiles, ticket: ArenaTicket) -> None:
        with self._changed:
            if _arena_use(files, ticket) not in self._unread:
                self._unsettled.discard(_arena_use(files, ticket))
            self._changed.notify_all()

    def _run(self, files: ArenaFiles, ticket: ArenaTicket) -> bool:
        """Digest, near tiers; True if the arena is still needed, because slow tiers are flushed from it."""
        tiers = read_tiers(ticket.tiers)
        owed = [without_secrets(tier.to_json()) for tier in tiers if tier.slow]
        manifest = Manifest(
            job=self._run_folder.id, version=ticket.version, rank=ticket.rank, world_size=ticket.world_size,
            size=ticket.size, data_start=0, time=ticket.time, header="", digests={}, node=self._run_folder.node,
            parent=ticket.parent, meta=ticket.meta, owed=owed,
        )  # fmt: skip
        earlier = _earlier(files, ticket)
        work = Work(ticket, files, self._context.maps.view(files, ticket.size), self._site, earlier or manifest)
        near, far = self._context.chain(tiers)
        in_memory = any(tier.kind == "memory" for tier in tiers)

        def report(module: ChainModule, error: Exception | None) -> None:
            if isinstance(module, DigestModule) and error is None and not in_memory and earlier is None:
                _keep_digests(files, ticket, work.manifest)
            if isinstance(module, DigestModule) and error is None and far and ticket.world_size > 1:
                self._flusher.shares.publish(work.manifest, parse_header(work.shard, files.shard).layout.entries)
            if isinstance(module, StoreModule) and error is None:
                self._record(work.manifest)
                self._mark_stored(files, ticket)
            if isinstance(error, DamagedCapture):
                self._unreadable.add(_arena_use(files, ticket))
            self._context.record_result(ticket, tiers, module, error)

        try:
            if earlier is None and self._before.get((files.rank, files.index)) == ticket.generation:
                DigestModule().run(work)
                work.manifest = self._compared(work.manifest, ticket, files)
            run_chain(near, work, report)
            if not far or not work.manifest.header:
                return False
            source = self._inventory.lasting(ticket.version, ticket.rank)
            return self._flusher.submit(ticket, work.manifest, source, files) and source is None
        finally:
            work.shard.release()

    def _compared(self, manifest: Manifest, ticket: ArenaTicket, files: ArenaFiles) -> Manifest:
        """A manifest whose digests were taken again: `TierError` if the digests of the capture say otherwise.

        Those are in the manifests of other copies. Without one the manifest is marked as unverified.
        """
        for copy, original in self._inventory.originals(ticket):
            if wrong := _differing(original, manifest):
                by = f"by the manifest in tier {copy.tier}"
                raise _Altered(f"{files.shard}: {wrong} is not what was captured, {by}: this arena is left aside")
            return replace(manifest, unverified=False)
        noted = self._journal.read().shards.get(ticket.version, {}).get(ticket.rank)
        if noted is not None and noted.digest and noted.digest != shard_digest(manifest):
            by = "by the digest in the catalogue"
            raise _Altered(f"{files.shard}: is not what was captured, {by}: this arena is left aside")
        _log.warning(
            "%s: unverified: its digests were taken after a restart, with none to compare", shard_label(ticket)
        )
        return replace(manifest, unverified=True)

    def _fail(self, ticket: ArenaTicket, why: str) -> None:
        """A shard does not get into the tiers that it is not in yet."""
        try:
            kinds = self._inventory.missing(ticket)
        except EvergradError:
            kinds = [tier["kind"] for tier in ticket.tiers]
        for kind in kinds:
            self._context.note(ticket, kind, why)

    def _record(self, manifest: Manifest) -> None:
        """Tell the catalogue of a shard, once."""
        with self._lock:
            if (manifest.version, manifest.rank) in self._noted:
                return
            self._noted.add((manifest.version, manifest.rank))
        self._journal.note_shard(manifest, self._writer)

    def _evaluate(self) -> None:
        """Tell what is complete now or never will be, retire what is no longer needed, say which arenas are free."""
        news: list[AgentEvent] = []
        with self._lock:
            tiers = self._inventory.tiers()
            for kind in (tier.kind for tier in tiers):
                complete = self._inventory.complete(kind)
                for version in complete:
                    self._tell(news, Committed(version.step, version.attempt, kind))
                if complete:
                    self._overtake(news, kind, complete[-1])
            for version, name in list(self._completion.failed()):
                why = self._completion.failure(version, name) or ""
                self._tell(news, Failed(version.step, version.attempt, name, why))
            found = find_arenas(self._site.arenas) if self._rank is None else ()
            ranks = {files.rank for files in found} | ({self._rank} if self._rank is not None else set())
            if any(isinstance(event, Committed) for event in news):
                for version, name in self._inventory.retain(shared=False):
                    self._forget(version, name)
            for version, tier in self._inventory.uncommitted():
                if self._completion.failure(version, tier.kind) is None:
                    self._flusher.submit_commit(version, tier)
            lasting = {tier.kind for tier in tiers if tier.survives_reboot}
            for event in news:
                if isinstance(event, Committed) and event.tier in lasting:
                    self._completion.record_committed(event.version)
        for event in (*news, *(ArenasFree(rank, self.free_arenas(rank)) for rank in sorted(ranks))):
            self._notify(event)
        with self._changed:
            self._changed.notify_all()
        self._news.set()

    def _overtake(self, news: list[AgentEvent], kind: str, newest: Version) -> None:
        for version, tier in list(self._completion.incomplete()):
            if tier == kind and version.age() < newest.age():
                ranks = ", ".join(map(str, self._completion.missing(version, tier)))
                why = f"overtaken by {newest}: no shard of rank {ranks} came"
                self._tell(news, Failed(version.step, version.attempt, tier, why))
                self._forget(version, tier)

    def _forget(self, version: Version, tier: str) -> None:
        self._completion.forget(version, tier)
        for kind in (Committed, Failed):
            self._told.discard((kind, version, tier))

    def _tell(self, news: list[AgentEvent], event: Committed | Failed) -> None:
        key = type(event), event.version, event.tier
        if key not in self._told:
            self._told.add(key)
            news.append(event)

    def _watch(self) -> None:
        """Look for what other nodes have completed, often at first, then less so."""
        pause = _QUICK_S
        while not self._closed.is_set():
            with self._lock:
                waiting = any(version.attempt == self._attempt for version, _ in self._completion.incomplete())
            if not waiting:
                self._news.wait()
                pause = _QUICK_S
            self._news.clear()
            if self._closed.is_set():
                return
            self._news.wait(pause)
            pause = min(pause * 1.5, _SLOW_S)
            with self._lock:
                before = self._completion.seen
                self._completion.refresh()
                changed = self._completion.seen != before
            if changed:
                pause = _QUICK_S
                self._evaluate()


class _Altered(TierError):
    """An arena does not hold what was captured."""


def _arena_use(files: ArenaFiles, ticket: ArenaTicket) -> tuple[int, int, int]:
    """Rank, index and generation: one use of one arena."""
    return files.rank, files.index, ticket.generation


def _place(version: Version) -> tuple[int, int]:
    return version.step, version.attempt


def _earlier(files: ArenaFiles, ticket: ArenaTicket) -> Manifest | None:
    """Digests that were taken before a crash: of what was captured, not of what may have happened to it since."""
    for path in (files.manifest, files.digests):
        try:
            earlier = Manifest.read(path)
            if earlier.generation == ticket.generation and earlier.version == ticket.version:
                return earlier
        except FileNotFoundError:
            continue
        except FormatError as error:
            _log.warning("%s: %s: the shard is digested again", shard_label(ticket), error)
    return None


def _keep_digests(files: ArenaFiles, ticket: ArenaTicket, manifest: Manifest) -> None:
    """Keep digests beside the arena for whoever goes on after a crash. Nothing else depends on them."""
    try:
        _files.publish(files.digests, replace(manifest, generation=ticket.generation).to_bytes())
    except OSError as error:
        _log.warning("%s: cannot be written: %s", files.digests, reason(error))


def _differing(original: Manifest, found: Manifest) -> str:
    """Name the first difference of two manifests of a shard; empty if none. One may leave tensors to other ranks."""
    digests = {**{path: digest for path, (_, digest) in original.elsewhere.items()}, **original.digests}
    if digests != found.digests:
        return min(
            path for path in digests.keys() | found.digests.keys() if digests.get(path) != found.digests.get(path)
        )
    is_whole = not original.elsewhere
    return "" if original.values == found.values and (not is_whole or original.header == found.header) else "the header"


def _ticket(manifest: Manifest, tiers: Sequence[Tier]) -> ArenaTicket:
    """What a trainer said of a shard whose arena is long in use again."""
    version, specs = manifest.version, [tier.to_json() for tier in tiers]
    return ArenaTicket(
        0, True, version.step, version.attempt, manifest.rank, manifest.world_size, manifest.size, manifest.time,
        manifest.parent, specs, dict(manifest.meta),
    )  # fmt: skip
