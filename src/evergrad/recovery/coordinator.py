"""The launcher's part in a recovery: it learns who died, hears what the others saw, and writes the next plan.

Nothing is decided anywhere else, so whoever reaches the store goes on in one and the same generation. The launcher
calls `exited` as soon as a child is reaped; all the rest happens in a thread of the coordinator's own.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Literal, Protocol

from torch._C._distributed_c10d import PrefixStore, TCPStore

from evergrad._forkserver import describe_exit
from evergrad._wire import Forged, Secret
from evergrad.errors import UsageError
from evergrad.recovery.decide import STRATEGIES, StopDecision, Strategy, decide, is_exact, with_relaunched_members
from evergrad.recovery.launch.summary import NO_FINGERPRINT, NOTHING_TO_COMPARE
from evergrad.recovery.membership import (
    EXIT_ALL_LEFT,
    Fingerprint,
    MembershipPlan,
    StoreKeys,
    SurvivorReport,
    Verdict,
    first_difference,
)
from evergrad.recovery.store import PREFIX, SignedStore
from evergrad.wording import did_you_mean

# Every process of a job as its coordinator counts them: who lives, who is out, and what became of those.


@dataclass(slots=True)
class ProcessTable:
    """By uid; it only grows. Whoever changes it, or reads more than one thing of it, holds the coordinator's lock."""

    uids: list[int] = field(default_factory=list)
    """All that were ever started, in order."""
    codes: dict[int, int] = field(default_factory=dict)
    """Of those who are out: 0 has finished, anything else is dead (negative: the signal)."""
    hows: dict[int, str] = field(default_factory=dict)
    """What became of them, as in "rank 2 …"."""
    left: set[int] = field(default_factory=set)
    """Those who have left in good order, before the job's end."""

    def copy(self) -> ProcessTable:
        """As it is now."""
        return ProcessTable(list(self.uids), dict(self.codes), dict(self.hows), set(self.left))

    def count_out(self, uid: int, code: int, how: str) -> bool:
        """Note that a process is out; whether that is news."""
        if uid in self.codes:
            return False
        self.codes[uid], self.hows[uid] = code, how
        return True

    def spares(self, members: Collection[int]) -> list[int]:
        """Those who live and are not among these members, in order."""
        return [uid for uid in list(self.uids) if uid not in members and uid not in self.codes]

    def finished(self, members: Collection[int]) -> set[int]:
        """Of these members, those who have finished."""
        return {uid for uid in members if self.codes.get(uid) == 0}

    def dead(self, members: Collection[int]) -> set[int]:
        """Of these members, those who are dead."""
        return {uid for uid in members if self.codes.get(uid, 0) != 0}

    def have_all(self, members: Collection[int], code: int) -> bool:
        """Whether all of these are out, with this code."""
        return all(self.codes.get(uid) == code for uid in members)

    def describe_end(self, plan: MembershipPlan, uid: int) -> str:
        """What became of a process, by the rank that it had."""
        return f"rank {plan.rank_of(uid)} {self.hows[uid]}"

    def describe_ends(self, plan: MembershipPlan, uids: Collection[int]) -> str:
        """The same of several."""
        return ", ".join(self.describe_end(plan, uid) for uid in sorted(uids))


# How often a job tries again before it is given up: what comes back every time is no accident.

_MAX_FUTILE_GENERATIONS = 20
"""So many generations in a row that lose nobody and come to no point are enough."""
_MAX_RETURNS_TO_VERSION = 5
"""So often a job goes back to the same version."""


class RetryLimits:
    """One job's."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._restarts = self._futile = 0
        self._returns: Counter[str] = Counter()

    @property
    def no_restart(self) -> str:
        """Why the job is not relaunched once more; empty if it may be."""
        used = self._restarts >= self._max_restarts
        return f"{self._restarts} of {self._max_restarts} were used" if used else ""

    def restarted(self) -> None:
        """The job is relaunched."""
        self._restarts += 1

    def limit_reached(self, before: MembershipPlan, after: MembershipPlan) -> str:
        """What speaks against going on from one plan to the next, which counts as tried; empty if nothing does."""
        if after.dead or after.left or after.joiners or after.point > before.point:
            self._futile = 0
        else:
            self._futile += 1
            if self._futile >= _MAX_FUTILE_GENERATIONS:
                return f"{self._futile} generations in a row came to no point; the last"
        if after.version:
            self._returns[after.version] += 1
            if self._returns[after.version] > _MAX_RETURNS_TO_VERSION:
                return (
                    f"the job has gone back {_MAX_RETURNS_TO_VERSION} times to {after.version}, "
                    "and its ranks differ again"
                )
        return ""


# The store as the coordinator sees it: what ranks have told, and what they are told.
#
# It only ever looks into the store and never waits in it: a wait that ends without result fills the terminal with
# torch's warnings. Every call may raise `Forged`.

_LEAVE = -1


class CoordinatorStore:
    """Of one job, by generation and uid."""

    def __init__(self, store: SignedStore) -> None:
        self._store = store

    def ping(self) -> None:
        """Ask anything, and return when there is an answer."""
        self._store.store.check([StoreKeys.fatal])

    def fatal(self) -> str | None:
        """Why nobody shall go on, if a rank says so."""
        return self._store.find(StoreKeys.fatal)

    def misuse(self) -> str | None:
        """Which calls the script leaves out, if a rank says so when it has finished."""
        return self._store.find(StoreKeys.misuse)

    def progress(self) -> int:
        """How many steps were applied, as far as ranks have told."""
        progress = self._store.find(StoreKeys.progress)
        return 0 if progress is None else int(json.loads(progress).get("step", 0))

    def has_joined(self, uid: int) -> bool:
        """Whether this process has called `eg.join`."""
        return self._store.has(StoreKeys.joined(uid))

    def has_waited(self, uid: int) -> bool:
        """Return True if this process has come to its first `job.batches` as a spare."""
        return self._store.has(StoreKeys.waiting(uid))

    def has_checkpointer(self, uid: int) -> bool:
        """Whether it has joined with something to restart from."""
        joined = self._store.find(StoreKeys.joined(uid))
        return joined is not None and bool(json.loads(joined).get("checkpointer"))

    def can_be_called(self, uid: int) -> bool:
        """Whether this spare waits, and nobody has called it."""
        return self._store.has(StoreKeys.waiting(uid)) and not self._store.has(StoreKeys.called(uid))

    def is_broken(self, plan: MembershipPlan) -> bool:
        """Whether somebody knows that this generation is over."""
        return self._store.has(StoreKeys.broken(plan.generation))

    def reason(self, plan: MembershipPlan) -> str:
        """Why it is over, as the first who knew said; empty if nobody has."""
        return str(json.loads(self._broken(plan)).get("reason", ""))

    def report(self, plan: MembershipPlan, uid: int) -> SurvivorReport | None:
        """What a survivor saw of it, once it has told."""
        text = self._store.find(StoreKeys.report(plan.generation, uid))
        return None if text is None else SurvivorReport.from_json(text)

    def diverged(self) -> str:
        """The first difference between ranks after a process joined, unless it has been healed since."""
        return self._store.find(StoreKeys.diverged) or ""

    def fingerprint(self, uid: int) -> Fingerprint | None:
        """The fingerprint of what a process has trained, once it has ended its training."""
        text = self._store.find(StoreKeys.fingerprint(uid))
        return None if text is None else Fingerprint.from_json(text)

    def publish(self, plan: MembershipPlan) -> None:
        """Say what the next generation is."""
        self._store.set(StoreKeys.plan(plan.generation), plan.to_json())

    def break_generation(self, plan: MembershipPlan, uid: int, reason: str) -> None:
        """Say that a generation is over because of a member, or of nobody (-1); unless that is known already."""
        text = json.dumps({"uid": uid, "reason": reason})
        self._store.claim(StoreKeys.broken(plan.generation), text)
        self._wake(plan, text)

    def spread_break(self, plan: MembershipPlan) -> None:
        """Let all members know of what one of them has said."""
        self._wake(plan, self._broken(plan))

    def request_change(self, plan: MembershipPlan, waiting: Sequence[int]) -> None:
        """Ask everyone to stop before the next step: these wait to be let in."""
        self._store.set(StoreKeys.change(plan.generation), json.dumps({"uids": list(waiting)}))

    def note_end(self, uid: int) -> None:
        """Tell those who wait for this process between two epochs that it has ended its script."""
        self._store.set(StoreKeys.ended(uid), "1")

    def call(self, uid: int, generation: int) -> None:
        """Call a spare into a generation."""
        self._store.set(StoreKeys.called(uid), str(generation))

    def dismiss(self, uid: int) -> None:
        """Let a spare leave: the job has ended without a need for it."""
        self._store.set(StoreKeys.called(uid), str(_LEAVE))

    def forbid(self, message: str) -> None:
        """Let nobody go on."""
        self._store.set(StoreKeys.fatal, message)  # whatever is there: it may not be ours

    def _broken(self, plan: MembershipPlan) -> str:
        return self._store.find(StoreKeys.broken(plan.generation)) or "{}"

    def _wake(self, plan: MembershipPlan, text: str) -> None:
        """Every member that may be waiting for someone who will never come."""
        self._store.set_all({StoreKeys.news(uid, plan.generation): text for uid in plan.members})


_log = logging.getLogger(__name__)
_LOOK_S = 0.005
_NEWS_S = 0.1
"""How often to look for what is not urgent: a fatal message, progress."""
_LATE_S = 10.0
_PATIENCE_S = 10.0
_LOST = -9
"""As a code: it will be killed, or cannot be."""
_EXIT_CODES = {"finished": 0, "failed": 1, "fatal": 2, "too-few": 4, "diverged": 6, "left": EXIT_ALL_LEFT}
_Ending = Literal["finished", "failed", "fatal", "too-few", "diverged", "left"]


class RecordEvent(Protocol):
    """Takes an event for the timeline; called from more than one thread."""

    def __call__(self, event: str, /, **fields: object) -> None: ...


@dataclass(frozen=True, slots=True)
class SpawnRequest:
    """A process that is to be started because the job is relaunched and lacks one."""

    rank: int
    generation: int
    replaces: int | None
    """The uid of the dead one whose place it takes, if that has died just now."""


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How the job ended."""

    kind: _Ending
    message: str
    exit_code: int
    """What the launcher exits with."""
    failures_survived: int
    uncompared: str = ""
    """The reason why the final states of the ranks were not compared; empty if they were, or if there is one rank."""


class Coordinator:
    """Keeps one job going, from `begin` until there is an `outcome`. All methods are thread-safe."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        num_ranks: int,
        strategy: Strategy = "rollback",
        min_ranks: int = 1,
        max_ranks: int | None = None,
        max_restarts: int = 3,
        secret: Secret | None = None,
        tell: RecordEvent,
        spawn: Callable[[SpawnRequest], int] | None = None,
    ) -> None:
        if strategy not in STRATEGIES:
            hint = did_you_mean(strategy, STRATEGIES)
            raise UsageError(f"strategy: expected one of {', '.join(STRATEGIES)}, found {strategy!r}.{hint}")
        if not 1 <= min_ranks <= num_ranks:
            raise UsageError(f"min_ranks: expected 1 to {num_ranks}, the number of ranks, found {min_ranks}")
        self._num_ranks, self._strategy, self._min_ranks = num_ranks, strategy, min_ranks
        self._max_ranks = num_ranks if max_ranks is None else max_ranks
        self._record_event, self._spawn, self._retry_limits = tell, spawn, RetryLimits(max_restarts)
        # Not a client that can be cut: it would count connections of ranks, which end in this process, as its own.
        store = PrefixStore(PREFIX, TCPStore(host, port, None, False, timedelta(seconds=60), False))
        self._store = CoordinatorStore(SignedStore(store, secret))
        self._lock = threading.Lock()
        """Over plan, roster and outcome."""
        self._plan: MembershipPlan | None = None
        self._processes = ProcessTable()
        self._outcome: JobOutcome | None = None
        self._ended = threading.Event()
        self._stir = threading.Event()
        """Somebody has exited, or the coordinator is to close."""
        self._closing = False
        self._survived = self._step = 0
        self._changing = -1
        """The generation that has been asked to let somebody in."""
        self._broken_off = -1
        """The generation whose members have been told that it is over."""
        self._has_checkpointer = False
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)

    @property
    def outcome(self) -> JobOutcome | None:
        """How the job ended; None while it goes on."""
        return self._outcome

    @property
    def generation(self) -> int:
        """The number of the present generation."""
        return self.membership[0]

    @property
    def membership(self) -> tuple[int, tuple[int, ...]]:
        """The present generation, and its members."""
        plan = self._plan
        return (plan.generation, plan.members) if plan is not None else (0, ())

    def rank_of(self, uid: int) -> int | None:
        """The rank of a process in the present generation."""
        plan = self._plan
        return plan.rank_of(uid) if plan is not None else None

    @property
    def alive(self) -> int:
        """How many ranks of the present generation live."""
        return sum(not self.is_out(uid) for uid in self.membership[1])

    @property
    def spares(self) -> int:
        """How many processes live that have no rank."""
        return len(self._processes.spares(frozenset(self.membership[1])))

    @property
    def step(self) -> int:
        """How many steps were applied, as far as is known."""
        return self._step

    @property
    def failures_survived(self) -> int:
        """How many ranks have died and did not end the job."""
        return self._survived

    def begin(self, uids: Sequence[int]) -> None:
        """The launcher has started these: the first are the ranks, the others are spares."""
        assert self._plan is None, "a coordinator begins once"
        assert len(set(uids)) == len(uids) >= self._num_ranks, f"cannot begin with {uids}"
        with self._lock:
            self._processes.uids = list(uids)
        self._install(MembershipPlan(0, tuple(uids[: self._num_ranks])))
        self._thread.start()

    def add_spare(self, uid: int) -> None:
        """The launcher has started one more spare."""
        with self._lock:
            self._processes.uids.append(uid)
            over = self._outcome is not None
        if over and not self._closing:
            self._store.dismiss(uid)

    def process_exited(self, uid: int, code: int) -> None:
        """A process is gone: with 0 it has finished, with anything else it is dead (negative: the signal)."""
        self._count_out(uid, code, f"ended with {describe_exit(code)}", {"how": describe_exit(code)})

    def process_lost(self, uid: int, why: str, *, stack: str = "") -> None:
        """A process lives, maybe, but is not there: it is in no further generation, whatever becomes of it.

        `why` goes on as in "rank 2 …"; `stack` is where its script was when it was last heard of.
        """
        self._count_out(uid, _LOST, why, {"how": why, "stack": stack})

    def has_left(self, uid: int) -> bool:
        """Whether a process has left the job in good order, before its end."""
        return uid in self._processes.left

    def is_out(self, uid: int) -> bool:
        """Whether a process has exited, or was lost."""
        return uid in self._processes.codes

    def break_generation(self, reason: str) -> None:
        """Let the present generation break: it does not get any further, and nobody is to blame."""
        plan = self._plan
        if plan is not None and self._goes_on():
            self._store.break_generation(plan, -1, reason)
            self._stir.set()

    def await_store(self) -> None:
        """Return when the store has answered."""
        self._store.ping()

    def wait(self, timeout: float | None = None) -> JobOutcome | None:
        """The outcome, once there is one; None if that takes longer than this many seconds."""
        self._ended.wait(timeout)
        return self._outcome

    def close(self) -> None:
        """Decide nothing any more. Twice is fine."""
        self._closing = True
        self._stir.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE_S)

    def _count_out(self, uid: int, code: int, how: str, fields: dict[str, str]) -> None:
        with self._lock:
            if not self._processes.count_out(uid, code, how):
                return
            plan, goes_on = self._plan, self._goes_on()
        try:
            self._handle_exit(uid, code, plan, goes_on, fields)
        except Forged as error:
            self._end("fatal", str(error))
        self._stir.set()

    def _handle_exit(
        self, uid: int, code: int, plan: MembershipPlan | None, goes_on: bool, fields: dict[str, str]
    ) -> None:
        rank = plan.rank_of(uid) if plan is not None else None
        if plan is None or rank is None or not goes_on:
            if self._outcome is None:
                had = {"joined": self._store.has_joined(uid), "waited": self._store.has_waited(uid)}
                if code != 0:
                    self._record_event(
                        "process_lost", uid=uid, rank=rank, code=code, generation=self.generation, **had, **fields
                    )
                elif uid not in self._processes.left:
                    self._record_event("spare_ended", uid=uid, **had)
        elif code == 0:
            self._store.note_end(uid)
            self._finish_if_all_have(plan)
        elif code == EXIT_ALL_LEFT:
            if self._have_all(plan, EXIT_ALL_LEFT):
                self._end("left", "all ranks were asked to leave, and did so together. Start it again to go on there")
        else:
            can_go_on = plan.generation > 0 or self._store.has_joined(uid)
            if can_go_on:
                self._break(plan, uid)  # before anything slow: survivors wait for it
            self._record_event("process_lost", uid=uid, rank=rank, code=code, generation=plan.generation, **fields)
            if not self._is_fatal() and not can_go_on:
                self._end("failed", f"{self._processes.describe_end(plan, uid)} before it joined: see what it printed")

    def _run(self) -> None:
        try:
            while (plan := self._plan) is not None and self._await_break(plan):
                reports = self._gather(plan)
                if reports is not None:
                    self._decide_next(plan, reports)
        except Forged as error:
            self._end("fatal", str(error))
        except Exception as error:
            if not self._closing:
                _log.exception("the coordinator cannot go on")
                self._end("failed", f"the coordinator cannot go on: {type(error).__name__}: {error}")

    def _await_break(self, plan: MembershipPlan) -> bool:
        """Whether this generation has broken; False if there is nothing more to do."""
        news_s = 0.0
        while self._goes_on():
            if self._store.is_broken(plan):
                self._store.spread_break(plan)
                self._record_event("generation_broken", generation=plan.generation, reason=self._store.reason(plan))
                return True
            if time.monotonic() >= news_s:
                self._look_for_news(plan)
                news_s = time.monotonic() + _NEWS_S
            self._pause(_LOOK_S)
        return False

    def _gather(self, plan: MembershipPlan) -> dict[int, SurvivorReport] | None:
        """What the members saw that neither died nor finished; None if the job ended meanwhile.

        A rank that neither reports nor exits is waited for: nobody else can say where it is.
        """
        reports: dict[int, SurvivorReport] = {}
        begun_s, is_said = time.monotonic(), False
        while self._goes_on():
            for uid in plan.members:
                if uid not in reports and not self.is_out(uid):
                    report = self._store.report(plan, uid)
                    if report is not None:
                        reports[uid] = report
            missing = [uid for uid in plan.members if uid not in reports and not self.is_out(uid)]
            if not missing:
                return reports
            waited_s = time.monotonic() - begun_s
            if waited_s >= _LATE_S and not is_said:
                is_said = True
                self._record_event(
                    "reports_late", generation=plan.generation, uids=missing, waited_s=round(waited_s, 3)
                )
            if waited_s >= 1.0:
                self._look_for_news(plan)
            self._pause(0.001 if waited_s < 1.0 else 0.02)
        return None

    def _decide_next(self, plan: MembershipPlan, reports: dict[int, SurvivorReport]) -> None:
        """Decide, and say so to everyone."""
        if self._is_fatal():
            return
        with self._lock:
            processes = self._processes.copy()
        self._step = max([self._step, *(report.step for report in reports.values())])
        if self._end_if_nobody_is_left(plan, processes):
            return
        spares, hindrance = self._callable(processes.spares(frozenset(plan.members))), self._hindrance(plan)
        decision = decide(
            plan,
            reports,
            strategy=self._strategy,
            spares=spares,
            min_ranks=self._min_ranks,
            max_ranks=self._max_ranks,
            can_restart=not hindrance,
            finished=processes.finished(plan.members),
            dead=processes.dead(plan.members),
        )
        if isinstance(decision, StopDecision):
            self._stop(plan, processes, decision, hindrance)
            return
        if objection := self._retry_limits.limit_reached(plan, decision):
            self._end("failed", f"{objection}: {self._store.reason(plan)}")
            return
        if decision.relaunch:
            self._retry_limits.restarted()
            start = partial(self._start, decision.generation)
            decision = with_relaunched_members(decision, self._num_ranks, spares, start)
        self._install(decision)
        for uid in decision.joiners:
            if plan.rank_of(uid) is None:
                self._store.call(uid, decision.generation)

    def _end_if_nobody_is_left(self, plan: MembershipPlan, processes: ProcessTable) -> bool:
        """Whether every member is out, some of them in good order: then there is nothing to decide."""
        finished, dead = processes.finished(plan.members), processes.dead(plan.members)
        if dead == set(plan.members) and EXIT_ALL_LEFT in processes.codes.values():
            died = processes.describe_ends(plan, [uid for uid in dead if processes.codes[uid] != EXIT_ALL_LEFT])
            self._end("left", f"all ranks were asked to leave, and one died meanwhile ({died}): its work may be lost")
            return True
        if finished and finished | dead == set(plan.members):
            # Whatever a dead one alone did after the training, such as a last save, may be missing.
            self._finish_if_all_have(plan)
            self._end("failed", f"{processes.describe_ends(plan, dead)}; the others finished without it")
            return True
        return False

    def _stop(self, plan: MembershipPlan, processes: ProcessTable, decision: StopDecision, hindrance: str) -> None:
        """The job cannot go on, and cannot be relaunched."""
        if decision.is_mistake:
            self._end("fatal", f"{decision.reason}. {decision.advice}")
            return
        dead = processes.dead(plan.members)
        deaths = processes.describe_ends(plan, dead) or "nobody died"
        # Where every rank ended by itself, it is the script that failed.
        if dead == set(plan.members) and all(processes.codes[uid] > 0 for uid in dead):
            self._end("failed", f"no rank is left ({deaths}): see what they printed. No restart: {hindrance}")
        else:
            self._end("too-few", f"{decision.reason} ({deaths}). No restart: {hindrance}. {decision.advice}")

    def _start(self, generation: int, rank: int, before: int | None) -> int:
        """Start a process that a relaunch lacks; its uid."""
        assert self._spawn is not None, "asked for by _hindrance"
        uid = self._spawn(SpawnRequest(rank, generation, before))
        with self._lock:
            self._processes.uids.append(uid)
        self._record_event("process_spawned", uid=uid, rank=rank, replaces=before, generation=generation)
        return uid

    def _install(self, plan: MembershipPlan) -> None:
        """Make this the present generation."""
        self._store.publish(plan)
        with self._lock:
            self._plan = plan
            self._processes.left |= set(plan.left)
            self._survived += len(plan.dead)
            dead = self._processes.dead(plan.members)
            finished = self._processes.finished(plan.previous)
        # At a job's end some ranks may be gone before the last ones; in any other plan they have ended too early.
        is_end = all(verdict is Verdict.PROCEED for verdict in plan.verdicts.values())
        self._record_event(
            "plan",
            generation=plan.generation,
            members=list(plan.members),
            strategy=self._strategy,
            verdicts=dict(Counter(str(verdict) for verdict in plan.verdicts.values())),
            joiners=list(plan.joiners),
            calls=list(plan.calls),
            dead=list(plan.dead),
            left=list(plan.left),
            ended=[] if is_end else [uid for uid in plan.previous if uid in finished],
            point=plan.point,
            kind=str(plan.kind),
            restart=plan.restart,
            relaunch=plan.relaunch,
            exact=is_exact(plan) if plan.generation else True,
        )
        for uid in plan.members:
            if uid in dead:  # exited while the plan was made
                self._break(plan, uid)
        self._finish_if_all_have(plan)

    def _break(self, plan: MembershipPlan, uid: int) -> None:
        """This generation is over because a member is out."""
        if self._broken_off == plan.generation:
            return  # every member knows: of many that die together, each would tell all the others again
        self._store.break_generation(plan, uid, self._processes.describe_end(plan, uid))
        self._broken_off = plan.generation

    def _finish_if_all_have(self, plan: MembershipPlan) -> None:
        if not self._have_all(plan, 0):
            return
        if (misuse := self._store.misuse()) is not None:
            self._end("fatal", misuse)
            return
        found = {rank: self._store.fingerprint(uid) for rank, uid in enumerate(plan.members)}
        given = {rank: each for rank, each in found.items() if each is not None}
        path, difference = first_difference(given)
        if path:
            self._record_event("ranks_differ", step=self._step, path=path, reason=difference)
            self._end("diverged", f"all ranks have finished, and their states differ: {difference}")
            return
        if before := self._store.diverged():  # those that differ may have ended at other steps
            self._end("diverged", f"all ranks have finished, but not as one model: {before}")
            return
        lacking = [f"rank {rank}" for rank, each in found.items() if each is None]
        uncompared = f"{', '.join(lacking[:3])}{' …' * (len(lacking) > 3)} {NO_FINGERPRINT}" if lacking else ""
        if plan.world_size > 1 and not lacking and not any(each.tensors for each in given.values()):
            uncompared = NOTHING_TO_COMPARE
        ranks = f"{plan.world_size} of {self._num_ranks} in the end"
        self._end("finished", f"all ranks have finished, {ranks}", uncompared=uncompared)

    def _have_all(self, plan: MembershipPlan, code: int) -> bool:
        """True if all members are out, with this code; asked once for each that exits, so counted before looked at."""
        return len(self._processes.codes) >= plan.world_size and self._processes.have_all(plan.members, code)

    def _is_fatal(self) -> bool:
        """Whether a rank says that nobody shall go on; the outcome says so too then."""
        message = self._store.fatal()
        if message is not None:
            self._end("fatal", message)
        return message is not None

    def _note_progress(self) -> None:
        self._step = max(self._step, self._store.progress())

    def _look_for_news(self, plan: MembershipPlan) -> None:
        if self._is_fatal():
            return
        self._note_progress()
        self._let_in(plan)
        finished = self._processes.finished(plan.members)
        if plan.generation > 0 or not finished:
            return
        # Generation 0 needs them all: the others would wait for one that left without joining.
        joined = {uid for uid in plan.members if self._store.has_joined(uid)}
        left = next((uid for uid in plan.members if uid in finished and uid not in joined), None)
        if left is not None and joined:
            self._break(plan, left)

    def _hindrance(self, plan: MembershipPlan) -> str:
        """Why the job cannot be relaunched; empty if it can."""
        if self._spawn is None:
            return "no process can be started"
        if used_up := self._retry_limits.no_restart:
            return used_up
        self._has_checkpointer = self._has_checkpointer or any(map(self._store.has_checkpointer, plan.members))
        return "" if self._has_checkpointer else "there is no checkpointer to restart from"

    def _let_in(self, plan: MembershipPlan) -> None:
        """Where there are too few ranks and somebody waits: let all stop before their next step, to let it in."""
        if len(plan.members) >= self._max_ranks or plan.calls or self._changing == plan.generation:
            return
        with self._lock:
            spares = self._processes.spares(frozenset(plan.members))
        waiting = self._callable(spares)
        if waiting and not self._store.is_broken(plan):
            self._changing = plan.generation
            self._store.request_change(plan, waiting)
            self._record_event("change_requested", generation=plan.generation, waiting=waiting)

    def _callable(self, spares: Sequence[int]) -> list[int]:
        """Of these spares, those that can be called, in order."""
        return [uid for uid in spares if self._store.can_be_called(uid)]

    def _pause(self, seconds: float) -> None:
        """Until something stirs, or so long."""
        self._stir.wait(seconds)
        self._stir.clear()

    def _goes_on(self) -> bool:
        return self._outcome is None and not self._closing

    def _end(self, kind: _Ending, message: str, *, uncompared: str = "") -> None:
        """Settle the outcome, once, and let everyone know who waits for a plan or to be called."""
        with self._lock:
            if self._outcome is not None:
                return
            self._outcome = JobOutcome(kind, message, _EXIT_CODES[kind], self._survived, uncompared)
            spares = self._processes.spares(frozenset(self.membership[1]))
        with suppress(RuntimeError):  # the store may be what failed
            self._note_progress()
            if kind not in ("finished", "diverged"):
                self._store.forbid(message)
            for uid in spares:
                self._store.dismiss(uid)
        event = f"job_{kind.replace('-', '_')}"
        self._record_event(
            event, message=message, generation=self.generation, failures_survived=self._survived, step=self._step
        )
        self._ended.set()
        self._stir.set()
