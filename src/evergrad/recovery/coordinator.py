"""The launcher's part in a recovery: it learns who died, hears what the others saw, and writes the next plan.

Nothing is decided anywhere else, so whoever reaches the store goes on in one and the same generation. The launcher
calls `exited` as soon as a child is reaped; all the rest happens in a thread of the coordinator's own. It only ever
looks into the store and never waits in it: a wait that ends without result fills the terminal with torch's warnings.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal, Protocol

from torch._C._distributed_c10d import PrefixStore, TCPStore

from evergrad.checkpoint.preemption import signal_name
from evergrad.errors import UsageError
from evergrad.recovery.membership import LEFT_TOGETHER, Keys, Plan, Report
from evergrad.recovery.sealing import Forged, Secret
from evergrad.recovery.stores import PREFIX, Sealed
from evergrad.recovery.strategies import STRATEGIES, Stop, Strategy, decide, is_exact

__all__ = ["Coordinator", "Outcome", "SpawnRequest", "Tell"]

_log = logging.getLogger(__name__)
_LOOK_S = 0.005
_NEWS_S = 0.1
"""How often to look for what is not urgent: a fatal message, progress."""
_LATE_S = 10.0
_PATIENCE_S = 10.0
_FUTILE = 20
"""So many generations in a row that lose nobody and come to no point are enough."""
_RETURNS = 5
_LEAVE = -1
_LOST = -9
"""As a code: it will be killed, or cannot be."""
_EXIT_CODES = {"finished": 0, "failed": 1, "fatal": 2, "too-few": 4, "left": LEFT_TOGETHER}


class Tell(Protocol):
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
class Outcome:
    """How the job ended."""

    kind: Literal["finished", "failed", "fatal", "too-few", "left"]
    message: str
    exit_code: int
    """What the launcher exits with."""
    failures_survived: int


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
        tell: Tell,
        spawn: Callable[[SpawnRequest], int] | None = None,
    ) -> None:
        if strategy not in STRATEGIES:
            raise UsageError(f"strategy: expected one of {', '.join(STRATEGIES)}, found {strategy!r}")
        if not 1 <= min_ranks <= num_ranks:
            raise UsageError(f"min_ranks: expected 1 to {num_ranks}, the number of ranks, found {min_ranks}")
        self._num_ranks, self._strategy, self._min_ranks = num_ranks, strategy, min_ranks
        self._max_ranks = num_ranks if max_ranks is None else max_ranks
        self._max_restarts, self._tell, self._spawn = max_restarts, tell, spawn
        # Not a client that can be cut: it would count connections of ranks, which end in this process, as its own.
        self._store = Sealed(
            PrefixStore(PREFIX, TCPStore(host, port, None, False, timedelta(seconds=60), False)), secret
        )
        self._lock = threading.Lock()
        """Over all that follows up to the outcome."""
        self._plan: Plan | None = None
        self._uids: list[int] = []
        self._codes: dict[int, int] = {}
        self._hows: dict[int, str] = {}
        """What became of those who are out, as in "rank 2 …"."""
        self._left: set[int] = set()
        self._outcome: Outcome | None = None
        self._ended = threading.Event()
        self._stir = threading.Event()
        """Somebody has exited, or the coordinator is to close."""
        self._closing = False
        self._restarts = self._survived = self._step = self._futile = 0
        self._changing = -1
        self._returns: Counter[str] = Counter()
        """The generation that has been asked to let somebody in."""
        self._has_checkpointer = False
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)

    @property
    def outcome(self) -> Outcome | None:
        """How the job ended; None while it goes on."""
        return self._outcome

    @property
    def generation(self) -> int:
        """The number of the present generation."""
        return self._plan.generation if self._plan is not None else 0

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
        plan = self._plan
        return sum(uid not in self._codes for uid in plan.members) if plan is not None else 0

    @property
    def spares(self) -> int:
        """How many processes live that have no rank."""
        members = self._plan.members if self._plan is not None else ()
        return sum(uid not in members and uid not in self._codes for uid in list(self._uids))

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
            self._uids = list(uids)
        self._install(Plan(0, tuple(uids[: self._num_ranks])))
        self._thread.start()

    def started(self, uid: int) -> None:
        """The launcher has started one more spare."""
        with self._lock:
            self._uids.append(uid)
            over = self._outcome is not None
        if over and not self._closing:
            self._store.set(Keys.called(uid), str(_LEAVE))

    def exited(self, uid: int, code: int) -> None:
        """A process is gone: with 0 it has finished, with anything else it is dead (negative: the signal)."""
        self._count_out(uid, code, f"ended with {_how(code)}", {"how": _how(code)})

    def lost(self, uid: int, why: str, *, stack: str = "") -> None:
        """A process lives, maybe, but is not there: it is in no further generation, whatever becomes of it.

        `why` goes on as in "rank 2 …"; `stack` is where its script was when it was last heard of.
        """
        self._count_out(uid, _LOST, why, {"how": why, "stack": stack})

    def has_left(self, uid: int) -> bool:
        """Whether a process has left the job in good order, before its end."""
        return uid in self._left

    def is_out(self, uid: int) -> bool:
        """Whether a process has exited, or was lost."""
        return uid in self._codes

    def interrupt(self, reason: str) -> None:
        """Let the present generation break: it does not get any further, and nobody is to blame."""
        plan = self._plan
        if plan is not None and self._goes_on():
            self._break(plan, -1, reason)
            self._stir.set()

    def _count_out(self, uid: int, code: int, how: str, fields: dict[str, str]) -> None:
        with self._lock:
            if uid in self._codes:
                return
            self._codes[uid], self._hows[uid] = code, how
            plan, goes_on = self._plan, self._goes_on()
        try:
            self._miss(uid, code, plan, goes_on, fields)
        except Forged as error:
            self._end("fatal", str(error))
        self._stir.set()

    def _miss(self, uid: int, code: int, plan: Plan | None, goes_on: bool, fields: dict[str, str]) -> None:
        rank = plan.rank_of(uid) if plan is not None else None
        if plan is None or rank is None or not goes_on:
            if code != 0 and self._outcome is None:
                self._tell("death", uid=uid, rank=rank, code=code, generation=self.generation, **fields)
        elif code == 0:
            self._finish_if_all_have(plan)
        elif code == LEFT_TOGETHER:
            if all(self._codes.get(uid) == code for uid in plan.members):
                self._end("left", "all ranks were asked to leave, and did so together. Start it again to go on there")
        else:
            can_go_on = plan.generation > 0 or self._has(Keys.joined(uid))
            if can_go_on:
                self._break(plan, uid)  # before anything slow: survivors wait for it
            self._tell("death", uid=uid, rank=rank, code=code, generation=plan.generation, **fields)
            if not self._is_fatal() and not can_go_on:
                self._end("failed", f"rank {rank} {self._hows[uid]} before it joined: see what it printed")

    def wait(self, timeout: float | None = None) -> Outcome | None:
        """The outcome, once there is one; None if that takes longer than this many seconds."""
        self._ended.wait(timeout)
        return self._outcome

    def close(self) -> None:
        """Decide nothing any more. Twice is fine."""
        self._closing = True
        self._stir.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE_S)

    def _run(self) -> None:
        try:
            while (plan := self._plan) is not None and self._await_break(plan):
                reports = self._gather(plan)
                if reports is not None:
                    self._go_on(plan, reports)
        except Forged as error:
            self._end("fatal", str(error))
        except Exception as error:
            if not self._closing:
                _log.exception("the coordinator cannot go on")
                self._end("failed", f"the coordinator cannot go on: {type(error).__name__}: {error}")

    def _await_break(self, plan: Plan) -> bool:
        """Whether this generation has broken; False if there is nothing more to do."""
        key, news_s = Keys.broken(plan.generation), 0.0
        while self._goes_on():
            if self._has(key):
                self._spread_news(plan, self._find(key) or "{}")
                self._tell("broken", generation=plan.generation, reason=self._reason(plan))
                return True
            if time.monotonic() >= news_s:
                self._look_for_news(plan)
                news_s = time.monotonic() + _NEWS_S
            self._stir.wait(_LOOK_S)
            self._stir.clear()
        return False

    def _gather(self, plan: Plan) -> dict[int, Report] | None:
        """What the members saw that neither died nor finished; None if the job ended meanwhile.

        A rank that neither reports nor exits is waited for: nobody else can say where it is.
        """
        reports: dict[int, Report] = {}
        begun_s, is_said = time.monotonic(), False
        while self._goes_on():
            for uid in plan.members:
                if uid not in reports and uid not in self._codes:
                    text = self._find(Keys.report(plan.generation, uid))
                    if text is not None:
                        reports[uid] = Report.from_json(text)
            missing = [uid for uid in plan.members if uid not in reports and uid not in self._codes]
            if not missing:
                return reports
            waited_s = time.monotonic() - begun_s
            if waited_s >= _LATE_S and not is_said:
                is_said = True
                self._tell("late", generation=plan.generation, uids=missing, waited_s=round(waited_s, 3))
            if waited_s >= 1.0:
                self._look_for_news(plan)
            self._stir.wait(0.001 if waited_s < 1.0 else 0.02)
            self._stir.clear()
        return None

    def _go_on(self, plan: Plan, reports: dict[int, Report]) -> None:
        """Decide, and say so to everyone."""
        if self._is_fatal():
            return
        with self._lock:
            codes, uids = dict(self._codes), list(self._uids)
        finished = {uid for uid in plan.members if codes.get(uid) == 0}
        dead = {uid for uid in plan.members if codes.get(uid, 0) != 0}
        self._step = max([self._step, *(report.step for report in reports.values())])
        if dead == set(plan.members) and LEFT_TOGETHER in codes.values():
            died = self._deaths(plan, {uid for uid in dead if codes[uid] != LEFT_TOGETHER})
            self._end("left", f"all ranks were asked to leave, and one died meanwhile ({died}): its work may be lost")
            return
        if finished and finished | dead == set(plan.members):
            # Whatever a dead one alone did after the training, such as a last save, may be missing.
            self._finish_if_all_have(plan)
            self._end("failed", f"{self._deaths(plan, dead)}; the others had finished by then")
            return
        spares = self._waiting(plan, uids, codes)
        hindrance = self._hindrance(plan)
        decision = decide(
            plan,
            reports,
            strategy=self._strategy,
            spares=spares,
            min_ranks=self._min_ranks,
            max_ranks=self._max_ranks,
            can_restart=not hindrance,
            finished=finished,
            dead=dead,
        )
        if isinstance(decision, Stop):
            # Where every rank ended by itself, it is the script that failed.
            deaths = self._deaths(plan, dead) or "nobody died"
            if dead == set(plan.members) and all(codes[uid] > 0 for uid in dead):
                self._end("failed", f"no rank is left ({deaths}): see what they printed. No restart: {hindrance}")
            else:
                message = f"{decision.reason} ({deaths}). No restart: {hindrance}. {decision.advice}"
                self._end("too-few", message)
            return
        if decision.dead or decision.left or decision.joiners or decision.point > plan.point:
            self._futile = 0
        elif (futile := self._futile + 1) < _FUTILE:
            self._futile = futile
        else:
            self._end("failed", f"{futile} generations in a row came to no point; the last: {self._reason(plan)}")
            return
        if decision.version and not self._may_go_back(decision.version, plan):
            return
        if decision.relaunch:
            self._restarts += 1
            decision = self._complete(decision, spares)
        self._install(decision)
        for uid in decision.joiners:
            if uid not in plan.members:
                self._store.set(Keys.called(uid), str(decision.generation))

    def _may_go_back(self, version: str, plan: Plan) -> bool:
        """Not for ever to the same version: what comes again is no soft error."""
        self._returns[version] += 1
        if self._returns[version] > _RETURNS:
            times = f"{_RETURNS} times to {version}"
            self._end("failed", f"the job has gone back {times}, and its ranks differ again: {self._reason(plan)}")
        return self._outcome is None

    def _complete(self, plan: Plan, spares: Sequence[int]) -> Plan:
        """The members of a relaunch: who lives keeps its place, spares and new processes take the others."""
        assert self._spawn is not None, "asked for by _hindrance"
        places: list[int | None] = [*plan.previous, *[None] * (self._num_ranks - len(plan.previous))]
        waiting, members = iter(spares), []
        for rank, before in enumerate(places):
            if before is not None and before in plan.verdicts:
                members.append(before)
            elif (spare := next(waiting, None)) is not None:
                members.append(spare)
            else:
                uid = self._spawn(SpawnRequest(rank, plan.generation, before))
                with self._lock:
                    self._uids.append(uid)
                self._tell("spawn", uid=uid, rank=rank, replaces=before, generation=plan.generation)
                members.append(uid)
        return replace(plan, members=tuple(members), joiners=tuple(uid for uid in members if uid not in plan.verdicts))

    def _install(self, plan: Plan) -> None:
        """Make this the present generation."""
        self._store.set(Keys.plan(plan.generation), plan.to_json())
        with self._lock:
            self._plan = plan
            self._left |= set(plan.left)
            self._survived += len(plan.dead)
            codes = {uid: self._codes[uid] for uid in plan.members if uid in self._codes}
        self._tell(
            "plan",
            generation=plan.generation,
            members=list(plan.members),
            strategy=self._strategy,
            verdicts=dict(Counter(str(verdict) for verdict in plan.verdicts.values())),
            joiners=list(plan.joiners),
            calls=list(plan.calls),
            dead=list(plan.dead),
            left=list(plan.left),
            point=plan.point,
            kind=str(plan.kind),
            restart=plan.restart,
            relaunch=plan.relaunch,
            exact=is_exact(plan) if plan.generation else True,
        )
        for uid, code in codes.items():  # exited while the plan was made
            if code != 0:
                self._break(plan, uid)
        self._finish_if_all_have(plan)

    def _finish_if_all_have(self, plan: Plan) -> None:
        if all(self._codes.get(uid) == 0 for uid in plan.members):
            self._end("finished", f"all ranks have finished, {plan.world_size} of {self._num_ranks} in the end")

    def _is_fatal(self) -> bool:
        """Whether a rank says that nobody shall go on; the outcome says so too then."""
        message = self._find(Keys.fatal)
        if message is not None:
            self._end("fatal", message)
        return message is not None

    def _note_progress(self) -> None:
        progress = self._find(Keys.progress)
        if progress is not None:
            self._step = max(self._step, int(json.loads(progress).get("step", 0)))

    def _look_for_news(self, plan: Plan) -> None:
        if self._is_fatal():
            return
        self._note_progress()
        self._let_in(plan)
        if plan.generation > 0 or not any(self._codes.get(uid) == 0 for uid in plan.members):
            return
        # Generation 0 needs them all: the others would wait for one that left without joining.
        joined = {uid for uid in plan.members if self._has(Keys.joined(uid))}
        left = [uid for uid in plan.members if self._codes.get(uid) == 0 and uid not in joined]
        if left and joined:
            self._break(plan, left[0])

    def _hindrance(self, plan: Plan) -> str:
        """Why the job cannot be relaunched; empty if it can."""
        if self._spawn is None:
            return "no process can be started"
        if self._restarts >= self._max_restarts:
            return f"{self._restarts} of {self._max_restarts} were used"
        for uid in plan.members:
            if self._has_checkpointer:
                break
            joined = self._find(Keys.joined(uid))
            self._has_checkpointer = joined is not None and bool(json.loads(joined).get("checkpointer"))
        return "" if self._has_checkpointer else "there is no checkpointer to restart from"

    def _let_in(self, plan: Plan) -> None:
        """Where there are too few ranks and somebody waits: let all stop before their next step, to let it in."""
        if len(plan.members) >= self._max_ranks or plan.calls or self._changing == plan.generation:
            return
        with self._lock:
            codes, uids = dict(self._codes), list(self._uids)
        waiting = self._waiting(plan, uids, codes)
        if waiting and not self._has(Keys.broken(plan.generation)):
            self._changing = plan.generation
            self._store.set(Keys.change(plan.generation), json.dumps({"uids": waiting}))
            self._tell("change", generation=plan.generation, waiting=waiting)

    def _waiting(self, plan: Plan, uids: Sequence[int], codes: Mapping[int, int]) -> list[int]:
        """The spares that can be called, in order."""
        spares = [uid for uid in uids if uid not in plan.members and uid not in codes]
        return [uid for uid in spares if self._has(Keys.waiting(uid)) and not self._has(Keys.called(uid))]

    def _break(self, plan: Plan, uid: int, reason: str = "") -> None:
        """This generation is over because a member is out."""
        text = json.dumps({"uid": uid, "reason": reason or f"rank {plan.rank_of(uid)} {self._hows[uid]}"})
        self._store.claim(Keys.broken(plan.generation), text)
        self._spread_news(plan, text)

    def _spread_news(self, plan: Plan, text: str) -> None:
        """Wake every member that may be waiting for someone who will never come."""
        self._store.set_all({Keys.news(uid, plan.generation): text for uid in plan.members})

    def _reason(self, plan: Plan) -> str:
        return str(json.loads(self._find(Keys.broken(plan.generation)) or "{}").get("reason", ""))

    def _has(self, key: str) -> bool:
        return self._store.has(key)

    def _find(self, key: str) -> str | None:
        return self._store.find(key)

    def _goes_on(self) -> bool:
        return self._outcome is None and not self._closing

    def _deaths(self, plan: Plan, dead: set[int]) -> str:
        return ", ".join(f"rank {plan.rank_of(uid)} {self._hows[uid]}" for uid in sorted(dead))

    def _end(self, kind: Literal["finished", "failed", "fatal", "too-few", "left"], message: str) -> None:
        """Settle the outcome, once, and let everyone know who waits for a plan or to be called."""
        with self._lock:
            if self._outcome is not None:
                return
            self._outcome = Outcome(kind, message, _EXIT_CODES[kind], self._survived)
            members = self._plan.members if self._plan is not None else ()
            waiting = [uid for uid in self._uids if uid not in members and uid not in self._codes]
        with suppress(RuntimeError):  # the store may be what failed
            self._note_progress()
            if kind != "finished":
                self._store.set(Keys.fatal, message)  # whatever is there: it may not be ours
            for uid in waiting:
                self._store.set(Keys.called(uid), str(_LEAVE))
        self._tell(kind, message=message, generation=self.generation, failures_survived=self._survived, step=self._step)
        self._ended.set()
        self._stir.set()


def _how(code: int) -> str:
    return signal_name(-code) if code < 0 else f"exit code {code}"
