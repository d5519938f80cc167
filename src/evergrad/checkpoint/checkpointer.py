"""The public face: save, wait, restore."""

from __future__ import annotations

import json
import logging
import operator
import os
import shutil
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from uuid import uuid4

from evergrad.checkpoint.agent.agent import linger_seconds
from evergrad.checkpoint.agent.client import AgentClient, PipelineClient, ThreadClient
from evergrad.checkpoint.agent.events import UnfinishedVersion
from evergrad.checkpoint.agent.inventory import CompletionLog
from evergrad.checkpoint.agent.pipeline import ChainModule
from evergrad.checkpoint.arena import Arena, ArenaTicket, check_open_files
from evergrad.checkpoint.capture.capture import CaptureInFlight, CapturePlan, StateCapture
from evergrad.checkpoint.catalogue.history import CatalogueJournal
from evergrad.checkpoint.catalogue.pins import Pins, keep_guarded
from evergrad.checkpoint.pending import Pending, SaveTracker
from evergrad.checkpoint.ranks import Ranks
from evergrad.checkpoint.restore.find import (
    Restored,
    RestoreRequest,
    VersionOpener,
    is_dcp_folder,
    list_versions,
    named_version,
    restore,
    restore_rank,
    stores_of,
)
from evergrad.checkpoint.restore.reshard import Resize
from evergrad.checkpoint.run_folder import RunFolder, arena_folder, moved_to, open_run_folder, time_now
from evergrad.checkpoint.save_policy import Policy, SavePolicyRuntime
from evergrad.checkpoint.tiers import (
    Compress,
    Local,
    Memory,
    Site,
    Tier,
    join_compression,
    without_password,
    without_secrets,
)
from evergrad.checkpoint.version import Version, VersionRecord
from evergrad.errors import CheckpointError, SaveRefused, UsageError, nearest
from evergrad.formats.gc_pause import gc_paused
from evergrad.state import Where
from evergrad.wording import checked_choice

# What a user gives to a `Checkpointer`, checked: each mistake is one line.

_SPELLED = {
    "memory": "eg.Memory()",
    "local": "eg.Local(path)",
    "persistent": "eg.Persistent(url)",
    "compress": "eg.Compress()",
}
"""Names of tiers that people write as text, and the objects to pass instead."""


def checked_tiers(tiers: Sequence[Tier | Compress] | Tier | None) -> list[Tier]:
    """The tiers, nearest first, each kind once; by default memory and the run folder's own disk."""
    given: list[Any] = [Memory(), Local()]
    if tiers is not None:
        given = [tiers] if isinstance(tiers, (Tier, str)) else list(tiers)
    for tier in given:
        if not isinstance(tier, (Tier, Compress)):
            close = nearest(tier[:100].lower(), _SPELLED, count=1) if isinstance(tier, str) else []
            hint = f" Did you mean {_SPELLED[close[0]]}?" if close else ""
            raise UsageError(f"tiers: {tier!r:.100} is no tier (expected eg.Memory(), eg.Local(path), …).{hint}")
    chosen = join_compression(given)
    if chosen and not any(tier.is_due(1) for tier in chosen):
        raise UsageError(f"tiers: {chosen[0]!r} alone would leave saves out: put eg.Memory() or eg.Local() before it")
    kinds = [tier.kind for tier in chosen]
    if not kinds or len(set(kinds)) < len(kinds):
        raise UsageError(f"tiers: expected at least one, each kind once, found {', '.join(kinds) or 'none'}")
    return chosen


def checked_run_dir(run_dir: str | os.PathLike[str]) -> str:
    """The path of a run folder; an empty one, which would be the current folder, is a variable that was never set."""
    path = os.fspath(run_dir) if isinstance(run_dir, str | os.PathLike) else None
    if not isinstance(path, str):
        raise UsageError(f"run_dir: expected the path of a folder, found {run_dir!r:.100}")
    if not path:
        raise UsageError("run_dir: an empty path names no folder. For the current one: '.'.")
    return path


def checked_modules(modules: Sequence[ChainModule]) -> tuple[ChainModule, ...]:
    """A user's own links in the agent's chain."""
    expected = "an object with an attribute `name` and a method `run(work)`"
    if not isinstance(modules, Iterable):
        raise UsageError(f"modules: expected a list of modules, each {expected}, found {modules!r:.100}")
    given = tuple(modules)
    for module in given:
        if isinstance(module, type) or not isinstance(module, ChainModule):
            raise UsageError(f"modules: {module!r:.100} is no module: expected {expected}")
    return given


def checked_step(step: int) -> int:
    """A whole number, 0 or more."""
    try:
        number = operator.index(step)
    except TypeError:
        raise UsageError(f"step: expected a whole number, found {step!r}") from None
    if isinstance(step, bool) or not 0 <= number < 1 << 63:
        raise UsageError(f"step: expected 0 or more, found {step!r}")
    return number


def checked_meta(meta: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of what JSON can hold."""
    try:
        notes: dict[str, Any] = json.loads(json.dumps(dict(meta or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(f"meta: expected what JSON can hold: {error}") from None
    return notes


_log = logging.getLogger(__name__)


class CheckpointWarning(UserWarning):
    """Something went wrong in the background since the last save; training can go on."""


class Checkpointer:
    """Saves a job's state without making it wait, and brings it back.

    >>> import torch, tempfile
    >>> model, folder = torch.nn.Linear(2, 2), tempfile.TemporaryDirectory()
    >>> with Checkpointer(folder.name, agent=False) as ck:
    ...     pending = ck.save(10, {"model": model})     # returns after the copy
    ...     _ = pending.wait()                          # on disk, for good
    ...     ck.restore({"model": model})
    10
    >>> folder.cleanup()

    `save` copies the state into shared memory and returns; an agent, one process a node, does the rest, and goes on
    when the trainer is killed. Each rank needs two arenas of its state's size in /dev/shm. All ranks call `save` and
    `restore` alike; the default process group is looked up each time. Not for several threads at once.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        tiers: Sequence[Tier | Compress] | Tier | None = None,
        *,
        reserve: object = None,
        agent: bool = True,
        when_busy: Literal["wait", "refuse"] = "wait",
        replicated: Where | bool = False,
        modules: Sequence[ChainModule] = (),
        linger_s: float | None = None,
        node: str | None = None,
        policy: Policy | int | Sequence[Policy | int] | None = None,
        preempt_signals: Sequence[str | int] = ("SIGTERM", "SIGUSR2"),
        exit_code: int = 75,
        grace_s: float = 25.0,
    ) -> None:
        """Find or start the job of a run folder, which all nodes share.

        - `tiers`: where versions go, nearest first; by default memory and the run folder's own disk.
        - `reserve`: a state like those that will be saved. Its arenas are then made now, not at the first save.
        - `agent`: False does the work in a thread of this process instead.
        - `when_busy`: what a save does when both arenas are in use.
        - `replicated`: the tensors that are the same on all ranks (names, globs, roles; True: all). What is under DDP
          or FSDP2 is known without.
        - `modules`: your own links in the agent's chain; it must be able to import them.
        - `linger_s`: how long an agent that this starts stays without work; EVERGRAD_LINGER, or 60 s.
        - `node`: the failure domain that this process is in; EVERGRAD_NODE, or the host's name.
        - `policy`: when `need_checkpoint` says so: every so many steps, `EverySeconds(600)`, …, or a list of them.
        - `preempt_signals`: what asks the job to save and leave. `exit_code` is then the process's to return, and
          `grace_s` how long after the signal `should_exit` may wait for the last save.
        """
        self._save_policy = SavePolicyRuntime(
            policy, preempt_signals=preempt_signals, exit_code=exit_code, grace_s=grace_s
        )
        self._tiers = checked_tiers(tiers)
        checked_choice("when_busy", when_busy, ("wait", "refuse"))
        modules = checked_modules(modules)
        linger = linger_seconds(linger_s) if agent or linger_s is not None else 0.0
        self._run_folder = RunFolder.open(checked_run_dir(run_dir), node)
        self._pid = os.getpid()
        self._folder = arena_folder(self._run_folder)
        self._site = Site(self._run_folder.id, self._run_folder.node_folder, self._folder, self._run_folder.run_dir)
        self._stores = {tier.kind: tier.store(self._site) for tier in self._tiers}
        for store in self._stores.values():
            store.check()
        self._run_fd = open_run_folder(self._run_folder)
        self._close_run = weakref.finalize(self, _close_own, self._run_fd, self._pid)
        self._tracker = SaveTracker()
        self._replicated = replicated
        self._state_capture = StateCapture(self._folder, self._tracker, when_busy)
        self._attached: Ranks | None = None
        self._attempt = self._last_step = -1
        self._saves = 0
        self._parent: str | None = None
        self._source: str | None = None
        self._restored: Restored | None = None
        self._closed = self._moved = False
        self._client: PipelineClient = (
            AgentClient(self._run_folder, self._tracker, modules, linger)
            if agent
            else ThreadClient(self._run_folder, self._tracker, modules)
        )
        if reserve is not None:
            try:
                self._state_capture.reserve(self._plan(reserve, Ranks.now()), Ranks.now().rank)
            except BaseException:
                self.close()
                raise

    @property
    def memory_bytes(self) -> int:
        """Shared memory that this rank's arenas take. Besides them, a save needs a few buffers of fixed size."""
        return self._state_capture.size

    @property
    def restored(self) -> Restored | None:
        """What the last `restore` found: version, tier, notes."""
        return self._restored

    def save(self, step: int, state: object, *, meta: Mapping[str, Any] | None = None) -> Pending:
        """Capture the state of this rank and return; the version is finished in the background.

        `state` is anything that `flatten` takes: nested dicts and lists of tensors and plain values, and objects with
        `state_dict()`. `meta` is noted with the version: JSON only. Something that failed in the background since the
        last save is said now, as a `CheckpointWarning`.
        """
        self._check_usable()
        self._say_moved()
        self._save_policy.begin_save()
        step = checked_step(step)
        ranks = Ranks.now()
        self._attach(ranks, step)
        # From here on a step back is another attempt, on every rank alike, whatever becomes of this save on one.
        self._last_step = step
        tiers = [tier for tier in self._tiers if tier.is_due(self._saves) or self._save_policy.preempted]
        self._saves += 1
        version, kinds = Version(step, self._attempt), [tier.kind for tier in tiers]
        durable = next((tier.kind for tier in tiers if tier.survives_reboot), kinds[0])
        try:
            notes = checked_meta(meta)  # here, because one rank's may be wrong: the others must hear of it
            for message in self._tracker.errors():
                warnings.warn(message, CheckpointWarning, stacklevel=2)
            pending = Pending(version, kinds, durable, self._tracker)
            flight = self._capture(version, state, notes, ranks, [tier.to_json() for tier in tiers])
        except BaseException as error:  # no other rank shall wait for this one's shard
            self._tracker.ignore_failure_of(version)
            self._client.report_failed_capture(
                version, ranks.rank, ranks.world_size, kinds, f"{type(error).__name__}: {error}"
            )
            raise
        pending.set_capture(flight)
        self._save_policy.saved(pending, kinds)
        return pending

    def need_checkpoint(self) -> bool:
        """Whether to save now: the policy says so, or the job has to leave. All ranks call it, and get one answer."""
        self._check_usable()
        return self._save_policy.need_checkpoint()

    def should_exit(self) -> bool:
        """Whether to leave now, with `exit_code`: a signal came to any rank, and the save after it was waited for."""
        self._check_usable()
        leaves = self._save_policy.should_exit()
        for message in self._save_policy.complaints():
            warnings.warn(message, CheckpointWarning, stacklevel=2)
        return leaves

    @property
    def has_policy(self) -> bool:
        """True if a policy says when to save."""
        return self._save_policy.has_policy

    def is_due(self, steps: int, agree: Callable[[list[float]], list[float]], *, votes: bool = True) -> bool:
        """True if the policy wants a save, `steps` after the last one; `agree` takes the largest over all ranks.

        For whoever runs the loop itself, as `eg.join` does: no signals are watched, and no group is made.
        """
        self._check_usable()
        return self._save_policy.is_due(steps, agree, votes=votes)

    @property
    def exit_code(self) -> int:
        """0, until `should_exit` says so: then 75, with which schedulers run a job again."""
        return self._save_policy.exit_code

    def restore(
        self,
        state: object,
        *,
        version: Version | int | str | None = None,
        strict: bool = True,
        where: Where | None = None,
        source: str | os.PathLike[str] | None = None,
        resize: Resize | None = None,
    ) -> int | None:
        """Put the newest version that all ranks can obtain into the state, in place; its step, or None.

        What was captured on these nodes, and not finished, is finished first. Every digest is checked before anything
        is loaded. A corrupt or torn version is passed over for the one before, and that is
        logged. `version` asks for one: by step, by name, by tag, or exactly. With `strict=False` what does not fit is
        left out and logged; `where` restores only some tensors (names, globs, roles: as `select`). `RestoreError` if
        there are versions and none of them is intact, or if a newer one that every rank has captured cannot be
        finished: it is tried again by the next call, and `version` goes back behind it.

        `source` begins from elsewhere: another job's run folder, the URL of its persistent tier, or a folder of
        torch.distributed.checkpoint, which knows no step: 0. With another number of ranks what is sharded is cut anew,
        what is replicated is given to all, and of what was each rank's own `resize(path, saved, rank, world_size)` says
        what this one gets.
        """
        self._check_usable()
        ranks = Ranks.now()
        ranks.run_on_all(self._check_readable)
        if source is not None and is_dcp_folder(source):
            return self._restore_dcp(Path(source), state, strict, where, ranks)
        unfinished = self._finish_captures(ranks)
        job, stores = self._run_folder.id, self._stores
        if source is not None:
            job, stores = ranks.run_on_all(lambda: stores_of(source, self._tiers))
        asked = ranks.run_on_all(lambda: self._named(version, source)) if isinstance(version, str) else version
        if source is not None:
            unfinished = ()  # another job's versions are restored, whatever became of this one's
        request = RestoreRequest(state, asked, strict, where, newest=version == "latest")
        scratch = self._scratch()
        obtaining = VersionOpener(
            job, stores, state, scratch, self._state_capture.mapped(), resize, strict, self._replicated
        )
        try:
            with gc_paused():
                committed = CompletionLog(self._run_folder.run_dir, None).last_committed() if source is None else None
                home = self._run_folder.run_dir if source is None else os.fspath(source)
                journal = CatalogueJournal(Path(home)) if "://" not in str(home) else None
                self._restored = restore(request, job, stores, ranks, obtaining, committed, journal, unfinished)
            ranks.gather(None)  # nobody reads any more what another one may remove
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        if self._restored is None:
            return None
        name = self._restored.version.name
        self._parent, self._source = name, None
        if source is not None:
            self._parent, self._source = f"{job}/{name}", without_password(os.fspath(source))
        self._attached = None  # what is saved from here on is another attempt
        return self._restored.version.step

    def restore_rank(self, state: object, rank: int, where: Where) -> int | None:
        """Put what one rank had saved into the state, of the newest version in which it lies at hand; its step.

        For a process that takes a lost rank's place: no other rank is asked, and versions that are not complete will
        do. Only what `where` chooses is loaded, and only what fits.
        """
        self._check_usable()
        found = restore_rank(self._run_folder.id, self._stores, rank, state, where)
        return None if found is None else found.step

    def versions(self) -> list[VersionRecord]:
        """The versions that this rank could restore now, newest first."""
        completion = CompletionLog(self._run_folder.run_dir, None)
        completion.refresh()
        return list_versions(
            self._run_folder.id, self._stores, completion, Ranks.now().rank, CatalogueJournal(self._run_folder.run_dir)
        )

    def note_guarded(self, version: Version) -> None:
        """Note that the state that this version was saved of was sound: a guard has compared all ranks'.

        All ranks may call it; one of them notes it. The version is tagged "guarded", so retention leaves it alone until
        the next one is; the one before stays, as "guarded-before", since this one may yet fail to be finished. Whether
        the files of a version are intact is another question: their digests tell.
        """
        self._check_usable()
        if Ranks.now().rank == 0:
            CatalogueJournal(self._run_folder.run_dir).note_guarded(version)
            keep_guarded(Pins(self._run_folder.run_dir), version, [record.version for record in self.versions()])

    def newest_guarded(self) -> Version | None:
        """The newest version whose state a guard found sound and that every rank could restore now; None if none.

        For `restore(version=…)`. All ranks call it, and get one answer.
        """
        self._check_usable()
        ranks = Ranks.now()
        noted = ranks.run_on_all(lambda: CatalogueJournal(self._run_folder.run_dir).read().guarded)
        mine = [record.version.name for record in self.versions() if record.version in noted]
        common = set.intersection(*(set(names) for names in ranks.gather(mine)))
        found = [version for name in common if (version := Version.parse(name)) is not None]
        return max(found, key=Version.age, default=None)

    def close(self) -> None:
        """Let go of arenas and agent. What was captured still becomes durable; with `agent=False` this waits for it."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._save_policy.close()
        self._state_capture.await_copies()
        self._client.close()
        self._tracker.set_unavailable(
            "the Checkpointer was closed before this was known: ask one on the same run folder"
        )
        self._state_capture.release_arenas()
        moved_to(self._run_folder, self._run_fd)  # before arenas of run folders that are gone are removed
        self._client.reclaim_arenas()
        self._close_run()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                f"this Checkpointer belongs to process {self._pid}: make one of your own in a forked process"
            )
        if self._closed:
            raise UsageError("this Checkpointer is closed")

    def _say_moved(self) -> None:
        """Warn, once, that the run folder is not where it was: what belongs into it is lost until it is back."""
        with suppress(OSError):
            if os.path.samestat(
                os.stat(self._run_folder.run_dir), os.fstat(self._run_fd)
            ):  # as nearly always, at no cost
                self._moved = False
                return
        moved = not self._run_folder.is_there()
        if moved and not self._moved:
            warnings.warn(self._where_moved(), CheckpointWarning, stacklevel=3)
        self._moved = moved

    def _check_readable(self) -> None:
        """Say now what would look like versions that are gone."""
        check_open_files()
        if not self._run_folder.is_there():
            raise CheckpointError(self._where_moved())

    def _where_moved(self) -> str:
        new = moved_to(self._run_folder, self._run_fd)
        what = "was moved or removed" if new is None else f"was moved to {new}"
        return (
            f"{self._run_folder.run_dir}: the run folder {what} since this Checkpointer was made: "
            "nothing is written there or "
            "read from it. Move it back, or begin again with its new path."
        )

    def _attach(self, ranks: Ranks, step: int) -> None:
        """Make sure that this process group has an attempt of its own, in which this step comes next."""
        if ranks == self._attached and step > self._last_step:
            return
        self._attached, self._last_step = None, -1
        mine = ranks.run_on_all(lambda: self._begin_attempt(ranks))
        attempt = ranks.gather(mine)[0]
        ranks.run_on_all(lambda: self._take_part(ranks, attempt))
        self._attempt, self._attached, self._saves = attempt, ranks, 0

    def _finish_captures(self, ranks: Ranks) -> Sequence[UnfinishedVersion]:
        """Have what was captured on all nodes finished, and then what is whole in shared tiers committed.

        Returns what this node knows of versions that were captured and could not be finished.
        """
        slow = [tier.to_json() for tier in self._tiers if tier.slow]
        self._state_capture.await_copies()
        again = ranks.gather(uuid4().hex)[0]  # what failed before is tried once, however many ranks a node has
        found = ranks.run_on_all(lambda: self._client.await_finished(ranks.rank, slow, again=again))
        return ranks.run_on_all(lambda: self._client.await_finished(ranks.rank, slow, commit=True) if slow else found)

    def _begin_attempt(self, ranks: Ranks) -> int:
        check_open_files()
        if ranks.rank:
            return 0
        tiers = [without_secrets(tier.to_json()) for tier in self._tiers]
        return self._run_folder.begin_attempt(
            world_size=ranks.world_size, parent=self._parent, source=self._source, tiers=tiers
        )

    def _take_part(self, ranks: Ranks, attempt: int) -> None:
        self._check_shared(attempt)
        self._state_capture.lease(ranks.rank)
        self._tracker.start_attempt(ranks.rank, attempt)
        self._client.attach(ranks.rank, attempt, [tier.to_json() for tier in self._tiers])

    def _restore_dcp(self, folder: Path, state: object, strict: bool, where: Where | None, ranks: Ranks) -> int | None:
        from evergrad.checkpoint.restore.dcp_folder import restore_dcp

        skipped = ranks.run_on_all(lambda: restore_dcp(folder, state, strict=strict, where=where))
        for line in skipped:
            _log.warning("rank %d: %s", ranks.rank, line)
        self._parent, self._source = None, str(folder.absolute())
        self._attached = self._restored = None
        return 0

    def _named(self, text: str, source: object) -> Version:
        if source is not None:
            return named_version(text, None, [])
        return named_version(text, self._run_folder.run_dir, [record.version for record in self.versions()])

    def _scratch(self) -> Path:
        """Where what has to be fetched lies meanwhile: on the node's own disk, if there is one."""
        local = next((tier for tier in self._tiers if isinstance(tier, Local)), Local())
        return local.root(self._run_folder.run_dir) / self._run_folder.id / self._run_folder.node_folder / ".fetched"

    def _check_shared(self, attempt: int) -> None:
        if not self._run_folder.sees_attempt(attempt):
            raise CheckpointError(
                f"{self._run_folder.run_dir}: node {self._run_folder.node} does not see what rank 0 wrote there. "
                "All nodes must share the run folder."
            )

    def _capture(
        self, version: Version, state: object, notes: dict[str, Any], ranks: Ranks, tiers: list[dict[str, Any]]
    ) -> CaptureInFlight:
        """Copy the state into an arena, and say on its ticket what it is, once all of it is there."""
        if refusal := self._tracker.refusal():
            raise SaveRefused(refusal)
        record = self._record(version.step, ranks)
        step, attempt, parent = version.step, version.attempt, self._parent

        def ticket(size: int) -> ArenaTicket:
            rank, world_size = ranks.rank, ranks.world_size
            return ArenaTicket(0, True, step, attempt, rank, world_size, size, time_now(), parent, tiers, notes)

        def announce(arena: Arena, error: Exception | None) -> None:
            if error is None:
                self._client.submit(ranks.rank, arena.files.index, arena.ticket)
            else:
                kinds = [tier["kind"] for tier in tiers]
                self._client.report_failed_capture(
                    version, ranks.rank, ranks.world_size, kinds, f"{type(error).__name__}: {error}"
                )

        return self._state_capture.capture(state, lambda: self._plan(state, ranks), record, ticket, announce)

    def _plan(self, state: object, ranks: Ranks) -> CapturePlan:
        return CapturePlan.of(state, self._record(0, ranks), replicated=self._replicated)

    def _record(self, step: int, ranks: Ranks) -> dict[str, Any]:
        return {
            "schema_version": 1, "job": self._run_folder.id, "step": step, "attempt": self._attempt,
            "rank": ranks.rank, "world_size": ranks.world_size,
        }  # fmt: skip


def _close_own(fd: int, pid: int) -> None:
    """Close a descriptor, in the process that opened it."""
    if os.getpid() == pid:
        with suppress(OSError):
            os.close(fd)
