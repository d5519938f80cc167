"""Finishes captured shards: runs the chain, sees versions become complete, retires old ones, frees arenas.

Near tiers come first, one shard of a rank after the other. What goes to slow ones is then flushed by workers of their
own, from a copy on disk where there is one, so that an arena is free again long before an upload ends.

The agent runs one for all ranks of a node; with `agent=False` each trainer runs one for its own rank. It needs no
torch. It keeps no state of its own that matters: whatever it is told, it could also find in the arenas and the tiers,
and that is what `recover` does after a crash.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from evergrad.checkpoint import storage
from evergrad.checkpoint.arena import ArenaFiles, Ticket, open_files_hint
from evergrad.checkpoint.catalogue.history import Journal, shard_digest
from evergrad.checkpoint.events import Committed, Event, Failed, Free, Unfinished
from evergrad.checkpoint.finish.chain import DamagedCapture, Digest, Module, Put, arrange, run_chain
from evergrad.checkpoint.finish.desk import Desk, where
from evergrad.checkpoint.finish.flushing import Flushing
from evergrad.checkpoint.finish.freeing import Freeing
from evergrad.checkpoint.finish.workers import Workers
from evergrad.checkpoint.layout import parse
from evergrad.checkpoint.manifest import Manifest
from evergrad.checkpoint.run_folder import Job, arena_folder, find_arenas
from evergrad.checkpoint.tiers import Site, Tier, Work, read_tiers, without_secrets
from evergrad.checkpoint.tiers.memory import Held
from evergrad.checkpoint.version import Version
from evergrad.errors import EvergradError, FormatError, SaveRefused, TierError, reason
from evergrad.formats.version_records import shard_name

_log = logging.getLogger(__name__)
_QUICK_S, _SLOW_S = 0.02, 1.0


class Engine:
    """Everything that happens to a version after it was captured. Methods may be called from any thread."""

    def __init__(self, job: Job, notify: Callable[[Event], None], *, rank: int | None = None) -> None:
        self._job, self._notify, self._rank = job, notify, rank
        self._site = Site(job.id, job.node_folder, arena_folder(job), job.run_dir)
        writer = job.node_folder if rank is None else f"{job.node_folder}.{shard_name(rank)}"
        self._desk = Desk(job, self._site, writer, rank, self._evaluate)
        self._lock, self._completion, self._holdings = self._desk.lock, self._desk.completion, self._desk.holdings
        self._near = Workers("evergrad")
        self._freeing = Freeing(self._desk)
        self._flushing = Flushing(self._desk, self._end, self._forget)
        self._journal, self._writer = Journal(job.run_dir), writer
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
        self._settled = threading.Condition(self._lock)
        self._taken: dict[tuple[int, int], int] = {}
        """(rank, index) → the generation of the arena that was last taken up."""
        self._before = {
            (files.rank, files.index): ticket.generation
            for files in find_arenas(self._site.arenas, rank)
            if (ticket := files.read_ticket()) is not None and ticket.captured
        }
        """(rank, index) → the generation of what was captured before there was this engine."""
        self._attempt = 0
        self._told: set[tuple[type[Event], Version, str]] = set()
        self._news = threading.Event()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="evergrad-watch", daemon=True).start()

    @property
    def owed(self) -> int:
        """Captured shards whose chain has not ended."""
        return self._near.owed + self._flushing.workers.owed

    def recover(self) -> None:
        """Take up what was captured and not finished: after a crash of the trainer, of an agent, or of both."""
        tickets = [(files, files.read_ticket()) for files in find_arenas(self._site.arenas, self._rank)]
        captured = [
            (files, self._holdings.here(ticket)) for files, ticket in tickets if ticket is not None and ticket.captured
        ]
        # Oldest first: what comes after a newer version is there has been overtaken.
        for files, ticket in sorted(captured, key=lambda found: found[1].version.age()):
            if self._is_taken(files, ticket):
                continue
            try:
                self._survey(ticket.tiers)
                missing = self._holdings.missing(ticket)
            except EvergradError as error:  # such as a tier that this Evergrad does not know
                _log.error("%s: found in memory, and left there: %s", where(ticket), error)
                self._left[_use(files, ticket)] = f"rank {ticket.rank}: {error}"
                continue
            slow = [tier for tier in read_tiers(ticket.tiers) if tier.slow]
            if missing and {tier.kind for tier in slow}.issuperset(missing):
                if self._holdings.lasting(ticket.version, ticket.rank):
                    missing = []  # flushed from there, below
                elif self._holdings.is_unseen(slow):
                    continue  # until it has been looked whether it is there
            if missing and files.shard.exists():  # if not, the arena was being removed
                if self._queue(files, ticket):
                    _log.info("%s: found in memory, going on", where(ticket))
            else:
                with self._lock:
                    self._taken[files.rank, files.index] = ticket.generation
                    self._freeing.end(files, ticket)
        for copy, manifest, tiers in self._holdings.owed():
            _log.info("%s, rank %d: not in tier %s yet, going on", copy.version, copy.rank, tiers[0].kind)
            self._flushing.later(_ticket(manifest, tiers), replace(manifest, owed=()), copy)
        self._evaluate()

    def attach(self, attempt: int, tiers: Sequence[dict[str, Any]], modules: Sequence[Module] = ()) -> None:
        """A trainer begins; refused if a later attempt of the job is known."""
        with self._lock:
            self._check_attempt(attempt)
            self._attempt = attempt
            self._desk.modules = tuple(modules)
            arrange(
                {tier.kind: tier.store(self._site) for tier in read_tiers(tiers)}, modules
            )  # says what is wrong now
        self._survey(tiers)
        with self._lock:
            self._completion.refresh()
            self._told.clear()  # the newcomer has been told nothing
            self._desk.maps.drop_replaced()
        self.recover()  # what the trainer before it captured, and was killed before it could say so

    def submit(self, rank: int, index: int, generation: int, known: Ticket | None = None) -> None:
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
        self._queue(files, self._holdings.here(ticket))

    def fail(self, version: Version, rank: int, world_size: int, tiers: Sequence[str], why: str) -> None:
        """A rank could not capture a version: it will not be complete in any tier, and nobody shall wait for it."""
        with self._lock:
            for kind in tiers:
                self._completion.note(version, kind, rank, world_size, f"not captured: {why}")
        self._evaluate()

    def _survey(self, specs: Sequence[dict[str, Any]]) -> None:
        """Look at near tiers now, at slow ones in the background: no save shall wait for a service that is away."""
        for tier in self._holdings.survey(specs):
            with self._lock:
                self._looking += self._flushing.workers.submit(-1, self._look, tier)

    def _look(self, tier: Tier) -> None:
        try:
            self._holdings.look(tier)
            self.recover()
        except Exception:
            _log.exception("tier %s: what it holds is not known", tier.kind)
        finally:
            with self._settled:
                self._looking -= 1
                self._settled.notify_all()

    def _check_attempt(self, attempt: int) -> None:
        # The run folder knows of attempts on other nodes, and of those before this process began.
        latest = max(self._attempt, self._job.latest_attempt())
        if attempt < latest:
            raise SaveRefused(f"attempt {attempt} of the job is over: attempt {latest} runs it now")

    def settle(
        self, slow: Sequence[dict[str, Any]] = (), *, everywhere: bool = False, again: str | None = None
    ) -> None:
        """Wait until all that has been captured is in a tier, or has failed.

        With `everywhere`, or with `slow` tiers to look at, also until it is known what slow tiers hold. What failed
        before is tried once more for each new value of `again`, which all ranks of a restore have in common.
        """
        self._survey(slow)
        if again is not None:
            self._retry(again)
        self.recover()
        with self._settled:
            self._settled.wait_for(lambda: not self._unsettled and not ((everywhere or slow) and self._looking))

    def commit_whole(self, slow: Sequence[dict[str, Any]]) -> None:
        """Commit what is whole in tiers that all nodes share, once every node has settled; wait until it is done."""
        shared = [tier for tier in read_tiers(slow) if tier.shared]
        with self._lock:
            self._completion.refresh()
            begun = {kind for _, kind in self._completion.incomplete()}
        for tier in shared:
            if tier.kind in begun:  # another node may have put a shard there whose news did not get here
                self._holdings.look(tier)
        self._evaluate()
        with self._settled:
            self._settled.wait_for(lambda: not self._flushing.is_committing)

    def unfinished(self) -> list[Unfinished]:
        """Return the versions in arenas, or begun in a tier shared by all nodes, each with its failures.

        Whether a version can be restored all the same is for the ranks to see: what other nodes once noted as complete
        may have been lost since.
        """
        tickets = [(files, files.read_ticket()) for files in find_arenas(self._site.arenas, self._rank)]
        found: dict[Version, Unfinished] = {}
        with self._lock:
            tiers = self._holdings.tiers()
            shared = [tier.kind for tier in tiers if tier.shared]
            for files, ticket in tickets:
                if ticket is None or not ticket.captured:
                    continue
                version = ticket.version
                known = found.setdefault(version, Unfinished(*_place(version), ticket.world_size, [], [], ""))
                (known.damaged if _use(files, ticket) in self._altered else known.ranks).append(ticket.rank)
                if _use(files, ticket) in self._unreadable:
                    known.unreadable.append(ticket.rank)
            for kind in shared:
                visible = {*self._holdings.complete(kind)}
                for version in self._completion.begun(kind):
                    if version not in visible and not self._holdings.is_retired(version, kind):
                        size = self._completion.world_size(version, kind)
                        known = found.setdefault(version, Unfinished(*_place(version), size, [], [], ""))
                        is_gone = (version, kind) in self._flushing.gone
                        (known.damaged if is_gone else known.ranks).extend(self._completion.ranks(version, kind))
            left = {
                ticket.version: self._left[_use(files, ticket)]
                for files, ticket in tickets
                if ticket is not None and _use(files, ticket) in self._left
            }
            # The memory tier tells of its own arenas, and whether a version in them was ever complete.
            if all(tier.kind != "memory" for tier in tiers):
                for files, held in self._without_ticket():
                    known = found.setdefault(
                        held.version, Unfinished(*_place(held.version), held.world_size, [], [], "")
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

    def _without_ticket(self) -> Iterator[tuple[ArenaFiles, Held]]:
        """Yield arenas whose ticket is damaged or gone and that hold a version newer than all complete ones."""
        for files in find_arenas(self._site.arenas, self._rank, rests=True):
            with suppress(OSError):  # a ticket that cannot be opened may be sound
                if files.read_ticket(strict=True) is None and (held := self._freeing.lost(files)) is not None:
                    yield files, held

    def close(self) -> None:
        """Finish what is owed, and stop."""
        self._near.close()
        self._flushing.workers.drain()
        with self._lock:
            self._completion.refresh()
        self._evaluate()  # the last one to come finds everybody else's shards, and commits
        self._flushing.workers.close()
        self._closed.set()
        self._news.set()

    def free_arenas(self, rank: int) -> dict[str, int]:
        """The arenas of a rank that may be overwritten, each with the generation that is done with."""
        return self._freeing.free(rank, self._attempt)

    def clean(self) -> None:
        """Give back the memory of arenas that nobody needs."""
        self._freeing.clean()

    def _retry(self, again: str) -> None:
        """Take up again what was captured and got into no tier, and what could not be committed; once a value."""
        with self._lock:
            if again in self._again:
                return
            self._again.add(again)
            for version, tier in self._holdings.uncommitted():
                self._forgive(version, tier.kind)
        self._flushing.try_again()
        for files in find_arenas(self._site.arenas, self._rank):
            ticket = files.read_ticket()
            if ticket is None or not ticket.captured or not self._is_taken(files, ticket):
                continue
            if not self._freeing.has_ended(files, ticket):
                continue  # it is on its way
            try:
                missing = self._holdings.missing(ticket)
            except EvergradError:
                continue
            # What lies in a tier can be restored from there: its arena may be free, and is left alone.
            if {*missing} == {tier["kind"] for tier in ticket.tiers}:
                with self._lock:
                    for kind in missing:
                        self._forgive(ticket.version, kind)
                    self._altered.discard(_use(files, ticket))
                    self._unreadable.discard(_use(files, ticket))
                    self._unread.add(_use(files, ticket))
                    self._taken.pop((files.rank, files.index), None)
                    self._freeing.resume(files)

    def _forgive(self, version: Version, tier: str) -> None:
        self._completion.forgive(version, tier)
        self._told.discard((Failed, version, tier))

    def _is_taken(self, files: ArenaFiles, ticket: Ticket) -> bool:
        with self._lock:
            return self._taken.get((files.rank, files.index)) == ticket.generation

    def _queue(self, files: ArenaFiles, ticket: Ticket) -> bool:
        """Have the chain run on a shard; False if that was said before."""
        with self._lock:
            if self._is_taken(files, ticket):
                return False
            self._taken[files.rank, files.index] = ticket.generation
            self._unsettled.add(_use(files, ticket))
            if not self._near.submit(files.rank, self._finish, files, ticket):
                self._settle(files, ticket)
                return False
            return True

    def _finish(self, files: ArenaFiles, ticket: Ticket) -> None:
        """Run the near part of the chain on one shard; what goes further is flushed afterwards."""
        flushed_from_here = False
        try:
            # What was captured later is announced later; an arena is never reused before its chain has ended.
            if not self._freeing.has_ended(files, ticket):
                with files.worked_on():  # another process may have found it too
                    now = files.read_ticket(strict=True)
                    if now is not None and now.generation == ticket.generation:
                        flushed_from_here = self._run(files, ticket)
        except EvergradError as error:
            if isinstance(error, _Altered):
                self._altered.add(_use(files, ticket))
            if isinstance(error, DamagedCapture):
                self._unreadable.add(_use(files, ticket))
            _log.error("%s: not finished: %s", where(ticket), error)
            self._fail(ticket, str(error))
        except OSError as error:
            self._give_up(files, ticket, error)
        except Exception as error:
            _log.exception("%s: not finished", where(ticket))
            self._fail(ticket, f"{type(error).__name__}: {error}")
        finally:
            if not flushed_from_here:
                self._end(files, ticket)
            self._evaluate()

    def _give_up(self, files: ArenaFiles, ticket: Ticket, error: OSError) -> None:
        """The system refuses what it takes to finish a shard."""
        why = f"{error.filename or files.shard}: {open_files_hint(error)}"
        _log.error("%s: not finished: %s", where(ticket), why)
        self._fail(ticket, why)

    def _end(self, files: ArenaFiles, ticket: Ticket) -> None:
        """The arena is not read any more: its shard is in tiers, or will not get there."""
        self._freeing.end(files, ticket)
        self._unread.discard(_use(files, ticket))
        self._settle(files, ticket)

    def _settle(self, files: ArenaFiles, ticket: Ticket) -> None:
        with self._settled:
            if _use(files, ticket) not in self._unread:
                self._unsettled.discard(_use(files, ticket))
            self._settled.notify_all()

    def _run(self, files: ArenaFiles, ticket: Ticket) -> bool:
        """Digest, near tiers; True if the arena is still needed, because slow tiers are flushed from it."""
        tiers = read_tiers(ticket.tiers)
        owed = [without_secrets(tier.to_json()) for tier in tiers if tier.slow]
        manifest = Manifest(
            job=self._job.id, version=ticket.version, rank=ticket.rank, world_size=ticket.world_size,
            size=ticket.size, data_start=0, time=ticket.time, header="", digests={}, node=self._job.node,
            parent=ticket.parent, meta=ticket.meta, owed=owed,
        )  # fmt: skip
        earlier = _earlier(files, ticket)
        work = Work(ticket, files, self._desk.maps.view(files, ticket.size), self._site, earlier or manifest)
        near, far = self._desk.chain(tiers)
        in_memory = any(tier.kind == "memory" for tier in tiers)

        def report(module: Module, error: Exception | None) -> None:
            if isinstance(module, Digest) and error is None and not in_memory and earlier is None:
                _keep_digests(files, ticket, work.manifest)
            if isinstance(module, Digest) and error is None and far and ticket.world_size > 1:
                self._flushing.shares.publish(work.manifest, parse(work.shard, files.shard).layout.entries)
            if isinstance(module, Put) and error is None:
                self._record(work.manifest)
                self._settle(files, ticket)
            if isinstance(error, DamagedCapture):
                self._unreadable.add(_use(files, ticket))
            self._desk.report(ticket, tiers, module, error)

        try:
            if earlier is None and self._before.get((files.rank, files.index)) == ticket.generation:
                Digest().run(work)
                work.manifest = self._compared(work.manifest, ticket, files)
            run_chain(near, work, report)
            if not far or not work.manifest.header:
                return False
            source = self._holdings.lasting(ticket.version, ticket.rank)
            return self._flushing.later(ticket, work.manifest, source, files) and source is None
        finally:
            work.shard.release()

    def _compared(self, manifest: Manifest, ticket: Ticket, files: ArenaFiles) -> Manifest:
        """A manifest whose digests were taken again: `TierError` if the digests of the capture say otherwise.

        Those are in the manifests of other copies. Without one the manifest is marked as unverified.
        """
        for copy, original in self._holdings.originals(ticket):
            if wrong := _differing(original, manifest):
                by = f"by the manifest in tier {copy.tier}"
                raise _Altered(f"{files.shard}: {wrong} is not what was captured, {by}: this arena is left aside")
            return replace(manifest, unverified=False)
        noted = self._journal.read().shards.get(ticket.version, {}).get(ticket.rank)
        if noted is not None and noted.digest and noted.digest != shard_digest(manifest):
            by = "by the digest in the catalogue"
            raise _Altered(f"{files.shard}: is not what was captured, {by}: this arena is left aside")
        _log.warning("%s: unverified: its digests were taken after a restart, with none to compare", where(ticket))
        return replace(manifest, unverified=True)

    def _fail(self, ticket: Ticket, why: str) -> None:
        """A shard does not get into the tiers that it is not in yet."""
        try:
            kinds = self._holdings.missing(ticket)
        except EvergradError:
            kinds = [tier["kind"] for tier in ticket.tiers]
        for kind in kinds:
            self._desk.note(ticket, kind, why)

    def _record(self, manifest: Manifest) -> None:
        """Tell the catalogue of a shard, once."""
        with self._lock:
            if (manifest.version, manifest.rank) in self._noted:
                return
            self._noted.add((manifest.version, manifest.rank))
        self._journal.note_shard(manifest, self._writer)

    def _evaluate(self) -> None:
        """Tell what is complete now or never will be, retire what is no longer needed, say which arenas are free."""
        news: list[Event] = []
        with self._lock:
            tiers = self._holdings.tiers()
            for kind in (tier.kind for tier in tiers):
                complete = self._holdings.complete(kind)
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
                for version, name in self._holdings.retain(shared=False):
                    self._forget(version, name)
            for version, tier in self._holdings.uncommitted():
                if self._completion.failure(version, tier.kind) is None:
                    self._flushing.commit_later(version, tier)
            lasting = {tier.kind for tier in tiers if tier.survives_reboot}
            for event in news:
                if isinstance(event, Committed) and event.tier in lasting:
                    self._completion.remember(event.version)
        for event in (*news, *(Free(rank, self.free_arenas(rank)) for rank in sorted(ranks))):
            self._notify(event)
        with self._settled:
            self._settled.notify_all()
        self._news.set()

    def _overtake(self, news: list[Event], kind: str, newest: Version) -> None:
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

    def _tell(self, news: list[Event], event: Committed | Failed) -> None:
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


def _use(files: ArenaFiles, ticket: Ticket) -> tuple[int, int, int]:
    """Rank, index and generation: one use of one arena."""
    return files.rank, files.index, ticket.generation


def _place(version: Version) -> tuple[int, int]:
    return version.step, version.attempt


def _earlier(files: ArenaFiles, ticket: Ticket) -> Manifest | None:
    """Digests that were taken before a crash: of what was captured, not of what may have happened to it since."""
    for path in (files.manifest, files.digests):
        try:
            earlier = Manifest.read(path)
            if earlier.generation == ticket.generation and earlier.version == ticket.version:
                return earlier
        except FileNotFoundError:
            continue
        except FormatError as error:
            _log.warning("%s: %s: the shard is digested again", where(ticket), error)
    return None


def _keep_digests(files: ArenaFiles, ticket: Ticket, manifest: Manifest) -> None:
    """Keep digests beside the arena for whoever goes on after a crash. Nothing else depends on them."""
    try:
        storage.publish(files.digests, replace(manifest, generation=ticket.generation).to_bytes())
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


def _ticket(manifest: Manifest, tiers: Sequence[Tier]) -> Ticket:
    """What a trainer said of a shard whose arena is long in use again."""
    version, specs = manifest.version, [tier.to_json() for tier in tiers]
    return Ticket(
        0, True, version.step, version.attempt, manifest.rank, manifest.world_size, manifest.size, manifest.time,
        manifest.parent, specs, dict(manifest.meta),
    )  # fmt: skip
